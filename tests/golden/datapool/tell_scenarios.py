#!/usr/bin/env python3
"""Writes the decisions of tests/scenarios/*.txt anew, as the second model of make_scripts.py decides them.

`python3 tell_scenarios.py [--here] FILE...`, in place or (`--here`) into this folder; comments, configuration and events stay, what stands indented below an event and the `end` line
are replaced. Python 3.11, standard library only.
"""
import json
import pathlib
import sys

from make_scripts import Model


def word(d):
    kind = d["decision"]
    if kind == "admit":
        return f"A{d['group']}@{d['version']}" + (f"<{d['from']}" if d.get("from") is not None else "")
    if kind == "ready":
        return f"R{d['group']}" + ("~" if d["partial"] else "")
    if kind == "reissue":
        return f"I{d['group']}.{d['rollout']}:{d['attempt']}"
    if kind == "tombstone":
        return f"X{d['group']}:{d['reason']}"
    if kind == "take":
        return f"T{d['group']}/{d['staleness']}"
    if kind == "lease":
        return f"L{d['batch']}[{','.join(map(str, d['groups']))}]" + ("!" if d["again"] else "")
    if kind == "hold":
        return f"H{d['have']}+{d['need']}[{','.join(map(str, d['blocked']))}]"
    if kind == "recover":
        return f"recover:{d['who']}[{','.join(map(str, d['batches']))}]"
    plain = {"late": ("late", "group"), "requeue": ("Q", "group"), "update": ("U", "version"), "commit": ("C", "step"), "refuse": ("refuse:", "reason")}
    if kind in plain:
        return plain[kind][0] + str(d[plain[kind][1]])
    return kind


def events(words):
    """The events of one line: verb and the rest."""
    verb, rest = words[0], words[1:]
    if verb in ("finish", "fail"):
        outcome = next((w for w in rest if w in ("policy_failure", "truncated", "aborted")), "scored" if verb == "finish" else "infra_failure")
        reward = None if "no" in rest or verb == "fail" else float(rest[rest.index("reward") + 1]) if "reward" in rest else 1.0
        for target in rest[0].split(","):
            group, _, rollout = target.partition("/")
            yield {"event": verb, "group": int(group), "rollout": int(rollout or 0), "outcome": outcome, "reward": reward}
    elif verb in ("update", "commit"):
        yield {"event": verb, "batch" if verb == "update" else "step": int(rest[0])}
    else:
        yield {"event": verb, "who": rest[0] if rest else None}


def wrapped(words):
    lines = [""]
    for w in words:
        if lines[-1] and len(lines[-1]) + len(w) > 120:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + w
    return [f"    {line}" for line in lines if line]


def tell(text):
    out, model, seen = [], None, 0

    def news():
        nonlocal seen
        fresh, seen = model.out[seen:], len(model.out)
        return wrapped([word(d) for d in fresh])

    for line in text.splitlines():
        if line.startswith((" ", "end")):
            continue
        out.append(line)
        if line.startswith("pool "):
            model = Model(json.loads(line[5:]))
            out += news()
        elif line and not line.startswith("#"):
            t, *words = line.split()
            for e in events(words):
                assert model.event({"t": float(t), **e}), line
            out += news()
    s = model.summary()
    ledger = s["ledger"]
    dead = sum(ledger["tombstoned"].values())
    out.append(f"end bound {s['bound']} staleness {s['max_staleness']} ledger {ledger['admitted']},{ledger['consumed']},{dead},{ledger['in_flight']}")
    return "\n".join(out) + "\n"


here = "--here" in sys.argv
for path in [pathlib.Path(name) for name in sys.argv[1:] if name != "--here"]:
    (pathlib.Path(path.name) if here else path).write_text(tell(path.read_text()))
