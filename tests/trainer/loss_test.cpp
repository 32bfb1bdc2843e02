#include "trainer/loss.h"

#include <gtest/gtest.h>

#include <cmath>

#include <fmt/format.h>

#include "common/json.h"
#include "common/rng.h"

namespace temper::trainer {
namespace {

Algorithm Parse(const std::string& text) { return ParseAlgorithm(ParseJson(text).value()).value().algorithm; }

LossRollout Rollout(double reward, std::vector<double> logp_new, std::vector<double> logp_old) {
  LossRollout r;
  r.reward = reward;
  r.mask.assign(logp_new.size(), 1);
  r.logp_new = std::move(logp_new);
  r.logp_old = std::move(logp_old);
  return r;
}

// Two rollouts with ratios .5 1.1 1.5 and .7 4, advantages +1 and -1.
std::vector<LossGroup> F1() {
  auto old = [](double logp, double r) { return logp - std::log(r); };
  return {{{Rollout(1, {-1, -2, -0.5}, {old(-1, 0.5), old(-2, 1.1), old(-0.5, 1.5)}),
            Rollout(-1, {-1.5, -0.25}, {old(-1.5, 0.7), old(-0.25, 4)})}}};
}

Algorithm TokenMean(const std::string& loss) {
  return Parse(R"({"advantage":{"baseline":"group_mean"},"aggregation":{"mode":"token-mean"},"loss":)" + loss + "}");
}

void ExpectCoef(const LossResult& result, const std::vector<double>& expected_times_tokens) {
  std::vector<double> got;
  for (const auto& group : result.coef) {
    for (const auto& rollout : group) got.insert(got.end(), rollout.begin(), rollout.end());
  }
  ASSERT_EQ(got.size(), expected_times_tokens.size());
  for (size_t k = 0; k < got.size(); ++k) EXPECT_NEAR(got[k] * 5, expected_times_tokens[k], 1e-12) << "token " << k;
}

// A sign or a clip bound on the wrong side would train away from the objective.
TEST(Loss, CoefficientsOfTheReferenceFixture) {
  const auto batch = F1();
  ExpectCoef(ComputeLoss(TokenMean(R"({"kind":"reinforce"})"), batch), {-1, -1, -1, 1, 1});
  ExpectCoef(ComputeLoss(TokenMean(R"({"kind":"ppo_clip"})"), batch), {-.5, -1.1, 0, 0, 4});
  ExpectCoef(ComputeLoss(TokenMean(R"({"kind":"ppo_clip","dual_clip":3})"), batch), {-.5, -1.1, 0, 0, 0});
  ExpectCoef(ComputeLoss(TokenMean(R"({"kind":"cispo"})"), batch), {-.5, -1.1, -1.5, .7, 4});
  ExpectCoef(ComputeLoss(TokenMean(R"({"kind":"cispo","ratio_max":1.28})"), batch), {-.5, -1.1, -1.28, .7, 1.28});
  ExpectCoef(ComputeLoss(TokenMean(R"({"kind":"cispo","ratio_min":0.8,"ratio_max":1.2})"), batch), {-.8, -1.1, -1.2, .8, 1.2});
  ExpectCoef(ComputeLoss(TokenMean(R"({"kind":"cispo","mask_low":0.2,"mask_high":0.28})"), batch), {-.5, -1.1, 0, 0, 4});
  EXPECT_NEAR(ComputeLoss(TokenMean(R"({"kind":"ppo_clip"})"), batch).loss, 0.4, 1e-12);
  EXPECT_NEAR(ComputeLoss(TokenMean(R"({"kind":"ppo_clip","dual_clip":3})"), batch).loss, 0.2, 1e-12);
  EXPECT_NEAR(ComputeLoss(TokenMean(R"({"kind":"ppo_clip","dual_clip":3,"dual_clip_value":"drop"})"), batch).loss, -0.4, 1e-12);
  EXPECT_NEAR(ComputeLoss(TokenMean(R"({"kind":"cispo"})"), batch).loss, 0.28, 1e-12);
  const LossMetrics m = ComputeLoss(TokenMean(R"({"kind":"ppo_clip"})"), batch).metrics;
  EXPECT_NEAR(m.clip_fraction_high, 0.2, 1e-15);
  EXPECT_NEAR(m.clip_fraction_low, 0.2, 1e-15);
}

// Off policy, the divergence is the new policy's, not that of the one that drew.
TEST(Loss, DivergenceFromTheReferenceIsThatOfTheNewPolicy) {
  LossRollout first = Rollout(1, {-1}, {-1.5}), second = Rollout(0, {-2}, {-1.5});
  first.logp_ref = {-1.2};
  second.logp_ref = {-1};
  const auto algorithm = ParseAlgorithm(ParseJson(R"({"recipe":"grpo","kl":{"where":"loss","coef":1}})").value()).value().algorithm;
  const LossMetrics m = ComputeLoss(algorithm, {{{first, second}}}).metrics;
  // k3 of x = logp_new - logp_ref: exp(-x) - 1 + x at 0.2 and at -1.
  EXPECT_NEAR(m.kl_reference, (0.018730753077982 + 0.718281828459045) / 2, 1e-12);
}

// The mask of CISPO acts on one side only, by the sign of the advantage.
TEST(Loss, CispoMaskIsOneSided) {
  auto coef = [](double advantage, double r) {
    const std::vector<LossGroup> groups = {{{Rollout(advantage, {-1}, {-1 - std::log(r)})}}};
    return ComputeLoss(
               Parse(R"({"loss":{"kind":"cispo","mask_low":0.2,"mask_high":0.28},"advantage":{"baseline":"none"},"aggregation":{"mode":"token-mean"}})"),
               groups)
        .coef[0][0][0];
  };
  EXPECT_NEAR(coef(1, 0.5), -0.5, 1e-12);
  EXPECT_NEAR(coef(1, 1.27), -1.27, 1e-12);
  EXPECT_EQ(coef(1, 1.29), 0);
  EXPECT_NEAR(coef(-1, 1.5), 1.5, 1e-12);
  EXPECT_NEAR(coef(-1, 0.81), 0.81, 1e-12);
  EXPECT_EQ(coef(-1, 0.79), 0);
}

// A denominator could be taken per group, per rollout or per token where another was meant.
TEST(Loss, AggregationOfTheReferenceFixture) {
  auto loss = [](const std::string& kind, const std::string& aggregation) {
    return ComputeLoss(Parse(R"({"advantage":{"baseline":"group_mean"},"loss":{"kind":")" + kind + R"("},"aggregation":)" + aggregation + "}"),
                       F1())
        .loss;
  };
  EXPECT_NEAR(loss("ppo_clip", R"({"mode":"seq-mean-token-sum"})"), 1.0, 1e-12);
  EXPECT_NEAR(loss("ppo_clip", R"({"mode":"seq-mean-token-mean"})"), 0.733333333333, 1e-11);
  EXPECT_NEAR(loss("ppo_clip", R"({"mode":"seq-mean-token-sum-norm","length_norm":4})"), 0.25, 1e-12);
  EXPECT_NEAR(loss("cispo", R"({"mode":"seq-mean-token-sum"})"), 0.7, 1e-12);
  EXPECT_NEAR(loss("cispo", R"({"mode":"seq-mean-token-mean"})"), 0.0625, 1e-12);
  EXPECT_NEAR(loss("cispo", R"({"mode":"prompt-mean"})"), 0.28, 1e-12);
  // Two groups with 1 and 4 tokens: prompt-mean weighs the groups alike, token-mean the tokens.
  LossRollout one = Rollout(1, {-1}, {-1}), four = Rollout(1, {-1, -1, -1, -1}, {-1, -1, -1, -1});
  const std::string settings = R"({"advantage":{"baseline":"none"},"loss":{"kind":"reinforce"},"aggregation":{"mode":")";
  const std::vector<LossGroup> two = {{{one}}, {{four}}};
  EXPECT_NEAR(ComputeLoss(Parse(settings + R"(prompt-mean"}})"), two).coef[0][0][0], -0.5, 1e-15);
  EXPECT_NEAR(ComputeLoss(Parse(settings + R"(prompt-mean"}})"), two).coef[1][0][0], -0.125, 1e-15);
  EXPECT_NEAR(ComputeLoss(Parse(settings + R"(token-mean"}})"), two).coef[1][0][0], -0.2, 1e-15);
  // Segments are sequences of their own where asked.
  four.segment = {0, 0, 0, 1};
  const LossResult segments = ComputeLoss(Parse(settings + R"(seq-mean-token-mean","unit":"segment"}})"), {{{four}}});
  EXPECT_EQ(segments.metrics.sequences, 2);
  EXPECT_NEAR(segments.coef[0][0][0], -1.0 / 6, 1e-15);
  EXPECT_NEAR(segments.coef[0][0][3], -0.5, 1e-15);
}

