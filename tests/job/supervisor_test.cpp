// The supervisor against roles that misbehave. The supervisor starts `/proc/self/exe serve ROLE --run DIR`, which is this test
// itself: what a role then does is written in DIR/script.ROLE.
#include "job/supervisor.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "common/clock.h"
#include "common/file.h"
#include "common/strings.h"

namespace temper::job {
namespace {

int CountStarts(const std::string& file) {
  auto text = ReadFile(file);
  return text.ok() ? static_cast<int>(std::count(text->begin(), text->end(), '\n')) : 0;
}

// Each word is one step: a number sleeps so many tenths of a second; exitN, killN end; once:WORD does WORD only at the first start;
// again:ROLE waits for that role's second start; ignore makes SIGTERM harmless; error writes the reason file.
int PlayRole(const std::string& role, const std::string& run) {
  const std::string starts = run + "/starts." + role;
  const bool first = !Exists(starts);
  if (!AppendFile(starts, std::string(std::getenv("TEMPER_INCARNATION")) + "\n").ok()) return 99;
  auto script = ReadFile(run + "/script." + role);
  for (std::string word : Split(script.ok() ? *script : "600", ' ')) {
    if (word.rfind("once:", 0) == 0) {
      if (!first) continue;
      word = word.substr(5);
    }
    if (word.rfind("again:", 0) == 0) {
      const std::string other = run + "/starts." + word.substr(6);
      while (CountStarts(other) < 2) SystemClock::Get().SleepS(0.01);
    } else if (word == "ignore") signal(SIGTERM, SIG_IGN);
    else if (word == "error") (void)WriteFile(run + "/logs/" + role + ".error", "the reason of " + role + "\n");
    else if (word.rfind("exit", 0) == 0) _exit(std::stoi(word.substr(4)));
    else if (word.rfind("kill", 0) == 0) kill(getpid(), std::stoi(word.substr(4)));
    else SystemClock::Get().SleepS(std::stod(word) / 10);
  }
  return 0;
}

class SupervisorTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = testing::TempDir() + "temper_supervisor_XXXXXX";
    ASSERT_TRUE(mkdtemp(pattern.data()));
    dir_ = pattern;
    sigprocmask(SIG_SETMASK, nullptr, &mask_);
  }
  void TearDown() override {
    sigprocmask(SIG_SETMASK, &mask_, nullptr);
    EXPECT_TRUE(RemoveAll(dir_).ok());
  }

  // Runs a job whose roles follow `scripts`, in a child process because the janitor wants a single-threaded one. `signals` are
  // sent to it at the times given.
  JobEnd RunJob(const std::map<std::string, std::string>& scripts, const std::vector<std::pair<double, int>>& signals = {}) {
    int result[2];
    EXPECT_EQ(pipe(result), 0);
    const pid_t child = fork();
    if (child == 0) {
      close(result[0]);
      _exit(Child(scripts, result[1]));
    }
    close(result[1]);
    const double start_s = SystemClock::Get().NowS();
    for (const auto& [at_s, signal] : signals) {
      SystemClock::Get().SleepS(start_s + at_s - SystemClock::Get().NowS());
      kill(child, signal);
    }
    auto text = ReadAll(result[0]);
    close(result[0]);
    int status = 0;
    waitpid(child, &status, 0);
    took_s_ = SystemClock::Get().NowS() - start_s;
    JobEnd end;
    end.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    if (text.ok()) end.reason = *text;
    return end;
  }

  int Child(const std::map<std::string, std::string>& scripts, int result_fd) {
    sandbox::JanitorOptions options;
    options.init_path = std::string(TEMPER_BUILD_DIR) + "/temper-sandbox-init";
    auto janitor = sandbox::ForkJanitor(options);
    if (!janitor.ok()) {
      (void)WriteAll(result_fd, "no janitor: " + janitor.status().message());
      return 77;
    }
    BlockSupervisorSignals();
    if (!freopen("/dev/null", "w", stdout)) return 98;
    RunFolder run(dir_);
    if (!run.Create().ok()) return 97;
    std::vector<RoleSpec> roles;
    for (const auto& [role, script] : scripts) {
      if (!WriteFile(run.File("script." + role), script).ok()) return 96;
      RoleSpec spec;
      spec.name = spec.role = role;
      spec.address = "unix-abstract:temper-test-nobody";
      roles.push_back(spec);
    }
    auto config = Config::Parse(
        "model: {create: {}}\ntasks: {train: {generator: terminal}}\nverifier: {name: f, kind: command, command: [v]}\nalgorithm: {recipe: grpo}\n", "f");
    const Job job = *ReadJob(*config);
    const Plan plan;
    RunState state;
    state.incarnation = 1;
    state.counters["supervisor.restarts"] = 3;  // of an earlier start
    JobEnd end;
    {
      Supervisor supervisor(job, plan, run, state, *janitor, roles, false);
      end = supervisor.Run();
    }
    (void)janitor->Stop();
    (void)WriteAll(result_fd, end.reason);
    return end.exit_code;
  }

