// The StepModel of the engine: PagedForward over a KvPool.
#pragma once

#include <memory>
#include <vector>

#include "engine/decode/model.h"
#include "engine/engine.h"
#include "engine/kv_pool.h"
#include "engine/paged_forward.h"
#include "engine/weights.h"

namespace temper::engine {

class PagedModel : public StepModel {
 public:
  // `engine` must outlive it.
  PagedModel(Engine& engine, const ModelConfig& config, Profile profile, int pages);

  int vocab() const override { return pool_.config().vocab; }
  int max_positions() const override { return pool_.config().max_positions; }
  int window() const override { return window_; }
  int pages() const override { return pool_.capacity(); }
  int32_t AllocatePage() override { return pool_.Allocate(); }
  void FreePage(int32_t page) override { pool_.Release(page); }
  void CopyPage(int32_t from, int32_t to, int positions) override { pool_.CopyPrefix(from, to, positions); }
  // The weights must have the configuration and profile of the model.
  void SetWeights(const ComputeWeights& weights) override;
  void Run(std::span<const StepRow> rows, std::vector<StepLogits>* out) override;
  float LogSumExp(std::span<const float> logits) const override;

 private:
  const Engine& engine_;
  KvPool pool_;
  int window_ = 0;
  PagedForward forward_;
  ComputeWeights weights_;
  std::vector<PagedSequence> sequences_;
  std::vector<int32_t> last_;  // index of the last token, for rows that want logits
};

}  // namespace temper::engine
