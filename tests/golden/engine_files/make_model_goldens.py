"""Writes small model files and what other libraries read from them: python make_model_goldens.py (in this folder).

Run with gguf 0.19.0, transformers 5.24, torch 2.15. tiny.gguf: llama, every tensor type that is read, Q and K permuted, a smollm
tokenizer; tiny_expected.json: its tensors dequantised by gguf and put back in Hugging Face's order, as first values and CRC-32 of all. hf/: a folder saved by
transformers with config.json of the newer form; hf_logits.json: logits of transformers in float64.
"""
import json
import zlib

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from transformers import LlamaConfig, LlamaForCausalLM

WIDTH, HEADS, KV, DIM, FFN, LAYERS = 64, 4, 2, 16, 96, 2
rng = np.random.default_rng(7)
alphabet = [chr(c) for c in (*range(33, 127), *range(0xA1, 0xAD), *range(0xAE, 0x100), *range(0x100, 0x144))]
tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "ab", "Ġab"]
types = [3, 3, 3] + [1] * (len(tokens) - 3)
VOCAB = len(tokens)
w = gguf.GGUFWriter("tiny.gguf", "llama")
w.add_context_length(128)
w.add_embedding_length(WIDTH)
w.add_block_count(LAYERS)
w.add_feed_forward_length(FFN)
w.add_head_count(HEADS)
w.add_head_count_kv(KV)
w.add_layer_norm_rms_eps(1e-5)
w.add_rope_freq_base(10000.0)
w.add_vocab_size(VOCAB)
w.add_tokenizer_model("gpt2")
w.add_tokenizer_pre("smollm")
w.add_token_list(tokens)
w.add_token_types(types)
w.add_token_merges(["a b", "Ġ ab"])
w.add_bos_token_id(1)
w.add_eos_token_id(2)
w.add_add_bos_token(False)
w.add_chat_template("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}")
Q = gguf.GGMLQuantizationType
expected = {}


def add(name, hf, shape, kind, heads=0):
    x = rng.standard_normal(shape).astype(np.float32) * 0.1
    stored = x
    if heads:  # as llama.cpp's converter does
        stored = x.reshape(heads, 2, DIM // 2, -1).swapaxes(1, 2).reshape(x.shape)
    data = quantize(stored, kind)
    w.add_tensor(name, data, raw_dtype=kind)
    back = dequantize(data, kind).astype(np.float32).reshape(shape)
    if heads:
        back = back.reshape(heads, DIM // 2, 2, -1).swapaxes(1, 2).reshape(shape)
    expected[hf] = np.ascontiguousarray(back)


kinds = [Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.F16, Q.BF16, Q.F32, Q.Q4_1]
add("token_embd.weight", "model.embed_tokens.weight", (VOCAB, WIDTH), Q.Q8_0)
for i in range(LAYERS):
    for k, (name, hf, shape, heads) in enumerate([
            ("attn_q", "self_attn.q_proj", (HEADS * DIM, WIDTH), HEADS), ("attn_k", "self_attn.k_proj", (KV * DIM, WIDTH), KV),
            ("attn_v", "self_attn.v_proj", (KV * DIM, WIDTH), 0), ("attn_output", "self_attn.o_proj", (WIDTH, HEADS * DIM), 0),
            ("ffn_gate", "mlp.gate_proj", (FFN, WIDTH), 0), ("ffn_up", "mlp.up_proj", (FFN, WIDTH), 0), ("ffn_down", "mlp.down_proj", (WIDTH, FFN), 0)]):
        add(f"blk.{i}.{name}.weight", f"model.layers.{i}.{hf}.weight", shape, kinds[(k + 2 * i) % len(kinds)], heads)
    for name, hf in (("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm")):
        add(f"blk.{i}.{name}.weight", f"model.layers.{i}.{hf}.weight", (WIDTH,), Q.F32)
add("output_norm.weight", "model.norm.weight", (WIDTH,), Q.F32)
w.write_header_to_file()
w.write_kv_data_to_file()
w.write_tensors_to_file()
w.close()
json.dump({k: {"first": [float(x) for x in v.ravel()[:4]], "crc32": zlib.crc32(v.tobytes())} for k, v in expected.items()}, open("tiny_expected.json", "w"), indent=0)

torch.manual_seed(3)
config = LlamaConfig(vocab_size=40, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                     max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=False, bos_token_id=0, eos_token_id=[1, 2],
                     rope_parameters={"rope_type": "llama3", "rope_theta": 5000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                      "original_max_position_embeddings": 32})
model = LlamaForCausalLM(config).float()
model.save_pretrained("hf", max_shard_size="12KB")
ids = [3, 1, 4, 1, 5, 9, 2, 6, 35, 8, 39]
model = model.double()
with torch.no_grad():
    logits = model(torch.tensor([ids])).logits[0]
    logprobs = torch.log_softmax(logits, -1)
json.dump({"ids": ids, "logprobs": [logprobs[i, ids[i + 1]].item() for i in range(len(ids) - 1)]}, open("hf_logits.json", "w"))
