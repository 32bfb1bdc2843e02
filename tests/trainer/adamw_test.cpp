#include "trainer/adamw.h"

#include <gtest/gtest.h>

#include <cmath>
#include <memory>

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

std::unique_ptr<engine::Engine> MakeEngine(int threads, engine::CpuPath path = engine::CpuPath::kAuto) {
  return engine::Engine::Create({.cpu = path, .threads = threads}).value();
}

void Fill(engine::Parameters& p, uint64_t seed, double scale) {
  Rng rng(seed);
  for (float& x : p.flat()) x = static_cast<float>(scale * rng.Normal());
}

// The update could differ from AdamW as published (bias correction, epsilon inside or outside the root, decay of the gradient).
TEST(AdamW, AgreesWithThePublishedUpdateInDouble) {
  const auto engine = MakeEngine(2);
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
    const auto report = optimizer.Step(*engine, o, grads, params).value();
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

// The update could depend on how many threads share it or on the width of the registers. The reference is the formula of
// engine/cpu/ops.h in scalars, each operation rounded once; 300 columns leave a tail in every register width.
TEST(AdamW, NeitherThreadsNorKernelsChangeABit) {
  engine::ModelConfig config = Tiny();
  config.vocab = 301;
  config.width = 62;
  config.heads = config.kv_heads = 1;
  const AdamWOptions o = {.lr = 3e-3, .eps = 1e-8, .weight_decay = 0.1, .clip_norm = 0};
  engine::Parameters expected = engine::InitParameters(config, 1);
  std::vector<float> m(expected.flat().size()), v(expected.flat().size());
  engine::Gradients grads(config);
  for (int step = 1; step <= 3; ++step) {
    Fill(grads, static_cast<uint64_t>(step), 1);
    const auto rate = static_cast<float>(o.lr / (1 - std::pow(o.beta1, step))), eps = static_cast<float>(o.eps);
    const auto root = static_cast<float>(1 / std::sqrt(1 - std::pow(o.beta2, step)));
    const auto b1 = static_cast<float>(o.beta1), c1 = static_cast<float>(1 - o.beta1);
    const auto b2 = static_cast<float>(o.beta2), c2 = static_cast<float>(1 - o.beta2);
    for (const engine::TensorSpec& tensor : expected.tensors()) {
      const float shrink = tensor.matrix() ? static_cast<float>(1 - o.lr * o.weight_decay) : 1.0f;
      for (int64_t i = tensor.offset; i < tensor.offset + tensor.size; ++i) {
        const float g = grads.flat()[i];
        m[i] = b1 * m[i] + c1 * g;
        v[i] = b2 * v[i] + c2 * (g * g);
        float& p = expected.flat()[i];
        p = p * shrink - rate * (m[i] / (std::sqrt(v[i]) * root + eps));
      }
    }
  }
  const std::vector<float> want(expected.flat().begin(), expected.flat().end());
  for (engine::CpuPath path : engine::AvailableCpuPaths()) {
    for (int count : {1, 2, 5}) {
      const auto engine = MakeEngine(count, path);
      engine::Parameters params = engine::InitParameters(config, 1);
      AdamW optimizer(config);
      double norm = 0;
      for (int step = 1; step <= 3; ++step) {
        Fill(grads, static_cast<uint64_t>(step), 1);
        norm = optimizer.Step(*engine, o, grads, params).value().grad_norm;
      }
      EXPECT_EQ(want, std::vector<float>(params.flat().begin(), params.flat().end())) << engine::CpuPathName(path) << ", threads " << count;
      static double first_norm = norm;
      EXPECT_EQ(norm, first_norm) << engine::CpuPathName(path) << ", threads " << count;
    }
  }
}

// One bad gradient could destroy the weights and the moments for good.
TEST(AdamW, AGradientThatIsNotFiniteChangesNothing) {
  const auto engine = MakeEngine(1);
  engine::Parameters params = engine::InitParameters(Tiny(), 1);
  const std::vector<float> before(params.flat().begin(), params.flat().end());
  AdamW optimizer(Tiny());
  engine::Gradients grads(Tiny());
  grads.flat()[5] = std::nanf("");
  EXPECT_FALSE(optimizer.Step(*engine, {}, grads, params).ok());
  EXPECT_EQ(optimizer.steps(), 0);
  EXPECT_EQ(before, std::vector<float>(params.flat().begin(), params.flat().end()));
}

// Tiny gradients, common in RL of large models, could vanish in the epsilon.
TEST(AdamW, TinyGradientsMoveTheWeights) {
  const auto engine = MakeEngine(1);
  engine::Parameters params(Tiny());
  AdamW optimizer(Tiny());
  engine::Gradients grads(Tiny());
  for (float& g : grads.flat()) g = 1e-12f;
  ASSERT_TRUE(optimizer.Step(*engine, {.lr = 1e-3}, grads, params).ok());
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
  o.schedule = Schedule::kWsd;
  o.decay_steps = 4;
  EXPECT_EQ(LearningRate(o, 0), 0.25) << "warm-up";
  EXPECT_EQ(LearningRate(o, 8), 1);
  EXPECT_EQ(LearningRate(o, 9), 0.75);
  EXPECT_EQ(LearningRate(o, 11), 0.25);
  EXPECT_EQ(LearningRate(o, 12), 0);
}

}  // namespace
}  // namespace temper::trainer
