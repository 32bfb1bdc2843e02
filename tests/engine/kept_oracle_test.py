# Logprobs and gradients of tokens drawn among kept sets, against PyTorch in float64: a masked log-softmax differentiated by autograd.
import json
import pathlib
import random
import subprocess
import sys
import tempfile

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

temper = sys.argv[1]
torch.manual_seed(3)
rng = random.Random(5)
vocab = 61


def rows_of(count):
    rows = []
    for _ in range(count):
        ids = [rng.randrange(vocab) for _ in range(rng.randrange(2, 40))]
        kept = [None if rng.random() < 0.3 else sorted({i, *rng.sample(range(vocab), rng.randrange(0, vocab - 1))}) for i in ids]
        temperature = rng.choice([1.0, 0.7, 1.5])
        rows.append({"ids": ids, "coef": [rng.uniform(-1, 1) for _ in ids], "temperature": temperature, "kept": kept})
    # The same tokens among others: nodes that must not merge.
    rows.append({**rows[0], "kept": [None] * len(rows[0]["ids"])})
    return rows


def run(model, rows):
    model.zero_grad()
    objective, logprobs = 0, []
    for row in rows:
        logits = model(torch.tensor([row["ids"]])).logits[0] / row["temperature"]
        own = [None]
        for i in range(1, len(row["ids"])):
            line = logits[i - 1]
            kept = row["kept"][i]
            if kept is not None:
                mask = torch.full_like(line, float("-inf"))
                mask[kept] = 0
                line = line + mask
            value = torch.log_softmax(line, -1)[row["ids"][i]]
            own.append(value.item())
            objective = objective + row["coef"][i] * value
        logprobs.append(own)
    objective.backward()
    return logprobs, {name: p.grad.clone() for name, p in model.named_parameters()}


def main():
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        config = LlamaConfig(vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                             num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False, attn_implementation="eager")
        model = LlamaForCausalLM(config).to(torch.float32)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(3)
        model.save_pretrained(folder / "model")
        model = model.to(torch.float64)
        rows = rows_of(12)
        (folder / "in.json").write_text(json.dumps({"rows": rows}))
        logprobs, grads = run(model, rows)
        worst = {}
        # transformers computes norms and attention's softmax in fp32 whatever the model is: that bounds what it can judge.
        for numerics, tree, bound in [("f64", "on", 1e-6), ("f64", "off", 1e-6), ("f32", "on", 1e-5), ("f32", "off", 1e-5)]:
            out = subprocess.run([temper, "engine", "grad", folder / "model", "--in", folder / "in.json", "--out", folder / "g.safetensors",
                                  "--numerics", numerics, "--tree", tree], check=True, capture_output=True, text=True)
            answer = json.loads(out.stdout)
            difference = max(abs(a - b) for x, y in zip(answer["logprobs"], logprobs) for a, b in zip(x[1:], y[1:]))
            assert difference < bound * 10, (numerics, tree, "logprobs", difference)
            ours = load_file(folder / "g.safetensors")
            assert set(ours) == set(grads)
            for name, g in grads.items():
                error = ((ours[name].to(torch.float64) - g).norm() / g.norm()).item()
                worst[numerics, tree] = max(worst.get((numerics, tree), 0), error)
                assert error < bound, (numerics, tree, name, error)
        # The oracle itself: without the masks it is another gradient.
        _, unmasked = run(model, [{**row, "kept": [None] * len(row["ids"])} for row in rows])
        assert min(((unmasked[n] - g).norm() / g.norm()).item() for n, g in grads.items()) > 0.1
        print("measured:", ", ".join(f"{n} tree {t}: {e:.1e}" for (n, t), e in worst.items()))


main()
