#include "text/regex.h"

#include <algorithm>
#include <array>
#include <string>
#include <unordered_set>

#include "text/utf8.h"

namespace temper::text {
namespace {

constexpr size_t kMaxPattern = 1 << 16;      // bytes
constexpr size_t kMaxInstructions = 1 << 16;
constexpr size_t kMaxFirstClasses = 256;     // a pattern of more classes is matched without looking ahead
constexpr int kMaxDepth = 100;
constexpr size_t kRememberAfter = 1 << 14;   // steps back, beyond 64 for each code point, before failed states are remembered

// A set of code points with a fast path for ASCII, and for large sets a bit for each code point of the pages that are mixed.
struct CharClass {
  static constexpr size_t kManyRanges = 16;
  static constexpr uint32_t kPage = 256;
  CodeSet set;
  bool ascii[128] = {};
  std::vector<uint16_t> pages;                 // index into `bits` by code point / kPage; empty for small sets
  std::vector<std::array<uint64_t, 4>> bits;   // [0] holds none, [1] all
  explicit CharClass(CodeSet s) : set(std::move(s)) {
    for (uint32_t c = 0; c < 128; ++c) ascii[c] = Contains(set, c);
    if (set.size() <= kManyRanges) return;
    pages.resize(0x110000 / kPage);
    bits = {{0, 0, 0, 0}, {~0ULL, ~0ULL, ~0ULL, ~0ULL}};
    for (const auto& [first, last] : set) {
      for (uint32_t page = first / kPage; page <= last / kPage; ++page) {
        if (first <= page * kPage && last >= page * kPage + kPage - 1) {
          pages[page] = 1;
          continue;
        }
        if (pages[page] == 0) {
          pages[page] = static_cast<uint16_t>(bits.size());
          bits.push_back({});
        }
        for (uint32_t c = std::max(first, page * kPage); c <= std::min(last, page * kPage + kPage - 1); ++c) {
          bits[pages[page]][c % kPage / 64] |= 1ULL << (c % 64);
        }
      }
    }
  }
  bool Has(uint32_t cp) const {
    if (cp < 128) return ascii[cp];
    if (pages.empty()) return Contains(set, cp);
    return bits[pages[cp / kPage]][cp % kPage / 64] >> (cp % 64) & 1;
  }
};

enum class Op : uint8_t {
  kClass,    // one code point of classes[a]
  kRepeat,   // min..max code points of classes[a], greedy; possessive when `flag`
  kSplit,    // try a, then b; with `flag` a is tried only where the next code point is in classes[min]
  kJump,     // to a
  kLook,     // look ahead: run the program at pc+1 up to its kMatch, then go on at a; `flag` = must not match
  kAtomic,   // run pc+1 up to its kMatch, take its end, go on at a
  kBehind,   // the code point before is in classes[a]; `flag` = it must not be (nor does the text's start count)
  kBegin,    // start of text
  kEnd,      // end of text; with `flag` also before a last newline
  kLineBegin,
  kLineEnd,
  kMatch,
};

struct Instruction {
  Op op;
  bool flag = false;
  uint32_t a = 0, b = 0;
  uint32_t min = 0, max = 0;
};

}  // namespace

struct Regex::Program {
  std::vector<Instruction> code;
  std::vector<CharClass> classes;
};

namespace {

struct Node {
  enum class Kind { kEmpty, kClass, kConcat, kAlternate, kRepeat, kLook, kAtomic, kBehind, kAssert } kind = Kind::kEmpty;
  std::vector<Node> children;
  CodeSet set;                    // kClass, kBehind
  uint32_t min = 0, max = 0;      // kRepeat
  bool lazy = false, possessive = false, negative = false;
  bool folded = false;            // kClass: one written character, whatever its case
  Op op = Op::kMatch;             // kAssert
};

constexpr uint32_t kUnbounded = UINT32_MAX;

class PatternParser {
 public:
  explicit PatternParser(std::vector<uint32_t> pattern) : p_(std::move(pattern)) {}

  Result<Node> Parse() {
    Node node = Alternation(0);
    if (problem_.empty() && at_ < p_.size()) Fail("')' without '('");
    if (!problem_.empty()) return InvalidArgument("regular expression, character " + std::to_string(at_) + ": " + problem_);
    return node;
  }

