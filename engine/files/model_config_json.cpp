#include "engine/files/model_config_json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <optional>

#include "engine/rope.h"
#include "text/json.h"

namespace temper::engine {
namespace {

using text::Value;

// Reads numbers of an object; the first failure sticks.
class Fields {
 public:
  explicit Fields(const Value& node) : node_(node) {}

  int Int(const char* key, std::optional<int64_t> fallback = std::nullopt) {
    const Value* v = node_.Find(key);
    if (!v || v->is_none()) {
      if (fallback) return static_cast<int>(*fallback);
      Fail(std::string("config.json: ") + key + " is missing");
      return 0;
    }
    if (!v->is_int() || v->as_int() < -1 || v->as_int() > INT32_MAX) {
      Fail(std::string("config.json: ") + key + " is no whole number in range");
      return 0;
    }
    return static_cast<int>(v->as_int());
  }
  double Double(const char* key, double fallback) {
    const Value* v = node_.Find(key);
    if (!v || v->is_none()) return fallback;
    if (v->is_float()) return v->as_float();
    if (v->is_int()) return static_cast<double>(v->as_int());
    Fail(std::string("config.json: ") + key + " is no number");
    return fallback;
  }
  bool Bool(const char* key, bool fallback) {
    const Value* v = node_.Find(key);
    if (!v || v->is_none()) return fallback;
    if (!v->is_bool()) Fail(std::string("config.json: ") + key + " is neither true nor false");
    return v->is_bool() ? v->as_bool() : fallback;
  }
  void Fail(std::string what) {
    if (status_.ok()) status_ = InvalidArgument(std::move(what));
  }
  const Status& status() const { return status_; }

