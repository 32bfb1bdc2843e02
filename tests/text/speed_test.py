"""How fast texts become ids on one thread: Temper beside `encode_batch_fast` of `tokenizers` with RAYON_NUM_THREADS=1, with
SmolLM2's vocabulary, with Llama 3's, Qwen's and DeepSeek's pre-tokenizers on it, and as Llama 2 with a small vocabulary made here.

usage: speed_test.py TEXT_ENCODE_SPEED. Texts: the sources and the manual of Python's own library, in documents of 2 to 8 KB. Rounds are
interleaved, the median of their ratios counts. Temper must not be slower, and must give as many ids.
"""
import json
import os
import pathlib
import pydoc_data.topics
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time

os.environ["RAYON_NUM_THREADS"] = "1"

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "smollm2"))
import families_test
import fuzz_strings
import reference
from tokenizers import Tokenizer

ROUNDS = 11
BYTES = 1_500_000  # of each of the two kinds of text


def documents():
    manual = "\n\n".join(pydoc_data.topics.topics[k] for k in sorted(pydoc_data.topics.topics))
    sources, size = [], 0
    for path in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")):
        sources.append(path.read_text(errors="replace"))
        size += len(sources[-1])
        if size > BYTES:
            break
    text = manual[:BYTES] + "".join(sources)[:BYTES]
    out, at = [], 0
    while at < len(text):
        step = 2000 + at * 7919 % 6000
        out.append(text[at:at + step])
        at += step
    return out


def main():
    program = pathlib.Path(sys.argv[1]).resolve()
    smollm2 = reference.load_tokenizer().backend_tokenizer
    texts = documents()
    size = sum(len(t.encode()) for t in texts)
    failures, said = [], []
    spm = families_test.FAMILIES["llama2"](fuzz_strings.strings(3000, "corpus"))
    pres = {"SmolLM2": None, "Llama 3": [families_test.LLAMA3], "Qwen": [families_test.QWEN2], "DeepSeek V3": families_test.DEEPSEEK_V3,
            "Llama 2": None}
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "texts.jsonl").write_text("".join(json.dumps(t) + "\n" for t in texts))
        for name, patterns in pres.items():
            t = spm if name == "Llama 2" else Tokenizer.from_str(smollm2.to_str())
            if patterns:
                t.pre_tokenizer = families_test.stages(*map(families_test.split, patterns), families_test.byte_level())
            t.save(str(folder / "tokenizer.json"))
            run = subprocess.Popen([program, folder / "tokenizer.json", folder / "texts.jsonl"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            ours, theirs, ids = [], [], 0
            for _ in range(ROUNDS):
                print("go", file=run.stdin, flush=True)
                seconds, count = run.stdout.readline().split()
                ours.append(float(seconds))
                start = time.perf_counter()
                encodings = t.encode_batch_fast(texts, add_special_tokens=False)
                theirs.append(time.perf_counter() - start)
                ids = sum(len(e.ids) for e in encodings)
                if int(count) != ids:
                    failures.append(f"{name}: {count} ids, tokenizers gives {ids}")
                    break
            run.stdin.close()
            run.wait()
            ratio = statistics.median(b / a for a, b in zip(ours, theirs))
            said.append(f"{name}: {ratio:.1f}x ({size / statistics.median(ours) / 1e6:.1f} MB/s beside {size / statistics.median(theirs) / 1e6:.1f})")
            if ratio < 1:
                failures.append(f"{name}: slower than tokenizers")
    print("measured: encoding on one thread beside tokenizers' encode_batch_fast, median of "
          f"{ROUNDS} interleaved rounds on {size / 1e6:.1f} MB: {', '.join(said)}")
    reference.finish(failures)


if __name__ == "__main__":
    main()
