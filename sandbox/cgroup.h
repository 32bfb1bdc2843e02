// The janitor's cgroup subtree: limits on memory and tasks, counters of what was used, and killing whole groups.
//
// Three modes. `v2`: one hierarchy with memory and pids. `hybrid`: memory and pids of version 1 below our own paths, and a
// version 2 directory (no controllers needed) for cgroup.kill and cpu.stat. `none`: no usable hierarchy; groups are then
// empty objects and every limit that needs one is held elsewhere or not at all. Single-threaded.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/file.h"
#include "common/status.h"
#include "sandbox/janitor.h"

namespace temper::sandbox {

// Where the hierarchies are, with our own position in them; "" = not there or not usable.
struct CgroupBases {
  std::string v1_memory;
  std::string v1_pids;
  std::string v2;
  bool v2_limits = false;  // v2 has memory and pids to give to children
};
// Eight hexadecimal digits: the pid namespace in which this process's numbers mean something. A job id (`temper-PID.TAG-RANDOM`)
// holds it, so that nobody takes another container's job for a dead one.
std::string PidNamespaceTag();

// From the text of /proc/self/mountinfo and /proc/self/cgroup. Does not look at v2's controllers.
CgroupBases ParseCgroupBases(const std::string& mountinfo, const std::string& own);

// Files of a group that tell what happened in it; readable from any process that holds the descriptors.
struct CounterFiles {
  Fd cpu;     // "usage_usec N"
  Fd oom;     // "oom_kill N"
  Fd peak;    // "N"
  Fd refused; // "max N": refused forks
};
struct Counters {
  int64_t cpu_us = -1;
  int64_t oom_kills = -1;
  int64_t peak_bytes = -1;
  int64_t refused_forks = -1;
};
// -1 for what cannot be read. `fds` in the order of CounterFiles.
Counters ReadCounters(int cpu, int oom, int peak, int refused);
// Value of the line "KEY N" of a flat-keyed file; nullopt when there is none.
std::optional<int64_t> KeyedValue(const std::string& text, const std::string& key);

class CgroupTree {
 public:
  struct Group {
    std::string name;
    std::string v2_dir, memory_dir, pids_dir;
    // Writing "0" to each puts the writer into the group. (CLONE_INTO_CGROUP would save one of them, but Linux 6.18 kills a
    // child cloned into a group in which cgroup.kill was ever written.)
    std::vector<Fd> enter;
    CounterFiles counters;
    int64_t memory_bytes = -1, processes = -1;  // limits now in force
  };

  // Makes `job_id` below the bases. kFailedPrecondition when `mode` is asked for by name and does not work here; kAuto
  // never fails and falls to kNone with why() set.
  static Result<CgroupTree> Open(CgroupMode mode, const std::string& job_id);
  static Result<CgroupTree> OpenAt(CgroupMode mode, const std::string& job_id, const CgroupBases& bases);

  CgroupMode mode() const { return mode_; }
  const std::string& why() const { return why_; }  // why not a better mode; "" in v2 and hybrid

  Result<Group> Make(const std::string& name);
  Status SetLimits(Group& group, int64_t memory_bytes, int64_t processes);
  // Sets back what can be set back (the peak). In v2 mode a group is made anew instead: see reusable().
  void ResetCounters(Group& group);
  bool reusable() const { return mode_ != CgroupMode::kV2; }
  // Puts a process into the group `host` (v2 directory); false in mode none.
  bool Enroll(pid_t pid);
  // Removes an empty group; false when it still holds a process.
  bool Remove(const Group& group);
  // Kills everything below job_id and removes it; false when something is left after `timeout_s`.
  bool RemoveAll(double timeout_s);

 private:
  CgroupMode mode_ = CgroupMode::kNone;
  std::string why_;
  std::vector<std::string> roots_;  // job_id's directory in each hierarchy
  std::string v2_root_, memory_root_, pids_root_;
};

// Kills and removes what is left of `job_id` in every hierarchy of the machine.
bool RemoveCgroups(const std::string& job_id, double timeout_s);

}  // namespace temper::sandbox
