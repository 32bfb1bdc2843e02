// What Hugging Face's tokenizers and Python know about code points. Tables: text/unicode_tables.inc (generated).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace temper::text {

// A set of code points: sorted, disjoint, inclusive ranges.
using CodeSet = std::vector<std::pair<uint32_t, uint32_t>>;

CodeSet Normalized(CodeSet ranges);                      // sorts and joins
CodeSet Union(const CodeSet& a, const CodeSet& b);
CodeSet Complement(const CodeSet& a);
CodeSet Intersection(const CodeSet& a, const CodeSet& b);
bool Contains(const CodeSet& set, uint32_t cp);

// \p{NAME}: a general category ("Lu", "L"), or one of the scripts Han, Hiragana, Katakana, Hangul; nullopt when unknown.
std::optional<CodeSet> UnicodeProperty(std::string_view name);
const CodeSet& SpaceSet();   // \s of the tokenizers' engine
const CodeSet& WordSet();    // \w
const CodeSet& BracketWordSet();  // \w in brackets, where that engine knows a few less
const CodeSet& RustWordSet();     // \w of the tokenizers' other engine: Whitespace and `single_word`
const CodeSet& MarkSet();         // what StripAccents takes away
const CodeSet& DigitSet();   // \d = Nd
const CodeSet& NumericSet();      // what Digits splits at
const CodeSet& PunctuationSet();  // what Punctuation splits at

// Python's str.upper, lower, casefold, title, capitalize and swapcase.
std::string Upper(std::string_view s);
std::string Lower(std::string_view s);
std::string CaseFold(std::string_view s);
std::string Title(std::string_view s);
std::string Capitalize(std::string_view s);
std::string SwapCase(std::string_view s);
uint32_t SimpleLower(uint32_t cp);
uint32_t SimpleUpper(uint32_t cp);
// All code points equal to one of `set` when the tokenizers' engine ignores case, those of the set included.
CodeSet WithCaseVariants(const CodeSet& set);
// The code points that equal two or three others when case is ignored (ß and "ss").
const CodeSet& SeveralWithoutCaseSet();
// Whether `points` are two or three that equal one.
bool IsOneWithoutCase(const std::vector<uint32_t>& points);

// What Python's str methods hold of one character: isspace (what str.strip() strips), islower, isupper, istitle's capitals,
// isalpha, isdigit, isnumeric, isprintable, and what may begin or continue an identifier.
bool IsPythonSpace(uint32_t cp);
bool IsLowercase(uint32_t cp);
bool IsUppercase(uint32_t cp);
bool IsTitlecase(uint32_t cp);
bool IsAlpha(uint32_t cp);
bool IsPythonDigit(uint32_t cp);
bool IsPythonNumeric(uint32_t cp);
bool IsPrintable(uint32_t cp);
bool BeginsIdentifier(uint32_t cp);
bool ContinuesIdentifier(uint32_t cp);
// 0 to 9 of a decimal digit of any script (Nd), else -1.
int DecimalValue(uint32_t cp);

// Composition and decomposition, canonical (NFC, NFD) and with compatibility characters replaced (NFKC, NFKD).
std::string ToNfc(std::string_view s);
std::string ToNfd(std::string_view s);
std::string ToNfkc(std::string_view s);
std::string ToNfkd(std::string_view s);
// The lower case of each code point by itself, as the normalizer Lowercase writes it.
std::string TokenizerLower(std::string_view s);

}  // namespace temper::text
