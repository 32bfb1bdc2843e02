#include "engine/score.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include <fmt/format.h>

#include "common/check.h"
#include "engine/kept_set.h"
#include "engine/kv_pool.h"
#include "engine/paged_forward.h"
#include "engine/reference.h"
#include "engine/train_pass.h"

namespace temper::engine {
namespace {

using Top = std::vector<std::pair<int32_t, double>>;

template <typename Value>
Top LikeliestOf(std::span<const Value> logits, Value log_sum_exp, int count, std::span<const int32_t> among) {
  std::vector<std::pair<Value, int32_t>> entries;  // logprob, id
  if (among.empty()) {
    entries.reserve(logits.size());
    for (size_t id = 0; id < logits.size(); ++id) entries.emplace_back(logits[id] - log_sum_exp, static_cast<int32_t>(id));
  } else {
    for (const int32_t id : among) entries.emplace_back(logits[static_cast<size_t>(id)] - log_sum_exp, id);
  }
  const auto end = entries.begin() + std::min<ptrdiff_t>(count, static_cast<ptrdiff_t>(entries.size()));
  std::partial_sort(entries.begin(), end, entries.end(), [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first > b.first : a.second < b.second;
  });
  Top out;
  for (auto it = entries.begin(); it != end; ++it) out.emplace_back(it->second, it->first);
  return out;
}

float InverseTemperature(const ScoreRow& row) { return 1.0f / static_cast<float>(row.temperature); }

std::vector<RowScores> Empty(const std::vector<ScoreRow>& rows, const ScoreOptions& options) {
  std::vector<RowScores> out(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    out[i].logprobs.assign(rows[i].ids.size(), std::numeric_limits<double>::quiet_NaN());
    if (options.top) out[i].top.resize(rows[i].ids.size());
  }
  return out;
}

// Rows [begin, end) as one tree batch.
void ScoreBatch(TrainPass& pass, const ComputeWeights& weights, const std::vector<ScoreRow>& rows, size_t begin, size_t end,
                const ScoreOptions& options, std::vector<RowScores>& out) {
  TreeBuilder builder;
  std::vector<std::vector<int32_t>> handles;
  for (size_t i = begin; i < end; ++i) {
    const float t = InverseTemperature(rows[i]);
    handles.push_back(builder.AddRow(rows[i].ids, std::span(&t, 1), rows[i].kept));
  }
  std::vector<int32_t> index;
  const TreeBatch tree = builder.Build(&index);
  const auto vocab = static_cast<size_t>(weights.config().vocab);
  // Rows of different temperatures never share a node, so the row of a node has the temperature of its own token. A row's
  // first token has one too.
  std::vector<Top> top(tree.size());
  ForwardOptions forward;
  forward.keep = false;
  if (options.top) {
    forward.row_inv_temperature = std::numeric_limits<float>::quiet_NaN();
    forward.on_row = [&](int node, const float* logits, float lse) { top[node] = Likeliest({logits, vocab}, lse, options.top); };
  }
  const auto logprobs = pass.Forward(weights, tree, forward);
  TEMPER_CHECK(logprobs.ok()) << logprobs.status().ToString();
  for (size_t i = begin; i < end; ++i) {
    for (size_t j = 0; j < rows[i].ids.size(); ++j) {
      const int node = index[handles[i - begin][j]];
      out[i].logprobs[j] = (*logprobs)[node];
      if (options.top) out[i].top[j] = top[node];
    }
  }
}

// Rows [begin, end) through pages, `chunk` tokens of each at a time.
void ScorePages(Engine& engine, const ComputeWeights& weights, const std::vector<ScoreRow>& rows, size_t begin, size_t end,
                int chunk, const ScoreOptions& options, std::vector<RowScores>& out) {
  const int vocab = weights.config().vocab;
  int pages = 0;
  size_t longest = 0;
  for (size_t i = begin; i < end; ++i) {
    pages += static_cast<int>((rows[i].ids.size() + kPagePositions - 1) / kPagePositions);
    longest = std::max(longest, rows[i].ids.size());
  }
  KvPool pool(weights.config(), weights.profile(), pages);
  PagedForward pass(engine, pool);
  std::vector<std::vector<int32_t>> tables(end - begin);
  std::vector<size_t> behind(end - begin, 0);  // pages given back: every layer's window has passed them
  const auto window = static_cast<size_t>(LongestWindow(weights.config()));
  std::vector<int32_t> all(std::min<size_t>(chunk, longest));
  std::iota(all.begin(), all.end(), 0);
  for (size_t start = 0; start < longest; start += chunk) {
    std::vector<PagedSequence> batch;
    std::vector<size_t> who;
    for (size_t i = begin; i < end; ++i) {
      const auto& ids = rows[i].ids;
      if (ids.size() <= start) continue;
      const size_t n = std::min<size_t>(chunk, ids.size() - start);
      std::vector<int32_t>& table = tables[i - begin];
      for (size_t& p = behind[i - begin]; window && (p + 1) * kPagePositions + window <= start + 1; ++p) pool.Release(std::exchange(table[p], -1));
      while (table.size() * kPagePositions < start + n) table.push_back(pool.Allocate());
      batch.push_back({std::span(ids).subspan(start, n), static_cast<int>(start), tables[i - begin], std::span(all).first(n),
                       InverseTemperature(rows[i])});
      who.push_back(i);
    }
    const float* logits = pass.Run(weights, batch).data();
    const float* lse = pass.log_sum_exp().data();
    for (size_t b = 0; b < batch.size(); ++b) {
      const auto& ids = rows[who[b]].ids;
      RowScores& scores = out[who[b]];
      for (size_t j = start; j < start + batch[b].tokens.size(); ++j, logits += vocab, ++lse) {
        if (j + 1 < ids.size()) {
          const std::string_view kept = rows[who[b]].kept.empty() ? std::string_view() : rows[who[b]].kept[j + 1];
          scores.logprobs[j + 1] = logits[ids[j + 1]] - (kept.empty() ? *lse : RowLogSumExp(engine, KeptLogits(kept, logits).values));
        }
        if (options.top) scores.top[j] = Likeliest({logits, static_cast<size_t>(vocab)}, *lse, options.top);
      }
    }
  }
}

}  // namespace

std::vector<std::pair<int32_t, double>> Likeliest(std::span<const float> logits, float log_sum_exp, int count, std::span<const int32_t> among) {
  return LikeliestOf(logits, log_sum_exp, count, among);
}

Status CheckTemperature(double t) {
  const auto f = static_cast<float>(t);
  if (f >= 1e-30f && f <= 1e30f) return Status::Ok();
  return InvalidArgument(fmt::format("temperature {}: expected a number from 1e-30 to 1e30", t));
}

Status CheckScoreRow(const ModelConfig& config, const ScoreRow& row) {
  if (row.ids.empty()) return InvalidArgument("ids: an empty list");
  if (static_cast<int64_t>(row.ids.size()) > config.max_positions) {
    return InvalidArgument(fmt::format("ids: {} tokens, the model has {} positions", row.ids.size(), config.max_positions));
  }
  for (size_t i = 0; i < row.ids.size(); ++i) {
    if (row.ids[i] < 0 || row.ids[i] >= config.vocab) {
      return InvalidArgument(fmt::format("ids[{}] = {} is outside the vocabulary of {}", i, row.ids[i], config.vocab));
    }
  }
  if (!row.kept.empty() && row.kept.size() != row.ids.size()) {
    return InvalidArgument(fmt::format("kept: {} entries for {} ids", row.kept.size(), row.ids.size()));
  }
  for (size_t i = 0; i < row.kept.size(); ++i) {
    const Status kept = CheckKept(row.kept[i], config.vocab, row.ids[i]);
    if (!kept.ok()) return kept.WithContext(fmt::format("kept[{}]", i));
  }
  return CheckTemperature(row.temperature);
}

std::vector<RowScores> Score(Engine& engine, const ComputeWeights& weights, const std::vector<ScoreRow>& rows,
                             const ScoreOptions& options) {
  std::vector<RowScores> out = Empty(rows, options);
  switch (options.mode) {
    case ScoreOptions::Mode::kFlat: {
      TrainPass pass(engine);
      for (size_t i = 0; i < rows.size(); ++i) ScoreBatch(pass, weights, rows, i, i + 1, options, out);
      break;
    }
    case ScoreOptions::Mode::kTree: {
      TrainPass pass(engine);
      if (!rows.empty()) ScoreBatch(pass, weights, rows, 0, rows.size(), options, out);
      break;
    }
    case ScoreOptions::Mode::kPrefill:
      for (size_t i = 0; i < rows.size(); ++i) ScorePages(engine, weights, rows, i, i + 1, options.chunk, options, out);
      break;
    case ScoreOptions::Mode::kDecode:
      if (!rows.empty()) ScorePages(engine, weights, rows, 0, rows.size(), 1, options, out);
      break;
  }
  return out;
}

std::vector<RowScores> ScoreReference(const Parameters& params, const std::vector<ScoreRow>& rows,
                                      const ScoreOptions& options) {
  std::vector<RowScores> out = Empty(rows, options);
  for (size_t i = 0; i < rows.size(); ++i) {
    TreeBuilder builder;
    const float t = InverseTemperature(rows[i]);
    builder.AddRow(rows[i].ids, std::span(&t, 1), rows[i].kept);
    const TreeBatch tree = builder.Build(nullptr);
    const std::vector<double> inverse(tree.size(), 1 / rows[i].temperature);
    ReferenceOptions reference;
    reference.inv_temperature = inverse;
    reference.rows = options.top > 0;
    reference.row_inv_temperature = 1 / rows[i].temperature;
    const ReferenceResult result = RunReference(params, tree, reference);
    out[i].logprobs = result.logprobs;
    for (size_t j = 0; j < result.rows.size(); ++j) {
      out[i].top[j] = LikeliestOf<double>(result.rows[j], 0.0, options.top, {});
    }
  }
  return out;
}

}  // namespace temper::engine
