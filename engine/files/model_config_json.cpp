#include "engine/files/model_config_json.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <optional>

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

// The object that holds type and factors: rope_parameters, or rope_scaling of the older form.
Status ReadRope(const Value& root, ModelConfig* config) {
  Fields top(root);
  config->rope_theta = top.Double("rope_theta", 10000);
  RETURN_IF_ERROR(top.status());
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const Value* node = root.Find(key);
    if (!node || node->is_none()) continue;
    if (!node->is_dict()) return InvalidArgument(std::string("config.json: ") + key + " is no object");
    if (node->Find("full_attention")) return InvalidArgument(std::string("config.json: ") + key + " per layer type is not supported");
    Fields rope(*node);
    config->rope_theta = rope.Double("rope_theta", config->rope_theta);
    if (rope.Double("partial_rotary_factor", 1) != 1) return InvalidArgument("config.json: partial_rotary_factor is not supported");
    const std::string type = node->StringOr("rope_type", node->StringOr("type", "default"));
    RopeScaling& s = config->rope_scaling;
    if (type == "default") {
      s.kind = RopeScaling::Kind::kNone;
    } else if (type == "linear" || type == "llama3") {
      s.kind = type == "linear" ? RopeScaling::Kind::kLinear : RopeScaling::Kind::kLlama3;
      s.factor = rope.Double("factor", 0);
      s.low_freq_factor = rope.Double("low_freq_factor", 1);
      s.high_freq_factor = rope.Double("high_freq_factor", 4);
      s.original_max_positions = rope.Int("original_max_position_embeddings", 8192);
      if (!(s.factor > 0)) return InvalidArgument(std::string("config.json: ") + key + ".factor is missing or not positive");
    } else {
      return InvalidArgument(std::string("config.json: ") + key + " of type '" + type + "' is not supported");
    }
    RETURN_IF_ERROR(rope.status());
  }
  return Status::Ok();
}

Status RefuseWhatIsNotComputed(const Value& root) {
  const std::string type = root.StringOr("model_type", "");
  if (type != "llama") return InvalidArgument("config.json: model_type '" + type + "' is not supported (llama is)");
  if (const Value* list = root.Find("architectures"); list && list->is_list()) {
    for (const Value& a : list->as_list()) {
      if (!a.is_string() || a.as_string() != "LlamaForCausalLM") {
        return InvalidArgument("config.json: the architecture '" + (a.is_string() ? a.as_string() : "?") + "' is not supported");
      }
    }
  }
  if (const std::string act = root.StringOr("hidden_act", "silu"); act != "silu") {
    return InvalidArgument("config.json: hidden_act '" + act + "' is not supported");
  }
  Fields fields(root);
  for (const char* key : {"attention_bias", "mlp_bias", "rope_interleaved", "use_sliding_window"}) {
    if (fields.Bool(key, false)) return InvalidArgument(std::string("config.json: ") + key + " is not supported");
  }
  for (const char* key : {"quantization_config", "sliding_window", "sliding_window_pattern", "rope_local_base_freq"}) {
    const Value* v = root.Find(key);
    if (v && !v->is_none()) return InvalidArgument(std::string("config.json: ") + key + " is not supported");
  }
  if (const Value* layers = root.Find("layer_types"); layers && layers->is_list()) {
    for (const Value& l : layers->as_list()) {
      if (!l.is_string() || l.as_string() != "full_attention") return InvalidArgument("config.json: layer_types other than full_attention are not supported");
    }
  }
  return fields.status();
}

}  // namespace

Result<ModelConfig> ParseConfigJson(std::string_view json) {
  auto parsed = text::ParseJson(json);
  if (!parsed.ok()) return parsed.status().WithContext("config.json");
  const Value& root = *parsed;
  if (!root.is_dict()) return InvalidArgument("config.json: not an object");
  RETURN_IF_ERROR(RefuseWhatIsNotComputed(root));
  Fields f(root);
  ModelConfig c;
  c.vocab = f.Int("vocab_size");
  c.layers = f.Int("num_hidden_layers");
  c.width = f.Int("hidden_size");
  c.heads = f.Int("num_attention_heads");
  c.kv_heads = f.Int("num_key_value_heads", c.heads);
  c.ffn = f.Int("intermediate_size");
  c.max_positions = f.Int("max_position_embeddings", 2048);
  c.rms_eps = f.Double("rms_norm_eps", 1e-6);
  c.tied = f.Bool("tie_word_embeddings", false);
  RETURN_IF_ERROR(f.status());
  if (c.heads < 1) return InvalidArgument("config.json: num_attention_heads must be positive");
  if (root.Find("head_dim") == nullptr && c.width % c.heads) return InvalidArgument("config.json: hidden_size is no multiple of num_attention_heads");
  c.head_dim = f.Int("head_dim", c.width / c.heads);
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
  const Status valid = c.Validate();
  if (!valid.ok()) return valid.WithContext("config.json");
  return c;
}

