// RUN/summary.json: what a run came to, written at every end of a job (docs/doors.md).
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "job/job.h"
#include "job/plan.h"

namespace temper::job {

struct JobEnd {
  int exit_code = 0;      // 0 done, 1 failed, 130 stopped
  std::string phase;      // done | failed | stopped
  std::string reason;     // one line
  double wall_s = 0;      // of all starts of the run
  double sampling_s = 0;  // of all starts: during which tokens were drawn
  int64_t restarts = 0;   // of roles, in all starts
  std::map<std::string, double> counters;  // of all starts: "gateway.tokens_sampled", "trainer.cpu_path.avx512", …
};

// Joins what the run folder holds with `end`. What cannot be read is null and named in "notes".
std::string MakeSummary(const Job& job, const Plan& plan, const std::string& run_dir, const JobEnd& end);

}  // namespace temper::job
