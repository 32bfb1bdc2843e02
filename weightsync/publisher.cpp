#include "weightsync/publisher.h"

#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <linux/memfd.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <mutex>

#include "common/clock.h"
#include "common/file.h"
#include "common/log.h"
#include "common/rpc_call.h"
#include "temper/v1/weightsync.grpc.pb.h"
#include "weightsync/publisher_core.h"
#include "weightsync/wire.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace temper::weightsync {
namespace {

constexpr size_t kArenasMax = 8;
constexpr int64_t kSliceMs = 20;  // how often a waiting Publish looks at the workers' processes

int64_t NowMs() { return static_cast<int64_t>(SystemClock::Get().NowS() * 1e3); }

// Memory of one version, shared read-only with workers. Only this mapping can ever write it (F_SEAL_FUTURE_WRITE), and only
// between Begin and Publish.
class Arena {
 public:
  static Result<std::unique_ptr<Arena>> Create(size_t bytes) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t size = (bytes + page - 1) / page * page;
    auto arena = std::unique_ptr<Arena>(new Arena());
    arena->fd_ = Fd(memfd_create("temper-weights", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (!arena->fd_.valid()) return ErrnoStatus("memfd_create", errno);
    if (ftruncate(arena->fd_.get(), static_cast<off_t>(size)) != 0) return ErrnoStatus("weights of " + std::to_string(size) + " bytes", errno);
    void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, arena->fd_.get(), 0);
    if (at == MAP_FAILED) return ErrnoStatus("mmap of " + std::to_string(size) + " bytes", errno);
    arena->at_ = static_cast<std::byte*>(at);
    arena->size_ = size;
    const int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE;
    if (fcntl(arena->fd_.get(), F_ADD_SEALS, seals | F_SEAL_SEAL) != 0) return ErrnoStatus("sealing a memfd", errno);
    struct stat st {};
    if (fstat(arena->fd_.get(), &st) != 0) return ErrnoStatus("fstat", errno);
    arena->inode_ = st.st_ino;
    return arena;
  }
  ~Arena() {
    if (at_) munmap(at_, size_);
  }

  std::byte* at() { return at_; }
  int fd() const { return fd_.get(); }
  uint64_t inode() const { return inode_; }
  void Protect(bool writable) { TEMPER_CHECK(mprotect(at_, size_, writable ? PROT_READ | PROT_WRITE : PROT_READ) == 0); }

  std::optional<Version> version;  // what it holds, once sealed

 private:
  Arena() = default;
  Fd fd_;
  std::byte* at_ = nullptr;
  size_t size_ = 0;
  uint64_t inode_ = 0;
};

// The process of one incarnation of a worker; readable once it has ended.
struct Process {
  std::string worker;
  uint64_t incarnation = 0;
  Fd pidfd;
};

}  // namespace

struct Publisher::State final : public v1::WeightSync::Service {
  explicit State(const PublisherOptions& o) : options(o), core(o.epoch, o.lease_ms) {}

  grpc::Status Sync(grpc::ServerContext* context, const v1::SyncRequest* request, v1::SyncReply* reply) override {
    Result<Report> report = FromProto(*request);
    if (!report.ok()) return ToGrpc(report.status());
    const int64_t deadline_ms = NowMs() + std::min<int64_t>(request->wait_ms(), 30000);
    std::unique_lock lock(mutex);
    ToProto(options.manifest, reply->mutable_manifest());
    if (std::string why = Mismatch(*request); !why.empty()) {
      reply->set_epoch(options.epoch);
      reply->set_refuse(why);
      return grpc::Status::OK;
    }
    core.OnReport(*report, NowMs());
    Watch(*report);
    changed.notify_all();
    while (!stopped && !core.TellsNews(*report) && !context->IsCancelled()) {
      const int64_t left_ms = deadline_ms - NowMs();
      if (left_ms <= 0) break;
      changed.wait_for(lock, std::chrono::milliseconds(std::min<int64_t>(left_ms, 100)));
    }
    if (stopped) return {grpc::StatusCode::UNAVAILABLE, "the publisher stops"};
    ToProto(core.AnswerTo(*report), reply);
    return grpc::Status::OK;
  }

