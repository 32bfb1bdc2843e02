// The supervisor of a run: starts the roles, watches them, shows how it goes, and ends everything in order.
//
// Problem: any process may die at any moment, and nothing may remain afterwards. Idea: one loop on the main thread owns all
// children; the listening sockets are opened here and inherited, so a restarted role keeps its address and its clients queue;
// the janitor (forked before any thread) removes whatever is left. A role that exits with code 1 has told why and ends the job;
// any other death is restarted with a growing pause, at most five times in a minute. The trainer's exit with code 0 is the end of
// the job. A helper thread asks the roles for their numbers.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "job/job.h"
#include "job/plan.h"
#include "job/run_folder.h"
#include "job/summary.h"
#include "sandbox/janitor.h"

namespace temper::job {

struct RoleSpec {
  std::string name;     // "rollout-0"
  std::string role;     // "rollout"
  int index = 0;
  std::string address;  // of its control socket
  std::vector<std::pair<std::string, int>> fds;  // inherited, by name: "control", "agent", "janitor"
};

// Blocks the signals that the supervisor reads from a descriptor. Call on the main thread before others exist.
void BlockSupervisorSignals();

class Supervisor {
 public:
  // Everything passed in outlives the supervisor. `state` is written to the folder as it changes. `panel`: draw on a terminal.
  Supervisor(const Job& job, const Plan& plan, RunFolder& run, RunState state, sandbox::Janitor& janitor, std::vector<RoleSpec> roles, bool panel);
  ~Supervisor();

  // Runs the job to its end; afterwards no role is left (the janitor still is). Main thread only.
  JobEnd Run();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace temper::job
