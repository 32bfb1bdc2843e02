// The doors of the job: `temper run`, `temper serve`, `temper doctor`, `temper top`.
#pragma once

#include <vector>

#include "common/command.h"

namespace temper::job {

const std::vector<Command>& Commands();

}  // namespace temper::job
