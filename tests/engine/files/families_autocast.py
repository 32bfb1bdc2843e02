"""Gradients of `temper engine grad --numerics bf16` beside PyTorch's autocast to bf16, for a model of every family whose weights are
bf16 numbers: against float64 (`--numerics f64`, which engine_families_test holds to transformers), the relative error of no tensor
may be larger than autocast's.

usage: families_autocast.py TEMPER
"""
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file

TEMPER = pathlib.Path(sys.argv[1]).resolve()
SIZES = dict(vocab_size=320, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
             head_dim=32, max_position_embeddings=320, rms_norm_eps=1e-6, bos_token_id=0, eos_token_id=1, pad_token_id=None,
             tie_word_embeddings=True)
WINDOW = dict(sliding_window=50, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
MODELS = {
    "llama": transformers.LlamaConfig(**SIZES), "qwen2": transformers.Qwen2Config(**{k: v for k, v in SIZES.items() if k != "head_dim"}),
    "qwen3": transformers.Qwen3Config(**SIZES), "mistral": transformers.MistralConfig(**SIZES, sliding_window=50),
    "gemma3": transformers.Gemma3TextConfig(**SIZES, **WINDOW, query_pre_attn_scalar=32, final_logit_softcapping=30.0),
    "gemma2": transformers.Gemma2Config(**SIZES, **WINDOW, query_pre_attn_scalar=32),
}


def make_model(config, rng):
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    gemma = config.model_type in ("gemma2", "gemma3_text")
    with torch.no_grad():
        for name, p in model.named_parameters():
            x = torch.tensor(rng.standard_normal(tuple(p.shape)), dtype=torch.float32)
            if name.endswith("bias"):
                x *= 0.1
            elif p.ndim == 1:
                x = x * 0.1 + (0 if gemma else 1)
            else:
                x *= (0.3 if gemma else 1) / p.shape[1] ** 0.5 if "embed" in name else 1 / p.shape[1] ** 0.5
            p.copy_(x.bfloat16())
    return model


def autocast_gradient(model, rows):
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        objective = 0
        for row in rows:
            ids = torch.tensor([row["ids"]])
            logprobs = torch.log_softmax(model(ids, use_cache=False).logits[0, :-1].float(), -1)
            chosen = logprobs.gather(1, ids[0, 1:, None])[:, 0]
            objective = objective + (chosen * torch.tensor(row["coef"][1:])).sum()
    objective.backward()
    return {name: p.grad.double().numpy() for name, p in model.named_parameters()}


def gradient(folder, rows, numerics):
    (folder / "in.json").write_text(json.dumps({"rows": rows}))
    subprocess.run([TEMPER, "engine", "grad", folder / "model", "--in", folder / "in.json", "--out", folder / "g.safetensors", "--numerics",
                    numerics], check=True, stdout=subprocess.DEVNULL)
    return {k: v.astype(np.float64) for k, v in load_file(folder / "g.safetensors").items()}


def main():
    rng = np.random.default_rng(3)
    bad = 0
    for name, config in MODELS.items():
        model = make_model(config, rng)
        rows = [{"ids": [int(x) for x in rng.integers(0, config.vocab_size, n)], "coef": [float(np.float32(x)) for x in rng.normal(size=n)],
                 "temperature": 1} for n in (257, 130, 90, 40)]
        with tempfile.TemporaryDirectory() as temporary:
            folder = pathlib.Path(temporary)
            model.save_pretrained(folder / "model")
            want, ours = gradient(folder, rows, "f64"), gradient(folder, rows, "bf16")
        theirs = autocast_gradient(model, rows)
        assert set(want) == set(theirs)
        ratios = []
        for tensor, x in want.items():
            norm = np.linalg.norm(x)
            a, b = np.linalg.norm(ours[tensor] - x) / norm, np.linalg.norm(theirs[tensor] - x) / norm
            ratios.append(a / b)
            if a > b:
                bad += 1
                print(f"FAILED {name} {tensor}: {a:.4f}, autocast {b:.4f}")
        print(f"measured: {name}: error over autocast's: {np.median(ratios):.2f} in the median tensor, {max(ratios):.2f} in the worst of "
              f"{len(ratios)}", flush=True)
    return bad != 0


if __name__ == "__main__":
    sys.exit(main())
