"""Writes families/NAME for every family of models: a Hugging Face folder with a tiny random model, saved by transformers in fp32, and
what transformers computes with it in float64: golden.json (rows, coefficients, log-probabilities, objective) and
gradient.safetensors (of every parameter). And ropes.json: frequencies of every kind of rotary scaling.

Run: python3 families_f64.py, which writes into the folder it runs in (torch 2.15, transformers 5.24, numpy 2.4, safetensors;
versions are recorded in the files).

transformers keeps norms, rotary angles and softmax in fp32 whatever the model's type, which cannot judge a double. Inside
`all_double` the names by which it asks for fp32 mean float64, so that its own code runs in double throughout.
"""
import contextlib
import json
import pathlib

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

TEMPERATURE = 0.8
SIZES = dict(vocab_size=23, hidden_size=16, intermediate_size=20, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=96, rms_norm_eps=1e-5, bos_token_id=0, eos_token_id=1, pad_token_id=None)
GEMMA = dict(SIZES, head_dim=6, query_pre_attn_scalar=10, sliding_window=7,
             layer_types=["sliding_attention", "full_attention", "sliding_attention"])
MODELS = {
    "llama": transformers.LlamaConfig(**SIZES, head_dim=6, tie_word_embeddings=False, rope_parameters={
        "rope_type": "llama3", "rope_theta": 5000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32}),
    "qwen2": transformers.Qwen2Config(**SIZES, tie_word_embeddings=True, use_sliding_window=True, sliding_window=9, max_window_layers=1,
                                      rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, "factor": 3.0,
                                                       "original_max_position_embeddings": 32}),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=6, tie_word_embeddings=False,
                                      rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "mistral": transformers.MistralConfig(**SIZES, head_dim=6, sliding_window=11,
                                          rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
    "gemma3": transformers.Gemma3TextConfig(**GEMMA, rope_parameters={
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}),
    # Of the two caps this family's code applies the second alone; Gemma 2's both. A width that is no square tells what its root is.
    "gemma3_caps": transformers.Gemma3TextConfig(**GEMMA, attn_logit_softcapping=1.5, final_logit_softcapping=2.0),
    "gemma2": transformers.Gemma2Config(**dict(GEMMA, hidden_size=24), attn_logit_softcapping=1.5, final_logit_softcapping=2.0),
}
ROPES = [
    dict(rope_type="linear", factor=2.0), dict(rope_type="dynamic", factor=4.0),
    dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=128),
    dict(rope_type="llama3", factor=32.0, low_freq_factor=2.0, high_freq_factor=8.0, original_max_position_embeddings=8192),
    dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768),
    dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=512, beta_fast=16.0, beta_slow=2.0, truncate=False),
    dict(rope_type="yarn", factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=0.7),
    dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=64, attention_factor=1.25),
]


@contextlib.contextmanager
def all_double():
    names = (torch.float32, torch.float, torch.Tensor.float)
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = names
        torch.set_default_dtype(torch.float32)


def values(name, shape, rng, gemma):
    x = rng.standard_normal(shape)
    if name.endswith("bias"):
        return x * 0.2
    if len(shape) == 1:
        return x * 0.2 + (0 if gemma else 1)
    return x * (0.5 if "embed" in name or "lm_head" in name else 0.3)


def write_model(name, config, rng):
    cls = getattr(transformers, config.architectures[0] if config.architectures else {
        "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "mistral": "MistralForCausalLM",
        "gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM"}[config.model_type])
    config._attn_implementation = "eager"
    folder = pathlib.Path("families") / name
    model = cls(config)
    gemma = config.model_type in ("gemma2", "gemma3_text")
    with torch.no_grad():
        for key, p in model.named_parameters():
            p.copy_(torch.tensor(values(key, tuple(p.shape), rng, gemma), dtype=torch.float32))
    model.save_pretrained(folder)
    for other in folder.glob("generation_config.json"):
        other.unlink()
    vocab = config.vocab_size
    trunk = [int(x) for x in rng.integers(0, vocab, 70)]
    rows = [trunk, trunk[:20] + [int(x) for x in rng.integers(0, vocab, 30)], trunk[:64] + [int(x) for x in rng.integers(0, vocab, 7)],
            [int(x) for x in rng.integers(0, vocab, 2)]]
    coef = [[float(np.float32(x)) for x in rng.normal(size=len(r))] for r in rows]
    with all_double():
        double = cls(config).double().eval()
        double.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
        objective, logprobs = 0, []
        for ids, weights in zip(rows, coef):
            logits = double(torch.tensor([ids]), use_cache=False).logits[0]
            assert logits.dtype == torch.float64
            chosen = (logits / TEMPERATURE).log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            objective = objective + (chosen * torch.tensor(weights[1:], dtype=torch.float64)).sum()
            logprobs.append([None] + chosen.tolist())
        objective.backward()
    single = model(torch.tensor([rows[0]]), use_cache=False).logits[0].double()  # the model as it is, in fp32
    again = double(torch.tensor([rows[0]]), use_cache=False).logits[0]
    print(name, "differs from fp32 by", (single - again).abs().max().item())
    assert (single - again).abs().max() < 1e-4
    golden = dict(made_with=dict(torch=torch.__version__, transformers=transformers.__version__, numpy=np.__version__),
                  temperature=TEMPERATURE, rows=rows, coef=coef, objective=objective.item(), logprobs=logprobs)
    (folder / "golden.json").write_text(json.dumps(golden) + "\n")
    save_file({k: p.grad for k, p in double.named_parameters()}, folder / "gradient.safetensors")


def write_ropes():
    out = []
    for scaling in ROPES:
        for head_dim, theta, positions in [(64, 10000.0, 4096), (128, 500000.0, 32768), (6, 5000.0, 96)]:
            config = transformers.LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, max_position_embeddings=positions,
                                              rope_parameters=dict(scaling, rope_theta=theta))
            with all_double():
                inverse, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, None)
            assert inverse.dtype == torch.float64
            out.append(dict(config=json.loads(config.to_json_string(use_diff=False)), inverse=inverse.tolist(), factor=float(factor)))
    pathlib.Path("ropes.json").write_text(json.dumps(dict(transformers=transformers.__version__, cases=out)) + "\n")


def main():
    rng = np.random.default_rng(11)
    for name, config in MODELS.items():
        write_model(name, config, rng)
    write_ropes()


main()
