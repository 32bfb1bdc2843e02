"""Writes losses.json: random optimizer steps under random settings, and what docs/algorithm_block.md says of each: loss, advantages,
d(loss)/d(logp_new) and metrics. python3 make_loss_goldens.py, which writes into the folder it runs in.

Needs numpy; its version is recorded in the file. Written from that document (and docs/losses.md, of the metrics) alone: its
formulas in double precision, in its order. No derivative is written down: slopes are complex steps, f(x + ih) = f(x) + ih f'(x), which
have no rounding of a difference. What is detached is taken from the real point, so it has no imaginary part.

Cases go round over all loss kinds and all recipes; the other settings are drawn, each where it is read (a setting without effect is an
error). Data are few short rollouts, with gaps in their masks, none sampled, groups of one, equal rewards, failures, ratios beyond the
clamp; fields that nothing read are left out.
"""
import json
import math
import random

import numpy as np

PER_KIND, PER_RECIPE, PER_CREDIT = 14, 3, 24
H = 1e-150
EQUAL = 1e-9

GM, GS = {"baseline": "group_mean"}, {"scale": "group_std"}
PPO = {"kind": "ppo_clip", "clip_low": .2, "clip_high": .2}
TOKENS, SEQUENCES = {"mode": "token-mean"}, {"mode": "seq-mean-token-mean"}
RECIPES = {
    "grpo": dict(advantage={**GM, **GS}, loss=PPO, aggregation=SEQUENCES),
    "dr_grpo": dict(advantage=GM, loss=PPO, aggregation={"mode": "seq-mean-token-sum-norm"}),
    "dapo": dict(advantage={**GM, **GS}, loss={**PPO, "clip_high": .28}, aggregation=TOKENS, dynamic_sampling="refill"),
    "gspo": dict(advantage={**GM, **GS}, loss={"kind": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}, aggregation=SEQUENCES),
    "gmpo": dict(advantage={**GM, **GS}, loss={"kind": "gmpo", "log_clip_low": .4, "log_clip_high": .4}, aggregation=SEQUENCES),
    "cispo": dict(advantage={**GM, **GS}, loss={"kind": "cispo", "ratio_min": 0, "ratio_max": 5}, aggregation={"mode": "prompt-mean"},
                  dynamic_sampling="refill"),
    "rloo": dict(advantage={"baseline": "leave_one_out"}, loss=PPO, aggregation=TOKENS),
    "reinforce": dict(advantage={"baseline": "none"}, loss={"kind": "reinforce"}, aggregation={"mode": "seq-mean-token-sum"}),
    "reinforce_pp": dict(advantage={"credit": "token", "baseline": "none", "whiten": True}, loss=PPO, aggregation=TOKENS,
                         kl={"where": "reward", "estimator": "k1", "coef": .001}),
    "reinforce_pp_baseline": dict(advantage={**GM, "whiten": True}, loss=PPO, aggregation=TOKENS),
    "ppo": dict(advantage={"credit": "gae", "gamma": 1, "lambda": 1, "whiten": True}, loss=PPO, aggregation=TOKENS),
    "dual_clip": dict(advantage={**GM, **GS}, loss={**PPO, "dual_clip": 3}, aggregation=TOKENS),
    "sapo": dict(advantage={**GM, **GS}, loss={"kind": "sapo", "tau_pos": 1, "tau_neg": 1.05}, aggregation=SEQUENCES),
    "dppo_tv": dict(advantage=GM, loss={"kind": "dppo_tv", "tv_low": .2, "tv_high": .2, "ratio_max": 20}, aggregation=TOKENS),
    "m2po": dict(advantage={**GM, **GS}, loss={"kind": "m2po", "m2_max": .04}, aggregation=TOKENS),
    "minimax_01": dict(advantage={**GM, **GS, "balance": True}, loss={**PPO, "dual_clip": 3, "dual_clip_value": "drop"}, aggregation=SEQUENCES,
                       kl={"where": "loss", "estimator": "sg_prob", "coef": .01}),
    "kimi": dict(advantage=GM, loss={"kind": "ratio_band", "ratio_min": .5, "ratio_max": 2, "drift": .001}, aggregation=TOKENS),
    "opd": dict(distillation={"kind": "policy_gradient", "coef": 1, "student": "old"}, loss={"kind": "cispo", "ratio_min": 0, "ratio_max": None},
                aggregation=TOKENS),
    "dpo": dict(loss={"kind": "dpo", "beta": .1}),
    "ipo": dict(loss={"kind": "ipo", "beta": .1, "length_average": True}),
    "sft": dict(loss={"kind": "sft"}, aggregation=TOKENS),
}
DEFAULTS = {
    "reward": {"process_coef": 1, "speed_coef": 0, "speed_baseline_s": None},
    "overlong": {"max_tokens": None, "buffer_tokens": None, "factor": 1, "mask_truncated": False},
    "advantage": {"credit": "rollout", "gamma": 1, "lambda": 1, "baseline": "none", "scale": "none", "std": "sample", "std_eps": 1e-6,
                  "whiten": False, "balance": False},
    "loss": {"drift": 0},
    "aggregation": {"mode": "token-mean", "length_norm": None, "unit": "rollout"},
    "kl": {"where": "none", "estimator": None, "coef": None, "importance_weighted": False},
    "off_policy": {"mode": "bypass", "weight": "none", "weight_min": None, "weight_max": 2, "outside": "truncate",
                   "normalize": False, "reject": []},
    "distillation": {"kind": "none", "coef": 1, "student": "old", "task_reward": False},
}
KINDS = {
    "reinforce": {},
    "ppo_clip": {"clip_low": .2, "clip_high": .2, "dual_clip": None, "dual_clip_value": "cap"},
    "cispo": {"ratio_min": 0, "ratio_max": 5, "mask_low": None, "mask_high": None},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "gmpo": {"log_clip_low": .4, "log_clip_high": .4},
    "sapo": {"tau_pos": 1, "tau_neg": 1.05},
    "dppo_tv": {"tv_low": .2, "tv_high": .2, "ratio_max": 20},
    "m2po": {"m2_max": .04},
    "ratio_band": {"ratio_min": .5, "ratio_max": 2},
    "dpo": {"beta": .1, "label_smoothing": 0},
    "ipo": {"beta": .1, "length_average": True},
    "sft": {},
    "distill": {},
}
PAIRS = ("dpo", "ipo")
WITHOUT_OLD = ("reinforce", "dpo", "ipo", "sft", "distill")
WITHOUT_ADVANTAGE = ("dpo", "ipo", "sft", "distill")