 private:
  const Value& node_;
  Status status_;
};

// A family as its config.json names it, with what transformers takes for absent keys (0: derived from others).
struct FamilyFile {
  Family family;
  const char* model_type;
  const char* architecture;
  const char* activation_key;
  const char* activation;
  int max_positions, kv_heads, head_dim;
  bool tied;
  double theta;
};
constexpr FamilyFile kFamilies[] = {
    {Family::kLlama, "llama", "LlamaForCausalLM", "hidden_act", "silu", 2048, 0, 0, false, 1e4},
    {Family::kQwen2, "qwen2", "Qwen2ForCausalLM", "hidden_act", "silu", 32768, 0, 0, false, 1e4},
    {Family::kQwen3, "qwen3", "Qwen3ForCausalLM", "hidden_act", "silu", 32768, 0, 128, false, 1e4},
    {Family::kMistral, "mistral", "MistralForCausalLM", "hidden_act", "silu", 131072, 8, 0, false, 1e4},
    {Family::kGemma3, "gemma3_text", "Gemma3ForCausalLM", "hidden_activation", "gelu_pytorch_tanh", 131072, 4, 256, true, 1e6},
    {Family::kGemma2, "gemma2", "Gemma2ForCausalLM", "hidden_activation", "gelu_pytorch_tanh", 8192, 4, 256, true, 1e4},
};

const FamilyFile& FileOf(Family family) { return kFamilies[static_cast<int>(family)]; }

Result<const FamilyFile*> FamilyOf(const Value& root) {
  const std::string type = root.StringOr("model_type", "");
  for (const FamilyFile& f : kFamilies) {
    if (type == f.model_type) return &f;
  }
  return InvalidArgument("config.json: model_type '" + type +
                         "' is not supported (llama, qwen2, qwen3, mistral, gemma2, gemma3_text are)");
}

bool Given(const Value& node, const char* key) {
  const Value* v = node.Find(key);
  return v && !v->is_none();
}

// What yarn multiplies cos and sin with, as its paper says or as `mscale` refines it.
double YarnAttentionFactor(double factor, double scale, double scale_all) {
  const auto of = [&](double m) { return factor <= 1 ? 1.0 : 0.1 * m * std::log(factor) + 1; };
  return scale != 0 && scale_all != 0 ? of(scale) / of(scale_all) : of(1);
}

// An object of type and factors, and the base it may hold.
Status ReadScaling(const Value& node, const std::string& where, const Value& root, int max_positions, RopeScaling* s,
                   double* theta) {
  if (!node.is_dict()) return InvalidArgument("config.json: " + where + " is no object");
  Fields rope(node);
  *theta = rope.Double("rope_theta", *theta);
  if (rope.Double("partial_rotary_factor", 1) != 1) return InvalidArgument("config.json: partial_rotary_factor is not supported");
  const std::string type = node.StringOr("rope_type", node.StringOr("type", "default"));
  const auto kind = ParseRopeScaling(type);
  if (!kind.ok()) return InvalidArgument("config.json: " + where + " of type '" + type + "' is not supported");
  *s = {};
  s->kind = *kind;
  if (s->kind == RopeScaling::Kind::kNone) return rope.status();
  if (s->kind == RopeScaling::Kind::kLlama3 || s->kind == RopeScaling::Kind::kYarn) {
    Fields outside(root);
    s->original_max_positions =
        rope.Int("original_max_position_embeddings", outside.Int("original_max_position_embeddings", max_positions));
    RETURN_IF_ERROR(outside.status());
  }
  if (!node.Find("factor")) return InvalidArgument("config.json: " + where + ".factor is missing");
  s->factor = rope.Double(
      "factor", s->kind == RopeScaling::Kind::kYarn ? static_cast<double>(max_positions) / s->original_max_positions : 0);
  if (!(s->factor > 0)) return InvalidArgument("config.json: " + where + ".factor is not positive");
  if (s->kind == RopeScaling::Kind::kLlama3) {
    s->low_freq_factor = rope.Double("low_freq_factor", 1);
    s->high_freq_factor = rope.Double("high_freq_factor", 4);
  }
  if (s->kind == RopeScaling::Kind::kYarn) {
    if (const double beta = rope.Double("beta_fast", 0); beta != 0) s->beta_fast = beta;
    if (const double beta = rope.Double("beta_slow", 0); beta != 0) s->beta_slow = beta;
    s->truncate = rope.Bool("truncate", true);
    s->attention_factor = rope.Double("attention_factor",
                                      YarnAttentionFactor(s->factor, rope.Double("mscale", 0), rope.Double("mscale_all_dim", 0)));
  }
  return rope.status();
}

// rope_parameters, or rope_theta and rope_scaling of the older form; Gemma has one of each for the windowed layers.
Status ReadRope(const Value& root, ModelConfig* config) {
  Fields top(root);
  const bool gemma = config->family == Family::kGemma3;
  config->rope_theta = top.Double("rope_theta", FileOf(config->family).theta);
  if (gemma) config->local_rope_theta = top.Double("rope_local_base_freq", 1e4);
  if (top.Double("partial_rotary_factor", 1) != 1) return InvalidArgument("config.json: partial_rotary_factor is not supported");
  RETURN_IF_ERROR(top.status());
  // Of both the older one counts, for Gemma what it says: as transformers 5 reads them.
  const Value* scaling_node = root.Find("rope_scaling");
  const bool older = scaling_node && scaling_node->is_dict() && scaling_node->as_dict().size() > 0;
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    const Value* node = root.Find(key);
    if (!node || node->is_none() || (older && !gemma && node != scaling_node)) continue;
    if (!node->is_dict()) return InvalidArgument(std::string("config.json: ") + key + " is no object");
    if (node->as_dict().size() == 0) continue;
    const bool nested = node->Find("full_attention") || node->Find("sliding_attention");
    if (!nested) {
      RETURN_IF_ERROR(ReadScaling(*node, key, root, config->max_positions, &config->rope_scaling, &config->rope_theta));
      continue;
    }
    if (!gemma) return InvalidArgument(std::string("config.json: ") + key + " per layer type is not supported");
    for (const bool local : {false, true}) {
      const char* part = local ? "sliding_attention" : "full_attention";
      if (!Given(*node, part)) continue;
      RopeScaling scaling;
      double* theta = local ? &config->local_rope_theta : &config->rope_theta;
      const std::string where = std::string(key) + "." + part;
      RETURN_IF_ERROR(ReadScaling(*node->Find(part), where, root, config->max_positions, &scaling, theta));
      if (!local) config->rope_scaling = scaling;
      if (local && scaling.kind != RopeScaling::Kind::kNone) {
        return InvalidArgument("config.json: " + where + " that scales is not supported");
      }
    }
  }
  return Status::Ok();
}

// Which layers see only a window, and how long it is.
Status ReadWindow(const Value& root, ModelConfig* c) {
  Fields f(root);
  const bool qwen = c->family == Family::kQwen2 || c->family == Family::kQwen3, gemma3 = c->family == Family::kGemma3,
             gemma = gemma3 || c->family == Family::kGemma2;
  const Value* types = root.Find("layer_types");
  std::vector<uint8_t> windowed;
  if (types && !types->is_none()) {
    if (!types->is_list() || types->as_list().size() != static_cast<size_t>(c->layers)) {
      return InvalidArgument("config.json: layer_types is no list of one word a layer");
    }
    for (const Value& t : types->as_list()) {
      const std::string word = t.is_string() ? t.as_string() : "?";
      if (word != "full_attention" && word != "sliding_attention") {
        return InvalidArgument("config.json: layer_types of '" + word + "' are not supported");
      }
      windowed.push_back(word == "sliding_attention");
    }
  }
  const bool none = root.Find("sliding_window") && !Given(root, "sliding_window");
  if (gemma && none) return InvalidArgument("config.json: a sliding_window of null is not supported");
  const bool used = qwen ? f.Bool("use_sliding_window", false) && !none : c->family != Family::kLlama;
  if (used && !none) c->window = f.Int("sliding_window", 4096);
  const int first = qwen ? f.Int("max_window_layers", 28) : 0, pattern = gemma3 ? f.Int("sliding_window_pattern", 6) : 2;
  RETURN_IF_ERROR(f.status());
  if (used && (gemma || qwen) && c->window < 1) return InvalidArgument("config.json: sliding_window is not positive");
  if (pattern < 1) return InvalidArgument("config.json: sliding_window_pattern is not positive");
  if (windowed.empty() && c->window > 0 && (gemma || qwen)) {
    for (int l = 0; l < std::min(c->layers, 1024); ++l) windowed.push_back(gemma ? (l + 1) % pattern != 0 : l >= first);
  }
  const bool some = std::find(windowed.begin(), windowed.end(), 1) != windowed.end();
  if (some && c->window == 0) {
    return InvalidArgument("config.json: layer_types of 'sliding_attention' without a sliding_window are not supported");
  }
  // Mistral's own class gives every layer the window, whatever layer_types say: a mixture is not of that class.
  const bool mixed = std::find(windowed.begin(), windowed.end(), 0) != windowed.end();
  if (c->family == Family::kMistral && c->window > 0 && mixed) {
    return InvalidArgument("config.json: layer_types that differ are not supported");
  }
  if (c->window > 0 && (gemma || qwen)) c->windowed = std::move(windowed);
  return Status::Ok();
}

// Keys that the family's class in transformers reads and that change what is computed. Others it ignores, too.
Status RefuseWhatIsNotComputed(const Value& root, const FamilyFile& family) {
  if (const Value* list = root.Find("architectures"); list && list->is_list()) {
    for (const Value& a : list->as_list()) {
      if (!a.is_string() || a.as_string() != family.architecture) {
        return InvalidArgument("config.json: the architecture '" + (a.is_string() ? a.as_string() : "?") + "' is not supported");
      }
    }
  }
  for (const char* key : {"hidden_act", "hidden_activation"}) {
    const std::string act = root.StringOr(key, family.activation);
    if (act != family.activation) return InvalidArgument(std::string("config.json: ") + key + " '" + act + "' is not supported");
  }
  Fields fields(root);
  const bool llama = family.family == Family::kLlama, gemma3 = family.family == Family::kGemma3,
             gemma = gemma3 || family.family == Family::kGemma2;
  const std::pair<const char*, bool> kFlags[] = {{"attention_bias", llama || gemma || family.family == Family::kQwen3},
                                                 {"mlp_bias", llama},
                                                 {"use_sliding_window", llama},
                                                 {"rope_interleaved", true},
                                                 {"use_bidirectional_attention", gemma}};
  for (const auto& [key, read] : kFlags) {
    if (read && fields.Bool(key, false)) return InvalidArgument(std::string("config.json: ") + key + " is not supported");
  }
  const auto refuse = [&](bool refused, const char* key) {
    if (refused && Given(root, key)) fields.Fail(std::string("config.json: ") + key + " is not supported");
  };
  refuse(true, "quantization_config");
  refuse(llama, "sliding_window");
  for (const char* key : {"sliding_window_pattern", "rope_local_base_freq"}) refuse(!gemma3, key);
  for (const char* key : {"query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"}) refuse(!gemma, key);
  return fields.status();
}

}  // namespace

