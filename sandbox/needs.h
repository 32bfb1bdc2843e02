// What sandboxes need of a machine, each thing tried for real, and, where it is missing, what that costs and what cures it. The
// one place of these words: `temper doctor`, the plan of a job and the error of whoever cannot make a sandbox say them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/status.h"
#include "sandbox/janitor.h"

namespace temper::sandbox {

struct Need {
  enum class State { kOk, kLimited, kMissing };
  std::string field;  // "user_namespaces"; stable, for machines
  State state = State::kOk;
  std::string found;  // what works, or what failed and why
  std::string cost;   // what follows; "" when nothing is missing
  std::string cure;   // the setting to change; "" when nothing is missing
  bool operator==(const Need&) const = default;
};
const char* Name(Need::State state);  // "ok", "limited", "missing"
// "user_namespaces: FOUND; COST. Cure: CURE"
std::string Sentence(const Need& need);
// kFailedPrecondition with the sentence of every need that is missing, a line each; Ok when none is.
Status MissingNeeds(const std::vector<Need>& needs);

// What explains a refusal of the kernel.
struct Surroundings {
  bool root = true;
  uint64_t capabilities = ~uint64_t{0};  // effective, bit by number
  bool seccomp = false;                  // a filter stands over this process
  bool chroot = false;
  bool container = false;
  std::optional<int64_t> max_user_namespaces, unprivileged_userns_clone, apparmor_restrict;
};
Surroundings LookAround();

// Pure: the need of a step that ended with `error` (0 = it works) in these surroundings.
Need ExplainRoot(const Surroundings& s);
Need ExplainUserNamespaces(int error, const Surroundings& s);
Need ExplainUserIds(int error, const Surroundings& s);
// `refused`: names of kinds that cannot be made.
Need ExplainNamespaces(const std::vector<std::string>& refused, int error, const Surroundings& s);
// Of `mounts`, `proc`, `pivot_root`, `loopback`, `seccomp`; `step` says which of its calls failed.
Need ExplainStep(const std::string& field, const std::string& step, int error, const Surroundings& s);
// From /proc/self/mountinfo and the mode that came out; `why` as CgroupTree has it, `busy` that our own group holds processes.
Need ExplainCgroups(const std::string& mode, const std::string& why, const std::string& mountinfo, bool cpu_counted, bool busy);

// Tries everything in child processes, which leave nothing. Takes a few milliseconds. Only while this process has one thread.
// A mode asked for by name that does not work is missing; with kAuto and kNone the worst of cgroups is limited.
std::vector<Need> TrySandboxNeeds(CgroupMode mode = CgroupMode::kAuto);

}  // namespace temper::sandbox
