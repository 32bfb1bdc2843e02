// A model beside the policy that is scored and never trained: the reference of a KL term or of a preference loss, the teacher of a
// distillation. Only its compute form is held. Its logprobs of sampled tokens are at each token's own 1/T and among its kept tokens
// (docs/kept_sets.md says why).
#pragma once

#include <string>
#include <vector>

#include "common/status.h"
#include "engine/config.h"
#include "engine/train_pass.h"
#include "engine/weights.h"
#include "text/text_model.h"
#include "trainer/batch.h"

namespace temper::trainer {

class FrozenModel {
 public:
  FrozenModel() = default;  // none
  // `model`: a folder, a file or a fetched name. kInvalidArgument when its tokens are not those of the policy, or its positions do not
  // reach as far: its logprobs would be of something else.
  static Result<FrozenModel> Load(const std::string& model, const engine::ModelConfig& policy, const text::TextFiles& policy_text,
                                  engine::Profile profile);

  bool empty() const { return weights_.empty(); }
  const engine::ComputeWeights& weights() const { return weights_; }
  // Of the compute form, as hexadecimal digits.
  std::string Fingerprint() const;

 private:
  engine::ComputeWeights weights_;
};

// The same without reading parameters; what a plan asks before anything starts.
Status CheckFrozenModel(const std::string& model, const engine::ModelConfig& config, const text::TextFiles& text,
                        const engine::ModelConfig& policy, const text::TextFiles& policy_text);

// What a model finds likeliest where the wanted nodes of a chunk were drawn: `count` tokens each, fewer where fewer were kept.
Result<LikelyTokens> Likeliest(engine::TrainPass& pass, const engine::ComputeWeights& weights, const BatchChunk& chunk, int count);

}  // namespace temper::trainer
