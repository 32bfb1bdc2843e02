"""Measures peers of `temper bench`: `peers.py torch THREADS PATH CLOCK`, then a line of JSON a request, its seconds in return.

{"work": "gemm", "m", "n", "k", "library", "dtype", "repeats"}; {"work": "decode", "config", "batch", "context", "dtype"}; {"work": "prefill", "config",
"tokens", "dtype"}; {"work": "step", "config", "rows", "length", "mode"}. Models have random weights of the config's shape. PATH
(avx2, avx512, amx) caps the libraries alike.
"""
import json
import os
import sys
import time

NAME, THREADS, PATH, CLOCK = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
now = {"wall": time.perf_counter, "cpu": time.process_time}[CLOCK]
if PATH in ("avx2", "avx512"):
    os.environ["ONEDNN_MAX_CPU_ISA"] = {"avx2": "AVX2", "avx512": "AVX512_CORE"}[PATH]
    os.environ["MKL_ENABLE_INSTRUCTIONS"] = PATH.upper()
    os.environ["ATEN_CPU_CAPABILITY"] = PATH
if PATH == "avx2":
    os.environ["OPENBLAS_CORETYPE"] = "Haswell"
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = str(THREADS)
answers = os.dup(1)
os.dup2(2, 1)  # what libraries print is no answer

import torch  # noqa: E402

torch.set_num_threads(THREADS)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
held = {}


def once(key, make):
    if key not in held:
        held[key] = make()
    return held[key]


def gemm(m, n, k, library, dtype, repeats):
    # As many matrices as ours are read from: none is in a cache when its turn comes.
    key = ("gemm", m, n, k, library, dtype)
    if key not in held:
        held.clear()  # what served the last product

    def make():
        copies = max(1, (160 << 20) // (n * k * 4))
        weights = [torch.randn(n, k, dtype=DTYPES[dtype]) for _ in range(copies)]
        x = torch.randn(m, k, dtype=DTYPES[dtype])
        if library == "openblas":  # numpy's
            return [w.numpy() for w in weights], lambda w, x=x.numpy(): x @ w.T, [0]
        if library == "onednn":
            packed = [torch.ops.mkldnn._reorder_linear_weight(w, m) for w in weights]
            return packed, lambda w: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], ""), [0]
        return weights, lambda w: torch.nn.functional.linear(x, w), [0]

    weights, product, turn = once(key, make)
    begin = now()
    for _ in range(repeats):
        product(weights[turn[0] % len(weights)])
        turn[0] += 1
    return (now() - begin) / repeats


def model(config, dtype):
    def make():
        import transformers
        kind = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[config["model_type"]]
        made = transformers.AutoModelForCausalLM.from_config(kind(**config), dtype=DTYPES[dtype], attn_implementation="sdpa")
        return made.eval()

    return once(("model", json.dumps(config), dtype), make)


def decode(config, batch, context, dtype):
    import transformers
    m = model(config, dtype)
    with torch.inference_mode():
        def make():
            one = m(torch.randint(config["vocab_size"], (1, context)), use_cache=True).past_key_values
            cache = transformers.DynamicCache()
            for layer in range(config["num_hidden_layers"]):
                held_layer = one.layers[layer]
                cache.update(*(x.expand(batch, -1, -1, -1).clone() for x in (held_layer.keys, held_layer.values)), layer)
            return cache

        cache = once(("cache", json.dumps(config), batch, context, dtype), make)
        if (held_tokens := cache.get_seq_length() - context) > 0:
            cache.crop(-held_tokens)
        ids = torch.randint(config["vocab_size"], (batch, 1))
        begin = now()
        logits = m(ids, past_key_values=cache, use_cache=True).logits[:, -1].float()
        torch.log_softmax(logits, -1)
        return now() - begin


def prefill(config, tokens, dtype):
    m = model(config, dtype)
    with torch.inference_mode():
        ids = torch.randint(config["vocab_size"], (1, tokens))
        begin = now()
        m(ids, use_cache=True, logits_to_keep=1)
        return now() - begin


def step(config, rows, length, mode):
    m = model(config, "bfloat16" if mode == "bfloat16" else "float32")
    optimizer = once(("adamw", json.dumps(config), mode), lambda: torch.optim.AdamW(m.parameters(), lr=1e-6))
    ids = torch.randint(config["vocab_size"], (rows, length))
    begin = now()
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        logits = m(ids).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(m.parameters(), 1)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return now() - begin


WORKS = {"gemm": gemm, "decode": decode, "prefill": prefill, "step": step}
if NAME != "torch":
    sys.exit(f"no peer '{NAME}'")
with os.fdopen(answers, "w", buffering=1) as out:
    out.write("ready\n")
    for line in sys.stdin:
        request = json.loads(line)
        try:
            out.write(json.dumps({"seconds": WORKS[request.pop("work")](**request)}) + "\n")
        except Exception as e:  # whatever a library may not be able to do
            out.write(json.dumps({"error": f"{type(e).__name__}: {e}"}) + "\n")