Result<ModelConfig> ParseConfigJson(std::string_view json) {
  auto parsed = text::ParseJson(json);
  if (!parsed.ok()) return parsed.status().WithContext("config.json");
  const Value& root = *parsed;
  if (!root.is_dict()) return InvalidArgument("config.json: not an object");
  ASSIGN_OR_RETURN(const FamilyFile* family, FamilyOf(root));
  RETURN_IF_ERROR(RefuseWhatIsNotComputed(root, *family));
  Fields f(root);
  ModelConfig c;
  c.family = family->family;
  c.vocab = f.Int("vocab_size");
  c.layers = f.Int("num_hidden_layers");
  c.width = f.Int("hidden_size");
  c.heads = f.Int("num_attention_heads");
  c.kv_heads = f.Int("num_key_value_heads", family->kv_heads && !root.Find("num_key_value_heads") ? family->kv_heads : c.heads);
  c.ffn = f.Int("intermediate_size");
  c.max_positions = f.Int("max_position_embeddings", family->max_positions);
  c.rms_eps = f.Double("rms_norm_eps", 1e-6);
  c.tied = f.Bool("tie_word_embeddings", family->tied);
  RETURN_IF_ERROR(f.status());
  if (c.heads < 1) return InvalidArgument("config.json: num_attention_heads must be positive");
  if (!Given(root, "head_dim") && !family->head_dim && c.width % c.heads) {
    return InvalidArgument("config.json: hidden_size is no multiple of num_attention_heads");
  }
  c.head_dim = f.Int("head_dim", family->head_dim ? family->head_dim : c.width / c.heads);
  const bool gemma2 = c.family == Family::kGemma2;
  if (gemma2 || c.family == Family::kGemma3) {
    const auto cap = [&](const char* key, double absent) { return root.Find(key) ? f.Double(key, 0) : absent; };
    c.query_scalar = f.Double("query_pre_attn_scalar", 256);
    // Gemma 3 has the key, too, but none of its implementations caps scores: heads are normed instead.
    if (gemma2) c.score_cap = cap("attn_logit_softcapping", 50);
    c.logit_cap = cap("final_logit_softcapping", gemma2 ? 30 : 0);
    if (!(c.query_scalar > 0)) return InvalidArgument("config.json: query_pre_attn_scalar is not positive");
  }
  c.bos_id = f.Int("bos_token_id", -1);
  c.pad_id = f.Int("pad_token_id", -1);
  if (const Value* eos = root.Find("eos_token_id"); eos && !eos->is_none()) {
    for (const Value& id : eos->is_list() ? eos->as_list() : text::List{*eos}) {
      if (!id.is_int() || id.as_int() < 0 || id.as_int() > INT32_MAX) return InvalidArgument("config.json: eos_token_id is no token id");
      c.eos_ids.push_back(static_cast<int>(id.as_int()));
    }
  }
  RETURN_IF_ERROR(f.status());
  RETURN_IF_ERROR(ReadRope(root, &c));
  RETURN_IF_ERROR(ReadWindow(root, &c));
  const Status valid = c.Validate();
  if (!valid.ok()) return valid.WithContext("config.json");
  return c;
}

