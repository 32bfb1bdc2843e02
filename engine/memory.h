// Peak resident memory of what a process does with a model, said before it runs: the plan of a job and `temper model inspect` are made of
// these. Bytes; what a process has before it touches a model (code, libraries, threads) is not in them. tests/trainer/memory_test.cpp holds
// them to a tenth of what processes then have. Pure.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/config.h"

namespace temper::engine {

int64_t ParameterCount(const ModelConfig& config);

// Optimizer steps: fp32 weights, gradients, both moments of AdamW, the packed form that passes read, and the largest pass, of `tokens`
// nodes with paths of at most `positions`: TrainPass::PlannedBytes, or the budget that ChoosePass is given.
int64_t TrainBytes(const ModelConfig& config, Profile profile, int64_t tokens, int64_t positions, int64_t pass_bytes);

// Scoring: the packed form and the largest pass (ForwardOptions::keep false), or, if that is more, packing it from weights that were read
// into fp32, or reading them from files of `file_bytes`, which are mapped (0: from nowhere).
int64_t ScoreBytes(const ModelConfig& config, Profile profile, int64_t file_bytes, int64_t tokens, int64_t positions, int64_t pass_bytes);

// A Decoder: `pages` of keys and values that are taken at once at the most, steps of at most `rows` tokens, `logit_rows` of them with logits
// (one a sequence). Without the weights, which a worker maps: each version is one copy of ComputeBytes(config, profile) for the whole
// machine, in the publisher's memory file.
int64_t DecodeBytes(const ModelConfig& config, Profile profile, int threads, int64_t pages, int rows, int logit_rows);

}  // namespace temper::engine
