// The engine's doors on ids: `temper engine score` and `temper engine grad` (docs/doors.md).
#pragma once

#include <vector>

#include "common/command.h"

namespace temper::engine {

const std::vector<Command>& Commands();

}  // namespace temper::engine