 private:
  void Fail(const std::string& what) {
    if (problem_.empty()) problem_ = what;
  }
  bool More() const { return problem_.empty() && at_ < p_.size(); }
  bool Is(uint32_t c, size_t ahead = 0) const { return at_ + ahead < p_.size() && p_[at_ + ahead] == c; }
  bool Take(uint32_t c) {
    if (!Is(c)) return false;
    ++at_;
    return true;
  }
  bool TakeWord(std::string_view word) {
    for (size_t i = 0; i < word.size(); ++i) {
      if (!Is(static_cast<unsigned char>(word[i]), i)) return false;
    }
    at_ += word.size();
    return true;
  }

  Node Alternation(int depth) {
    Node out;
    if (depth > kMaxDepth) {
      Fail("nested too deeply");
      return out;
    }
    const bool outer_case = ignore_case_;
    out.kind = Node::Kind::kAlternate;
    out.children.push_back(Concatenation(depth));
    while (More() && Take('|')) out.children.push_back(Concatenation(depth));
    ignore_case_ = outer_case;
    if (out.children.size() == 1) {
      Node only = std::move(out.children[0]);
      return only;
    }
    return out;
  }

  Node Concatenation(int depth) {
    Node out;
    out.kind = Node::Kind::kConcat;
    while (More() && !Is('|') && !Is(')')) out.children.push_back(Quantified(depth));
    std::vector<uint32_t> row;
    RefuseSeveral(out, &row);
    return out;
  }

  // Without case a row of characters may equal one ("ss" and ß): that is not implemented. `row`: the folded characters met last.
  void RefuseSeveral(const Node& node, std::vector<uint32_t>* row) {
    if (node.kind == Node::Kind::kConcat) {
      for (const Node& child : node.children) RefuseSeveral(child, row);
      return;
    }
    if (!node.folded) return row->clear();
    row->push_back(node.set[0].first);
    for (size_t n = 2; n <= std::min<size_t>(3, row->size()); ++n) {
      if (!IsOneWithoutCase({row->end() - static_cast<long>(n), row->end()})) continue;
      Fail("ignoring the case of '" + FromCodePoints(&*(row->end() - static_cast<long>(n)), &*row->begin() + row->size()) +
           "', which then equals one character, is not supported");
    }
  }

  Node Quantified(int depth) {
    Node atom = Atom(depth);
    for (int quantifiers = 0; More(); ++quantifiers) {
      uint32_t min = 0, max = 0;
      const bool braces = Is('{');
      if (Take('?')) {
        max = 1;
      } else if (Take('*')) {
        max = kUnbounded;
      } else if (Take('+')) {
        min = 1, max = kUnbounded;
      } else if (!braces || !Braces(&min, &max)) {
        break;
      }
      if (min == 1 && max == 1 && !Is('?')) continue;
      if (quantifiers > 8) Fail("too many quantifiers in a row");
      if (atom.kind == Node::Kind::kAssert || atom.kind == Node::Kind::kLook || atom.kind == Node::Kind::kBehind) {
        Fail("repetition of an assertion is not supported");
      }
      Node repeat;
      repeat.kind = Node::Kind::kRepeat;
      repeat.min = min, repeat.max = max;
      if (Take('?')) {
        repeat.lazy = true;
      } else if (!braces && Take('+')) {  // in Oniguruma's Ruby syntax {n,m}+ is a repetition of a repetition
        repeat.possessive = true;
      }
      repeat.children.push_back(std::move(atom));
      atom = std::move(repeat);
    }
    return atom;
  }

  bool Number(uint32_t* out) {
    if (!More() || p_[at_] < '0' || p_[at_] > '9') return false;
    uint32_t v = 0;
    while (at_ < p_.size() && p_[at_] >= '0' && p_[at_] <= '9') v = std::min<uint32_t>(v * 10 + (p_[at_++] - '0'), 100000);
    *out = v;
    return true;
  }

