// Invariants of losses, advantages and off-policy weights on random batches (the numbers in comments are those of the reference's list).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include <fmt/format.h>

#include "common/json.h"
#include "common/rng.h"
#include "trainer/loss.h"

namespace temper::trainer {
namespace {

Algorithm Parse(const std::string& text) { return ParseAlgorithm(ParseJson(text).value()).value().algorithm; }

// A block of `loss`, its advantages the rewards themselves, and more keys.
Algorithm Block(const std::string& loss, const std::string& mode = "token-mean", const std::string& more = "") {
  return Parse(fmt::format(R"({{"loss":{},"advantage":{{"baseline":"none"}},"aggregation":{{"mode":"{}"}}{}}})", loss, mode, more));
}

const char* const kRatioKinds[] = {"ppo_clip", "cispo", "gspo", "gmpo", "sapo", "dppo_tv", "m2po", "ratio_band"};
std::string ModeOf(const std::string& kind) { return kind == "gspo" || kind == "gmpo" ? "seq-mean-token-mean" : "token-mean"; }
std::string LossOf(const std::string& kind) { return fmt::format(R"({{"kind":"{}"}})", kind); }

// Groups of 1 to 5 rollouts of 0 to 8 tokens, a third of them context.
std::vector<LossGroup> RandomBatch(uint64_t seed, double spread = 0.5, bool equal_rewards = false) {
  Rng rng(seed);
  std::vector<LossGroup> groups(1 + rng.Below(4));
  for (LossGroup& group : groups) {
    const double same = rng.Uniform() - 0.5;
    for (uint64_t i = 0, n = 1 + rng.Below(5); i < n; ++i) {
      LossRollout& r = group.rollouts.emplace_back();
      r.reward = equal_rewards ? same : 2 * rng.Uniform() - 1;
      for (uint64_t t = 0, length = rng.Below(9); t < length; ++t) {
        r.mask.push_back(rng.Uniform() < 0.67);
        r.logp_old.push_back(-3 * rng.Uniform());
        r.logp_new.push_back(r.logp_old.back() + spread * (2 * rng.Uniform() - 1));
        r.logp_rollout.push_back(r.logp_old.back() + 2 * rng.Uniform() - 1);
        r.logp_ref.push_back(r.logp_old.back() + rng.Uniform() - 0.5);
        r.segment.push_back(static_cast<int64_t>(t / 3));
        r.turn.push_back(static_cast<int32_t>(t / 4));
      }
    }
  }
  return groups;
}

template <class Visit>
void EachToken(const std::vector<LossGroup>& groups, const Visit& visit) {
  for (size_t g = 0; g < groups.size(); ++g) {
    for (size_t i = 0; i < groups[g].rollouts.size(); ++i) {
      for (size_t t = 0; t < groups[g].rollouts[i].mask.size(); ++t) {
        if (groups[g].rollouts[i].mask[t]) visit(g, i, t);
      }
    }
  }
}

// One token: c = -coef of advantage `a` at ratio `r`.
double C(const Algorithm& algorithm, double a, double r, double logp_old = -1.5) {
  LossRollout rollout;
  rollout.reward = a;
  rollout.mask = {1};
  rollout.logp_old = {logp_old};
  rollout.logp_new = {logp_old + std::log(r)};
  return -ComputeLoss(algorithm, {{{rollout}}}).coef[0][0][0];
}

std::vector<double> Ratios() {
  std::vector<double> out;
  for (double x = -3; x <= 3.0001; x += 0.05) out.push_back(std::exp(x));
  return out;
}

// 2: no token of an advantage loses its gradient, none has more than the bound, and the weight grows with the ratio.
TEST(LossProperty, CispoIsABoundedMonotoneWeight) {
  const Algorithm cispo = Block(R"({"kind":"cispo","ratio_min":0.1})"), open = Block(R"({"kind":"cispo","ratio_max":null})");
  double last = 0;
  for (double r : Ratios()) {
    const double c = C(cispo, 2, r);
    EXPECT_GE(c, last);
    EXPECT_LE(c, 2 * 5.0);
    EXPECT_GE(c, 2 * 0.1 - 1e-15);
    EXPECT_EQ(C(cispo, -2, r), -c);  // 5: odd in A
    if (r >= 0.1 && r <= 5) {
      EXPECT_EQ(c, C(open, 2, r));
    }
    last = c;
  }
  EXPECT_EQ(C(cispo, 0, 2), 0);
}

// 3, 4: the mask alone turns CISPO into PPO's gradient; dropping and dual clipping are one gradient; bounds of PPO.
TEST(LossProperty, ClippingsAgreeWhereTheyMust) {
  const Algorithm masked = Block(R"({"kind":"cispo","ratio_max":null,"mask_low":0.2,"mask_high":0.28})");
  const Algorithm far = Block(R"({"kind":"cispo","mask_low":1e9,"mask_high":1e9})"), cispo = Block(R"({"kind":"cispo"})");
  const Algorithm dapo = Block(R"({"kind":"ppo_clip","clip_high":0.28})");
  const Algorithm dual = Block(R"({"kind":"ppo_clip","clip_high":0.28,"dual_clip":3})");
  const Algorithm drop = Block(R"({"kind":"ppo_clip","clip_high":0.28,"dual_clip":3,"dual_clip_value":"drop"})");
  for (double r : Ratios()) {
    for (double a : {-1.5, 1.5}) {
      EXPECT_EQ(C(masked, a, r), C(dapo, a, r)) << r;
      EXPECT_EQ(C(far, a, r), C(cispo, a, r));
      EXPECT_EQ(C(dual, a, r), C(drop, a, r));
      const double c = C(dapo, a, r);
      EXPECT_TRUE(c == 0 || std::abs(c - r * a) < 1e-12);
      if (a > 0) {
        EXPECT_LE(std::abs(c), 1.28 * a + 1e-12);
      }
      EXPECT_LE(std::abs(C(dual, a, r)), 3 * std::abs(a) + 1e-12);
    }
  }
}

// 5, 6: which rules treat good and bad alike, and that SAPO fades without ending.
TEST(LossProperty, SidesOfARule) {
  for (const char* kind : {"reinforce", "ratio_band"}) {
    for (double r : Ratios()) EXPECT_EQ(C(Block(LossOf(kind)), 1, r), -C(Block(LossOf(kind)), -1, r)) << kind;
  }
  for (const char* kind : {"ppo_clip", "sapo", "dppo_tv"}) {
    bool odd = true;
    for (double r : Ratios()) odd = odd && C(Block(LossOf(kind)), 1, r, -0.5) == -C(Block(LossOf(kind)), -1, r, -0.5);
    EXPECT_FALSE(odd) << kind;
  }
  const Algorithm sapo = Block(R"({"kind":"sapo"})");
  double last = C(sapo, 1, 3);
  for (double r = 3.5; r < 30; r += 0.5) {
    EXPECT_LT(C(sapo, 1, r), last);
    EXPECT_GT(C(sapo, 1, r), 0);
    last = C(sapo, 1, r);
  }
}

// 7, 9, 16: what must not matter: a shift of both logprobs, whatever stands at mask 0, context between the tokens; a group without a
// difference has no gradient.
TEST(LossProperty, WhatMustNotMatter) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const std::string kind : kRatioKinds) {
    const Algorithm a = Parse(fmt::format(R"({{"loss":{},"advantage":{{"baseline":"group_mean","scale":"group_std"}},"aggregation":{{"mode":"{}"}}}})",
                                          LossOf(kind), ModeOf(kind)));
    for (uint64_t seed = 0; seed < 20; ++seed) {
      const std::vector<LossGroup> batch = RandomBatch(seed);
      const LossResult plain = ComputeLoss(a, batch);
      std::vector<LossGroup> shifted = batch, spoiled = batch, longer = batch;
      for (auto& group : shifted) {
        for (auto& r : group.rollouts) {
          for (double& x : r.logp_new) x -= 0.25;
          for (double& x : r.logp_old) x -= 0.25;
        }
      }
      for (size_t g = 0; g < batch.size(); ++g) {
        for (size_t i = 0; i < batch[g].rollouts.size(); ++i) {
          LossRollout &bad = spoiled[g].rollouts[i], &more = longer[g].rollouts[i];
          for (size_t t = 0; t < bad.mask.size(); ++t) {
            if (!bad.mask[t]) bad.logp_new[t] = bad.logp_old[t] = nan;
          }
          more.mask.insert(more.mask.begin(), 3, 0);
          more.logp_new.insert(more.logp_new.begin(), 3, nan);
          more.logp_old.insert(more.logp_old.begin(), 3, nan);
          more.logp_rollout.clear(), more.logp_ref.clear(), more.segment.clear(), more.turn.clear();
        }
      }
      const LossResult moved = ComputeLoss(a, shifted), kept = ComputeLoss(a, spoiled), after = ComputeLoss(a, longer);
      EXPECT_EQ(kept.coef, plain.coef) << kind;
      EXPECT_EQ(kept.loss, plain.loss) << kind;
      EXPECT_EQ(after.loss, plain.loss) << kind;
      EachToken(batch, [&](size_t g, size_t i, size_t t) {
        EXPECT_EQ(after.coef[g][i][t + 3], plain.coef[g][i][t]) << kind;
        // A difference of probabilities, unlike a ratio, is not the same after a shift.
        if (kind != "dppo_tv") {
          EXPECT_NEAR(moved.coef[g][i][t], plain.coef[g][i][t], 1e-12) << kind;
        }
      });
      const LossResult still = ComputeLoss(a, RandomBatch(seed, 0.5, /*equal_rewards=*/true));
      for (const auto& group : still.coef) {
        for (const auto& row : group) EXPECT_TRUE(std::all_of(row.begin(), row.end(), [](double c) { return c == 0; })) << kind;
      }
    }
  }
}

