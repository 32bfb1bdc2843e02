// The roles of a job as processes: `temper serve ROLE --run RUN`. Fills each part's plain options from the job and the run's
// state, starts its server, and waits for the end.
#pragma once

#include <string>

namespace temper::job {

// A role of its own process. Reads RUN/job.yaml and RUN/state.json; listening sockets come in by TEMPER_SERVE_FDS
// ("control=100,agent=101"), the number of this start by TEMPER_INCARNATION. Ends on SIGTERM or Role.Stop.
// Returns the exit code: 0 done or stopped; 1 failed for good, with the reason in RUN/logs/NAME.error; 3 the trainer was
// stopped before its last step.
int ServeRole(const std::string& role, const std::string& run_dir, int index);

}  // namespace temper::job
