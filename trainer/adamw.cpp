#include "trainer/adamw.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "engine/cpu/ops.h"

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

}  // namespace

double LearningRate(const AdamWOptions& options, int64_t step) {
  if (step < options.warmup_steps) return options.lr * static_cast<double>(step + 1) / static_cast<double>(options.warmup_steps);
  if (options.schedule == Schedule::kConstant) return options.lr;
  if (options.schedule == Schedule::kWsd) {
    const double left = static_cast<double>(std::max<int64_t>(0, options.total_steps - step));
    return options.lr * std::min(1.0, left / static_cast<double>(std::max<int64_t>(1, options.decay_steps)));
  }
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

Result<AdamW::Report> AdamW::Step(engine::Engine& engine, const AdamWOptions& options, const engine::Gradients& grads,
                                  engine::Parameters& params) {
  TEMPER_CHECK(grads.flat().size() == params.flat().size() && m_.flat().size() == params.flat().size())
      << "gradient " << grads.flat().size() << ", moments " << m_.flat().size() << ", parameters " << params.flat().size();
  const engine::cpu::Ops& ops = engine.ops(engine::Profile::kF32);
  engine::Threads& threads = engine.threads();
  const std::vector<Block> blocks = Blocks(params);
  const float* g_all = grads.flat().data();
  std::vector<double> squares(blocks.size());
  threads.Run(static_cast<int>(blocks.size()),
              [&](int b, int) { squares[b] = ops.sum_of_squares(g_all + blocks[b].begin, blocks[b].size); });
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
  engine::cpu::AdamWUpdate update;
  update.clip = clip;
  update.beta1 = static_cast<float>(options.beta1);
  update.rest1 = static_cast<float>(1 - options.beta1);
  update.beta2 = static_cast<float>(options.beta2);
  update.rest2 = static_cast<float>(1 - options.beta2);
  update.rate = static_cast<float>(report.lr / correction1);
  update.root = static_cast<float>(1 / std::sqrt(correction2));
  update.eps = static_cast<float>(options.eps);
  const auto keep = static_cast<float>(1 - report.lr * options.weight_decay);
  threads.Run(static_cast<int>(blocks.size()), [&](int b, int) {
    const Block& block = blocks[b];
    engine::cpu::AdamWUpdate u = update;
    u.g = g_all + block.begin;
    u.m = m_.flat().data() + block.begin;
    u.v = v_.flat().data() + block.begin;
    u.p = params.flat().data() + block.begin;
    u.n = block.size;
    u.shrink = block.decay ? keep : 1.0f;
    ops.adamw(u);
  });
  return report;
}

}  // namespace temper::trainer
