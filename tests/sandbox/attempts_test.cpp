// Attempts to break out of a sandbox or to do harm from inside, each under its number in the list of attacks that every backend
// has to hold. The attempts are made by attacker.cpp. What it reports as `ALLOWED` reached its aim; each test shows first that
// the same attempt does so where the guard is away (outside, or with a wider limit), then that it does not inside, and after
// every test the service has to be healthy and nothing may be left (TearDown).
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <cstdlib>
#include <future>
#include <map>
#include <set>
#include <thread>

#include "common/clock.h"
#include "common/file.h"
#include "common/rpc.h"
#include "common/strings.h"
#include "sandbox/cgroup.h"
#include "sandbox/files.h"
#include "sandbox/janitor.h"
#include "sandbox/remains.h"
#include "sandbox/service.h"
#include "tests/sandbox/live_sandbox.h"

namespace temper::sandbox {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;
using Names = std::vector<std::string>;

const char kAttacker[] = TEMPER_BUILD_DIR "/tests/sandbox/sandbox-attacker";
// In two halves, so that the attacker that searches for it does not find its own command line.
constexpr char kSecretHalf[] = "hunter2-", kOtherHalf[] = "is-the-key";
constexpr int kLeakedDescriptors = 200;

enum Layers { kAll, kNoCgroups, kNoSeccomp, kNoUsers, kNoNetwork, kLayersEnd };

// The janitors, forked before any thread, by a process that has secrets and open descriptors.
class Janitors : public ::testing::Environment {
 public:
  void SetUp() override {
    setenv("SUPER_SECRET_API_KEY", (std::string(kSecretHalf) + kOtherHalf).c_str(), 1);
    for (int i = 0; i < kLeakedDescriptors; ++i) ASSERT_GE(open("/etc/passwd", O_RDONLY), 0);
    for (int layers = 0; layers < kLayersEnd; ++layers) {
      JanitorOptions options;
      options.init_path = TEMPER_BUILD_DIR "/temper-sandbox-init";
      if (layers == kNoCgroups) options.cgroups = CgroupMode::kNone;
      options.without.seccomp = layers == kNoSeccomp;
      options.without.users = layers == kNoUsers;
      options.without.network = layers == kNoNetwork;
      auto janitor = ForkJanitor(options);
      ASSERT_TRUE(janitor.ok()) << janitor.status().ToString();
      janitors_[layers] = std::make_unique<Janitor>(std::move(*janitor));
    }
  }
  void TearDown() override {
    for (auto& janitor : janitors_) janitor.reset();
  }
  static Janitor& Get(Layers layers) { return *janitors_[layers]; }

 private:
  static std::unique_ptr<Janitor> janitors_[kLayersEnd];
};
std::unique_ptr<Janitor> Janitors::janitors_[kLayersEnd];
const auto* const kEnvironment = ::testing::AddGlobalTestEnvironment(new Janitors);

Names Entries(const std::string& folder) {
  auto names = ListDir(folder);
  return names.ok() ? std::move(*names) : Names();
}

// What an attacker reported.
struct Report {
  std::map<std::string, std::string> lines;
  ExecResult result;
  std::string text;
  std::string operator[](const std::string& name) const {
    auto it = lines.find(name);
    return it == lines.end() ? "(not tried)" : it->second;
  }
  int64_t Count(const std::string& name) const {
    int64_t value = -1;
    return ParseInt((*this)[name], &value) ? value : -1;
  }
  std::set<std::string> Allowed() const {
    std::set<std::string> names;
    for (const auto& [name, value] : lines) {
      if (value == "ALLOWED") names.insert(name);
    }
    return names;
  }
};

Report Parse(const std::string& text) {
  Report report;
  report.text = text;
  for (const std::string& line : Split(text, '\n')) {
    const size_t space = line.rfind(' ');
    if (space == std::string::npos) continue;
    std::string& value = report.lines[line.substr(0, space)];
    // Tried twice: what was allowed once is allowed.
    if (value != "ALLOWED") value = line.substr(space + 1);
  }
  return report;
}

// The same attempt on the host, by root; what it mounts and names is its own.
Report Outside(const Names& words, const Names& options = {"--apart"}) {
  int ends[2];
  EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
  Fd from(ends[0]), to(ends[1]);
  std::vector<const char*> argv = {kAttacker};
  for (const std::string& option : options) argv.push_back(option.c_str());
  for (const std::string& word : words) argv.push_back(word.c_str());
  argv.push_back(nullptr);
  const pid_t pid = fork();
  if (pid == 0) {
    dup2(to.get(), 1);
    execv(kAttacker, const_cast<char* const*>(argv.data()));
    _exit(127);
  }
  to.Reset();
  auto text = ReadAll(from.get(), 1 << 20);
  int status = 0;
  waitpid(pid, &status, 0);
  EXPECT_TRUE(text.ok());
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << words[0] << ": " << status;
  return Parse(text.ok() ? *text : "");
}

class SandboxAttempt : public SandboxTest {
 protected:
  void Start(CreateRequest q = Request(), Layers layers = kAll, ServiceOptions o = {}) {
    layers_ = layers;
    q.mounts.push_back({kAttacker, "/opt/attacker"});
    o.janitor_fd = Janitors::Get(layers).service_fd();
    service_.reset();
    StartService(q, o);
  }
  ExecRequest Call(const Names& words, Role role = Role::kAgent, const std::string& id = "a") {
    ExecRequest e = Sh("", role, id);
    e.argv = {"/opt/attacker"};
    e.argv.insert(e.argv.end(), words.begin(), words.end());
    return e;
  }
  Report AttackBy(const ExecRequest& e) {
    ExecResult r = Run(e);
    Report report = Parse(r.out.bytes);
    report.result = std::move(r);
    return report;
  }
  Report Attack(const Names& words, Role role = Role::kAgent, const std::string& id = "a") {
    return AttackBy(Call(words, role, id));
  }
  std::future<Result<ExecResult>> InBackground(const ExecRequest& e) {
    auto done = std::make_shared<std::promise<Result<ExecResult>>>();
    auto future = done->get_future();
    service_->ExecAsync(e, [done](Result<ExecResult> r) { done->set_value(std::move(r)); });
    return future;
  }
  bool WaitFor(const std::string& script, const std::string& id = "a", Role role = Role::kAgent) {
    return Run(Sh("for i in $(seq 400); do if " + script + "; then echo yes; exit; fi; sleep 0.01; done", role, id)).out.bytes ==
           "yes\n";
  }

  // Whatever happened: the service makes, runs and removes sandboxes, and nothing of those before is left.
  void TearDown() override {
    if (!service_) return;
    // Without its own network the first sandbox holds names that a second one needs.
    if (layers_ == kNoNetwork) {
      EXPECT_TRUE(service_->Destroy("a").ok());
    }
    CreateRequest q = Request("after");
    auto made = service_->Create(q);
    EXPECT_TRUE(made.ok()) << made.status().ToString();
    EXPECT_EQ(Run(Sh("echo fine", Role::kAgent, "after")).out.bytes, "fine\n");
    const auto living = service_->List();
    for (const SandboxInfo& info : *living) {
      const double start = SystemClock::Get().NowS();
      EXPECT_TRUE(service_->Destroy(info.id).ok());
      EXPECT_LT(SystemClock::Get().NowS() - start, 5) << info.id;
    }
    EXPECT_TRUE(service_->List()->empty());
    EXPECT_EQ(Left(), "");
  }

