#include "sandbox/needs.h"

#include <fcntl.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <linux/securebits.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <utility>

#include "common/file.h"
#include "common/strings.h"
#include "sandbox/cgroup.h"
#include "sandbox/seccomp.h"

namespace temper::sandbox {
namespace {

constexpr char kNoSandbox[] = "no sandbox can be made, so no job runs here";
constexpr char kUnconfined[] =
    "start the container with `--privileged`, or with `--security-opt seccomp=unconfined --security-opt apparmor=unconfined "
    "--cap-add SYS_ADMIN --cap-add NET_ADMIN` (docker, podman); Kubernetes: `securityContext: {privileged: true}`";
constexpr char kPivot[] =
    "enter the folder with pivot_root in a mount namespace instead of chroot, as systemd-nspawn and tests/bare_machine.sh do";
constexpr std::pair<int, const char*> kCapabilities[] = {{CAP_CHOWN, "CHOWN"},         {CAP_DAC_OVERRIDE, "DAC_OVERRIDE"},
                                                         {CAP_FOWNER, "FOWNER"},       {CAP_KILL, "KILL"},
                                                         {CAP_SETGID, "SETGID"},       {CAP_SETUID, "SETUID"},
                                                         {CAP_SETPCAP, "SETPCAP"},     {CAP_NET_ADMIN, "NET_ADMIN"},
                                                         {CAP_SYS_ADMIN, "SYS_ADMIN"}, {CAP_MKNOD, "MKNOD"}};

bool Has(const Surroundings& s, int capability) { return s.capabilities >> capability & 1; }

std::string ErrorName(int error) {
  const char* name = strerrorname_np(error);
  return name ? name : std::to_string(error);
}

Need Fine(const std::string& field, const std::string& found) { return Need{field, Need::State::kOk, found, "", ""}; }
Need Missing(const std::string& field, const std::string& found, const std::string& cure) {
  return Need{field, Need::State::kMissing, found, kNoSandbox, cure};
}

// Why a privileged call is refused and what to do, where nothing special to the call explains it.
std::pair<std::string, std::string> WhyRefused(int error, const Surroundings& s) {
  if (s.seccomp && (error == EPERM || error == ENOSYS))
    return {"a seccomp filter stands over this process, as a container's default profile does", kUnconfined};
  if (error == EPERM && !Has(s, CAP_SYS_ADMIN)) return {"this process lacks CAP_SYS_ADMIN", kUnconfined};
  if (error == ENOSYS || error == EINVAL)
    return {"this kernel does not have it", "Linux 5.14 or newer with namespaces, as Debian 12 has"};
  if (error == EPERM || error == EACCES)
    return {"the kernel or a security module refuses it", std::string("look into `dmesg`; in a container: ") + kUnconfined};
  return {strerror(error), "look into `dmesg`"};
}

std::string Take(const std::string& path) {
  auto text = ReadFile(path, 16 << 20);
  return text.ok() ? std::move(*text) : std::string();
}

std::optional<int64_t> NumberOf(const char* path) {
  auto text = ReadFile(path, 100);
  int64_t value;
  if (!text.ok() || !ParseInt(Trim(*text), &value)) return std::nullopt;
  return value;
}

// A field of a table such as /proc/self/status: "KEY:\tVALUE".
std::string Field(const std::string& text, const std::string& key) {
  for (const std::string& line : Split(text, '\n')) {
    if (line.rfind(key + ":", 0) == 0) return std::string(Trim(line.substr(key.size() + 1)));
  }
  return "";
}

// --- trying: each in a child, which says over a pipe which step failed how ---

struct Failure {
  int error = 0;
  char step[60] = {};
};

// The child's part: Try{fd}.Fail("mount tmpfs") tells and ends it; returning from `body` is success.
struct Teller {
  int fd;
  [[noreturn]] void Fail(const char* step) const {
    Failure failure;
    failure.error = errno;
    strncpy(failure.step, step, sizeof failure.step - 1);
    const bool told = write(fd, &failure, sizeof failure) == sizeof failure;
    _exit(told ? 1 : 2);
  }
};

Failure InChild(const std::function<void(const Teller&)>& body, const std::function<int(pid_t)>& beside = nullptr) {
  int ends[2], go[2];
  Failure failure;
  auto broken = [&](const char* step) {
    failure.error = errno;
    strncpy(failure.step, step, sizeof failure.step - 1);
    return failure;
  };
  if (pipe2(ends, O_CLOEXEC) != 0) return broken("pipe");
  Fd from(ends[0]), to(ends[1]);
  if (pipe2(go, O_CLOEXEC) != 0) return broken("pipe");
  Fd go_read(go[0]), go_write(go[1]);
  const pid_t pid = fork();
  if (pid < 0) return broken("fork");
  if (pid == 0) {
    go_write.Reset();
    body(Teller{to.get()});
    Failure done;
    const bool told = write(to.get(), &done, sizeof done) == sizeof done;
    char c;
    if (beside && told && read(go_read.get(), &c, 1) < 0) _exit(3);
    _exit(told ? 0 : 2);
  }
  to.Reset();
  if (read(from.get(), &failure, sizeof failure) != sizeof failure) {
    failure.error = ECHILD;
    strcpy(failure.step, "died while trying");
  }
  if (failure.error == 0 && beside) {
    failure.error = beside(pid);
    strcpy(failure.step, "write uid_map");
  }
  go_write.Reset();
  while (waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
  }
  return failure;
}

constexpr uint32_t kTriedUser = 0x0fff0000;  // below the range that janitors take

// As the janitor makes them (janitor_loop.cpp).
void TryUserNamespace(const Surroundings& s, std::vector<Need>* needs) {
  const Failure failure = InChild(
      [](const Teller& t) {
        if (prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP, 0, 0, 0) != 0 || syscall(SYS_setresuid, -1, kTriedUser, -1) != 0)
          t.Fail("setresuid");
        if (unshare(CLONE_NEWUSER) != 0) t.Fail("unshare");
      },
      [](pid_t pid) {
        const std::string map = "0 " + std::to_string(kTriedUser) + " 65536";
        for (const char* file : {"/uid_map", "/gid_map"}) {
          Fd fd(open(("/proc/" + std::to_string(pid) + file).c_str(), O_WRONLY | O_CLOEXEC));
          if (!fd.valid() || write(fd.get(), map.data(), map.size()) < 0) return errno;
        }
        return 0;
      });
  const std::string step = failure.step;
  if (failure.error == 0) {
    needs->push_back(ExplainUserNamespaces(0, s));
    needs->push_back(ExplainUserIds(0, s));
    return;
  }
  if (step == "unshare") {
    needs->push_back(ExplainUserNamespaces(failure.error, s));
    return;
  }
  // The ids are what is missing; whether there are namespaces is another question.
  needs->push_back(ExplainUserNamespaces(InChild([](const Teller& t) {
                                           if (unshare(CLONE_NEWUSER) != 0) t.Fail("unshare");
                                         }).error,
                                         s));
  needs->push_back(ExplainUserIds(failure.error, s));
}

void TryNamespaces(const Surroundings& s, std::vector<Need>* needs) {
  std::vector<std::string> refused;
  int error = 0;
  for (const auto& [name, flag] : {std::pair{"mount", CLONE_NEWNS},
                                   {"pid", CLONE_NEWPID},
                                   {"network", CLONE_NEWNET},
                                   {"ipc", CLONE_NEWIPC},
                                   {"uts", CLONE_NEWUTS},
                                   {"cgroup", CLONE_NEWCGROUP}}) {
    const Failure failure = InChild([flag = flag](const Teller& t) {
      if (unshare(flag) != 0) t.Fail("unshare");
    });
    if (failure.error == 0) continue;
    refused.emplace_back(name);
    error = failure.error;
  }
  needs->push_back(ExplainNamespaces(refused, error, s));
}

// The mounts of a sandbox in small: a tmpfs with a device, a read-only view, /proc of a new pid namespace, and the change of
// root.
void TryMounts(const Surroundings& s, std::vector<Need>* needs) {
  std::string base;
  for (const char* place : {"/sys/kernel", "/sys", "/mnt", "/srv", "/media"}) {
    if (base.empty() && IsDirectory(place)) base = place;
  }
  const std::string device = base + "/null", view = base + "/usr", proc = base + "/proc";
  const Failure mounts = InChild([&](const Teller& t) {
    if (unshare(CLONE_NEWNS) != 0) t.Fail("private mounts");
    if (mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) t.Fail("private mounts");
    if (mount("temper", base.c_str(), "tmpfs", MS_NOSUID, "mode=0755,size=1m") != 0) t.Fail("mount a tmpfs");
    if (mknod(device.c_str(), S_IFCHR | 0666, makedev(1, 3)) != 0) t.Fail("mknod of a device");
    if (mkdir(view.c_str(), 0755) != 0) t.Fail("mkdir");
    const int tree = open_tree(AT_FDCWD, "/usr", OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_RECURSIVE);
    if (tree < 0) t.Fail("open_tree");
    mount_attr attr = {};
    attr.attr_set = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID;
    if (mount_setattr(tree, "", AT_EMPTY_PATH | AT_RECURSIVE, &attr, sizeof attr) != 0) t.Fail("mount_setattr");
    if (move_mount(tree, "", AT_FDCWD, view.c_str(), MOVE_MOUNT_F_EMPTY_PATH) != 0) t.Fail("move_mount");
    const int fs = fsopen("tmpfs", FSOPEN_CLOEXEC);
    if (fs < 0 || fsconfig(fs, FSCONFIG_CMD_CREATE, nullptr, nullptr, 0) != 0 || fsmount(fs, FSMOUNT_CLOEXEC, 0) < 0)
      t.Fail("fsopen of a tmpfs");
  });
  needs->push_back(ExplainStep("mounts", mounts.step, mounts.error, s));
  // In a pid namespace of its own, whose first process mounts its /proc.
  auto inner = [&](const Teller& t, const std::function<void()>& last) {
    if (unshare(CLONE_NEWNS | CLONE_NEWPID) != 0 || mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        mount("temper", base.c_str(), "tmpfs", MS_NOSUID, "mode=0755,size=1m") != 0 || mkdir(proc.c_str(), 0755) != 0) {
      t.Fail("private mounts");
    }
    const pid_t pid = fork();
    if (pid < 0) t.Fail("fork");
    if (pid == 0) {
      last();
      _exit(0);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    // Its failure has been told; a second one would be read by nobody.
    if (status != 0) _exit(1);
  };
  const Failure of_proc = InChild([&](const Teller& t) {
    inner(t, [&] {
      if (mount("proc", proc.c_str(), "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "hidepid=2") != 0) t.Fail("mount /proc");
    });
  });
  needs->push_back(ExplainStep("proc", of_proc.step, of_proc.error, s));
  const Failure pivot = InChild([&](const Teller& t) {
    inner(t, [&] {
      if (chdir(base.c_str()) != 0 || syscall(SYS_pivot_root, ".", ".") != 0) t.Fail("pivot_root");
      if (umount2(".", MNT_DETACH) != 0) t.Fail("umount of the old root");
    });
  });
  needs->push_back(ExplainStep("pivot_root", pivot.step, pivot.error, s));
}

void TryLoopback(const Surroundings& s, std::vector<Need>* needs) {
  const Failure failure = InChild([](const Teller& t) {
    if (unshare(CLONE_NEWNET) != 0) t.Fail("network namespace");
    const int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    ifreq request = {};
    strcpy(request.ifr_name, "lo");
    request.ifr_flags = IFF_UP | IFF_RUNNING;
    if (fd < 0 || ioctl(fd, SIOCSIFFLAGS, &request) != 0) t.Fail("loopback up");
  });
  needs->push_back(ExplainStep("loopback", failure.step, failure.error, s));
}

void TrySeccomp(const Surroundings& s, std::vector<Need>* needs) {
  auto filter = CompileSeccompFilter();
  if (!filter.ok()) {
    needs->push_back(Missing("seccomp", filter.status().message(), "install libseccomp 2.5 or newer"));
    return;
  }
  const Failure failure = InChild([&](const Teller& t) {
    sock_fprog program = {static_cast<unsigned short>(filter->size() / sizeof(sock_filter)),
                          reinterpret_cast<sock_filter*>(filter->data())};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) t.Fail("no_new_privs");
    if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program) != 0) t.Fail("seccomp filter");
    if (sethostname("x", 1) == 0) t.Fail("the filter holds nothing");
  });
  needs->push_back(ExplainStep("seccomp", failure.step, failure.error, s));
}

void TryCgroups(CgroupMode asked, std::vector<Need>* needs) {
  const std::string mountinfo = Take("/proc/self/mountinfo"),
                    own = Take("/proc/self/cgroup");
  const std::string job = "temper-" + std::to_string(getpid()) + "." + PidNamespaceTag() + "-doctor";
  auto tree = CgroupTree::Open(asked, job);
  if (!tree.ok()) {
    needs->push_back(
        Missing("cgroups", tree.status().message(), "leave `sandbox.cgroups` at auto, or mount that hierarchy writable"));
    return;
  }
  auto group = tree->Make("s0");
  const bool counted = group.ok() && group->counters.cpu.valid();
  if (group.ok()) tree->Remove(*group);
  tree->RemoveAll(1);
  const CgroupBases bases = ParseCgroupBases(mountinfo, own);
  const std::string v2 = bases.v2;
  const std::string given = v2.empty() ? "" : Take(v2 + "/cgroup.controllers");
  const bool busy = given.find("memory") != std::string::npos && !Take(v2 + "/cgroup.procs").empty();
  const char* mode = tree->mode() == CgroupMode::kV2 ? "v2" : tree->mode() == CgroupMode::kHybrid ? "hybrid" : "none";
  needs->push_back(ExplainCgroups(mode, tree->why(), mountinfo, counted, busy));
}

// Who leaves a root by the back door stands above it: `..` stops at the root only for those who are below it.
bool InChroot() {
  struct Place {
    uint64_t mount, inode;
  };
  const Failure failure = InChild([](const Teller& t) {
    auto place = [&](int folder, const char* name) {
      struct statx st;
      if (statx(folder, name, AT_NO_AUTOMOUNT, STATX_INO | STATX_MNT_ID, &st) != 0) _exit(0);
      return Place{st.stx_mnt_id, st.stx_ino};
    };
    const int root = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const Place before = place(AT_FDCWD, "/");
    if (root < 0 || (chroot("/usr") != 0 && chroot("/proc") != 0) || fchdir(root) != 0) return;
    for (int i = 0; i < 100; ++i) {
      if (chdir("..") != 0) return;
    }
    const Place after = place(AT_FDCWD, ".");
    if (after.mount != before.mount || after.inode != before.inode) {
      errno = EXDEV;
      t.Fail("above the root");
    }
  });
  return failure.error == EXDEV;
}

}  // namespace

