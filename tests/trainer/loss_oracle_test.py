#!/usr/bin/env python3
"""`temper train loss` beside the loss and advantage functions of TRL and verl, on random batches: gaps in masks, rows without a
token, groups of one, equal rewards, extreme ratios. Values and gradients to 1e-9; where the two mean different things on purpose
(docs/losses.md), the peer's formula is computed from ours and agrees to 1e-9.

  loss_oracle_test.py TEMPER

TRL's trainers are given a stand-in for `self`: the code that computes advantages, weights and losses is theirs. verl's modules are
read from its wheel without its package initialisers, which would start Ray; names that the loss code only mentions in type hints or
as a container of settings (TensorDict, DictConfig, ActorConfig, DataProto) are stand-ins.
"""
import collections
import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import math
import pathlib
import random
import subprocess
import sys
import traceback
import types
from unittest import mock

import numpy as np
import torch

TEMPER = sys.argv[1]
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
compared = collections.Counter()


# ---- the peers -------------------------------------------------------------------------------------------------------------------

class Settings(dict):
    """verl's settings: fields and get(). Absent fields are None, as an unset field of its dataclass is."""
    def __getattr__(self, name):
        return self.get(name)


def load_verl():
    root = pathlib.Path(importlib.util.find_spec("verl").origin).parent

    def package(name, **names):
        module = types.ModuleType(name)
        module.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        module.__dict__.update(names)
        sys.modules[name] = module
        return module

    stand_in = lambda name, **names: sys.modules.setdefault(name, types.SimpleNamespace(**names))
    stand_in("tensordict", TensorDict=dict)
    stand_in("omegaconf", DictConfig=Settings, MISSING=None)
    for name in ("verl", "verl.utils", "verl.trainer", "verl.trainer.ppo", "verl.workers"):
        package(name)
    sys.modules["verl.trainer.config"] = types.SimpleNamespace(AlgoConfig=type("AlgoConfig", (), {}))
    sys.modules["verl.trainer.config.algorithm"] = types.SimpleNamespace(RolloutCorrectionConfig=object)
    sys.modules["verl.workers.config"] = types.SimpleNamespace(ActorConfig=Settings)
    sys.modules["verl.workers.config.actor"] = types.SimpleNamespace(PolicyLossConfig=object)
    sys.modules["verl.protocol"] = types.SimpleNamespace(DataProto=object)
    sys.modules["verl.utils.device"] = types.SimpleNamespace(get_device_name=lambda: "cpu", get_torch_device=lambda: torch.cpu)
    groupwise = importlib.import_module("verl.utils.groupwise")
    sys.modules["verl.utils"].as_torch_index = groupwise.as_torch_index
    sys.modules["verl.utils"].group_mean_std = groupwise.group_mean_std
    return importlib.import_module("verl.trainer.ppo.core_algos"), importlib.import_module("verl.trainer.ppo.rollout_corr_helper")


import trl.trainer.dpo_trainer
import trl.trainer.grpo_trainer
import trl.trainer.rloo_trainer
import trl.experimental.gmpo.gmpo_trainer

core, corr = load_verl()
print(f"trl {importlib.metadata.version('trl')}, verl {importlib.metadata.version('verl')}, torch {torch.__version__}")


# ---- batches ---------------------------------------------------------------------------------------------------------------------

class Batch:
    """Groups of rows: mask, logprobs of the new, old, rollout and reference policy, reward, values."""

    def __init__(self, seed, sizes=(4, 4, 4), gaps=True, empty=False, spread=1.0, equal=False, length=9, apart=0.3):
        rng = random.Random(seed)
        self.groups, self.rows = [], []
        for size in sizes:
            group = []
            same = rng.uniform(-1, 1)
            for i in range(size):
                n = rng.randint(1, length)
                mask = [int(not gaps or rng.random() < 0.7) for _ in range(n)]
                if not any(mask):
                    mask[rng.randrange(n)] = 1
                if empty and i == 1:
                    mask = [0] * n
                old = [-rng.expovariate(1) for _ in range(n)]
                row = {"reward": same if equal else rng.choice([0.0, 1.0, rng.uniform(-1, 1)]), "mask": mask, "logp_old": old,
                       "logp_new": [x + rng.gauss(0, spread) for x in old],
                       "logp_rollout": [x + rng.gauss(0, apart) for x in old],
                       "logp_ref": [x + rng.gauss(0, 0.5) for x in old],
                       "values": [rng.uniform(-1, 1) for _ in range(n)]}
                group.append(row)
                self.rows.append(row)
            self.groups.append(group)
        self.index = np.array([g for g, group in enumerate(self.groups) for _ in group])
        self.width = max(len(r["mask"]) for r in self.rows)
        self.mask = self.tensor("mask")
        self.length = self.mask.sum(1)

    def tensor(self, name):
        """Padded with what must never matter."""
        pad = 0 if name == "mask" else -7.25
        return torch.tensor([[float(x) for x in r[name]] + [float(pad)] * (self.width - len(r[name])) for r in self.rows])

    def leaf(self):
        return self.tensor("logp_new").requires_grad_()

    @property
    def rewards(self):
        return torch.tensor([r["reward"] for r in self.rows])

    def token_rewards(self):
        """Each row's reward on its last sampled token; on the first token of a row that has none."""
        out = torch.zeros(len(self.rows), self.width)
        for i, r in enumerate(self.rows):
            last = max((t for t, m in enumerate(r["mask"]) if m), default=0)
            out[i, last] = r["reward"]
        return out


