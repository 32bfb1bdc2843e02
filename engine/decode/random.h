// Counter-based random numbers for sampling: no state, so a draw does not depend on batch size, order or thread.
#pragma once

#include <array>
#include <cstdint>

#include "engine/decode/types.h"

namespace temper::engine {

// A uniform number in [0, 1) with 53 bits: Philox-4x32-10 keyed by the SampleKey, with the absolute position of the token
// (its index in prompt + completion) as the counter. Pure; any thread.
double UniformAt(const SampleKey& key, int64_t position);

// The Philox-4x32-10 block function (Salmon et al., 2011).
std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

}  // namespace temper::engine
