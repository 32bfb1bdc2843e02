#include "rollout/worker.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/check.h"
#include "common/clock.h"
#include "common/faults.h"
#include "common/log.h"
#include "engine/decode/paged_model.h"
#include "engine/engine.h"
#include "engine/kernel_path.h"
#include "engine/kv_pool.h"

namespace temper::rollout {
namespace {

constexpr uint64_t kKvBytesMax = uint64_t{1} << 30;
constexpr double kIdleWaitS = 1.0;       // an idle engine thread looks around this often even without a wake
constexpr double kFencedWaitS = 0.02;    // and this often while there is work that may not run
constexpr double kMetricsS = 0.25;

double NowS() { return SystemClock::Get().NowS(); }

// One request, shared by the engine thread and the caller's Call.
struct Running {
  GenerateRequest request;
  double deadline_s = 0;  // 0 = none

  // Held while a callback runs, so that a Call can wait for it and then forbid further ones.
  std::mutex callback_mutex;
  Callbacks callbacks;
  bool detached = false;

  std::atomic<bool> done{false};
  std::atomic<bool> cancelled{false};

  // Engine thread only.
  uint64_t id = 0;  // in the decoder
  bool added = false;
  Chunk pending;
  size_t pending_kept_bytes = 0;
  double pending_since_s = 0;
  uint64_t ids_hash = 0;

  void Emit(const Chunk& chunk) {
    std::lock_guard lock(callback_mutex);
    if (!detached && callbacks.on_chunk) callbacks.on_chunk(chunk);
  }
  void Done(const Status& status) {
    TEMPER_CHECK(!done.exchange(true)) << "a call ended twice";
    std::lock_guard lock(callback_mutex);
    if (!detached && callbacks.on_done) callbacks.on_done(status);
    callbacks = {};
  }
};

class Fixed final : public WeightSource {
 public:
  Fixed(engine::ComputeWeights weights, const engine::Version& version) : weights_{std::move(weights), version} {}
  std::optional<Weights> TakeSwap() override {
    return std::exchange(taken_, true) ? std::nullopt : std::optional<Weights>(weights_);
  }
  void Swapped(const engine::Version&) override {}
  bool MayServe() override { return true; }
  void SetWake(std::function<void()>) override {}

 private:
  Weights weights_;
  bool taken_ = false;
};

}  // namespace

std::unique_ptr<WeightSource> FixedWeights(engine::ComputeWeights weights, const engine::Version& version) {
  return std::make_unique<Fixed>(std::move(weights), version);
}

struct Worker::State {
  WorkerOptions options;
  WeightSource* source = nullptr;
  std::unique_ptr<engine::Engine> engine;
  temper::Metrics metrics;

  // What other threads hand to the engine thread.
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::shared_ptr<Running>> added;
  std::vector<std::shared_ptr<Running>> cancelled;
  int calls = 0;  // accepted and not ended; at most queue_max
  bool woken = false;
  bool stopped = false;

  // Engine thread only.
  std::unique_ptr<engine::Decoder> decoder;
  std::vector<std::shared_ptr<Running>> early;  // before the first weights
  std::unordered_map<uint64_t, std::shared_ptr<Running>> running;
  std::vector<engine::DecodeEvent> events;
  double metrics_at_s = 0;
  uint64_t metrics_tokens = 0;

  std::thread thread;

  void Loop() {
    std::vector<std::shared_ptr<Running>> added_now, cancelled_now;
    for (;;) {
      {
        std::lock_guard lock(mutex);
        if (stopped) break;
        std::swap(added_now, added);
        std::swap(cancelled_now, cancelled);
        woken = false;
      }
      for (auto& r : added_now) Accept(std::move(r));
      added_now.clear();
      for (auto& r : cancelled_now) Abort(*r, Cancelled("cancelled by the caller"));
      cancelled_now.clear();
      Swap();
      events.clear();
      bool worked = decoder && source->MayServe() && decoder->Step(&events);
      const double now_s = NowS();
      for (engine::DecodeEvent& e : events) {
        (void)Faults::Get().Hit("rollout.sampled");
        OnEvent(e, now_s);
      }
      const double next_s = Sweep(now_s);
      UpdateMetrics(now_s);
      if (!worked) Sleep(now_s, next_s);
    }
    for (auto& [id, r] : running) r->Done(Unavailable("the worker stops"));
    for (auto& r : early) r->Done(Unavailable("the worker stops"));
    running.clear();
    early.clear();
    {
      std::lock_guard lock(mutex);
      std::swap(added_now, added);
    }
    for (auto& r : added_now) r->Done(Unavailable("the worker stops"));
  }

