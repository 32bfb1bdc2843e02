// The order of one attempt, over parts that write down what is asked of them: open, create, play, seal, export, verify.
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "agents/attempt.h"
#include "common/file.h"
#include "common/json.h"
#include "temper/v1/types.pb.h"

namespace temper::agents {
namespace {

using Journal = std::vector<std::string>;
using verifiers::VerdictOutcome;

struct RecordingGateway final : gateway::GatewayControl {
  Result<gateway::Opened> Open(const gateway::OpenOptions& options) override {
    journal->push_back("open");
    opened = options;
    if (!open.ok()) return open;
    return gateway::Opened{"key", "http://x/v1"};
  }
  Result<gateway::Sealed> Seal(const std::string& session, int) override {
    journal->push_back("seal");
    if (!seal.ok()) return seal;
    auto trajectory = std::make_shared<v1::Trajectory>();
    trajectory->set_session(session);
    if (calls) trajectory->add_calls()->set_finish("stop");
    for (const std::string& flag : flags) trajectory->add_flags(flag);
    trajectory->set_final_text("last words");
    // Two answers in the first call, one in the second; the third was given no answer.
    for (const int32_t call : {1, 1, 2}) {
      v1::TokenRun* run = trajectory->add_runs();
      run->set_provenance(v1::SAMPLED);
      run->set_call(call);
    }
    trajectory->add_runs()->set_call(3);
    return gateway::Sealed{trajectory, "sealed"};
  }
  Status Abort(const std::string&, const std::string& reason) override {
    journal->push_back("abort " + reason);
    return Status::Ok();
  }
  Result<gateway::GatewayStatus> GetStatus() override { return gateway::GatewayStatus{}; }

  Journal* journal = nullptr;
  gateway::OpenOptions opened;
  Status open, seal;
  bool calls = true;
  std::vector<std::string> flags;
};

struct RecordingSandbox final : sandbox::SandboxService {
  Result<sandbox::SandboxInfo> Create(const sandbox::CreateRequest& request) override {
    journal->push_back("create");
    if (!create.ok()) return create;
    return sandbox::SandboxInfo{.id = request.id, .enforced = {}};
  }
  Result<sandbox::ExecResult> Exec(const sandbox::ExecRequest&) override { return Unimplemented("nobody runs a command here"); }
  Result<std::vector<sandbox::File>> Export(const std::string&, const sandbox::ExportOptions&) override {
    journal->push_back("export");
    if (!exported.ok()) return exported;
    return std::vector<sandbox::File>{{.path = "left", .bytes = "behind"}};
  }
  Status Renew(const std::string&, double) override { return Status::Ok(); }
  Status Destroy(const std::string&) override {
    journal->push_back("destroy");
    return Status::Ok();
  }
  Result<std::vector<sandbox::SandboxInfo>> List() override { return std::vector<sandbox::SandboxInfo>{}; }

  Journal* journal = nullptr;
  Status create, exported;
};

struct RecordingVerifier final : verifiers::Verifier {
  verifiers::Verdict Verify(const verifiers::Case& c) override {
    journal->push_back("verify");
    seen = c;
    return verdict;
  }
  Journal* journal = nullptr;
  verifiers::Verdict verdict{.outcome = VerdictOutcome::kScored, .reward = 0.75, .components = {{"part", 0.5}}, .turn_rewards = {0.25, -1}, .evidence_json = R"({"found":1})"};
  std::optional<verifiers::Case> seen;
};

struct RecordingScaffold final : Scaffold {
  std::vector<sandbox::Mount> Mounts(const std::string&) const override { return {}; }
  bool NeedsRelay() const override { return false; }
  AgentEnd Play(const AttemptContext& context) const override {
    journal->push_back("play");
    EXPECT_TRUE(Exists(context.task_file)) << "the agent begins before its task is there";
    return end;
  }
  Journal* journal = nullptr;
  AgentEnd end{AgentEnd::Kind::kDone, ""};
};

// One attempt; a test spoils one part and plays it.
struct World {
  World() {
    gateway.journal = sandbox.journal = verifier.journal = scaffold.journal = &journal;
    run_dir = testing::TempDir() + "attempt-order-" + std::to_string(getpid());
    EXPECT_TRUE(MakeDirs(run_dir + "/attempts").ok());
    options.scaffold.run_dir = run_dir;
  }
  ~World() { EXPECT_TRUE(RemoveAll(run_dir).ok()); }

  // As a training attempt that `change` makes another.
  AttemptResult Play(const std::function<void(AttemptSpec&)>& change = {}) {
    AttemptSpec spec;
    spec.session = "3.1.2";
    spec.group = 3;
    spec.rollout = 1;
    spec.attempt = 2;
    spec.training = true;
    spec.task = {.id = "t", .family = "f", .instruction = "do", .files = {}};
    if (change) change(spec);
    const AttemptRunner runner(options, scaffold, gateway, sandbox, verifier);
    const std::atomic<bool> stopped = false;
    AttemptResult result = runner.Run(spec, stopped);
    EXPECT_TRUE(ListDir(run_dir + "/attempts")->empty()) << "the task file is left behind";
    if (result.trajectory) {
      EXPECT_EQ(result.trajectory->outcome(), result.outcome);
      EXPECT_EQ(result.trajectory->reason(), result.reason);
      EXPECT_EQ(result.trajectory->reward(), result.reward.value_or(0));
    }
    return result;
  }

