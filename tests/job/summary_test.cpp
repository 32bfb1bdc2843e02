// Every field of summary.json, from a run folder made by hand.
#include "job/summary.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include "common/config.h"
#include "common/env.h"
#include "common/file.h"
#include "common/json.h"
#include "common/metrics.h"
#include "datapool/service.h"

namespace temper::job {
namespace {

class SummaryTest : public testing::Test {
 protected:
  void SetUp() override {
    run_ = testing::TempDir() + "summary-" + std::to_string(getpid());
    ASSERT_TRUE(RemoveAll(run_).ok());
    ASSERT_TRUE(MakeDirs(run_).ok());
    Config config = Config::Parse(
                        "name: small\nmodel: {create: {}}\ntasks: {train: {generator: terminal}}\nverifier: {name: f, kind: command, "
                        "command: [v]}\nalgorithm: {recipe: grpo, dynamic_sampling: off}\npool: {groups_per_step: 1, group_size: 2, staleness: 0}\n",
                        "f").value();
    job_ = ReadJob(config).value();
    plan_.bound = 1;
    plan_.cpu_path = "planned";
    end_.exit_code = 130;
    end_.phase = "stopped";
    end_.reason = "stopped by a signal";
    end_.wall_s = 12.5;
    end_.sampling_s = 4;
    end_.restarts = 3;
    end_.counters = {{"gateway.tokens_sampled", 600}, {"gateway.tokens_sampled_eval", 200}, {"trainer.cpu_path.avx512", 1},
                     {"rollout-0.cpu_path.avx512", 1}, {"rollout-1.cpu_path.avx2", 1}};
  }
  void TearDown() override { ASSERT_TRUE(RemoveAll(run_).ok()); }
  void Write(const std::string& file, const std::string& text) { ASSERT_TRUE(WriteFile(run_ + "/" + file, text).ok()); }

  // A pool that hands out group 0, whose rollouts end scored and truncated, and which is trained; then it is stopped with group 1 open.
  void WriteLedger() {
    temper::Metrics metrics;
    Faults faults;
    datapool::LocalPoolOptions options;
    options.config = job_.pool;
    options.task_counts = {8};
    options.job_incarnation = "1";
    options.ledger_path = run_ + "/ledger.jsonl";
    auto pool = datapool::LocalDataPool::Open(options, datapool::MakeMemoryStore(), metrics,
                                              Env{SystemClock::Get(), PosixFileSystem::Get(), faults, Rng(0)}).value();
    ASSERT_TRUE(pool->AttachAgents("a").ok());
    ASSERT_TRUE(pool->AttachTrainer("t", 0).ok());
    const datapool::TakeIssuesReply first = pool->TakeIssues("a", 100, 1000).value();
    ASSERT_EQ(first.issues.size(), 2u);
    for (const datapool::AttemptId id : {datapool::AttemptId{0, 0, 1}, datapool::AttemptId{0, 1, 1}}) {
      datapool::FinishedAttempt attempt;
      attempt.id = id;
      attempt.outcome = id.rollout == 0 ? "scored" : "truncated";
      attempt.reason = id.rollout == 0 ? "" : "turns";
      attempt.reward = 1 - id.rollout;
      attempt.trajectory = "bytes";
      ASSERT_TRUE(*pool->Finish("a", attempt));
    }
    ASSERT_TRUE(pool->Lease("t", 0, 1000)->ready);
    ASSERT_TRUE(pool->Update("t", 0).ok());
    ASSERT_TRUE(pool->Commit(1).ok());
    ASSERT_EQ(pool->TakeIssues("a", 100, 1000)->issues.size(), 2u);
    ASSERT_TRUE(pool->Close(datapool::CloseReason::kStopped).ok());
    pool->Stop();
  }
  void WriteTraining() {
    Write("metrics.jsonl",
          R"({"step":1,"version":0,"tokens_trained":100,"tree_tokens":300,"logical_tokens":400,"on_policy_tokens":100,)"
          R"("importance_ratio_max_dev_on_policy":0,"staleness_max":0,"forward_s":1,"backward_s":0.5,"optimizer_s":0.5})" "\n");
    Write("evaluations.jsonl",
          R"({"evaluation":0,"version":0,"on_policy_tokens":20,"importance_ratio_max_dev_on_policy":0})" "\n"
          R"({"evaluation":1,"version":1,"on_policy_tokens":30,"importance_ratio_max_dev_on_policy":0.125})" "\n");
    Write("eval.jsonl", "{\"pass_rate\":0.25,\"rewards\":[0,0.5,null]}\n{\"pass_rate\":0.5}\n"
                        "{\"pass_rate\":0.75,\"rewards\":[0.5,1,0.75]}\n");
    Write("sft.jsonl", "{\"step\":1,\"tokens\":50}\n{\"step\":2,\"tokens\":90}\n{\"torn");
  }
  std::string Summary() { return MakeSummary(job_, plan_, run_, end_); }

