#include "trainer/bench/peer.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <algorithm>
#include <cmath>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "common/file.h"
#include "common/json.h"

namespace temper::trainer::bench {

namespace {

const json::value* Field(const json::value& answer, const char* name) { return answer.as_object().if_contains(name); }

Result<json::value> ParseAnswer(const std::string& name, const std::string& line) {
  auto parsed = ParseJson(line);
  if (!parsed.ok() || !parsed->is_object()) return FailedPrecondition("peer " + name + " said '" + line + "'");
  if (const json::value* error = Field(*parsed, "error")) {
    return FailedPrecondition("peer " + name + ": " + (error->is_string() ? std::string(error->as_string()) : line));
  }
  return parsed;
}

}  // namespace

Result<std::unique_ptr<Peer>> Peer::Start(const PeerOptions& options) {
  int to[2], from[2];
  if (pipe2(to, O_CLOEXEC) != 0) return ErrnoStatus("pipe", errno);
  if (pipe2(from, O_CLOEXEC) != 0) {
    const Status status = ErrnoStatus("pipe", errno);
    close(to[0]);
    close(to[1]);
    return status;
  }
  const std::string count = std::to_string(options.threads);
  const int pid = fork();
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    setpgid(0, 0);  // a peer starts processes of its own, which end with it
    dup2(to[0], 0);
    dup2(from[1], 1);
    execlp(options.program.c_str(), options.program.c_str(), options.script.c_str(), options.name.c_str(), count.c_str(),
           options.cap.c_str(), options.clock.c_str(), nullptr);
    _exit(127);
  }
  close(to[0]);
  close(from[1]);
  std::unique_ptr<Peer> peer(new Peer(pid, to[1], from[0], options));
  if (pid < 0) return ErrnoStatus("fork", errno);
  setpgid(pid, pid);  // in both: whoever is first
  auto line = peer->ReadLine();
  if (!line.ok()) return FailedPrecondition(options.program + " " + options.script + " did not come up: " + line.status().message());
  ASSIGN_OR_RETURN(const json::value ready, ParseAnswer(options.name, *line));
  const json::value* version = Field(ready, "ready");
  const json::value* isa = Field(ready, "isa");
  const json::value* threads = Field(ready, "threads");
  if (!version || !version->is_string() || !isa || !isa->is_string() || !threads || !threads->is_int64())
    return FailedPrecondition("peer " + options.name + " did not say what it is: " + *line);
  // A figure of another number of threads is no peer's.
  if (threads->as_int64() != options.threads)
    return FailedPrecondition("peer " + options.name + " runs on " + std::to_string(threads->as_int64()) + " threads, not " + count);
  peer->version_ = std::string(version->as_string());
  peer->runs_on_ = std::string(isa->as_string()) + ", " + count + " threads";
  return peer;
}

Peer::~Peer() {
  close(in_);
  close(out_);
  if (pid_ > 0) {
    kill(-pid_, SIGKILL);
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
    pollfd ready = {.fd = out_, .events = POLLIN, .revents = 0};
    const int polled = poll(&ready, 1, options_.patience_s * 1000);
    if (polled < 0 && errno == EINTR) continue;
    if (polled == 0) return FailedPrecondition("peer " + options_.name + " did not answer in " + std::to_string(options_.patience_s) + " s");
    char buffer[4096];
    const ssize_t n = read(out_, buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return FailedPrecondition("peer " + options_.name + " ended");
    pending_.append(buffer, static_cast<size_t>(n));
  }
}

Result<Peer::Answer> Peer::Ask(const std::string& request) {
  const std::string line = request + "\n";
  struct sigaction ignore = {}, former = {};
  ignore.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &ignore, &former);
  const ssize_t written = write(in_, line.data(), line.size());
  sigaction(SIGPIPE, &former, nullptr);
  if (written != static_cast<ssize_t>(line.size())) return FailedPrecondition("peer " + options_.name + " ended");
  ASSIGN_OR_RETURN(const std::string said, ReadLine());
  ASSIGN_OR_RETURN(const json::value parsed, ParseAnswer(options_.name, said));
  Answer answer;
  if (const json::value* logprobs = Field(parsed, "logprobs"); logprobs && logprobs->is_array()) {
    for (const json::value& x : logprobs->as_array()) answer.logprobs.push_back(x.is_double() ? x.as_double() : NAN);
    return answer;
  }
  const json::value* seconds = Field(parsed, "seconds");
  if (!seconds || !seconds->is_double() || !(seconds->as_double() > 0))
    return FailedPrecondition("peer " + options_.name + " said '" + said + "'");
  answer.seconds = seconds->as_double();
  if (const json::value* peak = Field(parsed, "peak_bytes"); peak && peak->is_int64()) answer.peak_bytes = peak->as_int64();
  return answer;
}

Status CheckPeer(Peer& peer, const std::string& folder, std::span<const int32_t> ids, std::span<const float> ours, const std::string& dtype) {
  ASSIGN_OR_RETURN(const Peer::Answer answer, peer.Ask(fmt::format(R"({{"work":"logprobs","model":"{}","ids":[{}],"dtype":"{}"}})",
                                                                   folder, fmt::join(ids, ","), dtype)));
  if (answer.logprobs.size() != ids.size() - 1) return FailedPrecondition("it gives no log-probabilities");
  double worst = 0;
  for (size_t i = 1; i < ids.size(); ++i) worst = std::max(worst, std::abs(answer.logprobs[i - 1] - static_cast<double>(ours[i])));
  // Rounding to bf16 in another order gives some 0.03; another model, or q and k out of order, 0.3 and more.
  if (!(worst < 0.15)) return FailedPrecondition(fmt::format("its log-probabilities differ from ours by {:.3f}", worst));
  return Status::Ok();
}

}  // namespace temper::trainer::bench
