// What a person is told of a job from outside: `temper top`, the lines of the run itself, `temper sandbox remains`, and the times
// that `temper plot` puts its marks at; while it runs, after its supervisor was killed, and after it was resumed to its end.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "common/clock.h"
#include "common/file.h"
#include "common/strings.h"
#include "job/curves.h"
#include "job/run_folder.h"
#include "tests/e2e/job_process.h"

namespace temper::e2e {
namespace {

// `temper top RUN` on a terminal of its own.
class LiveTop {
 public:
  explicit LiveTop(const std::string& run) {
    const std::string program = std::string(TEMPER_BUILD_DIR) + "/temper";
    winsize size{40, 120, 0, 0};
    pid_ = forkpty(&terminal_, nullptr, nullptr, &size);
    if (pid_ == 0) {
      execl(program.c_str(), "temper", "top", run.c_str(), nullptr);
      _exit(127);
    }
  }
  ~LiveTop() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
    close(terminal_);
  }
  // Reads what it draws for so long, or until it contains `text`.
  bool Shows(const std::string& text, double limit_s) {
    SystemClock& clock = SystemClock::Get();
    for (const double end_s = clock.NowS() + limit_s; clock.NowS() < end_s && drawn.find(text) == std::string::npos;) {
      pollfd readable{terminal_, POLLIN, 0};
      if (poll(&readable, 1, 100) <= 0) continue;
      char buffer[4096];
      const ssize_t n = read(terminal_, buffer, sizeof buffer);
      if (n <= 0) break;
      drawn.append(buffer, static_cast<size_t>(n));
    }
    return drawn.find(text) != std::string::npos;
  }
  // -1: it does not end.
  int ExitCode() {
    Shows("no such text", 15);  // until it closes its terminal
    int status = 0;
    for (int i = 0; waitpid(pid_, &status, WNOHANG) == 0; ++i) {
      if (i == 100) return -1;
      SystemClock::Get().SleepS(0.05);
    }
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  std::string drawn;

 private:
  pid_t pid_ = -1;
  int terminal_ = -1;
};

// The number before `unit` on the line of `text` that begins with `line`.
double NumberBefore(const std::string& text, const std::string& line, const std::string& unit) {
  const size_t begin = text.find(line), end = text.find(unit, begin);
  if (begin == std::string::npos || end == std::string::npos || text.find('\n', begin) < end) return -1;
  return std::strtod(text.c_str() + text.rfind(' ', end - 1) + 1, nullptr);
}

// A program that works in the run's folder and has it among its arguments; gone with this object.
class Bystander {
 public:
  explicit Bystander(const std::string& folder) : pid_(fork()) {
    if (pid_ != 0) return;
    if (chdir(folder.c_str()) != 0) _exit(1);
    dup2(open("/dev/null", O_WRONLY), 1);
    execlp("tail", "tail", "-f", (folder + "/metrics.jsonl").c_str(), nullptr);
    _exit(1);
  }
  ~Bystander() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }

