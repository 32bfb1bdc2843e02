#include "job/optimizers.h"

namespace temper::job {

trainer::AdamWOptions MakeOptimizer(const Job& job) {
  trainer::AdamWOptions options;
  options.lr = job.optimizer.lr;
  options.beta1 = job.optimizer.beta1;
  options.beta2 = job.optimizer.beta2;
  options.eps = job.optimizer.eps;
  options.weight_decay = job.optimizer.weight_decay;
  options.clip_norm = job.optimizer.clip_norm;
  options.warmup_steps = job.optimizer.warmup_steps;
  options.total_steps = job.trainer.steps * job.trainer.optimizer_steps();
  options.decay_steps = job.optimizer.decay_steps;
  options.schedule = job.optimizer.schedule == "linear"   ? trainer::Schedule::kLinear
                     : job.optimizer.schedule == "cosine" ? trainer::Schedule::kCosine
                     : job.optimizer.schedule == "wsd"    ? trainer::Schedule::kWsd
                                                          : trainer::Schedule::kConstant;
  return options;
}

trainer::AdamWOptions MakeWarmUpOptimizer(const Job& job) {
  trainer::AdamWOptions options;
  options.lr = job.trainer.sft->lr;
  options.weight_decay = job.optimizer.weight_decay;
  options.clip_norm = job.optimizer.clip_norm;
  options.schedule = trainer::Schedule::kLinear;
  return options;
}

}  // namespace temper::job
