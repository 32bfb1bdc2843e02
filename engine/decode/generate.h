// The work behind `temper engine generate` (docs/doors.md): lines of requests in, lines of tokens out.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "engine/engine.h"
#include "engine/weights.h"

namespace temper::engine {

struct GenerateOutput {
  std::string text;    // one line for each line of the input, in order
  int bad_lines = 0;   // answered with an error
};

// Runs all lines of `input` (JSON Lines; blank ones are skipped) as one continuous batch. `seed` serves lines without one.
GenerateOutput GenerateLines(Engine& engine, const ComputeWeights& weights, std::string_view input, uint64_t seed);

}  // namespace temper::engine
