// The program that tests send into sandboxes to break out or to do harm: `sandbox-attacker NAME ARGUMENT…`. Run outside, with
// the guard away, the same attempt succeeds: that is how the tests know that it is one (attempts_test.cpp).
//
// `--apart` before NAME tries each thing in namespaces of its own. Prints a line for each thing tried: `NAME ALLOWED`, or `NAME
// ERRNO` (or `NAME SIGSYS`); counts as `NAME NUMBER`.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <linux/bpf.h>
#include <linux/capability.h>
#include <linux/if_packet.h>
#include <linux/perf_event.h>
#include <linux/sched.h>
#include <mqueue.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/sem.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <functional>
#include <string>
#include <vector>

namespace {

using Arguments = std::vector<std::string>;

void Print(const std::string& name, const std::string& value) {
  printf("%s %s\n", name.c_str(), value.c_str());
  fflush(stdout);
}
void Print(const std::string& name, long value) { Print(name, std::to_string(value)); }
std::string ErrnoName(int error) {
  const char* name = strerrorname_np(error);
  return name ? name : std::to_string(error);
}

// Set by --apart: with mounts, host name and queues of its own, so that what succeeds outside harms nobody.
bool apart = false;

// Each in a child: what succeeds must not help the next one.
void Try(const std::string& name, const std::function<long()>& call) {
  const pid_t pid = fork();
  if (pid == 0) {
    if (apart && (unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC) != 0 ||
                  mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0)) {
      _exit(255);
    }
    errno = 0;
    _exit(call() >= 0 ? 0 : errno);
  }
  int status = 0;
  if (pid < 0 || waitpid(pid, &status, 0) != pid) return Print(name, "NOT TRIED");
  if (WIFSIGNALED(status)) return Print(name, WTERMSIG(status) == SIGSYS ? "SIGSYS" : "SIGNAL");
  Print(name, WEXITSTATUS(status) == 0 ? "ALLOWED" : ErrnoName(WEXITSTATUS(status)));
}

long Number(const std::string& text) { return strtol(text.c_str(), nullptr, 10); }
[[noreturn]] void SleepForEver() {
  for (;;) pause();
}
void SleepMs(long ms) {
  timespec t = {ms / 1000, ms % 1000 * 1000000};
  nanosleep(&t, nullptr);
}
long Open(const std::string& path, int flags) { return open(path.c_str(), flags | O_CLOEXEC, 0600); }

// --- what exhausts ---

struct Shared {
  std::atomic<long> tickets, working, made, refused, error;
  std::atomic<bool> stop;
};

// A bomb with an end: every process forks as long as fewer than `most` were made and fewer than 480 forks were refused.
void Bomb(Shared* s, long most) {
  while (s->refused < 480 && s->tickets.fetch_add(1) < most) {
    ++s->working;
    const pid_t pid = fork();
    if (pid < 0) {
      s->error = errno;
      --s->working;
      --s->tickets;
      ++s->refused;
      sched_yield();
    } else if (pid == 0) {
      Bomb(s, most);
      while (!s->stop) SleepMs(2);
      _exit(0);
    } else {
      ++s->made;
    }
  }
  --s->working;
}

void Forks(const Arguments& a) {
  // Orphans become children of this process, so that it can wait for all.
  prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
  auto* s = new (mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) Shared{};
  s->working = 1;
  Bomb(s, Number(a[0]));
  while (s->working > 0) SleepMs(2);
  Print("made", s->made);
  Print("refused", s->refused);
  Print("error", s->error ? ErrnoName(static_cast<int>(s->error)) : "none");
  s->stop = true;
  while (wait(nullptr) > 0) {
  }
}

void Threads(const Arguments& a) {
  long made = 0;
  int error = 0;
  for (; made < Number(a[0]) && error == 0; ++made) {
    pthread_t thread;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 64 << 10);
    error = pthread_create(
        &thread, &attributes, [](void*) -> void* { SleepForEver(); }, nullptr);
    if (error) break;
  }
  Print("made", made);
  Print("error", error ? ErrnoName(error) : "none");
}

// Children that end at once and are never waited for.
void Zombies(const Arguments& a) {
  long made = 0;
  int error = 0;
  for (; made < Number(a[0]); ++made) {
    const pid_t pid = fork();
    if (pid == 0) _exit(0);
    if (pid < 0) {
      error = errno;
      break;
    }
  }
  Print("made", made);
  Print("error", error ? ErrnoName(error) : "none");
}

