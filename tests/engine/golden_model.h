// The model of tests/golden/engine/llama_f64.json.
#pragma once

#include "common/json.h"
#include "engine/parameters.h"

namespace temper::engine {

// Of the golden file's "config".
inline ModelConfig GoldenConfig(const json::value& config) {
  const auto size = [&](const char* key) { return static_cast<int>(config.at(key).as_int64()); };
  ModelConfig c;
  c.vocab = size("vocab");
  c.layers = size("layers");
  c.width = size("width");
  c.heads = size("heads");
  c.kv_heads = size("kv_heads");
  c.head_dim = size("head_dim");
  c.ffn = size("ffn");
  c.max_positions = size("max_positions");
  c.rope_theta = config.at("rope_theta").to_number<double>();
  c.rms_eps = config.at("rms_eps").to_number<double>();
  c.tied = config.at("tied").as_bool();
  return c;
}

// The weights of llama_f64.py.
inline Parameters GoldenParameters(const ModelConfig& c, uint64_t seed) {
  Parameters params = InitParameters(c, seed);
  for (size_t i = 0; i < params.tensors().size(); ++i) {
    auto data = params.tensor(i);
    for (size_t j = 0; j < data.size(); ++j) {
      data[j] = params.tensors()[i].matrix() ? data[j] * 2.5f : static_cast<float>(1 + (static_cast<int>(j % 7) - 3) / 16.0);
    }
  }
  return params;
}

}  // namespace temper::engine
