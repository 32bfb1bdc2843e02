"""The real Gemma 3 270M from its Q4_K_M file: `temper engine score --numerics f32` against transformers, which reads the same file by
its own way. Rows below, at and beyond the window of 512; no log-probability may differ by more than 1e-3.

usage: gemma3_test.py TEMPER (fetches the model with `temper model fetch gemma-3-270m`)
"""
import json
import pathlib
import subprocess
import sys
import tempfile

import torch
import transformers

TEMPER = pathlib.Path(sys.argv[1]).resolve()
ROOT = pathlib.Path(__file__).resolve().parents[3]
TOLERANCE = 1e-3
SIZES = [23, 64, 300, 513, 640]


def main():
    subprocess.run([TEMPER, "model", "fetch", "gemma-3-270m"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    folder, file = ROOT / "models" / "gemma-3-270m", "gemma-3-270m-q4_k_m.gguf"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32, attn_implementation="eager")
    text = (ROOT / "docs" / "sandbox.md").read_text() + (ROOT / "docs" / "trainer.md").read_text()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    rows = [[tokenizer.bos_token_id] + ids[17 * i:17 * i + n - 1] for i, n in enumerate(SIZES)]
    assert [len(r) for r in rows] == SIZES
    with tempfile.TemporaryDirectory() as temporary:
        path = pathlib.Path(temporary) / "rows.jsonl"
        path.write_text("".join(json.dumps({"ids": r}) + "\n" for r in rows))
        out = subprocess.run([TEMPER, "engine", "score", folder / file, "--in", path, "--numerics", "f32"], check=True,
                             stdout=subprocess.PIPE, text=True).stdout
    errors, total = [], []
    for ids, line in zip(rows, out.splitlines(), strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, :-1].double()
        theirs = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        errors += (torch.tensor(json.loads(line)["logprobs"][1:], dtype=torch.float64) - theirs).abs().tolist()
        total += theirs.tolist()
    mean = sum(total) / len(total)
    print(f"measured: {len(errors)} log probabilities of rows of {min(SIZES)} to {max(SIZES)} tokens, mean {mean:.2f}; apart from transformers' "
          f"by {sum(errors) / len(errors):.2g} in the mean, {max(errors):.2g} at most")
    return not (max(errors) <= TOLERANCE and mean > -6)  # a model read wrongly by both would know no English


if __name__ == "__main__":
    sys.exit(main())
