#include "engine/layer.h"

#include <algorithm>
#include <cmath>

namespace temper::engine {

LayerSpec LayerOf(const ModelConfig& c, int layer) {
  const bool gemma3 = c.family == Family::kGemma3, gemma = gemma3 || c.family == Family::kGemma2;
  LayerSpec spec;
  spec.qkv_bias = c.family == Family::kQwen2;
  spec.qk_norm = c.family == Family::kQwen3 || gemma3;
  spec.output_norms = gemma;
  spec.activation = gemma ? Activation::kGeluTanh : Activation::kSilu;
  if (c.window > 0 && (c.windowed.empty() || c.windowed[layer])) spec.window = c.window;
  spec.rope = gemma3 && spec.window ? 1 : 0;
  spec.score_scale = 1 / std::sqrt(c.query_scalar > 0 ? c.query_scalar : static_cast<double>(c.head_dim));
  spec.score_cap = c.score_cap;
  return spec;
}

int LongestWindow(const ModelConfig& config) {
  int longest = 0;
  for (int l = 0; l < config.layers; ++l) {
    const int window = LayerOf(config, l).window;
    if (window == 0) return 0;
    longest = std::max(longest, window);
  }
  return longest;
}

ModelSpec SpecOf(const ModelConfig& c) {
  ModelSpec spec;
  if (c.family == Family::kGemma3 || c.family == Family::kGemma2) {
    spec.gain_offset = 1;
    spec.embedding_scale = std::sqrt(static_cast<double>(c.width));
  }
  if (c.family == Family::kGemma3) spec.ropes = 2;
  spec.logit_cap = c.logit_cap;
  return spec;
}

bool LayerTensor::gain() const {
  switch (role) {
    case Role::kInputGain:
    case Role::kQGain:
    case Role::kKGain:
    case Role::kAttentionGain:
    case Role::kMlpGain:
    case Role::kOutGain: return true;
    default: return false;
  }
}

std::vector<LayerTensor> LayerTensors(const ModelConfig& c) {
  const LayerSpec spec = LayerOf(c, 0);
  std::vector<LayerTensor> out;
  const auto add = [&](bool present, Role role, const char* name, std::vector<int64_t> shape) {
    if (present) out.push_back({role, name, std::move(shape)});
  };
  add(true, Role::kInputGain, "input_layernorm.weight", {c.width});
  add(true, Role::kQ, "self_attn.q_proj.weight", {c.q_dim(), c.width});
  add(true, Role::kK, "self_attn.k_proj.weight", {c.kv_dim(), c.width});
  add(true, Role::kV, "self_attn.v_proj.weight", {c.kv_dim(), c.width});
  add(spec.qkv_bias, Role::kQBias, "self_attn.q_proj.bias", {c.q_dim()});
  add(spec.qkv_bias, Role::kKBias, "self_attn.k_proj.bias", {c.kv_dim()});
  add(spec.qkv_bias, Role::kVBias, "self_attn.v_proj.bias", {c.kv_dim()});
  add(spec.qk_norm, Role::kQGain, "self_attn.q_norm.weight", {c.head_dim});
  add(spec.qk_norm, Role::kKGain, "self_attn.k_norm.weight", {c.head_dim});
  add(true, Role::kO, "self_attn.o_proj.weight", {c.width, c.q_dim()});
  // Where outputs are normed too, the name that others give the MLP's input is that of the attention's output.
  add(spec.output_norms, Role::kAttentionGain, "post_attention_layernorm.weight", {c.width});
  add(true, Role::kMlpGain, spec.output_norms ? "pre_feedforward_layernorm.weight" : "post_attention_layernorm.weight",
      {c.width});
  add(true, Role::kGate, "mlp.gate_proj.weight", {c.ffn, c.width});
  add(true, Role::kUp, "mlp.up_proj.weight", {c.ffn, c.width});
  add(true, Role::kDown, "mlp.down_proj.weight", {c.width, c.ffn});
  add(spec.output_norms, Role::kOutGain, "post_feedforward_layernorm.weight", {c.width});
  return out;
}

LayerIndex::LayerIndex(const ModelConfig& config, int layer) {
  const std::vector<LayerTensor> tensors = LayerTensors(config);
  std::fill(std::begin(index_), std::end(index_), -1);
  int at = 1 + layer * static_cast<int>(tensors.size());
  for (const LayerTensor& t : tensors) index_[static_cast<int>(t.role)] = at++;
}

int FinalGainIndex(const ModelConfig& c) { return 1 + c.layers * static_cast<int>(LayerTensors(c).size()); }
int HeadIndex(const ModelConfig& c) { return c.tied ? 0 : FinalGainIndex(c) + 1; }

}  // namespace temper::engine
