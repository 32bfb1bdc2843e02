"""Writes tokenizer goldens: small tokenizers (each <= 40 KiB) and what Hugging Face's `tokenizers` gives for fuzzed texts.

Run with tokenizers 0.23.3: python make_tokenizer_goldens.py OUT_DIR. Files: NAME.json (a tokenizer.json) and NAME.cases.jsonl, one
case a line: text, ids with special tokens parsed, ids with them as text, ids after the post-processor, decoded texts.
"""
import json
import random
import sys

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

OUT = sys.argv[1] if len(sys.argv) > 1 else "."
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
          r"\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
O200K = "|".join([
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
DEEPSEEK = [r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
            r"\s*[\r\n]+|\s+(?!\S)|\s+"]
CORPUS = ["the quick brown fox jumps over the lazy dog", "import os\nfor i in range(10):\n    print(i)\n", "it's we'll I'd you've they're",
          "Größe naïve café señor", "你好世界 こんにちは 안녕하세요", "12345 67 8.9 3,141", "🎉👩‍👩‍👧 emoji", "\t\ttabs\r\n\r\nlines   spaces",
          "<tool_call>\n{\"name\": \"ls\"}\n</tool_call>"] * 3


def split(pattern, behavior="isolated", invert=False):
    return pre_tokenizers.Split(Regex(pattern), behavior, invert)


def byte_level(regex, prefix=False):
    return pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=regex)


def seq(*stages):
    return pre_tokenizers.Sequence(list(stages))


def build(pre, normalizer=None, size=700, ignore_merges=False, drop=(), added=(), post=None, uncut=()):
    """`uncut`: texts whose merges reach across what `pre` cuts, so that cutting shows."""
    t = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if normalizer:
        t.normalizer = normalizer
    t.pre_tokenizer = byte_level(False) if uncut else pre
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator([*CORPUS, *uncut], trainers.BpeTrainer(vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                                      show_progress=False))
    t.pre_tokenizer = pre
    if drop:  # bytes that the vocabulary has no token for
        spec = json.loads(t.to_str())
        gone = {k for k in spec["model"]["vocab"] if any(d in k for d in drop)}
        keep = [k for k in sorted(spec["model"]["vocab"], key=spec["model"]["vocab"].get) if k not in gone]
        spec["model"]["vocab"] = {k: i for i, k in enumerate(keep)}
        spec["model"]["merges"] = [m for m in spec["model"]["merges"] if not any("".join(m).find(d) >= 0 for d in drop)]
        t = Tokenizer.from_str(json.dumps(spec))
    for token in added:
        (t.add_special_tokens if token.special else t.add_tokens)([token])
    if post:
        t.post_processor = post(t)
    return t


SPECIALS = [AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True), AddedToken("<tool_call>", normalized=False),
            AddedToken("</tool_call>", normalized=False)]
ODD = [AddedToken("<left>", lstrip=True, normalized=False), AddedToken("<right>", rstrip=True, special=True),
       AddedToken("word", single_word=True, normalized=False), AddedToken("ÅB", normalized=True), AddedToken("<｜a｜>", special=True),
       AddedToken("<le", normalized=False)]


def bos(t):
    return processors.TemplateProcessing(single="<|im_start|> $A <|im_end|>", pair="$A $B",
                                         special_tokens=[(s, t.token_to_id(s)) for s in ("<|im_start|>", "<|im_end|>")])


# What more the texts of a kind are made of, and what is changed in its file: ids of added tokens that `tokenizers` does not heed,
# truncation and padding, which are for callers that ask.
EXTRA = {"folds": ["k", "K", "\u212a", "ſ", "S", "ß", "ẞ", "ı", "İ", "²", "¹³", "½x", "a²b", "ǅ", "σς", "Σ", "\u1c89\u1c8a", "i\u0307", "ﬀ"],
         "accents": ["naïve", "x\u0301\u0302y", "\u0903", "a\u0903b", "नमस्ते", "Ⓐb", "a\u200db", "a\u2040b", "x²y", "a_b", "a-b", "…", "!?", "<one>", "<two>", "<\u0301three>"]}


def pairs(name):
    return [a + b for a in EXTRA[name] for b in EXTRA[name] if "<" not in a + b] * 3


