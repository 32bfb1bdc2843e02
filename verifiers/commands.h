// Door: `temper verifier run`.
#pragma once

#include <vector>

#include "common/command.h"

namespace temper::verifiers {

const std::vector<Command>& Commands();

}  // namespace temper::verifiers
