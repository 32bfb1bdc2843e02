// The AMX path over emulated tiles; needs AVX-512.
#pragma once

#include "engine/cpu/ops.h"

namespace temper::engine::cpu {

void EmulatedAmxGemm(const Gemm& g);
// The whole table of that path.
const Ops& EmulatedAmxOps(bool bf16);

}  // namespace temper::engine::cpu
