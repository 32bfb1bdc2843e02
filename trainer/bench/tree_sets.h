// Data sets of `temper bench tree`: rollouts as the gateway hands them over, in the shapes in which agents share prefixes.
#pragma once

#include <string>
#include <vector>

#include "common/status.h"
#include "trainer/trajectory.h"

namespace temper::trainer::bench {

struct TreeSet {
  std::string name;    // "grpo_short"
  std::string about;   // "a group of 8: prompt 64, answers of 96"
  std::vector<Group> groups;     // in canonical order
  std::vector<uint8_t> silent = {};  // of BatchOptions
  bool shares = true;  // false: no two rows begin alike
};
// The words `--only` may hold.
const std::vector<std::string>& TreeSetNames();
// Tokens are drawn from `vocab`, the same at every call.
TreeSet MakeTreeSet(const std::string& name, int vocab);

// Rows of `temper pool export`, a set a step, in order. Rows of one rollout become its runs again: what a row has in common with those before
// it is there once, and a token that was drawn is drawn in the first row that holds it. InvalidArgument names the line.
Result<std::vector<TreeSet>> TreeSetsOfRows(const std::string& path, int vocab);

}  // namespace temper::trainer::bench
