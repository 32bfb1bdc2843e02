// The picture of `temper pool sim --plot`: one row a policy, a column a batch; red bars: the largest staleness of the batch
// (grey line: the bound), blue bars: how long the trainer waited for it.
#pragma once

#include <string>
#include <vector>

#include "datapool/sim.h"

namespace temper::datapool {

// A PNG file.
std::string DrawReports(const std::vector<WorldReport>& reports);

}  // namespace temper::datapool
