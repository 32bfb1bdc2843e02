#include "trainer/algorithm.h"

#include <gtest/gtest.h>

#include "common/json.h"

namespace temper::trainer {
namespace {

Result<ParsedAlgorithm> Parse(const std::string& text) { return ParseAlgorithm(ParseJson(text).value()); }

void ExpectError(const std::string& text, const std::vector<std::string>& parts) {
  const Result<ParsedAlgorithm> parsed = Parse(text);
  ASSERT_FALSE(parsed.ok()) << text << " was accepted: " << parsed->expanded;
  for (const std::string& part : parts) {
    EXPECT_NE(parsed.status().message().find(part), std::string::npos) << text << ": " << parsed.status().message();
  }
}

// A recipe could silently lose one of its published settings.
TEST(Algorithm, RecipesExpandToTheirDocumentedSettings) {
  const ParsedAlgorithm grpo = Parse(R"({"recipe":"grpo"})").value();
  EXPECT_EQ(grpo.algorithm.loss.kind, LossKind::kPpoClip);
  EXPECT_EQ(grpo.algorithm.loss.clip_low, 0.2);
  EXPECT_EQ(grpo.algorithm.loss.clip_high, 0.2);
  EXPECT_EQ(grpo.algorithm.advantage.baseline, Baseline::kGroupMean);
  EXPECT_EQ(grpo.algorithm.advantage.scale, Scale::kGroupStd);
  EXPECT_EQ(grpo.algorithm.aggregation.mode, AggregationMode::kSeqMeanTokenMean);
  EXPECT_EQ(grpo.algorithm.dynamic_sampling, DynamicSampling::kOff);

  const ParsedAlgorithm cispo = Parse(R"({"recipe":"cispo","dynamic_sampling":"off"})").value();
  EXPECT_EQ(cispo.algorithm.loss.kind, LossKind::kCispo);
  EXPECT_EQ(cispo.algorithm.loss.ratio_min, 0);
  EXPECT_EQ(cispo.algorithm.loss.ratio_max, 5);
  EXPECT_EQ(cispo.algorithm.aggregation.mode, AggregationMode::kPromptMean);
  EXPECT_EQ(cispo.algorithm.dynamic_sampling, DynamicSampling::kOff);
  EXPECT_EQ(cispo.sources.at("dynamic_sampling"), "file");
  EXPECT_EQ(cispo.sources.at("loss.ratio_max"), "recipe");
  EXPECT_EQ(cispo.sources.at("advantage.std"), "default");
}

// The expansion could hold keys that are not read, or lose some, so that a resolved job file would not start again.
TEST(Algorithm, ExpansionIsValidInputWithTheSameMeaning) {
  for (const char* text : {R"({"recipe":"grpo"})", R"({"recipe":"cispo"})", R"({"recipe":"cispo","loss":{"kind":"reinforce"}})",
                           R"({"loss":{"kind":"sft"},"aggregation":{"mode":"token-mean"}})",
                           R"({"recipe":"grpo","overlong":{"max_tokens":64,"buffer_tokens":16},"reward":{"speed_coef":0.1}})",
                           R"({"recipe":"grpo","advantage":{"credit":"turn","gamma":0.9},"loss":{"dual_clip":3}})"}) {
    const ParsedAlgorithm first = Parse(text).value();
    const Result<ParsedAlgorithm> second = Parse(first.expanded);
    ASSERT_TRUE(second.ok()) << first.expanded << ": " << second.status().message();
    EXPECT_EQ(first.expanded, second->expanded);
  }
}

// Another loss kind could inherit a parameter of the recipe's kind with another meaning.
TEST(Algorithm, AnotherKindDropsTheRecipesLossKeys) {
  const ParsedAlgorithm parsed = Parse(R"({"recipe":"cispo","loss":{"kind":"ppo_clip"}})").value();
  EXPECT_EQ(parsed.algorithm.loss.clip_high, 0.2);
  EXPECT_EQ(parsed.expanded.find("ratio_max"), std::string::npos) << parsed.expanded;
  EXPECT_EQ(parsed.algorithm.aggregation.mode, AggregationMode::kPromptMean);
}

// A setting without effect could be accepted: the user believes in something that does not happen.
TEST(Algorithm, SettingsWithoutEffectAreErrors) {
  ExpectError(R"({"recipe":"cispo","loss":{"clip_low":0.2}})", {"algorithm.loss.clip_low", "no effect", "ppo_clip, gspo"});
  ExpectError(R"({"recipe":"grpo","loss":{"ratio_max":5}})", {"algorithm.loss.ratio_max", "cispo, dppo_tv, ratio_band"});
  ExpectError(R"({"recipe":"grpo","advantage":{"gamma":1}})", {"algorithm.advantage.gamma", "turn, token, gae"});
  ExpectError(R"({"recipe":"grpo","advantage":{"lambda":1}})", {"algorithm.advantage.lambda", "gae"});
  ExpectError(R"({"recipe":"grpo","advantage":{"scale":"none","std_eps":1e-6}})", {"algorithm.advantage.std_eps", "group_std"});
  ExpectError(R"({"recipe":"grpo","advantage":{"credit":"turn","balance":false}})", {"algorithm.advantage.balance"});
  ExpectError(R"({"recipe":"grpo","reward":{"speed_baseline_s":3}})", {"algorithm.reward.speed_baseline_s", "speed_coef"});
  ExpectError(R"({"recipe":"grpo","overlong":{"max_tokens":64}})", {"algorithm.overlong.max_tokens", "buffer_tokens"});
  ExpectError(R"({"recipe":"grpo","overlong":{"buffer_tokens":64}})", {"algorithm.overlong.buffer_tokens", "max_tokens"});
  ExpectError(R"({"recipe":"grpo","overlong":{"factor":1}})", {"algorithm.overlong.factor"});
  ExpectError(R"({"recipe":"grpo","kl":{"coef":0.1}})", {"algorithm.kl.coef", "kl.where"});
  ExpectError(R"({"recipe":"grpo","off_policy":{"weight":"token"}})", {"algorithm.off_policy.weight", "cispo"});
  ExpectError(R"({"recipe":"grpo","off_policy":{"reject":[]}})", {"algorithm.off_policy.reject", "empty"});
  ExpectError(R"({"recipe":"cispo","aggregation":{"unit":"rollout"}})", {"algorithm.aggregation.unit", "seq-mean"});
  ExpectError(R"({"recipe":"grpo","aggregation":{"length_norm":5}})", {"algorithm.aggregation.length_norm", "seq-mean-token-sum-norm"});
  ExpectError(R"({"recipe":"grpo","distillation":{"coef":1}})", {"algorithm.distillation.coef"});
  ExpectError(R"({"recipe":"grpo","loss":{"dual_clip_value":"cap"}})", {"algorithm.loss.dual_clip_value", "dual_clip"});
  ExpectError(R"({"recipe":"cispo","loss":{"mask_low":0.2}})", {"algorithm.loss.mask_low", "mask_high"});
  ExpectError(R"({"loss":{"kind":"sft"},"aggregation":{"mode":"token-mean"},"advantage":{"baseline":"none"}})",
              {"algorithm.advantage.baseline", "sft"});
  ExpectError(R"({"loss":{"kind":"sft"},"aggregation":{"mode":"token-mean"},"overlong":{"mask_truncated":true}})",
              {"algorithm.overlong.mask_truncated"});
}

// A typing error or a value of the wrong kind could be taken for something else.
TEST(Algorithm, WrongKeysTypesAndRangesAreErrors) {
  ExpectError("[]", {"algorithm", "mapping"});
  ExpectError(R"({"recipe":"grpo","los":{}})", {"algorithm.los", "loss"});
  ExpectError(R"({"recipe":"grpo","loss":{"clip_hihg":0.3}})", {"algorithm.loss.clip_hihg", "clip_high"});
  ExpectError(R"({"recipe":"grpo","loss":{"clip_high":"0.3"}})", {"algorithm.loss.clip_high", "number"});
  ExpectError(R"({"recipe":"grpo","loss":{"clip_high":-0.3}})", {"algorithm.loss.clip_high", "at least 0"});
  ExpectError(R"({"recipe":"grpo","loss":{"dual_clip":1.1}})", {"algorithm.loss.dual_clip", "1.2"});
  ExpectError(R"({"recipe":"grpo","loss":3})", {"algorithm.loss", "mapping"});
  ExpectError(R"({"recipe":"grop"})", {"algorithm.recipe", "grop", "grpo"});
  ExpectError(R"({"recipe":"grpo","dynamic_sampling":"maybe"})", {"algorithm.dynamic_sampling", "off, drop, refill"});
  ExpectError(R"({"recipe":"grpo","overlong":{"max_tokens":8.5,"buffer_tokens":2}})", {"algorithm.overlong.max_tokens", "integer"});
  ExpectError(R"({"advantage":{"baseline":"none"}})", {"algorithm.loss.kind", "required"});
  ExpectError(R"({"loss":{"kind":"cispo"},"aggregation":{"mode":"token-mean"}})", {"algorithm.advantage.baseline", "required"});
  ExpectError(R"({"loss":{"kind":"cispo"},"advantage":{"baseline":"none"}})", {"algorithm.aggregation.mode", "required"});
  ExpectError(R"({"recipe":"grpo","aggregation":{"mode":"seq-mean-token-sum-norm"}})", {"algorithm.aggregation.length_norm"});
}

// What is documented but not built could run as something else.
TEST(Algorithm, WhatIsNotBuiltIsRefusedByName) {
  for (const char* recipe : {"dapo", "dr_grpo", "gspo", "gmpo", "rloo", "ppo", "dpo", "sft", "opd", "kimi", "minimax_01"}) {
    ExpectError(std::string(R"({"recipe":")") + recipe + R"("})", {"algorithm.recipe", recipe, "not built", "grpo, cispo"});
  }
  ExpectError(R"({"recipe":"grpo","loss":{"kind":"sapo"}})", {"algorithm.loss.kind", "sapo", "not built"});
  ExpectError(R"({"recipe":"grpo","kl":{"where":"loss","coef":0.04}})", {"algorithm.kl.where", "not built"});
  ExpectError(R"({"recipe":"grpo","advantage":{"credit":"gae"}})", {"algorithm.advantage.credit", "not built"});
  ExpectError(R"({"recipe":"grpo","off_policy":{"mode":"decoupled"}})", {"algorithm.off_policy.mode", "not built"});
  EXPECT_EQ(Parse(R"({"recipe":"dapo"})").status().code(), StatusCode::kUnimplemented);
}

// Off-policy tokens could be trained without any ratio.
TEST(Algorithm, ReinforceNeedsStalenessZeroInARun) {
  const ParsedAlgorithm p = Parse(R"({"recipe":"grpo","loss":{"kind":"reinforce"}})").value();
  EXPECT_TRUE(CheckAlgorithmForRun(p.algorithm, 0).ok());
  EXPECT_FALSE(CheckAlgorithmForRun(p.algorithm, 1).ok());
}

}  // namespace
}  // namespace temper::trainer
