#include "trainer/algorithm.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <type_traits>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "common/json.h"
#include "common/strings.h"

namespace temper::trainer {
namespace {

constexpr double kInf = HUGE_VAL;
using Type = SettingType;

struct Key {
  std::string path;
  Type type = Type::kNumber;
  const char* fallback = nullptr;  // JSON text of the default; nullptr = none, to be given where it is read
  double min = -kInf, max = kInf;
  const char* values = "";         // kEnum: all values, space separated
};

// All keys but the parameters of losses, in the order of the expanded block.
const std::vector<Key>& CommonKeys() {
  static const std::vector<Key> keys = {
      {"reward.process_coef", Type::kNumber, "1"},
      {"reward.speed_coef", Type::kNumber, "0"},
      {"reward.speed_baseline_s", Type::kOptionalNumber, "null", 1e-9},
      {"overlong.max_tokens", Type::kOptionalInt, "null", 1},
      {"overlong.buffer_tokens", Type::kOptionalInt, "null", 1},
      {"overlong.factor", Type::kNumber, "1", 1e-9},
      {"overlong.mask_truncated", Type::kBool, "false"},
      {"dynamic_sampling", Type::kEnum, "\"off\"", -kInf, kInf, "off drop refill"},
      {"advantage.credit", Type::kEnum, "\"rollout\"", -kInf, kInf, "rollout turn token gae"},
      {"advantage.gamma", Type::kNumber, "1", 0, 1},
      {"advantage.lambda", Type::kNumber, "1", 0, 1},
      {"advantage.baseline", Type::kEnum, nullptr, -kInf, kInf, "none group_mean leave_one_out length_weighted batch_mean"},
      {"advantage.scale", Type::kEnum, "\"none\"", -kInf, kInf, "none group_std batch_std group_mean"},
      {"advantage.std", Type::kEnum, "\"sample\"", -kInf, kInf, "sample population"},
      {"advantage.std_eps", Type::kNumber, "1e-6", 0},
      {"advantage.whiten", Type::kBool, "false"},
      {"advantage.balance", Type::kBool, "false"},
      {"loss.kind", Type::kEnum, nullptr},
      {"loss.drift", Type::kNumber, "0", 0},
      {"aggregation.mode", Type::kEnum, nullptr, -kInf, kInf,
       "token-mean prompt-mean seq-mean-token-mean seq-mean-token-sum seq-mean-token-sum-norm"},
      {"aggregation.length_norm", Type::kOptionalInt, nullptr, 1},
      {"aggregation.unit", Type::kEnum, "\"rollout\"", -kInf, kInf, "rollout segment"},
      {"kl.where", Type::kEnum, "\"none\"", -kInf, kInf, "none loss reward"},
      {"kl.estimator", Type::kEnum, nullptr, -kInf, kInf, "k1 k2 k3 k1+ k3+ sg_prob"},
      {"kl.coef", Type::kNumber, nullptr},
      {"kl.importance_weighted", Type::kBool, "false"},
      {"off_policy.mode", Type::kEnum, "\"bypass\"", -kInf, kInf, "bypass decoupled"},
      {"off_policy.weight", Type::kEnum, "\"none\"", -kInf, kInf, "none token sequence"},
      {"off_policy.weight_min", Type::kOptionalNumber, "null", 0},
      {"off_policy.weight_max", Type::kOptionalNumber, "2", 0},
      {"off_policy.outside", Type::kEnum, "\"truncate\"", -kInf, kInf, "truncate zero"},
      {"off_policy.normalize", Type::kBool, "false"},
      {"off_policy.reject", Type::kList, "[]"},
      {"distillation.kind", Type::kEnum, "\"none\"", -kInf, kInf, "none policy_gradient topk_forward_kl"},
      {"distillation.coef", Type::kNumber, "1"},
      {"distillation.student", Type::kEnum, "\"old\"", -kInf, kInf, "old new"},
      {"distillation.task_reward", Type::kBool, "false"},
  };
  return keys;
}

// The keys of a block whose loss is `kind`, in the order of the expanded block.
std::vector<Key> KeysOf(const LossKind& kind) {
  std::vector<Key> keys;
  for (const Key& key : CommonKeys()) {
    keys.push_back(key);
    if (key.path != "loss.kind") continue;
    for (const LossParameter& p : kind.parameters) {
      keys.push_back({std::string("loss.") + p.name, p.type, p.fallback, p.min, p.max, p.values});
    }
  }
  return keys;
}

struct Recipe {
  const char* name;
  const char* source;
  const char* block;  // JSON
  std::vector<const char*> required = {};  // keys that the user must give, or the block's null
};

const std::vector<Recipe>& Recipes() {
  static const std::vector<Recipe> recipes = {
      {"grpo", "arXiv 2402.03300, without its KL (as TRL and verl by default)",
       R"({"advantage":{"baseline":"group_mean","scale":"group_std"},"loss":{"kind":"ppo_clip","clip_low":0.2,"clip_high":0.2},
           "aggregation":{"mode":"seq-mean-token-mean"}})"},
      {"dr_grpo", "arXiv 2503.20783",
       R"({"advantage":{"baseline":"group_mean","scale":"none"},"loss":{"kind":"ppo_clip","clip_low":0.2,"clip_high":0.2},
           "aggregation":{"mode":"seq-mean-token-sum-norm"}})",
       {"aggregation.length_norm"}},
      {"dapo", "arXiv 2503.14476",
       R"({"advantage":{"baseline":"group_mean","scale":"group_std"},"loss":{"kind":"ppo_clip","clip_low":0.2,"clip_high":0.28},
           "aggregation":{"mode":"token-mean"},"dynamic_sampling":"refill"})",
       {"overlong.max_tokens", "overlong.buffer_tokens"}},
      {"gspo", "arXiv 2507.18071 v2, section 5.1",
       R"({"advantage":{"baseline":"group_mean","scale":"group_std"},"loss":{"kind":"gspo","clip_low":3e-4,"clip_high":4e-4},
           "aggregation":{"mode":"seq-mean-token-mean"}})"},
      {"gmpo", "arXiv 2507.20673",
       R"({"advantage":{"baseline":"group_mean","scale":"group_std"},"loss":{"kind":"gmpo","log_clip_low":0.4,"log_clip_high":0.4},
           "aggregation":{"mode":"seq-mean-token-mean"}})"},
      {"cispo", "MiniMax-M1, arXiv 2506.13585 eq 4 and 5; its upper bound is not published, 5 is ScaleRL's and AReaL's",
       R"({"advantage":{"baseline":"group_mean","scale":"group_std"},"loss":{"kind":"cispo","ratio_min":0,"ratio_max":5},
           "aggregation":{"mode":"prompt-mean"},"dynamic_sampling":"refill"})"},
      {"rloo", "estimator of arXiv 2402.14740, loss of verl",
       R"({"advantage":{"baseline":"leave_one_out","scale":"none"},"loss":{"kind":"ppo_clip","clip_low":0.2,"clip_high":0.2},
           "aggregation":{"mode":"token-mean"}})"},
      {"reinforce", "Williams 1992",
       R"({"advantage":{"baseline":"none","scale":"none"},"loss":{"kind":"reinforce"},"aggregation":{"mode":"seq-mean-token-sum"}})"},
      {"reinforce_pp", "arXiv 2501.03262, verl",
       R"({"advantage":{"credit":"token","baseline":"none","scale":"none","whiten":true},
           "loss":{"kind":"ppo_clip","clip_low":0.2,"clip_high":0.2},"aggregation":{"mode":"token-mean"},
           "kl":{"where":"reward","estimator":"k1","coef":0.001}})"},
      {"reinforce_pp_baseline", "arXiv 2501.03262, verl",
       R"({"advantage":{"baseline":"group_mean","scale":"none","whiten":true},"loss":{"kind":"ppo_clip","clip_low":0.2,"clip_high":0.2},
           "aggregation":{"mode":"token-mean"}})"},
      {"ppo", "arXiv 1707.06347, verl's defaults; needs the values of a critic",
       R"({"advantage":{"credit":"gae","gamma":1,"lambda":1,"whiten":true},"loss":{"kind":"ppo_clip","clip_low":0.2,"clip_high":0.2},
           "aggregation":{"mode":"token-mean"}})"},
      {"dual_clip", "arXiv 1912.09729; verl's GRPO as shipped",
       R"({"advantage":{"baseline":"group_mean","scale":"group_std"},
           "loss":{"kind":"ppo_clip","clip_low":0.2,"clip_high":0.2,"dual_clip":3},"aggregation":{"mode":"token-mean"}})"},
      {"sapo", "arXiv 2511.20347",
       R"({"advantage":{"baseline":"group_mean","scale":"group_std"},"loss":{"kind":"sapo","tau_pos":1,"tau_neg":1.05},
           "aggregation":{"mode":"seq-mean-token-mean"}})"},
      {"dppo_tv", "arXiv 2602.04879, verl",
       R"({"advantage":{"baseline":"group_mean","scale":"none"},"loss":{"kind":"dppo_tv","tv_low":0.2,"tv_high":0.2,"ratio_max":20},
           "aggregation":{"mode":"token-mean"}})"},
      {"m2po", "arXiv 2510.01161",
       R"({"advantage":{"baseline":"group_mean","scale":"group_std"},"loss":{"kind":"m2po","m2_max":0.04},"aggregation":{"mode":"token-mean"}})"},
      {"minimax_01", "MiniMax-01, arXiv 2501.08313 section 5.4.2; 3, 0.01 and balance are ours, they are not published",
       R"({"advantage":{"baseline":"group_mean","scale":"group_std","balance":true},
           "loss":{"kind":"ppo_clip","clip_low":0.2,"clip_high":0.2,"dual_clip":3,"dual_clip_value":"drop"},
           "aggregation":{"mode":"seq-mean-token-mean"},"kl":{"where":"loss","estimator":"sg_prob","coef":0.01}})"},
      {"kimi", "Kimi K2.5 report; numbers ours, drift as in prime-rl",
       R"({"advantage":{"baseline":"group_mean","scale":"none"},"loss":{"kind":"ratio_band","ratio_min":0.5,"ratio_max":2,"drift":0.001},
           "aggregation":{"mode":"token-mean"}})"},
      {"opd", "Tinker's on-policy distillation",
       R"({"distillation":{"kind":"policy_gradient","coef":1,"student":"old"},"loss":{"kind":"cispo","ratio_min":0,"ratio_max":null},
           "aggregation":{"mode":"token-mean"}})"},
      {"dpo", "arXiv 2305.18290", R"({"loss":{"kind":"dpo","beta":0.1}})"},
      {"ipo", "arXiv 2310.12036", R"({"loss":{"kind":"ipo","beta":0.1,"length_average":true}})"},
      {"sft", "cross-entropy of what was sampled", R"({"loss":{"kind":"sft"},"aggregation":{"mode":"token-mean"}})"},
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

