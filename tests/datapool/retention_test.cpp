// Retention: what leaves the store, when nothing more comes in, and that nothing is lost by either.
#include "datapool/retention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <set>

#include "common/file.h"
#include "datapool/archive.h"
#include "datapool/listing.h"
#include "datapool/record.h"
#include "datapool/service.h"
#include "datapool/store.h"
#include "datapool/store_reader.h"
#include "datapool/verify.h"
#include "tests/datapool/borrowed_store.h"
#include "tests/datapool/script.h"

namespace temper::datapool {
namespace {

std::string NewRun() {
  std::string path = testing::TempDir() + "/retention-XXXXXX";
  TEMPER_CHECK(mkdtemp(path.data()) != nullptr);
  return path;
}

LedgerLine Line(LedgerLine::Kind kind, std::optional<int64_t> group, std::optional<int64_t> step = std::nullopt, std::vector<int64_t> groups = {}) {
  LedgerLine l;
  l.kind = kind;
  l.group = group;
  l.step = step;
  l.groups = std::move(groups);
  return l;
}

// What could go wrong: a group that a checkpoint does not hold yet, or one that was rolled back, is let go.
TEST(Retention, OnlyWhatIsOverForGoodIsDue) {
  using Kind = LedgerLine::Kind;
  Retention r;
  r.Add(Line(Kind::kConsume, 0, 1));
  r.Add(Line(Kind::kConsume, 2, 1));
  r.Add(Line(Kind::kConsume, 3, 2));
  EXPECT_TRUE(r.Due().empty()) << "no checkpoint holds them";
  r.Add(Line(Kind::kTombstone, 1));
  EXPECT_EQ(r.Due(), (std::vector<int64_t>{1})) << "buried is over at once";
  r.Add(Line(Kind::kCommit, std::nullopt, 1));
  EXPECT_EQ(r.Due(), (std::vector<int64_t>{0, 1, 2}));
  r.Add(Line(Kind::kRollback, std::nullopt, 1));
  EXPECT_EQ(r.Due(), (std::vector<int64_t>{0, 1, 2})) << "group 3 is to be trained again";
  r.Add(Line(Kind::kRetire, std::nullopt, 1, {0, 1, 2}));
  EXPECT_TRUE(r.Due().empty());
  for (int64_t g : {0, 1, 2}) EXPECT_TRUE(r.Retired(g));
  EXPECT_FALSE(r.Retired(3));
  r.Add(Line(Kind::kConsume, 4, 2));
  r.Add(Line(Kind::kCommit, std::nullopt, 2));
  EXPECT_EQ(r.Due(), (std::vector<int64_t>{4}));
  r.Add(Line(Kind::kRetire, std::nullopt, 2, {4}));
  EXPECT_TRUE(r.Retired(4));
  EXPECT_FALSE(r.Retired(3));
}

// What could go wrong: more is handed out than fits, or the gate flutters at its limit.
TEST(SpaceGate, LeavesRoomForWhatIsPlayed) {
  constexpr int64_t kMiB = 1 << 20;
  SpaceGate gate({Consumed::kDrop, 800 * kMiB, 0});
  gate.Saw(10 * kMiB);
  gate.Look({0, INT64_MAX}, 0);
  EXPECT_EQ(gate.room(), 35) << "seven eighths of the bound, each record twice";
  EXPECT_EQ(gate.reason(), "");
  gate.HandedOut(30);
  EXPECT_EQ(gate.room(), 5);
  gate.HandedOut(30);
  EXPECT_EQ(gate.room(), 0);
  gate.Look({0, INT64_MAX}, 35);
  EXPECT_EQ(gate.reason(), "store") << "those that are played may bring all of it";
  gate.Look({0, INT64_MAX}, 33);
  EXPECT_EQ(gate.reason(), "store") << "shut until a sixteenth is back";
  gate.Look({0, INT64_MAX}, 30);
  EXPECT_EQ(gate.reason(), "");
  gate.Look({690 * kMiB, INT64_MAX}, 0);
  EXPECT_EQ(gate.reason(), "store");

  SpaceGate disk({Consumed::kKeep, std::nullopt, 100 * kMiB});
  disk.Saw(kMiB);
  disk.Look({0, 120 * kMiB}, 4);
  EXPECT_EQ(disk.room(), 6);
  disk.Look({0, 108 * kMiB}, 4);
  EXPECT_EQ(disk.reason(), "disk");
  EXPECT_EQ(disk.room(), 0);
  disk.Look({0, INT64_MAX}, 4);
  EXPECT_EQ(disk.reason(), "");
  SpaceGate open({});
  open.Look({int64_t{1} << 60, 0}, 1'000'000);
  EXPECT_EQ(open.reason(), "") << "no limits";
}

// A store whose file system is what a test says.
struct Small final : Store {
  Status Write(const StoreWrite& w, bool sync) override { return store->Write(w, sync); }
  Result<std::optional<std::string>> State() override { return store->State(); }
  Result<std::vector<std::pair<int64_t, std::string>>> Ledger() override { return store->Ledger(); }
  Result<std::string> Trajectory(const AttemptId& id) override { return store->Trajectory(id); }
  Result<std::vector<std::pair<AttemptId, std::string>>> Records(int64_t group) override { return store->Records(group); }
  Result<StoreSpace> Space() override {
    ASSIGN_OR_RETURN(StoreSpace s, store->Space());
    s.free = *free;
    return s;
  }
  explicit Small(int64_t* bytes) : free(bytes) {}
  int64_t* free;
  std::unique_ptr<Store> store = MakeMemoryStore();
};

FinishedAttempt Scored(const AttemptId& id, double reward, std::string trajectory = "x") {
  FinishedAttempt f;
  f.id = id;
  f.outcome = "scored";
  f.reward = reward;
  f.trajectory = std::move(trajectory);
  return f;
}

// What could go wrong: at a nearly full disk more rollouts begin, waiting costs groups their deadline, the job does not go on when space
// is back, or nobody is told why it stands.
TEST(Retention, HoldsBackBeforeTheDiskIsFull) {
  const std::string run = NewRun();
  int64_t free = int64_t{1} << 40;
  FakeClock clock;
  Faults faults;
  Metrics metrics;
  LocalPoolOptions options;
  options.config = Config(R"({"P":1,"S":3,"deadline_s":60})");
  options.job_incarnation = "j";
  options.ledger_path = run + kLedgerFile;
  options.retention.free = 100 << 20;
  auto opened = LocalDataPool::Open(options, std::make_unique<Small>(&free), metrics, Env{clock, PosixFileSystem::Get(), faults, Rng(0)});
  ASSERT_TRUE(opened.ok());
  LocalDataPool& pool = **opened;
  ASSERT_TRUE(pool.AttachAgents("a").ok());
  ASSERT_TRUE(pool.AttachTrainer("t", 0).ok());
  ASSERT_EQ(pool.TakeIssues("a", 1, 0)->issues.size(), 1u);
  free = 50 << 20;
  clock.Advance(1);
  EXPECT_TRUE(pool.TakeIssues("a", 100, 0)->issues.empty());
  EXPECT_EQ(pool.Metrics()->at("held"), 2);
  EXPECT_THAT(metrics.Lines(), testing::Contains(testing::StartsWith("no space (disk")));
  clock.Advance(1000);
  EXPECT_TRUE(*pool.Finish("a", Scored({0, 0, 1}, 1))) << "what is played goes on";
  EXPECT_TRUE(pool.Lease("t", 0, 0)->ready) << "and is trained";
  EXPECT_EQ(pool.Metrics()->at("tombstoned"), 0) << "deadlines stand still";
  free = 200 << 20;
  clock.Advance(1);
  EXPECT_EQ(pool.TakeIssues("a", 100, 0)->issues.size(), 3u);
  EXPECT_EQ(pool.Metrics()->at("held"), 0);
  const std::string ledger = *ReadFile(options.ledger_path);
  EXPECT_THAT(ledger, testing::HasSubstr(R"("event":"space","reason":"disk"})"));
  EXPECT_THAT(ledger, testing::HasSubstr(R"("event":"space","reason":"back"})"));
  clock.Advance(61);
  ASSERT_TRUE(pool.Pause(false).ok());
  EXPECT_EQ(pool.Metrics()->at("tombstoned"), 3) << "and go on";
  const VerifyReport report = VerifyLedger(options.config, *ReadFile(options.ledger_path));
  EXPECT_TRUE(report.ok()) << PrintVerify(report);
  opened->reset();
  EXPECT_TRUE(RemoveAll(run).ok());
}

// What could go wrong: a record leaves the store that a lease needs later, under any order of events and crashes of trainer and pool.
TEST(Retention, NothingThatIsStillNeededLeaves) {
  int64_t retired = 0, back = 0;
  for (uint64_t seed = 0; seed < 40; ++seed) {
    Rng rng(seed);
    const std::string run = NewRun();
    int64_t free = INT64_MAX;
    Small store(&free);
    Metrics metrics;
    LocalPoolOptions options;
    options.config = Config(R"({"P":2,"S":1,"G":2,"retries":1,"zero_signal":"refill","window":{"policy":"greedy"}})");
    options.job_incarnation = "j";
    options.ledger_path = run + kLedgerFile;
    options.retention.consumed = Consumed::kDrop;
    std::unique_ptr<LocalDataPool> pool;
    const auto open = [&] {
      pool.reset();
      auto opened = LocalDataPool::Open(options, std::make_unique<BorrowedStore>(store), metrics, Env::System());
      ASSERT_TRUE(opened.ok()) << opened.status().message();
      pool = *std::move(opened);
    };
    open();
    int64_t step = 0, committed = 0;
    int trainers = 0;
    std::string trainer = "t";
    ASSERT_TRUE(pool->AttachAgents("a").ok());
    ASSERT_TRUE(pool->AttachTrainer(trainer, 0).ok());
    std::vector<AttemptId> playing;
    for (int turn = 0; turn < 150; ++turn) {
      const auto taken = pool->TakeIssues("a", 3, 0);
      ASSERT_TRUE(taken.ok());
      for (const Issue& issue : taken->issues) playing.push_back(issue.id);
      if (!playing.empty() && rng.Chance(0.8)) {
        const size_t at = rng.Below(playing.size());
        const AttemptId id = playing[at];
        playing.erase(playing.begin() + static_cast<ptrdiff_t>(at));
        ASSERT_TRUE(pool->Finish("a", Scored(id, static_cast<double>(rng.Below(2)), fmt::format("{}.{}", id.group, id.rollout))).ok());
      }
      const auto lease = pool->Lease(trainer, step, 0);
      ASSERT_TRUE(lease.ok()) << lease.status().message();
      if (lease->ready) {
        for (const LeasedGroup& g : lease->groups) {
          ASSERT_EQ(g.members.size(), 2u) << "seed " << seed << " group " << g.group;
          for (size_t i = 0; i < 2; ++i) EXPECT_EQ(g.members[i], fmt::format("{}.{}", g.group, g.rollouts[i]));
        }
        back += lease->again;
        if (rng.Chance(0.7)) {
          ASSERT_TRUE(pool->Update(trainer, step).ok());
          ++step;
          if (rng.Chance(0.4)) {
            ASSERT_TRUE(pool->Commit(step).ok());
            committed = step;
          }
        }
      }
      if (rng.Chance(0.05)) open();
      if (rng.Chance(0.05)) {
        trainer = fmt::format("t{}", ++trainers);
        ASSERT_TRUE(pool->AttachTrainer(trainer, committed).ok());
        step = committed;
      }
    }
    EXPECT_EQ(pool->Metrics()->at("quarantined"), 0);
    const auto ledger = ReadLedger(*ReadFile(options.ledger_path));
    ASSERT_TRUE(ledger.ok());
    for (const LedgerRecord& record : *ledger) {
      if (record.line.kind != LedgerLine::Kind::kRetire) continue;
      retired += static_cast<int64_t>(record.line.groups.size());
      for (int64_t group : record.line.groups) EXPECT_TRUE(store.Records(group)->empty()) << "seed " << seed << " group " << group;
    }
    const VerifyReport report = VerifyLedger(options.config, *ReadFile(options.ledger_path));
    EXPECT_TRUE(report.ok()) << "seed " << seed << ": " << PrintVerify(report);
    pool.reset();
    EXPECT_TRUE(RemoveAll(run).ok());
    if (HasFailure()) return;
  }
  EXPECT_GT(retired, 200);
  EXPECT_GT(back, 20);
}

// What could go wrong: a ledger that retires what is needed passes for balanced.
TEST(Retention, TheBalanceSeesWhatLeavesTooEarly) {
  const PoolConfig config = Config(R"({"P":1,"S":1})");
  Window window(config);
  std::string text;
  int64_t seq = 0;
  const auto add = [&](const StepOutput& out) {
    for (const LedgerLine& l : out.ledger) text += PrintLedger({++seq, l}) + "\n";
  };
  add(window.Start(0));
  Event finish;
  finish.kind = Event::Kind::kFinish;
  finish.outcome = "scored";
  finish.reward = 1;
  add(*window.Apply(finish, 1));
  Event lease;
  lease.kind = Event::Kind::kLease;
  add(*window.Apply(lease, 2));
  Event update;
  update.kind = Event::Kind::kUpdate;
  add(*window.Apply(update, 3));
  const auto retired = [&](int64_t group) {
    LedgerLine l = Line(LedgerLine::Kind::kRetire, std::nullopt, 1, {group});
    l.t = 5;
    l.reason = "drop";
    return VerifyLedger(config, text + PrintLedger({seq + 1, l}) + "\n");
  };
  EXPECT_THAT(PrintVerify(retired(0)), testing::HasSubstr("group 0 is retired, but no committed step has trained it"));
  Event commit;
  commit.kind = Event::Kind::kCommit;
  commit.number = 1;
  add(*window.Apply(commit, 4));
  EXPECT_TRUE(retired(0).ok()) << PrintVerify(retired(0));
  EXPECT_FALSE(retired(1).ok());
}

struct Played {
  int64_t most = 0, written = 0;  // bytes in the store at the most; of records
  int64_t held = 0;               // turns at which nothing was handed out for want of space
  Status status;
};

// A job of its own on a RocksDB: `steps` of one batch, committed every other step. `between` is called each turn.
Played PlayOnDisk(const std::string& run, RetentionConfig retention, int64_t steps, size_t bytes, const std::function<void(Metrics&)>& between,
                  const std::string& config = R"({"P":4,"S":1,"G":2,"window":{"policy":"greedy"}})") {
  Played out;
  Metrics metrics;
  LocalPoolOptions options;
  options.config = Config(config);
  options.job_incarnation = "j";
  options.ledger_path = run + kLedgerFile;
  options.archive_dir = run + kArchiveDir;
  options.retention = retention;
  Rng rng(1);
  std::string noise(bytes, '\0');
  for (char& c : noise) c = static_cast<char>(rng.Next());
  const auto play = [&]() -> Status {
    ASSIGN_OR_RETURN(std::unique_ptr<Store> store, OpenRocksStore(run + "/pool"));
    Store* space = store.get();
    ASSIGN_OR_RETURN(const std::unique_ptr<LocalDataPool> pool, LocalDataPool::Open(options, std::move(store), metrics, Env::System()));
    RETURN_IF_ERROR(pool->AttachAgents("a").status());
    RETURN_IF_ERROR(pool->AttachTrainer("t", 0).status());
    int idle = 0;  // turns since anything was handed out or trained
    for (int64_t step = 0; step < steps;) {
      // A store from which nothing leaves is held for good.
      if (++idle > 1500) return DeadlineExceeded("nothing has moved since step " + std::to_string(step) + ": records do not leave");
      ASSIGN_OR_RETURN(const TakeIssuesReply taken, pool->TakeIssues("a", 4, 20));
      if (!taken.issues.empty()) idle = 0;
      out.held += pool->Metrics()->at("held") != 0;
      for (const Issue& issue : taken.issues) {
        RETURN_IF_ERROR(pool->Finish("a", Scored(issue.id, issue.id.rollout, noise)).status());
        out.written += static_cast<int64_t>(bytes);
      }
      ASSIGN_OR_RETURN(const LeaseReply lease, pool->Lease("t", step, 0));
      if (lease.ready) {
        for (const LeasedGroup& g : lease.groups) {
          if (g.members.size() != 2 || g.members[0] != noise || g.members[1] != noise) return DataLoss("a leased record is not what was written");
        }
        idle = 0;
        RETURN_IF_ERROR(pool->Update("t", step));
        if (++step % 2 == 0) RETURN_IF_ERROR(pool->Commit(step));
      }
      ASSIGN_OR_RETURN(const StoreSpace now, space->Space());
      out.most = std::max(out.most, now.used);
      between(metrics);
    }
    return pool->Close(CloseReason::kJobEnd);
  };
  out.status = play();
  return out;
}

// What could go wrong: the store grows over its bound, because what was dropped keeps its space.
TEST(Retention, TheBoundOfTheStoreIsHeld) {
  const std::string run = NewRun();
  constexpr int64_t kBound = 64 << 20;
  const Played played = PlayOnDisk(run, {Consumed::kDrop, kBound, 0}, 100, 1 << 20, [](Metrics&) {});
  ASSERT_TRUE(played.status.ok()) << played.status.message();
  EXPECT_GT(played.written, 3 * kBound);
  EXPECT_LE(played.most, kBound);
  std::printf("measured: %lld MB written, at most %lld MB in a store of at most %lld MB, held at %lld turns\n", static_cast<long long>(played.written >> 20),
              static_cast<long long>(played.most >> 20), static_cast<long long>(kBound >> 20), static_cast<long long>(played.held));
  const auto ledger = ReadLedger(*ReadFile(run + kLedgerFile));
  ASSERT_TRUE(ledger.ok());
  EXPECT_THAT(ExplainGroup(*ledger, 0)->back(), testing::HasSubstr(R"("event":"retire")"));
  EXPECT_THAT(ListGroups(*ledger)[0], testing::HasSubstr(R"("records":"dropped")"));
  auto reader = StoreReader::Open(run);
  ASSERT_TRUE(reader.ok());
  EXPECT_EQ((*reader)->Read(0, 0, std::nullopt).status().code(), StatusCode::kNotFound);
  reader->reset();
  EXPECT_TRUE(RemoveAll(run).ok());
}

// What could go wrong: the records of one source leave, those of another stay, or one source's bound is taken for that of all.
TEST(Retention, RecordsOfEverySourceLeave) {
  const std::string run = NewRun();
  constexpr int64_t kBound = 48 << 20;
  const Played played = PlayOnDisk(run, {Consumed::kDrop, kBound, 0}, 60, 1 << 20, [](Metrics&) {},
                                   R"({"P":4,"S":1,"G":2,"window":{"policy":"greedy"},"sources":[{"name":"math","weight":1},{"name":"code","weight":3}]})");
  ASSERT_TRUE(played.status.ok()) << played.status.message();
  EXPECT_GT(played.written, 3 * kBound);
  EXPECT_LE(played.most, kBound);
  const auto ledger = ReadLedger(*ReadFile(run + kLedgerFile));
  ASSERT_TRUE(ledger.ok());
  std::map<std::string, std::set<int64_t>> trained, dropped;
  std::map<int64_t, std::string> source_of;
  for (const LedgerRecord& record : *ledger) {
    const LedgerLine& l = record.line;
    if (l.kind == LedgerLine::Kind::kAdmit) source_of[*l.group] = l.source;
    if (l.kind == LedgerLine::Kind::kConsume) trained[source_of.at(*l.group)].insert(*l.group);
    if (l.kind != LedgerLine::Kind::kRetire) continue;
    for (const int64_t group : l.groups) dropped[source_of.at(group)].insert(group);
  }
  ASSERT_EQ(trained.size(), 2u);
  EXPECT_EQ(trained["code"].size(), 3 * trained["math"].size());
  EXPECT_EQ(dropped, trained) << "sixty steps, each second one with a commit: nothing is left";
  EXPECT_TRUE(RemoveAll(run).ok());
}

// What could go wrong: an archived record is lost, changed, or not found where people look.
TEST(Retention, WhatIsArchivedIsReadAsBefore) {
  const std::string run = NewRun();
  const Played played = PlayOnDisk(run, {Consumed::kArchive, std::nullopt, 0}, 4, 5000, [](Metrics&) {});
  ASSERT_TRUE(played.status.ok()) << played.status.message();
  auto archive = Archive::Open(run + kArchiveDir);
  ASSERT_TRUE(archive.ok()) << archive.status().message();
  EXPECT_EQ(archive->records().size(), 4u * 4 * 2);
  auto reader = StoreReader::Open(run);
  ASSERT_TRUE(reader.ok());
  for (int32_t rollout : {0, 1}) EXPECT_EQ((*reader)->Read(0, rollout, std::nullopt)->size(), 5000u);
  EXPECT_EQ((*reader)->Read(0, 0, 1)->size(), 5000u);
  EXPECT_FALSE((*reader)->Read(0, 0, 2).ok());
  EXPECT_EQ((*reader)->List(0)->size(), 2u);
  // Cut or changed anywhere, it is not taken for whole.
  const std::string path = run + kArchiveDir + "/step-00000002.records", bytes = *ReadFile(path);
  Rng rng(5);
  for (int i = 0; i < 200; ++i) {
    const size_t cut = rng.Below(bytes.size());
    ASSERT_TRUE(WriteFile(path, bytes.substr(0, cut)).ok());
    const auto shorter = Archive::Open(run + kArchiveDir);
    EXPECT_LT(shorter.ok() ? shorter->records().size() : 0, 32u);
    std::string flipped = bytes;
    flipped[cut] = static_cast<char>(flipped[cut] ^ (1 << rng.Below(8)));
    ASSERT_TRUE(WriteFile(path, flipped).ok());
    const auto changed = Archive::Open(run + kArchiveDir);
    if (!changed.ok()) continue;
    int good = 0;
    for (int64_t group = 0; group < 8; ++group) {
      for (int32_t rollout : {0, 1}) {
        const auto read = changed->Read({group, rollout, 1});
        good += read.ok();
        EXPECT_TRUE(read.ok() || read.status().code() == StatusCode::kDataLoss || read.status().code() == StatusCode::kNotFound);
      }
    }
    EXPECT_LT(good, 16) << "byte " << cut;
  }
  reader->reset();
  EXPECT_TRUE(RemoveAll(run).ok());
}

constexpr int kNoMounts = 77;

// A small file system of our own, that grows when the pool has held back for a while. In a program of its own: RocksDB's threads of this
// one are not in a fork.
int MountSmallDisk(const std::string& run) {
  const uid_t uid = getuid();
  const gid_t gid = getgid();
  if (unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return kNoMounts;
  if (!WriteFile("/proc/self/setgroups", "deny").ok() || !WriteFile("/proc/self/uid_map", fmt::format("0 {} 1", uid)).ok() ||
      !WriteFile("/proc/self/gid_map", fmt::format("0 {} 1", gid)).ok() || mount("tmpfs", run.c_str(), "tmpfs", 0, "size=160m") != 0) {
    return kNoMounts;
  }
  setenv("TEMPER_TEST_RUN", run.c_str(), 1);
  execl("/proc/self/exe", "pool", "--gtest_also_run_disabled_tests", "--gtest_filter=Retention.DISABLED_SmallDisk", "--gtest_brief=1", nullptr);
  return 127;
}

int LiveOnASmallDisk(const std::string& run) {
  int held = 0;
  bool grown = false;
  const Played played = PlayOnDisk(run, {Consumed::kKeep, std::nullopt, 64 << 20}, 20, 1 << 20, [&](Metrics& metrics) {
    held += metrics["held"].value() == 2;
    if (held < 5 || grown) return;
    grown = true;
    if (mount("tmpfs", run.c_str(), "tmpfs", MS_REMOUNT, "size=640m") != 0) std::abort();
  });
  std::printf("measured: held at %lld turns, %lld MB written\n", static_cast<long long>(played.held), static_cast<long long>(played.written >> 20));
  if (!played.status.ok()) std::printf("%s\n", played.status.message().c_str());
  std::fflush(stdout);
  if (!played.status.ok()) return 2;
  if (!grown) return 3;
  const VerifyReport report = VerifyLedger(Config(R"({"P":4,"S":1,"G":2,"window":{"policy":"greedy"}})"), *ReadFile(run + kLedgerFile));
  return report.ok() && report.consumed == 80 ? 0 : 4;
}

TEST(Retention, DISABLED_SmallDisk) { _exit(LiveOnASmallDisk(std::getenv("TEMPER_TEST_RUN"))); }

// What could go wrong: the disk fills up although the pool could have held back; or it does not go on when there is space again.
TEST(Retention, ASmallDiskIsNeverFull) {
  const std::string run = NewRun();
  std::fflush(stdout);
  const pid_t pid = fork();
  if (pid == 0) _exit(MountSmallDisk(run));
  int status = 0;
  ASSERT_EQ(waitpid(pid, &status, 0), pid);
  ASSERT_TRUE(WIFEXITED(status)) << status;
  if (WEXITSTATUS(status) == kNoMounts) GTEST_SKIP() << "kernel: no mounts in a user namespace";
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_TRUE(RemoveAll(run).ok());
}

}  // namespace
}  // namespace temper::datapool