  std::string Mismatch(const v1::SyncRequest& r) const {
    const Manifest& m = options.manifest;
    if (!r.profile().empty() && r.profile() != m.profile) return "the worker runs profile " + r.profile() + ", the trainer " + m.profile;
    if (!r.layout().empty() && r.layout() != m.layout) return "the worker reads layout " + r.layout() + ", the trainer writes " + m.layout;
    if (r.config_hash() && r.config_hash() != m.config_hash) return "the worker runs another model configuration";
    return "";
  }

  // Opens a pidfd for a new incarnation, so that its end is seen at once.
  void Watch(const Report& report) {
    for (const Process& p : processes) {
      if (p.worker == report.worker && p.incarnation == report.incarnation) return;
    }
    auto it = core.members().find(report.worker);
    if (it == core.members().end() || it->second.incarnation != report.incarnation) return;
    log::Info("rollout worker joined", {{"worker", report.worker}, {"pid", report.pid}, {"incarnation", report.incarnation}});
    int fd = static_cast<int>(syscall(SYS_pidfd_open, report.pid, 0));
    if (fd < 0 && errno == ESRCH) {
      core.OnGone(report.worker, report.incarnation, NowMs());
      return;
    }
    // Without a pidfd (an old kernel) the lease alone tells.
    if (fd >= 0) processes.push_back({report.worker, report.incarnation, Fd(fd)});
  }

  void Look() {
    const int64_t now_ms = NowMs();
    for (size_t i = 0; i < processes.size();) {
      pollfd p{processes[i].pidfd.get(), POLLIN, 0};
      if (poll(&p, 1, 0) <= 0) {
        ++i;
        continue;
      }
      log::Warn("rollout worker gone", {{"worker", processes[i].worker}, {"incarnation", processes[i].incarnation}});
      core.OnGone(processes[i].worker, processes[i].incarnation, now_ms);
      processes.erase(processes.begin() + static_cast<int64_t>(i));
    }
    core.OnTick(now_ms);
  }

  const PublisherOptions options;
  mutable std::mutex mutex;
  std::condition_variable changed;
  PublisherCore core;
  std::vector<std::unique_ptr<Arena>> arenas;
  Arena* filling = nullptr;  // between Begin and Publish
  std::vector<Process> processes;
  bool stopped = false;
  bool joined = false;  // the first Publish has waited for workers
  int64_t publishes = 0;
  int64_t refused = 0;
  double publish_ms_last = 0;
};

Result<std::unique_ptr<Publisher>> Publisher::Create(const PublisherOptions& options) {
  if (options.manifest.bytes == 0 || options.epoch == 0 || options.lease_ms <= 0) {
    return InvalidArgument("weight sync: manifest, epoch and lease must be given");
  }
  return std::unique_ptr<Publisher>(new Publisher(std::make_unique<State>(options)));
}

Publisher::Publisher(std::unique_ptr<State> state) : state_(std::move(state)) {}
Publisher::~Publisher() { Stop(); }

grpc::Service* Publisher::service() { return state_.get(); }

Result<std::span<std::byte>> Publisher::Begin() {
  State& s = *state_;
  std::lock_guard lock(s.mutex);
  s.Look();
  if (!s.filling) {
    for (auto it = s.arenas.begin(); it != s.arenas.end();) {
      Arena& arena = **it;
      auto readers = !arena.version ? PublisherCore::Readers::kNone : s.core.ReadersOf(*arena.version);
      if (arena.version == s.core.newest() && arena.version) readers = PublisherCore::Readers::kLive;  // for those who join later
      if (readers == PublisherCore::Readers::kFenced) {
        // A worker that hangs may map it: the kernel keeps the memory as long as it does, nobody writes it any more.
        it = s.arenas.erase(it);
        continue;
      }
      if (readers == PublisherCore::Readers::kNone && !s.filling) s.filling = &arena;
      ++it;
    }
  }
  if (!s.filling) {
    if (s.arenas.size() >= kArenasMax) {
      return ResourceExhausted(std::to_string(kArenasMax) + " versions are still read by workers");
    }
    ASSIGN_OR_RETURN(std::unique_ptr<Arena> arena, Arena::Create(s.options.manifest.bytes));
    s.filling = arena.get();
    s.arenas.push_back(std::move(arena));
  }
  s.filling->version.reset();
  s.filling->Protect(true);
  return std::span<std::byte>(s.filling->at(), s.options.manifest.bytes);
}