  Journal journal;
  RecordingGateway gateway;
  RecordingSandbox sandbox;
  RecordingVerifier verifier;
  RecordingScaffold scaffold;
  AttemptOptions options;
  std::string run_dir;
};

// Where the random numbers of a session come from.
std::array<uint64_t, 4> Key(const World& world) {
  const gateway::KeySpace& key = world.gateway.opened.key_space;
  return {key.seed, key.domain, key.a, key.b};
}

std::string Ending(const AttemptResult& r) { return r.reason.empty() ? r.outcome : r.outcome + "/" + r.reason; }

// Rollouts of a group that draw the same numbers teach nothing; evaluations that draw different ones differ though the policy is
// the same, and a task that is played again must not get another chance.
TEST(AttemptRunner, WhatIsDrawnFollowsFromTheTaskAndNotFromTheTry) {
  World world;
  world.options.seed = 7;
  std::set<std::array<uint64_t, 4>> keys;
  for (int64_t group : {3, 4}) {
    for (int rollout : {0, 1}) {
      for (int attempt : {0, 1}) {
        world.Play([&](AttemptSpec& spec) { spec.group = group, spec.rollout = rollout, spec.attempt = attempt; });
        keys.insert(Key(world));
      }
    }
  }
  EXPECT_EQ(keys.size(), 4u);
  for (int64_t task : {3, 4}) {
    for (int64_t evaluation : {0, 1, 2}) {
      world.Play([&](AttemptSpec& spec) { spec.training = false, spec.evaluation = evaluation, spec.task_index = task; });
      keys.insert(Key(world));
    }
  }
  EXPECT_EQ(keys.size(), 6u);
  world.options.seed = 8;
  world.Play();
  EXPECT_EQ(keys.count(Key(world)), 0u);
}

// The agent could go on writing while it is judged, a judge could see a session that still grows, or sit beside the agent's
// living sandbox.
TEST(AttemptRunner, SealsThenExportsThenJudges) {
  World world;
  const AttemptResult result = world.Play();
  EXPECT_EQ(world.journal, (Journal{"open", "create", "play", "seal", "export", "destroy", "verify", "destroy"}));
  EXPECT_EQ(Ending(result), "scored");
  EXPECT_EQ(result.reward, 0.75);
  ASSERT_TRUE(result.trajectory);
  EXPECT_EQ(result.trajectory->components().at("part"), 0.5);
  EXPECT_EQ(result.trajectory->evidence(), R"({"found":1})");
  EXPECT_EQ(std::vector<double>(result.trajectory->turn_rewards().begin(), result.trajectory->turn_rewards().end()), (std::vector<double>{0.25, -1}));
  ASSERT_TRUE(world.verifier.seen);
  ASSERT_EQ(world.verifier.seen->files.size(), 1u);
  EXPECT_EQ(world.verifier.seen->files[0].bytes, "behind");
  EXPECT_EQ(world.verifier.seen->outcome, "scored");
  EXPECT_EQ(world.verifier.seen->final_text, "last words");
  EXPECT_EQ(world.verifier.seen->turns, 2);
  const json::value metadata = ParseJson(world.verifier.seen->metadata_json).value();
  EXPECT_EQ(metadata.at("group").as_int64(), 3);
  EXPECT_EQ(metadata.at("rollout").as_int64(), 1);
  EXPECT_EQ(metadata.at("attempt").as_int64(), 2);
}

// A failure of our own parts could come out as a reward (0 is one too), and be learnt from.
TEST(AttemptRunner, NoFailureOfOurOwnPartsBecomesAReward) {
  struct Row {
    const char* what;
    void (*spoil)(World&);
    const char* ending;
    Journal after_open;
  };
  const Journal judged = {"create", "play", "seal", "export", "destroy", "verify", "destroy"};
  const Row rows[] = {
      {"gateway away", [](World& w) { w.gateway.open = Unavailable("gone"); }, "aborted/gateway_restarted", {}},
      {"session taken", [](World& w) { w.gateway.open = AlreadyExists("taken"); }, "aborted/session_taken", {}},
      {"gateway broken", [](World& w) { w.gateway.open = Internal("broken"); }, "infra_failure/gateway", {}},
      {"no sandbox", [](World& w) { w.sandbox.create = Internal("mount"); }, "infra_failure/sandbox",
       {"create", "destroy", "abort sandbox"}},
      {"sandbox service away", [](World& w) { w.sandbox.create = Unavailable("gone"); }, "aborted/sandbox_restarted",
       {"create", "destroy", "abort sandbox_restarted"}},
      {"agent could not be run", [](World& w) { w.scaffold.end = {AgentEnd::Kind::kInfra, "exec"}; }, "infra_failure/sandbox",
       {"create", "play", "seal", "destroy"}},
      {"worker failed", [](World& w) { w.gateway.flags = {"worker_error"}; }, "infra_failure/worker",
       {"create", "play", "seal", "destroy"}},
      {"worker failed and a limit was hit", [](World& w) { w.gateway.flags = {"rollout_limit:turns", "worker_error"}; },
       "infra_failure/worker", {"create", "play", "seal", "destroy"}},
      {"gateway restarted under a call", [](World& w) { w.gateway.flags = {"gateway_restart"}; }, "aborted/gateway_restart",
       {"create", "play", "seal", "destroy"}},
      {"agent never called", [](World& w) { w.gateway.calls = false; }, "infra_failure/no_call",
       {"create", "play", "seal", "destroy"}},
      {"agent crashed", [](World& w) { w.scaffold.end = {AgentEnd::Kind::kExit, "1"}; }, "infra_failure/agent_exit",
       {"create", "play", "seal", "destroy"}},
      {"seal failed", [](World& w) { w.gateway.seal = Internal("disk"); }, "infra_failure/gateway",
       {"create", "play", "seal", "destroy", "abort gateway"}},
      {"session forgotten", [](World& w) { w.gateway.seal = NotFound("3.1.2"); }, "aborted/gateway_restarted",
       {"create", "play", "seal", "destroy", "abort gateway_restarted"}},
      {"export failed", [](World& w) { w.sandbox.exported = Internal("read"); }, "infra_failure/sandbox",
       {"create", "play", "seal", "export", "destroy", "abort sandbox"}},
      {"judge failed", [](World& w) { w.verifier.verdict.outcome = VerdictOutcome::kInfraFailure; }, "infra_failure/verifier", judged},
      {"judge gave rewards of other turns", [](World& w) { w.verifier.verdict.turn_rewards = {1}; }, "infra_failure/verifier", judged},
      {"judge's sandbox service away",
       [](World& w) {
         w.verifier.verdict.outcome = VerdictOutcome::kInfraFailure;
         w.verifier.verdict.evidence_json = R"({"reason":"sandbox","message":"UNAVAILABLE: gone"})";
       },
       "aborted/sandbox_restarted", judged},
  };
  for (const Row& row : rows) {
    for (const bool failure_reward : {false, true}) {
      World world;
      if (failure_reward) world.options.failure_reward = -1;
      row.spoil(world);
      const AttemptResult result = world.Play();
      EXPECT_EQ(Ending(result), row.ending) << row.what;
      EXPECT_FALSE(result.reward) << row.what << ": reward " << *result.reward;
      if (result.trajectory) {
        EXPECT_EQ(result.trajectory->components_size(), 0) << row.what;
      }
      Journal expected = {"open"};
      expected.insert(expected.end(), row.after_open.begin(), row.after_open.end());
      EXPECT_EQ(world.journal, expected) << row.what;
    }
  }
}

// What the policy did to itself could be hidden as infrastructure, or a set failure reward be ignored.
TEST(AttemptRunner, ThePolicysOwnFailuresAreWorthSomething) {
  World judged;
  judged.scaffold.end = {AgentEnd::Kind::kTimeout, ""};
  AttemptResult result = judged.Play();
  EXPECT_EQ(Ending(result), "truncated/time");
  EXPECT_EQ(result.reward, 0.75);
  EXPECT_EQ(judged.verifier.seen->outcome, "truncated");

  World fixed;
  fixed.options.failure_reward = -1;
  fixed.scaffold.end = {AgentEnd::Kind::kTimeout, ""};
  result = fixed.Play();
  EXPECT_EQ(Ending(result), "truncated/time");
  EXPECT_EQ(result.reward, -1);
  EXPECT_EQ(fixed.journal, (Journal{"open", "create", "play", "seal", "destroy"}));

  World overfull;
  overfull.sandbox.exported = ResourceExhausted("more than can be taken out");
  result = overfull.Play();
  EXPECT_EQ(Ending(result), "policy_failure/limit");
  EXPECT_EQ(result.reward, 0);
  EXPECT_FALSE(overfull.verifier.seen);
}

// An attempt that was cancelled could still be sealed, judged and kept.
TEST(AttemptRunner, AStoppedAttemptIsAbortedUnjudged) {
  World world;
  const AttemptRunner runner(world.options, world.scaffold, world.gateway, world.sandbox, world.verifier);
  const std::atomic<bool> stopped = true;
  AttemptSpec spec;
  spec.session = "0.0.1";
  const AttemptResult result = runner.Run(spec, stopped);
  EXPECT_EQ(Ending(result), "aborted/stopped");
  EXPECT_FALSE(result.trajectory);
  EXPECT_EQ(world.journal, (Journal{"open", "create", "destroy", "abort stopped"}));
}

}  // namespace
}  // namespace temper::agents
