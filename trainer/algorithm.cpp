#include "trainer/algorithm.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "common/json.h"
#include "common/strings.h"

namespace temper::trainer {
namespace {

// What a key may hold. kOptional* admit null.
enum class Type { kNumber, kOptionalNumber, kOptionalInt, kBool, kEnum, kList };

struct Key {
  const char* path;
  Type type;
  const char* fallback;  // JSON text of the default; nullptr = none, to be given where it is read
  double min = -HUGE_VAL, max = HUGE_VAL;
  const char* values = "";   // kEnum: all documented values, space separated
  const char* missing = "";  // kEnum: those of `values` that are not built yet
};

constexpr double kInf = HUGE_VAL;

// Parameters of the loss kinds have their defaults per kind in kKinds; `fallback` here is only a marker.
const Key kKeys[] = {
    {"reward.process_coef", Type::kNumber, "1"},
    {"reward.speed_coef", Type::kNumber, "0"},
    {"reward.speed_baseline_s", Type::kOptionalNumber, "null", 1e-9},
    {"overlong.max_tokens", Type::kOptionalInt, "null", 1},
    {"overlong.buffer_tokens", Type::kOptionalInt, "null", 1},
    {"overlong.factor", Type::kNumber, "1"},
    {"overlong.mask_truncated", Type::kBool, "false"},
    {"dynamic_sampling", Type::kEnum, "\"off\"", -kInf, kInf, "off drop refill"},
    {"advantage.credit", Type::kEnum, "\"rollout\"", -kInf, kInf, "rollout turn token gae", "gae"},
    {"advantage.gamma", Type::kNumber, "1", 0, 1},
    {"advantage.lambda", Type::kNumber, "1", 0, 1},
    {"advantage.baseline", Type::kEnum, nullptr, -kInf, kInf, "none group_mean leave_one_out length_weighted batch_mean"},
    {"advantage.scale", Type::kEnum, "\"none\"", -kInf, kInf, "none group_std batch_std group_mean"},
    {"advantage.std", Type::kEnum, "\"sample\"", -kInf, kInf, "sample population"},
    {"advantage.std_eps", Type::kNumber, "1e-6", 0},
    {"advantage.whiten", Type::kBool, "false"},
    {"advantage.balance", Type::kBool, "false"},
    {"loss.kind", Type::kEnum, nullptr, -kInf, kInf,
     "reinforce ppo_clip cispo gspo gmpo sapo dppo_tv m2po ratio_band dpo ipo sft distill",
     "gspo gmpo sapo dppo_tv m2po ratio_band dpo ipo distill"},
    {"loss.clip_low", Type::kNumber, "0", 0},
    {"loss.clip_high", Type::kNumber, "0", 0},
    {"loss.dual_clip", Type::kOptionalNumber, "null", 1},
    {"loss.dual_clip_value", Type::kEnum, "\"cap\"", -kInf, kInf, "cap drop"},
    {"loss.ratio_min", Type::kNumber, "0", 0},
    {"loss.ratio_max", Type::kOptionalNumber, "null", 0},
    {"loss.mask_low", Type::kOptionalNumber, "null", 0},
    {"loss.mask_high", Type::kOptionalNumber, "null", 0},
    {"loss.log_clip_low", Type::kNumber, "0", 0},
    {"loss.log_clip_high", Type::kNumber, "0", 0},
    {"loss.tau_pos", Type::kNumber, "0", 0},
    {"loss.tau_neg", Type::kNumber, "0", 0},
    {"loss.tv_low", Type::kNumber, "0", 0},
    {"loss.tv_high", Type::kNumber, "0", 0},
    {"loss.m2_max", Type::kNumber, "0", 0},
    {"loss.beta", Type::kNumber, "0", 0},
    {"loss.label_smoothing", Type::kNumber, "0", 0, 1},
    {"loss.length_average", Type::kBool, "true"},
    {"loss.drift", Type::kNumber, "0", 0},
    {"aggregation.mode", Type::kEnum, nullptr, -kInf, kInf,
     "token-mean prompt-mean seq-mean-token-mean seq-mean-token-sum seq-mean-token-sum-norm"},
    {"aggregation.length_norm", Type::kOptionalInt, nullptr, 1},
    {"aggregation.unit", Type::kEnum, "\"rollout\"", -kInf, kInf, "rollout segment"},
    {"kl.where", Type::kEnum, "\"none\"", -kInf, kInf, "none loss reward", "loss reward"},
    {"kl.estimator", Type::kEnum, "\"k3\"", -kInf, kInf, "k1 k2 k3 k1+ k3+ sg_prob"},
    {"kl.coef", Type::kNumber, "0"},
    {"kl.importance_weighted", Type::kBool, "false"},
    {"off_policy.mode", Type::kEnum, "\"bypass\"", -kInf, kInf, "bypass decoupled", "decoupled"},
    {"off_policy.weight", Type::kEnum, "\"none\"", -kInf, kInf, "none token sequence"},
    {"off_policy.weight_min", Type::kOptionalNumber, "null", 0},
    {"off_policy.weight_max", Type::kOptionalNumber, "2", 0},
    {"off_policy.outside", Type::kEnum, "\"truncate\"", -kInf, kInf, "truncate zero"},
    {"off_policy.normalize", Type::kBool, "false"},
    {"off_policy.reject", Type::kList, "[]"},
    {"distillation.kind", Type::kEnum, "\"none\"", -kInf, kInf, "none policy_gradient topk_forward_kl",
     "policy_gradient topk_forward_kl"},
    {"distillation.coef", Type::kNumber, "1"},
    {"distillation.student", Type::kEnum, "\"old\"", -kInf, kInf, "old new"},
    {"distillation.task_reward", Type::kBool, "false"},
};

struct Kind {
  const char* name;
  std::vector<std::pair<const char*, const char*>> parameters;  // name, JSON text of the default
  bool drift;
};

// All documented kinds, so that a parameter of another kind can be named; only the built ones get past the check of values.
const std::vector<Kind>& Kinds() {
  static const std::vector<Kind> kinds = {
      {"reinforce", {}, true},
      {"ppo_clip", {{"clip_low", "0.2"}, {"clip_high", "0.2"}, {"dual_clip", "null"}, {"dual_clip_value", "\"cap\""}}, true},
      {"cispo", {{"ratio_min", "0"}, {"ratio_max", "5"}, {"mask_low", "null"}, {"mask_high", "null"}}, true},
      {"gspo", {{"clip_low", "3e-4"}, {"clip_high", "4e-4"}}, false},
      {"gmpo", {{"log_clip_low", "0.4"}, {"log_clip_high", "0.4"}}, false},
      {"sapo", {{"tau_pos", "1"}, {"tau_neg", "1.05"}}, true},
      {"dppo_tv", {{"tv_low", "0.2"}, {"tv_high", "0.2"}, {"ratio_max", "20"}}, true},
      {"m2po", {{"m2_max", "0.04"}}, true},
      {"ratio_band", {{"ratio_min", "0.5"}, {"ratio_max", "2"}}, true},
      {"dpo", {{"beta", "0.1"}, {"label_smoothing", "0"}}, false},
      {"ipo", {{"beta", "0.1"}, {"length_average", "true"}}, false},
      {"sft", {}, false},
      {"distill", {}, false},
  };
  return kinds;
}

struct Recipe {
  const char* name;
  std::vector<std::pair<const char*, const char*>> keys;  // path, JSON text; empty = documented, not built yet
};

const std::vector<Recipe>& Recipes() {
  static const std::vector<Recipe> recipes = {
      {"grpo",
       {{"advantage.baseline", "\"group_mean\""},
        {"advantage.scale", "\"group_std\""},
        {"loss.kind", "\"ppo_clip\""},
        {"loss.clip_low", "0.2"},
        {"loss.clip_high", "0.2"},
        {"aggregation.mode", "\"seq-mean-token-mean\""}}},
      {"cispo",
       {{"advantage.baseline", "\"group_mean\""},
        {"advantage.scale", "\"group_std\""},
        {"loss.kind", "\"cispo\""},
        {"loss.ratio_min", "0"},
        {"loss.ratio_max", "5"},
        {"aggregation.mode", "\"prompt-mean\""},
        {"dynamic_sampling", "\"refill\""}}},
      {"dr_grpo", {}}, {"dapo", {}}, {"gspo", {}}, {"gmpo", {}}, {"rloo", {}}, {"reinforce", {}}, {"reinforce_pp", {}},
      {"reinforce_pp_baseline", {}}, {"ppo", {}}, {"dual_clip", {}}, {"sapo", {}}, {"dppo_tv", {}}, {"m2po", {}},
      {"minimax_01", {}}, {"kimi", {}}, {"opd", {}}, {"dpo", {}}, {"ipo", {}}, {"sft", {}},
  };
  return recipes;
}

std::vector<std::string> Words(const char* text) { return Split(text, ' '); }

bool Contains(const std::vector<std::string>& list, const std::string& word) {
  return std::find(list.begin(), list.end(), word) != list.end();
}

std::string Join(const std::vector<std::string>& list) { return temper::Join(list, ", "); }

// " Did you mean 'x'?" when something known is near.
std::string Hint(const std::string& word, const std::vector<std::string>& known) {
  const std::string nearest = Nearest(word, known);
  return nearest.empty() ? "" : fmt::format(" Did you mean '{}'?", nearest);
}

// A value of the tables above.
json::value Literal(const char* text) { return ParseJson(text).value(); }

const Key* FindKey(const std::string& path) {
  for (const Key& key : kKeys) {
    if (path == key.path) return &key;
  }
  return nullptr;
}

const Kind& FindKind(const std::string& name) {
  for (const Kind& kind : Kinds()) {
    if (name == kind.name) return kind;
  }
  TEMPER_CHECK(false) << "no loss kind " << name;
  std::abort();
}

bool IsBlock(const std::string& name) {
  return std::any_of(std::begin(kKeys), std::end(kKeys),
                     [&](const Key& k) { return std::string(k.path).rfind(name + ".", 0) == 0; });
}

// Names one level below `block` ("" = the top).
std::vector<std::string> NamesIn(const std::string& block) {
  std::vector<std::string> names;
  if (block.empty()) names.push_back("recipe");
  for (const Key& key : kKeys) {
    const std::string path = key.path;
    const size_t dot = path.find('.');
    std::string name;
    if (block.empty()) {
      name = path.substr(0, dot);
    } else if (dot != std::string::npos && path.substr(0, dot) == block) {
      name = path.substr(dot + 1);
    }
    if (!name.empty() && !Contains(names, name)) names.push_back(name);
  }
  return names;
}

std::string Show(const json::value& v) {
  std::string text = PrintJson(v);
  if (text.size() > 60) text = text.substr(0, 57) + "...";
  return text;
}

// Checks type and range; null on an enum that has "none" or "off" means that value.
Result<json::value> CheckValue(const Key& key, json::value v, const std::string& where) {
  auto wrong = [&](const std::string& expected) {
    return InvalidArgument(fmt::format("{}: {} is not {}", where, Show(v), expected));
  };
  const bool optional = key.type == Type::kOptionalNumber || key.type == Type::kOptionalInt;
  if (optional && v.is_null()) return v;
  switch (key.type) {
    case Type::kNumber:
    case Type::kOptionalNumber:
    case Type::kOptionalInt: {
      const bool integer = key.type == Type::kOptionalInt;
      if (!v.is_number() || (integer && v.is_double())) {
        return wrong(std::string(integer ? "an integer" : "a number") + (optional ? " or null" : ""));
      }
      const double number = v.to_number<double>();
      if (!std::isfinite(number)) return wrong("finite");
      if (number < key.min || number > key.max || (integer && number > 1e15)) {
        return wrong(key.max == kInf ? fmt::format("at least {:g}", key.min) : fmt::format("in {:g}..{:g}", key.min, key.max));
      }
      return v;
    }
    case Type::kBool:
      if (!v.is_bool()) return wrong("true or false");
      return v;
    case Type::kList:
      if (!v.is_array()) return wrong("a list");
      return v;
    case Type::kEnum: {
      const std::vector<std::string> values = Words(key.values);
      if (v.is_null() && (values[0] == "none" || values[0] == "off")) return json::value(values[0]);
      if (!v.is_string()) return wrong("one of " + Join(values));
      const std::string word(v.get_string());
      if (!Contains(values, word)) {
        return InvalidArgument(fmt::format("{}: '{}' is not one of {}.{}", where, word, Join(values), Hint(word, values)));
      }
      return v;
    }
  }
  return v;
}

// The merged settings: user over recipe over defaults.
class Settings {
 public:
  Settings(std::map<std::string, json::value> values, std::map<std::string, std::string> sources)
      : values_(std::move(values)), sources_(std::move(sources)) {}

