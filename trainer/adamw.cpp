#include "trainer/adamw.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <utility>
#include <vector>

#include <fmt/format.h>

namespace temper::trainer {
namespace {

constexpr int64_t kBlock = 16384;  // floats; a block never crosses a tensor

struct Block {
  int64_t begin = 0, size = 0;
  bool decay = false;
};

std::vector<Block> Blocks(const engine::Parameters& params) {
  std::vector<Block> blocks;
  for (const engine::TensorSpec& tensor : params.tensors()) {
    for (int64_t at = 0; at < tensor.size; at += kBlock) {
      blocks.push_back({tensor.offset + at, std::min(kBlock, tensor.size - at), tensor.matrix()});
    }
  }
  return blocks;
}

// Eight lanes, then the lanes in order: fixed, whatever the vector width.
double SumOfSquares(const float* x, int64_t n) {
  std::array<double, 8> lanes{};
  for (int64_t i = 0; i < n; ++i) lanes[i & 7] += static_cast<double>(x[i]) * x[i];
  double sum = 0;
  for (double lane : lanes) sum += lane;
  return sum;
}

}  // namespace

double LearningRate(const AdamWOptions& options, int64_t step) {
  if (step < options.warmup_steps) return options.lr * static_cast<double>(step + 1) / static_cast<double>(options.warmup_steps);
  if (options.schedule == Schedule::kConstant) return options.lr;
  const double span = static_cast<double>(std::max<int64_t>(1, options.total_steps - options.warmup_steps));
  const double progress = std::min(1.0, static_cast<double>(step - options.warmup_steps) / span);
  if (options.schedule == Schedule::kLinear) return options.lr * (1 - progress);
  return options.lr * 0.5 * (1 + std::cos(std::numbers::pi * progress));
}

AdamW::AdamW(const engine::ModelConfig& config) : m_(config), v_(config) {}

void AdamW::Restore(int64_t steps, engine::Parameters first_moment, engine::Parameters second_moment) {
  steps_ = steps;
  m_ = std::move(first_moment);
  v_ = std::move(second_moment);
}

Result<AdamW::Report> AdamW::Step(engine::Threads& threads, const AdamWOptions& options, const engine::Gradients& grads,
                                  engine::Parameters& params) {
  TEMPER_CHECK(grads.flat().size() == params.flat().size() && m_.flat().size() == params.flat().size())
      << "gradient " << grads.flat().size() << ", moments " << m_.flat().size() << ", parameters " << params.flat().size();
  const std::vector<Block> blocks = Blocks(params);
  const float* g_all = grads.flat().data();
  std::vector<double> squares(blocks.size());
  threads.Run(static_cast<int>(blocks.size()),
              [&](int b, int) { squares[b] = SumOfSquares(g_all + blocks[b].begin, blocks[b].size); });
  double total = 0;
  for (double s : squares) total += s;
  Report report;
  report.grad_norm = std::sqrt(total);
  report.lr = LearningRate(options, steps_);
  if (!std::isfinite(report.grad_norm)) {
    return Internal(fmt::format("the gradient is not finite at optimizer step {}; lower optimizer.lr", steps_ + 1));
  }
  ++steps_;

  const float clip = options.clip_norm > 0 && report.grad_norm > options.clip_norm
                         ? static_cast<float>(options.clip_norm / report.grad_norm)
                         : 1.0f;
  const double correction1 = 1 - std::pow(options.beta1, static_cast<double>(steps_));
  const double correction2 = 1 - std::pow(options.beta2, static_cast<double>(steps_));
  const auto b1 = static_cast<float>(options.beta1), c1 = static_cast<float>(1 - options.beta1);
  const auto b2 = static_cast<float>(options.beta2), c2 = static_cast<float>(1 - options.beta2);
  const auto rate = static_cast<float>(report.lr / correction1);
  const auto root = static_cast<float>(1 / std::sqrt(correction2));
  const auto eps = static_cast<float>(options.eps);
  const auto keep = static_cast<float>(1 - report.lr * options.weight_decay);
  threads.Run(static_cast<int>(blocks.size()), [&](int b, int) {
    const Block& block = blocks[b];
    const float* g = g_all + block.begin;
    float* m = m_.flat().data() + block.begin;
    float* v = v_.flat().data() + block.begin;
    float* p = params.flat().data() + block.begin;
    const float shrink = block.decay ? keep : 1.0f;
    for (int64_t i = 0; i < block.size; ++i) {
      const float gradient = g[i] * clip;
      m[i] = b1 * m[i] + c1 * gradient;
      v[i] = b2 * v[i] + c2 * (gradient * gradient);
      p[i] = p[i] * shrink - rate * (m[i] / (std::sqrt(v[i]) * root + eps));
    }
  });
  return report;
}

}  // namespace temper::trainer
