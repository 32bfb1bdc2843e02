// The policy a job starts from: a model on disk, or one made on the spot with the tasks' words as vocabulary.
#pragma once

#include <string>

#include "engine/config.h"
#include "job/job.h"
#include "job/plan.h"

namespace temper::job {

// Sizes of the policy; reads headers only.
Result<engine::ModelConfig> PolicyConfig(const Job& job);

// The models beside the policy that the algorithm reads, checked against it; reads headers only. The error begins with the key.
Result<OtherModels> ReadOtherModels(const Job& job, const engine::ModelConfig& policy);

// Where the model of a run lies: RUN/model when it is created, else what model.path names.
std::string PolicyPath(const Job& job, const std::string& run_dir);

// Writes RUN/model when the policy is created (fresh parameters of the job's seed, tokenizer, chat template).
Status WriteInitialModel(const Job& job, const std::string& run_dir);

}  // namespace temper::job