# ---- settings

def expand(block):
    """The block over its recipe over the defaults, key by key."""
    full = {name: dict(keys) for name, keys in DEFAULTS.items()} | {"dynamic_sampling": "off"}
    recipe = RECIPES.get(block.get("recipe"), {})
    kind = block.get("loss", {}).get("kind", recipe.get("loss", {}).get("kind"))
    full["loss"] |= {"kind": kind, **KINDS[kind]}
    for source in (recipe, block):
        for name, keys in source.items():
            if name == "dynamic_sampling":
                full[name] = keys
            elif name == "loss" and source is recipe and keys["kind"] != kind:
                continue
            elif name != "recipe" and keys is not None:
                full[name] |= keys
    if full["kl"]["estimator"] is None:
        full["kl"]["estimator"] = "k1" if full["kl"]["where"] == "reward" else "k3"
    return full


# ---- small mathematics; every argument may be complex

def clamp(x):
    x = np.asarray(x, complex)
    return np.where(x.real > 20, 20, np.where(x.real < -20, -20, x))


def ratio_of(x):
    return np.exp(clamp(x))


def larger(a, b):
    a, b = np.asarray(a, complex), np.asarray(b, complex)
    return np.where(a.real >= b.real, a, b)


def smaller(a, b):
    return -larger(-np.asarray(a, complex), -np.asarray(b, complex))


def estimate(kind, x):
    if kind in ("k1", "k1+"):
        return x
    if kind == "k2":
        return x * x / 2
    return np.exp(-clamp(x)) - 1 + clamp(x)


def measured(measure, log_rho):
    """Of section 1, off_policy.reject. k2 takes no exp, so nothing is clamped there."""
    if measure == "k2":
        return log_rho * log_rho / 2
    rho = float(np.real(ratio_of(log_rho)))
    return rho if measure == "ratio" else rho - 1 - float(np.real(clamp(log_rho)))


def deviation(values, kind):
    n = len(values) - (kind == "sample")
    return math.sqrt(sum((v - sum(values) / len(values)) ** 2 for v in values) / n) if n > 0 else 0.0


def describe(values):
    if not len(values):
        return {"mean": 0, "std": 0, "min": 0, "max": 0}
    return {"mean": sum(values) / len(values), "std": deviation(values, "sample"), "min": min(values), "max": max(values)}


# ---- steps 1 to 6 of section 3: from rewards to advantages

class Rollout:
    """One rollout on its way; `read` collects which fields of the data anything looked at."""

    def __init__(self, data, read):
        self.data, self.read = data, read
        self.tokens = [t for t, m in enumerate(data["mask"]) if m]
        self.left = data.get("outcome", "scored") in ("scored", "policy_failure", "truncated")
        self.trained = self.left
        self.whole = 0.0                            # its advantage with credit rollout
        self.advantage = {t: 0.0 for t in self.tokens}

    def of(self, name):
        self.read.add(name)
        return self.data[name]

    def shift(self, change):
        self.whole = change(self.whole)
        self.advantage = {t: change(a) for t, a in self.advantage.items()}


