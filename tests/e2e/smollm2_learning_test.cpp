// What configs/smollm2-135m.yaml promises, and its control with rewards permuted within groups. A quarter of an hour each.
#include <gtest/gtest.h>
#include <unistd.h>

#include "common/file.h"
#include "tests/e2e/job_process.h"

namespace temper::e2e {
namespace {

struct Change {
  double mean = 0, low = 0, high = 0;
};

// Plays the whole job and gives the change of the held-out reward, with its paired interval over tasks.
Change Play(const std::vector<std::string>& arguments) {
  EXPECT_EQ(chdir(TEMPER_SOURCE_DIR), 0);
  EXPECT_TRUE(Exists("models/smollm2-135m-instruct")) << "temper model fetch smollm2-135m-instruct brings it (temper test --long does that)";
  JobProcess job("smollm2-learning");
  job.Start(arguments, {}, "smollm2-135m.yaml");
  EXPECT_EQ(job.Wait(5400), 0) << job.Output();
  const json::value summary = job.Summary();
  EXPECT_EQ(*JsonRef(summary).DoubleOr("importance_ratio_max_dev_on_policy", 1), 0);
  const json::value* change = summary.as_object().if_contains("eval_change");
  if (!change || !change->is_object()) {
    ADD_FAILURE() << "no eval_change in " << PrintJson(summary);
    return {};
  }
  const json::array& interval = change->at("ci95").as_array();
  Change out{change->at("mean").to_number<double>(), interval[0].to_number<double>(), interval[1].to_number<double>()};
  EXPECT_GE(change->at("tasks").to_number<int64_t>(), 200);
  EXPECT_EQ(change->at("unpaired").to_number<int64_t>(), 0);
  // Recorded with the pass (tests/run.py).
  std::printf("measured: held-out %.3f -> %.3f, %+.3f [%.3f, %.3f], %.0f s\n", summary.at("eval_start").to_number<double>(),
              summary.at("eval_end").to_number<double>(), out.mean, out.low, out.high, summary.at("wall_s").to_number<double>());
  EXPECT_EQ(job.Remains(), "");
  return out;
}

// What could go wrong: the loop runs, and a real model learns nothing in it.
TEST(SmolLM2Learning, LooksBeforeItActs) {
  const Change change = Play({});
  EXPECT_GE(change.mean, 0.15);
  EXPECT_GT(change.low, 0);
}

// What could go wrong: something other than the reward makes the held-out reward rise.
TEST(SmolLM2Learning, PermutedRewardsTeachNothing) {
  const Change change = Play({"--set", "trainer.permute_rewards=true"});
  EXPECT_LE(change.low, 0);
  EXPECT_GE(change.high, 0);
}

}  // namespace
}  // namespace temper::e2e
