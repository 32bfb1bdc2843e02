#include "engine/memory.h"

#include <algorithm>

#include "engine/buffer.h"
#include "engine/forward.h"
#include "engine/kv_pool.h"
#include "engine/parameters.h"
#include "engine/weights.h"

namespace temper::engine {
namespace {

// Of a node or row beside the buffers: the tree while it is built and laid out, the plan, logprobs, coefficients.
constexpr int64_t kListBytes = 160;

// cos and sin of every position that is reached, for each kind of layer.
int64_t AngleBytes(const ModelConfig& c, int64_t positions) {
  return SpecOf(c).ropes * ((std::min<int64_t>(positions, c.max_positions) + 255) / 256 * 256) * c.head_dim * 4;
}

}  // namespace

int64_t ParameterCount(const ModelConfig& config) {
  int64_t count = 0;
  for (const TensorSpec& spec : TensorSpecs(config)) count += static_cast<int64_t>(spec.size);
  return count;
}

int64_t TrainBytes(const ModelConfig& c, Profile profile, int64_t tokens, int64_t positions, int64_t pass_bytes) {
  return 16 * ParameterCount(c) + static_cast<int64_t>(ComputeBytes(c, profile)) + AngleBytes(c, positions) + kListBytes * tokens + pass_bytes;
}

int64_t ScoreBytes(const ModelConfig& c, Profile profile, int64_t file_bytes, int64_t tokens, int64_t positions, int64_t pass_bytes) {
  const int64_t fp32 = 4 * ParameterCount(c), packed = static_cast<int64_t>(ComputeBytes(c, profile));
  return std::max({file_bytes + fp32, fp32 + packed, packed + AngleBytes(c, positions) + kListBytes * tokens + pass_bytes});
}

int64_t DecodeBytes(const ModelConfig& c, Profile profile, int threads, int64_t pages, int rows, int logit_rows) {
  const int steps[] = {rows, logit_rows};
  const size_t pass = ForwardPass::PlannedBytes(c, profile, threads, steps, logit_rows, /*logits_given=*/true, Keep::kNothing);
  return pages * static_cast<int64_t>(KvPool::PageBytes(c, profile)) + static_cast<int64_t>(pass) +
         static_cast<int64_t>(Buffer::Rounded(static_cast<size_t>(logit_rows) * c.vocab * 4)) + AngleBytes(c, c.max_positions) + kListBytes * rows;
}

}  // namespace temper::engine