 private:
  const pid_t pid_;
};

TEST(Watching, AJobThatIsKilledAndResumed) {
  JobProcess job("watching"), other("watching_other");
  job.Start({"--set", "trainer.steps=40", "--set", "eval.every=40", "--set", "tasks.eval.count=96"});
  ASSERT_TRUE(job.WaitSteps(3, 200)) << job.Output();
  SystemClock::Get().SleepS(1);

  // ---- while it runs
  std::string output;
  auto state = job::RunFolder(job.folder()).ReadState();
  ASSERT_TRUE(state.ok());
  EXPECT_EQ(JobProcess::Door({"top", job.folder()}, &output), 0) << output;
  EXPECT_NE(output.find(" of 8 in flight"), std::string::npos) << output;
  if (state->sampling_s > 0) {  // written every ten seconds
    EXPECT_GT(NumberBefore(output, "speed ", " tokens/s (mean since the first token)"), 0) << output;
  }
  EXPECT_EQ(JobProcess::Door({"run", "--resume", job.folder()}, &output), 2) << output;
  EXPECT_NE(output.find(" goes on already, as process " + std::to_string(job.SupervisorPid()) + ";"), std::string::npos) << output;
  {
    // Nothing of it has been left behind as long as it runs, and who only looks at it never was.
    const Bystander reader(job.folder());
    SystemClock::Get().SleepS(0.3);
    EXPECT_EQ(JobProcess::Door({"sandbox", "remains", "--run", job.folder()}, &output), 0) << output;
    EXPECT_EQ(output.find("{"), std::string::npos) << output;
    EXPECT_NE(output.find("still running"), std::string::npos) << output;
    EXPECT_EQ(JobProcess::Door({"sandbox", "remains", "--run", job.folder(), "--live"}, &output), 0) << output;
    EXPECT_NE(output.find("serve trainer --run " + job.folder() + "\",\"live\":true"), std::string::npos) << output;
    EXPECT_EQ(output.find("tail -f"), std::string::npos) << output;
    std::vector<std::string> lines = Split(std::string(Trim(output)), '\n');
    std::sort(lines.begin(), lines.end());
    EXPECT_EQ(std::adjacent_find(lines.begin(), lines.end()), lines.end()) << "nothing twice: " << output;
    // Another run's question does not get this one's answer, nor does a question about all.
    ASSERT_TRUE(MakeDirs(other.folder()).ok());
    EXPECT_EQ(JobProcess::Door({"sandbox", "remains", "--run", other.folder(), "--live"}, &output), 0) << output;
    EXPECT_EQ(output, "");
    (void)JobProcess::Door({"sandbox", "remains"}, &output);
    EXPECT_EQ(output.find(job.folder()), std::string::npos) << output;
    EXPECT_EQ(output.find(state->sandbox_job), std::string::npos) << output;
  }

  // ---- killed
  LiveTop live(job.folder());
  EXPECT_TRUE(live.Shows("rollouts running", 20)) << live.drawn;
  job.Signal(SIGKILL);
  EXPECT_EQ(job.Wait(10), 128 + SIGKILL);
  const std::string resume = job::ResumeCommand(job.folder());
  EXPECT_EQ(live.ExitCode(), 1) << live.drawn;
  EXPECT_NE(live.drawn.find(resume), std::string::npos) << live.drawn;
  EXPECT_EQ(JobProcess::Door({"top", job.folder()}, &output), 1) << output;
  EXPECT_NE(output.find("smoke  dead  "), std::string::npos) << output;
  EXPECT_NE(output.find("\n" + resume + "\n"), std::string::npos) << output;
  EXPECT_EQ(output.find("in flight"), std::string::npos) << output;
  EXPECT_EQ(job.Remains(), "");
  EXPECT_EQ(JobProcess::Door({"sandbox", "remains", "--run", job.folder(), "--wait", "10"}, &output), 0) << output;
  EXPECT_EQ(output, "");
  // Phases are looked at twice a second: these two take longer here. (What is told of them, if anything is known yet, depends on the moment.)
  const std::string told = job.Output();
  EXPECT_NE(told.find("\nwarm-up"), std::string::npos) << told;
  EXPECT_NE(told.find("\nevaluating"), std::string::npos) << told;
  EXPECT_GT(NumberBefore(job.Output(), "step 2/40 ", " tok/s training"), 0) << job.Output();
  const job::CurvePoint before = job::ReadCurve(job.folder())->points.back();
  ASSERT_LT(before.step, 30) << "time for two more starts";

  // ---- resumed, stopped, resumed
  const size_t printed = job.Output().size();
  job.Resume();
  ASSERT_TRUE(job.WaitSteps(static_cast<int>(before.step) + 3, 200)) << job.Output();
  job.Signal(SIGINT);
  ASSERT_EQ(job.Wait(30), 130);
  const std::string said = job.Output().substr(printed);
  EXPECT_EQ(said.find("\nstep 1/40 "), std::string::npos) << "told before: " << said;
  EXPECT_EQ(said.substr(said.rfind("\nrun: ")), "\nrun: " + job.folder() + "\nto go on: " + resume + "\n");
  job.Resume();
  ASSERT_EQ(job.Wait(200), 0) << job.Output();
  EXPECT_EQ(job.Output().substr(job.Output().rfind("\nrun: ")), "\nrun: " + job.folder() + "\n");

  // ---- done
  EXPECT_EQ(JobProcess::Door({"top", job.folder()}, &output), 0) << output;
  EXPECT_NE(output.find("smoke  done  "), std::string::npos) << output;
  const json::value summary = job.Summary();
  const int64_t aborted = *JsonRef(summary).Field("outcomes")->IntOr("aborted", 0);
  EXPECT_GT(aborted, 0) << "what was played when it was killed";
  EXPECT_NE(output.find("aborted " + std::to_string(aborted)), std::string::npos) << output;

  // Each mark at its time: the first evaluation behind the warm-up, the last step of the first start before the first of the
  // second, the last evaluation at the end of all three.
  const job::Curve curve = *job::ReadCurve(job.folder());
  ASSERT_EQ(curve.points.size(), 40u);
  for (size_t i = 1; i < 40; ++i) EXPECT_GT(curve.points[i].wall_s, curve.points[i - 1].wall_s) << i;
  EXPECT_GT(curve.points[static_cast<size_t>(before.step)].wall_s, before.wall_s) << "behind the first start, not beside it";
  ASSERT_EQ(curve.evaluations.size(), 2u);
  EXPECT_GT(curve.evaluations[0].wall_s, 1);
  EXPECT_LT(curve.evaluations[0].wall_s, curve.points[0].wall_s);
  const double wall_s = *JsonRef(summary).DoubleOr("wall_s", 0);
  EXPECT_GT(curve.evaluations[1].wall_s, curve.points.back().wall_s);
  EXPECT_LT(curve.evaluations[1].wall_s, wall_s);
  EXPECT_GT(curve.evaluations[1].wall_s, wall_s - 15);
}

}  // namespace
}  // namespace temper::e2e
