// The kernels of the forward pass once more, in plain scalar code from their definitions (docs/numerics.md,
// docs/engine.md): a table that an engine can run (Engine::WithKernels), and tables with one fault each,
// which tests of exactness must catch.
#pragma once

#include "engine/cpu/ops.h"

namespace temper::engine {

// Slow. What only the backward pass calls is the AVX2 path's.
const cpu::Ops& ScalarOps(bool bf16);
// Scalar, but the products run down the reduced axis one by one instead of in the order of the definition.
const cpu::Ops& SequentialOps(bool bf16);
// Scalar, but attention takes its keys in tiles of 64 counted from where the tile of queries begins (a node,
// a chunk) instead of from position 0.
const cpu::Ops& NodeAlignedOps(bool bf16);

}  // namespace temper::engine
