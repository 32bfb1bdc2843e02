// `temper doctor`, the plan and the refusal of `temper run`, where something is really missing: a filter as a container's default
// profile has it, no capabilities, no user namespaces left, a chroot, no cgroups. Causes that this machine cannot show (settings
// of other distributions) are given to the pure part.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <functional>

#include "common/file.h"
#include "common/json.h"
#include "sandbox/needs.h"

namespace temper {
namespace {

using sandbox::Need;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

const char kTemper[] = TEMPER_BUILD_DIR "/temper";

struct Answer {
  int exit_code = -1;
  std::string out;  // and the errors
};

// `condition` runs in the child before the program, and may not allocate what the parent's threads hold (there are none).
Answer Temper(const std::vector<std::string>& words, const std::function<bool()>& condition = nullptr,
              const std::function<void(pid_t)>& beside = nullptr) {
  int ends[2], ready[2], go[2];
  EXPECT_EQ(pipe2(ends, O_CLOEXEC) | pipe2(ready, O_CLOEXEC) | pipe2(go, O_CLOEXEC), 0);
  const pid_t pid = fork();
  if (pid == 0) {
    dup2(ends[1], 1);
    dup2(ends[1], 2);
    char c = 'x';
    if (beside) {
      // A user namespace of this test's own, whose map the parent writes.
      if (unshare(CLONE_NEWUSER) != 0 || write(ready[1], &c, 1) != 1 || read(go[0], &c, 1) != 1) _exit(101);
    }
    if (condition && !condition()) _exit(100);
    std::vector<const char*> argv = {kTemper};
    for (const std::string& word : words) argv.push_back(word.c_str());
    argv.push_back(nullptr);
    execv(kTemper, const_cast<char* const*>(argv.data()));
    _exit(102);
  }
  Fd from(ends[0]), ready_read(ready[0]), go_write(go[1]);
  for (int fd : {ends[1], ready[1], go[0]}) close(fd);
  char c;
  if (beside && read(ready_read.get(), &c, 1) == 1) {
    beside(pid);
    EXPECT_EQ(write(go_write.get(), "x", 1), 1);
  }
  Answer answer;
  auto text = ReadAll(from.get(), 1 << 20);
  answer.out = text.ok() ? *text : "";
  int status = 0;
  waitpid(pid, &status, 0);
  answer.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 1000;
  return answer;
}

// The state of a field in `temper doctor --json`.
std::string State(const Answer& answer, const std::string& field, const std::string& part = "state") {
  auto value = ParseJson(answer.out);
  if (!value.ok()) return "no JSON: " + answer.out;
  for (const json::value& need : value->as_object().at("needs").as_array()) {
    if (need.as_object().at("field").as_string() == field.c_str()) return std::string(need.as_object().at(part).as_string());
  }
  return "(not tried)";
}

std::string RunFolder() { return ::testing::TempDir() + "temper-doctor-run-" + std::to_string(getpid()); }

// In one condition: doctor says `field` is missing with `words`, exits 1; the dry run's plan has the same words; the run is
// refused with the same words before anything is made.
void ExpectRefused(const std::string& field, const std::vector<std::string>& words, const std::function<bool()>& condition,
                   const std::function<void(pid_t)>& beside = nullptr) {
  const Answer doctor = Temper({"doctor", "--json"}, condition, beside);
  EXPECT_EQ(doctor.exit_code, 1) << doctor.out;
  EXPECT_EQ(State(doctor, field), "missing") << doctor.out;
  EXPECT_EQ(State(doctor, "sandbox"), "(not tried)");
  const std::string found = State(doctor, field, "found"), cure = State(doctor, field, "cure");
  for (const std::string& word : words) EXPECT_THAT(found + " " + cure, HasSubstr(word));
  const Answer text = Temper({"doctor"}, condition, beside);
  EXPECT_EQ(text.exit_code, 1);
  EXPECT_THAT(text.out, AllOf(HasSubstr("MISSING"), HasSubstr("no job can run here: "), HasSubstr(field), HasSubstr(found),
                              HasSubstr(cure)));
  const std::string job = TEMPER_SOURCE_DIR "/configs/smoke.yaml";
  const Answer dry = Temper({"run", job, "--dry-run"}, condition, beside);
  EXPECT_EQ(dry.exit_code, 0) << dry.out;
  EXPECT_THAT(dry.out, AllOf(HasSubstr("missing"), HasSubstr(found), HasSubstr(cure)));
  const Answer run = Temper({"run", job, "--out", RunFolder()}, condition, beside);
  EXPECT_EQ(run.exit_code, 1) << run.out;
  EXPECT_THAT(run.out, AllOf(HasSubstr(field + ": " + found), HasSubstr(cure)));
  EXPECT_FALSE(Exists(RunFolder()));
  const Answer door = Temper({"sandbox", "run", "--", "true"}, condition, beside);
  EXPECT_EQ(door.exit_code, 1) << door.out;
  EXPECT_THAT(door.out, HasSubstr(cure));
}

// What a container's default profile refuses to those without CAP_SYS_ADMIN.
bool DefaultProfile() {
  std::vector<sock_filter> code;
  auto add = [&](uint16_t op, uint32_t k, uint8_t yes = 0, uint8_t no = 0) { code.push_back(sock_filter{op, yes, no, k}); };
  auto refuse = [&](int call, int error) {
    add(BPF_JMP | BPF_JEQ | BPF_K, static_cast<uint32_t>(call), 0, 1);
    add(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<uint32_t>(error));
  };
  add(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr));
  for (int call : {SYS_unshare, SYS_mount, SYS_umount2, SYS_pivot_root, SYS_setns, SYS_open_tree, SYS_move_mount, SYS_fsopen,
                   SYS_fsconfig, SYS_fsmount, SYS_fspick, SYS_mount_setattr}) {
    refuse(call, EPERM);
  }
  refuse(SYS_clone3, ENOSYS);
  add(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone, 0, 3);
  add(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args));
  add(BPF_JMP | BPF_JSET | BPF_K, 0x7e020000, 0, 1);
  add(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM);
  add(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
  sock_fprog program = {static_cast<unsigned short>(code.size()), code.data()};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program) == 0;
}

