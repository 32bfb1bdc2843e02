"""SmolLM2 learns sums with Temper and with TRL on this machine, one after the other, on the same prompts in the same order.

usage: sum_trl_test.py TEMPER [--out DIR] [--seeds 1,2,3]. Runs configs/smollm2-sum.yaml on every seed; then TRL's GRPOTrainer with
the settings of that job (prompts, rollouts, length, temperature, lr, no KL, sequence-mean loss, constant rate), each in a process of
its own with all cores, in the faster of its dtypes, until its ten-step mean is 0.70 or 60 steps are done. Everything else of TRL is its
default (AdamW's second beta 0.999), everything else of Temper its own (0.95).

Clocks: Temper from the start of `temper run` (loading, evaluation before the first step, checkpoints and checks included); TRL from
the start of `train()`, its imports and loading left out. Asserted: Temper's ten-step mean reaches 0.70 on each seed within 60 steps;
its median step is no later than TRL's, its median time at least three times sooner. A TRL run that does not get there in 60 steps
counts with 60 and its time so far, which favours TRL. Curves: DIR/{temper,trl}-SEED.jsonl, for `temper plot`.

What a former start left in DIR is used again when it was made by the same program, job and script: the whole takes an hour.
"""
import argparse
import hashlib
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
STEPS, GOAL, MEAN_OF = 60, 0.70, 10
DTYPES = ("float32", "autocast", "bfloat16")
# TRL makes and frees large tensors all the time; without these the kernel spends its time handing out pages (6 times slower).
ALLOCATOR = ("glibc.malloc.mmap_threshold=8589934592:glibc.malloc.trim_threshold=17179869184:glibc.malloc.hugetlb=1")


def reached(rewards):
    """The first step (from 1) whose ten-step mean is there, or None."""
    for i in range(MEAN_OF, len(rewards) + 1):
        if sum(rewards[i - MEAN_OF:i]) / MEAN_OF >= GOAL:
            return i
    return None


def made_by(program):
    parts = [pathlib.Path(program), ROOT / "configs" / "smollm2-sum.yaml", pathlib.Path(__file__)]
    return hashlib.sha256(b"".join(p.read_bytes() for p in parts)).hexdigest()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# ---- Temper ----------------------------------------------------------------------------------------------------------------


