// The door `temper bench engine` (docs/doors.md).
#pragma once

#include <vector>

#include "common/command.h"

namespace temper::trainer {

const std::vector<Command>& BenchCommands();

}  // namespace temper::trainer
