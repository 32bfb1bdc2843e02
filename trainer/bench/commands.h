// The doors `temper bench engine` and `temper bench tree` (docs/doors.md).
#pragma once

#include <vector>

#include "common/command.h"

namespace temper::trainer {

const std::vector<Command>& BenchCommands();

}  // namespace temper::trainer