def door(algorithm, batch):
    """Our loss, advantages [row, width], coefficients [row, width] and metrics."""
    request = {"algorithm": algorithm, "groups": [{"rollouts": group} for group in batch.groups]}
    done = subprocess.run([TEMPER, "train", "loss", "--in", "-"], input=json.dumps(request), capture_output=True, text=True)
    assert done.returncode == 0, f"{algorithm}: {done.stderr}"
    answer = json.loads(done.stdout)
    wide = lambda row: list(row) + [0.0] * (batch.width - len(row))
    coef = torch.tensor([wide(row) for group in answer["coef"] for row in group])
    advantages = [a for group in answer["advantages"] for a in group]
    advantages = torch.stack([torch.tensor(wide(a)) if isinstance(a, list) else torch.full((batch.width,), float(a)) for a in advantages])
    return types.SimpleNamespace(loss=answer["loss"], coef=coef, advantages=advantages * batch.mask, metrics=answer["metrics"])


def near(what, got, want, tolerance=1e-9):
    got, want = torch.as_tensor(got, dtype=torch.float64).detach(), torch.as_tensor(want, dtype=torch.float64).detach()
    assert got.shape == want.shape, f"{what}: {got.shape} and {want.shape}"
    error = ((got - want).abs() / want.abs().clamp(min=1)).max().item() if got.numel() else 0
    assert error <= tolerance and not math.isnan(error), f"{what}: off by {error:g}\nours {got}\ntheirs {want}"
    compared[what.split(":")[0]] += 1


def compare(what, ours, loss, leaf, tolerance=1e-9, factor=None):
    """Value and gradient. `factor` [row], within 1e-8 of 1, scales the rows of our gradient to the peer's formula."""
    (gradient,) = torch.autograd.grad(loss, leaf)
    near(f"{what}: loss", ours.loss, loss, tolerance if factor is None else 2e-8)
    near(f"{what}: gradient", ours.coef if factor is None else ours.coef * factor.unsqueeze(1), gradient, tolerance)


BATCHES = [dict(), dict(gaps=False), dict(spread=4.0), dict(sizes=(2, 6, 3)), dict(equal=True), dict(sizes=(1, 4)), dict(spread=0.01)]
BARE = {"baseline": "none"}


def batches(count=1, **override):
    for number, kinds in enumerate(BATCHES):
        for seed in range(count):
            yield Batch(1000 * number + seed, **{**kinds, **override})


# ---- verl ------------------------------------------------------------------------------------------------------------------------

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def aggregation(mode):
    return {"mode": mode, "length_norm": 8} if mode.endswith("norm") else {"mode": mode}


def verl_settings(mode, **settings):
    info = {"dp_size": 1, **({"loss_scale_factor": 8} if mode.endswith("norm") else {})}
    return Settings(clip_ratio=0.2, global_batch_info=info, policy_loss=Settings(dro_beta=settings.pop("dro_beta", None)), **settings)


def verl_lengths(batch, mode):
    """verl divides a sequence by its length + 1e-8; the peer's formula from ours."""
    return batch.length.clamp(min=1) / (batch.length.clamp(min=1) + 1e-8) if mode == "seq-mean-token-mean" else None


