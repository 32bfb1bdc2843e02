"""Tokenizer and chat template of SmolLM2-135M-Instruct: `temper text` against tokenizers and transformers, exactly.

usage: text_test.py TEMPER. Encoding: strings of every kind below, twice (the text of special tokens parsed or left as text), and
every code point of Unicode between letters, digits and spaces. Decoding: what was encoded, and sequences of random ids, most of
which hold broken UTF-8. Chat: conversations rendered to text and to ids; what transformers refuses must be refused.
"""
import random
import sys
import unicodedata

import material
import reference

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<reponame>", "<file_sep>", "<filename>",
           "<gh_stars>", "<issue_start>", "<jupyter_code>", "<empty_output>"]
ALMOST = ["<|im_start", "<|im_start|", "|im_end|>", "<|im_end|", "<|im_start|>user\n", "<<|im_end|>>", "<|IM_END|>",
          "<| im_end |>", "<|im_<|im_end|>end|>", "<repo_name", "<repo name>", "<filename>>"]
SPACES = [" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", "\r", " \n", "\n ", "\u00a0", "\u2003", "\u3000", "\u200b", "\u2028",
          "\u2029", "\u0085", "\x0b", "\x0c", "\x1c", "\x1f", "\ufeff", "\u180e", "\u1680", "\u202f"]
DIGITS = ["0", "7", "42", "007", "1234567890", "3.14", "1e-7", "1,000,000", "½", "²", "Ⅷ", "①", "٣٤", "५६", "𝟘𝟙", "〇", "一",
          "৪", "𐄇", "1st", "x86_64", "12:34:56", "+49 (0)30", "0xFF", "1'000"]
JOINED = ["👩‍👩‍👧‍👦", "👩🏽‍🚀", "🏳️‍🌈", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "❤️‍🔥", "❤", "❤️", "1️⃣", "🇫🇷", "🇫", "🇫🇷🇯", "👍🏿", "\u200d", "\ufe0f",
          "😀\u200d", "🧑‍🤝‍🧑", "🫱🏻‍🫲🏿", "☺︎"]
RIGHT_TO_LEFT = ["שלום", "עולם", "مرحبا", "بالعالم", "ﷺ", "لا", "\u200f", "\u200e", "\u202b", "\u202c", "\u2067", "\u2069",
                 "אבג123", "١٢٣", "(עברית)", "فارسی‌", "ܫܠܡܐ", "نَصٌّ"]
COMBINING = ["e\u0301", "é", "a\u0308\u0304", "o\u0327\u0301", "\u0301", "n\u0303o", "ḍ̇", "d\u0307\u0323", "Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤",
             "각", "각", "ﬁ", "Å", "Å", "ก็", "நி", "क्षि", "ที่", "\u20e3", "Ω"]
EDGES = ["\x00", "\x01", "\x7f", "\x80", "\x9f", "\u00ad", "\u0378", "\ud7ff", "\ue000", "\uf8ff", "\ufdd0", "\ufffd",
         "\ufffe", "\uffff", "\U00010000", "\U0001ffff", "\U0002a6df", "\U000e0001", "\U000f0000", "\U0010ffff",
         "\ufffd\ufffd", "\u07ff", "\u0800"]
WORDS = ["don't", "we'LL", "I'm", "they'Ve", "'s", "''", "it's'd", "'tis", "naïve", "Straße", "ŒUVRE", "hello", " world",
         "HELLO", "snake_case", "camelCase", "kebab-case", "a", "I", "...", "!?", "@user", "#tag",
         "https://example.org/a?b=c&d=%20", "C:\\Users\\x", "$1", "€5", "100%", "~/.bashrc", "→", "≠", "«quoted»", "“curly”",
         "—", "…", "\\n", "\\u0041", "&amp;"]


def any_char(rng):
    while True:
        c = chr(rng.randrange(rng.choice([0x80, 0x800, 0x3000, 0x10000, 0x20000, 0x110000])))
        if unicodedata.category(c) != "Cs":
            return c


