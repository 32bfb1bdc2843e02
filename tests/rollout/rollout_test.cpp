// The rollout worker: the same contract in the same process and over gRPC; weights from a fixed source and from weight sync.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>

#include "common/clock.h"
#include "common/faults.h"
#include "common/process.h"
#include "common/rpc.h"
#include "engine/train_pass.h"
#include "rollout/client.h"
#include "rollout/server.h"
#include "rollout/worker.h"
#include "tests/harness/tiny_model.h"
#include "weightsync/manifest.h"
#include "weightsync/publisher.h"

namespace temper::rollout {
namespace {

engine::ModelConfig TinyConfig() {
  engine::ModelConfig c = TinyModel(60);
  c.max_positions = 2048;
  return c;
}

engine::ComputeWeights Weights(uint64_t seed) {
  return engine::ComputeWeights::FromParameters(engine::InitParameters(TinyConfig(), seed), engine::Profile::kBf16);
}

// Weights that a test hands over when it likes.
class ManualSource final : public WeightSource {
 public:
  void Give(engine::ComputeWeights weights, Version version) {
    std::lock_guard lock(mutex_);
    next_ = Weights{std::move(weights), version};
    if (wake_) wake_();
  }
  // After so many more looks of the engine thread (one a step).
  void GiveLater(int looks, engine::ComputeWeights weights, Version version) {
    std::lock_guard lock(mutex_);
    later_.push_back({looks_ + looks, Weights{std::move(weights), version}});
  }
  void Fence(bool fenced) {
    std::lock_guard lock(mutex_);
    fenced_ = fenced;
    if (wake_) wake_();
  }
  // Fenced after so many more steps, however late a test is to notice them.
  void ServeOnly(int steps) {
    std::lock_guard lock(mutex_);
    steps_left_ = steps;
  }
  std::optional<Weights> TakeSwap() override {
    std::lock_guard lock(mutex_);
    ++looks_;
    if (!later_.empty() && later_.front().first <= looks_) {
      Weights w = std::move(later_.front().second);
      later_.pop_front();
      return w;
    }
    return std::exchange(next_, std::nullopt);
  }
  void Swapped(const Version& version) override {
    std::lock_guard lock(mutex_);
    swapped_ = version;
  }
  bool MayServe() override {
    std::lock_guard lock(mutex_);
    if (steps_left_ && (*steps_left_)-- == 0) {
      fenced_ = true;
      steps_left_.reset();
    }
    return !fenced_;
  }
  void SetWake(std::function<void()> wake) override {
    std::lock_guard lock(mutex_);
    wake_ = std::move(wake);
  }
  Version swapped() {
    std::lock_guard lock(mutex_);
    return swapped_;
  }

 private:
  std::mutex mutex_;
  std::optional<Weights> next_;
  int looks_ = 0;
  std::deque<std::pair<int, Weights>> later_;
  bool fenced_ = false;
  std::optional<int> steps_left_;
  Version swapped_;
  std::function<void()> wake_;
};

GenerateRequest Request(uint64_t a, uint32_t max_tokens = 30) {
  GenerateRequest r;
  r.prompt_ids = {1, 2, 3, static_cast<int32_t>(a % 50)};
  r.sampling.max_tokens = max_tokens;
  r.key = {.seed = 1, .domain = 2, .a = a};
  r.coalesce_ms = kOneChunk;
  return r;
}

// A call whose end can be waited for.
struct Watched {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Chunk> chunks;
  std::optional<Status> status;