def test_verl_policy_losses():
    off = 1e30  # verl's dual clip is always on
    table = [
        ("vanilla", dict(clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=off), {"kind": "ppo_clip"}),
        ("vanilla", dict(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=off), {"kind": "ppo_clip", "clip_high": 0.28}),
        ("vanilla", dict(clip_ratio_c=3.0), {"kind": "ppo_clip", "dual_clip": 3}),
        ("cispo", dict(clip_ratio_low=1.0, clip_ratio_high=4.0), {"kind": "cispo"}),
        ("cispo", dict(clip_ratio_low=0.2, clip_ratio_high=0.28), {"kind": "cispo", "ratio_min": 0.8, "ratio_max": 1.28}),
        ("sapo", dict(tau_pos=1.0, tau_neg=1.05), {"kind": "sapo"}),
        ("dppo_tv", dict(clip_ratio_c=20.0), {"kind": "dppo_tv"}),
        ("dro", dict(dro_beta=0.4), {"kind": "reinforce", "drift": 0.2}),
        ("gspo", dict(clip_ratio_low=3e-4, clip_ratio_high=4e-4), {"kind": "gspo"}),
        ("gspo", dict(clip_ratio_low=0.3, clip_ratio_high=0.3), {"kind": "gspo", "clip_low": 0.3, "clip_high": 0.3}),
    ]
    for batch in [*batches(), *batches(1, empty=True), *batches(1, spread=15.0)]:
        advantages = batch.rewards.unsqueeze(1).expand_as(batch.mask)
        for name, settings, loss in table:
            wild = (batch.tensor("logp_new") - batch.tensor("logp_old")).abs().max() > 9
            if name == "gspo" and wild:
                continue  # its clamp at 10: test_verl_differences
            for mode in ["seq-mean-token-mean"] if name in ("gspo", "sapo") else MODES:  # verl's SAPO takes no other
                leaf = batch.leaf()
                theirs, _ = core.get_policy_loss_fn(name)(
                    old_log_prob=batch.tensor("logp_old"), log_prob=leaf, advantages=advantages, response_mask=batch.mask,
                    loss_agg_mode=mode, config=verl_settings(mode, **settings))
                ours = door({"loss": loss, "advantage": BARE, "aggregation": aggregation(mode)}, batch)
                compare(f"verl {name}", ours, theirs, leaf, factor=verl_lengths(batch, mode))


def test_verl_gmpo():
    # 1e-8 on its lengths is inside an exponential: not to be scaled away, so to 1e-7; TRL's is compared to 1e-9.
    for batch in batches():
        leaf = batch.leaf()
        theirs, _ = core.compute_policy_loss_geo_mean(
            batch.tensor("logp_old"), leaf, batch.rewards.unsqueeze(1).expand_as(batch.mask), batch.mask,
            config=verl_settings("", clip_ratio_low=0.4, clip_ratio_high=0.4))
        ours = door({"loss": {"kind": "gmpo"}, "advantage": BARE, "aggregation": {"mode": "seq-mean-token-mean"}}, batch)
        compare("verl geo_mean", ours, theirs, leaf, tolerance=1e-7)


def test_verl_advantages():
    for batch in [*batches(), *batches(1, empty=True)]:
        mask, index, rewards = batch.mask, batch.index, batch.token_rewards()
        alone = torch.tensor([float((index == g).sum() == 1) for g in index])
        equal = torch.tensor([float(len({r["reward"] for r in batch.groups[g]}) == 1) for g in index])
        raw = batch.rewards.unsqueeze(1) * mask

        def ours(advantage, **more):
            return door({"loss": {"kind": "ppo_clip"}, "aggregation": {"mode": "token-mean"}, "advantage": advantage, **more}, batch).advantages

        # A group of one: verl takes its mean for 0 and its deviation for 1; ours is exactly 0. Equal rewards: exactly 0 with us.
        one = alone.unsqueeze(1)
        grpo = ours({"baseline": "group_mean", "scale": "group_std"})
        near("verl grpo: advantages", grpo + one * raw / (1 + 1e-6), core.compute_grpo_outcome_advantage(rewards, mask, index)[0])
        assert (grpo[(alone + equal) > 0] == 0).all()
        near("verl grpo without std: advantages", ours({"baseline": "group_mean"}) + one * raw,
             core.compute_grpo_outcome_advantage(rewards, mask, index, norm_adv_by_std_in_grpo=False)[0])
        near("verl rloo: advantages", ours({"baseline": "leave_one_out"}) + one * raw, core.compute_rloo_outcome_advantage(rewards, mask, index)[0])
        near("verl rloo_vectorized: advantages", ours({"baseline": "leave_one_out"}),
             core.compute_rloo_vectorized_outcome_advantage(rewards, mask, index)[0])
        near("verl opo: advantages", ours({"baseline": "length_weighted"}) + one * raw, core.compute_opo_outcome_advantage(rewards, mask, index)[0])
        if mask.sum() < 2:
            continue
        # Whitening: verl's means divide by n + 1e-8, which for these batches is below 1e-9.
        if not alone.any():
            near("verl reinforce_plus_plus_baseline: advantages", ours({"baseline": "group_mean", "whiten": True}),
                 core.compute_reinforce_plus_plus_baseline_outcome_advantage(rewards, mask, index)[0], 1e-8)
        if (batch.length == 0).any():
            continue  # a row without a token has no place for its reward
        for gamma in (1.0, 0.9):
            near("verl reinforce_plus_plus: advantages", ours({"credit": "token", "gamma": gamma, "baseline": "none", "whiten": True}),
                 core.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, config=Settings(gamma=gamma))[0], 1e-8)
            theirs, returns = core.compute_gae_advantage_return(rewards, batch.tensor("values"), mask, gamma, 0.8)
            settings = {"credit": "gae", "gamma": gamma, "lambda": 0.8}
            near("verl gae: advantages", ours({**settings, "whiten": True}), theirs * mask, 1e-8)
            near("verl gae: unwhitened", ours(settings), (returns - batch.tensor("values")) * mask)


