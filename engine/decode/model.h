// What the Decoder asks of a model: one mixed batch of decode rows and prompt chunks over KV pages. Two implementations: the
// engine's PagedForward (paged_model.h), and a small deterministic one in the scheduler's property tests.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/decode/radix_cache.h"

namespace temper::engine {

class ComputeWeights;

// Tokens of one sequence at positions start … start + tokens.size() - 1. `pages` covers positions 0 … of the sequence in
// pages of 64; keys and values of the tokens are written to their pages, those before `start` are read. A page whose positions
// all lie before the window of `start` may be -1.
struct StepRow {
  std::span<const int32_t> tokens;
  int64_t start = 0;
  std::span<const int32_t> pages;
  bool want_logits = false;       // logits after the last token
  float inv_temperature = 1.0f;   // multiplies the logits
};

struct StepLogits {
  std::span<const float> logits;  // [vocab], times inv_temperature; empty when not wanted. Valid until the next Run
  float log_sum_exp = 0.0f;       // the engine's RowLogSumExp of `logits`
};

// Also the source of the pages its rows name.
class StepModel : public PageSource {
 public:
  virtual int vocab() const = 0;
  virtual int max_positions() const = 0;
  // A token sees itself and so many positions less one before it, in the layer that sees the most; 0: all of them.
  virtual int window() const { return 0; }
  // Later runs read these weights. Between two runs only; the model keeps a copy (which shares the mapping).
  virtual void SetWeights(const ComputeWeights& weights) = 0;
  // Copies keys and values of the first `positions` positions of one page to another that is empty.
  virtual void CopyPage(int32_t from, int32_t to, int positions) = 0;
  // One entry of `out` a row, in the same order. A row's result depends on that row alone.
  virtual void Run(std::span<const StepRow> rows, std::vector<StepLogits>* out) = 0;
  // The engine's RowLogSumExp of some logits.
  virtual float LogSumExp(std::span<const float> logits) const = 0;
};

}  // namespace temper::engine
