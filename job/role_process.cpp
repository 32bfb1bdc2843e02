#include "job/role_process.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "common/file.h"
#include "common/strings.h"

extern char** environ;

namespace temper::job {
namespace {

// Between fork and exec only calls that are safe after a fork of a process with threads.
[[noreturn]] void ExecChild(const char* program, char* const* argv, char* const* envp, const std::vector<int>& fds, int null_fd, int log_fd,
                            pid_t parent) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  // The parent may have died before the line above.
  if (getppid() != parent) _exit(127);
  for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGCHLD, SIGPIPE, SIGUSR1, SIGUSR2, SIGQUIT}) ::signal(signal, SIG_DFL);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  dup2(null_fd, 0);
  dup2(log_fd, 1);
  dup2(log_fd, 2);
  for (int fd : fds) fcntl(fd, F_SETFD, 0);
  execve(program, argv, envp);
  constexpr char kFailed[] = "temper: exec failed\n";
  if (write(2, kFailed, sizeof kFailed - 1) < 0) _exit(126);
  _exit(127);
}

}  // namespace

std::string RoleEnd::ToString() const {
  return (signaled ? "killed by signal " : "exit code ") + std::to_string(code);
}

Result<pid_t> StartRole(const RoleCommand& command) {
  Fd log(open(command.log_path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
  if (!log.valid()) return ErrnoStatus(command.log_path, errno);
  Fd null(open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!null.valid()) return ErrnoStatus("/dev/null", errno);

  std::vector<std::string> environment;
  for (char** entry = environ; *entry; ++entry) {
    const std::string_view text(*entry);
    bool replaced = false;
    for (const auto& [name, value] : command.env) replaced = replaced || text.substr(0, name.size() + 1) == name + "=";
    if (!replaced) environment.emplace_back(text);
  }
  for (const auto& [name, value] : command.env) environment.push_back(name + "=" + value);
  std::vector<char*> argv, envp;
  for (const std::string& argument : command.argv) argv.push_back(const_cast<char*>(argument.c_str()));
  for (const std::string& entry : environment) envp.push_back(const_cast<char*>(entry.c_str()));
  argv.push_back(nullptr);
  envp.push_back(nullptr);

  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) return ErrnoStatus("fork", errno);
  if (pid == 0) ExecChild(command.program.c_str(), argv.data(), envp.data(), command.fds, null.get(), log.get(), parent);
  setpgid(pid, pid);  // Also here: whoever runs first.
  return pid;
}

bool Reap(pid_t pid, RoleEnd* end) {
  int status = 0;
  const pid_t got = waitpid(pid, &status, WNOHANG);
  if (got == 0) return false;
  if (got < 0) {
    *end = {false, 127};
    return true;
  }
  *end = WIFSIGNALED(status) ? RoleEnd{true, WTERMSIG(status)} : RoleEnd{false, WEXITSTATUS(status)};
  return true;
}

std::string LastLines(const std::string& path, int lines) {
  auto text = ReadFile(path);
  if (!text.ok()) return "";
  const size_t keep = 2000;
  std::string tail = text->size() > keep ? text->substr(text->size() - keep) : *text;
  std::vector<std::string> parts;
  for (const std::string& line : Split(tail, '\n')) {
    if (!Trim(line).empty()) parts.emplace_back(Trim(line));
  }
  if (static_cast<int>(parts.size()) > lines) parts.erase(parts.begin(), parts.end() - lines);
  return Join(parts, " | ");
}

}  // namespace temper::job