std::vector<double> Advantages(const std::string& advantage, const std::vector<double>& rewards, std::vector<int> lengths = {}) {
  std::vector<LossGroup> groups(1);
  for (size_t i = 0; i < rewards.size(); ++i) {
    const std::vector<double> logp(lengths.empty() ? 1 : static_cast<size_t>(lengths[i]), -1.0);
    groups[0].rollouts.push_back(Rollout(rewards[i], logp, logp));
  }
  const LossResult r = ComputeLoss(
      Parse(R"({"loss":{"kind":"reinforce"},"aggregation":{"mode":"token-mean"},"advantage":)" + advantage + "}"), groups);
  return r.rollout_advantage[0];
}

// Published conventions differ by n or n-1, by epsilon, by what a group of equals gives.
TEST(Loss, AdvantageConventions) {
  const std::vector<double> r = {1, 0, 0, 1};
  EXPECT_NEAR(Advantages(R"({"baseline":"group_mean","scale":"group_std"})", r)[0], 0.8660239, 1e-7);
  EXPECT_NEAR(Advantages(R"({"baseline":"group_mean","scale":"group_std","std_eps":1e-4})", r)[1], -0.8658754, 1e-7);
  EXPECT_NEAR(Advantages(R"({"baseline":"group_mean","scale":"group_std","std":"population"})", r)[0], 0.999998, 1e-6);
  EXPECT_NEAR(Advantages(R"({"baseline":"leave_one_out"})", r)[0], 0.666667, 1e-6);
  EXPECT_NEAR(Advantages(R"({"baseline":"group_mean"})", r)[0], 0.5, 1e-15);
  EXPECT_NEAR(Advantages(R"({"baseline":"group_mean","scale":"group_mean"})", r)[0], 1.0, 1e-15);
  EXPECT_NEAR(Advantages(R"({"baseline":"length_weighted"})", {1, 0}, {3, 1})[0], 0.25, 1e-15);
  EXPECT_NEAR(Advantages(R"({"baseline":"group_mean","scale":"group_std"})", {1, 0, 0, 0, 0, 0, 0, 0})[0], 2.474867, 1e-6);
  for (double a : Advantages(R"({"baseline":"group_mean","scale":"group_std"})", {0.1 + 0.2, 0.3, 0.3})) EXPECT_EQ(a, 0);
  EXPECT_EQ(Advantages(R"({"baseline":"group_mean"})", {1})[0], 0);
  EXPECT_EQ(Advantages(R"({"baseline":"none"})", {1})[0], 1);
  const auto balanced = Advantages(R"({"baseline":"group_mean","balance":true})", {1, 0, 0, 0}, {1, 2, 3, 4});
  EXPECT_NEAR(1 * balanced[0], 9 * -balanced[1], 1e-12);
}