// Names one level below `block` ("" = the top), with the parameters of all losses.
std::vector<std::string> NamesIn(const std::string& block) {
  std::vector<std::string> names;
  auto add = [&](const std::string& name) {
    if (!Contains(names, name)) names.push_back(name);
  };
  if (block.empty()) add("recipe");
  for (const Key& key : CommonKeys()) {
    const size_t dot = key.path.find('.');
    if (block.empty()) add(key.path.substr(0, dot));
    if (!block.empty() && dot != std::string::npos && key.path.substr(0, dot) == block) add(key.path.substr(dot + 1));
    if (block != "loss" || key.path != "loss.kind") continue;
    for (const LossKind& kind : LossKinds()) {
      for (const LossParameter& p : kind.parameters) add(p.name);
    }
  }
  return names;
}

std::vector<std::string> KindNames(const std::function<bool(const LossKind&)>& wanted) {
  std::vector<std::string> names;
  for (const LossKind& kind : LossKinds()) {
    if (wanted(kind)) names.push_back(kind.name);
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
  // `user`: what was written in the block itself.
  Settings(const LossKind& kind, std::map<std::string, json::value> values, const std::map<std::string, json::value>& user)
      : kind_(kind), values_(std::move(values)), user_(user) {}

  const LossKind& kind() const { return kind_; }
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

  // Why `path` is not read under the other settings and what would read it; empty = it is read.
  std::string WhyNotRead(const std::string& path) const {
    const size_t dot = path.find('.');
    const std::string block = path.substr(0, dot);
    const std::string name = dot == std::string::npos ? "" : path.substr(dot + 1);
    if (block == "loss") return name == "kind" ? "" : LossUnread(name);
    if (block == "reward" || block == "overlong" || block == "dynamic_sampling") {
      const std::string why = RewardUnread();
      return why.empty() && block != "dynamic_sampling" ? ShapingUnread(path) : why;
    }
    if (block == "advantage") {
      const std::string why = RewardUnread();
      return why.empty() ? AdvantageUnread(name) : why;
    }
    if (block == "aggregation") return AggregationUnread(name);
    if (block == "kl") return KlUnread(name);
    if (block == "off_policy") return OffPolicyUnread(name);
    return DistillationUnread(name);
  }

 private:
  std::string KindUnread(const std::function<bool(const LossKind&)>& reads) const {
    return fmt::format("loss kind {} does not read it; read by loss kinds {}", kind_.name, Join(KindNames(reads)));
  }
  std::string PolicyUnread() const {
    return kind_.reads_advantages ? "" : KindUnread([](const LossKind& k) { return k.reads_advantages; });
  }

  std::string LossUnread(const std::string& name) const {
    if (name == "drift") return kind_.takes_drift ? "" : KindUnread([](const LossKind& k) { return k.takes_drift; });
    auto has = [&](const LossKind& k) {
      return std::any_of(k.parameters.begin(), k.parameters.end(), [&](const LossParameter& p) { return name == p.name; });
    };
    for (const LossParameter& p : kind_.parameters) {
      if (name != p.name) continue;
      return *p.needs && IsNull(std::string("loss.") + p.needs) ? fmt::format("read only when loss.{} is set", p.needs) : "";
    }
    return KindUnread(has);
  }

  std::string RewardUnread() const {
    if (!kind_.reads_advantages) return PolicyUnread();
    if (Word("distillation.kind") == "none" || Bool("distillation.task_reward")) return "";
    return "distillation alone gives the advantages; read with distillation.task_reward: true";
  }

  std::string ShapingUnread(const std::string& path) const {
    if (path == "reward.speed_baseline_s" && Number("reward.speed_coef") == 0) return "read only when reward.speed_coef is not 0";
    for (const auto& [one, other] : {std::pair{"overlong.max_tokens", "overlong.buffer_tokens"}, {"overlong.buffer_tokens", "overlong.max_tokens"}}) {
      // Both null turn the rule off, and may be said.
      if (path == one && IsNull(other) && !(IsNull(one) && user_.count(other))) return fmt::format("read only together with {}", other);
    }
    if (path == "overlong.factor" && (IsNull("overlong.max_tokens") || IsNull("overlong.buffer_tokens"))) {
      return "read only when overlong.max_tokens and overlong.buffer_tokens are set";
    }
    return "";
  }

  std::string AdvantageUnread(const std::string& name) const {
    const std::string credit = Word("advantage.credit");
    const std::string scale = credit == "gae" ? "none" : Word("advantage.scale");
    if (name == "gamma" && credit == "rollout") {
      return "advantage.credit rollout has one return for all tokens; read with credit turn, token, gae";
    }
    if (name == "lambda" && credit != "gae") return "read with advantage.credit gae";
    if ((name == "baseline" || name == "scale" || name == "balance") && credit == "gae") {
      return "advantage.credit gae takes the critic's values instead; read with credit rollout" +
             std::string(name == "balance" ? "" : ", turn, token");
    }
    if (name == "balance" && credit != "rollout") {
      return fmt::format("advantage.credit {} gives one rollout several advantages; read with credit rollout", credit);
    }
    if ((name == "std" || name == "std_eps") && scale != "group_std" && scale != "batch_std") {
      return fmt::format("advantage.scale {} divides by no standard deviation; read with scale group_std, batch_std", scale);
    }
    return "";
  }

  std::string AggregationUnread(const std::string& name) const {
    const std::string mode = Word("aggregation.mode");
    if (kind_.pairs) {
      return fmt::format("loss kind {} is a mean over pairs; read by loss kinds {}", kind_.name,
                         Join(KindNames([](const LossKind& k) { return !k.pairs; })));
    }
    if (name == "length_norm" && mode != "seq-mean-token-sum-norm") {
      return fmt::format("aggregation.mode {} does not read it; read with mode seq-mean-token-sum-norm", mode);
    }
    if (name == "unit" && mode.rfind("seq-mean", 0) != 0 && Word("off_policy.weight") != "sequence" && !RejectsSequences()) {
      return fmt::format("aggregation.mode {} has nothing per sequence; read with the seq-mean modes, off_policy.weight sequence, and "
                         "rejection at a sequence level", mode);
    }
    return "";
  }

  bool RejectsSequences() const {
    const json::array& rules = At("off_policy.reject").get_array();
    return std::any_of(rules.begin(), rules.end(), [](const json::value& rule) {
      const json::value* level = rule.is_object() ? rule.get_object().if_contains("level") : nullptr;
      return level && level->is_string() && level->get_string() != "token";
    });
  }

  std::string KlUnread(const std::string& name) const {
    if (!kind_.reads_advantages && !kind_.only_distills) {
      return KindUnread([](const LossKind& k) { return k.reads_advantages || k.only_distills; });
    }
    if (name == "where") return "";
    if (Word("kl.where") == "none") return "read only when kl.where is loss or reward";
    if (name == "importance_weighted" && Word("kl.where") == "reward") return "a KL in the reward is not weighted; read with kl.where loss";
    return "";
  }

  std::string OffPolicyUnread(const std::string& name) const {
    if (!kind_.reads_advantages) return PolicyUnread();
    const bool decoupled = Word("off_policy.mode") == "decoupled";
    if (name == "mode") return "";
    if (name == "reject") return At("off_policy.reject").get_array().empty() ? "an empty list rejects nothing; leave it out" : "";
    if (name == "weight") {
      return decoupled ? ""
                       : "off_policy.mode bypass: the ratio already holds the mismatch (loss kind cispo bounds it); read with mode decoupled";
    }
    if (!decoupled || Word("off_policy.weight") == "none") return "read only with off_policy.weight token or sequence, mode decoupled";
    if (name == "outside" && IsNull("off_policy.weight_min") && IsNull("off_policy.weight_max")) {
      return "nothing is outside without off_policy.weight_min or weight_max";
    }
    return "";
  }

  std::string DistillationUnread(const std::string& name) const {
    if (!kind_.reads_advantages && !kind_.only_distills) {
      return KindUnread([](const LossKind& k) { return k.reads_advantages || k.only_distills; });
    }
    if (name == "kind") return "";
    const std::string kind = Word("distillation.kind");
    if (kind == "none") return "read only when distillation.kind is policy_gradient or topk_forward_kl";
    if (name == "student" && kind == "topk_forward_kl") return "topk_forward_kl compares distributions; read with policy_gradient";
    if (name == "task_reward" && kind_.only_distills) return "loss kind distill has no policy term; read by the policy losses";
    return "";
  }

  const LossKind& kind_;
  const std::map<std::string, json::value> values_;
  const std::map<std::string, json::value>& user_;
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
    if (name == "recipe" || name == "dynamic_sampling") {
      out[name] = value;
      continue;
    }
    if (!Contains(NamesIn(""), name)) return unknown("", name);
    if (value.is_null()) {
      dropped.push_back(name);
      continue;
    }
    if (!value.is_object()) return InvalidArgument(fmt::format("{}.{}: expected a mapping, got {}", root, name, Show(value)));
    for (const auto& [leaf_view, leaf_value] : value.get_object()) {
      const std::string path = name + "." + std::string(leaf_view);
      if (!Contains(NamesIn(name), std::string(leaf_view))) return unknown(name, std::string(leaf_view));
      out[path] = leaf_value;
    }
  }
  return Status::Ok();
}