def run_temper(program, seed, out):
    """Runs the job; writes OUT/temper-SEED.jsonl with the wall-clock time at which each step was there. Returns the run folder."""
    folder = out / f"temper-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    log = open(out / f"temper-{seed}.log", "w")
    begin, curve = time.monotonic(), []
    run = subprocess.Popen([program, "run", ROOT / "configs" / "smollm2-sum.yaml", "--set", f"seed={seed}", "--out", folder],
                           cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    while run.poll() is None:
        time.sleep(0.1)
        for line in lines(folder / "metrics.jsonl")[len(curve):]:
            curve.append({"step": line["step"], "reward_mean": line["reward_mean"], "wall_s": round(time.monotonic() - begin, 1)})
    assert run.returncode == 0, f"temper run, seed {seed}: exit code {run.returncode}"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["importance_ratio_max_dev_on_policy"] == 0 and summary["steps"] == STEPS, summary
    (out / f"temper-{seed}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in curve))
    return folder


def prompts_of(program, folder):
    """What the policy was asked, in the order of the groups: what TRL is asked, too."""
    rows = []
    for group in range(4 * STEPS):
        show = subprocess.run([program, "trajectory", "show", folder, f"{group}.0"], stdout=subprocess.PIPE, text=True, check=True)
        prompt = re.search(r"What is (\d+) \+ (\d+)\? Answer with the number only\.", show.stdout)
        rows.append({"prompt": prompt[0], "answer": int(prompt[1]) + int(prompt[2])})
    return rows


# ---- TRL (a process of its own) ---------------------------------------------------------------------------------------------


def run_trl(prompts_path, seed, dtype, steps, out):
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    import reference

    torch.manual_seed(seed)
    torch.set_num_threads(os.cpu_count())
    rows = json.loads(pathlib.Path(prompts_path).read_text())
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": r["prompt"]}], "answer": r["answer"]} for r in rows])
    rewards, file = [], open(out, "w")

    def first_integer(completions, answer, **_):
        found = [re.search(r"[+-]?\d+", c[0]["content"]) for c in completions]
        scores = [float(bool(m) and int(m.group()) == a) for m, a in zip(found, answer)]
        rewards.append(sum(scores) / len(scores))
        file.write(json.dumps({"step": len(rewards), "reward_mean": rewards[-1], "wall_s": round(time.monotonic() - begin, 1)}) + "\n")
        file.flush()
        return scores

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if reached(rewards) is not None:
                control.should_training_stop = True
            return control

    # A plain model with the dequantised weights: what was read from a GGUF file counts as quantised and is refused for training.
    source = reference.load_model(torch.float32)
    source.config.quantization_config = None
    model = AutoModelForCausalLM.from_config(source.config, dtype=torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    model.load_state_dict(source.state_dict())
    del source
    config = GRPOConfig(
        output_dir=str(pathlib.Path(out).with_suffix("")) + "-out", seed=seed, use_cpu=True, bf16=dtype == "autocast", fp16=False,
        learning_rate=1e-5, lr_scheduler_type="constant", beta=0.0, loss_type="grpo", num_generations=8,
        per_device_train_batch_size=32, gradient_accumulation_steps=1, max_completion_length=16, temperature=1.0, top_p=1.0, top_k=0,
        max_steps=steps, shuffle_dataset=False, gradient_checkpointing=False, save_strategy="no", report_to=[], disable_tqdm=True)
    trainer = GRPOTrainer(model=model.train(), reward_funcs=first_integer, args=config, train_dataset=data,
                          processing_class=reference.load_tokenizer(), callbacks=[Stop()])
    begin = time.monotonic()
    trainer.train()


def start_trl(prompts, seed, dtype, steps, out):
    if (curve := lines(pathlib.Path(out))) and (len(curve) >= steps or reached([line["reward_mean"] for line in curve])):
        return curve
    environment = dict(os.environ, GLIBC_TUNABLES=ALLOCATOR, OMP_NUM_THREADS=str(os.cpu_count()))
    log = open(pathlib.Path(out).with_suffix(".log"), "w")
    subprocess.run([sys.executable, __file__, "--trl", prompts, str(seed), dtype, str(steps), out], check=True, env=environment,
                   stdout=log, stderr=subprocess.STDOUT)
    return lines(pathlib.Path(out))


def fastest_dtype(prompts, out):
    """Seconds a step (the second to the fourth) in each dtype; the faster one that keeps fp32 master weights."""
    seconds = {}
    for dtype in DTYPES:
        curve = start_trl(prompts, 1, dtype, 4, str(out / f"trl-{dtype}.jsonl"))
        seconds[dtype] = (curve[3]["wall_s"] - curve[0]["wall_s"]) / 3
        print(f"TRL {dtype}: {seconds[dtype]:.1f} s a step", flush=True)
    return min(("float32", "autocast"), key=seconds.get), seconds


# ---- The comparison -----------------------------------------------------------------------------------------------------------


def main():
    if sys.argv[1] == "--trl":
        return run_trl(sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5]), sys.argv[6])
    parser = argparse.ArgumentParser()
    parser.add_argument("temper")
    parser.add_argument("--out", default=str(ROOT / "build" / "sum-trl"))
    parser.add_argument("--seeds", default="1,2,3")
    args = parser.parse_args()
    out, seeds = pathlib.Path(args.out), [int(s) for s in args.seeds.split(",")]
    if not (out / "made_by").exists() or (out / "made_by").read_text() != made_by(args.temper):
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        (out / "made_by").write_text(made_by(args.temper))

    ours, theirs = {}, {}
    for seed in seeds:
        prompts = out / f"prompts-{seed}.json"  # written last
        if not prompts.exists():
            prompts.write_text(json.dumps(prompts_of(args.temper, run_temper(args.temper, seed, out))))
        curve = lines(out / f"temper-{seed}.jsonl")
        step = reached([line["reward_mean"] for line in curve])
        assert step is not None, f"Temper, seed {seed}: no ten-step mean of {GOAL} within {STEPS} steps"
        ours[seed] = (step, curve[step - 1]["wall_s"])
        print(f"Temper seed {seed}: {GOAL} at step {step}, {ours[seed][1]:.0f} s", flush=True)

    dtype, seconds = fastest_dtype(str(out / f"prompts-{seeds[0]}.json"), out)
    for seed in seeds:
        curve = start_trl(str(out / f"prompts-{seed}.json"), seed, dtype, STEPS, str(out / f"trl-{seed}.jsonl"))
        step = reached([line["reward_mean"] for line in curve])
        theirs[seed] = (step or STEPS, curve[(step or len(curve)) - 1]["wall_s"])
        print(f"TRL {dtype} seed {seed}: {f'{GOAL} at' if step else 'not there by'} step {theirs[seed][0]}, {theirs[seed][1]:.0f} s", flush=True)

    step, their_step = (statistics.median(v[0] for v in side.values()) for side in (ours, theirs))
    seconds_ours, seconds_theirs = (statistics.median(v[1] for v in side.values()) for side in (ours, theirs))
    print(f"measured: steps to {GOAL}: Temper {sorted(v[0] for v in ours.values())}, TRL {sorted(v[0] for v in theirs.values())}; "
          f"seconds, median: {seconds_ours:.0f} and {seconds_theirs:.0f} (TRL 1.16 {dtype}; a step in "
          + ", ".join(f"{d} {s:.1f} s" for d, s in seconds.items()) + f"), {seconds_theirs / seconds_ours:.1f} times sooner")
    assert step <= their_step, f"median step {step}, TRL's {their_step}"
    assert seconds_ours * 3 <= seconds_theirs, f"median {seconds_ours:.0f} s, TRL's {seconds_theirs:.0f} s"


if __name__ == "__main__":
    main()
