// The gateway role over a real worker and a real (tiny, random) model: HTTP in, gRPC to the worker, trajectories out.
#include "gateway/server.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <grpcpp/impl/codegen/service_type.h>

#include <cmath>
#include <mutex>
#include <thread>

#include "common/file.h"
#include "common/json.h"
#include "common/rpc.h"
#include "engine/engine.h"
#include "engine/files/model_file.h"
#include "engine/train_pass.h"
#include "engine/tree_batch.h"
#include "gateway/policy_text.h"
#include "gateway/session.h"
#include "rollout/service.h"
#include "rollout/worker.h"
#include "temper/v1/types.pb.h"
#include "tests/gateway/http_client.h"
#include "text/json.h"
#include "text/task_vocabulary.h"
#include "text/text_model.h"

namespace temper::gateway {
namespace {

// Weights that the test hands to the worker when it likes.
class ManualSource final : public rollout::WeightSource {
 public:
  void Give(engine::ComputeWeights weights, engine::Version version) {
    std::function<void()> wake;
    {
      std::lock_guard lock(mutex_);
      next_ = Weights{std::move(weights), version};
      wake = wake_;
    }
    if (wake) wake();
  }
  std::optional<Weights> TakeSwap() override {
    std::lock_guard lock(mutex_);
    return std::exchange(next_, std::nullopt);
  }
  void Swapped(const engine::Version&) override {}
  bool MayServe() override { return true; }
  void SetWake(std::function<void()> wake) override {
    std::lock_guard lock(mutex_);
    wake_ = std::move(wake);
  }

 private:
  std::mutex mutex_;
  std::optional<Weights> next_;
  std::function<void()> wake_;
};

class ServerTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    dir_ = ::testing::TempDir() + "gateway-server-" + std::to_string(::getpid());
    ASSERT_TRUE(RemoveAll(dir_).ok());
    const std::vector<std::string> words = {"list the files in the folder data", "which word is in notes"};
    text::TextFiles files;
    text::TaskTextFiles made = text::MakeTaskVocabulary(words);
    files.tokenizer_json = made.tokenizer_json;
    files.tokenizer_config_json = made.tokenizer_config_json;
    auto text = text::LoadTextModel(files);
    ASSERT_TRUE(text.ok()) << text.status().ToString();
    engine::ModelConfig c;
    c.vocab = text->tokenizer.size();
    c.layers = 2;
    c.width = 32;
    c.heads = 2;
    c.kv_heads = 1;
    c.head_dim = 16;
    c.ffn = 48;
    c.max_positions = 4096;
    c.eos_ids.assign(text->end_ids.begin(), text->end_ids.end());
    config_ = c;
    ASSERT_TRUE(engine::SaveHuggingFace(dir_ + "/model", c, engine::InitParameters(c, 1), files, engine::FileType::kF32).ok());
    ASSERT_TRUE(text->chat_template.has_value());
    end_id_ = text->end_ids.at(0);
  }
  static void TearDownTestSuite() { ASSERT_TRUE(RemoveAll(dir_).ok()); }

  static engine::ComputeWeights Weights(uint64_t seed) {
    return engine::ComputeWeights::FromParameters(engine::InitParameters(config_, seed), engine::Profile::kBf16);
  }

  void SetUp() override {
    rollout::WorkerOptions options;
    options.threads = 1;
    auto worker = rollout::Worker::Start(options, &source_);
    ASSERT_TRUE(worker.ok()) << worker.status().ToString();
    worker_ = std::move(*worker);
    source_.Give(Weights(1), {1, 0});
    worker_service_ = rollout::MakeRolloutService(worker_.get());
    const std::string name = "temper-gateway-server-" + std::to_string(::getpid());
    auto fd = ListenAbstract(name + "-rollout");
    ASSERT_TRUE(fd.ok());
    worker_rpc_ = std::make_unique<RpcServer>(std::move(*fd));
    worker_rpc_->Register(worker_service_.get());
    ASSERT_TRUE(worker_rpc_->Start().ok());
    worker_address_ = "unix-abstract:" + name + "-rollout";
    // As the supervisor does: it opens the sockets and keeps them.
    auto agent = ListenTcp("127.0.0.1", 0);
    auto control = ListenAbstract(name + "-control");
    ASSERT_TRUE(agent.ok() && control.ok());
    agent_ = std::move(*agent);
    control_ = std::move(*control);
    control_address_ = "unix-abstract:" + name + "-control";
    log_dir_ = dir_ + "/log-" + ::testing::UnitTest::GetInstance()->current_test_info()->name();
  }
  void TearDown() override {
    server_.reset();
    worker_rpc_->Stop();
    worker_->Stop();
  }