Result<const Recipe*> FindRecipe(const json::value& value, const std::string& root) {
  if (!value.is_string()) return InvalidArgument(fmt::format("{}.recipe: {} is not the name of a recipe", root, Show(value)));
  const std::string name(value.get_string());
  std::vector<std::string> all;
  for (const Recipe& r : Recipes()) {
    if (name == r.name) return &r;
    all.push_back(r.name);
  }
  return InvalidArgument(fmt::format("{}.recipe: no recipe '{}'.{} There are: {}", root, name, Hint(name, all), Join(all)));
}

template <class Enum>
Enum ValueOf(const char* words, const std::string& word) {
  const std::vector<std::string> all = Words(words);
  return static_cast<Enum>(std::find(all.begin(), all.end(), word) - all.begin());
}

Result<Algorithm::Reject> ParseReject(const json::value& value, const std::string& where) {
  if (!value.is_object()) return InvalidArgument(fmt::format("{}: expected a mapping, got {}", where, Show(value)));
  static const std::vector<Key> keys = {{"measure", Type::kEnum, nullptr, -kInf, kInf, "ratio k2 k3"},
                                        {"level", Type::kEnum, nullptr, -kInf, kInf, "token sequence_sum sequence_mean sequence_any"},
                                        {"min", Type::kOptionalNumber, "null", 0},
                                        {"max", Type::kOptionalNumber, "null", 0},
                                        {"only_negative", Type::kBool, "false"}};
  const json::object& object = value.get_object();
  std::vector<std::string> names;
  for (const Key& key : keys) names.push_back(key.path);
  for (const auto& [name, field] : object) {
    if (Contains(names, std::string(name))) continue;
    return InvalidArgument(fmt::format("{}.{}: unknown key.{} Known here: {}", where, std::string(name), Hint(std::string(name), names), Join(names)));
  }
  std::map<std::string, json::value> read;
  for (const Key& key : keys) {
    const json::value* field = object.if_contains(key.path);
    if (!field && !key.fallback) {
      return InvalidArgument(fmt::format("{}.{}: required; one of {}", where, key.path, Join(Words(key.values))));
    }
    ASSIGN_OR_RETURN(read[key.path], CheckValue(key, field ? *field : Literal(key.fallback), where + "." + key.path));
  }
  Algorithm::Reject rule;
  rule.measure = ValueOf<Measure>(keys[0].values, std::string(read["measure"].get_string()));
  rule.level = ValueOf<RejectLevel>(keys[1].values, std::string(read["level"].get_string()));
  if (!read["min"].is_null()) rule.min = read["min"].to_number<double>();
  if (!read["max"].is_null()) rule.max = read["max"].to_number<double>();
  rule.only_negative = read["only_negative"].get_bool();
  if (rule.measure != Measure::kRatio && rule.min) {
    return InvalidArgument(fmt::format("{}.min: this setting has no effect: a divergence has no lower bound; read with measure ratio", where));
  }
  if (rule.min == 0) {
    return InvalidArgument(fmt::format("{}.min: 0 has no effect: every ratio is above it; leave min out", where));
  }
  if (rule.max == 0 && rule.measure == Measure::kRatio) {
    return InvalidArgument(fmt::format("{}.max: 0 would drop everything: every ratio is above it", where));
  }
  if (!rule.min && !rule.max) return InvalidArgument(fmt::format("{}: this rule has no effect without {}max", where, rule.measure == Measure::kRatio ? "min or " : ""));
  if (rule.min && rule.max && *rule.min > *rule.max) {
    return InvalidArgument(fmt::format("{}.max: {:g} is below min {:g}", where, *rule.max, *rule.min));
  }
  return rule;
}

