// Small models, rows and trees for engine tests, all from seeds.
#pragma once

#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "engine/engine.h"
#include "engine/parameters.h"
#include "engine/tree_batch.h"

namespace temper::engine {

// Sizes that are multiples of nothing convenient, grouped queries, untied head.
inline ModelConfig OddConfig() {
  ModelConfig c;
  c.vocab = 77;
  c.layers = 2;
  c.width = 44;
  c.heads = 6;
  c.kv_heads = 2;
  c.head_dim = 10;
  c.ffn = 52;
  c.max_positions = 400;
  c.tied = false;
  return c;
}

// The shape of the quickstart's policy, in small.
inline ModelConfig TinyConfig() {
  ModelConfig c;
  c.vocab = 300;
  c.layers = 2;
  c.width = 64;
  c.heads = 2;
  c.kv_heads = 1;
  c.head_dim = 32;
  c.ffn = 96;
  c.max_positions = 512;
  return c;
}

// Weights far enough from zero that attention is not flat and every tensor matters; an embedding of deviation 0.05, so that
// logits keep a moderate size.
inline Parameters TestParameters(const ModelConfig& config, uint64_t seed) {
  Parameters params = InitParameters(config, seed);
  std::mt19937_64 rng(seed);
  for (size_t i = 0; i < params.tensors().size(); ++i) {
    const bool matrix = params.tensors()[i].matrix();
    const float factor = i == 0 ? 0.05f * std::sqrt(static_cast<float>(config.width)) : 2.5f;
    for (float& x : params.tensor(i)) {
      if (matrix) {
        x *= factor;
      } else {
        x += 0.2f * (static_cast<float>(rng() % 1000) / 500 - 1);
      }
    }
  }
  return params;
}

inline std::vector<int32_t> RandomIds(std::mt19937_64& rng, int n, int vocab) {
  std::vector<int32_t> ids(n);
  for (int32_t& id : ids) id = static_cast<int32_t>(rng() % vocab);
  return ids;
}

// Rows that share prefixes at many depths: exact duplicates, strict prefixes, forks at token 0, one-token rows, forks on and
// beside page borders.
inline std::vector<std::vector<int32_t>> ForkedRows(std::mt19937_64& rng, int vocab, int longest) {
  std::vector<std::vector<int32_t>> rows;
  rows.push_back(RandomIds(rng, longest, vocab));
  for (int keep : {0, 1, 5, 31, 63, 64, 65, 100, 127, 128}) {
    if (keep > longest - 2) break;
    std::vector<int32_t> row(rows[rng() % rows.size()]);
    row.resize(std::min<size_t>(row.size(), keep));
    const auto tail = RandomIds(rng, 1 + static_cast<int>(rng() % (longest - keep)), vocab);
    row.insert(row.end(), tail.begin(), tail.end());
    rows.push_back(row);
  }
  rows.push_back(rows[1]);
  rows.push_back({rows[0].begin(), rows[0].begin() + longest / 2});
  rows.push_back({rows[0][0]});
  return rows;
}

inline std::unique_ptr<Engine> MakeEngine(CpuPath path, int threads) {
  auto engine = Engine::Create({path, threads});
  TEMPER_CHECK(engine.ok()) << engine.status().ToString();
  return *std::move(engine);
}

}  // namespace temper::engine
