// Agents that misbehave, played by the real runner through a real gateway and a real worker: each attempt ends typed, in time,
// with nothing of it left, and the next one finds every part as it was.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "agents/attempt.h"
#include "common/clock.h"
#include "common/file.h"
#include "common/metrics.h"
#include "common/rpc.h"
#include "common/strings.h"
#include "engine/parameters.h"
#include "engine/weights.h"
#include "gateway/gateway.h"
#include "gateway/http/server.h"
#include "gateway/policy_text.h"
#include "rollout/worker.h"
#include "sandbox/janitor.h"
#include "sandbox/service.h"
#include "temper/v1/types.pb.h"
#include "tests/harness/tiny_model.h"
#include "text/task_vocabulary.h"
#include "text/text_model.h"

namespace temper::agents {
namespace {

// Forked before any thread exists.
class JanitorEnvironment : public ::testing::Environment {
 public:
  void SetUp() override {
    sandbox::JanitorOptions options;
    options.init_path = TEMPER_BUILD_DIR "/temper-sandbox-init";
    auto janitor = sandbox::ForkJanitor(options);
    ASSERT_TRUE(janitor.ok()) << janitor.status().ToString();
    janitor_ = std::make_unique<sandbox::Janitor>(std::move(*janitor));
  }
  void TearDown() override { janitor_.reset(); }
  static sandbox::Janitor& Get() { return *janitor_; }

 private:
  static inline std::unique_ptr<sandbox::Janitor> janitor_;
};
const auto* const kEnvironment = ::testing::AddGlobalTestEnvironment(new JanitorEnvironment);

struct CountingVerifier final : verifiers::Verifier {
  verifiers::Verdict Verify(const verifiers::Case&) override {
    ++calls;
    return {.outcome = verifiers::VerdictOutcome::kScored, .reward = 0.5, .components = {}, .turn_rewards = {}, .evidence_json = "{}"};
  }
  std::atomic<int> calls{0};
};

// Worker, gateway, agent plane and sandboxes, as a job has them.
class Parts {
 public:
  Parts() {
    const text::TaskTextFiles made = text::MakeTaskVocabulary(std::vector<std::string>{"say something"});
    text::TextFiles files;
    files.tokenizer_json = made.tokenizer_json;
    files.tokenizer_config_json = made.tokenizer_config_json;
    text::TextModel text = text::LoadTextModel(files).value();
    engine::ModelConfig config = TinyModel(text.tokenizer.size());
    config.max_positions = 1024;
    config.eos_ids.assign(text.end_ids.begin(), text.end_ids.end());
    policy_ = gateway::NewPolicyText(std::move(text));
    weights_ = rollout::FixedWeights(
        engine::ComputeWeights::FromParameters(engine::InitParameters(config, 1), engine::Profile::kF32), {1, 0});
    rollout::WorkerOptions options;
    options.threads = 1;
    worker_ = rollout::Worker::Start(options, weights_.get()).value();
    const gateway::GatewayOptions behind{.context_tokens = config.max_positions};
    gateway_ = std::make_unique<gateway::Gateway>(behind, *policy_, *worker_, SystemClock::Get(), metrics_);
    EXPECT_TRUE(gateway_->Start().ok());
    Fd listening = ListenTcp("127.0.0.1", 0).value();
    const std::string address = "127.0.0.1:" + std::to_string(BoundPort(listening.get()).value());
    gateway_->SetBaseUrl("http://" + address + "/v1");
    http_ = std::make_unique<gateway::http::Server>(
        gateway::http::ServerOptions{.refuse = &gateway::Gateway::RefusalBody},
        [this](gateway::http::Request request, std::shared_ptr<gateway::http::Responder> out) {
          gateway_->Handle(std::move(request), std::move(out));
        });
    EXPECT_TRUE(http_->AddListener(listening.Release()).ok());
    http_->Start();
    sandbox::ServiceOptions service;
    service.janitor_fd = JanitorEnvironment::Get().service_fd();
    service.gateway_address = address;
    sandbox_ = sandbox::LocalSandboxService::Start(service).value();
    run_dir_ = testing::TempDir() + "bad-agents-" + std::to_string(getpid());
    EXPECT_TRUE(MakeDirs(run_dir_ + "/attempts").ok());
  }
  ~Parts() {
    sandbox_.reset();
    http_->Stop();
    gateway_->Stop();
    worker_->Stop();
    EXPECT_TRUE(RemoveAll(run_dir_).ok());
  }

