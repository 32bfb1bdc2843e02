#include "job/resume.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include "common/config.h"
#include "common/file.h"

namespace temper::job {
namespace {

class ResumeTest : public testing::Test {
 protected:
  void SetUp() override {
    run_ = testing::TempDir() + "resume-" + std::to_string(getpid());
    ASSERT_TRUE(RemoveAll(run_).ok());
    ASSERT_TRUE(MakeDirs(run_ + "/checkpoints").ok());
    Store({});
  }
  void TearDown() override { ASSERT_TRUE(RemoveAll(run_).ok()); }

  static std::pair<Job, std::string> Read(std::vector<std::string> sets) {
    Config config = Config::Parse(
                        "model: {create: {}}\ntasks: {train: {generator: terminal}}\nverifier: {name: f, kind: command, command: [v]}\n"
                        "algorithm: {recipe: grpo}\ntrainer: {steps: 10}\n", "f").value();
    for (const std::string& set : sets) EXPECT_TRUE(config.Set(set).ok()) << set;
    Job job = ReadJob(config).value();
    return {std::move(job), config.ResolvedYaml()};
  }
  void Store(const std::vector<std::string>& sets) { ASSERT_TRUE(WriteFile(run_ + "/job.yaml", Read(sets).second).ok()); }
  // What a resume with these settings is refused for; "" = nothing.
  std::string Refusal(const std::vector<std::string>& sets) const {
    const auto [job, resolved] = Read(sets);
    const Status status = CheckResume(run_, job, resolved);
    EXPECT_TRUE(status.ok() || status.code() == StatusCode::kInvalidArgument) << status.ToString();
    return status.message();
  }
  std::string run_;
};

// A run could go on as another job, half of it trained one way and half another.
TEST_F(ResumeTest, TheJobIsTheSame) {
  EXPECT_EQ(Refusal({}), "");
  EXPECT_NE(Refusal({"seed=9"}).find("`seed: 9`"), std::string::npos);
  EXPECT_EQ(Refusal({"optimizer.lr=0.5"}), "a resumed job must be the same: optimizer.lr: the run has `lr: 3e-04`, this job `lr: 0.5`");
  EXPECT_EQ(Refusal({"trainer.sft.tokens=5"}), "a resumed job must be the same: trainer.sft: the run has nothing, this job `sft:`");
  // Steps, and a schedule that could not be lengthened, matter least where the whole job is another.
  EXPECT_EQ(Refusal({"name=another", "trainer.steps=60", "optimizer.schedule=linear"}),
            "a resumed job must be the same: name: the run has `name: \"job\"`, this job `name: \"another\"`");
  EXPECT_NE(Refusal({"name=another", "trainer.steps=2"}).find("the same: name: "), std::string::npos);
}

// More steps could be refused for no reason, or let another change through beside them.
TEST_F(ResumeTest, StepsMayRise) {
  EXPECT_EQ(Refusal({"pool.retention.consumed=drop", "pool.retention.disk=1GiB", "pool.retention.free=0"}), "") << "decides nothing else";
  EXPECT_NE(Refusal({"pool.retention.consumed=drop", "seed=9"}).find("`seed: 9`"), std::string::npos);
  EXPECT_EQ(Refusal({"trainer.steps=11"}), "");
  EXPECT_NE(Refusal({"trainer.steps=11", "seed=9"}).find("`seed: 9`"), std::string::npos);
  EXPECT_NE(Refusal({"trainer.steps=9"}).find("not 9"), std::string::npos);
}

// With a schedule that ends at the last step, the steps already done would have had other rates.
TEST_F(ResumeTest, NotUnderASchedule) {
  for (const char* schedule : {"linear", "cosine"}) {
    const std::string set = std::string("optimizer.schedule=") + schedule;
    Store({set});
    EXPECT_EQ(Refusal({set}), "");
    EXPECT_NE(Refusal({set, "trainer.steps=11"}).find(schedule), std::string::npos);
  }
}

// A pool that has ended gives no further batch: the job would wait or fail somewhere inside.
TEST_F(ResumeTest, NotWhenAllStepsAreDone) {
  ASSERT_TRUE(MakeDirs(run_ + "/checkpoints/9").ok());
  EXPECT_EQ(Refusal({"trainer.steps=11"}), "");
  ASSERT_TRUE(MakeDirs(run_ + "/checkpoints/10").ok());
  EXPECT_EQ(Refusal({}), "");
  EXPECT_NE(Refusal({"trainer.steps=11"}).find("checkpoints/10"), std::string::npos);
}

// After kill -9 the time of the job went back to the last state, behind steps that are in the file.
TEST_F(ResumeTest, TheJobsTimeIsNotBehindItsLastLine) {
  EXPECT_EQ(LastJobSeconds(run_), 0);
  ASSERT_TRUE(WriteFile(run_ + "/metrics.jsonl", "{\"step\":1,\"wall_s\":99}\n{\"step\":2,\"job_s\":12.5}\n{\"step\":3,\"jo").ok());
  EXPECT_EQ(LastJobSeconds(run_), 12.5);
  ASSERT_TRUE(WriteFile(run_ + "/eval.jsonl", "{\"version\":0,\"job_s\":11}\n").ok());
  EXPECT_EQ(LastJobSeconds(run_), 12.5);
  ASSERT_TRUE(WriteFile(run_ + "/eval.jsonl", "{\"version\":2,\"job_s\":14}\n").ok());
  EXPECT_EQ(LastJobSeconds(run_), 14);
}

}  // namespace
}  // namespace temper::job
