#include "engine/parameters.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "common/check.h"
#include "engine/layer.h"

namespace temper::engine {

std::vector<TensorSpec> TensorSpecs(const ModelConfig& c) {
  std::vector<TensorSpec> out;
  int64_t offset = 0;
  auto add = [&](std::string name, std::vector<int64_t> shape, bool gain) {
    int64_t size = 1;
    for (int64_t n : shape) size *= n;
    out.push_back({std::move(name), std::move(shape), offset, size, gain});
    offset += size;
  };
  const std::vector<LayerTensor> of_layer = LayerTensors(c);
  add("model.embed_tokens.weight", {c.vocab, c.width}, false);
  for (int l = 0; l < c.layers; ++l) {
    for (const LayerTensor& t : of_layer) add(fmt::format("model.layers.{}.{}", l, t.name), t.shape, t.gain());
  }
  add("model.norm.weight", {c.width}, true);
  if (!c.tied) add("lm_head.weight", {c.vocab, c.width}, false);
  return out;
}

Parameters::Parameters(const ModelConfig& config) : config_(config), tensors_(TensorSpecs(config)) {
  data_.assign(tensors_.back().offset + tensors_.back().size, 0.0f);
}

int Parameters::Find(std::string_view name) const {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (tensors_[i].name == name) return static_cast<int>(i);
  }
  return -1;
}

void Parameters::SetZero() { std::fill(data_.begin(), data_.end(), 0.0f); }

namespace {

uint64_t Mix(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Close to a standard normal without a mathematical library, so the same on every machine: the sum of twelve uniforms of
// 21 bits, less its mean.
float Normal(uint64_t key, uint64_t counter) {
  int64_t sum = 0;
  for (int i = 0; i < 4; ++i) {
    const uint64_t x = Mix(key ^ Mix(counter * 4 + i));
    for (int j = 0; j < 3; ++j) sum += static_cast<int64_t>(x >> (21 * j) & 0x1fffff);
  }
  return static_cast<float>((static_cast<double>(sum) - 6.0 * 0x1fffff) / 0x200000);
}

}  // namespace

Parameters InitParameters(const ModelConfig& config, uint64_t seed) {
  Parameters params(config);
  const double inner = std::sqrt(2.0 / (5.0 * config.width));
  for (size_t i = 0; i < params.tensors().size(); ++i) {
    const TensorSpec& spec = params.tensors()[i];
    std::span<float> data = params.tensor(i);
    if (!spec.matrix()) {
      std::fill(data.begin(), data.end(), spec.gain ? static_cast<float>(1 - SpecOf(config).gain_offset) : 0.0f);
      continue;
    }
    double deviation = inner;
    if (spec.name.ends_with("o_proj.weight") || spec.name.ends_with("down_proj.weight")) {
      deviation /= std::sqrt(2.0 * config.layers);
    }
    // An embedding that is small beside what the layers write hides which token stands where, and copying is learnt late: with 0.02
    // a policy of width 128 begins to copy after some 300,000 tokens of warm-up, with 1/sqrt(width) before 100,000.
    if (spec.name == "model.embed_tokens.weight") deviation = 1.0 / std::sqrt(config.width);
    if (spec.name == "lm_head.weight") deviation = 0.02;
    const uint64_t key = Mix(Mix(seed) + i);
    for (size_t j = 0; j < data.size(); ++j) data[j] = Normal(key, j) * static_cast<float>(deviation);
  }
  return params;
}

}  // namespace temper::engine