def test_verl_kl():
    for batch in batches():
        for name in ("k2", "k3", "k1+", "k3+"):
            leaf = batch.leaf()
            theirs = core.agg_loss(core.kl_penalty(leaf, batch.tensor("logp_ref"), name), batch.mask, "token-mean")
            ours = door({"loss": {"kind": "reinforce"}, "advantage": {"baseline": "group_mean"}, "aggregation": {"mode": "token-mean"},
                         "kl": {"where": "loss", "estimator": name, "coef": 1}}, batch)
            policy = door({"loss": {"kind": "reinforce"}, "advantage": {"baseline": "group_mean"}, "aggregation": {"mode": "token-mean"}}, batch)
            gone = core.kl_penalty(leaf, batch.tensor("logp_ref"), "k3").max() >= 10  # verl stops k3 at 10: a difference, below
            if gone and name.startswith("k3"):
                continue
            difference = types.SimpleNamespace(loss=ours.loss - policy.loss, coef=ours.coef - policy.coef)
            compare(f"verl kl {name}", difference, theirs, leaf)
        for name in ("k1", "k2", "k3"):
            penalty = core.kl_penalty(batch.tensor("logp_old"), batch.tensor("logp_ref"), name)
            theirs = (batch.token_rewards() - 0.3 * penalty * batch.mask).sum(1, keepdim=True) * batch.mask
            ours = door({"loss": {"kind": "ppo_clip"}, "advantage": BARE, "aggregation": {"mode": "token-mean"},
                         "kl": {"where": "reward", "estimator": name, "coef": 0.3}}, batch)
            near("verl kl in the reward: advantages", ours.advantages, theirs)