void Memory(const Arguments& a) {
  const long bytes = Number(a[1]) << 20;
  int fd = -1;
  if (a[0] == "memfd") fd = memfd_create("x", 0);
  if (a[0] == "shm") fd = static_cast<int>(Open("/dev/shm/bomb", O_RDWR | O_CREAT));
  if (a[0] == "tmpfs") fd = static_cast<int>(Open("/work/bomb", O_RDWR | O_CREAT));
  if (fd >= 0) {
    std::string block(1 << 20, 'x');
    for (long done = 0; done < bytes; done += 1 << 20) {
      if (write(fd, block.data(), block.size()) != static_cast<ssize_t>(block.size())) return Print("took", ErrnoName(errno));
    }
  } else {
    char* p =
        static_cast<char*>(mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (p == MAP_FAILED) return Print("took", ErrnoName(errno));
    for (long i = 0; i < bytes; i += 4096) p[i] = 1;
  }
  Print("took", "ALL");
}

void Fill(const Arguments& a) {
  signal(SIGXFSZ, SIG_IGN);
  const int fd = static_cast<int>(Open(a[0], O_WRONLY | O_CREAT | O_APPEND));
  std::string block(64 << 10, 'x');
  long done = 0;
  while (done < Number(a[1]) << 20) {
    const ssize_t n = write(fd, block.data(), block.size());
    if (n < 0) return Print("wrote", done >> 20), Print("error", ErrnoName(errno));
    done += n;
  }
  Print("wrote", done >> 20);
  Print("error", "none");
}

void Inodes(const Arguments& a) {
  long made = 0;
  for (; made < Number(a[1]); ++made) {
    const long fd = Open(a[0] + "/f" + std::to_string(made), O_WRONLY | O_CREAT);
    if (fd < 0) return Print("made", made), Print("error", ErrnoName(errno));
    close(static_cast<int>(fd));
  }
  Print("made", made);
  Print("error", "none");
}

void Sparse(const Arguments& a) {
  signal(SIGXFSZ, SIG_IGN);
  const int fd = static_cast<int>(Open(a[0], O_WRONLY | O_CREAT));
  Print("sparse", ftruncate(fd, 1l << 40) == 0 ? "ALLOWED" : ErrnoName(errno));
}

void Deep(const Arguments& a) {
  long made = 0;
  for (; made < Number(a[1]); ++made) {
    if ((made == 0 && chdir(a[0].c_str()) != 0) || mkdir("d", 0777) != 0 || chdir("d") != 0) break;
  }
  Print("made", made);
}

void LongNames(const Arguments& a) {
  Try("name of 255", [&] { return Open(a[0] + "/" + std::string(255, 'n'), O_WRONLY | O_CREAT); });
  Try("name of 256", [&] { return Open(a[0] + "/" + std::string(256, 'n'), O_WRONLY | O_CREAT); });
  Try("path of 4 KiB", [&] {
    std::string path = a[0];
    while (path.size() < 4096) path += "/./" + std::string(60, '.') + "/..";
    return Open(path, O_WRONLY | O_CREAT);
  });
}

// --- output ---

void Flood(const Arguments& a) {
  const long mib = a.size() > 1 ? Number(a[1]) : 0;
  const std::string block(1 << 16, 'x');
  auto put = [&](int fd) {
    for (size_t done = 0; done < block.size();) {
      const ssize_t n = write(fd, block.data() + done, block.size() - done);
      if (n < 0) _exit(3);
      done += static_cast<size_t>(n);
    }
  };
  if (a[0] == "endless") {
    for (;;) put(1);
  }
  if (a[0] == "early") close(1);
  for (long i = 0; i < mib * 16; ++i) {
    if (a[0] == "line" || a[0] == "alternating") put(1);
    if (a[0] == "errors" || a[0] == "alternating" || a[0] == "early") put(2);
  }
}

// --- what does not end ---

// `count` processes that ignore every polite signal; one of them stops itself.
void Stubborn(const Arguments& a) {
  for (int s : {SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGPIPE, SIGALRM, SIGUSR1}) signal(s, SIG_IGN);
  for (long i = 1; i < Number(a[0]); ++i) {
    if (fork() == 0) {
      setsid();
      if (i == 1) raise(SIGSTOP);
      SleepForEver();
    }
  }
  SleepForEver();
}

// Detaches in every way there is and writes to `a[0]` for ever under the name of somebody else.
void Daemon(const Arguments& a, char** argv) {
  if (fork() != 0) return;
  setsid();
  if (fork() != 0) _exit(0);
  for (int s = 1; s < 32; ++s) signal(s, SIG_IGN);
  if (chdir("/") != 0) _exit(1);
  const std::string path = a[0], mark = a[1];
  for (char** word = argv + 1; *word; ++word) memset(*word, ' ', strlen(*word));
  snprintf(argv[0], strlen(argv[0]) + 1, "sshd");
  prctl(PR_SET_NAME, ("sshd" + mark).c_str(), 0, 0, 0);
  syscall(SYS_close_range, 0, ~0u, 0);
  for (;;) {
    const int fd = static_cast<int>(Open(path, O_WRONLY | O_CREAT | O_APPEND));
    if (write(fd, ".", 1) == 1) close(fd);
    SleepMs(5);
  }
}

// --- other processes ---

void Signals(const Arguments& a) {
  for (const std::string& word : a) {
    const pid_t pid = static_cast<pid_t>(Number(word));
    for (int s : {SIGSTOP, SIGKILL}) Try("kill " + word + " " + sigabbrev_np(s), [&] { return kill(pid, s); });
    if (pid > 1) Try("kill group " + word, [&] { return kill(-pid, SIGKILL); });
  }
}

// Everything that the caller may kill, itself excepted.
void KillAll(const Arguments&) {
  const pid_t own = fork();
  if (own == 0) SleepForEver();
  SleepMs(20);
  Print("kill -1", kill(-1, SIGKILL) == 0 ? "ALLOWED" : ErrnoName(errno));
  int status = 0;
  waitpid(own, &status, 0);
  Print("took its own child", WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL ? "ALLOWED" : "no");
}

void Trace(const Arguments& a) {
  const pid_t pid = static_cast<pid_t>(Number(a[0]));
  Try("ptrace attach", [&] { return ptrace(PTRACE_ATTACH, pid, 0, 0); });
  Try("ptrace seize", [&] { return ptrace(PTRACE_SEIZE, pid, 0, 0); });
  // Address 4096 of the other is not mapped: EFAULT says that only the address was wrong.
  auto transfer = [&](bool out) -> long {
    char byte = 0;
    iovec mine = {&byte, 1}, other = {reinterpret_cast<void*>(4096), 1};
    const ssize_t n = out ? process_vm_writev(pid, &mine, 1, &other, 1, 0) : process_vm_readv(pid, &mine, 1, &other, 1, 0);
    return n < 0 && errno == EFAULT ? 0 : n;
  };
  Try("process_vm_writev", [&] { return transfer(true); });
  Try("process_vm_readv", [&] { return transfer(false); });
  Try("proc mem", [&] { return Open("/proc/" + a[0] + "/mem", O_RDWR); });
  Try("pidfd_getfd", [&]() -> long {
    const long fd = syscall(SYS_pidfd_open, pid, 0);
    return fd < 0 ? fd : syscall(SYS_pidfd_getfd, fd, 0, 0);
  });
}

void ProcOf(const Arguments& a) {
  const std::string proc = "/proc/" + a[0] + "/";
  char link[4096];
  for (const char* name : {"environ", "maps", "stack", "syscall"}) {
    Try(name, [&]() -> long {
      const long fd = Open(proc + name, O_RDONLY);
      return fd < 0 ? fd : read(static_cast<int>(fd), link, 1);
    });
  }
  for (const char* name : {"root", "exe", "cwd"}) Try(name, [&] { return readlink((proc + name).c_str(), link, sizeof link); });
  Try("through root", [&] { return Open(proc + "root/etc/passwd", O_RDONLY); });
  Try("fd", [&]() -> long { return opendir((proc + "fd").c_str()) ? 0 : -1; });
  Try("oom_score_adj", [&] { return Open(proc + "oom_score_adj", O_WRONLY); });
  for (size_t i = 1; i < a.size(); ++i) {
    Try("write " + a[i], [&] { return Open(a[i], O_WRONLY); });
    Try("replace " + a[i], [&] {
      const std::string other = a[i] + "-new";
      if (Open(other, O_WRONLY | O_CREAT) < 0 || rename(other.c_str(), a[i].c_str()) != 0) return -1l;
      return 0l;
    });
  }
}

// --- the kernel ---

void Sysctl(const Arguments&) {
  for (const char* path : {"/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname", "/proc/sys/vm/overcommit_memory",
                           "/proc/sys/kernel/modprobe", "/proc/sysrq-trigger", "/proc/sys/fs/binfmt_misc/register",
                           "/proc/sys/user/max_user_namespaces"}) {
    Try(std::string("write ") + path, [&] { return Open(path, O_WRONLY); });
  }
  for (const char* path : {"/proc/kcore", "/proc/kallsyms", "/proc/keys", "/proc/key-users", "/proc/timer_list", "/proc/kmsg"}) {
    Try(std::string("read ") + path, [&]() -> long {
      const long fd = Open(path, O_RDONLY | O_NONBLOCK);
      char byte;
      if (fd < 0) return fd;
      const ssize_t n = read(static_cast<int>(fd), &byte, 1);
      errno = n == 0 ? ENODATA : errno;  // empty: covered
      return n == 1 || (n < 0 && errno == EAGAIN) ? 0 : -1;
    });
  }
  for (const char* path : {"/sys/kernel", "/sys/power/state", "/sys/fs/cgroup"})
    Try(std::string("see ") + path, [&] { return access(path, F_OK); });
}

void Mounts(const Arguments& a) {
  const std::string& dir = a[0];
  auto bind_itself = [&] { return mount(dir.c_str(), dir.c_str(), nullptr, MS_BIND, nullptr); };
  Try("mount tmpfs", [&] { return mount("x", dir.c_str(), "tmpfs", 0, nullptr); });
  Try("mount proc", [&] { return mount("x", dir.c_str(), "proc", 0, nullptr); });
  Try("bind over /etc", [&] { return mount(dir.c_str(), "/etc", nullptr, MS_BIND, nullptr); });
  Try("remount / writable", [&] { return mount(nullptr, "/", nullptr, MS_BIND | MS_REMOUNT, nullptr); });
  Try("umount /proc", [&] { return umount2("/proc", MNT_DETACH); });
  Try("pivot_root", [&] {
    bind_itself();
    return chdir(dir.c_str()) == 0 ? syscall(SYS_pivot_root, ".", ".") : -1l;
  });
  Try("chroot", [&] { return chroot(dir.c_str()); });
  Try("fsopen", [&] { return syscall(SYS_fsopen, "tmpfs", 0); });
  Try("open_tree", [&] { return syscall(SYS_open_tree, AT_FDCWD, "/", 1 /* clone */); });
  Try("move_mount", [&] {
    bind_itself();
    mkdir((dir + "/to").c_str(), 0700);
    return syscall(SYS_move_mount, AT_FDCWD, dir.c_str(), AT_FDCWD, (dir + "/to").c_str(), 0) == 0 || errno == ELOOP ? 0 : -1;
  });
  Try("mount_setattr", [&] {
    uint64_t none[4] = {};
    return syscall(SYS_mount_setattr, AT_FDCWD, "/", 0, none, sizeof none);
  });
  // The way through a user namespace in which one is root.
  Try("overlay in a nested user namespace", [&]() -> long {
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return -1;
    return mount("overlay", dir.c_str(), "overlay", 0, "lowerdir=/usr:/etc") == 0 || errno == EINVAL ? 0 : -1;
  });
}

constexpr struct {
  const char* name;
  uint64_t flag;
} kNamespaces[] = {{"user", CLONE_NEWUSER}, {"mnt", CLONE_NEWNS},  {"pid", CLONE_NEWPID},      {"net", CLONE_NEWNET},
                   {"ipc", CLONE_NEWIPC},   {"uts", CLONE_NEWUTS}, {"cgroup", CLONE_NEWCGROUP}};

void Namespaces(const Arguments& a) {
  for (const auto& n : kNamespaces) {
    Try(std::string("unshare ") + n.name, [&] { return unshare(static_cast<int>(n.flag)); });
    Try(std::string("clone ") + n.name, [&]() -> long {
      const long pid = syscall(SYS_clone, n.flag | SIGCHLD, 0, 0, 0, 0);
      if (pid == 0) _exit(0);
      return pid;
    });
    Try(std::string("clone3 ") + n.name, [&]() -> long {
      clone_args args = {};
      args.flags = n.flag;
      args.exit_signal = SIGCHLD;
      const long pid = syscall(SYS_clone3, &args, sizeof args);
      if (pid == 0) _exit(0);
      return pid;
    });
    // One's own stands for that of process 1 where there is no way to see that one.
    Try(std::string("setns ") + n.name, [&]() -> long {
      long fd = Open("/proc/" + a[0] + "/ns/" + n.name, O_RDONLY);
      if (fd < 0) fd = Open(std::string("/proc/self/ns/") + n.name, O_RDONLY);
      // EINVAL: a user namespace one is in already; the call was let through.
      return setns(static_cast<int>(fd), 0) == 0 || errno == EINVAL ? 0 : -1;
    });
  }
}

long Device(const std::string& path, mode_t kind, dev_t number) {
  if (mknod(path.c_str(), kind | 0600, number) != 0) return -1;
  return unlink(path.c_str());
}

void Devices(const Arguments& a) {
  const std::string path = a[0] + "/node";
  Try("mknod character", [&] { return Device(path, S_IFCHR, makedev(1, 1)); });
  Try("mknod block", [&] { return Device(path, S_IFBLK, makedev(7, 0)); });
  for (const char* device : {"/dev/kvm", "/dev/vda", "/dev/sda", "/dev/nvme0n1", "/dev/mem", "/dev/kmsg", "/dev/loop-control",
                             "/dev/fuse", "/dev/ptmx"}) {
    Try(std::string("open ") + device, [&] { return Open(device, O_RDONLY | O_NONBLOCK); });
  }
}

void WhoAmI(const Arguments&) {
  Print("euid", geteuid());
  FILE* status = fopen("/proc/self/status", "r");
  char line[256];
  while (status && fgets(line, sizeof line, status)) {
    if (!strncmp(line, "CapEff:", 7)) Print("capabilities", strtoul(line + 7, nullptr, 16) ? "SOME" : "none");
  }
}

void Privileges(const Arguments& a) {
  for (const std::string& program : a) {
    for (uid_t uid : {0u, 1000u, 1001u}) {
      if (uid != getuid()) Try("setuid " + std::to_string(uid), [&] { return setuid(uid); });
    }
    printf("through %s\n", program.c_str());
    fflush(stdout);
    if (fork() == 0) {
      execl(program.c_str(), program.c_str(), "whoami", nullptr);
      Print("exec", ErrnoName(errno));
      _exit(1);
    }
    while (wait(nullptr) > 0) {
    }
  }
  Try("setgid", [] { return setgid(0); });
  Try("ambient", [] { return prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_SYS_ADMIN, 0, 0); });
  Try("capset", []() -> long {
    __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    __user_cap_data_struct data[2] = {{1u << CAP_SYS_ADMIN, 1u << CAP_SYS_ADMIN, 0}, {0, 0, 0}};
    return syscall(SYS_capset, &header, data);
  });
  Try("no_new_privs off", [] { return prctl(PR_SET_NO_NEW_PRIVS, 0, 0, 0, 0); });
}

