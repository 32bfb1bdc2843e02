// What a job left behind. After any end of a job nothing of it may remain: this looks, and tests plant one of each to
// know that it sees.
#pragma once

#include <string>
#include <vector>

#include "common/status.h"

namespace temper::sandbox {

struct RemainsQuery {
  // Janitor::job_id(), or a prefix such as "temper-" for every job on the machine; "" = only what names the run folder.
  std::string job_id = "temper-";
  std::string run_folder;  // processes that name it in arguments or environment, or work in it, are the job's; "" = not asked
  std::vector<int> ports;  // TCP ports that must not be listened on
};

struct Remain {
  std::string kind;  // "process", "sandbox", "mount", "cgroup", "shared_memory", "port", "temporary_folder"
  std::string what;  // pid and command, path, port
  // Of a job that somebody still supervises: its run is locked, or the process that forked its janitor lives.
  bool live = false;
  // Found by a sign that others may bear too: a process that names the run folder and was not started by a job (a shell, an
  // editor, another door), or a mount of ours that does not say of which job.
  bool doubtful = false;
};

// What RUN/state.json calls the janitor of its last start; "" where there is none.
std::string JobOfRun(const std::string& run_folder);

// Looks once; never lists the calling process, nor anything twice. Takes some milliseconds. Lists what is live or doubtful too:
// who asks after a job's end wants to hear of it.
std::vector<Remain> FindRemains(const RemainsQuery& query);
// Looks until nothing remains or `timeout_s` has passed; returns what is still there.
std::vector<Remain> WaitForNoRemains(const RemainsQuery& query, double timeout_s = 10);

}  // namespace temper::sandbox
