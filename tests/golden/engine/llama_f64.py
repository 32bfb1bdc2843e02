"""Writes llama_f64.json: log-probabilities and gradients of a tiny Llama in float64, by PyTorch autograd over separate rows.

Run: python3 llama_f64.py, which writes into the folder it runs in (needs torch, transformers, numpy; versions are recorded in
the file).

transformers' own Llama keeps norms, rotary angles and softmax in fp32 and cannot judge a double to 1e-9, so the model is
written out here; that it is the same model is checked against transformers' LlamaForCausalLM to fp32 accuracy.
"""
import json
import math

import numpy as np
import torch
import transformers

CONFIG = dict(vocab=23, layers=2, width=16, heads=4, kv_heads=2, head_dim=6, ffn=24, max_positions=96,
              rope_theta=10000.0, rms_eps=1e-5, tied=False)
SEED = 42
TEMPERATURE = 0.8
M64 = (1 << 64) - 1


def mix(x):
    x = (x + 0x9E3779B97F4A7C15) & M64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M64
    return x ^ (x >> 31)


def normal(key, counter):  # as engine/parameters.cpp
    total = 0
    for i in range(4):
        x = mix(key ^ mix(counter * 4 + i))
        total += sum(x >> (21 * j) & 0x1FFFFF for j in range(3))
    return np.float32((total - 6.0 * 0x1FFFFF) / 0x200000)


def specs(c):
    out = [("model.embed_tokens.weight", (c["vocab"], c["width"]))]
    q, kv = c["heads"] * c["head_dim"], c["kv_heads"] * c["head_dim"]
    for l in range(c["layers"]):
        p = f"model.layers.{l}."
        out += [(p + "input_layernorm.weight", (c["width"],)),
                (p + "self_attn.q_proj.weight", (q, c["width"])), (p + "self_attn.k_proj.weight", (kv, c["width"])),
                (p + "self_attn.v_proj.weight", (kv, c["width"])), (p + "self_attn.o_proj.weight", (c["width"], q)),
                (p + "post_attention_layernorm.weight", (c["width"],)),
                (p + "mlp.gate_proj.weight", (c["ffn"], c["width"])), (p + "mlp.up_proj.weight", (c["ffn"], c["width"])),
                (p + "mlp.down_proj.weight", (c["width"], c["ffn"]))]
    out += [("model.norm.weight", (c["width"],)), ("lm_head.weight", (c["vocab"], c["width"]))]
    return out


def parameters(c, seed):
    """InitParameters of the engine, then matrices * 2.5 and norms 1 + (index % 7 - 3) / 16, in fp32."""
    out = {}
    for i, (name, shape) in enumerate(specs(c)):
        n = math.prod(shape)
        if len(shape) == 1:
            values = [np.float32(1 + (j % 7 - 3) / 16) for j in range(n)]
        else:
            deviation = math.sqrt(2.0 / (5.0 * c["width"]))
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                deviation /= math.sqrt(2.0 * c["layers"])
            if name == "model.embed_tokens.weight":
                deviation = 1.0 / math.sqrt(c["width"])
            if name == "lm_head.weight":
                deviation = 0.02
            key = mix((mix(seed) + i) & M64)
            values = [normal(key, j) * np.float32(deviation) * np.float32(2.5) for j in range(n)]
        out[name] = torch.tensor(np.array(values, np.float32).reshape(shape), dtype=torch.float64, requires_grad=True)
    return out


def norm(x, gain, eps):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * gain


def rotate(x, c):
    half = c["head_dim"] // 2
    inverse = torch.tensor([c["rope_theta"] ** (-2 * i / c["head_dim"]) for i in range(half)], dtype=torch.float64)
    angle = torch.arange(x.shape[0], dtype=torch.float64)[:, None] * inverse
    cos, sin = angle.cos()[:, None, :], angle.sin()[:, None, :]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def logits(p, c, ids):
    n, hd = len(ids), c["head_dim"]
    x = p["model.embed_tokens.weight"][ids]
    mask = torch.full((n, n), -math.inf, dtype=torch.float64).triu(1)
    for l in range(c["layers"]):
        t = lambda name: p[f"model.layers.{l}.{name}.weight"]
        h = norm(x, t("input_layernorm"), c["rms_eps"])
        q = rotate((h @ t("self_attn.q_proj").T).view(n, c["heads"], hd), c)
        k = rotate((h @ t("self_attn.k_proj").T).view(n, c["kv_heads"], hd), c)
        v = (h @ t("self_attn.v_proj").T).view(n, c["kv_heads"], hd)
        group = c["heads"] // c["kv_heads"]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(hd) + mask
        o = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(n, -1)
        x = x + o @ t("self_attn.o_proj").T
        h = norm(x, t("post_attention_layernorm"), c["rms_eps"])
        x = x + (torch.nn.functional.silu(h @ t("mlp.gate_proj").T) * (h @ t("mlp.up_proj").T)) @ t("mlp.down_proj").T
    return norm(x, p["model.norm.weight"], c["rms_eps"]) @ p["lm_head.weight"].T


def check_against_transformers(p, c, ids):
    config = transformers.LlamaConfig(
        vocab_size=c["vocab"], hidden_size=c["width"], intermediate_size=c["ffn"], num_hidden_layers=c["layers"],
        num_attention_heads=c["heads"], num_key_value_heads=c["kv_heads"], head_dim=c["head_dim"],
        max_position_embeddings=c["max_positions"], rms_norm_eps=c["rms_eps"], rope_theta=c["rope_theta"],
        tie_word_embeddings=c["tied"])
    model = transformers.LlamaForCausalLM(config).to(torch.float64).eval()
    missing = model.load_state_dict({k: v.detach() for k, v in p.items()}, strict=False)
    assert not missing.missing_keys and not missing.unexpected_keys, missing
    theirs = model(torch.tensor([ids])).logits[0]
    ours = logits(p, c, ids)
    error = (theirs - ours).abs().max().item()
    assert error < 1e-5, error
    return error


def main():
    c = CONFIG
    p = parameters(c, SEED)
    rng = np.random.default_rng(7)
    trunk = [int(x) for x in rng.integers(0, c["vocab"], 70)]
    rows = [trunk, trunk[:20] + [int(x) for x in rng.integers(0, c["vocab"], 30)],
            trunk[:64] + [int(x) for x in rng.integers(0, c["vocab"], 9)], trunk[:64] + [int(x) for x in rng.integers(0, c["vocab"], 5)],
            trunk[:33], [int(x) for x in rng.integers(0, c["vocab"], 2)]]
    coef = [[float(np.float32(x)) for x in rng.normal(size=len(r))] for r in rows]
    print("transformers differs by", check_against_transformers(p, c, rows[0]))
    objective, logprobs = 0, []
    for ids, weights in zip(rows, coef):
        lp = (logits(p, c, ids) / TEMPERATURE).log_softmax(-1)
        chosen = lp[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        objective = objective + (chosen * torch.tensor(weights[1:], dtype=torch.float64)).sum()
        logprobs.append([None] + chosen.tolist())
    objective.backward()
    out = dict(made_with=dict(torch=torch.__version__, transformers=transformers.__version__, numpy=np.__version__),
               config=c, seed=SEED, temperature=TEMPERATURE, rows=rows, coef=coef, objective=objective.item(),
               logprobs=logprobs, gradient={k: v.grad.flatten().tolist() for k, v in p.items()})
    with open("llama_f64.json", "w") as f:
        json.dump(out, f)
        f.write("\n")


main()