void Keys(const Arguments&) {
  constexpr int kGetKeyringId = 0, kSearch = 10, kGetPersistent = 22, kJoinSession = 1;
  Try("session keyring", [] { return syscall(SYS_keyctl, kGetKeyringId, -3, 1); });
  Try("user keyring", [] { return syscall(SYS_keyctl, kGetKeyringId, -4, 1); });
  Try("persistent keyring", [] { return syscall(SYS_keyctl, kGetPersistent, -1, -2); });
  Try("join session", [] { return syscall(SYS_keyctl, kJoinSession, "temper-test"); });
  Try("add_key", [] { return syscall(SYS_add_key, "user", "temper-test", "x", 1, -2); });
  Try("search", [] { return syscall(SYS_keyctl, kSearch, -2, "user", "nobody", 0) >= 0 || errno == ENOKEY ? 0 : -1; });
  Try("request_key", [] { return syscall(SYS_request_key, "user", "nobody", 0, -2) >= 0 || errno == ENOKEY ? 0 : -1; });
}

void Families(const Arguments&) {
  struct Family {
    const char* name;
    int family, type, protocol;
  };
  for (const Family& f : {Family{"packet", AF_PACKET, SOCK_RAW, 0},
                          {"alg", AF_ALG, SOCK_SEQPACKET, 0},
                          {"vsock", AF_VSOCK, SOCK_STREAM, 0},
                          {"bluetooth", AF_BLUETOOTH, SOCK_RAW, 1},
                          {"key", AF_KEY, SOCK_RAW, 2},
                          {"xdp", AF_XDP, SOCK_RAW, 0},
                          {"tipc", AF_TIPC, SOCK_RDM, 0},
                          {"netlink nflog", AF_NETLINK, SOCK_RAW, 5},
                          {"netlink audit", AF_NETLINK, SOCK_RAW, 9},
                          {"netlink netfilter", AF_NETLINK, SOCK_RAW, 12},
                          {"netlink uevent", AF_NETLINK, SOCK_RAW, 15},
                          {"netlink generic", AF_NETLINK, SOCK_RAW, 16},
                          {"raw", AF_INET, SOCK_RAW, IPPROTO_ICMP},
                          {"raw6", AF_INET6, SOCK_RAW, IPPROTO_ICMPV6}}) {
    Try(f.name, [&] { return socket(f.family, f.type, f.protocol); });
  }
  for (int family = 0; family < 50; ++family) {
    if (family == AF_UNIX || family == AF_INET || family == AF_INET6 || family == AF_NETLINK) continue;
    if (socket(family, SOCK_STREAM, 0) >= 0 || socket(family, SOCK_DGRAM, 0) >= 0)
      Print("family " + std::to_string(family), "ALLOWED");
  }
}

