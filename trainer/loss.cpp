#include "trainer/loss.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "trainer/losses/kind.h"

namespace temper::trainer {
namespace {

constexpr double kEqual = 1e-9;  // rewards closer than this are the same reward

double Sum(const std::vector<double>& v) {
  double sum = 0;
  for (double x : v) sum += x;
  return sum;
}

double Mean(const std::vector<double>& v) { return v.empty() ? 0 : Sum(v) / static_cast<double>(v.size()); }

double Deviation(const std::vector<double>& v, bool population) {
  const double n = static_cast<double>(v.size()) - (population ? 0 : 1);
  if (n <= 0) return 0;
  const double mean = Mean(v);
  double sum = 0, largest = 0;
  for (double x : v) {
    sum += (x - mean) * (x - mean);
    largest = std::max(largest, std::abs(x - mean));
  }
  if (std::isfinite(sum) || !std::isfinite(largest)) return std::sqrt(sum / n);
  // The squares alone are too large; an infinite deviation would make advantages of 0.
  sum = 0;
  for (double x : v) sum += (x - mean) / largest * ((x - mean) / largest);
  return largest * std::sqrt(sum / n);
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

// Of x = logp - logp_ref, without sg_prob. In k3, whose x goes through exp, x is clamped.
double KlValue(KlEstimator estimator, double x) {
  switch (estimator) {
    case KlEstimator::kK1:
    case KlEstimator::kK1Plus: return x;
    case KlEstimator::kK2: return x * x / 2;
    case KlEstimator::kK3:
    case KlEstimator::kK3Plus: return std::exp(-Clamp20(x)) - 1 + Clamp20(x);
    case KlEstimator::kSgProb: break;
  }
  TEMPER_CHECK(false) << "this KL term has no estimator of its own";
  return 0;
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

// Step 4: what the KL term adds to the reward of each of `tokens`; empty when it is not in the reward.
std::vector<double> KlRewards(const Algorithm& a, const Work& w) {
  std::vector<double> out;
  if (a.kl.where != KlWhere::kReward) return out;
  for (int32_t t : w.tokens) {
    const double x = w.in->logp_old[static_cast<size_t>(t)] - w.in->logp_ref[static_cast<size_t>(t)];
    out.push_back(-a.kl.coef * KlValue(a.kl.estimator, x));
  }
  return out;
}

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

// A turn's reward sits on its last sampled token; a turn without one on the nearest earlier token, else on the first.
std::vector<double> TokenRewards(const LossRollout& r, const std::vector<int32_t>& tokens, const std::vector<double>& turn_reward) {
  std::vector<double> out(tokens.size(), 0.0);
  if (tokens.empty()) return out;
  for (size_t u = 0; u < turn_reward.size(); ++u) {
    size_t at = 0;
    for (size_t k = 0; k < tokens.size() && TurnOf(r, tokens[k]) <= u; ++k) at = k;
    out[at] += turn_reward[u];
  }
  return out;
}

// Generalised advantage estimates of the sampled tokens; tokens between them cost no step.
std::vector<double> Gae(const Algorithm& a, const LossRollout& r, const std::vector<int32_t>& tokens, const std::vector<double>& rewards) {
  std::vector<double> out(tokens.size(), 0.0);
  double next_value = 0, next = 0;
  for (size_t k = tokens.size(); k-- > 0;) {
    const double value = r.values[static_cast<size_t>(tokens[k])];
    const double error = rewards[k] + a.advantage.gamma * next_value - value;
    out[k] = next = error + a.advantage.gamma * a.advantage.lambda * next;
    next_value = value;
  }
  return out;
}

// Step 5, first half: returns of each sampled token and R_i. With credit gae the returns are the advantages already.
void FillReturns(const Algorithm& a, double last_turn_extra, Work& w) {
  const LossRollout& r = *w.in;
  const double alpha = a.reward.process_coef;
  const double final_reward = r.reward + last_turn_extra;
  const std::vector<double> kl = KlRewards(a, w);
  w.returns.assign(w.tokens.size(), 0);
  if (a.advantage.credit == Credit::kRollout) {
    w.total = final_reward;
    for (double turn_reward : r.turn_rewards) w.total += alpha * turn_reward;
    for (double token_reward : kl) w.total += token_reward;
    std::fill(w.returns.begin(), w.returns.end(), w.total);
    return;
  }
  const size_t turns = TurnCount(r, w.tokens);
  std::vector<double> reward(turns);
  for (size_t u = 0; u < turns; ++u) reward[u] = alpha * TurnReward(r, u);
  reward[turns - 1] += final_reward;
  if (a.advantage.credit == Credit::kTurn) {
    for (size_t k = 0; k < kl.size(); ++k) reward[TurnOf(r, w.tokens[k])] += kl[k];
    for (size_t u = turns - 1; u-- > 0;) reward[u] += a.advantage.gamma * reward[u + 1];
    for (size_t k = 0; k < w.tokens.size(); ++k) w.returns[k] = reward[TurnOf(r, w.tokens[k])];
  } else {
    w.returns = TokenRewards(r, w.tokens, reward);
    for (size_t k = 0; k < kl.size(); ++k) w.returns[k] += kl[k];
    if (a.advantage.credit == Credit::kGae) {
      w.returns = Gae(a, r, w.tokens, w.returns);
    } else {
      for (size_t k = w.tokens.size(); k-- > 1;) w.returns[k - 1] += a.advantage.gamma * w.returns[k];
    }
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

// Step 6, distillation: the teacher's opinion of each token joins the advantage.
void AddTeacher(const Algorithm& a, Work& w) {
  for (size_t k = 0; k < w.tokens.size(); ++k) {
    const auto t = static_cast<size_t>(w.tokens[k]);
    const double student = a.distillation.student_new ? w.in->logp_new[t] : w.in->logp_old[t];
    w.advantages[k] += a.distillation.coef * (w.in->logp_teacher[t] - student);
  }
}

// A term of the loss that takes no off-policy weight, and its derivative with respect to logp_new.
struct Term {
  double value = 0, slope = 0;
};

Term KlTerm(const Algorithm::Kl& kl, const LossToken& t) {
  const double x = t.logp_new - t.logp_ref;
  Term term;
  if (kl.estimator == KlEstimator::kSgProb) {
    const double difference = std::exp(t.logp_new) - std::exp(t.logp_ref);
    term = {difference * t.logp_new, difference};
  } else {
    // `+`: the gradient of k2 whatever the value.
    term = {KlValue(kl.estimator, x), x};
    if (kl.estimator == KlEstimator::kK3) term.slope = InsideClamp(x) ? 1 - std::exp(-x) : 0;
  }
  if (kl.importance_weighted) {
    term.slope = term.slope * t.ratio + (t.inside ? term.value * t.ratio : 0);
    term.value *= t.ratio;
  }
  return {kl.coef * term.value, kl.coef * term.slope};
}

// Steps 7 and 9: 1/denominator of each token. `sequence[k]` numbers the sequence of token k within the batch.
struct Denominators {
  int64_t tokens = 0;                      // N
  std::vector<int64_t> group_tokens;       // per group
  int64_t groups = 0;                      // Q
  std::vector<int64_t> sequence_tokens;    // per sequence; all > 0 but in pairs, so size() = B
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
  auto check = [&](const char* name, size_t size, bool read) {
    TEMPER_CHECK(size == n || (size == 0 && !read)) << name << " has " << size << " entries, mask " << n;
  };
  check("logp_new", r.logp_new.size(), true);
  if (!IsValid(r.outcome)) return;
  check("logp_old", r.logp_old.size(), a.ReadsOldLogprobs());
  check("logp_rollout", r.logp_rollout.size(), a.ReadsRolloutLogprobs());
  check("logp_ref", r.logp_ref.size(), a.ReadsReference());
  check("logp_teacher", r.logp_teacher.size(), a.ReadsTeacher());
  check("values", r.values.size(), a.ReadsValues());
  check("teacher_top", r.teacher_top.size(), a.ReadsTeacherTop());
  check("turn", r.turn.size(), false);
  check("segment", r.segment.size(), false);
}

// Where the trainable tokens of a rollout are among the sequences of the batch.
struct Place {
  size_t sequence = 0, index = 0;
};

// The batch as the losses see it.
struct Layout {
  std::vector<LossSequence> sequences;
  std::vector<std::vector<double>> log_rho;        // per sequence and token: what off-policy weights and rules look at
  std::vector<std::vector<std::vector<Place>>> at;  // [g][i][k]
};

// The pair of a group, chosen and rejected, for a loss of pairs; none without two valid rewards that differ.
std::vector<size_t> PairOf(const std::vector<Work>& group) {
  if (group.size() != 2 || !group[0].left || !group[1].left) return {};
  const double first = group[0].in->reward, second = group[1].in->reward;
  if (std::abs(first - second) <= kEqual) return {};
  return first > second ? std::vector<size_t>{0, 1} : std::vector<size_t>{1, 0};
}

// Step 7: denominators over what is left; sequences are numbered in the order in which they first occur, pairs chosen first.
Layout LayOut(const Algorithm& a, const Batch& batch, Denominators& d) {
  Layout layout;
  layout.at.resize(batch.size());
  d.group_tokens.assign(batch.size(), 0);
  for (size_t g = 0; g < batch.size(); ++g) {
    layout.at[g].resize(batch[g].size());
    std::vector<size_t> order;
    if (a.loss.kind->pairs) {
      order = PairOf(batch[g]);
    } else {
      for (size_t i = 0; i < batch[g].size(); ++i) order.push_back(i);
    }
    for (size_t i : order) {
      const Work& w = batch[g][i];
      if (!w.trained) continue;
      std::map<int64_t, size_t> numbers;
      auto number = [&](int64_t segment) {
        const auto [it, fresh] = numbers.try_emplace(segment, layout.sequences.size());
        if (fresh) {
          layout.sequences.emplace_back();
          layout.log_rho.emplace_back();
        }
        return it->second;
      };
      if (a.loss.kind->pairs) number(0);  // also without a token
      for (size_t k = 0; k < w.tokens.size(); ++k) {
        const auto t = static_cast<size_t>(w.tokens[k]);
        const LossRollout& r = *w.in;
        const size_t s = number(a.aggregation.per_segment && !r.segment.empty() ? r.segment[t] : 0);
        layout.at[g][i].push_back({s, layout.sequences[s].tokens.size()});
        LossToken& token = layout.sequences[s].tokens.emplace_back();
        token.advantage = w.advantages[k];
        token.logp_new = r.logp_new[t];
        token.logp_old = a.ReadsOldLogprobs() ? r.logp_old[t] : r.logp_new[t];
        if (a.ReadsReference()) token.logp_ref = r.logp_ref[t];
        token.log_ratio = token.logp_new - token.logp_old;
        token.ratio = ClampedExp(token.log_ratio);
        token.inside = InsideClamp(token.log_ratio);
        layout.log_rho[s].push_back(a.off_policy.decoupled ? token.logp_old - r.logp_rollout[t] : token.log_ratio);
      }
      d.group_tokens[g] += static_cast<int64_t>(w.tokens.size());
    }
    d.tokens += d.group_tokens[g];
    d.groups += d.group_tokens[g] > 0;
  }
  for (LossSequence& sequence : layout.sequences) {
    sequence.losses.resize(sequence.tokens.size());
    d.sequence_tokens.push_back(static_cast<int64_t>(sequence.tokens.size()));
  }
  return layout;
}


// Step 8, w: into LossToken::weight.
void ApplyWeights(const Algorithm::OffPolicy& off, Layout& layout, LossMetrics& metrics) {
  if (off.weight == OffPolicyWeight::kNone) return;
  const bool by_sequence = off.weight == OffPolicyWeight::kSequence;
  auto bounded = [&](double log_rho) {
    const double rho = ClampedExp(log_rho);
    const bool outside = (off.weight_min && rho < *off.weight_min) || (off.weight_max && rho > *off.weight_max);
    if (!outside) return rho;
    if (off.zero_outside) return 0.0;
    return off.weight_min && rho < *off.weight_min ? *off.weight_min : *off.weight_max;
  };
  double total = 0, units = 0;
  for (size_t s = 0; s < layout.sequences.size(); ++s) {
    std::vector<LossToken>& tokens = layout.sequences[s].tokens;
    const double whole = by_sequence ? bounded(Sum(layout.log_rho[s])) : 0;
    for (size_t k = 0; k < tokens.size(); ++k) tokens[k].weight = by_sequence ? whole : bounded(layout.log_rho[s][k]);
    units += by_sequence ? 1 : static_cast<double>(tokens.size());
    if (by_sequence) total += whole;
    else for (const LossToken& t : tokens) total += t.weight;
  }
  double sum = 0, squares = 0, n = 0;
  for (LossSequence& sequence : layout.sequences) {
    for (LossToken& t : sequence.tokens) {
      if (off.normalize && total > 0) t.weight /= total / units;
      sum += t.weight;
      squares += t.weight * t.weight;
      n += 1;
    }
  }
  if (n > 0) metrics.ess = squares > 0 ? sum * sum / (n * squares) : 0;
}

// Of x = log rho. k2 takes no exp, so nothing is clamped there.
double Measured(Measure measure, double x) {
  switch (measure) {
    case Measure::kRatio: return ClampedExp(x);
    case Measure::kK2: return x * x / 2;
    case Measure::kK3: return ClampedExp(x) - 1 - Clamp20(x);
  }
  return 0;
}

// Step 8, keep: zeroes LossToken::weight of what a rule drops.
void ApplyRejection(const Algorithm::OffPolicy& off, Layout& layout, LossMetrics& metrics) {
  for (size_t s = 0; s < layout.sequences.size(); ++s) {
    std::vector<LossToken>& tokens = layout.sequences[s].tokens;
    const std::vector<double>& x = layout.log_rho[s];
    std::vector<uint8_t> dropped(tokens.size(), 0);
    for (const Algorithm::Reject& rule : off.reject) {
      auto outside = [&](double value) { return (rule.min && value < *rule.min) || (rule.max && value > *rule.max); };
      const double n = static_cast<double>(x.size());
      bool whole = false;
      if (rule.level == RejectLevel::kSequenceSum || rule.level == RejectLevel::kSequenceMean) {
        const double share = rule.level == RejectLevel::kSequenceMean ? 1 / n : 1;
        double sum = 0;
        for (double v : x) sum += rule.measure == Measure::kRatio ? v : Measured(rule.measure, v);
        whole = outside(rule.measure == Measure::kRatio ? ClampedExp(sum * share) : sum * share);
      } else if (rule.level == RejectLevel::kSequenceAny) {
        whole = std::any_of(x.begin(), x.end(), [&](double v) { return outside(Measured(rule.measure, v)); });
      }
      for (size_t k = 0; k < tokens.size(); ++k) {
        if (rule.only_negative && !(tokens[k].advantage < 0)) continue;
        if (whole || (rule.level == RejectLevel::kToken && outside(Measured(rule.measure, x[k])))) dropped[k] = 1;
      }
    }
    for (size_t k = 0; k < tokens.size(); ++k) {
      if (!dropped[k]) continue;
      tokens[k].weight = 0;
      ++metrics.rejected_tokens;
    }
  }
}

Distribution Describe(const std::vector<double>& v) {
  if (v.empty()) return {};
  const auto [low, high] = std::minmax_element(v.begin(), v.end());
  return {Mean(v), Deviation(v, /*population=*/false), *low, *high};
}

// Of log_rho over the n > 0 trainable tokens and their sequences.
void MeasureMismatch(const Layout& layout, double n, LossMetrics& metrics) {
  double k1 = 0, k3 = 0, chi2 = 0;
  const auto b = static_cast<double>(layout.log_rho.size());
  metrics.ppl_ratio = 0;
  for (const std::vector<double>& row : layout.log_rho) {
    for (double x : row) {
      const double rho = ClampedExp(x);
      k1 -= x;
      k3 += rho - 1 - Clamp20(x);
      chi2 += rho * rho - 1;
    }
    const double sum = Sum(row), difference = -sum / static_cast<double>(row.size());
    metrics.log_ppl_diff += difference / b;
    metrics.ppl_ratio += ClampedExp(difference) / b;
    metrics.chi2_seq += (std::exp(2 * Clamp20(sum)) - 1) / b;
  }
  metrics.mismatch_k1 = k1 / n;
  metrics.mismatch_k3 = k3 / n;
  metrics.chi2_token = chi2 / n;
}

// Steps 1 to 3 and the returns.
Batch Prepare(const Algorithm& a, const std::vector<LossGroup>& groups, LossMetrics& metrics) {
  Batch batch(groups.size());
  std::vector<double> all_rewards, turn_tokens;
  for (size_t g = 0; g < groups.size(); ++g) {
    std::vector<Work>& group = batch[g];
    group.resize(groups[g].rollouts.size());
    TEMPER_CHECK(!a.loss.kind->pairs || group.size() <= 2) << "group " << g << " of a loss of pairs has " << group.size() << " rollouts";
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
      for (size_t k = 0; k < w.tokens.size(); ++k) {
        const bool same = k > 0 && TurnOf(*w.in, w.tokens[k]) == TurnOf(*w.in, w.tokens[k - 1]);
        if (same) turn_tokens.back() += 1;
        else turn_tokens.push_back(1);
      }
      rewards.push_back(RewardOf(a, w.in->reward, w.in->turn_rewards));
      walls.push_back(w.in->wall_s);
    }
    const bool zero_signal = a.ReadsRewards() && (rewards.size() < 2 || AllEqual(rewards));
    metrics.zero_signal_groups += zero_signal;
    all_rewards.insert(all_rewards.end(), rewards.begin(), rewards.end());
    const bool drop = zero_signal && a.dynamic_sampling != DynamicSampling::kOff;
    const double baseline_s = a.reward.speed_baseline_s.value_or(Median(walls));
    for (Work& w : group) {
      w.left = w.left && !drop;
      w.trained = w.left && !(a.overlong.mask_truncated && w.in->outcome == Outcome::kTruncated);
      if (w.left && a.TakesTaskAdvantage()) FillReturns(a, Shaping(a, w, baseline_s), w);
    }
  }
  metrics.reward = Describe(all_rewards);
  metrics.turn_tokens = Describe(turn_tokens);
  return batch;
}

// Steps 5 and 6.
void FillAdvantages(const Algorithm& a, Batch& batch) {
  if (a.TakesTaskAdvantage()) {
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
    // The loss of sft is that of advantage 1.
    const bool ones = !a.loss.kind->reads_advantages && !a.loss.kind->pairs && !a.loss.kind->only_distills;
    for (auto& group : batch) {
      for (Work& w : group) {
        if (!w.left) continue;
        w.advantage = ones ? 1 : 0;
        w.advantages.assign(w.tokens.size(), w.advantage);
      }
    }
  }
  if (a.distillation.kind != DistillationKind::kPolicyGradient) return;
  for (auto& group : batch) {
    for (Work& w : group) {
      if (w.left) AddTeacher(a, w);
    }
  }
}

// Step 8, the terms that take neither w nor keep.
Term OtherTerms(const Algorithm& a, const LossToken& token) {
  Term sum;
  if (a.loss.drift > 0) sum = {a.loss.drift * token.log_ratio * token.log_ratio, 2 * a.loss.drift * token.log_ratio};
  if (a.kl.where == KlWhere::kLoss) {
    const Term kl = KlTerm(a.kl, token);
    sum.value += kl.value;
    sum.slope += kl.slope;
  }
  return sum;
}

}  // namespace

double RewardOf(const Algorithm& a, double reward, const std::vector<double>& turn_rewards) {
  if (a.loss.kind->pairs) return reward;
  for (double turn_reward : turn_rewards) reward += a.reward.process_coef * turn_reward;
  return reward;
}

LossResult ComputeLoss(const Algorithm& a, const std::vector<LossGroup>& groups) {
  TEMPER_CHECK(a.loss.kind != nullptr) << "an algorithm without a loss";
  LossResult result;
  LossMetrics& metrics = result.metrics;
  Batch batch = Prepare(a, groups, metrics);
  FillAdvantages(a, batch);
  Denominators d;
  Layout layout = LayOut(a, batch, d);
  metrics.tokens = d.tokens;
  metrics.sequences = std::count_if(d.sequence_tokens.begin(), d.sequence_tokens.end(), [](int64_t n) { return n > 0; });
  metrics.has_mismatch = a.ReadsOldLogprobs();
  metrics.has_reference = a.ReadsReference();
  metrics.has_teacher = a.ReadsTeacher();
  ApplyWeights(a.off_policy, layout, metrics);
  ApplyRejection(a.off_policy, layout, metrics);
  a.loss.kind->evaluate(a.loss.parameters, layout.sequences);

  const bool pairs = a.loss.kind->pairs;
  const double pair_weight = layout.sequences.empty() ? 0 : 2 / static_cast<double>(layout.sequences.size());
  for (const LossSequence& sequence : layout.sequences) result.loss += sequence.value * pair_weight;

  // Step 9, token by token in the order of the input.
  double clipped_low = 0, clipped_high = 0, surprise = 0, divergence_reference = 0, divergence_teacher = 0;
  std::vector<double> advantages;
  const bool top = a.distillation.kind == DistillationKind::kTopkForwardKl;
  result.rollout_advantage.resize(batch.size());
  result.token_advantages.resize(batch.size());
  result.coef.resize(batch.size());
  if (top) result.coef_top.resize(batch.size());
  for (size_t g = 0; g < batch.size(); ++g) {
    for (size_t i = 0; i < batch[g].size(); ++i) {
      const Work& w = batch[g][i];
      const LossRollout& r = *w.in;
      result.rollout_advantage[g].push_back(w.advantage);
      auto& token_advantages = result.token_advantages[g].emplace_back(r.mask.size(), 0.0);
      auto& coef = result.coef[g].emplace_back(r.mask.size(), 0.0);
      if (top) result.coef_top[g].emplace_back(r.mask.size());
      for (size_t k = 0; k < layout.at[g][i].size(); ++k) {
        const auto t = static_cast<size_t>(w.tokens[k]);
        const auto [s, index] = layout.at[g][i][k];
        const LossToken& token = layout.sequences[s].tokens[index];
        const TokenLoss& loss = layout.sequences[s].losses[index];
        const double weight = pairs ? pair_weight : Weight(a.aggregation, d, g, s);
        const Term others = OtherTerms(a, token);
        double value = loss.value * token.weight + others.value;
        if (top) {
          for (const TopToken& pair : r.teacher_top[t]) {
            const double p = std::exp(pair.logp_teacher);
            value += a.distillation.coef * p * (pair.logp_teacher - pair.logp_new);
            result.coef_top[g][i][t].push_back(-a.distillation.coef * p * weight);
          }
        }
        result.loss += value * weight;
        coef[t] = (loss.slope + others.slope) * weight;
        token_advantages[t] = token.advantage;
        advantages.push_back(token.advantage);
        if (metrics.has_reference) divergence_reference += KlValue(KlEstimator::kK3, token.logp_new - r.logp_ref[t]);
        if (metrics.has_teacher) divergence_teacher += KlValue(KlEstimator::kK3, token.logp_new - r.logp_teacher[t]);
        surprise -= token.logp_new;
        if (loss.clipped && token.advantage < 0) ++clipped_low;
        if (loss.clipped && token.advantage > 0) ++clipped_high;
      }
    }
  }
  metrics.advantage = Describe(advantages);
  if (d.tokens > 0) {
    const double n = static_cast<double>(d.tokens);
    metrics.clip_fraction_low = clipped_low / n;
    metrics.clip_fraction_high = clipped_high / n;
    metrics.entropy = surprise / n;
    metrics.kl_reference = divergence_reference / n;
    metrics.kl_teacher = divergence_teacher / n;
    if (metrics.has_mismatch) MeasureMismatch(layout, n, metrics);
  }
  return result;
}

}  // namespace temper::trainer