  void Sleep(double now_s, double next_s) {
    const bool blocked = !running.empty();  // fenced, or all that runs waits for pages: look again soon
    double wait_s = std::min(next_s - now_s, blocked ? kFencedWaitS : kIdleWaitS);
    if (wait_s <= 0) return;
    std::unique_lock lock(mutex);
    changed.wait_for(lock, std::chrono::duration<double>(wait_s),
                     [&] { return stopped || woken || !added.empty() || !cancelled.empty(); });
  }

  void Swap() {
    std::optional<WeightSource::Weights> next = source->TakeSwap();
    if (!next) return;
    (void)Faults::Get().Hit("rollout.swap");
    if (!decoder) MakeDecoder(next->weights);
    const Status status = decoder->SwapWeights(next->weights, next->version);
    TEMPER_CHECK(status.ok()) << status.ToString();
    const engine::Version version = next->version;
    next.reset();  // the source counts who still maps the former version
    source->Swapped(version);
    for (auto& r : early) Add(std::move(r));
    early.clear();
  }

  void MakeDecoder(const engine::ComputeWeights& weights) {
    const engine::ModelConfig& config = weights.config();
    const uint64_t page = engine::KvPool::PageBytes(config, weights.profile());
    const uint64_t full = (static_cast<uint64_t>(config.max_positions) + 63) / 64;
    uint64_t pages = options.kv_bytes ? options.kv_bytes / page : std::min(2 * full * static_cast<uint64_t>(options.max_batch), kKvBytesMax / page);
    pages = std::clamp<uint64_t>(pages, 2, INT32_MAX / 64);
    engine::DecoderOptions o{.max_batch = options.max_batch,
                             .chunk_tokens = options.chunk_tokens,
                             .waiting_max = options.queue_max,
                             .in_flight = options.in_flight};
    decoder = std::make_unique<engine::Decoder>(
        std::make_unique<engine::PagedModel>(*engine, config, weights.profile(), static_cast<int>(pages)), o);
    const std::string path = engine::CpuPathName(engine::KernelPath(*engine, weights.profile()));
    metrics["cpu_path." + path].Set(1);
    log::Info("rollout engine ready", {{"cpu", path}, {"threads", engine->threads().count()},
                                       {"profile", engine::ProfileName(weights.profile())}, {"kv_pages", pages}, {"kv_bytes", pages * page}});
  }

  void Accept(std::shared_ptr<Running> r) {
    if (decoder) {
      Add(std::move(r));
    } else {
      early.push_back(std::move(r));
    }
  }

  void Add(std::shared_ptr<Running> r) {
    r->ids_hash = IdsHash(r->request.prompt_ids);
    r->pending.ids_hash = r->ids_hash;  // a call may end before its first token
    engine::DecodeRequest request{.ids = std::move(r->request.prompt_ids),
                                  .sampling = r->request.sampling,
                                  .stop_ids = std::move(r->request.stop_ids),
                                  .key = r->request.key};
    Result<uint64_t> id = decoder->Add(std::move(request));
    if (!id.ok()) {
      metrics["refused"].Add();
      End(*r, id.status());
      return;
    }
    r->id = *id;
    r->added = true;
    running.emplace(*id, std::move(r));
  }

  void End(Running& r, const Status& status) {
    {
      std::lock_guard lock(mutex);
      --calls;
    }
    r.Done(status);
  }

