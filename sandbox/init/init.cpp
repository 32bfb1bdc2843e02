// PID 1 of a sandbox, and the client by which an agent inside runs a command as the tool user (chosen by the name it is
// called by). Static, libc only, one thread, no allocation but mmap.
//
// As PID 1: starts commands the service asks for, reaps everything, reports exits, runs tool commands for the agent. Its own
// end is the end of every process inside; it ends when the service's channel or the janitor's pipe closes.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "sandbox/init/protocol.h"

namespace temper::sandbox::protocol {
namespace {

constexpr int kChildrenMax = 256;
constexpr int kClientsMax = 64;
constexpr int kFdsMax = 8;
constexpr int kGoneMs = 500;  // twice at most: well within the service's patience with a kill

struct Child {
  pid_t pid = 0;
  uint32_t exec_id = 0;
  uint32_t role = 0;
  int client = -1;  // index of the tool client, or -1 when the service asked
};

Child children[kChildrenMax];
int clients[kClientsMax];
sock_fprog filter;
Command defaults;  // limits of the service's last command, which tool commands share
const char* slots[2 * kArgumentsMax + 2];
const char* const kToolEnv[] = {"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/work", "LANG=C.UTF-8",
                                "TEMPER_TOOL_EXEC=/temper/tool-exec"};

void Say(const char* a, const char* b, const char* c) {
  char line[512];
  int n = snprintf(line, sizeof line, "%s: %.300s: %s\n", a, b, c);
  if (n > 0 && write(2, line, static_cast<size_t>(n) < sizeof line ? n : sizeof line - 1) < 0) return;
}

// One packet with its descriptors (close-on-exec). Returns the byte count, 0 at the end, -1 when there is nothing.
ssize_t Receive(int socket, Message* message, int* fds, int* count) {
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kFdsMax)];
  iovec io = {message, sizeof *message};
  msghdr h = {};
  h.msg_iov = &io;
  h.msg_iovlen = 1;
  h.msg_control = control;
  h.msg_controllen = sizeof control;
  ssize_t n = recvmsg(socket, &h, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  *count = 0;
  if (n < 0) return -1;
  for (cmsghdr* c = CMSG_FIRSTHDR(&h); c; c = CMSG_NXTHDR(&h, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    int k = static_cast<int>((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    for (int i = 0; i < k && *count < kFdsMax; ++i) memcpy(&fds[(*count)++], CMSG_DATA(c) + i * sizeof(int), sizeof(int));
  }
  return n;
}

bool Send(int socket, const Message& message, const int* fds, int count) {
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kFdsMax)] = {};
  iovec io = {const_cast<Message*>(&message), sizeof message};
  msghdr h = {};
  h.msg_iov = &io;
  h.msg_iovlen = 1;
  if (count > 0) {
    h.msg_control = control;
    h.msg_controllen = CMSG_SPACE(sizeof(int) * count);
    cmsghdr* c = CMSG_FIRSTHDR(&h);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int) * count);
    memcpy(CMSG_DATA(c), fds, sizeof(int) * count);
  }
  return sendmsg(socket, &h, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof message);
}

void CloseAll(int* fds, int count) {
  for (int i = 0; i < count; ++i) close(fds[i]);
}

// A private copy of the payload file: the sender may change or shrink the file while we read. Null when it is too large
// or unreadable. `size` is what the file has.
char* CopyPayload(int fd, size_t* size) {
  struct stat st;
  if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode) || st.st_size <= 0 || st.st_size > kPayloadBytesMax) return nullptr;
  *size = static_cast<size_t>(st.st_size);
  void* p = mmap(nullptr, *size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  size_t done = 0;
  while (done < *size) {
    ssize_t n = pread(fd, static_cast<char*>(p) + done, *size - done, static_cast<off_t>(done));
    if (n <= 0) {
      munmap(p, *size);
      return nullptr;
    }
    done += static_cast<size_t>(n);
  }
  return static_cast<char*>(p);
}

