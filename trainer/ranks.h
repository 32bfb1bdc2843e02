// Data-parallel training: a batch cut into parts, each computed by a process of its own (a rank), the gradients added up in one order.
//
// Rank 0 is the trainer. It alone leases, plans, knows losses, holds fp32 weights and moments, writes checkpoints and publishes. The other
// ranks know trees: they hold the compute form of the weights and a gradient, and do what rank 0 says:
//
//   rank 0 ─ chunk ─► rank k: forward ─ logprobs ─► rank 0: one coefficient a node ─► rank k: backward      (each rank its chunks, in order)
//   all ─ Reduce ─► rank 0: AdamW ─ Broadcast ─► all
//
// Which chunk goes where follows from the batch alone (BuildRankedBatch), sums from the ranks' numbers (Collective), so a step is the same to
// the bit whenever it is run with the same ranks, and up to the order of sums with others. Ranks have no state that outlives a step but what
// rank 0 sent: the whole trainer, not one rank, is what is restarted.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "common/status.h"
#include "engine/engine.h"
#include "engine/train_pass.h"
#include "engine/weights.h"
#include "trainer/batch.h"
#include "trainer/collective.h"

namespace temper::trainer {

// The models a rank holds.
enum class RankModel : uint8_t { kPolicy, kReference, kTeacher };

// As BuildBatch, for several ranks: groups are dealt out in their order, each rank about as many tokens of those that are differentiated and
// of the silent ones; whole groups, unless there are fewer than ranks, then whole rollouts. BatchChunk::rank says whose a chunk is; the
// chunks of a rank are those of BuildBatch for its part alone. With one rank it is BuildBatch.
Result<Batch> BuildRankedBatch(std::vector<Group> groups, const BatchOptions& options, int ranks);

// Rank 0's ends: control[k-1] to rank k, and the collective of all. No control: the trainer is alone.
struct RankLinks {
  std::vector<Link> control;
  std::unique_ptr<Collective> collective;
};

// Rank 0's view of all ranks, itself among them. An error of another rank names it: "trainer rank 2: it is gone".
class Ranks {
 public:
  // `pass` computes rank 0's own chunks and must outlive this; `links` too (may be null: alone).
  Ranks(engine::TrainPass& pass, RankLinks* links);

  int size() const { return links_ == nullptr ? 1 : 1 + static_cast<int>(links_->control.size()); }

  // All ranks hold these from now on. `weights` are what rank 0 computes with until the next Load of the same model.
  Status Load(RankModel model, const engine::ComputeWeights& weights);
  // Calls `work` with the index of every chunk: those of one rank in order, ranks beside each other in threads of their own, rank 0's in the
  // caller's. After the first error no chunk is begun; the error of the lowest rank is returned.
  Status ForEach(const Batch& batch, const std::function<Status(size_t chunk)>& work);
  // On the chunk's own rank: logprobs by item, and the gradient (added to that rank's own; `grads` are those of rank 0). A Backward belongs
  // to the Forward of the policy before it. From ForEach.
  Result<std::vector<float>> Forward(RankModel model, const BatchChunk& chunk, bool keep);
  Status Backward(const BatchChunk& chunk, std::span<const float> coef, engine::Gradients& grads);
  // `grads` become the sum over all ranks. Afterwards those of other ranks are zero.
  Status Reduce(engine::Gradients& grads);
  // A model's likeliest tokens, on the chunk's own rank. From ForEach.
  Result<LikelyTokens> Likeliest(RankModel model, const BatchChunk& chunk, int count);
  // As ScoreBatch, on all ranks.
  Result<std::vector<std::vector<float>>> Score(RankModel model, const Batch& batch);

 private:
  Result<std::string> Ask(int rank, uint32_t what, std::string_view payload);
  engine::TrainPass& pass_;
  RankLinks* links_;
  engine::ComputeWeights weights_[3];
};

// The whole life of a rank above 0: obeys `control` until its other end closes (OK), or why it cannot. `threads`: of EngineOptions.
Status ServeRank(engine::Engine& engine, Link control, Collective& collective);

}  // namespace temper::trainer
