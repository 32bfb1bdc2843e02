"""Folders that `temper model export` writes, from Hugging Face folders and GGUF files of every family: transformers must load them
without a key too few or too many, and give the log-probabilities of `temper engine score --numerics f64`.

usage: families_transformers.py TEMPER
"""
import json
import pathlib
import subprocess
import sys
import tempfile

import torch
import transformers
from safetensors.torch import load_file, save_file

TEMPER = pathlib.Path(sys.argv[1]).resolve()
GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "golden" / "engine"
TOLERANCE = 2e-5  # transformers computes in fp32


def call(*arguments):
    return subprocess.run([TEMPER, *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout


def scores(model, rows, folder):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"ids": ids}) + "\n" for ids in rows))
    return [json.loads(line)["logprobs"] for line in call("engine", "score", model, "--in", path, "--numerics", "f64").splitlines()]


def half_precision_loads():
    """A folder of F16 in several files: every number must be read as transformers reads it."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        model = transformers.AutoModelForCausalLM.from_pretrained(GOLDEN / "families" / "qwen3", dtype=torch.float16)
        model.save_pretrained(folder / "half", max_shard_size="6KB")
        call("model", "export", folder / "half", folder / "out")
        again = transformers.AutoModelForCausalLM.from_pretrained(folder / "out", dtype=torch.float32).state_dict()
        shards = len(list((folder / "half").glob("*.safetensors")))
        good = shards > 1 and all(torch.equal(x.float(), again[k]) for k, x in model.state_dict().items())
        print(f"{'ok    ' if good else 'FAILED'} F16 in {shards} files")
        return good


def a_stored_head():
    """The tied model of families/gemma2 with a head stored beside the embedding, alone, or equal to it: transformers decides what it is."""
    good = True
    for kind in ("equal", "other", "alone"):
        with tempfile.TemporaryDirectory() as temporary:
            folder = pathlib.Path(temporary)
            (folder / "in").mkdir()
            (folder / "in" / "config.json").write_text((GOLDEN / "families" / "gemma2" / "config.json").read_text())
            tensors = load_file(GOLDEN / "families" / "gemma2" / "model.safetensors")
            head = tensors["model.embed_tokens.weight"].clone()
            if kind == "other":
                head[3] += 0.5
            if kind == "alone":
                del tensors["model.embed_tokens.weight"]
            save_file({**tensors, "lm_head.weight": head}, folder / "in" / "model.safetensors", metadata={"format": "pt"})
            call("model", "export", folder / "in", folder / "out")
            ids, all_logprobs = list(range(23)), []
            for source in ("in", "out"):
                model = transformers.AutoModelForCausalLM.from_pretrained(folder / source, dtype=torch.float64, attn_implementation="eager")
                with torch.inference_mode():
                    logits = model(torch.tensor([ids])).logits[0, :-1]
                all_logprobs.append(torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist())
                all_logprobs.append(scores(folder / source, [ids], folder)[0][1:])
            apart = max(abs(x - all_logprobs[0][i]) for row in all_logprobs for i, x in enumerate(row))
            good = good and apart <= TOLERANCE
            print(f"{'ok    ' if apart <= TOLERANCE else 'FAILED'} a head stored beside the embedding, {kind}: apart by {apart:.2g}", flush=True)
    return good


def main():
    bad = 0
    sources = sorted((GOLDEN / "families").iterdir()) + sorted((GOLDEN / "families_gguf").iterdir())
    for source in sources:
        with tempfile.TemporaryDirectory() as temporary:
            folder = pathlib.Path(temporary)
            call("model", "export", source, folder / "out")
            model, info = transformers.AutoModelForCausalLM.from_pretrained(folder / "out", dtype=torch.float32, output_loading_info=True,
                                                                            attn_implementation="eager")
            wrong = {k: v for k, v in info.items() if v}
            rows = json.loads((GOLDEN / "families" / source.stem / "golden.json").read_text())["rows"]
            config = json.loads((folder / "out" / "config.json").read_text())
            apart = 0.0
            for ids, ours in zip(rows, scores(folder / "out", rows, folder)):
                with torch.inference_mode():
                    logits = model(torch.tensor([ids])).logits[0, :-1].double()
                theirs = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
                apart = max([apart] + [abs(a - b) for a, b in zip(theirs, ours[1:], strict=True)])
            good = not wrong and apart <= TOLERANCE and type(model).__name__ == config["architectures"][0]
            bad += not good
            print(f"{'ok    ' if good else 'FAILED'} {source.name}: {type(model).__name__}, apart by {apart:.2g}", wrong or "", flush=True)
    bad += not half_precision_loads()
    bad += not a_stored_head()
    print(f"measured: {len(sources)} exported models, {bad} wrong")
    return bad != 0 or not sources


if __name__ == "__main__":
    sys.exit(main())
