#include "engine/config.h"

#include <fmt/format.h>

namespace temper::engine {

const char* ProfileName(Profile profile) { return profile == Profile::kBf16 ? "bf16" : "f32"; }

Result<Profile> ParseProfile(const std::string& name) {
  if (name == "bf16") return Profile::kBf16;
  if (name == "f32") return Profile::kF32;
  return InvalidArgument(fmt::format("numerics '{}' is not one of bf16, f32", name));
}

namespace {

constexpr const char* kFamilies[] = {"llama", "qwen2", "qwen3", "mistral", "gemma3", "gemma2"};
constexpr const char* kScalings[] = {"default", "linear", "dynamic", "llama3", "yarn"};

Status CheckScaling(const RopeScaling& s) {
  if (s.kind == RopeScaling::Kind::kNone) return Status::Ok();
  const auto bad = [](const char* what, double value) { return InvalidArgument(fmt::format("rope scaling {} {}", what, value)); };
  if (!(s.factor > 0) || !(s.factor < 1e9)) return bad("factor", s.factor);
  if (!(s.low_freq_factor > 0) || !(s.low_freq_factor < s.high_freq_factor)) return bad("low_freq_factor", s.low_freq_factor);
  if (!(s.high_freq_factor < 1e9)) return bad("high_freq_factor", s.high_freq_factor);
  if (s.original_max_positions < 1) return bad("original positions", s.original_max_positions);
  if (!(s.beta_slow > 0) || !(s.beta_slow < 1e9)) return bad("beta_slow", s.beta_slow);
  if (!(s.beta_fast > 0) || !(s.beta_fast < 1e9)) return bad("beta_fast", s.beta_fast);
  if (!(s.attention_factor > 0) || !(s.attention_factor < 1e9)) return bad("attention_factor", s.attention_factor);
  return Status::Ok();
}

}  // namespace

const char* FamilyName(Family family) { return kFamilies[static_cast<int>(family)]; }

Result<Family> ParseFamily(const std::string& name) {
  for (int i = 0; i < 6; ++i) {
    if (name == kFamilies[i]) return static_cast<Family>(i);
  }
  return InvalidArgument(fmt::format("the family '{}' is not one of llama, qwen2, qwen3, mistral, gemma3, gemma2", name));
}

const char* RopeScalingName(RopeScaling::Kind kind) { return kScalings[static_cast<int>(kind)]; }

Result<RopeScaling::Kind> ParseRopeScaling(const std::string& name) {
  for (int i = 0; i < 5; ++i) {
    if (name == kScalings[i]) return static_cast<RopeScaling::Kind>(i);
  }
  return InvalidArgument(fmt::format("rope scaling '{}' is not one of default, linear, dynamic, llama3, yarn", name));
}

Status ModelConfig::Validate() const {
  struct Size {
    const char* name;
    int64_t value;
    int64_t limit;
  };
  const Size sizes[] = {{"vocab", vocab, 1 << 21},     {"layers", layers, 1024},        {"width", width, 1 << 16},
                        {"heads", heads, 1024},        {"kv_heads", kv_heads, 1024},    {"head_dim", head_dim, 1024},
                        {"ffn", ffn, 1 << 18},         {"max_positions", max_positions, 1 << 24}};
  for (const Size& size : sizes) {
    if (size.value < 1 || size.value > size.limit) {
      return InvalidArgument(fmt::format("model {} = {} is outside 1 … {}", size.name, size.value, size.limit));
    }
  }
  if (heads % kv_heads) return InvalidArgument(fmt::format("{} heads are no multiple of {} kv_heads", heads, kv_heads));
  if (head_dim % 2) return InvalidArgument(fmt::format("head_dim {} is odd: rotary positions need pairs", head_dim));
  if (!(rope_theta > 1) || !(rope_theta < 1e12)) return InvalidArgument(fmt::format("rope_theta {}", rope_theta));
  if (!(rms_eps > 0) || !(rms_eps < 1)) return InvalidArgument(fmt::format("rms_eps {}", rms_eps));
  RETURN_IF_ERROR(CheckScaling(rope_scaling));
  if (!(local_rope_theta > 1) || !(local_rope_theta < 1e12)) {
    return InvalidArgument(fmt::format("local_rope_theta {}", local_rope_theta));
  }
  if (window < 0 || window > 1 << 24) return InvalidArgument(fmt::format("window {}", window));
  if (window && family == Family::kLlama) return InvalidArgument("a window in a model of the family llama");
  if (!windowed.empty() && windowed.size() != static_cast<size_t>(layers)) {
    return InvalidArgument(fmt::format("{} layers, and {} that are windowed or not", layers, windowed.size()));
  }
  for (const auto& [name, value] :
       {std::pair{"query_scalar", query_scalar}, {"score_cap", score_cap}, {"logit_cap", logit_cap}}) {
    if (!(value >= 0) || !(value < 1e6) || (value > 0 && value < 1e-6)) return InvalidArgument(fmt::format("{} {}", name, value));
    if (value > 0 && family != Family::kGemma3 && family != Family::kGemma2) {
      return InvalidArgument(fmt::format("{} in a model of the family {}", name, FamilyName(family)));
    }
  }
  for (int id : eos_ids) {
    if (id < 0 || id >= vocab) return InvalidArgument(fmt::format("eos id {} with vocab {}", id, vocab));
  }
  if (bos_id >= vocab || pad_id >= vocab) return InvalidArgument(fmt::format("bos/pad id outside vocab {}", vocab));
  return Status::Ok();
}

}  // namespace temper::engine
