// Kept sets (engine/kept_set.h) as the doors write them: a list with, for each token, null (the whole vocabulary) or the kept ids, rising.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/json.h"
#include "common/status.h"

namespace temper::engine {

void WriteKept(JsonWriter& w, std::span<const std::string> kept);

// The sets of draws of `tokens`, one each. InvalidArgument names the entry: another count, ids that do not rise, lie outside the vocabulary
// or lack the token.
Result<std::vector<std::string>> ReadKept(const JsonRef& list, std::span<const int32_t> tokens, int vocab);

}  // namespace temper::engine
