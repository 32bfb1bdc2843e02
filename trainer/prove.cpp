#include "trainer/prove.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

#include <fmt/format.h>

#include "common/faults.h"

namespace temper::trainer {
namespace {

// Allowed |g_tree - g_rows| / |g_rows|. In bf16 the gradients that enter a product are rounded to 8 bits, once per shared node or
// once per row.
double Tolerance(engine::Profile profile) { return profile == engine::Profile::kF32 ? 1e-4 : 2e-2; }

struct Scored {
  Batch batch;
  std::vector<std::vector<float>> logprobs;
  engine::Gradients grads;
};

// Hangs a node below another one of its parent's depth: it reads keys that are not its ancestors', as with a wrong subtree end.
void Misplace(engine::TreeBatch& tree) {
  for (int32_t v = 0; v < tree.size(); ++v) {
    for (int32_t w = 0; w < v && tree.parent[v] >= 0; ++w) {
      if (w == tree.parent[v] || tree.pos[w] + 1 != tree.pos[v]) continue;
      tree.parent[v] = w;
      return;
    }
  }
}

Result<Scored> Score(engine::TrainPass& pass, const engine::ComputeWeights& weights, std::vector<Group> groups,
                     const std::vector<std::vector<std::vector<double>>>& coef, const BatchOptions& options) {
  Scored out{.batch = {}, .logprobs = {}, .grads = engine::Gradients(weights.config())};
  ASSIGN_OR_RETURN(out.batch, BuildBatch(std::move(groups), options));
  // A proof that fails must stop the job.
  if (options.merge && !Faults::Get().Hit("trainer.change_tout").ok()) Misplace(out.batch.chunks[0].tree);
  const std::vector<std::vector<float>> nodes = ItemCoefficients(out.batch, coef);
  for (size_t c = 0; c < out.batch.chunks.size(); ++c) {
    const BatchChunk& chunk = out.batch.chunks[c];
    ASSIGN_OR_RETURN(const std::span<const float> logprobs, pass.Forward(weights, chunk.tree, Wanting(chunk)));
    out.logprobs.emplace_back(logprobs.begin(), logprobs.end());
    pass.Backward(nodes[c], out.grads);
  }
  return out;
}

int64_t IdsOf(const Group& group) {
  int64_t ids = 0;
  for (const Rollout& rollout : group.rollouts) {
    for (const TokenRun& run : rollout.runs) ids += static_cast<int64_t>(run.ids.size());
  }
  return ids;
}

}  // namespace

Result<TreeProof> ProveTree(engine::TrainPass& pass, const engine::ComputeWeights& weights, const std::vector<Group>& groups,
                            const std::vector<std::vector<std::vector<double>>>& coef, const BatchOptions& options,
                            int64_t max_logical_tokens) {
  std::vector<Group> part;
  auto part_coef = coef;
  int64_t ids = 0;
  for (const Group& group : groups) {
    if (!part.empty() && ids + IdsOf(group) > max_logical_tokens) break;
    part.push_back(group);
    ids += IdsOf(group);
  }
  part_coef.resize(part.size());
  bool zero = true;
  for (const auto& group : part_coef) {
    for (const auto& rollout : group) {
      zero = zero && std::all_of(rollout.begin(), rollout.end(), [](double c) { return c == 0; });
    }
  }
  if (zero) {
    for (auto& group : part_coef) {
      for (auto& rollout : group) std::fill(rollout.begin(), rollout.end(), 1.0);
    }
  }

  BatchOptions merged = options, rows = options;
  merged.merge = true;
  rows.merge = false;
  merged.silent = rows.silent = {};  // what has no coefficient is proved too
  ASSIGN_OR_RETURN(Scored tree, Score(pass, weights, part, part_coef, merged));
  ASSIGN_OR_RETURN(const Scored flat, Score(pass, weights, std::move(part), part_coef, rows));

  // The smallest change there is: a proof that fails must stop the job.
  if (!Faults::Get().Hit("trainer.change_tree").ok()) {
    const SampledToken& first = tree.batch.samples[0][0][0];
    float& logprob = tree.logprobs[first.chunk][first.node];
    logprob = std::nextafter(logprob, -1e9f);
  }

  TreeProof proof;
  proof.logical_tokens = tree.batch.logical_tokens;
  proof.tree_tokens = tree.batch.tree_tokens;
  proof.tolerance = Tolerance(weights.profile());
  for (size_t g = 0; g < tree.batch.samples.size(); ++g) {
    for (size_t i = 0; i < tree.batch.samples[g].size(); ++i) {
      for (size_t k = 0; k < tree.batch.samples[g][i].size(); ++k) {
        const SampledToken& a = tree.batch.samples[g][i][k];
        const SampledToken& b = flat.batch.samples[g][i][k];
        ++proof.tokens;
        const float as_tree = tree.logprobs[a.chunk][a.node], as_row = flat.logprobs[b.chunk][b.node];
        if (as_tree == as_row) continue;
        if (proof.different_logprobs++ > 0) continue;
        proof.first_difference = fmt::format("session {}, sampled token {}: {:.9g} as a tree, {:.9g} as a row",
                                             tree.batch.groups[g].rollouts[i].session, k, as_tree, as_row);
      }
    }
  }
  double difference = 0, tree_squares = 0, rows_squares = 0, worst = 0;
  const std::span<const float> x = tree.grads.flat(), y = flat.grads.flat();
  for (const engine::TensorSpec& tensor : tree.grads.tensors()) {
    double here = 0;
    for (size_t k = static_cast<size_t>(tensor.offset); k < static_cast<size_t>(tensor.offset + tensor.size); ++k) {
      const double d = static_cast<double>(x[k]) - y[k];
      here += d * d;
      tree_squares += static_cast<double>(x[k]) * x[k];
      rows_squares += static_cast<double>(y[k]) * y[k];
    }
    difference += here;
    if (here > worst || std::isnan(here)) {
      worst = here;
      proof.worst_tensor = tensor.name;
    }
  }
  proof.tree_norm = std::sqrt(tree_squares);
  proof.rows_norm = std::sqrt(rows_squares);
  proof.gradient_error = difference == 0 ? 0 : std::sqrt(difference) / proof.rows_norm;
  if (std::isnan(proof.gradient_error)) proof.gradient_error = HUGE_VAL;
  return proof;
}

std::string TreeProof::Text() const {
  std::string text = fmt::format("{} sampled tokens, {} tokens as rows, {} as a tree: {} logprobs differ", tokens, logical_tokens, tree_tokens,
                                 different_logprobs);
  if (!first_difference.empty()) text += fmt::format(" (first: {})", first_difference);
  text += fmt::format(", gradient error {:.2e} (at most {:.0e}; norm {:.6g} as a tree, {:.6g} as rows)", gradient_error, tolerance, tree_norm,
                      rows_norm);
  if (gradient_error > tolerance) text += fmt::format(", the most in {}", worst_tensor);
  return text;
}

}  // namespace temper::trainer