// tcp:ADDRESS:PORT, tcp6:ADDRESS:PORT, udp:ADDRESS:PORT (a datagram and its answer), abstract:NAME, unix:PATH
void Reach(const Arguments& a) {
  for (const std::string& word : a) {
    Try(word, [&]() -> long {
      const std::string kind = word.substr(0, word.find(':')), rest = word.substr(word.find(':') + 1);
      const size_t last = rest.rfind(':');
      sockaddr_storage address = {};
      socklen_t size = 0;
      if (kind == "abstract" || kind == "unix") {
        auto* un = reinterpret_cast<sockaddr_un*>(&address);
        un->sun_family = AF_UNIX;
        const size_t skip = kind == "abstract" ? 1 : 0;
        memcpy(un->sun_path + skip, rest.data(), rest.size());
        size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + skip + rest.size());
      } else if (kind == "tcp6") {
        auto* in = reinterpret_cast<sockaddr_in6*>(&address);
        in->sin6_family = AF_INET6;
        in->sin6_port = htons(static_cast<uint16_t>(Number(rest.substr(last + 1))));
        in->sin6_scope_id = 1;
        inet_pton(AF_INET6, rest.substr(0, last).c_str(), &in->sin6_addr);
        size = sizeof *in;
      } else {
        auto* in = reinterpret_cast<sockaddr_in*>(&address);
        in->sin_family = AF_INET;
        in->sin_port = htons(static_cast<uint16_t>(Number(rest.substr(last + 1))));
        inet_pton(AF_INET, rest.substr(0, last).c_str(), &in->sin_addr);
        size = sizeof *in;
      }
      const int fd = socket(address.ss_family, kind == "udp" ? SOCK_DGRAM : SOCK_STREAM | SOCK_NONBLOCK, 0);
      if (connect(fd, reinterpret_cast<sockaddr*>(&address), size) == 0) return kind == "udp" ? send(fd, "x", 1, 0) : 0;
      if (errno != EINPROGRESS) return -1;
      pollfd p = {fd, POLLOUT, 0};
      if (poll(&p, 1, 500) <= 0) return errno = ETIMEDOUT, -1;
      int error = 0;
      socklen_t n = sizeof error;
      getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &n);
      return errno = error, error ? -1 : 0;
    });
  }
}

