// The two optimizers of a job: the job file's words as options of the trainer.
#pragma once

#include "job/job.h"
#include "trainer/adamw.h"

namespace temper::job {

// Of reinforcement learning: the block `optimizer`, scheduled over trainer.steps.
trainer::AdamWOptions MakeOptimizer(const Job& job);

// Of the warm-up: its own rate falling to 0 and AdamW's own betas and eps, whatever reinforcement learning uses (an eps that suits
// policy gradients would stop a warm-up); weight_decay and clip_norm are those of `optimizer`. Requires job.trainer.sft.
trainer::AdamWOptions MakeWarmUpOptimizer(const Job& job);

}  // namespace temper::job
