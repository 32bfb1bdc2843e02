#include "sandbox/janitor_loop.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/filter.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <linux/securebits.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "common/clock.h"
#include "common/rng.h"
#include "sandbox/cgroup.h"
#include "sandbox/init/protocol.h"
#include "sandbox/janitor_protocol.h"
#include "sandbox/packet.h"
#include "sandbox/root.h"
#include "sandbox/seccomp.h"

namespace temper::sandbox {
namespace {

constexpr uint32_t kIdsPerSlot = 65536;
constexpr double kSetupTimeoutS = 5;
// Proc files that tell about the host or other containers; the rest is guarded by not being the host's root.
constexpr const char* kMasked[] = {"proc/kallsyms", "proc/keys", "proc/key-users", "proc/timer_list", "proc/kcore", "proc/sysrq-trigger",
                                   "proc/kmsg", "proc/sched_debug"};

// What costs time to make and keeps nothing of a sandbox when all its processes are dead: a range of user ids with its
// namespace, a network namespace with loopback up, and cgroups. A slot belongs to one living sandbox at a time.
struct Slot {
  int index = 0;
  uint32_t host_uid = 0;
  Fd user_ns, net_ns;
  CgroupTree::Group group;
};

struct Box {
  pid_t pid = 0;
  std::unique_ptr<Slot> slot;
  bool dead = false;        // reaped
  uint32_t destroy_seq = 0; // to be answered when dead
};

Status Errno(const std::string& what) { return ErrnoStatus(what, errno); }

// The part of a sandbox's making that happens inside, before the init program: mounts and identity. Runs in the new
// process, as the host's root, in the new namespaces. Returns only on failure.
struct Setup {
  RootTemplates::Root root;
  int disk = -1;     // the sandbox's tmpfs, not yet attached; has work, tmp, shm
  int user_ns = -1;  // -1: stays the host's root (JanitorOptions::without)
  int control = -1, lifeline = -1, filter = -1;
  const std::vector<Fd>* enter = nullptr;

  Status Run() const {
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    for (const Fd& fd : *enter) {
      if (write(fd.get(), "0", 1) != 1) return Errno("enter cgroup");
    }
    // Only now, so that the cgroup namespace begins at the sandbox's own group.
    if (unshare(CLONE_NEWCGROUP) != 0) return Errno("unshare cgroup");
    for (const Mount& m : root.of_files) RETURN_IF_ERROR(BindReadOnly(m.source, root.path + m.target));
    if (chdir(root.path.c_str()) != 0) return Errno("chdir " + root.path);
    if (mount("proc", "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "hidepid=2") != 0) return Errno("mount /proc");
    for (const char* path : kMasked) {
      // Absent on kernels built without it.
      if (mount("dev/null", path, nullptr, MS_BIND, nullptr) != 0 && errno != ENOENT) return Errno(std::string("mask ") + path);
    }
    if (mount("proc/sys", "proc/sys", nullptr, MS_BIND, nullptr) != 0 ||
        mount(nullptr, "proc/sys", nullptr, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, nullptr) != 0) {
      return Errno("read-only /proc/sys");
    }
    if (move_mount(disk, "", AT_FDCWD, "temper/disk", MOVE_MOUNT_F_EMPTY_PATH) != 0) return Errno("mount the disk");
    for (auto [from, to] : {std::pair{"temper/disk/work", "work"}, {"temper/disk/tmp", "tmp"}, {"temper/disk/shm", "dev/shm"}}) {
      if (mount(from, to, nullptr, MS_BIND, nullptr) != 0) return Errno(std::string("mount /") + to);
    }
    if (umount2("temper/disk", MNT_DETACH) != 0) return Errno("umount disk");
    if (syscall(SYS_pivot_root, ".", ".") != 0) return Errno("pivot_root");
    if (umount2(".", MNT_DETACH) != 0 || chdir("/") != 0) return Errno("leave the host's root");
    if (sethostname("sandbox", 7) != 0) return Errno("sethostname");
    if (setsid() < 0) return Errno("setsid");
    if (user_ns >= 0 && setns(user_ns, CLONE_NEWUSER) != 0) return Errno("enter user namespace");
    if (setgroups(0, nullptr) != 0 || setresgid(0, 0, 0) != 0 || setresuid(0, 0, 0) != 0) return Errno("become the sandbox's root");
    // The change of user cleared it.
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    int high[3];
    for (int i = 0; i < 3; ++i) {
      high[i] = fcntl(i == 0 ? control : i == 1 ? lifeline : filter, F_DUPFD, 64);
      if (high[i] < 0) return Errno("dup");
    }
    int null = open("/dev/null", O_RDWR);
    for (int i = 0; i < 3; ++i) {
      if (null < 0 || dup2(null, i) < 0) return Errno("/dev/null");
    }
    // The report channel is close-on-exec and lies above: it stays until exec.
    const int order[] = {protocol::kControlFd, protocol::kLifelineFd, protocol::kFilterFd};
    for (int i = 0; i < 3; ++i) {
      if (dup2(high[i], order[i]) < 0) return Errno("dup2");
    }
    if (syscall(SYS_close_range, protocol::kFilterFd + 1, ~0u, CLOSE_RANGE_CLOEXEC) != 0) return Errno("close_range");
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, nullptr);
    for (int s : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGPIPE}) signal(s, SIG_DFL);
    char* const argv[] = {const_cast<char*>("temper-sandbox-init"), nullptr};
    char* const env[] = {nullptr};
    execve(protocol::kInitPath, argv, env);
    return Errno(std::string("exec ") + protocol::kInitPath);
  }
};

class Loop {
 public:
  Loop(JanitorProcessOptions options, CgroupTree tree) : options_(std::move(options)), tree_(std::move(tree)) {}

