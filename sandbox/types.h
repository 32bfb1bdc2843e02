// Plain types of the sandbox service: what a sandbox is made of, what ran in it and how that ended. No threads, no proto.
//
// A sandbox is a set of Linux namespaces with one work folder, `/work`, read-only system folders, loopback as its only
// network, and two payload users: `agent` (the program under training) and `tool` (what that program runs). Neither can
// signal, trace or read the other; both may write the work folder.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace temper::sandbox {

inline constexpr char kWorkFolder[] = "/work";
// Where an agent inside reaches the gateway's agent plane when the sandbox was created with `relay`.
inline constexpr char kRelayAddress[] = "127.0.0.1:8080";
// Environment variable (set for every command) with the path of the program that runs a command as `tool`:
// `$TEMPER_TOOL_EXEC [--timeout S] sh -c 'ls x'`. Standard streams are passed through; the exit code is the command's,
// 128+N after signal N, 124 over the timeout.
inline constexpr char kToolExecVariable[] = "TEMPER_TOOL_EXEC";

// Bounds of one sandbox. 0 means "no bound" for cpu_s only; everything else is always bounded.
struct Limits {
  int64_t memory_bytes = int64_t{256} << 20;  // everything the payload uses, the contents of its files included
  int64_t processes = 64;                     // tasks of the payload (threads count)
  int64_t disk_bytes = int64_t{64} << 20;     // /work, /tmp and /dev/shm together
  int64_t files = 8192;                       // inodes of the same
  double cpu_s = 0;                           // processor time of the whole sandbox, over all its commands
  double wall_s = 60;                         // of one command
  int64_t output_bytes = int64_t{128} << 10;  // kept of each of stdout and stderr (first half and last half); the rest is counted
};

// One entry of a work folder. A link is never followed, in neither direction.
struct File {
  enum class Kind { kRegular = 0, kLink = 1, kFolder = 2 };
  std::string path;   // relative to the work folder, no "." or ".." part
  std::string bytes;  // contents; the target of a link
  uint32_t mode = 0644;
  Kind kind = Kind::kRegular;
  bool operator==(const File&) const = default;
};

// A host folder or file that is visible, read-only, at an absolute path inside.
struct Mount {
  std::string source;
  std::string target;
  bool operator==(const Mount&) const = default;
};

struct CreateRequest {
  std::string id;  // chosen by the caller: [A-Za-z0-9._-]{1,100}; unique among the living
  Limits limits;
  std::string rootfs;         // host folder whose entries are the system folders (read-only); "" = the host's own /usr, /bin, /lib*
  std::vector<Mount> mounts;  // not below /work, /proc, /dev or /tmp
  std::vector<File> files;    // laid into the work folder, owned by `agent`
  bool relay = false;         // listen at kRelayAddress inside and relay to the gateway
  double ttl_s = 600;         // destroyed then unless renewed
};

enum class Role { kAgent = 0, kTool = 1 };

struct ExecRequest {
  std::string id;
  std::vector<std::string> argv;                          // argv[0] is looked up in PATH
  std::vector<std::pair<std::string, std::string>> env;   // added to PATH, HOME, LANG and the tool variable
  std::string cwd = kWorkFolder;
  std::string stdin_bytes;
  bool capture_fd3 = false;                               // gives the command a file descriptor 3 (write end)
  double timeout_s = 0;                                   // 0 = limits.wall_s; never above it
  Role role = Role::kAgent;
};

enum class ExecOutcome {
  kExited,    // exit_code; 127 = not found, 126 = not executable
  kSignaled,  // by a signal that no limit caused; `signal`
  kTimeout,   // over the wall clock: killed
  kLimit,     // ended by another limit: `limit`
  kInfra,     // the sandbox failed or was destroyed meanwhile: says nothing about the command. `message`
};
// "exited", "signaled", "timeout", "limit", "infra".
const char* Name(ExecOutcome outcome);

// What was kept of a stream.
struct Captured {
  std::string bytes;     // head and tail joined by a line that tells the number of dropped bytes, when any were
  uint64_t dropped = 0;  // bytes read and thrown away
};

struct Usage {
  double wall_s = 0;       // of this command
  double cpu_s = 0;        // of the sandbox during this command; without cgroups: of the command and what it waited for
  int64_t peak_bytes = 0;  // of the sandbox since its creation; -1 unknown
};

struct ExecResult {
  ExecOutcome outcome = ExecOutcome::kInfra;
  int exit_code = 0;
  int signal = 0;
  // "memory", "processes", "disk", "files", "cpu_s", "wall_s", "output" when one was hit, else "". Hit and ended are two
  // things: kExited with limit "processes" is a refused fork in a command that lived on.
  std::string limit;
  Captured out;
  Captured err;
  std::string fd3;           // whole, at most kFd3BytesMax
  uint64_t fd3_dropped = 0;  // > 0: fd3 is not whole; the command met a broken pipe there
  Usage usage;
  std::string message;       // reason of kInfra
};
inline constexpr int64_t kFd3BytesMax = int64_t{4} << 20;

// How each limit is held in this sandbox: "cgroup", "rlimit", "tmpfs", "timer", "capture" or "no".
struct Enforced {
  std::string memory, processes, disk, files, cpu_s, wall_s, output;
};

struct SandboxInfo {
  std::string id;
  Enforced enforced;
  double ttl_left_s = 0;
  int commands_running = 0;
};

struct ExportOptions {
  std::string path;  // relative to the work folder; "" = all of it
  int64_t bytes_max = int64_t{192} << 20;  // an answer has to fit into one message
  int64_t files_max = 100000;
};

}  // namespace temper::sandbox