  bool Has(const std::string& path) const { return values_.count(path) != 0; }
  const json::value& At(const std::string& path) const {
    auto it = values_.find(path);
    TEMPER_CHECK(it != values_.end()) << "setting " << path << " is read but was never filled";
    return it->second;
  }
  bool IsNull(const std::string& path) const { return !Has(path) || At(path).is_null(); }
  std::string Word(const std::string& path) const { return Has(path) ? std::string(At(path).get_string()) : ""; }
  double Number(const std::string& path) const { return At(path).to_number<double>(); }
  std::optional<double> OptionalNumber(const std::string& path) const {
    return IsNull(path) ? std::nullopt : std::optional<double>(Number(path));
  }
  std::optional<int64_t> OptionalInt(const std::string& path) const {
    return IsNull(path) ? std::nullopt : std::optional<int64_t>(At(path).to_number<int64_t>());
  }
  bool Bool(const std::string& path) const { return At(path).get_bool(); }
  bool Written(const std::string& path) const {
    auto it = sources_.find(path);
    return it != sources_.end() && it->second == "file";
  }

  // Why `path` is not read under the other settings and what would read it; empty = it is read.
  std::string WhyNotRead(const std::string& path) const {
    const size_t dot = path.find('.');
    const std::string block = path.substr(0, dot);
    const std::string name = dot == std::string::npos ? "" : path.substr(dot + 1);
    const std::string kind = Word("loss.kind");
    const std::string credit = Word("advantage.credit");
    const std::string scale = Word("advantage.scale");
    const std::string mode = Word("aggregation.mode");
    static const char* kRewardKinds = "read by loss kinds reinforce, ppo_clip, cispo, gspo, gmpo, sapo, dppo_tv, m2po, ratio_band";

    if (block == "loss" && name != "kind") {
      if (name == "drift") {
        if (FindKind(kind).drift) return "";
        return fmt::format("loss kind {} does not read it; read by loss kinds {}", kind, KindsReading(name));
      }
      for (const auto& [parameter, fallback] : FindKind(kind).parameters) {
        if (name != parameter) continue;
        if (name == "dual_clip_value" && IsNull("loss.dual_clip")) return "read only when loss.dual_clip is set";
        return "";
      }
      return fmt::format("loss kind {} does not read it; read by loss kinds {}", kind, KindsReading(name));
    }
    const bool reward_block = block == "reward" || block == "overlong" || block == "dynamic_sampling" || block == "advantage" ||
                              block == "off_policy" || block == "kl";
    if (reward_block && kind == "sft") return fmt::format("loss kind sft does not read it; {}", kRewardKinds);
    if (path == "reward.speed_baseline_s" && Number("reward.speed_coef") == 0) return "read only when reward.speed_coef is not 0";
    if (path == "overlong.max_tokens" && !Written("overlong.buffer_tokens") && IsNull("overlong.buffer_tokens")) {
      return "read only together with overlong.buffer_tokens";
    }
    if (path == "overlong.buffer_tokens" && !Written("overlong.max_tokens") && IsNull("overlong.max_tokens")) {
      return "read only together with overlong.max_tokens";
    }
    if (path == "overlong.factor" && (IsNull("overlong.max_tokens") || IsNull("overlong.buffer_tokens"))) {
      return "read only when overlong.max_tokens and overlong.buffer_tokens are set";
    }
    if (path == "advantage.gamma" && credit == "rollout") {
      return "advantage.credit rollout has one return for all tokens; read with credit turn, token, gae";
    }
    if (path == "advantage.lambda" && credit != "gae") return "read with advantage.credit gae";
    if (path == "advantage.balance" && (credit == "turn" || credit == "token")) {
      return fmt::format("advantage.credit {} gives one rollout several advantages; read with credit rollout", credit);
    }
    if ((path == "advantage.std" || path == "advantage.std_eps") && scale != "group_std" && scale != "batch_std") {
      return fmt::format("advantage.scale {} divides by no standard deviation; read with scale group_std, batch_std", scale);
    }
    if (path == "aggregation.length_norm" && mode != "seq-mean-token-sum-norm") {
      return fmt::format("aggregation.mode {} does not read it; read with mode seq-mean-token-sum-norm", mode);
    }
    if (path == "aggregation.unit" && mode.rfind("seq-mean", 0) != 0) {
      return fmt::format("aggregation.mode {} has nothing per sequence; read with the seq-mean modes", mode);
    }
    if (block == "kl" && name != "where") return "read only when kl.where is loss or reward";
    if (block == "off_policy" && name == "weight") {
      return "off_policy.mode bypass: the ratio already holds the mismatch (loss kind cispo bounds it); read with mode decoupled";
    }
    if (block == "off_policy" && name.rfind("reject", 0) != 0 && name != "mode") return "read only with off_policy.weight, mode decoupled";
    if (path == "off_policy.reject" && At(path).get_array().empty()) return "an empty list rejects nothing; leave it out";
    if (block == "distillation" && name != "kind") return "read only when distillation.kind is policy_gradient or topk_forward_kl";
    return "";
  }