  // Ends a call early with `status`; one that has ended is left alone.
  void Abort(Running& r, const Status& status) {
    if (r.done) return;
    std::shared_ptr<Running> keep;
    if (r.added) {
      decoder->Cancel(r.id);  // its event finds nobody
      auto it = running.find(r.id);
      keep = std::move(it->second);
      running.erase(it);
      Flush(*keep, "abort");
    } else {
      auto it = std::find_if(early.begin(), early.end(), [&](const auto& e) { return e.get() == &r; });
      TEMPER_CHECK(it != early.end());
      keep = std::move(*it);
      early.erase(it);
    }
    End(*keep, status);
  }

  void OnEvent(engine::DecodeEvent& e, double now_s) {
    auto it = running.find(e.id);
    if (it == running.end()) return;
    Running& r = *it->second;
    Chunk& c = r.pending;
    if (!c.ids.empty() && (c.version != e.version || c.mixed != e.mixed)) Flush(r, "");
    if (c.ids.empty()) r.pending_since_s = now_s;
    c.version = e.version;
    c.mixed = e.mixed;
    c.prompt_tokens = e.prompt_tokens;
    c.cached_tokens = e.cached_tokens;
    if (e.token >= 0) {
      c.ids.push_back(e.token);
      c.logprobs.push_back(e.logprob);
      if (!e.kept.empty() || !c.kept.empty()) {
        r.pending_kept_bytes += e.kept.size();
        c.kept.resize(c.ids.size());
        c.kept.back() = std::move(e.kept);
      }
      r.ids_hash = IdsHash({&e.token, 1}, r.ids_hash);
    }
    c.ids_hash = r.ids_hash;
    if (e.finish == engine::Finish::kNone) {
      if (r.request.coalesce_ms == 0 || r.pending_kept_bytes >= options.chunk_kept_bytes) Flush(r, "");
      return;
    }
    std::shared_ptr<Running> keep = std::move(it->second);
    running.erase(it);
    Flush(*keep, engine::FinishName(e.finish));
    End(*keep, Status::Ok());
  }

  void Flush(Running& r, const char* finish) {
    if (r.pending.ids.empty() && !*finish) return;
    r.pending.finish = finish;
    r.Emit(r.pending);
    r.pending.ids.clear();
    r.pending.logprobs.clear();
    r.pending.kept.clear();
    r.pending_kept_bytes = 0;
    r.pending.finish.clear();
  }

  // Deadlines and chunks that are due; when the next one is.
  double Sweep(double now_s) {
    double next_s = now_s + kIdleWaitS;
    std::vector<std::shared_ptr<Running>> late;
    auto look = [&](const std::shared_ptr<Running>& r) {
      if (r->deadline_s > 0) {
        if (r->deadline_s <= now_s) late.push_back(r);
        next_s = std::min(next_s, r->deadline_s);
      }
      if (!r->pending.ids.empty() && r->request.coalesce_ms != kOneChunk) {
        const double due_s = r->pending_since_s + r->request.coalesce_ms * 1e-3;
        if (due_s <= now_s) {
          Flush(*r, "");
        } else {
          next_s = std::min(next_s, due_s);
        }
      }
    };
    for (auto& [id, r] : running) look(r);
    for (auto& r : early) look(r);
    for (auto& r : late) Abort(*r, DeadlineExceeded("the call's deadline is over"));
    return late.empty() ? next_s : now_s;
  }