// Whitening could count rollouts instead of tokens.
TEST(Loss, WhiteningIsOverTokens) {
  auto row = [](double reward, int n) {
    const std::vector<double> logp(static_cast<size_t>(n), -1.0);
    return Rollout(reward, logp, logp);
  };
  const std::vector<LossGroup> groups = {{{row(1, 2), row(0, 1)}}, {{row(1, 1), row(1, 4)}}};
  const LossResult r = ComputeLoss(
      Parse(R"({"loss":{"kind":"ppo_clip"},"aggregation":{"mode":"token-mean"},"advantage":{"baseline":"group_mean","whiten":true}})"),
      groups);
  EXPECT_NEAR(r.rollout_advantage[0][0], 1.365332, 1e-6);
  EXPECT_NEAR(r.rollout_advantage[0][1], -1.755426, 1e-6);
  EXPECT_NEAR(r.rollout_advantage[1][1], -0.195047, 1e-6);
}

// Rewards to go could leak to the wrong turn, or context tokens could cost a step of the discount.
TEST(Loss, RewardToGo) {
  auto row = [](std::vector<double> turn_rewards, double reward, std::vector<int32_t> turn) {
    LossRollout r;
    r.turn_rewards = std::move(turn_rewards);
    r.reward = reward;
    for (int32_t t : turn) {
      r.mask.push_back(t >= 0);
      r.turn.push_back(std::max(t, 0));
    }
    r.logp_new.assign(r.mask.size(), -1);
    r.logp_old = r.logp_new;
    return r;
  };
  const std::vector<LossGroup> groups = {{{row({-.1, 0, -.2, 0}, 1, {0, 1, -1, 2, 3}), row({0, -.1, 0}, 0, {0, 1, 2})}}};
  auto advantages = [&](const std::string& text) {
    return ComputeLoss(Parse(R"({"loss":{"kind":"reinforce"},"aggregation":{"mode":"token-mean"},"advantage":)" + text + "}"), groups)
        .token_advantages[0];
  };
  auto expect = [](const std::vector<double>& got, const std::vector<double>& want) {
    ASSERT_EQ(got.size(), want.size());
    for (size_t k = 0; k < got.size(); ++k) EXPECT_NEAR(got[k], want[k], 1e-12) << k;
  };
  expect(advantages(R"({"credit":"turn","baseline":"none"})")[0], {.7, .8, 0, .8, 1.0});
  expect(advantages(R"({"credit":"turn","baseline":"none","gamma":0.9})")[0], {.467, .63, 0, .7, 1.0});
  expect(advantages(R"({"credit":"turn","baseline":"group_mean"})")[0], {.4, .5, 0, .5, .7});
  expect(advantages(R"({"credit":"turn","baseline":"group_mean"})")[1], {-.4, -.4, -.3});
  expect(advantages(R"({"credit":"turn","baseline":"leave_one_out"})")[0], {.8, .9, 0, .9, 1.1});
  expect(advantages(R"({"credit":"token","baseline":"none","gamma":0.9})")[0], {.467, .63, 0, .7, 1.0});
}

