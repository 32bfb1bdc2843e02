// Rotary angles by position: cos and sin as fp32, computed once in extended precision (x87, so the same on every machine)
// and shared by every pass over a config. Rows appear when first asked for: a model may have a hundred thousand positions.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "engine/config.h"

namespace temper::engine {

// Thread-safe.
class RopeTable {
 public:
  RopeTable(const ModelConfig& config, int which);

  // [head_dim / 2] each, times the attention factor of the scaling; position below max_positions.
  const float* cos(int position) const { return Row(position); }
  const float* sin(int position) const { return Row(position) + inverse_.size(); }

 private:
  static constexpr int kBlock = 256;  // positions computed together
  struct Block {
    std::once_flag once;
    std::vector<float> rows;  // [kBlock][cos, sin]
  };
  const float* Row(int position) const;

  std::vector<double> inverse_;
  double factor_;
  std::unique_ptr<Block[]> blocks_;
};

// Of table `which` of a model (LayerSpec::rope): 0 its own, 1 that of Gemma's windowed layers.
// Inverse frequency of each pair, scaling applied, in double ([head_dim / 2]).
std::vector<double> InverseFrequencies(const ModelConfig& config, int which);
// What cos and sin are multiplied by.
double AngleFactor(const ModelConfig& config, int which);
// Cached while anyone holds it. Thread-safe.
std::shared_ptr<const RopeTable> GetRopeTable(const ModelConfig& config, int which);

}  // namespace temper::engine
