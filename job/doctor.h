// `temper doctor`: what a machine has and lacks, in one form for people and one for machines.
#pragma once

#include <string>
#include <vector>

#include "job/plan.h"
#include "sandbox/needs.h"

namespace temper::job {

struct NeedGroup {
  std::string title;
  std::vector<sandbox::Need> needs;
};

// What jobs need besides sandboxes: processor, cores, memory, descriptors, folders, disk, ports; which models are there.
std::vector<sandbox::Need> TryMachine(const Machine& machine);
// Makes a sandbox, runs a command in it, removes it. Starts threads: nothing may be forked afterwards that needs there to be
// none.
sandbox::Need TrySandbox(sandbox::CgroupMode cgroups);

// What a plan says of the machine: how limits are held, and a line for each need that is limited or missing.
std::string PlanOfNeeds(const std::vector<sandbox::Need>& needs);

std::vector<std::string> MissingFields(const std::vector<NeedGroup>& groups);
// A line each, with what it costs and the cure below it, and the verdict at the end.
std::string PrintNeeds(const std::vector<NeedGroup>& groups);
// {"can_run":true,"missing":[…],"limited":[…],
//  "needs":[{"group":…,"field":…,"state":"ok|limited|missing","found":…,"cost":…,"cure":…}]}
std::string NeedsToJson(const std::vector<NeedGroup>& groups);

}  // namespace temper::job