def returns(rollout, a, last_turn):
    """Of each sampled token, and R_i."""
    tokens, advantage, kl = rollout.tokens, a["advantage"], {t: 0.0 for t in rollout.tokens}
    if a["kl"]["where"] == "reward":
        for t in tokens:
            kl[t] = -a["kl"]["coef"] * float(np.real(estimate(a["kl"]["estimator"], rollout.of("logp_old")[t] - rollout.of("logp_ref")[t])))
    turns = [a["reward"]["process_coef"] * r for r in rollout.of("turn_rewards")]
    final = rollout.of("reward") + last_turn
    if advantage["credit"] == "rollout":
        total = final + sum(turns) + sum(kl.values())
        return {t: total for t in tokens}, total
    turn = rollout.of("turn")
    turns[-1] += final
    if advantage["credit"] == "turn":
        for t in tokens:
            turns[turn[t]] += kl[t]
        for u in reversed(range(len(turns) - 1)):
            turns[u] += advantage["gamma"] * turns[u + 1]
        out = {t: turns[turn[t]] for t in tokens}
        return out, out[tokens[0]] if tokens else final
    paid = dict(kl)
    for u, reward in enumerate(turns):
        if tokens:
            reached = [t for t in tokens if turn[t] <= u]
            paid[reached[-1] if reached else tokens[0]] += reward
    out, behind, value_behind = {}, 0.0, 0.0
    for t in reversed(tokens):
        if advantage["credit"] == "token":
            behind = paid[t] + advantage["gamma"] * behind
        else:
            value = rollout.of("values")[t]
            behind = paid[t] + advantage["gamma"] * value_behind - value + advantage["gamma"] * advantage["lambda"] * behind
            value_behind = value
        out[t] = behind
    return out, out[tokens[0]] if tokens else final


def task_advantages(batch, a):
    advantage = a["advantage"]
    for group in batch:
        left = [r for r in group if r.left]
        for r in left:
            extra = 0.0
            if a["reward"]["speed_coef"]:
                walls, baseline = [x.of("wall_s") for x in left], a["reward"]["speed_baseline_s"]
                if baseline is None:
                    baseline = float(np.median(walls))
                if r.of("reward") > 0:
                    extra += a["reward"]["speed_coef"] * max(-1, min(1, 1 - r.of("wall_s") / baseline))
            if a["overlong"]["max_tokens"] is not None:
                end, buffer = a["overlong"]["max_tokens"], a["overlong"]["buffer_tokens"]
                extra += a["overlong"]["factor"] * max(-1, min(0, (end - buffer - len(r.tokens)) / buffer))
            r.returns, r.total = returns(r, a, extra)
    everyone = [r.total for group in batch for r in group if r.left]
    batch_std = deviation(everyone, advantage["std"])
    baseline, scale = (advantage["baseline"], advantage["scale"]) if advantage["credit"] != "gae" else ("none", "none")
    for group in batch:
        left = [r for r in group if r.left]
        totals = [r.total for r in left]
        if not left:
            continue
        mean, lengths = sum(totals) / len(totals), sum(len(r.tokens) for r in left)
        equal = max(totals) - min(totals) <= EQUAL
        zero = scale == "batch_std" and batch_std <= EQUAL or scale == "group_mean" and mean <= 0
        if baseline in ("group_mean", "leave_one_out", "length_weighted") or scale in ("group_std", "group_mean"):
            zero = zero or len(left) < 2 or equal and (advantage["credit"] == "rollout" or scale == "group_std")
        divisor = {"none": 1, "group_std": deviation(totals, advantage["std"]) + advantage["std_eps"],
                   "batch_std": batch_std + advantage["std_eps"], "group_mean": mean}[scale]
        for r in left:
            base = {"none": 0, "group_mean": mean, "batch_mean": sum(everyone) / len(everyone)}.get(baseline)
            if baseline == "leave_one_out":
                base = (sum(totals) - r.total) / max(1, len(left) - 1)
            if baseline == "length_weighted":
                base = sum(len(x.tokens) * x.total for x in left) / lengths if lengths else mean
            r.whole, r.advantage = r.total, dict(r.returns)
            r.shift(lambda value: 0.0 if zero else (value - base) / divisor)
    if advantage["whiten"]:
        trained = [x for group in batch for r in group if r.trained for x in r.advantage.values()]
        mean = sum(trained) / len(trained) if trained else 0
        spread = math.sqrt(deviation(trained, "sample") ** 2 + 1e-8) if trained else 1e-4
        for r in (r for group in batch for r in group if r.left):
            r.shift(lambda value: (value - mean) / spread)
    if advantage["balance"]:
        for group in batch:
            weight = lambda sign: sum(len(r.tokens) * abs(r.whole) for r in group if r.left and r.whole * sign > 0)
            positive, negative = weight(1), weight(-1)
            for r in group:
                side = positive if r.whole > 0 else negative
                if r.left and r.whole != 0 and side > 0:
                    r.shift(lambda value: value * (positive + negative) / (2 * side))


# ---- steps 7 to 9: the loss as a function of logp_new