namespace {

text::Dict ScalingDict(const RopeScaling& s) {
  text::Dict dict = text::MakeDict({{"rope_type", RopeScalingName(s.kind)}});
  if (s.kind != RopeScaling::Kind::kNone) dict.Set("factor", s.factor);
  if (s.kind == RopeScaling::Kind::kLlama3) {
    dict.Set("low_freq_factor", s.low_freq_factor);
    dict.Set("high_freq_factor", s.high_freq_factor);
  }
  if (s.kind == RopeScaling::Kind::kYarn) {
    dict.Set("beta_fast", s.beta_fast);
    dict.Set("beta_slow", s.beta_slow);
    dict.Set("attention_factor", s.attention_factor);
    dict.Set("truncate", s.truncate);
  }
  if (s.kind == RopeScaling::Kind::kLlama3 || s.kind == RopeScaling::Kind::kYarn) {
    dict.Set("original_max_position_embeddings", s.original_max_positions);
  }
  return dict;
}

Value CapOrNone(double cap) { return cap > 0 ? Value(cap) : Value(nullptr); }

// A whole number is written as one: transformers asks for it where the published files have it.
Value NumberOf(double x) { return x == std::floor(x) && std::abs(x) < 1e9 ? Value(static_cast<int64_t>(x)) : Value(x); }

// What only some families have.
void SetFamilyKeys(const ModelConfig& c, text::Dict* root) {
  text::List types;
  for (int l = 0; l < c.layers; ++l) {
    const bool windowed = c.window > 0 && (c.windowed.empty() || c.windowed[l]);
    types.push_back(windowed ? "sliding_attention" : "full_attention");
  }
  switch (c.family) {
    case Family::kLlama:
      root->Set("attention_bias", false);
      root->Set("mlp_bias", false);
      break;
    case Family::kQwen3:
      root->Set("attention_bias", false);
      [[fallthrough]];
    case Family::kQwen2:
      root->Set("use_sliding_window", c.window > 0);
      root->Set("sliding_window", c.window > 0 ? Value(c.window) : Value(nullptr));
      root->Set("max_window_layers", c.layers);
      root->Set("layer_types", types);
      break;
    case Family::kMistral: root->Set("sliding_window", c.window > 0 ? Value(c.window) : Value(nullptr)); break;
    case Family::kGemma2:
    case Family::kGemma3:
      root->Set("attention_bias", false);
      root->Set("query_pre_attn_scalar", NumberOf(c.query_scalar));
      root->Set("attn_logit_softcapping", CapOrNone(c.score_cap));
      root->Set("final_logit_softcapping", CapOrNone(c.logit_cap));
      root->Set("sliding_window", c.window);
      root->Set("layer_types", types);
      if (c.family == Family::kGemma3) root->Set("rope_local_base_freq", c.local_rope_theta);
      break;
  }
}

}  // namespace

