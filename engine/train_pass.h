// Training over a tree batch: log-probabilities forward, then the gradient of J = Σ coef_v · logprob_v, which is all the
// engine knows of a loss (docs/design.md 2). The forward is that of PagedForward to the bit.
//
//   TrainPass pass(engine);
//   ASSIGN_OR_RETURN(auto logprobs, pass.Forward(weights, tree));   // span, one per node (and target), NaN at roots
//   … losses → coef …
//   pass.Backward(coef, grads);                                     // grads += dJ/dθ, Hugging Face names
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "common/status.h"
#include "engine/engine.h"
#include "engine/parameters.h"
#include "engine/tree_batch.h"
#include "engine/weights.h"

namespace temper::engine {

struct ForwardOptions {
  // One flag per node: only these log-probabilities (and those of their targets) are computed, the others are NaN and their coef is ignored
  // (prompts and tool output need none). Empty: all. Does not change the numbers of those computed.
  std::span<const uint8_t> wanted;
  bool keep = true;  // false: logprobs only, nothing is kept for a backward pass
  // Keep only the input of every layer; Backward computes each layer again. The same bits, for about a third more time and a fraction
  // of the memory.
  bool recompute = false;
  // Above 0: the tree is computed in pre-order chunks of at most so many nodes, of which one has its activations at a time; what chunks
  // share are the keys and values of root paths and, in fp32, their gradients. The same log-probabilities to the bit, the same gradient up
  // to the order of sums; the forward pass is done twice, but for the last chunk, which is there when Backward begins.
  int chunk_nodes = 0;
  // When set, called once for every node (from engine threads, in no fixed order, several at a time) with its logits times
  // `row_inv_temperature` (NaN: the node's own 1/T) and their log-sum-exp: the distribution of the token after it.
  std::function<void(int node, const float* logits, float log_sum_exp)> on_row = {};
  float row_inv_temperature = 1;
  // When set, called once for every node whose log-probability is computed, in the same way, with what it is read from: its parent's logits
  // times its own 1/T, and their log-sum-exp over its kept tokens.
  std::function<void(int node, const float* logits, float log_sum_exp)> on_draw = {};
};

// What a forward and a backward pass do, counted: the arithmetic behind a prediction of its time. Attention pairs are those computed: a page of
// 64 keys for each of its queries, with what the mask then hides. Recomputed parts count as forward work each time they are done.
struct PassWork {
  double forward_rows = 0, forward_pairs = 0, forward_head_rows = 0;  // of Forward
  double again_rows = 0, again_pairs = 0, again_head_rows = 0;        // the same, done again in Backward
  double backward_rows = 0, backward_pairs = 0, backward_head_rows = 0;
  double chunks = 0;  // each turns the matrices and adds to every gradient of a weight once
};

// One calling thread at a time. Buffers grow to the largest batch and are reused.
class TrainPass {
 public:
  explicit TrainPass(Engine& engine);  // must outlive it
  ~TrainPass();

  // Log-probability of every node's token given its path, at the node's own 1/T and among its kept tokens; NaN at roots; then those of the
  // targets (TreeBatch::items). The span is valid until the next Forward. `weights` and `tree` must stay until Backward is done.
  // InvalidArgument: a token outside the vocabulary, a path longer than max_positions, an empty tree, a kept set that is none or lacks the
  // token, a target of a root.
  Result<std::span<const float>> Forward(const ComputeWeights& weights, const TreeBatch& tree,
                                         const ForwardOptions& options = {});
  // Of the last Forward (with chunks: of its last chunk): the last residual of every node, fp32 [nodes][width] ...
  std::span<const float> hidden() const;
  // ... and a node's keys and values (KvPool::Read).
  std::vector<float> KeysValues(int node) const;
  // Adds the gradient to `grads` (of the same config): through the kept logits alone, the set itself being constant. coef: one per
  // item, those of roots are ignored. Deterministic: the same bits for any thread count and kernel path. Call at most once per Forward.
  void Backward(std::span<const float> coef, Gradients& grads);

  // Bytes of activations, pages and scratch held now.
  size_t bytes() const;
  // What bytes() comes to with a fresh pass: after Forward, and Backward if options.keep, of this tree on `threads` threads. It may be less
  // by the scratch of threads that found nothing to do.
  static size_t PlannedBytes(const ModelConfig& config, Profile profile, int threads, const TreeBatch& tree, const ForwardOptions& options = {});
  // What Forward, and Backward if options.keep, of this tree do. Coefficients of 0 are not known here: each row of the head counts.
  static PassWork CountWork(const ModelConfig& config, const TreeBatch& tree, const ForwardOptions& options = {});
  // An upper bound of it for any tree of so many nodes in so many unforked runs, whole, for a forward and a backward pass on as many threads
  // as kPlannedThreads.
  static size_t EstimateBytes(const ModelConfig& config, Profile profile, int64_t nodes, int64_t branches, bool recompute = false);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Plans that decide how a gradient is computed count this many threads whatever the machine has: with the plan its last bits would
// change. Each thread more than this adds its scratch (a dozen rows of logits).
constexpr int kPlannedThreads = 16;

// How a forward and backward pass over a tree is computed: ForwardOptions of these names, and what it then holds.
struct PassChoice {
  int chunk_nodes = 0;
  bool recompute = false;
  size_t bytes = 0;
};
// Of the ways that fit into `bytes` the one with the least arithmetic, by the model's sizes (PassWork, and what each chunk adds): everything kept;
// layers computed again; chunks of 64 or 96 nodes times a power of two; those with layers computed again. Where nothing fits, the least of all.
// A pure function of its arguments. `wanted` as in ForwardOptions.
PassChoice ChoosePass(const ModelConfig& config, Profile profile, const TreeBatch& tree, std::span<const uint8_t> wanted, size_t bytes);

}  // namespace temper::engine
