#include "engine/config.h"

#include <fmt/format.h>

namespace temper::engine {

const char* ProfileName(Profile profile) { return profile == Profile::kBf16 ? "bf16" : "f32"; }

Result<Profile> ParseProfile(const std::string& name) {
  if (name == "bf16") return Profile::kBf16;
  if (name == "f32") return Profile::kF32;
  return InvalidArgument(fmt::format("numerics '{}' is not one of bf16, f32", name));
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
  if (rope_scaling.kind != RopeScaling::Kind::kNone && !(rope_scaling.factor > 0)) {
    return InvalidArgument(fmt::format("rope scaling factor {}", rope_scaling.factor));
  }
  for (int id : eos_ids) {
    if (id < 0 || id >= vocab) return InvalidArgument(fmt::format("eos id {} with vocab {}", id, vocab));
  }
  if (bos_id >= vocab || pad_id >= vocab) return InvalidArgument(fmt::format("bos/pad id outside vocab {}", vocab));
  return Status::Ok();
}

}  // namespace temper::engine
