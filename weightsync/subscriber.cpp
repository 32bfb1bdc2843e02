#include "weightsync/subscriber.h"

#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#include "common/clock.h"
#include "common/faults.h"
#include "common/file.h"
#include "common/log.h"
#include "common/rpc.h"
#include "common/rpc_call.h"
#include "temper/v1/weightsync.grpc.pb.h"
#include "weightsync/manifest.h"
#include "weightsync/subscriber_core.h"
#include "weightsync/wire.h"

namespace temper::weightsync {
namespace {

int64_t NowMs() { return static_cast<int64_t>(SystemClock::Get().NowS() * 1e3); }

// The mapping of an arena.
struct Mapping {
  std::byte* at = nullptr;
  size_t size = 0;
  ~Mapping() {
    if (at) munmap(at, size);
  }
};

// Opens the arena of a record and maps it: shared and read-only, or (for the fault points) as a private copy that can be written.
Result<std::shared_ptr<Mapping>> Map(const VersionRecord& record, bool private_copy) {
  const std::string path = "/proc/" + std::to_string(record.pid) + "/fd/" + std::to_string(record.fd);
  Fd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return ErrnoStatus(path, errno);
  struct stat st {};
  if (fstat(fd.get(), &st) != 0) return ErrnoStatus(path, errno);
  if (st.st_ino != record.arena) return DataLoss(path + " is not the arena of " + ToString(record.version));
  // Without this seal the file could shrink under the mapping, and reading it would be a SIGBUS.
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || !(seals & F_SEAL_SHRINK)) return DataLoss(path + " is not sealed");
  if (static_cast<uint64_t>(st.st_size) < record.bytes) return DataLoss(path + " has " + std::to_string(st.st_size) + " bytes");
  auto mapping = std::make_shared<Mapping>();
  void* at = mmap(nullptr, record.bytes, private_copy ? PROT_READ | PROT_WRITE : PROT_READ, private_copy ? MAP_PRIVATE : MAP_SHARED,
                  fd.get(), 0);
  if (at == MAP_FAILED) return ErrnoStatus("mmap of " + path, errno);
  mapping->at = static_cast<std::byte*>(at);
  mapping->size = record.bytes;
  return mapping;
}

}  // namespace

struct Subscriber::State {
  State(const SubscriberOptions& o, std::function<void()> w)
      : options(o),
        wake(std::move(w)),
        channel(RpcChannel(o.publisher_address)),
        stub(v1::WeightSync::NewStub(channel)),
        core(o.worker, o.incarnation ? o.incarnation : static_cast<uint64_t>(SystemClock::Get().WallS() * 1e6), getpid()) {}

  void Loop() {
    bool may_serve = false;
    while (!Stopping()) {
      const Status status = Exchange();
      bool due;
      {
        std::unique_lock lock(mutex);
        if (!status.ok() && !stopped) {
          changed.wait_for(lock, std::chrono::milliseconds(options.retry_ms), [&] { return stopped; });
        }
        due = core.SwapDue() || core.swapping();
        const bool now_may = core.MayServe(NowMs());
        if (due || now_may != may_serve) {
          may_serve = now_may;
          lock.unlock();
          wake();
          lock.lock();
        }
        // The engine swaps between two steps; its acknowledgement is the next report. The wait is short enough to keep the lease.
        if (due) changed.wait_for(lock, std::chrono::milliseconds(WaitMs()), [&] { return stopped || !(core.SwapDue() || core.swapping()); });
      }
    }
  }

  bool Stopping() {
    std::lock_guard lock(mutex);
    return stopped;
  }

  int64_t WaitMs() const { return std::clamp<int64_t>(core.lease_ms() / 4, 10, 2000); }

  std::vector<Version> Held() {
    std::vector<Version> held;
    std::erase_if(mapped, [&](const auto& m) {
      if (m.second.expired()) return true;
      held.push_back(m.first);
      return false;
    });
    return held;
  }

