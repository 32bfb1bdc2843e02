// Targets: further tokens scored where a node's own is, what a distillation over a teacher's likeliest tokens asks for.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <set>

#include <fmt/format.h>

#include "engine/kept_set.h"
#include "engine/train_pass.h"
#include "tests/engine/test_models.h"

namespace temper::engine {
namespace {

// The same data twice: `asked` has targets, in `leaves` each of them is a node of its own, which is what a target is defined by.
struct Twice {
  TreeBatch asked, leaves;
  std::vector<int32_t> same;  // per item of `asked`, the node of `leaves`
};

Twice WithTargets(std::mt19937_64& rng, const ModelConfig& c) {
  TreeBuilder asked, leaves;
  const float temperatures[] = {1, 1.25f};
  struct Wish {
    int32_t handle, token, leaf;
  };
  std::vector<Wish> wishes;
  std::vector<std::pair<int32_t, int32_t>> handles;
  for (const auto& ids : ForkedRows(rng, c.vocab, 90)) {
    const std::vector<std::string> kept = SomeKept(ids, c.vocab);
    const std::span<const float> t(&temperatures[handles.size() % 2], 1);
    const std::vector<int32_t> a = asked.AddRow(ids, t, kept), b = leaves.AddRow(ids, t, kept);
    for (size_t i = 0; i < ids.size(); ++i) handles.emplace_back(a[i], b[i]);
    for (size_t i = 1; i < ids.size(); ++i) {
      if (rng() % 3 == 0) continue;
      std::vector<int32_t> choice;
      if (kept[i].empty()) {
        choice = RandomIds(rng, 4, c.vocab);
      } else {
        EXPECT_TRUE(DecodeKept(kept[i], c.vocab, &choice).ok());
        std::shuffle(choice.begin(), choice.end(), rng);
        choice.resize(std::min<size_t>(choice.size(), 3));
      }
      for (int32_t token : choice) wishes.push_back({a[i], token, leaves.AddNode(b[i - 1], token, t[0], kept[i])});
    }
  }
  std::vector<int32_t> index, leaf_index;
  Twice out;
  out.asked = asked.Build(&index);
  out.leaves = leaves.Build(&leaf_index);
  out.same.resize(static_cast<size_t>(out.asked.size()));
  for (const auto& [a, b] : handles) out.same[index[a]] = leaf_index[b];
  for (const Wish& wish : wishes) {
    out.asked.targets.push_back({index[wish.handle], wish.token});
    out.same.push_back(leaf_index[wish.leaf]);
  }
  return out;
}

// Goes wrong if a target is read from another distribution than its node's own token, pulls on other logits, or is lost where the pass is
// cut into chunks.
TEST(Targets, AreLeavesThatAreNotComputed) {
  for (const auto& [name, c] : AllConfigs()) {
    const Parameters params = TestParameters(c, 7);
    std::mt19937_64 rng(9);
    const Twice twice = WithTargets(rng, c);
    ASSERT_GT(twice.asked.targets.size(), 100u);
    ASSERT_GT(twice.leaves.size(), twice.asked.size() + 100);
    std::vector<float> coef(static_cast<size_t>(twice.asked.items())), leaf_coef(static_cast<size_t>(twice.leaves.size()), 0.0f);
    for (size_t i = 0; i < coef.size(); ++i) {
      coef[i] = static_cast<float>(static_cast<int>(rng() % 9) - 4) / 4;  // sums of them are exact
      leaf_coef[twice.same[i]] += coef[i];
    }
    for (const Profile profile : {Profile::kBf16, Profile::kF32}) {
      const ComputeWeights weights = ComputeWeights::FromParameters(params, profile);
      std::vector<float> bits;
      for (const CpuPath path : AvailableCpuPaths()) {
        auto engine = MakeEngine(path, 2);
        TrainPass pass(*engine);
        SCOPED_TRACE(fmt::format("{} {} {}", name, ProfileName(profile), CpuPathName(path)));
        const auto want = pass.Forward(weights, twice.leaves);
        ASSERT_TRUE(want.ok()) << want.status().ToString();
        const std::vector<float> leaves(want->begin(), want->end());
        Gradients leaf_grads(c);
        pass.Backward(leaf_coef, leaf_grads);
        for (const auto& [chunk, recompute] : {std::pair(0, false), {0, true}, {64, false}, {33, true}}) {
          ForwardOptions options;
          options.chunk_nodes = chunk;
          options.recompute = recompute;
          const auto got = pass.Forward(weights, twice.asked, options);
          ASSERT_TRUE(got.ok()) << got.status().ToString();
          ASSERT_EQ(static_cast<int>(got->size()), twice.asked.items());
          for (size_t i = 0; i < got->size(); ++i) {
            ASSERT_EQ(std::memcmp(&(*got)[i], &leaves[twice.same[i]], sizeof(float)), 0) << i << ": " << (*got)[i] << " " << leaves[twice.same[i]];
          }
          Gradients grads(c);
          pass.Backward(coef, grads);
          double error = 0, norm = 0;
          for (size_t i = 0; i < grads.flat().size(); ++i) {
            error += std::pow(static_cast<double>(grads.flat()[i]) - leaf_grads.flat()[i], 2);
            norm += std::pow(static_cast<double>(leaf_grads.flat()[i]), 2);
          }
          EXPECT_GT(norm, 0);
          EXPECT_LT(std::sqrt(error / norm), profile == Profile::kBf16 ? 1e-2 : 1e-5) << chunk;
          if (chunk > 0) continue;
          if (bits.empty()) bits.assign(grads.flat().begin(), grads.flat().end());
          EXPECT_EQ(std::memcmp(bits.data(), grads.flat().data(), bits.size() * sizeof(float)), 0) << "the same on every path";
        }
      }
    }
  }
}

// Goes wrong if what a draw was read from is another row than that of its logprob, or is shown twice or not at all.
TEST(Targets, DrawsShowTheirDistribution) {
  const ModelConfig c = OddConfig();
  const ComputeWeights weights = ComputeWeights::FromParameters(TestParameters(c, 7), Profile::kBf16);
  std::mt19937_64 rng(9);
  const Twice twice = WithTargets(rng, c);
  std::vector<uint8_t> wanted(static_cast<size_t>(twice.asked.size()));
  for (uint8_t& w : wanted) w = rng() % 2;
  auto engine = MakeEngine(CpuPath::kAuto, 2);
  TrainPass pass(*engine);
  for (const int chunk : {0, 40}) {
    std::vector<float> read(wanted.size(), 0);
    std::vector<std::atomic<int>> seen(wanted.size());
    ForwardOptions options;
    options.wanted = wanted;
    options.keep = false;
    options.chunk_nodes = chunk;
    options.on_draw = [&](int node, const float* logits, float lse) {
      ++seen[node];
      read[node] = logits[twice.asked.token[node]] - lse;
    };
    const auto logprobs = pass.Forward(weights, twice.asked, options);
    ASSERT_TRUE(logprobs.ok());
    for (int v = 0; v < twice.asked.size(); ++v) {
      const bool drawn = wanted[v] && twice.asked.parent[v] >= 0;
      EXPECT_EQ(seen[v], drawn ? 1 : 0) << v;
      EXPECT_TRUE(!drawn || read[v] == (*logprobs)[v]) << v;
      EXPECT_EQ(std::isnan((*logprobs)[v]), !drawn) << v;
    }
    for (size_t i = 0; i < twice.asked.targets.size(); ++i) {
      EXPECT_EQ(std::isnan((*logprobs)[twice.asked.size() + i]), !wanted[twice.asked.targets[i].node]) << i;
    }
  }
}

// Goes wrong if a target that has no logprob is trained on.
TEST(Targets, BadOnesAreRefused) {
  const ModelConfig c = TinyConfig();
  auto engine = MakeEngine(CpuPath::kAuto, 1);
  const ComputeWeights weights = ComputeWeights::FromParameters(TestParameters(c, 4), Profile::kF32);
  TrainPass pass(*engine);
  TreeBuilder builder;
  const int32_t root = builder.AddNode(-1, 1, 1);
  builder.AddNode(root, 2, 1);
  builder.AddNode(root, 3, 1, EncodeKept(std::vector<int32_t>{3, 5}, c.vocab));
  for (const TreeBatch::Target bad : {TreeBatch::Target{0, 1}, {3, 1}, {-1, 1}, {1, c.vocab}, {1, -1}, {2, 4}}) {
    TreeBatch tree = builder.Build(nullptr);
    tree.targets = {{1, 7}, {2, 5}, bad};
    const auto forward = pass.Forward(weights, tree);
    EXPECT_EQ(forward.status().code(), StatusCode::kInvalidArgument) << bad.node << " " << bad.token;
    EXPECT_NE(forward.status().message().find("target 2"), std::string::npos) << forward.status().message();
  }
}

}  // namespace
}  // namespace temper::engine
