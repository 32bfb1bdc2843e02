#include "sandbox/service.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <deque>
#include <future>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "common/clock.h"
#include "common/log.h"
#include "common/rng.h"
#include "sandbox/capture.h"
#include "sandbox/cgroup.h"
#include "sandbox/files.h"
#include "sandbox/init/protocol.h"
#include "sandbox/janitor_protocol.h"
#include "sandbox/packet.h"
#include "sandbox/poller.h"
#include "sandbox/relay.h"
#include "sandbox/wire.h"

namespace temper::sandbox {
namespace {

constexpr double kJanitorTimeoutS = 20;
constexpr double kKillGraceS = 2;  // from SIGKILL to giving the sandbox up
constexpr size_t kReadBytes = 64 << 10;
constexpr size_t kCommandsMax = 1024;
constexpr int kRelayConnectionsPerSandbox = 64;

Status Check(const CreateRequest& q) {
  auto bad = [](const std::string& what) { return InvalidArgument("sandbox " + what); };
  bool id_ok = !q.id.empty() && q.id.size() <= 100 && q.id.find_first_not_of("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-") == std::string::npos;
  if (!id_ok) return bad("id '" + q.id + "' is not [A-Za-z0-9._-]{1,100}");
  const Limits& l = q.limits;
  if (l.memory_bytes < (1 << 20)) return bad("limit memory is below 1MiB");
  if (l.processes < 1 || l.processes > 1000000) return bad("limit processes is not 1..1000000");
  if (l.disk_bytes < 4096) return bad("limit disk is below 4KiB");
  if (l.files < 1 || l.files > 100000000) return bad("limit files is not 1..100000000");
  if (!(l.cpu_s >= 0 && l.cpu_s <= 1e7)) return bad("limit cpu_s is not 0..1e7");
  if (!(l.wall_s > 0 && l.wall_s <= 1e7)) return bad("limit wall_s is not above 0 and at most 1e7");
  if (l.output_bytes < 1 || l.output_bytes > (int64_t{1} << 30)) return bad("limit output is not 1..1GiB");
  if (!(q.ttl_s > 0 && q.ttl_s <= 1e8)) return bad("ttl_s is not above 0 and at most 1e8");
  return Status::Ok();
}

Status Check(const ExecRequest& q) {
  auto has_nul = [](const std::string& s) { return s.find('\0') != std::string::npos; };
  if (q.argv.empty() || q.argv[0].empty()) return InvalidArgument("argv is empty");
  if (q.argv.size() + q.env.size() + 8 > protocol::kArgumentsMax) return InvalidArgument("too many arguments");
  if (q.cwd.empty() || q.cwd[0] != '/' || has_nul(q.cwd)) return InvalidArgument("cwd '" + q.cwd + "' is not an absolute path");
  for (const std::string& a : q.argv) {
    if (has_nul(a)) return InvalidArgument("an argument has a NUL");
  }
  for (const auto& [name, value] : q.env) {
    if (name.empty() || name.find('=') != std::string::npos || has_nul(name) || has_nul(value)) {
      return InvalidArgument("environment variable '" + name + "' is impossible");
    }
  }
  if (!(q.timeout_s >= 0)) return InvalidArgument("timeout_s is negative");
  return Status::Ok();
}

Result<Fd> MemoryFile(std::string_view bytes) {
  Fd fd(memfd_create("sandbox", MFD_CLOEXEC));
  if (!fd.valid()) return ErrnoStatus("memfd_create", errno);
  RETURN_IF_ERROR(WriteAll(fd.get(), bytes));
  if (lseek(fd.get(), 0, SEEK_SET) != 0) return ErrnoStatus("lseek", errno);
  return fd;
}

// A stream of a command: the reading end of its pipe and where the bytes go.
struct Stream {
  Fd fd;
  Capture* capture = nullptr;  // null: fd 3
};

struct Running {
  uint32_t exec_id = 0;
  Role role = Role::kAgent;
  Capture out, err;
  std::string fd3;
  uint64_t fd3_dropped = 0;
  Stream streams[3];
  Fd input;  // writing end of its standard input, while there is more to write
  std::string input_bytes;
  size_t input_at = 0;
  double start_s = 0, deadline_s = 0, kill_s = 0;  // kill_s: when it was killed, 0 = not
  bool timed_out = false, cpu_out = false;
  bool disk_was_full = false, files_were_full = false;  // when it began
  bool disk_full = false, files_full = false;           // became so meanwhile
  Counters base;
  std::function<void(Result<ExecResult>)> done;
  explicit Running(int64_t output_bytes) : out(output_bytes), err(output_bytes) {}
};

struct Box {
  enum class State { kCreating, kReady, kDying } state = State::kCreating;
  std::string id;
  uint32_t handle = 0;  // 0 until the janitor has answered
  Limits limits;
  Enforced enforced;
  uint32_t host_uid = 0;
  double expires_s = 0;
  Fd control, work, cpu, oom, peak, refused;
  bool gone = false;  // its init has ended
  Counters base;      // at creation
  std::unique_ptr<Relay> relay;
  std::map<uint32_t, std::unique_ptr<Running>> running;
  std::vector<std::function<void(Status)>> destroyed;  // who waits for its end

