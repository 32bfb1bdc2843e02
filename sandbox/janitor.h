// The janitor: the single-threaded process that makes sandboxes and removes everything when its owner is gone.
//
// Forked by the owner (`temper run`, or a door) from the main thread before any thread, gRPC or RocksDB exists. It owns
// one cgroup subtree named job_id() and every sandbox. Two channels lead to it:
//   lifeline   held by the owner only. Its end (the owner died or called Stop) makes the janitor kill every sandbox and
//              every enrolled process, remove the cgroups, and exit: within 10 s, usually within 0.1 s.
//   service    a SEQPACKET socket given to the sandbox service (this process, or an inherited descriptor of the sandbox
//              role). A new service that connects over it first resets: sandboxes of the former one are killed.
// If the janitor itself is killed, every sandbox dies with it (its init sees the end of a pipe), the owner sees the end
// of lifeline_fd(), and RemoveLeftovers() removes the empty cgroups.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>

#include "common/status.h"

namespace temper::sandbox {

enum class CgroupMode { kAuto, kV2, kHybrid, kNone };

struct JanitorOptions {
  // The static init; "" = `temper-sandbox-init` beside the running executable, or TEMPER_SANDBOX_INIT.
  std::string init_path;
  // kAuto takes the best that works below our own cgroup. kNone holds limits by rlimits where it can.
  CgroupMode cgroups = CgroupMode::kAuto;
  int sandboxes_max = 512;
  // Layers that are left out. Only tests do: they show that each layer holds something (tests/sandbox/attempts_test.cpp); no
  // door, job key or environment variable leads here.
  struct Without {
    bool seccomp = false, users = false, network = false;
  } without;
};

class Janitor {
 public:
  ~Janitor();  // Stop() with 10 s, when not stopped
  Janitor(Janitor&&) noexcept;
  Janitor& operator=(Janitor&&) noexcept;

  pid_t pid() const;
  // "temper-PID-RANDOM": the name of its cgroups; FindRemains (sandbox/remains.h) looks for it.
  const std::string& job_id() const;
  // End of the service channel, close-on-exec: hand it to LocalSandboxService, or let the sandbox role inherit a
  // duplicate. Stays open here so that a restarted role can have it again. Owned by this object.
  int service_fd() const;
  // Becomes readable (end of file) when the janitor is gone. Owned by this object.
  int lifeline_fd() const;
  // Puts a process, and all it will start, under the janitor: killed with the rest. For roles and host-side agents. What the
  // process had started before is not part of it: let a fresh child wait for this before it executes anything. Without
  // cgroups only the process and its process group are reached.
  Status Enroll(pid_t pid);
  // Orderly end: kills and removes everything, waits for it. kDeadlineExceeded when that took longer.
  Status Stop(double timeout_s = 10);
  // After the janitor died by itself: kills what its cgroups still hold and removes them.
  Status RemoveLeftovers(double timeout_s = 10);

 private:
  friend Result<Janitor> ForkJanitor(const JanitorOptions& options);
  struct Impl;
  explicit Janitor(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Call once, from the main thread, while the process is single-threaded (checked). kFailedPrecondition names what the
// machine lacks (root, namespaces, the init binary).
Result<Janitor> ForkJanitor(const JanitorOptions& options = {});

}  // namespace temper::sandbox
