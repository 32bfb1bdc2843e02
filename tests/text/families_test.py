"""Tokenizers of every supported family, made here and trained on generated text, against Hugging Face's `tokenizers`: the ids of
fuzzed strings (special tokens parsed, as text, and with what begins and ends a text) and the text of ids must be equal.

usage: families_test.py TEMPER [FAMILY…]. Each family has its published pre-tokenizer, normalizer, decoder and kinds of added
tokens; the vocabulary is small. Every family that GGUF files have a name for is also written as one and compared again. Strings
with a code point that is assigned in only one of the two Unicode versions (the one our tables were made with, the regular
expressions' of `tokenizers`; the one of Python) may differ; whether any does is said.
"""
import json
import os
import pathlib
import random
import sys
import tempfile
import time
import unicodedata

os.environ["RAYON_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import gguf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

import door
import fuzz_strings

COMMON = 84_000          # strings that every family encodes
OWN = 27_000             # and those with its own added tokens
PLAIN = 20_000           # of its own, again with the text of special tokens left as text
VOCABULARY = 3_000
META = "\u2581"

TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + TAIL
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + TAIL
QWEN35 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + TAIL
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
WORD = r"[^\r\n\p{L}\p{N}]?"
TEKKEN = rf"{WORD}[{UPPER}]*[{LOWER}]+|{WORD}[{UPPER}]+[{LOWER}]*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|" + TAIL
O200K = (rf"{WORD}[{UPPER}]*[{LOWER}]+{CONTRACTIONS}?|{WORD}[{UPPER}]+[{LOWER}]*{CONTRACTIONS}?|" +
         r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + TAIL)
NO_HAN = r"&&[^\p{Han}]"
KIMI = (rf"[\p{{Han}}]+|{WORD}[{UPPER}{NO_HAN}]*[{LOWER}{NO_HAN}]+{CONTRACTIONS}?|{WORD}[{UPPER}{NO_HAN}]+[{LOWER}{NO_HAN}]*{CONTRACTIONS}?|" +
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + TAIL)
CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
DEEPSEEK_V3 = [r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
               r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + TAIL]
# The letters of DeepSeek LLM's pre-tokenizer: first, last.
CASED = [(0x41, 0x5a), (0x61, 0x7a), 
         (0xb5, 0xb5), (0xc0, 0xd6), (0xd8, 0xf6), (0xf8, 0x1ba), (0x1bc, 0x1bf), (0x1c4, 0x293), (0x295, 0x2af), (0x370, 0x373),
         (0x376, 0x376), (0x377, 0x377), (0x37b, 0x37d), (0x37f, 0x37f), (0x386, 0x386), (0x388, 0x38a), (0x38c, 0x38c), (0x38e,
         0x3a1), (0x3a3, 0x3f5), (0x3f7, 0x481), (0x48a, 0x52f), (0x531, 0x556), (0x10a0, 0x10c5), (0x13a0, 0x13f5), (0x13f8,
         0x13fd), (0x1c90, 0x1cba), (0x1cbd, 0x1cbf), (0x1d00, 0x1d2b), (0x1d6b, 0x1d77), (0x1d79, 0x1d9a), (0x1e00, 0x1f15),
         (0x1f18, 0x1f1d), (0x1f20, 0x1f45), (0x1f48, 0x1f4d), (0x1f50, 0x1f57), (0x1f59, 0x1f59), (0x1f5b, 0x1f5b), (0x1f5d,
         0x1f5d), (0x1f5f, 0x1f7d), (0x1f80, 0x1fb4), (0x1fb6, 0x1fbc), (0x1fbe, 0x1fbe), (0x1fc2, 0x1fc4), (0x1fc6, 0x1fcc),
         (0x1fd0, 0x1fd3), (0x1fd6, 0x1fdb), (0x1fe0, 0x1fec), (0x1ff2, 0x1ff4), (0x1ff6, 0x1ffc), (0x2102, 0x2102), (0x2107,
         0x2107), (0x210a, 0x2113), (0x2115, 0x2115), (0x2119, 0x211d), (0x2124, 0x2124), (0x2126, 0x2126), (0x2128, 0x2128),
         (0x212a, 0x212d), (0x212f, 0x2134), (0x2139, 0x2139), (0x213c, 0x213f), (0x2145, 0x2149), (0x214e, 0x214e), (0x2183,
         0x2183), (0x2184, 0x2184), (0x2c00, 0x2c7b), (0x2c7e, 0x2ce4), (0x2ceb, 0x2cee), (0x2cf2, 0x2cf2), (0x2cf3, 0x2cf3),
         (0xa640, 0xa66d), (0xa680, 0xa69b), (0xa722, 0xa76f), (0xa771, 0xa787), (0xa78b, 0xa78e), (0xab70, 0xabbf), (0xfb00,
         0xfb06), (0xfb13, 0xfb17), (0xff21, 0xff3a), (0xff41, 0xff5a), (0x10400, 0x1044f), (0x104b0, 0x104d3), (0x104d8,
         0x104fb), (0x10c80, 0x10cb2), (0x10cc0, 0x10cf2), (0x118a0, 0x118df), (0x1e900, 0x1e943)]


def split(pattern, behavior="isolated"):
    return pre_tokenizers.Split(Regex(pattern), behavior)


def byte_level(regex=False):
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)


