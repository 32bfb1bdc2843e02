// The door `temper train loss`.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include <fmt/format.h>

#include "common/json.h"
#include "common/rng.h"
#include "trainer/commands.h"

namespace temper::trainer {
namespace {

constexpr const char* kExample1 =
    R"({"algorithm":{"loss":{"kind":"cispo"},"advantage":{"baseline":"group_mean"},"aggregation":{"mode":"token-mean"}},"groups":[{"rollouts":[{"reward":1,"mask":[1,1,1],"logp_new":[-1,-2,-0.5],"logp_old":[-0.306852819,-2.095310180,-0.905465108]},{"reward":-1,"mask":[0,1,1],"logp_new":[null,-1.5,-0.25],"logp_old":[null,-1.143325056,-1.636294361]}]}]})";
constexpr const char* kExample2 =
    R"({"algorithm":{"recipe":"grpo"},"groups":[{"rollouts":[{"reward":1,"mask":[1],"logp_new":[-1],"logp_old":[-1]},{"reward":0,"mask":[1,1],"logp_new":[-1,-1],"logp_old":[-1,-1]},{"reward":0,"mask":[1],"logp_new":[-1],"logp_old":[-1]},{"reward":1,"mask":[1],"logp_new":[-1],"logp_old":[-1]}]}]})";

void ExpectRows(const JsonRef& got, const std::vector<std::vector<double>>& want) {
  const auto rows = got.Items().value();
  ASSERT_EQ(rows.size(), want.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto row = rows[i].Doubles().value();
    ASSERT_EQ(row.size(), want[i].size());
    for (size_t t = 0; t < row.size(); ++t) EXPECT_NEAR(row[t], want[i][t], 1e-9);
  }
}

// The documented examples are what a user holds us to.
TEST(TrainLoss, DocumentedExamples) {
  const json::value first = ParseJson(TrainLoss(kExample1).value()).value();
  EXPECT_NEAR(JsonRef(first).Field("loss")->Double().value(), 0.28, 1e-9);
  ExpectRows(JsonRef(first).Field("advantages").value(), {{1, -1}});
  ExpectRows(JsonRef(first).Field("coef")->Items().value()[0], {{-0.1, -0.22, -0.3}, {0, 0.14, 0.8}});

  const json::value second = ParseJson(TrainLoss(kExample2).value()).value();
  EXPECT_EQ(JsonRef(second).Field("loss")->Double().value(), 0);
  ExpectRows(JsonRef(second).Field("advantages").value(), {{0.866023904, -0.866023904, -0.866023904, 0.866023904}});
  ExpectRows(JsonRef(second).Field("coef")->Items().value()[0],
             {{-0.216505976}, {0.108252988, 0.108252988}, {0.216505976}, {-0.216505976}});
  EXPECT_EQ(JsonRef(second).Field("metrics")->Field("tokens")->Int().value(), 5);
  EXPECT_EQ(JsonRef(second).Field("algorithm")->Field("loss")->Field("kind")->String().value(), "ppo_clip");
}

// One answer of the door, as numbers.
struct Answer {
  explicit Answer(const std::string& input) {
    const Result<std::string> text = TrainLoss(input);
    EXPECT_TRUE(text.ok()) << input << ": " << text.status().message();
    if (!text.ok()) return;
    value = ParseJson(*text).value();
    loss = JsonRef(value).Field("loss")->Double().value();
    for (const json::value& group : value.at("coef").as_array()) {
      for (const json::value& rollout : group.as_array()) {
        for (const json::value& c : rollout.as_array()) coef.push_back(c.to_number<double>());
      }
    }
  }
  double Metric(const char* name) const { return JsonRef(value).Field("metrics")->Field(name)->Double().value(); }
  std::vector<double> Advantages(size_t group) const { return JsonRef(value).Field("advantages")->Items().value()[group].Doubles().value(); }
  json::value value;
  double loss = 0;
  std::vector<double> coef;
};

void ExpectNear(const std::vector<double>& got, const std::vector<double>& want, double tolerance) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t k = 0; k < got.size(); ++k) EXPECT_NEAR(got[k], want[k], tolerance) << k;
}

// Fixture F1 of the reference: two rollouts, ratios .5 1.1 1.5 and .7 4, advantages `first` and -`first`.
Answer F1(const std::string& loss, const std::string& mode = "token-mean", double first = 1) {
  const std::string advantage = fmt::format(R"("reward":{},)", first), other = fmt::format(R"("reward":{},)", -first);
  std::string rows;
  const std::vector<std::vector<double>> logps = {{-1, -2, -0.5}, {-1.5, -0.25}}, ratios = {{0.5, 1.1, 1.5}, {0.7, 4}};
  for (size_t i = 0; i < 2; ++i) {
    std::string mask, now, old;
    for (size_t t = 0; t < logps[i].size(); ++t) {
      const char* comma = t ? "," : "";
      mask += fmt::format("{}1", comma);
      now += fmt::format("{}{:.17g}", comma, logps[i][t]);
      old += fmt::format("{}{:.17g}", comma, logps[i][t] - std::log(ratios[i][t]));
    }
    rows += fmt::format(R"({}{{{}"mask":[{}],"logp_new":[{}],"logp_old":[{}]}})", i ? "," : "", i ? other : advantage, mask, now, old);
  }
  return Answer(fmt::format(R"({{"algorithm":{{"loss":{},"advantage":{{"baseline":"none"}},"aggregation":{}}},"groups":[{{"rollouts":[{}]}}]}})",
                            loss, mode[0] == '{' ? mode : R"({"mode":")" + mode + "\"}", rows));
}