LossParameters ParametersOf(const Settings& s) {
  LossParameters out;
  for (const LossParameter& p : s.kind().parameters) {
    const std::string path = std::string("loss.") + p.name;
    if (s.IsNull(path)) {
      out.Set(p.name, std::nullopt);
    } else if (p.type == Type::kBool) {
      out.Set(p.name, s.Bool(path));
    } else if (p.type == Type::kEnum) {
      out.Set(p.name, ValueOf<int>(p.values, s.Word(path)));
    } else {
      out.Set(p.name, s.Number(path));
    }
  }
  return out;
}

Status CheckKl(const Settings& s, const std::string& root) {
  const std::string where = s.Word("kl.where"), estimator = s.Word("kl.estimator");
  if (where == "none") return Status::Ok();
  if (!s.Has("kl.coef")) return InvalidArgument(fmt::format("{}.kl.coef: required with kl.where {}", root, where));
  if (!(s.Number("kl.coef") > 0)) {
    return InvalidArgument(fmt::format("{}.kl.coef: {:g} is not above 0; to turn the term off say kl.where none", root, s.Number("kl.coef")));
  }
  if (where == "loss" && estimator == "k1") {
    return InvalidArgument(fmt::format("{}.kl.estimator: k1 in the loss has no effect: its expected gradient is zero; say k1+", root));
  }
  if (where == "reward" && (estimator.back() == '+' || estimator == "sg_prob")) {
    return InvalidArgument(fmt::format("{}.kl.estimator: {} says something of a gradient, and a reward has none; one of k1, k2, k3", root, estimator));
  }
  if (where == "reward" && !s.WhyNotRead("advantage.credit").empty()) {
    return InvalidArgument(fmt::format("{}.kl.where: reward has no effect: {}", root, s.WhyNotRead("advantage.credit")));
  }
  return Status::Ok();
}