const char* Name(Need::State state) {
  return state == Need::State::kOk ? "ok" : state == Need::State::kLimited ? "limited" : "missing";
}

std::string Sentence(const Need& need) {
  std::string text = need.field + ": " + need.found;
  if (!need.cost.empty()) text += "; " + need.cost;
  if (!need.cure.empty()) text += ". Cure: " + need.cure;
  return text;
}

Status MissingNeeds(const std::vector<Need>& needs) {
  std::string text;
  for (const Need& need : needs) {
    if (need.state == Need::State::kMissing) text += "\n  " + Sentence(need);
  }
  return text.empty() ? Status::Ok()
                      : FailedPrecondition("sandboxes cannot be made on this machine (`temper doctor` shows all of it):" + text);
}

Surroundings LookAround() {
  Surroundings s;
  s.root = geteuid() == 0;
  const std::string status = Take("/proc/self/status");
  if (const std::string caps = Field(status, "CapEff"); !caps.empty()) s.capabilities = std::strtoull(caps.c_str(), nullptr, 16);
  s.seccomp = Field(status, "Seccomp") == "2";
  s.container = Exists("/.dockerenv") || Exists("/run/.containerenv");
  s.max_user_namespaces = NumberOf("/proc/sys/user/max_user_namespaces");
  s.unprivileged_userns_clone = NumberOf("/proc/sys/kernel/unprivileged_userns_clone");
  s.apparmor_restrict = NumberOf("/proc/sys/kernel/apparmor_restrict_unprivileged_userns");
  s.chroot = InChroot();
  return s;
}