// `grace`: what the hard limit lies above the soft one.
void SetLimit(__rlimit_resource resource, uint64_t value, uint64_t grace = 0) {
  rlimit limit = {value, value + grace};
  setrlimit(resource, &limit);
}

[[noreturn]] void RunChild(const Command& command, const int* fds, int count) {
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  setsid();
  // When memory runs out, the kernel is to take a tool before the agent that ran it.
  if (command.role == 1) {
    int adj = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (adj >= 0) {
      if (write(adj, "500", 3) != 3) Say("temper", "oom_score_adj", strerror(errno));
      close(adj);
    }
  }
  SetLimit(RLIMIT_CORE, 0);
  if (command.address_space) SetLimit(RLIMIT_AS, command.address_space);
  if (command.processes) SetLimit(RLIMIT_NPROC, command.processes);
  if (command.file_size) SetLimit(RLIMIT_FSIZE, command.file_size);
  if (command.cpu_s) SetLimit(RLIMIT_CPU, command.cpu_s, 1);  // SIGXCPU, which says why, before SIGKILL
  SetLimit(RLIMIT_MEMLOCK, 64 << 10);
  SetLimit(RLIMIT_MSGQUEUE, 64 << 10);
  umask(002);
  uint32_t uid = command.role == 1 ? kToolUid : kAgentUid;
  if (setgroups(0, nullptr) != 0 || setresgid(kWorkGid, kWorkGid, kWorkGid) != 0 || setresuid(uid, uid, uid) != 0) _exit(125);
  // Received descriptors are all above 3 + count: nothing is overwritten before it is moved.
  int high[4];
  for (int i = 0; i < count; ++i) {
    high[i] = fcntl(fds[i], F_DUPFD, 16);
    if (high[i] < 0) _exit(125);
  }
  for (int i = 0; i < count; ++i) {
    if (dup2(high[i], i) < 0) _exit(125);
  }
  if (syscall(SYS_close_range, count, ~0u, 0) != 0) _exit(125);
  if (chdir(command.cwd) != 0) {
    Say("temper", command.cwd, strerror(errno));
    _exit(126);
  }
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &filter) != 0) _exit(125);
  environ = const_cast<char**>(command.env);
  execvp(command.argv[0], const_cast<char* const*>(command.argv));
  int error = errno;
  Say("temper", command.argv[0], strerror(error));
  _exit(error == ENOENT ? 127 : 126);
}

// Starts a command; `fds` are stdin, stdout, stderr and perhaps fd 3. False when no process could be made.
bool Start(const Command& command, const int* fds, int count, uint32_t exec_id, int client) {
  Child* child = nullptr;
  for (Child& c : children) {
    if (c.pid == 0) {
      child = &c;
      break;
    }
  }
  if (!child) return false;
  pid_t pid = fork();
  if (pid < 0) return false;
  if (pid == 0) RunChild(command, fds, count);
  *child = Child{pid, exec_id, command.role, client};
  return true;
}

uint64_t Micros(const timeval& t) { return static_cast<uint64_t>(t.tv_sec) * 1000000 + static_cast<uint64_t>(t.tv_usec); }

void Reap() {
  int status;
  rusage usage;
  for (pid_t pid; (pid = wait4(-1, &status, WNOHANG, &usage)) > 0;) {
    for (Child& c : children) {
      if (c.pid != pid) continue;
      if (c.client == -1) Send(kControlFd, Message{kExit, c.exec_id, status, 0, Micros(usage.ru_utime) + Micros(usage.ru_stime)}, nullptr, 0);
      if (c.client >= 0) {
        Send(clients[c.client], Message{kExit, 0, status, 0, 0}, nullptr, 0);
        close(clients[c.client]);
        clients[c.client] = -1;
      }
      c.pid = 0;
      break;
    }
  }
}

