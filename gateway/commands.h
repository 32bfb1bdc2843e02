// Doors of the gateway: `temper gateway try`, `temper trajectory show` (docs/doors.md).
#pragma once

#include <vector>

#include "common/command.h"

namespace temper::gateway {

const std::vector<Command>& Commands();

}  // namespace temper::gateway