  void Start() {
    ServerOptions options;
    options.log_dir = log_dir_;
    options.agent_fd = ::dup(agent_.get());
    options.control_fd = ::dup(control_.get());
    options.workers = {worker_address_};
    options.model_path = dir_ + "/model";
    server_ = std::make_unique<Server>(std::move(options));
    const Status status = server_->Start();
    ASSERT_TRUE(status.ok()) << status.ToString();
  }

  static OpenOptions Options(const std::string& session, uint64_t rollout) {
    OpenOptions o;
    o.session = session;
    o.sampling = SamplingPolicy{.max_tokens = 500};
    if (rollout % 2) o.sampling = SamplingPolicy{.top_p = 0.9f, .top_k = 30, .min_p = 0.001f, .max_tokens = 500};
    o.training = true;
    o.key_space = {5, 0, 0, rollout};
    return o;
  }

  // A few turns of an agent that echoes what it got.
  std::string Play(const std::string& key, int turns) {
    std::string messages = "{\"role\":\"user\",\"content\":\"list the files in data\"}";
    for (int i = 0; i < turns; ++i) {
      HttpAnswer answer = Exchange(*BoundPort(agent_.get()), "POST", "/v1/chat/completions", key,
                                   "{\"model\":\"m\",\"messages\":[" + messages +
                                       "],\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"shell\",\"parameters\":{\"type\":\"object\","
                                       "\"properties\":{\"command\":{\"type\":\"string\"}}}}}]}");
      if (answer.status != 200) return answer.body;
      auto json = *ParseJson(answer.body);
      const auto& message = json.at("choices").at(0).at("message").as_object();
      messages += "," + PrintJson(message);
      if (message.contains("tool_calls")) {
        for (const auto& call : message.at("tool_calls").as_array()) {
          messages += ",{\"role\":\"tool\",\"tool_call_id\":" + PrintJson(call.at("id")) + ",\"content\":\"notes\"}";
        }
      } else {
        messages += ",{\"role\":\"user\",\"content\":\"which word\"}";
      }
    }
    return "";
  }

  // Scores every sampled token of the trajectory with the trainer's own forward pass; counts those equal to the last bit.
  static void Check(const v1::Trajectory& t, engine::Engine& engine, int* equal, int* sampled, int* anchored, int* swapped) {
    for (int64_t step : {0, 1}) {
      engine::TreeBuilder builder;
      std::vector<std::vector<int32_t>> nodes(t.runs_size());
      for (const auto& run : t.runs()) {
        int32_t at = run.parent() < 0 ? -1 : nodes[run.parent()].back();
        for (int k = 0; k < run.ids_size(); ++k) {
          at = builder.AddNode(at, static_cast<int32_t>(run.ids(k)), run.provenance() == v1::SAMPLED ? run.inv_temperature() : 1.0f,
                               run.kept_size() ? run.kept(k) : std::string());
          nodes[run.id()].push_back(at);
        }
      }
      std::vector<int32_t> index;
      const engine::TreeBatch tree = builder.Build(&index);
      engine::TrainPass pass(engine);
      const engine::ComputeWeights weights = Weights(1 + step);
      auto logprobs = pass.Forward(weights, tree);
      ASSERT_TRUE(logprobs.ok()) << logprobs.status().ToString();
      for (const auto& run : t.runs()) {
        if (run.provenance() != v1::SAMPLED || run.version().step() != step) continue;
        EXPECT_FALSE(run.mixed());
        for (int i = 0; i < run.ids_size(); ++i) {
          ++*sampled;
          *swapped += step;
          if ((*logprobs)[index[nodes[run.id()][i]]] == run.logprobs(i)) ++*equal;
        }
        if (run.parent() >= 0 && t.runs(run.parent()).parent() >= 0) ++*anchored;
      }
    }
  }

  static inline std::string dir_;
  static inline engine::ModelConfig config_;
  static inline int32_t end_id_ = 0;

  ManualSource source_;
  std::unique_ptr<rollout::Worker> worker_;
  std::unique_ptr<grpc::Service> worker_service_;
  std::unique_ptr<RpcServer> worker_rpc_;
  std::string worker_address_, control_address_, log_dir_;
  Fd agent_, control_;
  std::unique_ptr<Server> server_;
};

