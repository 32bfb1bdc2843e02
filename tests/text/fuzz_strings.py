"""Strings of every kind that Unicode has, for tests of tokenizers. Deterministic in the seed."""
import random

SPACES = [" ", " ", "  ", "   ", " " * 7, " " * 40, "\t", "\t\t", "\n", "\n\n", "\n\n\n", "\r\n", "\r\n\r\n", "\r", " \n", "\n ", "\t \n", "\x0b",
          "\x0c", "\x1c", "\x1f", "\x85", "\u00a0", "\u1680", "\u180e", "\u2000", "\u2003", "\u200a", "\u200b", "\u2028", "\u2029", "\u202f",
          "\u205f", "\u2060", "\u3000", "\ufeff"]
DIGITS = ["0", "1", "7", "42", "007", "123", "1234", "1234567890", "0" * 50, "3.14", "1e-7", "1,000,000", "½", "²", "¹⁰", "Ⅷ", "ⅷ", "①", "⑳",
          "٣٤", "۱۲۳", "५६७८", "৪", "๓๔", "𝟘𝟙𝟚", "𝟗", "〇", "一二三", "𐄇", "𞥐𞥑", "㊿", "1st", "x86_64", "12:34:56", "0xFF", "1'000", "５６"]
WORDS = ["the", "The", "THE", " the", " quick", "brown fox", "hello", "Hello, world!", "camelCase", "snake_case", "kebab-case", "HTMLParser",
         "iPhone", "McDonald", "naïve", "Größe", "ŒUVRE", "Ångström", "İstanbul", "ĳ", "ǅ", "ŉ", "ﬀ", "ﬁn", "ß", "ẞ", "ſ", "K", "Ω", "ªº",
         "слово", "Привет мир", "Ελληνικά", "λόγος", "Ǆungla", "𝒜𝓑", "ⓐⓑ", "🅰", "Ꭰꭰ", "ქართული", "Ქ", "հայ", "العربية", "שלום", "हिन्दी", "தமிழ்",
         "ไทย", "ລາວ", "မြန်မာ", "ខ្មែរ", "한국어", "日本語", "にほんご", "カタカナ", "ｶﾀｶﾅ", "中文字", "龥", "龦", "㐀", "𠀀", "豈", "々", "〆"]
CONTRACTIONS = ["'s", "'S", "'ſ", "'t", "'T", "'re", "'RE", "'rE", "'ve", "'m", "'M", "'ll", "'LL", "'lL", "'d", "'D", "don't", "we'LL've", "I'm",
                "'tis", "''", "it's'd", "’s", "’t", "ʼn", "'ŀ", "'ſſ", "O'Reilly", "x's", "5's"]
MARKS = ["e\u0301", "é", "A\u030a", "Å", "Å", "a\u0308\u0304", "o\u0327\u0301", "d\u0307\u0323", "ḍ̇", "\u0301", "\u0300\u0316", "\u0344", "\u0958",
         "\u0f73", "\u0f75", "\u2126", "각", "\u1100\u1161\u11a8", "\u1100\u1161", "가\u11a8", "\u11a8", "\ua960\ud7b0", "ﾊﾞ", "か\u3099", "क\u093c",
         "Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤", "\u20e3", "\ufe0f", "\u034f", "\U000e0100", "\U0001d15e", "\U0001d165\U0001d16e", "\u0345", "ﷺ", "㌔", "①", "²", "ﬃ", "ｱ", "℀"]
JOINED = ["👩‍👩‍👧‍👦", "👩🏽‍🚀", "🏳️‍🌈", "🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f", "❤️‍🔥", "❤", "1️⃣", "🇫🇷", "🇫", "🇫🇷🇯", "👍🏿", "\u200d",
          "😀\u200d", "🧑‍🤝‍🧑", "🫱🏻‍🫲🏿", "☺︎", "🎉", "🎉🎉🎉", "🪿", "🫨"]
RIGHT_TO_LEFT = ["\u200f", "\u200e", "\u202b", "\u202c", "\u2067", "\u2069", "\u061c", "אבג123", "(עברית)", "نَصٌّ", "ﻻ", "لا", "ܫܠܡܐ", "ߒߞߏ", "𞤀𞤣"]
PUNCTUATION = list("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~") + ["...", "--", "—", "…", "«»", "“”", "‘’", "¿", "¡", "、", "。", "！", "（", "「", "・", "～", "₿", "€", "±", "×", "→", "≠", "∑",
                                                             "°", "§", "¨", "´", "˜", "^^", "==", "!=", "</", "/>", "//", "/*", "::", "->", "=>", "&&", "||", "${", "\\n", "http://", "@x", "#1", "‿",
                                                             "〜", "゠", "᠆", "๏", "॥", "؟", "׃", "﹏", "＿", "𐄀", "\u2011", "\u00ad"]