// 8: where the proximal policy is the one that drew, every loss with a ratio is what it is without the weight; where it is the new one,
// what a token gets is its weight times its advantage. A weight that entered the ratio, or replaced it, would break one of them.
TEST(LossProperty, ADecoupledLossIsTheLossTimesItsWeight) {
  const std::string decoupled = R"(,"off_policy":{"mode":"decoupled","weight_max":null,"weight":)";
  for (const std::string kind : kRatioKinds) {
    const Algorithm plain = Block(LossOf(kind), ModeOf(kind));
    for (const char* weight : {"\"token\"}", "\"sequence\"}"}) {
      const Algorithm weighted = Block(LossOf(kind), ModeOf(kind), decoupled + weight);
      for (uint64_t seed = 0; seed < 20; ++seed) {
        std::vector<LossGroup> batch = RandomBatch(seed), fresh = batch;
        for (auto& group : batch) {
          for (auto& r : group.rollouts) r.logp_rollout = r.logp_old;
        }
        const LossResult with = ComputeLoss(weighted, batch), without = ComputeLoss(plain, batch);
        EXPECT_EQ(with.coef, without.coef) << kind;
        EXPECT_EQ(with.loss, without.loss) << kind;
        if (kind == "gspo" || kind == "gmpo") continue;  // their slope is one for the whole sequence
        for (auto& group : fresh) {
          for (auto& r : group.rollouts) r.logp_new = r.logp_old;
        }
        const LossResult first = ComputeLoss(weighted, fresh);
        EachToken(fresh, [&](size_t g, size_t i, size_t t) {
          const LossRollout& r = fresh[g].rollouts[i];
          double x = r.logp_old[t] - r.logp_rollout[t];
          if (weight[1] == 's') {
            x = 0;
            for (size_t k = 0; k < r.mask.size(); ++k) x += r.mask[k] ? r.logp_old[k] - r.logp_rollout[k] : 0;
          }
          EXPECT_NEAR(-first.coef[g][i][t] * static_cast<double>(first.metrics.tokens), std::exp(x) * r.reward, 1e-9) << kind << weight;
        });
      }
    }
  }
}

