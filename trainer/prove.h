// Proof on the user's own batch that tree training is training on separate rows: the logprobs equal to the bit, the gradients up
// to the rounding of the profile.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/status.h"
#include "engine/engine.h"
#include "engine/train_pass.h"
#include "trainer/batch.h"

namespace temper::trainer {

struct TreeProof {
  int64_t tokens = 0;          // sampled tokens compared
  int64_t logical_tokens = 0, tree_tokens = 0;
  int64_t different_logprobs = 0;
  std::string first_difference;  // session, sampled token and both logprobs; empty when all are equal
  double tree_norm = 0, rows_norm = 0;  // of the gradients
  double gradient_error = 0;   // |g_tree - g_rows| / |g_rows|
  std::string worst_tensor;    // the parameter whose gradients differ the most; empty when they are equal
  double tolerance = 0;
  bool holds() const { return different_logprobs == 0 && gradient_error <= tolerance; }
  std::string Text() const;    // one line: what was compared, and what differs
};

// `groups` in canonical order with `coef` per [group][rollout][sampled token] (all zero: ones are taken). Runs the whole groups, in
// that order, until `max_logical_tokens` are reached (at least one).
Result<TreeProof> ProveTree(engine::TrainPass& pass, const engine::ComputeWeights& weights, const std::vector<Group>& groups,
                            const std::vector<std::vector<std::vector<double>>>& coef, const BatchOptions& options,
                            int64_t max_logical_tokens);

}  // namespace temper::trainer