// The promise of the whole: what an agent's calls left behind scores to the very same bits in the trainer's forward pass, across
// turns, a swap of weights in the middle, and a restart of the gateway.
TEST_F(ServerTest, TrajectoriesScoreToTheLastBit) {
  Start();
  auto control = NewGatewayClient(control_address_, 10);
  constexpr int kAgents = 6;
  std::vector<std::string> keys;
  for (int a = 0; a < kAgents; ++a) {
    auto opened = control->Open(Options("0." + std::to_string(a) + ".1", a));
    ASSERT_TRUE(opened.ok()) << opened.status().ToString();
    EXPECT_EQ(opened->base_url, server_->base_url());
    keys.push_back(opened->api_key);
  }
  auto all = [&](int turns) {
    std::vector<std::thread> agents;
    for (const std::string& key : keys) {
      agents.emplace_back([&, key] { EXPECT_EQ(Play(key, turns), ""); });
    }
    // In the middle of the first calls.
    while (worker_->metrics().Snapshot()["tokens_sampled"] < 50) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    source_.Give(Weights(2), {1, 1});
    for (auto& agent : agents) agent.join();
  };
  all(3);
  server_->Stop();
  server_.reset();
  // A client that comes while the gateway is away queues in the socket that the supervisor keeps.
  std::thread early([&] { EXPECT_EQ(Play(keys[0], 1), ""); });
  Start();
  early.join();
  EXPECT_EQ(Play(keys[1], 2), "");

  auto engine = engine::Engine::Create({.threads = 1});
  ASSERT_TRUE(engine.ok());
  int equal = 0, sampled = 0, anchored = 0, swapped = 0;
  for (int a = 0; a < kAgents; ++a) {
    auto sealed = control->Seal("0." + std::to_string(a) + ".1", 0);
    ASSERT_TRUE(sealed.ok()) << sealed.status().ToString();
    Check(*sealed->trajectory, **engine, &equal, &sampled, &anchored, &swapped);
  }
  EXPECT_EQ(equal, sampled);
  EXPECT_GT(sampled, 500);
  EXPECT_GT(anchored, 0);
  EXPECT_GT(swapped, 100);          // drawn after the swap
  EXPECT_GT(sampled - swapped, 0);  // and before
}

TEST_F(ServerTest, StartNamesWhatIsMissing) {
  // What could go wrong: a gateway without a template or a worker starts and fails at the first call.
  ServerOptions options;
  options.model_path = dir_ + "/none";
  options.workers = {worker_address_};
  Status status = Server(options).Start();
  EXPECT_EQ(status.code(), StatusCode::kNotFound);
  EXPECT_NE(status.message().find("none"), std::string::npos);
  options.model_path = dir_ + "/model";
  options.workers.clear();
  EXPECT_EQ(Server(options).Start().code(), StatusCode::kInvalidArgument);
  options.workers = {worker_address_};
  options.port = *BoundPort(agent_.get());
  EXPECT_EQ(Server(options).Start().code(), StatusCode::kFailedPrecondition);
}

// Rendering, tokenising and matching must cost far less than drawing: a job makes about a hundred calls a second on two cores.
TEST_F(ServerTest, ACallCostsLittle) {
  auto files = engine::LoadTextFiles(dir_ + "/model");
  ASSERT_TRUE(files.ok());
  auto text = NewPolicyText(std::move(*text::LoadTextModel(*files)));
  const auto tools = *text::ParseJson(R"([{"type":"function","function":{"name":"shell","parameters":{"type":"object","properties":{"command":{"type":"string"}}}}}])");
  const int kSessions = 40, kTurns = 8;
  timespec a, b;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &a);
  for (int s = 0; s < kSessions; ++s) {
    Session session(Options("0.0.1", 0), "k", 0, *text, {.context_tokens = 4096});
    ChatRequest r;
    r.tools = tools;
    r.messages = {{.role = Role::kUser, .content = "list the files in the folder data and tell which word is in notes"}};
    for (int turn = 0; turn < kTurns; ++turn) {
      auto planned = session.Begin(r, 1, 1);
      ASSERT_TRUE(std::holds_alternative<Plan>(planned));
      const Plan& plan = std::get<Plan>(planned);
      EXPECT_EQ(plan.anchor_run >= 0, turn > 0);
      Drawn d;
      d.finish = "stop";
      d.spans.resize(1);
      for (char c : std::string("list the files")) d.spans[0].ids.push_back(c);
      d.spans[0].ids.push_back(end_id_);
      d.spans[0].logprobs.assign(d.spans[0].ids.size(), -1);
      d.content = "list the files";
      Answer answer = session.Commit(plan, {d}, {.end_s = 1});
      r.messages.push_back({.role = Role::kAssistant, .content = answer.choices[0].content});
      r.messages.push_back({.role = Role::kUser, .content = "notes data files " + std::string(200, 'x')});
    }
  }
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &b);
  const double ms = ((b.tv_sec - a.tv_sec) * 1e3 + (b.tv_nsec - a.tv_nsec) * 1e-6) / (kSessions * kTurns);
  RecordProperty("cpu_ms_per_call", std::to_string(ms));
  std::printf("%.3f ms of CPU a call\n", ms);
  EXPECT_LT(ms, 5);  // far above what is usual, so that only a change of kind fails
}

}  // namespace
}  // namespace temper::gateway
