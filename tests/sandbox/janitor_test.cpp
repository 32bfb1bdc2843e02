// The janitor: whatever ends, and however, nothing remains. Each test forks an owner of its own, because an owner must be
// single-threaded when it forks its janitor and because it is to be killed.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <functional>
#include <optional>
#include <thread>

#include "common/clock.h"
#include "common/file.h"
#include "common/strings.h"
#include "sandbox/janitor.h"
#include "sandbox/remains.h"
#include "sandbox/service.h"

namespace temper::sandbox {
namespace {

JanitorOptions Options(CgroupMode mode = CgroupMode::kAuto) {
  JanitorOptions o;
  o.init_path = TEMPER_BUILD_DIR "/temper-sandbox-init";
  o.cgroups = mode;
  return o;
}

std::string Show(const std::vector<Remain>& remains) {
  std::string text;
  for (const Remain& r : remains) text += r.kind + ": " + r.what + "\n";
  return text;
}

// Seconds that only the sleepers of this test binary sleep; the same in the processes that it forks.
const std::string kMark = "9" + std::to_string(getpid());

std::vector<pid_t> Sleepers() {
  std::vector<pid_t> found;
  const std::string command = std::string("sleep\0", 6) + kMark + std::string("\0", 1);
  auto names = ListDir("/proc");
  for (const std::string& name : names.value()) {
    int64_t pid;
    if (!ParseInt(name, &pid)) continue;
    auto text = ReadFile("/proc/" + name + "/cmdline", 65536);
    if (text.ok() && *text == command) found.push_back(static_cast<pid_t>(pid));
  }
  return found;
}

// A process that runs `body`, which sends a line with Say() when it is where the test wants it.
class Owner {
 public:
  explicit Owner(std::function<void(Owner&)> body) {
    int ends[2];
    EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
    read_ = Fd(ends[0]);
    write_ = Fd(ends[1]);
    pid_ = fork();
    if (pid_ == 0) {
      read_.Reset();
      body(*this);
      _exit(0);
    }
    write_.Reset();
  }
  ~Owner() { Kill(); }
  void Say(std::string line) {
    std::replace(line.begin(), line.end(), '\n', ' ');
    Status told = WriteAll(write_.get(), line + "\n");
    if (!told.ok()) _exit(9);
  }
  std::string Hear() {
    std::string line;
    char c;
    while (read(read_.get(), &c, 1) == 1 && c != '\n') line += c;
    return line;
  }
  void Kill() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  int Wait() {
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = 0;
    return status;
  }