  // Children of the janitor (the first process of each sandbox) and processes in the groups of sandboxes.
  std::string Left() {
    const Janitor& janitor = Janitors::Get(layers_);
    std::string left;
    for (const std::string& name : Entries("/proc")) {
      int64_t pid;
      if (!ParseInt(name, &pid)) continue;
      auto status = ReadFile("/proc/" + name + "/status", 65536), cgroup = ReadFile("/proc/" + name + "/cgroup", 65536);
      if (!status.ok() || !cgroup.ok() || HasSubstrOf(*status, "State:\tZ")) continue;
      if (HasSubstrOf(*status, "PPid:\t" + std::to_string(janitor.pid()) + "\n") ||
          HasSubstrOf(*cgroup, "/" + janitor.job_id() + "/s"))
        left += name + " ";
    }
    for (const Remain& r : FindRemains(RemainsQuery{janitor.job_id(), "", {}})) {
      if (r.kind != "process" && r.kind != "cgroup") left += r.kind + ": " + r.what + " ";
    }
    return left;
  }
  static bool HasSubstrOf(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

  static void ExpectAllowed(const Report& report, const Names& names) {
    for (const std::string& name : names)
      EXPECT_EQ(report[name], "ALLOWED") << "the control does not show that this can be done: " << name;
  }
  // Each name was tried and met one of these errors, and nothing at all was allowed.
  static void ExpectRefused(const Report& report, const Names& names, const Names& errors) {
    for (const std::string& name : names) EXPECT_THAT(errors, ::testing::Contains(report[name])) << name;
    EXPECT_THAT(report.Allowed(), ::testing::IsEmpty()) << report.text;
    EXPECT_EQ(report.result.outcome, ExecOutcome::kExited) << report.result.err.bytes;
  }
  Layers layers_ = kAll;
};

std::string Scratch(const std::string& name) {
  const std::string path = ::testing::TempDir() + "temper-attempt-" + std::to_string(getpid()) + "-" + name;
  EXPECT_TRUE(RemoveAll(path).ok());
  EXPECT_TRUE(MakeDirs(path).ok());
  return path;
}

// A child of the test that does nothing: somebody to attack outside.
class Victim {
 public:
  Victim() : pid_(fork()) {
    if (pid_ == 0) {
      for (;;) pause();
    }
  }
  ~Victim() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  std::string pid() const { return std::to_string(pid_); }
  bool Lives() const {
    siginfo_t info = {};
    return waitid(P_PID, static_cast<id_t>(pid_), &info, WNOHANG | WNOWAIT | WEXITED) == 0 && info.si_pid == 0;
  }

