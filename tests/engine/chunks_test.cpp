// Trees in pre-order chunks: the same log-probabilities to the bit and the same gradient, in the memory of a chunk and of root paths.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <span>

#include "engine/engine.h"
#include "engine/train_pass.h"
#include "tests/engine/test_models.h"

namespace temper::engine {
namespace {

struct Trained {
  std::vector<float> logprobs, gradient;
};

Trained Train(TrainPass& pass, const ComputeWeights& weights, const TreeBatch& tree, const std::vector<float>& coef,
              int chunk_nodes, bool recompute) {
  ForwardOptions options;
  options.chunk_nodes = chunk_nodes;
  options.recompute = recompute;
  const auto row = pass.Forward(weights, tree, options);
  EXPECT_TRUE(row.ok()) << row.status().ToString();
  Gradients grads(weights.config());
  Trained out;
  out.logprobs.assign(row->begin(), row->end());
  pass.Backward(coef, grads);
  out.gradient.assign(grads.flat().begin(), grads.flat().end());
  return out;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// |a - b| / |b|
double Distance(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    difference += std::pow(static_cast<double>(a[i]) - b[i], 2);
    norm += std::pow(static_cast<double>(b[i]), 2);
  }
  return std::sqrt(difference / norm);
}

class Chunks : public testing::TestWithParam<std::tuple<Profile, NamedConfig>> {};
INSTANTIATE_TEST_SUITE_P(All, Chunks, testing::Combine(testing::Values(Profile::kBf16, Profile::kF32), testing::ValuesIn(AllConfigs())),
                         [](const auto& which) {
                           return std::string(ProfileName(std::get<0>(which.param))) + "_" + std::get<1>(which.param).name;
                         });

// Could go wrong: a chunk reads keys of another branch, loses what a later one pulled on its own, or takes it twice.
TEST_P(Chunks, GiveTheSameLogprobsAndGradient) {
  const auto& [profile, model] = GetParam();
  const ModelConfig& c = model.config;
  std::mt19937_64 rng(6);
  const ComputeWeights weights = ComputeWeights::FromParameters(TestParameters(c, 3), profile);
  const TreeBatch tree = ForkedTree(rng, c.vocab, 140, 2);
  const std::vector<float> coef = RandomCoefficients(rng, tree);
  auto engine = MakeEngine(CpuPath::kAuto, 2);
  TrainPass pass(*engine);
  const Trained whole = Train(pass, weights, tree, coef, 0, false);
  for (const int chunk_nodes : {1, 7, 33, 64, 200, tree.size()}) {
    if (chunk_nodes == 1 && std::string(model.name) != "odd") continue;  // slow
    for (const bool recompute : {false, true}) {
      SCOPED_TRACE(testing::Message() << chunk_nodes << " nodes, recompute " << recompute);
      const Trained got = Train(pass, weights, tree, coef, chunk_nodes, recompute);
      EXPECT_TRUE(SameBits(got.logprobs, whole.logprobs));
      // In bf16 what enters a product is rounded per chunk or once for all, as with another batch.
      EXPECT_LE(Distance(got.gradient, whole.gradient), profile == Profile::kF32 ? 2e-6 : 3e-3);
      if (chunk_nodes == tree.size()) {
        EXPECT_TRUE(SameBits(got.gradient, whole.gradient));
      }
    }
  }
  EXPECT_TRUE(SameBits(Train(pass, weights, tree, coef, 0, false).gradient, whole.gradient)) << "after chunks, in used buffers";
}

// Could go wrong: chunks save nothing.
TEST(ChunkMemory, IsThatOfOneChunkAndOfPaths) {
  ModelConfig c = TinyConfig();
  c.max_positions = 4096;
  c.layers = 6;
  const ComputeWeights weights = ComputeWeights::FromParameters(TestParameters(c, 7), Profile::kBf16);
  std::mt19937_64 rng(1);
  const float one = 1;
  const std::vector<int32_t> prompt = RandomIds(rng, 300, c.vocab);
  TreeBuilder group, row;
  for (int i = 0; i < 16; ++i) {
    std::vector<int32_t> ids = prompt;
    const std::vector<int32_t> own = RandomIds(rng, 300, c.vocab);
    ids.insert(ids.end(), own.begin(), own.end());
    group.AddRow(ids, std::span(&one, 1));
  }
  row.AddRow(RandomIds(rng, 4000, c.vocab), std::span(&one, 1));
  for (const TreeBatch& tree : {group.Build(nullptr), row.Build(nullptr)}) {
    size_t whole = 0;
    for (const int chunk_nodes : {0, 1024, 256}) {
      auto engine = MakeEngine(CpuPath::kAuto, 2);
      TrainPass pass(*engine);
      Train(pass, weights, tree, std::vector<float>(tree.size(), 1), chunk_nodes, false);
      if (chunk_nodes == 0) whole = pass.bytes();
      if (chunk_nodes == 256) {
        EXPECT_LT(3 * pass.bytes(), whole);
      }
    }
  }
}

}  // namespace
}  // namespace temper::engine
