// The doors of the trainer: `temper train loss` (docs/algorithm_block.md 4).
#pragma once

#include <string>
#include <vector>

#include "common/command.h"
#include "common/status.h"

namespace temper::trainer {

const std::vector<Command>& Commands();

// The whole of `temper train loss`: one JSON object in, one out. A failure is about the input and names its path.
Result<std::string> TrainLoss(const std::string& input);

}  // namespace temper::trainer