Need ExplainRoot(const Surroundings& s) {
  if (!s.root)
    return Missing("root", "this process is not root, and only root may make what a sandbox is made of",
                   "run it with sudo, or as root of a container");
  std::string lacking, options;
  for (const auto& [bit, name] : kCapabilities) {
    if (Has(s, bit)) continue;
    lacking += std::string(lacking.empty() ? "" : ", ") + "CAP_" + name;
    options += std::string(" --cap-add ") + name;
  }
  if (lacking.empty()) return Fine("root", "with the capabilities that are needed");
  return Missing("root", "this root lacks " + lacking,
                 "start the container with `--privileged`, or with `--security-opt seccomp=unconfined" + options + "`");
}

Need ExplainUserNamespaces(int error, const Surroundings& s) {
  const std::string field = "user_namespaces", what = "unshare of a user namespace: " + ErrorName(error) + ", ";
  if (error == 0) return Fine(field, "can be made");
  if ((error == ENOSPC || error == EUSERS) && s.max_user_namespaces) {
    return Missing(field, what + "user.max_user_namespaces is " + std::to_string(*s.max_user_namespaces),
                   "`sysctl -w user.max_user_namespaces=15000`, and the same in /etc/sysctl.d to keep it");
  }
  if (s.seccomp && (error == EPERM || error == ENOSYS)) {
    const auto [why, cure] = WhyRefused(error, s);
    return Missing(field, what + why, cure);
  }
  if (error == EPERM && s.chroot) return Missing(field, what + "this is a chroot, in which the kernel refuses them", kPivot);
  if ((error == EPERM || error == EACCES) && s.unprivileged_userns_clone == 0) {
    return Missing(field, what + "kernel.unprivileged_userns_clone is 0", "`sysctl -w kernel.unprivileged_userns_clone=1`");
  }
  if ((error == EPERM || error == EACCES) && s.apparmor_restrict == 1) {
    return Missing(field, what + "kernel.apparmor_restrict_unprivileged_userns is 1",
                   "`sysctl -w kernel.apparmor_restrict_unprivileged_userns=0`");
  }
  const auto [why, cure] = WhyRefused(error, s);
  return Missing(field, what + why, cure);
}

