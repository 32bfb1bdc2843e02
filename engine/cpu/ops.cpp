#include "engine/cpu/ops.h"

namespace temper::engine::cpu {

size_t AttentionScratchBytes(int rows, int head_dim) {
  const size_t padded = (rows + 31) / 32 * 32, depth = (head_dim + 31) / 32 * 32;
  // Forward: q, s, p, pv, o, alpha; backward: s, dp, p, ds. Elements counted as 4 bytes, each array rounded up to a line.
  const size_t forward = padded * (QueryStride(head_dim) + 64 + 64 + depth + depth + 1), backward = padded * 64 * 4;
  return (forward > backward ? forward : backward) * 4 + 8 * 64;
}

}  // namespace temper::engine::cpu