 private:
  pid_t pid_ = 0;
  Fd read_, write_;
};

#define OWNER_CHECK(cond) \
  if (!(cond)) owner.Say(std::string("failed: " #cond " line ") + std::to_string(__LINE__))

// Two sandboxes in which commands and daemons run: four sleepers.
void FillSandboxes(Owner& owner, const Janitor& janitor) {
  ServiceOptions so;
  so.janitor_fd = janitor.service_fd();
  auto* service = LocalSandboxService::Start(so)->release();
  for (const char* id : {"a", "b"}) {
    CreateRequest q;
    q.id = id;
    OWNER_CHECK(service->Create(q).ok());
    ExecRequest e;
    e.id = id;
    e.argv = {"sh", "-c", "trap '' TERM; (setsid sleep " + kMark + " &) ; sleep " + kMark + "; true"};
    service->ExecAsync(e, [](Result<ExecResult>) {});
  }
  for (int i = 0; i < 500 && Sleepers().size() < 6; ++i) SystemClock::Get().SleepS(0.02);
}

// A janitor with an enrolled process that has a detached child: two sleepers. With `sandboxes`: six.
Janitor* Busy(Owner& owner, CgroupMode mode, bool sandboxes = true) {
  auto forked = ForkJanitor(Options(mode));
  if (!forked.ok()) {
    owner.Say("failed: " + forked.status().ToString());
    _exit(1);
  }
  auto* janitor = new Janitor(std::move(*forked));
  pid_t pid = fork();
  if (pid == 0) {
    raise(SIGSTOP);  // a child born before the enrolment would not be part of it
    const std::string script = "setsid sleep " + kMark + " & exec sleep " + kMark;
    execlp("sh", "sh", "-c", script.c_str(), nullptr);
    _exit(1);
  }
  waitpid(pid, nullptr, WUNTRACED);
  OWNER_CHECK(janitor->Enroll(pid).ok());
  kill(pid, SIGCONT);
  if (sandboxes) FillSandboxes(owner, *janitor);
  return janitor;
}

RemainsQuery Of(const std::string& job_id) {
  RemainsQuery q;
  q.job_id = job_id;
  return q;
}

class JanitorModes : public ::testing::TestWithParam<CgroupMode> {};
INSTANTIATE_TEST_SUITE_P(Modes, JanitorModes, ::testing::Values(CgroupMode::kAuto, CgroupMode::kNone));

// What could go wrong: kill -9 of the owner leaves sandboxes, enrolled processes or cgroups.
TEST_P(JanitorModes, KilledOwnerLeavesNothing) {
  Owner owner([](Owner& o) {
    o.Say(Busy(o, GetParam())->job_id());
    pause();
  });
  std::string job = owner.Hear();
  ASSERT_EQ(job.rfind("temper-", 0), 0u) << job;
  std::string before = Show(FindRemains(Of(job)));
  if (GetParam() == CgroupMode::kAuto) {
    EXPECT_THAT(before, ::testing::HasSubstr("sandbox: "));
    EXPECT_THAT(before, ::testing::HasSubstr("cgroup: "));
    EXPECT_THAT(before, ::testing::HasSubstr("process: "));
  }
  EXPECT_EQ(Sleepers().size(), 6u);
  double start = SystemClock::Get().NowS();
  owner.Kill();
  EXPECT_EQ(Show(WaitForNoRemains(Of(job), 10)), "");
  for (int i = 0; i < 400 && Sleepers().size() > (GetParam() == CgroupMode::kNone ? 1u : 0u); ++i) SystemClock::Get().SleepS(0.02);
  // Without cgroups a process that left its enrolled parent's group is out of reach; with them none is.
  EXPECT_LE(Sleepers().size(), GetParam() == CgroupMode::kNone ? 1u : 0u);
  EXPECT_LT(SystemClock::Get().NowS() - start, 10);
  for (pid_t pid : Sleepers()) kill(pid, SIGKILL);
}

// What could go wrong: an orderly stop is slower, or less thorough, than a murder.
TEST_P(JanitorModes, StopLeavesNothing) {
  Owner owner([](Owner& o) {
    Janitor* janitor = Busy(o, GetParam());
    std::string job = janitor->job_id();
    Status stopped = janitor->Stop(5);
    o.Say(stopped.ok() ? job : stopped.ToString());
    _exit(0);
  });
  std::string job = owner.Hear();
  ASSERT_EQ(job.rfind("temper-", 0), 0u) << job;
  EXPECT_EQ(Show(FindRemains(Of(job))), "");
  owner.Wait();
  for (pid_t pid : Sleepers()) kill(pid, SIGKILL);
}

// What could go wrong: kill -9 of the janitor leaves sandboxes that nobody owns, and the owner does not notice.
TEST(Janitor, KilledJanitorTakesItsSandboxesAlong) {
  Owner owner([](Owner& o) {
    Janitor* janitor = Busy(o, CgroupMode::kAuto);
    o.Say(janitor->job_id());
    kill(janitor->pid(), SIGKILL);
    pollfd p = {janitor->lifeline_fd(), POLLIN, 0};
    o.Say(poll(&p, 1, 5000) == 1 ? "noticed" : "not noticed");
    o.Say(janitor->RemoveLeftovers(5).ToString());
    o.Say(Show(FindRemains(Of(janitor->job_id()))) + ".");
    _exit(0);
  });
  std::string job = owner.Hear();
  EXPECT_EQ(owner.Hear(), "noticed");
  EXPECT_EQ(owner.Hear(), "OK");
  EXPECT_EQ(owner.Hear(), ".");
  for (int i = 0; i < 400 && !Sleepers().empty(); ++i) SystemClock::Get().SleepS(0.02);
  EXPECT_EQ(Sleepers().size(), 0u);
}

// What could go wrong: the sandbox role dies alone and what it had made lives on, or its successor cannot work.
TEST(Janitor, NewServiceBeginsClean) {
  Owner owner([](Owner& o) {
    Janitor* janitor = Busy(o, CgroupMode::kAuto, false);
    pid_t first = fork();
    if (first == 0) {
      FillSandboxes(o, *janitor);
      pause();
    }
    for (int i = 0; i < 500 && Sleepers().size() < 6; ++i) SystemClock::Get().SleepS(0.02);
    o.Say(std::to_string(Sleepers().size()));
    kill(first, SIGKILL);
    waitpid(first, nullptr, 0);
    ServiceOptions so;
    so.janitor_fd = janitor->service_fd();
    auto service = LocalSandboxService::Start(so);
    o.Say(service.ok() ? "started" : service.status().ToString());
    for (int i = 0; i < 500 && Sleepers().size() > 2u; ++i) SystemClock::Get().SleepS(0.02);
    o.Say(std::to_string(Sleepers().size()));
    CreateRequest q;
    q.id = "a";
    o.Say((*service)->Create(q).status().ToString());
    service->reset();
    Status stopped = janitor->Stop(5);
    o.Say(stopped.ToString());
    _exit(0);
  });
  EXPECT_EQ(owner.Hear(), "6");
  EXPECT_EQ(owner.Hear(), "started");
  EXPECT_EQ(owner.Hear(), "2");  // the enrolled ones
  EXPECT_EQ(owner.Hear(), "OK");
  EXPECT_EQ(owner.Hear(), "OK");
}

// What could go wrong: a janitor forked beside threads inherits a locked heap and hangs at the worst time.
TEST(Janitor, RefusesToBeForkedLate) {
  Owner owner([](Owner& o) {
    std::thread other([] { SystemClock::Get().SleepS(0.5); });
    o.Say(ForkJanitor(Options()).status().message());
    other.join();
    JanitorOptions missing = Options();
    missing.init_path = "/nowhere/init";
    o.Say(ForkJanitor(missing).status().message());
    JanitorOptions v2 = Options(CgroupMode::kV2);
    auto forked = ForkJanitor(v2);
    o.Say(forked.ok() ? "v2" : forked.status().message());
    if (setresuid(65534, 65534, 65534) != 0) _exit(1);
    o.Say(ForkJanitor(Options()).status().message());
    _exit(0);
  });
  EXPECT_THAT(owner.Hear(), ::testing::HasSubstr("before any thread"));
  EXPECT_THAT(owner.Hear(), ::testing::HasSubstr("/nowhere/init"));
  EXPECT_THAT(owner.Hear(), ::testing::AnyOf("v2", ::testing::HasSubstr("v2 does not work")));
  EXPECT_THAT(owner.Hear(), ::testing::HasSubstr("root"));
}

// What could go wrong: the search for remains sees nothing because it looks at nothing. One of each kind is planted.
TEST(Remains, PlantedOnesAreFound) {
  const std::string job = "temper-planted-" + std::to_string(getpid());
  const std::string run = ::testing::TempDir() + "run-" + std::to_string(getpid());
  EXPECT_EQ(Show(FindRemains(RemainsQuery{job, run, {}})), "");
  ASSERT_TRUE(MakeDirs(run).ok());
  auto found = [&](const std::vector<int>& ports, const std::string& kind) {
    std::vector<Remain> all = FindRemains(RemainsQuery{job, run, ports});
    for (const Remain& r : all) {
      if (r.kind == kind) return true;
    }
    return false;
  };

  // A process by its arguments, by its environment, by where it works.
  for (int way = 0; way < 3; ++way) {
    EXPECT_FALSE(found({}, "process")) << way;
    pid_t pid = fork();
    if (pid == 0) {
      if (way == 1) setenv("TEMPER_RUN", run.c_str(), 1);
      if (way == 2 && chdir(run.c_str()) != 0) _exit(1);
      execlp("sh", "sh", "-c", ("sleep " + kMark + "; true").c_str(), way == 0 ? (run + "/x").c_str() : "y", nullptr);
      _exit(1);
    }
    for (int i = 0; i < 100 && !found({}, "process"); ++i) SystemClock::Get().SleepS(0.01);
    EXPECT_TRUE(found({}, "process")) << way;
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
    for (const Remain& r : FindRemains(RemainsQuery{job, run, {}})) {
      if (r.kind == "process") kill(static_cast<pid_t>(atoi(r.what.c_str())), SIGKILL);
    }
    for (pid_t sleeper : Sleepers()) kill(sleeper, SIGKILL);
    for (int i = 0; i < 100 && found({}, "process"); ++i) SystemClock::Get().SleepS(0.01);
  }

  // A mount. In this process's own mount namespace, which the child takes a private copy of.
  pid_t child = fork();
  if (child == 0) {
    if (unshare(CLONE_NEWNS) != 0 || mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) _exit(3);
    if (found({}, "mount") || mount("none", run.c_str(), "tmpfs", 0, "size=4k") != 0) _exit(4);
    _exit(found({}, "mount") ? 0 : 5);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);

  // A cgroup.
  std::string group;
  for (const char* base : {"/sys/fs/cgroup/unified/", "/sys/fs/cgroup/"}) {
    group = base + job;
    if (mkdir(group.c_str(), 0755) == 0) break;
    group.clear();
  }
  if (!group.empty()) {
    EXPECT_TRUE(found({}, "cgroup"));
    rmdir(group.c_str());
  }
  EXPECT_FALSE(found({}, "cgroup"));

  // Shared memory.
  int shm = shm_open(("/" + job).c_str(), O_CREAT | O_RDWR, 0600);
  ASSERT_GE(shm, 0);
  EXPECT_TRUE(found({}, "shared_memory"));
  shm_unlink(("/" + job).c_str());
  close(shm);
  EXPECT_FALSE(found({}, "shared_memory"));

  // Ports: TCP, and an abstract name.
  Fd tcp(socket(AF_INET, SOCK_STREAM, 0));
  ASSERT_EQ(listen(tcp.get(), 1), 0);
  sockaddr_storage address = {};
  socklen_t size = sizeof address;
  getsockname(tcp.get(), reinterpret_cast<sockaddr*>(&address), &size);
  unsigned char* raw = reinterpret_cast<unsigned char*>(&address);
  int port = raw[2] << 8 | raw[3];
  EXPECT_TRUE(found({port}, "port"));
  tcp.Reset();
  EXPECT_FALSE(found({port}, "port"));
  Fd name(socket(AF_UNIX, SOCK_STREAM, 0));
  std::string bytes = std::string("\1\0\0", 3) + job;
  ASSERT_EQ(bind(name.get(), reinterpret_cast<const sockaddr*>(bytes.data()), static_cast<socklen_t>(bytes.size())), 0);
  EXPECT_TRUE(found({}, "port"));
  name.Reset();
  EXPECT_FALSE(found({}, "port"));

  // A temporary folder.
  ASSERT_TRUE(MakeDirs("/tmp/" + job + "-x").ok());
  EXPECT_TRUE(found({}, "temporary_folder"));
  ASSERT_TRUE(RemoveAll("/tmp/" + job + "-x").ok());

  ASSERT_TRUE(RemoveAll(run).ok());
  EXPECT_EQ(Show(FindRemains(RemainsQuery{job, run, {}})), "");
}

// A job that runs was listed as left behind, a shell that names the folder as a job's, a port once for each of its connections;
// and whoever asks after an end must still hear of everything.
TEST(Remains, LiveJobsAndBystandersAreToldApart) {
  const std::string job = "temper-told-" + std::to_string(getpid());
  const std::string run = ::testing::TempDir() + "told-" + std::to_string(getpid());
  ASSERT_TRUE(MakeDirs(run).ok());
  auto start = [&](bool of_job) {
    pid_t pid = fork();
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (of_job) setenv("TEMPER_INCARNATION", "100000", 1);
      else unsetenv("TEMPER_INCARNATION");
      // `sh` executes a single command itself: one process.
      execlp("sh", "sh", "-c", ("exec sleep " + kMark).c_str(), nullptr);
      _exit(1);
    }
    return pid;
  };
  auto in_run = [&](bool of_job) {
    setenv("TEMPER_TOLD_RUN", run.c_str(), 1);
    const pid_t pid = start(of_job);
    unsetenv("TEMPER_TOLD_RUN");
    return pid;
  };
  const pid_t worker = in_run(true), reader = in_run(false);
  auto find = [&](pid_t pid) {
    for (const Remain& r : FindRemains(RemainsQuery{job, run, {}})) {
      if (r.kind == "process" && atoi(r.what.c_str()) == pid) return std::optional(r);
    }
    return std::optional<Remain>();
  };
  for (int i = 0; i < 200 && !(find(worker) && find(reader)); ++i) SystemClock::Get().SleepS(0.01);
  ASSERT_TRUE(find(worker) && find(reader));
  EXPECT_FALSE(find(worker)->doubtful);
  EXPECT_TRUE(find(reader)->doubtful);
  EXPECT_FALSE(find(worker)->live) << "nobody supervises it";

  // Held, with this process as its supervisor: its children and what bears the job's name are live.
  ASSERT_TRUE(MakeDirs("/tmp/" + job + "-x").ok());
  auto folder_is_live = [&] {
    for (const Remain& r : FindRemains(RemainsQuery{job, run, {}})) {
      if (r.kind == "temporary_folder") return r.live;
    }
    ADD_FAILURE() << "not found";
    return false;
  };
  EXPECT_FALSE(folder_is_live());
  ASSERT_TRUE(WriteFile(run + "/state.json", "{\"pid\":" + std::to_string(getpid()) + ",\"sandbox_job\":\"" + job + "\"}").ok());
  EXPECT_EQ(JobOfRun(run), job);
  EXPECT_EQ(JobOfRun(run + "/none"), "");
  EXPECT_FALSE(folder_is_live()) << "nobody holds the lock";
  {
    const Fd lock = LockFile(run + "/lock").value();
    EXPECT_TRUE(folder_is_live());
    EXPECT_TRUE(find(worker)->live);
  }
  EXPECT_FALSE(folder_is_live());
  EXPECT_FALSE(find(worker)->live);
  // Without a job's name nothing is found by one, and not everything either.
  for (const Remain& r : FindRemains(RemainsQuery{"", run, {}})) {
    EXPECT_TRUE(r.what.find(run) != std::string::npos || r.kind == "process" || r.kind == "mount") << r.kind << " " << r.what;
  }

  // A name that is listened on and connected to has two lines in the kernel's table.
  const std::string name = std::string(1, '\0') + job + "-port";
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, name.data(), name.size());
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size());
  Fd listening(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)), client(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(bind(listening.get(), reinterpret_cast<sockaddr*>(&address), length), 0);
  ASSERT_EQ(listen(listening.get(), 4), 0);
  ASSERT_EQ(connect(client.get(), reinterpret_cast<sockaddr*>(&address), length), 0);
  Fd server(accept(listening.get(), nullptr, nullptr));
  int ports = 0;
  for (const Remain& r : FindRemains(RemainsQuery{job, run, {}})) ports += r.kind == "port";
  EXPECT_EQ(ports, 1);

  for (const pid_t pid : {worker, reader}) {
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  }
  ASSERT_TRUE(RemoveAll("/tmp/" + job + "-x").ok());
  ASSERT_TRUE(RemoveAll(run).ok());
}

}  // namespace
}  // namespace temper::sandbox
