// AdamW on fp32 master weights, after clipping by the global gradient norm. Deterministic: blocks of fixed size are summed in fixed
// order, so neither thread count nor kernel path changes a bit.
#pragma once

#include <cstdint>

#include "common/status.h"
#include "engine/engine.h"
#include "engine/parameters.h"

namespace temper::trainer {

enum class Schedule { kConstant, kLinear, kCosine, kWsd };

struct AdamWOptions {
  double lr = 3e-4;
  double beta1 = 0.9, beta2 = 0.95;
  double eps = 1e-15;
  double weight_decay = 0;  // decoupled, on matrices only (not on norm gains)
  double clip_norm = 1;     // 0 = no clipping
  int64_t warmup_steps = 0;  // lr rises linearly from lr / warmup_steps to lr
  Schedule schedule = Schedule::kConstant;  // linear, cosine: to 0 at total_steps; wsd: constant, then linearly to 0 over the last decay_steps
  int64_t total_steps = 0;   // read by all but constant
  int64_t decay_steps = 0;   // read by wsd
};

// The learning rate of step `step` (from 0).
double LearningRate(const AdamWOptions& options, int64_t step);

class AdamW {
 public:
  AdamW() = default;  // of nothing, to be assigned
  explicit AdamW(const engine::ModelConfig& config);  // moments zero, no step taken

  struct Report {
    double grad_norm = 0;  // before clipping
    double lr = 0;
  };
  // One step on `params` against `grads` (dloss/dθ; left unchanged). A gradient that is not finite changes nothing and is an error.
  Result<Report> Step(engine::Engine& engine, const AdamWOptions& options, const engine::Gradients& grads,
                      engine::Parameters& params);

  // State, for checkpoints.
  int64_t steps() const { return steps_; }
  const engine::Parameters& first_moment() const { return m_; }
  const engine::Parameters& second_moment() const { return v_; }
  void Restore(int64_t steps, engine::Parameters first_moment, engine::Parameters second_moment);

 private:
  int64_t steps_ = 0;
  engine::Parameters m_, v_;
};

}  // namespace temper::trainer