Result<PublishReport> Publisher::Publish(int64_t step, const Digest& digest, int64_t deadline_ms) {
  State& s = *state_;
  const int64_t start_ms = NowMs();
  const int64_t end_ms = start_ms + deadline_ms;
  std::unique_lock lock(s.mutex);
  TEMPER_CHECK(s.filling) << "Publish without Begin";
  auto wait_slice = [&](int64_t until_ms) {
    s.changed.wait_for(lock, std::chrono::milliseconds(std::clamp<int64_t>(until_ms - NowMs(), 1, kSliceMs)));
    s.Look();
  };
  if (!s.joined) {
    const int64_t join_end_ms = std::min(end_ms, start_ms + s.options.join_ms);
    while (!s.stopped && s.core.live() < s.options.expected_workers && NowMs() < join_end_ms) wait_slice(join_end_ms);
    s.joined = true;
  }
  if (s.stopped) return Cancelled("the publisher was stopped");
  VersionRecord record{.version = {s.options.epoch, step},
                       .digest = digest,
                       .bytes = s.options.manifest.bytes,
                       .pid = static_cast<int32_t>(getpid()),
                       .fd = s.filling->fd(),
                       .arena = s.filling->inode()};
  s.filling->Protect(false);
  RETURN_IF_ERROR(s.core.Seal(record, NowMs()));
  s.filling->version = record.version;
  s.filling = nullptr;
  s.changed.notify_all();
  while (!s.stopped && s.core.newest_state() != VersionState::kCommitted && s.core.newest_state() != VersionState::kRejected &&
         NowMs() < end_ms) {
    wait_slice(end_ms);
  }
  s.refused += s.core.refused();
  switch (s.core.newest_state()) {
    case VersionState::kCommitted: break;
    case VersionState::kRejected:
      return DataLoss("version " + ToString(record.version) + " was refused twice: " + s.core.rejected_reason());
    default:
      if (s.stopped) return Cancelled("the publisher was stopped");
      return DeadlineExceeded("version " + ToString(record.version) + " is not served by all " + std::to_string(s.core.live()) +
                              " workers after " + std::to_string(deadline_ms) + " ms");
  }
  PublishReport report{.version = record.version,
                       .workers = 0,
                       .lost = s.core.lost(),
                       .refused = s.core.refused(),
                       .wall_ms = static_cast<double>(NowMs() - start_ms)};
  for (const auto& [name, m] : s.core.members()) report.workers += !m.fenced && m.active == record.version;
  ++s.publishes;
  s.publish_ms_last = report.wall_ms;
  return report;
}

bool Publisher::Committed(Version* version) const {
  std::lock_guard lock(state_->mutex);
  std::optional<Version> v = state_->core.committed();
  if (v) *version = *v;
  return v.has_value();
}

std::map<std::string, double> Publisher::Metrics() const {
  std::lock_guard lock(state_->mutex);
  const State& s = *state_;
  std::map<std::string, double> m;
  m["workers"] = s.core.live();
  m["fenced"] = static_cast<double>(s.core.members().size()) - s.core.live();
  if (auto v = s.core.committed()) {
    m["version_epoch"] = static_cast<double>(v->epoch);
    m["version_step"] = static_cast<double>(v->step);
  }
  m["publishes"] = static_cast<double>(s.publishes);
  m["publish_ms_last"] = s.publish_ms_last;
  m["refused"] = static_cast<double>(s.refused);
  m["arenas"] = static_cast<double>(s.arenas.size());
  return m;
}

std::vector<std::string> Publisher::Describe() const {
  std::lock_guard lock(state_->mutex);
  std::vector<std::string> lines;
  for (const auto& [name, m] : state_->core.members()) {
    std::string line = name + " pid " + std::to_string(m.pid);
    line += m.fenced ? " fenced" : "";
    line += m.active ? " serves " + ToString(*m.active) : " serves nothing yet";
    if (m.staged) line += ", has staged " + ToString(*m.staged);
    lines.push_back(std::move(line));
  }
  return lines;
}

void Publisher::Stop() {
  std::lock_guard lock(state_->mutex);
  state_->stopped = true;
  state_->changed.notify_all();
}

}  // namespace temper::weightsync