std::string WriteConfigJson(const ModelConfig& c, FileType type) {
  const FamilyFile& family = FileOf(c.family);
  text::Dict rope = text::MakeDict({{"rope_theta", c.rope_theta}});
  const text::Dict dict = ScalingDict(c.rope_scaling);
  for (const auto& [key, value] : dict.items()) rope.Set(key, value);
  Value scaling = c.rope_scaling.kind == RopeScaling::Kind::kNone ? Value(nullptr) : Value(dict);
  if (c.family == Family::kGemma3) {
    const text::Dict local = text::MakeDict({{"rope_theta", c.local_rope_theta}, {"rope_type", "default"}});
    rope = text::MakeDict({{"full_attention", rope}, {"sliding_attention", local}});
  }
  Value eos = nullptr;
  if (c.eos_ids.size() == 1) eos = c.eos_ids[0];
  if (c.eos_ids.size() > 1) eos = text::List(c.eos_ids.begin(), c.eos_ids.end());
  auto id = [](int v) { return v < 0 ? Value(nullptr) : Value(v); };
  const char* dtype = type == FileType::kBF16 ? "bfloat16" : "float32";
  text::Dict root = text::MakeDict({{"architectures", text::List{family.architecture}},
                                    {"model_type", family.model_type},
                                    {"vocab_size", c.vocab},
                                    {"hidden_size", c.width},
                                    {"intermediate_size", c.ffn},
                                    {"num_hidden_layers", c.layers},
                                    {"num_attention_heads", c.heads},
                                    {"num_key_value_heads", c.kv_heads},
                                    {"head_dim", c.head_dim},
                                    {family.activation_key, family.activation},
                                    {"max_position_embeddings", c.max_positions},
                                    {"rms_norm_eps", c.rms_eps},
                                    {"tie_word_embeddings", c.tied},
                                    {"rope_theta", c.rope_theta},
                                    {"rope_scaling", scaling},
                                    {"rope_parameters", rope},
                                    {"bos_token_id", id(c.bos_id)},
                                    {"eos_token_id", eos},
                                    {"pad_token_id", id(c.pad_id)},
                                    {"dtype", dtype},
                                    {"torch_dtype", dtype}});
  SetFamilyKeys(c, &root);
  text::JsonStyle style;
  style.indent = 2;
  return text::DumpJson(Value(root), style).value() + "\n";
}