  Counters Read() const { return ReadCounters(cpu.get(), oom.get(), peak.get(), refused.get()); }
};

}  // namespace

class LocalSandboxService::Loop {
 public:
  Loop(const ServiceOptions& options, std::unique_ptr<Poller> poller, Fd wake, sockaddr_in gateway)
      : options_(options), gateway_(gateway), poller_(std::move(poller)), wake_(std::move(wake)) {}

  Status Start() {
    poller_->Add(wake_.get(), EPOLLIN, [this](uint32_t) { DrainWake(); });
    poller_->Add(options_.janitor_fd, EPOLLIN, [this](uint32_t) { OnJanitor(); });
    thread_ = std::thread([this] { Run(); });
    // What a former service on this channel left is killed, and its answers still in the channel belong to no call of ours.
    return Wait<Status>([this](auto done) {
      Ask(JanitorRequest{}, [done](Result<JanitorReply> reply, std::vector<Fd>&&) { done(reply.ok() ? Status::Ok() : reply.status()); });
    });
  }

  void Close() {
    Status closed = Wait<Status>([this](auto done) {
      closing_ = true;
      auto left = std::make_shared<int>(1);
      auto one = [left, done](Status) {
        if (--*left == 0) done(Status::Ok());
      };
      std::vector<std::string> ids;
      for (auto& [id, box] : boxes_) ids.push_back(id);
      for (const std::string& id : ids) {
        ++*left;
        Destroy(id, one);
      }
      one(Status::Ok());
    });
    (void)closed;  // always OK: a sandbox that could not be destroyed is the janitor's to remove
  }

  void Stop() {
    Close();
    Post([this] { stop_ = true; });
    thread_.join();
  }

  // Runs `work` on the loop and blocks until it has called its `done` (which every path does, at the latest after
  // kJanitorTimeoutS or a command's limits).
  template <typename T>
  T Wait(std::function<void(std::function<void(T)>)> work) {
    auto promise = std::make_shared<std::promise<T>>();
    auto future = promise->get_future();
    Post([work = std::move(work), promise] { work([promise](T value) { promise->set_value(std::move(value)); }); });
    return future.get();
  }

