#include "tests/e2e/job_process.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "common/clock.h"
#include "common/file.h"
#include "common/strings.h"
#include "sandbox/remains.h"

namespace temper::e2e {
namespace {

const std::string kBinary = std::string(TEMPER_BUILD_DIR) + "/temper";

pid_t SpawnTemper(const std::vector<std::string>& arguments, const std::map<std::string, std::string>& env, const std::string& output) {
  const pid_t pid = fork();
  if (pid != 0) return pid;
  const int fd = open(output.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644);
  const int null = open("/dev/null", O_RDONLY);
  dup2(null, 0);
  dup2(fd, 1);
  dup2(fd, 2);
  for (const auto& [name, value] : env) setenv(name.c_str(), value.c_str(), 1);
  std::vector<char*> argv{const_cast<char*>("temper")};
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  execv(kBinary.c_str(), argv.data());
  _exit(127);
}

}  // namespace

JobProcess::JobProcess(const std::string& name) {
  base_ = testing::TempDir() + "temper_e2e_" + name + "_XXXXXX";
  EXPECT_TRUE(mkdtemp(base_.data()));
  folder_ = base_ + "/run";
}

JobProcess::~JobProcess() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  if (testing::Test::HasFailure()) {
    std::fprintf(stderr, "kept for a look: %s\n%s\n", base_.c_str(), Output().c_str());
  } else {
    EXPECT_TRUE(RemoveAll(base_).ok());
  }
}

void JobProcess::Spawn(const std::vector<std::string>& arguments, const std::map<std::string, std::string>& env) {
  started_s_ = SystemClock::Get().NowS();
  pid_ = SpawnTemper(arguments, env, base_ + "/output");
}

void JobProcess::Start(const std::vector<std::string>& arguments, const std::map<std::string, std::string>& env,
                       const std::string& config) {
  const std::string file = config[0] == '/' ? config : std::string(TEMPER_SOURCE_DIR) + "/configs/" + config;
  std::vector<std::string> all{"run", file, "--out", folder_};
  all.insert(all.end(), arguments.begin(), arguments.end());
  Spawn(all, env);
}

void JobProcess::Resume(const std::vector<std::string>& arguments) {
  std::vector<std::string> all{"run", "--resume", "--out", folder_};
  all.insert(all.end(), arguments.begin(), arguments.end());
  Spawn(all, {});
}

int JobProcess::Wait(double limit_s) {
  SystemClock& clock = SystemClock::Get();
  const double until_s = clock.NowS() + limit_s;
  int status = 0;
  while (waitpid(pid_, &status, WNOHANG) == 0) {
    if (clock.NowS() > until_s) {
      ADD_FAILURE() << "the job does not end";
      kill(pid_, SIGKILL);
      waitpid(pid_, &status, 0);
      break;
    }
    clock.SleepS(0.02);
  }
  pid_ = -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

void JobProcess::Signal(int signal) { kill(pid_, signal); }

bool JobProcess::WaitSteps(int steps, double limit_s) {
  SystemClock& clock = SystemClock::Get();
  const double until_s = clock.NowS() + limit_s;
  while (clock.NowS() < until_s) {
    const std::string text = Read("metrics.jsonl");
    if (std::count(text.begin(), text.end(), '\n') >= steps) return true;
    siginfo_t info{};
    if (waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == pid_) return false;
    clock.SleepS(0.02);
  }
  return false;
}

pid_t JobProcess::RolePid(const std::string& role) const {
  const std::vector<pid_t> pids = RolePids(role);
  return pids.empty() ? -1 : pids[0];
}

std::vector<pid_t> JobProcess::RolePids(const std::string& role) const {
  std::vector<pid_t> pids;
  auto names = ListDir("/proc");
  if (!names.ok()) return pids;
  for (const std::string& name : *names) {
    int64_t pid = 0;
    if (!ParseInt(name, &pid)) continue;
    auto line = ReadFile("/proc/" + name + "/cmdline");
    if (!line.ok()) continue;
    const std::string want = std::string("temper") + '\0' + "serve" + '\0' + role + '\0' + "--run" + '\0' + folder_ + '\0';
    if (line->rfind(want, 0) == 0) pids.push_back(static_cast<pid_t>(pid));
  }
  return pids;
}

pid_t JobProcess::SupervisorPid() const {
  auto state = ParseJson(Read("state.json"));
  return state.ok() ? static_cast<pid_t>(*JsonRef(*state).IntOr("pid", -1)) : -1;
}

pid_t JobProcess::JanitorPid() const {
  const std::string supervisor = std::to_string(SupervisorPid());
  auto children = ReadFile("/proc/" + supervisor + "/task/" + supervisor + "/children");
  if (!children.ok()) return -1;
  for (const std::string& word : Split(*children, ' ')) {
    int64_t pid = 0;
    if (!ParseInt(word, &pid)) continue;
    // It has the supervisor's own command line.
    auto line = ReadFile("/proc/" + word + "/cmdline");
    if (line.ok() && line->find("serve") == std::string::npos) return static_cast<pid_t>(pid);
  }
  return -1;
}

std::string JobProcess::Read(const std::string& file) const {
  auto text = ReadFile(folder_ + "/" + file);
  return text.ok() ? *text : "";
}

std::string JobProcess::Output() const {
  auto text = ReadFile(base_ + "/output");
  return text.ok() ? *text : "";
}

json::value JobProcess::Summary() const {
  auto value = ParseJson(Read("summary.json"));
  EXPECT_TRUE(value.ok()) << value.status().ToString();
  return value.ok() ? *value : json::value(json::object());
}

std::string JobProcess::Remains() const {
  sandbox::RemainsQuery query;
  query.run_folder = folder_;
  if (auto state = ParseJson(Read("state.json")); state.ok()) {
    if (auto job = JsonRef(*state).StringOr("sandbox_job", ""); job.ok() && !job->empty()) query.job_id = *job;
    if (auto endpoints = JsonRef(*state).Field("endpoints"); endpoints.ok()) {
      auto plane = endpoints->StringOr("agent_plane", "");
      int64_t port = 0;
      if (plane.ok() && ParseInt(plane->substr(plane->rfind(':') + 1), &port)) query.ports.push_back(static_cast<int>(port));
    }
  }
  std::string text;
  for (const sandbox::Remain& remain : sandbox::WaitForNoRemains(query, 10)) text += remain.kind + " " + remain.what + "\n";
  return text;
}

int JobProcess::Door(const std::vector<std::string>& arguments, std::string* output) {
  std::string path = testing::TempDir() + "temper_door_XXXXXX";
  const int fd = mkstemp(path.data());
  close(fd);
  const pid_t pid = SpawnTemper(arguments, {}, path);
  int status = 0;
  waitpid(pid, &status, 0);
  auto text = ReadFile(path);
  *output = text.ok() ? *text : "";
  (void)RemoveAll(path);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace temper::e2e