  // {n}, {n,}, {,m}, {n,m}; anything else is a literal brace.
  bool Braces(uint32_t* min, uint32_t* max) {
    const size_t start = at_;
    ++at_;
    const bool low = Number(min);
    if (!low) *min = 0;
    if (Take(',')) {
      if (!Number(max)) {
        *max = kUnbounded;
        if (!low) {
          at_ = start;
          return false;
        }
      }
    } else {
      *max = *min;
      if (!low) {
        at_ = start;
        return false;
      }
    }
    if (!Take('}')) {
      at_ = start;
      return false;
    }
    if (*min > 1000 || (*max != kUnbounded && *max > 1000)) Fail("a repetition count above 1000");
    if (*max < *min) Fail("a repetition whose maximum is below its minimum");
    return true;
  }

  Node ClassNode(CodeSet set) {
    Node out;
    out.kind = Node::Kind::kClass;
    out.set = std::move(set);
    return out;
  }

  // Oniguruma folds written characters and bracketed classes, but neither \p{...} nor \w and their kin.
  Node Literal(uint32_t c) {
    if (!ignore_case_) return ClassNode({{c, c}});
    if (Contains(SeveralWithoutCaseSet(), c)) FailSeveral(c);
    Node out = ClassNode(WithCaseVariants({{c, c}}));
    out.folded = true;
    return out;
  }

  void FailSeveral(uint32_t c) {
    Fail("ignoring the case of '" + FromCodePoints(&c, &c + 1) + "', which then equals several characters, is not supported");
  }

  Node Atom(int depth) {
    Node out;
    const uint32_t c = p_[at_];
    if (Take('(')) return Group(depth);
    if (Take('[')) return ClassNode(BracketClass(depth, true));
    if (Take('.')) return ClassNode(Complement({{'\n', '\n'}}));
    if (Take('^')) return Assert(Op::kLineBegin);
    if (Take('$')) return Assert(Op::kLineEnd);
    if (c == '*' || c == '+' || c == '?') {
      Fail("a quantifier without anything before it");
      return out;
    }
    if (Take('\\')) {
      if (Take('A')) return Assert(Op::kBegin);
      if (Take('z')) return Assert(Op::kEnd);
      if (Take('Z')) {
        out = Assert(Op::kEnd);
        out.negative = true;
        return out;
      }
      CodeSet set = Escape(false);
      return set.size() == 1 && set[0].first == set[0].second ? Literal(set[0].first) : ClassNode(std::move(set));
    }
    ++at_;
    return Literal(c);
  }

  Node Assert(Op op) {
    Node out;
    out.kind = Node::Kind::kAssert;
    out.op = op;
    return out;
  }

  Node Group(int depth) {
    Node out;
    if (Take('?')) {
      if (Take(':')) {
        out = Alternation(depth + 1);
      } else if (Is('=') || Is('!')) {
        out.kind = Node::Kind::kLook;
        out.negative = p_[at_++] == '!';
        out.children.push_back(Alternation(depth + 1));
      } else if (Take('>')) {
        out.kind = Node::Kind::kAtomic;
        out.children.push_back(Alternation(depth + 1));
      } else if (TakeWord("<=") || TakeWord("<!")) {
        out.kind = Node::Kind::kBehind;
        out.negative = p_[at_ - 1] == '!';
        Node inner = Alternation(depth + 1);
        while (inner.kind == Node::Kind::kConcat && inner.children.size() == 1) {
          Node only = std::move(inner.children[0]);
          inner = std::move(only);
        }
        if (inner.kind != Node::Kind::kClass) Fail("a look-behind of more than one character is not supported");
        out.set = inner.set;
      } else if (TakeWord("i:")) {
        const bool outer = ignore_case_;
        ignore_case_ = true;
        out = Alternation(depth + 1);
        ignore_case_ = outer;
      } else if (TakeWord("i)")) {
        ignore_case_ = true;  // up to the end of the enclosing group
        out.kind = Node::Kind::kConcat;
        return out;
      } else {
        Fail("this kind of group '(?' is not supported");
      }
    } else {
      out = Alternation(depth + 1);
    }
    if (!Take(')')) Fail("'(' without ')'");
    return out;
  }

