// The job file's words as options of the two optimizers.
#include "job/optimizers.h"

#include <gtest/gtest.h>

#include "common/config.h"

namespace temper::job {
namespace {

Job Read(const std::string& more) {
  Config config = Config::Parse("name: small\nmodel: {create: {}}\ntasks: {train: {generator: terminal}}\nverifier: {name: f, kind: command, command: [v]}\n"
                                "algorithm: {recipe: grpo}\npool: {groups_per_step: 1, group_size: 2, staleness: 0}\n" + more, "f").value();
  return ReadJob(config).value();
}

TEST(OptimizersTest, ReinforcementLearningHasEveryWordOfTheBlock) {
  const trainer::AdamWOptions o = MakeOptimizer(
      Read("optimizer: {lr: 0.25, betas: [0.5, 0.75], eps: 0.125, weight_decay: 0.375, clip_norm: 2, schedule: cosine, warmup_steps: 3}\n"
           "trainer: {steps: 17}\n"));
  EXPECT_EQ(o.lr, 0.25);
  EXPECT_EQ(o.beta1, 0.5);
  EXPECT_EQ(o.beta2, 0.75);
  EXPECT_EQ(o.eps, 0.125);
  EXPECT_EQ(o.weight_decay, 0.375);
  EXPECT_EQ(o.clip_norm, 2);
  EXPECT_EQ(o.schedule, trainer::Schedule::kCosine);
  EXPECT_EQ(o.warmup_steps, 3);
  EXPECT_EQ(o.total_steps, 17);
}

// What could go wrong: settings meant for reinforcement learning change, or stop, the warm-up before it.
TEST(OptimizersTest, TheWarmUpHasItsOwnRateBetasAndEps) {
  const trainer::AdamWOptions o = MakeWarmUpOptimizer(
      Read("optimizer: {lr: 0.25, betas: [0.5, 0.75], eps: 0.125, weight_decay: 0.375, clip_norm: 2, schedule: cosine, warmup_steps: 3}\n"
           "trainer: {steps: 17, sft: {source: demonstrations, tokens: 10, lr: 0.0625}}\n"));
  EXPECT_EQ(o.lr, 0.0625);
  EXPECT_EQ(o.beta1, 0.9);
  EXPECT_EQ(o.beta2, 0.95);
  EXPECT_EQ(o.eps, 1e-15);
  EXPECT_EQ(o.weight_decay, 0.375);
  EXPECT_EQ(o.clip_norm, 2);
  EXPECT_EQ(o.schedule, trainer::Schedule::kLinear);
}

}  // namespace
}  // namespace temper::job
