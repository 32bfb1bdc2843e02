// Kill anything, lose nothing: every role, the supervisor, the janitor, and the trainer between any two of its durable steps.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "common/file.h"
#include "common/strings.h"
#include "tests/e2e/job_process.h"

namespace temper::e2e {
namespace {

constexpr int kSteps = 8;
const std::vector<std::string> kArguments = {"--set", "trainer.steps=" + std::to_string(kSteps)};

// What must be true of every run that came to its end, however it got there.
void ExpectGoodEnd(const JobProcess& job) {
  const json::value summary = job.Summary();
  const JsonRef s(summary);
  EXPECT_EQ(*s.StringOr("end", ""), "done") << PrintJson(summary);
  EXPECT_EQ(*s.IntOr("steps", 0), kSteps);
  EXPECT_TRUE(*s.BoolOr("ledger_balanced", false)) << PrintJson(summary);
  EXPECT_TRUE(*s.BoolOr("ledger_replayed", false)) << PrintJson(summary);
  EXPECT_EQ(*s.DoubleOr("importance_ratio_max_dev_on_policy", 1), 0);
  EXPECT_LE(*s.IntOr("staleness_max", 99), *s.IntOr("staleness_bound", 0));
  EXPECT_EQ(job.Remains(), "");
  // Each step once, in order.
  int64_t step = 0;
  for (const std::string& line : Split(job.Read("metrics.jsonl"), '\n')) {
    if (line.empty()) continue;
    auto value = ParseJson(line);
    ASSERT_TRUE(value.ok()) << line;
    EXPECT_EQ(*JsonRef(*value).IntOr("step", 0), ++step);
  }
  EXPECT_EQ(step, kSteps);
}

class KillRole : public testing::TestWithParam<const char*> {};

// A role killed at any moment is restarted and the job goes on, with no rollout counted as a failure of the policy or lost.
TEST_P(KillRole, TheJobGoesOn) {
  JobProcess job(std::string("kill_") + GetParam());
  job.Start(kArguments);
  ASSERT_TRUE(job.WaitSteps(2, 120));
  const pid_t pid = job.RolePid(GetParam());
  ASSERT_GT(pid, 0);
  EXPECT_EQ(Trim(*ReadFile("/proc/" + std::to_string(pid) + "/comm")), std::string("temper-") + GetParam()) << "what ps and pgrep say";
  kill(pid, SIGKILL);
  ASSERT_EQ(job.Wait(180), 0);
  ExpectGoodEnd(job);
  EXPECT_EQ(*JsonRef(job.Summary()).IntOr("restarts", 0), 1);
}

INSTANTIATE_TEST_SUITE_P(Roles, KillRole, testing::Values("pool", "sandbox", "rollout", "gateway", "trainer", "agents"),
                         [](const auto& given) { return std::string(given.param); });

// What becomes of open rollouts is the last thing that a pool writes: one that died of it left a "done" job with rollouts running for ever.
TEST(Crash, APoolThatDiesWhileItIsClosedIsClosedAllTheSame) {
  for (const char* moment : {"applied", "durable"}) {
    JobProcess job(std::string("close_") + moment);
    job.Start(kArguments, {{"TEMPER_FAULTS", std::string("pool.close.") + moment + "=exit@1"}});
    ASSERT_EQ(job.Wait(180), 0) << job.Output();
    ExpectGoodEnd(job);
    EXPECT_NE(job.Output().find("pool died before it was closed; restarting it"), std::string::npos) << job.Output();
    EXPECT_EQ(*JsonRef(job.Summary()).IntOr("restarts", 0), 1);
    std::string output;
    EXPECT_EQ(JobProcess::Door({"pool", "verify", job.folder()}, &output), 0) << output;
    EXPECT_NE(output.find("\"running\":0"), std::string::npos) << output;
  }
}

// A rank of the trainer that is killed must not be waited for: it is named within seconds, and the trainer begins again with all of them.
TEST(Crash, AKilledRankIsNamedAndTheJobGoesOn) {
  JobProcess job("rank");
  std::vector<std::string> arguments = kArguments;
  arguments.insert(arguments.end(), {"--set", "trainer.ranks=3"});
  job.Start(arguments);
  ASSERT_TRUE(job.WaitSteps(2, 120));
  const std::vector<pid_t> ranks = job.RolePids("rank");
  ASSERT_EQ(ranks.size(), 2u);
  EXPECT_EQ(Trim(*ReadFile("/proc/" + std::to_string(ranks[1]) + "/comm")), "temper-rank") << "what ps and pgrep say";
  const std::string line = *ReadFile("/proc/" + std::to_string(ranks[1]) + "/cmdline");
  const char index = line[line.size() - 2];
  kill(ranks[1], SIGKILL);
  const std::string words = std::string("trainer rank ") + index + " was killed by signal 9; restarting it";
  int tenths = 0;
  while (tenths < 50 && job.Output().find(words) == std::string::npos) {
    usleep(100000);
    ++tenths;
  }
  EXPECT_LT(tenths, 50) << job.Output();
  ASSERT_EQ(job.Wait(180), 0);
  ExpectGoodEnd(job);
  EXPECT_EQ(*JsonRef(job.Summary()).IntOr("restarts", 0), 1);
}

// Roles killed during the warm-up and the first evaluation have little state to come back to: it must be enough.
TEST(Crash, RolesKilledEarly) {
  JobProcess job("early");
  job.Start(kArguments);
  for (const char* role : {"rollout", "gateway", "trainer", "agents"}) {
    pid_t pid = -1;
    for (int i = 0; i < 500 && pid < 0; ++i) {
      pid = job.RolePid(role);
      usleep(10000);
    }
    ASSERT_GT(pid, 0) << role;
    usleep(400000);
    kill(pid, SIGKILL);
  }
  ASSERT_EQ(job.Wait(180), 0);
  ExpectGoodEnd(job);
}

// After kill -9 of the supervisor nothing may live on, and --resume must finish the job.
TEST(Crash, KilledSupervisorResumes) {
  JobProcess job("supervisor");
  job.Start(kArguments);
  ASSERT_TRUE(job.WaitSteps(3, 120));
  job.Signal(SIGKILL);
  EXPECT_EQ(job.Wait(10), 128 + SIGKILL);
  EXPECT_EQ(job.Remains(), "");
  job.Resume();
  ASSERT_EQ(job.Wait(180), 0);
  ExpectGoodEnd(job);
}

// Ctrl-C ends in seconds with exit code 130 and an account of itself; --resume finishes the job.
TEST(Crash, CtrlCResumes) {
  JobProcess job("ctrlc");
  job.Start(kArguments);
  ASSERT_TRUE(job.WaitSteps(3, 120));
  job.Signal(SIGINT);
  EXPECT_EQ(job.Wait(15), 130);
  EXPECT_EQ(*JsonRef(job.Summary()).StringOr("end", ""), "stopped");
  EXPECT_TRUE(*JsonRef(job.Summary()).BoolOr("ledger_balanced", false));
  EXPECT_EQ(job.Remains(), "");
  job.Resume();
  ASSERT_EQ(job.Wait(180), 0);
  ExpectGoodEnd(job);
}

// A stopped run that is given more steps must go on from where it was, and end as if it had had them from the start.
TEST(Crash, AStoppedRunTakesMoreSteps) {
  JobProcess job("more");
  job.Start({"--set", "trainer.steps=" + std::to_string(kSteps - 2)});
  ASSERT_TRUE(job.WaitSteps(2, 120));
  job.Signal(SIGINT);
  ASSERT_EQ(job.Wait(15), 130);
  job.Resume(kArguments);
  ASSERT_EQ(job.Wait(180), 0);
  ExpectGoodEnd(job);
}

// Without the janitor nobody cleans up any more: the job must end by itself and leave nothing.
TEST(Crash, KilledJanitorEndsTheJob) {
  JobProcess job("janitor");
  job.Start(kArguments);
  ASSERT_TRUE(job.WaitSteps(2, 120));
  const pid_t janitor = job.JanitorPid();
  ASSERT_GT(janitor, 0);
  kill(janitor, SIGKILL);
  EXPECT_EQ(job.Wait(30), 1);
  EXPECT_NE(JsonRef(job.Summary()).StringOr("reason", "")->find("janitor"), std::string::npos);
  EXPECT_EQ(job.Remains(), "");
  job.Resume();
  ASSERT_EQ(job.Wait(180), 0);
  ExpectGoodEnd(job);
}

class TrainerFault : public testing::TestWithParam<const char*> {};

// The trainer may die between any two durable steps; the batches since its checkpoint come back and nothing is trained twice.
TEST_P(TrainerFault, NothingIsTrainedTwice) {
  JobProcess job("fault");
  job.Start(kArguments, {{"TEMPER_FAULTS", std::string(GetParam())}});
  ASSERT_EQ(job.Wait(180), 0);
  ExpectGoodEnd(job);
  EXPECT_EQ(*JsonRef(job.Summary()).IntOr("restarts", 0), 1);
}

INSTANTIATE_TEST_SUITE_P(Points, TrainerFault,
                         testing::Values("trainer.before_update=exit@3", "trainer.before_checkpoint=exit@2", "trainer.before_commit=exit@2",
                                         "pool.before_write=exit@40", "pool.after_write=exit@60"),
                         [](const auto& given) {
                           std::string name(given.param);
                           for (char& c : name) {
                             if (!isalnum(static_cast<unsigned char>(c))) c = '_';
                           }
                           return name;
                         });

// kill -9 of the trainer at moments nobody chose, several times in one job: its last weights and moments must be those of a job that nobody
// touched, to the bit. (With staleness 0 the batches are the same: a job is a function of its seed and of trainer.memory.)
class RandomKills : public testing::TestWithParam<int> {};

TEST_P(RandomKills, EqualNoInterruptionToTheBit) {
  std::vector<std::string> arguments = kArguments;
  const std::string ranks = std::to_string(GetParam());
  for (const std::string& set : {std::string("pool.staleness=0"), std::string("trainer.memory=256MiB"), std::string("trainer.sft.tokens=20000"), "trainer.ranks=" + ranks}) {
    arguments.insert(arguments.end(), {"--set", set});
  }
  JobProcess whole("whole"), cut("cut");
  whole.Start(arguments);
  ASSERT_EQ(whole.Wait(240), 0) << whole.Output();
  const std::string end = "checkpoints/" + std::to_string(kSteps) + "/";
  ASSERT_FALSE(whole.Read(end + "model.safetensors").empty());

  const auto seed = static_cast<uint32_t>(getpid());
  std::mt19937 random(seed);
  std::printf("seed %u, %s ranks:", seed, ranks.c_str());
  cut.Start(arguments);
  int kills = 0;
  for (const int steps : {0, 1, 3, 5, 6}) {
    if (!cut.WaitSteps(steps, 120)) break;
    usleep(random() % 900'000);
    const pid_t trainer = cut.RolePid("trainer");
    if (trainer < 0 || kill(trainer, SIGKILL) != 0) continue;
    ++kills;
    const std::string lines = cut.Read("metrics.jsonl");
    std::printf(" killed after %d steps;", static_cast<int>(std::count(lines.begin(), lines.end(), '\n')));
    usleep(300'000);  // the supervisor starts another one
  }
  std::printf("\n");
  ASSERT_EQ(cut.Wait(240), 0) << cut.Output();
  EXPECT_GE(kills, 3);
  EXPECT_EQ(*JsonRef(cut.Summary()).IntOr("restarts", 0), kills);
  for (const char* file : {"model.safetensors", "optimizer.safetensors"}) EXPECT_EQ(whole.Read(end + file), cut.Read(end + file)) << file;
}

INSTANTIATE_TEST_SUITE_P(Ranks, RandomKills, testing::Values(1, 2), [](const auto& given) { return "Of" + std::to_string(given.param); });

class Disagreement : public testing::TestWithParam<const char*> {};

// One changed weight in the worker, one changed logprob in the store, or one in the tree that is not the rows', must stop the job:
// training would be silently wrong.
TEST_P(Disagreement, StopsTheJob) {
  JobProcess job("disagree");
  // Every token is trained at the version that drew it: those of other versions cannot be held against the trainer's own.
  std::vector<std::string> arguments = kArguments;
  arguments.insert(arguments.end(), {"--set", "pool.staleness=0"});
  job.Start(arguments, {{"TEMPER_FAULTS", std::string(GetParam())}});
  EXPECT_EQ(job.Wait(180), 1);
  const std::string reason = *JsonRef(job.Summary()).StringOr("reason", "");
  EXPECT_EQ(reason.rfind("trainer: ", 0), 0u) << reason;
  EXPECT_EQ(job.Remains(), "");
}

INSTANTIATE_TEST_SUITE_P(Points, Disagreement, testing::Values("weightsync.flip_verified=fail@3", "agents.change_logprob=fail@3",
                                                                "trainer.change_tree=fail"),
                         [](const auto& given) {
                           return std::string(given.index == 0 ? "weight" : given.index == 1 ? "logprob" : "tree");
                         });

}  // namespace
}  // namespace temper::e2e