std::string WriteConfigJson(const ModelConfig& c, FileType type) {
  text::Dict rope = text::MakeDict({{"rope_theta", c.rope_theta}});
  Value scaling = nullptr;
  if (c.rope_scaling.kind == RopeScaling::Kind::kNone) {
    rope.Set("rope_type", "default");
  } else {
    const RopeScaling& s = c.rope_scaling;
    text::Dict dict = text::MakeDict({{"rope_type", s.kind == RopeScaling::Kind::kLinear ? "linear" : "llama3"}, {"factor", s.factor}});
    if (s.kind == RopeScaling::Kind::kLlama3) {
      dict.Set("low_freq_factor", s.low_freq_factor);
      dict.Set("high_freq_factor", s.high_freq_factor);
      dict.Set("original_max_position_embeddings", s.original_max_positions);
    }
    for (const auto& [key, value] : dict.items()) rope.Set(key, value);
    scaling = dict;
  }
  Value eos = nullptr;
  if (c.eos_ids.size() == 1) eos = c.eos_ids[0];
  if (c.eos_ids.size() > 1) eos = text::List(c.eos_ids.begin(), c.eos_ids.end());
  auto id = [](int v) { return v < 0 ? Value(nullptr) : Value(v); };
  const char* dtype = type == FileType::kBF16 ? "bfloat16" : "float32";
  const text::Dict root = text::MakeDict({{"architectures", text::List{"LlamaForCausalLM"}},
                                          {"model_type", "llama"},
                                          {"vocab_size", c.vocab},
                                          {"hidden_size", c.width},
                                          {"intermediate_size", c.ffn},
                                          {"num_hidden_layers", c.layers},
                                          {"num_attention_heads", c.heads},
                                          {"num_key_value_heads", c.kv_heads},
                                          {"head_dim", c.head_dim},
                                          {"hidden_act", "silu"},
                                          {"max_position_embeddings", c.max_positions},
                                          {"rms_norm_eps", c.rms_eps},
                                          {"tie_word_embeddings", c.tied},
                                          {"attention_bias", false},
                                          {"mlp_bias", false},
                                          {"rope_theta", c.rope_theta},
                                          {"rope_scaling", scaling},
                                          {"rope_parameters", rope},
                                          {"bos_token_id", id(c.bos_id)},
                                          {"eos_token_id", eos},
                                          {"pad_token_id", id(c.pad_id)},
                                          {"dtype", dtype},
                                          {"torch_dtype", dtype}});
  text::JsonStyle style;
  style.indent = 2;
  return text::DumpJson(Value(root), style).value() + "\n";
}

Result<ModelConfig> ConfigFromGguf(const GgufFile& file) {
  const Value* architecture = file.Meta("general.architecture");
  if (!architecture || !architecture->is_string() || architecture->as_string() != "llama") {
    return InvalidArgument("the architecture '" + (architecture && architecture->is_string() ? architecture->as_string() : "?") + "' is not supported (llama is)");
  }
  Status status;
  auto integer = [&](const std::string& key, std::optional<int64_t> fallback) -> int {
    const Value* v = file.Meta(key);
    if (v && v->is_int() && v->as_int() >= 0 && v->as_int() <= INT32_MAX) return static_cast<int>(v->as_int());
    if (!v && fallback) return static_cast<int>(*fallback);
    if (status.ok()) status = InvalidArgument("metadata '" + key + "' is " + (v ? "not a number that can be used" : "missing"));
    return 0;
  };
  auto number = [&](const std::string& key, double fallback) {
    const Value* v = file.Meta(key);
    return v && v->is_float() ? v->as_float() : v && v->is_int() ? static_cast<double>(v->as_int()) : fallback;
  };
  // Metadata floats are fp32; the decimal number that was meant is the shortest that rounds to it.
  auto as_written = [](double v) {
    char buffer[32];
    auto [end, error] = std::to_chars(buffer, buffer + sizeof(buffer), static_cast<float>(v));
    return std::strtod(std::string(buffer, end).c_str(), nullptr);
  };
  ModelConfig c;
  const FileTensor* embedding = file.Find("token_embd.weight");
  if (!embedding || embedding->shape.size() != 2) return InvalidArgument("tensor token_embd.weight is missing or no matrix");
  c.vocab = static_cast<int>(std::min<int64_t>(embedding->shape[0], INT32_MAX));
  c.layers = integer("llama.block_count", std::nullopt);
  c.width = integer("llama.embedding_length", std::nullopt);
  c.heads = integer("llama.attention.head_count", std::nullopt);
  c.kv_heads = integer("llama.attention.head_count_kv", c.heads);
  c.ffn = integer("llama.feed_forward_length", std::nullopt);
  c.max_positions = integer("llama.context_length", 2048);
  c.rms_eps = as_written(number("llama.attention.layer_norm_rms_epsilon", 1e-5));
  c.rope_theta = as_written(number("llama.rope.freq_base", 10000));
  c.tied = file.Find("output.weight") == nullptr;
  RETURN_IF_ERROR(status);
  if (c.heads < 1) return InvalidArgument("metadata 'llama.attention.head_count' must be positive");
  c.head_dim = integer("llama.attention.key_length", c.width / c.heads);
  const int rotated = integer("llama.rope.dimension_count", c.head_dim), values = integer("llama.attention.value_length", c.head_dim);
  RETURN_IF_ERROR(status);
  if (rotated != c.head_dim || values != c.head_dim) return InvalidArgument("heads that are rotated in part, or with values of another size, are not supported");
  if (const Value* v = file.Meta("llama.expert_count"); v && v->is_int() && v->as_int() > 0) return InvalidArgument("experts are not supported");
  if (file.Find("rope_freqs.weight")) return InvalidArgument("tensor rope_freqs.weight (scaled rotary frequencies) is not supported");
  if (const Value* v = file.Meta("llama.rope.scaling.type"); v && v->is_string() && v->as_string() != "none") {
    if (v->as_string() != "linear") return InvalidArgument("rope scaling '" + v->as_string() + "' is not supported");
    c.rope_scaling.kind = RopeScaling::Kind::kLinear;
    c.rope_scaling.factor = number("llama.rope.scaling.factor", 1);
  }
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

}  // namespace temper::engine
