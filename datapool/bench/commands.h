// The door `temper bench pool` (docs/doors.md).
#pragma once

#include <vector>

#include "common/command.h"

namespace temper::datapool {

const std::vector<Command>& BenchCommands();

}  // namespace temper::datapool