namespace {

// Reads metadata of one architecture; the first failure sticks.
class Metadata {
 public:
  Metadata(const GgufFile& file, std::string architecture) : file_(file), architecture_(std::move(architecture)) {}

  const Value* Find(const std::string& key) const { return file_.Meta(architecture_ + "." + key); }
  int Int(const std::string& key, std::optional<int64_t> fallback = std::nullopt) {
    const Value* v = Find(key);
    if (v && v->is_int() && v->as_int() >= 0 && v->as_int() <= INT32_MAX) return static_cast<int>(v->as_int());
    if (!v && fallback) return static_cast<int>(*fallback);
    Fail("metadata '" + architecture_ + "." + key + "' is " + (v ? "not a number that can be used" : "missing"));
    return 0;
  }
  // Metadata floats are fp32; the decimal number that was meant is the shortest that rounds to it.
  double Number(const std::string& key, double fallback) {
    const Value* v = Find(key);
    if (!v) return fallback;
    if (v->is_int()) return static_cast<double>(v->as_int());
    if (!v->is_float()) Fail("metadata '" + architecture_ + "." + key + "' is no number");
    if (!v->is_float()) return fallback;
    char buffer[32];
    auto [end, error] = std::to_chars(buffer, buffer + sizeof(buffer), static_cast<float>(v->as_float()));
    return std::strtod(std::string(buffer, end).c_str(), nullptr);
  }
  void Fail(std::string what) {
    if (status_.ok()) status_ = InvalidArgument(std::move(what));
  }
  const Status& status() const { return status_; }
  const std::string& architecture() const { return architecture_; }