// 18, and 8 of REINFORCE: weights of one change nothing; bounds act one way; a normalised weight has mean one, and the effective share says so.
TEST(LossProperty, OffPolicyWeights) {
  auto block = [](const std::string& settings) {
    return Block(R"({"kind":"reinforce"})", "token-mean", R"(,"off_policy":{"mode":"decoupled","weight":"token")" + settings + "}");
  };
  for (uint64_t seed = 0; seed < 30; ++seed) {
    std::vector<LossGroup> batch = RandomBatch(seed);
    for (auto& group : batch) {
      for (auto& r : group.rollouts) r.reward = 1;
    }
    const LossResult two = ComputeLoss(block(""), batch), four = ComputeLoss(block(R"(,"weight_max":4)"), batch);
    const LossResult raw = ComputeLoss(block(R"(,"weight_max":null)"), batch), ice = ComputeLoss(block(R"(,"outside":"zero")"), batch);
    const LossResult normal = ComputeLoss(block(R"(,"weight_max":null,"normalize":true)"), batch);
    const LossResult none = ComputeLoss(Block(R"({"kind":"reinforce"})"), batch);
    double total = 0;
    EachToken(batch, [&](size_t g, size_t i, size_t t) {
      EXPECT_LE(std::abs(two.coef[g][i][t]), std::abs(four.coef[g][i][t]));
      EXPECT_LE(std::abs(four.coef[g][i][t]), std::abs(raw.coef[g][i][t]));
      EXPECT_TRUE(ice.coef[g][i][t] == 0 || ice.coef[g][i][t] == two.coef[g][i][t]);
      total -= normal.coef[g][i][t];
    });
    if (none.metrics.tokens > 0) {
      EXPECT_NEAR(total, 1, 1e-12);
      EXPECT_GT(normal.metrics.ess, 0);
      EXPECT_LE(normal.metrics.ess, 1 + 1e-12);
      double squares = 0;
      EachToken(batch, [&](size_t g, size_t i, size_t t) { squares += std::pow(normal.coef[g][i][t], 2); });
      // mean(w^2) = chi2 + 1 = 1 / ESS where mean(w) = 1.
      EXPECT_NEAR(squares * static_cast<double>(none.metrics.tokens), 1 / normal.metrics.ess, 1e-9);
    }
    for (auto& group : batch) {
      for (auto& r : group.rollouts) r.logp_rollout = r.logp_old;
    }
    const LossResult ones = ComputeLoss(block(""), batch);
    EXPECT_EQ(ones.coef, none.coef);
    EXPECT_EQ(ones.metrics.ess, 1);
    EXPECT_EQ(ones.metrics.mismatch_k3, 0);
    EXPECT_EQ(ones.metrics.chi2_token, 0);
    EXPECT_NEAR(ones.metrics.ppl_ratio, 1, 1e-12);
  }
}

