"""Log probabilities of SmolLM2-135M-Instruct: `temper engine score` against transformers with the same dequantised weights.

usage: score_test.py TEMPER. `f32` must agree with transformers in fp32 to 1e-3 in every single log probability. `bf16` must have
no more error against transformers in fp32 than transformers in bf16 has: in the mean over all tokens, in the root of the mean
square, in the 99.9th percentile and in the largest single error; one of the four being more is a failure.
"""
import sys

import numpy
import torch

import material
import reference

TOLERANCE = 1e-3
# Around the sizes at which pages (64), attention tiles and blocks of rows end, and far from them; each of the kinds meets short
# and long ones, because there are more sizes than kinds and no common factor.
SIZES = [5, 6, 7, 9, 12, 17, 24, 31, 32, 33, 48, 63, 64, 65, 80, 96, 97, 127, 128, 129, 150, 191, 192, 193, 255, 256, 257,
         320, 383, 500, 512, 513, 700, 1000, 1025, 1500, 2000]
KINDS = ["prose", "code", "digits", "scripts", "emoji", "chat", "mixed"]


def make_texts(tokenizer):
    """[(kind, ids)…]"""
    out = []
    for i, size in enumerate(SIZES):
        kind = KINDS[i % len(KINDS)]
        if kind == "chat":
            rng = material.random.Random(i)
            ids = tokenizer.apply_chat_template(material.conversation(rng, 2 + size // 40), tokenize=True, return_dict=False)
        else:
            ids = tokenizer.encode(material.text(kind, 8 * size, i), add_special_tokens=False)
        assert len(ids) >= size, (kind, size, len(ids))
        out.append((kind, ids[:size]))
    return out


def reference_scores(model, ids):
    """log p(ids[i] | ids[:i]) for i > 0. The softmax is taken in double: only the logits carry the dtype's error."""
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, :-1].double()
        return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


def statistics(error):
    return {"mean": error.mean(), "rms": numpy.sqrt((error ** 2).mean()),
            "p99.9": numpy.quantile(error, 0.999), "max": error.max()}


def show(stats):
    return ", ".join(f"{name} {value:.3g}" for name, value in stats.items())


def main():
    door = reference.Door(sys.argv[1])
    texts = make_texts(reference.load_tokenizer())
    rows = [{"ids": ids} for _, ids in texts]
    scores = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        model = reference.load_model(dtype)
        scores["transformers " + name] = [reference_scores(model, ids) for _, ids in texts]
        del model
    for numerics in ("f32", "bf16"):
        answers = door.lines("engine score", rows, "--numerics", numerics)
        assert all(a["logprobs"][0] is None for a in answers)
        scores["temper " + numerics] = [numpy.array(a["logprobs"][1:], dtype=float) for a in answers]

    truth = scores.pop("transformers fp32")
    failures, stats = [], {}
    for name, values in scores.items():
        errors = [abs(a - b) for a, b in zip(values, truth)]
        stats[name] = statistics(numpy.concatenate(errors))
        print(f"{name} against transformers fp32: {show(stats[name])}")
        for kind in KINDS:
            print(f"    {kind:8} {show(statistics(numpy.concatenate([e for e, (k, _) in zip(errors, texts) if k == kind])))}")
        if name == "temper f32":
            failures += [f"f32: {kind} of {len(ids)} tokens is off by {error.max():.3g} at token {int(error.argmax()) + 1}"
                         for error, (kind, ids) in zip(errors, texts) if not error.max() <= TOLERANCE]
    ours, theirs = stats["temper bf16"], stats["transformers bf16"]
    failures += [f"bf16: {key} error {ours[key]:.3g} is more than the {theirs[key]:.3g} of transformers in bf16"
                 for key in ours if not ours[key] <= theirs[key]]
    tokens = sum(len(t) for t in truth)
    print(f"measured: {len(texts)} texts of {min(SIZES)} to {max(SIZES)} tokens, {tokens} log probabilities; "
          f"error against transformers fp32: f32 {show(stats['temper f32'])}; bf16 {show(ours)}; "
          f"transformers bf16 {show(theirs)}")
    reference.finish(failures)


if __name__ == "__main__":
    main()