def test_verl_off_policy():
    for batch in [*batches(), *batches(1, apart=1.5)]:
        log_ratio = batch.tensor("logp_old") - batch.tensor("logp_rollout")
        advantages = batch.rewards.unsqueeze(1).expand_as(batch.mask)

        def ours(off_policy):
            return door({"loss": {"kind": "reinforce"}, "advantage": BARE, "aggregation": {"mode": "token-mean"},
                         "off_policy": {"mode": "decoupled", **off_policy}}, batch)

        def check(what, answer, weights=None, keep=None):
            leaf = batch.leaf()
            per_token = -advantages * leaf * (1 if weights is None else weights) * (1 if keep is None else keep)
            compare(what, answer, core.agg_loss(per_token, batch.mask, "token-mean"), leaf)

        for level in ("token", "sequence"):
            for threshold, settings in ((2.0, {}), ("0.5_2.0", {"weight_min": 0.5, "outside": "zero"})):
                for normal in (False, True):
                    weights, metrics = corr.compute_rollout_correction_weights(log_ratio, batch.mask, level, threshold, normal)
                    answer = ours({"weight": level, "normalize": normal, **settings})
                    if normal and level == "sequence":
                        # verl's mean of a sequence's weights divides by its length + 1e-8: its mean from ours.
                        raw = corr.compute_rollout_correction_weights(log_ratio, batch.mask, level, threshold)[0].max(1).values
                        ratio = (raw.mean() / (raw * batch.length / (batch.length + 1e-8)).mean()).item()
                        answer.loss, answer.coef = answer.loss * ratio, answer.coef * ratio
                    check(f"verl {level} weights", answer, weights=weights)
                    if not normal and answer.metrics["ess"] > 0:
                        near("verl weights: ess", answer.metrics["ess"], metrics["rollout_is_eff_sample_size"], 1e-6)
        for option, rule in (("token_k2", ("k2", "token")), ("token_k3", ("k3", "token")), ("seq_sum_k2", ("k2", "sequence_sum")),
                             ("seq_sum_k3", ("k3", "sequence_sum")), ("seq_mean_k2", ("k2", "sequence_mean")),
                             ("seq_mean_k3", ("k3", "sequence_mean")), ("seq_max_k2", ("k2", "sequence_any")), ("seq_max_k3", ("k3", "sequence_any"))):
            kept, _ = corr.compute_rollout_rejection_mask(log_ratio, batch.mask, option, 0.05)
            answer = ours({"reject": [{"measure": rule[0], "level": rule[1], "max": 0.05}]})
            check(f"verl {option}", answer, keep=kept)
            # In decoupled mode verl counts the tokens after rejection: its denominator from ours.
            if kept.any():
                leaf, share = batch.leaf(), (batch.mask.sum() / kept.sum()).item()
                after = types.SimpleNamespace(loss=answer.loss * share, coef=answer.coef * share)
                compare(f"verl {option} counted after", after, core.agg_loss(-advantages * leaf, kept, "token-mean"), leaf)
            assert answer.metrics["rejected_tokens"] == (batch.mask - kept).sum().item()
        # verl bounds 1/rho although it says rho: its bounds (low, high) are ours (1/high, 1/low).
        for option, level in (("token_k1", "token"), ("seq_sum_k1", "sequence_sum"), ("seq_mean_k1", "sequence_mean")):
            kept, _ = corr.compute_rollout_rejection_mask(log_ratio, batch.mask, option, "0.8_1.5")
            check(f"verl {option}", ours({"reject": [{"measure": "ratio", "level": level, "min": 1 / 1.5, "max": 1 / 0.8}]}), keep=kept)
        # verl's means over a sequence divide by its length + 1e-8.
        metrics = corr.compute_offpolicy_metrics(batch.tensor("logp_old"), batch.tensor("logp_rollout"), batch.mask)
        answer = ours({"weight": "token"}).metrics
        for mine, theirs in (("mismatch_k1", "kl"), ("mismatch_k3", "k3_kl"), ("log_ppl_diff", "log_ppl_diff"), ("ppl_ratio", "ppl_ratio"),
                             ("chi2_token", "chi2_token"), ("chi2_seq", "chi2_seq")):
            near(f"verl metrics: {mine}", answer[mine], metrics[theirs], 1e-7)


def test_verl_differences():
    """Each line of docs/losses.md, "Where verl differs", that the other tests do not hold already."""
    # CISPO's denominator: M1's is per prompt, verl's over all tokens. Ours has both; the per-prompt one is the mean of verl's groups.
    for batch in batches(1):
        leaf, total = batch.leaf(), 0
        advantages = batch.rewards.unsqueeze(1).expand_as(batch.mask)
        for g in range(len(batch.groups)):
            rows = torch.tensor(batch.index == g)
            part, _ = core.compute_policy_loss_cispo(batch.tensor("logp_old")[rows], leaf[rows], advantages[rows], batch.mask[rows],
                                                     config=verl_settings("", clip_ratio_low=1.0, clip_ratio_high=4.0))
            total = total + part / len(batch.groups)
        ours = door({"loss": {"kind": "cispo"}, "advantage": BARE, "aggregation": {"mode": "prompt-mean"}}, batch)
        compare("verl cispo per prompt", ours, total, leaf)
    # k3 stops at 10 there.
    far = Batch(1, spread=0.0)
    for row in far.rows:
        row["logp_ref"] = [x + 5 for x in row["logp_new"]]
    assert (core.kl_penalty(far.tensor("logp_new"), far.tensor("logp_ref"), "k3") * far.mask).max() == 10
    ours = door({"loss": {"kind": "reinforce"}, "advantage": {"baseline": "none"}, "aggregation": {"mode": "token-mean"},
                 "kl": {"where": "loss", "coef": 1}}, far)
    plain = door({"loss": {"kind": "reinforce"}, "advantage": {"baseline": "none"}, "aggregation": {"mode": "token-mean"}}, far)
    near("verl k3 cap: ours", ours.loss - plain.loss, math.exp(5) - 1 - 5)
    # GSPO: log s stops at 10 there, with slope 0 beyond; at 20 here.
    wild = Batch(2, sizes=(2,), gaps=False)
    for row, sign in zip(wild.rows, (1, -1)):
        row["reward"] = -1.0
        row["logp_new"] = [x + sign * 12 for x in row["logp_old"]]
    leaf = wild.leaf()
    theirs, _ = core.compute_policy_loss_gspo(wild.tensor("logp_old"), leaf, -torch.ones_like(wild.mask), wild.mask, "seq-mean-token-mean",
                                              config=verl_settings("seq-mean-token-mean", clip_ratio_low=3e-4, clip_ratio_high=4e-4))
    (gradient,) = torch.autograd.grad(theirs, leaf)
    ours = door({"loss": {"kind": "gspo"}, "advantage": BARE, "aggregation": {"mode": "seq-mean-token-mean"}}, wild)
    assert (gradient == 0).all() and (ours.coef[0][:len(wild.rows[0]["mask"])] != 0).all() and (ours.coef[1] == 0).all()
    near("verl gspo clamp: ours", ours.coef[0].sum(), math.exp(12) / 2)


