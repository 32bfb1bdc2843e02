#!/usr/bin/env python3
"""Breaks the program on purpose, one patch of this folder at a time, and says which tests go red.

usage: run.py BUILD [NAME...]. A patch changes one source file; its first line says which condition is broken, its second names a test that must
fail: `red: BINARY: Suite.Test`. The file is compiled as the build compiles it and takes the place of the original in its library;
then every program below is linked against that and runs. A patch that does not apply or compile, or whose test stays green, is a
failure; so is any red test where nothing is broken.
"""
import json
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILD = pathlib.Path(sys.argv[1]).resolve()
# What a patch of the window machine is tried on, besides the program it names.
PROGRAMS = ["datapool_window_test", "datapool_scenario_test", "datapool_golden_test", "datapool_search_test", "datapool_random_test"]
TIMEOUT_S = 60  # a machine that stands still, or a search without end, is red too


def command_of(what):
    """The last command of the build that makes `what`, without its wrapping."""
    out = subprocess.run(["ninja", "-C", BUILD, "-t", "commands", what], stdout=subprocess.PIPE, text=True, check=True).stdout
    line = out.strip().splitlines()[-1]
    return re.sub(r"^: && ", "", re.sub(r" && :$", "", line))


def compile_command(source):
    for entry in json.loads((BUILD / "compile_commands.json").read_text()):
        if pathlib.Path(entry["file"]) == ROOT / source:
            return shlex.split(entry["command"])
    raise SystemExit(f"{source}: the build does not compile it")


def red_tests(program, folder):
    """Names of failed tests; the program's own name when it did not end by itself."""
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    try:
        subprocess.run([folder / program, "--gtest_brief=1", "--gtest_fail_fast", f"--gtest_output=json:{result}"], cwd=folder, timeout=TIMEOUT_S, stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return [f"{program}: did not end"]
    if not result.exists():
        return [f"{program}: died"]
    return [f"{program}: {suite['name']}.{test['name']}" for suite in json.loads(result.read_text())["testsuites"] for test in suite["testsuite"]
            if test.get("failures")]


def tried(source, patch, programs):
    """Red tests of all programs with `source` patched (patch None: as it is); a string says why there are none to speak of."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = pathlib.Path(name)
        mutated = folder / source
        mutated.parent.mkdir(parents=True)
        shutil.copy(ROOT / source, mutated)
        if patch is not None:
            applied = subprocess.run(["patch", "-p1", "--no-backup-if-mismatch", "-F0", "-d", folder, "-i", patch], stdout=subprocess.PIPE, text=True)
            if applied.returncode != 0:
                return "does not apply: " + applied.stdout
        words = compile_command(source)
        original = words[words.index("-o") + 1]
        changed = folder / pathlib.Path(original).name
        words[words.index("-o") + 1] = str(changed)
        words[words.index(str(ROOT / source))] = str(mutated)
        compiled = subprocess.run(words, cwd=BUILD, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if compiled.returncode != 0:
            return "does not compile: " + compiled.stdout[-2000:]
        library = re.sub(r"CMakeFiles/([^/]+)\.dir/.*", r"lib\1.a", original)
        own = folder / pathlib.Path(library).name
        shutil.copy(BUILD / library, own)
        subprocess.run(["ar", "r", own, changed], check=True)
        red = []
        for program in programs:
            link = command_of(program).replace(" " + library, f" {own}")
            link = re.sub(r"-o \S+", f"-o {folder / program}", link, count=1)
            linked = subprocess.run(link, shell=True, cwd=BUILD, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if linked.returncode != 0:
                return "does not link: " + linked.stdout[-2000:]
            red += red_tests(program, folder)
            (folder / program).unlink()
        return red


def main():
    patches = sorted(HERE.glob("*.patch"))
    if len(sys.argv) > 2:
        patches = [p for p in patches if p.stem in sys.argv[2:]]
    bad = controlled = 0
    known = set()
    for patch in patches:
        # A program that ends itself is red as a whole.
        head, second = patch.read_text().splitlines()[:2]
        named = re.fullmatch(r"red: ((\w+): \S.*)", second)
        source = re.search(r"^\+\+\+ b/(\S+)$", patch.read_text(), re.M).group(1)
        programs = list(dict.fromkeys([named.group(2)] + (PROGRAMS if source.startswith("datapool/") else [])))
        if (source, tuple(programs)) not in known:
            known.add((source, tuple(programs)))
            control = tried(source, None, programs)
            controlled += 1
            if control:
                bad += 1
                print(f"FAILED nothing broken, {source}: {control}", flush=True)
        red = tried(source, patch, programs)
        ok = isinstance(red, list) and named.group(1) in red
        bad += not ok
        print(f"{'red' if ok else 'FAILED'} {patch.stem}: {head}", flush=True)
        for line in red if isinstance(red, list) else [red]:
            print(f"    {line}", flush=True)
        if not ok and isinstance(red, list):
            print(f"    stayed green: {named.group(1)}", flush=True)
    print(f"measured: {len(patches)} mutants, {len(patches) - bad} red, {controlled} controls green" if not bad else f"{bad} failures")
    return 1 if bad or not patches else 0


sys.exit(main())