  // After a backslash: a set, usually of one code point.
  CodeSet Escape(bool bracketed) {
    if (!More()) {
      Fail("a backslash at the end");
      return {};
    }
    const uint32_t c = p_[at_++];
    switch (c) {
      case 's': return SpaceSet();
      case 'S': return Complement(SpaceSet());
      case 'd': return DigitSet();
      case 'D': return Complement(DigitSet());
      case 'w': return bracketed ? BracketWordSet() : WordSet();
      case 'W': return Complement(bracketed ? BracketWordSet() : WordSet());
      case 'n': return {{'\n', '\n'}};
      case 'r': return {{'\r', '\r'}};
      case 't': return {{'\t', '\t'}};
      case 'v': return {{'\v', '\v'}};
      case 'f': return {{'\f', '\f'}};
      case 'a': return {{7, 7}};
      case 'e': return {{27, 27}};
      case 'p':
      case 'P': return Property(c == 'P');
      case 'x':
      case 'u': return Hex(c);
      default: break;
    }
    if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9')) {
      Fail(std::string("the escape \\") + static_cast<char>(c) + " is not supported");
      return {};
    }
    return {{c, c}};
  }

  CodeSet Property(bool negative) {
    std::string name;
    if (!Take('{')) {
      Fail("\\p needs {NAME}");
      return {};
    }
    if (Take('^')) negative = !negative;
    while (More() && !Is('}')) AppendUtf8(p_[at_++], &name);
    if (!Take('}')) Fail("\\p{ without }");
    static constexpr std::pair<const char*, const char*> kLongNames[] = {
        {"Letter", "L"}, {"Number", "N"}, {"Punctuation", "P"}, {"Symbol", "S"}, {"Mark", "M"}, {"Separator", "Z"}};
    for (const auto& [full, brief] : kLongNames) {
      if (name == full) name = brief;
    }
    auto set = UnicodeProperty(name);
    if (!set) {
      Fail("the property \\p{" + name + "} is not supported");
      return {};
    }
    return negative ? Complement(*set) : *set;
  }

  CodeSet Hex(uint32_t kind) {
    uint32_t v = 0;
    size_t digits = 0;
    const bool braced = kind == 'x' && Take('{');
    const size_t most = braced ? 8 : kind == 'x' ? 2 : 4;
    while (More() && digits < most) {
      const uint32_t c = p_[at_];
      int d = c >= '0' && c <= '9' ? static_cast<int>(c - '0') : c >= 'a' && c <= 'f' ? static_cast<int>(c - 'a' + 10)
              : c >= 'A' && c <= 'F' ? static_cast<int>(c - 'A' + 10) : -1;
      if (d < 0) break;
      v = v * 16 + static_cast<uint32_t>(d);
      ++digits, ++at_;
    }
    if (digits == 0 || (kind == 'u' && digits != 4) || (braced && !Take('}')) || v > 0x10FFFF) Fail("a malformed hexadecimal escape");
    return {{v, v}};
  }

  // After '[': up to and including ']'. `outermost`: not within another, which alone ignores case.
  CodeSet BracketClass(int depth, bool outermost) {
    if (depth > kMaxDepth) {
      Fail("nested too deeply");
      return {};
    }
    const bool negative = Take('^');
    CodeSet all;
    bool have_left = false;
    CodeSet left;  // what stands left of the last &&
    bool first = true;
    while (More() && (first || !Is(']'))) {
      first = false;
      if (Is('[') && Is(':', 1)) {
        Fail("POSIX brackets are not supported");
        return {};
      }
      if (Take('[')) {
        all = Union(all, BracketClass(depth + 1, false));
        continue;
      }
      if (TakeWord("&&")) {
        all = Normalized(std::move(all));
        left = have_left ? Intersection(left, all) : all;
        have_left = true;
        all.clear();
        continue;
      }
      CodeSet item = ClassItem();
      const bool single = item.size() == 1 && item[0].first == item[0].second;
      if (single && Is('-') && at_ + 1 < p_.size() && !Is(']', 1) && !Is('[', 1)) {
        ++at_;
        const CodeSet high = ClassItem();
        if (high.size() != 1 || high[0].first != high[0].second || high[0].first < item[0].first) {
          Fail("a malformed range in a character class");
          return {};
        }
        item[0].second = high[0].first;
      }
      all.insert(all.end(), item.begin(), item.end());
    }
    if (!Take(']')) Fail("'[' without ']'");
    all = Normalized(std::move(all));
    if (have_left) all = Intersection(left, all);
    if (outermost && ignore_case_) {
      all = WithCaseVariants(all);
      // Negated it is a class of single characters all the same.
      const CodeSet several = Intersection(all, SeveralWithoutCaseSet());
      if (!several.empty() && !negative) FailSeveral(several[0].first);
    }
    return negative ? Complement(all) : all;
  }

