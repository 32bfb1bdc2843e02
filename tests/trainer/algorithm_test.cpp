#include "trainer/algorithm.h"

#include <algorithm>
#include <map>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "common/json.h"
#include "common/strings.h"

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

// "loss.kind=dpo loss.beta=0.1" as a map of printed JSON values.
std::map<std::string, std::string> Settings(const std::string& text) {
  std::map<std::string, std::string> out;
  for (const std::string& word : Split(text, ' ')) {
    if (word.empty()) continue;
    const size_t equal = word.find('=');
    const std::string value = word.substr(equal + 1);
    const Result<json::value> number = ParseJson(value);
    out[word.substr(0, equal)] = number.ok() ? PrintJson(*number) : '"' + value + '"';
  }
  return out;
}

// The keys of a block, likewise.
std::map<std::string, std::string> KeysOf(const json::object& block) {
  std::map<std::string, std::string> out;
  for (const auto& [name, value] : block) {
    if (!value.is_object()) out[name] = PrintJson(value);
    else for (const auto& [key, inner] : value.get_object()) out[std::string(name) + "." + std::string(key)] = PrintJson(inner);
  }
  return out;
}

// A recipe could silently lose, change or gain a setting. Of every one, all keys that are read and where each has its value from:
// docs/algorithm_block.md 2 beside the defaults of 1 and 1.1.
TEST(Algorithm, RecipesExpandToTheirDocumentedSettings) {
  const std::string kind_none = "kl.where=none off_policy.mode=bypass distillation.kind=none ";
  const std::string any = "reward.process_coef=1 reward.speed_coef=0 overlong.mask_truncated=false dynamic_sampling=off advantage.credit=rollout "
                          "advantage.whiten=false advantage.balance=false " + kind_none;
  const std::string deviation = "advantage.std=sample advantage.std_eps=1e-6 ", unit = "aggregation.unit=rollout ", drift = "loss.drift=0 ";
  const std::string gm_gs = "advantage.baseline=group_mean advantage.scale=group_std ", gm = "advantage.baseline=group_mean advantage.scale=none ";
  const std::string none = "advantage.baseline=none advantage.scale=none ";
  const std::string ppo = "loss.kind=ppo_clip loss.clip_low=0.2 loss.clip_high=0.2 ", one_sided = drift + "loss.dual_clip=null ";
  const std::string token_mean = "aggregation.mode=token-mean ", seq_mean = "aggregation.mode=seq-mean-token-mean ";
  struct Row {
    std::string name, defaults, recipe, source;
    std::string file = {};                // what the user says beside it
    std::vector<std::string> unread = {};  // of `defaults`
  };
  const std::vector<Row> rows = {
      {"grpo", any + deviation + one_sided + unit, gm_gs + ppo + seq_mean, "2402.03300"},
      {"dr_grpo", any + one_sided + unit, gm + ppo + "aggregation.mode=seq-mean-token-sum-norm", "2503.20783", "aggregation.length_norm=64"},
      {"dapo", any + deviation + one_sided + "overlong.factor=1",
       gm_gs + token_mean + "loss.kind=ppo_clip loss.clip_low=0.2 loss.clip_high=0.28 dynamic_sampling=refill", "2503.14476",
       "overlong.max_tokens=64 overlong.buffer_tokens=16"},
      {"gspo", any + deviation + unit, gm_gs + seq_mean + "loss.kind=gspo loss.clip_low=3e-4 loss.clip_high=4e-4", "2507.18071"},
      {"gmpo", any + deviation + unit, gm_gs + seq_mean + "loss.kind=gmpo loss.log_clip_low=0.4 loss.log_clip_high=0.4", "2507.20673"},
      {"cispo", any + deviation + drift + "loss.mask_low=null loss.mask_high=null",
       gm_gs + "loss.kind=cispo loss.ratio_min=0 loss.ratio_max=5 aggregation.mode=prompt-mean dynamic_sampling=refill", "2506.13585"},
      {"rloo", any + one_sided, "advantage.baseline=leave_one_out advantage.scale=none " + ppo + token_mean, "2402.14740"},
      {"reinforce", any + drift + unit, none + "loss.kind=reinforce aggregation.mode=seq-mean-token-sum", "Williams 1992"},
      {"reinforce_pp", any + one_sided + "advantage.gamma=1",
       none + ppo + token_mean + "advantage.credit=token advantage.whiten=true kl.where=reward kl.estimator=k1 kl.coef=0.001", "2501.03262", "",
       {"advantage.balance"}},
      {"reinforce_pp_baseline", any + one_sided, gm + ppo + token_mean + "advantage.whiten=true", "2501.03262"},
      {"ppo", any + one_sided, ppo + token_mean + "advantage.credit=gae advantage.gamma=1 advantage.lambda=1 advantage.whiten=true", "1707.06347", "",
       {"advantage.balance"}},
      {"dual_clip", any + deviation + drift + "loss.dual_clip_value=cap", gm_gs + ppo + token_mean + "loss.dual_clip=3", "1912.09729"},
      {"sapo", any + deviation + drift + unit, gm_gs + seq_mean + "loss.kind=sapo loss.tau_pos=1 loss.tau_neg=1.05", "2511.20347"},
      {"dppo_tv", any + drift, gm + token_mean + "loss.kind=dppo_tv loss.tv_low=0.2 loss.tv_high=0.2 loss.ratio_max=20", "2602.04879"},
      {"m2po", any + deviation + drift, gm_gs + token_mean + "loss.kind=m2po loss.m2_max=0.04", "2510.01161"},
      {"minimax_01", any + deviation + drift + unit + "kl.importance_weighted=false",
       gm_gs + ppo + seq_mean + "advantage.balance=true loss.dual_clip=3 loss.dual_clip_value=drop kl.where=loss kl.estimator=sg_prob kl.coef=0.01",
       "2501.08313"},
      {"kimi", any, gm + token_mean + "loss.kind=ratio_band loss.ratio_min=0.5 loss.ratio_max=2 loss.drift=0.001", "K2.5"},
      {"opd", kind_none + drift + "loss.mask_low=null loss.mask_high=null distillation.task_reward=false",
       token_mean + "loss.kind=cispo loss.ratio_min=0 loss.ratio_max=null distillation.kind=policy_gradient distillation.coef=1 distillation.student=old",
       "Tinker"},
      {"dpo", "loss.label_smoothing=0", "loss.kind=dpo loss.beta=0.1", "2305.18290"},
      {"ipo", "", "loss.kind=ipo loss.beta=0.1 loss.length_average=true", "2310.12036"},
      {"sft", "", "loss.kind=sft " + token_mean, "cross-entropy"},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(row.name);
    json::object block = {{"recipe", row.name}};
    std::map<std::string, std::string> values = Settings(row.defaults), sources;
    for (const std::string& path : row.unread) ASSERT_EQ(values.erase(path), 1u) << path;
    for (const auto& [path, value] : values) sources[path] = "default";
    for (const auto& [text, from] : {std::pair{row.recipe, "recipe"}, {row.file, "file"}}) {
      for (const auto& [path, value] : Settings(text)) values[path] = value, sources[path] = from;
    }
    for (const auto& [path, value] : Settings(row.file)) {
      json::value& parent = block[path.substr(0, path.find('.'))];
      if (!parent.is_object()) parent = json::object();
      parent.get_object()[path.substr(path.find('.') + 1)] = ParseJson(value).value();
    }
    const Result<ParsedAlgorithm> parsed = ParseAlgorithm(block);
    ASSERT_TRUE(parsed.ok()) << parsed.status().message();
    json::object expanded = ParseJson(parsed->expanded).value().as_object();
    EXPECT_EQ(expanded.at("recipe"), json::value(row.name));
    expanded.erase("recipe");
    EXPECT_EQ(KeysOf(expanded), values);
    EXPECT_EQ(parsed->sources, sources);
    EXPECT_NE(parsed->recipe_source.find(row.source), std::string::npos) << parsed->recipe_source;
    const Result<ParsedAlgorithm> again = Parse(parsed->expanded);
    ASSERT_TRUE(again.ok()) << parsed->expanded << ": " << again.status().message();
    EXPECT_EQ(again->expanded, parsed->expanded);
  }
  // What the error of an unknown recipe lists is all there are.
  const std::string listed = Parse(R"({"recipe":"none"})").status().message();
  for (const Row& row : rows) EXPECT_NE(listed.find(row.name), std::string::npos) << listed;
  EXPECT_EQ(std::count(listed.begin(), listed.end(), ','), static_cast<int64_t>(rows.size()) - 1) << "a recipe that this table lacks: " << listed;
  EXPECT_EQ(Parse(R"({"recipe":"cispo","dynamic_sampling":"off"})")->sources.at("dynamic_sampling"), "file");
}