// A sign, a bound on the wrong side or a factor would train away from the objective. Values and slopes per token as published.
TEST(TrainLoss, GoldenF1EveryLoss) {
  struct Row {
    const char* loss;
    double value;  // sum over tokens
    std::vector<double> slope;
  };
  const std::vector<Row> rows = {
      {R"({"kind":"reinforce"})", 1 + 2 + .5 - 1.5 - .25, {-1, -1, -1, 1, 1}},
      {R"({"kind":"cispo","ratio_max":null})", .5 + 2.2 + .75 - 1.05 - 1, {-.5, -1.1, -1.5, .7, 4}},  // REINFORCE with a ratio
      {R"({"kind":"ppo_clip"})", -.5 - 1.1 - 1.2 + .8 + 4, {-.5, -1.1, 0, 0, 4}},
      {R"({"kind":"ppo_clip","dual_clip":3})", -.5 - 1.1 - 1.2 + .8 + 3, {-.5, -1.1, 0, 0, 0}},
      {R"({"kind":"ppo_clip","clip_high":0.28})", -.5 - 1.1 - 1.28 + .8 + 4, {-.5, -1.1, 0, 0, 4}},
      {R"({"kind":"ppo_clip","dual_clip":3,"dual_clip_value":"drop"})", -.5 - 1.1 - 1.2 + .8, {-.5, -1.1, 0, 0, 0}},
      {R"({"kind":"cispo","ratio_max":1.28})", .5 + 2.2 + .64 - 1.05 - .32, {-.5, -1.1, -1.28, .7, 1.28}},
      {R"({"kind":"cispo"})", .5 + 2.2 + .75 - 1.05 - 1, {-.5, -1.1, -1.5, .7, 4}},
      {R"({"kind":"cispo","ratio_min":0.8,"ratio_max":1.2})", .8 + 2.2 + .6 - 1.2 - .3, {-.8, -1.1, -1.2, .8, 1.2}},
      {R"({"kind":"cispo","mask_low":0.2,"mask_high":0.28})", .5 + 2.2 - 1, {-.5, -1.1, 0, 0, 4}},
      {R"({"kind":"sapo"})", -1.510163 - 2.099917 - 2.489837 + 1.607218 + 3.652986, {-.470007, -1.097255, -1.410022, .682919, .630445}},
      {R"({"kind":"dppo_tv"})", .5 + 2.2 - 1.05 - 1, {-.5, -1.1, 0, .7, 4}},
      {R"({"kind":"reinforce","drift":0.5})", 1.240227 + 2.004542 + .582201 - 1.436391 + .710906, {-1.693147, -.904690, -.594535, .643325, 2.386294}},
      {R"({"kind":"ratio_band"})", .5 + 2.2 + .75 - 1.05, {-.5, -1.1, -1.5, .7, 0}},
      // log r squared: .480, .009, .164, .127, 1.922: without the last their mean is .195, without the first too .100, then .0682, .009.
      {R"({"kind":"m2po","m2_max":0.2})", -.5 - 1.1 - 1.5 + .7, {-.5, -1.1, -1.5, .7, 0}},
      {R"({"kind":"m2po"})", -1.1, {0, -1.1, 0, 0, 0}},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(row.loss);
    const Answer answer = F1(row.loss);
    EXPECT_NEAR(answer.loss * 5, row.value, 3e-6);
    std::vector<double> slope = answer.coef;
    for (double& c : slope) c *= 5;
    ExpectNear(slope, row.slope, 1e-6);
  }
  // One ratio a sequence: each token has 1/(2 sequences x its length) of it.
  const Answer gspo = F1(R"({"kind":"gspo"})", "seq-mean-token-mean");
  EXPECT_NEAR(gspo.loss, (-.937889 + 1.673320) / 2, 1e-6);
  ExpectNear(gspo.coef, {-.937889 / 6, -.937889 / 6, -.937889 / 6, 1.673320 / 4, 1.673320 / 4}, 1e-6);
  const Answer flipped = F1(R"({"kind":"gspo"})", "seq-mean-token-mean", -1);
  EXPECT_NEAR(flipped.loss, (.9997 - 1.0004) / 2, 1e-6);
  ExpectNear(flipped.coef, {0, 0, 0, 0, 0}, 0);
  EXPECT_NEAR(flipped.Metric("clip_fraction_low"), 0.6, 1e-12);
  EXPECT_NEAR(flipped.Metric("clip_fraction_high"), 0.4, 1e-12);
  // GMPO: log r -.693 .095 .405 and -.357 1.386; A > 0 caps .405 at .4, A < 0 raises nothing above -.4.
  const double first = std::exp((std::log(0.5) + std::log(1.1) + 0.4) / 3), second = std::exp((std::log(0.7) + std::log(4)) / 2);
  const Answer gmpo = F1(R"({"kind":"gmpo"})", "seq-mean-token-mean");
  EXPECT_NEAR(gmpo.loss, (second - first) / 2, 1e-12);
  ExpectNear(gmpo.coef, {-first / 6, -first / 6, 0, second / 4, second / 4}, 1e-12);
}

TEST(TrainLoss, GoldenF1Aggregated) {
  const std::string norm = R"({"mode":"seq-mean-token-sum-norm","length_norm":4})";
  struct Row {
    const char* loss;
    double token_mean, token_sum, sequence_mean, sum_norm;
  };
  for (const Row& row : {Row{R"({"kind":"ppo_clip"})", .4, 1.0, .733333333, .25}, Row{R"({"kind":"cispo"})", .28, .7, .0625, .175},
                         Row{R"({"kind":"ppo_clip","clip_high":0.28})", .384, .96, .72, .24}}) {
    EXPECT_NEAR(F1(row.loss).loss, row.token_mean, 1e-9);
    EXPECT_NEAR(F1(row.loss, "prompt-mean").loss, row.token_mean, 1e-9);  // one group
    EXPECT_NEAR(F1(row.loss, "seq-mean-token-sum").loss, row.token_sum, 1e-9);
    EXPECT_NEAR(F1(row.loss, "seq-mean-token-mean").loss, row.sequence_mean, 1e-9);
    EXPECT_NEAR(F1(row.loss, norm).loss, row.sum_norm, 1e-9);
  }
}

// Rows of one token each unless `lengths` says otherwise, on policy, with these rewards.
std::string Rewards(const std::vector<double>& rewards, const std::vector<int>& lengths = {}) {
  std::string rows;
  for (size_t i = 0; i < rewards.size(); ++i) {
    std::string ones, logps;
    for (int t = 0; t < (lengths.empty() ? 1 : lengths[i]); ++t) ones += t ? ",1" : "1", logps += t ? ",-1" : "-1";
    rows += fmt::format(R"({}{{"reward":{},"mask":[{}],"logp_new":[{}],"logp_old":[{}]}})", i ? "," : "", rewards[i], ones, logps, logps);
  }
  return R"({"rollouts":[)" + rows + "]}";
}

