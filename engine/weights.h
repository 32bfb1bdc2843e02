// Compute weights: what a forward pass reads. One 64-byte aligned contiguous buffer that is also the wire form of weight
// sync: matrices as panels (docs/numerics.md 3), norm gains as fp32 vectors. compute = round-to-nearest-even(master), a pure
// function, so trainer and workers read the very same numbers. Nothing derived (no transposed panels) is in the buffer.
//
// Layout, parts in this order, each starting on a 64-byte border:
//   embedding panel (also the head when tied) · per layer: input gain, [q;k;v] panel, (their biases, stacked like its rows),
//   (gains of q and of k), o panel, (gain of the attention's output), gain before the MLP, [gate;up] panel, down panel, (gain of
//   its output) · final gain · head panel (untied only); in brackets what only some families have (engine/layer.h)
// A panel of an [N, K] matrix is [N16/16][K32/2][16] words of two bf16 (k even in the low half), or in f32 [N16/16][K32][16]
// floats, with N16 and K32 = N and K rounded up to 16 and 32 and zeros in the padding. Stacked matrices are each padded to
// 16 rows, then follow one another. Vectors are padded with zeros to 16 floats. A gain is what is multiplied with: where the
// master holds w and means 1 + w, the sum, rounded once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/status.h"
#include "engine/buffer.h"
#include "engine/config.h"
#include "engine/layer.h"
#include "engine/parameters.h"
#include "engine/threads.h"

namespace temper::engine {

class RopeTable;  // internal: cos and sin by position

// A panel inside the buffer. `rows` counts padded output rows (a multiple of 16), `depth` the padded reduced axis (of 32).
struct Panel {
  const std::byte* data = nullptr;
  int rows = 0;
  int depth = 0;
};

// 128-bit digest of the logical elements (padding does not enter): tensors in canonical order, row by row, in the profile's
// dtype. Equal digests = equal numbers, whatever the layout.
struct Digest {
  uint64_t high = 0;
  uint64_t low = 0;
  bool operator==(const Digest&) const = default;
  std::string Hex() const;  // 32 hexadecimal digits
};

size_t ComputeBytes(const ModelConfig& config, Profile profile);
// "panel16-v1/bf16" and so on: refuse another id before reading a byte.
std::string ComputeLayoutId(Profile profile);
// Writes the whole compute form; `out` has exactly ComputeBytes and 64-byte alignment. The same bytes with and without `threads`.
void Pack(const Parameters& params, Profile profile, std::span<std::byte> out, Threads* threads = nullptr);

// A read-only view. Copies are cheap and share the mapping. Thread-safe: immutable.
class ComputeWeights {
 public:
  struct Layer {
    LayerSpec spec;
    const RopeTable* rope;
    const float* input_gain;
    Panel qkv;  // rows: q at 0, k at q_rows, v at q_rows + kv_rows (each padded to 16)
    const float* qkv_bias;  // by row of the panel, or null
    const float *q_gain, *k_gain;  // null without
    Panel o;
    const float* attention_gain;  // null without
    const float* mlp_gain;
    Panel gate_up;  // gate at 0, up at ffn padded to 16
    Panel down;
    const float* out_gain;  // null without
  };

  ComputeWeights() = default;
  // `bytes`: exactly ComputeBytes(config, profile), 64-byte aligned, unchanged while any copy lives; `owner` is held as long
  // (the mapping). InvalidArgument when size, alignment or config do not fit.
  static Result<ComputeWeights> View(const ModelConfig& config, Profile profile, std::span<const std::byte> bytes,
                                     std::shared_ptr<const void> owner);
  // Packs into a buffer of its own.
  static ComputeWeights FromParameters(const Parameters& params, Profile profile);

  bool empty() const { return bytes_.empty(); }
  const ModelConfig& config() const { return config_; }
  Profile profile() const { return profile_; }
  std::span<const std::byte> bytes() const { return bytes_; }
  // Reads the whole buffer once.
  Digest ComputeDigest() const;

  // The parts, for the engine's own passes.
  const Panel& embedding() const { return embedding_; }
  const Panel& head() const { return head_; }
  const Layer& layer(int i) const { return layers_[i]; }
  const float* final_gain() const { return final_gain_; }
  const ModelSpec& spec() const { return spec_; }

 private:
  ModelConfig config_;
  Profile profile_ = Profile::kBf16;
  std::span<const std::byte> bytes_;
  std::shared_ptr<const void> owner_;
  std::vector<std::shared_ptr<const RopeTable>> ropes_;
  ModelSpec spec_;
  Panel embedding_, head_;
  std::vector<Layer> layers_;
  const float* final_gain_ = nullptr;
};

// Packs into `memory`, which a loop keeps from step to step: fresh memory of this size costs as much as the packing. What it held
// before is overwritten, so no earlier view of it may be in use; `memory` must outlive the view.
ComputeWeights Repack(const Parameters& params, Profile profile, Threads& threads, Buffer& memory);

}  // namespace temper::engine