// An infrastructure failure could become a reward of 0, or a dropped group could stay in a denominator.
TEST(Loss, FailuresAndDroppedGroupsAreNowhere) {
  const Algorithm a = Parse(R"({"recipe":"grpo","dynamic_sampling":"drop","aggregation":{"mode":"token-mean"}})");
  const LossRollout good = Rollout(1, {-1}, {-1}), bad = Rollout(0, {-1, -1}, {-1, -1});
  LossRollout failed = Rollout(-1e9, {std::nan("")}, {std::nan("")});
  failed.outcome = Outcome::kInfraFailure;
  const LossResult with = ComputeLoss(a, {{{good, failed, bad}}, {{good, good}}, {{good, failed}}});
  const LossResult without = ComputeLoss(a, {{{good, bad}}});
  EXPECT_EQ(with.loss, without.loss);
  EXPECT_EQ(with.coef[0][0], without.coef[0][0]);
  EXPECT_EQ(with.coef[0][2], without.coef[0][1]);
  EXPECT_EQ(with.coef[0][1][0], 0);
  EXPECT_EQ(with.coef[1][0][0], 0);
  EXPECT_EQ(with.rollout_advantage[2][0], 0);
  EXPECT_EQ(with.metrics.tokens, 3);
  EXPECT_EQ(with.metrics.sequences, 2);
  EXPECT_EQ(with.metrics.zero_signal_groups, 2);
  // Without dropping, a group of equals stays in the denominator.
  const LossResult kept = ComputeLoss(Parse(R"({"recipe":"grpo","aggregation":{"mode":"token-mean"}})"), {{{good, bad}}, {{good, good}}});
  EXPECT_EQ(kept.metrics.tokens, 5);
  EXPECT_EQ(kept.coef[1][0][0], 0);
}