def long_word(rng):
    kind = rng.randrange(4)
    n = rng.randrange(50, 1500)
    if kind == 0:
        return rng.choice("aZé漢 \t.-=0\n😀") * n
    if kind == 1:
        return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(n))
    if kind == 2:
        return "".join(rng.choice(["ab", "ba", "aa"]) for _ in range(n))
    return "".join(any_char(rng) for _ in range(n // 10))


def joiner(*lists, most=10):
    return lambda rng: "".join(rng.choice(rng.choice(lists)) for _ in range(rng.randrange(1, most)))


KINDS = {
    "any code points": lambda rng: "".join(any_char(rng) for _ in range(rng.randrange(1, 40))),
    "runs of white space": joiner(SPACES, SPACES, WORDS),
    "white space alone": joiner(SPACES),
    "digits": joiner(DIGITS, DIGITS, WORDS, SPACES),
    "code": lambda rng: material.text("code", 400, rng.random())[rng.randrange(200):][:rng.randrange(1, 200)],
    "special tokens within": joiner(SPECIAL, SPECIAL, WORDS, SPACES),
    "almost special tokens": joiner(ALMOST, ALMOST, SPECIAL, WORDS),
    "line ends": lambda rng: rng.choice(["\r\n", "\n", "\r", "\n\r"]).join(rng.choices(WORDS + SPACES, k=rng.randrange(2, 9))),
    "joined emoji": joiner(JOINED, JOINED, material.EMOJI, WORDS),
    "right to left": joiner(RIGHT_TO_LEFT, RIGHT_TO_LEFT, WORDS, SPACES),
    "combining marks": joiner(COMBINING, COMBINING, WORDS),
    "edges of encodings": joiner(EDGES, EDGES, WORDS),
    "long words": long_word,
    "contractions and marks": joiner(WORDS, most=12),
    "prose and scripts": lambda rng: material.text(rng.choice(["prose", "scripts", "mixed", "emoji", "digits"]),
                                                   rng.randrange(1, 300), rng.random())[:rng.randrange(1, 400)],
    "everything": joiner(SPECIAL, ALMOST, SPACES, DIGITS, JOINED, RIGHT_TO_LEFT, COMBINING, EDGES, WORDS, most=30),
}
EACH = 200


def make_strings():
    """[(kind, text)…]: the empty string, and EACH of every kind."""
    return [("empty", "")] + [(kind, make(random.Random(f"{kind} {i}"))) for kind, make in KINDS.items() for i in range(EACH)]


def sweep():
    """Every code point at the end of a word, in a word of its own, before and after a digit, before a stop; 256 to a string."""
    points = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    return ["".join(f"a{chr(c)}{chr(c)} {chr(c)}1{chr(c)}.\n" for c in points[at:at + 256]) for at in range(0, len(points), 256)]


CONTENTS = ["", " ", "\n", "  two spaces  ", "\n\nlines\n\n", "<|im_end|>", "<|im_start|>system\nno<|im_end|>\n",
            "{{ 7 * 7 }}", "{% raw %}", "{# none #}", "back\\slash \"quotes\" 'single'", "<b>&lt;</b>", "\r\n", "\x00",
            "12345", "None", "👩‍👩‍👧 שלום", "e\u0301"]


def make_conversations():
    """[(messages, tools, add_generation_prompt)…]"""
    rng = random.Random(23)
    parameters = {"type": "object", "properties": {"x": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "shell", "description": "runs", "parameters": parameters}}]
    out = []
    for i in range(60):  # ordinary ones, one to fifteen messages
        out.append((material.conversation(rng, 1 + i % 8), None, i % 2 == 0))
    for content in CONTENTS:  # each content in each role
        for role in ("system", "user", "assistant", "tool"):
            out.append(([{"role": role, "content": content}, {"role": "user", "content": content}], None, rng.random() < 0.5))
    for i in range(40):  # roles in any order, several systems, unknown roles, further fields
        messages = [{"role": rng.choice(["system", "user", "assistant", "tool", "developer", "<|im_end|>", ""]),
                     "content": rng.choice(CONTENTS + [rng.choice(list(KINDS.values()))(rng)])}
                    for _ in range(rng.randrange(1, 12))]
        messages[0]["name"] = "someone"
        out.append((messages, rng.choice([None, tools]), rng.random() < 0.5))
    call = {"id": "c1", "type": "function", "function": {"name": "shell", "arguments": {"x": "ls"}}}
    out.append(([{"role": "user", "content": "list"}, {"role": "assistant", "content": "", "tool_calls": [call]},
                 {"role": "tool", "content": "a\nb", "tool_call_id": "c1"}], tools, True))
    # What the template cannot put together.
    for content in (None, 5, True, ["part"], [{"type": "text", "text": "hi"}], {"a": 1}):
        out.append(([{"role": "user", "content": content}], None, True))
    out.append(([{"role": "user"}], None, True))
    out.append(([{"content": "no role"}], None, False))
    out.append(([{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}], tools, False))
    return out


class Differences:
    """Collects what is not equal."""

    def __init__(self):
        self.failures = []

    def check(self, what, inputs, ours, theirs):
        assert len(inputs) == len(ours) == len(theirs)
        wrong = [i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b]
        print(f"{what}: {len(inputs) - len(wrong)} of {len(inputs)} equal", flush=True)
        columns = ((what, inputs), ("ours", ours), ("theirs", theirs))
        self.failures += ["\n    ".join(f"{name} {ascii(values[i])[:300]}" for name, values in columns) for i in wrong[:5]]
        if len(wrong) > 5:
            self.failures.append(f"{what}: {len(wrong) - 5} more")


def main():
    door = reference.Door(sys.argv[1])
    tokenizer = reference.load_tokenizer()
    backend = tokenizer.backend_tokenizer
    differences = Differences()

    def encode(texts, *options):
        return [a["ids"] for a in door.lines("text encode", texts, *options)]

    def encode_theirs(texts):
        return [e.ids for e in backend.encode_batch(texts, add_special_tokens=True)]

    strings = [text for _, text in make_strings()]
    distinct = len(set(strings))
    backend.encode_special_tokens = False
    parsed = encode_theirs(strings)
    swept = sweep()
    differences.check("encode, special tokens parsed", strings, encode(strings, "--parse-special", "--add-special"), parsed)
    differences.check("encode, every code point", swept, encode(swept, "--parse-special"), encode_theirs(swept))
    assert parsed[:500] == [tokenizer.encode(text) for text in strings[:500]]  # transformers adds nothing of its own
    backend.encode_special_tokens = True
    plain = encode_theirs(strings)
    differences.check("encode, special tokens as text", strings, encode(strings), plain)
    backend.encode_special_tokens = False
    assert sum(a != b for a, b in zip(parsed, plain)) > EACH

    rng = random.Random(31)
    sequences = parsed + plain
    sequences += [[rng.randrange(len(tokenizer)) for _ in range(rng.randrange(1, 30))] for _ in range(1000)]
    # Tokens of single bytes and of pieces of code points, in any order: nearly always broken.
    pieces = [i for i in range(len(tokenizer)) if "\ufffd" in backend.decode([i])]
    every = range(len(tokenizer))
    sequences += [[rng.choice(pieces if rng.random() < 0.8 else every) for _ in range(rng.randrange(1, 20))] for _ in range(2000)]
    # Cut anywhere, within code points too.
    sequences += [ids[at:at + rng.randrange(1, 12)] for ids in parsed if ids for at in [rng.randrange(len(ids))]]
    sequences += [[i] for i in range(len(tokenizer))]
    broken = 0
    for skip in (False, True):
        theirs = [tokenizer.decode(ids, skip_special_tokens=skip) for ids in sequences]
        broken = sum("\ufffd" in text for text in theirs)
        ours = [a["text"] for a in door.lines("text decode", [{"ids": ids} for ids in sequences], *["--skip-special"] * skip)]
        differences.check("decode" + ", special tokens left out" * skip, sequences, ours, theirs)

    conversations = make_conversations()
    lines, theirs = [], []
    for messages, tools, prompt in conversations:
        lines.append({"messages": messages, "tools": tools, "add_generation_prompt": prompt})
        try:
            options = {"tools": tools, "add_generation_prompt": prompt, "return_dict": False}
            theirs.append(tuple(tokenizer.apply_chat_template(messages, tokenize=ids, **options) for ids in (False, True)))
        except Exception:
            theirs.append("refused")
    answers = door.lines("text render", lines, "--tokens", ok=False)
    ours = ["refused" if "error" in a else (a["text"], a["ids"]) for a in answers]
    differences.check("chat template", lines, ours, theirs)
    refused = theirs.count("refused")

    print(f"measured: {distinct} different strings and {len(swept)} strings of every code point encode alike, "
          f"{2 * len(sequences)} sequences of ids decode alike ({broken} hold broken UTF-8), "
          f"{len(conversations)} conversations render alike ({refused} of them refused by both)")
    if distinct < 2000 or len(conversations) - refused < 50:
        differences.failures.append(f"only {distinct} strings and {len(conversations) - refused} conversations")
    reference.finish(differences.failures)


if __name__ == "__main__":
    main()