  void Post(std::function<void()> work) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      posts_.push_back(std::move(work));
    }
    uint64_t one = 1;
    while (write(wake_.get(), &one, sizeof one) < 0 && errno == EINTR) {
    }
  }

  // --- all below on the loop thread ---

  struct Created {
    Fd work;
    uint32_t host_uid = 0;
  };

  void Create(const CreateRequest& request, std::function<void(Result<Created>)> done) {
    Status ok = Check(request);
    if (!ok.ok()) return done(ok);
    if (closing_) return done(Unavailable("the sandbox service stops"));
    if (request.relay && options_.gateway_address.empty()) return done(InvalidArgument("this sandbox service has no gateway to relay to"));
    if (boxes_.count(request.id)) return done(AlreadyExists("sandbox '" + request.id + "' exists"));
    auto box = std::make_unique<Box>();
    box->id = request.id;
    box->limits = request.limits;
    box->expires_s = Now() + request.ttl_s;
    boxes_[request.id] = std::move(box);

    JanitorRequest ask;
    ask.type = JanitorRequest::Type::kCreate;
    ask.memory_bytes = request.limits.memory_bytes;
    ask.processes = request.limits.processes;
    ask.disk_bytes = request.limits.disk_bytes;
    ask.files = request.limits.files;
    ask.relay = request.relay;
    ask.rootfs = request.rootfs;
    ask.mounts = request.mounts;
    std::string id = request.id;
    Ask(std::move(ask), [this, id, done](Result<JanitorReply> reply, std::vector<Fd>&& fds) {
      auto it = boxes_.find(id);
      TEMPER_CHECK(it != boxes_.end()) << id;
      Box& b = *it->second;
      if (!reply.ok()) {
        std::vector<std::function<void(Status)>> waiting = std::move(b.destroyed);
        boxes_.erase(it);
        for (auto& w : waiting) w(Status::Ok());
        return done(reply.status());
      }
      Adopt(b, *reply, std::move(fds));
      if (b.state == Box::State::kDying) {
        BeginDestroy(b);
        return done(Aborted("sandbox '" + id + "' was destroyed while it was made"));
      }
      ++created_;
      done(Created{Fd(fcntl(b.work.get(), F_DUPFD_CLOEXEC, 0)), b.host_uid});
    });
  }

  // The files are in: commands may run.
  Result<SandboxInfo> MakeReady(const std::string& id) {
    Box* box = Find(id);
    if (!box || box->state != Box::State::kCreating) return Aborted("sandbox '" + id + "' was destroyed while it was made");
    box->state = Box::State::kReady;
    return Describe(*box);
  }

  void Exec(const ExecRequest& request, std::function<void(Result<ExecResult>)> done) {
    Box* box = Find(request.id);
    if (!box || box->state != Box::State::kReady) return done(NotFound("no sandbox '" + request.id + "'"));
    if (running_ >= kCommandsMax) return done(ResourceExhausted("already " + std::to_string(running_) + " commands"));
    auto run = std::make_unique<Running>(box->limits.output_bytes);
    run->exec_id = ++exec_ids_;
    run->role = request.role;
    run->start_s = Now();
    double timeout_s = box->limits.wall_s;
    if (request.timeout_s > 0) timeout_s = std::min(timeout_s, request.timeout_s);
    run->deadline_s = run->start_s + timeout_s;
    run->base = box->Read();
    struct statfs fs = {};
    if (fstatfs(box->work.get(), &fs) == 0) {
      run->disk_was_full = fs.f_bavail == 0;
      run->files_were_full = fs.f_ffree == 0;
    }
    run->done = std::move(done);
    Running* r = run.get();
    box->running[r->exec_id] = std::move(run);
    ++running_;
    ++commands_;
    if (box->gone) return Finish(*box, r->exec_id, -1);

    Status started = SendExec(*box, *r, request);
    if (!started.ok()) {
      ExecResult result;
      result.message = started.message();
      return Complete(*box, r->exec_id, std::move(result));
    }
    if (r->input.valid() && WriteInput(*r)) {
      poller_->Add(r->input.get(), EPOLLOUT, [this, r](uint32_t) {
        if (!WriteInput(*r)) {
          poller_->Remove(r->input.get());
          r->input.Reset();
        }
      });
    } else {
      r->input.Reset();
    }
    for (Stream& s : r->streams) {
      if (!s.fd.valid()) continue;
      poller_->Add(s.fd.get(), EPOLLIN, [this, r, &s](uint32_t) {
        // One read a turn, so that a flood of one command does not starve the others.
        if (!ReadOnce(*r, s)) {
          poller_->Remove(s.fd.get());
          s.fd.Reset();
        }
      });
    }
  }

  Result<Fd> WorkFolder(const std::string& id) {
    Box* box = Find(id);
    if (!box || box->state != Box::State::kReady) return NotFound("no sandbox '" + id + "'");
    return Fd(fcntl(box->work.get(), F_DUPFD_CLOEXEC, 0));
  }

  Status Renew(const std::string& id, double ttl_s) {
    Box* box = Find(id);
    if (!box || box->state == Box::State::kDying) return NotFound("no sandbox '" + id + "'");
    if (!(ttl_s > 0 && ttl_s <= 1e8)) return InvalidArgument("ttl_s is not above 0 and at most 1e8");
    box->expires_s = Now() + ttl_s;
    return Status::Ok();
  }

  void Destroy(const std::string& id, std::function<void(Status)> done) {
    Box* box = Find(id);
    if (!box) return done(Status::Ok());
    box->destroyed.push_back(std::move(done));
    if (box->state == Box::State::kDying) return;
    box->state = Box::State::kDying;
    if (box->handle != 0) BeginDestroy(*box);  // else when the janitor has answered its creation
  }

  std::vector<SandboxInfo> List() {
    std::vector<SandboxInfo> all;
    for (auto& [id, box] : boxes_) {
      if (box->state == Box::State::kReady) all.push_back(Describe(*box));
    }
    return all;
  }

 private:
  using OnReply = std::function<void(Result<JanitorReply>, std::vector<Fd>&&)>;
  struct Asked {
    OnReply done;
    double deadline_s;
  };

  static double Now() { return SystemClock::Get().NowS(); }

  Box* Find(const std::string& id) {
    auto it = boxes_.find(id);
    return it == boxes_.end() ? nullptr : it->second.get();
  }

  SandboxInfo Describe(const Box& b) const {
    return SandboxInfo{b.id, b.enforced, std::max(0.0, b.expires_s - Now()), static_cast<int>(b.running.size())};
  }

  void Run() {
    // A command that closes its standard input is no reason to die; write() answers EPIPE then.
    sigset_t pipe;
    sigemptyset(&pipe);
    sigaddset(&pipe, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe, nullptr);
    while (!stop_) {
      poller_->Wait(NextTimer());
      Tick();
      if (!options_.metrics) continue;
      temper::Metrics& m = *options_.metrics;
      m["sandboxes"].Set(static_cast<double>(boxes_.size()));
      m["sandboxes_created"].Set(static_cast<double>(created_));
      m["sandbox_commands"].Set(static_cast<double>(commands_));
      m["relay_connections"].Set(static_cast<double>(relay_stats_.connections));
      m["relay_bytes"].Set(static_cast<double>(relay_stats_.bytes));
    }
  }

  void DrainWake() {
    uint64_t count;
    while (read(wake_.get(), &count, sizeof count) < 0 && errno == EINTR) {
    }
    std::deque<std::function<void()>> posts;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      posts.swap(posts_);
    }
    for (auto& post : posts) post();
  }

  double NextTimer() const {
    double wait_s = asked_.empty() ? 10 : 1;
    if (!boxes_.empty()) wait_s = 1;
    double now = Now();
    for (auto& [id, box] : boxes_) {
      if (box->relay) wait_s = std::min(wait_s, 0.1);
      for (auto& [exec_id, run] : box->running) {
        wait_s = std::min(wait_s, box->limits.cpu_s > 0 ? 0.05 : 0.1);
        wait_s = std::min(wait_s, (run->kill_s > 0 ? run->kill_s + kKillGraceS : run->deadline_s) - now);
      }
      wait_s = std::min(wait_s, box->expires_s - now);
    }
    return std::max(0.0, wait_s);
  }

  // Deadlines, processor time, full disks, leases, unanswered questions.
  void Tick() {
    double now = Now();
    std::vector<std::string> expired, lost;
    for (auto& [id, box] : boxes_) {
      if (box->relay) box->relay->Retry(now);
      if (box->state == Box::State::kReady && now >= box->expires_s) expired.push_back(id);
      if (!box->running.empty() && !Watch(*box, now)) {
        log::Warn("command outlived its kill; destroying the sandbox", {{"sandbox", id}});
        lost.push_back(id);
      }
    }
    for (const std::string& id : expired) log::Warn("sandbox lease expired", {{"sandbox", id}});
    expired.insert(expired.end(), lost.begin(), lost.end());
    for (const std::string& id : expired) Destroy(id, [](Status) {});
    std::vector<uint32_t> late;
    for (auto& [seq, asked] : asked_) {
      if (now >= asked.deadline_s) late.push_back(seq);
    }
    for (uint32_t seq : late) {
      OnReply done = std::move(asked_[seq].done);
      asked_.erase(seq);
      done(DeadlineExceeded("the janitor does not answer"), {});
    }
  }

  // False when SIGKILL did not end a command: the whole sandbox has to go.
  bool Watch(Box& box, double now) {
    bool cpu_out = false;
    if (box.limits.cpu_s > 0 && box.base.cpu_us >= 0) {
      int64_t used = ReadCounters(box.cpu.get(), -1, -1, -1).cpu_us - box.base.cpu_us;
      cpu_out = static_cast<double>(used) > box.limits.cpu_s * 1e6;
    }
    struct statfs fs = {};
    bool full = fstatfs(box.work.get(), &fs) == 0;
    std::vector<uint32_t> lost;
    for (auto& [exec_id, run] : box.running) {
      run->disk_full |= full && fs.f_bavail == 0 && !run->disk_was_full;
      run->files_full |= full && fs.f_ffree == 0 && !run->files_were_full;
      if (run->kill_s > 0) {
        if (now >= run->kill_s + kKillGraceS) lost.push_back(exec_id);
        continue;
      }
      run->timed_out = now >= run->deadline_s;
      run->cpu_out = cpu_out;
      if (!run->timed_out && !run->cpu_out) continue;
      run->kill_s = now;
      protocol::Message message{protocol::kKill, exec_id, 0, 0, 0};
      Status sent = SendPacket(box.control.get(), std::string_view(reinterpret_cast<char*>(&message), sizeof message), {}, 0.1);
      if (!sent.ok()) run->kill_s = now - kKillGraceS;
    }
    for (uint32_t exec_id : lost) Finish(box, exec_id, SIGKILL);
    return lost.empty();
  }

  void Ask(JanitorRequest request, OnReply done) {
    request.seq = ++seqs_;
    Status sent = SendPacket(options_.janitor_fd, Encode(request), {}, 5);
    if (!sent.ok()) return done(sent, {});
    asked_[request.seq] = Asked{std::move(done), Now() + kJanitorTimeoutS};
  }

  void OnJanitor() {
    for (;;) {
      auto packet = ReceivePacket(options_.janitor_fd);
      if (!packet.ok()) {
        if (packet.status().code() == StatusCode::kNotFound) return;
        if (packet.status().code() == StatusCode::kInvalidArgument) continue;
        // Without a janitor there are no sandboxes; every call from now on fails.
        poller_->Remove(options_.janitor_fd);
        std::map<uint32_t, Asked> asked = std::move(asked_);
        asked_.clear();
        for (auto& [seq, a] : asked) a.done(Unavailable("the janitor is gone"), {});
        return;
      }
      auto reply = DecodeJanitorReply(packet->bytes);
      if (!reply.ok()) continue;
      auto it = asked_.find(reply->seq);
      if (it == asked_.end()) continue;  // of a former service, or too late: its descriptors close here
      OnReply done = std::move(it->second.done);
      asked_.erase(it);
      if (reply->code != StatusCode::kOk) {
        done(Status(reply->code, reply->message), {});
      } else {
        done(std::move(reply), std::move(packet->fds));
      }
    }
  }

  void Adopt(Box& b, const JanitorReply& reply, std::vector<Fd>&& fds) {
    size_t next = 0;
    auto take = [&](uint32_t bit) { return (reply.fds & bit) && next < fds.size() ? std::move(fds[next++]) : Fd(); };
    b.handle = reply.handle;
    b.host_uid = reply.host_uid;
    b.control = take(kFdControl);
    b.work = take(kFdWork);
    Fd listener = take(kFdRelay);
    b.cpu = take(kFdCpu);
    b.oom = take(kFdOom);
    b.peak = take(kFdPeak);
    b.refused = take(kFdRefused);
    b.enforced = Enforced{reply.memory, reply.processes, "tmpfs", "tmpfs", reply.cpu, "timer", "capture"};
    b.base = b.Read();
    std::string id = b.id;
    poller_->Add(b.control.get(), EPOLLIN, [this, id](uint32_t) { OnInit(id); });
    if (listener.valid()) {
      b.relay = std::make_unique<Relay>(poller_.get(), std::move(listener), gateway_, kRelayConnectionsPerSandbox, &relay_stats_);
    }
  }

  Status SendExec(Box& box, Running& r, const ExecRequest& request) {
    bool by_rlimit = box.enforced.memory == "rlimit";
    WireWriter w;
    w.U32(protocol::kExecMagic).U32(request.role == Role::kTool ? 1 : 0);
    w.U64(by_rlimit ? static_cast<uint64_t>(box.limits.memory_bytes) : 0);
    w.U64(by_rlimit ? static_cast<uint64_t>(box.limits.processes) : 0);
    // Above the size of the disk, so that a full disk answers ENOSPC and only a sparse file meets this limit.
    w.U64(static_cast<uint64_t>(box.limits.disk_bytes) + (1 << 20));
    w.U64(box.limits.cpu_s > 0 ? static_cast<uint64_t>(std::ceil(box.limits.cpu_s)) + (box.enforced.cpu_s == "cgroup" ? 2 : 0) : 0);
    w.Str(request.cwd);
    w.U32(static_cast<uint32_t>(request.argv.size()));
    for (const std::string& a : request.argv) w.Str(a);
    std::vector<std::string> env = {"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/work", "LANG=C.UTF-8",
                                    std::string(kToolExecVariable) + "=" + protocol::kToolExecPath};
    for (const auto& [name, value] : request.env) {
      std::erase_if(env, [&, prefix = name + "="](const std::string& e) { return e.compare(0, prefix.size(), prefix) == 0; });
      env.push_back(name + "=" + value);
    }
    w.U32(static_cast<uint32_t>(env.size()));
    for (const std::string& e : env) w.Str(e);
    if (w.bytes().size() > protocol::kPayloadBytesMax) return InvalidArgument("arguments and environment take more than 2 MiB");
    ASSIGN_OR_RETURN(Fd payload, MemoryFile(w.bytes()));

    // A pipe, never a file: a file could be read again from its beginning through a link to /proc/self/fd/0 that an agent
    // left among the files of a verifier, whose input holds the answers.
    Fd input;
    if (request.stdin_bytes.empty()) {
      input = Fd(open("/dev/null", O_RDONLY | O_CLOEXEC));
      if (!input.valid()) return ErrnoStatus("/dev/null", errno);
    } else {
      int ends[2];
      if (pipe2(ends, O_CLOEXEC) != 0) return ErrnoStatus("pipe", errno);
      input = Fd(ends[0]);
      r.input = Fd(ends[1]);
      r.input_bytes = request.stdin_bytes;
      fcntl(ends[1], F_SETFL, O_NONBLOCK);
    }
    std::vector<Fd> theirs;
    const int count = request.capture_fd3 ? 3 : 2;
    for (int i = 0; i < count; ++i) {
      int ends[2];
      if (pipe2(ends, O_CLOEXEC) != 0) return ErrnoStatus("pipe", errno);
      r.streams[i].fd = Fd(ends[0]);
      r.streams[i].capture = i == 0 ? &r.out : i == 1 ? &r.err : nullptr;
      theirs.emplace_back(ends[1]);
      fcntl(ends[0], F_SETFL, O_NONBLOCK);
    }
    // Both users may open /dev/stdin, /dev/stderr and the like, which they may inherit from each other.
    auto share = [&](const Fd& fd) { return fchown(fd.get(), box.host_uid + protocol::kAgentUid, box.host_uid + protocol::kWorkGid) == 0 && fchmod(fd.get(), 0660) == 0; };
    for (const Fd& fd : theirs) {
      if (!share(fd)) return ErrnoStatus("share a stream", errno);
    }
    if (r.input.valid() && !share(input)) return ErrnoStatus("share standard input", errno);
    protocol::Message message{protocol::kExec, r.exec_id, 0, request.capture_fd3 ? protocol::kHasFd3 : 0, 0};
    std::vector<int> fds = {payload.get(), input.get()};
    for (const Fd& fd : theirs) fds.push_back(fd.get());
    return SendPacket(box.control.get(), std::string_view(reinterpret_cast<char*>(&message), sizeof message), fds, 1);
  }

  // False when all is written, or the command does not want it.
  static bool WriteInput(Running& r) {
    while (r.input_at < r.input_bytes.size()) {
      ssize_t n = write(r.input.get(), r.input_bytes.data() + r.input_at, r.input_bytes.size() - r.input_at);
      if (n < 0) return errno == EAGAIN || errno == EINTR;
      r.input_at += static_cast<size_t>(n);
    }
    return false;
  }

  // False at the end of the stream, or when no more of it is wanted.
  static bool ReadOnce(Running& r, Stream& s) {
    char bytes[kReadBytes];
    ssize_t n = read(s.fd.get(), bytes, sizeof bytes);
    if (n < 0) return errno == EAGAIN || errno == EINTR;
    if (n == 0) return false;
    if (s.capture) {
      s.capture->Add({bytes, static_cast<size_t>(n)});
    } else {
      size_t keep = std::min(static_cast<size_t>(n), static_cast<size_t>(kFd3BytesMax) - r.fd3.size());
      r.fd3.append(bytes, keep);
      r.fd3_dropped += static_cast<size_t>(n) - keep;
      // It is worthless now, and a gigabyte more of it would take this loop's time from everybody: the writer meets a broken pipe.
      if (r.fd3_dropped > 0) return false;
    }
    return true;
  }

  void OnInit(const std::string& id) {
    Box* box = Find(id);
    if (!box) return;
    for (;;) {
      auto packet = ReceivePacket(box->control.get());
      if (packet.ok()) {
        protocol::Message m;
        if (packet->bytes.size() != sizeof m) continue;
        std::memcpy(&m, packet->bytes.data(), sizeof m);
        if (m.type == protocol::kExit) Finish(*box, m.exec_id, m.status, static_cast<int64_t>(m.cpu_us));
        continue;
      }
      if (packet.status().code() == StatusCode::kNotFound) return;
      if (packet.status().code() == StatusCode::kInvalidArgument) continue;
      box->gone = true;
      poller_->Remove(box->control.get());
      while (!box->running.empty()) Finish(*box, box->running.begin()->first, -1);
      return;
    }
  }

  // `status` as wait() gives it; -1 = there is none: the process could not be made or the sandbox has ended.
  void Finish(Box& box, uint32_t exec_id, int status, int64_t cpu_us = 0) {
    auto it = box.running.find(exec_id);
    if (it == box.running.end()) return;
    Running& r = *it->second;
    // What the command wrote before it ended is in the pipes now. Others that live on may still write: no more than a
    // pipe can hold is taken.
    for (Stream& s : r.streams) {
      if (!s.fd.valid()) continue;
      if (!s.capture && r.fd3_dropped > 0) continue;
      for (int turns = 0; turns < 32 && ReadOnce(r, s); ++turns) {
        if (PipeEmpty(s.fd.get())) break;
      }
    }
    Counters now = box.Read();
    auto delta = [](int64_t after, int64_t before) { return after < 0 || before < 0 ? int64_t{0} : after - before; };
    ExecResult e;
    e.usage.wall_s = Now() - r.start_s;
    e.usage.cpu_s = static_cast<double>(now.cpu_us < 0 ? cpu_us : delta(now.cpu_us, r.base.cpu_us)) * 1e-6;
    e.usage.peak_bytes = now.peak_bytes;
    struct statfs fs = {};
    bool full = fstatfs(box.work.get(), &fs) == 0;
    bool oom = delta(now.oom_kills, box.gone ? box.base.oom_kills : r.base.oom_kills) > 0;
    bool refused = delta(now.refused_forks, r.base.refused_forks) > 0;
    if (r.out.dropped() || r.err.dropped()) e.limit = "output";
    if (r.files_full || (full && fs.f_ffree == 0)) e.limit = "files";
    if (r.disk_full || (full && fs.f_bavail == 0)) e.limit = "disk";
    if (refused) e.limit = "processes";
    if (oom) e.limit = "memory";
    e.out = r.out.Take();
    e.err = r.err.Take();
    e.fd3 = std::move(r.fd3);
    e.fd3_dropped = r.fd3_dropped;

    auto ended_by = [&](const char* limit) {
      e.outcome = ExecOutcome::kLimit;
      e.limit = limit;
      if (WIFSIGNALED(status)) e.signal = WTERMSIG(status);
    };
    if (r.timed_out) {
      e.outcome = ExecOutcome::kTimeout;
      e.limit = "wall_s";
    } else if (r.cpu_out) {
      ended_by("cpu_s");
    } else if (status == -1) {
      if (oom) {
        ended_by("memory");
      } else if (refused && !box.gone) {
        ended_by("processes");
      } else {
        e.message = box.state == Box::State::kDying ? "destroyed" : box.gone ? "the sandbox has ended" : "no process could be made";
      }
    } else if (WIFSIGNALED(status)) {
      int signal = WTERMSIG(status);
      if (signal == SIGKILL && oom) {
        ended_by("memory");
      } else if (signal == SIGXCPU) {
        ended_by("cpu_s");
      } else if (signal == SIGXFSZ) {
        ended_by("disk");
      } else {
        e.outcome = ExecOutcome::kSignaled;
        e.signal = signal;
      }
    } else {
      e.outcome = ExecOutcome::kExited;
      e.exit_code = WEXITSTATUS(status);
      // A shell reports the killed command in its own exit code.
      if (e.exit_code == 128 + SIGKILL && oom) ended_by("memory");
      if (e.exit_code == 128 + SIGXCPU && box.limits.cpu_s > 0) ended_by("cpu_s");
      if (e.exit_code == 128 + SIGXFSZ) ended_by("disk");
    }
    Complete(box, exec_id, std::move(e));
  }

  static bool PipeEmpty(int fd) {
    int waiting = 0;
    return ioctl(fd, FIONREAD, &waiting) == 0 && waiting == 0;
  }

  void Complete(Box& box, uint32_t exec_id, ExecResult result) {
    auto it = box.running.find(exec_id);
    std::unique_ptr<Running> r = std::move(it->second);
    box.running.erase(it);
    --running_;
    for (Stream& s : r->streams) {
      if (s.fd.valid()) poller_->Remove(s.fd.get());
    }
    if (r->input.valid()) poller_->Remove(r->input.get());
    r->done(std::move(result));
  }

  void BeginDestroy(Box& box) {
    while (!box.running.empty()) Finish(box, box.running.begin()->first, -1);
    box.relay.reset();
    if (!box.gone) poller_->Remove(box.control.get());
    box.control.Reset();
    box.work.Reset();
    JanitorRequest ask;
    ask.type = JanitorRequest::Type::kDestroy;
    ask.handle = box.handle;
    std::string id = box.id;
    Ask(std::move(ask), [this, id](Result<JanitorReply> reply, std::vector<Fd>&&) {
      auto it = boxes_.find(id);
      if (it == boxes_.end()) return;
      std::vector<std::function<void(Status)>> waiting = std::move(it->second->destroyed);
      boxes_.erase(it);
      Status status = reply.ok() || reply.status().code() == StatusCode::kNotFound ? Status::Ok() : reply.status();
      for (auto& w : waiting) w(status);
    });
  }

  ServiceOptions options_;
  sockaddr_in gateway_;
  std::unique_ptr<Poller> poller_;
  Fd wake_;
  std::thread thread_;
  std::mutex mutex_;
  std::deque<std::function<void()>> posts_;  // bounded by the callers: each waits for its own, and commands are counted
  bool stop_ = false, closing_ = false;
  std::map<std::string, std::unique_ptr<Box>> boxes_;
  std::map<uint32_t, Asked> asked_;
  // A stale answer to a former service on the same channel must not look like one to us.
  uint32_t seqs_ = static_cast<uint32_t>(Mix64(static_cast<uint64_t>(getpid()) ^ static_cast<uint64_t>(SystemClock::Get().WallS() * 1e6)));
  uint32_t exec_ids_ = 0;
  size_t running_ = 0;
  RelayStats relay_stats_;
  int64_t created_ = 0, commands_ = 0;
};

