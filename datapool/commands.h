// Doors: `temper pool sim`, `verify`, `ls`, `explain`.
#pragma once

#include <vector>

#include "common/command.h"

namespace temper::datapool {

const std::vector<Command>& Commands();

}  // namespace temper::datapool