def other_ids(spec):
    for token, far in zip(spec["added_tokens"], (900, 5, 70000)):
        token["id"] = far
    spec["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    spec["padding"] = {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "!"}


EDITS = {"accents": other_ids}
KINDS = {
    "smollm": lambda: build(seq(pre_tokenizers.Digits(individual_digits=True), byte_level(True)), drop=("À", "õ", "ÿ", "Ĩ"), added=SPECIALS),
    "gpt2_prefix": lambda: build(byte_level(True, prefix=True), added=SPECIALS[:1]),
    "llama3": lambda: build(seq(split(LLAMA3), byte_level(False)), ignore_merges=True, added=SPECIALS, post=bos),
    "qwen": lambda: build(seq(split(QWEN), byte_level(False)), normalizer=normalizers.NFC(), added=SPECIALS + ODD),
    "deepseek": lambda: build(seq(*map(split, DEEPSEEK), byte_level(False)), normalizer=normalizers.Sequence([]), added=SPECIALS),
    "o200k": lambda: build(seq(split(O200K), byte_level(False)), added=SPECIALS),
    "behaviors": lambda: build(seq(split("-", "merged_with_previous"), split("_", "merged_with_next"), split(r"\d", "contiguous"),
                                   split("x", "removed"), split(r"[a-c]+", "isolated", True), byte_level(True)), size=400),
    "swallowed": lambda: build(byte_level(True), size=400, added=[
        AddedToken("<right>", rstrip=True, special=True), AddedToken("word", rstrip=True, normalized=False),
        AddedToken("  ", lstrip=True, rstrip=True, normalized=False), AddedToken("\n", lstrip=True, rstrip=True, special=True)]),
    "folds": lambda: build(seq(split(r"[\w](?i:k)[^\w\s]?|(?i:[a-hj-z[^\w\s]]+|ı|\p{Lu}+|[^σ\s]σ)|\w{2}"), byte_level(False)), size=900, uncut=pairs("folds")),
    "accents": lambda: build(seq(pre_tokenizers.Whitespace(), byte_level(False)), size=900, uncut=pairs("accents"),
                             normalizer=normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]),
                             added=[AddedToken("<one>", special=True), AddedToken("<two>", normalized=False), AddedToken("<three>")]),
}
META = "\u2581"


def spm(normalizer, pre, decoder, added=(), fallback=True, size=330):
    """SentencePiece's BPE: unknown, begin, end; the bytes; then what training gave, every pair that makes a token being a merge."""
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.Metaspace(META)
    t.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=size, limit_alphabet=90, show_progress=False))
    known = json.loads(t.to_str())["model"]["vocab"]
    # Long ones first: the score of a token is its place. "<s" and "s>" would make "<s>", and "9▁" reaches across a space.
    pieces = [p for p in sorted(known, key=known.get) if len(p) > 1] + ["\n\n", META * 2, META * 4, META * 3, "9" + META, "<s", "s>"]
    pieces += [p for p in known if len(p) == 1]
    head = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)] * fallback
    vocab = {p: i for i, p in enumerate(head + pieces)}
    merges = [(p[:i], p[i:]) for p in pieces for i in range(len(p) - 1, 0, -1) if p[:i] in vocab and p[i:] in vocab]
    t = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=fallback))
    if normalizer:
        t.normalizer = normalizer
    if pre:
        t.pre_tokenizer = pre
    if decoder:
        t.decoder = decoder
    for token in [AddedToken(c, special=True, normalized=False) for c in head[:3]] + list(added):
        (t.add_special_tokens if token.special else t.add_tokens)([token])
    t.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)])
    return t


def spm_decoder(strip):
    return decoders.Sequence([decoders.Replace(META, " "), decoders.ByteFallback(), decoders.Fuse()] + [decoders.Strip(" ", 1, 0)] * strip)