def stages(*steps):
    return pre_tokenizers.Sequence(list(steps))


def digits():
    return pre_tokenizers.Digits(individual_digits=True)


def special(*contents, **how):
    return [AddedToken(c, special=True, normalized=False, **how) for c in contents]


def added(*contents, **how):
    return [AddedToken(c, **{"normalized": False, **how}) for c in contents]


def around(begin, end=None):
    """A post-processor that puts a token in front of a text, and one behind it."""
    def make(t):
        names = [begin] + [end] * (end is not None)
        return processors.TemplateProcessing(single=f"{begin} $A {end or ''}".strip(), pair=f"{begin} $A $B",
                                             special_tokens=[(n, t.token_to_id(n)) for n in names])
    return make


def train(pre_tokenizer, normalizer, corpus, alphabet, limit=None):
    t = Tokenizer(models.BPE())
    if normalizer:
        t.normalizer = normalizer
    t.pre_tokenizer = pre_tokenizer
    options = {"initial_alphabet": alphabet} if alphabet else {"limit_alphabet": limit}
    t.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=VOCABULARY, show_progress=False, min_frequency=2, max_token_length=24, **options))
    return t


def byte_bpe(pre_tokenizer, tokens, normalizer=None, ignore_merges=False, post=None):
    """Trained on texts cut anywhere: many merges reach across what `pre_tokenizer` cuts, so that every cut shows in the ids."""
    def make(corpus):
        t = train(stages(split(r"[\s\S]{1,9}"), byte_level()), normalizer, corpus, pre_tokenizers.ByteLevel.alphabet())
        t.pre_tokenizer = pre_tokenizer
        t.model.ignore_merges = ignore_merges
        t.decoder = decoders.ByteLevel()
        for token in tokens:
            (t.add_special_tokens if token.special else t.add_tokens)([token])
        t.post_processor = post(t) if post else processors.ByteLevel(trim_offsets=False)
        return t
    return make


def implied_merges(vocab, scores):
    """Every way to put a token together from two, as conversions of SentencePiece's vocabularies list them: best score first,
    then the longest left part, then the longest right part."""
    merges = []
    for token, score in scores.items():
        pairs = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in vocab and token[i:] in vocab]
        merges += [(a, b, score) for a, b in sorted(pairs, key=lambda p: (vocab[p[0]], vocab[p[1]]))]
    return [(a, b) for a, b, _ in sorted(merges, key=lambda m: (m[2], len(m[0]), len(m[1])), reverse=True)]


def spm_bpe(normalizer, pre_tokenizer, decoder, tokens, fallback=True):
    """SentencePiece's BPE: unknown, begin and end; the bytes; what training gave. Its score is its place."""
    def make(corpus):
        trained = train(pre_tokenizers.Metaspace(split=True), None, corpus, None, limit=400)
        known = json.loads(trained.to_str())["model"]["vocab"]
        pieces = sorted(known, key=known.get)
        pieces = [p for p in pieces if len(p) > 1] + ["\n\n", "\n\n\n", META * 2, META * 4, META * 3, "<s", "s>"] + [p for p in pieces if len(p) == 1] + [META] * (META not in known)
        head = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)] * fallback
        pieces = [p for p in dict.fromkeys(pieces) if p not in head]
        vocab = {p: i for i, p in enumerate(head + pieces)}
        scores = {p: -float(i) for i, p in enumerate(pieces)}
        t = Tokenizer(models.BPE(vocab=vocab, merges=implied_merges(vocab, scores), unk_token="<unk>", fuse_unk=True, byte_fallback=fallback))
        if normalizer:
            t.normalizer = normalizer
        if pre_tokenizer:
            t.pre_tokenizer = pre_tokenizer
        t.decoder = decoder
        t.add_special_tokens(special("<unk>", "<s>", "</s>"))
        for token in tokens:
            (t.add_special_tokens if token.special else t.add_tokens)([token])
        t.post_processor = around("<s>")(t)
        return t
    return make


