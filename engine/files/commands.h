// Doors that take a MODEL for its files and its text: `temper model fetch|inspect|export`, `temper text encode|decode|render`.
// They live here, above text/, because MODEL may be a GGUF file.
#pragma once

#include <vector>

#include "common/command.h"

namespace temper::engine {

const std::vector<Command>& FileCommands();

}  // namespace temper::engine