// Keeps what a container's root has by default.
bool DefaultCapabilities() {
  const uint64_t keep = 1ull << CAP_CHOWN | 1ull << CAP_DAC_OVERRIDE | 1ull << CAP_FOWNER | 1ull << CAP_FSETID |
                        1ull << CAP_KILL | 1ull << CAP_SETGID | 1ull << CAP_SETUID | 1ull << CAP_SETPCAP |
                        1ull << CAP_NET_BIND_SERVICE | 1ull << CAP_NET_RAW | 1ull << CAP_SYS_CHROOT | 1ull << CAP_MKNOD |
                        1ull << CAP_AUDIT_WRITE | 1ull << CAP_SETFCAP;
  for (int bit = 0; bit <= 40; ++bit) {
    if (!(keep >> bit & 1) && prctl(PR_CAPBSET_DROP, bit, 0, 0, 0) != 0 && errno != EINVAL) return false;
  }
  return true;  // they are gone after exec
}

bool PrivateMounts() { return unshare(CLONE_NEWNS) == 0 && mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0; }

// Another user, who may yet read what is only root's: a checkout may lie below a home that nobody else can enter.
bool Nobody() {
  if (prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0) != 0 || setgid(65534) != 0 || setuid(65534) != 0) return false;
  __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct data[2] = {};
  data[0].effective = data[0].permitted = data[0].inheritable = 1u << CAP_DAC_READ_SEARCH;
  return syscall(SYS_capset, &header, data) == 0 && prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_DAC_READ_SEARCH, 0, 0) == 0;
}

// The control: on the machine as it is, everything works, and the report says so.
TEST(Doctor, OnThisMachineJobsCanRun) {
  const Answer text = Temper({"doctor"}), as_json = Temper({"doctor", "--json"});
  EXPECT_EQ(text.exit_code, 0) << text.out;
  EXPECT_THAT(text.out, AllOf(HasSubstr("jobs can run here"), Not(HasSubstr("MISSING"))));
  for (const char* field : {"cpu",   "cores",      "memory",   "shared_memory",   "open_files", "temporary_folder", "disk",
                            "ports", "models",     "root",     "user_namespaces", "user_ids",   "namespaces",       "mounts",
                            "proc",  "pivot_root", "loopback", "seccomp",         "cgroups",    "sandbox"}) {
    EXPECT_THAT(text.out, HasSubstr(std::string("  ") + field + " ")) << field;
    EXPECT_THAT(State(as_json, field), ::testing::AnyOf("ok", "limited")) << field;
  }
  EXPECT_THAT(State(as_json, "sandbox", "found"), HasSubstr("memory by "));
  const Answer job = Temper({"doctor", TEMPER_SOURCE_DIR "/configs/smoke.yaml"});
  EXPECT_EQ(job.exit_code, 0) << job.out;
  EXPECT_THAT(job.out, AllOf(HasSubstr("can be planned"), HasSubstr("  training ")));
  EXPECT_EQ(Temper({"doctor", "nowhere.yaml"}).exit_code, 2);
  EXPECT_EQ(Temper({"doctor", "--jsn"}).exit_code, 2);
}

