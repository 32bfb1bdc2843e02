// Rotary angles by position: cos and sin as fp32, computed once in extended precision (x87, so the same on every machine)
// and shared by every pass over a config.
#pragma once

#include <memory>
#include <vector>

#include "engine/config.h"

namespace temper::engine {

struct RopeTable {
  int half = 0;             // head_dim / 2
  std::vector<float> cos;   // [max_positions][half]
  std::vector<float> sin;
};

// Inverse frequency of each pair, scaling applied, in double ([head_dim / 2]).
std::vector<double> InverseFrequencies(const ModelConfig& config);
// Cached while anyone holds it. Thread-safe.
std::shared_ptr<const RopeTable> GetRopeTable(const ModelConfig& config);

}  // namespace temper::engine
