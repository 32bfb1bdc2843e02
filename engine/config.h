// What a model is: its family, the sizes and constants of a decoder (RMSNorm, RoPE, grouped-query attention, gated MLP, tied or
// untied head), and the numerics profile it runs in. Plain values; no tensors. What they make of a layer: engine/layer.h.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/status.h"

namespace temper::engine {

// docs/numerics.md 2. All engines of a job run the same profile; bit equality is promised inside a profile.
enum class Profile : uint8_t {
  kBf16,  // inputs of every GEMM and of attention bf16, all else fp32
  kF32,   // everything fp32, K-ordered FMA in blocks of 32
};
const char* ProfileName(Profile profile);             // "bf16", "f32"
Result<Profile> ParseProfile(const std::string& name);  // InvalidArgument for any other word

// Named as config.json names them ("model_type"), but for "gemma3_text".
enum class Family : uint8_t { kLlama, kQwen2, kQwen3, kMistral, kGemma3, kGemma2 };
const char* FamilyName(Family family);                   // "llama", "qwen2", "qwen3", "mistral", "gemma3", "gemma2"
Result<Family> ParseFamily(const std::string& name);  // InvalidArgument for any other word

struct RopeScaling {
  // kDynamic: as trained up to max_positions and other frequencies for a longer row; max_positions is also the longest row here,
  // so it is kept for saving and changes no angle.
  enum class Kind : uint8_t { kNone, kLinear, kDynamic, kLlama3, kYarn };
  Kind kind = Kind::kNone;
  double factor = 1;
  double low_freq_factor = 1;         // llama3 only
  double high_freq_factor = 4;        // llama3 only
  int original_max_positions = 8192;  // llama3 and yarn
  double beta_fast = 32;              // yarn only: turns within the original positions above which a pair stays as it was,
  double beta_slow = 1;               // … and below which it is stretched
  double attention_factor = 1;        // yarn only: multiplies cos and sin
  bool truncate = true;               // yarn only: the borders between the two are whole pairs
  bool operator==(const RopeScaling&) const = default;
};
const char* RopeScalingName(RopeScaling::Kind kind);  // "default" for kNone, else as config.json names it
Result<RopeScaling::Kind> ParseRopeScaling(const std::string& name);

struct ModelConfig {
  Family family = Family::kLlama;
  int vocab = 0;          // rows of the embedding
  int layers = 0;
  int width = 0;          // residual stream
  int heads = 0;          // query heads
  int kv_heads = 0;       // divides heads
  int head_dim = 0;       // even; heads * head_dim may differ from width
  int ffn = 0;            // inner width of the gated MLP
  int max_positions = 0;  // longest path, in tokens
  double rope_theta = 10000;
  RopeScaling rope_scaling;
  double rms_eps = 1e-5;
  bool tied = true;  // the head is the embedding
  int window = 0;    // tokens that a windowed layer sees, its own among them; 0: no layer is windowed
  std::vector<uint8_t> windowed;  // per layer, or empty: all of them when there is a window
  double local_rope_theta = 10000;  // Gemma 3: of the windowed layers
  double query_scalar = 0;  // scores are divided by the root of it; 0: of head_dim
  double score_cap = 0;     // scores s become cap · tanh(s / cap); 0: they stay. Of files Gemma 2 alone has it
  double logit_cap = 0;     // the same for logits
  int bos_id = -1;  // -1: none
  int pad_id = -1;
  std::vector<int> eos_ids;

  int q_dim() const { return heads * head_dim; }
  int kv_dim() const { return kv_heads * head_dim; }
  // Every size positive and within sane limits, kv_heads divides heads, head_dim even, ids inside the vocabulary, nothing set
  // that the family does not have.
  Status Validate() const;
  bool operator==(const ModelConfig&) const = default;
};

}  // namespace temper::engine
