#include "trainer/frozen_model.h"

#include <algorithm>
#include <span>

#include <fmt/format.h>

#include "engine/files/model_file.h"
#include "engine/kept_set.h"
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
  using Entry = std::pair<float, int32_t>;  // logprob, token
  std::vector<std::vector<Entry>> by_node(static_cast<size_t>(chunk.tree.size()));
  engine::ForwardOptions options = Wanting(chunk, /*keep=*/false);
  options.on_draw = [&](int node, const float* logits, float log_sum_exp) {
    std::vector<Entry> entries;
    const std::string_view kept = chunk.tree.kept_set(chunk.tree.kept_index(node));
    if (kept.empty()) {
      for (int32_t id = 0; id < vocab; ++id) entries.emplace_back(logits[id] - log_sum_exp, id);
    } else {
      std::vector<int32_t> ids;
      TEMPER_CHECK(engine::DecodeKept(kept, vocab, &ids).ok()) << "the pass has checked it";
      for (const int32_t id : ids) entries.emplace_back(logits[id] - log_sum_exp, id);
    }
    const auto before = [](const Entry& a, const Entry& b) { return a.first != b.first ? a.first > b.first : a.second < b.second; };
    const auto end = entries.begin() + std::min<ptrdiff_t>(count, static_cast<ptrdiff_t>(entries.size()));
    std::partial_sort(entries.begin(), end, entries.end(), before);
    by_node[static_cast<size_t>(node)].assign(entries.begin(), end);
  };
  RETURN_IF_ERROR(pass.Forward(weights, chunk.tree, options).status());
  LikelyTokens out;
  out.begin.assign(1, 0);
  for (const std::vector<Entry>& entries : by_node) {
    for (const auto& [logprob, token] : entries) {
      out.token.push_back(token);
      out.logprob.push_back(logprob);
    }
    out.begin.push_back(static_cast<int32_t>(out.token.size()));
  }
  return out;
}

std::string FrozenModel::Fingerprint() const { return weights_.ComputeDigest().Hex(); }

}  // namespace temper::trainer