// Ends all processes of a user, whatever group or session they are in, and waits until their places are free again: a command
// that follows has all of them. kill(-1) as that user is one system call that no fork can slip through; a child makes it because
// PID 1 must not change its own user.
void KillUser(uint32_t role) {
  const uint32_t uid = role == 1 ? kToolUid : kAgentUid;
  pid_t pid = fork();
  const bool full = pid < 0;
  if (full) {
    // No place for that child, and one that gets free is taken by whoever forks first: all stand still while the commands of
    // this user make room.
    kill(-1, SIGSTOP);
    for (const Child& c : children) {
      if (c.pid && c.role == role) kill(-c.pid, SIGKILL);
    }
    for (int i = 0; i < kGoneMs && (pid = fork()) < 0; ++i) {
      usleep(1000);
      Reap();
    }
  }
  if (pid == 0) {
    if (setresuid(uid, uid, uid) == 0) kill(-1, SIGKILL);
    _exit(0);
  }
  if (full) kill(-1, SIGCONT);
  // The killed and the child, which is of this user too, until nobody has its id.
  for (int i = 0; i < kGoneMs; ++i) {
    Reap();
    errno = 0;
    if (getpriority(PRIO_USER, uid) == -1 && errno == ESRCH) break;
    usleep(1000);
  }
}

// False when the service is gone.
bool HandleControl() {
  Message m = {};
  int fds[kFdsMax];
  int count;
  ssize_t n = Receive(kControlFd, &m, fds, &count);
  if (n < 0) return errno == EAGAIN || errno == EINTR;
  if (n == 0) return false;
  if (n == sizeof m && m.type == kExec && count == (m.flags & kHasFd3 ? 5 : 4)) {
    size_t size = 0;
    char* payload = CopyPayload(fds[0], &size);
    Command command;
    bool started = payload && ParseCommand(payload, size, false, slots, &command);
    if (started) {
      defaults = command;
      started = Start(command, fds + 1, count - 1, m.exec_id, -1);
    }
    if (payload) munmap(payload, size);
    if (!started) Send(kControlFd, Message{kExit, m.exec_id, -1, 0, 0}, nullptr, 0);
  } else if (n == sizeof m && m.type == kKill) {
    uint32_t role = 2;
    for (const Child& c : children) {
      if (c.pid && c.client < 0 && c.exec_id == m.exec_id) role = c.role;
    }
    if (role < 2) KillUser(role);
  }
  CloseAll(fds, count);
  return true;
}

void DropClient(int i) {
  for (Child& c : children) {
    if (c.pid && c.client == i) {
      kill(-c.pid, SIGKILL);
      c.client = -2;  // nobody to tell
    }
  }
  close(clients[i]);
  clients[i] = -1;
}

void HandleClient(int i) {
  Message m = {};
  int fds[kFdsMax];
  int count;
  ssize_t n = Receive(clients[i], &m, fds, &count);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
  bool busy = false;
  for (const Child& c : children) busy |= c.pid && c.client == i;
  bool started = false;
  if (n == sizeof m && m.type == kTool && count == 4 && !busy) {
    size_t size = 0;
    char* payload = CopyPayload(fds[0], &size);
    Command command;
    if (payload && ParseCommand(payload, size, true, slots, &command)) {
      command.address_space = defaults.address_space;
      command.processes = defaults.processes;
      command.file_size = defaults.file_size;
      command.cpu_s = defaults.cpu_s;
      // A fixed environment, so that the agent's key never reaches a tool unless the agent names it.
      const char* env[sizeof kToolEnv / sizeof *kToolEnv + 65] = {};
      int k = 0;
      for (const char* variable : kToolEnv) env[k++] = variable;
      for (int j = 0; j < 64 && command.env[j]; ++j) env[k++] = command.env[j];
      command.env = env;
      started = Start(command, fds + 1, 3, 0, i);
    }
    if (payload) munmap(payload, size);
  }
  CloseAll(fds, count);
  if (!started) DropClient(i);
}