LLAMA = normalizers.Sequence([normalizers.Prepend(META), normalizers.Replace(" ", META)])
NO_HAN = r"&&[^\p{Han}]"
KIMI = O200K.replace(r"\p{Lo}\p{M}]", r"\p{Lo}\p{M}" + NO_HAN + "]").replace("[\\r\\n/]*", "[\\r\\n]*")
SPM_KINDS = {
    "llama2": lambda: spm(LLAMA, None, spm_decoder(True), [AddedToken("<|user|>", special=True, rstrip=True), AddedToken("wörd", single_word=True)]),
    "llama2_metaspace": lambda: spm(None, pre_tokenizers.Metaspace(META, prepend_scheme="first", split=False), spm_decoder(True),
                                    [AddedToken("<left>", lstrip=True, normalized=False)]),
    "gemma": lambda: spm(normalizers.Replace(" ", META), pre_tokenizers.Split(" ", "merged_with_previous"), spm_decoder(False),
                         [AddedToken("<start_of_turn>", special=True), AddedToken("\t\t", normalized=False)]),
    "spm_unknown": lambda: spm(None, pre_tokenizers.Metaspace(META, prepend_scheme="always", split=True), decoders.Metaspace(META, "always"), fallback=False),
    "components": lambda: spm(normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip(), normalizers.Replace(Regex("e{2,}"), "ee")]),
                              seq(pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation("isolated"), pre_tokenizers.CharDelimiterSplit("z"),
                                  pre_tokenizers.Metaspace(META, prepend_scheme="never")), None),
    "decomposed": lambda: build(seq(pre_tokenizers.Punctuation("contiguous"), split("x*", "isolated"), split("y?", "merged_with_previous"), byte_level(True)),
                                normalizer=normalizers.Sequence([normalizers.NFKD(), normalizers.NFD(), normalizers.Strip(left=False)]), size=400),
    "kimi": lambda: build(seq(split(r"[\p{Han}]+|" + KIMI), byte_level(False)), size=400, added=SPECIALS[:2],
                          uncut=["漢字kana", "e\u0301t", "'quick"] * 50),
}
SPM_PARTS = ["<s>", "</s>", "<s", "<|user|>  ", "<|user|>", "<left>", "  <left>", "wörd", "<start_of_turn>", "\t\t", META, META * 2, "    ", " a", "a ", "9 9 ",
             "<0x41>", "\n\n", "①", "ﬃ", "㌔", "Ｆ", "İ", "Σ", "ß", "！", "，", "eeee", "𝟘", "\U00016ff1", "\u08d5\u1abf", "xx", "yy", "漢字kana", "zz",
             "quickthe" * 9, "ovthequ" * 6, "999" * 25]
PARTS = ["the ", "quick", "It's", "'ſ", "'S", "we'LL", " ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u180e", "\u2003", "\u3000", "\x85", "12345", "٣٤", "Ⅷ", "½",
         "é", "e\u0301", "Å", "A\u030a", "ÅB", "각", "\u1100\u1161\u11a8", "ﬁ", "你好", "かな", "カタ", "👩‍👩‍👧", "🇩🇪", "\u0300\u0316", "x_y-z", "--", "__", "a.b", "/usr/bin", "$+<=>",
         "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<left>", "<right>", "word", "words", "<le", "<｜a｜>", "\ufffd", "\x00", "\x7f", "õÿ", "\U000e0100"]


def text(rng, parts):
    out = []
    for _ in range(rng.randint(1, 9)):
        kind = rng.random()
        if kind < 0.75:
            out.append(rng.choice(parts))
        elif kind < 0.9:
            out.append("".join(rng.choice("abcxyz 019_-'\n") for _ in range(rng.randint(1, 6))))
        else:
            c = rng.randrange(0x20, 0x30000)
            out.append(chr(c) if not 0xD800 <= c < 0xE000 else "?")
    return "".join(out)


for name, make in {**KINDS, **SPM_KINDS}.items():
    tokenizer = make()
    tokenizer.save(f"{OUT}/{name}.json", pretty=False)
    if name in EDITS:
        spec = json.loads(tokenizer.to_str())
        EDITS[name](spec)
        with open(f"{OUT}/{name}.json", "w") as f:
            json.dump(spec, f, ensure_ascii=False, separators=(",", ":"))
        tokenizer = Tokenizer.from_file(f"{OUT}/{name}.json")
        tokenizer.no_truncation()
        tokenizer.no_padding()
    rng = random.Random(name)
    with open(f"{OUT}/{name}.cases.jsonl", "w") as f:
        for _ in range(70 if name in SPM_KINDS else 120):
            t = text(rng, PARTS + SPM_PARTS * (name in SPM_KINDS) + EXTRA.get(name, []) * 3)
            tokenizer.encode_special_tokens = False
            ids = tokenizer.encode(t, add_special_tokens=False).ids
            full = tokenizer.encode(t, add_special_tokens=True).ids
            tokenizer.encode_special_tokens = True
            plain = tokenizer.encode(t, add_special_tokens=False).ids
            noise = [rng.randrange(tokenizer.get_vocab_size()) for _ in range(5)]
            if name in SPM_KINDS:  # bytes stand low
                noise += [rng.randrange(3, 259) for _ in range(4)] + noise[:1]
            case = {"text": t, "ids": ids, "plain": plain, "full": full, "noise": noise,
                    "decoded": [tokenizer.decode(ids, skip_special_tokens=False), tokenizer.decode(ids, skip_special_tokens=True),
                                tokenizer.decode(noise, skip_special_tokens=False)]}
            f.write(json.dumps(case, ensure_ascii=True) + "\n")