  CodeSet ClassItem() {
    if (!More()) return {};
    if (Take('\\')) {
      if (Take('b')) return {{8, 8}};
      return Escape(true);
    }
    const uint32_t c = p_[at_++];
    return {{c, c}};
  }

  std::vector<uint32_t> p_;
  size_t at_ = 0;
  bool ignore_case_ = false;
  std::string problem_;
};

bool CanBeEmpty(const Node& n) {
  switch (n.kind) {
    case Node::Kind::kClass: return false;
    case Node::Kind::kConcat: return std::all_of(n.children.begin(), n.children.end(), CanBeEmpty);
    case Node::Kind::kAlternate: return std::any_of(n.children.begin(), n.children.end(), CanBeEmpty);
    case Node::Kind::kRepeat: return n.min == 0 || CanBeEmpty(n.children[0]);
    case Node::Kind::kAtomic: return CanBeEmpty(n.children[0]);
    default: return true;
  }
}

class Compiler {
 public:
  explicit Compiler(Regex::Program* program) : code_(program->code), classes_(program->classes) {}

  Status Compile(const Node& node) {
    Emit(node);
    Add(Op::kMatch);
    if (!problem_.empty()) return InvalidArgument("regular expression: " + problem_);
    for (Instruction& i : code_) {
      CodeSet first;
      size_t visits = 0;
      if (i.op != Op::kSplit || !First(i.a, &first, &visits)) continue;
      i.min = AddClass(first);
      i.flag = true;
    }
    return Status::Ok();
  }

 private:
  static constexpr size_t kMaxVisits = 32;

  // Adds to `set` what the program at `pc` can begin with; false when that is anything, or not known with little work.
  bool First(uint32_t pc, CodeSet* set, size_t* visits) const {
    while (++*visits <= kMaxVisits && classes_.size() < kMaxFirstClasses) {
      const Instruction& i = code_[pc];
      switch (i.op) {
        case Op::kClass: *set = Union(*set, classes_[i.a].set); return true;
        case Op::kRepeat:
          *set = Union(*set, classes_[i.a].set);
          if (i.min > 0) return true;
          ++pc;
          break;
        case Op::kSplit:
          if (!First(i.a, set, visits)) return false;
          pc = i.b;
          break;
        case Op::kJump: pc = i.a; break;
        case Op::kLook: pc = i.a; break;
        case Op::kBehind:
        case Op::kBegin:
        case Op::kLineBegin: ++pc; break;
        default: return false;  // what can hold at the end of the text
      }
    }
    return false;
  }

  uint32_t Add(Op op) {
    if (code_.size() >= kMaxInstructions) {
      if (problem_.empty()) problem_ = "too large";  // Emit stops at once, so little more is added
    }
    code_.push_back(Instruction{op});
    return static_cast<uint32_t>(code_.size() - 1);
  }
  uint32_t Here() const { return static_cast<uint32_t>(code_.size()); }
  uint32_t AddClass(const CodeSet& set) {
    for (size_t i = 0; i < classes_.size(); ++i) {
      if (classes_[i].set == set) return static_cast<uint32_t>(i);
    }
    classes_.emplace_back(set);
    return static_cast<uint32_t>(classes_.size() - 1);
  }

  void Emit(const Node& n) {
    if (!problem_.empty()) return;
    switch (n.kind) {
      case Node::Kind::kEmpty: break;
      case Node::Kind::kClass: {
        const uint32_t k = AddClass(n.set);
        code_[Add(Op::kClass)].a = k;
        break;
      }
      case Node::Kind::kConcat:
        for (const Node& c : n.children) Emit(c);
        break;
      case Node::Kind::kAlternate: {
        std::vector<uint32_t> ends;
        for (size_t i = 0; i + 1 < n.children.size(); ++i) {
          const uint32_t split = Add(Op::kSplit);
          code_[split].a = Here();
          Emit(n.children[i]);
          ends.push_back(Add(Op::kJump));
          code_[split].b = Here();
        }
        Emit(n.children.back());
        for (uint32_t e : ends) code_[e].a = Here();
        break;
      }
      case Node::Kind::kRepeat: EmitRepeat(n); break;
      case Node::Kind::kLook:
      case Node::Kind::kAtomic: {
        const uint32_t at = Add(n.kind == Node::Kind::kLook ? Op::kLook : Op::kAtomic);
        code_[at].flag = n.negative;
        Emit(n.children[0]);
        Add(Op::kMatch);
        code_[at].a = Here();
        break;
      }
      case Node::Kind::kBehind: {
        const uint32_t k = AddClass(n.set);
        const uint32_t at = Add(Op::kBehind);
        code_[at].a = k;
        code_[at].flag = n.negative;
        break;
      }
      case Node::Kind::kAssert: code_[Add(n.op)].flag = n.negative; break;
    }
  }

