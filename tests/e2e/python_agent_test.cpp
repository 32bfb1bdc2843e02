// An agent in another language, run by the host's python3 inside the sandbox: examples/agents/terminal_agent.py.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>

#include "common/strings.h"
#include "tests/e2e/job_process.h"

namespace temper::e2e {
namespace {

constexpr int kSteps = 3;

std::vector<std::string> Arguments(const std::vector<std::string>& more) {
  std::vector<std::string> all = {"--set", "trainer.steps=" + std::to_string(kSteps)};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

void ExpectGoodRun(const JobProcess& job) {
  const json::value summary = job.Summary();
  const JsonRef s(summary);
  EXPECT_EQ(*s.StringOr("end", ""), "done") << PrintJson(summary);
  EXPECT_EQ(*s.IntOr("steps", 0), kSteps);
  EXPECT_EQ(*s.IntOr("weight_updates", 0), kSteps);
  EXPECT_TRUE(*s.BoolOr("ledger_balanced", false)) << PrintJson(summary);
  EXPECT_TRUE(*s.BoolOr("ledger_replayed", false)) << PrintJson(summary);
  EXPECT_EQ(*s.DoubleOr("importance_ratio_max_dev_on_policy", 1), 0);
  EXPECT_GT(*s.IntOr("on_policy_tokens", 0), 0);
  EXPECT_EQ(*s.Field("outcomes")->IntOr("infra_failure", 1), 0);
  EXPECT_EQ(*s.Field("outcomes")->IntOr("policy_failure", 1), 0);
  EXPECT_GE(*s.Field("outcomes")->IntOr("scored", 0), kSteps * 16 / 2);
  double reward = 0;
  for (const std::string& line : Split(std::string(Trim(job.Read("metrics.jsonl"))), '\n')) {
    auto value = ParseJson(line);
    ASSERT_TRUE(value.ok()) << line;
    reward = std::max(reward, *JsonRef(*value).DoubleOr("reward_mean", 0));
  }
  EXPECT_GT(reward, 0);
  std::string output;
  EXPECT_EQ(JobProcess::Door({"pool", "verify", job.folder()}, &output), 0) << output;
  EXPECT_EQ(job.Remains(), "");
}

// The first line of eval.jsonl without its time.
json::value FirstEvaluation(const JobProcess& job) {
  auto value = ParseJson(Split(job.Read("eval.jsonl"), '\n').front());
  EXPECT_TRUE(value.ok()) << job.Output();
  if (!value.ok()) return nullptr;
  EXPECT_GT(*JsonRef(*value).DoubleOr("pass_rate", 0), 0);
  value->as_object().erase("wall_s");
  return *value;
}

// What could go wrong: the loop works only with our own C++ agent, because the sandbox lacks what another needs, or the client's
// way of writing a conversation changes what the policy reads. At version 0 the same weights draw the same tokens from the same
// words, so both agents must solve the very same tasks.
TEST(PythonAgent, DoesWhatTheCppAgentDoes) {
  // The command of examples/agents/terminal_agent.py, whose relative path starts at the root of the tree.
  ASSERT_EQ(chdir(TEMPER_SOURCE_DIR), 0);
  JobProcess python("python_agent"), cpp("cpp_agent");
  python.Start(Arguments({"--set", "scaffold.command=[\"python3\", \"/opt/agents/terminal_agent.py\"]", "--set",
                          "sandbox.mounts=[{source: examples/agents, target: /opt/agents}]"}));
  ASSERT_EQ(python.Wait(300), 0);
  ExpectGoodRun(python);
  cpp.Start(Arguments({}));
  ASSERT_EQ(cpp.Wait(300), 0);
  ExpectGoodRun(cpp);
  EXPECT_EQ(PrintJson(FirstEvaluation(python)), PrintJson(FirstEvaluation(cpp)));
}

}  // namespace
}  // namespace temper::e2e