void Accept(int listener) {
  int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (fd < 0) return;
  ucred peer = {};
  socklen_t size = sizeof peer;
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == kAgentUid) {
    for (int& slot : clients) {
      if (slot < 0) {
        slot = fd;
        return;
      }
    }
  }
  close(fd);
}

int ToolListener() {
  int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  memcpy(address.sun_path + 1, kToolSocket, sizeof kToolSocket - 1);
  socklen_t size = offsetof(sockaddr_un, sun_path) + sizeof kToolSocket;
  if (fd < 0 || bind(fd, reinterpret_cast<sockaddr*>(&address), size) != 0 || listen(fd, kClientsMax) != 0) return -1;
  return fd;
}

int InitMain() {
  // Nothing inside may look into this process, and it must not outlive the janitor.
  prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
  fcntl(kControlFd, F_SETFD, FD_CLOEXEC);
  fcntl(kLifelineFd, F_SETFD, FD_CLOEXEC);
  struct stat st;
  if (fstat(kFilterFd, &st) != 0 || st.st_size <= 0 || st.st_size % sizeof(sock_filter) != 0) return 1;
  void* code = mmap(nullptr, st.st_size, PROT_READ, MAP_PRIVATE, kFilterFd, 0);
  if (code == MAP_FAILED) return 1;
  filter.len = static_cast<unsigned short>(st.st_size / sizeof(sock_filter));
  filter.filter = static_cast<sock_filter*>(code);
  close(kFilterFd);
  for (int& c : clients) c = -1;

  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGCHLD);
  sigprocmask(SIG_BLOCK, &set, nullptr);
  int signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
  int listener = ToolListener();
  if (signals < 0 || listener < 0) return 1;

  for (;;) {
    pollfd p[4 + kClientsMax];
    int which[kClientsMax];
    int n = 4;
    p[0] = {kControlFd, POLLIN, 0};
    p[1] = {kLifelineFd, POLLIN, 0};
    p[2] = {signals, POLLIN, 0};
    p[3] = {listener, POLLIN, 0};
    for (int i = 0; i < kClientsMax; ++i) {
      if (clients[i] < 0) continue;
      which[n - 4] = i;
      p[n++] = {clients[i], POLLIN, 0};
    }
    if (poll(p, n, -1) < 0) {
      if (errno == EINTR) continue;
      return 1;
    }
    if (p[1].revents) return 0;
    if (p[2].revents) {
      signalfd_siginfo info;
      while (read(signals, &info, sizeof info) > 0) {
      }
      Reap();
    }
    if (p[0].revents && !HandleControl()) return 0;
    for (int i = 4; i < n; ++i) {
      int c = which[i - 4];
      if (!p[i].revents || clients[c] != p[i].fd) continue;
      HandleClient(c);
    }
    if (p[3].revents) Accept(listener);
  }
}

void Put(char** at, const void* data, size_t size) {
  memcpy(*at, data, size);
  *at += size;
}
void PutU32(char** at, uint32_t v) { Put(at, &v, sizeof v); }
void PutStr(char** at, const char* s) {
  size_t n = strlen(s);
  PutU32(at, static_cast<uint32_t>(n));
  Put(at, s, n + 1);
}

int ToolUsage() {
  static const char text[] =
      "usage: $TEMPER_TOOL_EXEC [--timeout SECONDS] [--env NAME=VALUE]… COMMAND [ARGUMENT]…\n"
      "Runs the command in /work as the tool user; exit code: the command's, 128+N after signal N, 124 over the timeout,\n"
      "125 when it could not be started.\n";
  if (write(2, text, sizeof text - 1) < 0) return 125;
  return 125;
}