// Serves until killed: a victim for Reach in another sandbox.
void Serve(const Arguments& a) {
  const int tcp = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in in = {};
  in.sin_family = AF_INET;
  in.sin_port = htons(static_cast<uint16_t>(Number(a[0])));
  const int un = socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un name = {};
  name.sun_family = AF_UNIX;
  memcpy(name.sun_path + 1, a[1].data(), a[1].size());
  if (bind(tcp, reinterpret_cast<sockaddr*>(&in), sizeof in) != 0 || listen(tcp, 9) != 0 ||
      bind(un, reinterpret_cast<sockaddr*>(&name), static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + a[1].size())) !=
          0 ||
      listen(un, 9) != 0) {
    return Print("serve", ErrnoName(errno));
  }
  Print("serve", "ready");
  SleepForEver();
}

// --- what could be inherited ---

void Descriptors(const Arguments&) {
  std::string open_ones;
  for (int fd = 0; fd < 4096; ++fd) {
    if (fcntl(fd, F_GETFD) >= 0) open_ones += (open_ones.empty() ? "" : " ") + std::to_string(fd);
  }
  Print("open:", open_ones);
}

bool Holds(const std::string& path, const std::string& word) {
  const long fd = Open(path, O_RDONLY | O_NONBLOCK | O_NOFOLLOW);
  if (fd < 0) return false;
  std::string text;
  char block[65536];
  for (ssize_t n; text.size() < (8u << 20) && (n = read(static_cast<int>(fd), block, sizeof block)) > 0;)
    text.append(block, static_cast<size_t>(n));
  close(static_cast<int>(fd));
  return text.find(word) != std::string::npos;
}

