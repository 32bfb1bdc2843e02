// The float64 path against finite differences, and the fast paths against the float64 path.
#include <gtest/gtest.h>

#include <cmath>

#include "engine/bf16.h"
#include "engine/reference.h"
#include "engine/train_pass.h"
#include "tests/engine/test_models.h"

namespace temper::engine {
namespace {

// Of tokens drawn among all others and among few of them.
struct Problem {
  TreeBatch tree;
  std::vector<float> coef;
  std::vector<double> coef64;
};

Problem MakeProblem(const ModelConfig& c, int longest, bool merge) {
  std::mt19937_64 rng(21);
  TreeBuilder builder(merge);
  std::vector<int32_t> index;
  std::vector<std::pair<int32_t, float>> pulls;
  int n = 0;
  for (const auto& row : ForkedRows(rng, c.vocab, longest)) {
    const float t = 1.0f + 0.25f * (n++ % 2);
    for (int32_t handle : builder.AddRow(row, std::span(&t, 1), SomeKept(row, c.vocab))) {
      pulls.push_back({handle, static_cast<float>(rng() % 2001) / 1000 - 1});
    }
  }
  Problem p;
  p.tree = builder.Build(&index);
  p.coef.assign(p.tree.size(), 0);
  for (auto [handle, x] : pulls) p.coef[index[handle]] += x;
  p.coef64.assign(p.coef.begin(), p.coef.end());
  return p;
}

double RelativeError(std::span<const double> want, std::span<const float> got) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    error += (want[i] - got[i]) * (want[i] - got[i]);
    norm += want[i] * want[i];
  }
  return std::sqrt(error / (norm + 1e-300));
}

// Could go wrong: the judge itself is wrong.
TEST(Reference, GradientIsTheSlopeOfTheObjective) {
  for (const auto& [name, c] : AllConfigs()) {
    if (c.head_dim == 32) continue;  // too large for differences of every tensor
    SCOPED_TRACE(name);
    Parameters params = TestParameters(c, 1);
    const Problem p = MakeProblem(c, 20, true);
    ReferenceOptions options;
    options.coef = p.coef64;
    options.gradient = true;
    const ReferenceResult r = RunReference(params, p.tree, options);
    options.gradient = false;
    std::mt19937_64 rng(2);
    for (size_t i = 0; i < params.tensors().size(); ++i) {
      const TensorSpec& spec = params.tensors()[i];
      // Along the gradient of the tensor and along a random sign pattern: fp32 masters allow steps of exact size only there.
      for (int trial = 0; trial < 2; ++trial) {
        std::vector<float> saved(params.tensor(i).begin(), params.tensor(i).end());
        double slope = 0, value[2];
        const float step = 1.0f / (1 << 18);
        std::vector<int> sign(spec.size);
        for (int& s : sign) s = rng() % 2 ? 1 : -1;
        if (trial == 0) {
          for (int64_t j = 0; j < spec.size; ++j) sign[j] = r.gradient[spec.offset + j] > 0 ? 1 : -1;
        }
        std::vector<double> moved(spec.size);
        for (int side = 0; side < 2; ++side) {
          for (int64_t j = 0; j < spec.size; ++j) {
            params.tensor(i)[j] = saved[j] + (side ? -1 : 1) * sign[j] * step;
            moved[j] += (side ? -0.5 : 0.5) * (static_cast<double>(params.tensor(i)[j]) - saved[j]);
          }
          value[side] = RunReference(params, p.tree, options).objective;
        }
        for (int64_t j = 0; j < spec.size; ++j) slope += r.gradient[spec.offset + j] * 2 * moved[j];
        const double measured = value[0] - value[1];
        EXPECT_NEAR(measured, slope, 1e-5 * std::abs(slope) + 1e-8) << spec.name << " trial " << trial;
        std::copy(saved.begin(), saved.end(), params.tensor(i).begin());
      }
    }
  }
}

// Could go wrong: merging rows into a tree changes the objective or its gradient.
TEST(Reference, ATreeIsItsRows) {
  const ModelConfig c = OddConfig();
  const Parameters params = TestParameters(c, 1);
  std::mt19937_64 rng(3);
  const auto rows = ForkedRows(rng, c.vocab, 80);
  const float t = 0.9f;
  TreeBuilder merged(true), apart(false);
  std::vector<int32_t> index[2];
  std::vector<std::pair<int32_t, double>> pulls[2];
  for (const auto& row : rows) {
    const std::vector<std::string> kept = SomeKept(row, c.vocab);
    const auto a = merged.AddRow(row, std::span(&t, 1), kept), b = apart.AddRow(row, std::span(&t, 1), kept);
    for (size_t i = 0; i < a.size(); ++i) {
      const double x = static_cast<double>(rng() % 2001) / 1000 - 1;
      pulls[0].push_back({a[i], x});
      pulls[1].push_back({b[i], x});
    }
  }
  const TreeBatch trees[2] = {merged.Build(&index[0]), apart.Build(&index[1])};
  EXPECT_LT(trees[0].size(), trees[1].size());
  EXPECT_EQ(trees[0].logical_tokens, trees[1].size());
  ReferenceResult results[2];
  for (int i = 0; i < 2; ++i) {
    std::vector<double> coef(trees[i].size(), 0);
    for (auto [handle, x] : pulls[i]) coef[index[i][handle]] += x;
    ReferenceOptions options;
    options.coef = coef;
    options.gradient = true;
    results[i] = RunReference(params, trees[i], options);
  }
  EXPECT_NEAR(results[0].objective, results[1].objective, 1e-12 * std::abs(results[1].objective));
  double error = 0, norm = 0;
  for (size_t i = 0; i < results[0].gradient.size(); ++i) {
    error += std::pow(results[0].gradient[i] - results[1].gradient[i], 2);
    norm += std::pow(results[1].gradient[i], 2);
  }
  EXPECT_LT(std::sqrt(error / norm), 1e-12);
}