# ---- TRL -------------------------------------------------------------------------------------------------------------------------

def trl_self(trainer, leaf, **settings):
    """What TRL's loss and advantage code reads of a trainer: one process, one step, no entropy terms, our logprobs."""
    fake = mock.MagicMock()
    fake._get_per_token_logps_and_entropies = lambda *a, **k: (leaf, torch.zeros_like(leaf), None)
    fake.accelerator.gather = fake.accelerator.gather_for_metrics = lambda x: x
    fake.accelerator.reduce = lambda x, reduction=None: x
    fake.accelerator.num_processes, fake.accelerator.process_index, fake.accelerator.device = 1, 0, torch.device("cpu")
    fake._metrics = {"train": collections.defaultdict(list)}
    fake._logs = collections.defaultdict(list, rewards=collections.defaultdict(list), extra=collections.defaultdict(list))
    fake.get_off_policy_mask = getattr(trainer, "get_off_policy_mask", None)
    base = dict(aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level="token", beta=0.0,
                use_vllm=False, current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False, epsilon_low=0.2, epsilon_high=0.2,
                max_completion_length=8, vllm_importance_sampling_correction=False)
    arguments = dict(delta=None, use_bias_correction_kl=False, steps_per_generation=1, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05)
    for name, value in {**base, **settings}.items():
        setattr(fake, name, value)
    for name, value in {**arguments, **{k: v for k, v in settings.items() if k in arguments}}.items():
        setattr(fake.args, name, value)
    return fake


def trl_inputs(batch, **more):
    rows = len(batch.rows)
    return {"prompt_ids": torch.zeros(rows, 1, dtype=torch.long), "prompt_mask": torch.ones(rows, 1, dtype=torch.long),
            "completion_ids": torch.zeros(rows, batch.width, dtype=torch.long), "completion_mask": torch.ones_like(batch.mask),
            "tool_mask": batch.mask, "advantages": batch.rewards, "old_per_token_logps": batch.tensor("logp_old"),
            "num_items_in_batch": batch.mask.sum(), **more}