std::string WithAdvantage(const std::string& advantage, const std::string& groups) {
  return R"({"algorithm":{"loss":{"kind":"ppo_clip"},"aggregation":{"mode":"token-mean"},"advantage":)" + advantage + R"(},"groups":[)" + groups + "]}";
}

// Published estimators differ by n or n-1, by epsilon, by what a group of one or of equals gives.
TEST(TrainLoss, GoldenF2Advantages) {
  const std::string half = Rewards({1, 0, 0, 1}), eighth = Rewards({1, 0, 0, 0, 0, 0, 0, 0});
  auto first_two = [](const std::string& advantage, const std::string& group) {
    std::vector<double> a = Answer(WithAdvantage(advantage, group)).Advantages(0);
    a.resize(2);
    return a;
  };
  const std::string grpo = R"({"baseline":"group_mean","scale":"group_std")";
  ExpectNear(first_two(grpo + "}", half), {.8660239, -.8660239}, 1e-7);
  ExpectNear(first_two(grpo + R"(,"std_eps":1e-4})", half), {.8658754, -.8658754}, 1e-7);
  ExpectNear(first_two(grpo + R"(,"std":"population"})", half), {.999998, -.999998}, 1e-7);
  ExpectNear(first_two(R"({"baseline":"leave_one_out"})", half), {.666667, -.666667}, 1e-6);
  ExpectNear(first_two(R"({"baseline":"group_mean"})", half), {.5, -.5}, 1e-15);
  ExpectNear(first_two(grpo + "}", eighth), {2.474867, -.353552}, 1e-6);
  ExpectNear(first_two(R"({"baseline":"leave_one_out"})", eighth), {1, -.142857}, 1e-6);
  ExpectNear(first_two(R"({"baseline":"group_mean"})", eighth), {.875, -.125}, 1e-15);
  ExpectNear(first_two(R"({"baseline":"length_weighted"})", Rewards({1, 0, 0, 1}, {2, 4, 6, 8})), {.5, -.5}, 1e-15);
  ExpectNear(first_two(R"({"baseline":"group_mean","scale":"group_mean"})", half), {1, -1}, 1e-15);
  ExpectNear(first_two(R"({"baseline":"group_mean","scale":"group_mean"})", Rewards({-1, 0})), {0, 0}, 0);
  const Answer whitened(WithAdvantage(R"({"baseline":"group_mean","whiten":true})", Rewards({1, 0}, {2, 1}) + "," + Rewards({1, 1}, {1, 4})));
  ExpectNear(whitened.Advantages(0), {1.365332, -1.755426}, 1e-6);
  ExpectNear(whitened.Advantages(1), {-.195047, -.195047}, 1e-6);
  // Groups of one and of equals: exactly zero under a group's statistics, the reward itself without.
  for (const char* advantage : {R"({"baseline":"group_mean"})", R"({"baseline":"leave_one_out"})", R"({"baseline":"length_weighted"})",
                                R"({"baseline":"none","scale":"group_std"})", R"({"baseline":"group_mean","scale":"group_std"})",
                                R"({"baseline":"group_mean","scale":"group_mean"})"}) {
    EXPECT_EQ(Answer(WithAdvantage(advantage, Rewards({3}))).Advantages(0)[0], 0) << advantage;
    EXPECT_EQ(Answer(WithAdvantage(advantage, Rewards({0.1 + 0.2, 0.3}))).Advantages(0), (std::vector<double>{0, 0})) << advantage;
  }
  EXPECT_EQ(Answer(WithAdvantage(R"({"baseline":"none"})", Rewards({3}))).Advantages(0)[0], 3);
  EXPECT_EQ(Answer(WithAdvantage(R"({"baseline":"batch_mean","scale":"batch_std"})", Rewards({2, 2}))).Advantages(0), (std::vector<double>{0, 0}));
}

// The denominator is the whole step's, whatever the split.
TEST(TrainLoss, GoldenF3Aggregation) {
  const std::vector<std::vector<double>> losses = {{4}, {1, 1, 1}, {2, 2, 2, 2}, {0, 6}};
  auto loss = [&](const std::string& aggregation) {
    std::string rows;
    for (const auto& sequence : losses) {
      std::string mask, logp;
      for (double l : sequence) mask += mask.empty() ? "1" : ",1", logp += fmt::format("{}{}", logp.empty() ? "" : ",", -l);
      rows += fmt::format(R"({}{{"reward":1,"mask":[{}],"logp_new":[{}]}})", rows.empty() ? "" : ",", mask, logp);
    }
    return Answer(R"({"algorithm":{"loss":{"kind":"reinforce"},"advantage":{"baseline":"none"},"aggregation":)" + aggregation +
                  R"(},"groups":[{"rollouts":[)" + rows + "]}]}").loss;
  };
  EXPECT_NEAR(loss(R"({"mode":"token-mean"})"), 2.1, 1e-12);
  EXPECT_NEAR(loss(R"({"mode":"seq-mean-token-sum"})"), 5.25, 1e-12);
  EXPECT_NEAR(loss(R"({"mode":"seq-mean-token-mean"})"), 2.5, 1e-12);
  EXPECT_NEAR(loss(R"({"mode":"seq-mean-token-sum-norm","length_norm":8})"), .65625, 1e-12);
}

// Fixture F4: logprobs of the trainer and of the rollout engine, two sequences. Coefficients are -w/3.
Answer F4(const std::string& off_policy, const std::string& more = "") {
  return Answer(R"({"algorithm":{"loss":{"kind":"reinforce"},"advantage":{"baseline":"none"},"aggregation":{"mode":"token-mean")" + more +
                R"(},"off_policy":)" + off_policy +
                R"(},"groups":[{"rollouts":[{"reward":1,"mask":[1,1],"logp_new":[-1,-2],"logp_old":[-1,-2],"logp_rollout":[-1.1,-1.7]},)"
                R"({"reward":1,"mask":[1],"logp_new":[-0.5],"logp_old":[-0.5],"logp_rollout":[-1.5]}]}]})");
}
std::vector<double> WeightsOf(const Answer& answer) {
  std::vector<double> w;
  for (double c : answer.coef) w.push_back(-3 * c);
  return w;
}