class Step:
    """Trainable tokens as vectors, in the order groups, rollouts, tokens (pairs: the chosen one first), and what is constant in them."""

    def __init__(self, a, groups):
        self.a, self.kind, self.read = a, a["loss"]["kind"], {"mask"}
        self.metrics = {}
        self.task = self.kind not in WITHOUT_ADVANTAGE and (a["distillation"]["kind"] == "none" or a["distillation"]["task_reward"])
        self.batch = [[Rollout(data, self.read) for data in group["rollouts"]] for group in groups]
        self.filter()
        if self.task:
            task_advantages(self.batch, a)
        if self.kind == "sft":
            for r in (r for group in self.batch for r in group if r.left):
                r.shift(lambda value: 1.0)
        if a["distillation"]["kind"] == "policy_gradient":
            for r in (r for group in self.batch for r in group if r.left):
                student = r.of("logp_new" if a["distillation"]["student"] == "new" else "logp_old")
                for t in r.tokens:
                    r.advantage[t] += a["distillation"]["coef"] * (r.of("logp_teacher")[t] - student[t])
        self.lay_out()
        self.weigh()

    def filter(self):
        a, rewards, turn_tokens = self.a, [], []
        self.metrics["zero_signal_groups"] = 0
        for group in self.batch:
            left = [r for r in group if r.left]
            for r in left:
                reads_turns = self.task and a["advantage"]["credit"] != "rollout"
                turn = [r.of("turn")[t] if reads_turns else 0 for t in r.tokens]
                turn_tokens += [turn.count(u) for u in sorted(set(turn))]
            if not self.task and self.kind not in PAIRS:
                rewards += [0] * len(left)
                continue
            own = [r.of("reward") + (a["reward"]["process_coef"] * sum(r.of("turn_rewards")) if self.task else 0) for r in left]
            rewards += own
            silent = len(own) < 2 or max(own) - min(own) <= EQUAL
            self.metrics["zero_signal_groups"] += silent
            for r in left:
                r.left = not (silent and self.task and a["dynamic_sampling"] != "off")
                r.trained = r.left and not (self.task and a["overlong"]["mask_truncated"] and r.data.get("outcome") == "truncated")
        self.metrics |= {"reward": describe(rewards), "turn_tokens": describe(turn_tokens)}

    def lay_out(self):
        a, kl, off = self.a, self.a["kl"], self.a["off_policy"]
        self.where, self.sequences = [], []
        for g, group in enumerate(self.batch):
            order = list(range(len(group)))
            if self.kind in PAIRS:
                first, second = (r.of("reward") if r.left else None for r in group)
                if first is None or second is None or abs(first - second) <= EQUAL:
                    continue
                order = [0, 1] if first > second else [1, 0]
            for i in order:
                if not group[i].trained:
                    continue
                numbers = {}
                if self.kind in PAIRS:
                    numbers[0] = len(self.sequences)
                    self.sequences.append([])
                for t in group[i].tokens:
                    segment = group[i].of("segment")[t] if a["aggregation"]["unit"] == "segment" else 0
                    if segment not in numbers:
                        numbers[segment] = len(self.sequences)
                        self.sequences.append([])
                    self.sequences[numbers[segment]].append(len(self.where))
                    self.where.append((g, i, t, numbers[segment]))
        self.n = len(self.where)
        column = lambda name: np.array([self.batch[g][i].of(name)[t] for g, i, t, _ in self.where], float)
        self.advantage = np.array([self.batch[g][i].advantage[t] for g, i, t, _ in self.where], float)
        self.x = column("logp_new")
        self.reads_old = (self.kind not in WITHOUT_OLD or a["loss"]["drift"] > 0 or kl["where"] == "reward" or kl["importance_weighted"] or
                          off["mode"] == "decoupled" or bool(off["reject"]) or
                          a["distillation"]["kind"] == "policy_gradient" and a["distillation"]["student"] == "old")
        self.old = column("logp_old") if self.reads_old else self.x
        self.reads_ref = kl["where"] != "none" or self.kind in PAIRS
        self.ref = column("logp_ref") if self.reads_ref else None
        self.log_rho = self.old - column("logp_rollout") if off["mode"] == "decoupled" else self.x - self.old
        tokens_of = {}
        for g, *_ in self.where:
            tokens_of[g] = tokens_of.get(g, 0) + 1
        b = max(1, len(self.sequences))
        self.share = np.array([{"token-mean": lambda: self.n, "prompt-mean": lambda: len(tokens_of) * tokens_of[g],
                                "seq-mean-token-mean": lambda: b * len(self.sequences[s]), "seq-mean-token-sum": lambda: b,
                                "seq-mean-token-sum-norm": lambda: b * a["aggregation"]["length_norm"]}[a["aggregation"]["mode"]]()
                               for g, _, _, s in self.where], float) ** -1.0 if self.n else np.zeros(0)

    def weigh(self):
        """w and keep of section 1, off_policy; rho is the ratio to the rollout engine's logprob."""
        off, n = self.a["off_policy"], self.n
        sums = [float(self.log_rho[s].sum()) for s in self.sequences]

        def bounded(x):
            rho, low, high = float(np.real(ratio_of(x))), off["weight_min"], off["weight_max"]
            if low is not None and rho < low:
                return 0.0 if off["outside"] == "zero" else low
            if high is not None and rho > high:
                return 0.0 if off["outside"] == "zero" else high
            return rho
        w, self.metrics["ess"] = np.ones(n), 1.0
        if off["weight"] != "none":
            if off["weight"] == "token":
                w = np.array([bounded(x) for x in self.log_rho])
                mean = w.mean() if n else 0
            else:
                of_sequence = [bounded(x) for x in sums]
                for s, value in zip(self.sequences, of_sequence):
                    w[s] = value
                mean = sum(of_sequence) / len(of_sequence) if of_sequence else 0
            if off["normalize"] and mean > 0:
                w = w / mean
            if n:
                self.metrics["ess"] = w.sum() ** 2 / (n * (w ** 2).sum()) if w.any() else 0.0
        keep = np.ones(n, bool)
        for rule in off["reject"]:
            beyond = lambda value: value < rule.get("min", -math.inf) or value > rule.get("max", math.inf)
            bad = np.zeros(n, bool)
            for s in self.sequences:
                x, level, measure = self.log_rho[s], rule["level"], rule["measure"]
                if not len(s):
                    continue
                if level in ("token", "sequence_any"):
                    each = np.array([beyond(measured(measure, v)) for v in x])
                    bad[s] = each if level == "token" else each.any()
                    continue
                # Of ratios the product or the geometric mean, of divergences the sum or the mean.
                share = 1 / len(s) if level == "sequence_mean" else 1
                bad[s] = beyond(measured(measure, x.sum() * share) if measure == "ratio" else sum(measured(measure, v) for v in x) * share)
            keep &= ~(bad & (self.advantage < 0) if rule.get("only_negative") else bad)
        self.weight = w * keep
        self.metrics["rejected_tokens"] = int((~keep).sum())

    def kind_loss(self, x):
        """l per token of section 1.1, and which tokens have their coefficient zeroed or capped: by the kind's rule or by the clamp."""
        p, kind, a = self.a["loss"], self.kind, self.advantage
        r, r0 = ratio_of(x - self.old), np.real(ratio_of(self.x - self.old))  # r0: detached
        beyond = np.abs(self.x - self.old) > 20
        none = np.zeros(self.n, bool)
        if kind == "reinforce":
            return -a * x, none
        if kind == "sft":
            return -x, none
        if kind == "distill":
            return 0 * x, none
        if kind == "ppo_clip":
            loss = larger(-r * a, -smaller(larger(r, 1 - p["clip_low"]), 1 + p["clip_high"]) * a)
            clipped = (a > 0) & (r0 > 1 + p["clip_high"]) | (a < 0) & (r0 < 1 - p["clip_low"])
            if p["dual_clip"] is not None:
                dual = (a < 0) & (r0 > p["dual_clip"])
                loss = np.where(dual, 0 if p["dual_clip_value"] == "drop" else -p["dual_clip"] * a, loss)
                clipped |= dual
            return loss, clipped | beyond
        if kind == "cispo":
            c = np.clip(r0, p["ratio_min"], p["ratio_max"])
            clipped = c != r0
            if p["mask_low"] is not None:
                masked = (a > 0) & (r0 > 1 + p["mask_high"]) | (a < 0) & (r0 < 1 - p["mask_low"])
                c, clipped = np.where(masked, 0, c), clipped | masked
            return -c * a * x, clipped | beyond
        if kind in ("gspo", "gmpo"):
            loss, clipped = np.zeros(self.n, complex), none.copy()
            for s in self.sequences:
                log_r, mine = x[s] - self.old[s], a[s]
                if kind == "gmpo":
                    high, low = (mine > 0) & (log_r.real > p["log_clip_high"]), (mine < 0) & (log_r.real < -p["log_clip_low"])
                    log_r = np.where(high, p["log_clip_high"], np.where(low, -p["log_clip_low"], log_r))
                mean = log_r.sum() / len(s)
                ratio = ratio_of(mean)
                outside = abs(mean.real) > 20
                if kind == "gmpo":
                    loss[s], clipped[s] = -mine * ratio, high | low | outside
                else:
                    bounded = smaller(larger(ratio, 1 - p["clip_low"]), 1 + p["clip_high"])
                    loss[s] = larger(-ratio * mine, -bounded * mine)
                    clipped[s] = (mine > 0) & (ratio.real > 1 + p["clip_high"]) | (mine < 0) & (ratio.real < 1 - p["clip_low"]) | outside
            return loss, clipped
        if kind == "sapo":
            tau = np.where(a > 0, p["tau_pos"], p["tau_neg"])
            z = tau * (r - 1)
            return -(4 / tau) * np.where(z.real > -700, 1 / (1 + np.exp(-larger(z, -700))), 0) * a, beyond
        if kind == "dppo_tv":
            moved = np.exp(self.x) - np.exp(self.old)
            inside = np.where(a > 0, moved <= p["tv_high"], moved >= -p["tv_low"])
            c = r0 if p["ratio_max"] is None else np.minimum(r0, p["ratio_max"])
            return -c * inside * a * x, ~inside | (c != r0) | beyond
        if kind == "m2po":
            squares = (self.x - self.old) ** 2
            order = sorted(range(self.n), key=lambda k: (squares[k], k))
            while order and sum(squares[k] for k in order) / len(order) > p["m2_max"]:
                order.pop()
            kept = np.isin(np.arange(self.n), order)
            return -r * kept * a, ~kept | beyond
        inside = (r0 >= p["ratio_min"]) & (r0 <= (math.inf if p["ratio_max"] is None else p["ratio_max"]))
        return -r0 * inside * a * x, ~inside | beyond

    def pair_loss(self, x):
        p, total = self.a["loss"], 0
        for chosen, rejected in zip(self.sequences[::2], self.sequences[1::2]):
            sides = []
            for s in (chosen, rejected):
                value = (x[s] - self.ref[s]).sum() if len(s) else 0
                sides.append(value / len(s) if self.kind == "ipo" and p["length_average"] and s else value)
            margin = complex(sides[0] - sides[1])
            if self.kind == "ipo":
                total = total + (margin - 1 / (2 * p["beta"])) ** 2
                continue
            minus_log_sigmoid = lambda z: np.log(1 + np.exp(-z)) if z.real > 0 else np.log(1 + np.exp(z)) - z
            z, eps = p["beta"] * margin, p["label_smoothing"]
            total = total + (1 - eps) * minus_log_sigmoid(z) + eps * minus_log_sigmoid(-z)
        return total / (len(self.sequences) / 2) if self.sequences else 0

    def loss(self, x, nudge=None):
        """`nudge`: (token, pair, step) of teacher_top."""
        x = np.asarray(x, complex)
        if self.kind in PAIRS:
            return self.pair_loss(x)
        kl, tau = self.a["kl"], self.a["loss"]["drift"]
        per_token = self.kind_loss(x)[0] * self.weight
        if tau > 0:
            per_token = per_token + tau * (x - self.old) ** 2
        if kl["where"] == "loss":
            y, y0 = x - self.ref, self.x - self.ref
            if kl["estimator"] == "sg_prob":
                term = (np.exp(self.x) - np.exp(self.ref)) * x
            elif kl["estimator"].endswith("+"):
                term = np.real(estimate(kl["estimator"], y0)) + (y * y - y0 * y0) / 2
            else:
                term = estimate(kl["estimator"], y)
            per_token = per_token + kl["coef"] * term * (ratio_of(x - self.old) if kl["importance_weighted"] else 1)
        if self.a["distillation"]["kind"] == "topk_forward_kl":
            for k, (g, i, t, _) in enumerate(self.where):
                for j, (teacher, student) in enumerate(self.batch[g][i].of("teacher_top")[t]):
                    here = student + nudge[2] if nudge and nudge[:2] == (k, j) else student
                    per_token[k] += self.a["distillation"]["coef"] * math.exp(teacher) * (teacher - here)
        return (per_token * self.share).sum()

    def answer(self):
        coef = [[[0.0] * len(r.data["mask"]) for r in group] for group in self.batch]
        for k, (g, i, t, _) in enumerate(self.where):
            x = self.x.astype(complex)
            x[k] += 1j * H
            coef[g][i][t] = float(np.imag(self.loss(x)) / H)
        out = {"loss": float(np.real(self.loss(self.x))), "coef": coef}
        if self.a["distillation"]["kind"] == "topk_forward_kl":
            out["coef_top"] = [[[[] for _ in r.data["mask"]] for r in group] for group in self.batch]
            for k, (g, i, t, _) in enumerate(self.where):
                for j in range(len(self.batch[g][i].of("teacher_top")[t])):
                    out["coef_top"][g][i][t].append(float(np.imag(self.loss(self.x, (k, j, 1j * H))) / H))
        one = self.a["advantage"]["credit"] == "rollout" and self.a["distillation"]["kind"] == "none"
        each = lambda r: [r.advantage.get(t, 0.0) if r.trained else 0.0 for t in range(len(r.data["mask"]))]
        out["advantages"] = [[r.whole if one else each(r) for r in group] for group in self.batch]
        out["metrics"] = self.measure()
        return out

    def measure(self):
        m, n, x = self.metrics, self.n, self.log_rho
        sequences = [s for s in self.sequences if len(s)]
        m |= {"tokens": n, "sequences": len(sequences), "advantage": describe(self.advantage.tolist())}
        clipped = np.zeros(0, bool) if self.kind in PAIRS else self.kind_loss(self.x.astype(complex))[1]
        if self.kind in PAIRS:
            clipped = np.zeros(n, bool)
        over = max(1, n)
        m |= {"clip_fraction_low": float((clipped & (self.advantage < 0)).sum() / over),
              "clip_fraction_high": float((clipped & (self.advantage > 0)).sum() / over), "entropy": float(-self.x.sum() / over)}
        k3 = lambda other: float(np.real(estimate("k3", self.x - other)).sum() / over)
        if self.reads_ref:
            m["kl_reference"] = k3(self.ref)
        if self.a["distillation"]["kind"] == "policy_gradient":
            m["kl_teacher"] = k3(np.array([self.batch[g][i].of("logp_teacher")[t] for g, i, t, _ in self.where], float))
        if self.reads_old and n:
            rho, sums = np.real(ratio_of(x)), np.array([x[s].sum() for s in sequences])
            means = np.array([-x[s].sum() / len(s) for s in sequences])
            m |= {"mismatch_k1": float(-x.mean()), "mismatch_k3": float((rho - np.real(clamp(x)) - 1).mean()), "log_ppl_diff": float(means.mean()),
                  "ppl_ratio": float(np.real(ratio_of(means)).mean()), "chi2_token": float((rho ** 2).mean() - 1),
                  "chi2_seq": float((np.real(ratio_of(sums)) ** 2).mean() - 1)}
        return m


