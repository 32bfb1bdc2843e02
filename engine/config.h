// What a model is: the sizes and constants of a Llama-family decoder (RMSNorm, RoPE, grouped-query attention, SwiGLU,
// tied or untied head), and the numerics profile it runs in. Plain values; no tensors.
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

struct RopeScaling {
  enum class Kind : uint8_t { kNone, kLinear, kLlama3 };
  Kind kind = Kind::kNone;
  double factor = 1;
  double low_freq_factor = 1;   // llama3 only
  double high_freq_factor = 4;  // llama3 only
  int original_max_positions = 8192;  // llama3 only
};

struct ModelConfig {
  int vocab = 0;          // rows of the embedding
  int layers = 0;
  int width = 0;          // residual stream
  int heads = 0;          // query heads
  int kv_heads = 0;       // divides heads
  int head_dim = 0;       // even; heads * head_dim may differ from width
  int ffn = 0;            // SwiGLU inner width
  int max_positions = 0;  // longest path, in tokens
  double rope_theta = 10000;
  RopeScaling rope_scaling;
  double rms_eps = 1e-5;
  bool tied = true;  // the head is the embedding
  int bos_id = -1;   // -1: none
  int pad_id = -1;
  std::vector<int> eos_ids;

  int q_dim() const { return heads * head_dim; }
  int kv_dim() const { return kv_heads * head_dim; }
  // Every size positive and within sane limits, kv_heads divides heads, head_dim even, ids inside the vocabulary.
  Status Validate() const;
};

}  // namespace temper::engine