// A weight could be summed over the wrong axis, bounded on the wrong side, or take its tokens out of the denominator.
TEST(TrainLoss, GoldenF4OffPolicy) {
  const Answer tis = F4(R"({"mode":"decoupled","weight":"token","weight_max":2})");
  ExpectNear(WeightsOf(tis), {1.105171, .740818, 2}, 1e-6);
  EXPECT_NEAR(tis.Metric("ess"), .854482, 1e-6);
  EXPECT_NEAR(tis.Metric("mismatch_k1"), -.266667, 1e-6);
  EXPECT_NEAR(tis.Metric("mismatch_k3"), .254757, 1e-6);
  EXPECT_NEAR(tis.Metric("log_ppl_diff"), -.45, 1e-12);
  EXPECT_NEAR(tis.Metric("ppl_ratio"), .736525, 1e-6);
  EXPECT_NEAR(tis.Metric("chi2_token"), 2.053090, 1e-6);
  EXPECT_NEAR(tis.Metric("chi2_seq"), 3.029688, 1e-6);
  const Answer raw = F4(R"({"mode":"decoupled","weight":"token","weight_max":null})");
  ExpectNear(WeightsOf(raw), {1.105171, .740818, 2.718282}, 1e-6);
  EXPECT_NEAR(raw.Metric("ess"), .758160, 1e-6);
  ExpectNear(WeightsOf(F4(R"({"mode":"decoupled","weight":"token","normalize":true})")), {.862070, .577863, 1.560067}, 1e-6);
  const Answer icepop = F4(R"({"mode":"decoupled","weight":"token","weight_min":0.5,"outside":"zero"})");
  ExpectNear(WeightsOf(icepop), {1.105171, .740818, 0}, 1e-6);
  EXPECT_NEAR(icepop.Metric("ess"), .641669, 1e-6);
  EXPECT_EQ(icepop.Metric("tokens"), 3);
  EXPECT_EQ(icepop.Metric("rejected_tokens"), 0);
  ExpectNear(WeightsOf(F4(R"({"mode":"decoupled","weight":"sequence","weight_max":null})")), {.818731, .818731, 2.718282}, 1e-6);
  ExpectNear(WeightsOf(F4(R"({"mode":"decoupled","weight":"sequence","weight_max":2})")), {.818731, .818731, 2}, 1e-6);
  ExpectNear(WeightsOf(F4(R"({"mode":"decoupled","weight":"token","weight_min":0.8})")), {1.105171, .8, 2}, 1e-6);

  auto kept = [](const std::string& rule) {
    const Answer answer = F4(R"({"mode":"decoupled","reject":[)" + rule + "]}");
    std::string out;
    for (double c : answer.coef) out += c == 0 ? '0' : '1';
    EXPECT_EQ(answer.Metric("rejected_tokens"), std::count(out.begin(), out.end(), '0'));
    EXPECT_EQ(answer.Metric("tokens"), 3) << "rejected tokens stay in the denominator";
    for (double c : answer.coef) EXPECT_TRUE(c == 0 || std::abs(c + 1.0 / 3) < 1e-15);
    return out;
  };
  EXPECT_EQ(kept(R"({"measure":"ratio","level":"token","min":0.8,"max":2})"), "100");
  EXPECT_EQ(kept(R"({"measure":"ratio","level":"sequence_sum","min":0.8187})"), "111");  // .818731
  EXPECT_EQ(kept(R"({"measure":"ratio","level":"sequence_sum","min":0.8188})"), "001");
  EXPECT_EQ(kept(R"({"measure":"ratio","level":"sequence_mean","min":0.9048,"max":2.7182})"), "110");  // .904837, 2.718282
  EXPECT_EQ(kept(R"({"measure":"ratio","level":"sequence_mean","min":0.9049,"max":2.7183})"), "001");
  EXPECT_EQ(kept(R"({"measure":"k3","level":"sequence_mean","max":0.0229})"), "000");  // .022995, .718282
  EXPECT_EQ(kept(R"({"measure":"k3","level":"sequence_mean","max":0.023})"), "110");
  EXPECT_EQ(kept(R"({"measure":"k3","level":"sequence_sum","max":0.0459})"), "000");
  EXPECT_EQ(kept(R"({"measure":"k3","level":"sequence_sum","max":0.0461})"), "110");
  EXPECT_EQ(kept(R"({"measure":"k2","level":"token","max":0.04})"), "100");  // .005, .045, .5
  EXPECT_EQ(kept(R"({"measure":"k2","level":"sequence_any","max":0.04})"), "000");
  EXPECT_EQ(kept(R"({"measure":"ratio","level":"sequence_any","min":0.75})"), "001");  // veto
  EXPECT_EQ(kept(R"({"measure":"ratio","level":"token","min":0.8,"max":2,"only_negative":true})"), "111");
  EXPECT_EQ(kept(R"({"measure":"ratio","level":"token","min":0.8},{"measure":"ratio","level":"token","max":2})"), "100");
  // Bypass: the rules look at the ratio itself, .5 1.1 1.5 and .7 4.
  const auto bypass = [](const std::string& rule) {
    return F1(R"({"kind":"cispo"})", R"({"mode":"token-mean"},"off_policy":{"reject":[)" + rule + "]}").coef;
  };
  ExpectNear(bypass(R"({"measure":"ratio","level":"token","max":2})"), {-.1, -.22, -.3, .14, 0}, 1e-12);
  ExpectNear(bypass(R"({"measure":"ratio","level":"token","min":0.6})"), {0, -.22, -.3, .14, .8}, 1e-12);
  ExpectNear(bypass(R"({"measure":"ratio","level":"sequence_any","min":0.6})"), {0, 0, 0, .14, .8}, 1e-12);
}