# ---- random settings: each key only where it is read

def draw_kind(rng, kind):
    p, loss = lambda share: rng.random() < share, {"kind": kind}
    if kind == "ppo_clip" and p(.7):
        loss |= {"clip_low": rng.choice([.1, .3, 1.5]), "clip_high": rng.choice([.1, .5])}
    if kind == "ppo_clip" and p(.5):
        loss |= {"dual_clip": rng.choice([1.6, 3]), "dual_clip_value": rng.choice(["cap", "drop"])}
    if kind == "cispo":
        loss |= {"ratio_min": rng.choice([0, .8]), "ratio_max": rng.choice([1.2, 3, None])} if p(.7) else {}
        loss |= {"mask_low": .2, "mask_high": .28} if p(.4) else {}
    fixed = {"gspo": {"clip_low": .2, "clip_high": .3}, "gmpo": {"log_clip_low": .1, "log_clip_high": .7}, "sapo": {"tau_pos": 2, "tau_neg": .5},
             "dppo_tv": {"tv_low": .05, "tv_high": .1, "ratio_max": rng.choice([1.5, None])}, "m2po": {"m2_max": rng.choice([0, .01, .2, 4])},
             "ratio_band": {"ratio_min": .8, "ratio_max": rng.choice([1.3, None])}, "dpo": {"beta": .5, "label_smoothing": .1},
             "ipo": {"beta": .5, "length_average": False}}
    return loss | (fixed[kind] if kind in fixed and p(.6) else {})