def test_trl_policy_losses():
    grpo = trl.trainer.grpo_trainer.GRPOTrainer
    sequence = {"mode": "seq-mean-token-mean"}
    table = [
        (dict(loss_type="grpo"), {"kind": "ppo_clip"}, sequence, {}),
        (dict(loss_type="dapo", epsilon_high=0.28), {"kind": "ppo_clip", "clip_high": 0.28}, {"mode": "token-mean"}, {}),
        (dict(loss_type="bnpo"), {"kind": "ppo_clip"}, {"mode": "token-mean"}, {}),
        (dict(loss_type="dr_grpo"), {"kind": "ppo_clip"}, {"mode": "seq-mean-token-sum-norm", "length_norm": 8}, {}),
        (dict(loss_type="cispo", epsilon_high=5.0), {"kind": "cispo"}, {"mode": "token-mean"}, {}),
        (dict(loss_type="sapo"), {"kind": "sapo"}, sequence, {}),
        (dict(loss_type="grpo", importance_sampling_level="sequence", epsilon_low=3e-4, epsilon_high=4e-4), {"kind": "gspo"}, sequence, {}),
        (dict(loss_type="grpo", importance_sampling_level="sequence", epsilon_low=0.3, epsilon_high=0.3),
         {"kind": "gspo", "clip_low": 0.3, "clip_high": 0.3}, sequence, {}),
        (dict(loss_type="grpo", beta=0.04), {"kind": "ppo_clip"}, sequence, {"kl": {"where": "loss", "estimator": "k3", "coef": 0.04}}),
        (dict(loss_type="dapo", beta=0.04, use_bias_correction_kl=True), {"kind": "ppo_clip"}, {"mode": "token-mean"},
         {"kl": {"where": "loss", "coef": 0.04, "importance_weighted": True}}),
        # OPSM: a sequence of A < 0 whose mean log(old/new) is above the threshold is left out.
        (dict(loss_type="grpo", off_policy_mask_threshold=0.1), {"kind": "ppo_clip"}, sequence,
         {"off_policy": {"reject": [{"measure": "ratio", "level": "sequence_mean", "min": math.exp(-0.1), "only_negative": True}]}}),
    ]
    for batch in [*batches(), *batches(1, empty=True)]:
        for settings, loss, mode, more in table:
            leaf = batch.leaf()
            fake = trl_self(grpo, leaf, **settings)
            theirs = grpo._compute_loss(fake, fake.model, trl_inputs(batch, ref_per_token_logps=batch.tensor("logp_ref")))
            ours = door({"loss": loss, "advantage": BARE, "aggregation": mode, **more}, batch)
            # TRL counts rows without a token as sequences; here they are in no denominator.
            rows, counted = len(batch.rows), int((batch.length > 0).sum())
            if mode["mode"] != "token-mean":
                ours.loss, ours.coef = ours.loss * counted / rows, ours.coef * counted / rows
            name = settings["loss_type"] + (" sequence" if "importance_sampling_level" in settings else "") + (" kl" if "beta" in settings else "")
            compare(f"trl {name}", ours, theirs, leaf)
        leaf = batch.leaf()
        gmpo = trl.experimental.gmpo.gmpo_trainer.GMPOTrainer
        theirs = gmpo._compute_loss(*(lambda f: (f, f.model))(trl_self(gmpo, leaf, epsilon_low=0.4, epsilon_high=0.4)), trl_inputs(batch))
        ours = door({"loss": {"kind": "gmpo"}, "advantage": BARE, "aggregation": sequence}, batch)
        rows, counted = len(batch.rows), int((batch.length > 0).sum())
        empty = (-batch.rewards * (batch.length == 0)).sum() / rows  # a row without a token has ratio 1 there
        ours.loss, ours.coef = ours.loss * counted / rows + empty.item(), ours.coef * counted / rows
        compare("trl gmpo", ours, theirs, leaf)


def trl_generate(module, trainer, batch, sampled=True, **settings):
    """TRL's own way from rewards to advantages (and weights), with generation and scoring put in."""
    generations = len(batch.rows) // len(batch.groups)
    fake = trl_self(trainer, batch.tensor("logp_old"), **settings)
    fake.environment_factories, fake.environments, fake.tools = None, None, None
    fake.num_generations, fake.num_iterations, fake.pad_to_multiple_of = generations, 1, None
    fake.args.gradient_accumulation_steps = 1
    fake._tokenizer.pad_token_id = 0
    fake.mask_truncated_completions = False
    fake.reward_weights = torch.ones(1)
    fake.reward_funcs = fake.reward_func_names = ["reward"]
    fake.multi_objective_aggregation = "sum_then_normalize"
    rows = range(len(batch.rows))
    ids = ([[1] for _ in rows], [[1] * batch.width for _ in rows])
    mask = [[int(m) for m in r] for r in batch.mask.tolist()]
    if sampled:
        fake._generate = lambda prompts: (*ids, mask, [""] * len(rows), batch.tensor("logp_rollout").tolist(), {}, None, None)
    else:
        fake._generate = lambda prompts: (*ids, [""] * len(rows))
    fake._calculate_rewards = lambda *a: batch.rewards.unsqueeze(1)
    with mock.patch.object(module, "disable_gradient_checkpointing", lambda *a, **k: contextlib.nullcontext()), \
            mock.patch.object(module, "gather_object", lambda x: x):
        return trainer._generate_and_score_completions(fake, [{"prompt": ""} for _ in rows])