  Callbacks callbacks() {
    return {.on_chunk =
                [this](const Chunk& c) {
                  std::lock_guard lock(mutex);
                  EXPECT_FALSE(status) << "a chunk after the end";
                  chunks.push_back(c);
                  changed.notify_all();
                },
            .on_done =
                [this](const Status& s) {
                  std::lock_guard lock(mutex);
                  EXPECT_FALSE(status) << "two ends";
                  status = s;
                  changed.notify_all();
                }};
  }
  Status Wait() {
    std::unique_lock lock(mutex);
    EXPECT_TRUE(changed.wait_for(lock, std::chrono::seconds(20), [&] { return status.has_value(); }));
    return status.value_or(Internal("no end"));
  }
  void WaitChunks(size_t n) {
    std::unique_lock lock(mutex);
    EXPECT_TRUE(changed.wait_for(lock, std::chrono::seconds(20), [&] { return chunks.size() >= n; }));
  }
};

// Parameter: false = the Worker itself, true = through gRPC.
class RolloutContract : public testing::TestWithParam<bool> {
 protected:
  void StartWorker(WorkerOptions options = {}) {
    options.threads = 1;
    if (!GetParam()) {
      worker_ = *Worker::Start(options, &source_);
      client_ = worker_.get();
      return;
    }
    static std::atomic<int> count{0};
    std::string name = "temper-test-rollout-" + std::to_string(getpid()) + "-" + std::to_string(++count);
    ServerOptions o;
    o.worker = options;
    o.listen_fd = ListenAbstract(name)->Release();
    o.source = &source_;
    server_ = std::make_unique<Server>(o);
    ASSERT_TRUE(server_->Start().ok());
    remote_ = ConnectRollout("unix-abstract:" + name);
    client_ = remote_.get();
  }
  void TearDown() override {
    remote_.reset();
    if (server_) server_->Stop();
    if (worker_) worker_->Stop();
  }