// A number that depends on the task could get a value that nobody chose.
TEST(Algorithm, RecipesAskForWhatDependsOnTheTask) {
  ExpectError(R"({"recipe":"dr_grpo"})", {"algorithm.aggregation.length_norm", "dr_grpo"});
  ExpectError(R"({"recipe":"dapo"})", {"algorithm.overlong.max_tokens", "dapo", "overlong: null"});
  ExpectError(R"({"recipe":"dapo","overlong":{"max_tokens":64}})", {"algorithm.overlong", "buffer_tokens"});
  const ParsedAlgorithm off = Parse(R"({"recipe":"dapo","overlong":null})").value();
  EXPECT_FALSE(off.algorithm.overlong.max_tokens);
  EXPECT_EQ(Parse(off.expanded).value().expanded, off.expanded);
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
  EXPECT_EQ(parsed.algorithm.loss.parameters["clip_high"], 0.2);
  EXPECT_EQ(parsed.expanded.find("ratio_max"), std::string::npos) << parsed.expanded;
  EXPECT_EQ(parsed.algorithm.aggregation.mode, AggregationMode::kPromptMean);
}

// A setting without effect could be accepted: the user believes in something that does not happen. One row a rule of
// docs/algorithm_block.md 2: the block, the key that the error must name, and words of what would read it.
TEST(Algorithm, SettingsWithoutEffectAreErrors) {
  struct Row {
    const char* block;
    std::vector<std::string> parts;
  };
  const std::vector<Row> rows = {
      // Parameters of another kind.
      {R"({"recipe":"cispo","loss":{"clip_low":0.2}})", {"algorithm.loss.clip_low", "ppo_clip, gspo"}},
      {R"({"recipe":"grpo","loss":{"ratio_max":5}})", {"algorithm.loss.ratio_max", "cispo, dppo_tv, ratio_band"}},
      {R"({"recipe":"gspo","loss":{"log_clip_low":0.4}})", {"algorithm.loss.log_clip_low", "gmpo"}},
      {R"({"recipe":"grpo","loss":{"tau_pos":1}})", {"algorithm.loss.tau_pos", "sapo"}},
      {R"({"recipe":"grpo","loss":{"m2_max":1}})", {"algorithm.loss.m2_max", "m2po"}},
      {R"({"recipe":"grpo","loss":{"beta":0.1}})", {"algorithm.loss.beta", "dpo, ipo"}},
      {R"({"recipe":"ipo","loss":{"label_smoothing":0}})", {"algorithm.loss.label_smoothing", "dpo"}},
      {R"({"recipe":"dpo","loss":{"length_average":true}})", {"algorithm.loss.length_average", "ipo"}},
      {R"({"recipe":"gspo","loss":{"drift":0.1}})", {"algorithm.loss.drift", "reinforce, ppo_clip, cispo, sapo"}},
      {R"({"recipe":"sft","loss":{"drift":0}})", {"algorithm.loss.drift"}},
      {R"({"recipe":"grpo","loss":{"dual_clip_value":"cap"}})", {"algorithm.loss.dual_clip_value", "dual_clip"}},
      {R"({"recipe":"cispo","loss":{"mask_low":0.2}})", {"algorithm.loss.mask_low", "mask_high"}},
      // Advantages.
      {R"({"recipe":"grpo","advantage":{"gamma":1}})", {"algorithm.advantage.gamma", "turn, token, gae"}},
      {R"({"recipe":"grpo","advantage":{"lambda":1}})", {"algorithm.advantage.lambda", "gae"}},
      {R"({"recipe":"grpo","advantage":{"credit":"token","lambda":1}})", {"algorithm.advantage.lambda", "gae"}},
      {R"({"recipe":"grpo","advantage":{"scale":"none","std_eps":1e-6}})", {"algorithm.advantage.std_eps", "group_std"}},
      {R"({"recipe":"grpo","advantage":{"scale":"group_mean","std":"sample"}})", {"algorithm.advantage.std", "group_std"}},
      {R"({"recipe":"grpo","advantage":{"credit":"turn","balance":false}})", {"algorithm.advantage.balance", "credit rollout"}},
      {R"({"recipe":"grpo","advantage":{"credit":"token","balance":true}})", {"algorithm.advantage.balance", "credit rollout"}},
      {R"({"recipe":"ppo","advantage":{"balance":true}})", {"algorithm.advantage.balance", "gae"}},
      {R"({"recipe":"ppo","advantage":{"baseline":"none"}})", {"algorithm.advantage.baseline", "gae"}},
      {R"({"recipe":"ppo","advantage":{"scale":"group_std"}})", {"algorithm.advantage.scale", "gae"}},
      // Rewards.
      {R"({"recipe":"grpo","reward":{"speed_baseline_s":3}})", {"algorithm.reward.speed_baseline_s", "speed_coef"}},
      {R"({"recipe":"grpo","overlong":{"max_tokens":64}})", {"algorithm.overlong.max_tokens", "buffer_tokens"}},
      {R"({"recipe":"grpo","overlong":{"max_tokens":null}})", {"algorithm.overlong.max_tokens", "buffer_tokens"}},
      {R"({"recipe":"grpo","overlong":{"buffer_tokens":64}})", {"algorithm.overlong.buffer_tokens", "max_tokens"}},
      {R"({"recipe":"grpo","overlong":{"max_tokens":64,"buffer_tokens":null}})", {"algorithm.overlong.max_tokens", "buffer_tokens"}},
      {R"({"recipe":"grpo","overlong":{"factor":1}})", {"algorithm.overlong.factor"}},
      {R"({"recipe":"grpo","off_policy":{"reject":[{"measure":"ratio","level":"token","min":0,"max":2}]}})",
       {"algorithm.off_policy.reject[0].min", "every ratio is above"}},
      {R"({"recipe":"grpo","off_policy":{"mode":"decoupled","weight":"token","weight_min":0}})", {"algorithm.off_policy.weight_min", "null"}},
      // KL.
      {R"({"recipe":"grpo","kl":{"coef":0.1}})", {"algorithm.kl.coef", "kl.where"}},
      {R"({"recipe":"grpo","kl":{"estimator":"k3"}})", {"algorithm.kl.estimator", "kl.where"}},
      {R"({"recipe":"grpo","kl":{"importance_weighted":true}})", {"algorithm.kl.importance_weighted", "kl.where"}},
      {R"({"recipe":"grpo","kl":{"where":"reward","coef":0.1,"importance_weighted":false}})", {"algorithm.kl.importance_weighted", "loss"}},
      {R"({"recipe":"grpo","kl":{"where":"loss","coef":0.1,"estimator":"k1"}})", {"algorithm.kl.estimator", "k1+"}},
      {R"({"recipe":"grpo","kl":{"where":"reward","coef":0.1,"estimator":"k1+"}})", {"algorithm.kl.estimator", "k1, k2, k3"}},
      {R"({"recipe":"grpo","kl":{"where":"reward","coef":0.1,"estimator":"k3+"}})", {"algorithm.kl.estimator", "k1, k2, k3"}},
      {R"({"recipe":"grpo","kl":{"where":"reward","coef":0.1,"estimator":"sg_prob"}})", {"algorithm.kl.estimator", "k1, k2, k3"}},
      {R"({"recipe":"grpo","kl":{"where":"loss","coef":0}})", {"algorithm.kl.coef", "none"}},
      // Off-policy.
      {R"({"recipe":"grpo","off_policy":{"weight":"token"}})", {"algorithm.off_policy.weight", "cispo", "decoupled"}},
      {R"({"recipe":"grpo","off_policy":{"weight_max":2}})", {"algorithm.off_policy.weight_max", "decoupled"}},
      {R"({"recipe":"grpo","off_policy":{"mode":"decoupled","normalize":true}})", {"algorithm.off_policy.normalize", "weight"}},
      {R"({"recipe":"grpo","off_policy":{"mode":"decoupled"}})", {"algorithm.off_policy.mode", "weight or reject"}},
      {R"({"recipe":"grpo","off_policy":{"mode":"decoupled","weight":"none"}})", {"algorithm.off_policy.mode", "weight or reject"}},
      {R"({"recipe":"grpo","off_policy":{"mode":"decoupled","weight":"token","weight_max":null,"outside":"zero"}})", {"algorithm.off_policy.outside"}},
      {R"({"recipe":"grpo","off_policy":{"reject":[]}})", {"algorithm.off_policy.reject", "empty"}},
      {R"({"recipe":"grpo","off_policy":{"reject":[{"measure":"ratio","level":"token"}]}})", {"algorithm.off_policy.reject[0]", "min or max"}},
      {R"({"recipe":"grpo","off_policy":{"reject":[{"measure":"k3","level":"token","min":0.1,"max":1}]}})", {"algorithm.off_policy.reject[0].min"}},
      // Aggregation.
      {R"({"recipe":"cispo","aggregation":{"unit":"rollout"}})", {"algorithm.aggregation.unit", "seq-mean"}},
      {R"({"recipe":"grpo","aggregation":{"length_norm":5}})", {"algorithm.aggregation.length_norm", "seq-mean-token-sum-norm"}},
      {R"({"recipe":"gspo","aggregation":{"mode":"token-mean"}})", {"algorithm.aggregation.mode", "gspo", "seq-mean-token-mean"}},
      {R"({"recipe":"gmpo","aggregation":{"mode":"prompt-mean"}})", {"algorithm.aggregation.mode", "gmpo", "seq-mean-token-mean"}},
      {R"({"recipe":"dpo","aggregation":{"mode":"token-mean"}})", {"algorithm.aggregation.mode", "pairs"}},
      {R"({"recipe":"ipo","aggregation":{"unit":"rollout"}})", {"algorithm.aggregation.unit", "pairs"}},
      // Whole blocks with dpo, ipo, sft.
      {R"({"recipe":"sft","advantage":{"baseline":"none"}})", {"algorithm.advantage.baseline", "sft", "reinforce"}},
      {R"({"recipe":"sft","overlong":{"mask_truncated":true}})", {"algorithm.overlong.mask_truncated"}},
      {R"({"recipe":"sft","kl":{"where":"loss","coef":0.1}})", {"algorithm.kl"}},
      {R"({"recipe":"sft","off_policy":{"mode":"bypass"}})", {"algorithm.off_policy.mode"}},
      {R"({"recipe":"dpo","reward":{"process_coef":1}})", {"algorithm.reward.process_coef", "dpo"}},
      {R"({"recipe":"dpo","dynamic_sampling":"drop"})", {"algorithm.dynamic_sampling"}},
      {R"({"recipe":"ipo","advantage":{"whiten":true}})", {"algorithm.advantage.whiten", "ipo"}},
      {R"({"recipe":"ipo","off_policy":{"reject":[{"measure":"k3","level":"token","max":1}]}})", {"algorithm.off_policy.reject"}},
      {R"({"recipe":"dpo","kl":{"where":"none"}})", {"algorithm.kl.where"}},
      {R"({"recipe":"dpo","distillation":{"kind":"policy_gradient"}})", {"algorithm.distillation.kind"}},
      // Distillation.
      {R"({"recipe":"grpo","distillation":{"coef":1}})", {"algorithm.distillation.coef", "policy_gradient"}},
      {R"({"recipe":"opd","distillation":{"coef":0}})", {"algorithm.distillation.coef", "none"}},
      {R"({"recipe":"opd","advantage":{"whiten":true}})", {"algorithm.advantage.whiten", "task_reward"}},
      {R"({"recipe":"opd","reward":{"speed_coef":1}})", {"algorithm.reward.speed_coef", "task_reward"}},
      {R"({"recipe":"opd","dynamic_sampling":"drop"})", {"algorithm.dynamic_sampling", "task_reward"}},
      {R"({"recipe":"opd","overlong":{"mask_truncated":true}})", {"algorithm.overlong.mask_truncated", "task_reward"}},
      {R"({"recipe":"opd","kl":{"where":"reward","coef":0.1}})", {"algorithm.kl.where", "task_reward"}},
      {R"({"loss":{"kind":"distill"},"aggregation":{"mode":"token-mean"}})", {"algorithm.distillation.kind", "topk_forward_kl"}},
      {R"({"loss":{"kind":"distill"},"aggregation":{"mode":"token-mean"},"distillation":{"kind":"policy_gradient"}})",
       {"algorithm.distillation.kind", "topk_forward_kl"}},
      {R"({"loss":{"kind":"distill"},"aggregation":{"mode":"token-mean"},"distillation":{"kind":"topk_forward_kl","task_reward":true}})",
       {"algorithm.distillation.task_reward"}},
      {R"({"loss":{"kind":"distill"},"aggregation":{"mode":"token-mean"},"distillation":{"kind":"topk_forward_kl","student":"new"}})",
       {"algorithm.distillation.student", "policy_gradient"}},
      {R"({"recipe":"opd","distillation":{"kind":"topk_forward_kl"}})", {"algorithm.loss.kind", "task_reward"}},
      // One advantage a rollout.
      {R"({"recipe":"gmpo","advantage":{"credit":"turn"}})", {"algorithm.advantage.credit", "gmpo"}},
      {R"({"recipe":"gmpo","distillation":{"kind":"policy_gradient","task_reward":true}})", {"algorithm.distillation.kind", "gmpo"}},
  };
  for (const Row& row : rows) ExpectError(row.block, row.parts);
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
  for (const char* factor : {"0", "-1"}) {
    ExpectError(fmt::format(R"({{"recipe":"grpo","overlong":{{"max_tokens":8,"buffer_tokens":2,"factor":{}}}}})", factor),
                {"algorithm.overlong.factor", "at least"});
  }
  ExpectError(R"({"recipe":"grpo","off_policy":{"reject":[{"measure":"ratio","level":"token","max":0}]}})",
              {"algorithm.off_policy.reject[0].max", "drop everything"});
  ExpectError(R"({"advantage":{"baseline":"none"}})", {"algorithm.loss.kind", "required"});
  ExpectError(R"({"loss":{"kind":"cispo"},"aggregation":{"mode":"token-mean"}})", {"algorithm.advantage.baseline", "required"});
  ExpectError(R"({"loss":{"kind":"cispo"},"advantage":{"baseline":"none"}})", {"algorithm.aggregation.mode", "required"});
  ExpectError(R"({"recipe":"grpo","aggregation":{"mode":"seq-mean-token-sum-norm"}})", {"algorithm.aggregation.length_norm"});
  ExpectError(R"({"recipe":"grpo","kl":{"where":"loss"}})", {"algorithm.kl.coef", "required"});
  ExpectError(R"({"recipe":"grpo","loss":{"kind":"grpo"}})", {"algorithm.loss.kind", "ppo_clip"});
  ExpectError(R"({"recipe":"sapo","loss":{"tau_pos":0}})", {"algorithm.loss.tau_pos"});
  ExpectError(R"({"recipe":"kimi","loss":{"ratio_max":0.1}})", {"algorithm.loss.ratio_max", "ratio_min"});
  ExpectError(R"({"recipe":"grpo","off_policy":{"reject":{"measure":"k3"}}})", {"algorithm.off_policy.reject", "list"});
  ExpectError(R"({"recipe":"grpo","off_policy":{"reject":[{"measure":"k3","max":1}]}})", {"algorithm.off_policy.reject[0].level", "required"});
  ExpectError(R"({"recipe":"grpo","off_policy":{"reject":[{"mesure":"k3","level":"token","max":1}]}})",
              {"algorithm.off_policy.reject[0].mesure", "measure"});
  ExpectError(R"({"recipe":"grpo","off_policy":{"mode":"decoupled","weight":"token","weight_min":3}})", {"algorithm.off_policy.weight_max"});
}

