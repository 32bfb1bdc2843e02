#!/usr/bin/env python3
"""Says which share of a parser's lines its fuzz test reaches, and fails below the floor.

  tests/fuzz/coverage.py [--build DIR] [--only NAME] [--missed] [--no-build]

Builds the fuzz tests of tests/fuzz/parsers.json in the `coverage` preset (gcc --coverage), runs each by itself, and asks gcov
which lines of the named sources it ran. The table is a list of {test, filter, sources: {FILE: [FUNCTION…]}, skip: […]}: of a
FILE count the lines of the functions whose name matches one of the patterns (an empty list: all of the file) and none of
`skip`. Only what outside bytes can steer belongs there: a writer in the same file, say, is left out by name. --missed prints
the lines not reached. Exit status 1: a share below the floor, a failed test, or a source without counts.
"""
import argparse
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TABLE = pathlib.Path(__file__).resolve().parent / "parsers.json"
FLOOR = 0.80


def run_test(build, binary, pattern):
    """Runs one fuzz test alone, from zero counts."""
    for old in build.rglob("*.gcda"):
        old.unlink()
    path = next((p for p in build.glob(f"tests/**/{binary}") if p.is_file()), None)
    if path is None:
        return f"{binary} is not built"
    run = subprocess.run([path, f"--gtest_filter={pattern}"], cwd=path.parent, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, text=True, errors="replace")
    ran = re.search(r"(\d+) tests? from .* ran\.", run.stdout)
    if run.returncode != 0 or not ran or ran.group(1) == "0":
        return f"{binary} --gtest_filter={pattern} ended with {run.returncode}:\n{run.stdout[-3000:]}"
    return None


def line_counts(build, source):
    """{line: count}, [(name, first line, last line)…] of one source file; template instances of a line are added up."""
    lines, functions = {}, []
    # A header is counted where the sources of its folder include it.
    path = pathlib.Path(source)
    found = (build / path.parent).rglob("*.gcda") if path.suffix == ".h" else build.rglob(f"{path.name}.gcda")
    for notes in found:
        out = subprocess.run(["gcov", "--json-format", "--demangled-names", "--stdout", notes], cwd=build,
                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True).stdout
        for document in out.splitlines():
            for file in json.loads(document)["files"]:
                if (build / file["file"]).resolve() != (ROOT / source).resolve() and file["file"] != source:
                    continue
                for line in file["lines"]:
                    lines[line["line_number"]] = lines.get(line["line_number"], 0) + line["count"]
                functions += [(f["demangled_name"], f["start_line"], f["end_line"]) for f in file["functions"]]
    return lines, functions


def selected(lines, functions, only, skip):
    def inside(patterns):
        return {n for name, first, last in functions if any(re.search(p, name) for p in patterns)
                for n in range(first, last + 1)}
    keep = inside(only) if only else set(lines)
    return {n: count for n, count in lines.items() if n in keep - inside(skip)}


def ranges(numbers):
    text, first = [], None
    for n in sorted(numbers):
        if first is not None and n == last + 1:
            last = n
            continue
        if first is not None:
            text.append(f"{first}-{last}" if last > first else str(first))
        first = last = n
    if first is not None:
        text.append(f"{first}-{last}" if last > first else str(first))
    return " ".join(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build" / "coverage")
    parser.add_argument("--only", default="", metavar="NAME", help="rows whose test, filter or source contains NAME")
    parser.add_argument("--missed", action="store_true")
    parser.add_argument("--no-build", action="store_true")
    args = parser.parse_args()
    build = args.build.resolve()
    rows = [row for row in json.loads(TABLE.read_text()) if args.only in " ".join([row["test"], row["filter"], *row["sources"]])]
    if not rows:
        print(f"coverage: no row matches {args.only!r}", file=sys.stderr)
        return 2
    if not args.no_build:
        subprocess.run(["cmake", "--preset", "coverage", "-B", build], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
        subprocess.run(["ninja", "-C", build, *sorted({row["test"] for row in rows})], stdout=subprocess.DEVNULL, check=True)

    bad = 0
    print(f"{'share':>6} {'lines':>11}  {'parser':<38} fuzz test")
    for row in rows:
        name = f"{row['test']} {row['filter']}"
        error = run_test(build, row["test"], row["filter"])
        if error:
            print(f"FAILED {error}")
            bad += 1
            continue
        for source, only in row["sources"].items():
            lines, functions = line_counts(build, source)
            lines = selected(lines, functions, only, row.get("skip", []))
            reached = sum(1 for count in lines.values() if count)
            share = reached / len(lines) if lines else 0.0
            bad += share < FLOOR
            mark = "" if share >= FLOOR else f"  BELOW {FLOOR:.0%}"
            print(f"{share:6.1%} {reached:>5}/{len(lines):<5}  {source:<38} {name}{mark}", flush=True)
            if args.missed:
                print(f"       missed: {ranges(n for n, count in lines.items() if not count)}")
    print(f"{bad} below {FLOOR:.0%} or failed" if bad else f"every parser at or above {FLOOR:.0%}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
