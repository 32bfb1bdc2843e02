// Whether a job may go on in the folder of a run (`temper run --resume`).
#pragma once

#include <string>

#include "common/status.h"
#include "job/job.h"

namespace temper::job {

// `job` and `resolved` (its resolved YAML) against RUN/job.yaml. They must be the same, with one exception: a run that is not done
// may be given more trainer.steps where the learning rate does not follow from their number (optimizer.schedule: constant); the
// steps it then takes are those of a run that had them from the start. A done run gets no more: its pool ended with job_end,
// which nothing reopens. kInvalidArgument says which value differs, and for steps what to do instead.
Status CheckResume(const std::string& run_dir, const Job& job, const std::string& resolved);

// The latest `job_s` of RUN/metrics.jsonl and RUN/eval.jsonl: a supervisor that was killed had worked at least so long, although
// its state.json may be seconds older. 0 where there is none.
double LastJobSeconds(const std::string& run_dir);

}  // namespace temper::job