  Status Start() {
    int pipes[2];
    if (pipe2(pipes, O_CLOEXEC) != 0) return Errno("pipe");
    lifeline_read_ = Fd(pipes[0]);
    lifeline_write_ = Fd(pipes[1]);
    ASSIGN_OR_RETURN(std::string filter, CompileSeccompFilter());
    if (options_.janitor.without.seccomp) {
      const sock_filter allow = {BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW};
      filter.assign(reinterpret_cast<const char*>(&allow), sizeof allow);
    }
    filter_ = Fd(memfd_create("filter", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (!filter_.valid()) return Errno("memfd_create");
    RETURN_IF_ERROR(WriteAll(filter_.get(), filter));
    fcntl(filter_.get(), F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    // Mounts made here are seen by nobody else and go with this process.
    if (unshare(CLONE_NEWNS) != 0) return Errno("unshare mount namespace (is this root?)");
    if (mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) return Errno("private mounts");
    std::string base;
    for (const char* place : {"/sys/kernel", "/sys", "/mnt", "/srv", "/media"}) {
      if (base.empty() && IsDirectory(place)) base = place;
    }
    if (base.empty()) return FailedPrecondition("no folder to mount on: none of /sys, /mnt, /srv, /media exists");
    if (mount("temper", base.c_str(), "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=1m") != 0) return Errno("mount at " + base);
    roots_ = std::make_unique<RootTemplates>(base, options_.init);
    home_net_ = Fd(open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC));
    if (!home_net_.valid()) return Errno("/proc/self/ns/net");
    sigset_t set;
    sigemptyset(&set);
    for (int s : {SIGCHLD, SIGTERM}) sigaddset(&set, s);
    sigprocmask(SIG_BLOCK, &set, nullptr);
    signals_ = Fd(signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
    if (!signals_.valid()) return Errno("signalfd");
    // A range of ids away from those that people and other containers use; another job on the machine likely has another.
    uint64_t seed = Mix64(static_cast<uint64_t>(getpid()) ^ static_cast<uint64_t>(SystemClock::Get().WallS() * 1e6));
    first_id_ = 0x10000000u + static_cast<uint32_t>(Rng(seed).Below(48000)) * kIdsPerSlot;
    // Fails now rather than at the first sandbox when namespaces or root are missing.
    ASSIGN_OR_RETURN(std::unique_ptr<Slot> slot, TakeSlot());
    free_.push_back(std::move(slot));
    return Status::Ok();
  }

  // Until the lifeline ends.
  void Serve() {
    for (;;) {
      pollfd p[3] = {{options_.lifeline.get(), POLLIN, 0}, {signals_.get(), POLLIN, 0}, {options_.service.get(), POLLIN, 0}};
      if (!service_open_) p[2].fd = -1;
      if (poll(p, 3, -1) < 0) {
        if (errno == EINTR) continue;
        return;
      }
      if (p[1].revents) {
        signalfd_siginfo info;
        bool stop = false;
        while (read(signals_.get(), &info, sizeof info) == sizeof info) stop |= info.ssi_signo == SIGTERM;
        Reap();
        if (stop) return;
      }
      if (p[0].revents && !HandleOwner()) return;
      if (p[2].revents) HandleService();
    }
  }

  void CleanUp() {
    for (auto& [handle, box] : boxes_) KillBox(box);
    for (pid_t pid : enrolled_) {
      kill(-pid, SIGKILL);
      kill(pid, SIGKILL);
    }
    // What is in the tree's own groups, enrolled processes too.
    Clock& clock = SystemClock::Get();
    double end = clock.NowS() + 8;
    while (clock.NowS() < end) {
      Reap();
      if (std::all_of(boxes_.begin(), boxes_.end(), [](auto& b) { return b.second.dead; })) break;
      clock.SleepS(0.002);
    }
    boxes_.clear();
    free_.clear();
    tree_.RemoveAll(std::max(0.5, end - clock.NowS()));
  }

 private:
  bool HandleOwner() {
    for (;;) {
      auto packet = ReceivePacket(options_.lifeline.get());
      if (!packet.ok()) return packet.status().code() == StatusCode::kNotFound;
      uint32_t pid = 0, answer = 0;
      if (packet->bytes.size() == sizeof pid) {
        std::memcpy(&pid, packet->bytes.data(), sizeof pid);
        if (tree_.Enroll(static_cast<pid_t>(pid))) {
          answer = 1;
        } else if (kill(static_cast<pid_t>(pid), 0) == 0) {
          enrolled_.push_back(static_cast<pid_t>(pid));
          answer = 1;
        }
      }
      Status sent = SendPacket(options_.lifeline.get(), std::string_view(reinterpret_cast<char*>(&answer), sizeof answer));
      if (!sent.ok()) return false;
    }
  }

  void HandleService() {
    for (;;) {
      auto packet = ReceivePacket(options_.service.get());
      if (!packet.ok()) {
        if (packet.status().code() == StatusCode::kNotFound) return;
        if (packet.status().code() == StatusCode::kInvalidArgument) continue;
        // The owner holds the other end too, so this is the end of the owner as well; the lifeline says so.
        service_open_ = false;
        return;
      }
      auto request = DecodeJanitorRequest(packet->bytes);
      if (!request.ok()) {
        Answer(JanitorReply{.code = request.status().code(), .message = request.status().message()}, {});
        continue;
      }
      switch (request->type) {
        case JanitorRequest::Type::kReset:
          Reset(*request);
          break;
        case JanitorRequest::Type::kCreate:
          Create(*request);
          break;
        case JanitorRequest::Type::kDestroy:
          Destroy(*request);
          break;
      }
    }
  }

  void Answer(const JanitorReply& reply, const std::vector<int>& fds) {
    Status sent = SendPacket(options_.service.get(), Encode(reply), fds);
    (void)sent;  // a service that is gone or stuck gets no answer; its successor resets
  }

  void Fail(uint32_t seq, const Status& status) {
    Answer(JanitorReply{.seq = seq, .code = status.code(), .message = status.message()}, {});
  }

  // Kills all; they free themselves when reaped.
  void Reset(const JanitorRequest& request) {
    for (auto& [handle, box] : boxes_) {
      KillBox(box);
      box.destroy_seq = 0;
      orphans_.push_back(handle);
    }
    Reap();
    Answer(JanitorReply{.seq = request.seq}, {});
  }

  void KillBox(Box& box) {
    if (box.dead) return;
    // The end of its first process is the end of every process in its pid namespace, and nothing else is in its groups.
    kill(box.pid, SIGKILL);
  }

  void Destroy(const JanitorRequest& request) {
    auto it = boxes_.find(request.handle);
    if (it == boxes_.end()) return Fail(request.seq, NotFound("no sandbox " + std::to_string(request.handle)));
    it->second.destroy_seq = request.seq;
    KillBox(it->second);
    Reap();
  }

  void Reap() {
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
      for (auto& [handle, box] : boxes_) {
        if (box.pid == pid) box.dead = true;
      }
    }
    for (auto it = boxes_.begin(); it != boxes_.end();) {
      Box& box = it->second;
      auto orphan = std::find(orphans_.begin(), orphans_.end(), it->first);
      if (!box.dead || (box.destroy_seq == 0 && orphan == orphans_.end())) {
        ++it;
        continue;
      }
      if (orphan != orphans_.end()) orphans_.erase(orphan);
      if (box.destroy_seq) Answer(JanitorReply{.seq = box.destroy_seq, .handle = it->first}, {});
      GiveBack(std::move(box.slot));
      it = boxes_.erase(it);
    }
  }

  void GiveBack(std::unique_ptr<Slot> slot) {
    if (!tree_.reusable()) {
      tree_.Remove(slot->group);
      slot->group = {};
    }
    free_.push_back(std::move(slot));
  }

  Result<std::unique_ptr<Slot>> TakeSlot() {
    std::unique_ptr<Slot> slot;
    if (!free_.empty()) {
      slot = std::move(free_.back());
      free_.pop_back();
    } else {
      slot = std::make_unique<Slot>();
      slot->index = slots_++;
      slot->host_uid = options_.janitor.without.users ? 0 : first_id_ + static_cast<uint32_t>(slot->index) * kIdsPerSlot;
      RETURN_IF_ERROR(MakeUserNs(slot.get()));
      RETURN_IF_ERROR(MakeNetNs(slot.get()));
    }
    if (slot->group.name.empty()) {
      ASSIGN_OR_RETURN(slot->group, tree_.Make("s" + std::to_string(slot->index)));
    }
    return slot;
  }

  // A user namespace lives as long as a descriptor leads to it. Its maps can only be written from outside. It is made as the
  // user that will be its root: the kernel counts inotify instances, pending signals and the like to the maker too, and what one
  // sandbox takes must not be missing in another, or for the host's root.
  Status MakeUserNs(Slot* slot) {
    if (options_.janitor.without.users) return Status::Ok();
    int hold[2], told[2];
    if (pipe2(hold, O_CLOEXEC) != 0) return Errno("pipe");
    Fd read_end(hold[0]), write_end(hold[1]);
    if (pipe2(told, O_CLOEXEC) != 0) return Errno("pipe");
    Fd told_read(told[0]), told_write(told[1]);
    const pid_t pid = fork();
    if (pid < 0) return Errno("fork");
    if (pid == 0) {
      close(hold[1]);
      // Only the effective user changes, and the capabilities stay: some systems let no ordinary user make namespaces.
      const bool made = prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP, 0, 0, 0) == 0 && syscall(SYS_setresuid, -1, slot->host_uid, -1) == 0 &&
                        unshare(CLONE_NEWUSER) == 0;
      const int error = made ? 0 : errno;
      if (write(told[1], &error, sizeof error) != sizeof error) _exit(1);
      char c;
      while (read(hold[0], &c, 1) < 0 && errno == EINTR) {
      }
      _exit(0);
    }
    told_write.Reset();
    int error = 0;
    Status status;
    if (read(told_read.get(), &error, sizeof error) != sizeof error) status = Internal("user namespace: the maker died");
    if (status.ok() && error != 0) status = ErrnoStatus("user namespace", error);
    std::string proc = "/proc/" + std::to_string(pid);
    std::string map = "0 " + std::to_string(slot->host_uid) + " " + std::to_string(kIdsPerSlot);
    for (const char* file : {"/uid_map", "/gid_map"}) {
      if (!status.ok()) break;
      Fd fd(open((proc + file).c_str(), O_WRONLY | O_CLOEXEC));
      if (!fd.valid() || write(fd.get(), map.data(), map.size()) < 0) status = Errno(std::string("write") + file);
    }
    slot->user_ns = Fd(open((proc + "/ns/user").c_str(), O_RDONLY | O_CLOEXEC));
    if (status.ok() && !slot->user_ns.valid()) status = Errno("open user namespace");
    write_end.Reset();
    while (waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
    }
    return status;
  }

  Status MakeNetNs(Slot* slot) {
    if (options_.janitor.without.network) {
      slot->net_ns = Fd(fcntl(home_net_.get(), F_DUPFD_CLOEXEC, 3));
      return slot->net_ns.valid() ? Status::Ok() : Errno("dup");
    }
    if (unshare(CLONE_NEWNET) != 0) return Errno("network namespace");
    Status status = LoopbackUp();
    slot->net_ns = Fd(open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC));
    if (status.ok() && !slot->net_ns.valid()) status = Errno("open network namespace");
    Home();
    return status;
  }

