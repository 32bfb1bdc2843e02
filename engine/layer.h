// What a layer is. This page, the loader (engine/files/model_config_json.cpp) and the names in layer.cpp are all that knows a
// family; every pass follows the page: forward over trees and pages, backward, the float64 path, the compute form. One layer, x →
// x:
//
//   h = norm(x) · g_in
//   q, k, v = Wq h (+ bq), Wk h (+ bk), Wv h (+ bv)                 qkv_bias
//   q, k of every head: norm over head_dim · g_q, g_k               qk_norm
//   q, k turned by the angles of their position                     rope: which of the model's tables
//   s = q · k · score_scale;  s = cap · tanh(s / cap)               score_cap
//   a = softmax over the keys at positions (p - window, p]          window (0: [0, p])
//   o = Wo (a · v);  o = norm(o) · g_attention                      output_norms
//   y = x + o
//   h = norm(y) · g_mlp
//   m = Wdown (activation(Wgate h) * (Wup h));  m = norm(m) · g_out activation, output_norms
//   x = y + m
//
// Before the first layer x = E[token] · embedding_scale; after the last, logits = W (norm(x) · g), capped like the scores, times
// 1/T. norm(x) = x / √(mean(x²) + eps). Every gain is a stored vector w, meaning w + gain_offset.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/config.h"

namespace temper::engine {

enum class Activation : uint8_t { kSilu, kGeluTanh };

struct LayerSpec {
  bool qkv_bias = false;
  bool qk_norm = false;
  bool output_norms = false;
  Activation activation = Activation::kSilu;
  int window = 0;
  int rope = 0;
  double score_scale = 1;
  double score_cap = 0;
};
LayerSpec LayerOf(const ModelConfig& config, int layer);
// The window of the layer that sees the farthest back; 0 when one sees everything. What lies before it is needed by no later token.
int LongestWindow(const ModelConfig& config);

struct ModelSpec {
  double gain_offset = 0;
  double embedding_scale = 1;
  double logit_cap = 0;
  int ropes = 1;  // rotary tables
};
ModelSpec SpecOf(const ModelConfig& config);

// The tensors of a layer in canonical order: every layer of a model has the same.
enum class Role : uint8_t {
  kInputGain, kQ, kK, kV, kQBias, kKBias, kVBias, kQGain, kKGain, kO, kAttentionGain, kMlpGain, kGate, kUp, kDown, kOutGain,
};
constexpr int kRoles = 16;
struct LayerTensor {
  Role role;
  const char* name;  // what follows "model.layers.N."
  std::vector<int64_t> shape;
  bool gain() const;
};
std::vector<LayerTensor> LayerTensors(const ModelConfig& config);

// Where a layer's tensors stand in the canonical order of all (engine/parameters.h): -1 for what the family does not have.
class LayerIndex {
 public:
  LayerIndex(const ModelConfig& config, int layer);
  int operator[](Role role) const { return index_[static_cast<int>(role)]; }

 private:
  int index_[kRoles];
};
// The same for what stands outside of layers; the embedding is tensor 0, and the head when it is tied.
int FinalGainIndex(const ModelConfig& config);
int HeadIndex(const ModelConfig& config);

}  // namespace temper::engine