// 13: dropping tokens never makes another one louder.
TEST(LossProperty, RejectionTurnsNothingUp) {
  for (const std::string kind : kRatioKinds) {
    for (const char* rule : {R"("measure":"ratio","level":"token","min":0.7,"max":1.4)", R"("measure":"k3","level":"sequence_mean","max":0.05)",
                             R"("measure":"ratio","level":"sequence_any","min":0.6,"only_negative":true)"}) {
      const Algorithm rejecting =
          Block(LossOf(kind), ModeOf(kind), fmt::format(R"(,"off_policy":{{"mode":"decoupled","reject":[{{{}}}]}})", rule));
      const Algorithm plain = Block(LossOf(kind), ModeOf(kind));
      for (uint64_t seed = 0; seed < 20; ++seed) {
        const auto batch = RandomBatch(seed);
        const LossResult some = ComputeLoss(rejecting, batch), all = ComputeLoss(plain, batch);
        EXPECT_EQ(some.metrics.tokens, all.metrics.tokens);
        EachToken(batch, [&](size_t g, size_t i, size_t t) {
          EXPECT_LE(std::abs(some.coef[g][i][t]), std::abs(all.coef[g][i][t]) + 1e-15) << kind << rule;
        });
      }
    }
  }
}

// 10, 11: order and split do not matter, but for the means over sequences that are asked to count segments.
TEST(LossProperty, OrderAndSplit) {
  for (const char* text :
       {R"({"recipe":"grpo"})", R"({"recipe":"cispo"})", R"({"recipe":"gspo"})", R"({"recipe":"rloo"})", R"({"recipe":"m2po"})",
        R"({"recipe":"reinforce_pp_baseline"})", R"({"recipe":"kimi","off_policy":{"mode":"decoupled","weight":"sequence","normalize":true}})"}) {
    const Algorithm a = Parse(text);
    for (uint64_t seed = 0; seed < 20; ++seed) {
      std::vector<LossGroup> batch = RandomBatch(seed), turned = batch;
      std::reverse(turned.begin(), turned.end());
      for (auto& group : turned) std::reverse(group.rollouts.begin(), group.rollouts.end());
      const LossResult one = ComputeLoss(a, batch), other = ComputeLoss(a, turned);
      EXPECT_NEAR(one.loss, other.loss, 1e-12) << text;
      EachToken(batch, [&](size_t g, size_t i, size_t t) {
        const size_t back = batch.size() - 1 - g;
        EXPECT_NEAR(one.coef[g][i][t], other.coef[back][batch[g].rollouts.size() - 1 - i][t], 1e-12) << text;
      });
    }
  }
  // A split into segments: invisible to token-mean with a token's rule, not to a mean over sequences.
  const auto batch = RandomBatch(3);
  for (const char* more : {"", R"(,"off_policy":{"mode":"decoupled","weight":"sequence"})"}) {
    const Algorithm whole = Block(R"({"kind":"cispo"})", "seq-mean-token-mean", more);
    Algorithm split = whole;
    split.aggregation.per_segment = true;
    EXPECT_GT(ComputeLoss(split, batch).metrics.sequences, ComputeLoss(whole, batch).metrics.sequences);
    EXPECT_NE(ComputeLoss(split, batch).coef, ComputeLoss(whole, batch).coef);
    split.aggregation.mode = AggregationMode::kTokenMean;
    Algorithm flat = whole;
    flat.aggregation.mode = AggregationMode::kTokenMean;
    if (!*more) {
      EXPECT_EQ(ComputeLoss(split, batch).coef, ComputeLoss(flat, batch).coef);
    }
  }
}