Status CheckDistillation(const Settings& s, const std::string& root) {
  const std::string kind = s.Word("distillation.kind");
  if (s.kind().only_distills && kind != "topk_forward_kl") {
    return InvalidArgument(fmt::format("{}.distillation.kind: loss kind distill has nothing to do without topk_forward_kl", root));
  }
  if (kind == "none") return Status::Ok();
  if (s.Number("distillation.coef") == 0) {
    return InvalidArgument(fmt::format("{}.distillation.coef: 0 turns the term off; say distillation.kind none", root));
  }
  if (kind == "topk_forward_kl" && !s.kind().only_distills && !s.Bool("distillation.task_reward")) {
    return InvalidArgument(fmt::format("{}.loss.kind: {} has no advantage with topk_forward_kl alone; say loss kind distill, or "
                                       "distillation.task_reward: true", root, s.kind().name));
  }
  return Status::Ok();
}

// Rules between keys that are all read.
Status CheckTogether(const Settings& s, const std::string& root) {
  const LossKind& kind = s.kind();
  if (kind.check) {
    const std::string wrong = kind.check(ParametersOf(s));
    if (!wrong.empty()) return InvalidArgument(fmt::format("{}.loss.{}", root, wrong));
  }
  const bool shaping = s.WhyNotRead("reward.process_coef").empty() && !s.IsNull("overlong.max_tokens");
  if (shaping && s.Number("overlong.buffer_tokens") > s.Number("overlong.max_tokens")) {
    return InvalidArgument(fmt::format("{}.overlong.buffer_tokens: {} is above max_tokens {}", root,
                                       s.Number("overlong.buffer_tokens"), s.Number("overlong.max_tokens")));
  }
  const std::string mode = s.Word("aggregation.mode");
  if (!kind.pairs && mode == "seq-mean-token-sum-norm" && s.IsNull("aggregation.length_norm")) {
    return InvalidArgument(
        fmt::format("{}.aggregation.length_norm: required by mode seq-mean-token-sum-norm: the constant L to divide by", root));
  }
  if (kind.per_sequence && mode != "seq-mean-token-mean") {
    return InvalidArgument(fmt::format("{}.aggregation.mode: loss kind {} has one ratio for a sequence; it needs seq-mean-token-mean, not {}",
                                       root, kind.name, mode));
  }
  RETURN_IF_ERROR(CheckKl(s, root));
  RETURN_IF_ERROR(CheckDistillation(s, root));
  const bool decoupled = s.Word("off_policy.mode") == "decoupled";
  if (decoupled && s.Word("off_policy.weight") == "none" && s.At("off_policy.reject").get_array().empty()) {
    return InvalidArgument(fmt::format("{}.off_policy.mode: decoupled has no effect without off_policy.weight or reject", root));
  }
  const auto low = s.OptionalNumber("off_policy.weight_min"), high = s.OptionalNumber("off_policy.weight_max");
  if (low == 0) return InvalidArgument(fmt::format("{}.off_policy.weight_min: 0 has no effect: every ratio is above it; null = no bound", root));
  if (decoupled && s.Word("off_policy.weight") != "none" && low && high && *low > *high) {
    return InvalidArgument(fmt::format("{}.off_policy.weight_max: {:g} is below weight_min {:g}", root, *high, *low));
  }
  return Status::Ok();
}