// Jobs run from a folder that nobody can write, with --out elsewhere: it is no reason to say that none can.
TEST(Doctor, AFolderThatCannotBeWritten) {
  const Answer doctor = Temper({"doctor", "--json"}, [] { return chdir("/proc/self") == 0; });
  EXPECT_EQ(doctor.exit_code, 0) << doctor.out;
  EXPECT_EQ(State(doctor, "disk"), "limited") << doctor.out;
  EXPECT_EQ(State(doctor, "disk", "cost"), "no run folder can be made here");
}

TEST(Doctor, AContainersDefaultProfile) {
  ExpectRefused("user_namespaces", {"EPERM", "seccomp filter", "--security-opt seccomp=unconfined", "--privileged"},
                &DefaultProfile);
  const Answer doctor = Temper({"doctor", "--json"}, &DefaultProfile);
  for (const char* field : {"namespaces", "mounts", "proc", "pivot_root", "loopback"})
    EXPECT_EQ(State(doctor, field), "missing") << field;
  EXPECT_EQ(State(doctor, "root"), "ok");
  EXPECT_EQ(State(doctor, "seccomp"), "ok");
}

TEST(Doctor, AContainersDefaultCapabilities) {
  ExpectRefused("root", {"CAP_SYS_ADMIN", "CAP_NET_ADMIN", "--cap-add SYS_ADMIN", "--privileged"}, &DefaultCapabilities);
  ExpectRefused("root", {"not root", "sudo"}, &Nobody);
}

TEST(Doctor, NoUserNamespacesLeft) {
  // In a user namespace of its own, whose limit is its own: the machine's is not touched.
  struct stat outside;
  ASSERT_EQ(stat("/proc/self/ns/user", &outside), 0);
  auto all_ids = [](pid_t pid) {
    for (const char* file : {"/uid_map", "/gid_map"}) {
      Fd fd(open(("/proc/" + std::to_string(pid) + file).c_str(), O_WRONLY));
      EXPECT_GT(write(fd.get(), "0 0 4294967295", 14), 0);
    }
  };
  ExpectRefused(
      "user_namespaces", {"ENOSPC", "user.max_user_namespaces is 0", "sysctl -w user.max_user_namespaces=15000"},
      [outside] {
        struct stat inside;
        if (stat("/proc/self/ns/user", &inside) != 0 || inside.st_ino == outside.st_ino) return false;
        const int fd = open("/proc/sys/user/max_user_namespaces", O_WRONLY | O_CLOEXEC);
        return fd >= 0 && write(fd, "0", 1) == 1;
      },
      all_ids);
  // A rootless container: root, and the ids of one user only.
  auto one_id = [](pid_t pid) {
    for (const char* file : {"/uid_map", "/gid_map"}) {
      Fd fd(open(("/proc/" + std::to_string(pid) + file).c_str(), O_WRONLY));
      EXPECT_GT(write(fd.get(), "0 0 1", 5), 0);
    }
  };
  ExpectRefused(
      "user_ids", {"rootless", "podman with sudo"}, [] { return true; }, one_id);
}

TEST(Doctor, AChroot) {
  // A folder with the machine's folders in it, and the machine's root bound elsewhere: only the first is no mount.
  for (bool is_mount : {false, true}) {
    const std::string folder = ::testing::TempDir() + "temper-doctor-chroot-" + std::to_string(getpid());
    ASSERT_TRUE(MakeDirs(folder).ok());
    ExpectRefused("user_namespaces", {"EPERM", "this is a chroot", "pivot_root"}, [&] {
      if (!PrivateMounts()) return false;
      if (is_mount) {
        if (mount("/", folder.c_str(), nullptr, MS_BIND | MS_REC, nullptr) != 0) return false;
      } else {
        if (mount("x", ::testing::TempDir().c_str(), "tmpfs", 0, nullptr) != 0 && errno != EBUSY) return false;
        if (!MakeDirs(folder).ok()) return false;
        const auto names = ListDir("/");
        for (const std::string& name : *names) {
          struct stat s;
          const std::string from = "/" + name, to = folder + from;
          if (lstat(from.c_str(), &s) != 0) continue;
          if (S_ISLNK(s.st_mode)) {
            char target[4096] = {};
            if (readlink(from.c_str(), target, sizeof target - 1) > 0 && symlink(target, to.c_str()) != 0) return false;
          } else if (S_ISDIR(s.st_mode) && name != "tmp") {
            if (mkdir(to.c_str(), 0755) != 0 || mount(from.c_str(), to.c_str(), nullptr, MS_BIND | MS_REC, nullptr) != 0)
              return false;
          }
        }
        if (mkdir((folder + "/tmp").c_str(), 01777) != 0) return false;
      }
      return chroot(folder.c_str()) == 0 && chdir("/") == 0;
    });
    ASSERT_TRUE(RemoveAll(folder).ok());
  }
}