Need ExplainUserIds(int error, const Surroundings& s) {
  if (error == 0) return Fine("user_ids", "ranges of 65536 ids from 268435456 on");
  (void)s;
  return Missing("user_ids",
                 "ids from 268435456 on: " + ErrorName(error) +
                     ", this user namespace does not have them (a rootless or remapped container)",
                 "run as root of the machine: podman with sudo, docker without `userns-remap`");
}

Need ExplainNamespaces(const std::vector<std::string>& refused, int error, const Surroundings& s) {
  if (refused.empty()) return Fine("namespaces", "mount, pid, network, ipc, uts, cgroup");
  const auto [why, cure] = WhyRefused(error, s);
  return Missing("namespaces", "unshare of " + Join(refused, ", ") + ": " + ErrorName(error) + ", " + why, cure);
}

Need ExplainStep(const std::string& field, const std::string& step, int error, const Surroundings& s) {
  if (error == 0) {
    return Fine(field, field == "mounts"       ? "tmpfs, devices, read-only views"
                       : field == "proc"       ? "of a new pid namespace"
                       : field == "pivot_root" ? "works"
                       : field == "loopback"   ? "in a network namespace"
                                               : "the filter is accepted and holds");
  }
  const std::string what = step + ": " + ErrorName(error) + ", ";
  if (field == "pivot_root" && s.chroot && !s.seccomp) return Missing(field, what + "this is a chroot", kPivot);
  if (field == "loopback" && error == EPERM && !s.seccomp && !Has(s, CAP_NET_ADMIN)) {
    return Missing(field, what + "this process lacks CAP_NET_ADMIN", kUnconfined);
  }
  if (step == "mknod of a device" && error == EPERM && Has(s, CAP_MKNOD)) {
    return Missing(field, what + "this is a user namespace, in which nobody may make devices",
                   "run as root of the machine, not of a rootless container");
  }
  const auto [why, cure] = WhyRefused(error, s);
  return Missing(field, what + why, cure);
}

