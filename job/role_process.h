// A role as a child process: started by fork and exec of this very binary, watched, stopped.
#pragma once

#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

#include "common/status.h"

namespace temper::job {

struct RoleCommand {
  std::string name;               // "rollout-0": of its log and in messages
  std::string program;            // path; "/proc/self/exe" is this binary
  std::vector<std::string> argv;  // argv[0] is what `ps` shows
  std::vector<std::pair<std::string, std::string>> env;  // added to ours
  std::vector<int> fds;           // inherited under the same numbers
  std::string log_path;           // standard output and error are appended here
};

// How a child ended.
struct RoleEnd {
  bool signaled = false;
  int code = 0;  // exit code or signal
  std::string ToString() const;  // "exit code 1", "killed by signal 9"
};

// Call from the main thread only: a child dies (SIGKILL) when the thread that forked it ends. The child has a process group of
// its own, so that Ctrl-C on the terminal reaches us alone, default signal handling and an empty signal mask.
Result<pid_t> StartRole(const RoleCommand& command);

// The end of the child, once; false while it runs.
bool Reap(pid_t pid, RoleEnd* end);

// The last lines of a log, at most `lines` and 2000 bytes, joined by " | ".
std::string LastLines(const std::string& path, int lines);

}  // namespace temper::job
