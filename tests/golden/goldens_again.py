"""Writes every golden file again, with the libraries it came from, and compares with the committed one.

usage: goldens_again.py TEXT_MAKE_TASK_FILES. Each generator runs in an empty folder. Files must be equal byte for byte; the few
whose numbers come out of torch may differ by a stated amount, because its kernels, and so their rounding, depend on the
processor. A committed file that no generator writes is an error too, but for those of OWN.
"""
import json
import math
import os
import pathlib
import struct
import subprocess
import sys
import tempfile

import numpy

FOLDER = pathlib.Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
MODEL = ROOT / "models" / "smollm2-135m-instruct" / "SmolLM2-135M-Instruct.Q4_1.gguf"
TASK_FILES = pathlib.Path(sys.argv[1]).resolve()  # our own program: it writes the vocabulary, transformers says what that vocabulary means
SCENARIOS = sorted((ROOT / "tests" / "scenarios").glob("*.txt"))

# Generator, its arguments, and the name of its standard output ("" = it writes files).
GENERATORS = [("datapool/make_scripts.py", [], "scripts.jsonl"),
              ("datapool/tell_scenarios.py", ["--here", *SCENARIOS], ""),
              ("engine/families_f64.py", [], ""),
              ("engine/families_gguf.py", [], ""),
              ("engine/llama_f64.py", [], ""),
              ("engine_files/make_model_goldens.py", [], ""),
              ("engine_files/make_quant_goldens.py", [], ""),
              ("engine_files/make_smollm2_goldens.py", [MODEL], "smollm2.cases.jsonl"),
              ("text/make_jinja_goldens.py", [], "jinja.cases.jsonl"),
              ("text/make_task_chat_goldens.py", [TASK_FILES], "task_chat.cases.jsonl"),
              ("text/make_tokenizer_goldens.py", [], ""),
              ("text/make_unicode_tables.py", [], "unicode_tables.inc"),
              ("trainer/make_loss_goldens.py", [], "")]
ELSEWHERE = {"text/unicode_tables.inc": ROOT / "text" / "unicode_tables.inc", **{f"datapool/{p.name}": p for p in SCENARIOS}}
# Numbers that nobody else's library gives: the bits of our own engine, the same on every kernel path (tests/engine/golden_test.cpp
# writes them with TEMPER_UPDATE_GOLDEN=1).
OWN = {"engine/digests.json"}
# How far two numbers may be apart, absolute or relative.
FAMILIES = ["gemma2", "gemma3", "gemma3_caps", "llama", "mistral", "qwen2", "qwen3"]
TOLERANCE = {"engine/llama_f64.json": 1e-11, "engine/ropes.json": 1e-13,
             **{f"engine/families/{f}/{name}": 1e-10 for f in FAMILIES for name in ("golden.json", "gradient.safetensors")}, "engine_files/hf_logits.json": 1e-6, "trainer/losses.json": 1e-11,
             **{f"engine_files/hf/model-0000{i}-of-00004.safetensors": 1e-6 for i in range(1, 5)}}


def value_of(data, name):
    """JSON, or a safetensors file, all of one type, as its head and its numbers."""
    if name.endswith(".json"):
        return json.loads(data)
    size = struct.unpack("<Q", data[:8])[0]
    head = json.loads(data[8:8 + size])
    (dtype,) = {x["dtype"] for k, x in head.items() if k != "__metadata__"}
    return [head, numpy.frombuffer(data[8 + size:], {"F32": "<f4", "F64": "<f8"}[dtype]).tolist()]


def distance(a, b, path="$"):
    """The largest difference of two values, relative above 1; an exception when anything but a number differs."""
    if isinstance(a, dict) and isinstance(b, dict) and list(a) == list(b):
        return max((distance(a[k], b[k], f"{path}.{k}") for k in a), default=0)
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return max((distance(x, y, f"{path}[{i}]") for i, (x, y) in enumerate(zip(a, b))), default=0)
    if isinstance(a, float) and isinstance(b, float) and math.isfinite(a) and math.isfinite(b):
        return abs(a - b) / max(1, abs(a), abs(b))
    if type(a) is type(b) and a == b:
        return 0
    raise ValueError(f"{path}: {str(a)[:60]!r} is not {str(b)[:60]!r}")


def compare(name, again):
    """What is to be said of a file, and whether it is good."""
    committed = ELSEWHERE.get(name, FOLDER / name)
    if not committed.exists():
        return "is not committed", False
    old, new = committed.read_bytes(), again.read_bytes()
    if old == new:
        return "equal", True
    if name not in TOLERANCE:
        at = next((i for i, (a, b) in enumerate(zip(old, new)) if a != b), min(len(old), len(new)))
        return f"differs from byte {at} on: {old[at:at + 40]!r} is now {new[at:at + 40]!r}", False
    try:
        far = distance(value_of(old, name), value_of(new, name))
    except ValueError as error:
        return str(error), False
    return f"apart by {far:.2g}, {TOLERANCE[name]:g} is allowed", far <= TOLERANCE[name]


def main():
    bad, written = [], set()
    with tempfile.TemporaryDirectory() as temporary:
        for script, arguments, output in GENERATORS:
            folder = pathlib.Path(temporary) / script.replace("/", ".")
            folder.mkdir()
            run = subprocess.run([sys.executable, FOLDER / script, *arguments], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                 env={**os.environ, "TZ": "UTC", "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"})
            if run.returncode != 0:
                bad.append(script)
                print(f"FAILED {script}: exit code {run.returncode}\n{run.stderr.decode(errors='replace')[-2000:]}")
                continue
            if output:
                (folder / output).write_bytes(run.stdout)
            for path in sorted(p for p in folder.rglob("*") if p.is_file()):
                name = f"{script.split('/')[0]}/{path.relative_to(folder)}"
                written.add(name)
                text, good = compare(name, path)
                print(f"{'ok    ' if good else 'FAILED'} {name}: {text}", flush=True)
                if not good:
                    bad.append(name)
    committed = {str(p.relative_to(FOLDER)) for p in FOLDER.rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc", ".txt")}
    for name in sorted(committed - written - OWN) + sorted(OWN - committed):
        bad.append(name)
        print(f"FAILED {name}: " + ("no generator wrote it" if name in committed else "is not there"))
    print(f"{len(written)} files written again, {len(bad)} wrong")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