Result<Algorithm> Fill(const Settings& s, const std::string& root) {
  Algorithm a;
  auto set = [&](auto& field, const char* path) {
    for (const Key& key : CommonKeys()) {
      if (key.path == path) field = ValueOf<std::decay_t<decltype(field)>>(key.values, s.Word(path));
    }
  };
  auto read = [&](const char* path) { return s.WhyNotRead(path).empty(); };
  if (read("reward.process_coef")) {
    a.reward.process_coef = s.Number("reward.process_coef");
    a.reward.speed_coef = s.Number("reward.speed_coef");
    a.reward.speed_baseline_s = s.OptionalNumber("reward.speed_baseline_s");
    a.overlong.max_tokens = s.OptionalInt("overlong.max_tokens");
    a.overlong.buffer_tokens = s.OptionalInt("overlong.buffer_tokens");
    a.overlong.factor = s.Number("overlong.factor");
    a.overlong.mask_truncated = s.Bool("overlong.mask_truncated");
    set(a.dynamic_sampling, "dynamic_sampling");
    set(a.advantage.credit, "advantage.credit");
    a.advantage.gamma = s.Number("advantage.gamma");
    a.advantage.lambda = s.Number("advantage.lambda");
    if (read("advantage.baseline")) set(a.advantage.baseline, "advantage.baseline");
    if (read("advantage.scale")) set(a.advantage.scale, "advantage.scale");
    a.advantage.population_std = s.Word("advantage.std") == "population";
    a.advantage.std_eps = s.Number("advantage.std_eps");
    a.advantage.whiten = s.Bool("advantage.whiten");
    a.advantage.balance = read("advantage.balance") && s.Bool("advantage.balance");
  }
  a.loss.kind = &s.kind();
  a.loss.parameters = ParametersOf(s);
  if (read("loss.drift")) a.loss.drift = s.Number("loss.drift");
  if (read("aggregation.mode")) {
    set(a.aggregation.mode, "aggregation.mode");
    a.aggregation.length_norm = s.OptionalInt("aggregation.length_norm").value_or(0);
    a.aggregation.per_segment = s.Word("aggregation.unit") == "segment";
  }
  if (read("kl.where")) set(a.kl.where, "kl.where");
  if (a.kl.where != KlWhere::kNone) {
    set(a.kl.estimator, "kl.estimator");
    a.kl.coef = s.Number("kl.coef");
    a.kl.importance_weighted = s.Bool("kl.importance_weighted");
  }
  if (read("off_policy.mode")) {
    a.off_policy.decoupled = s.Word("off_policy.mode") == "decoupled";
    if (a.off_policy.decoupled) set(a.off_policy.weight, "off_policy.weight");
    a.off_policy.weight_min = s.OptionalNumber("off_policy.weight_min");
    a.off_policy.weight_max = s.OptionalNumber("off_policy.weight_max");
    a.off_policy.zero_outside = s.Word("off_policy.outside") == "zero";
    a.off_policy.normalize = a.off_policy.weight != OffPolicyWeight::kNone && s.Bool("off_policy.normalize");
    const json::array& rules = s.At("off_policy.reject").get_array();
    for (size_t i = 0; i < rules.size(); ++i) {
      ASSIGN_OR_RETURN(const Algorithm::Reject rule, ParseReject(rules[i], fmt::format("{}.off_policy.reject[{}]", root, i)));
      a.off_policy.reject.push_back(rule);
    }
  }
  if (read("distillation.kind")) set(a.distillation.kind, "distillation.kind");
  if (a.distillation.kind != DistillationKind::kNone) {
    a.distillation.coef = s.Number("distillation.coef");
    a.distillation.student_new = s.Word("distillation.student") == "new";
    a.distillation.task_reward = read("distillation.task_reward") && s.Bool("distillation.task_reward");
  }
  if (a.loss.kind->one_advantage && a.AdvantagesDifferByToken()) {
    const bool teacher = a.ReadsTeacher();
    return InvalidArgument(fmt::format("{}.{}: loss kind {} needs one advantage for all tokens of a rollout; {}", root,
                                       teacher ? "distillation.kind" : "advantage.credit", a.loss.kind->name,
                                       teacher ? "policy_gradient gives each token its own" : "say credit rollout"));
  }
  return a;
}

