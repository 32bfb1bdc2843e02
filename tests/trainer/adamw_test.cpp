#include "trainer/adamw.h"

#include <gtest/gtest.h>

#include <cmath>

#include "common/rng.h"
#include "tests/harness/tiny_model.h"

namespace temper::trainer {
namespace {

// Its embedding is longer than one block of the update.
engine::ModelConfig Tiny() {
  engine::ModelConfig c = TinyModel(300);
  c.width = 64;
  return c;
}

void Fill(engine::Parameters& p, uint64_t seed, double scale) {
  Rng rng(seed);
  for (float& x : p.flat()) x = static_cast<float>(scale * rng.Normal());
}

// The update could differ from AdamW as published (bias correction, epsilon inside or outside the root, decay of the gradient).
TEST(AdamW, AgreesWithThePublishedUpdateInDouble) {
  engine::Threads threads(2);
  engine::Parameters params = engine::InitParameters(Tiny(), 1);
  std::vector<double> p(params.flat().begin(), params.flat().end()), m(p.size(), 0), v(p.size(), 0);
  const AdamWOptions o = {.lr = 1e-2, .eps = 1e-8, .weight_decay = 0.1, .clip_norm = 1};
  AdamW optimizer(Tiny());
  engine::Gradients grads(Tiny());
  for (int step = 1; step <= 5; ++step) {
    Fill(grads, static_cast<uint64_t>(step), step == 3 ? 1e-4 : 1.0);
    double norm = 0;
    for (float g : grads.flat()) norm += static_cast<double>(g) * g;
    norm = std::sqrt(norm);
    const auto report = optimizer.Step(threads, o, grads, params).value();
    EXPECT_NEAR(report.grad_norm / norm, 1, 1e-12);
    for (const engine::TensorSpec& tensor : params.tensors()) {
      for (int64_t i = tensor.offset; i < tensor.offset + tensor.size; ++i) {
        const double g = grads.flat()[i] * std::min(1.0, 1 / norm);
        m[i] = 0.9 * m[i] + 0.1 * g;
        v[i] = 0.95 * v[i] + 0.05 * g * g;
        if (tensor.matrix()) p[i] *= 1 - o.lr * o.weight_decay;
        p[i] -= o.lr / (1 - std::pow(0.9, step)) * m[i] / (std::sqrt(v[i]) / std::sqrt(1 - std::pow(0.95, step)) + o.eps);
      }
    }
  }
  for (size_t i = 0; i < p.size(); ++i) ASSERT_NEAR(params.flat()[i], p[i], 2e-6 * (1 + std::abs(p[i]))) << i;
}

// The sum of the gradient norm could depend on how many threads share it.
TEST(AdamW, ThreadsNeverChangeABit) {
  std::vector<std::vector<float>> results;
  for (int count : {1, 2, 5}) {
    engine::Threads threads(count);
    engine::Parameters params = engine::InitParameters(Tiny(), 1);
    AdamW optimizer(Tiny());
    engine::Gradients grads(Tiny());
    for (int step = 0; step < 3; ++step) {
      Fill(grads, static_cast<uint64_t>(step), 1);
      ASSERT_TRUE(optimizer.Step(threads, {}, grads, params).ok());
    }
    results.emplace_back(params.flat().begin(), params.flat().end());
  }
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);
}

// One bad gradient could destroy the weights and the moments for good.
TEST(AdamW, AGradientThatIsNotFiniteChangesNothing) {
  engine::Threads threads(1);
  engine::Parameters params = engine::InitParameters(Tiny(), 1);
  const std::vector<float> before(params.flat().begin(), params.flat().end());
  AdamW optimizer(Tiny());
  engine::Gradients grads(Tiny());
  grads.flat()[5] = std::nanf("");
  EXPECT_FALSE(optimizer.Step(threads, {}, grads, params).ok());
  EXPECT_EQ(optimizer.steps(), 0);
  EXPECT_EQ(before, std::vector<float>(params.flat().begin(), params.flat().end()));
}

// Tiny gradients, common in RL of large models, could vanish in the epsilon.
TEST(AdamW, TinyGradientsMoveTheWeights) {
  engine::Threads threads(1);
  engine::Parameters params(Tiny());
  AdamW optimizer(Tiny());
  engine::Gradients grads(Tiny());
  for (float& g : grads.flat()) g = 1e-12f;
  ASSERT_TRUE(optimizer.Step(threads, {.lr = 1e-3}, grads, params).ok());
  EXPECT_NEAR(params.flat()[0], -1e-3, 2e-6);
}

TEST(AdamW, Schedules) {
  AdamWOptions o = {.lr = 1, .warmup_steps = 4, .total_steps = 12};
  EXPECT_EQ(LearningRate(o, 0), 0.25);
  EXPECT_EQ(LearningRate(o, 3), 1);
  EXPECT_EQ(LearningRate(o, 100), 1);
  o.schedule = Schedule::kLinear;
  EXPECT_EQ(LearningRate(o, 8), 0.5);
  EXPECT_EQ(LearningRate(o, 12), 0);
  o.schedule = Schedule::kCosine;
  EXPECT_NEAR(LearningRate(o, 8), 0.5, 1e-15);
}

}  // namespace
}  // namespace temper::trainer
