#!/usr/bin/env python3
"""Runs the test tiers and says what ran, what was skipped and why.

  tests/run.py --build DIR                  the fast tier: every ctest test without the label `long`
  tests/run.py --build DIR --long [NAME…]   the long tier: tests with the label `long`, or those whose name contains NAME;
                                            each pass is recorded in docs/long_tier.tsv with its commit

Before the long tier, what its tests need is made, by their labels: `python` = the environment of tests/setup_python.sh, handed
to them as TEMPER_PYTHON; `smollm2` = `temper model fetch`. Where that fails, those tests fail.

The last line is `N passed, N failed, N skipped`, counted over the single tests inside the gtest binaries (a test that is no
gtest binary counts once). Only a hardware or kernel fact may skip: a skip whose reason does not begin with `hardware:` or
`kernel:` counts as a failure.
"""
import argparse
import datetime
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent
RECORD = ROOT / "docs" / "long_tier.tsv"


def ctest_labels(build, selection):
    """The labels of each test, by name."""
    out = subprocess.run(["ctest", "--show-only=json-v1", *selection], cwd=build, stdout=subprocess.PIPE, check=True).stdout
    return {test["name"]: next((p["value"] for p in test.get("properties", []) if p["name"] == "LABELS"), [])
            for test in json.loads(out)["tests"]}


def prepare(build, labels):
    """Makes what tests with these labels need. Returns what the environment gains, and by label why a need could not be met."""
    env, unmet = {}, {}
    if "python" in labels:
        made = subprocess.run([ROOT / "tests" / "setup_python.sh"], stdout=subprocess.PIPE, text=True)
        if made.returncode == 0:
            env["TEMPER_PYTHON"] = made.stdout.strip()
        else:
            unmet["python"] = "tests/setup_python.sh failed"
    if "smollm2" in labels:
        fetch = ["model", "fetch", "smollm2-135m-instruct"]
        if subprocess.run([build.resolve() / "temper", *fetch], cwd=ROOT, stdout=subprocess.DEVNULL).returncode != 0:
            unmet["smollm2"] = f"temper {' '.join(fetch)} failed"
    return env, unmet


def git(*args):
    return subprocess.run(["git", "-C", str(ROOT), *args], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout.strip()


def read_results(folder):
    """Single results of every gtest binary that ran: (binary, test, state, text)."""
    for path in sorted(folder.glob("*.xml")):
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            name = f"{case.get('classname')}.{case.get('name')}"
            failure, skip = case.find("failure"), case.find("skipped")
            if failure is not None:
                yield path.stem, name, "failed", failure.get("message", "")
            elif skip is not None:
                text = re.sub(r"^\S+:\d+\n", "", (skip.get("message") or skip.text or "").strip()).strip()
                yield path.stem, name, "skipped", text
            elif case.get("status") == "run":
                yield path.stem, name, "passed", ""


def record_pass(name, seconds, output):
    # The record itself changes with every pass.
    dirty = "+changes" if git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{RECORD.relative_to(ROOT)}") else ""
    line = f"{name}\t{git('rev-parse', '--short=12', 'HEAD')}{dirty}\t{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%dT%H:%MZ}\t{seconds:.0f}"
    # What a test says it measured is part of the record.
    line += "\t" + "; ".join(re.findall(r"^(?:\d+: )?measured: (.*)$", output, re.M)) + "\n"
    old = RECORD.read_text().splitlines(keepends=True) if RECORD.exists() else ["test\tcommit\twhen\tseconds\tmeasured\n"]
    RECORD.write_text("".join([x for x in old if not x.startswith(name + "\t")] + [line]))


def main():
    parser = argparse.ArgumentParser(prog="temper test", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # Absolute: each test writes its results from a folder of its own, and results that are not found would be skips that are not counted.
    parser.add_argument("--build", type=lambda p: pathlib.Path(p).resolve(), default=ROOT / "build" / "release")
    parser.add_argument("--long", nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true", help="only print the names")
    args = parser.parse_args()

    selection = ["-L", "long"] if args.long is not None else ["-LE", "long"]
    labels = ctest_labels(args.build, selection)
    names = list(labels)
    if args.long:
        unknown = [want for want in args.long if not any(want in name for name in names)]
        if unknown:
            print(f"temper test: no long test matches {' '.join(unknown)}; there are: {' '.join(names)}", file=sys.stderr)
            return 2
        names = [name for name in names if any(want in name for want in args.long)]
    if args.list:
        print("\n".join(names))
        return 0

    results = args.build / "test-results"
    shutil.rmtree(results, ignore_errors=True)
    results.mkdir(parents=True)
    log = results / "ctest.log"
    started = time.monotonic()
    gained, unmet = prepare(args.build, {label for name in names for label in labels[name]})
    failed, others = [], []
    for position, name in enumerate(names, 1):
        reasons = [unmet[label] for label in labels[name] if label in unmet]
        if reasons:
            print(f"FAILED       - s  {name}: {'; '.join(reasons)}", flush=True)
            failed.append(name)
            continue
        begin = time.monotonic()
        if sys.stderr.isatty():
            print(f"\r\033[K[{position}/{len(names)}] {name}", end="", file=sys.stderr, flush=True)
        run = subprocess.run(
            ["ctest", "-R", f"^{re.escape(name)}$", "--verbose" if args.long is not None else "--output-on-failure", "--no-tests=error"],
            cwd=args.build, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            env={**os.environ, **gained, "GTEST_OUTPUT": f"xml:{results / name}.xml"})
        seconds = time.monotonic() - begin
        with log.open("a") as file:
            file.write(run.stdout)
        ok = run.returncode == 0
        line = ("ok    " if ok else "FAILED") + f" {seconds:7.1f} s  {name}"
        print(("\r\033[K" if sys.stderr.isatty() else "") + line, flush=True)
        if not ok:
            failed.append(name)
            print(run.stdout[-6000:])
        elif args.long is not None:
            record_pass(name, seconds, run.stdout)
        if not (results / f"{name}.xml").exists():
            others.append((name, ok))

    passed = sum(1 for _, ok in others if ok)
    broken = [name for name, ok in others if not ok]
    skips = []
    for binary, test, state, text in read_results(results):
        if state == "passed":
            passed += 1
        elif state == "failed":
            # The place and what it says: where only the last lines of an output are kept, this is all that tells.
            broken.append(f"{binary}: {test}\n" + "\n".join("         " + line for line in text.splitlines()[:12]))
        elif re.match(r"(hardware|kernel):", text):
            skips.append(f"{binary}: {test}: {text}")
        else:
            broken.append(f"{binary}: {test}: skipped without a hardware or kernel fact ({text or 'no reason'})")
    broken += [name for name in failed if not any(b.startswith(name) for b in broken)]

    cpu = [line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    flags = next((line for line in open("/proc/cpuinfo") if line.startswith("flags")), "")
    paths = [path for path, flag in (("avx2", " avx2"), ("avx512", " avx512bw"), ("amx", " amx_bf16")) if flag in flags]
    print(f"\n{len(names)} test programs in {time.monotonic() - started:.0f} s on {cpu[0] if cpu else 'unknown CPU'}; kernel paths: {', '.join(paths)}")
    for text in skips:
        print("skipped: " + text)
    for text in broken:
        print("failed:  " + text)
    print(f"{passed} passed, {len(broken)} failed, {len(skips)} skipped")
    return 1 if broken or not names else 0


if __name__ == "__main__":
    sys.exit(main())