Need ExplainCgroups(const std::string& mode, const std::string& why, const std::string& mountinfo, bool cpu_counted, bool busy) {
  Need need{"cgroups", Need::State::kOk, "", "", ""};
  if (mode != "none") {
    need.found = mode == "v2" ? "v2: memory, processes, processor time" : "hybrid: memory and processes by version 1";
    if (mode == "hybrid" && cpu_counted) need.found += ", processor time by version 2";
    if (!cpu_counted) {
      need.state = Need::State::kLimited;
      need.cost = "`cpu_s` is held for each process and not for the sandbox";
      need.cure = "mount version 2 beside it: `mount -t cgroup2 none /sys/fs/cgroup/unified`";
    }
    return need;
  }
  need.state = Need::State::kLimited;
  need.cost =
      "`memory` is held as the address space of each process and `processes` for each user (rlimit), `cpu_s` for each process, "
      "none of them for the "
      "sandbox as a whole; a job that is killed may leave what had left its roles' process groups";
  if (why == "asked for") {
    need.found = "none: asked for by `sandbox.cgroups: none`";
    need.cure = "`sandbox.cgroups: auto`";
    return need;
  }
  int mounted = 0, read_only = 0;
  bool v2 = false;
  for (const std::string& line : Split(mountinfo, '\n')) {
    const std::vector<std::string> f = Split(line, ' ');
    size_t dash = 0;
    while (dash < f.size() && f[dash] != "-") ++dash;
    if (f.size() < 6 || dash + 1 >= f.size() || f[dash + 1].rfind("cgroup", 0) != 0) continue;
    ++mounted;
    read_only += f[5].rfind("ro", 0) == 0;
    v2 |= f[dash + 1] == "cgroup2";
  }
  constexpr char kContainer[] = "in a container: `--privileged`, or `--cgroupns=private -v /sys/fs/cgroup:/sys/fs/cgroup:rw`";
  if (mounted == 0) {
    need.found = "none: no hierarchy is mounted";
    need.cure = std::string("`mount -t cgroup2 none /sys/fs/cgroup`; ") + kContainer;
  } else if (read_only == mounted) {
    need.found = "none: the hierarchies are mounted read-only";
    need.cure = std::string("mount them writable; ") + kContainer;
  } else if (busy) {
    need.found = "none: our own group of version 2 holds processes, so it cannot hand memory and pids to groups below it";
    need.cure =
        "start from a group that was handed to us: `systemd-run --scope -p Delegate=yes …`; in a container move its processes "
        "into a group below first";
  } else {
    need.found = "none: " + why;
    need.cure =
        v2 ? "hand memory and pids down: `systemd-run --scope -p Delegate=yes …`, or mount them as version 1" : kContainer;
  }
  return need;
}

std::vector<Need> TrySandboxNeeds(CgroupMode mode) {
  const Surroundings s = LookAround();
  std::vector<Need> needs = {ExplainRoot(s)};
  // Everything else would only repeat it.
  if (!s.root) return needs;
  TryUserNamespace(s, &needs);
  TryNamespaces(s, &needs);
  TryMounts(s, &needs);
  TryLoopback(s, &needs);
  TrySeccomp(s, &needs);
  TryCgroups(mode, &needs);
  return needs;
}

}  // namespace temper::sandbox