// 14: sums, shifts and scales of group advantages.
TEST(LossProperty, GroupAdvantages) {
  auto advantages = [](const std::string& advantage, std::vector<LossGroup> batch, double scale = 1, double shift = 0) {
    for (auto& group : batch) {
      for (auto& r : group.rollouts) r.reward = scale * r.reward + shift;
    }
    return ComputeLoss(Parse(R"({"loss":{"kind":"ppo_clip"},"aggregation":{"mode":"token-mean"},"advantage":)" + advantage + "}"), batch)
        .rollout_advantage;
  };
  const std::string mean = R"({"baseline":"group_mean"})", loo = R"({"baseline":"leave_one_out"})";
  const std::string std = R"({"baseline":"group_mean","scale":"group_std","std_eps":0})";
  for (uint64_t seed = 0; seed < 40; ++seed) {
    const auto batch = RandomBatch(seed);
    for (const std::string& a : {mean, loo, std}) {
      const auto plain = advantages(a, batch), shifted = advantages(a, batch, 1, 7);
      for (size_t g = 0; g < plain.size(); ++g) {
        EXPECT_NEAR(std::accumulate(plain[g].begin(), plain[g].end(), 0.0), 0, 1e-12) << a;
        for (size_t i = 0; i < plain[g].size(); ++i) EXPECT_NEAR(plain[g][i], shifted[g][i], 1e-9) << a;
      }
    }
    const auto centred = advantages(mean, batch), left_out = advantages(loo, batch), scaled = advantages(std, batch, 3), unscaled = advantages(std, batch);
    for (size_t g = 0; g < centred.size(); ++g) {
      const auto n = static_cast<double>(centred[g].size());
      for (size_t i = 0; i < centred[g].size(); ++i) {
        if (n > 1) {
          EXPECT_NEAR(left_out[g][i], n / (n - 1) * centred[g][i], 1e-12);
        }
        if (n == 1) {
          EXPECT_EQ(left_out[g][i], 0);
        }
        EXPECT_NEAR(scaled[g][i], unscaled[g][i], 1e-9);
      }
    }
  }
}

