// Doors: `temper sandbox run`, `temper sandbox remains`.
#pragma once

#include <vector>

#include "common/command.h"

namespace temper::sandbox {

const std::vector<Command>& Commands();

}  // namespace temper::sandbox
