#include "job/role_process.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/file.h"

namespace temper::job {
namespace {

class RoleProcessTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = testing::TempDir() + "temper_role_XXXXXX";
    ASSERT_TRUE(mkdtemp(pattern.data()));
    dir_ = pattern;
  }
  void TearDown() override { EXPECT_TRUE(RemoveAll(dir_).ok()); }

  RoleCommand Shell(const std::string& script) {
    RoleCommand command;
    command.name = "role";
    command.program = "/bin/sh";
    command.argv = {"sh", "-c", script};
    command.log_path = dir_ + "/log";
    return command;
  }
  RoleEnd WaitEnd(pid_t pid) {
    RoleEnd end;
    for (int i = 0; i < 500; ++i) {
      if (Reap(pid, &end)) return end;
      SystemClock::Get().SleepS(0.01);
    }
    ADD_FAILURE() << "the child does not end";
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
    return end;
  }
  std::string dir_;
};

// Output, environment and exit code are all that is known of a role that failed.
TEST_F(RoleProcessTest, OutputGoesToTheLog) {
  RoleCommand command = Shell("echo out $X; echo err >&2; exit 7");
  command.env = {{"X", "value"}};
  auto pid = StartRole(command);
  ASSERT_TRUE(pid.ok()) << pid.status().ToString();
  const RoleEnd end = WaitEnd(*pid);
  EXPECT_FALSE(end.signaled);
  EXPECT_EQ(end.code, 7);
  EXPECT_EQ(LastLines(dir_ + "/log", 5), "out value | err");
  EXPECT_EQ(LastLines(dir_ + "/log", 1), "err");
  EXPECT_EQ(LastLines(dir_ + "/none", 1), "");
}

// Only the sockets of the table may reach a role; any other descriptor would keep something open that should close.
TEST_F(RoleProcessTest, InheritsOnlyWhatIsNamed) {
  // High numbers, which the child's own descriptors do not reach.
  Fd null(open("/dev/null", O_RDONLY | O_CLOEXEC));
  Fd first(fcntl(null.get(), F_DUPFD_CLOEXEC, 700)), second(fcntl(null.get(), F_DUPFD_CLOEXEC, 800));
  RoleCommand command = Shell("ls /proc/self/fd | tr '\\n' ' '");
  command.fds = {first.get()};
  auto pid = StartRole(command);
  ASSERT_TRUE(pid.ok());
  EXPECT_EQ(WaitEnd(*pid).code, 0);
  const std::string seen = " " + LastLines(dir_ + "/log", 1) + " ";
  EXPECT_NE(seen.find(" " + std::to_string(first.get()) + " "), std::string::npos) << seen;
  EXPECT_EQ(seen.find(" " + std::to_string(second.get()) + " "), std::string::npos) << seen;
}

// A blocked SIGTERM would make every orderly stop a hard one.
TEST_F(RoleProcessTest, SignalsReachTheChild) {
  sigset_t set, old;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigprocmask(SIG_BLOCK, &set, &old);
  auto pid = StartRole(Shell("exec sleep 60"));
  sigprocmask(SIG_SETMASK, &old, nullptr);
  ASSERT_TRUE(pid.ok());
  kill(*pid, SIGTERM);
  const RoleEnd end = WaitEnd(*pid);
  EXPECT_TRUE(end.signaled);
  EXPECT_EQ(end.code, SIGTERM);
  EXPECT_EQ(end.ToString(), "killed by signal 15");
}

// A role that outlives a killed supervisor would go on sampling for nobody.
TEST_F(RoleProcessTest, DiesWithItsParent) {
  int pipe_fds[2];
  ASSERT_EQ(pipe(pipe_fds), 0);
  const pid_t parent = fork();
  if (parent == 0) {
    auto pid = StartRole(Shell("exec sleep 60"));
    const pid_t child = pid.ok() ? *pid : -1;
    if (write(pipe_fds[1], &child, sizeof child) != sizeof child) _exit(1);
    pause();
    _exit(0);
  }
  pid_t child = -1;
  ASSERT_EQ(read(pipe_fds[0], &child, sizeof child), static_cast<ssize_t>(sizeof child));
  close(pipe_fds[0]);
  close(pipe_fds[1]);
  ASSERT_GT(child, 0);
  kill(parent, SIGKILL);
  waitpid(parent, nullptr, 0);
  // The orphan may stay a zombie where nobody reaps for init; a zombie has no command line.
  bool gone = false;
  for (int i = 0; i < 300 && !gone; ++i) {
    auto line = ReadFile("/proc/" + std::to_string(child) + "/cmdline");
    gone = !line.ok() || line->empty();
    if (!gone) SystemClock::Get().SleepS(0.01);
  }
  EXPECT_TRUE(gone);
}

// A program that is not there must look like a failed role, not like a running one.
TEST_F(RoleProcessTest, MissingProgram) {
  RoleCommand command = Shell("true");
  command.program = dir_ + "/none";
  auto pid = StartRole(command);
  ASSERT_TRUE(pid.ok());
  EXPECT_EQ(WaitEnd(*pid).code, 127);
  command.log_path = dir_ + "/no/log";
  EXPECT_FALSE(StartRole(command).ok());
}

}  // namespace
}  // namespace temper::job
