// Whole jobs of three steps with every recipe, every KL and every model beside the policy: what no refusal names must run.
#include <gtest/gtest.h>

#include "common/file.h"
#include "common/strings.h"
#include "tests/e2e/job_process.h"

namespace temper::e2e {
namespace {

struct Case {
  const char* name;
  const char* algorithm;      // the block
  const char* trainer = "";   // more keys of the trainer; {run} is the folder of the job that made the models
  int group_size = 4;
  int staleness = 1;
};

std::string Replaced(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return at == std::string::npos ? text : text.replace(at, from.size(), to);
}

// A run of two steps whose checkpoints 0 and 2 are the models of the others; made once.
const JobProcess& Models() {
  static JobProcess* job = [] {
    auto* made = new JobProcess("models");
    made->Start({"--set", "trainer.steps=2", "--set", "trainer.checkpoint_every=1", "--set", "trainer.keep=5", "--set", "optimizer.lr=2e-3"});
    EXPECT_EQ(made->Wait(300), 0) << made->Output();
    return made;
  }();
  return *job;
}

class Algorithms : public testing::TestWithParam<Case> {
 public:
  static void TearDownTestSuite() { delete &Models(); }
};

TEST_P(Algorithms, TheWholeJob) {
  const Case& c = GetParam();
  const std::string models = Models().folder();
  std::string text = ReadFile(std::string(TEMPER_SOURCE_DIR) + "/configs/smoke.yaml").value();
  text = Replaced(text, "create: {layers: 2, width: 64, heads: 4, kv_heads: 2, ffn: 192, vocab: tasks}", "path: " + models + "/checkpoints/0");
  text = Replaced(text, "{recipe: cispo, dynamic_sampling: off}", c.algorithm);
  text = Replaced(text, "group_size: 4", "group_size: " + std::to_string(c.group_size));
  text = Replaced(text, "staleness: 1", "staleness: " + std::to_string(c.staleness));
  text = Replaced(text, "steps: 5", "steps: 3");
  text = Replaced(text, "lr: 4.0e-4", "lr: 2.0e-3");
  text = Replaced(text, "  sft: {source: demonstrations, tokens: 150000, poor_fraction: 0.5, batch_tokens: 256, lr: 3.0e-3}\n", "");
  std::string more = c.trainer;
  if (more.find("{run}") != std::string::npos) more = Replaced(more, "{run}", models);
  text = Replaced(text, "  keep: 2\n", "  keep: 2\n" + more);
  JobProcess job(std::string("algorithm_") + c.name);
  const std::string file = testing::TempDir() + "/algorithm_" + c.name + ".yaml";
  ASSERT_TRUE(WriteFile(file, text).ok());
  job.Start({}, {}, file);
  ASSERT_EQ(job.Wait(300), 0) << job.Output();

  const json::value summary = job.Summary();
  const JsonRef s(summary);
  EXPECT_EQ(*s.IntOr("steps", 0), 3);
  EXPECT_EQ(*s.DoubleOr("importance_ratio_max_dev_on_policy", 1), 0);
  EXPECT_TRUE(*s.BoolOr("ledger_balanced", false));
  double moved = 0;
  const std::vector<std::string> lines = Split(std::string(Trim(job.Read("metrics.jsonl"))), '\n');
  ASSERT_EQ(lines.size(), 3u);
  for (size_t i = 0; i < lines.size(); ++i) {
    const json::value value = ParseJson(lines[i]).value();
    const JsonRef line(value);
    moved += *line.DoubleOr("grad_norm", 0);
    // The start weights are those of version 0, to the bit; a named model is another one. Afterwards the policy has left.
    if (line.Has("kl_reference")) {
      if (i == 0 && more.empty()) {
        EXPECT_EQ(*line.DoubleOr("kl_reference", -1), 0);
      }
      if (i == 0 && !more.empty()) {
        EXPECT_GT(*line.DoubleOr("kl_reference", -1), 0);
      }
      if (i == 2) {
        EXPECT_GE(*line.DoubleOr("kl_reference", -1), 0);
      }
    }
    if (line.Has("kl_teacher")) {
      EXPECT_GT(*line.DoubleOr("kl_teacher", -1), 0);
    }
  }
  EXPECT_GT(moved, 0) << job.Output();
  const bool reads_reference = std::string(c.algorithm).find("kl:") != std::string::npos;
  if (reads_reference) {
    EXPECT_TRUE(JsonRef(ParseJson(lines[0]).value()).Has("kl_reference"));
  }
  if (std::string(c.algorithm).find("opd") != std::string::npos) {
    EXPECT_TRUE(JsonRef(ParseJson(lines[0]).value()).Has("kl_teacher"));
  }
}

// A verifier's rewards of turns, from its sandbox through the record to the loss: outcomes are all equal, so that nothing else could be
// learnt from.
TEST(Turns, AVerifiersRewardsAreTrained) {
  std::string text = ReadFile(std::string(TEMPER_SOURCE_DIR) + "/configs/smoke.yaml").value();
  text = Replaced(text, "{recipe: cispo, dynamic_sampling: off}",
                  "{recipe: grpo, advantage: {credit: turn, baseline: group_mean}, reward: {process_coef: 0.5, speed_coef: 0.1}}");
  text = Replaced(text, "steps: 5", "steps: 3");
  text = Replaced(text, "{name: files, kind: command, command: [\"{build}/files-verifier\"], timeout_s: 20}",
                  R"({name: turns, kind: command, timeout_s: 20, command: [/bin/sh, -c, 'n=$(sed "s/.*\"turns\":\([0-9]*\).*/\1/"); r=; )"
                  R"(for i in $(seq $n); do r="$r${r:+,}$i"; done; echo "{\"reward\":0,\"turn_rewards\":[$r]}" >&3']})");
  JobProcess job("turns");
  const std::string file = testing::TempDir() + "/turns.yaml";
  ASSERT_TRUE(WriteFile(file, text).ok());
  job.Start({}, {}, file);
  ASSERT_EQ(job.Wait(300), 0) << job.Output();
  int64_t several = 0;
  for (const std::string& line : Split(std::string(Trim(job.Read("metrics.jsonl"))), '\n')) {
    const json::value value = ParseJson(line).value();
    // Turn n gives n, half of it counts, and every rollout has a turn; outcomes give nothing.
    EXPECT_GE(*JsonRef(value).DoubleOr("reward_min", 0), 0.5);
    EXPECT_GE(*JsonRef(value).DoubleOr("reward_mean", 0), *JsonRef(value).DoubleOr("reward_min", 0));
    EXPECT_LE(*JsonRef(value).DoubleOr("reward_mean", 0), *JsonRef(value).DoubleOr("reward_max", 0));
    several += *JsonRef(value).DoubleOr("advantage_std", 0) > 0 && *JsonRef(value).DoubleOr("grad_norm", 0) > 0;
  }
  EXPECT_GT(several, 0) << job.Read("metrics.jsonl");
  std::string shown;
  ASSERT_EQ(JobProcess::Door({"trajectory", "show", job.folder(), "0.0.1", "--json"}, &shown), 0) << shown;
  const json::value trajectory = ParseJson(shown).value();
  const JsonRef rewards = JsonRef(trajectory).Field("turn_rewards").value();
  double turn = 0;
  const std::vector<JsonRef> items = rewards.Items().value();
  for (const JsonRef& reward : items) EXPECT_EQ(reward.Double().value(), ++turn);
  EXPECT_GE(turn, 1);
}

INSTANTIATE_TEST_SUITE_P(
    , Algorithms,
    testing::Values(
        Case{"grpo", "{recipe: grpo}"}, Case{"dr_grpo", "{recipe: dr_grpo, aggregation: {length_norm: 48}}"},
        Case{"dapo", "{recipe: dapo, overlong: {max_tokens: 96, buffer_tokens: 32}}"}, Case{"gspo", "{recipe: gspo}"}, Case{"gmpo", "{recipe: gmpo}"},
        Case{"cispo", "{recipe: cispo}"}, Case{"cispo_mask", "{recipe: cispo, loss: {mask_low: 0.2, mask_high: 0.28}}"}, Case{"rloo", "{recipe: rloo}"},
        Case{"reinforce", "{recipe: reinforce}", "", 4, 0}, Case{"reinforce_pp", "{recipe: reinforce_pp, kl: {coef: 0.001}}"},
        Case{"reinforce_pp_baseline", "{recipe: reinforce_pp_baseline}"}, Case{"dual_clip", "{recipe: dual_clip}"}, Case{"sapo", "{recipe: sapo}"},
        Case{"dppo_tv", "{recipe: dppo_tv}"}, Case{"m2po", "{recipe: m2po}"}, Case{"minimax_01", "{recipe: minimax_01, kl: {coef: 0.01}}"},
        Case{"kimi", "{recipe: kimi}"}, Case{"sft", "{recipe: sft}"}, Case{"dpo", "{recipe: dpo}", "", 2}, Case{"ipo", "{recipe: ipo}", "", 2},
        Case{"opd", "{recipe: opd}", "  teacher: {run}/checkpoints/2\n"},
        Case{"opd_with_rewards", "{recipe: opd, distillation: {task_reward: true}, advantage: {baseline: group_mean}}", "  teacher: {run}/checkpoints/2\n"},
        Case{"topk_forward_kl", "{loss: {kind: distill}, aggregation: {mode: token-mean}, distillation: {kind: topk_forward_kl}}",
             "  teacher: {run}/checkpoints/2\n  teacher_top: 8\n"},
        Case{"kl_loss_k2", "{recipe: grpo, kl: {where: loss, estimator: k2, coef: 0.05}}"},
        Case{"kl_loss_k3", "{recipe: grpo, kl: {where: loss, estimator: k3, coef: 0.05}}"},
        Case{"kl_loss_k1_plus", "{recipe: grpo, kl: {where: loss, estimator: k1+, coef: 0.05}}"},
        Case{"kl_loss_k3_plus", "{recipe: grpo, kl: {where: loss, estimator: k3+, coef: 0.05, importance_weighted: true}}"},
        Case{"kl_reward_k1", "{recipe: grpo, kl: {where: reward, estimator: k1, coef: 0.05}}"},
        Case{"kl_reward_k2", "{recipe: grpo, advantage: {credit: turn}, kl: {where: reward, estimator: k2, coef: 0.05}}"},
        Case{"kl_reward_k3", "{recipe: grpo, kl: {where: reward, estimator: k3, coef: 0.05}}"},
        Case{"kl_named", "{recipe: grpo, kl: {where: loss, coef: 0.05}}", "  reference: {run}/checkpoints/2\n"},
        Case{"decoupled_epochs_ranks", "{recipe: grpo, off_policy: {mode: decoupled, weight: token}}", "  minibatches: 2\n  epochs: 2\n  ranks: 2\n"},
        Case{"decoupled", "{recipe: grpo, off_policy: {mode: decoupled, weight: token, reject: [{measure: ratio, level: sequence_mean, max: 4}]}}"}),
    [](const auto& p) { return std::string(p.param.name); });

}  // namespace
}  // namespace temper::e2e
