"""Writes families_gguf/NAME.gguf: the models of families/, as llama.cpp's converter writes them.

Run: python3 families_gguf.py, which writes into the folder it runs in (gguf 0.19.0, safetensors, numpy 2.4.6).
"""
import json
import pathlib

import gguf
import numpy as np
from safetensors.numpy import load_file

HERE = pathlib.Path(__file__).resolve().parent
NAMES = {"input_layernorm.weight": "attn_norm.weight", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
         "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
GEMMA_NAMES = {"post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm"}
OTHER_NAMES = {"post_attention_layernorm": "ffn_norm"}
OUTSIDE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}


def name_of(name, gemma):
    if name in OUTSIDE:
        return OUTSIDE[name]
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    for ours, theirs in {**NAMES, **(GEMMA_NAMES if gemma else OTHER_NAMES)}.items():
        if rest.startswith(ours):
            return f"blk.{layer}.{theirs}{rest.removeprefix(ours)}"
    raise KeyError(name)


def rope_factors(theta, head_dim, factor, low, high, original):
    out = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        if wavelength < original / high:
            out.append(1)
        elif wavelength > original / low:
            out.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


def write(name):
    c = json.loads((HERE / "families" / name / "config.json").read_text())
    kind = c["model_type"]
    gemma, permuted = kind in ("gemma2", "gemma3_text"), kind in ("llama", "mistral")
    w = gguf.GGUFWriter(f"families_gguf/{name}.gguf", "llama" if permuted else kind.removesuffix("_text"))
    heads, kv = c["num_attention_heads"], c["num_key_value_heads"]
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"])
    w.add_block_count(c["num_hidden_layers"])
    w.add_feed_forward_length(c["intermediate_size"])
    w.add_head_count(heads)
    w.add_head_count_kv(kv)
    w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    w.add_bos_token_id(c["bos_token_id"])
    w.add_eos_token_id(c["eos_token_id"])
    if "head_dim" in c:
        w.add_key_length(c["head_dim"])
        w.add_value_length(c["head_dim"])
    rope = c["rope_parameters"]
    if gemma:
        w.add_sliding_window(c["sliding_window"])
        if kind == "gemma3_text":
            w.add_sliding_window_pattern(2)
        for key, add in (("final_logit_softcapping", w.add_final_logit_softcapping), ("attn_logit_softcapping", w.add_attn_logit_softcapping)):
            if c[key] is not None:
                add(c[key])
        rope = rope.get("full_attention", rope)
    if kind == "mistral":
        w.add_sliding_window(c["sliding_window"])
    theta = rope["rope_theta"]
    if kind == "llama":  # the scaling of Llama 3.1, whatever the folder has
        theta = 500000.0
        w.add_tensor("rope_freqs.weight", rope_factors(theta, c["head_dim"], 8.0, 1.0, 4.0, 8192))
    w.add_rope_freq_base(theta)
    if rope["rope_type"] in ("linear", "yarn"):
        w.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        w.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    for key, x in load_file(HERE / "families" / name / "model.safetensors").items():
        for part, count in (("q_proj.weight", heads), ("k_proj.weight", kv)):
            if permuted and key.endswith(part):
                x = x.reshape(count, 2, x.shape[0] // count // 2, -1).swapaxes(1, 2).reshape(x.shape)
        if gemma and key.endswith("norm.weight"):
            x = x + np.float32(1)
        w.add_tensor(name_of(key, gemma), np.ascontiguousarray(x))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


pathlib.Path("families_gguf").mkdir(exist_ok=True)
for folder in sorted((HERE / "families").iterdir()):
    write(folder.name)
