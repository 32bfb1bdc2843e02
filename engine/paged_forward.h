// Forward over pages: prefill, chunked prefill and decoding of many sequences in one call. The same kernels in the same order
// as a TrainPass, so a token's logits are the same to the bit whichever of them computed it, with whatever batch mates.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "engine/engine.h"
#include "engine/kv_pool.h"
#include "engine/weights.h"

namespace temper::engine {

// New tokens of one sequence. Positions 0 … start-1 are already in the pages.
struct PagedSequence {
  std::span<const int32_t> tokens;  // at positions start, start+1, …; at least one
  int start = 0;
  std::span<const int32_t> pages;  // page i holds positions 64i …; covers start + tokens.size(); -1 where every layer's window has passed
  // Which of `tokens` want a row of logits (increasing indices); decoding asks for the last one only.
  std::span<const int32_t> logits;
  float inv_temperature = 1;  // multiplies the logits
};

// One calling thread at a time. Holds buffers that grow to the largest call.
class PagedForward {
 public:
  // Both must outlive it.
  PagedForward(Engine& engine, KvPool& pool);
  ~PagedForward();

  // Runs all sequences as one batch: writes K and V of every new token into its page (those pages must be held by this
  // sequence alone) and returns the wanted rows, [rows][vocab] fp32, in order of sequence and index. The span is valid until
  // the next call. Tokens outside the vocabulary, positions beyond the config and short page lists are bugs and abort.
  std::span<const float> Run(const ComputeWeights& weights, std::span<const PagedSequence> sequences);
  // RowLogSumExp of every row of the last call.
  std::span<const float> log_sum_exp() const;
  // The last residual of every row of the last call: fp32 [rows][width].
  std::span<const float> hidden() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace temper::engine