void SearchFolder(const std::string& folder, const std::string& word, int depth) {
  DIR* dir = opendir(folder.c_str());
  while (dirent* e = dir ? readdir(dir) : nullptr) {
    const std::string path = folder + "/" + e->d_name;
    if (e->d_type == DT_DIR && e->d_name[0] != '.' && depth > 0) SearchFolder(path, word, depth - 1);
    if (e->d_type == DT_REG && Holds(path, word)) Print("found in " + path, "ALLOWED");
  }
  if (dir) closedir(dir);
}

// The word is given as two halves, so that the command line of this program is not a place where it is found.
void Search(const Arguments& a) {
  const std::string word = a[0] + a[1];
  for (char** e = environ; *e; ++e) {
    if (strstr(*e, word.c_str())) Print("in the environment", "ALLOWED");
  }
  DIR* proc = opendir("/proc");
  while (dirent* e = proc ? readdir(proc) : nullptr) {
    for (const char* file : {"environ", "cmdline"}) {
      const std::string path = std::string("/proc/") + e->d_name + "/" + file;
      if (Number(e->d_name) > 0 && Holds(path, word)) Print(path, "ALLOWED");
    }
  }
  for (size_t i = 2; i < a.size(); ++i) SearchFolder(a[i], word, 6);
  Print("searched", "ALL");
}

