// The loop with a real model: configs/smollm2-135m.yaml, three optimizer steps.
#include <gtest/gtest.h>
#include <unistd.h>

#include "common/file.h"
#include "common/strings.h"
#include "tests/e2e/job_process.h"

namespace temper::e2e {
namespace {

// What could go wrong: sizes, a tokenizer or a chat template that only a real model has break a part; or the 135 million weights
// that the worker maps are not the trainer's to the last bit.
TEST(SmolLM2, ThreeStepsOfTheWholeLoop) {
  // Where `temper model fetch` put the model.
  ASSERT_EQ(chdir(TEMPER_SOURCE_DIR), 0);
  ASSERT_TRUE(Exists("models/smollm2-135m-instruct")) << "temper model fetch smollm2-135m-instruct brings it (temper test --long does that)";
  JobProcess job("smollm2");
  job.Start({"--set", "trainer.steps=3", "--set", "trainer.sft.tokens=3000", "--set", "tasks.eval.count=16", "--set",
             "optimizer.warmup_steps=0"}, {}, "smollm2-135m.yaml");
  ASSERT_EQ(job.Wait(3000), 0) << job.Output();
  const json::value summary = job.Summary();
  const JsonRef s(summary);
  std::printf("[ smollm2 ] %s\n", PrintJson(summary).c_str());
  EXPECT_EQ(*s.StringOr("end", ""), "done");
  EXPECT_EQ(*s.IntOr("steps", 0), 3);
  EXPECT_EQ(*s.IntOr("weight_updates", 0), 3);
  EXPECT_GT(*s.IntOr("on_policy_tokens", 0), 0);
  EXPECT_EQ(*s.DoubleOr("importance_ratio_max_dev_on_policy", 1), 0);
  EXPECT_FALSE(summary.at("on_policy_versions").as_array().empty());
  EXPECT_EQ(*s.Field("outcomes")->IntOr("infra_failure", 1), 0);
  EXPECT_TRUE(*s.BoolOr("ledger_balanced", false));
  std::string output;
  EXPECT_EQ(JobProcess::Door({"pool", "verify", job.folder()}, &output), 0) << output;
  EXPECT_EQ(job.Remains(), "");
}

}  // namespace
}  // namespace temper::e2e
