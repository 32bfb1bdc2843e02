// What the pool promises about crashes: kill -9 at every named point, a power cut, damaged files, a full disk. One scripted job
// (scripted_job.h) is compared with its uninterrupted self.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <set>

#include "common/strings.h"
#include "datapool/archive.h"
#include "datapool/store.h"
#include "datapool/store_reader.h"
#include "datapool/verify.h"
#include "tests/datapool/scripted_job.h"

namespace temper::datapool {
namespace {

std::string NewRun() {
  std::string path = testing::TempDir() + "pool-crash-XXXXXX";
  TEMPER_CHECK(mkdtemp(path.data()) != nullptr);
  return path;
}

Status PlayHere(ScriptedJob job) {
  ASSIGN_OR_RETURN(std::unique_ptr<Store> store, OpenRocksStore(job.run + "/pool"));
  return PlayScript(job, std::move(store));
}

// What a process of its own does.
TEST(PoolDurability, DISABLED_Process) {
  ScriptedJob job;
  job.run = std::getenv("TEMPER_TEST_RUN");
  job.name = std::to_string(getpid());
  if (const char* bytes = std::getenv("TEMPER_TEST_BYTES")) job.record_bytes = std::strtoull(bytes, nullptr, 10);
  if (const char* fate = std::getenv("TEMPER_TEST_CONSUMED")) job.retention.consumed = fate[0] == 'a' ? Consumed::kArchive : Consumed::kDrop;
  const Status played = PlayHere(job);
  if (!played.ok()) std::fprintf(stderr, "played: %s\n", played.ToString().c_str());
  _exit(played.ok() ? 0 : 3);
}

int RunProcess(const std::string& run, const std::string& faults, size_t bytes = 20'000, const std::string& log = "/dev/null") {
  const pid_t pid = fork();
  if (pid == 0) {
    setenv("TEMPER_TEST_RUN", run.c_str(), 1);
    setenv("TEMPER_TEST_BYTES", std::to_string(bytes).c_str(), 1);
    setenv("TEMPER_FAULTS", faults.c_str(), 1);
    if (freopen(log.c_str(), "a", stderr) == nullptr) _exit(126);
    execl("/proc/self/exe", "pool", "--gtest_also_run_disabled_tests", "--gtest_filter=PoolDurability.DISABLED_Process", "--gtest_brief=1", nullptr);
    _exit(127);
  }
  int status = 0;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  return status;
}

std::vector<std::string> Batches(const std::string& run) {
  std::vector<std::string> out;
  for (int64_t b = 0; b < kScriptedSteps; ++b) {
    Result<std::string> batch = ReadFile(run + "/batch-" + std::to_string(b));
    out.push_back(batch.ok() ? *batch : "none");
  }
  return out;
}

const std::vector<std::string>& Uninterrupted() {
  static const std::vector<std::string> batches = [] {
    const std::string run = NewRun();
    ScriptedJob job;
    job.run = run;
    job.name = "alone";
    const Status played = PlayHere(job);
    TEMPER_CHECK(played.ok()) << played.message();
    std::vector<std::string> out = Batches(run);
    (void)RemoveAll(run);
    return out;
  }();
  return batches;
}

void ExpectWhole(const std::string& run, const std::string& what) {
  EXPECT_EQ(Batches(run), Uninterrupted()) << what;
  Result<std::string> ledger = ReadFile(run + "/ledger.jsonl");
  ASSERT_TRUE(ledger.ok());
  const VerifyReport report = VerifyLedger(Config(kScriptedPool), *ledger);
  EXPECT_TRUE(report.ok()) << what << ": " << PrintVerify(report);
  EXPECT_EQ(report.consumed, kScriptedSteps * 2) << what;
  EXPECT_EQ(report.running, 0) << what;
}

// Those that hold something of the job's.
std::vector<std::string> StoreFiles(const std::string& run) {
  Result<std::vector<std::string>> names = ListDir(run + "/pool");
  TEMPER_CHECK(names.ok()) << names.status().message();
  std::erase_if(*names, [](const std::string& name) { return name.rfind("LOG", 0) == 0 || name == "LOCK" || name == "IDENTITY"; });
  return *std::move(names);
}

// RocksDB's own log has no error in it.
void ExpectNoStoreError(const std::string& run, const std::string& what) {
  Result<std::vector<std::string>> names = ListDir(run + "/pool");
  ASSERT_TRUE(names.ok());
  for (const std::string& name : *names) {
    if (name.rfind("LOG", 0) != 0) continue;
    const std::string log = *ReadFile(run + "/pool/" + name);
    EXPECT_EQ(log.find("Corruption"), std::string::npos) << what;
    EXPECT_EQ(log.find("[ERROR]"), std::string::npos) << what;
  }
}

std::vector<std::string> PointsOfEveryJob() {
  std::vector<std::string> points = {"pool.before_write", "pool.after_write", "pool.ledger_half", "pool.after_ledger", "pool.recover.cut"};
  for (const char* call : {"attach_agents", "attach_trainer", "take_issues", "finish", "lease", "update", "commit", "pause", "close"}) {
    for (const char* moment : {"applied", "durable"}) points.push_back(fmt::format("pool.{}.{}", call, moment));
  }
  points.push_back("trainer.batch_written");
  points.push_back("trainer.checkpoint_written");
  return points;
}
// Of those whose records leave.
const std::vector<std::string> kPointsOfRetention = {"pool.archive.written", "pool.retire.applied", "pool.retire.durable"};

// What could go wrong: a point is added to the pool, and no test dies there.
TEST(PoolDurability, EveryNamedPointIsAmongThem) {
  const std::string source = *ReadFile(TEMPER_SOURCE_DIR "/datapool/service.cpp");
  std::set<std::string> named;
  const auto quoted = [&](const std::string& before, const auto& add) {
    for (size_t at = source.find(before); at != std::string::npos; at = source.find(before, at + 1)) {
      const size_t begin = at + before.size();
      add(source.substr(begin, source.find('"', begin) - begin));
    }
  };
  quoted("turn.calls.insert(\"", [&](const std::string& call) {
    for (const char* moment : {"applied", "durable"}) named.insert("pool." + call + "." + moment);
  });
  quoted("Point(\"", [&](const std::string& point) {
    if (point != "pool.") named.insert(point);  // those of the calls
  });
  std::set<std::string> known(kPointsOfRetention.begin(), kPointsOfRetention.end());
  for (const std::string& point : PointsOfEveryJob()) {
    if (point.starts_with("pool.")) known.insert(point);
  }
  EXPECT_EQ(named, known);
}

// What could go wrong: killed at any point, the pool comes back with other batches, lost or doubled work, or a ledger that does not
// balance. At each death a batch is partly filled, or leased, or trained and not committed: a checkpoint is written every other step.
TEST(PoolDurability, KilledAtEveryPointTheBatchesAreThoseOfAnUninterruptedRun) {
  const std::vector<std::string> points = PointsOfEveryJob();
  EXPECT_GE(points.size(), 25u);
  std::map<std::string, int> hits;
  for (const std::string& point : points) {
    const std::string run = NewRun();
    bool done = false;
    // Ever later, until the job gets through: the first hit, the third, the ninth… of one life.
    for (int at = 1; !done; at *= 3) {
      const int status = RunProcess(run, fmt::format("{}=exit@{}", point, at));
      done = WIFEXITED(status) && WEXITSTATUS(status) == 0;
      ASSERT_TRUE(done || (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)) << point << "@" << at << ": status " << status;
      hits[point] += !done;
      ASSERT_LT(at, 100'000) << point;
    }
    ExpectWhole(run, point);
    ExpectNoStoreError(run, point);
    EXPECT_GT(hits[point], 0) << point << " was never hit";
    EXPECT_TRUE(RemoveAll(run).ok());
  }
  int deaths = 0;
  for (const auto& [point, n] : hits) deaths += n;
  std::printf("measured: %zu points, %d deaths\n", points.size(), deaths);
}

// Of each group that was retired the store has nothing, and the archive, where there is one, all that was valid.
void ExpectRetired(const std::string& run, const std::string& fate, const std::string& what) {
  std::set<int64_t> retired;
  const std::vector<std::string> lines = Split(*ReadFile(run + "/ledger.jsonl"), '\n');
  for (const std::string& line : lines) {
    if (line.empty()) continue;
    const Result<LedgerRecord> record = ParseLedger(line);
    ASSERT_TRUE(record.ok());
    if (record->line.kind != LedgerLine::Kind::kRetire) continue;
    for (int64_t group : record->line.groups) EXPECT_TRUE(retired.insert(group).second) << what << ": group " << group << " left twice";
  }
  EXPECT_GE(retired.size(), static_cast<size_t>(kScriptedSteps) * 2) << what;
  const Result<Archive> archive = Archive::Open(run + "/archive");
  ASSERT_TRUE(archive.ok()) << archive.status().message();
  Result<std::unique_ptr<Store>> store = OpenRocksStore(run + "/pool");
  ASSERT_TRUE(store.ok());
  for (int64_t group : retired) {
    EXPECT_TRUE((*store)->Records(group)->empty()) << what << ": group " << group;
    int found = 0;
    for (const auto& [id, place] : archive->records()) {
      if (id.group != group) continue;
      EXPECT_EQ(*archive->Read(id), ScriptedRecord(id, 20'000));
      ++found;
    }
    const int wanted = fate == "archive" && group % 7 != 3 ? 2 : found;
    EXPECT_EQ(found, wanted) << what << ": group " << group;
  }
}

// What could go wrong: killed around a commit that lets records go, some are lost that are needed, or some that are archived, or the
// store and the ledger disagree on what has left.
TEST(PoolDurability, KilledWhileRecordsLeaveNothingIsLost) {
  int deaths = 0;
  std::map<std::string, int> hits;
  std::vector<std::string> points = kPointsOfRetention;
  points.insert(points.end(), {"pool.commit.applied", "pool.before_write", "pool.after_write", "trainer.checkpoint_written"});
  for (const std::string fate : {"archive", "drop"}) {
    setenv("TEMPER_TEST_CONSUMED", fate.c_str(), 1);
    for (const std::string& point : points) {
      if (fate == "drop" && point == "pool.archive.written") continue;
      const std::string run = NewRun();
      bool done = false;
      int here = 0;
      for (int at = 1; !done; at += point.find("write") == std::string::npos ? 1 : 7) {
        const int status = RunProcess(run, fmt::format("{}=exit@{}", point, at));
        done = WIFEXITED(status) && WEXITSTATUS(status) == 0;
        ASSERT_TRUE(done || (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)) << point << "@" << at << ": status " << status;
        here += !done;
        ASSERT_LT(at, 1000) << point;
      }
      EXPECT_GT(here, 0) << point << " was never hit";
      deaths += here;
      hits[point] += here;
      ExpectWhole(run, fate + " " + point);
      ExpectRetired(run, fate, point);
      EXPECT_TRUE(RemoveAll(run).ok());
      if (HasFailure()) return;
    }
  }
  unsetenv("TEMPER_TEST_CONSUMED");
  EXPECT_GT(deaths, 15);
  std::printf("measured: %d deaths", deaths);
  for (const std::string& point : kPointsOfRetention) std::printf(", %d at %s", hits[point], point.c_str());
  std::printf("\n");
}

// ---- power cuts

// Every sync of a player process, as lines "PATH\tSIZE" in the file that TEMPER_TEST_SYNCS names; renames as "FROM\t>\tTO"; syncs of
// folders as "PATH\t/\t\tNAME\tNAME…", what they hold then.
struct Syncs {
  std::map<std::string, int64_t> bytes;
  std::map<std::string, std::set<std::string>> names;
  explicit Syncs(const std::string& journal) {
    Result<std::string> text = ReadFile(journal);
    if (!text.ok()) return;
    for (const std::string& line : Split(*text, '\n')) {
      const std::vector<std::string> words = Split(line, '\t');
      if (words.size() > 3 && words[1] == "/") {
        names[words[0]] = {words.begin() + 3, words.end()};
        continue;
      }
      if (words.size() == 2) bytes[words[0]] = std::atoll(words[1].c_str());
      if (words.size() == 3) bytes[words[2]] = std::exchange(bytes[words[0]], 0);
    }
  }
};

// The machine dies: of each file of the pool everything after its last sync goes, or everything from some byte after it; and of those whose
// folder was not synced since they were made, some are gone whole. Returns the bytes lost; `forgotten` counts the names.
int64_t PowerCut(const std::string& run, const std::string& journal, Rng& rng, int* forgotten) {
  Syncs synced(journal);
  int64_t gone = 0;
  for (const std::string& folder : {run + "/pool", run}) {
    const std::vector<std::string> held = *ListDir(folder);
    for (const std::string& name : held) {
      if (synced.names[folder].count(name) || name == "LOCK" || name.rfind("LOG", 0) == 0 || rng.Chance(0.5)) continue;
      const std::string path = folder + "/" + name;
      ++*forgotten;
      if (!IsDirectory(path)) gone += *FileSize(path);
      EXPECT_TRUE(RemoveAll(path).ok()) << path;
      if (path == run + "/pool") return gone;
    }
  }
  std::vector<std::string> files = {run + "/ledger.jsonl"};
  for (const std::string& name : StoreFiles(run)) files.push_back(run + "/pool/" + name);
  int64_t lost = gone;
  for (const std::string& path : files) {
    Result<int64_t> size = FileSize(path);
    const int64_t safe = synced.bytes[path];
    if (!size.ok() || *size <= safe) continue;
    const int64_t kept = safe + (rng.Chance(0.5) ? 0 : static_cast<int64_t>(rng.Below(static_cast<uint64_t>(*size - safe))));
    EXPECT_EQ(truncate(path.c_str(), kept), 0) << path;
    lost += *size - kept;
  }
  return lost;
}

// What could go wrong: something is promised before it is on the disk. The machine dies at some write of the job, again and again; what
// was not synced is gone. The job must come to the batches of an uninterrupted one all the same, and its ledger must balance.
TEST(PoolDurability, APowerCutLosesNothingThatWasPromised) {
  int64_t lost = 0;
  int cuts = 0, forgotten = 0;
  for (uint64_t seed = 0; seed < 40; ++seed) {
    const std::string run = NewRun(), journal = run + ".syncs";
    setenv("TEMPER_TEST_SYNCS", journal.c_str(), 1);
    if (seed % 2) setenv("TEMPER_TEST_CONSUMED", "archive", 1);
    Rng rng(seed);
    bool done = false;
    for (int life = 0; !done; ++life) {
      ASSERT_LT(life, 20) << "seed " << seed;
      const char* point = rng.Chance(0.5) ? "pool.after_ledger" : rng.Chance(0.5) ? "pool.after_write" : "pool.ledger_half";
      const std::string fault = life < 6 ? fmt::format("{}=exit@{}", point, 1 + rng.Below(30)) : "";
      const int status = RunProcess(run, fault, 20'000, run + ".log");
      done = WIFEXITED(status) && WEXITSTATUS(status) == 0;
      ASSERT_TRUE(done || WIFSIGNALED(status)) << "seed " << seed << " life " << life << ": status " << status << "\n" << *ReadFile(run + ".log");
      if (done) break;
      lost += PowerCut(run, journal, rng, &forgotten);
      ++cuts;
    }
    ExpectWhole(run, fmt::format("seed {}", seed));
    unsetenv("TEMPER_TEST_SYNCS");
    unsetenv("TEMPER_TEST_CONSUMED");
    if (seed % 2) ExpectRetired(run, "archive", fmt::format("seed {}", seed));
    EXPECT_TRUE(RemoveAll(run).ok());
    EXPECT_TRUE(RemoveAll(journal).ok());
    EXPECT_TRUE(RemoveAll(run + ".log").ok());
    if (HasFailure()) return;
  }
  EXPECT_GT(cuts, 80);
  EXPECT_GT(lost, 1'000'000) << "nothing was at stake";
  EXPECT_GT(forgotten, 2) << "how many depends on when the store made its files";
  std::printf("measured: %d power cuts, %lld unsynced bytes and %d unsynced names lost\n", cuts, static_cast<long long>(lost), forgotten);
}

// ---- damaged files

// What could go wrong: a changed bit in the store goes unseen, into the pool's state or into what is trained.
TEST(PoolDurability, AChangedBitIsSeen) {
  const std::string run = NewRun();
  const int status = RunProcess(run, "pool.update.applied=exit@4");
  ASSERT_TRUE(WIFSIGNALED(status));
  std::map<std::string, std::string> files;
  for (const std::string& name : StoreFiles(run)) files[name] = *ReadFile(run + "/pool/" + name);
  std::string state;
  std::vector<AttemptId> ids;
  {
    Result<std::unique_ptr<StoreReader>> reader = StoreReader::Open(run);
    ASSERT_TRUE(reader.ok());
    ids = *(*reader)->List(std::nullopt);
    ASSERT_GT(ids.size(), 10u);
  }
  const std::string copy = run + "-flipped";
  auto lay = [&](const std::string& changed, const std::string& bytes) {
    ASSERT_TRUE(RemoveAll(copy).ok());
    ASSERT_TRUE(MakeDirs(copy).ok());
    for (const auto& [name, content] : files) ASSERT_TRUE(WriteFile(copy + "/" + name, name == changed ? bytes : content).ok());
  };
  lay("", "");
  {
    Result<std::unique_ptr<Store>> store = OpenRocksStore(copy);
    ASSERT_TRUE(store.ok());
    state = **(*store)->State();
  }
  Rng rng(1);
  int seen = 0, harmless = 0;
  std::vector<std::string> names;
  for (const auto& [name, content] : files) {
    if (!content.empty()) names.push_back(name);
  }
  for (int i = 0; i < 300; ++i) {
    const std::string& name = names[rng.Below(names.size())];
    std::string bytes = files[name];
    const size_t bit = rng.Below(bytes.size() * 8);
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << (bit % 8)));
    lay(name, bytes);
    const std::string where = fmt::format("{} bit {}", name, bit);
    Result<std::unique_ptr<Store>> store = OpenRocksStore(copy);
    if (!store.ok()) {
      ++seen;
      continue;
    }
    bool clean = true;
    Result<std::optional<std::string>> now = (*store)->State();
    if (!now.ok()) {
      clean = false;
    } else {
      EXPECT_TRUE(now->has_value() && **now == state) << where << ": another state, and nobody noticed";
    }
    for (const AttemptId& id : ids) {
      Result<std::string> record = (*store)->Trajectory(id);
      if (!record.ok()) {
        clean = false;
      } else {
        EXPECT_EQ(record->size(), ScriptedRecord(id, 20'000).size()) << where;
        EXPECT_TRUE(*record == ScriptedRecord(id, 20'000)) << where << ": another record, and nobody noticed";
      }
    }
    ++(clean ? harmless : seen);
  }
  EXPECT_GT(seen, 100);
  std::printf("measured: of 300 changed bits %d seen, %d in bytes that nothing reads\n", seen, harmless);
  EXPECT_TRUE(RemoveAll(copy).ok());
  EXPECT_TRUE(RemoveAll(run).ok());
}

// ---- a full disk

// A user and mount namespace of our own, so that a small file system can be mounted. False: the kernel does not let us.
bool OwnMounts() {
  const uid_t uid = getuid();
  const gid_t gid = getgid();
  if (unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return false;
  return WriteFile("/proc/self/setgroups", "deny").ok() && WriteFile("/proc/self/uid_map", fmt::format("0 {} 1", uid)).ok() &&
         WriteFile("/proc/self/gid_map", fmt::format("0 {} 1", gid)).ok();
}

constexpr int kNoMounts = 77;

// What could go wrong: a disk that fills up at some moment costs work, or is not named as the cause. Each life gets a little more space
// than the last, so that it ends at another point.
int LiveOnASmallDisk(const std::string& run) {
  if (!OwnMounts()) return kNoMounts;
  int kilobytes = 700, full = 0;
  if (mount("tmpfs", run.c_str(), "tmpfs", 0, fmt::format("size={}k", kilobytes).c_str()) != 0) return kNoMounts;
  for (;; kilobytes += 150) {
    if (kilobytes > 64'000) return 2;
    if (mount("tmpfs", run.c_str(), "tmpfs", MS_REMOUNT, fmt::format("size={}k", kilobytes).c_str()) != 0) return 3;
    const std::string log = run + ".log";
    (void)RemoveAll(log);
    const int status = RunProcess(run, "", 100'000, log);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) break;
    ++full;
    const std::string said = *ReadFile(log);
    if (said.find("No space left on device") == std::string::npos && said.find("NoSpace") == std::string::npos) {
      std::printf("at %d kB the cause is not named: %s\n", kilobytes, said.c_str());
      return 4;
    }
  }
  std::printf("measured: %d lives on a full disk, done at %d kB\n", full, kilobytes);
  if (full < 8) return 5;
  ExpectWhole(run, "full disk");
  std::fflush(stdout);
  return testing::Test::HasFailure() ? 1 : 0;
}

TEST(PoolDurability, AFullDiskIsNamedAndCostsNothing) {
  const std::string run = NewRun();
  (void)Uninterrupted();
  std::fflush(stdout);
  const pid_t pid = fork();
  if (pid == 0) _exit(LiveOnASmallDisk(run));
  int status = 0;
  ASSERT_EQ(waitpid(pid, &status, 0), pid);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == kNoMounts) GTEST_SKIP() << "kernel: no mounts in a user namespace";
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_TRUE(RemoveAll(run).ok());
  EXPECT_TRUE(RemoveAll(run + ".log").ok());
}

// ---- what a player process says of its syncs

void NoteSync(const std::string& line) {
  const char* journal = std::getenv("TEMPER_TEST_SYNCS");
  if (journal != nullptr) (void)AppendFile(journal, line + "\n");
}

int NotedSync(int fd, long call) {
  char path[4096];
  const ssize_t n = readlink(fmt::format("/proc/self/fd/{}", fd).c_str(), path, sizeof path - 1);
  struct stat file{};
  const int result = static_cast<int>(syscall(call, fd));
  if (result == 0 && n > 0 && fstat(fd, &file) == 0 && S_ISREG(file.st_mode)) {
    NoteSync(fmt::format("{}\t{}", std::string_view(path, static_cast<size_t>(n)), static_cast<int64_t>(file.st_size)));
  }
  if (result == 0 && n > 0 && S_ISDIR(file.st_mode)) {
    std::string line = fmt::format("{}\t/\t", std::string_view(path, static_cast<size_t>(n)));
    const Result<std::vector<std::string>> names = ListDir(std::string(path, static_cast<size_t>(n)));
    if (names.ok()) {
      for (const std::string& name : *names) line += "\t" + name;
    }
    NoteSync(line);
  }
  return result;
}

}  // namespace
}  // namespace temper::datapool

// In place of the C library's, for RocksDB's shared library too: the file system that a power cut is simulated on.
extern "C" int fdatasync(int fd) { return temper::datapool::NotedSync(fd, SYS_fdatasync); }
extern "C" int fsync(int fd) { return temper::datapool::NotedSync(fd, SYS_fsync); }
extern "C" int rename(const char* from, const char* to) noexcept {
  const int result = static_cast<int>(syscall(SYS_rename, from, to));
  if (result == 0) temper::datapool::NoteSync(fmt::format("{}\t>\t{}", from, to));
  return result;
}
