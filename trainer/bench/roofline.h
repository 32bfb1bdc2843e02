// What an optimizer step is made of: the time of each part beside the least that its arithmetic, or its bytes, take on this
// machine (`roofline`), and what the head costs as the vocabulary grows (`head`).
#pragma once

#include <functional>

#include "engine/config.h"
#include "trainer/bench/engine_bench.h"

namespace temper::trainer::bench {

// One row a part, of a step on options.step_rows rows of options.step_length tokens, and one of the whole.
Status RunRoofline(engine::Engine& engine, const Options& options, const engine::ModelConfig& config,
                   const std::function<void(const Row&)>& emit);
// Time forward and backward, and memory beside logits of all tokens, for every vocabulary of the options, at the model's width.
Status RunHead(engine::Engine& engine, const Options& options, const engine::ModelConfig& config,
               const std::function<void(const Row&)>& emit);

}  // namespace temper::trainer::bench