 private:
  const GgufFile& file_;
  std::string architecture_;
  Status status_;
};

// Llama 3.1 and later come with their scaling as a tensor of what each frequency is divided by. Its parameters are found again,
// so that the model can be saved: the factor is the largest divisor, the others are those of every published model.
Status ReadRopeFrequencies(const FileTensor& t, ModelConfig* c) {
  const auto bad = [] {
    return InvalidArgument("tensor rope_freqs.weight holds no scaling of Llama 3, and others are not supported");
  };
  if (t.type != FileType::kF32 || t.count != static_cast<uint64_t>(c->head_dim / 2)) return bad();
  std::vector<float> divisors(t.count);
  ReadElements(t.type, t.bytes, divisors);
  ModelConfig plain = *c;
  plain.rope_scaling = {};
  RopeScaling& s = c->rope_scaling;
  s.kind = RopeScaling::Kind::kLlama3;
  s.factor = *std::max_element(divisors.begin(), divisors.end());
  if (!(s.factor > 0) || !(s.factor < 1e6)) return bad();
  const std::vector<double> before = InverseFrequencies(plain, 0), after = InverseFrequencies(*c, 0);
  for (size_t i = 0; i < divisors.size(); ++i) {
    if (!(std::abs(before[i] / after[i] - divisors[i]) <= 1e-4 * divisors[i])) return bad();
  }
  return Status::Ok();
}

Status ReadScaling(const GgufFile& file, Metadata* meta, ModelConfig* c) {
  const Value* type = meta->Find("rope.scaling.type");
  const std::string name = type && type->is_string() ? type->as_string() : "none";
  RopeScaling& s = c->rope_scaling;
  if (name == "linear" || name == "yarn") {
    s.kind = name == "linear" ? RopeScaling::Kind::kLinear : RopeScaling::Kind::kYarn;
    s.factor = meta->Number("rope.scaling.factor", 1);
  } else if (name != "none") {
    return InvalidArgument("rope scaling '" + name + "' is not supported");
  }
  if (s.kind == RopeScaling::Kind::kYarn) {
    s.original_max_positions = meta->Int("rope.scaling.original_context_length", c->max_positions);
    s.beta_fast = meta->Number("rope.scaling.yarn_beta_fast", 32);
    s.beta_slow = meta->Number("rope.scaling.yarn_beta_slow", 1);
    s.attention_factor = meta->Number("rope.scaling.attn_factor", 1) * YarnAttentionFactor(s.factor, 0, 0);
    for (const char* key :
         {"rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"}) {
      if (meta->Find(key)) return InvalidArgument("metadata '" + meta->architecture() + "." + key + "' is not supported");
    }
  }
  RETURN_IF_ERROR(meta->status());
  if (const FileTensor* t = file.Find("rope_freqs.weight")) {
    if (s.kind != RopeScaling::Kind::kNone) {
      return InvalidArgument("tensor rope_freqs.weight beside another rope scaling is not supported");
    }
    return ReadRopeFrequencies(*t, c);
  }
  return Status::Ok();
}

// What Gemma's files leave to the reader is as llama.cpp has it.
Status ReadGemma(Metadata* meta, ModelConfig* c) {
  const bool gemma2 = c->family == Family::kGemma2;
  // Of the published models only the largest divides by something else than the size of a head.
  const int layers_of_27b = gemma2 ? 46 : 62;
  c->query_scalar = c->layers == layers_of_27b ? c->width / c->heads : c->head_dim;
  if (gemma2) c->score_cap = meta->Number("attn_logit_softcapping", 50);
  c->logit_cap = meta->Number("final_logit_softcapping", gemma2 ? 30 : 0);
  c->window = gemma2 ? meta->Int("attention.sliding_window", 4096) : meta->Int("attention.sliding_window");
  if (!gemma2) c->local_rope_theta = meta->Number("rope.freq_base_swa", 1e4);
  const int pattern = gemma2 ? 2 : meta->Int("attention.sliding_window_pattern", 6);
  RETURN_IF_ERROR(meta->status());
  if (pattern < 1 || c->window < 1) return InvalidArgument("metadata of the sliding window is not positive");
  for (int l = 0; l < std::min(c->layers, 1024); ++l) c->windowed.push_back((l + 1) % pattern != 0);
  return Status::Ok();
}

}  // namespace