// The user's keys over the recipe's; another loss kind drops the recipe's loss keys, null drops those of its block.
struct Merged {
  std::map<std::string, json::value> values;
  std::map<std::string, std::string> sources;
};

Result<Merged> Merge(const Recipe* recipe, const std::map<std::string, json::value>& user, const std::vector<std::string>& dropped) {
  Merged merged;
  if (recipe) {
    std::vector<std::string> none;
    RETURN_IF_ERROR(Flatten(Literal(recipe->block), "recipe", merged.values, none));
    auto drop_block = [&](const std::string& prefix) {
      for (auto it = merged.values.begin(); it != merged.values.end();) {
        it = it->first.rfind(prefix, 0) == 0 ? merged.values.erase(it) : std::next(it);
      }
    };
    if (auto it = user.find("loss.kind"); it != user.end() && it->second != merged.values["loss.kind"]) drop_block("loss.");
    for (const std::string& name : dropped) drop_block(name + ".");
  }
  for (const auto& [path, value] : merged.values) merged.sources[path] = "recipe";
  for (const auto& [path, value] : user) merged.values[path] = value, merged.sources[path] = "file";
  return merged;
}

Result<const LossKind*> KindOf(const std::map<std::string, json::value>& values, const std::string& root) {
  const std::vector<std::string> names = KindNames([](const LossKind&) { return true; });
  auto it = values.find("loss.kind");
  if (it == values.end()) return InvalidArgument(fmt::format("{}.loss.kind: required without a recipe; one of {}", root, Join(names)));
  const std::string words = temper::Join(names, " ");
  ASSIGN_OR_RETURN(const json::value word, CheckValue({"loss.kind", Type::kEnum, nullptr, -kInf, kInf, words.c_str()}, it->second,
                                                      root + ".loss.kind"));
  return FindLossKind(std::string(word.get_string()));
}

Status CheckRequired(const Recipe* recipe, const Settings& s, const std::map<std::string, json::value>& user,
                     const std::string& root) {
  for (const char* path : {"advantage.baseline", "aggregation.mode"}) {
    if (s.Has(path) || !s.WhyNotRead(path).empty()) continue;
    std::string values;
    for (const Key& key : CommonKeys()) {
      if (key.path == path) values = Join(Words(key.values));
    }
    return InvalidArgument(fmt::format("{}.{}: required{}; one of {}", root, path, recipe ? "" : " without a recipe", values));
  }
  if (!recipe) return Status::Ok();
  for (const std::string path : recipe->required) {
    const std::string block = path.substr(0, path.find('.'));
    const bool reads_block = s.WhyNotRead(block == "overlong" ? "overlong.mask_truncated" : path).empty();
    if (!reads_block || user.count(path)) continue;
    return InvalidArgument(fmt::format("{}.{}: required by recipe {}{}", root, path, recipe->name,
                                       block == "overlong" ? ": it depends on your task (overlong: null turns the rule off)" : ": the constant L to divide by"));
  }
  return Status::Ok();
}

