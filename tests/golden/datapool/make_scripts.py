#!/usr/bin/env python3
"""Random scripts for `temper pool sim` and what a second, slow model of docs/pool_sim.md decides on them.

The model was written from the rules alone: plain lists, everything searched from scratch at each question, no index that could
go stale. Writes scripts.jsonl: one object a case, {"config": line, "events": [lines], "output": [objects]}; numbers of error
lines are compared, not their words. Python 3.11, standard library only: `python3 make_scripts.py > scripts.jsonl`.
"""
import json
import math
import random


class Model:
    def __init__(self, c):
        self.c = c
        self.P, self.S, self.G = c["P"], c.get("S", 0), c.get("G", 1)
        self.n = self.G + c.get("extra", 0)
        self.min_valid = c.get("min_valid", min(2, self.G))
        self.sources = c.get("sources") or [{"name": "default", "weight": 1}]
        share = [1] * len(self.sources)
        total = sum(s.get("weight", 1) for s in self.sources)
        for _ in range(self.P - len(share)):
            owed = [s.get("weight", 1) * self.P - share[i] * total for i, s in enumerate(self.sources)]
            share[owed.index(max(owed))] += 1
        self.quota = share
        self.B = [c["B"]] if c.get("B") else [(self.S + 1) * p for p in share]
        self.W = [self.size(s.get("window") or c.get("window", {}), b) for s, b in zip(self.sources, self.B)]
        self.groups = []      # all ever admitted
        self.back = [[] for _ in self.sources]   # requeued tasks
        self.fresh = [0] * len(self.sources)     # new tasks used
        self.v = self.committed = 0
        self.batches = {}     # number -> {"groups", "state": out | done | back}
        self.filling = []
        self.next = 0
        self.asking = False
        self.t = 0
        self.dead = {}
        self.attempts = dict(issued=0, finished=0, failed=0, aborted=0)
        self.worst = 0
        self.out = []
        self.settle()

    @staticmethod
    def size(w, b):
        policy = w.get("policy", "anchored")
        if policy == "strict":
            return 1
        if policy == "greedy":
            return b
        if policy == "areal":
            return None
        if "size" in w:
            return w["size"]
        return max(1, math.floor(w.get("fraction", 0.3) * b + 1e-9))

    # a group: dict(num, src, pos, ver, born, from, runs=[{over, valid, reward, attempt, infra}], state run|ready|taken|updated|dead, late)
    def living(self, i):
        return [g for g in self.groups if g["src"] == i and g["state"] in ("run", "ready")]

    def head(self, i):
        alive = self.living(i)
        return alive[0] if alive else None

    def holding(self, i):
        return sum(g["src"] == i and g["state"] in ("run", "ready", "taken") for g in self.groups)

    def emit(self, decision, **fields):
        consumed = sum(g["state"] == "updated" for g in self.groups)
        dead = sum(g["state"] == "dead" for g in self.groups)
        heads = [self.head(i) for i in range(len(self.sources))]
        line = dict(t=self.t, decision=decision, **fields)
        line["head"] = [h and h["num"] if h is None else h["num"] for h in heads]
        line["ledger"] = [len(self.groups), consumed, dead, len(self.groups) - consumed - dead]
        self.out.append(line)

    def cut(self, g):
        for r in g["runs"]:
            if not r["over"]:
                r["over"] = True
                self.attempts["aborted"] += 1

    def kill(self, g, reason, line=True):
        self.cut(g)
        g["state"] = "dead"
        self.dead[reason] = self.dead.get(reason, 0) + 1
        if line:
            self.emit("tombstone", group=g["num"], reason=reason)

    def complete(self, g):
        rewards = [r["reward"] for r in g["runs"] if r["valid"]]
        if self.c.get("zero_signal") == "refill" and max(rewards) - min(rewards) <= 1e-9:
            return self.kill(g, "zero_signal")
        self.cut(g)
        g["state"] = "ready"
        self.emit("ready", group=g["num"], valid=len(rewards), partial=len(rewards) < self.G)

    def check(self, g):
        valid = sum(r["valid"] for r in g["runs"])
        if valid == self.G:
            self.complete(g)
        elif all(r["over"] for r in g["runs"]):
            if valid >= self.min_valid:
                self.complete(g)
            else:
                self.kill(g, "too_few_valid")

    def lease(self, b, again):
        self.batches[b]["state"] = "out"
        self.asking = False
        members = self.batches[b]["groups"]
        ages = [b - g["ver"] for g in members]
        self.worst = max([self.worst] + ages)
        self.emit("lease", batch=b, groups=[g["num"] for g in members], staleness=ages, again=again)
        self.fresh_lease = b

    def take_phase(self):
        moved = False
        back = sorted(b for b, x in self.batches.items() if x["state"] == "back")
        if back:
            self.lease(back[0], True)
            return True
        for i in range(len(self.sources)):
            while sum(g["src"] == i for g in self.filling) < self.quota[i]:
                head = self.head(i)
                ready = [g for g in self.living(i) if g["state"] == "ready" and (self.W[i] is None or g["pos"] <= head["pos"] + self.W[i] - 1)]
                if not ready:
                    break
                g = ready[0]
                moved = True
                m = self.c.get("max_staleness")
                if m is not None and self.next - g["ver"] > m:
                    self.kill(g, "stale")
                    continue
                g["state"] = "taken"
                self.filling.append(g)
                self.emit("take", group=g["num"], batch=self.next, staleness=self.next - g["ver"])
        if len(self.filling) == self.P:
            b = self.next
            self.next += 1
            self.batches[b] = {"groups": self.filling}
            self.filling = []
            self.lease(b, False)
            moved = True
        return moved

    def task_left(self, i):
        tasks = self.sources[i].get("tasks")
        if tasks is None:
            tasks = self.c.get("tasks")
        return bool(self.back[i]) or tasks is None or self.fresh[i] < tasks

    def settle(self):
        while True:
            moved = False
            self.fresh_lease = None
            if self.asking:
                moved = self.take_phase()
            m = self.c.get("max_staleness")
            if self.fresh_lease is not None and m is not None:
                for g in self.groups:
                    if g["state"] in ("run", "ready") and self.fresh_lease + 1 - g["ver"] > m:
                        self.kill(g, "stale")
                        moved = True
            for i in range(len(self.sources)):
                while self.holding(i) < self.B[i] and self.task_left(i):
                    moved = True
                    origin = None
                    if self.back[i]:
                        origin = self.back[i].pop(0)
                    else:
                        self.fresh[i] += 1
                    g = dict(num=len(self.groups), src=i, pos=sum(x["src"] == i for x in self.groups), ver=self.v, born=self.t, origin=origin, state="run",
                             late=False, runs=[dict(over=False, valid=False, reward=None, attempt=1, infra=0) for _ in range(self.n)])
                    self.groups.append(g)
                    self.attempts["issued"] += self.n
                    extra = {} if origin is None else {"from": origin}
                    self.emit("admit", group=g["num"], source=self.sources[i]["name"], pos=g["pos"], version=self.v, **extra)
            if not moved:
                return

    def hold(self):
        if not self.asking:
            return
        blocked = []
        for i in range(len(self.sources)):
            head = self.head(i)
            if self.W[i] is None or head is None or sum(g["src"] == i for g in self.filling) == self.quota[i]:
                continue
            blocked += [g["num"] for g in self.living(i) if g["state"] == "ready" and g["pos"] > head["pos"] + self.W[i] - 1]
        self.emit("hold", batch=self.next, have=len(self.filling), need=self.P - len(self.filling), blocked=sorted(blocked))

    def due(self, t, inclusive):
        d = self.c.get("deadline_s")
        if d is None:
            return None
        late = [(g["born"] + d, g["num"]) for g in self.groups if g["state"] == "run" and not g["late"] and (g["born"] + d < t or (inclusive and g["born"] + d == t))]
        return min(late) if late else None

    def fire(self, t, inclusive):
        while (due := self.due(t, inclusive)) is not None:
            self.t = max(self.t, due[0])
            g = self.groups[due[1]]
            how = self.c.get("on_deadline", "tombstone")
            if how == "wait":
                g["late"] = True
                self.emit("late", group=g["num"])
            elif sum(r["valid"] for r in g["runs"]) >= self.min_valid:
                self.complete(g)
            elif how == "requeue" and g["origin"] is None:
                self.kill(g, "requeued", line=False)
                self.back[g["src"]].append(g["num"])
                self.emit("requeue", group=g["num"])
            else:
                self.kill(g, "deadline")
            self.settle()
            self.hold()

    def event(self, e):
        """False: a bad line."""
        t, kind = e["t"], e["event"]
        if t < self.t:
            return False
        if kind in ("finish", "fail") and e.get("rollout", 0) >= self.n:
            return False
        if kind in ("finish", "fail") and e["group"] >= len(self.groups):
            # Scripts only do this where no deadline could still admit it.
            assert self.due(t, False) is None
            return False
        self.fire(t, kind == "tick")
        self.t = t
        getattr(self, "on_" + kind)(e)
        self.settle()
        if kind != "crash":
            self.hold()
        return True

    def on_tick(self, e):
        pass

    def find(self, e):
        g = self.groups[e["group"]]
        r = g["runs"][e.get("rollout", 0)]
        if g["state"] != "run" or r["over"]:
            self.emit("ignore", group=g["num"], rollout=e.get("rollout", 0))
            return None, None
        return g, r

    def on_finish(self, e):
        g, r = self.find(e)
        if g is None:
            return
        self.attempts["finished"] += 1
        r["over"] = True
        r["valid"] = e.get("reward") is not None
        r["reward"] = e.get("reward")
        self.check(g)

    def on_fail(self, e):
        g, r = self.find(e)
        if g is None:
            return
        again = True
        if e["outcome"] == "aborted":
            self.attempts["aborted"] += 1
        else:
            self.attempts["failed"] += 1
            r["infra"] += 1
            again = r["infra"] <= self.c.get("retries", 0)
        if again:
            r["attempt"] += 1
            self.attempts["issued"] += 1
            self.emit("reissue", group=g["num"], rollout=e.get("rollout", 0), attempt=r["attempt"], version=self.v)
        else:
            r["over"] = True
            self.check(g)

    def on_lease(self, e):
        if self.asking:
            self.emit("refuse", event="lease", reason="open")
        elif sum(x["state"] == "out" for x in self.batches.values()) >= self.c.get("max_leases", 1):
            self.emit("refuse", event="lease", reason="outstanding")
        else:
            self.asking = True

    def on_update(self, e):
        b = e["batch"]
        if b < self.v:
            self.emit("ignore", batch=b)
        elif b not in self.batches or self.batches[b]["state"] != "out":
            self.emit("refuse", event="update", reason="no_lease", batch=b)
        elif b > self.v:
            self.emit("refuse", event="update", reason="order", batch=b)
        else:
            self.batches[b]["state"] = "done"
            self.v += 1
            for g in self.batches[b]["groups"]:
                g["state"] = "updated"
            self.emit("update", batch=b, version=self.v, groups=[g["num"] for g in self.batches[b]["groups"]])

    def on_commit(self, e):
        n = e["step"]
        if n <= self.committed:
            self.emit("ignore", step=n)
        elif n > self.v:
            self.emit("refuse", event="commit", reason="order", step=n)
        else:
            self.committed = n
            self.emit("commit", step=n)

    def on_crash(self, e):
        if e["who"] == "pool":
            self.emit("recover", who="pool", batches=[])
            return
        back = [b for b in sorted(self.batches) if b >= self.committed]
        for b in back:
            self.batches[b]["state"] = "back"
            for g in self.batches[b]["groups"]:
                g["state"] = "taken"
        self.v = self.committed
        self.asking = False
        self.emit("recover", who="trainer", batches=back)

    def summary(self):
        bound = None
        if None not in self.W:
            bound = max((b + w - 2) // p for b, w, p in zip(self.B, self.W, self.quota))
        consumed = sum(g["state"] == "updated" for g in self.groups)
        dead = sum(self.dead.values())
        rollouts = dict(self.attempts)
        rollouts["in_flight"] = rollouts["issued"] - rollouts["finished"] - rollouts["failed"] - rollouts["aborted"]
        return {"bound": bound, "max_staleness": self.worst, "B": self.B, "W": self.W, "quota": self.quota, "version": self.v, "batches": self.next,
                "ledger": {"admitted": len(self.groups), "consumed": consumed, "tombstoned": self.dead, "in_flight": len(self.groups) - consumed - dead},
                "rollouts": rollouts}


def random_config(r):
    c = {"P": r.randint(1, 4), "S": r.randint(0, 2), "G": r.randint(1, 3)}
    if r.random() < .4:
        c["extra"] = r.randint(0, 2)
    if r.random() < .5:
        c["min_valid"] = r.randint(1, c["G"])
    if r.random() < .6:
        c["retries"] = r.randint(0, 2)
    if r.random() < .6:
        c["deadline_s"] = r.randint(1, 15)
        c["on_deadline"] = r.choice(["wait", "tombstone", "requeue"])
    if c["G"] > 1 and r.random() < .5:
        c["zero_signal"] = "refill"
    if r.random() < .4:
        c["max_leases"] = 2
    if r.random() < .4:
        c["max_staleness"] = c.get("max_leases", 1) + r.randint(0, 2)
    if r.random() < .2:
        c["tasks"] = r.randint(3, 30)
    c["window"] = r.choice([{}, {"policy": "strict"}, {"policy": "greedy"}, {"policy": "areal"}, {"fraction": .5}, {"policy": "anchored", "size": r.randint(1, (c["S"] + 1) * c["P"])}])
    if r.random() < .3 and c["P"] >= 2 and "size" not in c["window"]:
        c["sources"] = [{"name": "a", "weight": 1}, {"name": "b", "weight": r.choice([1, 2.5, 9])}]
        if r.random() < .3:
            c["sources"][0]["window"] = {"policy": "strict"}
    elif r.random() < .3:
        c["B"] = max((c["S"] + 1) * c["P"], c["P"] * (c["S"] + 1) + r.randint(0, 3))
    return c


def random_event(r, m, t):
    running = [(g, i) for g in m.groups if g["state"] == "run" for i, x in enumerate(g["runs"]) if not x["over"]]
    dice = r.random()
    if dice < .62 and running:
        # The younger ones more often, so that backlogs build up behind the head.
        g, i = max(r.choice(running), r.choice(running), key=lambda x: x[0]["num"])
        if r.random() < .8:
            reward = None if r.random() < .1 else r.choice([0, 1, 1, .5])
            return {"t": t, "event": "finish", "group": g["num"], "rollout": i, "outcome": r.choice(["scored", "policy_failure", "truncated"]), "reward": reward}
        return {"t": t, "event": "fail", "group": g["num"], "rollout": i, "outcome": r.choice(["infra_failure", "infra_failure", "aborted"]), "kind": "oom"}
    if dice < .76:
        return {"t": t, "event": "lease"}
    if dice < .87:
        return {"t": t, "event": "update", "batch": max(0, m.v + r.choice([0, 0, 0, 0, 1, -1]))}
    if dice < .91:
        return {"t": t, "event": "commit", "step": max(0, m.v + r.choice([0, 0, -1, 1]))}
    if dice < .94:
        return {"t": t, "event": "crash", "who": r.choice(["pool", "trainer"])}
    if dice < .98 or not m.groups:
        return {"t": t, "event": "tick"}
    # Something that is over, or wrong.
    if r.random() < .5 or m.due(t, False) is not None:
        return {"t": t, "event": "finish", "group": r.randrange(len(m.groups)), "rollout": r.choice([0, 0, m.n]), "reward": 1}
    return {"t": t, "event": "finish", "group": len(m.groups) + 3, "reward": 1}


def main():
    for seed in range(24):
        r = random.Random(seed)
        config = random_config(r)
        m = Model(config)
        events, output, t = [], list(m.out), 0
        for _ in range(60):
            t += r.choice([0, 0, 0, .25, .5, 1, 2.5])
            e = random_event(r, m, t)
            m.out = []
            good = m.event(e)
            events.append(e)
            output += m.out if good else [{"error": True}]
        output.append(m.summary())
        print(json.dumps({"config": config, "events": events, "output": output}, separators=(",", ":")))


if __name__ == "__main__":
    main()