  // One report and what its answer asks for.
  Status Exchange() {
    v1::SyncRequest request;
    int64_t wait_ms;
    auto context = std::make_shared<grpc::ClientContext>();
    {
      std::lock_guard lock(mutex);
      if (stopped) return Cancelled("stopped");
      wait_ms = core.SwapDue() || core.swapping() ? 0 : WaitMs();
      ToProto(core.NextReport(Held(), NowMs()), &request);
      if (model_known) {
        request.set_config_hash(manifest.config_hash);
        request.set_profile(manifest.profile);
        request.set_layout(manifest.layout);
      }
      running = context;
    }
    request.set_wait_ms(static_cast<uint32_t>(wait_ms));
    context->set_deadline(gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_millis(wait_ms + 2000, GPR_TIMESPAN)));
    v1::SyncReply reply;
    const Status status = FromGrpc(stub->Sync(context.get(), request, &reply));
    std::unique_lock lock(mutex);
    ++syncs;
    running.reset();
    if (!status.ok()) {
      if (status.code() == StatusCode::kUnavailable) core.OnAbsent();
      return status;
    }
    Result<Answer> answer = FromProto(reply);
    if (!answer.ok()) return answer.status();
    if (!answer->refuse.empty()) return Refused(answer->refuse);
    if (!model_known) {
      const Manifest offered = FromProto(reply.manifest());
      Result<ManifestModel> read = ReadManifest(offered);
      if (!read.ok()) return Refused(read.status().message());
      manifest = offered;
      model = *read;
      model_known = true;
    }
    const std::optional<VersionRecord> record = core.OnAnswer(*answer);
    if (!record) return Status::Ok();
    staged_weights = {};  // of a version that was superseded
    lock.unlock();
    Result<engine::ComputeWeights> weights = Stage(*record);
    lock.lock();
    if (weights.ok()) {
      staged_weights = *weights;
      core.OnStaged(*record);
      return Status::Ok();
    }
    ++refused;
    log::Error("weights refused", {{"version", ToString(record->version)}, {"why", weights.status().message()}});
    core.OnRefused(*record, weights.status().message());
    return Status::Ok();
  }

  Status Refused(const std::string& why) {
    if (!std::exchange(complained, true)) log::Error("weight sync refused", {{"worker", options.worker}, {"why", why}});
    return FailedPrecondition(why);
  }

  Result<engine::ComputeWeights> Stage(const VersionRecord& record) {
    if (record.bytes != manifest.bytes) {
      return DataLoss(std::to_string(record.bytes) + " bytes offered, " + std::to_string(manifest.bytes) + " expected");
    }
    const bool corrupt = !Faults::Get().Hit("weightsync.corrupt_staged").ok();
    ASSIGN_OR_RETURN(engine::ComputeWeights weights, View(record, corrupt));
    if (corrupt) FlipWeight(weights);
    const Digest digest = weights.ComputeDigest();
    if (!(digest == record.digest)) return DataLoss("digest " + digest.Hex() + ", expected " + record.digest.Hex());
    if (!Faults::Get().Hit("weightsync.flip_verified").ok()) {
      ASSIGN_OR_RETURN(weights, View(record, true));
      FlipWeight(weights);
    }
    return weights;
  }

  Result<engine::ComputeWeights> View(const VersionRecord& record, bool private_copy) {
    ASSIGN_OR_RETURN(std::shared_ptr<Mapping> mapping, Map(record, private_copy));
    {
      std::lock_guard lock(mutex);
      mapped.emplace_back(record.version, mapping);
    }
    return engine::ComputeWeights::View(model.config, model.profile, std::span<const std::byte>(mapping->at, record.bytes), mapping);
  }

  // Changes the highest mantissa bit of one matrix element; the bytes are a private copy.
  void FlipWeight(const engine::ComputeWeights& weights) {
    auto* word = const_cast<std::byte*>(weights.layer(0).down.data);
    word[model.profile == engine::Profile::kBf16 ? 0 : 2] ^= std::byte{0x40};
  }

  const SubscriberOptions options;
  const std::function<void()> wake;
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<v1::WeightSync::Stub> stub;
  mutable std::mutex mutex;
  std::condition_variable changed;
  SubscriberCore core;
  bool stopped = false;
  bool model_known = false;
  bool complained = false;
  Manifest manifest;
  ManifestModel model;
  engine::ComputeWeights staged_weights;
  std::vector<std::pair<Version, std::weak_ptr<Mapping>>> mapped;
  std::shared_ptr<grpc::ClientContext> running;
  int64_t syncs = 0;
  int64_t refused = 0;
  std::thread thread;
};

Subscriber::Subscriber(const SubscriberOptions& options, std::function<void()> wake)
    : state_(std::make_unique<State>(options, std::move(wake))) {
  state_->thread = std::thread([s = state_.get()] { s->Loop(); });
}

Subscriber::~Subscriber() { Stop(); }

std::optional<Staged> Subscriber::TakeSwap() {
  std::lock_guard lock(state_->mutex);
  std::optional<Version> version = state_->core.TakeSwap();
  if (!version) return std::nullopt;
  return Staged{std::exchange(state_->staged_weights, {}), *version};
}

void Subscriber::Swapped(const Version& version) {
  std::lock_guard lock(state_->mutex);
  state_->core.OnSwapped(version);
  state_->changed.notify_all();
}

bool Subscriber::MayServe() const {
  std::lock_guard lock(state_->mutex);
  return state_->core.MayServe(NowMs());
}

std::map<std::string, double> Subscriber::Metrics() const {
  std::lock_guard lock(state_->mutex);
  std::map<std::string, double> m;
  if (auto v = state_->core.active()) {
    m["active_epoch"] = static_cast<double>(v->epoch);
    m["active_step"] = static_cast<double>(v->step);
  }
  m["staged"] = state_->core.staged() ? 1 : 0;
  m["refused"] = static_cast<double>(state_->refused);
  m["syncs"] = static_cast<double>(state_->syncs);
  return m;
}

void Subscriber::Stop() {
  {
    std::lock_guard lock(state_->mutex);
    state_->stopped = true;
    if (state_->running) state_->running->TryCancel();
    state_->changed.notify_all();
  }
  if (state_->thread.joinable()) state_->thread.join();
}

}  // namespace temper::weightsync