  void UpdateMetrics(double now_s) {
    if (now_s - metrics_at_s < kMetricsS) return;
    if (decoder) {
      const engine::DecoderStats s = decoder->stats();
      auto set = [&](const char* name, double value) { metrics[name].Set(value); };
      set("tokens_sampled", static_cast<double>(s.tokens_sampled));
      set("prefill_tokens", static_cast<double>(s.prefill_tokens));
      set("prompt_tokens", static_cast<double>(s.prompt_tokens));
      set("cached_tokens", static_cast<double>(s.cached_tokens));
      set("cache_hit", s.prompt_tokens ? static_cast<double>(s.cached_tokens) / static_cast<double>(s.prompt_tokens) : 0);
      set("steps", static_cast<double>(s.steps));
      set("batch_mean", s.steps ? static_cast<double>(s.batch_rows) / static_cast<double>(s.steps) : 0);
      set("tokens_per_s", static_cast<double>(s.tokens_sampled - metrics_tokens) / (now_s - metrics_at_s));
      set("running", s.running);
      set("waiting", s.waiting);
      set("swaps", static_cast<double>(s.swaps));
      set("preemptions", static_cast<double>(s.preemptions));
      set("free_pages", s.free_pages);
      set("total_pages", s.total_pages);
      set("version_epoch", static_cast<double>(decoder->version().epoch));
      set("version_step", static_cast<double>(decoder->version().step));
      metrics_tokens = s.tokens_sampled;
    }
    metrics_at_s = now_s;
  }
};

namespace {

// The caller's end of a request in this process.
class LocalCall final : public Call {
 public:
  LocalCall(std::shared_ptr<Running> running, std::function<void(std::shared_ptr<Running>)> cancel)
      : running_(std::move(running)), cancel_(std::move(cancel)) {}
  ~LocalCall() override {
    Cancel();
    std::lock_guard lock(running_->callback_mutex);
    running_->detached = true;
    running_->callbacks = {};
  }
  void Cancel() override {
    if (!running_->done && !running_->cancelled.exchange(true)) cancel_(running_);
  }

 private:
  std::shared_ptr<Running> running_;
  std::function<void(std::shared_ptr<Running>)> cancel_;
};

}  // namespace

Result<std::unique_ptr<Worker>> Worker::Start(const WorkerOptions& options, WeightSource* source) {
  if (options.max_batch < 1 || options.queue_max < 1 || options.chunk_tokens < 1) {
    return InvalidArgument("rollout: max_batch, queue_max and chunk_tokens must be 1 or more");
  }
  auto state = std::make_shared<State>();
  state->options = options;
  state->source = source;
  engine::EngineOptions e;
  ASSIGN_OR_RETURN(e.cpu, engine::ParseCpuPath(options.cpu));
  e.threads = options.threads;
  ASSIGN_OR_RETURN(state->engine, engine::Engine::Create(e));
  source->SetWake([weak = std::weak_ptr<State>(state)] {
    if (auto s = weak.lock()) {
      std::lock_guard lock(s->mutex);
      s->woken = true;
      s->changed.notify_all();
    }
  });
  state->thread = std::thread([s = state.get()] { s->Loop(); });
  return std::unique_ptr<Worker>(new Worker(std::move(state)));
}

Worker::Worker(std::shared_ptr<State> state) : state_(std::move(state)) {}
Worker::~Worker() { Stop(); }

std::unique_ptr<Call> Worker::Generate(GenerateRequest request, Callbacks callbacks) {
  auto r = std::make_shared<Running>();
  if (request.deadline_ms > 0) r->deadline_s = NowS() + static_cast<double>(request.deadline_ms) * 1e-3;
  r->request = std::move(request);
  r->callbacks = std::move(callbacks);
  auto cancel = [weak = std::weak_ptr<State>(state_)](std::shared_ptr<Running> which) {
    if (auto s = weak.lock()) {
      std::lock_guard lock(s->mutex);
      if (s->stopped) return;
      s->cancelled.push_back(std::move(which));
      s->changed.notify_all();
    }
  };
  Status refused;
  {
    std::lock_guard lock(state_->mutex);
    if (state_->stopped) {
      refused = Unavailable("the worker stops");
    } else if (state_->calls >= state_->options.queue_max) {
      refused = ResourceExhausted(std::to_string(state_->calls) + " calls are running or waiting already");
    } else {
      ++state_->calls;
      state_->added.push_back(r);
      state_->changed.notify_all();
    }
  }
  if (!refused.ok()) r->Done(refused);
  return std::make_unique<LocalCall>(std::move(r), std::move(cancel));
}

void Worker::Wake() {
  std::lock_guard lock(state_->mutex);
  state_->woken = true;
  state_->changed.notify_all();
}

void Worker::Stop() {
  {
    std::lock_guard lock(state_->mutex);
    state_->stopped = true;
    state_->changed.notify_all();
  }
  if (state_->thread.joinable()) {
    state_->source->SetWake({});
    state_->thread.join();
  }
}

const temper::Metrics& Worker::metrics() const { return state_->metrics; }

}  // namespace temper::rollout
