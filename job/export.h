// A run's trained rollouts as rows that other trainers read.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "common/status.h"
#include "trainer/trajectory.h"

namespace temper::job {

// The rows of one rollout. `head`: a JSON object, whose fields come first; `advantages`: of its sampled tokens, as the loss has them.
std::vector<std::string> RowsOf(const trainer::Rollout& rollout, const std::string& head, const std::vector<double>& advantages);

// One row a logical sequence (a root-to-leaf path of a rollout's token tree) of every group that was trained and not rolled back, by step,
// group, rollout and path; docs/pool.md has the fields. Each trainable token has mask 1 in exactly one row, the first that holds it.
// Advantages are those of the job's algorithm over the step's groups. kUnimplemented: they depend on models beside the policy, or on
// log-probabilities that only the trainer had.
// Groups whose records were dropped have no rows: `dropped` gets each step's, as text.
Status ExportRows(const std::string& run, const std::function<void(const std::string&)>& row, const std::function<void(const std::string&)>& dropped);

}  // namespace temper::job