def draw_off_policy(rng):
    p, off = lambda share: rng.random() < share, {}
    if p(.6):
        off["mode"] = "decoupled"
        if p(.75):
            off["weight"] = rng.choice(["token", "sequence"])
            if p(.6):
                off |= {"weight_min": rng.choice([None, .6]), "weight_max": rng.choice([None, 1.3])}
            if (off.get("weight_max", 2), off.get("weight_min")) != (None, None) and p(.5):
                off["outside"] = rng.choice(["truncate", "zero"])
            if p(.5):
                off["normalize"] = True
    if "weight" not in off or p(.4):
        off["reject"] = []
        for _ in range(rng.randint(1, 2)):
            rule = {"measure": rng.choice(["ratio", "k2", "k3"]), "level": rng.choice(["token", "sequence_sum", "sequence_mean", "sequence_any"])}
            if rule["measure"] == "ratio":
                rule |= rng.choice([{"min": .7}, {"max": 1.4}, {"min": .5, "max": 1.8}])
            else:
                rule["max"] = rng.choice([.02, .05, .3, 250])
            off["reject"].append(rule | ({"only_negative": True} if p(.3) else {}))
    return off


def draw_advantage(rng, kind, credit):
    p, out = lambda share: rng.random() < share, {}
    if credit != "rollout":
        out["credit"] = credit
        if p(.6):
            out["gamma"] = rng.choice([.9, .5, 0])
    if credit == "gae":
        if p(.6):
            out["lambda"] = rng.choice([.9, .2])
    else:
        out |= {"baseline": rng.choice(["none", "group_mean", "leave_one_out", "length_weighted", "batch_mean"]),
                "scale": rng.choice(["none", "none", "group_std", "batch_std", "group_mean"])}
        if out["scale"].endswith("std") and p(.5):
            out |= {"std": rng.choice(["sample", "population"]), "std_eps": rng.choice([1e-5, 1e-2])}
    if p(.3):
        out["whiten"] = True
    if credit == "rollout" and p(.25):
        out["balance"] = True
    return out


