#include "text/unicode.h"

#include <algorithm>
#include <map>
#include <unordered_map>

#include "text/utf8.h"

namespace temper::text {
namespace {

struct CodeRange { uint32_t first, last; };
struct CategoryRange { uint32_t first, last; uint8_t value; };
struct CaseRun { uint32_t first, last; uint32_t step; int32_t delta; };
struct LongCase { uint32_t cp, a, b, c; };
struct Decomposition { uint32_t cp, a, b; };
struct Composition { uint32_t a, b, cp; };
struct Compatibility { uint32_t cp, at, count; };  // kCompatibilityPoints[at..at+count)

#include "text/unicode_tables.inc"

constexpr const char* kCategories[] = {"Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "No", "Pc", "Pd", "Ps",
                                       "Pe", "Pi", "Pf", "Po", "Sm", "Sc", "Sk", "So", "Zs", "Zl", "Zp", "Cc", "Cf", "Co"};
constexpr const char* kScripts[] = {"Han", "Hiragana", "Katakana", "Hangul"};
constexpr uint32_t kLastCodePoint = 0x10FFFF;

template <size_t n>
CodeSet FromRanges(const CodeRange (&ranges)[n]) {
  CodeSet out;
  for (const CodeRange& r : ranges) out.emplace_back(r.first, r.last);
  return out;
}

template <size_t n>
uint32_t MapCase(const CaseRun (&runs)[n], uint32_t cp) {
  // Runs of step 2 may interleave, so the last run that starts at or before cp need not be the one; look back a few.
  const CaseRun* end =
      std::upper_bound(std::begin(runs), std::end(runs), cp, [](uint32_t c, const CaseRun& r) { return c < r.first; });
  for (int back = 0; back < 4 && end != std::begin(runs); ++back) {
    --end;
    if (cp >= end->first && cp <= end->last && (cp - end->first) % end->step == 0) {
      return static_cast<uint32_t>(static_cast<int32_t>(cp) + end->delta);
    }
  }
  return cp;
}

template <size_t n>
const LongCase* FindLong(const LongCase (&table)[n], uint32_t cp) {
  auto it = std::lower_bound(std::begin(table), std::end(table), cp, [](const LongCase& l, uint32_t c) { return l.cp < c; });
  return it != std::end(table) && it->cp == cp ? it : nullptr;
}

void AppendLong(const LongCase& l, std::string* out) {
  for (uint32_t c : {l.a, l.b, l.c}) {
    if (c) AppendUtf8(c, out);
  }
}

void AppendUpper(uint32_t cp, std::string* out) {
  if (const LongCase* l = FindLong(kLongUpper, cp)) return AppendLong(*l, out);
  AppendUtf8(SimpleUpper(cp), out);
}

template <size_t n>
bool InTable(const CodeRange (&table)[n], uint32_t cp) {
  auto it = std::upper_bound(std::begin(table), std::end(table), cp, [](uint32_t c, const CodeRange& r) { return c < r.first; });
  return it != std::begin(table) && cp <= std::prev(it)->last;
}

CodeSet Categories(std::initializer_list<const char*> names) {
  CodeSet out;
  for (const char* name : names) out = Union(out, *UnicodeProperty(name));
  return out;
}

bool IsCased(uint32_t cp) { return IsLowercase(cp) || IsUppercase(cp) || IsTitlecase(cp); }

bool IsCaseIgnorable(uint32_t cp) {
  static const CodeSet ignorable = Categories({"Mn", "Me", "Cf", "Lm", "Sk"});
  return Contains(ignorable, cp) || InTable(kCaseIgnorableExtra, cp);
}

// A capital sigma is final after a cased letter and before none, over what is ignored between them.
bool IsFinalSigma(const std::vector<uint32_t>& points, size_t at) {
  size_t before = at, after = at + 1;
  while (before > 0 && IsCaseIgnorable(points[before - 1])) --before;
  if (before == 0 || !IsCased(points[before - 1])) return false;
  while (after < points.size() && IsCaseIgnorable(points[after])) ++after;
  return after == points.size() || !IsCased(points[after]);
}

void AppendLower(const std::vector<uint32_t>& points, size_t at, std::string* out) {
  const uint32_t cp = points[at];
  if (cp == 0x130) return (void)out->append("i\u0307");  // the one lower-case mapping of two code points
  AppendUtf8(cp == 0x3A3 && IsFinalSigma(points, at) ? 0x3C2 : SimpleLower(cp), out);
}

void AppendTitle(uint32_t cp, std::string* out) {
  if (IsTitlecase(cp)) {
    AppendUtf8(cp, out);
  } else if (const uint32_t t = MapCase(kTitleRuns, cp); t != cp) {
    AppendUtf8(t, out);
  } else if (const LongCase* l = FindLong(kLongUpper, cp)) {
    AppendUtf8(l->a, out);
    for (uint32_t c : {l->b, l->c}) {
      if (c) AppendUtf8(cp == 0x149 ? c : SimpleLower(c), out);  // U+0149 is an apostrophe and a capital N
    }
  } else {
    AppendUtf8(SimpleUpper(cp), out);
  }
}

int CombiningClass(uint32_t cp) {
  auto it = std::upper_bound(std::begin(kCombiningClasses), std::end(kCombiningClasses), cp,
                             [](uint32_t c, const CategoryRange& r) { return c < r.first; });
  if (it == std::begin(kCombiningClasses)) return 0;
  --it;
  return cp <= it->last ? it->value : 0;
}

// Hangul syllables are composed by arithmetic (Unicode 3.12).
constexpr uint32_t kSBase = 0xAC00, kLBase = 0x1100, kVBase = 0x1161, kTBase = 0x11A7, kLCount = 19, kVCount = 21, kTCount = 28,
                   kSCount = kLCount * kVCount * kTCount;

void Decompose(uint32_t cp, bool compatibility, std::vector<uint32_t>* out) {
  if (cp >= kSBase && cp < kSBase + kSCount) {
    const uint32_t s = cp - kSBase;
    out->push_back(kLBase + s / (kVCount * kTCount));
    out->push_back(kVBase + s % (kVCount * kTCount) / kTCount);
    if (s % kTCount) out->push_back(kTBase + s % kTCount);
    return;
  }
  auto it = std::lower_bound(std::begin(kDecompositions), std::end(kDecompositions), cp,
                             [](const Decomposition& d, uint32_t c) { return d.cp < c; });
  if (it != std::end(kDecompositions) && it->cp == cp) {
    Decompose(it->a, compatibility, out);
    if (it->b) Decompose(it->b, compatibility, out);
    return;
  }
  if (compatibility) {
    auto c = std::lower_bound(std::begin(kCompatibilities), std::end(kCompatibilities), cp,
                              [](const Compatibility& k, uint32_t point) { return k.cp < point; });
    if (c != std::end(kCompatibilities) && c->cp == cp) {
      out->insert(out->end(), kCompatibilityPoints + c->at, kCompatibilityPoints + c->at + c->count);
      return;
    }
  }
  out->push_back(cp);
}

uint32_t Compose(uint32_t a, uint32_t b) {
  if (a >= kLBase && a < kLBase + kLCount && b >= kVBase && b < kVBase + kVCount) {
    return kSBase + ((a - kLBase) * kVCount + (b - kVBase)) * kTCount;
  }
  if (a >= kSBase && a < kSBase + kSCount && (a - kSBase) % kTCount == 0 && b > kTBase && b < kTBase + kTCount) {
    return a + (b - kTBase);
  }
  auto it = std::lower_bound(std::begin(kCompositions), std::end(kCompositions), std::make_pair(a, b),
                             [](const Composition& c, const std::pair<uint32_t, uint32_t>& key) {
                               return std::make_pair(c.a, c.b) < key;
                             });
  return it != std::end(kCompositions) && it->a == a && it->b == b ? it->cp : 0;
}

std::vector<uint32_t> Decomposed(const std::vector<uint32_t>& points, bool compatibility) {
  std::vector<uint32_t> out;
  for (uint32_t cp : points) Decompose(cp, compatibility, &out);
  for (size_t i = 0; i < out.size();) {  // canonical order within each run of marks
    if (CombiningClass(out[i]) == 0) {
      ++i;
      continue;
    }
    size_t end = i;
    while (end < out.size() && CombiningClass(out[end]) != 0) ++end;
    std::stable_sort(out.begin() + static_cast<long>(i), out.begin() + static_cast<long>(end),
                     [](uint32_t x, uint32_t y) { return CombiningClass(x) < CombiningClass(y); });
    i = end;
  }
  return out;
}

bool IsAscii(std::string_view s) {
  return std::all_of(s.begin(), s.end(), [](char c) { return static_cast<unsigned char>(c) < 0x80; });
}

}  // namespace

CodeSet Normalized(CodeSet ranges) {
  std::sort(ranges.begin(), ranges.end());
  CodeSet out;
  for (const auto& [a, b] : ranges) {
    if (!out.empty() && a <= out.back().second + 1) {
      out.back().second = std::max(out.back().second, b);
    } else {
      out.emplace_back(a, b);
    }
  }
  return out;
}

CodeSet Union(const CodeSet& a, const CodeSet& b) {
  CodeSet all = a;
  all.insert(all.end(), b.begin(), b.end());
  return Normalized(std::move(all));
}

CodeSet Complement(const CodeSet& a) {
  CodeSet out;
  uint32_t next = 0;
  for (const auto& [first, last] : a) {
    if (first > next) out.emplace_back(next, first - 1);
    next = last + 1;
  }
  if (next <= kLastCodePoint) out.emplace_back(next, kLastCodePoint);
  return out;
}

CodeSet Intersection(const CodeSet& a, const CodeSet& b) { return Complement(Union(Complement(a), Complement(b))); }

bool Contains(const CodeSet& set, uint32_t cp) {
  auto it = std::upper_bound(set.begin(), set.end(), cp, [](uint32_t c, const auto& r) { return c < r.first; });
  return it != set.begin() && cp <= std::prev(it)->second;
}

std::optional<CodeSet> UnicodeProperty(std::string_view name) {
  CodeSet out;
  for (const CategoryRange& r : kCategoryRanges) {
    const std::string_view category = kCategories[r.value];
    if (name == category || (name.size() == 1 && name[0] == category[0])) out.emplace_back(r.first, r.last);
  }
  for (const CategoryRange& r : kScriptRanges) {
    if (name == kScripts[r.value]) out.emplace_back(r.first, r.last);
  }
  if (out.empty() || name == "C") return std::nullopt;  // C holds the unassigned, which the tables do not
  return Normalized(std::move(out));
}

const CodeSet& SpaceSet() {
  static const CodeSet set = FromRanges(kSpaceRanges);
  return set;
}

const CodeSet& WordSet() {
  static const CodeSet set = Normalized(FromRanges(kWordRanges));
  return set;
}

const CodeSet& BracketWordSet() {
  static const CodeSet set = Intersection(WordSet(), Complement(FromRanges(kUnbracketedWordRanges)));
  return set;
}

const CodeSet& RustWordSet() {
  static const CodeSet set = FromRanges(kRustWordRanges);
  return set;
}

const CodeSet& MarkSet() {
  static const CodeSet set = FromRanges(kMarkRanges);
  return set;
}

const CodeSet& DigitSet() {
  static const CodeSet set = *UnicodeProperty("Nd");
  return set;
}

const CodeSet& NumericSet() {
  static const CodeSet set = FromRanges(kNumericRanges);
  return set;
}

const CodeSet& PunctuationSet() {
  static const CodeSet set = FromRanges(kPunctuationRanges);
  return set;
}

uint32_t SimpleLower(uint32_t cp) { return MapCase(kLowerRuns, cp); }
uint32_t SimpleUpper(uint32_t cp) { return MapCase(kUpperRuns, cp); }

std::string Upper(std::string_view s) {
  std::string out;
  for (uint32_t cp : ToCodePoints(s)) AppendUpper(cp, &out);
  return out;
}

std::string Lower(std::string_view s) {
  std::string out;
  const std::vector<uint32_t> points = ToCodePoints(s);
  for (size_t i = 0; i < points.size(); ++i) AppendLower(points, i, &out);
  return out;
}

std::string CaseFold(std::string_view s) {
  std::string out;
  for (uint32_t cp : ToCodePoints(s)) {
    if (const LongCase* l = FindLong(kLongFold, cp)) {
      AppendLong(*l, &out);
    } else if (const uint32_t folded = MapCase(kFoldRuns, cp); folded != cp) {
      AppendUtf8(folded, &out);
    } else if (cp == 0x130) {
      out += "i\u0307";
    } else if (!(cp >= 0x13A0 && cp <= 0x13F5)) {  // Cherokee folds to its capitals
      AppendUtf8(SimpleLower(cp), &out);
    } else {
      AppendUtf8(cp, &out);
    }
  }
  return out;
}

std::string Title(std::string_view s) {
  std::string out;
  bool in_word = false;
  const std::vector<uint32_t> points = ToCodePoints(s);
  for (size_t i = 0; i < points.size(); ++i) {
    if (in_word) {
      AppendLower(points, i, &out);
    } else {
      AppendTitle(points[i], &out);
    }
    in_word = IsCased(points[i]);
  }
  return out;
}

std::string Capitalize(std::string_view s) {
  std::string out;
  const std::vector<uint32_t> points = ToCodePoints(s);
  for (size_t i = 0; i < points.size(); ++i) {
    if (i == 0) {
      AppendTitle(points[i], &out);
    } else {
      AppendLower(points, i, &out);
    }
  }
  return out;
}

std::string SwapCase(std::string_view s) {
  std::string out;
  const std::vector<uint32_t> points = ToCodePoints(s);
  for (size_t i = 0; i < points.size(); ++i) {
    if (IsUppercase(points[i])) {
      AppendLower(points, i, &out);
    } else if (IsLowercase(points[i])) {
      AppendUpper(points[i], &out);
    } else {
      AppendUtf8(points[i], &out);
    }
  }
  return out;
}

bool IsLowercase(uint32_t cp) {
  static const CodeSet set = Categories({"Ll"});
  return Contains(set, cp) || InTable(kLowercaseExtra, cp);
}

bool IsUppercase(uint32_t cp) {
  static const CodeSet set = Categories({"Lu"});
  return Contains(set, cp) || InTable(kUppercaseExtra, cp);
}

bool IsTitlecase(uint32_t cp) {
  static const CodeSet set = Categories({"Lt"});
  return Contains(set, cp);
}

bool IsAlpha(uint32_t cp) {
  static const CodeSet set = Categories({"L"});
  return Contains(set, cp);
}

bool IsPythonDigit(uint32_t cp) { return Contains(DigitSet(), cp) || InTable(kDigitExtra, cp); }
bool IsPythonNumeric(uint32_t cp) { return Contains(NumericSet(), cp) || InTable(kNumericExtra, cp); }

bool IsPrintable(uint32_t cp) {
  static const CodeSet set = Union(Categories({"L", "M", "N", "P", "S"}), {{' ', ' '}});
  return Contains(set, cp);
}

bool BeginsIdentifier(uint32_t cp) {
  static const CodeSet set = Categories({"L", "Nl"});
  return Contains(set, cp) != InTable(kIdentifierStartFlips, cp);
}

bool ContinuesIdentifier(uint32_t cp) {
  static const CodeSet set = Categories({"L", "Nl", "Mn", "Mc", "Nd", "Pc"});
  return Contains(set, cp) != InTable(kIdentifierFlips, cp);
}

int DecimalValue(uint32_t cp) {
  const CodeSet& digits = DigitSet();
  auto it = std::upper_bound(digits.begin(), digits.end(), cp, [](uint32_t c, const auto& r) { return c < r.first; });
  if (it == digits.begin() || cp > std::prev(it)->second) return -1;
  return static_cast<int>((cp - std::prev(it)->first) % 10);  // each script has its ten in a row
}

namespace {

// Those equal without case, and the first of them.
struct EqualCase {
  std::unordered_map<uint32_t, uint32_t> first;
  std::map<uint32_t, CodeSet> all;  // by the first
};

const EqualCase& EqualCases() {
  static const EqualCase cases = [] {
    EqualCase out;
    for (const CaseRun& r : kEqualCaseRuns) {
      for (uint32_t c = r.first; c <= r.last; c += r.step) {
        const auto first = static_cast<uint32_t>(static_cast<int32_t>(c) + r.delta);
        out.first[c] = first;
        out.all.try_emplace(first, CodeSet{{first, first}}).first->second.emplace_back(c, c);
      }
    }
    return out;
  }();
  return cases;
}

uint32_t FirstWithoutCase(uint32_t cp) {
  const auto it = EqualCases().first.find(cp);
  return it == EqualCases().first.end() ? cp : it->second;
}

}  // namespace

CodeSet WithCaseVariants(const CodeSet& set) {
  CodeSet out = set;
  if (set.size() == 1 && set[0].first == set[0].second) {  // a written character, of which patterns have many
    const auto it = EqualCases().all.find(FirstWithoutCase(set[0].first));
    return it == EqualCases().all.end() ? set : Normalized(it->second);
  }
  for (const auto& [first, all] : EqualCases().all) {
    if (std::any_of(all.begin(), all.end(), [&](const auto& c) { return Contains(set, c.first); })) {
      out.insert(out.end(), all.begin(), all.end());
    }
  }
  return Normalized(std::move(out));
}

const CodeSet& SeveralWithoutCaseSet() {
  static const CodeSet set = [] {
    CodeSet out;
    for (const LongCase& l : kSeveralWithoutCase) out.emplace_back(l.cp, l.cp);
    return Normalized(std::move(out));
  }();
  return set;
}

bool IsOneWithoutCase(const std::vector<uint32_t>& points) {
  return std::any_of(std::begin(kSeveralWithoutCase), std::end(kSeveralWithoutCase), [&](const LongCase& l) {
    const uint32_t several[] = {l.a, l.b, l.c};
    if (points.size() != (l.c ? 3u : 2u)) return false;
    return std::equal(points.begin(), points.end(), several,
                      [](uint32_t x, uint32_t y) { return FirstWithoutCase(x) == FirstWithoutCase(y); });
  });
}

bool IsPythonSpace(uint32_t cp) {
  return (cp >= 0x9 && cp <= 0xD) || (cp >= 0x1C && cp <= 0x20) || cp == 0x85 || cp == 0xA0 || cp == 0x1680 ||
         (cp >= 0x2000 && cp <= 0x200A) || cp == 0x2028 || cp == 0x2029 || cp == 0x202F || cp == 0x205F || cp == 0x3000;
}

namespace {

std::string Decomposed(std::string_view s, bool compatibility) {
  if (IsAscii(s)) return std::string(s);
  const std::vector<uint32_t> d = Decomposed(ToCodePoints(s), compatibility);
  return FromCodePoints(d.data(), d.data() + d.size());
}

std::string Composed(std::string_view s, bool compatibility) {
  if (IsAscii(s)) return std::string(s);
  const std::vector<uint32_t> points = ToCodePoints(s);
  // Below U+0300 nothing composes and nothing is composed anew.
  if (!compatibility && std::all_of(points.begin(), points.end(), [](uint32_t cp) { return cp < 0x300; })) return std::string(s);
  std::vector<uint32_t> out;
  size_t starter = SIZE_MAX;
  int last_class = 0;
  for (uint32_t cp : Decomposed(points, compatibility)) {
    const int k = CombiningClass(cp);
    if (starter != SIZE_MAX && (last_class < k || out.size() == starter + 1)) {
      if (const uint32_t composed = Compose(out[starter], cp); composed && (out.size() == starter + 1 || last_class < k)) {
        out[starter] = composed;
        continue;
      }
    }
    out.push_back(cp);
    if (k == 0) {
      starter = out.size() - 1;
      last_class = 0;
    } else {
      last_class = k;
    }
  }
  return FromCodePoints(out.data(), out.data() + out.size());
}

}  // namespace

std::string ToNfd(std::string_view s) { return Decomposed(s, false); }
std::string ToNfkd(std::string_view s) { return Decomposed(s, true); }
std::string ToNfc(std::string_view s) { return Composed(s, false); }
std::string ToNfkc(std::string_view s) { return Composed(s, true); }

std::string TokenizerLower(std::string_view s) {
  std::string out;
  for (uint32_t cp : ToCodePoints(s)) {
    if (cp == 0x130) {
      out += "i\u0307";
    } else {
      AppendUtf8(MapCase(kTokenizerLowerRuns, cp), &out);
    }
  }
  return out;
}

}  // namespace temper::text
