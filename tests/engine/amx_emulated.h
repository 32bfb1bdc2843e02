// The tiled GEMM over emulated tiles; needs AVX-512.
#pragma once

#include "engine/cpu/ops.h"

namespace temper::engine::cpu {

void EmulatedAmxGemm(const Gemm& g);

}  // namespace temper::engine::cpu
