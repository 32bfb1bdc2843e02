#!/usr/bin/env python3
"""Coverage-guided fuzzing of the parsers of outside bytes, under the address and undefined-behaviour sanitizers.

  tests/fuzz/guided.py TARGET [--seconds S] [--build DIR]

Builds fuzz_TARGET of the `fuzz` preset (clang, libFuzzer) and runs it for S seconds (600) from committed seeds. Exit status 1: it
crashed, hung for 20 s at one input, allocated 512 MiB at once or grew over 3 GiB, leaked, or tried fewer than a thousand inputs.
The input that did it is kept under DIR/found and named; put it into a test of the part when the fault is mended.
"""
import argparse
import json
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
GOLDEN = ROOT / "tests" / "golden"


def lines_of(path, key):
    return [case[key].encode() for case in map(json.loads, path.read_text().splitlines()) if key in case]


def files(*patterns):
    return [path.read_bytes() for pattern in patterns for path in sorted(GOLDEN.glob(pattern))]


def seeds(target):
    """Good inputs to begin with."""
    if target == "json":
        return files("text/smollm.json", "engine/families/*/config.json") + [rb'{"a":[1,2.5e-7,-0,true,null,"x\u00e9\n\ud83c\udf89"],"b":{"c":{},"d":[]},"e":12345678901234567890123}']
    if target == "jinja":
        return lines_of(GOLDEN / "text" / "jinja.cases.jsonl", "template")
    if target == "regex":
        patterns = [rb"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+", rb"(a|b)*c|(?:ab?)+?d",
                    rb"\p{N}{1,3}(?=x)|(?>a+)b|[a-c&&[^b]]++", rb"^\S+$|(?<=a)b|\u0041\x{41}[[:alpha:]]"]
        return [p + b"\0" + b"It's 1234 abc\n  x aab " for p in patterns]
    if target == "tokenizer_json":
        return [b + b" a's 12 \xc3\xa9\n" for b in files("text/*.json") if len(b) < 12000]
    if target == "tool_calls":
        return [b'say <tool_call>{"name": "f", "arguments": {"a": "b"}}</tool_call>', b"<tool_call>g\n{}", b'<tool_call>\n{"name":"f","arguments":{}}\n</tool_call>\n<tool_call>{']
    if target == "gguf":
        return files("*/tiny.gguf", "*/quants.gguf", "engine/families_gguf/*.gguf")
    if target == "safetensors":
        return files("engine/families/llama/model.safetensors", "engine/families/qwen2/model.safetensors")
    if target == "config_json":
        return files("engine/families/*/config.json")
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build" / "fuzz")
    args = parser.parse_args()
    good = seeds(args.target)
    if good is None:
        print(f"guided.py: there is no target {args.target!r}", file=sys.stderr)
        return 2
    build = args.build.resolve()
    if not shutil.which("clang++") or not list(pathlib.Path("/usr/lib").glob("**/libclang_rt.fuzzer-x86_64.a")):
        install = ["apt-get", "install", "-y", "--no-install-recommends", "clang", "libclang-rt-14-dev"]
        if subprocess.run(install, stdout=subprocess.DEVNULL).returncode != 0:
            print("guided.py: needs " + " ".join(install[4:]) + "; as root run: " + " ".join(install), file=sys.stderr)
            return 1
    subprocess.run(["cmake", "--preset", "fuzz", "-B", build], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    subprocess.run(["ninja", "-C", build, f"fuzz_{args.target}"], stdout=subprocess.DEVNULL, check=True)

    folder = build / "corpus" / args.target
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for i, seed in enumerate(good):
        (folder / f"seed-{i}").write_bytes(seed)
    found = build / "found"
    found.mkdir(exist_ok=True)
    run = subprocess.run(
        [build / "tests" / "fuzz" / f"fuzz_{args.target}", f"-max_total_time={args.seconds}", "-timeout=20", "-rss_limit_mb=3072",
         "-malloc_limit_mb=512", f"-max_len={max(512, max(map(len, good)) * 5 // 4)}", f"-artifact_prefix={found}/{args.target}-",
         "-print_final_stats=1", "-verbosity=1", folder],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    tried = int((re.findall(r"stat::number_of_executed_units:\s*(\d+)", run.stdout) or ["0"])[-1])
    edges = re.findall(r" cov: (\d+) ft: (\d+) corp: (\d+)", run.stdout)
    if run.returncode != 0 or tried < 1000 or not edges:
        print(run.stdout[-6000:])
        print(f"fuzz_{args.target}: ended with {run.returncode} after {tried} inputs; what it found lies under {found}")
        return 1
    print(f"measured: {tried} inputs in {args.seconds} s, {edges[0][0]} edges from {len(good)} seeds, {edges[-1][0]} in the end")
    return 0


if __name__ == "__main__":
    sys.exit(main())