LocalSandboxService::LocalSandboxService(std::unique_ptr<Loop> loop) : loop_(std::move(loop)) {}

Result<std::unique_ptr<LocalSandboxService>> LocalSandboxService::Start(const ServiceOptions& options) {
  sockaddr_in gateway = {};
  if (!options.gateway_address.empty()) {
    ASSIGN_OR_RETURN(gateway, ParseAddress(options.gateway_address));
  }
  ASSIGN_OR_RETURN(std::unique_ptr<Poller> poller, Poller::Make());
  Fd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.valid()) return ErrnoStatus("eventfd", errno);
  auto loop = std::make_unique<Loop>(options, std::move(poller), std::move(wake), gateway);
  Status started = loop->Start();
  std::unique_ptr<LocalSandboxService> service(new LocalSandboxService(std::move(loop)));
  if (!started.ok()) return started;
  return service;
}

LocalSandboxService::~LocalSandboxService() { loop_->Stop(); }

void LocalSandboxService::Close() { loop_->Close(); }

Result<SandboxInfo> LocalSandboxService::Create(const CreateRequest& request) {
  using Made = Result<Loop::Created>;
  auto created = std::make_shared<Made>(loop_->Wait<Made>([&](auto done) { loop_->Create(request, done); }));
  if (!created->ok()) return created->status();
  // On the caller's thread: other sandboxes do not wait for these bytes.
  Loop::Created& c = **created;
  Status put = PutFiles(c.work.get(), request.files, c.host_uid + protocol::kAgentUid, c.host_uid + protocol::kWorkGid);
  c.work.Reset();
  if (!put.ok()) {
    Status destroyed = Destroy(request.id);
    (void)destroyed;
    return put;
  }
  return loop_->Wait<Result<SandboxInfo>>([&](auto done) { done(loop_->MakeReady(request.id)); });
}