def spm_decoder(strip):
    steps = [decoders.Replace(META, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * strip)


CHAT = special("<|im_start|>", "<|im_end|>", "<|endoftext|>")
QWEN_TOKENS = CHAT + added("<tool_call>", "</tool_call>", "<think>", "</think>", "<|fim_prefix|>")
STAR_TOKENS = special("<|endoftext|>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<file_sep>")
DEEPSEEK_TOKENS = special("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>") + added("<｜User｜>", "<｜Assistant｜>", "<|EOT|>", "<think>")
ODD = (added("<left>", lstrip=True) + special("<right>", rstrip=True) + added("<both>", lstrip=True, rstrip=True) + added("word", single_word=True) +
       added("ÅB", normalized=True) + added("héllo", normalized=True, single_word=True) + added("<le", "  ", "\n\n\n\n"))
LLAMA_NORMALIZER = normalizers.Sequence([normalizers.Prepend(META), normalizers.Replace(" ", META)])
PHI_TOKENS = special("<|endoftext|>") + special("<|assistant|>", "<|system|>", "<|end|>", "<|user|>", rstrip=True)

FAMILIES = {
    "gpt2": byte_bpe(byte_level(True), special("<|endoftext|>")),
    "smollm2": byte_bpe(stages(digits(), byte_level(True)), CHAT + special("<repo_name>", "<jupyter_code>")),
    "starcoder": byte_bpe(stages(digits(), byte_level(True)), STAR_TOKENS),
    "command-r": byte_bpe(stages(digits(), byte_level(True)), special("<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>") + added("<|USER_TOKEN|>"), normalizers.NFC(),
                          post=around("<BOS_TOKEN>")),
    "llama3": byte_bpe(stages(split(LLAMA3), byte_level()), special("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>"), ignore_merges=True,
                       post=lambda t: processors.Sequence([processors.ByteLevel(trim_offsets=True), around("<|begin_of_text|>")(t)])),
    "qwen2": byte_bpe(stages(split(QWEN2), byte_level()), CHAT, normalizers.NFC()),
    "qwen3": byte_bpe(stages(split(QWEN2), byte_level()), QWEN_TOKENS, normalizers.NFC()),
    "qwen35": byte_bpe(stages(split(QWEN35), byte_level()), QWEN_TOKENS, normalizers.NFC()),
    "tekken": byte_bpe(stages(split(TEKKEN), byte_level()), special("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"), ignore_merges=True, post=around("<s>")),
    "deepseek-llm": byte_bpe(stages(split("[\r\n]"), split(r"\s?[" + "".join(f"{chr(a)}-{chr(b)}" for a, b in CASED) + "]+"),
                                    split(r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"), split(r"\s+$"), split(CJK), digits(), byte_level()),
                             DEEPSEEK_TOKENS, normalizers.Sequence([]), post=around("<｜begin▁of▁sentence｜>")),
    "deepseek-coder": byte_bpe(stages(split("[\r\n]"), split(r"\s?\p{L}+"), split(r"\s?\p{P}+"), split(CJK), digits(), byte_level()), DEEPSEEK_TOKENS,
                               normalizers.Sequence([]), post=around("<｜begin▁of▁sentence｜>")),
    "deepseek-v3": byte_bpe(stages(*map(split, DEEPSEEK_V3), byte_level()), DEEPSEEK_TOKENS, normalizers.Sequence([])),
    "gpt-4o": byte_bpe(stages(split(O200K), byte_level()), special("<|endoftext|>", "<|endofprompt|>")),
    "minimax-m2": byte_bpe(stages(split(O200K), byte_level()), special("]!p~[", "]~b]", "[e~[", "]~!b[") + added("<minimax:tool_call>", "<think>")),
    "kimi-k2": byte_bpe(stages(split(KIMI), byte_level()), special("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|tool_calls_section_begin|>")),
    "llama2": spm_bpe(LLAMA_NORMALIZER, None, spm_decoder(True), []),
    "llama2-metaspace": spm_bpe(None, pre_tokenizers.Metaspace(META, prepend_scheme="first", split=False), spm_decoder(True), added("<tool>")),
    "phi-3": spm_bpe(LLAMA_NORMALIZER, None, spm_decoder(True), PHI_TOKENS),
    "gemma3": spm_bpe(normalizers.Replace(" ", META), pre_tokenizers.Split(" ", "merged_with_previous"), spm_decoder(False),
                      special("<start_of_turn>", "<end_of_turn>") + added("\t\t", "<unused0>")),
    # Components that these families do not show, in use elsewhere.
    "odd-tokens": byte_bpe(stages(split(QWEN2), byte_level()), CHAT + ODD, normalizers.NFC()),
    "spm-unknown": spm_bpe(None, pre_tokenizers.Metaspace(META, prepend_scheme="always", split=True), decoders.Metaspace(META, "always"), ODD, fallback=False),
    "normalizers": spm_bpe(normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]),
                           stages(pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation("isolated"), pre_tokenizers.Metaspace(META, prepend_scheme="never")),
                           decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(META, "never")]), []),
    "decomposed": byte_bpe(stages(pre_tokenizers.Punctuation("contiguous"), pre_tokenizers.Digits(False), split("x|y", "merged_with_next"), split("a+", "removed"),
                                  pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)), CHAT, normalizers.Sequence([normalizers.NFKD(), normalizers.NFD()])),
}
# What a GGUF file calls them: tokenizer.ggml.model, .pre.
IN_GGUF = {"gpt2": ("gpt2", "gpt-2"), "smollm2": ("gpt2", "smollm"), "starcoder": ("gpt2", "starcoder"), "command-r": ("gpt2", "command-r"),
           "llama3": ("gpt2", "llama-bpe"), "qwen2": ("gpt2", "qwen2"), "qwen3": ("gpt2", "qwen2"), "qwen35": ("gpt2", "qwen35"), "tekken": ("gpt2", "tekken"),
           "deepseek-llm": ("gpt2", "deepseek-llm"), "deepseek-coder": ("gpt2", "deepseek-coder"), "deepseek-v3": ("gpt2", "deepseek-v3"),
           "gpt-4o": ("gpt2", "gpt-4o"), "minimax-m2": ("gpt2", "minimax-m2"), "kimi-k2": ("gpt2", "kimi-k2"), "llama2": ("llama", "default"),
           "gemma3": ("gemma4", "gemma4")}


