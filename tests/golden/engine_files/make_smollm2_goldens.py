"""Writes smollm2.cases.jsonl: what `tokenizers` makes of texts with SmolLM2's tokenizer, built here from the GGUF file alone.

Run with tokenizers 0.23.3, gguf 0.19.0: python make_smollm2_goldens.py MODEL.gguf > smollm2.cases.jsonl.
"""
import json
import random
import sys

import gguf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

reader = gguf.GGUFReader(sys.argv[1])
tokens, types, merges = (reader.fields["tokenizer.ggml." + k].contents() for k in ("tokens", "token_type", "merges"))
tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[tuple(m.split(" ")) for m in merges]))
tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
tokenizer.decoder = decoders.ByteLevel()
tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, types) if k == 3])
rng = random.Random(11)
WORDS = ["The capital", " of", " France", "don't", " we'll", "def f(x):\n    return x", "\n\n", "  ", "12345", " 3.14", "é", "naïve", "你好", "🎉", "👩‍👩‍👧", "\t", "\u00a0", "\x07", "\x00",
         "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "{\"a\": [1, 2]}", "ß", "Привет", "؀", "ﷺ", "\u2028", "Ω≈ç√"]
for _ in range(150):
    text = "".join(rng.choice(WORDS) for _ in range(rng.randint(1, 12)))
    tokenizer.encode_special_tokens = False
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    tokenizer.encode_special_tokens = True
    plain = tokenizer.encode(text, add_special_tokens=False).ids
    print(json.dumps({"text": text, "ids": ids, "plain": plain, "decoded": tokenizer.decode(ids, skip_special_tokens=False)}))