// A loss that the job cannot run yet could start and do something else.
TEST(Algorithm, WhatAJobCannotRunIsRefusedByName) {
  const std::vector<std::pair<std::string, std::vector<std::string>>> table = {
      {R"({"recipe":"ppo"})", {"algorithm.advantage.credit", "gae", "critic"}},
  };
  for (const auto& [text, parts] : table) {
    const Status status = CheckAlgorithmForRun(Parse(text).value().algorithm, 0);
    EXPECT_EQ(status.code(), StatusCode::kUnimplemented) << text;
    for (const std::string& part : parts) EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
  }
  for (const char* text : {R"({"recipe":"grpo"})", R"({"recipe":"gspo"})", R"({"recipe":"gmpo"})", R"({"recipe":"cispo"})", R"({"recipe":"sapo"})",
                           R"({"recipe":"m2po"})", R"({"recipe":"kimi"})", R"({"recipe":"rloo"})", R"({"recipe":"dual_clip"})", R"({"recipe":"dppo_tv"})",
                           R"({"recipe":"reinforce_pp_baseline"})", R"({"recipe":"dapo","overlong":null})", R"({"recipe":"minimax_01"})",
                           R"({"recipe":"reinforce_pp"})", R"({"recipe":"dpo"})", R"({"recipe":"ipo"})", R"({"recipe":"opd"})",
                           R"({"loss":{"kind":"distill"},"distillation":{"kind":"topk_forward_kl"},"aggregation":{"mode":"token-mean"}})",
                           R"({"recipe":"grpo","reward":{"process_coef":0.5,"speed_coef":0.1},"advantage":{"credit":"turn"}})"}) {
    EXPECT_TRUE(CheckAlgorithmForRun(Parse(text).value().algorithm, 4).ok()) << text;
  }
}

// Off-policy tokens could be trained without any ratio.
TEST(Algorithm, ReinforceNeedsStalenessZeroInARun) {
  const ParsedAlgorithm p = Parse(R"({"recipe":"grpo","loss":{"kind":"reinforce"}})").value();
  EXPECT_TRUE(CheckAlgorithmForRun(p.algorithm, 0).ok());
  EXPECT_FALSE(CheckAlgorithmForRun(p.algorithm, 1).ok());
  const ParsedAlgorithm weighted = Parse(R"({"recipe":"reinforce","off_policy":{"mode":"decoupled","weight":"token"}})").value();
  EXPECT_TRUE(CheckAlgorithmForRun(weighted.algorithm, 1).ok());
  EXPECT_FALSE(CheckAlgorithmForRun(weighted.algorithm, 1, 2).ok()) << "the weight knows nothing of later steps";
  EXPECT_NE(CheckAlgorithmForRun(p.algorithm, 0, 2).message().find("2 optimizer steps on a batch make it differ from 1"), std::string::npos);
  EXPECT_TRUE(CheckAlgorithmForRun(Parse(R"({"recipe":"sft"})").value().algorithm, 0, 2).ok());
}

}  // namespace
}  // namespace temper::trainer
