#include "sandbox/seccomp.h"

#include <linux/sched.h>
#include <sched.h>
#include <seccomp.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/personality.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <memory>

#include "common/file.h"

namespace temper::sandbox {
namespace {

// Names that this version of libseccomp does not know are not in its kernel headers either and are skipped; clone3 and
// io_uring answer ENOSYS, for which callers have a fallback.
constexpr const char* kRefused[] = {
    "mount", "umount", "umount2", "pivot_root", "chroot", "move_mount", "open_tree", "fsopen", "fsconfig", "fsmount", "fspick",
    "mount_setattr", "ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "kcmp", "pidfd_getfd", "keyctl",
    "add_key", "request_key", "bpf", "perf_event_open", "kexec_load", "kexec_file_load", "init_module", "finit_module",
    "delete_module", "create_module", "query_module", "get_kernel_syms", "userfaultfd", "setns", "unshare", "open_by_handle_at", "name_to_handle_at", "swapon",
    "swapoff", "reboot", "quotactl", "quotactl_fd", "acct", "settimeofday", "stime", "clock_settime", "clock_adjtime", "adjtimex", "syslog",
    "memfd_secret", "fanotify_init", "fanotify_mark", "iopl", "ioperm", "modify_ldt", "lookup_dcookie", "vhangup", "sethostname",
    "setdomainname", "nfsservctl", "uselib", "_sysctl", "sysfs", "ustat", "vm86", "vm86old", "mbind", "migrate_pages", "move_pages",
};
constexpr const char* kAbsent[] = {"clone3", "io_uring_setup", "io_uring_enter", "io_uring_register"};

}  // namespace

Result<std::string> CompileSeccompFilter() {
  std::unique_ptr<void, decltype(&seccomp_release)> context(seccomp_init(SCMP_ACT_ALLOW), &seccomp_release);
  if (!context) return Internal("seccomp_init failed");
  scmp_filter_ctx c = context.get();
  int error = 0;
  auto add = [&](uint32_t action, int call, std::initializer_list<scmp_arg_cmp> arguments) {
    if (call == __NR_SCMP_ERROR || call < 0) return;
    int r = seccomp_rule_add_array(c, action, call, arguments.size(), arguments.begin());
    if (r != 0 && error == 0) error = r;
  };
  const uint32_t refuse = SCMP_ACT_ERRNO(EPERM);
  const uint32_t absent = SCMP_ACT_ERRNO(ENOSYS);
  const uint32_t no_family = SCMP_ACT_ERRNO(EAFNOSUPPORT);
  for (const char* name : kRefused) add(refuse, seccomp_syscall_resolve_name(name), {});
  for (const char* name : kAbsent) add(absent, seccomp_syscall_resolve_name(name), {});
  for (uint64_t bit : {CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET}) {
    bit &= 0xffffffff;
    add(refuse, SCMP_SYS(clone), {SCMP_A0(SCMP_CMP_MASKED_EQ, bit, bit)});
  }
  // Only the low 32 bits of a command or family count in the kernel: compares are masked, or refuse larger values too.
  for (uint64_t command : {TIOCSTI, 0x541c /* TIOCLINUX */}) {
    add(refuse, SCMP_SYS(ioctl), {SCMP_A1(SCMP_CMP_MASKED_EQ, 0xffffffff, command)});
  }
  for (uint64_t family = 0; family < AF_NETLINK; ++family) {
    if (family == AF_UNIX || family == AF_INET || family == AF_INET6) continue;
    add(no_family, SCMP_SYS(socket), {SCMP_A0(SCMP_CMP_EQ, family)});
  }
  add(no_family, SCMP_SYS(socket), {SCMP_A0(SCMP_CMP_GT, AF_NETLINK)});
  add(no_family, SCMP_SYS(socket), {SCMP_A0(SCMP_CMP_EQ, AF_NETLINK), SCMP_A2(SCMP_CMP_NE, 0 /* NETLINK_ROUTE */)});
  // Also refuses to tell the present personality (all bits set), which nobody but a debugger asks.
  for (uint64_t bit : {READ_IMPLIES_EXEC, MMAP_PAGE_ZERO, ADDR_COMPAT_LAYOUT}) {
    add(refuse, SCMP_SYS(personality), {SCMP_A0(SCMP_CMP_MASKED_EQ, bit, bit)});
  }
  if (error == 0) error = seccomp_attr_set(c, SCMP_FLTATR_ACT_BADARCH, SCMP_ACT_KILL_PROCESS);
  if (error == 0) error = seccomp_attr_set(c, SCMP_FLTATR_CTL_OPTIMIZE, 2);
  if (error != 0) return ErrnoStatus("seccomp filter", -error);
  Fd file(memfd_create("seccomp", MFD_CLOEXEC));
  if (!file.valid()) return ErrnoStatus("memfd_create", errno);
  if ((error = seccomp_export_bpf(c, file.get())) != 0) return ErrnoStatus("seccomp_export_bpf", -error);
  if (lseek(file.get(), 0, SEEK_SET) != 0) return ErrnoStatus("lseek", errno);
  return ReadAll(file.get(), 1 << 20);
}

}  // namespace temper::sandbox