def test_trl_advantages_and_weights():
    module, grpo = trl.trainer.grpo_trainer, trl.trainer.grpo_trainer.GRPOTrainer
    for batch in batches():
        if len({len(g) for g in batch.groups}) != 1:
            continue  # TRL's groups have one size
        for scale, advantage in (("group", {"baseline": "group_mean", "scale": "group_std", "std_eps": 1e-4}),
                                 ("batch", {"baseline": "group_mean", "scale": "batch_std", "std_eps": 1e-4}), ("none", {"baseline": "group_mean"})):
            theirs = trl_generate(module, grpo, batch, scale_rewards=scale)["advantages"]
            ours = door({"loss": {"kind": "ppo_clip"}, "aggregation": {"mode": "token-mean"}, "advantage": advantage}, batch).advantages
            near(f"trl {scale}: advantages", ours, theirs.unsqueeze(1) * batch.mask)
        for mode, settings in (("token_truncate", {"weight": "token", "weight_max": 2}), ("token_mask", {"weight": "token", "weight_max": 2, "outside": "zero"}),
                               ("sequence_truncate", {"weight": "sequence", "weight_max": 2}),
                               ("sequence_mask", {"weight": "sequence", "weight_max": 2, "outside": "zero"})):
            vllm = dict(use_vllm=True, vllm_importance_sampling_correction=True, vllm_importance_sampling_mode=mode,
                        vllm_importance_sampling_clip_max=2.0, vllm_importance_sampling_clip_min=None, scale_rewards="none")
            made = trl_generate(module, grpo, batch, **vllm)
            leaf = batch.leaf()
            fake = trl_self(grpo, leaf, loss_type="dapo", **vllm)
            inputs = trl_inputs(batch, advantages=made["advantages"], importance_sampling_ratio=made["importance_sampling_ratio"])
            theirs = grpo._compute_loss(fake, fake.model, inputs)
            ours = door({"loss": {"kind": "ppo_clip"}, "aggregation": {"mode": "token-mean"}, "advantage": {"baseline": "group_mean"},
                         "off_policy": {"mode": "decoupled", **settings}}, batch)
            compare(f"trl {mode}", ours, theirs, leaf)


def test_trl_preferences():
    dpo = trl.trainer.dpo_trainer.DPOTrainer
    for seed in range(12):
        batch = Batch(seed, sizes=(2,) * 4, spread=[0.3, 3, 0.3, 30][seed % 4])
        for group in batch.groups:
            group[0]["reward"], group[1]["reward"] = 1.0, 0.0
        order = list(range(0, len(batch.rows), 2)) + list(range(1, len(batch.rows), 2))
        for kind in ("sigmoid", "ipo"):
            leaf = batch.leaf()
            fake = trl_self(dpo, leaf, ld_alpha=None, precompute_ref_logps=False, f_divergence_type="reverse_kl", loss_types=[kind],
                            loss_weights=[1.0], beta=0.1, label_smoothing=0.0, use_weighting=False)
            mask = batch.mask[order]
            fake.model.side_effect = lambda **k: types.SimpleNamespace(
                log_probs=leaf[order] * mask, entropy=mask, mean_logits=mask, is_top1=mask.bool(), num_correct_tokens=mask.sum())
            fake.model.training = True
            fake.ref_model.side_effect = lambda **k: types.SimpleNamespace(log_probs=batch.tensor("logp_ref")[order] * mask)
            one = torch.zeros(len(order), 1)  # logprobs start at the second token
            inputs = {"input_ids": torch.zeros(len(order), batch.width + 1, dtype=torch.long), "completion_mask": torch.cat([one, mask], 1),
                      "attention_mask": torch.ones(len(order), batch.width + 1, dtype=torch.long)}
            with mock.patch.object(trl.trainer.dpo_trainer, "disable_gradient_checkpointing", lambda *a, **k: contextlib.nullcontext()), \
                    mock.patch.object(trl.trainer.dpo_trainer, "is_peft_model", lambda *a: False):
                theirs = dpo._compute_loss(fake, fake.model, inputs, False)
            ours = door({"recipe": "dpo" if kind == "sigmoid" else "ipo"}, batch)
            compare(f"trl dpo {kind}", ours, theirs, leaf)


def test_trl_rloo():
    """TRL's RLOO takes one ratio of the whole sequence, the sum of its log-ratios, and the mean over sequences. Ours has the estimator;
    its loss is GSPO's with the length as exponent, which no setting here expresses: the advantages are compared."""
    module, rloo = trl.trainer.rloo_trainer, trl.trainer.rloo_trainer.RLOOTrainer
    for batch in batches():
        if len({len(g) for g in batch.groups}) != 1:
            continue
        theirs = trl_generate(module, rloo, batch, sampled=False, normalize_advantages=False, reward_clip_range=None)["advantages"]
        ours = door({"recipe": "rloo"}, batch).advantages
        near("trl rloo: advantages", ours, theirs.unsqueeze(1) * batch.mask)


def main():
    wanted, failed = sys.argv[2:], []
    for name, test in sorted(globals().items()):
        if name.startswith("test_") and (not wanted or name in wanted):
            try:
                test()
                print(f"{name}: done", flush=True)
            except Exception:  # the others are run all the same
                failed.append(name)
                print(f"{name}: failed\n{traceback.format_exc()}", flush=True)
    for what, count in sorted(compared.items()):
        print(f"{what}: {count} comparisons")
    print(f"measured: trl {importlib.metadata.version('trl')}, verl {importlib.metadata.version('verl')}: {len(compared)} functions and "
          f"settings, {sum(compared.values())} comparisons")
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