// A log-ratio beyond the clamp of +-20 could be trained no more and be told nowhere, or be let through by a bound that needs no exp.
TEST(TrainLoss, BeyondTheClamp) {
  // One of two tokens is 30 less likely than before, at A = 1: no rule of a loss but the clamp takes its gradient.
  const auto answer = [](const std::string& loss, const std::string& more = "") {
    const bool sequence = loss.find("\"g") != std::string::npos;
    return Answer(fmt::format(R"({{"algorithm":{{"loss":{},"advantage":{{"baseline":"none"}},"aggregation":{{"mode":"{}"}}{}}},"groups":[{{"rollouts":[)"
                              R"({{"reward":1,"mask":[1],"logp_new":[-31],"logp_old":[-1]}},{{"reward":1,"mask":[1],"logp_new":[-1],"logp_old":[-1]}}]}}]}})",
                              loss, sequence ? "seq-mean-token-mean" : "token-mean", more));
  };
  for (const char* loss : {R"({"kind":"ppo_clip"})", R"({"kind":"sapo"})", R"({"kind":"gspo"})", R"({"kind":"gmpo"})", R"({"kind":"m2po","m2_max":1000})"}) {
    const Answer beyond = answer(loss);
    EXPECT_EQ(beyond.coef[0], 0) << loss;
    EXPECT_LT(beyond.coef[1], 0) << loss;
    EXPECT_EQ(beyond.Metric("clip_fraction_high"), 0.5) << loss;
    EXPECT_EQ(beyond.Metric("clip_fraction_low"), 0) << loss;
  }
  for (const char* loss : {R"({"kind":"cispo"})", R"({"kind":"dppo_tv"})", R"({"kind":"ratio_band","ratio_min":0,"ratio_max":null})"}) {
    const Answer beyond = answer(loss);
    EXPECT_EQ(beyond.coef[0], -std::exp(-20) / 2) << loss;
    EXPECT_EQ(beyond.Metric("clip_fraction_high"), 0.5) << loss;
  }
  // log^2 / 2 is 450.
  const char* rule = R"(,"off_policy":{{"reject":[{{"measure":"k2","level":"{}","max":{}}}]}})";
  for (const char* level : {"token", "sequence_sum", "sequence_mean", "sequence_any"}) {
    EXPECT_EQ(answer(R"({"kind":"cispo"})", fmt::format(fmt::runtime(rule), level, 250)).Metric("rejected_tokens"), 1) << level;
    EXPECT_EQ(answer(R"({"kind":"cispo"})", fmt::format(fmt::runtime(rule), level, 451)).Metric("rejected_tokens"), 0) << level;
  }
}

// The square of a large reward could make a deviation infinite and every advantage 0, without a word.
TEST(TrainLoss, HugeRewards) {
  const auto input = [](const char* first, const char* second) {
    return fmt::format(R"({{"algorithm":{{"recipe":"grpo"}},"groups":[{{"rollouts":[{{"reward":{},"mask":[1],"logp_new":[-1],"logp_old":[-1]}},)"
                       R"({{"reward":{},"mask":[1],"logp_new":[-1],"logp_old":[-1]}}]}}]}})", first, second);
  };
  for (const auto& [high, low] : std::vector<std::pair<const char*, const char*>>{{"1e200", "-1e200"}, {"1e308", "-1e308"}, {"1e150", "-1e150"}}) {
    const Answer answer(input(high, low));
    ExpectNear(answer.Advantages(0), {std::sqrt(0.5), -std::sqrt(0.5)}, 1e-9);
    ExpectNear(answer.coef, {-std::sqrt(0.5) / 2, std::sqrt(0.5) / 2}, 1e-9);
    EXPECT_TRUE(std::isfinite(JsonRef(answer.value).Field("metrics")->Field("reward")->Field("std")->Double().value()));
  }
  // Their sum is no number any more; where the group is dropped, that shows in a metric alone.
  std::string dropped = input("1.5e308", "1.5e308");
  dropped.replace(dropped.find("\"grpo\""), 6, R"("grpo","dynamic_sampling":"drop")");
  for (const std::string& too_large : {input("1.5e308", "1.4e308"), dropped}) {
    const Result<std::string> text = TrainLoss(too_large);
    ASSERT_FALSE(text.ok()) << *text;
    EXPECT_EQ(text.status().code(), StatusCode::kOutOfRange);
    EXPECT_NE(text.status().message().find("too large"), std::string::npos);
  }
}

// Fixture F5: behaviour, proximal and new logprob -2, -1.5, -1.2.
TEST(TrainLoss, GoldenF5Decoupled) {
  auto loss = [](double reward, const std::string& off_policy) {
    return Answer(fmt::format(R"({{"algorithm":{{"loss":{{"kind":"ppo_clip"}},"advantage":{{"baseline":"none"}},"aggregation":{{"mode":"token-mean"}},)"
                              R"("off_policy":{}}},"groups":[{{"rollouts":[{{"reward":{},"mask":[1],"logp_new":[-1.2],"logp_old":[-1.5],)"
                              R"("logp_rollout":[-2]}}]}}]}})", off_policy, reward));
  };
  EXPECT_NEAR(loss(1, R"({"mode":"decoupled","weight":"token","weight_max":null})").loss, -1.978466, 1e-6);
  const Answer negative = loss(-1, R"({"mode":"decoupled","weight":"token","weight_max":null})");
  EXPECT_NEAR(negative.loss, 2.225541, 1e-6);
  EXPECT_NEAR(negative.coef[0], 2.225541, 1e-6);
  EXPECT_NEAR(loss(1, R"({"mode":"decoupled","weight":"token"})").loss, -1.648721 * 1.2, 1e-6);
  EXPECT_NEAR(loss(1, R"({"mode":"decoupled","weight":"token","weight_max":1.5})").loss, -1.5 * 1.2, 1e-12);
}