def unsure_points():
    """The code points that only one of the two Unicode versions has assigned."""
    points = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    cut = pre_tokenizers.Split(Regex(r"\p{Cn}+"), "removed", invert=True)
    text = "".join(map(chr, points))
    theirs = set()
    for _, (a, b) in cut.pre_tokenize_str(text):
        theirs.update(points[a:b])
    return {chr(c) for c in points if (c in theirs) != (unicodedata.category(chr(c)) == "Cn")}


def write_gguf(t, path, kind):
    """The vocabulary as the metadata of a GGUF file."""
    spec = json.loads(t.to_str())
    contents = {i: c for c, i in spec["model"]["vocab"].items()}
    types = {i: gguf.TokenType.NORMAL for i in contents}
    for token in spec["added_tokens"]:
        contents[token["id"]] = token["content"]
        types[token["id"]] = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind[0])
    writer.add_tokenizer_pre(kind[1])
    tokens = [contents[i] for i in range(len(contents))]
    writer.add_token_list(tokens)
    if kind[0] == "llama":
        for i, token in enumerate(tokens):
            types[i] = gguf.TokenType.BYTE if token.startswith("<0x") and len(token) == 6 else types[i]
        writer.add_token_scores([0.0 if i < 259 else 258.0 - i for i in range(len(tokens))])
    else:
        writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in spec["model"]["merges"]])
    writer.add_token_types([types[i] for i in range(len(tokens))])
    if kind[0] != "gpt2":
        writer.add_unk_token_id(0)
        writer.add_add_space_prefix(kind[0] == "llama")
    writer.add_add_bos_token(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


class Comparison:
    def __init__(self, unsure):
        self.unsure, self.failures, self.excused = unsure, [], 0

    def check(self, what, inputs, ours, theirs):
        assert len(inputs) == len(ours) == len(theirs)
        wrong = []
        for i, (a, b) in enumerate(zip(ours, theirs)):
            if a != b:
                if isinstance(inputs[i], str) and not self.unsure.isdisjoint(inputs[i]):
                    self.excused += 1
                else:
                    wrong.append(i)
        self.failures += [f"{what}: {ascii(inputs[i])[:400]}\n    ours {ascii(ours[i])[:300]}\n    theirs {ascii(theirs[i])[:300]}" for i in wrong[:3]]
        if wrong:
            self.failures.append(f"{what}: {len(wrong)} of {len(inputs)} differ")


def compare(name, program, folder, common, corpus, comparison):
    """The numbers of strings and of sequences of ids compared."""
    t = FAMILIES[name](corpus)
    (folder / name).mkdir()
    t.save(str(folder / name / "tokenizer.json"), pretty=False)
    (folder / name / "config.json").write_text("{}")
    tokens = [json.loads(t.to_str())["added_tokens"][i]["content"] for i in range(len(t.get_added_tokens_decoder()))]
    own = fuzz_strings.strings(OWN, name, tokens)
    ours = door.Door(program, folder / name)
    theirs = lambda texts, add=False: [e.ids for e in t.encode_batch_fast(texts, add_special_tokens=add)]
    strings = common + own
    expected = theirs(strings)
    comparison.check(f"{name}, encode", strings, ours.encode(strings, "--parse-special"), expected)
    comparison.check(f"{name}, with what begins a text", own[:PLAIN // 2], ours.encode(own[:PLAIN // 2], "--parse-special", "--add-special"), theirs(own[:PLAIN // 2], True))
    t.encode_special_tokens = True
    comparison.check(f"{name}, special tokens as text", own[:PLAIN], ours.encode(own[:PLAIN]), theirs(own[:PLAIN]))
    t.encode_special_tokens = False

    rng = random.Random(name)
    size = t.get_vocab_size()
    sequences = expected[-PLAIN:] + [[i] for i in range(size)]
    sequences += [[rng.randrange(size) for _ in range(rng.randint(1, 12))] for _ in range(PLAIN)]
    low = min(size, 300)  # the tokens of single bytes stand first
    sequences += [[rng.randrange(low if rng.random() < 0.85 else size) for _ in range(rng.randint(1, 12))] for _ in range(PLAIN)]
    for skip in (False, True):
        comparison.check(f"{name}, decode{' without special tokens' * skip}", sequences, ours.decode(sequences, *["--skip-special"] * skip),
                         t.decode_batch(sequences, skip_special_tokens=skip))
    if name in IN_GGUF:
        path = folder / f"{name}.gguf"
        write_gguf(t, path, IN_GGUF[name])
        as_file = door.Door(program, path)
        comparison.check(f"{name} as GGUF, encode", own, as_file.encode(own, "--parse-special"), expected[-len(own):])
        comparison.check(f"{name} as GGUF, decode", sequences[:PLAIN], as_file.decode(sequences[:PLAIN]), t.decode_batch(sequences[:PLAIN], skip_special_tokens=False))
    return len(set(strings)), len(sequences)


def main():
    names = sys.argv[2:] or list(FAMILIES)
    comparison = Comparison(unsure_points())
    common = fuzz_strings.strings(COMMON, "common")
    corpus = fuzz_strings.strings(15_000, "corpus")
    least, sequences = None, 0
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            start, before = time.monotonic(), len(comparison.failures)
            distinct, decoded = compare(name, sys.argv[1], pathlib.Path(folder), common, corpus, comparison)
            least = distinct if least is None else min(least, distinct)
            sequences += decoded
            print(f"{name}: {distinct} strings, {'equal' if len(comparison.failures) == before else 'DIFFERENT'}, {time.monotonic() - start:.1f} s", flush=True)
    if least < 100_000:
        comparison.failures.append(f"only {least} different strings")
    print(f"measured: {len(names)} families, {least} different strings or more each, encode as tokenizers does, {sequences} sequences of ids decode as it does; "
          f"{comparison.excused} strings with code points of only one Unicode version differ")
    door.finish(comparison.failures)


if __name__ == "__main__":
    main()