void LocalSandboxService::ExecAsync(const ExecRequest& request, std::function<void(Result<ExecResult>)> done) {
  Status ok = Check(request);
  if (!ok.ok()) return done(ok);
  loop_->Post([this, request, done] { loop_->Exec(request, done); });
}

Result<ExecResult> LocalSandboxService::Exec(const ExecRequest& request) {
  auto promise = std::make_shared<std::promise<Result<ExecResult>>>();
  auto future = promise->get_future();
  ExecAsync(request, [promise](Result<ExecResult> result) { promise->set_value(std::move(result)); });
  return future.get();
}

Result<std::vector<File>> LocalSandboxService::Export(const std::string& id, const ExportOptions& options) {
  ASSIGN_OR_RETURN(Fd work, loop_->Wait<Result<Fd>>([&](auto done) { done(loop_->WorkFolder(id)); }));
  return TakeFiles(work.get(), options);
}

Status LocalSandboxService::Renew(const std::string& id, double ttl_s) {
  return loop_->Wait<Status>([&](auto done) { done(loop_->Renew(id, ttl_s)); });
}

Status LocalSandboxService::Destroy(const std::string& id) {
  return loop_->Wait<Status>([&](auto done) { loop_->Destroy(id, done); });
}

Result<std::vector<SandboxInfo>> LocalSandboxService::List() {
  return loop_->Wait<std::vector<SandboxInfo>>([&](auto done) { done(loop_->List()); });
}

}  // namespace temper::sandbox
