#include "trainer/batch.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <utility>

#include <fmt/format.h>

#include "common/rng.h"

namespace temper::trainer {
namespace {

// The runs of one rollout with everything that does not depend on how they are laid out.
struct Shape {
  std::vector<std::vector<int32_t>> children;  // per run, by (call, choice, index)
  std::vector<int32_t> roots;
  std::vector<int32_t> sampled;     // sampled runs in the order in which they were drawn
  std::vector<int32_t> turn;        // per run, of sampled ones
  std::vector<int64_t> segment;     // per run, of sampled ones
  int64_t tokens = 0;
};

Shape ShapeOf(const Rollout& rollout) {
  const std::vector<TokenRun>& runs = rollout.runs;
  Shape shape;
  shape.children.resize(runs.size());
  shape.turn.assign(runs.size(), 0);
  shape.segment.assign(runs.size(), 0);
  auto before = [&](int32_t a, int32_t b) {
    return std::tuple(runs[a].call, runs[a].choice, a) < std::tuple(runs[b].call, runs[b].choice, b);
  };
  for (size_t i = 0; i < runs.size(); ++i) {
    const auto index = static_cast<int32_t>(i);
    (runs[i].parent < 0 ? shape.roots : shape.children[runs[i].parent]).push_back(index);
    if (runs[i].sampled) shape.sampled.push_back(index);
    shape.tokens += static_cast<int64_t>(runs[i].ids.size());
  }
  std::sort(shape.roots.begin(), shape.roots.end(), before);
  for (auto& list : shape.children) std::sort(list.begin(), list.end(), before);
  std::sort(shape.sampled.begin(), shape.sampled.end(), before);

  std::map<int32_t, int32_t> turn_of_call;
  for (int32_t r : shape.sampled) turn_of_call.try_emplace(runs[r].call, 0);
  int32_t rank = 0;
  for (auto& [call, turn] : turn_of_call) turn = rank++;

  std::vector<uint8_t> continued(runs.size(), 0);
  int64_t segments = 0;
  for (int32_t r : shape.sampled) {
    shape.turn[r] = turn_of_call[runs[r].call];
    int32_t ancestor = runs[r].parent;
    while (ancestor >= 0 && !runs[ancestor].sampled) ancestor = runs[ancestor].parent;
    if (ancestor >= 0 && !continued[ancestor]) {
      continued[ancestor] = 1;
      shape.segment[r] = shape.segment[ancestor];
    } else {
      shape.segment[r] = segments++;
    }
  }
  return shape;
}

// Lays rollouts into one TreeBuilder and remembers where their sampled tokens went.
class Layout {
 public:
  explicit Layout(bool merge) : merge_(merge), builder_(merge) {}

  bool empty() const { return tokens_ == 0; }
  int64_t tokens() const { return tokens_; }
  int64_t logical_tokens() const { return logical_; }

  // Appends the handles of the rollout's sampled tokens, per run in the order of its ids.
  Result<std::vector<std::vector<int32_t>>> Add(const Rollout& rollout, const Shape& shape) {
    std::vector<std::vector<int32_t>> handles(rollout.runs.size());
    for (int32_t root : shape.roots) RETURN_IF_ERROR(Walk(rollout, shape, root, handles));
    tokens_ += shape.tokens;
    return handles;
  }

  engine::TreeBatch Build(std::vector<int32_t>* index) {
    builder_.AddLogicalTokens(logical_);
    return builder_.Build(index);
  }

 private:
  // Depth first. `path` holds the runs above, for rows; with merging the last handle of the parent is enough.
  Status Walk(const Rollout& rollout, const Shape& shape, int32_t root, std::vector<std::vector<int32_t>>& handles) {
    struct Frame {
      int32_t run;
      int32_t parent_handle;
      int64_t depth;
    };
    std::vector<Frame> stack = {{root, -1, 0}};
    std::vector<int32_t> last(rollout.runs.size(), -1);
    while (!stack.empty()) {
      const Frame frame = stack.back();
      stack.pop_back();
      const TokenRun& run = rollout.runs[frame.run];
      if (run.sampled && frame.depth == 0 && !run.ids.empty()) {
        return InvalidArgument(fmt::format("session {}, run {}: a sampled token with nothing before it has no logprob",
                                           rollout.session, frame.run));
      }
      const int64_t depth = frame.depth + static_cast<int64_t>(run.ids.size());
      int32_t handle = frame.parent_handle;
      if (merge_) handle = Append(run, handle, handles[frame.run]);
      const std::vector<int32_t>& children = shape.children[frame.run];
      if (children.empty()) {
        logical_ += depth;
        if (!merge_) AppendRow(rollout, frame.run, handles);
      }
      for (auto it = children.rbegin(); it != children.rend(); ++it) stack.push_back({*it, handle, depth});
    }
    return Status::Ok();
  }