// Without cgroups jobs run, with limits: exit code 0, and what that costs; a mode asked for by name is refused.
TEST(Doctor, NoCgroups) {
  auto unmounted = [] { return PrivateMounts() && umount2("/sys/fs/cgroup", MNT_DETACH) == 0; };
  const Answer doctor = Temper({"doctor", "--json"}, unmounted);
  EXPECT_EQ(doctor.exit_code, 0) << doctor.out;
  EXPECT_EQ(State(doctor, "cgroups"), "limited");
  EXPECT_THAT(State(doctor, "cgroups", "found"), HasSubstr("no hierarchy is mounted"));
  EXPECT_THAT(State(doctor, "cgroups", "cost"), HasSubstr("address space of each process"));
  EXPECT_THAT(State(doctor, "cgroups", "cure"), HasSubstr("mount -t cgroup2"));
  EXPECT_THAT(State(doctor, "sandbox", "found"), HasSubstr("memory by rlimit, processes by rlimit, cpu_s by rlimit"));
  EXPECT_THAT(Temper({"doctor"}, unmounted).out, HasSubstr("jobs can run here, with limits: cgroups"));
  const std::string job = TEMPER_SOURCE_DIR "/configs/smoke.yaml";
  const Answer dry = Temper({"run", job, "--dry-run"}, unmounted);
  EXPECT_THAT(dry.out, AllOf(HasSubstr("limited"), HasSubstr(State(doctor, "cgroups", "cost"))));
  const Answer named = Temper({"run", job, "--set", "sandbox.cgroups=hybrid", "--out", RunFolder()}, unmounted);
  EXPECT_EQ(named.exit_code, 1) << named.out;
  EXPECT_THAT(named.out, AllOf(HasSubstr("cgroup mode hybrid does not work here"), HasSubstr("leave `sandbox.cgroups` at auto")));
  EXPECT_FALSE(Exists(RunFolder()));
}

// Settings of other machines, and how our own group can be.
TEST(Needs, CausesThatOtherMachinesHave) {
  sandbox::Surroundings s;
  auto says = [](const Need& need, const std::string& found, const std::string& cure) {
    EXPECT_EQ(need.state, Need::State::kMissing);
    EXPECT_THAT(need.found, HasSubstr(found));
    EXPECT_THAT(need.cure, HasSubstr(cure));
    EXPECT_THAT(need.cost, HasSubstr("no job runs here"));
  };
  EXPECT_EQ(sandbox::ExplainUserNamespaces(0, s).state, Need::State::kOk);
  s.unprivileged_userns_clone = 0;
  says(sandbox::ExplainUserNamespaces(EPERM, s), "kernel.unprivileged_userns_clone is 0",
       "sysctl -w kernel.unprivileged_userns_clone=1");
  s = {};
  s.apparmor_restrict = 1;
  says(sandbox::ExplainUserNamespaces(EACCES, s), "apparmor_restrict_unprivileged_userns is 1",
       "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0");
  s = {};
  says(sandbox::ExplainUserNamespaces(EPERM, s), "security module", "dmesg");
  says(sandbox::ExplainUserNamespaces(EINVAL, s), "kernel does not have it", "Linux 5.14");
  s.capabilities = 0;
  says(sandbox::ExplainNamespaces({"pid"}, EPERM, s), "unshare of pid: EPERM, this process lacks CAP_SYS_ADMIN", "--privileged");
  says(sandbox::ExplainStep("loopback", "loopback up", EPERM, s), "CAP_NET_ADMIN", "--cap-add NET_ADMIN");
  s = {};
  says(sandbox::ExplainStep("mounts", "mknod of a device", EPERM, s), "user namespace", "rootless");
  EXPECT_TRUE(sandbox::MissingNeeds({sandbox::ExplainUserNamespaces(0, s)}).ok());

  auto cgroups = [](const std::string& mounts, bool busy) { return sandbox::ExplainCgroups("none", "why", mounts, false, busy); };
  EXPECT_THAT(cgroups("1 2 0:1 / /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw\n", false).found, HasSubstr("read-only"));
  EXPECT_THAT(cgroups("1 2 0:1 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup rw\n", true).cure, HasSubstr("Delegate=yes"));
  EXPECT_THAT(cgroups("1 2 0:1 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup rw\n", false).found, HasSubstr("why"));
  EXPECT_EQ(sandbox::ExplainCgroups("v2", "", "", true, false).state, Need::State::kOk);
  const Need no_cpu = sandbox::ExplainCgroups("hybrid", "", "", false, false);
  EXPECT_EQ(no_cpu.state, Need::State::kLimited);
  EXPECT_THAT(no_cpu.cost, HasSubstr("cpu_s"));
}

}  // namespace
}  // namespace temper