  AttemptResult Play(const std::string& mode, double timeout_s, int max_turns) {
    AttemptOptions options;
    options.scaffold.command = {"{build}/bad-agent", mode};
    options.scaffold.build_dir = TEMPER_BUILD_DIR;
    options.scaffold.run_dir = run_dir_;
    options.scaffold.timeout_s = timeout_s;
    options.scaffold.max_turns = max_turns;
    options.sampling.max_tokens = 4;
    options.limits.memory_bytes = 320 << 20;
    options.limits.disk_bytes = 8 << 20;
    options.limits.files = 500;
    options.limits.processes = 24;
    const std::unique_ptr<Scaffold> scaffold = MakeScaffold(options.scaffold).value();
    const AttemptRunner runner(options, *scaffold, *gateway_, *sandbox_, verifier_);
    AttemptSpec spec;
    spec.session = std::to_string(++played_) + ".0.1";
    spec.group = played_;
    spec.training = true;
    spec.task = {.id = "t", .family = "f", .instruction = "say something", .files = {}};
    return runner.Run(spec, stopped_);
  }
  CountingVerifier& verifier() { return verifier_; }
  // What of an attempt is still there.
  std::string Left() {
    std::string left;
    const std::vector<sandbox::SandboxInfo> sandboxes = sandbox_->List().value();
    for (const sandbox::SandboxInfo& info : sandboxes) left += " sandbox " + info.id;
    const std::vector<std::string> files = ListDir(run_dir_ + "/attempts").value();
    for (const std::string& file : files) left += " " + file;
    const auto metrics = gateway_->GetStatus().value().metrics;
    if (auto it = metrics.find("calls_in_flight"); it != metrics.end() && it->second != 0) left += " calls";
    const std::vector<std::string> names = ListDir("/proc").value();
    for (const std::string& name : names) {
      int64_t pid = 0;
      if (!ParseInt(name, &pid)) continue;
      const Result<std::string> line = ReadFile("/proc/" + name + "/cmdline");
      if (line.ok() && line->rfind("/opt/temper/bad-agent", 0) == 0) left += " process " + name;
    }
    return left;
  }