  ManualSource source_;
  std::unique_ptr<Worker> worker_;
  std::unique_ptr<Server> server_;
  std::unique_ptr<RolloutClient> remote_;
  RolloutClient* client_ = nullptr;
};

// Goes wrong if a request before the first weights fails or is lost instead of waiting.
TEST_P(RolloutContract, WaitsForTheFirstWeights) {
  StartWorker();
  Watched w;
  auto call = client_->Generate(Request(1), w.callbacks());
  SystemClock::Get().SleepS(0.05);
  EXPECT_FALSE(w.status);
  source_.Give(Weights(1), {1, 0});
  EXPECT_TRUE(w.Wait().ok());
  ASSERT_EQ(w.chunks.size(), 1u);
  EXPECT_EQ(w.chunks[0].ids.size(), 30u);
  EXPECT_EQ(w.chunks[0].logprobs.size(), 30u);
  EXPECT_EQ(w.chunks[0].finish, "length");
  EXPECT_EQ(w.chunks[0].version, (Version{1, 0}));
  EXPECT_EQ(w.chunks[0].prompt_tokens, 4u);
  EXPECT_EQ(source_.swapped(), (Version{1, 0}));
}

// Goes wrong if many calls at once mix up their tokens, or the batch shows in the draws.
TEST_P(RolloutContract, ManyCallsAreEachTheirOwn) {
  StartWorker({.max_batch = 16});
  source_.Give(Weights(1), {1, 0});
  std::vector<std::unique_ptr<Watched>> watched;
  std::vector<std::unique_ptr<Call>> calls;
  for (uint64_t i = 0; i < 60; ++i) {
    watched.push_back(std::make_unique<Watched>());
    GenerateRequest r = Request(i);
    r.coalesce_ms = i % 3 == 0 ? 0 : i % 3 == 1 ? 1 : kOneChunk;
    calls.push_back(client_->Generate(r, watched.back()->callbacks()));
  }
  for (uint64_t i = 0; i < 60; ++i) {
    EXPECT_TRUE(watched[i]->Wait().ok());
    auto alone = GenerateBlocking(*client_, Request(i));
    ASSERT_TRUE(alone.ok());
    std::vector<int32_t> ids;
    std::vector<float> logprobs;
    uint64_t hash = IdsHash(Request(i).prompt_ids);
    for (const Chunk& c : watched[i]->chunks) {
      ids.insert(ids.end(), c.ids.begin(), c.ids.end());
      logprobs.insert(logprobs.end(), c.logprobs.begin(), c.logprobs.end());
      hash = IdsHash(c.ids, hash);
      EXPECT_EQ(c.ids_hash, hash);
      EXPECT_EQ(c.finish.empty(), &c != &watched[i]->chunks.back());
    }
    EXPECT_EQ(ids, alone->ids);
    EXPECT_EQ(logprobs, alone->logprobs);
  }
}

// Goes wrong if a cancelled call goes on in the batch, or its end never comes.
TEST_P(RolloutContract, CancelEndsTheSequence) {
  StartWorker();
  source_.Give(Weights(1), {1, 0});
  Watched w;
  GenerateRequest r = Request(1, 1900);
  r.coalesce_ms = 0;
  source_.ServeOnly(60);  // the sequence must not be over before this thread gets to cancel it
  auto call = client_->Generate(r, w.callbacks());
  w.WaitChunks(3);
  call->Cancel();
  call->Cancel();
  EXPECT_EQ(w.Wait().code(), StatusCode::kCancelled);
  source_.Fence(false);
  Worker& worker = server_ ? server_->worker() : *worker_;
  for (int i = 0; i < 100; ++i) {
    auto m = worker.metrics().Snapshot();
    if (m["running"] == 0 && m["tokens_sampled"] > 0) break;
    SystemClock::Get().SleepS(0.02);
  }
  EXPECT_EQ(worker.metrics().Snapshot()["running"], 0);
  EXPECT_LT(worker.metrics().Snapshot()["tokens_sampled"], 1900);
}

// Goes wrong if a call that ends before its first token contradicts its own prompt: the gateway then blames the worker.
TEST_P(RolloutContract, AnEndBeforeTheFirstTokenKnowsItsPrompt) {
  StartWorker();
  source_.Give(Weights(1), {1, 0});
  EXPECT_TRUE(GenerateBlocking(*client_, Request(1, 1)).ok());
  source_.Fence(true);
  GenerateRequest r = Request(2);
  Watched cancelled, late;
  auto one = client_->Generate(r, cancelled.callbacks());
  r.deadline_ms = 100;
  auto two = client_->Generate(r, late.callbacks());
  EXPECT_EQ(late.Wait().code(), StatusCode::kDeadlineExceeded);
  one->Cancel();
  EXPECT_EQ(cancelled.Wait().code(), StatusCode::kCancelled);
  for (Watched* w : {&cancelled, &late}) {
    // Over gRPC the end may be quicker than the last chunk.
    EXPECT_LE(w->chunks.size(), 1u);
    if (!GetParam()) {
      EXPECT_EQ(w->chunks.size(), 1u);
    }
    for (const Chunk& c : w->chunks) {
      EXPECT_EQ(c.finish, "abort");
      EXPECT_EQ(c.ids_hash, IdsHash(Request(2).prompt_ids));
    }
  }
}

// Goes wrong if dropping a call leaves a callback that touches freed memory (run under asan), or the sequence runs on.
TEST_P(RolloutContract, DroppedCallsNeverCallBack) {
  StartWorker();
  source_.Give(Weights(1), {1, 0});
  for (int i = 0; i < 30; ++i) {
    auto w = std::make_unique<Watched>();
    GenerateRequest r = Request(static_cast<uint64_t>(i), 1900);
    r.coalesce_ms = 0;
    auto call = client_->Generate(r, w->callbacks());
    if (i % 3) w->WaitChunks(static_cast<size_t>(i % 3));
    call.reset();
  }
  EXPECT_TRUE(GenerateBlocking(*client_, Request(1)).ok());
}

// Goes wrong if a deadline is ignored while the worker has no weights or is fenced.
TEST_P(RolloutContract, DeadlinesHold) {
  StartWorker();
  GenerateRequest r = Request(1);
  r.deadline_ms = 50;
  EXPECT_EQ(GenerateBlocking(*client_, r).status().code(), StatusCode::kDeadlineExceeded);
  source_.Give(Weights(1), {1, 0});
  EXPECT_TRUE(GenerateBlocking(*client_, Request(1)).ok());
  source_.Fence(true);
  EXPECT_EQ(GenerateBlocking(*client_, r).status().code(), StatusCode::kDeadlineExceeded);
  source_.Fence(false);
  EXPECT_TRUE(GenerateBlocking(*client_, Request(1)).ok());
}

// Goes wrong if a bad request takes the worker down or hangs.
TEST_P(RolloutContract, BadRequestsAreRefused) {
  StartWorker();
  source_.Give(Weights(1), {1, 0});
  for (auto change : std::vector<std::function<void(GenerateRequest&)>>{
           [](GenerateRequest& r) { r.prompt_ids.clear(); }, [](GenerateRequest& r) { r.prompt_ids[0] = 60; },
           [](GenerateRequest& r) { r.prompt_ids[0] = -1; }, [](GenerateRequest& r) { r.prompt_ids.assign(3000, 1); },
           [](GenerateRequest& r) { r.sampling.max_tokens = 0; }, [](GenerateRequest& r) { r.sampling.top_p = 0; },
           [](GenerateRequest& r) { r.sampling.temperature = -1; }, [](GenerateRequest& r) { r.stop_ids = {1000}; }}) {
    GenerateRequest r = Request(1);
    change(r);
    EXPECT_EQ(GenerateBlocking(*client_, r).status().code(), StatusCode::kInvalidArgument);
  }
  EXPECT_TRUE(GenerateBlocking(*client_, Request(1)).ok());
}

// Goes wrong if kept sets make a chunk that no message holds, or are cut off with it.
TEST_P(RolloutContract, ChunksOfManyKeptSetsAreCut) {
  StartWorker({.chunk_kept_bytes = 100});
  source_.Give(Weights(1), {1, 0});
  GenerateRequest r = Request(1);
  r.coalesce_ms = kOneChunk;
  r.sampling.top_k = 20;
  auto g = GenerateBlocking(*client_, r);
  ASSERT_TRUE(g.ok());
  size_t all = 0;
  for (const Chunk& chunk : g->chunks) {
    size_t bytes = 0;
    for (const std::string& set : chunk.kept) bytes += set.size();
    EXPECT_LT(bytes, 120u);
    EXPECT_TRUE(chunk.ids.empty() || chunk.kept.size() == chunk.ids.size());
    all += bytes;
  }
  EXPECT_GT(all, 200u);
  EXPECT_GT(g->chunks.size(), 2u);
  r.sampling.top_k = 0;
  g = GenerateBlocking(*client_, r);
  ASSERT_TRUE(g.ok());
  EXPECT_EQ(g->chunks.size(), 1u);
  EXPECT_TRUE(g->chunks[0].kept.empty());
}

// Goes wrong if the queue grows without bound.
TEST_P(RolloutContract, TheQueueIsBounded) {
  StartWorker({.queue_max = 5});
  std::vector<std::unique_ptr<Watched>> watched;
  std::vector<std::unique_ptr<Call>> calls;
  for (uint64_t i = 0; i < 8; ++i) {
    watched.push_back(std::make_unique<Watched>());
    calls.push_back(client_->Generate(Request(i), watched.back()->callbacks()));
  }
  SystemClock::Get().SleepS(0.2);
  source_.Give(Weights(1), {1, 0});
  int ok = 0, refused = 0;
  for (auto& w : watched) {
    Status s = w->Wait();
    ok += s.ok();
    refused += s.code() == StatusCode::kResourceExhausted;
  }
  EXPECT_EQ(ok, 5);
  EXPECT_EQ(refused, 3);
}

// Goes wrong if a chunk mixes versions, or a swap loses tokens.
TEST_P(RolloutContract, ChunksNeverSpanVersions) {
  StartWorker();
  source_.Give(Weights(1), {1, 0});
  for (int v = 1; v < 4; ++v) source_.GiveLater(200 * v, Weights(static_cast<uint64_t>(v) + 1), {1, v});
  Watched w;
  GenerateRequest r = Request(1, 1500);
  r.coalesce_ms = 1;
  auto call = client_->Generate(r, w.callbacks());
  EXPECT_TRUE(w.Wait().ok());
  size_t tokens = 0;
  Version last{1, -1};
  for (const Chunk& c : w.chunks) {
    EXPECT_GE(c.version, last);
    last = c.version;
    tokens += c.ids.size();
    EXPECT_FALSE(c.mixed);
  }
  EXPECT_EQ(tokens, 1500u);
  EXPECT_EQ(last.step, 3);
}

// Goes wrong if stopping hangs on open calls, or drops them without an end.
TEST_P(RolloutContract, StopEndsEveryCall) {
  StartWorker();
  std::vector<std::unique_ptr<Watched>> watched;
  std::vector<std::unique_ptr<Call>> calls;
  for (uint64_t i = 0; i < 5; ++i) {
    watched.push_back(std::make_unique<Watched>());
    calls.push_back(client_->Generate(Request(i, 1900), watched.back()->callbacks()));
    if (i == 2) source_.Give(Weights(1), {1, 0});
  }
  SystemClock::Get().SleepS(0.05);
  if (server_) server_->Stop();
  if (worker_) worker_->Stop();
  for (auto& w : watched) EXPECT_EQ(w->Wait().code(), StatusCode::kUnavailable);
}

INSTANTIATE_TEST_SUITE_P(LocalAndRemote, RolloutContract, testing::Bool(), [](const auto& p) { return p.param ? "Remote" : "Local"; });

// Goes wrong if an idle worker burns a core.
TEST(Worker, SleepsWhenIdle) {
  auto source = FixedWeights(Weights(1), {1, 0});
  auto worker = *Worker::Start({.threads = 2}, source.get());
  EXPECT_TRUE(GenerateBlocking(*worker, Request(1)).ok());
  SystemClock::Get().SleepS(0.05);
  double before = ProcessCpuS();
  SystemClock::Get().SleepS(0.5);
  EXPECT_LT(ProcessCpuS() - before, 0.05);
}

// Goes wrong if calls of one rollout move between workers, or all go to one.
TEST(Spread, KeepsARolloutOnItsWorker) {
  auto source_a = FixedWeights(Weights(1), {1, 0}), source_b = FixedWeights(Weights(1), {1, 0});
  auto a = *Worker::Start({.threads = 1}, source_a.get());
  auto b = *Worker::Start({.threads = 1}, source_b.get());
  Worker* workers[] = {a.get(), b.get()};
  std::vector<std::unique_ptr<RolloutClient>> list;
  list.push_back(std::move(a));
  list.push_back(std::move(b));
  auto spread = SpreadRollout(std::move(list));
  std::vector<std::unique_ptr<Watched>> watched;
  std::vector<std::unique_ptr<Call>> calls;
  for (int round = 0; round < 3; ++round) {
    for (uint64_t i = 0; i < 8; ++i) {
      watched.push_back(std::make_unique<Watched>());
      GenerateRequest r = Request(i, 10);
      r.prompt_ids.assign(70, static_cast<int32_t>(i));
      calls.push_back(spread->Generate(r, watched.back()->callbacks()));
    }
    if (round == 0) {
      for (auto& w : watched) EXPECT_TRUE(w->Wait().ok());
    }
  }
  for (auto& w : watched) EXPECT_TRUE(w->Wait().ok());
  SystemClock::Get().SleepS(0.6);
  for (Worker* w : workers) {
    w->Wake();
    SystemClock::Get().SleepS(0.1);
    auto m = w->metrics().Snapshot();
    EXPECT_EQ(m["tokens_sampled"], 120) << "four of eight rollouts, three calls each";
    EXPECT_EQ(m["cached_tokens"], 8 * 69) << "the second and third call of each find all of the prompt but its last token";
  }
}

// Goes wrong if a client goes before its calls: gRPC's callback thread would then drop the last reference to the channel and wait for
// itself.
TEST(RemoteRollout, EndsItsCallsBeforeItGoes) {
  std::string name = "temper-test-rollout-gone-" + std::to_string(getpid());
  auto source = FixedWeights(Weights(1), {1, 0});
  ServerOptions o;
  o.worker.threads = 1;
  o.listen_fd = ListenAbstract(name)->Release();
  o.source = source.get();
  Server server(o);
  ASSERT_TRUE(server.Start().ok());
  for (int i = 0; i < 20; ++i) {
    auto client = ConnectRollout("unix-abstract:" + name);
    std::vector<std::unique_ptr<Watched>> watched;
    std::vector<std::unique_ptr<Call>> calls;
    for (uint64_t k = 0; k < 5; ++k) {
      watched.push_back(std::make_unique<Watched>());
      calls.push_back(client->Generate(Request(k, 1900), watched.back()->callbacks()));
    }
    if (i % 2) calls.resize(2);
    client.reset();
    for (size_t k = 0; k < calls.size(); ++k) EXPECT_EQ(watched[k]->status.value_or(Internal("no end")).code(), StatusCode::kCancelled);
  }
  server.Stop();
}

// The whole path: a trainer publishes, a rollout server samples, and the trainer's own forward gives the same logprobs.
TEST(RolloutServer, ServesWhatTheTrainerPublishes) {
  std::string id = std::to_string(getpid());
  auto publisher = *weightsync::Publisher::Create(
      {.manifest = weightsync::MakeManifest(TinyConfig(), engine::Profile::kBf16), .epoch = 1, .expected_workers = 1});
  RpcServer trainer(*ListenAbstract("temper-test-rs-trainer-" + id));
  trainer.Register(publisher->service());
  ASSERT_TRUE(trainer.Start().ok());
  ServerOptions o;
  o.worker.threads = 1;
  o.listen_fd = ListenAbstract("temper-test-rs-" + id)->Release();
  o.publisher_address = "unix-abstract:temper-test-rs-trainer-" + id;
  Server server(o);
  ASSERT_TRUE(server.Start().ok());
  auto client = ConnectRollout("unix-abstract:temper-test-rs-" + id);
  auto engine = *engine::Engine::Create({.threads = 1});
  Watched early;
  auto early_call = client->Generate(Request(9), early.callbacks());
  for (int64_t step = 0; step < 6; ++step) {
    // At one version the worker's weights are not the trainer's: by one bit of one weight, which its logprobs must betray.
    const bool flipped = step == 4;
    if (flipped) Faults::Get().Arm("weightsync.flip_verified", "fail", 1);
    engine::Parameters p = engine::InitParameters(TinyConfig(), static_cast<uint64_t>(step));
    std::span<std::byte> bytes = *publisher->Begin();
    engine::Pack(p, engine::Profile::kBf16, bytes);
    auto weights = *engine::ComputeWeights::View(TinyConfig(), engine::Profile::kBf16, bytes, nullptr);
    auto report = publisher->Publish(step, weights.ComputeDigest(), 10000);
    ASSERT_TRUE(report.ok()) << report.status().ToString();
    EXPECT_EQ(report->workers, 1);
    GenerateRequest request = Request(static_cast<uint64_t>(step));
    if (step % 2) request.sampling.top_k = 9, request.sampling.top_p = 0.9f, request.sampling.min_p = 0.02f;
    auto g = GenerateBlocking(*client, request);
    ASSERT_TRUE(g.ok());
    ASSERT_EQ(g->kept.size(), g->ids.size());
    EXPECT_EQ(std::all_of(g->kept.begin(), g->kept.end(), [](const std::string& set) { return set.empty(); }), step % 2 == 0);
    EXPECT_EQ(g->chunks[0].version, (Version{1, step}));
    std::vector<int32_t> ids = Request(static_cast<uint64_t>(step)).prompt_ids;
    ids.insert(ids.end(), g->ids.begin(), g->ids.end());
    engine::TreeBuilder builder;
    std::vector<std::string> kept(4);
    kept.insert(kept.end(), g->kept.begin(), g->kept.end());
    builder.AddRow(ids, std::vector<float>{1.0f}, kept);
    std::vector<int32_t> index;
    engine::TreeBatch tree = builder.Build(&index);
    engine::TrainPass pass(*engine);
    auto scored = pass.Forward(weights, tree);
    ASSERT_TRUE(scored.ok());
    int different = 0;
    for (size_t i = 0; i < g->ids.size(); ++i) different += (*scored)[4 + i] != g->logprobs[i];
    if (flipped) {
      EXPECT_GT(different, 0);
    } else {
      EXPECT_EQ(different, 0) << "a ratio is not exactly 1 at step " << step;
    }
  }
  EXPECT_TRUE(early.Wait().ok());
  EXPECT_LE(publisher->Metrics()["arenas"], 2);
  server.Stop();
  publisher->Stop();
}

}  // namespace
}  // namespace temper::rollout