  void EmitRepeat(const Node& n) {
    const Node* body = &n.children[0];
    while (body->kind == Node::Kind::kConcat && body->children.size() == 1) body = &body->children[0];
    if (body->kind == Node::Kind::kClass && !n.lazy) {
      const uint32_t k = AddClass(body->set);
      Instruction& i = code_[Add(Op::kRepeat)];
      i.a = k, i.min = n.min, i.max = n.max, i.flag = n.possessive;
      return;
    }
    if (CanBeEmpty(*body)) {
      problem_ = "repetition of what can be empty is not supported";
      return;
    }
    uint32_t atomic = 0;
    if (n.possessive) atomic = Add(Op::kAtomic);
    for (uint32_t i = 0; i < n.min && problem_.empty(); ++i) Emit(*body);
    auto split = [&](uint32_t at, uint32_t inside, uint32_t after) {
      code_[at].a = n.lazy ? after : inside;
      code_[at].b = n.lazy ? inside : after;
    };
    if (n.max == kUnbounded) {
      const uint32_t loop = Add(Op::kSplit);
      Emit(*body);
      code_[Add(Op::kJump)].a = loop;
      split(loop, loop + 1, Here());
    } else {
      std::vector<uint32_t> splits;
      for (uint32_t i = n.min; i < n.max && problem_.empty(); ++i) {
        splits.push_back(Add(Op::kSplit));
        Emit(*body);
      }
      if (!problem_.empty()) return;
      for (uint32_t s : splits) split(s, s + 1, Here());
    }
    if (n.possessive) {
      Add(Op::kMatch);
      code_[atomic].a = Here();
    }
  }

  std::vector<Instruction>& code_;
  std::vector<CharClass>& classes_;
  std::string problem_;
};

// One search: a backtracking machine with an explicit stack.
class Machine {
 public:
  Machine(const Regex::Program& program, std::span<const uint32_t> text) : program_(program), text_(text) {
    stack_.reserve(16);
  }

  // The end of the match of the program at `pc` on text from `at`, or -1.
  long Run(uint32_t pc, size_t at) {
    const size_t bottom = stack_.size();
    std::vector<uint64_t> entered;  // states of this run, remembered as failed if the run fails
    const long end = Run(pc, at, bottom, &entered);
    stack_.resize(bottom);
    if (end >= 0) {
      for (uint64_t state : entered) failed_.erase(state);
    }
    return end;
  }

 private:
  struct Choice {
    uint32_t pc;
    size_t at;
    size_t least;  // a kRepeat that may still give up code points down to here; SIZE_MAX for a plain alternative
  };

