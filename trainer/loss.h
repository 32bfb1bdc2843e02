// From rewards and logprobs to one scalar per token: coef = d(loss)/d(logp_new) of the minimised loss (docs/algorithm_block.md 3).
//
// Pure functions of a whole optimizer step: outcome filtering, dynamic sampling, returns, advantages, denominators, off-policy weights,
// the loss (trainer/losses/), KL and distillation terms, aggregation, metrics. Nothing here knows of micro-batches, packing or trees, so
// neither can change a loss. All in double; sums run in the order groups, rollouts, tokens.
#pragma once

#include <cstdint>
#include <vector>

#include "common/ids.h"
#include "trainer/algorithm.h"

namespace temper::trainer {

// A token that the teacher finds likely, as the teacher and the policy score it.
struct TopToken {
  double logp_teacher = 0, logp_new = 0;
};

// One rollout. Token arrays have one entry per token of `mask`; entries at mask 0 are never read.
struct LossRollout {
  Outcome outcome = Outcome::kScored;
  double reward = 0;
  std::vector<double> turn_rewards;  // empty = zeros
  double wall_s = 0;                 // read when reward.speed_coef is not 0
  std::vector<uint8_t> mask;         // 1 = sampled by the policy and to be trained
  std::vector<double> logp_new;
  // Each of these may be empty when the settings do not read it (Algorithm::Reads…).
  std::vector<double> logp_old, logp_rollout, logp_ref, logp_teacher, values;
  std::vector<std::vector<TopToken>> teacher_top;
  std::vector<int32_t> turn;         // empty = all 0; not decreasing over sampled tokens
  std::vector<int64_t> segment;      // empty = all 0
};

struct LossGroup {
  std::vector<LossRollout> rollouts;
};

// Mean, standard deviation (n - 1) and range of something; all 0 when there is none.
struct Distribution {
  double mean = 0, deviation = 0, min = 0, max = 0;
};

// Formulas: docs/losses.md.
struct LossMetrics {
  // Of x = logp_old - logp_rollout (decoupled) or logp_new - logp_old (bypass) over trainable tokens or sequences; absent when the
  // settings read no logp_old.
  bool has_mismatch = false;
  double mismatch_k1 = 0, mismatch_k3 = 0, log_ppl_diff = 0, ppl_ratio = 1, chi2_token = 0, chi2_seq = 0;
  // k3 estimates of the divergence from the models beside the policy; absent when the settings do not read them.
  bool has_reference = false, has_teacher = false;
  double kl_reference = 0, kl_teacher = 0;
  double ess = 1;                                       // of the applied off-policy weights; 1 without any
  double clip_fraction_low = 0, clip_fraction_high = 0;  // tokens whose coefficient is zeroed or capped, at A<0 / A>0
  int64_t rejected_tokens = 0;
  int64_t zero_signal_groups = 0;  // groups whose valid rewards are all equal, or with fewer than two valid rollouts
  int64_t tokens = 0;              // N: trainable tokens of what is left
  int64_t sequences = 0;           // B
  double entropy = 0;              // estimate from the sampled tokens: mean of -logp_new over trainable ones
  Distribution reward;             // RewardOf each valid rollout, whether the settings read rewards or not
  Distribution advantage;          // of trainable tokens
  Distribution turn_tokens;        // sampled tokens of each turn of valid rollouts that sampled any; one turn a rollout without `turn`
};

struct LossResult {
  double loss = 0;
  // Per group and rollout. With credit rollout all trainable tokens have the advantage `rollout_advantage`; else see token_advantages.
  std::vector<std::vector<double>> rollout_advantage;
  std::vector<std::vector<std::vector<double>>> token_advantages;  // [g][i][n], 0 where not trained; always filled
  std::vector<std::vector<std::vector<double>>> coef;              // [g][i][n], 0 where not trained
  // [g][i][n][k] = d(loss)/d(logp_new of teacher_top[n][k]); only with distillation kind topk_forward_kl.
  std::vector<std::vector<std::vector<std::vector<double>>>> coef_top;
  LossMetrics metrics;
};

// What a rollout earned before shaping: reward + process_coef * sum of turn_rewards; of pairs the reward, which alone they compare.
double RewardOf(const Algorithm& algorithm, double reward, const std::vector<double>& turn_rewards);

// Requires (checked): arrays of one rollout have equal length, those that are read are present and finite at mask 1; a loss of pairs has
// at most two rollouts in every group (fewer are no pair).
LossResult ComputeLoss(const Algorithm& algorithm, const std::vector<LossGroup>& groups);

}  // namespace temper::trainer