  static Status LoopbackUp() {
    Fd s(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    ifreq request = {};
    std::strcpy(request.ifr_name, "lo");
    request.ifr_flags = IFF_UP | IFF_RUNNING;
    if (!s.valid() || ioctl(s.get(), SIOCSIFFLAGS, &request) != 0) return Errno("loopback up");
    return Status::Ok();
  }

  // Back to the host's network. This process must never stay in a sandbox's.
  void Home() { TEMPER_CHECK(setns(home_net_.get(), CLONE_NEWNET) == 0) << "setns to the host's network: " << strerror(errno); }

  static Result<Fd> RelayListener() {
    Fd s(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    int one = 1;
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(8080);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (!s.valid() || setsockopt(s.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) != 0 ||
        bind(s.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 || listen(s.get(), 64) != 0) {
      return Errno("listen at 127.0.0.1:8080 inside");
    }
    return s;
  }

  // The sandbox's one writable file system, with the three folders of it that show inside. Not attached anywhere yet.
  static Result<Fd> MakeDisk(const JanitorRequest& request, uint32_t host_uid) {
    Fd fs(fsopen("tmpfs", FSOPEN_CLOEXEC));
    if (!fs.valid()) return Errno("fsopen tmpfs");
    // The root and the three folders take an inode each and are not the payload's.
    std::string size = std::to_string(request.disk_bytes), inodes = std::to_string(request.files + 4);
    if (fsconfig(fs.get(), FSCONFIG_SET_STRING, "size", size.c_str(), 0) != 0 ||
        fsconfig(fs.get(), FSCONFIG_SET_STRING, "nr_inodes", inodes.c_str(), 0) != 0 ||
        fsconfig(fs.get(), FSCONFIG_SET_STRING, "mode", "0700", 0) != 0 ||
        fsconfig(fs.get(), FSCONFIG_CMD_CREATE, nullptr, nullptr, 0) != 0) {
      return Errno("tmpfs of " + size + " bytes, " + inodes + " inodes");
    }
    Fd disk(fsmount(fs.get(), FSMOUNT_CLOEXEC, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV));
    if (!disk.valid()) return Errno("fsmount");
    struct Folder {
      const char* name;
      mode_t mode;
    };
    for (Folder f : {Folder{"work", 02775}, Folder{"tmp", 01777}, Folder{"shm", 01777}}) {
      if (mkdirat(disk.get(), f.name, 0700) != 0 ||
          fchownat(disk.get(), f.name, host_uid + protocol::kAgentUid, host_uid + protocol::kWorkGid, 0) != 0 ||
          fchmodat(disk.get(), f.name, f.mode, 0) != 0) {
        return Errno(std::string("folder ") + f.name);
      }
    }
    return disk;
  }

  void Create(const JanitorRequest& request) {
    if (static_cast<int>(boxes_.size()) >= options_.janitor.sandboxes_max) {
      return Fail(request.seq, ResourceExhausted("already " + std::to_string(boxes_.size()) + " sandboxes"));
    }
    auto root = roots_->Get(request.rootfs, request.mounts);
    if (!root.ok()) return Fail(request.seq, root.status());
    auto slot = TakeSlot();
    if (!slot.ok()) return Fail(request.seq, slot.status());
    Status status = CreateIn(request, *root, *slot);
    if (!status.ok()) {
      if (*slot) GiveBack(std::move(*slot));
      Fail(request.seq, status);
    }
  }

  Status CreateIn(const JanitorRequest& request, const RootTemplates::Root& root, std::unique_ptr<Slot>& slot) {
    CgroupTree::Group& group = slot->group;
    // The init is one of the tasks of the group; `processes` is the payload's, so it gets one more.
    RETURN_IF_ERROR(tree_.SetLimits(group, request.memory_bytes, request.processes + 1));
    tree_.ResetCounters(group);
    ASSIGN_OR_RETURN(Fd disk, MakeDisk(request, slot->host_uid));
    Fd work(openat(disk.get(), "work", O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW));
    if (!work.valid()) return Errno("open work folder");
    int control[2], report[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, control) != 0) return Errno("socketpair");
    Fd outside(control[0]), inside(control[1]);
    if (pipe2(report, O_CLOEXEC) != 0) return Errno("pipe");
    Fd report_read(report[0]), report_write(report[1]);

    Setup setup;
    setup.root = root;
    setup.disk = disk.get();
    setup.user_ns = slot->user_ns.get();
    setup.control = inside.get();
    setup.lifeline = lifeline_read_.get();
    setup.filter = filter_.get();
    setup.enter = &group.enter;

    clone_args args = {};
    args.flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS;
    args.exit_signal = SIGCHLD;
    // The child is born in the slot's network; the listener belongs to the network in which it is made.
    if (setns(slot->net_ns.get(), CLONE_NEWNET) != 0) return Errno("setns to the sandbox's network");
    Result<Fd> relay = request.relay ? RelayListener() : Result<Fd>(Fd());
    pid_t pid = relay.ok() ? static_cast<pid_t>(syscall(SYS_clone3, &args, sizeof args)) : -1;
    int clone_errno = errno;
    if (pid == 0) {
      Status failed = setup.Run();
      Status told = WriteAll(report_write.get(), failed.message());
      _exit(told.ok() ? 1 : 2);
    }
    Home();
    if (!relay.ok()) return relay.status();
    if (pid < 0) return ErrnoStatus("clone", clone_errno);

    report_write.Reset();
    Status status = WaitForExec(report_read.get());
    if (!status.ok()) {
      kill(pid, SIGKILL);
      while (waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
      }
      return status;
    }
    uint32_t handle = ++handles_;
    JanitorReply reply{.seq = request.seq, .handle = handle, .fds = kFdControl | kFdWork, .host_uid = slot->host_uid};
    bool grouped = tree_.mode() != CgroupMode::kNone;
    reply.memory = reply.processes = grouped ? "cgroup" : "rlimit";
    reply.cpu = group.counters.cpu.valid() ? "cgroup" : "rlimit";
    std::vector<int> fds = {outside.get(), work.get()};
    auto add = [&](uint32_t bit, const Fd& fd) {
      if (!fd.valid()) return;
      reply.fds |= bit;
      fds.push_back(fd.get());
    };
    add(kFdRelay, *relay);
    add(kFdCpu, group.counters.cpu);
    add(kFdOom, group.counters.oom);
    add(kFdPeak, group.counters.peak);
    add(kFdRefused, group.counters.refused);
    boxes_[handle] = Box{pid, std::move(slot), false, 0};
    Answer(reply, fds);
    return Status::Ok();
  }

  // The report channel closes when the init program has begun; before that it may carry why it could not.
  static Status WaitForExec(int report) {
    Clock& clock = SystemClock::Get();
    std::string message;
    for (double end = clock.NowS() + kSetupTimeoutS;;) {
      double left = end - clock.NowS();
      pollfd p = {report, POLLIN, 0};
      if (left <= 0 || poll(&p, 1, static_cast<int>(left * 1e3) + 1) == 0) return DeadlineExceeded("sandbox set-up hangs");
      char buffer[512];
      ssize_t n = read(report, buffer, sizeof buffer);
      if (n > 0) message.append(buffer, static_cast<size_t>(n));
      if (n == 0) break;
      if (n < 0 && errno != EINTR) return Errno("sandbox set-up");
    }
    return message.empty() ? Status::Ok() : Internal("sandbox set-up: " + message);
  }

  JanitorProcessOptions options_;
  CgroupTree tree_;
  std::unique_ptr<RootTemplates> roots_;
  Fd lifeline_read_, lifeline_write_, filter_, home_net_, signals_;
  uint32_t first_id_ = 0;
  int slots_ = 0;
  uint32_t handles_ = 0;
  std::vector<std::unique_ptr<Slot>> free_;
  std::map<uint32_t, Box> boxes_;
  std::vector<uint32_t> orphans_;
  std::vector<pid_t> enrolled_;  // only those no cgroup could take
  bool service_open_ = true;
};

}  // namespace

int RunJanitor(JanitorProcessOptions options) {
  prctl(PR_SET_NAME, "temper-janitor", 0, 0, 0);
  setsid();  // Ctrl-C at the terminal is the owner's business
  signal(SIGPIPE, SIG_IGN);
  for (int s : {SIGINT, SIGHUP, SIGQUIT}) signal(s, SIG_IGN);
  signal(SIGTERM, SIG_DFL);
  int lifeline = options.lifeline.get();
  auto report = [&](const std::string& message) { return SendPacket(lifeline, "ready:" + message); };
  auto tree = CgroupTree::Open(options.janitor.cgroups, options.job_id);
  if (!tree.ok()) return report(tree.status().message()).ok() ? 1 : 2;
  Loop loop(std::move(options), std::move(*tree));
  Status started = loop.Start();
  if (!report(started.message()).ok() || !started.ok()) {
    loop.CleanUp();
    return 1;
  }
  loop.Serve();
  loop.CleanUp();
  return 0;
}

}  // namespace temper::sandbox