  int Starts(const std::string& role) { return CountStarts(dir_ + "/starts." + role); }
  std::string dir_;
  sigset_t mask_;
  double took_s_ = 0;
};

#define NEEDS_JANITOR(end) \
  ASSERT_NE(end.exit_code, 77) << end.reason

// The trainer's end is the job's end, and nobody is left behind.
TEST_F(SupervisorTest, DoneWhenTheTrainerIs) {
  const JobEnd end = RunJob({{"trainer", "3 exit0"}, {"agents", "600"}, {"gateway", "600"}});
  NEEDS_JANITOR(end);
  EXPECT_EQ(end.exit_code, 0) << end.reason;
  EXPECT_LT(took_s_, 20);  // of the 60 s that the others would sleep
  EXPECT_NE(ReadFile(dir_ + "/state.json")->find("\"phase\":\"done\""), std::string::npos);
}

// A role killed at any moment comes back, with a number above the former one.
TEST_F(SupervisorTest, ADeadRoleIsRestarted) {
  const JobEnd end = RunJob({{"trainer", "again:gateway again:agents exit0"}, {"gateway", "1 once:kill9 600"}, {"agents", "once:exit3 600"}});
  NEEDS_JANITOR(end);
  EXPECT_EQ(end.exit_code, 0) << end.reason;
  EXPECT_EQ(Starts("gateway"), 2);
  EXPECT_EQ(Starts("agents"), 2);
  EXPECT_EQ(*ReadFile(dir_ + "/starts.gateway"), "100000\n100001\n");
  // It is a count of the run, which goes on where an earlier start of it ended.
  EXPECT_EQ(RunFolder(dir_).ReadState()->counters["supervisor.restarts"], 3 + 2);
}

// A role that says why it failed ends the job with its words; starting it again would only repeat them.
TEST_F(SupervisorTest, AFailedRoleEndsTheJob) {
  const JobEnd end = RunJob({{"trainer", "600"}, {"agents", "1 error exit1"}});
  NEEDS_JANITOR(end);
  EXPECT_EQ(end.exit_code, 1);
  EXPECT_EQ(end.reason, "agents: the reason of agents");
  EXPECT_EQ(Starts("agents"), 1);
}

// A role that dies at once, for ever, must not be restarted for ever.
TEST_F(SupervisorTest, RestartsAreLimited) {
  const JobEnd end = RunJob({{"trainer", "600"}, {"rollout", "kill11"}});
  NEEDS_JANITOR(end);
  EXPECT_EQ(end.exit_code, 1);
  EXPECT_NE(end.reason.find("rollout died 6 times"), std::string::npos) << end.reason;
  EXPECT_EQ(Starts("rollout"), 6);
}

// Ctrl-C ends in seconds also when a role does not listen.
TEST_F(SupervisorTest, CtrlCStops) {
  const JobEnd end = RunJob({{"trainer", "600"}, {"agents", "ignore 600"}}, {{0.7, SIGINT}});
  NEEDS_JANITOR(end);
  EXPECT_EQ(end.exit_code, 130) << end.reason;
  EXPECT_LT(took_s_, 8);
  EXPECT_NE(ReadFile(dir_ + "/state.json")->find("\"phase\":\"stopped\""), std::string::npos);
}

// The second Ctrl-C waits for nobody.
TEST_F(SupervisorTest, SecondCtrlCStopsHard) {
  const JobEnd end = RunJob({{"trainer", "ignore 600"}, {"agents", "ignore 600"}}, {{0.7, SIGINT}, {1.0, SIGINT}});
  NEEDS_JANITOR(end);
  EXPECT_EQ(end.exit_code, 130);
  EXPECT_LT(took_s_, 3);
}

}  // namespace
}  // namespace temper::job

int main(int argc, char** argv) {
  if (argc >= 5 && !std::strcmp(argv[1], "serve")) return temper::job::PlayRole(argv[2], argv[4]);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
