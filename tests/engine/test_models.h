// Small models, rows and trees for engine tests, all from seeds.
#pragma once

#include <cmath>
#include <cstdint>
#include <memory>
#include <ostream>
#include <random>
#include <vector>

#include "engine/engine.h"
#include "engine/kept_set.h"
#include "engine/layer.h"
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

struct NamedConfig {
  const char* name;
  ModelConfig config;
};
inline void PrintTo(const NamedConfig& model, std::ostream* out) { *out << model.name; }

// One of every kind of layer, in odd sizes: windows shorter than a tile, longer than a page, and on some layers only.
inline std::vector<NamedConfig> AllConfigs() {
  ModelConfig qwen2 = OddConfig(), qwen3 = OddConfig(), mistral = OddConfig(), gemma = OddConfig();
  qwen2.family = Family::kQwen2;
  qwen2.tied = true;
  qwen2.window = 70;
  qwen2.windowed = {0, 1};
  qwen2.rope_scaling.kind = RopeScaling::Kind::kYarn;
  qwen2.rope_scaling.factor = 3;
  qwen2.rope_scaling.original_max_positions = 64;
  qwen2.rope_scaling.attention_factor = 1.1;
  qwen3.family = Family::kQwen3;
  qwen3.head_dim = 18;
  mistral.family = Family::kMistral;
  mistral.window = 20;
  gemma.family = Family::kGemma3;
  gemma.tied = true;
  gemma.layers = 3;
  gemma.head_dim = 12;
  gemma.window = 37;
  gemma.windowed = {1, 0, 1};
  gemma.query_scalar = 15;
  gemma.score_cap = 3;
  gemma.logit_cap = 4;
  ModelConfig gemma2 = gemma;
  gemma2.family = Family::kGemma2;
  gemma2.windowed = {0, 1, 0};
  return {{"tiny", TinyConfig()}, {"odd", OddConfig()}, {"qwen2", qwen2},  {"qwen3", qwen3},
          {"mistral", mistral},   {"gemma3", gemma},    {"gemma2", gemma2}};
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

// For each token of a row none or some set that holds it (engine/kept_set.h), a function of position and token alone, so that equal prefixes
// have equal sets.
inline std::vector<std::string> SomeKept(const std::vector<int32_t>& row, int vocab) {
  std::vector<std::string> out;
  for (size_t i = 0; i < row.size(); ++i) {
    std::mt19937_64 rng(i * 1000003 + static_cast<size_t>(row[i]));
    const uint64_t share[] = {0, 2, 20, 60, 97};  // of a hundred
    const uint64_t take = share[rng() % 5];
    out.emplace_back();
    if (!take) continue;
    std::vector<int32_t> ids;
    for (int32_t id = 0; id < vocab; ++id) {
      if (rng() % 100 < take || id == row[i]) ids.push_back(id);
    }
    out.back() = EncodeKept(ids, vocab);
  }
  return out;
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

// The tree of forked rows, `roots` times, at one inverse temperature.
inline TreeBatch ForkedTree(std::mt19937_64& rng, int vocab, int longest, int roots = 1) {
  TreeBuilder builder;
  const float inverse_temperature = 1.25f;
  for (int root = 0; root < roots; ++root) {
    for (const auto& row : ForkedRows(rng, vocab, longest)) builder.AddRow(row, std::span(&inverse_temperature, 1));
  }
  return builder.Build(nullptr);
}

// A coefficient in [-1, 1] for every node.
inline std::vector<float> RandomCoefficients(std::mt19937_64& rng, const TreeBatch& tree) {
  std::vector<float> out(static_cast<size_t>(tree.size()));
  for (float& x : out) x = static_cast<float>(rng() % 2001) / 1000 - 1;
  return out;
}

inline std::unique_ptr<Engine> MakeEngine(CpuPath path, int threads) {
  auto engine = Engine::Create({path, threads});
  TEMPER_CHECK(engine.ok()) << engine.status().ToString();
  return *std::move(engine);
}

}  // namespace temper::engine
