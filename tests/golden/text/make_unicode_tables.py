"""Writes text/unicode_tables.inc: what Hugging Face's tokenizers think of every code point.

The general categories, scripts, white space and what is equal without case are asked of the regular-expression engine of
`tokenizers` itself (run with 0.23.3), so that our scanners agree with it whatever Unicode version it has; what Whitespace,
StripAccents, Digits, Punctuation and Lowercase take, which have versions of their own, is asked of each. Other case mappings,
the properties that str's methods ask, decompositions and combining classes are Python's (3.11, Unicode 14), the last two only where `tokenizers` agrees.
Usage: python make_unicode_tables.py > text/unicode_tables.inc
"""
import unicodedata

from tokenizers import Regex, normalizers, pre_tokenizers

POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
TEXT = "".join(map(chr, POINTS))
CATEGORIES = "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Co".split()
SCRIPTS = ["Han", "Hiragana", "Katakana", "Hangul"]


def ranges_of(pattern):
    split = pre_tokenizers.Split(Regex(pattern + "+"), "removed", invert=True)
    # With invert the pieces kept are the matches; a match may span the surrogate gap, which is cut here.
    out = []
    for _, (a, b) in split.pre_tokenize_str(TEXT):
        first = POINTS[a]
        for i in range(a + 1, b):
            if POINTS[i] != POINTS[i - 1] + 1:
                out.append((first, POINTS[i - 1]))
                first = POINTS[i]
        out.append((first, POINTS[b - 1]))
    return out