  std::string run_;
  Job job_;
  Plan plan_;
  JobEnd end_;
};

// A number could come from the plan, or from another counter of a like name.
TEST_F(SummaryTest, EveryFieldSaysWhatTheFolderHolds) {
  WriteLedger();
  WriteTraining();
  EXPECT_EQ(PrintJson(ParseJson(Summary()).value()),
            PrintJson(ParseJson(R"({"name":"small","end":"stopped","exit_code":130,"reason":"stopped by a signal","steps":1,"wall_s":12.5,)"
                                R"("eval_start":0.25,"eval_end":0.75,"eval_change":{"mean":0.5,"ci95":[0.5,0.5],"tasks":2,"unpaired":1,)"
                                R"("resamples":10000},"evaluations":3,"tokens_sampled":600,"tokens_sampled_eval":200,)"
                                R"("tokens_trained":100,"sft_tokens":90,"tree_tokens":300,"logical_tokens":400,"on_policy_tokens":150,)"
                                R"("on_policy_versions":[1],"importance_ratio_max_dev_on_policy":0.125,"staleness_max":0,"staleness_bound":1,)"
                                R"("outcomes":{"scored":1,"policy_failure":0,"truncated":1,"infra_failure":0,"aborted":2},)"
                                R"("ledger_balanced":true,"ledger_replayed":true,"groups":{"admitted":2,"consumed":1,"in_flight":1,)"
                                R"("tombstoned":{}},"length_bias":1,"weight_updates":1,"tokens_per_s":{"sample":200,"train":200},"numerics":"bf16",)"
                                R"("cpu_paths":["avx2","avx512"],"restarts":3,"notes":[]})").value()));
}

// A job that checked nothing could claim agreement, and one that never began could break its own account.
TEST_F(SummaryTest, AnEmptyFolderClaimsNothing) {
  end_.counters.clear();
  end_.sampling_s = 0;
  plan_.bound.reset();
  const json::value s = ParseJson(Summary()).value();
  for (const char* key : {"eval_start", "eval_end", "eval_change", "importance_ratio_max_dev_on_policy", "staleness_bound"}) {
    EXPECT_TRUE(s.at(key).is_null()) << key;
  }
  EXPECT_EQ(s.at("steps").as_int64(), 0);
  EXPECT_TRUE(s.at("cpu_paths").as_array().empty());
  const std::string notes = PrintJson(s.at("notes"));
  EXPECT_NE(notes.find("no token could be checked"), std::string::npos) << notes;
  EXPECT_NE(notes.find("no role said which kernels"), std::string::npos) << notes;
}

// One evaluation is a start and no end.
TEST_F(SummaryTest, OneEvaluationIsNoGain) {
  Write("eval.jsonl", "{\"pass_rate\":0.25}\nrubbish\n");
  const json::value s = ParseJson(Summary()).value();
  EXPECT_EQ(s.at("eval_start").as_double(), 0.25);
  EXPECT_TRUE(s.at("eval_end").is_null());
  EXPECT_NE(PrintJson(s.at("notes")).find("eval.jsonl"), std::string::npos);
}

// A ledger out of balance could be reported as a good one.
TEST_F(SummaryTest, AChangedLedgerIsNamed) {
  WriteLedger();
  std::string ledger = ReadFile(run_ + "/ledger.jsonl").value();
  const size_t at = ledger.find("\"event\":\"outcome\"");
  ASSERT_NE(at, std::string::npos) << ledger;
  const size_t from = ledger.rfind('\n', at) + 1, to = ledger.find('\n', at) + 1;
  Write("ledger.jsonl", ledger.substr(0, from) + ledger.substr(to));
  const json::value s = ParseJson(Summary()).value();
  EXPECT_FALSE(s.at("ledger_balanced").as_bool());
  EXPECT_NE(PrintJson(s.at("notes")).find("ledger.jsonl line"), std::string::npos);
}

}  // namespace
}  // namespace temper::job