  // A run takes back only choices of its own, above `bottom`.
  long Run(uint32_t pc, size_t at, size_t bottom, std::vector<uint64_t>* entered) {
    auto back = [&]() -> bool {
      while (stack_.size() > bottom) {
        Choice& top = stack_.back();
        if (top.least != SIZE_MAX && top.at > top.least) {
          --top.at;
          pc = top.pc, at = top.at;
          if (top.at == top.least) stack_.pop_back();
        } else {
          pc = top.pc, at = top.at;
          stack_.pop_back();
        }
        // A state entered twice fails twice: the future of (pc, at) depends on nothing else, not even on where the match began.
        if (++steps_ > kRememberAfter + 64 * text_.size()) {
          const uint64_t state = static_cast<uint64_t>(pc) << 40 | at;
          if (!failed_.insert(state).second) continue;
          entered->push_back(state);
        }
        return true;
      }
      return false;
    };
    for (;;) {
      const Instruction& i = program_.code[pc];
      bool ok = true;
      switch (i.op) {
        case Op::kClass:
          ok = at < text_.size() && program_.classes[i.a].Has(text_[at]);
          if (ok) ++at, ++pc;
          break;
        case Op::kRepeat: {
          const CharClass& k = program_.classes[i.a];
          size_t end = at;
          const size_t limit = i.max == kUnbounded ? text_.size() : std::min(text_.size(), at + i.max);
          while (end < limit && k.Has(text_[end])) ++end;
          ok = end - at >= i.min;
          if (!ok) break;
          if (!i.flag && end > at + i.min) stack_.push_back({pc + 1, end, at + i.min});
          at = end;
          ++pc;
          break;
        }
        case Op::kSplit:
          if (i.flag && (at == text_.size() || !program_.classes[i.min].Has(text_[at]))) {
            pc = i.b;
            break;
          }
          stack_.push_back({i.b, at, SIZE_MAX});
          pc = i.a;
          break;
        case Op::kJump: pc = i.a; break;
        case Op::kLook:
          ok = (Run(pc + 1, at) >= 0) != i.flag;
          pc = i.a;
          break;
        case Op::kAtomic: {
          const long end = Run(pc + 1, at);
          ok = end >= 0;
          if (ok) at = static_cast<size_t>(end), pc = i.a;
          break;
        }
        case Op::kBehind:
          ok = (at > 0 && program_.classes[i.a].Has(text_[at - 1])) != i.flag;
          ++pc;
          break;
        case Op::kBegin: ok = at == 0, ++pc; break;
        case Op::kEnd: ok = at == text_.size() || (i.flag && at + 1 == text_.size() && text_[at] == '\n'), ++pc; break;
        case Op::kLineBegin: ok = at == 0 || text_[at - 1] == '\n', ++pc; break;
        case Op::kLineEnd: ok = at == text_.size() || text_[at] == '\n', ++pc; break;
        case Op::kMatch: return static_cast<long>(at);
      }
      if (!ok && !back()) return -1;
    }
  }

  const Regex::Program& program_;
  std::span<const uint32_t> text_;
  std::vector<Choice> stack_;
  size_t steps_ = 0;
  std::unordered_set<uint64_t> failed_;
};

}  // namespace

Regex::Regex(std::unique_ptr<const Program> program) : program_(std::move(program)) {}
Regex::Regex(Regex&&) noexcept = default;
Regex& Regex::operator=(Regex&&) noexcept = default;
Regex::~Regex() = default;

Result<Regex> Regex::Parse(std::string_view pattern) {
  if (pattern.size() > kMaxPattern) return InvalidArgument("a regular expression above " + std::to_string(kMaxPattern) + " bytes");
  ASSIGN_OR_RETURN(const Node node, PatternParser(ToCodePoints(pattern)).Parse());
  auto program = std::make_unique<Program>();
  RETURN_IF_ERROR(Compiler(program.get()).Compile(node));
  return Regex(std::move(program));
}

Regex Regex::Literal(std::string_view text) {
  Node node;
  node.kind = Node::Kind::kConcat;
  for (uint32_t cp : ToCodePoints(text)) {
    Node c;
    c.kind = Node::Kind::kClass;
    c.set = {{cp, cp}};
    node.children.push_back(std::move(c));
  }
  auto program = std::make_unique<Program>();
  const Status status = Compiler(program.get()).Compile(node);
  TEMPER_CHECK(status.ok()) << status.ToString();
  return Regex(std::move(program));
}

Regex Regex::OneOf(const CodeSet& set) {
  Node node;
  node.kind = Node::Kind::kClass;
  node.set = set;
  auto program = std::make_unique<Program>();
  const Status status = Compiler(program.get()).Compile(node);
  TEMPER_CHECK(status.ok()) << status.ToString();
  return Regex(std::move(program));
}

std::vector<std::pair<size_t, size_t>> Regex::FindAll(std::span<const uint32_t> text) const {
  std::vector<std::pair<size_t, size_t>> out;
  Machine machine(*program_, text);
  for (size_t at = 0; at <= text.size();) {
    const long found = machine.Run(0, at);
    const size_t end = static_cast<size_t>(found);
    if (found < 0 || (end == at && !out.empty() && out.back().second == end)) {
      ++at;
      continue;
    }
    out.emplace_back(at, end);
    at = end;
  }
  return out;
}

}  // namespace temper::text