// A truncated rollout's tokens could be trained although masked, or its reward be left out of the statistics.
TEST(Loss, OverlongRules) {
  LossRollout truncated = Rollout(0, {-1, -1}, {-1, -1});
  truncated.outcome = Outcome::kTruncated;
  const LossRollout good = Rollout(1, {-1}, {-1});
  const LossResult r = ComputeLoss(Parse(R"({"recipe":"grpo","overlong":{"mask_truncated":true}})"), {{{good, truncated}}});
  EXPECT_EQ(r.metrics.tokens, 1);
  EXPECT_EQ(r.coef[0][1], (std::vector<double>{0, 0}));
  EXPECT_GT(r.rollout_advantage[0][0], 0.7);
  // Soft punishment 0, -.5, -1, -1 at lengths 4, 6, 8, 9 for max 8, buffer 4.
  std::vector<LossGroup> groups(1);
  for (size_t n : {4, 6, 8, 9}) groups[0].rollouts.push_back(Rollout(1, std::vector<double>(n, -1), std::vector<double>(n, -1)));
  const LossResult soft = ComputeLoss(
      Parse(
          R"({"loss":{"kind":"reinforce"},"aggregation":{"mode":"token-mean"},"advantage":{"baseline":"none"},"overlong":{"max_tokens":8,"buffer_tokens":4}})"),
      groups);
  EXPECT_EQ(soft.rollout_advantage[0], (std::vector<double>{1, 0.5, 0, 0}));
  // Speed: only where the task succeeded, against the median.
  groups[0].rollouts = {good, good, Rollout(0, {-1}, {-1})};
  groups[0].rollouts[0].wall_s = 5;
  groups[0].rollouts[1].wall_s = 20;
  groups[0].rollouts[2].wall_s = 1;
  const LossResult speed = ComputeLoss(
      Parse(R"({"loss":{"kind":"reinforce"},"aggregation":{"mode":"token-mean"},"advantage":{"baseline":"none"},"reward":{"speed_coef":0.2}})"),
      groups);
  EXPECT_NEAR(speed.rollout_advantage[0][0], 1.0, 1e-15);  // the median
  EXPECT_NEAR(speed.rollout_advantage[0][1], 0.8, 1e-15);
  EXPECT_EQ(speed.rollout_advantage[0][2], 0);
}

// coef could differ from the derivative of the loss that is reported.
TEST(Loss, CoefIsTheDerivativeWhereNothingIsDetached) {
  Rng rng(5);
  for (const char* text :
       {R"({"recipe":"grpo"})", R"({"recipe":"grpo","loss":{"drift":0.1,"dual_clip":2}})",
        R"({"loss":{"kind":"reinforce","drift":0.3},"advantage":{"baseline":"leave_one_out"},"aggregation":{"mode":"prompt-mean"}})",
        R"({"loss":{"kind":"sft"},"aggregation":{"mode":"seq-mean-token-sum"}})", R"({"recipe":"gspo","loss":{"clip_low":0.1,"clip_high":0.1}})",
        R"({"recipe":"gspo","loss":{"clip_high":2},"advantage":{"credit":"token"},"aggregation":{"unit":"segment"}})", R"({"recipe":"gmpo"})",
        R"({"recipe":"gmpo","off_policy":{"mode":"decoupled","weight":"token","reject":[{"measure":"ratio","level":"token","max":1.2}]}})",
        R"({"recipe":"sapo"})", R"({"recipe":"m2po"})", R"({"recipe":"dpo"})", R"({"recipe":"dpo","loss":{"label_smoothing":0.2,"beta":2}})",
        R"({"recipe":"ipo"})", R"({"recipe":"ipo","loss":{"length_average":false}})",
        R"({"recipe":"grpo","kl":{"where":"loss","coef":0.5}})", R"({"recipe":"grpo","kl":{"where":"loss","coef":0.5,"estimator":"k2"}})",
        R"({"recipe":"grpo","kl":{"where":"loss","coef":0.5,"importance_weighted":true}})",
        R"({"recipe":"grpo","off_policy":{"mode":"decoupled","weight":"sequence","normalize":true}})",
        R"({"loss":{"kind":"distill"},"distillation":{"kind":"topk_forward_kl"},"aggregation":{"mode":"token-mean"},"kl":{"where":"loss","coef":0.5}})"}) {
    const Algorithm a = Parse(text);
    std::vector<LossGroup> groups(3);
    for (auto& group : groups) {
      for (int i = 0; i < (a.loss.kind->pairs ? 2 : 4); ++i) {
        LossRollout r;
        r.reward = rng.Uniform();
        for (int t = 0; t < 5; ++t) {
          r.mask.push_back(rng.Uniform() < 0.7);
          r.logp_new.push_back(-3 * rng.Uniform());
          r.logp_old.push_back(r.logp_new.back() + rng.Uniform() - 0.5);
          r.logp_rollout.push_back(r.logp_old.back() + rng.Uniform() - 0.5);
          r.logp_ref.push_back(r.logp_new.back() + rng.Uniform() - 0.5);
          r.segment.push_back(t / 3);
          r.teacher_top.push_back({{-rng.Uniform(), -rng.Uniform()}, {-1 - rng.Uniform(), -1 - rng.Uniform()}});
        }
        group.rollouts.push_back(r);
      }
    }
    const LossResult result = ComputeLoss(a, groups);
    for (size_t g = 0; g < 3; ++g) {
      for (size_t i = 0; i < groups[g].rollouts.size(); ++i) {
        for (size_t t = 0; t < 5; ++t) {
          auto at = [&](double h) {
            auto moved = groups;
            moved[g].rollouts[i].logp_new[t] += h;
            return ComputeLoss(a, moved).loss;
          };
          EXPECT_NEAR(result.coef[g][i][t], (at(1e-6) - at(-1e-6)) / 2e-6, 1e-8) << text;
          for (size_t k = 0; !result.coef_top.empty() && k < result.coef_top[g][i][t].size(); ++k) {
            auto top = [&](double h) {
              auto moved = groups;
              moved[g].rollouts[i].teacher_top[t][k].logp_new += h;
              return ComputeLoss(a, moved).loss;
            };
            EXPECT_NEAR(result.coef_top[g][i][t][k], (top(1e-6) - top(-1e-6)) / 2e-6, 1e-8) << text;
          }
        }
      }
    }
  }
}