void Terminal(const Arguments& a) {
  if (!a.empty()) {  // a terminal of one's own, where there is none
    setsid();
    const int other = static_cast<int>(Open("/dev/ptmx", O_RDWR));
    int unlock = 0, number = 0;
    ioctl(other, TIOCSPTLCK, &unlock);
    ioctl(other, TIOCGPTN, &number);
    const int own = static_cast<int>(Open("/dev/pts/" + std::to_string(number), O_RDWR));
    if (own < 0 || dup2(own, 0) < 0) return Print("terminal", ErrnoName(errno));
    ioctl(0, TIOCSCTTY, 0);
  }
  Try("TIOCSTI", [] { return syscall(SYS_ioctl, 0, 0x5412ul, "x"); });
  Try("TIOCSTI with high bits", [] { return syscall(SYS_ioctl, 0, 0x100005412ul, "x"); });
  // Subcode 2 asks for nothing; EINVAL: not a console, but the call was let through.
  Try("TIOCLINUX", [] { return syscall(SYS_ioctl, 0, 0x541cul, "\2") == 0 || errno == EINVAL || errno == ENOTTY ? 0 : -1; });
  Try("TIOCLINUX with high bits",
      [] { return syscall(SYS_ioctl, 0, 0x10000541cul, "\2") == 0 || errno == EINVAL || errno == ENOTTY ? 0 : -1; });
  Try("controlling terminal", [] { return Open("/dev/tty", O_RDWR); });
  Try("new terminal", [] { return Open("/dev/ptmx", O_RDWR); });
}

void Interfaces(const Arguments& a) {
  Try("io_uring", [] {
    char parameters[128] = {};
    return syscall(SYS_io_uring_setup, 1, parameters);
  });
  Try("userfaultfd", [] { return syscall(SYS_userfaultfd, O_CLOEXEC); });
  Try("bpf", [] {
    bpf_attr attr = {};
    attr.map_type = BPF_MAP_TYPE_ARRAY;
    attr.key_size = attr.value_size = 4;
    attr.max_entries = 1;
    return syscall(SYS_bpf, BPF_MAP_CREATE, &attr, sizeof attr);
  });
  Try("perf", [] {
    perf_event_attr attr = {};
    attr.type = PERF_TYPE_SOFTWARE;
    attr.size = sizeof attr;
    attr.config = PERF_COUNT_SW_CPU_CLOCK;
    return syscall(SYS_perf_event_open, &attr, 0, -1, -1, 0);
  });
  Try("memfd_secret", [] { return syscall(447, 0); });
  Try("fanotify", [] { return syscall(SYS_fanotify_init, 0, O_RDONLY); });
  Try("name_to_handle", [&] {
    struct {
      unsigned bytes;
      int type;
      char data[128];
    } handle = {128, 0, {}};
    int mount_id;
    return syscall(SYS_name_to_handle_at, AT_FDCWD, a[0].c_str(), &handle, &mount_id, 0);
  });
}

void Machine(const Arguments&) {
  // An impossible time: EINVAL says that the caller might have set a possible one.
  timespec impossible = {0, 2000000000};
  timeval never = {0, 2000000};
  Try("clock_settime", [&] { return syscall(SYS_clock_settime, CLOCK_REALTIME, &impossible) == 0 || errno == EINVAL ? 0 : -1; });
  Try("settimeofday", [&] { return syscall(SYS_settimeofday, &never, 0) == 0 || errno == EINVAL ? 0 : -1; });
  Try("sethostname", [] { return sethostname("x", 1); });
  Try("personality", [] { return personality(READ_IMPLIES_EXEC); });
  Try("iopl", [] { return syscall(SYS_iopl, 3); });
  Try("ioperm", [] { return syscall(SYS_ioperm, 0x80, 1, 1); });
  Try("modify_ldt", [] {
    char buffer[64];
    return syscall(SYS_modify_ldt, 0, buffer, sizeof buffer);
  });
  Try("int 0x80", []() -> long {
    long result = 20;  // getpid
    asm volatile("int $0x80" : "+a"(result) : : "memory", "r8", "r9", "r10", "r11");
    return errno = ENOSYS, result > 0 ? 0 : -1;
  });
}

// --- files ---

// Exchanges two names as fast as it can, `times` times.
void Race(const Arguments& a) {
  for (long i = 0; i < Number(a[2]); ++i) {
    if (syscall(SYS_renameat2, AT_FDCWD, a[0].c_str(), AT_FDCWD, a[1].c_str(), 2 /* exchange */) != 0)
      return Print("exchange", ErrnoName(errno));
  }
  Print("exchanged", Number(a[2]));
}

// A file that is never the same size twice, until killed.
void Restless(const Arguments& a) {
  const int fd = static_cast<int>(Open(a[0], O_WRONLY | O_CREAT));
  const std::string block(1 << 20, 'x');
  for (;;) {
    for (int i = 0; i < 8; ++i) {
      if (write(fd, block.data(), block.size()) < 0) break;
    }
    if (ftruncate(fd, 0) != 0 || lseek(fd, 0, SEEK_SET) != 0) return;
  }
}

