// What a job left behind. After any end of a job nothing of it may remain: this looks, and tests plant one of each to
// know that it sees.
#pragma once

#include <string>
#include <vector>

#include "common/status.h"

namespace temper::sandbox {

struct RemainsQuery {
  // Janitor::job_id(), or a prefix such as "temper-" for every job on the machine.
  std::string job_id = "temper-";
  std::string run_folder;  // processes that name it in arguments or environment, or work in it, are the job's; "" = not asked
  std::vector<int> ports;  // TCP ports that must not be listened on
};

struct Remain {
  std::string kind;  // "process", "sandbox", "mount", "cgroup", "shared_memory", "port", "temporary_folder"
  std::string what;  // pid and command, path, port
};

// Looks once; never lists the calling process. Takes some milliseconds.
std::vector<Remain> FindRemains(const RemainsQuery& query);
// Looks until nothing remains or `timeout_s` has passed; returns what is still there.
std::vector<Remain> WaitForNoRemains(const RemainsQuery& query, double timeout_s = 10);

}  // namespace temper::sandbox