EDGES = ["\x00", "\x01", "\x07", "\x1b", "\x7f", "\x80", "\x9f", "\u0378", "\ud7ff", "\ue000", "\uf8ff", "\ufdd0", "\ufff9", "\ufffc", "\ufffd", "\ufffe",
         "\uffff", "\U00010000", "\U0001fffe", "\U0001ffff", "\U0002a6df", "\U0002fa1d", "\U00030000", "\U000e0001", "\U000f0000", "\U0010fffd",
         "\U0010ffff", "\u07ff", "\u0800", "\u2580", "\u2581", "\u2581\u2581", "\u2582", "Ġ", "Ċ", "Â", "<0x0A>", "<0xFF>", "<0x", "\u0143", "\u0144"]
CODE = ["def f(x):\n    return x\n", "if (a->b != NULL) {\n\t", "\n\n    for i in range(10):", "<div class=\"x\">", "SELECT * FROM t;", "x = {'a': 1}", "#include <a.h>\r\n",
        "print(f\"{x!r}\")", "a[i]++;", "/usr/bin/env", "C:\\Users", "https://example.org/a?b=c&d=%20", "--long-option=1", "1 + 2 * 3 == 7"]
POOLS = [SPACES, DIGITS, WORDS, WORDS, CONTRACTIONS, MARKS, JOINED, RIGHT_TO_LEFT, PUNCTUATION, EDGES, CODE]
# Where code points come from: first, last.
AREAS = [(0x20, 0x7e), (0x80, 0x24f), (0x250, 0x5ff), (0x600, 0xfff), (0x1000, 0x1fff), (0x2000, 0x2bff), (0x2c00, 0x33ff), (0x3400, 0x9fff),
         (0xa000, 0xd7ff), (0xe000, 0xffff), (0x10000, 0x1ffff), (0x10000, 0x11fff), (0x1d000, 0x1fbff), (0x20000, 0x323af), (0xe0000, 0xe01ef), (0x20, 0x10ffff)]


def code_point(rng):
    while True:
        c = rng.randint(*rng.choice(AREAS))
        if not 0xd800 <= c < 0xe000:
            return chr(c)


def string(rng, tokens):
    """One string. `tokens` are the added tokens of the vocabulary, whole and in part."""
    kind = rng.random()
    if kind < 0.02:  # one piece, often
        piece = rng.choice(rng.choice(POOLS))
        return piece * rng.choice([1, 2, 3, 17, 33, 64, 200])
    if kind < 0.04:  # a long row of few characters
        few = [code_point(rng) for _ in range(rng.randint(1, 3))] + ["a", "b"]
        return "".join(rng.choices(few, k=rng.randint(20, 300)))
    if kind < 0.14:
        return "".join(code_point(rng) for _ in range(rng.randint(1, 30)))
    if kind < 0.24:
        pool, space = rng.choice(POOLS), rng.choice(SPACES)
        return space.join(rng.choices(pool, k=rng.randint(1, 9)))
    if kind < 0.34:
        return "".join(rng.choices("abcdefghijklmnopqrstuvwxyzABC '  019.-_\n", k=rng.randint(1, 60)))
    out = []
    for _ in range(rng.randint(1, 12)):
        what = rng.random()
        if what < 0.12:
            out.append(code_point(rng))
        elif what < 0.24 and tokens:
            out.append(rng.choice(tokens))
        else:
            out.append(rng.choice(rng.choice(POOLS)))
    return "".join(out)


def look_alikes(tokens):
    """The tokens, and what is nearly one."""
    out = []
    for t in tokens:
        out += [t, t, t, " " + t, t + " ", t + "\n", t[:-1], t[1:], t + t, t.upper(), t.lower(), "a" + t, t + "a", t[: len(t) // 2] + t]
    return [t for t in out if t]


def strings(count, seed, tokens=()):
    rng = random.Random(seed)
    near = look_alikes(tokens)
    return [""] + [string(rng, near) for _ in range(count - 1)]