void Crashes(const Arguments& a) {
  rlimit most = {RLIM_INFINITY, RLIM_INFINITY};
  Print("core size", setrlimit(RLIMIT_CORE, &most) == 0 ? "ALLOWED" : ErrnoName(errno));
  long died = 0;
  for (long i = 0; i < Number(a[0]); ++i) {
    const pid_t pid = fork();
    if (pid == 0) {
      if (i % 2) abort();
      raise(SIGSEGV);
      _exit(0);
    }
    int status = 0;
    if (pid > 0 && waitpid(pid, &status, 0) == pid && WIFSIGNALED(status)) ++died;
    if (WCOREDUMP(status)) Print("dumped", "ALLOWED");
  }
  Print("died", died);
}

// --- processor time and kernel objects ---

void* Spin(void*) {
  for (std::atomic<long> n{0};;) ++n;
}

void Hog(const Arguments& a) {
  for (long i = 1; i < Number(a[0]); ++i) {
    pthread_t thread;
    pthread_create(&thread, nullptr, &Spin, nullptr);
  }
  Spin(nullptr);
}

void Priorities(const Arguments&) {
  sched_param p = {};
  p.sched_priority = 1;
  Try("SCHED_FIFO", [&] { return sched_setscheduler(0, SCHED_FIFO, &p); });
  Try("SCHED_RR", [&] { return sched_setscheduler(0, SCHED_RR, &p); });
  Try("nice -10", [] { return setpriority(PRIO_PROCESS, 0, -10); });
  Try("I/O class real time", [] { return syscall(SYS_ioprio_set, 1, 0, 1 << 13 | 4); });
}

// Takes as much as it gets of one thing and keeps it until killed; says how much, and what refused more.
void Exhaust(const Arguments& a) {
  rlimit most;
  getrlimit(RLIMIT_NOFILE, &most);
  most.rlim_cur = most.rlim_max;
  setrlimit(RLIMIT_NOFILE, &most);
  const long bound = Number(a[1]);
  long made = 0;
  for (long got = 0; made < bound; ++made) {
    int ends[2];
    mq_attr queue = {};
    queue.mq_maxmsg = 10;
    queue.mq_msgsize = 1024;
    if (a[0] == "inotify") got = inotify_init1(IN_CLOEXEC);
    if (a[0] == "epoll") got = epoll_create1(EPOLL_CLOEXEC);
    if (a[0] == "pipes") got = pipe2(ends, O_CLOEXEC);
    if (a[0] == "semaphores") got = semget(IPC_PRIVATE, 100, 0600 | IPC_CREAT);
    if (a[0] == "mqueue") got = mq_open(("/q" + std::to_string(made)).c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600, &queue);
    if (a[0] == "terminals") got = Open("/dev/ptmx", O_RDWR);
    if (got < 0) break;
  }
  Print(a[0] + " made", made);
  Print(a[0] + " then", made < bound ? ErrnoName(errno) : "more");
  if (a.size() > 2) {
    if (mkdir(a[2].c_str(), 0777) == 0) SleepForEver();  // needs no descriptor
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && !strcmp(argv[1], "--apart")) {
    apart = true;
    ++argv;
    --argc;
  }
  const std::string name = argc > 1 ? argv[1] : "";
  const Arguments a(argv + (argc > 1 ? 2 : 1), argv + argc);
  const struct {
    const char* name;
    void (*run)(const Arguments&);
  } kAttempts[] = {{"forks", Forks},
                   {"threads", Threads},
                   {"zombies", Zombies},
                   {"memory", Memory},
                   {"fill", Fill},
                   {"inodes", Inodes},
                   {"sparse", Sparse},
                   {"deep", Deep},
                   {"names", LongNames},
                   {"flood", Flood},
                   {"stubborn", Stubborn},
                   {"signals", Signals},
                   {"kill-all", KillAll},
                   {"trace", Trace},
                   {"proc-of", ProcOf},
                   {"sysctl", Sysctl},
                   {"mounts", Mounts},
                   {"namespaces", Namespaces},
                   {"devices", Devices},
                   {"whoami", WhoAmI},
                   {"privileges", Privileges},
                   {"keys", Keys},
                   {"families", Families},
                   {"reach", Reach},
                   {"serve", Serve},
                   {"descriptors", Descriptors},
                   {"search", Search},
                   {"terminal", Terminal},
                   {"interfaces", Interfaces},
                   {"machine", Machine},
                   {"race", Race},
                   {"restless", Restless},
                   {"crashes", Crashes},
                   {"hog", Hog},
                   {"priorities", Priorities},
                   {"exhaust", Exhaust}};
  if (name == "daemon") return Daemon(a, argv), 0;
  for (const auto& attempt : kAttempts) {
    if (name == attempt.name) return attempt.run(a), 0;
  }
  fprintf(stderr, "sandbox-attacker: no attempt '%s'\n", name.c_str());
  return 2;
}
