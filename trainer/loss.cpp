#include "trainer/loss.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

namespace temper::trainer {
namespace {

constexpr double kEqual = 1e-9;  // rewards closer than this are the same reward

// Clamped log-ratio: what every exp takes.
double Clamp20(double x) { return std::clamp(x, -20.0, 20.0); }

double Mean(const std::vector<double>& v) {
  double sum = 0;
  for (double x : v) sum += x;
  return v.empty() ? 0 : sum / static_cast<double>(v.size());
}

double Deviation(const std::vector<double>& v, bool population) {
  const double n = static_cast<double>(v.size()) - (population ? 0 : 1);
  if (n <= 0) return 0;
  const double mean = Mean(v);
  double sum = 0;
  for (double x : v) sum += (x - mean) * (x - mean);
  return std::sqrt(sum / n);
}

bool AllEqual(const std::vector<double>& v) {
  if (v.empty()) return true;
  const auto [low, high] = std::minmax_element(v.begin(), v.end());
  return *high - *low <= kEqual;
}

double Median(std::vector<double> v) {
  if (v.empty()) return 0;
  std::sort(v.begin(), v.end());
  const size_t half = v.size() / 2;
  return v.size() % 2 ? v[half] : (v[half - 1] + v[half]) / 2;
}

bool IsValid(Outcome o) { return o == Outcome::kScored || o == Outcome::kPolicyFailure || o == Outcome::kTruncated; }

// A rollout on its way through the steps of docs/algorithm_block.md 3.
struct Work {
  const LossRollout* in = nullptr;
  bool left = false;            // still in the batch after steps 1 and 2
  bool trained = false;         // left and not masked by overlong.mask_truncated
  std::vector<int32_t> tokens;  // indices at mask 1, in order
  std::vector<double> returns;  // per entry of `tokens`
  double total = 0;             // R_i
  double advantage = 0;         // of a rollout without trainable tokens, or credit rollout
  std::vector<double> advantages;  // per entry of `tokens`
};

double TurnReward(const LossRollout& r, size_t turn) { return turn < r.turn_rewards.size() ? r.turn_rewards[turn] : 0; }

size_t TurnOf(const LossRollout& r, int32_t token) { return r.turn.empty() ? 0 : static_cast<size_t>(r.turn[token]); }

size_t TurnCount(const LossRollout& r, const std::vector<int32_t>& tokens) {
  if (!r.turn_rewards.empty()) return r.turn_rewards.size();
  return tokens.empty() ? 1 : TurnOf(r, tokens.back()) + 1;
}

// Step 3: what speed and overlong add on the last turn.
double Shaping(const Algorithm& a, const Work& w, double baseline_s) {
  double extra = 0;
  if (a.reward.speed_coef != 0 && w.in->reward > 0 && baseline_s > 0) {
    extra += a.reward.speed_coef * std::clamp(1 - w.in->wall_s / baseline_s, -1.0, 1.0);
  }
  if (a.overlong.max_tokens && a.overlong.buffer_tokens) {
    const double length = static_cast<double>(w.tokens.size());
    const double buffer = static_cast<double>(*a.overlong.buffer_tokens);
    const double start = static_cast<double>(*a.overlong.max_tokens) - buffer;
    extra += a.overlong.factor * std::max(-1.0, std::min(0.0, (start - length) / buffer));
  }
  return extra;
}

// Step 5, first half: returns of each sampled token and R_i.
void FillReturns(const Algorithm& a, double last_turn_extra, Work& w) {
  const LossRollout& r = *w.in;
  const double alpha = a.reward.process_coef;
  const double final_reward = r.reward + last_turn_extra;
  w.returns.assign(w.tokens.size(), 0);
  if (a.advantage.credit == Credit::kRollout) {
    w.total = final_reward;
    for (double turn_reward : r.turn_rewards) w.total += alpha * turn_reward;
    std::fill(w.returns.begin(), w.returns.end(), w.total);
    return;
  }
  const size_t turns = TurnCount(r, w.tokens);
  std::vector<double> reward(turns);
  for (size_t u = 0; u < turns; ++u) reward[u] = alpha * TurnReward(r, u);
  reward[turns - 1] += final_reward;
  if (a.advantage.credit == Credit::kTurn) {
    for (size_t u = turns - 1; u-- > 0;) reward[u] += a.advantage.gamma * reward[u + 1];
    for (size_t k = 0; k < w.tokens.size(); ++k) w.returns[k] = reward[TurnOf(r, w.tokens[k])];
  } else if (!w.tokens.empty()) {
    // A turn's reward sits on its last sampled token; a turn without one on the nearest earlier token, else on the first.
    for (size_t u = 0; u < turns; ++u) {
      size_t at = 0;
      for (size_t k = 0; k < w.tokens.size() && TurnOf(r, w.tokens[k]) <= u; ++k) at = k;
      w.returns[at] += reward[u];
    }
    for (size_t k = w.tokens.size() - 1; k-- > 0;) w.returns[k] += a.advantage.gamma * w.returns[k + 1];
  }
  w.total = w.tokens.empty() ? final_reward : w.returns[0];
}

// Step 6, baseline and scale, for one group: fills advantage(s) of its valid rollouts.
void GroupAdvantages(const Algorithm& a, double batch_mean, double batch_deviation, std::vector<Work>& group) {
  std::vector<double> totals;
  double lengths = 0, weighted = 0, sum = 0;
  for (const Work& w : group) {
    if (!w.left) continue;
    totals.push_back(w.total);
    sum += w.total;
    lengths += static_cast<double>(w.tokens.size());
    weighted += static_cast<double>(w.tokens.size()) * w.total;
  }
  const Baseline baseline = a.advantage.baseline;
  const Scale scale = a.advantage.scale;
  const bool group_statistics = baseline == Baseline::kGroupMean || baseline == Baseline::kLeaveOneOut ||
                                baseline == Baseline::kLengthWeighted || scale == Scale::kGroupStd || scale == Scale::kGroupMean;
  bool zero = false;
  if (group_statistics) {
    zero = totals.size() < 2 ||
           (AllEqual(totals) && (a.advantage.credit == Credit::kRollout || scale == Scale::kGroupStd));
  }
  const double mean = Mean(totals);
  double divisor = 1;
  if (scale == Scale::kGroupStd) divisor = Deviation(totals, a.advantage.population_std) + a.advantage.std_eps;
  if (scale == Scale::kBatchStd) {
    zero = zero || batch_deviation <= kEqual;
    divisor = batch_deviation + a.advantage.std_eps;
  }
  if (scale == Scale::kGroupMean) {
    zero = zero || mean <= 0;
    divisor = mean;
  }
  for (Work& w : group) {
    if (!w.left) continue;
    double base = 0;
    switch (baseline) {
      case Baseline::kNone: break;
      case Baseline::kGroupMean: base = mean; break;
      case Baseline::kLeaveOneOut:
        if (totals.size() > 1) base = (sum - w.total) / static_cast<double>(totals.size() - 1);
        break;
      case Baseline::kLengthWeighted: base = lengths > 0 ? weighted / lengths : mean; break;
      case Baseline::kBatchMean: base = batch_mean; break;
    }
    auto advantage = [&](double value) { return zero ? 0 : (value - base) / divisor; };
    w.advantage = advantage(w.total);
    w.advantages.resize(w.tokens.size());
    for (size_t k = 0; k < w.tokens.size(); ++k) w.advantages[k] = advantage(w.returns[k]);
  }
}

using Batch = std::vector<std::vector<Work>>;

// Step 6, whiten: over the trainable tokens of the batch.
void Whiten(Batch& batch) {
  std::vector<double> all;
  for (const auto& group : batch) {
    for (const Work& w : group) {
      if (w.trained) all.insert(all.end(), w.advantages.begin(), w.advantages.end());
    }
  }
  const double mean = Mean(all);
  const double deviation = Deviation(all, /*population=*/false);
  const double divisor = std::sqrt(deviation * deviation + 1e-8);
  for (auto& group : batch) {
    for (Work& w : group) {
      if (!w.left) continue;
      w.advantage = (w.advantage - mean) / divisor;
      for (double& x : w.advantages) x = (x - mean) / divisor;
    }
  }
}

// Step 6, balance: positive and negative parts of a group weigh the same. Only with credit rollout.
void Balance(std::vector<Work>& group) {
  double positive = 0, negative = 0;
  for (const Work& w : group) {
    if (!w.left) continue;
    const double length = static_cast<double>(w.tokens.size());
    if (w.advantage > 0) positive += length * w.advantage;
    if (w.advantage < 0) negative -= length * w.advantage;
  }
  for (Work& w : group) {
    if (!w.left) continue;
    double factor = 1;
    if (w.advantage > 0 && positive > 0) factor = (positive + negative) / (2 * positive);
    if (w.advantage < 0 && negative > 0) factor = (positive + negative) / (2 * negative);
    w.advantage *= factor;
    for (double& x : w.advantages) x *= factor;
  }
}

// Value and derivative with respect to logp_new of one token's loss, before the denominator.
struct TokenLoss {
  double value = 0, slope = 0;
  bool clipped = false;  // coefficient zeroed or capped
};

TokenLoss PolicyLoss(const Algorithm::Loss& loss, double advantage, double logp_new, double logp_old) {
  TokenLoss out;
  const double x = logp_new - logp_old;
  const double r = std::exp(Clamp20(x));
  const bool inside = x >= -20 && x <= 20;  // the clamp has derivative 0 outside
  switch (loss.kind) {
    case LossKind::kReinforce:
      out = {-advantage * logp_new, -advantage, false};
      break;
    case LossKind::kPpoClip: {
      out.clipped = (advantage > 0 && r > 1 + loss.clip_high) || (advantage < 0 && r < 1 - loss.clip_low);
      const double bounded = std::clamp(r, 1 - loss.clip_low, 1 + loss.clip_high);
      out.value = std::max(-r * advantage, -bounded * advantage);
      out.slope = out.clipped || !inside ? 0 : -r * advantage;
      if (loss.dual_clip && advantage < 0 && r > *loss.dual_clip) {
        out = {loss.dual_clip_drop ? 0 : -*loss.dual_clip * advantage, 0, true};
      }
      break;
    }
    case LossKind::kCispo: {
      double weight = std::max(r, loss.ratio_min);
      if (loss.ratio_max) weight = std::min(weight, *loss.ratio_max);
      out.clipped = weight != r;
      if (loss.mask_low && ((advantage > 0 && r > 1 + *loss.mask_high) || (advantage < 0 && r < 1 - *loss.mask_low))) {
        weight = 0;
        out.clipped = true;
      }
      out.value = -weight * advantage * logp_new;
      out.slope = -weight * advantage;
      break;
    }
    case LossKind::kSft:
      out = {-logp_new, -1, false};
      break;
  }
  if (loss.drift > 0) {
    out.value += loss.drift * x * x;
    out.slope += 2 * loss.drift * x;
  }
  return out;
}

// Steps 7 and 9: 1/denominator of each token. `sequence[k]` numbers the sequence of token k within the batch.
struct Denominators {
  int64_t tokens = 0;                      // N
  std::vector<int64_t> group_tokens;       // per group
  int64_t groups = 0;                      // Q
  std::vector<int64_t> sequence_tokens;    // per sequence, all > 0, so size() = B
};

double Weight(const Algorithm::Aggregation& aggregation, const Denominators& d, size_t group, size_t sequence) {
  const double b = static_cast<double>(d.sequence_tokens.size());
  switch (aggregation.mode) {
    case AggregationMode::kTokenMean: return 1 / static_cast<double>(d.tokens);
    case AggregationMode::kPromptMean:
      return 1 / (static_cast<double>(d.groups) * static_cast<double>(d.group_tokens[group]));
    case AggregationMode::kSeqMeanTokenMean: return 1 / (b * static_cast<double>(d.sequence_tokens[sequence]));
    case AggregationMode::kSeqMeanTokenSum: return 1 / b;
    case AggregationMode::kSeqMeanTokenSumNorm: return 1 / (b * static_cast<double>(aggregation.length_norm));
  }
  return 0;
}

void CheckArrays(const Algorithm& a, const LossRollout& r) {
  const size_t n = r.mask.size();
  TEMPER_CHECK(r.logp_new.size() == n) << "logp_new has " << r.logp_new.size() << " entries, mask " << n;
  TEMPER_CHECK(r.logp_old.size() == n || (r.logp_old.empty() && !a.ReadsOldLogprobs()))
      << "logp_old has " << r.logp_old.size() << " entries, mask " << n;
  TEMPER_CHECK(r.turn.empty() || r.turn.size() == n) << "turn has " << r.turn.size() << " entries, mask " << n;
  TEMPER_CHECK(r.segment.empty() || r.segment.size() == n) << "segment has " << r.segment.size() << " entries, mask " << n;
}

}  // namespace

LossResult ComputeLoss(const Algorithm& a, const std::vector<LossGroup>& groups) {
  LossResult result;
  LossMetrics& metrics = result.metrics;

  // Steps 1 to 3 and returns.
  Batch batch(groups.size());
  for (size_t g = 0; g < groups.size(); ++g) {
    std::vector<Work>& group = batch[g];
    group.resize(groups[g].rollouts.size());
    std::vector<double> rewards, walls;
    for (size_t i = 0; i < group.size(); ++i) {
      Work& w = group[i];
      w.in = &groups[g].rollouts[i];
      CheckArrays(a, *w.in);
      w.left = IsValid(w.in->outcome);
      for (size_t t = 0; t < w.in->mask.size(); ++t) {
        if (w.in->mask[t]) w.tokens.push_back(static_cast<int32_t>(t));
      }
      if (!w.left) continue;
      double reward = w.in->reward;
      for (double turn_reward : w.in->turn_rewards) reward += a.reward.process_coef * turn_reward;
      rewards.push_back(reward);
      walls.push_back(w.in->wall_s);
    }
    const bool zero_signal = a.ReadsRewards() && (rewards.size() < 2 || AllEqual(rewards));
    metrics.zero_signal_groups += zero_signal;
    const bool drop = zero_signal && a.dynamic_sampling != DynamicSampling::kOff;
    const double baseline_s = a.reward.speed_baseline_s.value_or(Median(walls));
    for (Work& w : group) {
      w.left = w.left && !drop;
      w.trained = w.left && !(a.overlong.mask_truncated && w.in->outcome == Outcome::kTruncated);
      if (w.left && a.ReadsRewards()) FillReturns(a, Shaping(a, w, baseline_s), w);
    }
  }

  // Step 5 and 6: statistics and advantages.
  if (a.ReadsRewards()) {
    std::vector<double> totals;
    for (const auto& group : batch) {
      for (const Work& w : group) {
        if (w.left) totals.push_back(w.total);
      }
    }
    const double batch_mean = Mean(totals);
    const double batch_deviation = Deviation(totals, a.advantage.population_std);
    for (auto& group : batch) GroupAdvantages(a, batch_mean, batch_deviation, group);
    if (a.advantage.whiten) Whiten(batch);
    if (a.advantage.balance) {
      for (auto& group : batch) Balance(group);
    }
  } else {
    // sft: -logp_new is the loss of advantage 1.
    for (auto& group : batch) {
      for (Work& w : group) {
        if (!w.left) continue;
        w.advantage = 1;
        w.advantages.assign(w.tokens.size(), 1);
      }
    }
  }

  // Step 7: denominators over what is left; sequences are numbered in the order in which they first occur.
  Denominators d;
  d.group_tokens.assign(batch.size(), 0);
  std::vector<std::vector<std::vector<size_t>>> sequence_of(batch.size());
  for (size_t g = 0; g < batch.size(); ++g) {
    sequence_of[g].resize(batch[g].size());
    for (size_t i = 0; i < batch[g].size(); ++i) {
      const Work& w = batch[g][i];
      if (!w.trained) continue;
      std::map<int64_t, size_t> numbers;
      for (int32_t t : w.tokens) {
        const int64_t segment = a.aggregation.per_segment && !w.in->segment.empty() ? w.in->segment[t] : 0;
        const auto [it, fresh] = numbers.try_emplace(segment, d.sequence_tokens.size());
        if (fresh) d.sequence_tokens.push_back(0);
        ++d.sequence_tokens[it->second];
        sequence_of[g][i].push_back(it->second);
      }
      d.group_tokens[g] += static_cast<int64_t>(w.tokens.size());
    }
    d.tokens += d.group_tokens[g];
    d.groups += d.group_tokens[g] > 0;
  }
  metrics.tokens = d.tokens;
  metrics.sequences = static_cast<int64_t>(d.sequence_tokens.size());

  // Steps 8 and 9.
  double clipped_low = 0, clipped_high = 0, k1 = 0, k3 = 0, chi2 = 0;
  std::vector<double> sequence_x(d.sequence_tokens.size());
  metrics.has_mismatch = a.ReadsOldLogprobs();
  result.rollout_advantage.resize(batch.size());
  result.token_advantages.resize(batch.size());
  result.coef.resize(batch.size());
  for (size_t g = 0; g < batch.size(); ++g) {
    for (size_t i = 0; i < batch[g].size(); ++i) {
      const Work& w = batch[g][i];
      const LossRollout& r = *w.in;
      result.rollout_advantage[g].push_back(w.advantage);
      auto& token_advantages = result.token_advantages[g].emplace_back(r.mask.size(), 0.0);
      auto& coef = result.coef[g].emplace_back(r.mask.size(), 0.0);
      if (!w.trained) continue;
      for (size_t k = 0; k < w.tokens.size(); ++k) {
        const size_t t = static_cast<size_t>(w.tokens[k]);
        const double advantage = w.advantages[k];
        const double logp_old = a.ReadsOldLogprobs() ? r.logp_old[t] : r.logp_new[t];
        const TokenLoss token = PolicyLoss(a.loss, advantage, r.logp_new[t], logp_old);
        const double weight = Weight(a.aggregation, d, g, sequence_of[g][i][k]);
        result.loss += token.value * weight;
        coef[t] = token.slope * weight;
        token_advantages[t] = advantage;
        if (token.clipped && advantage < 0) ++clipped_low;
        if (token.clipped && advantage > 0) ++clipped_high;
        const double x = r.logp_new[t] - logp_old;
        const double ratio = std::exp(Clamp20(x));
        k1 -= x;
        k3 += ratio - 1 - Clamp20(x);
        chi2 += ratio * ratio - 1;
        sequence_x[sequence_of[g][i][k]] += x;
      }
    }
  }
  if (d.tokens > 0) {
    const double n = static_cast<double>(d.tokens), b = static_cast<double>(sequence_x.size());
    metrics.clip_fraction_low = clipped_low / n;
    metrics.clip_fraction_high = clipped_high / n;
    metrics.mismatch_k1 = k1 / n;
    metrics.mismatch_k3 = k3 / n;
    metrics.chi2_token = chi2 / n;
    metrics.ppl_ratio = 0;
    for (size_t s = 0; s < sequence_x.size(); ++s) {
      const double difference = -sequence_x[s] / static_cast<double>(d.sequence_tokens[s]);
      metrics.log_ppl_diff += difference / b;
      metrics.ppl_ratio += std::exp(Clamp20(difference)) / b;
      metrics.chi2_seq += (std::exp(2 * Clamp20(sequence_x[s])) - 1) / b;
    }
  }
  return result;
}

}  // namespace temper::trainer