Result<ModelConfig> ConfigFromGguf(const GgufFile& file) {
  ASSIGN_OR_RETURN(const Family family, GgufFamily(file));
  Metadata meta(file, FamilyName(family));
  ModelConfig c;
  c.family = family;
  const FileTensor* embedding = file.Find("token_embd.weight");
  if (!embedding || embedding->shape.size() != 2) return InvalidArgument("tensor token_embd.weight is missing or no matrix");
  c.vocab = static_cast<int>(std::min<int64_t>(embedding->shape[0], INT32_MAX));
  c.layers = meta.Int("block_count");
  c.width = meta.Int("embedding_length");
  c.heads = meta.Int("attention.head_count");
  c.kv_heads = meta.Int("attention.head_count_kv", c.heads);
  c.ffn = meta.Int("feed_forward_length");
  c.max_positions = meta.Int("context_length", 2048);
  c.rms_eps = meta.Number("attention.layer_norm_rms_epsilon", 1e-5);
  c.rope_theta = meta.Number("rope.freq_base", FileOf(family).theta);
  c.tied = file.Find("output.weight") == nullptr;
  RETURN_IF_ERROR(meta.status());
  if (c.heads < 1) return InvalidArgument("metadata '" + meta.architecture() + ".attention.head_count' must be positive");
  c.head_dim = meta.Int("attention.key_length", c.width / c.heads);
  const int rotated = meta.Int("rope.dimension_count", c.head_dim), values = meta.Int("attention.value_length", c.head_dim);
  RETURN_IF_ERROR(meta.status());
  if (rotated != c.head_dim || values != c.head_dim) {
    return InvalidArgument("heads that are rotated in part, or with values of another size, are not supported");
  }
  if (const Value* v = meta.Find("expert_count"); v && v->is_int() && v->as_int() > 0) {
    return InvalidArgument("experts are not supported");
  }
  if (c.head_dim < 1 || c.head_dim > 1024) {
    return InvalidArgument("heads of " + std::to_string(c.head_dim) + " numbers are not supported");
  }
  if (family == Family::kGemma3 || family == Family::kGemma2) {
    RETURN_IF_ERROR(ReadGemma(&meta, &c));
  } else if (const int window = meta.Int("attention.sliding_window", 0); window > 0) {
    // llama.cpp calls Mistral llama, too.
    if (family != Family::kLlama) {
      return InvalidArgument("metadata '" + meta.architecture() + ".attention.sliding_window' is not supported");
    }
    c.family = Family::kMistral;
    c.window = window;
  }
  RETURN_IF_ERROR(ReadScaling(file, &meta, &c));
  RETURN_IF_ERROR(meta.status());
  auto id = [&](const std::string& key) {
    const Value* v = file.Meta(key);
    return v && v->is_int() && v->as_int() >= 0 && v->as_int() < c.vocab ? static_cast<int>(v->as_int()) : -1;
  };
  c.bos_id = id("tokenizer.ggml.bos_token_id");
  c.pad_id = id("tokenizer.ggml.padding_token_id");
  if (const int eos = id("tokenizer.ggml.eos_token_id"); eos >= 0) c.eos_ids.push_back(eos);
  RETURN_IF_ERROR(c.Validate());
  return c;
}

Result<Family> GgufFamily(const GgufFile& file) {
  const Value* v = file.Meta("general.architecture");
  const std::string name = v && v->is_string() ? v->as_string() : "?";
  for (const Family f : {Family::kLlama, Family::kQwen2, Family::kQwen3, Family::kGemma2, Family::kGemma3}) {
    if (name == FamilyName(f)) return f;
  }
  return InvalidArgument("the architecture '" + name + "' is not supported (llama, qwen2, qwen3, gemma2, gemma3 are)");
}

}  // namespace temper::engine