// 15: a turn's return is its reward and the discounted rest; only a last reward makes all turns equal; empty turns change nothing.
TEST(LossProperty, RewardToGo) {
  Rng rng(4);
  for (int n = 0; n < 40; ++n) {
    LossRollout r;
    for (int u = 0; u < 5; ++u) {
      r.turn_rewards.push_back(rng.Uniform() - 0.5);
      r.mask.push_back(1);
      r.turn.push_back(u);
      r.logp_new.push_back(-1);
      r.logp_old.push_back(-1);
    }
    const double gamma = n % 2 ? 1 : 0.8;
    const Algorithm a = Parse(fmt::format(
        R"({{"loss":{{"kind":"ppo_clip"}},"aggregation":{{"mode":"token-mean"}},"advantage":{{"credit":"turn","baseline":"none","gamma":{}}}}})", gamma));
    const auto returns = ComputeLoss(a, {{{r}}}).token_advantages[0][0];
    for (size_t u = 0; u + 1 < 5; ++u) EXPECT_NEAR(returns[u] - gamma * returns[u + 1], r.turn_rewards[u], 1e-12);
    LossRollout last = r;
    last.turn_rewards.assign(5, 0);
    last.reward = 0.75;
    if (gamma == 1) {
      EXPECT_EQ(ComputeLoss(a, {{{last}}}).token_advantages[0][0], std::vector<double>(5, 0.75));
    }
    if (gamma != 1) continue;
    LossRollout more = r;
    more.turn_rewards.insert(more.turn_rewards.begin() + 2, 0.0);
    for (size_t k = 2; k < 5; ++k) ++more.turn[k];
    const auto same = ComputeLoss(a, {{{more}}}).token_advantages[0][0];
    for (size_t u = 0; u < 5; ++u) EXPECT_NEAR(same[u], returns[u], 1e-12);
  }
}

// 17: over all tokens of a distribution, k1 and k3 are the divergence, and the gradient of k2 is its gradient.
TEST(LossProperty, KlEstimatorsInExpectation) {
  const std::vector<double> p = {.7, .2, .1}, q = {.5, .3, .2};
  double divergence = 0;
  for (size_t v = 0; v < 3; ++v) divergence += p[v] * std::log(p[v] / q[v]);
  EXPECT_NEAR(divergence, .0851228, 1e-7);
  auto one = [&](const std::string& estimator, size_t v) {
    LossRollout r;
    r.mask = {1};
    r.logp_new = r.logp_old = {std::log(p[v])};
    r.logp_ref = {std::log(q[v])};
    return ComputeLoss(Block(R"({"kind":"reinforce"})", "token-mean", R"(,"kl":{"where":"loss","coef":1,"estimator":")" + estimator + "\"}"), {{{r}}});
  };
  for (const auto& [estimator, value] : {std::pair<const char*, double>{"k2", .0800876}, {"k3", divergence}, {"k1+", divergence}, {"k3+", divergence}}) {
    double mean = 0;
    std::vector<double> gradient(3, 0.0);  // by the logits: d logp_v / d z_w = [v = w] - p_w
    for (size_t v = 0; v < 3; ++v) {
      const LossResult token = one(estimator, v);
      mean += p[v] * token.loss;
      for (size_t w = 0; w < 3; ++w) gradient[w] += p[v] * token.coef[0][0][0] * ((v == w) - p[w]);
    }
    EXPECT_NEAR(mean, value, 1e-7) << estimator;
    if (std::string(estimator) == "k3") continue;  // its gradient is that of the other direction
    for (size_t w = 0; w < 3; ++w) EXPECT_NEAR(gradient[w], p[w] * (std::log(p[w] / q[w]) - divergence), 1e-12) << estimator;
  }
}

// 26: exchanging the pair negates the logit; opposite slopes; ln 2 where nothing is preferred.
TEST(LossProperty, PreferencesAreAntisymmetric) {
  const Algorithm dpo = Parse(R"({"recipe":"dpo"})");
  auto row = [](double reward, double now, double reference) {
    LossRollout r;
    r.reward = reward;
    r.mask = {1};
    r.logp_new = {now};
    r.logp_ref = {reference};
    return r;
  };
  const LossResult one = ComputeLoss(dpo, {{{row(1, -1, -3), row(0, -2, -1)}}}), other = ComputeLoss(dpo, {{{row(0, -1, -3), row(1, -2, -1)}}});
  EXPECT_NEAR(std::exp(-one.loss) + std::exp(-other.loss), 1, 1e-12);  // sigmoid(x) + sigmoid(-x)
  EXPECT_EQ(one.coef[0][0][0], -one.coef[0][1][0]);
  EXPECT_LT(one.coef[0][0][0], 0);
  EXPECT_NEAR(ComputeLoss(dpo, {{{row(1, -1, -1), row(0, -2, -2)}}}).loss, std::log(2), 1e-12);
}

}  // namespace
}  // namespace temper::trainer