 private:
  static std::string KindsReading(const std::string& parameter) {
    std::vector<std::string> names;
    for (const Kind& kind : Kinds()) {
      const bool reads = parameter == "drift" ? kind.drift
                                              : std::any_of(kind.parameters.begin(), kind.parameters.end(),
                                                            [&](const auto& p) { return parameter == p.first; });
      if (reads) names.push_back(kind.name);
    }
    return Join(names);
  }

  std::map<std::string, json::value> values_;
  std::map<std::string, std::string> sources_;
};

// The user's block as path -> value. `dropped` lists the blocks given as null: the recipe's keys for them are off.
Status Flatten(const json::value& block, const std::string& root, std::map<std::string, json::value>& out,
               std::vector<std::string>& dropped) {
  if (!block.is_object()) return InvalidArgument(fmt::format("{}: expected a mapping, got {}", root, Show(block)));
  auto unknown = [&](const std::string& parent, const std::string& name) {
    const std::string prefix = parent.empty() ? root : root + "." + parent;
    const std::vector<std::string> names = NamesIn(parent);
    return InvalidArgument(fmt::format("{}.{}: unknown key.{} Known here: {}", prefix, name, Hint(name, names), Join(names)));
  };
  for (const auto& [name_view, value] : block.get_object()) {
    const std::string name(name_view);
    if (name == "recipe" || FindKey(name)) {
      out[name] = value;
      continue;
    }
    if (!IsBlock(name)) return unknown("", name);
    if (value.is_null()) {
      dropped.push_back(name);
      continue;
    }
    if (!value.is_object()) return InvalidArgument(fmt::format("{}.{}: expected a mapping, got {}", root, name, Show(value)));
    for (const auto& [leaf_view, leaf_value] : value.get_object()) {
      const std::string path = name + "." + std::string(leaf_view);
      if (!FindKey(path)) return unknown(name, std::string(leaf_view));
      out[path] = leaf_value;
    }
  }
  return Status::Ok();
}

Result<const Recipe*> FindRecipe(const json::value& value, const std::string& root) {
  std::vector<std::string> built, all;
  for (const Recipe& r : Recipes()) {
    all.push_back(r.name);
    if (!r.keys.empty()) built.push_back(r.name);
  }
  if (!value.is_string()) return InvalidArgument(fmt::format("{}.recipe: {} is not the name of a recipe", root, Show(value)));
  const std::string name(value.get_string());
  for (const Recipe& r : Recipes()) {
    if (name != r.name) continue;
    if (r.keys.empty()) {
      return Unimplemented(fmt::format("{}.recipe: '{}' is not built yet; built: {}", root, name, Join(built)));
    }
    return &r;
  }
  return InvalidArgument(
      fmt::format("{}.recipe: no recipe '{}'.{} Built: {}", root, name, Hint(name, all), Join(built)));
}

// Rules between keys that are all read.
Status CheckTogether(const Settings& s, const std::string& root) {
  const std::string kind = s.Word("loss.kind");
  if (kind == "ppo_clip" && !s.IsNull("loss.dual_clip") && s.Number("loss.dual_clip") <= 1 + s.Number("loss.clip_high")) {
    return InvalidArgument(fmt::format("{}.loss.dual_clip: {:g} must be above 1 + clip_high = {:g}", root,
                                       s.Number("loss.dual_clip"), 1 + s.Number("loss.clip_high")));
  }
  if (kind == "cispo") {
    if (!s.IsNull("loss.ratio_max") && s.Number("loss.ratio_max") < s.Number("loss.ratio_min")) {
      return InvalidArgument(fmt::format("{}.loss.ratio_max: {:g} is below ratio_min {:g} (they are the bounds themselves)", root,
                                         s.Number("loss.ratio_max"), s.Number("loss.ratio_min")));
    }
    if (s.IsNull("loss.mask_low") != s.IsNull("loss.mask_high")) {
      const char* given = s.IsNull("loss.mask_low") ? "mask_high" : "mask_low";
      const char* absent = s.IsNull("loss.mask_low") ? "mask_low" : "mask_high";
      return InvalidArgument(fmt::format("{}.loss.{}: has no effect without {}; give both or none", root, given, absent));
    }
  }
  if (kind != "sft") {
    if (s.IsNull("overlong.max_tokens") != s.IsNull("overlong.buffer_tokens")) {
      const char* given = s.IsNull("overlong.max_tokens") ? "buffer_tokens" : "max_tokens";
      return InvalidArgument(fmt::format("{}.overlong.{}: has no effect while the other of max_tokens, buffer_tokens is null", root,
                                         given));
    }
    if (!s.IsNull("overlong.max_tokens") && s.Number("overlong.buffer_tokens") > s.Number("overlong.max_tokens")) {
      return InvalidArgument(fmt::format("{}.overlong.buffer_tokens: {} is above max_tokens {}", root,
                                         s.Number("overlong.buffer_tokens"), s.Number("overlong.max_tokens")));
    }
  }
  if (s.Word("aggregation.mode") == "seq-mean-token-sum-norm" && s.IsNull("aggregation.length_norm")) {
    return InvalidArgument(
        fmt::format("{}.aggregation.length_norm: required by mode seq-mean-token-sum-norm: the constant L to divide by", root));
  }
  return Status::Ok();
}

Algorithm Fill(const Settings& s) {
  Algorithm a;
  auto index = [&](const std::string& path) {
    const std::vector<std::string> values = Words(FindKey(path)->values);
    return static_cast<int>(std::find(values.begin(), values.end(), s.Word(path)) - values.begin());
  };
  const std::string kind = s.Word("loss.kind");
  if (kind != "sft") {
    a.reward.process_coef = s.Number("reward.process_coef");
    a.reward.speed_coef = s.Number("reward.speed_coef");
    a.reward.speed_baseline_s = s.OptionalNumber("reward.speed_baseline_s");
    a.overlong.max_tokens = s.OptionalInt("overlong.max_tokens");
    a.overlong.buffer_tokens = s.OptionalInt("overlong.buffer_tokens");
    a.overlong.factor = s.Number("overlong.factor");
    a.overlong.mask_truncated = s.Bool("overlong.mask_truncated");
    a.dynamic_sampling = static_cast<DynamicSampling>(index("dynamic_sampling"));
    a.advantage.credit = static_cast<Credit>(index("advantage.credit"));
    a.advantage.gamma = s.Number("advantage.gamma");
    a.advantage.baseline = static_cast<Baseline>(index("advantage.baseline"));
    a.advantage.scale = static_cast<Scale>(index("advantage.scale"));
    a.advantage.population_std = s.Word("advantage.std") == "population";
    a.advantage.std_eps = s.Number("advantage.std_eps");
    a.advantage.whiten = s.Bool("advantage.whiten");
    a.advantage.balance = s.Bool("advantage.balance");
  }
  if (kind == "reinforce") {
    a.loss.kind = LossKind::kReinforce;
  } else if (kind == "ppo_clip") {
    a.loss.kind = LossKind::kPpoClip;
    a.loss.clip_low = s.Number("loss.clip_low");
    a.loss.clip_high = s.Number("loss.clip_high");
    a.loss.dual_clip = s.OptionalNumber("loss.dual_clip");
    a.loss.dual_clip_drop = s.Word("loss.dual_clip_value") == "drop";
  } else if (kind == "cispo") {
    a.loss.kind = LossKind::kCispo;
    a.loss.ratio_min = s.Number("loss.ratio_min");
    a.loss.ratio_max = s.OptionalNumber("loss.ratio_max");
    a.loss.mask_low = s.OptionalNumber("loss.mask_low");
    a.loss.mask_high = s.OptionalNumber("loss.mask_high");
  } else {
    TEMPER_CHECK(kind == "sft") << "loss kind " << kind << " passed the check of built kinds";
    a.loss.kind = LossKind::kSft;
  }
  a.loss.drift = s.Number("loss.drift");
  a.aggregation.mode = static_cast<AggregationMode>(index("aggregation.mode"));
  a.aggregation.length_norm = s.OptionalInt("aggregation.length_norm").value_or(0);
  a.aggregation.per_segment = s.Word("aggregation.unit") == "segment";
  return a;
}

}  // namespace

Result<ParsedAlgorithm> ParseAlgorithm(const json::value& block, const std::string& root) {
  std::map<std::string, json::value> user;
  std::vector<std::string> dropped;
  RETURN_IF_ERROR(Flatten(block, root, user, dropped));

  const Recipe* recipe = nullptr;
  if (auto it = user.find("recipe"); it != user.end()) {
    ASSIGN_OR_RETURN(recipe, FindRecipe(it->second, root));
    user.erase(it);
  }
  for (auto& [path, value] : user) {
    const Key& key = *FindKey(path);
    ASSIGN_OR_RETURN(value, CheckValue(key, value, root + "." + path));
    if (key.type == Type::kEnum && Contains(Words(key.missing), std::string(value.get_string()))) {
      std::vector<std::string> built;
      for (const std::string& word : Words(key.values)) {
        if (!Contains(Words(key.missing), word)) built.push_back(word);
      }
      return Unimplemented(fmt::format("{}.{}: '{}' is not built yet; built: {}", root, path,
                                       std::string(value.get_string()), Join(built)));
    }
  }
  if (auto it = user.find("off_policy.reject"); it != user.end() && !it->second.get_array().empty()) {
    return Unimplemented(fmt::format("{}.off_policy.reject: rejection rules are not built yet; leave it out", root));
  }

  // Recipe, then the user's keys over it; another loss kind drops the recipe's loss keys, null drops those of its block.
  std::map<std::string, json::value> values;
  std::map<std::string, std::string> sources;
  if (recipe) {
    for (const auto& [path, text] : recipe->keys) values[path] = Literal(text), sources[path] = "recipe";
    auto drop_block = [&](const std::string& prefix) {
      for (auto it = values.begin(); it != values.end();) {
        if (it->first.rfind(prefix, 0) == 0) sources.erase(it->first), it = values.erase(it);
        else ++it;
      }
    };
    if (auto it = user.find("loss.kind"); it != user.end() && it->second != values["loss.kind"]) drop_block("loss.");
    for (const std::string& name : dropped) drop_block(name + ".");
  }
  for (const auto& [path, value] : user) values[path] = value, sources[path] = "file";

  if (!values.count("loss.kind")) {
    return InvalidArgument(fmt::format("{}.loss.kind: required without a recipe; one of reinforce, ppo_clip, cispo, sft", root));
  }
  const Kind& kind = FindKind(std::string(values["loss.kind"].get_string()));
  for (const Key& key : kKeys) {
    const std::string path = key.path;
    if (values.count(path)) continue;
    const char* fallback = key.fallback;
    if (path.rfind("loss.", 0) == 0 && path != "loss.drift") {
      fallback = nullptr;
      for (const auto& [name, text] : kind.parameters) {
        if (path == std::string("loss.") + name) fallback = text;
      }
    }
    if (fallback) values[path] = Literal(fallback), sources[path] = "default";
  }
  const Settings settings(values, sources);

  for (const auto& [path, source] : sources) {
    if (source != "file") continue;
    const std::string why = settings.WhyNotRead(path);
    if (!why.empty()) return InvalidArgument(fmt::format("{}.{}: this setting has no effect: {}", root, path, why));
  }
  for (const char* path : {"advantage.baseline", "aggregation.mode"}) {
    if (settings.Has(path) || !settings.WhyNotRead(path).empty()) continue;
    return InvalidArgument(
        fmt::format("{}.{}: required{}; one of {}", root, path, recipe ? "" : " without a recipe", Join(Words(FindKey(path)->values))));
  }
  RETURN_IF_ERROR(CheckTogether(settings, root));

  ParsedAlgorithm parsed;
  parsed.algorithm = Fill(settings);
  std::string& out = parsed.expanded;
  out = "{";
  if (recipe) out += fmt::format("\"recipe\":\"{}\"", recipe->name);
  std::string open;
  for (const Key& key : kKeys) {
    const std::string path = key.path;
    if (!settings.Has(path) || !settings.WhyNotRead(path).empty()) continue;
    parsed.sources[path] = sources[path];
    const size_t dot = path.find('.');
    const std::string parent = dot == std::string::npos ? "" : path.substr(0, dot);
    if (!open.empty() && open != parent) out += "}", open.clear();
    if (out.back() != '{') out += ",";
    if (!parent.empty() && open != parent) out += fmt::format("\"{}\":{{", parent), open = parent;
    out += fmt::format("\"{}\":{}", parent.empty() ? path : path.substr(dot + 1), PrintJson(values[path]));
  }
  if (!open.empty()) out += "}";
  out += "}";
  return parsed;
}

Status CheckAlgorithmForRun(const Algorithm& algorithm, int64_t staleness, const std::string& root) {
  if (algorithm.loss.kind == LossKind::kReinforce && staleness > 0) {
    return InvalidArgument(fmt::format(
        "{}.loss.kind: reinforce has no importance ratio, and staleness {} makes it differ from 1; use cispo or ppo_clip, or staleness 0",
        root, staleness));
  }
  return Status::Ok();
}

}  // namespace temper::trainer