// Three tokens of p = (.7, .2, .1) against q = (.5, .3, .2), advantage 0: what is left is the KL term.
TEST(TrainLoss, GoldenKlEstimators) {
  auto answer = [](const std::string& kl) {
    return Answer(fmt::format(R"({{"algorithm":{{"loss":{{"kind":"reinforce"}},"advantage":{{"baseline":"none"}},"aggregation":{{"mode":"seq-mean-token-sum"}},)"
                              R"("kl":{}}},"groups":[{{"rollouts":[{{"reward":0,"mask":[1,1,1],"logp_new":[{:.17g},{:.17g},{:.17g}],)"
                              R"("logp_old":[{:.17g},{:.17g},{:.17g}],"logp_ref":[{:.17g},{:.17g},{:.17g}]}}]}}]}})",
                              kl, std::log(.7), std::log(.2), std::log(.1), std::log(.7), std::log(.2), std::log(.1), std::log(.5), std::log(.3),
                              std::log(.2)));
  };
  const std::vector<double> k1 = {.336472, -.405465, -.693147}, k2 = {.056607, .082201, .240227}, k3 = {.050758, .094535, .306853};
  const std::vector<double> ratio = {.5 / .7, 1.5, 2};
  auto sum = [](const std::vector<double>& v) { return v[0] + v[1] + v[2]; };
  const Answer second = answer(R"({"where":"loss","estimator":"k2","coef":2})");
  EXPECT_NEAR(second.loss, 2 * sum(k2), 3e-6);
  ExpectNear(second.coef, {2 * k1[0], 2 * k1[1], 2 * k1[2]}, 2e-6);
  const Answer third = answer(R"({"where":"loss","coef":1})");
  EXPECT_NEAR(third.loss, sum(k3), 3e-6);
  ExpectNear(third.coef, {1 - ratio[0], 1 - ratio[1], 1 - ratio[2]}, 1e-12);
  for (const auto& [name, value] : {std::pair{"k1+", sum(k1)}, {"k3+", sum(k3)}}) {
    const Answer plus = answer(fmt::format(R"({{"where":"loss","estimator":"{}","coef":1}})", name));
    EXPECT_NEAR(plus.loss, value, 3e-6);
    ExpectNear(plus.coef, k1, 1e-6);
  }
  const Answer prob = answer(R"({"where":"loss","estimator":"sg_prob","coef":1})");
  ExpectNear(prob.coef, {.2, -.1, -.1}, 1e-12);
  // In the reward it moves the advantage: R = -coef x sum; k1 by default.
  const Answer reward = answer(R"({"where":"reward","coef":0.5})");
  EXPECT_NEAR(reward.Advantages(0)[0], -.5 * sum(k1), 1e-6);
  EXPECT_NEAR(answer(R"({"where":"reward","estimator":"k3","coef":0.5})").Advantages(0)[0], -.5 * sum(k3), 2e-6);
  // Weighted: r = 1 here, its derivative is not 0: d(k r) = k' + k.
  ExpectNear(answer(R"({"where":"loss","coef":1,"importance_weighted":true})").coef,
             {1 - ratio[0] + k3[0], 1 - ratio[1] + k3[1], 1 - ratio[2] + k3[2]}, 1e-6);
}

// The better of a pair could be taken for the worse, or a sum for a mean.
TEST(TrainLoss, GoldenPreferences) {
  auto answer = [](const std::string& loss, double first, double second) {
    return Answer(fmt::format(R"({{"algorithm":{{"loss":{}}},"groups":[{{"rollouts":[{{"reward":{},"mask":[1,0,1],"logp_new":[-4,null,-6],"logp_ref":[-5,null,-6]}},)"
                              R"({{"reward":{},"mask":[1],"logp_new":[-12],"logp_ref":[-11.5]}}]}}]}})", loss, first, second));
  };
  const Answer dpo = answer(R"({"kind":"dpo"})", 1, 0);
  EXPECT_NEAR(dpo.loss, .620957, 1e-6);
  ExpectNear(dpo.coef, {-.046257, 0, -.046257, .046257}, 1e-6);
  EXPECT_NEAR(answer(R"({"kind":"dpo","label_smoothing":0.1})", 1, 0).loss, .635957, 1e-6);
  const Answer swapped = answer(R"({"kind":"dpo"})", 0, 1);
  EXPECT_NEAR(swapped.loss, .620957 + .15, 1e-6);
  EXPECT_GT(swapped.coef[0], 0);
  EXPECT_NEAR(answer(R"({"kind":"ipo","length_average":false})", 1, 0).loss, 12.25, 1e-12);
  EXPECT_NEAR(answer(R"({"kind":"ipo"})", 1, 0).loss, 16, 1e-12);  // .5 + .5 - 5
  ExpectNear(answer(R"({"kind":"ipo"})", 1, 0).coef, {-4, 0, -4, 8}, 1e-12);
  // No preference, or only one that counts: no pair.
  const Answer tie = answer(R"({"kind":"dpo"})", 1, 1);
  EXPECT_EQ(tie.loss, 0);
  ExpectNear(tie.coef, {0, 0, 0, 0}, 0);
  EXPECT_EQ(tie.Metric("zero_signal_groups"), 1);
}

// A teacher's opinion could enter with the wrong sign, or be weighted as the policy term is.
TEST(TrainLoss, Distillation) {
  const std::string rollout = R"({"rollouts":[{"mask":[1,1],"logp_new":[-1,-2],"logp_old":[-1.2,-2],"logp_teacher":[-0.5,-3],)"
                              R"("teacher_top":[[[-0.5,-1],[-1.5,-2]],[]]}]})";
  const Answer opd(R"({"algorithm":{"recipe":"opd"},"groups":[)" + rollout + "]}");
  const double r = std::exp(.2);
  ExpectRows(JsonRef(JsonRef(opd.value).Field("advantages")->Items().value()[0]), {{.7, -1}});
  ExpectNear(opd.coef, {-.7 * r / 2, .5}, 1e-12);
  const Answer now(R"({"algorithm":{"recipe":"opd","distillation":{"student":"new","coef":2}},"groups":[)" + rollout + "]}");
  ExpectRows(JsonRef(JsonRef(now.value).Field("advantages")->Items().value()[0]), {{1, -2}});
  const Answer top(R"({"algorithm":{"loss":{"kind":"distill"},"aggregation":{"mode":"token-mean"},"distillation":{"kind":"topk_forward_kl","coef":3}},"groups":[)" +
                   rollout + "]}");
  const double p = std::exp(-.5), q = std::exp(-1.5);
  EXPECT_NEAR(top.loss, 3 * (p * .5 + q * .5) / 2, 1e-12);
  ExpectNear(top.coef, {0, 0}, 0);
  const auto rows = JsonRef(top.value).Field("coef_top")->Items().value()[0].Items().value()[0].Items().value();
  ExpectNear(rows[0].Doubles().value(), {-3 * p / 2, -3 * q / 2}, 1e-12);
  EXPECT_TRUE(rows[1].Doubles().value().empty());
}