  int32_t Append(const TokenRun& run, int32_t handle, std::vector<int32_t>& out) {
    const bool record = run.sampled && out.empty();
    for (size_t k = 0; k < run.ids.size(); ++k) {
      const std::string_view kept = run.kept.empty() ? std::string_view() : run.kept[k];
      handle = builder_.AddNode(handle, run.ids[k], run.sampled ? run.inv_temperature : 1.0f, kept);
      if (record) out.push_back(handle);
    }
    return handle;
  }

  void AppendRow(const Rollout& rollout, int32_t leaf, std::vector<std::vector<int32_t>>& handles) {
    std::vector<int32_t> path;
    for (int32_t r = leaf; r >= 0; r = rollout.runs[r].parent) path.push_back(r);
    int32_t handle = -1;
    for (auto it = path.rbegin(); it != path.rend(); ++it) handle = Append(rollout.runs[*it], handle, handles[*it]);
  }

  bool merge_;
  engine::TreeBuilder builder_;
  int64_t tokens_ = 0, logical_ = 0;
};

}  // namespace

Status PutInOrder(std::vector<Group>& groups) {
  std::sort(groups.begin(), groups.end(), [](const Group& a, const Group& b) { return a.group < b.group; });
  for (size_t g = 0; g < groups.size(); ++g) {
    if (g > 0 && groups[g].group == groups[g - 1].group) {
      return InvalidArgument(fmt::format("group {} is twice in one batch", groups[g].group));
    }
    std::vector<Rollout>& rollouts = groups[g].rollouts;
    std::sort(rollouts.begin(), rollouts.end(), [](const Rollout& a, const Rollout& b) { return a.rollout < b.rollout; });
    for (size_t i = 1; i < rollouts.size(); ++i) {
      if (rollouts[i].rollout == rollouts[i - 1].rollout) {
        return InvalidArgument(fmt::format("group {}: rollout {} is there twice", groups[g].group, rollouts[i].rollout));
      }
    }
  }
  return Status::Ok();
}

void Compare(BatchChunk& chunk, LikelyTokens likely) {
  chunk.tree.targets.clear();
  for (int32_t v = 0; v < chunk.tree.size(); ++v) {
    for (int32_t t = likely.begin[v]; t < likely.begin[v + 1]; ++t) chunk.tree.targets.push_back({v, likely.token[t]});
  }
  chunk.target_begin = std::move(likely.begin);
  chunk.target_teacher = std::move(likely.logprob);
}

Result<Batch> BuildBatch(std::vector<Group> groups, const BatchOptions& options) {
  RETURN_IF_ERROR(PutInOrder(groups));
  Batch batch;
  batch.groups = std::move(groups);
  batch.samples.resize(batch.groups.size());
  Layout layout(options.merge);
  // Sampled tokens of the open chunk still hold handles; they become nodes when it is built.
  std::vector<SampledToken*> open;
  bool silent = false;
  auto close = [&] {
    if (layout.empty()) return;
    std::vector<int32_t> index;
    BatchChunk chunk;
    chunk.tree = layout.Build(&index);
    chunk.silent = silent;
    chunk.wanted.assign(static_cast<size_t>(chunk.tree.size()), 0);
    for (SampledToken* token : open) {
      token->node = index[token->node];
      token->chunk = static_cast<int32_t>(batch.chunks.size());
      chunk.wanted[token->node] = 1;
    }
    if (options.choose) {
      const engine::PassChoice choice = options.choose(chunk.tree, chunk.wanted);
      chunk.chunk_nodes = choice.chunk_nodes;
      chunk.recompute = choice.recompute;
    } else if (chunk.tree.size() > options.max_chunk_nodes) {
      chunk.chunk_nodes = static_cast<int>(options.max_chunk_nodes);
    }
    batch.logical_tokens += layout.logical_tokens();
    batch.tree_tokens += chunk.tree.size();
    batch.chunks.push_back(std::move(chunk));
    open.clear();
    layout = Layout(options.merge);
  };

  TEMPER_CHECK(options.silent.empty() || options.silent.size() == batch.groups.size()) << options.silent.size();
  std::vector<size_t> order;
  for (const uint8_t pass : {0, 1}) {
    for (size_t g = 0; g < batch.groups.size(); ++g) {
      if ((!options.silent.empty() && options.silent[g]) == pass) order.push_back(g);
    }
  }
  for (const size_t g : order) {
    if (!silent && !options.silent.empty() && options.silent[g]) {
      close();
      silent = true;
    }
    const std::vector<Rollout>& rollouts = batch.groups[g].rollouts;
    std::vector<Shape> shapes;
    int64_t group_tokens = 0;
    for (const Rollout& rollout : rollouts) {
      shapes.push_back(ShapeOf(rollout));
      group_tokens += shapes.back().tokens;
    }
    // A group stays together where it can: its rollouts share the most.
    if (layout.tokens() + group_tokens > options.max_chunk_nodes) close();
    batch.samples[g].resize(rollouts.size());
    for (size_t i = 0; i < rollouts.size(); ++i) {
      if (layout.tokens() + shapes[i].tokens > options.max_chunk_nodes) close();
      ASSIGN_OR_RETURN(const auto handles, layout.Add(rollouts[i], shapes[i]));
      std::vector<SampledToken>& samples = batch.samples[g][i];
      for (int32_t r : shapes[i].sampled) {
        const TokenRun& run = rollouts[i].runs[r];
        for (size_t k = 0; k < run.ids.size(); ++k) {
          samples.push_back({.node = handles[r][k],
                             .logprob = run.logprobs[k],
                             .version = run.version.step,
                             .mixed = run.mixed,
                             .trainable = run.trainable,
                             .turn = shapes[i].turn[r],
                             .segment = shapes[i].segment[r]});
        }
      }
      for (SampledToken& token : samples) open.push_back(&token);
    }
  }
  close();
  return batch;
}

namespace {

// `logprob_of` an item where the token was drawn: the token's own node, or a target beside it.
template <class LogprobOf>
std::vector<LossGroup> LossGroups(const Batch& batch, bool decoupled, const OtherLogprobs& others, const LogprobOf& logprob_of) {
  std::vector<LossGroup> out(batch.groups.size());
  for (size_t g = 0; g < batch.groups.size(); ++g) {
    for (size_t i = 0; i < batch.groups[g].rollouts.size(); ++i) {
      const Rollout& rollout = batch.groups[g].rollouts[i];
      LossRollout& r = out[g].rollouts.emplace_back();
      r.outcome = rollout.outcome;
      r.reward = rollout.reward;
      r.turn_rewards = rollout.turn_rewards;
      r.wall_s = rollout.wall_s;
      for (const SampledToken& token : batch.samples[g][i]) {
        r.mask.push_back(token.trainable);
        r.logp_new.push_back(logprob_of(token, token.node));
        const bool first = others.old.empty();
        r.logp_old.push_back(!decoupled ? token.logprob : first ? r.logp_new.back() : others.old[token.chunk][token.node]);
        if (decoupled) r.logp_rollout.push_back(token.logprob);
        if (!others.reference.empty()) r.logp_ref.push_back(others.reference[token.chunk][token.node]);
        if (const BatchChunk& chunk = batch.chunks[token.chunk]; !chunk.target_begin.empty()) {
          std::vector<TopToken>& top = r.teacher_top.emplace_back();
          for (int32_t t = chunk.target_begin[token.node]; t < chunk.target_begin[token.node + 1]; ++t) {
            top.push_back({.logp_teacher = chunk.target_teacher[t], .logp_new = logprob_of(token, chunk.tree.size() + t)});
          }
        }
        if (!others.teacher.empty()) r.logp_teacher.push_back(others.teacher[token.chunk][token.node]);
        r.turn.push_back(token.turn);
        r.segment.push_back(token.segment);
      }
    }
  }
  return out;
}

}  // namespace

std::vector<LossGroup> MakeLossGroups(const Batch& batch, std::span<const std::vector<float>> logprobs, bool decoupled,
                                      const OtherLogprobs& others) {
  return LossGroups(batch, decoupled, others, [&](const SampledToken& token, int32_t item) { return logprobs[token.chunk][item]; });
}

std::vector<LossGroup> RecordedLossGroups(const Batch& batch, bool decoupled) {
  return LossGroups(batch, decoupled, {}, [](const SampledToken& token, int32_t) { return token.logprob; });
}

bool IsSilent(const std::vector<std::vector<double>>& values) {
  for (const std::vector<double>& rollout : values) {
    if (std::any_of(rollout.begin(), rollout.end(), [](double v) { return v != 0; })) return false;
  }
  return true;
}

std::vector<uint8_t> SilentGroups(const Algorithm& algorithm, const Batch& batch) {
  std::vector<uint8_t> silent;
  if (!algorithm.SilentWithoutAdvantage()) return silent;
  const LossResult recorded = ComputeLoss(algorithm, RecordedLossGroups(batch, algorithm.off_policy.decoupled));
  for (const auto& group : recorded.token_advantages) silent.push_back(IsSilent(group));
  return silent;
}

std::vector<std::vector<float>> ItemCoefficients(const Batch& batch, const std::vector<std::vector<std::vector<double>>>& coef,
                                                 const std::vector<std::vector<std::vector<std::vector<double>>>>& coef_top) {
  std::vector<std::vector<double>> sums;
  for (const BatchChunk& chunk : batch.chunks) sums.emplace_back(static_cast<size_t>(chunk.tree.items()), 0.0);
  for (size_t g = 0; g < batch.samples.size(); ++g) {
    for (size_t i = 0; i < batch.samples[g].size(); ++i) {
      const std::vector<SampledToken>& samples = batch.samples[g][i];
      for (size_t k = 0; k < samples.size(); ++k) {
        std::vector<double>& sum = sums[samples[k].chunk];
        sum[samples[k].node] += coef[g][i][k];
        if (coef_top.empty()) continue;
        const BatchChunk& chunk = batch.chunks[samples[k].chunk];
        const std::vector<double>& top = coef_top[g][i][k];  // none for a token that is not trained
        for (size_t t = 0; t < top.size(); ++t) sum[chunk.tree.size() + chunk.target_begin[samples[k].node] + t] += top[t];
      }
    }
  }
  std::vector<std::vector<float>> out;
  for (const auto& sum : sums) out.emplace_back(sum.begin(), sum.end());
  return out;
}

void PermuteRewards(uint64_t seed, std::vector<Group>& groups) {
  const Rng root(seed);
  for (Group& group : groups) {
    std::sort(group.rollouts.begin(), group.rollouts.end(), [](const Rollout& a, const Rollout& b) { return a.rollout < b.rollout; });
    std::vector<double> rewards;
    for (Rollout& r : group.rollouts) {
      rewards.push_back(r.reward);
      r.turn_rewards.clear();  // of other turns than another rollout has
    }
    Rng rng = root.Fork("permute_rewards", static_cast<uint64_t>(group.group));
    rng.Shuffle(rewards);
    for (size_t i = 0; i < rewards.size(); ++i) group.rollouts[i].reward = rewards[i];
  }
}

void OnPolicyCheck::Merge(const OnPolicyCheck& other) {
  tokens += other.tokens;
  max_deviation = std::max(max_deviation, other.max_deviation);
  if (first_mismatch.empty()) first_mismatch = other.first_mismatch;
}

OnPolicyCheck CheckOnPolicy(const Batch& batch, std::span<const std::vector<float>> logprobs, int64_t version) {
  OnPolicyCheck check;
  for (size_t g = 0; g < batch.samples.size(); ++g) {
    for (size_t i = 0; i < batch.samples[g].size(); ++i) {
      const std::vector<SampledToken>& samples = batch.samples[g][i];
      for (size_t k = 0; k < samples.size(); ++k) {
        const SampledToken& token = samples[k];
        if (token.mixed || !token.trainable || token.version != version) continue;
        ++check.tokens;
        const float recomputed = logprobs[token.chunk][token.node];
        if (recomputed == token.logprob) continue;
        double deviation = std::abs(std::expm1(static_cast<double>(recomputed) - static_cast<double>(token.logprob)));
        if (std::isnan(deviation)) deviation = std::numeric_limits<double>::infinity();
        check.max_deviation = std::max(check.max_deviation, deviation);
        if (check.first_mismatch.empty()) {
          check.first_mismatch = fmt::format("session {}, sampled token {}: recorded logprob {:.9g}, recomputed {:.9g}",
                                             batch.groups[g].rollouts[i].session, k, token.logprob, recomputed);
        }
      }
    }
  }
  return check;
}

Result<std::vector<std::vector<float>>> ScoreBatch(engine::TrainPass& pass, const engine::ComputeWeights& weights, const Batch& batch) {
  std::vector<std::vector<float>> logprobs;
  for (const BatchChunk& chunk : batch.chunks) {
    ASSIGN_OR_RETURN(const std::span<const float> row, pass.Forward(weights, chunk.tree, Wanting(chunk, /*keep=*/false)));
    logprobs.emplace_back(row.begin(), row.end());
  }
  return logprobs;
}

}  // namespace temper::trainer
