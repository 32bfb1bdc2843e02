// The door of decoding: `temper engine generate`.
#pragma once

#include <vector>

#include "common/command.h"

namespace temper::engine {

const std::vector<Command>& DecodeCommands();

}  // namespace temper::engine
