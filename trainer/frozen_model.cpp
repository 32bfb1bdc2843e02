#include "trainer/frozen_model.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "engine/files/model_file.h"
#include "engine/kept_set.h"
#include "engine/score.h"
#include "text/tokenizer.h"

namespace temper::trainer {
namespace {

// Which id the first token has that is another one in the other tokenizer; -1: they say the same.
int32_t FirstDifference(const text::Tokenizer& a, const text::Tokenizer& b) {
  for (int32_t id = 0; id < std::max(a.size(), b.size()); ++id) {
    const bool here = id < a.size() && a.HasToken(id), there = id < b.size() && b.HasToken(id);
    if (here != there || (here && a.TokenBytes(id) != b.TokenBytes(id))) return id;
  }
  return -1;
}

}  // namespace

Status CheckFrozenModel(const std::string& model, const engine::ModelConfig& config, const text::TextFiles& text,
                        const engine::ModelConfig& policy, const text::TextFiles& policy_text) {
  if (config.vocab != policy.vocab) {
    return InvalidArgument(fmt::format("{} has {} tokens, the policy {}", model, config.vocab, policy.vocab));
  }
  if (config.max_positions < policy.max_positions) {
    return InvalidArgument(fmt::format("{} has {} positions, the policy {}", model, config.max_positions, policy.max_positions));
  }
  if (!text.tokenizer_json.empty() && text.tokenizer_json == policy_text.tokenizer_json) return Status::Ok();
  ASSIGN_OR_RETURN(const text::TextModel own, text::LoadTextModel(policy_text));
  Result<text::TextModel> other = text::LoadTextModel(text);
  if (!other.ok()) return other.status().WithContext(model);
  const int32_t id = FirstDifference(own.tokenizer, other->tokenizer);
  if (id < 0) return Status::Ok();
  return InvalidArgument(fmt::format("{} has another tokenizer than the policy: token {} differs", model, id));
}

Result<FrozenModel> FrozenModel::Load(const std::string& model, const engine::ModelConfig& policy, const text::TextFiles& policy_text,
                                      engine::Profile profile) {
  ASSIGN_OR_RETURN(const engine::ModelFile file, engine::LoadModel(model));
  RETURN_IF_ERROR(CheckFrozenModel(model, file.config, file.text, policy, policy_text));
  FrozenModel frozen;
  frozen.weights_ = engine::ComputeWeights::FromParameters(file.params, profile);
  return frozen;
}

Result<LikelyTokens> Likeliest(engine::TrainPass& pass, const engine::ComputeWeights& weights, const BatchChunk& chunk, int count) {
  const int vocab = weights.config().vocab;
  std::vector<std::vector<std::pair<int32_t, double>>> by_node(static_cast<size_t>(chunk.tree.size()));
  engine::ForwardOptions options = Wanting(chunk, /*keep=*/false);
  options.on_draw = [&](int node, const float* logits, float log_sum_exp) {
    const std::string_view kept = chunk.tree.kept_set(chunk.tree.kept_index(node));
    std::vector<int32_t> among;
    if (!kept.empty()) TEMPER_CHECK(engine::DecodeKept(kept, vocab, &among).ok()) << "the pass has checked it";
    by_node[static_cast<size_t>(node)] = engine::Likeliest({logits, static_cast<size_t>(vocab)}, log_sum_exp, count, among);
  };
  RETURN_IF_ERROR(pass.Forward(weights, chunk.tree, options).status());
  LikelyTokens out;
  out.begin.assign(1, 0);
  for (const auto& likely : by_node) {
    for (const auto& [token, logprob] : likely) {
      out.token.push_back(token);
      out.logprob.push_back(static_cast<float>(logprob));
    }
    out.begin.push_back(static_cast<int32_t>(out.token.size()));
  }
  return out;
}

std::string FrozenModel::Fingerprint() const { return weights_.ComputeDigest().Hex(); }

}  // namespace temper::trainer
