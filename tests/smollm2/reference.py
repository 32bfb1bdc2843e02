"""What the tests with SmolLM2 compare with: transformers and tokenizers, fed from the GGUF file without a line of ours.

Weights: transformers reads the GGUF itself (the `gguf` package dequantises; transformers puts the rows of Q and K in Hugging
Face's order). Tokenizer: vocabulary, merges, special tokens and chat template are the file's; the file only names its
pre-tokenizer (`smollm`), which is SmolLM2's published one: every digit alone, then GPT-2's byte level.
"""
import json
import os
import pathlib
import subprocess
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

import gguf
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

FOLDER = pathlib.Path(__file__).resolve().parent.parent.parent / "models" / "smollm2-135m-instruct"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTROL = 3  # tokenizer.ggml.token_type of a special token

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


class Door:
    """The program under test: `TEMPER WORDS… MODEL --in - OPTIONS…`, a JSON line in and out for each item."""

    def __init__(self, program):
        self.program = pathlib.Path(program).resolve()

    def lines(self, words, items, *options, ok=True):
        text = "".join(json.dumps(item) + "\n" for item in items)
        run = subprocess.run([self.program, *words.split(), FOLDER, "--in", "-", *options],
                             input=text.encode(), stdout=subprocess.PIPE)
        out = [json.loads(line) for line in run.stdout.splitlines()]
        assert len(out) == len(items), f"temper {words}: {len(out)} answers to {len(items)} lines, exit code {run.returncode}"
        assert not ok or run.returncode == 0, f"temper {words}: exit code {run.returncode}"
        return out


def load_model(dtype):
    """transformers' model, in evaluation mode. Its rotary frequencies stay fp32 in every dtype, as transformers loads them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=FILE, dtype=dtype).eval()
    assert model.dtype == dtype and model.model.rotary_emb.inv_freq.dtype == torch.float32
    # generate() is to follow these weights and nothing else.
    model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=2)
    return model


def load_tokenizer():
    """The transformers tokenizer; `.backend_tokenizer` is the one of tokenizers."""
    fields = gguf.GGUFReader(FOLDER / FILE).fields
    value = {k.removeprefix("tokenizer."): f.contents() for k, f in fields.items() if k.startswith("tokenizer.")}
    assert value["ggml.model"] == "gpt2" and value["ggml.pre"] == "smollm" and not value["ggml.add_bos_token"]
    tokens = value["ggml.tokens"]
    merges = [tuple(m.split(" ")) for m in value["ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                     pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False)
                                for t, kind in zip(tokens, value["ggml.token_type"]) if kind == CONTROL])
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False,
                                                chat_template=value["chat_template"],
                                                **{name: tokens[value[f"ggml.{key}_token_id"]] for name, key in names.items()})


def finish(failures):
    """Says what failed and ends the script."""
    for text in failures:
        print(f"FAILED {text}")
    print(f"{len(failures)} failed" if failures else "all good")
    sys.exit(1 if failures else 0)