// metrics could describe members that were removed, rewards after shaping, or count turns across rollouts.
TEST(TrainLoss, DistributionsAreOfTheBatch) {
  const Answer answer(
      R"({"algorithm":{"recipe":"rloo","advantage":{"credit":"turn"}},"groups":[{"rollouts":[
          {"reward":1,"turn_rewards":[0.5,0],"mask":[1,1,0,1],"turn":[0,0,0,1],"logp_new":[-1,-2,null,-3],"logp_old":[-1,-2,null,-3]},
          {"reward":0,"turn_rewards":[0,0],"mask":[1,1,1],"turn":[1,1,1],"logp_new":[-1,-1,-2],"logp_old":[-1,-1,-2]},
          {"outcome":"infra_failure","reward":9,"mask":[1,1,1,1,1],"logp_new":[-1,-1,-1,-1,-1]},
          {"reward":-1,"turn_rewards":[0],"mask":[0],"logp_new":[null],"logp_old":[null]}]}]})");
  const JsonRef metrics = JsonRef(answer.value).Field("metrics").value();
  auto expect = [&](const char* name, double mean, double deviation, double min, double max) {
    const JsonRef d = metrics.Field(name).value();
    EXPECT_NEAR(d.Field("mean")->Double().value(), mean, 1e-12) << name;
    EXPECT_NEAR(d.Field("std")->Double().value(), deviation, 1e-12) << name;
    EXPECT_NEAR(d.Field("min")->Double().value(), min, 1e-12) << name;
    EXPECT_NEAR(d.Field("max")->Double().value(), max, 1e-12) << name;
  };
  // Rewards 1.5, 0, -1; the others' mean leaves 2, -0.25 for the first tokens of the first two; its second turn has 1 to go.
  expect("reward", 0.5 / 3, std::sqrt((std::pow(1.5 - 0.5 / 3, 2) + std::pow(0.5 / 3, 2) + std::pow(1 + 0.5 / 3, 2)) / 2), -1, 1.5);
  const double mean = (2 + 2 + 1.5 - 0.25 * 3) / 6;
  expect("advantage", mean,
         std::sqrt((2 * std::pow(2 - mean, 2) + std::pow(1.5 - mean, 2) + 3 * std::pow(-0.25 - mean, 2)) / 5), -0.25, 2);
  expect("turn_tokens", 2, 1, 1, 3);
  EXPECT_NEAR(metrics.Field("entropy")->Double().value(), 10.0 / 6, 1e-12);
}

// A critic's values could be shifted by one token, or context tokens cost a step.
TEST(TrainLoss, GeneralisedAdvantages) {
  const Answer answer(R"({"algorithm":{"recipe":"ppo","advantage":{"gamma":0.9,"lambda":0.5,"whiten":false}},"groups":[{"rollouts":[)"
                      R"({"reward":1,"mask":[1,0,1,1],"values":[0.1,null,0.2,0.4],"logp_new":[-1,null,-1,-1],"logp_old":[-1,null,-1,-1]}]}]})");
  const double third = 1 - .4, second = .9 * .4 - .2 + .45 * third, first = .9 * .2 - .1 + .45 * second;
  ExpectRows(JsonRef(JsonRef(answer.value).Field("advantages")->Items().value()[0]), {{first, 0, second, third}});
}

void ExpectError(const std::string& groups, const std::string& path, const std::string& algorithm = R"({"recipe":"grpo"})") {
  const auto result = TrainLoss(R"({"algorithm":)" + algorithm + R"(,"groups":)" + groups + "}");
  ASSERT_FALSE(result.ok()) << groups << " gave " << *result;
  EXPECT_NE(result.status().message().find(path), std::string::npos) << result.status().message();
}

