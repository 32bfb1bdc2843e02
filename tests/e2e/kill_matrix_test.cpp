// kill -9 of every process of a job, in every phase: while the policy samples, while a rollout is judged, while a worker swaps
// weights, while a checkpoint is half written, and once at a moment nobody chose. Each kill is a job of its own; the line it prints
// says which process died, at which step, in which phase.
//
// A phase is held open for a second by a fault point of the process that is in it; its log says when.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <random>

#include "common/file.h"
#include "common/strings.h"
#include "tests/e2e/job_process.h"

namespace temper::e2e {
namespace {

constexpr int kSteps = 6;

struct Phase {
  const char* name;
  const char* faults;  // what holds it open
  const char* log;     // whose log says so
};
// Between the first update and the last: the hit numbers are those of a job of six steps of 16 rollouts.
constexpr Phase kPhases[] = {
    {"sampling", "rollout.sampled=sleep:1@800", "rollout-0"},
    {"verifying", "agents.verify=sleep:1@55", "agents"},
    {"swapping", "rollout.swap=sleep:1@4", "rollout-0"},
    {"checkpoint", "trainer.checkpoint_half=sleep:1@3", "trainer"},  // checkpoints 0, 2, 4
    {"any", "", ""},
};

class KillMatrix : public testing::TestWithParam<std::tuple<const char*, int>> {};

int StepsDone(const JobProcess& job) {
  const std::string text = job.Read("metrics.jsonl");
  return static_cast<int>(std::count(text.begin(), text.end(), '\n'));
}

bool WaitFor(JobProcess& job, const Phase& phase, uint32_t seed) {
  if (!*phase.faults) {
    if (!job.WaitSteps(1, 120)) return false;
    usleep(std::mt19937(seed)() % 1'500'000);
    return true;
  }
  for (int i = 0; i < 12000; ++i) {
    if (job.Read(std::string("logs/") + phase.log + ".log").find("fault point name=") != std::string::npos) return true;
    usleep(10000);
  }
  return false;
}

TEST_P(KillMatrix, TheJobComesToItsEnd) {
  const std::string target = std::get<0>(GetParam());
  const Phase& phase = kPhases[std::get<1>(GetParam())];
  JobProcess job("matrix");
  std::map<std::string, std::string> env;
  if (*phase.faults) env["TEMPER_FAULTS"] = phase.faults;
  job.Start({"--set", "trainer.steps=" + std::to_string(kSteps)}, env);
  ASSERT_TRUE(WaitFor(job, phase, static_cast<uint32_t>(target.size() * 31 + std::get<1>(GetParam()))));
  const int step = StepsDone(job);
  const pid_t pid = target == "supervisor" ? job.SupervisorPid() : target == "janitor" ? job.JanitorPid() : job.RolePid(target);
  ASSERT_GT(pid, 0);
  ASSERT_EQ(kill(pid, SIGKILL), 0);
  std::printf("killed %s (pid %d) after step %d of %d, phase %s\n", target.c_str(), pid, step, kSteps, phase.name);
  EXPECT_GE(step, 1) << "not between the first and the last update";
  EXPECT_LT(step, kSteps) << "not between the first and the last update";

  if (target == "supervisor" || target == "janitor") {
    // Nothing may be left, and the run is continued.
    EXPECT_EQ(job.Wait(target == "janitor" ? 30 : 10), target == "janitor" ? 1 : 128 + SIGKILL);
    EXPECT_EQ(job.Remains(), "");
    job.Resume();
  }
  ASSERT_EQ(job.Wait(240), 0) << job.Output();

  const json::value summary = job.Summary();
  const JsonRef s(summary);
  EXPECT_EQ(*s.StringOr("end", ""), "done") << PrintJson(summary);
  EXPECT_EQ(*s.IntOr("steps", 0), kSteps);
  EXPECT_EQ(*s.DoubleOr("importance_ratio_max_dev_on_policy", 1), 0);
  EXPECT_LE(*s.IntOr("staleness_max", 99), *s.IntOr("staleness_bound", 0));
  // Whoever played when a part died is asked to play again. Only the sandboxes die with the janitor, before anyone knows why.
  if (target != "janitor") {
    EXPECT_EQ(*s.Field("outcomes")->IntOr("infra_failure", 99), 0);
  }
  // Balance by sets, decisions replayed: no group is trained twice in the surviving history, none is lost.
  std::string output;
  EXPECT_EQ(JobProcess::Door({"pool", "verify", job.folder()}, &output), 0) << output;
  int64_t expected = 0;
  for (const std::string& line : Split(std::string(Trim(job.Read("metrics.jsonl"))), '\n')) {
    EXPECT_EQ(*JsonRef(*ParseJson(line)).IntOr("step", 0), ++expected);
  }
  EXPECT_EQ(expected, kSteps);
  EXPECT_EQ(job.Remains(), "");
}

INSTANTIATE_TEST_SUITE_P(
    Kill, KillMatrix,
    testing::Combine(testing::Values("rollout", "gateway", "trainer", "pool", "sandbox", "agents", "supervisor", "janitor"), testing::Range(0, 5)),
    [](const auto& given) { return std::string(std::get<0>(given.param)) + "_" + kPhases[std::get<1>(given.param)].name; });

}  // namespace
}  // namespace temper::e2e