def draw_rewards(rng):
    p, out = lambda share: rng.random() < share, {}
    if p(.5):
        out["reward"] = {"process_coef": rng.choice([.5, -1, 2])}
        if p(.5):
            out["reward"]["speed_coef"] = rng.choice([.3, 1])
            out["reward"] |= {"speed_baseline_s": 2.5} if p(.4) else {}
    if p(.35):
        out["overlong"] = {"max_tokens": rng.choice([4, 6]), "buffer_tokens": rng.choice([1, 3, 4])}
        out["overlong"] |= {"factor": rng.choice([.5, 2])} if p(.6) else {}
    if p(.35):
        out.setdefault("overlong", {})["mask_truncated"] = True
    if p(.35):
        out["dynamic_sampling"] = rng.choice(["drop", "refill"])
    return out


def draw_block(rng, kind, credit):
    p, block = lambda share: rng.random() < share, {"loss": draw_kind(rng, kind)}
    if kind in PAIRS:
        return block
    trains = kind not in ("sft", "distill")
    if trains and kind not in ("gspo", "gmpo") and p(.3):
        block["loss"]["drift"] = rng.choice([.01, .5])
    modes = ["token-mean", "prompt-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
    mode = "seq-mean-token-mean" if kind in ("gspo", "gmpo") else rng.choice(modes)
    block["aggregation"] = {"mode": mode} | ({"length_norm": rng.choice([3, 8])} if mode == modes[-1] else {})
    if mode.startswith("seq-mean") and p(.4):
        block["aggregation"]["unit"] = "segment"
    task = trains
    if kind == "distill":
        block["distillation"] = {"kind": "topk_forward_kl", "coef": rng.choice([1, .3])}
    elif trains and p(.25):
        form = "topk_forward_kl" if kind == "gmpo" else rng.choice(["policy_gradient", "topk_forward_kl"])
        block["distillation"] = {"kind": form, "coef": rng.choice([1, .3, -.2])}
        if form == "policy_gradient" and p(.5):
            block["distillation"]["student"] = "new"
        if form == "topk_forward_kl" or credit != "rollout" or p(.5):
            block["distillation"]["task_reward"] = True
        task = "task_reward" in block["distillation"]
    if kind != "sft" and p(.45):
        where = rng.choice(["loss", "reward"]) if task else "loss"
        block["kl"] = {"where": where, "coef": rng.choice([.04, 1])}
        if p(.8):
            block["kl"]["estimator"] = rng.choice(["k2", "k3", "k3", "k1+", "k3+", "sg_prob"] if where == "loss" else ["k1", "k2", "k3"])
        if where == "loss" and p(.4):
            block["kl"]["importance_weighted"] = True
    if trains and p(.5):
        block["off_policy"] = draw_off_policy(rng)
    if task:
        block["advantage"] = draw_advantage(rng, kind, credit)
        block |= draw_rewards(rng)
    return block


# ---- random data

def draw_groups(rng, pairs):
    """Two to four groups; every number has four digits, so that the file is small and exact."""
    p, near_policy, extreme = lambda share: rng.random() < share, rng.random() < .1, rng.random() < .25
    far = lambda: extreme and p(.2)
    all_equal = p(.08)  # the whole batch
    number = lambda x: round(x, 4)
    logp = lambda: number(-rng.random() * (45 if far() else 3) - 1e-4)
    groups = []
    for _ in range(rng.randint(2, 4)):
        rollouts, equal, shared = [], all_equal or p(.25), 1 if all_equal else rng.choice([0, 1, .5, -1])
        for _ in range(2 if pairs else rng.choice([1, 2, 2, 3, 4])):
            n, turns, density = rng.choice([0, 1, 3, 4, 6]), rng.randint(1, 3), rng.choice([0, .7, .7, .7, 1, 1])
            r = {"mask": [int(p(density)) for _ in range(n)], "reward": shared if equal else rng.choice([0, 1, number(rng.uniform(-1, 2))])}
            if equal and p(.3):
                r["reward"] += 1e-12
            r["outcome"] = rng.choice(["scored"] * 6 + ["policy_failure", "truncated", "truncated", "infra_failure", "aborted"])
            r["turn_rewards"] = [0 if equal or p(.4) else number(rng.uniform(-.5, .5)) for _ in range(turns)]
            r["turn"] = sorted(rng.randrange(turns) for _ in range(n))
            r["segment"] = [rng.choice([0, 5, -2]) for _ in range(n)]
            r["wall_s"] = number(rng.uniform(.5, 6))
            r["logp_new"] = [logp() for _ in range(n)]
            for name in ("logp_old", "logp_rollout", "logp_ref", "logp_teacher"):
                r[name] = [x if near_policy else logp() if far() else number(x + rng.gauss(0, .4)) for x in r["logp_new"]]
            r["values"] = [number(rng.gauss(0, 1)) for _ in range(n)]
            r["teacher_top"] = [[[logp(), logp()] for _ in range(rng.randint(0, 2))] for _ in range(n)]
            rollouts.append(r)
        groups.append({"rollouts": rollouts})
    return groups


def without_unread(group, read):
    return {"rollouts": [{name: value for name, value in r.items() if name in read | {"outcome"} and (name, value) != ("outcome", "scored")}
                         for r in group["rollouts"]]}


def short(value):
    """Twelve digits; a thousandth of what the test allows."""
    if isinstance(value, dict):
        return {k: short(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [short(v) for v in value]
    if isinstance(value, (float, np.floating)):
        rounded = float(f"{value:.12g}")
        return int(rounded) if rounded == int(rounded) and abs(rounded) < 1e6 else rounded
    return int(value) if isinstance(value, (np.integer, np.bool_)) else value


def main():
    rng = random.Random(6)
    blocks = [draw_block(rng, kind, rng.choice(["rollout", "rollout", "turn", "token", "gae"]) if kind != "gmpo" else "rollout")
              for kind in KINDS for _ in range(PER_KIND)]
    # Whatever the loss, rewards reach it through a credit: more of each than the kinds bring.
    blocks += [draw_block(rng, rng.choice(["reinforce", "ppo_clip", "cispo"]), credit) for credit in ("rollout", "turn", "token", "gae")
               for _ in range(PER_CREDIT)]
    asked = {"dr_grpo": {"aggregation": {"length_norm": 5}}, "dapo": {"overlong": {"max_tokens": 5, "buffer_tokens": 3}}}
    blocks += [{"recipe": name, **asked.get(name, {})} for name in RECIPES for _ in range(PER_RECIPE)]
    cases = []
    for block in blocks:
        full = expand(block)
        while True:
            groups = draw_groups(rng, full["loss"]["kind"] in PAIRS)
            step = Step(full, groups)
            answer = step.answer()
            # (Numbers beyond 1e6 have too few digits for the test; a batch without a token says nothing.)
            if step.n and abs(answer["loss"]) < 1e6 and all(abs(c) < 1e6 for group in answer["coef"] for r in group for c in r):
                break
        cases.append({"in": {"algorithm": block, "groups": [without_unread(group, step.read) for group in groups]}, "out": short(answer)})
    with open("losses.json", "w") as file:
        file.write('{"generator":"tests/golden/trainer/make_loss_goldens.py",\n')
        file.write(f'"versions":{json.dumps({"numpy": np.__version__})},\n"cases":[\n')
        file.write(",\n".join(json.dumps(case, separators=(",", ":"), allow_nan=False) for case in cases) + "\n]}\n")
    print(f"{len(cases)} cases")


if __name__ == "__main__":
    main()