def split_off(pre_tokenizer):
    """The ranges of the code points that it makes a piece of, between letters."""
    found = []
    for at in range(0, len(POINTS), 256):
        some = POINTS[at:at + 256]
        for _, (a, b) in pre_tokenizer.pre_tokenize_str("".join(f"a{chr(c)}a" for c in some)):
            if b - a == 1 and a % 3 == 1:
                found.append(some[a // 3])
    return joined(found)


def word_of_rust():
    """What Whitespace joins with a letter in front."""
    found, split = [], pre_tokenizers.Whitespace()
    for at in range(0, len(POINTS), 256):
        some = POINTS[at:at + 256]
        found += [some[a // 3] for _, (a, b) in split.pre_tokenize_str("".join(f"a{chr(c)} " for c in some)) if b - a == 2 and a % 3 == 0]
    return joined(found)


def removed_by(normalizer):
    found = []
    for at in range(0, len(POINTS), 256):
        some = POINTS[at:at + 256]
        text = "".join(map(chr, some))
        if normalizer.normalize_str(text) != text:
            found += [c for c in some if normalizer.normalize_str(chr(c)) == ""]
    return joined(found)


def joined(points):
    out = []
    for c in points:
        if out and out[-1][1] == c - 1:
            out[-1] = (out[-1][0], c)
        else:
            out.append((c, c))
    return out


def emit(name, kind, rows):
    print(f"constexpr {kind} {name}[] = {{")
    line = "   "
    for row in rows:
        cell = " {" + ",".join(f"0x{v:x}" if i < 2 and v > 9 else str(v) for i, v in enumerate(row)) + "},"
        if len(line) + len(cell) > 120:
            print(line)
            line = "   "
        line += cell
    print(line)
    print("};")


def where(holds):
    """The ranges of the code points for which it holds."""
    out = []
    for c in POINTS:
        if not holds(chr(c)):
            continue
        if out and out[-1][1] == c - 1:
            out[-1] = (out[-1][0], c)
        else:
            out.append((c, c))
    return out


def compress(pairs):
    """(cp, delta) -> (first, last, step, delta) runs."""
    out = []
    for cp, delta in pairs:
        if out and out[-1][3] == delta:
            first, last, step, _ = out[-1]
            if (step == 0 and cp - last in (1, 2)) or (step and cp - last == step):
                out[-1] = (first, cp, cp - last, delta)
                continue
        out.append((cp, cp, 0, delta))
    return [(a, b, s or 1, d) for a, b, s, d in out]


def folds():
    """(cp, the first of those that are equal to it without case), as the engine matches, and (cp, points) of the forms that are several."""
    def variants_in(c, text):
        split = pre_tokenizers.Split(Regex(r"(?i)\x{%x}" % ord(c)), "removed", invert=True)
        return [s for s, _ in split.pre_tokenize_str(text) if len(s) == 1]

    every = [chr(c) for c in POINTS]
    forms = {x for c in every for s in (c.lower(), c.upper(), c.title(), c.casefold()) if s != c for x in (c, *s)}
    newer = {chr(c) for a, b in ranges_of(r"[\p{Lu}\p{Ll}\p{Lt}]") for c in range(a, b + 1) if unicodedata.category(chr(c)) == "Cn"}
    cased = sorted(forms | newer)
    text = "\n".join(cased)
    first = [(ord(c), ord(min(variants_in(c, text)))) for c in cased]
    long = [(ord(c), *[ord(x) for x in (c.casefold() + "\0")[:3]]) for c in cased if len(c.casefold()) > 1]
    for cp, *points in long:
        form = "".join(chr(p) for p in points if p)
        split = pre_tokenizers.Split(Regex(r"(?i)\x{%x}" % cp), "removed", invert=True)
        assert [s for s, _ in split.pre_tokenize_str(form)] == [form]
    return [(c, f) for c, f in first if f != c], long


def main():
    print("// Generated by tests/golden/text/make_unicode_tables.py; do not edit.")
    emit("kCategoryRanges", "CategoryRange",
         sorted((a, b, i) for i, c in enumerate(CATEGORIES) for a, b in ranges_of(r"\p{%s}" % c)))
    emit("kScriptRanges", "CategoryRange",
         sorted((a, b, i) for i, s in enumerate(SCRIPTS) for a, b in ranges_of(r"\p{%s}" % s)))
    emit("kSpaceRanges", "CodeRange", ranges_of(r"\s"))
    emit("kWordRanges", "CodeRange", ranges_of(r"\w"))
    # The engine knows them as \w, but not as [\w].
    inside = {c for a, b in ranges_of(r"[\w]") for c in range(a, b + 1)}
    emit("kUnbracketedWordRanges", "CodeRange", joined([c for a, b in ranges_of(r"\w") for c in range(a, b + 1) if c not in inside]))
    # What the other engine of `tokenizers` takes for a part of a word.
    emit("kRustWordRanges", "CodeRange", word_of_rust())
    emit("kMarkRanges", "CodeRange", removed_by(normalizers.StripAccents()))
    emit("kNumericRanges", "CodeRange", split_off(pre_tokenizers.Digits(individual_digits=True)))
    emit("kPunctuationRanges", "CodeRange", split_off(pre_tokenizers.Punctuation("isolated")))
    lower = normalizers.Lowercase()
    lowered = [(c, lower.normalize_str(chr(c))) for c in POINTS]
    emit("kTokenizerLowerRuns", "CaseRun", compress([(c, ord(s) - c) for c, s in lowered if len(s) == 1 and s != chr(c)]))
    assert [(c, s) for c, s in lowered if len(s) != 1] == [(0x130, "i\u0307")]
    first, long = folds()
    emit("kEqualCaseRuns", "CaseRun", compress([(c, f - c) for c, f in first]))
    emit("kSeveralWithoutCase", "LongCase", long)
    for name, fold in (("kUpperRuns", str.upper), ("kLowerRuns", str.lower)):
        simple = [(c, ord(fold(chr(c))) - c) for c in POINTS if len(fold(chr(c))) == 1 and fold(chr(c)) != chr(c)]
        emit(name, "CaseRun", compress(simple))
    emit("kLongUpper", "LongCase",
         [(c, *[ord(x) for x in (chr(c).upper() + "\0\0")[:3]]) for c in POINTS if len(chr(c).upper()) > 1])
    emit("kTitleRuns", "CaseRun", compress([(c, ord(chr(c).title()) - c) for c in POINTS
                                            if len(chr(c).title()) == 1 and chr(c).title() != chr(c).upper()]))
    nfd = normalizers.NFD()
    agreed = [c for c in POINTS if unicodedata.normalize("NFD", chr(c)) == nfd.normalize_str(chr(c))]
    decompositions, compositions = [], []
    for c in agreed:
        d = unicodedata.decomposition(chr(c))
        if not d or d.startswith("<"):
            continue
        parts = [int(x, 16) for x in d.split()]
        decompositions.append((c, *(parts + [0])[:2]))
        if len(parts) == 2 and unicodedata.normalize("NFC", chr(c)) == chr(c):
            compositions.append((parts[0], parts[1], c))
    emit("kDecompositions", "Decomposition", decompositions)
    emit("kCompositions", "Composition", sorted(compositions))
    nfkd = normalizers.NFKD()
    compatibilities, points = [], []
    for c in POINTS:
        full = unicodedata.normalize("NFKD", chr(c))
        if not unicodedata.decomposition(chr(c)).startswith("<") or nfkd.normalize_str(chr(c)) != full:
            continue
        compatibilities.append((c, len(points), len(full)))
        points += map(ord, full)
    emit("kCompatibilities", "Compatibility", compatibilities)
    print("constexpr uint32_t kCompatibilityPoints[] = {")
    for at in range(0, len(points), 16):
        print("    " + " ".join(f"0x{p:x}," for p in points[at:at + 16]))
    print("};")
    classes = []
    for c in POINTS:
        k = unicodedata.combining(chr(c))
        # A mark that `tokenizers` does not order among others is none to it.
        pair = "\u0301" + chr(c) if k < 230 else chr(c) + "\u0316"
        if not k or nfd.normalize_str(pair) == pair:
            continue
        if classes and classes[-1][1] == c - 1 and classes[-1][2] == k:
            classes[-1] = (classes[-1][0], c, k)
        else:
            classes.append((c, c, k))
    emit("kCombiningClasses", "CategoryRange", classes)
    # What Python's str methods ask, as far as the general categories do not say it.
    category = unicodedata.category
    emit("kLowercaseExtra", "CodeRange", where(lambda c: c.islower() and category(c) != "Ll"))
    emit("kUppercaseExtra", "CodeRange", where(lambda c: c.isupper() and category(c) != "Lu"))
    # A final sigma is one after a cased letter, over what is ignored between them: that is how it is found here.
    ignored = lambda c: ("A" + c + "\u03a3").lower()[-1] == "\u03c2" != (c + "\u03a3").lower()[-1]
    emit("kCaseIgnorableExtra", "CodeRange", where(lambda c: ignored(c) and category(c) not in ("Mn", "Me", "Cf", "Lm", "Sk")))
    letters = ("Lu", "Ll", "Lt", "Lm", "Lo", "Nl")
    emit("kIdentifierStartFlips", "CodeRange", where(lambda c: c.isidentifier() != (category(c) in letters)))
    emit("kIdentifierFlips", "CodeRange",
         where(lambda c: ("a" + c).isidentifier() != (category(c) in (*letters, "Mn", "Mc", "Nd", "Pc"))))
    emit("kDigitExtra", "CodeRange", where(lambda c: c.isdigit() and category(c) != "Nd"))
    emit("kNumericExtra", "CodeRange", where(lambda c: c.isnumeric() and category(c) not in ("Nd", "Nl", "No")))
    folded = [(c, chr(c).casefold()) for c in POINTS if chr(c).casefold() != chr(c).lower()]
    emit("kFoldRuns", "CaseRun", compress([(c, ord(f) - c) for c, f in folded if len(f) == 1]))
    emit("kLongFold", "LongCase", [(c, *[ord(x) for x in (f + "\0\0")[:3]]) for c, f in folded if len(f) > 1])


main()
