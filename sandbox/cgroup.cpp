#include "sandbox/cgroup.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include <fmt/format.h>

#include "common/clock.h"
#include "common/strings.h"

namespace temper::sandbox {
namespace {

// cgroup files want one write with no O_CREAT; an atomic replacement as for ordinary files is impossible.
bool Put(const std::string& path, const std::string& value) {
  Fd fd(open(path.c_str(), O_WRONLY | O_CLOEXEC));
  return fd.valid() && write(fd.get(), value.data(), value.size()) == static_cast<ssize_t>(value.size());
}

Fd OpenRead(const std::string& path) { return Fd(open(path.c_str(), O_RDONLY | O_CLOEXEC)); }

std::string Take(const std::string& path) {
  auto text = ReadFile(path, 1 << 20);
  return text.ok() ? *text : std::string();
}

bool MakeDir(const std::string& path) { return mkdir(path.c_str(), 0755) == 0 || errno == EEXIST; }

bool HasWord(const std::string& text, const std::string& word) {
  for (std::string_view line = text; !line.empty();) {
    size_t end = line.find_first_of(" \n");
    if (line.substr(0, end) == word) return true;
    if (end == std::string_view::npos) break;
    line.remove_prefix(end + 1);
  }
  return false;
}

std::vector<std::string> SubFolders(const std::string& path) {
  std::vector<std::string> names;
  DIR* dir = opendir(path.c_str());
  if (!dir) return names;
  while (dirent* e = readdir(dir)) {
    if (e->d_type == DT_DIR && e->d_name[0] != '.') names.push_back(path + "/" + e->d_name);
  }
  closedir(dir);
  return names;
}

void KillProcesses(const std::string& dir) {
  if (Put(dir + "/cgroup.kill", "1")) return;
  for (const std::string& line : Split(Take(dir + "/cgroup.procs"), '\n')) {
    int64_t pid;
    if (ParseInt(line, &pid) && pid > 1 && pid != getpid()) kill(static_cast<pid_t>(pid), SIGKILL);
  }
}

// Kills below `dir` and removes it, deepest first. True when it is gone.
bool KillAndRemove(const std::string& dir) {
  KillProcesses(dir);
  for (const std::string& sub : SubFolders(dir)) KillAndRemove(sub);
  return rmdir(dir.c_str()) == 0 || errno == ENOENT;
}

// Empty groups of jobs whose owner is dead: a machine that was cut off, or a janitor that was killed with its owner.
// Nothing is killed here: a group that still holds a process may be another janitor's, at work. A hierarchy can be shared with
// containers, whose process numbers mean nothing here: their groups are left to them, empty or not.
void RemoveEmptyOfDeadJobs(const std::string& base) {
  const std::string tag = PidNamespaceTag();
  for (const std::string& dir : SubFolders(base)) {
    const std::vector<std::string> parts = Split(BaseName(dir), '-');
    if (parts.size() != 3 || parts[0] != "temper") continue;
    const std::vector<std::string> owner = Split(parts[1], '.');
    int64_t pid;
    if (owner.size() != 2 || owner[1] != tag || !ParseInt(owner[0], &pid) || pid <= 1) continue;
    if (kill(static_cast<pid_t>(pid), 0) == 0 || errno != ESRCH) continue;
    for (const std::string& sub : SubFolders(dir)) rmdir(sub.c_str());
    rmdir(dir.c_str());
  }
}

bool RemoveRoots(const std::vector<std::string>& roots, double timeout_s) {
  Clock& clock = SystemClock::Get();
  for (double end = clock.NowS() + timeout_s;;) {
    bool gone = true;
    for (const std::string& root : roots) gone &= KillAndRemove(root);
    if (gone || clock.NowS() >= end) return gone;
    clock.SleepS(0.005);
  }
}

}  // namespace

std::string PidNamespaceTag() {
  struct stat s {};
  // Without /proc no other process can be looked at either.
  if (stat("/proc/self/ns/pid", &s) != 0) return "00000000";
  return fmt::format("{:08x}", static_cast<uint32_t>(s.st_ino));
}

CgroupBases ParseCgroupBases(const std::string& mountinfo, const std::string& own) {
  // Our path in each hierarchy: "ID:controllers:PATH"; version 2 has no controllers.
  auto own_path = [&](const std::string& controller) -> std::optional<std::string> {
    for (const std::string& line : Split(own, '\n')) {
      size_t a = line.find(':'), b = a == std::string::npos ? a : line.find(':', a + 1);
      if (b == std::string::npos) continue;
      std::string controllers = line.substr(a + 1, b - a - 1);
      bool match = controllers.empty() ? controller.empty() : false;
      for (const std::string& c : Split(controllers, ',')) match |= !controller.empty() && c == controller;
      if (match) return line.substr(b + 1);
    }
    return std::nullopt;
  };
  CgroupBases bases;
  for (const std::string& line : Split(mountinfo, '\n')) {
    // ID PARENT DEV ROOT POINT OPTIONS … - TYPE SOURCE SUPER
    std::vector<std::string> f = Split(line, ' ');
    size_t dash = 0;
    while (dash < f.size() && f[dash] != "-") ++dash;
    if (f.size() < 5 || dash + 3 >= f.size()) continue;
    const std::string& type = f[dash + 1];
    auto place = [&](const std::string& controller, std::string* out) {
      auto path = own_path(controller);
      if (!path || !out->empty()) return;
      // The mount may show only a part of the hierarchy (a container without a cgroup namespace).
      std::string root = f[3] == "/" ? "" : f[3];
      if (path->compare(0, root.size(), root) != 0) return;
      std::string below = path->substr(root.size());
      *out = f[4] + (below == "/" ? "" : below);
    };
    if (type == "cgroup2") place("", &bases.v2);
    if (type == "cgroup") {
      for (const std::string& option : Split(f[dash + 3], ',')) {
        if (option == "memory") place("memory", &bases.v1_memory);
        if (option == "pids") place("pids", &bases.v1_pids);
      }
    }
  }
  return bases;
}

std::optional<int64_t> KeyedValue(const std::string& text, const std::string& key) {
  for (const std::string& line : Split(text, '\n')) {
    int64_t value;
    if (line.size() > key.size() && line.compare(0, key.size(), key) == 0 && line[key.size()] == ' ' &&
        ParseInt(std::string_view(line).substr(key.size() + 1), &value)) {
      return value;
    }
  }
  return std::nullopt;
}

Counters ReadCounters(int cpu, int oom, int peak, int refused) {
  auto text = [](int fd) {
    char buffer[4096];
    ssize_t n = fd < 0 ? -1 : pread(fd, buffer, sizeof buffer, 0);
    return std::string(buffer, n > 0 ? static_cast<size_t>(n) : 0);
  };
  Counters c;
  c.cpu_us = KeyedValue(text(cpu), "usage_usec").value_or(-1);
  c.oom_kills = KeyedValue(text(oom), "oom_kill").value_or(-1);
  c.refused_forks = KeyedValue(text(refused), "max").value_or(-1);
  int64_t value;
  if (ParseInt(Trim(text(peak)), &value)) c.peak_bytes = value;
  return c;
}

Result<CgroupTree> CgroupTree::Open(CgroupMode mode, const std::string& job_id) {
  auto mounts = ReadFile("/proc/self/mountinfo", 16 << 20);
  auto own = ReadFile("/proc/self/cgroup", 1 << 20);
  CgroupBases bases;
  if (mounts.ok() && own.ok()) bases = ParseCgroupBases(*mounts, *own);
  // Version 2 gives controllers to children only from a group without processes of its own. Ours usually has some (us), but
  // one above it, which a service manager prepared, does not.
  for (std::string at = bases.v2; !at.empty(); at = DirName(at)) {
    std::string available = Take(at + "/cgroup.controllers");
    if (!HasWord(available, "memory") || !HasWord(available, "pids")) break;
    std::string given = Take(at + "/cgroup.subtree_control");
    if ((HasWord(given, "memory") && HasWord(given, "pids")) || Put(at + "/cgroup.subtree_control", "+memory +pids")) {
      bases.v2 = at;
      bases.v2_limits = true;
      break;
    }
  }
  return OpenAt(mode, job_id, bases);
}

Result<CgroupTree> CgroupTree::OpenAt(CgroupMode mode, const std::string& job_id, const CgroupBases& bases) {
  CgroupTree tree;
  bool v2 = !bases.v2.empty() && bases.v2_limits;
  bool v1 = !bases.v1_memory.empty() && !bases.v1_pids.empty();
  auto refuse = [&](const char* name, const char* why) {
    return FailedPrecondition(std::string("cgroup mode ") + name + " does not work here: " + why);
  };
  if (mode == CgroupMode::kV2 && !v2) return refuse("v2", "no version 2 hierarchy gives memory and pids to groups below ours");
  if (mode == CgroupMode::kHybrid && !v1) return refuse("hybrid", "memory and pids of version 1 are not mounted");
  if (mode == CgroupMode::kNone) {
    tree.why_ = "asked for";
    return tree;
  }
  bool take_v2 = v2 && mode != CgroupMode::kHybrid;
  if (!take_v2 && !v1) {
    tree.why_ = "no cgroup hierarchy with memory and pids is mounted and writable";
    return tree;
  }
  auto make = [&](const std::string& base) {
    std::string root = base + "/" + job_id;
    RemoveEmptyOfDeadJobs(base);
    if (!MakeDir(root)) return std::string();
    tree.roots_.push_back(root);
    return root;
  };
  bool ok = true;
  if (take_v2) {
    tree.mode_ = CgroupMode::kV2;
    tree.v2_root_ = make(bases.v2);
    ok = !tree.v2_root_.empty() && Put(tree.v2_root_ + "/cgroup.subtree_control", "+memory +pids");
  } else {
    tree.mode_ = CgroupMode::kHybrid;
    tree.memory_root_ = make(bases.v1_memory);
    tree.pids_root_ = make(bases.v1_pids);
    ok = !tree.memory_root_.empty() && !tree.pids_root_.empty();
    if (ok && !bases.v2.empty()) tree.v2_root_ = make(bases.v2);  // without it, killing goes by the pid namespace alone
  }
  if (!ok) {
    RemoveRoots(tree.roots_, 1);
    if (mode != CgroupMode::kAuto) return refuse(take_v2 ? "v2" : "hybrid", "cannot make a group (read-only?)");
    CgroupTree none;
    none.why_ = "cannot make a cgroup below our own";
    return none;
  }
  return tree;
}

Result<CgroupTree::Group> CgroupTree::Make(const std::string& name) {
  Group g;
  g.name = name;
  if (mode_ == CgroupMode::kNone) return g;
  auto fail = [&](const std::string& dir) { return ErrnoStatus("cgroup " + dir, errno); };
  auto enter = [&](const std::string& dir) {
    if (!MakeDir(dir)) return fail(dir);
    Fd fd(open((dir + "/cgroup.procs").c_str(), O_WRONLY | O_CLOEXEC));
    if (!fd.valid()) return fail(dir + "/cgroup.procs");
    g.enter.push_back(std::move(fd));
    return Status::Ok();
  };
  if (!v2_root_.empty()) {
    g.v2_dir = v2_root_ + "/" + name;
    RETURN_IF_ERROR(enter(g.v2_dir));
    g.counters.cpu = OpenRead(g.v2_dir + "/cpu.stat");
  }
  if (mode_ == CgroupMode::kHybrid) {
    g.memory_dir = memory_root_ + "/" + name;
    g.pids_dir = pids_root_ + "/" + name;
    RETURN_IF_ERROR(enter(g.memory_dir));
    RETURN_IF_ERROR(enter(g.pids_dir));
    g.counters.oom = OpenRead(g.memory_dir + "/memory.oom_control");
    g.counters.peak = OpenRead(g.memory_dir + "/memory.max_usage_in_bytes");
    g.counters.refused = OpenRead(g.pids_dir + "/pids.events");
  } else {
    g.counters.oom = OpenRead(g.v2_dir + "/memory.events");
    g.counters.peak = OpenRead(g.v2_dir + "/memory.peak");
    g.counters.refused = OpenRead(g.v2_dir + "/pids.events");
  }
  return g;
}

Status CgroupTree::SetLimits(Group& g, int64_t memory_bytes, int64_t processes) {
  if (mode_ == CgroupMode::kNone) return Status::Ok();
  auto put = [](const std::string& path, int64_t value) {
    return Put(path, std::to_string(value)) ? Status::Ok() : ErrnoStatus(path + " = " + std::to_string(value), errno);
  };
  if (g.memory_bytes != memory_bytes) {
    if (mode_ == CgroupMode::kV2) {
      RETURN_IF_ERROR(put(g.v2_dir + "/memory.max", memory_bytes));
      Put(g.v2_dir + "/memory.swap.max", "0");  // absent without swap
    } else {
      // The limit with swap may never be below the one without: it is opened first.
      std::string swap = g.memory_dir + "/memory.memsw.limit_in_bytes";
      Put(swap, "-1");
      RETURN_IF_ERROR(put(g.memory_dir + "/memory.limit_in_bytes", memory_bytes));
      Put(swap, std::to_string(memory_bytes));
    }
    g.memory_bytes = memory_bytes;
  }
  if (g.processes != processes) {
    RETURN_IF_ERROR(put((mode_ == CgroupMode::kV2 ? g.v2_dir : g.pids_dir) + "/pids.max", processes));
    g.processes = processes;
  }
  return Status::Ok();
}

void CgroupTree::ResetCounters(Group& g) {
  if (mode_ == CgroupMode::kHybrid) Put(g.memory_dir + "/memory.max_usage_in_bytes", "0");
}

bool CgroupTree::Enroll(pid_t pid) {
  if (v2_root_.empty()) return false;
  std::string dir = v2_root_ + "/host";
  return MakeDir(dir) && Put(dir + "/cgroup.procs", std::to_string(pid));
}

bool CgroupTree::Remove(const Group& g) {
  bool gone = true;
  for (const std::string* dir : {&g.v2_dir, &g.memory_dir, &g.pids_dir}) {
    if (!dir->empty() && rmdir(dir->c_str()) != 0 && errno != ENOENT) gone = false;
  }
  return gone;
}

bool CgroupTree::RemoveAll(double timeout_s) { return RemoveRoots(roots_, timeout_s); }

bool RemoveCgroups(const std::string& job_id, double timeout_s) {
  auto mounts = ReadFile("/proc/self/mountinfo", 16 << 20);
  auto own = ReadFile("/proc/self/cgroup", 1 << 20);
  if (!mounts.ok() || !own.ok()) return true;
  CgroupBases bases = ParseCgroupBases(*mounts, *own);
  std::vector<std::string> roots;
  for (const std::string* base : {&bases.v1_memory, &bases.v1_pids, &bases.v2}) {
    for (std::string at = *base; at.size() > 1; at = base == &bases.v2 ? DirName(at) : "") {
      if (IsDirectory(at + "/" + job_id)) roots.push_back(at + "/" + job_id);
    }
  }
  return RemoveRoots(roots, timeout_s);
}

}  // namespace temper::sandbox
