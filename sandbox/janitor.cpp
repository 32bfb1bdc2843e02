#include "sandbox/janitor.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "common/clock.h"
#include "common/file.h"
#include "common/rng.h"
#include "common/strings.h"
#include "sandbox/cgroup.h"
#include "sandbox/janitor_loop.h"
#include "sandbox/needs.h"
#include "sandbox/packet.h"

namespace temper::sandbox {

struct Janitor::Impl {
  pid_t pid = -1;
  std::string job_id;
  Fd lifeline, service;
  bool reaped = false;

  // True when the process is gone and reaped.
  bool WaitGone(double timeout_s) {
    Clock& clock = SystemClock::Get();
    for (double end = clock.NowS() + timeout_s; !reaped;) {
      pid_t r = waitpid(pid, nullptr, WNOHANG);
      if (r == pid || (r < 0 && errno == ECHILD)) reaped = true;
      if (reaped || clock.NowS() >= end) break;
      clock.SleepS(0.002);
    }
    return reaped;
  }
};

Janitor::Janitor(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Janitor::Janitor(Janitor&&) noexcept = default;
Janitor& Janitor::operator=(Janitor&&) noexcept = default;

Janitor::~Janitor() {
  if (!impl_) return;
  Status stopped = Stop();
  (void)stopped;  // a destructor has nobody to tell; Stop() itself is there for who wants to know
}

pid_t Janitor::pid() const { return impl_->pid; }
const std::string& Janitor::job_id() const { return impl_->job_id; }
int Janitor::service_fd() const { return impl_->service.get(); }
int Janitor::lifeline_fd() const { return impl_->lifeline.get(); }

Status Janitor::Enroll(pid_t pid) {
  uint32_t number = static_cast<uint32_t>(pid);
  int fd = impl_->lifeline.get();
  RETURN_IF_ERROR(SendPacket(fd, std::string_view(reinterpret_cast<char*>(&number), sizeof number)));
  pollfd p = {fd, POLLIN, 0};
  if (poll(&p, 1, 10000) <= 0) return DeadlineExceeded("the janitor does not answer");
  ASSIGN_OR_RETURN(Packet answer, ReceivePacket(fd));
  uint32_t ok = 0;
  if (answer.bytes.size() == sizeof ok) std::memcpy(&ok, answer.bytes.data(), sizeof ok);
  return ok ? Status::Ok() : NotFound("process " + std::to_string(pid) + " cannot be enrolled: not there");
}

Status Janitor::Stop(double timeout_s) {
  impl_->service.Reset();
  impl_->lifeline.Reset();
  if (impl_->reaped) return Status::Ok();
  if (!impl_->WaitGone(timeout_s)) {
    return DeadlineExceeded("the janitor is still cleaning after " + FormatDouble(timeout_s) + " s");
  }
  return Status::Ok();
}

Status Janitor::RemoveLeftovers(double timeout_s) {
  if (!impl_->WaitGone(timeout_s)) return FailedPrecondition("the janitor still lives");
  return RemoveCgroups(impl_->job_id, timeout_s) ? Status::Ok()
                                                 : DeadlineExceeded("cgroups of " + impl_->job_id + " still hold a process");
}

Result<Janitor> ForkJanitor(const JanitorOptions& options) {
  auto tasks = ListDir("/proc/self/task");
  if (tasks.ok() && tasks->size() != 1) {
    return FailedPrecondition("the janitor must be forked before any thread exists; there are " + std::to_string(tasks->size()));
  }
  if (geteuid() != 0) return MissingNeeds(TrySandboxNeeds(options.cgroups));
  std::string path = options.init_path;
  if (path.empty()) {
    const char* named = std::getenv("TEMPER_SANDBOX_INIT");
    char self[4096] = {};
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    path = named ? named : n > 0 ? DirName(std::string(self, static_cast<size_t>(n))) + "/temper-sandbox-init" : "temper-sandbox-init";
  }
  auto init = ReadFile(path, 64 << 20);
  if (!init.ok()) return FailedPrecondition("init program of sandboxes: " + init.status().message());

  int lifeline[2], service[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, lifeline) != 0) return ErrnoStatus("socketpair", errno);
  Fd owner_end(lifeline[0]), janitor_end(lifeline[1]);
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, service) != 0) return ErrnoStatus("socketpair", errno);
  Fd service_end(service[0]), janitor_service(service[1]);
  auto impl = std::make_unique<Janitor::Impl>();
  uint64_t random = Mix64(static_cast<uint64_t>(SystemClock::Get().WallS() * 1e6) ^ (static_cast<uint64_t>(getpid()) << 40));
  impl->job_id = "temper-" + std::to_string(getpid()) + "." + PidNamespaceTag() + "-" +
                 HexEncode(std::string_view(reinterpret_cast<char*>(&random), 4));

  pid_t pid = fork();
  if (pid < 0) return ErrnoStatus("fork", errno);
  if (pid == 0) {
    // Nothing of the owner stays but standard error and the two channels: an inherited descriptor could keep a file or a
    // port of it alive.
    JanitorProcessOptions process;
    process.janitor = options;
    process.job_id = impl->job_id;
    process.init = std::move(*init);
    int first = std::min(janitor_end.get(), janitor_service.get()), second = std::max(janitor_end.get(), janitor_service.get());
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (null >= 0) {
      dup2(null, 0);
      dup2(null, 1);
    }
    if (first > 3) syscall(SYS_close_range, 3, first - 1, 0);
    if (second > first + 1) syscall(SYS_close_range, first + 1, second - 1, 0);
    syscall(SYS_close_range, second + 1, ~0u, 0);
    process.lifeline = Fd(janitor_end.Release());
    process.service = Fd(janitor_service.Release());
    _exit(RunJanitor(std::move(process)));
  }
  impl->pid = pid;
  impl->lifeline = std::move(owner_end);
  impl->service = std::move(service_end);
  janitor_end.Reset();
  janitor_service.Reset();
  Janitor janitor(std::move(impl));
  pollfd p = {janitor.lifeline_fd(), POLLIN, 0};
  if (poll(&p, 1, 20000) <= 0) return DeadlineExceeded("the janitor does not start");
  auto ready = ReceivePacket(janitor.lifeline_fd());
  if (!ready.ok()) return FailedPrecondition("the janitor died while starting");
  std::string message = ready->bytes.substr(std::min<size_t>(6, ready->bytes.size()));
  if (!message.empty()) {
    RETURN_IF_ERROR(MissingNeeds(TrySandboxNeeds(options.cgroups)));
    return FailedPrecondition("sandboxes do not work here, though nothing seems to be missing: " + message);
  }
  return janitor;
}

}  // namespace temper::sandbox
