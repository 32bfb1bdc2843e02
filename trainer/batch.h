// From a forest of trajectories to tree batches for the engine, and back from losses to one scalar per node.
//
// Everything is put in canonical order first (groups by number, rollouts by index, children by call and choice), so a batch is a pure
// function of the set of groups: order of arrival never enters. Equal prefixes merge where token, position, 1/T and kept set agree; a shared
// node gets the sum of the coefficients of all rollouts that pass through it (docs/algorithm_block.md 4, docs/design.md 2).
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "common/status.h"
#include "engine/train_pass.h"
#include "engine/tree_batch.h"
#include "trainer/algorithm.h"
#include "trainer/loss.h"
#include "trainer/trajectory.h"

namespace temper::trainer {

// A sampled token of a rollout, in the order in which the rollout's tokens were sampled.
struct SampledToken {
  int32_t chunk = 0;  // which tree of the batch
  int32_t node = 0;   // pre-order index in that tree
  float logprob = 0;  // recorded when it was sampled
  int64_t version = 0;  // step
  bool mixed = false;
  bool trainable = true;
  int32_t turn = 0;     // rank of its call among the rollout's calls that sampled anything
  int64_t segment = 0;  // branch: a call that continues the last token of a segment belongs to it, else it opens a new one
};

struct BatchChunk {
  engine::TreeBatch tree;
  std::vector<uint8_t> wanted;  // per node: some rollout sampled it
  bool silent = false;          // of silent groups only: scored, never differentiated
  int chunk_nodes = 0;          // how it is computed where memory does not hold all of it: engine::ForwardOptions of these names
  bool recompute = false;
  int rank = 0;                 // where it is computed (trainer/ranks.h)
  // Where tree.targets are set (Compare): those of a node v are [target_begin[v], target_begin[v + 1]), with the teacher's logprobs.
  std::vector<int32_t> target_begin;
  std::vector<float> target_teacher;
};

// Per node of a chunk that is wanted: a model's likeliest tokens where the node was drawn, likeliest first, the lower id among equals.
struct LikelyTokens {
  std::vector<int32_t> begin;  // nodes + 1
  std::vector<int32_t> token;
  std::vector<float> logprob;  // at the node's own 1/T and among its kept tokens
};

// They become the targets of the chunk: what the policy is scored on and pulled towards besides its own draws.
void Compare(BatchChunk& chunk, LikelyTokens likely);

// How to score a chunk: sampled tokens only. `keep`: a backward pass follows; never for a silent chunk.
inline engine::ForwardOptions Wanting(const BatchChunk& chunk, bool keep = true) {
  engine::ForwardOptions options;
  options.wanted = chunk.wanted;
  options.keep = keep && !chunk.silent;
  options.chunk_nodes = chunk.chunk_nodes;
  options.recompute = chunk.recompute;
  return options;
}

struct Batch {
  std::vector<Group> groups;       // canonical order
  std::vector<BatchChunk> chunks;  // independent forests; more than one only when one would not fit in memory
  std::vector<std::vector<std::vector<SampledToken>>> samples;  // [group][rollout][k]
  int64_t logical_tokens = 0;  // every root-to-leaf path counted by itself
  int64_t tree_tokens = 0;     // nodes after merging
};

// Logprobs under `weights` of every sampled token of every chunk, by item; for no backward pass.
Result<std::vector<std::vector<float>>> ScoreBatch(engine::TrainPass& pass, const engine::ComputeWeights& weights, const Batch& batch);

struct BatchOptions {
  bool merge = true;              // false: every root-to-leaf path is a row of its own
  // Per group in canonical order: no token of it has a coefficient (all its rewards are equal). Such groups get chunks of their own,
  // behind the others, which need no backward pass. Empty: none.
  std::vector<uint8_t> silent = {};
  int64_t max_chunk_nodes = INT64_MAX;  // of the nodes before merging across rollouts; a single rollout may exceed it
  // How a chunk is computed (engine::ChoosePass). Empty: whole, one that exceeds max_chunk_nodes in pre-order chunks of so many nodes.
  std::function<engine::PassChoice(const engine::TreeBatch& tree, std::span<const uint8_t> wanted)> choose = {};
};

// Canonical order: groups by number, rollouts by index. kInvalidArgument: a group or rollout twice.
Status PutInOrder(std::vector<Group>& groups);

// Takes the groups of one lease in any order. kInvalidArgument: a sampled token with nothing before it (it has no logprob), a
// group or rollout twice.
Result<Batch> BuildBatch(std::vector<Group> groups, const BatchOptions& options);

// Logprobs of the batch by the models beside the policy, [chunk][node]; empty where the settings read none. `old`: by the policy as it was
// before the first optimizer step on the batch; empty where the step is the first.
struct OtherLogprobs {
  std::span<const std::vector<float>> reference, teacher, old = {};
};

// The input of ComputeLoss: one entry per sampled token. `logprobs[chunk][item]` (TreeBatch::items). `decoupled` (off_policy.mode):
// logp_rollout is the recorded logprob and logp_old that of `others.old`, or the one given in the first step; else logp_old is the recorded one.
std::vector<LossGroup> MakeLossGroups(const Batch& batch, std::span<const std::vector<float>> logprobs, bool decoupled = false,
                                      const OtherLogprobs& others = {});

// As if every logprob were the recorded one: what the rewards alone say of advantages.
std::vector<LossGroup> RecordedLossGroups(const Batch& batch, bool decoupled = false);

// Whether all of a group's per-token numbers are 0.
bool IsSilent(const std::vector<std::vector<double>>& values);

// BatchOptions::silent: groups that cannot have a gradient, told from their rewards alone, where a coefficient is a multiple of its token's
// advantage. Empty where it is not. Who leaves them out checks them again once the true coefficients are known.
std::vector<uint8_t> SilentGroups(const Algorithm& algorithm, const Batch& batch);

// The coefficient of each item of each chunk: the sum over the sampled tokens that lie on its node. Sums in double, in canonical order.
// `coef_top`: LossResult's, empty without targets.
std::vector<std::vector<float>> ItemCoefficients(const Batch& batch, const std::vector<std::vector<std::vector<double>>>& coef,
                                                 const std::vector<std::vector<std::vector<std::vector<double>>>>& coef_top = {});

// Rewards exchanged among the rollouts of each group by a permutation drawn from (seed, group), those of turns dropped: the control whose
// policy must not learn.
void PermuteRewards(uint64_t seed, std::vector<Group>& groups);

// Agreement of the trainer with the workers: sampled tokens whose recorded version is the one the trainer scored with.
struct OnPolicyCheck {
  int64_t tokens = 0;
  double max_deviation = 0;    // max |exp(logp_new - logp_recorded) - 1|; 0 exactly when all are equal to the bit
  std::string first_mismatch;  // "session 3.0.1, token 17: recorded -1.25, recomputed -1.2500001"; empty when there is none
  void Merge(const OnPolicyCheck& other);
};
OnPolicyCheck CheckOnPolicy(const Batch& batch, std::span<const std::vector<float>> logprobs, int64_t version);

}  // namespace temper::trainer
