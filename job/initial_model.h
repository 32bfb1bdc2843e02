// The policy a job starts from: a model on disk, or one made on the spot with the tasks' words as vocabulary.
#pragma once

#include <string>

#include "engine/config.h"
#include "job/job.h"

namespace temper::job {

// Sizes of the policy; reads headers only.
Result<engine::ModelConfig> PolicyConfig(const Job& job);

// Where the model of a run lies: RUN/model when it is created, else what model.path names.
std::string PolicyPath(const Job& job, const std::string& run_dir);

// Writes RUN/model when the policy is created (fresh parameters of the job's seed, tokenizer, chat template).
Status WriteInitialModel(const Job& job, const std::string& run_dir);

}  // namespace temper::job