// A hole in the data could be read as zero.
TEST(TrainLoss, WhatIsReadMustBeThere) {
  ExpectError(R"([{"rollouts":[{"mask":[1],"logp_new":[-1],"logp_old":[-1]}]}])", "groups[0].rollouts[0].reward");
  ExpectError(R"([{"rollouts":[{"reward":null,"mask":[1],"logp_new":[-1],"logp_old":[-1]}]}])", "groups[0].rollouts[0].reward");
  ExpectError(R"([{"rollouts":[{"reward":1,"mask":[1],"logp_new":[-1]}]}])", "groups[0].rollouts[0].logp_old");
  ExpectError(R"([{"rollouts":[]},{"rollouts":[{"reward":1,"mask":[0,1],"logp_new":[null,null],"logp_old":[-1,-1]}]}])",
              "groups[1].rollouts[0].logp_new[1]");
  ExpectError(R"([{"rollouts":[{"reward":1,"mask":[1],"logp_new":[-1],"logp_old":[1e999]}]}])", "groups[0].rollouts[0].logp_old[0]");
  ExpectError(R"([{"rollouts":[{"reward":1,"mask":[1],"logp_new":[-1,-1],"logp_old":[-1]}]}])", "groups[0].rollouts[0].logp_new");
  ExpectError(R"([{"rollouts":[{"reward":1,"mask":[2],"logp_new":[-1],"logp_old":[-1]}]}])", "groups[0].rollouts[0].mask[0]");
  ExpectError(R"([{"rollouts":[{"outcome":"fine","reward":1,"mask":[],"logp_new":[],"logp_old":[]}]}])", "groups[0].rollouts[0].outcome");
  ExpectError(R"([{}])", "groups[0].rollouts");
  const std::string turns = R"({"recipe":"grpo","advantage":{"credit":"turn"}})";
  ExpectError(R"([{"rollouts":[{"reward":1,"mask":[1,1],"logp_new":[-1,-1],"logp_old":[-1,-1],"turn":[1,0]}]}])",
              "groups[0].rollouts[0].turn[1]", turns);
  ExpectError(R"([{"rollouts":[{"reward":1,"mask":[1],"turn_rewards":[0],"logp_new":[-1],"logp_old":[-1],"turn":[1]}]}])",
              "groups[0].rollouts[0].turn[0]", turns);
  ExpectError(R"([{"rollouts":[{"reward":1,"mask":[1],"logp_new":[-1],"logp_old":[-1]}]}])", "groups[0].rollouts[0].logp_ref",
              R"({"recipe":"grpo","kl":{"where":"loss","coef":0.1}})");
  ExpectError(R"([{"rollouts":[{"reward":1,"mask":[1],"logp_new":[-1],"logp_old":[-1]}]}])", "groups[0].rollouts[0].logp_rollout",
              R"({"recipe":"grpo","off_policy":{"mode":"decoupled","weight":"token"}})");
  ExpectError(R"([{"rollouts":[{"reward":1,"mask":[1],"logp_new":[-1],"logp_old":[-1]}]}])", "groups[0].rollouts[0].values", R"({"recipe":"ppo"})");
  ExpectError(R"([{"rollouts":[{"mask":[1],"logp_new":[-1],"logp_old":[-1]}]}])", "groups[0].rollouts[0].logp_teacher", R"({"recipe":"opd"})");
  const std::string top = R"({"loss":{"kind":"distill"},"aggregation":{"mode":"token-mean"},"distillation":{"kind":"topk_forward_kl"}})";
  ExpectError(R"([{"rollouts":[{"mask":[1],"logp_new":[-1]}]}])", "groups[0].rollouts[0].teacher_top", top);
  ExpectError(R"([{"rollouts":[{"mask":[1],"logp_new":[-1],"teacher_top":[[[-1]]]}]}])", "groups[0].rollouts[0].teacher_top[0][0]", top);
  ExpectError(R"([{"rollouts":[{"mask":[1],"logp_new":[-1],"teacher_top":[[[-1,null]]]}]}])", "groups[0].rollouts[0].teacher_top[0][0][1]", top);
  ExpectError(R"([{"rollouts":[{"reward":1,"mask":[1],"logp_new":[-1],"logp_ref":[-1]}]}])", "groups[0].rollouts", R"({"recipe":"dpo"})");
  EXPECT_FALSE(TrainLoss("{").ok());
  EXPECT_FALSE(TrainLoss(R"({"groups":[]})").ok());
}

// Data that the settings do not read, or that belongs to failures of ours, could be refused.
TEST(TrainLoss, WhatIsNotReadMayBeAnything) {
  const char* sft =
      R"({"algorithm":{"loss":{"kind":"sft"},"aggregation":{"mode":"token-mean"}},"groups":[{"rollouts":[{"mask":[0,1],"logp_new":[null,-2],"logp_old":"no","values":3}]}]})";
  const json::value v = ParseJson(TrainLoss(sft).value()).value();
  EXPECT_EQ(JsonRef(v).Field("loss")->Double().value(), 2);
  EXPECT_TRUE(JsonRef(v).Field("metrics")->Field("mismatch_k1")->is_null());
  EXPECT_TRUE(TrainLoss(R"({"algorithm":{"recipe":"grpo"},"groups":[{"rollouts":[{"outcome":"infra_failure"}]}]})").ok());
  EXPECT_TRUE(TrainLoss(R"({"algorithm":{"recipe":"grpo"},"groups":[]})").ok());
}

// Bytes from outside could crash the door.
TEST(TrainLoss, SurvivesMutatedInput) {
  Rng rng(11);
  const std::string seeds[] = {kExample1, kExample2,
                               R"({"algorithm":{"loss":{"kind":"distill"},"aggregation":{"mode":"token-mean"},"distillation":{"kind":"topk_forward_kl"}},"groups":[{"rollouts":[{"mask":[1],"logp_new":[-1],"teacher_top":[[[-1,-2],[-3,-4]]]}]}]})",
                               R"({"algorithm":{"recipe":"gspo","off_policy":{"mode":"decoupled","weight":"sequence","normalize":true,"reject":[{"measure":"k3","level":"sequence_mean","max":0.1}]}},"groups":[{"rollouts":[{"reward":1,"mask":[1,0,1],"segment":[0,0,1],"logp_new":[-1,null,-2],"logp_old":[-1,null,-2],"logp_rollout":[-1,null,-2]},{"reward":0,"mask":[1],"logp_new":[-1],"logp_old":[-1],"logp_rollout":[-1.5]}]}]})",
                               R"({"algorithm":{"recipe":"dpo"},"groups":[{"rollouts":[{"reward":1,"mask":[1],"logp_new":[-1],"logp_ref":[-1]},{"reward":0,"mask":[1],"logp_new":[-1],"logp_ref":[-1]}]}]})",
                               R"({"algorithm":{"recipe":"cispo","advantage":{"credit":"token","gamma":0.5},"reward":{"speed_coef":1}},"groups":[{"rollouts":[{"reward":1,"wall_s":2,"turn_rewards":[1,2],"mask":[1,0,1],"turn":[0,0,1],"logp_new":[-1,null,-2],"logp_old":[-1,null,-2]}]}]})"};
  const std::string alphabet = "0123456789-.,:[]{}\"eEnultrfas";
  int accepted = 0;
  for (int n = 0; n < 20000; ++n) {
    std::string text = seeds[static_cast<size_t>(n) % std::size(seeds)];
    const int edits = 1 + n % 4;
    for (int e = 0; e < edits; ++e) {
      const size_t at = static_cast<size_t>(rng.Uniform() * static_cast<double>(text.size()));
      const char c = alphabet[static_cast<size_t>(rng.Uniform() * static_cast<double>(alphabet.size()))];
      if (rng.Uniform() < 0.5) {
        text[at] = c;
      } else if (rng.Uniform() < 0.5) {
        text.erase(at, 1 + static_cast<size_t>(rng.Uniform() * 8));
      } else {
        text.insert(at, 1, c);
      }
    }
    accepted += TrainLoss(text).ok();
  }
  EXPECT_GT(accepted, 100);
}

}  // namespace
}  // namespace temper::trainer
