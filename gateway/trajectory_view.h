// How `temper trajectory show` prints the token tree of an attempt.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "common/status.h"

namespace temper::gateway {

struct TrajectoryViewOptions {
  bool colour = false;
  bool tokens = false;  // one line a sampled token, with its logprob
  // Text of ids; null: ids are printed as numbers.
  std::function<std::string(const std::vector<int32_t>&)> decode;
};

// Both take a serialised temper.v1.Trajectory; DATA_LOSS when it is none, or when a run's parent does not come before it.
// One JSON object in one line: outcome, reward, nodes (docs/doors.md), and what else is known of the attempt.
Result<std::string> TrajectoryJson(const std::string& serialised);
// A tree for people: a line of facts and the text of each run, indented by branch.
Result<std::string> TrajectoryText(const std::string& serialised, const TrajectoryViewOptions& options);

}  // namespace temper::gateway