 private:
  std::unique_ptr<gateway::PolicyText> policy_;
  std::unique_ptr<rollout::WeightSource> weights_;
  std::unique_ptr<rollout::Worker> worker_;
  Metrics metrics_;
  std::unique_ptr<gateway::Gateway> gateway_;
  std::unique_ptr<gateway::http::Server> http_;
  std::unique_ptr<sandbox::LocalSandboxService> sandbox_;
  CountingVerifier verifier_;
  std::string run_dir_;
  std::atomic<bool> stopped_{false};
  int64_t played_ = 0;
};

struct Row {
  const char* mode;
  double timeout_s;
  const char* ending;  // outcome/reason, or several with '|' between
  int calls;           // on record, at least; a refused call is none
  int calls_max;
  double back_within_s;
};

const std::vector<Row>& Table() {
  constexpr double kShort = 0.5, kAmple = 40, kSoon = 3, kMinute = 30;
  static const std::vector<Row> table = {
      {"good", kAmple, "scored", 1, 1, kSoon},
      {"exits-at-once", kAmple, "infra_failure/no_call", 0, 0, kSoon},
      {"exits-3", kAmple, "infra_failure/agent_exit", 0, 0, kSoon},
      {"calls-and-exits-3", kAmple, "infra_failure/agent_exit", 1, 1, kSoon},
      {"crashes", kAmple, "infra_failure/agent_exit", 1, 1, kSoon},
      {"kills-itself", kAmple, "policy_failure/killed_agent", 1, 1, kSoon},
      {"kills-its-session", kAmple, "scored", 1, 1, kSoon},
      {"hangs", kShort, "truncated/time", 0, 0, kShort + kSoon},
      {"calls-and-hangs", kShort, "truncated/time", 1, 1, kShort + kSoon},
      {"never-exits", kShort, "truncated/time", 1, 1, kShort + kSoon},
      {"half-a-request", kShort, "truncated/time", 1, 1, kShort + kSoon},
      {"drips", kShort, "truncated/time", 0, 0, kShort + kSoon},
      {"10000-calls", kAmple, "truncated/turns", 4, 4, kMinute},
      {"2000-connections", kAmple, "truncated/turns", 4, 4, kMinute},
      {"calls-for-ever", 1, "truncated/turns", 4, 4, 1 + kSoon},
      {"500-at-once", 1, "truncated/time", 1, 1, 1 + kSoon},
      {"body-over-the-bound", kAmple, "scored", 1, 1, kMinute},
      {"only-bodies-over-the-bound", kAmple, "infra_failure/no_call", 0, 0, kMinute},
      {"giant-body", kAmple, "truncated/context", 1, 1, kMinute},
      {"giant-word", kAmple, "truncated/context", 1, 1, kMinute},
      {"giant-bodies-for-ever", 1, "truncated/context|truncated/time", 0, 0, 1 + kMinute},
      {"many-messages", kAmple, "truncated/context", 1, 1, kMinute},
      {"deep-body", kAmple, "scored", 1, 1, kSoon},
      {"giant-head", kAmple, "scored", 1, 1, kSoon},
      {"rubbish", kAmple, "scored", 1, 1, kSoon},
      {"floods-output", kAmple, "scored", 1, 1, kMinute},
      {"fork-storm", kAmple, "scored", 1, 1, 5},
      {"fork-storm-for-ever", kShort, "truncated/time", 1, 1, kShort + kSoon},
      {"memory", 5, "policy_failure/limit|truncated/time", 1, 1, 5 + kSoon},  // time where it is held by rlimits
      {"disk", kAmple, "scored", 1, 1, kSoon},
      {"files", kAmple, "scored", 1, 1, kSoon},
      {"daemon-calls-on", kAmple, "scored|truncated/turns", 1, 4, kSoon},
      {"wrong-key", kAmple, "infra_failure/no_call", 0, 0, kSoon},
      {"hangs-up", kAmple, "scored", 1, 2, kSoon},
  };
  return table;
}

std::string Ending(const AttemptResult& r) { return r.reason.empty() ? r.outcome : r.outcome + "/" + r.reason; }

// Any of them could hold a hand for ever, be blamed on the wrong one, bring a reward that nobody judged, or leave a part broken
// for the attempts after it.
TEST(BadAgents, EachAttemptEndsTypedInTime) {
  Parts parts;
  int judged = 0;
  for (const Row& row : Table()) {
    SCOPED_TRACE(row.mode);
    const double begin_s = SystemClock::Get().NowS();
    const AttemptResult result = parts.Play(row.mode, row.timeout_s, 4);
    EXPECT_LT(SystemClock::Get().NowS() - begin_s, row.back_within_s);
    const std::vector<std::string> endings = temper::Split(row.ending, '|');
    EXPECT_EQ(std::count(endings.begin(), endings.end(), Ending(result)), 1) << Ending(result) << ": " << result.detail;
    ASSERT_TRUE(result.trajectory);
    EXPECT_GE(result.trajectory->calls_size(), row.calls);
    EXPECT_LE(result.trajectory->calls_size(), row.calls_max);
    if (result.outcome == "infra_failure") {
      EXPECT_FALSE(result.reward);
      EXPECT_EQ(result.trajectory->reward(), 0);
    } else {
      EXPECT_EQ(result.reward, 0.5);
      ++judged;
    }
    EXPECT_EQ(parts.verifier().calls, judged);
    EXPECT_EQ(parts.Left(), "");
  }
  EXPECT_EQ(Ending(parts.Play("good", 20, 4)), "scored");
}

}  // namespace
}  // namespace temper::agents
