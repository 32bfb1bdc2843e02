// The master weights: fp32 tensors under their Hugging Face names, in one contiguous buffer and one canonical order.
// Gradients and optimizer moments have the same shape and use the same type.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/buffer.h"
#include "engine/config.h"

namespace temper::engine {

struct TensorSpec {
  std::string name;            // "model.layers.0.self_attn.q_proj.weight"
  std::vector<int64_t> shape;  // {out, in} for a matrix (row-major), {n} for a vector
  int64_t offset = 0;          // in floats, into Parameters::flat()
  int64_t size = 0;            // in floats
  bool gain = false;           // of a norm: what is stored may mean 1 more (engine/layer.h)
  bool matrix() const { return shape.size() == 2; }
};

// Canonical order: embed_tokens; per layer those of LayerTensors (engine/layer.h), for Llama input_layernorm, q, k, v, o,
// post_attention_layernorm, gate, up, down; norm; lm_head (absent when tied).
std::vector<TensorSpec> TensorSpecs(const ModelConfig& config);

// Movable, copyable (a copy copies the numbers). Not thread-safe for writing; tensors do not overlap.
class Parameters {
 public:
  Parameters() = default;
  explicit Parameters(const ModelConfig& config);  // all zero

  const ModelConfig& config() const { return config_; }
  const std::vector<TensorSpec>& tensors() const { return tensors_; }
  std::span<float> flat() { return data_; }
  std::span<const float> flat() const { return data_; }
  std::span<float> tensor(size_t index) { return flat().subspan(tensors_[index].offset, tensors_[index].size); }
  std::span<const float> tensor(size_t index) const {
    return flat().subspan(tensors_[index].offset, tensors_[index].size);
  }
  // Index of a name in tensors(), or -1.
  int Find(std::string_view name) const;
  void SetZero();

 private:
  ModelConfig config_;
  std::vector<TensorSpec> tensors_;
  std::vector<float, Allocator<float>> data_;
};
using Gradients = Parameters;

// A new policy: norms 1, biases 0, embedding of standard deviation 1/sqrt(width), a head of its own 0.02, matrices of standard
// deviation sqrt(2 / (5 * width)) (those that write the residual stream divided by sqrt(2 * layers)). A pure function of (config,
// seed) on every machine.
Parameters InitParameters(const ModelConfig& config, uint64_t seed);

}  // namespace temper::engine
