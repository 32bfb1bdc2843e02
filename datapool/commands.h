// Doors: `temper pool sim`, `temper pool verify`.
#pragma once

#include <vector>

#include "common/command.h"

namespace temper::datapool {

const std::vector<Command>& Commands();

}  // namespace temper::datapool