// One JSON object of the keys that are read.
std::string Expand(const Recipe* recipe, const Settings& s, const std::vector<Key>& keys, const std::map<std::string, std::string>& from,
                   std::map<std::string, std::string>& sources) {
  std::string out = "{";
  if (recipe) out += fmt::format("\"recipe\":\"{}\"", recipe->name);
  std::string open;
  for (const Key& key : keys) {
    const std::string& path = key.path;
    if (!s.Has(path) || !s.WhyNotRead(path).empty()) continue;
    sources[path] = from.at(path);
    const size_t dot = path.find('.');
    const std::string parent = dot == std::string::npos ? "" : path.substr(0, dot);
    if (!open.empty() && open != parent) out += "}", open.clear();
    if (out.back() != '{') out += ",";
    if (!parent.empty() && open != parent) out += fmt::format("\"{}\":{{", parent), open = parent;
    out += fmt::format("\"{}\":{}", parent.empty() ? path : path.substr(dot + 1), PrintJson(s.At(path)));
  }
  if (!open.empty()) out += "}";
  return out + "}";
}

}  // namespace

bool Algorithm::ReadsOldLogprobs() const {
  return loss.kind->reads_old || loss.drift > 0 || kl.where == KlWhere::kReward ||
         (kl.where == KlWhere::kLoss && kl.importance_weighted) || off_policy.decoupled || !off_policy.reject.empty() ||
         (ReadsTeacher() && !distillation.student_new);
}

Result<ParsedAlgorithm> ParseAlgorithm(const json::value& block, const std::string& root) {
  std::map<std::string, json::value> user;
  std::vector<std::string> dropped;
  RETURN_IF_ERROR(Flatten(block, root, user, dropped));

  const Recipe* recipe = nullptr;
  if (auto it = user.find("recipe"); it != user.end()) {
    ASSIGN_OR_RETURN(recipe, FindRecipe(it->second, root));
    user.erase(it);
    // `overlong: null` answers what a recipe asks for there.
    for (const std::string path : recipe->required) {
      if (Contains(dropped, path.substr(0, path.find('.')))) user.emplace(path, nullptr);
    }
  }
  ASSIGN_OR_RETURN(Merged merged, Merge(recipe, user, dropped));
  ASSIGN_OR_RETURN(const LossKind* kind, KindOf(merged.values, root));
  const std::vector<Key> keys = KeysOf(*kind);
  for (const Key& key : keys) {
    if (key.path == "loss.kind") continue;
    if (auto it = merged.values.find(key.path); it != merged.values.end()) {
      ASSIGN_OR_RETURN(it->second, CheckValue(key, it->second, root + "." + key.path));
      continue;
    }
    const char* fallback = key.fallback;
    if (key.path == "kl.estimator") fallback = merged.values["kl.where"] == "reward" ? "\"k1\"" : "\"k3\"";
    if (fallback) merged.values[key.path] = Literal(fallback), merged.sources[key.path] = "default";
  }
  const Settings settings(*kind, merged.values, user);

  for (const auto& [path, value] : user) {
    const std::string why = settings.WhyNotRead(path);
    if (!why.empty()) return InvalidArgument(fmt::format("{}.{}: this setting has no effect: {}", root, path, why));
  }
  RETURN_IF_ERROR(CheckRequired(recipe, settings, user, root));
  RETURN_IF_ERROR(CheckTogether(settings, root));

  ParsedAlgorithm parsed;
  ASSIGN_OR_RETURN(parsed.algorithm, Fill(settings, root));
  if (recipe) parsed.recipe_source = recipe->source;
  parsed.expanded = Expand(recipe, settings, keys, merged.sources, parsed.sources);
  return parsed;
}

Status CheckAlgorithmForRun(const Algorithm& a, int64_t staleness, int64_t optimizer_steps, const std::string& root) {
  auto later = [&](const char* path, const std::string& why) {
    return Unimplemented(fmt::format("{}.{}: {}; `temper train loss` computes it", root, path, why));
  };
  if (a.ReadsValues()) return later("advantage.credit", "a job cannot run gae yet: it needs the values of a critic");
  const bool weighted = a.off_policy.weight != OffPolicyWeight::kNone;
  // (A weight says how far the batch's first weights are from those that drew, not how far later steps are from the first.)
  if (!a.loss.kind->reads_old && a.loss.kind->reads_advantages && ((!weighted && staleness > 0) || optimizer_steps > 1)) {
    const bool several = optimizer_steps > 1;
    const std::string why = several ? fmt::format("{} optimizer steps on a batch make", optimizer_steps) : fmt::format("staleness {} makes", staleness);
    return InvalidArgument(fmt::format("{}.loss.kind: {} has no importance ratio, and {} it differ from 1; use cispo or ppo_clip, {}", root, a.loss.kind->name, why,
                                       several ? "or one step" : "an off_policy.weight, or staleness 0"));
  }
  return Status::Ok();
}

}  // namespace temper::trainer