// Could go wrong: the fast forward or backward computes something else.
TEST(TrainPass, F32AgreesWithFloat64) {
  for (const auto& [name, c] : AllConfigs()) {
    SCOPED_TRACE(name);
    for (bool merge : {true, false}) {
      const Parameters params = TestParameters(c, 7);
      const Problem p = MakeProblem(c, 90, merge);
      ReferenceOptions options;
      options.coef = p.coef64;
      options.gradient = true;
      const ReferenceResult want = RunReference(params, p.tree, options);
      auto engine = MakeEngine(CpuPath::kAuto, 2);
      TrainPass pass(*engine);
      const ComputeWeights weights = ComputeWeights::FromParameters(params, Profile::kF32);
      const auto logprobs = pass.Forward(weights, p.tree);
      ASSERT_TRUE(logprobs.ok());
      for (int i = 0; i < p.tree.size(); ++i) {
        if (p.tree.parent[i] < 0) {
          EXPECT_TRUE(std::isnan((*logprobs)[i]));
        } else {
          EXPECT_NEAR((*logprobs)[i], want.logprobs[i], 2e-5) << i;
        }
      }
      Gradients grads(c);
      pass.Backward(p.coef, grads);
      for (size_t i = 0; i < grads.tensors().size(); ++i) {
        const TensorSpec& spec = grads.tensors()[i];
        EXPECT_LT(RelativeError(std::span(want.gradient).subspan(spec.offset, spec.size), grads.tensor(i)), 1e-5) << spec.name;
      }
    }
  }
}

// Could go wrong: the bf16 gradient is noisier than its roundings explain, or a tensor's gradient is plainly wrong.
TEST(TrainPass, Bf16IsNearFloat64AtTheRoundedWeights) {
  for (const auto& [name, c] : AllConfigs()) {
    SCOPED_TRACE(name);
    Parameters params = TestParameters(c, 7);
    for (size_t i = 0; i < params.tensors().size(); ++i) {
      if (!params.tensors()[i].matrix()) continue;
      for (float& x : params.tensor(i)) x = FromBf16(ToBf16(x));
    }
    const Problem p = MakeProblem(c, 90, true);
    ReferenceOptions options;
    options.coef = p.coef64;
    options.gradient = true;
    const ReferenceResult want = RunReference(params, p.tree, options);
    auto engine = MakeEngine(CpuPath::kAuto, 2);
    TrainPass pass(*engine);
    const ComputeWeights weights = ComputeWeights::FromParameters(params, Profile::kBf16);
    const auto logprobs = pass.Forward(weights, p.tree);
    ASSERT_TRUE(logprobs.ok());
    for (int i = 0; i < p.tree.size(); ++i) {
      if (p.tree.parent[i] < 0) continue;
      EXPECT_NEAR((*logprobs)[i], want.logprobs[i], 0.08) << i;
    }
    Gradients grads(c);
    pass.Backward(p.coef, grads);
    for (size_t i = 0; i < grads.tensors().size(); ++i) {
      const TensorSpec& spec = grads.tensors()[i];
      EXPECT_LT(RelativeError(std::span(want.gradient).subspan(spec.offset, spec.size), grads.tensor(i)), 0.05) << spec.name;
    }
  }
}

// Could go wrong: `wanted` changes the numbers of those computed, or a node left out still pulls.
TEST(TrainPass, WantedOnlyLeavesOut) {
  const ModelConfig c = TinyConfig();
  const Parameters params = TestParameters(c, 7);
  const Problem p = MakeProblem(c, 90, true);
  auto engine = MakeEngine(CpuPath::kAuto, 2);
  const ComputeWeights weights = ComputeWeights::FromParameters(params, Profile::kBf16);
  TrainPass all(*engine), some(*engine);
  const auto a = all.Forward(weights, p.tree);
  std::vector<uint8_t> wanted(p.tree.size());
  std::vector<float> coef(p.coef);
  for (int i = 0; i < p.tree.size(); ++i) {
    wanted[i] = i % 3 == 0;
    if (!wanted[i]) coef[i] = 0;
  }
  ForwardOptions options;
  options.wanted = wanted;
  const auto b = some.Forward(weights, p.tree, options);
  for (int i = 0; i < p.tree.size(); ++i) {
    if (p.tree.parent[i] < 0 || !wanted[i]) {
      EXPECT_TRUE(std::isnan((*b)[i]));
    } else {
      EXPECT_EQ((*a)[i], (*b)[i]);
    }
  }
  Gradients x(c), y(c);
  all.Backward(coef, x);
  some.Backward(coef, y);
  EXPECT_TRUE(std::equal(x.flat().begin(), x.flat().end(), y.flat().begin()));
}

// Could go wrong: bad input reaches a kernel.
TEST(TrainPass, RefusesWhatTheModelCannotRead) {
  const ModelConfig c = TinyConfig();
  auto engine = MakeEngine(CpuPath::kAuto, 1);
  const ComputeWeights weights = ComputeWeights::FromParameters(TestParameters(c, 7), Profile::kBf16);
  TrainPass pass(*engine);
  const float one = 1;
  for (const std::vector<int32_t>& ids : {std::vector<int32_t>{}, {1, c.vocab}, {1, -1},
                                          std::vector<int32_t>(c.max_positions + 1, 2)}) {
    TreeBuilder builder;
    builder.AddRow(ids, std::span(&one, 1));
    EXPECT_EQ(pass.Forward(weights, builder.Build(nullptr)).status().code(), StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace temper::engine
