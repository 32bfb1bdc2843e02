#include "trainer/bench/peer.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "common/file.h"
#include "common/json.h"

namespace temper::trainer::bench {

Result<std::unique_ptr<Peer>> Peer::Start(const std::string& program, const std::string& script, const std::string& name,
                                          int threads, const std::string& path, const std::string& clock) {
  int to[2], from[2];
  if (pipe2(to, O_CLOEXEC) != 0) return ErrnoStatus("pipe", errno);
  if (pipe2(from, O_CLOEXEC) != 0) {
    const Status status = ErrnoStatus("pipe", errno);
    close(to[0]);
    close(to[1]);
    return status;
  }
  const std::string count = std::to_string(threads);
  const int pid = fork();
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    dup2(to[0], 0);
    dup2(from[1], 1);
    execlp(program.c_str(), program.c_str(), script.c_str(), name.c_str(), count.c_str(), path.c_str(), clock.c_str(), nullptr);
    _exit(127);
  }
  close(to[0]);
  close(from[1]);
  std::unique_ptr<Peer> peer(new Peer(pid, to[1], from[0], name));
  if (pid < 0) return ErrnoStatus("fork", errno);
  auto ready = peer->ReadLine();
  if (!ready.ok() || *ready != "ready")
    return FailedPrecondition("peer " + name + ": " + program + " " + script + " did not come up");
  return peer;
}

Peer::~Peer() {
  close(in_);
  close(out_);
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
}

Result<std::string> Peer::ReadLine() {
  for (;;) {
    if (const size_t end = pending_.find('\n'); end != std::string::npos) {
      std::string line = pending_.substr(0, end);
      pending_.erase(0, end + 1);
      return line;
    }
    char buffer[4096];
    const ssize_t n = read(out_, buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return FailedPrecondition("peer " + name_ + " ended");
    pending_.append(buffer, static_cast<size_t>(n));
  }
}

Result<double> Peer::Measure(const std::string& request) {
  const std::string line = request + "\n";
  struct sigaction ignore = {}, former = {};
  ignore.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &ignore, &former);
  const ssize_t written = write(in_, line.data(), line.size());
  sigaction(SIGPIPE, &former, nullptr);
  if (written != static_cast<ssize_t>(line.size())) return FailedPrecondition("peer " + name_ + " ended");
  ASSIGN_OR_RETURN(const std::string answer, ReadLine());
  auto parsed = ParseJson(answer);
  if (!parsed.ok() || !parsed->is_object()) return FailedPrecondition("peer " + name_ + " said '" + answer + "'");
  const json::value* seconds = parsed->as_object().if_contains("seconds");
  if (!seconds || !seconds->is_double() || !(seconds->as_double() > 0))
    return FailedPrecondition("peer " + name_ + ": " + answer);
  return seconds->as_double();
}

}  // namespace temper::trainer::bench
