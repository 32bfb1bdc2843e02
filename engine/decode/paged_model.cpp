#include "engine/decode/paged_model.h"

#include "common/check.h"

namespace temper::engine {

PagedModel::PagedModel(Engine& engine, const ModelConfig& config, Profile profile, int pages)
    : engine_(engine), pool_(config, profile, pages), window_(LongestWindow(config)), forward_(engine, pool_) {}

void PagedModel::SetWeights(const ComputeWeights& weights) {
  TEMPER_CHECK(weights.profile() == pool_.profile() && weights.config().vocab == pool_.config().vocab &&
               weights.config().layers == pool_.config().layers)
      << "weights of another model";
  weights_ = weights;
}

float PagedModel::LogSumExp(std::span<const float> logits) const {
  return RowLogSumExp(engine_, logits);
}

void PagedModel::Run(std::span<const StepRow> rows, std::vector<StepLogits>* out) {
  sequences_.clear();
  last_.resize(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    const StepRow& row = rows[i];
    last_[i] = static_cast<int32_t>(row.tokens.size()) - 1;
    sequences_.push_back({.tokens = row.tokens,
                          .start = static_cast<int>(row.start),
                          .pages = row.pages,
                          .logits = std::span<const int32_t>(&last_[i], row.want_logits ? 1 : 0),
                          .inv_temperature = row.inv_temperature});
  }
  std::span<const float> logits = forward_.Run(weights_, sequences_);
  std::span<const float> log_sum_exp = forward_.log_sum_exp();
  out->assign(rows.size(), {});
  size_t wanted = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (!rows[i].want_logits) continue;
    (*out)[i] = {logits.subspan(wanted * vocab(), vocab()), log_sum_exp[wanted]};
    ++wanted;
  }
}

}  // namespace temper::engine
