"""Greedy continuations of SmolLM2-135M-Instruct: `temper engine generate` against transformers' generate().

usage: greedy_test.py TEMPER. Both continue the same ids by at most 64 tokens and stop after the end token. In `f32` the tokens
must be those of transformers in fp32; only where the reference's own first two are within 1e-2 of each other may the two part,
and there the comparison of that prompt stops and is counted. At least 50 prompts must agree over all their 64 tokens. `bf16` is
only reported: there the rounding of either side decides many a tie of more than 1e-2.
"""
import sys

import torch

import material
import reference

NEW, NEAR, LEAST, BATCH = 64, 1e-2, 50, 16


def make_prompts(tokenizer):
    rng = material.random.Random(5)
    chats = [[{"role": "user", "content": question}] for question in material.QUESTIONS]
    chats += [material.conversation(rng, 1 + i % 3) for i in range(12)]
    out = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    starts = [sentence[:len(sentence) * 2 // 3] for sentence in material.PROSE + material.CODE + material.SCRIPTS]
    starts += [material.text(kind, 40 * (i + 1), i) for kind in ("digits", "emoji", "mixed", "prose", "code") for i in range(4)]
    out += [tokenizer.encode(text, add_special_tokens=False) for text in starts]
    return out


def continuations(model, prompts, end):
    """transformers' greedy continuations, and for every token how far the reference's first two were apart there."""
    out = [None] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for begin in range(0, len(order), BATCH):
        some = order[begin:begin + BATCH]
        width = max(len(prompts[i]) for i in some)
        ids = torch.tensor([[end] * (width - len(prompts[i])) + prompts[i] for i in some])
        mask = torch.tensor([[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in some])
        with torch.inference_mode():
            run = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, eos_token_id=end,
                                 output_logits=True, return_dict_in_generate=True)
        best = torch.stack(run.logits, 1).float().topk(2, -1).values
        gaps = (best[..., 0] - best[..., 1]).tolist()
        for row, i in enumerate(some):
            tokens = run.sequences[row, width:].tolist()
            length = tokens.index(end) + 1 if end in tokens else len(tokens)
            out[i] = tokens[:length], gaps[row][:length]
    return out


def compare(ours, theirs, gaps):
    """None, or (place, gap of the reference there) of the first token that differs."""
    if ours == theirs:
        return None
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
    return at, gaps[at] if at < len(gaps) else float("inf")


def main():
    door = reference.Door(sys.argv[1])
    tokenizer = reference.load_tokenizer()
    end = tokenizer.eos_token_id
    prompts = make_prompts(tokenizer)
    rows = [{"ids": ids, "max_tokens": NEW, "temperature": 0, "stop_ids": [end]} for ids in prompts]
    model = reference.load_model(torch.float32)
    truth = continuations(model, prompts, end)
    model = reference.load_model(torch.bfloat16)
    others = {"transformers bf16": [tokens for tokens, _ in continuations(model, prompts, end)]}
    for numerics in ("f32", "bf16"):
        others["temper " + numerics] = [a["ids"] for a in door.lines("engine generate", rows, "--numerics", numerics)]

    failures, said = [], {}
    for name, answers in others.items():
        parted = [compare(a, t, gaps) for a, (t, gaps) in zip(answers, truth)]
        agree = [len(a) for a, p in zip(answers, parted) if p is None]
        near = sum(p is not None and p[1] <= NEAR for p in parted)
        far = [(i, *p) for i, p in enumerate(parted) if p is not None and p[1] > NEAR]
        said[name] = (f"{agree.count(NEW)} agree over {NEW} tokens and {len(agree) - agree.count(NEW)} up to their end token, "
                      f"{near} stopped after a near-tie, {len(far)} parted elsewhere")
        print(f"{name}: {said[name]}" + "".join(f"\n    prompt {i} parts at token {at}, gap {gap:.3g}" for i, at, gap in far))
        if name == "temper f32":
            failures += [f"f32: prompt {i} parts at token {at}, where the reference's first two are {gap:.3g} apart"
                         for i, at, gap in far]
            if agree.count(NEW) < LEAST:
                failures.append(f"f32: only {agree.count(NEW)} prompts agree over {NEW} tokens, {LEAST} are asked for")
    ties = sum(gap <= NEAR for _, gaps in truth for gap in gaps)
    tokens = sum(len(t) for t, _ in truth)
    print(f"measured: {len(prompts)} prompts, {tokens} tokens of transformers fp32, {ties} of them near-ties; "
          + "; ".join(f"{name}: {text}" for name, text in said.items()))
    reference.finish(failures)


if __name__ == "__main__":
    main()