 private:
  pid_t pid_;
};

// --- what exhausts: refused at the limit, told, and gone with the sandbox ---

// A fork bomb may have 64 processes and not one more; 480 refusals later the next sandbox works.
TEST_F(SandboxAttempt, S01_ForkBomb) {
  CreateRequest q = Request();
  q.limits.processes = 300;
  Start(q);
  EXPECT_EQ(Attack({"forks", "200"}, Role::kTool).Count("made"), 200) << "the control";
  q.limits.processes = 64;
  Start(q);
  const Report report = Attack({"forks", "200"}, Role::kTool);
  EXPECT_LE(report.Count("made"), 63) << "with the attacker itself: 64";
  EXPECT_GE(report.Count("made"), 55);
  EXPECT_GE(report.Count("refused"), 480);
  EXPECT_EQ(report["error"], "EAGAIN");
  EXPECT_EQ(report.result.outcome, ExecOutcome::kExited);
  EXPECT_EQ(report.result.limit, "processes");
  // The shell's own, which never ends by itself. What is left of it is killed with a command that times out.
  EXPECT_EQ(Run("f() { f | f & }; f; sleep 0.3", Role::kTool).limit, "processes");
  ExecRequest e = Sh("sleep 60", Role::kTool);
  e.timeout_s = 0.1;
  // It needs a place to begin, which the bomb lets go of now and then.
  for (int tries = 0; Run(e).outcome != ExecOutcome::kTimeout; ++tries) ASSERT_LT(tries, 1000);
  EXPECT_EQ(Run("echo alive").out.bytes, "alive\n");
  // All places are taken by processes of other sessions when their command times out: they die too, and the next has theirs.
  // (A shell that cannot fork ends, and leaves one place.)
  e = Sh("(while :; do setsid sleep 60 & done); setsid sleep 60 & exec sleep 60", Role::kTool);
  e.timeout_s = 1;
  const ExecResult crowd = Run(e);
  EXPECT_EQ(crowd.outcome, ExecOutcome::kTimeout);
  EXPECT_THAT(crowd.err.bytes, HasSubstr("fork")) << "the control";
  EXPECT_EQ(Run("for i in $(seq 50); do sleep 0.1 & done; wait; echo alive").out.bytes, "alive\n");
}

// Threads and zombies count, and init takes the zombies of a parent that ended.
TEST_F(SandboxAttempt, S02_ThreadAndZombieBombs) {
  CreateRequest q = Request();
  q.limits.processes = 300;
  Start(q);
  for (const char* kind : {"threads", "zombies"}) EXPECT_EQ(Attack({kind, "200"}).Count("made"), 200) << "the control";
  q.limits.processes = 20;
  Start(q);
  for (const char* kind : {"threads", "zombies", "threads", "zombies"}) {
    const Report report = Attack({kind, "200"});
    // Fewer while the last ones are on their way out.
    EXPECT_LE(report.Count("made"), 19) << kind;
    EXPECT_GE(report.Count("made"), 10) << kind;
    EXPECT_EQ(report["error"], "EAGAIN") << kind;
    EXPECT_EQ(report.result.limit, "processes") << kind;
    // Twice: what the first left behind would be missing here.
    EXPECT_TRUE(WaitFor("[ $(ls -d /proc/[0-9]* | wc -l) -le 8 ]")) << kind;
  }
}

// Memory by touch, in a memfd, in shared memory, in files: all of it counts, and too much ends as `limit` memory.
TEST_F(SandboxAttempt, S03_MemoryBombs) {
  for (const char* kind : {"touch", "memfd", "shm", "tmpfs"}) {
    CreateRequest q = Request();
    q.limits.memory_bytes = 256 << 20;
    q.limits.disk_bytes = 200 << 20;
    Start(q);
    EXPECT_EQ(Attack({"memory", kind, "120"})["took"], "ALL") << "the control: " << kind;
    q.limits.memory_bytes = 64 << 20;
    Start(q);
    const Report report = Attack({"memory", kind, "120"});
    EXPECT_EQ(report.result.outcome, ExecOutcome::kLimit) << kind << report.text;
    EXPECT_EQ(report.result.limit, "memory") << kind;
    EXPECT_LE(report.result.usage.peak_bytes, 64 << 20) << kind;
    // The disk smaller than the memory: the full disk is what is met.
    if (std::string(kind) != "shm" && std::string(kind) != "tmpfs") continue;
    q.limits.disk_bytes = 16 << 20;
    Start(q);
    const Report full = Attack({"memory", kind, "120"});
    EXPECT_EQ(full["took"], "ENOSPC") << kind;
    EXPECT_EQ(full.result.outcome, ExecOutcome::kExited) << kind;
    EXPECT_EQ(full.result.limit, "disk") << kind;
  }
}

// One disk for /work, /tmp and /dev/shm; bytes, inodes, a sparse terabyte, a tree a hundred thousand folders deep, long names.
TEST_F(SandboxAttempt, S04_DiskAndInodeBombs) {
  CreateRequest q = Request();
  q.limits.memory_bytes = 512 << 20;
  q.limits.disk_bytes = 64 << 20;
  q.limits.files = 120000;
  Start(q);
  EXPECT_EQ(Attack({"fill", "/tmp/big", "30"}).Count("wrote"), 30) << "the control";
  EXPECT_EQ(Attack({"inodes", "/work", "1000"}).Count("made"), 1000) << "the control";
  Report report = Attack({"deep", "/work", "100000"});
  EXPECT_EQ(report.Count("made"), 100000);
  EXPECT_EQ(service_->Export("a", {}).status().code(), StatusCode::kResourceExhausted) << "too deep to return";
  const double start = SystemClock::Get().NowS();
  EXPECT_TRUE(service_->Destroy("a").ok());
  EXPECT_LT(SystemClock::Get().NowS() - start, 4) << "below 1 s where nothing else runs";

  q.limits.disk_bytes = 4 << 20;
  q.limits.files = 60;
  Start(q);
  for (const char* place : {"/work/big", "/tmp/big", "/dev/shm/big"}) {
    report = Attack({"fill", place, "30"});
    EXPECT_EQ(report["error"], "ENOSPC") << place;
    EXPECT_LE(report.Count("wrote"), 4) << place;
    EXPECT_EQ(report.result.limit, "disk") << place;
    Run(std::string("rm ") + place);
  }
  Attack({"fill", "/dev/shm/half", "3"});
  EXPECT_LE(Attack({"fill", "/work/half", "3"}).Count("wrote"), 1) << "one disk for all places";
  Run("rm /dev/shm/half /work/half");
  report = Attack({"inodes", "/work", "1000"});
  EXPECT_EQ(report.Count("made"), 60);
  EXPECT_EQ(report["error"], "ENOSPC");
  EXPECT_EQ(report.result.limit, "files");
  EXPECT_EQ(Run("echo still > f0").limit, "files");
  Run("rm -f /work/f*");
  EXPECT_EQ(Attack({"sparse", "/work/sparse"})["sparse"], "EFBIG");
  report = Attack({"names", "/tmp"});
  EXPECT_EQ(report["name of 255"], "ALLOWED");
  EXPECT_EQ(report["name of 256"], "ENAMETOOLONG");
  EXPECT_EQ(report["path of 4 KiB"], "ENAMETOOLONG");
}

// Output without end, in one line, on both streams in turn, on the other stream alone, after closing the first: read, counted,
// bounded, and the writer is never blocked.
TEST_F(SandboxAttempt, S05_EndlessOutput) {
  CreateRequest q = Request();
  q.limits.output_bytes = 1000;
  Start(q);
  constexpr uint64_t kMiB = 1 << 20;
  Report report = Attack({"flood", "line", "1024"});
  EXPECT_EQ(report.result.outcome, ExecOutcome::kExited);
  EXPECT_EQ(report.result.limit, "output");
  EXPECT_EQ(report.result.out.dropped, 1024 * kMiB - 1000);
  EXPECT_LT(report.result.out.bytes.size(), 1100u);
  report = Attack({"flood", "alternating", "8"});
  EXPECT_EQ(report.result.out.dropped, 8 * kMiB - 1000);
  EXPECT_EQ(report.result.err.dropped, 8 * kMiB - 1000);
  for (const char* kind : {"errors", "early"}) {
    report = Attack({"flood", kind, "8"});
    EXPECT_EQ(report.result.outcome, ExecOutcome::kExited) << kind;
    EXPECT_EQ(report.result.exit_code, 0) << kind;
    EXPECT_EQ(report.result.out.dropped, 0u) << kind;
    EXPECT_EQ(report.result.err.dropped, 8 * kMiB - 1000) << kind;
  }
  ExecResult r = Run("printf begin; head -c 20000 /dev/zero; printf end; head -c 999 /dev/zero >&2");
  EXPECT_EQ(r.out.bytes.substr(0, 5), "begin");
  EXPECT_EQ(r.out.bytes.substr(r.out.bytes.size() - 3), "end");
  EXPECT_EQ(r.err.dropped, 0u) << "the control: what fits is whole";
  ExecRequest e = Call({"flood", "endless"});
  e.timeout_s = 0.5;
  r = Run(e);
  EXPECT_EQ(r.outcome, ExecOutcome::kTimeout);
  EXPECT_GT(r.out.dropped, kMiB);
  EXPECT_LT(r.usage.wall_s, 2);
}

// --- what does not end ---

// Processes that ignore every signal that can be ignored, one of them stopped: the deadline ends them all.
TEST_F(SandboxAttempt, S06_StubbornProcesses) {
  const pid_t outside = fork();
  if (outside == 0) {
    execl(kAttacker, kAttacker, "stubborn", "1", nullptr);
    _exit(1);
  }
  SystemClock::Get().SleepS(0.1);
  kill(outside, SIGTERM);
  SystemClock::Get().SleepS(0.1);
  EXPECT_EQ(waitpid(outside, nullptr, WNOHANG), 0) << "the control: SIGTERM is ignored";
  kill(outside, SIGKILL);
  waitpid(outside, nullptr, 0);

  Start();
  for (Role role : {Role::kAgent, Role::kTool}) {
    const std::string seen = "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -q '[s]tubborn 5'";
    ExecRequest e = Call({"stubborn", "55"}, role);
    e.timeout_s = 0.5;
    auto ended = InBackground(e);
    EXPECT_TRUE(WaitFor(seen, "a", role)) << "the control: they are there";
    const auto r = ended.get();
    ASSERT_TRUE(r.ok());
    EXPECT_EQ(r->outcome, ExecOutcome::kTimeout);
    EXPECT_EQ(r->limit, "wall_s");
    // 50 ms where nothing else runs.
    EXPECT_LT(r->usage.wall_s, 1);
    EXPECT_TRUE(WaitFor("! " + seen, "a", role));
  }
}

// A daemon that forks twice, leaves the session, closes everything, ignores everything and takes another name.
TEST_F(SandboxAttempt, S07_Daemon) {
  CreateRequest q = Request();
  Start(q);
  const std::string mark = "-" + std::to_string(getpid() % 100000);
  auto alive = [&] {
    int count = 0;
    for (const std::string& name : Entries("/proc")) {
      auto comm = ReadFile("/proc/" + name + "/comm", 100);
      count += comm.ok() && *comm == "sshd" + mark + "\n";
    }
    return count;
  };
  Attack({"daemon", "/work/tick", mark}, Role::kTool);
  EXPECT_TRUE(WaitFor("[ -s tick ]"));
  EXPECT_EQ(alive(), 1) << "the control: it has outlived its command";
  const std::string a = Run("stat -c %s tick").out.bytes, b = Run("sleep 0.1; stat -c %s tick").out.bytes;
  EXPECT_NE(a, b) << "the control: it works on";
  // A command of the same user that times out takes it along; so does the end of the sandbox.
  ExecRequest e = Sh("sleep 60", Role::kTool);
  e.timeout_s = 0.1;
  Run(e);
  for (int i = 0; i < 200 && alive() > 0; ++i) SystemClock::Get().SleepS(0.01);
  EXPECT_EQ(alive(), 0);
  Run("rm tick");
  Attack({"daemon", "/work/tick", mark}, Role::kTool);
  EXPECT_TRUE(WaitFor("[ -s tick ]"));
  EXPECT_EQ(alive(), 1);
  EXPECT_TRUE(service_->Destroy("a").ok());
  EXPECT_EQ(alive(), 0);
}

// --- other processes ---

// Signals at init, at numbers that are processes outside, at everybody: they reach one's own processes only.
TEST_F(SandboxAttempt, S08_SignalsAtOthers) {
  {
    Victim victim;
    EXPECT_EQ(Outside({"signals", victim.pid()})["kill " + victim.pid() + " KILL"], "ALLOWED");
    SystemClock::Get().SleepS(0.05);
    EXPECT_FALSE(victim.Lives()) << "the control";
  }
  Victim victim;
  Start();
  auto agent = InBackground(Sh("echo $$ > pid; sleep 1; echo survived"));
  ASSERT_TRUE(WaitFor("[ -s pid ]"));
  const std::string pid(Trim(Run("cat pid").out.bytes)), self = std::to_string(getpid());
  Report report = Attack({"signals", "1", pid, victim.pid(), self}, Role::kTool);
  ExpectRefused(report, {"kill 1 KILL", "kill 1 STOP", "kill " + pid + " KILL"}, {"EPERM"});
  ExpectRefused(report, {"kill " + victim.pid() + " KILL", "kill " + self + " STOP", "kill group " + victim.pid()}, {"ESRCH"});
  EXPECT_TRUE(victim.Lives());
  report = Attack({"kill-all"}, Role::kTool);
  EXPECT_EQ(report["took its own child"], "ALLOWED") << "the control: kill(-1) kills what it may";
  auto r = agent.get();
  ASSERT_TRUE(r.ok());
  EXPECT_EQ(r->out.bytes, "survived\n") << "the agent is not the tool's";
  EXPECT_EQ(Attack({"signals", "1"})["kill 1 KILL"], "EPERM") << "nor is init the agent's";
}

// Tracing init, the agent, or a process outside; memory, descriptors.
TEST_F(SandboxAttempt, S09_TracingOthers) {
  const Names all = {"ptrace attach", "ptrace seize", "process_vm_writev", "process_vm_readv", "proc mem", "pidfd_getfd"};
  {
    Victim victim;
    ExpectAllowed(Outside({"trace", victim.pid()}), all);
  }
  Start();
  auto agent = InBackground(Sh("echo $$ > pid; sleep 0.5; echo survived"));
  ASSERT_TRUE(WaitFor("[ -s pid ]"));
  const std::string pid(Trim(Run("cat pid").out.bytes));
  for (const std::string& target : {std::string("1"), pid})
    ExpectRefused(Attack({"trace", target}, Role::kTool), all, {"EPERM", "ENOENT", "ESRCH"});
  ExpectRefused(Attack({"trace", "1"}), all, {"EPERM", "ENOENT", "ESRCH"});
  EXPECT_EQ(agent.get()->out.bytes, "survived\n");
}

// Environment, memory map, root, descriptors and program of init and of the agent; the program file of init.
TEST_F(SandboxAttempt, S10_ProcOfOthers) {
  const Names all = {"environ", "maps", "root", "exe", "cwd", "through root", "fd", "oom_score_adj"};
  {
    Victim victim;
    const std::string file = Scratch("init");
    ASSERT_TRUE(WriteFile(file + "/init", "x").ok());
    const Report report = Outside({"proc-of", victim.pid(), file + "/init"});
    ExpectAllowed(report, all);
    ExpectAllowed(report, {"write " + file + "/init", "replace " + file + "/init"});
    ASSERT_TRUE(RemoveAll(file).ok());
  }
  Start();
  ExecRequest e = Sh("echo $$ > pid; sleep 0.5; echo survived");
  e.env = {{"AGENT_KEY", "sesame"}};
  auto agent = InBackground(e);
  ASSERT_TRUE(WaitFor("[ -s pid ]"));
  const std::string pid(Trim(Run("cat pid").out.bytes));
  for (const std::string& target : {std::string("1"), pid}) {
    ExpectRefused(Attack({"proc-of", target, "/temper/init"}, Role::kTool), all, {"ENOENT", "EACCES", "EPERM"});
  }
  const Report report = Attack({"proc-of", "1", "/temper/init", "/temper/tool-exec", "/bin/sh"});
  ExpectRefused(report, all, {"ENOENT", "EACCES", "EPERM"});
  for (const char* file : {"/temper/init", "/temper/tool-exec", "/bin/sh"}) {
    EXPECT_THAT(report[std::string("write ") + file], AnyOf("EACCES", "EROFS", "ETXTBSY")) << file;
    EXPECT_THAT(report[std::string("replace ") + file], AnyOf("EACCES", "EROFS")) << file;
  }
  EXPECT_EQ(Attack({"proc-of", "self"})["environ"], "ALLOWED") << "the control: one's own";
  EXPECT_EQ(agent.get()->out.bytes, "survived\n");
}

// --- the kernel ---

// Settings of the machine, and what tells about it.
TEST_F(SandboxAttempt, S11_SettingsOfTheMachine) {
  const Report outside = Outside({"sysctl"});
  ExpectAllowed(outside, {"write /proc/sys/kernel/core_pattern", "write /proc/sys/vm/overcommit_memory", "read /proc/kallsyms",
                          "see /sys/kernel"});
  Start();
  for (Role role : {Role::kAgent, Role::kTool}) {
    const Report report = Attack({"sysctl"}, role);
    ExpectRefused(report,
                  {"write /proc/sys/kernel/core_pattern", "write /proc/sys/kernel/hostname",
                   "write /proc/sys/vm/overcommit_memory", "write /proc/sys/user/max_user_namespaces"},
                  {"EACCES", "EROFS"});
    for (const auto& [name, value] : outside.lines) EXPECT_NE(report[name], "(not tried)") << name;
    EXPECT_THAT(report["read /proc/kallsyms"], AnyOf("ENODATA", "EACCES"));
  }
}

// Mounts of every kind, old calls and new, by oneself or through a user namespace.
TEST_F(SandboxAttempt, S12_Mounts) {
  const Names all = {"mount tmpfs",  "mount proc", "bind over /etc", "remount / writable",
                     "umount /proc", "pivot_root", "chroot",         "fsopen",
                     "open_tree",    "move_mount", "mount_setattr",  "overlay in a nested user namespace"};
  const std::string folder = Scratch("mounts");
  ExpectAllowed(Outside({"mounts", folder}), all);
  ASSERT_TRUE(RemoveAll(folder).ok());
  Start();
  for (Role role : {Role::kAgent, Role::kTool}) ExpectRefused(Attack({"mounts", "/tmp"}, role), all, {"EPERM"});
  EXPECT_EQ(Run("touch /usr/x || touch /etc/x || touch /x || echo read-only").out.bytes, "read-only\n");
}

// New namespaces by unshare, clone and clone3; old ones by setns.
TEST_F(SandboxAttempt, S13_NestedNamespaces) {
  Names all;
  for (const char* call : {"unshare ", "clone ", "clone3 ", "setns "}) {
    for (const char* kind : {"user", "mnt", "pid", "net", "ipc", "uts", "cgroup"}) all.push_back(std::string(call) + kind);
  }
  ExpectAllowed(Outside({"namespaces", "1"}), all);
  Start();
  for (Role role : {Role::kAgent, Role::kTool}) ExpectRefused(Attack({"namespaces", "1"}, role), all, {"EPERM", "ENOSYS"});
}

// Devices, made or found.
TEST_F(SandboxAttempt, S14_Devices) {
  const std::string folder = Scratch("devices");
  const Report outside = Outside({"devices", folder});
  ExpectAllowed(outside, {"mknod character", "mknod block"});
  ASSERT_TRUE(RemoveAll(folder).ok());
  Start();
  for (Role role : {Role::kAgent, Role::kTool}) {
    const Report report = Attack({"devices", "/tmp"}, role);
    ExpectRefused(report, {"mknod character", "mknod block"}, {"EPERM"});
    for (const auto& [name, value] : outside.lines) {
      if (name.rfind("open ", 0) == 0) {
        EXPECT_THAT(report[name], AnyOf("ENOENT", "EACCES", "EPERM")) << name;
      }
    }
  }
  EXPECT_EQ(Run("ls /dev | tr '\\n' ' '").out.bytes, "fd full null random shm stderr stdin stdout urandom zero ");
}

// Set-user-id programs and programs with capabilities, brought in by a mount or made inside; users and capabilities asked for.
TEST_F(SandboxAttempt, S15_PrivilegeByPrograms) {
  const std::string folder = Scratch("programs");
  const std::string bytes = ReadFile(kAttacker, 64 << 20).value();
  for (const char* name : {"/suid", "/capable"}) {
    ASSERT_TRUE(WriteFile(folder + name, bytes).ok());
    ASSERT_EQ(chmod((folder + name).c_str(), name == std::string("/suid") ? 06755 : 0755), 0);
  }
  // cap_sys_admin+ep, version 2 of the attribute.
  const unsigned char capability[20] = {1, 0, 0, 2, 0, 0, 0x20, 0};
  ASSERT_EQ(setxattr((folder + "/capable").c_str(), "security.capability", capability, sizeof capability, 0), 0);
  // The control: an ordinary user gains by them outside.
  for (const char* name : {"/suid", "/capable"}) {
    const std::string out = folder + "/out";
    const pid_t pid = fork();
    if (pid == 0) {
      const int fd = open(out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
      dup2(fd, 1);
      if (setgid(65534) != 0 || setuid(65534) != 0) _exit(1);
      execl((folder + name).c_str(), "x", "whoami", nullptr);
      _exit(2);
    }
    waitpid(pid, nullptr, 0);
    const Report control = Parse(*ReadFile(out));
    if (name == std::string("/suid")) {
      EXPECT_EQ(control["euid"], "0") << "the control";
    }
    EXPECT_EQ(control["capabilities"], "SOME") << "the control: " << name;
  }
  CreateRequest q = Request();
  q.mounts = {{folder, "/opt/programs"}};
  Start(q);
  // The agent's own copy, for the tool to run.
  Run("cp /opt/attacker /work/mine && chmod 6755 /work/mine");
  for (Role role : {Role::kAgent, Role::kTool}) {
    const Report report =
        Attack({"privileges", "/opt/programs/suid", "/opt/programs/capable", "/work/mine", "/usr/bin/su"}, role);
    const std::string own = role == Role::kAgent ? "1000" : "1001";
    EXPECT_EQ(report["euid"], own);
    EXPECT_EQ(report["capabilities"], "none");
    EXPECT_THAT(report.text, ::testing::Not(HasSubstr("SOME")));
    EXPECT_THAT(report.text, ::testing::Not(HasSubstr(own == "1000" ? "euid 1001" : "euid 1000")));
    EXPECT_THAT(report.text, ::testing::Not(HasSubstr("euid 0")));
    ExpectRefused(report, {"setuid 0", own == "1000" ? "setuid 1001" : "setuid 1000", "setgid", "ambient", "capset"}, {"EPERM"});
    EXPECT_EQ(report["no_new_privs off"], "EINVAL");
    EXPECT_EQ(Run("grep -h NoNewPrivs /proc/self/status | cut -f2; for s in su sudo newuidmap mount; do $s -c id 2>/dev/null; "
                  "done; echo end",
                  role)
                  .out.bytes,
              "1\nend\n");
  }
  ASSERT_TRUE(RemoveAll(folder).ok());
}

// The keys of the session that started everything, of the user, of another sandbox.
TEST_F(SandboxAttempt, S16_Keyrings) {
  const Names all = {"session keyring", "user keyring", "persistent keyring", "join session", "add_key", "search", "request_key"};
  ExpectAllowed(Outside({"keys"}), all);
  Start();
  for (Role role : {Role::kAgent, Role::kTool}) ExpectRefused(Attack({"keys"}, role), all, {"EPERM", "ENOSYS"});
}

// --- network ---

// Socket families that lead to the machine rather than to a peer.
TEST_F(SandboxAttempt, S17_SocketFamilies) {
  const Names all = {"packet",
                     "alg",
                     "vsock",
                     "bluetooth",
                     "key",
                     "xdp",
                     "tipc",
                     "netlink nflog",
                     "netlink audit",
                     "netlink netfilter",
                     "netlink uevent",
                     "netlink generic",
                     "raw",
                     "raw6"};
  ExpectAllowed(Outside({"families"}), {"packet", "netlink uevent", "netlink generic", "raw", "raw6"});
  Start();
  for (Role role : {Role::kAgent, Role::kTool})
    ExpectRefused(Attack({"families"}, role), all, {"EAFNOSUPPORT", "EPERM", "EPROTONOSUPPORT"});
}

Fd AbstractListener(const std::string& name) {
  auto fd = ListenAbstract(name);
  EXPECT_TRUE(fd.ok()) << fd.status().ToString();
  return std::move(*fd);
}

// The host's loopback, the gateway's control plane, metadata services, names, link-local addresses, another sandbox.
TEST_F(SandboxAttempt, S18_NetworkAndAbstractSockets) {
  auto agent_plane = ListenTcp("127.0.0.1", 0), other = ListenTcp("127.0.0.1", 0);
  ASSERT_TRUE(agent_plane.ok() && other.ok());
  const std::string agent_port = std::to_string(*BoundPort(agent_plane->get())), port = std::to_string(*BoundPort(other->get()));
  const std::string control = "temper-attempt-control-" + std::to_string(getpid());
  Fd control_plane = AbstractListener(control);
  const std::string path = Scratch("socket") + "/s";
  Fd named(socket(AF_UNIX, SOCK_STREAM, 0));
  sockaddr_un un = {};
  un.sun_family = AF_UNIX;
  ASSERT_LT(path.size(), sizeof un.sun_path);
  path.copy(un.sun_path, path.size());
  ASSERT_EQ(bind(named.get(), reinterpret_cast<sockaddr*>(&un), sizeof un), 0);
  ASSERT_EQ(listen(named.get(), 1), 0);
  const Names there = {"tcp:127.0.0.1:" + port, "tcp:127.0.0.1:" + agent_port, "abstract:" + control, "unix:" + path};
  Names words = {"reach"};
  words.insert(words.end(), there.begin(), there.end());
  ExpectAllowed(Outside(words), there);

  const std::string inner = "temper-attempt-inner";
  words.insert(words.end(), {"tcp:169.254.169.254:80", "tcp:1.1.1.1:53", "udp:127.0.0.53:53", "udp:8.8.8.8:53", "tcp6:fe80::1:80",
                             "tcp6:::1:" + port, "tcp:127.0.0.1:9123", "abstract:" + inner, "tcp:10.0.0.1:80",
                             "abstract:" + Janitors::Get(kAll).job_id() + "-gateway"});
  CreateRequest q = Request();
  q.relay = true;
  ServiceOptions o;
  o.gateway_address = "127.0.0.1:" + agent_port;
  Start(q, kAll, o);
  CreateRequest neighbour = Request("b");
  neighbour.mounts = {{kAttacker, "/opt/attacker"}};
  ASSERT_TRUE(service_->Create(neighbour).ok());
  auto serving = InBackground(Call({"serve", "9123", inner}, Role::kAgent, "b"));
  for (int i = 0; i < 200 && Attack({"reach", "tcp:127.0.0.1:9123"}, Role::kAgent, "b").Allowed().empty(); ++i)
    SystemClock::Get().SleepS(0.01);
  ExpectAllowed(Attack({"reach", "tcp:127.0.0.1:9123", "abstract:" + inner}, Role::kTool, "b"),
                {"tcp:127.0.0.1:9123", "abstract:" + inner});
  for (Role role : {Role::kAgent, Role::kTool}) {
    const Report report = Attack(words, role);
    EXPECT_EQ(report.lines.size(), words.size() - 1);
    std::set<std::string> allowed = report.Allowed();
    // A datagram to one's own loopback is sent, and nobody hears it.
    allowed.erase("udp:127.0.0.53:53");
    EXPECT_THAT(allowed, ::testing::IsEmpty()) << report.text;
  }
  EXPECT_EQ(Attack({"reach", "tcp:127.0.0.1:8080"})["tcp:127.0.0.1:8080"], "ALLOWED") << "the agent plane is where it should be";
  EXPECT_TRUE(service_->Destroy("b").ok());
  EXPECT_TRUE(serving.get().ok());
  ASSERT_TRUE(RemoveAll(DirName(path)).ok());
}

// --- what could be inherited ---

// The service's process has 200 files open.
TEST_F(SandboxAttempt, S20_InheritedDescriptors) {
  const Report outside = Outside({"descriptors"});
  EXPECT_GT(outside.text.size(), 3u * kLeakedDescriptors) << "the control: a child that nobody cleans has them";
  Start();
  for (Role role : {Role::kAgent, Role::kTool}) {
    EXPECT_EQ(Attack({"descriptors"}, role).text, "open: 0 1 2\n");
    ExecRequest e = Call({"descriptors"}, role);
    e.capture_fd3 = true;
    EXPECT_EQ(AttackBy(e).text, "open: 0 1 2 3\n");
  }
  EXPECT_EQ(Run("$TEMPER_TOOL_EXEC /opt/attacker descriptors").out.bytes, "open: 0 1 2\n");
}

// A key in the environment of the service: not in any environment, command line or file inside.
TEST_F(SandboxAttempt, S21_SecretsOfTheService) {
  EXPECT_EQ(Outside({"search", kSecretHalf, kOtherHalf})["in the environment"], "ALLOWED") << "the control";
  Start();
  for (Role role : {Role::kAgent, Role::kTool}) {
    const Report report =
        Attack({"search", kSecretHalf, kOtherHalf, "/etc", "/work", "/tmp", "/dev/shm", "/temper", "/opt", "/run"}, role);
    EXPECT_EQ(report["searched"], "ALL");
    EXPECT_THAT(report.Allowed(), ::testing::IsEmpty()) << report.text;
  }
  ExecRequest e = Call({"search", kSecretHalf, kOtherHalf});
  e.env = {{"X", std::string(kSecretHalf) + kOtherHalf}};
  EXPECT_EQ(AttackBy(e)["in the environment"], "ALLOWED") << "the control: it would be found";
  EXPECT_THAT(Run("env | cut -d= -f1 | sort | tr '\\n' ' '").out.bytes, "HOME LANG PATH PWD TEMPER_TOOL_EXEC ");
  EXPECT_EQ(Run("cat /proc/self/cgroup | grep -c temper; hostname").out.bytes, "0\nsandbox\n");
}

// Keystrokes for the terminal of whoever started this.
TEST_F(SandboxAttempt, S22_TerminalInjection) {
  const Report outside = Outside({"terminal", "own"}, {});
  ExpectAllowed(outside, {"TIOCSTI", "TIOCSTI with high bits", "TIOCLINUX", "controlling terminal", "new terminal"});
  Start();
  for (Role role : {Role::kAgent, Role::kTool}) {
    const Report report = Attack({"terminal"}, role);
    // EPERM and not ENOTTY: refused before anybody looks what the descriptor is.
    ExpectRefused(report, {"TIOCSTI", "TIOCSTI with high bits", "TIOCLINUX", "TIOCLINUX with high bits"}, {"EPERM"});
    ExpectRefused(report, {"controlling terminal", "new terminal"}, {"ENXIO", "ENOENT"});
  }
}

// Parts of the kernel that have been the way out before.
TEST_F(SandboxAttempt, S23_KernelInterfaces) {
  const Names all = {"io_uring", "userfaultfd", "bpf", "perf", "memfd_secret", "fanotify", "name_to_handle"};
  ExpectAllowed(Outside({"interfaces", "/etc/passwd"}), {"userfaultfd", "bpf", "perf", "fanotify", "name_to_handle"});
  Start();
  for (Role role : {Role::kAgent, Role::kTool})
    ExpectRefused(Attack({"interfaces", "/etc/passwd"}, role), all, {"EPERM", "ENOSYS"});
}

// The clock, the name, the personality, ports, and calls of a foreign architecture.
TEST_F(SandboxAttempt, S24_ClockNamesAndForeignCalls) {
  const Names refused = {"clock_settime", "settimeofday", "sethostname", "personality", "iopl", "ioperm", "modify_ldt"};
  const Report outside = Outside({"machine"});
  ExpectAllowed(outside, {"clock_settime", "settimeofday", "sethostname", "personality", "modify_ldt"});
  Start();
  for (Role role : {Role::kAgent, Role::kTool}) {
    const Report report = Attack({"machine"}, role);
    ExpectRefused(report, refused, {"EPERM"});
    // A kernel that has no such calls kills with another signal.
    EXPECT_EQ(report["int 0x80"], outside["int 0x80"] == "ALLOWED" ? "SIGSYS" : "SIGNAL");
  }
}

// --- files that come back ---

// Links out of the work folder, in both directions, and folders exchanged for links during the transfer.
TEST_F(SandboxAttempt, S25_LinksOutOfTheWorkFolder) {
  Start();
  Run("ln -s /etc/passwd abs; ln -s ../../../etc rel; ln -s /proc/self/root magic; mkdir d; ln -s .. d/up; echo x > d/file; "
      "chmod 4755 d/file");
  auto files = service_->Export("a", {});
  ASSERT_TRUE(files.ok()) << files.status().ToString();
  std::string seen;
  for (const File& f : *files) {
    seen += f.path + (f.kind == File::Kind::kLink ? "->" + f.bytes : f.kind == File::Kind::kFolder ? "/" : "") + " ";
    if (f.path == "d/file") {
      EXPECT_EQ(f.mode, 0755u) << "set-user-id does not come back";
    }
  }
  EXPECT_EQ(seen, "abs->/etc/passwd d/ d/file d/up->.. magic->/proc/self/root rel->../../../etc ");
  for (const char* path : {"abs/x", "rel/passwd", "d/up/hole", "magic/etc/passwd", "../etc/passwd", "/etc/passwd"}) {
    EXPECT_EQ(service_->Export("a", {path}).status().code(), StatusCode::kInvalidArgument) << path;
  }
  EXPECT_EQ(service_->Export("a", {"abs"})->at(0).bytes, "/etc/passwd") << "a link is its words";
  EXPECT_EQ(Run("cat rel/hostname").out.bytes, "sandbox\n") << "the control: links lead somewhere inside";

  // In: through a link, over a link, above the folder.
  CreateRequest q = Request("in");
  for (const auto& bad : std::vector<std::vector<File>>{{{"out", "/etc", 0777, File::Kind::kLink}, {"out/passwd", "x"}},
                                                        {{"l", "/tmp/x", 0777, File::Kind::kLink}, {"l", "x"}},
                                                        {{"../x", "x"}},
                                                        {{"/etc/x", "x"}},
                                                        {{"d/../../x", "x"}}}) {
    q.files = bad;
    EXPECT_THAT(service_->Create(q).status().code(), AnyOf(StatusCode::kInvalidArgument, StatusCode::kAlreadyExists))
        << bad.back().path;
  }

  // A hundred thousand exchanges of a folder and a link to /etc.
  q = Request();
  q.files = {{"a/passwd", "inside"}, {"b", "/etc", 0777, File::Kind::kLink}, {"c/f", "inside"}};
  Start(q);
  auto racing = InBackground(Call({"race", "a", "b", "100000"}));
  int seen_inside = 0, rounds = 0;
  for (; racing.wait_for(std::chrono::seconds(0)) != std::future_status::ready; ++rounds) {
    auto all = service_->Export("a", {});
    for (const File& f : all.ok() ? *all : std::vector<File>()) {
      if (f.kind != File::Kind::kRegular) continue;
      EXPECT_EQ(f.bytes, "inside") << f.path;
      ++seen_inside;
    }
    auto one = service_->Export("a", {"a/passwd"});
    if (one.ok()) {
      EXPECT_EQ((*one)[0].bytes, "inside");
    }
  }
  EXPECT_EQ(Parse(racing.get()->out.bytes).Count("exchanged"), 100000);
  EXPECT_GT(rounds, 20);
  EXPECT_GT(seen_inside, 20);

  // The control: who opens by name in the same race reads the host's file sooner or later; TakeFiles never does.
  const std::string folder = Scratch("race");
  ASSERT_TRUE(MakeDirs(folder + "/a").ok());
  ASSERT_TRUE(WriteFile(folder + "/a/passwd", "inside").ok());
  ASSERT_EQ(symlink("/etc", (folder + "/b").c_str()), 0);
  const pid_t racer = fork();
  if (racer == 0) {
    if (chdir(folder.c_str()) != 0) _exit(1);
    execl(kAttacker, kAttacker, "race", "a", "b", "100000000", nullptr);
    _exit(1);
  }
  Fd fd(open(folder.c_str(), O_RDONLY | O_DIRECTORY));
  int led_out = 0;
  for (int i = 0; i < 20000 && led_out == 0; ++i) {
    auto naive = ReadFile(folder + "/a/passwd", 1 << 20);
    led_out += naive.ok() && *naive != "inside";
    auto one = TakeFiles(fd.get(), {"a/passwd"});
    if (one.ok()) {
      EXPECT_EQ((*one)[0].bytes, "inside");
    }
  }
  EXPECT_GT(led_out, 0) << "the control";
  kill(racer, SIGKILL);
  waitpid(racer, nullptr, 0);
  ASSERT_TRUE(RemoveAll(folder).ok());
}

// Pipes, sockets, folders and files that grow and shrink while they are read.
TEST_F(SandboxAttempt, S26_OutputsThatAreNoFiles) {
  Start();
  EXPECT_EQ(Run("mkfifo pipe; mkdir folder; truncate -s 1000 hole; python3 -c \"import socket; "
                "socket.socket(socket.AF_UNIX).bind('sock')\";"
                "stat -c '%F' pipe sock folder")
                .out.bytes,
            "fifo\nsocket\ndirectory\n")
      << "the control: they are there";
  double start = SystemClock::Get().NowS();
  auto files = service_->Export("a", {});
  ASSERT_TRUE(files.ok()) << files.status().ToString();
  std::string seen;
  for (const File& f : *files) seen += f.path + " ";
  EXPECT_EQ(seen, "folder hole ");
  EXPECT_EQ(files->back().bytes, std::string(1000, '\0'));
  for (const char* path : {"pipe", "sock"})
    EXPECT_EQ(service_->Export("a", {path}).status().code(), StatusCode::kNotFound) << path;
  EXPECT_LT(SystemClock::Get().NowS() - start, 2) << "a pipe that nobody writes holds nobody";

  ExecRequest e = Call({"restless", "/work/restless"});
  e.timeout_s = 1.5;
  auto growing = InBackground(e);
  std::set<size_t> sizes;
  start = SystemClock::Get().NowS();
  int rounds = 0;
  for (; growing.wait_for(std::chrono::seconds(0)) != std::future_status::ready; ++rounds) {
    auto one = service_->Export("a", {"restless", 4 << 20, 10});
    if (one.ok()) {
      sizes.insert((*one)[0].bytes.size());
      EXPECT_LE((*one)[0].bytes.size(), size_t{4} << 20);
    } else {
      EXPECT_THAT(one.status().code(), AnyOf(StatusCode::kResourceExhausted, StatusCode::kNotFound));
    }
  }
  EXPECT_EQ(growing.get()->outcome, ExecOutcome::kTimeout);
  EXPECT_GT(sizes.size(), 1u) << "the control: it changed while it was read";
  EXPECT_GT(rounds, 5);
  EXPECT_LT(SystemClock::Get().NowS() - start, 5);
}

// Names with a newline, with bytes that are no UTF-8, with a leading dash, with 255 bytes: the same in and out.
TEST_F(SandboxAttempt, S28_OddFileNames) {
  const Names odd = {"-rf", " ", "a\nb", "\xff\xfe", std::string(255, 'n'), "...", "\t", "*", "$(id)", "\x01", "d\\e", "'\""};
  CreateRequest q = Request();
  for (const std::string& name : odd) q.files.push_back({name, "of " + name});
  Start(q);
  auto back = [&](const std::string& suffix) {
    auto files = service_->Export("a", {});
    EXPECT_TRUE(files.ok()) << files.status().ToString();
    std::map<std::string, std::string> found;
    for (const File& f : *files) found[f.path] = f.bytes;
    for (const std::string& name : odd) {
      if (name.size() + suffix.size() > 255) continue;
      EXPECT_EQ(found.count(name + suffix), 1u) << name;
      EXPECT_EQ(found[name + suffix], "of " + name) << name;
    }
    return found.size();
  };
  EXPECT_EQ(back(""), odd.size());
  ExecResult r = Python(
      "import os\nfor n in os.listdir(b'.'):\n  if len(n) < 250: open(n + b'2', 'wb').write(open(n, "
      "'rb').read())\nprint(len(os.listdir(b'.')))");
  EXPECT_EQ(r.out.bytes, std::to_string(2 * odd.size() - 1) + "\n") << r.err.bytes;
  EXPECT_EQ(back("2"), 2 * odd.size() - 1);
  for (const std::string& name : {std::string("."), std::string(".."), std::string(256, 'n'), std::string("a\0b", 3)}) {
    CreateRequest bad = Request("b");
    bad.files = {{name, "x"}};
    EXPECT_EQ(service_->Create(bad).status().code(), StatusCode::kInvalidArgument) << name;
  }
}

// Crashes by the hundred: no core file anywhere.
TEST_F(SandboxAttempt, S29_CrashStormAndCoreFiles) {
  auto pattern = ReadFile("/proc/sys/kernel/core_pattern", 4096);
  ASSERT_TRUE(pattern.ok());
  const std::string folder = Scratch("cores");
  const pid_t pid = fork();
  if (pid == 0) {
    if (chdir(folder.c_str()) != 0) _exit(1);
    const int null = open("/dev/null", O_WRONLY);
    dup2(null, 1);
    execl(kAttacker, kAttacker, "crashes", "1", nullptr);
    _exit(1);
  }
  waitpid(pid, nullptr, 0);
  // A pattern that names a program or another folder puts them elsewhere.
  if (pattern->find_first_of("|/") == std::string::npos) {
    EXPECT_EQ(ListDir(folder)->size(), 1u) << "the control";
  }
  ASSERT_TRUE(RemoveAll(folder).ok());
  Start();
  for (Role role : {Role::kAgent, Role::kTool}) {
    const Report report = Attack({"crashes", "200"}, role);
    EXPECT_EQ(report.Count("died"), 200);
    EXPECT_EQ(report["core size"], "EPERM");
    EXPECT_EQ(report["dumped"], "(not tried)");
  }
  EXPECT_EQ(Run("ls -A /work /tmp /dev/shm").out.bytes, "/dev/shm:\n\n/tmp:\n\n/work:\n");
}

// 64 threads that compute, and every way to be preferred.
TEST_F(SandboxAttempt, S30_ProcessorHog) {
  const Names all = {"SCHED_FIFO", "SCHED_RR", "nice -10", "I/O class real time"};
  ExpectAllowed(Outside({"priorities"}), all);
  CreateRequest q = Request();
  q.limits.processes = 80;
  q.limits.cpu_s = 0.3;
  Start(q);
  for (Role role : {Role::kAgent, Role::kTool}) ExpectRefused(Attack({"priorities"}, role), all, {"EPERM", "EACCES"});
  ExecRequest e = Sh("taskset -c 0 nice -n -20 /opt/attacker hog 64 & /opt/attacker hog 64 & wait");
  ExecResult r = Run(e);
  EXPECT_EQ(r.outcome, ExecOutcome::kLimit);
  EXPECT_EQ(r.limit, "cpu_s");
  EXPECT_LT(r.usage.cpu_s, 1.2) << "of the whole sandbox";
  q.limits.cpu_s = 0;
  q.limits.wall_s = 0.8;
  Start(q);
  r = Run(Call({"hog", "64"}));
  EXPECT_EQ(r.outcome, ExecOutcome::kTimeout) << "the control: it never ends by itself";
  EXPECT_GT(r.usage.cpu_s, 0.3);
}

// Kernel objects that are counted by user: what one sandbox takes is not missing in another, nor outside.
TEST_F(SandboxAttempt, S31_KernelObjects) {
  CreateRequest q = Request();
  q.limits.memory_bytes = 512 << 20;
  q.limits.wall_s = 60;
  Start(q);
  CreateRequest other = q;
  other.id = "b";
  other.mounts = {{kAttacker, "/opt/attacker"}};
  ASSERT_TRUE(service_->Create(other).ok());
  // More than the machine has for one user would mean that there is no bound.
  for (const auto& [kind, most] :
       {std::pair("inotify", 100000), {"epoll", 2000000}, {"pipes", 2000000}, {"semaphores", 100000}, {"mqueue", 100000}}) {
    auto holding = InBackground(Call({"exhaust", kind, std::to_string(most), std::string("/work/") + kind}));
    EXPECT_TRUE(WaitFor(std::string("[ -d ") + kind + " ]"));
    const Report elsewhere = Attack({"exhaust", kind, "5"}, Role::kAgent, "b");
    EXPECT_EQ(elsewhere.Count(std::string(kind) + " made"), 5) << elsewhere.text;
    EXPECT_EQ(Outside({"exhaust", kind, "5"}, {}).Count(std::string(kind) + " made"), 5) << kind << " are missing outside";
    ExecRequest e = Sh("sleep 60");
    e.timeout_s = 0.05;
    Run(e);  // takes the holder along
    auto r = holding.get();
    ASSERT_TRUE(r.ok());
    const Report report = Parse(r->out.bytes);
    EXPECT_GE(report.Count(std::string(kind) + " made"), 5) << "the control: it took some. " << report.text;
    EXPECT_LT(report.Count(std::string(kind) + " made"), most);
    EXPECT_THAT(report[std::string(kind) + " then"], AnyOf("EMFILE", "ENFILE", "ENOSPC", "ENOMEM")) << kind;
  }
  EXPECT_EQ(Attack({"exhaust", "terminals", "5"})["terminals then"], "ENOENT");
}

// --- the layers ---

// With a layer away, the attempts that it holds succeed: the tests above would turn red.
TEST_F(SandboxAttempt, S39_EachLayerHoldsSomething) {
  const std::string folder = Scratch("layers");
  // Readable by user 1000 of the machine, whom the sandbox's agent must not be.
  ASSERT_TRUE(WriteFile(folder + "/of-user-1000", "private").ok());
  ASSERT_EQ(chmod(folder.c_str(), 0755) | chown((folder + "/of-user-1000").c_str(), 1000, 1000) |
                chmod((folder + "/of-user-1000").c_str(), 0400),
            0);
  auto listening = ListenTcp("127.0.0.1", 0);
  ASSERT_TRUE(listening.ok());
  const std::string tcp = "tcp:127.0.0.1:" + std::to_string(*BoundPort(listening->get()));
  const std::string name = "temper-attempt-layers-" + std::to_string(getpid());
  Fd abstract = AbstractListener(name);

  // Name of an attempt -> allowed.
  auto suite = [&](Layers layers) {
    CreateRequest q = Request();
    q.mounts = {{folder, "/opt/folder"}};
    Start(q, layers);
    std::set<std::string> allowed;
    auto add = [&](const Report& report) {
      for (const std::string& n : report.Allowed()) allowed.insert(n);
    };
    add(Attack({"keys"}));
    add(Attack({"namespaces", "1"}));
    add(Attack({"mounts", "/tmp"}));
    add(Attack({"interfaces", "/etc/passwd"}));
    add(Attack({"terminal"}));
    add(Attack({"families"}));
    add(Attack({"machine"}));
    add(Attack({"trace", "1"}));
    add(Attack({"sysctl"}));
    add(Attack({"proc-of", "1", "/temper/init"}));
    add(Attack({"reach", tcp, "abstract:" + name}));
    if (Run("cat /opt/folder/of-user-1000").out.bytes == "private") allowed.insert("file of user 1000");
    if (Run("cat /proc/self/uid_map").out.bytes.find("4294967295") != std::string::npos) allowed.insert("host's users");
    TearDown();
    service_.reset();
    return allowed;
  };
  using ::testing::Contains;
  EXPECT_THAT(suite(kAll), ::testing::IsEmpty());
  const std::set<std::string> no_seccomp = suite(kNoSeccomp);
  for (const char* held :
       {"session keyring", "add_key", "unshare user", "clone user", "clone3 user", "overlay in a nested user namespace",
        "TIOCLINUX", "netlink generic", "netlink uevent", "personality", "modify_ldt", "io_uring"}) {
    if (held == std::string("io_uring") && Outside({"interfaces", "/etc"})["io_uring"] != "ALLOWED") continue;
    EXPECT_THAT(no_seccomp, Contains(held));
  }
  for (const char* other_layer : {"file of user 1000", "host's users", tcp.c_str()})
    EXPECT_THAT(no_seccomp, ::testing::Not(Contains(other_layer)));
  EXPECT_THAT(suite(kNoUsers), ::testing::UnorderedElementsAre("file of user 1000", "host's users"));
  EXPECT_THAT(suite(kNoNetwork), ::testing::UnorderedElementsAre(tcp, "abstract:" + name));
  ASSERT_TRUE(RemoveAll(folder).ok());
}

// --- what `enforced` says ---

// Field by field: what is said to hold a limit is there and holds it.
TEST_F(SandboxAttempt, EnforcedTellsTheTruth) {
  for (Layers layers : {kAll, kNoCgroups}) {
    CreateRequest q = Request();
    q.limits = {.memory_bytes = 96 << 20,
                .processes = 30,
                .disk_bytes = 4 << 20,
                .files = 50,
                .cpu_s = 1,
                .wall_s = 8,
                .output_bytes = 1000};
    Start(q, layers);
    const bool none = enforced_.memory != "cgroup";
    if (layers == kNoCgroups) {
      EXPECT_TRUE(none);
    }
    const std::string held = none ? "rlimit" : "cgroup";
    EXPECT_EQ(enforced_.memory, held);
    EXPECT_EQ(enforced_.processes, held);
    EXPECT_THAT(enforced_.cpu_s, none ? AnyOf("rlimit", "rlimit") : AnyOf("cgroup", "rlimit"));
    EXPECT_EQ(enforced_.disk, "tmpfs");
    EXPECT_EQ(enforced_.files, "tmpfs");
    EXPECT_EQ(enforced_.wall_s, "timer");
    EXPECT_EQ(enforced_.output, "capture");

    // Groups of this job are there if and only if they are said to be, with these limits.
    std::string groups, limits;
    for (const Remain& r : FindRemains(RemainsQuery{Janitors::Get(layers).job_id(), "", {}})) {
      if (r.kind != "cgroup") continue;
      groups += r.what + " ";
      for (const std::string& sub : Entries(r.what)) {
        for (const char* file : {"memory.limit_in_bytes", "memory.max", "pids.max"}) {
          auto text = ReadFile(r.what + "/" + sub + "/" + file, 100);
          if (text.ok()) limits += std::string(Trim(*text)) + " ";
        }
      }
    }
    if (none) {
      EXPECT_EQ(groups, "");
    } else {
      EXPECT_THAT(limits, HasSubstr(std::to_string(96 << 20)));
      EXPECT_THAT(limits, HasSubstr("31 ")) << "with the init";
    }

    Report report = Attack({"memory", "touch", "300"});
    if (none) {
      EXPECT_EQ(report["took"], "ENOMEM") << "a limit on the address space";
    } else {
      EXPECT_EQ(report.result.limit, "memory");
    }
    EXPECT_EQ(Attack({"memory", "touch", "40"})["took"], "ALL") << "the control";
    report = Attack({"forks", "100"});
    EXPECT_LE(report.Count("made"), 30);
    EXPECT_GE(report.Count("made"), 25);
    EXPECT_EQ(report["error"], "EAGAIN");
    EXPECT_EQ(Attack({"fill", "/work/big", "30"})["error"], "ENOSPC");
    Run("rm /work/big");
    EXPECT_EQ(Attack({"inodes", "/work", "1000"}).Count("made"), 50);
    Run("rm -f /work/f*");
    EXPECT_EQ(Attack({"flood", "line", "1"}).result.limit, "output");
    ExecRequest e = Call({"stubborn", "2"});
    e.timeout_s = 0.2;
    EXPECT_EQ(Run(e).limit, "wall_s");
    ExecResult r = Run(Call({"hog", "2"}));
    EXPECT_EQ(r.outcome, ExecOutcome::kLimit);
    EXPECT_EQ(r.limit, "cpu_s");
    TearDown();
    service_.reset();
  }
}

// The same where parts of the hierarchies are not mounted, as in a container: by the door, in a mount namespace of its own.
TEST(SandboxEnforced, FollowsWhatIsMounted) {
  auto mounts = ReadFile("/proc/self/mountinfo", 16 << 20), own = ReadFile("/proc/self/cgroup", 1 << 20);
  const CgroupBases bases = ParseCgroupBases(*mounts, *own);
  auto enforced = [](const std::string& script) {
    const std::string command =
        "unshare -m --propagation private sh -c '" + script + " " TEMPER_BUILD_DIR "/temper sandbox run -- true' 2>&1";
    FILE* p = popen(command.c_str(), "r");
    std::string text;
    for (int c; (c = fgetc(p)) != EOF;) text += static_cast<char>(c);
    pclose(p);
    const size_t at = text.find("\"enforced\"");
    return at == std::string::npos ? text : text.substr(at);
  };
  const std::string all_gone = "umount -R /sys/fs/cgroup;";
  EXPECT_THAT(
      enforced(all_gone),
      HasSubstr(R"("memory":"rlimit","processes":"rlimit","disk":"tmpfs","files":"tmpfs","cpu_s":"rlimit","wall_s":"timer")"));
  // Mounted and not writable, as a container has it.
  EXPECT_THAT(enforced("for m in $(grep cgroup /proc/mounts | cut -d\" \" -f2); do mount -o remount,bind,ro $m; done;"),
              HasSubstr(R"("memory":"rlimit","processes":"rlimit","disk":"tmpfs","files":"tmpfs","cpu_s":"rlimit")"));
  if (!bases.v1_memory.empty() && !bases.v1_pids.empty()) {
    const std::string now = enforced("");
    EXPECT_THAT(now, HasSubstr(R"("memory":"cgroup","processes":"cgroup")"));
    if (!bases.v2.empty()) {
      EXPECT_THAT(now, HasSubstr(R"("cpu_s":"cgroup")"));
      // Processor time is the part of version 2: without it the others still hold.
      EXPECT_THAT(enforced("umount " + bases.v2 + ";"),
                  HasSubstr(R"("memory":"cgroup","processes":"cgroup","disk":"tmpfs","files":"tmpfs","cpu_s":"rlimit")"));
    }
    // One of the two is not enough.
    EXPECT_THAT(enforced("umount /sys/fs/cgroup/pids;"), HasSubstr(R"("memory":"rlimit","processes":"rlimit")"));
  }
}

}  // namespace
}  // namespace temper::sandbox