// On policy every kind must give the same gradient: the advantage.
TEST(Loss, OnPolicyAllKindsAgree) {
  const std::vector<LossGroup> groups = {{{Rollout(1, {-1, -2}, {-1, -2}), Rollout(0, {-3}, {-3})}}};
  auto with = [&](const std::string& loss) {
    return ComputeLoss(Parse(R"({"advantage":{"baseline":"group_mean"},"aggregation":{"mode":"seq-mean-token-mean"},"loss":)" + loss + "}"), groups).coef;
  };
  const auto reference = with(R"({"kind":"reinforce"})");
  for (const char* kind : {"ppo_clip", "cispo", "gspo", "gmpo", "sapo", "dppo_tv", "m2po", "ratio_band"}) {
    EXPECT_EQ(with(fmt::format(R"({{"kind":"{}"}})", kind)), reference) << kind;
  }
  EXPECT_EQ(with(R"({"kind":"ppo_clip","dual_clip":3})"), reference);
  EXPECT_EQ(with(R"({"kind":"cispo","mask_low":0.2,"mask_high":0.28,"drift":0.1})"), reference);
  const LossMetrics m = ComputeLoss(TokenMean(R"({"kind":"cispo"})"), groups).metrics;
  EXPECT_EQ(m.mismatch_k1, 0);
  EXPECT_EQ(m.mismatch_k3, 0);
  EXPECT_EQ(m.chi2_seq, 0);
  EXPECT_EQ(m.ppl_ratio, 1);
}

// Published off-policy metrics could be summed over the wrong axis.
TEST(Loss, MismatchMetricsOfTheReferenceFixture) {
  const std::vector<LossGroup> groups = {{{Rollout(1, {-1, -2}, {-1.1, -1.7}), Rollout(0, {-0.5}, {-1.5})}}};
  const LossMetrics m = ComputeLoss(TokenMean(R"({"kind":"cispo"})"), groups).metrics;
  EXPECT_NEAR(m.mismatch_k1, -0.266667, 1e-6);
  EXPECT_NEAR(m.mismatch_k3, 0.254757, 1e-6);
  EXPECT_NEAR(m.log_ppl_diff, -0.45, 1e-12);
  EXPECT_NEAR(m.ppl_ratio, 0.736525, 1e-6);
  EXPECT_NEAR(m.chi2_token, 2.053090, 1e-6);
  EXPECT_NEAR(m.chi2_seq, 3.029688, 1e-6);
}

// A probability ratio beyond e^20 could overflow, or go on pushing with an infinite weight.
TEST(Loss, LogRatiosAreClamped) {
  const std::vector<LossGroup> groups = {{{Rollout(1, {0}, {-1000}), Rollout(-1, {0}, {-1000})}}};
  const LossResult r = ComputeLoss(TokenMean(R"({"kind":"ppo_clip"})"), groups);
  EXPECT_TRUE(std::isfinite(r.loss));
  EXPECT_EQ(r.coef[0][1][0], 0);
  EXPECT_EQ(ComputeLoss(TokenMean(R"({"kind":"cispo"})"), groups).coef[0][0][0], -2.5);
}

}  // namespace
}  // namespace temper::trainer