int ToolMain(int argc, char** argv) {
  double timeout_s = -1;
  const char* env[64];
  uint32_t env_count = 0;
  int first = 1;
  while (first < argc && argv[first][0] == '-') {
    if (!strcmp(argv[first], "--")) {
      ++first;
      break;
    }
    if (first + 1 >= argc) return ToolUsage();
    if (!strcmp(argv[first], "--timeout")) {
      char* end;
      timeout_s = strtod(argv[first + 1], &end);
      if (*end || !(timeout_s > 0) || timeout_s > 1e6) return ToolUsage();
    } else if (!strcmp(argv[first], "--env") && env_count < 64) {
      env[env_count++] = argv[first + 1];
    } else {
      return ToolUsage();
    }
    first += 2;
  }
  if (first >= argc) return ToolUsage();

  size_t size = 12;
  for (int i = first; i < argc; ++i) size += strlen(argv[i]) + 5;
  for (uint32_t i = 0; i < env_count; ++i) size += strlen(env[i]) + 5;
  if (size > kPayloadBytesMax || argc - first > static_cast<int>(kArgumentsMax)) {
    Say("tool-exec", argv[first], "arguments too long");
    return 125;
  }
  int payload = memfd_create("tool", MFD_CLOEXEC);
  if (payload < 0 || ftruncate(payload, static_cast<off_t>(size)) != 0) return 125;
  void* map = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, payload, 0);
  if (map == MAP_FAILED) return 125;
  char* at = static_cast<char*>(map);
  PutU32(&at, kToolMagic);
  PutU32(&at, static_cast<uint32_t>(argc - first));
  for (int i = first; i < argc; ++i) PutStr(&at, argv[i]);
  PutU32(&at, env_count);
  for (uint32_t i = 0; i < env_count; ++i) PutStr(&at, env[i]);

  int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  memcpy(address.sun_path + 1, kToolSocket, sizeof kToolSocket - 1);
  socklen_t address_size = offsetof(sockaddr_un, sun_path) + sizeof kToolSocket;
  int fds[4] = {payload, 0, 1, 2};
  if (fd < 0 || connect(fd, reinterpret_cast<sockaddr*>(&address), address_size) != 0 || !Send(fd, Message{kTool, 0, 0, 0, 0}, fds, 4)) {
    Say("tool-exec", argv[first], strerror(errno));
    return 125;
  }
  pollfd p = {fd, POLLIN, 0};
  timespec start, now;
  clock_gettime(CLOCK_MONOTONIC, &start);
  for (;;) {
    int wait_ms = -1;
    if (timeout_s > 0) {
      clock_gettime(CLOCK_MONOTONIC, &now);
      double left = timeout_s - (static_cast<double>(now.tv_sec - start.tv_sec) + (now.tv_nsec - start.tv_nsec) * 1e-9);
      if (left <= 0) return 124;
      wait_ms = left > 1e6 ? 1000000000 : static_cast<int>(left * 1e3) + 1;
    }
    int r = poll(&p, 1, wait_ms);
    if (r > 0) break;
    if (r < 0 && errno != EINTR) return 125;
  }
  Message m = {};
  if (recv(fd, &m, sizeof m, 0) != sizeof m || m.type != kExit) {
    Say("tool-exec", argv[first], "could not be started");
    return 125;
  }
  return WIFEXITED(m.status) ? WEXITSTATUS(m.status) : 128 + WTERMSIG(m.status);
}

}  // namespace
}  // namespace temper::sandbox::protocol

int main(int argc, char** argv) {
  using namespace temper::sandbox::protocol;
  const char* name = argc > 0 ? strrchr(argv[0], '/') : nullptr;
  name = name ? name + 1 : argc > 0 ? argv[0] : "";
  if (!strcmp(name, kToolExecName)) return ToolMain(argc, argv);
  if (getpid() != 1) {
    static const char text[] = "temper-sandbox-init: is the first process of a sandbox; `temper sandbox run` starts one\n";
    return write(2, text, sizeof text - 1) < 0 ? 2 : 2;
  }
  return InitMain();
}
