// Source -> tokens -> syntax tree. White space is cut as Jinja does under trim_blocks and lstrip_blocks.
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <set>

#include "text/jinja.h"
#include "text/unicode.h"
#include "text/utf8.h"

namespace temper::text::jinja {
namespace {

constexpr int kMaxDepth = 150;
constexpr int kMaxLinks = 1000;

enum class TokenKind : uint8_t { kData, kVariableBegin, kVariableEnd, kBlockBegin, kBlockEnd, kName, kString, kInteger, kFloat, kOperator, kEof };

struct Token {
  TokenKind kind = TokenKind::kEof;
  std::string text;
  int line = 0;
};

bool IsSpaceAt(std::string_view s, size_t at, size_t* length) {
  const Utf8Char c = ReadUtf8(s, at);
  *length = c.length;
  return c.valid && IsPythonSpace(c.cp);
}

size_t SkipSpace(std::string_view s, size_t at) {
  size_t length = 0;
  while (at < s.size() && IsSpaceAt(s, at, &length)) at += length;
  return at;
}

// Python's str.rstrip().
std::string_view RightStrip(std::string_view s) {
  while (!s.empty()) {
    size_t at = s.size() - 1, length = 0;
    while (at > 0 && (static_cast<uint8_t>(s[at]) & 0xC0) == 0x80) --at;
    if (!IsSpaceAt(s, at, &length)) break;
    s = s.substr(0, at);
  }
  return s;
}

bool IsNameByte(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || static_cast<uint8_t>(c) >= 0x80;
}
bool IsDigit(char c) { return c >= '0' && c <= '9'; }

class Lexer {
 public:
  explicit Lexer(std::string_view source) {
    for (size_t i = 0; i < source.size(); ++i) {  // every kind of newline is one \n
      if (source[i] == '\r') {
        src_.push_back('\n');
        if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
      } else {
        src_.push_back(source[i]);
      }
    }
    if (!src_.empty() && src_.back() == '\n') src_.pop_back();
  }

  std::vector<Token> Run() {
    while (at_ < src_.size()) Text();
    Emit(TokenKind::kEof, "");
    return std::move(tokens_);
  }

 private:
  [[noreturn]] void Fail(const std::string& what) const { throw TemplateError{what, line_}; }
  void Emit(TokenKind kind, std::string text) { tokens_.push_back({kind, std::move(text), line_}); }
  // Moves on and counts lines.
  void Advance(size_t to) {
    line_ += static_cast<int>(std::count(src_.begin() + static_cast<long>(at_), src_.begin() + static_cast<long>(to), '\n'));
    at_ = to;
    line_starting_ = to > 0 && src_[to - 1] == '\n';
  }
  bool At(size_t i, std::string_view what) const { return std::string_view(src_).substr(std::min(i, src_.size()), what.size()) == what; }

  // Text up to the next tag, then the tag.
  void Text() {
    size_t tag = at_;
    while (tag < src_.size() && !(src_[tag] == '{' && tag + 1 < src_.size() && (src_[tag + 1] == '{' || src_[tag + 1] == '%' || src_[tag + 1] == '#'))) {
      ++tag;
    }
    std::string_view text = std::string_view(src_).substr(at_, tag - at_);
    if (tag >= src_.size()) {
      if (!text.empty()) Emit(TokenKind::kData, std::string(text));
      Advance(src_.size());
      return;
    }
    const char kind = src_[tag + 1];
    const char sign = tag + 2 < src_.size() ? src_[tag + 2] : '\0';
    if (sign == '-') {
      text = RightStrip(text);
    } else if (sign != '+' && kind != '{') {  // lstrip_blocks
      const size_t newline = text.rfind('\n');
      const size_t start = newline == std::string_view::npos ? 0 : newline + 1;
      if ((start > 0 || line_starting_) && SkipSpace(text, start) == text.size()) text = text.substr(0, start);
    }
    if (!text.empty()) Emit(TokenKind::kData, std::string(text));
    Advance(tag + (sign == '-' || sign == '+' ? 3 : 2));
    if (kind == '#') {
      Comment();
    } else if (kind == '%' && Raw()) {
      return;
    } else {
      Emit(kind == '{' ? TokenKind::kVariableBegin : TokenKind::kBlockBegin, "");
      Expression(kind == '%');
    }
  }

  void Comment() {
    for (size_t i = at_; i < src_.size(); ++i) {
      if (At(i, "-#}")) return Advance(SkipSpace(src_, i + 3));
      if (At(i, "+#}")) return Advance(i + 3);
      if (At(i, "#}")) return Advance(i + 2 + (At(i + 2, "\n") ? 1 : 0));
    }
    Fail("a comment has no end");
  }

  // {% raw %} … {% endraw %}; the opening sign is already read.
  bool Raw() {
    size_t i = SkipSpace(src_, at_);
    if (!At(i, "raw")) return false;
    i = SkipSpace(src_, i + 3);
    if (At(i, "-%}")) {
      i = SkipSpace(src_, i + 3);
    } else if (At(i, "%}")) {
      i += 2;
    } else {
      return false;
    }
    Advance(i);
    for (size_t tag = at_; tag < src_.size(); ++tag) {
      if (!At(tag, "{%")) continue;
      const char sign = tag + 2 < src_.size() ? src_[tag + 2] : '\0';
      size_t end = SkipSpace(src_, tag + (sign == '-' || sign == '+' ? 3 : 2));
      if (!At(end, "endraw")) continue;
      end = SkipSpace(src_, end + 6);
      if (At(end, "-%}")) {
        end = SkipSpace(src_, end + 3);
      } else if (At(end, "+%}")) {
        end += 3;
      } else if (At(end, "%}")) {
        end += 2 + (At(end + 2, "\n") ? 1 : 0);
      } else {
        continue;
      }
      std::string_view text = std::string_view(src_).substr(at_, tag - at_);
      if (sign == '-') {
        text = RightStrip(text);
      } else if (sign != '+') {
        const size_t newline = text.rfind('\n');
        const size_t start = newline == std::string_view::npos ? 0 : newline + 1;
        if ((start > 0 || line_starting_) && SkipSpace(text, start) == text.size()) text = text.substr(0, start);
      }
      if (!text.empty()) Emit(TokenKind::kData, std::string(text));
      Advance(end);
      return true;
    }
    Fail("a raw block has no end");
  }

  // The tokens of one tag, up to and including its end.
  void Expression(bool block) {
    std::string stack;  // closing brackets that are awaited; within brackets '}}' is no end
    for (;;) {
      if (at_ >= src_.size()) Fail("a tag has no end");
      if (stack.empty()) {
        if (block && At(at_, "-%}")) return End(TokenKind::kBlockEnd, SkipSpace(src_, at_ + 3));
        if (block && At(at_, "+%}")) return End(TokenKind::kBlockEnd, at_ + 3);
        if (block && At(at_, "%}")) return End(TokenKind::kBlockEnd, at_ + 2 + (At(at_ + 2, "\n") ? 1 : 0));
        if (!block && At(at_, "-}}")) return End(TokenKind::kVariableEnd, SkipSpace(src_, at_ + 3));
        if (!block && At(at_, "}}")) return End(TokenKind::kVariableEnd, at_ + 2);
      }
      size_t length = 0;
      if (IsSpaceAt(src_, at_, &length)) {
        Advance(SkipSpace(src_, at_));
        continue;
      }
      const char c = src_[at_];
      if (IsDigit(c)) {
        Number();
      } else if (IsNameByte(c)) {
        size_t end = at_;
        while (end < src_.size() && IsNameByte(src_[end])) ++end;
        Emit(TokenKind::kName, src_.substr(at_, end - at_));
        Advance(end);
      } else if (c == '\'' || c == '"') {
        String(c);
      } else {
        Operator(&stack);
      }
    }
  }

  void End(TokenKind kind, size_t to) {
    Emit(kind, "");
    Advance(to);
  }

  size_t Digits(size_t i) const {
    while (i < src_.size() && (IsDigit(src_[i]) || (src_[i] == '_' && i + 1 < src_.size() && IsDigit(src_[i + 1])))) ++i;
    return i;
  }

  void Number() {
    const bool after_dot = at_ > 0 && src_[at_ - 1] == '.';
    auto without_underscores = [&](size_t begin, size_t end) {
      std::string out = src_.substr(begin, end - begin);
      out.erase(std::remove(out.begin(), out.end(), '_'), out.end());
      return out;
    };
    if (src_[at_] == '0' && at_ + 1 < src_.size() && std::string_view("xXoObB").find(src_[at_ + 1]) != std::string_view::npos) {
      const int base = (src_[at_ + 1] | 32) == 'x' ? 16 : (src_[at_ + 1] | 32) == 'o' ? 8 : 2;
      size_t end = at_ + 2;
      while (end < src_.size() && (std::isxdigit(static_cast<unsigned char>(src_[end])) || src_[end] == '_')) ++end;
      const std::string digits = without_underscores(at_ + 2, end);
      int64_t v = 0;
      auto [stop, error] = std::from_chars(digits.data(), digits.data() + digits.size(), v, base);
      if (error != std::errc() || stop != digits.data() + digits.size()) Fail("a malformed number");
      Emit(TokenKind::kInteger, std::to_string(v));
      return Advance(end);
    }
    size_t end = Digits(at_);
    bool is_float = false;
    if (!after_dot) {
      if (At(end, ".") && end + 1 < src_.size() && IsDigit(src_[end + 1])) {
        end = Digits(end + 1);
        is_float = true;
      }
      if (end < src_.size() && (src_[end] | 32) == 'e') {
        size_t exponent = end + 1;
        if (At(exponent, "+") || At(exponent, "-")) ++exponent;
        if (exponent < src_.size() && IsDigit(src_[exponent])) {
          end = Digits(exponent);
          is_float = true;
        }
      }
    }
    const std::string digits = without_underscores(at_, end);
    if (!is_float && digits.size() > 1 && digits[0] == '0' && digits.find_first_not_of('0') != std::string::npos) Fail("a malformed number");
    Emit(is_float ? TokenKind::kFloat : TokenKind::kInteger, digits);
    Advance(end);
  }

  void String(char quote) {
    size_t end = at_ + 1;
    while (end < src_.size() && src_[end] != quote) end += src_[end] == '\\' ? 2 : 1;
    if (end >= src_.size()) Fail("a string has no end");
    Emit(TokenKind::kString, Unescape(std::string_view(src_).substr(at_ + 1, end - at_ - 1)));
    Advance(end + 1);
  }

  // Python's unicode-escape.
  std::string Unescape(std::string_view s) const {
    std::string out;
    for (size_t i = 0; i < s.size(); ++i) {
      if (s[i] != '\\' || i + 1 >= s.size()) {
        out.push_back(s[i]);
        continue;
      }
      const char c = s[++i];
      auto hex = [&](size_t digits) {
        uint32_t v = 0;
        if (i + digits >= s.size()) Fail("a malformed escape in a string");
        auto [stop, error] = std::from_chars(s.data() + i + 1, s.data() + i + 1 + digits, v, 16);
        if (error != std::errc() || stop != s.data() + i + 1 + digits) Fail("a malformed escape in a string");
        if (v > 0x10FFFF || (v >= 0xD800 && v < 0xE000)) Fail("an escape in a string names no character");
        i += digits;
        AppendUtf8(v, &out);
      };
      switch (c) {
        case 'n': out.push_back('\n'); break;
        case 't': out.push_back('\t'); break;
        case 'r': out.push_back('\r'); break;
        case 'a': out.push_back('\a'); break;
        case 'b': out.push_back('\b'); break;
        case 'f': out.push_back('\f'); break;
        case 'v': out.push_back('\v'); break;
        case '\\': case '\'': case '"': out.push_back(c); break;
        case '\n': break;
        case 'x': hex(2); break;
        case 'u': hex(4); break;
        case 'U': hex(8); break;
        case 'N': Fail("the escape \\N in a string is not supported");
        default:
          if (c >= '0' && c <= '7') {
            uint32_t v = 0;
            size_t digits = 0;
            while (digits < 3 && i + digits < s.size() && s[i + digits] >= '0' && s[i + digits] <= '7') {
              v = v * 8 + static_cast<uint32_t>(s[i + digits++] - '0');
            }
            i += digits - 1;
            AppendUtf8(v, &out);
          } else {
            out.push_back('\\');
            out.push_back(c);
          }
      }
    }
    return out;
  }

  void Operator(std::string* stack) {
    static constexpr std::string_view kOperators[] = {"//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[",
                                                      "]",  "(",  ")",  "{",  "}",  ">",  "<", "=", ".", ":", "|", ",", ";"};
    for (std::string_view op : kOperators) {
      if (!At(at_, op)) continue;
      const char c = op[0];
      if (c == '(' || c == '[' || c == '{') stack->push_back(c == '(' ? ')' : c == '[' ? ']' : '}');
      if (c == ')' || c == ']' || c == '}') {
        if (stack->empty() || stack->back() != c) Fail(std::string("unexpected '") + c + "'");
        stack->pop_back();
      }
      Emit(TokenKind::kOperator, std::string(op));
      return Advance(at_ + op.size());
    }
    Fail(std::string("unexpected character '") + src_.substr(at_, ReadUtf8(src_, at_).length) + "'");
  }

  std::string src_;
  size_t at_ = 0;
  int line_ = 1;
  bool line_starting_ = true;
  std::vector<Token> tokens_;
};

class Parser {
 public:
  explicit Parser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

  Template Run() {
    Template out;
    out.body = Statements({});
    if (Now().kind != TokenKind::kEof) Fail("unexpected end tag");
    return out;
  }

 private:
  // ---- tokens
  const Token& Now() const { return tokens_[at_]; }
  const Token& Next() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  Token Take() {
    Token t = tokens_[at_];
    if (t.kind != TokenKind::kEof) ++at_;
    return t;
  }
  bool IsOp(std::string_view op) const { return Now().kind == TokenKind::kOperator && Now().text == op; }
  bool IsName(std::string_view name) const { return Now().kind == TokenKind::kName && Now().text == name; }
  bool TakeOp(std::string_view op) {
    if (!IsOp(op)) return false;
    ++at_;
    return true;
  }
  bool TakeName(std::string_view name) {
    if (!IsName(name)) return false;
    ++at_;
    return true;
  }
  [[noreturn]] void Fail(const std::string& what) const { throw TemplateError{what, Now().line}; }
  std::string Describe() const {
    switch (Now().kind) {
      case TokenKind::kEof: return "the end of the template";
      case TokenKind::kVariableEnd: return "'}}'";
      case TokenKind::kBlockEnd: return "'%}'";
      default: return "'" + Now().text + "'";
    }
  }
  void ExpectOp(std::string_view op) {
    if (!TakeOp(op)) Fail("'" + std::string(op) + "' is expected, not " + Describe());
  }
  std::string ExpectName() {
    if (Now().kind != TokenKind::kName) Fail("a name is expected, not " + Describe());
    return Take().text;
  }
  void ExpectBlockEnd() {
    if (Now().kind != TokenKind::kBlockEnd) Fail("'%}' is expected, not " + Describe());
    ++at_;
  }

  // Each link of a chain (a + b + c, a.b.c, a|b|c) makes the tree one deeper; `links_` counts those of one tag.
  void Link() {
    if (++links_ > kMaxLinks) Fail("an expression is too long");
  }

  struct Deeper {
    explicit Deeper(Parser* p) : parser(p) {
      if (++parser->depth_ > kMaxDepth) parser->Fail("nested too deeply");
    }
    ~Deeper() { --parser->depth_; }
    Parser* parser;
  };

  ExprPtr Make(ExprKind kind) const {
    auto e = std::make_unique<Expr>();
    e->kind = kind;
    e->line = Now().line;
    return e;
  }

  // ---- statements
  // Up to a block whose name is one of `ends` (its '{%' is read, its name is not).
  Body Statements(const std::set<std::string>& ends) {
    Deeper deeper(this);
    Body out;
    for (;;) {
      const int line = Now().line;
      switch (Now().kind) {
        case TokenKind::kEof:
          if (!ends.empty()) Fail("the template ends where '{% " + *ends.begin() + " %}' is expected");
          return out;
        case TokenKind::kData: {
          Stmt s;
          s.line = line;
          s.text = Take().text;
          out.push_back(std::move(s));
          break;
        }
        case TokenKind::kVariableBegin: {
          ++at_;
          links_ = 0;
          Stmt s;
          s.kind = StmtKind::kOutput;
          s.line = line;
          s.expr = Tuple();
          if (Now().kind != TokenKind::kVariableEnd) Fail("'}}' is expected, not " + Describe());
          ++at_;
          out.push_back(std::move(s));
          break;
        }
        case TokenKind::kBlockBegin:
          if (Next().kind != TokenKind::kName) Fail("a tag needs a name");
          ++at_;
          links_ = 0;
          if (ends.count(Now().text)) return out;
          Statement(&out);
          break;
        default: Fail("unexpected " + Describe());
      }
    }
  }

  void Statement(Body* out) {
    const std::string name = Now().text;
    Stmt s;
    s.line = Now().line;
    if (name == "for") {
      For(&s);
    } else if (name == "if") {
      If(&s);
    } else if (name == "set") {
      Set(&s);
    } else if (name == "macro") {
      Macro(&s);
    } else if (name == "call") {
      CallBlock(&s);
    } else if (name == "filter") {
      ++at_;
      s.kind = StmtKind::kFilterBlock;
      s.expr = Filters(nullptr, true);
      ExpectBlockEnd();
      s.body = BodyUpTo("endfilter");
    } else if (name == "with") {
      With(&s);
    } else if (name == "generation") {
      ++at_;
      ExpectBlockEnd();
      s.kind = StmtKind::kScope;
      const int loops = std::exchange(loops_, 0);
      s.body = BodyUpTo("endgeneration");
      loops_ = loops;
    } else if (name == "break" || name == "continue") {
      if (loops_ == 0) Fail("'" + name + "' outside of a loop");
      ++at_;
      ExpectBlockEnd();
      s.kind = name == "break" ? StmtKind::kBreak : StmtKind::kContinue;
    } else if (name == "print") {
      ++at_;
      do {
        Stmt one;
        one.kind = StmtKind::kOutput;
        one.line = s.line;
        one.expr = Expression();
        out->push_back(std::move(one));
      } while (TakeOp(","));
      ExpectBlockEnd();
      return;
    } else {
      Fail("the tag '" + name + "' is not supported");
    }
    out->push_back(std::move(s));
  }

  Body BodyUpTo(const std::string& end) {
    Body body = Statements({end});
    ++at_;
    ExpectBlockEnd();
    return body;
  }

  void For(Stmt* s) {
    ++at_;
    s->kind = StmtKind::kFor;
    s->target = ParseTarget(/*in_for=*/true);
    if (!TakeName("in")) Fail("'in' is expected, not " + Describe());
    s->expr = Tuple(/*with_if=*/false, "recursive");
    if (TakeName("if")) s->condition = Expression();
    s->recursive = TakeName("recursive");
    ExpectBlockEnd();
    ++loops_;
    s->body = Statements({"endfor", "else"});
    --loops_;
    if (TakeName("else")) {
      ExpectBlockEnd();
      s->otherwise = Statements({"endfor"});
    }
    ++at_;
    ExpectBlockEnd();
  }

  void If(Stmt* s) {
    Deeper deeper(this);
    ++at_;
    s->kind = StmtKind::kIf;
    s->expr = Tuple(/*with_if=*/false);
    ExpectBlockEnd();
    s->body = Statements({"elif", "else", "endif"});
    if (IsName("elif")) {
      Stmt inner;
      inner.line = Now().line;
      If(&inner);
      s->otherwise.push_back(std::move(inner));
      return;  // the inner one read the endif
    }
    if (TakeName("else")) {
      ExpectBlockEnd();
      s->otherwise = Statements({"endif"});
    }
    ++at_;
    ExpectBlockEnd();
  }

  void Set(Stmt* s) {
    ++at_;
    s->target = ParseTarget(/*in_for=*/false);
    if (TakeOp("=")) {
      s->kind = StmtKind::kSet;
      s->expr = Tuple();
      return ExpectBlockEnd();
    }
    s->kind = StmtKind::kSetBlock;
    if (IsOp("|")) s->expr = Filters(nullptr, false);
    ExpectBlockEnd();
    s->body = BodyUpTo("endset");
  }

  Target ParseTarget(bool in_for) {
    std::vector<Target> items;
    bool comma = false;
    do {
      if (!items.empty() && (in_for ? IsName("in") : IsOp("=") || Now().kind == TokenKind::kBlockEnd)) break;  // a comma at the end
      items.push_back(SingleTarget(in_for));
      comma = comma || IsOp(",");
    } while (TakeOp(","));
    if (!comma) return std::move(items[0]);
    Target out;
    out.is_tuple = true;
    out.items = std::move(items);
    return out;
  }

  Target SingleTarget(bool in_for) {
    Deeper deeper(this);
    Target out;
    if (TakeOp("(") || IsOp("[")) {
      const bool list = TakeOp("[");
      out.is_tuple = true;
      do {
        if (IsOp(")") || IsOp("]")) break;
        out.items.push_back(SingleTarget(in_for));
      } while (TakeOp(","));
      ExpectOp(list ? "]" : ")");
      if (out.items.empty()) Fail("nothing to assign to");
      return out;
    }
    out.name = ExpectName();
    CheckAssignable(out.name);
    if (!in_for && TakeOp(".")) out.attribute = ExpectName();
    return out;
  }

  void CheckAssignable(const std::string& name) const {
    static const std::set<std::string> kReserved = {"true", "false", "none", "True", "False", "None", "not", "and", "or", "in", "is", "if", "else"};
    if (kReserved.count(name)) Fail("cannot assign to '" + name + "'");
  }

  // The parameters of a macro or call block: '(' … ')'.
  std::vector<Parameter> Parameters() {
    std::vector<Parameter> out;
    ExpectOp("(");
    while (!IsOp(")")) {
      if (!out.empty()) ExpectOp(",");
      Parameter p;
      p.name = ExpectName();
      CheckAssignable(p.name);
      if (TakeOp("=")) {
        p.fallback = Expression();
      } else if (!out.empty() && out.back().fallback) {
        Fail("a parameter without default after one with default");
      }
      out.push_back(std::move(p));
    }
    ExpectOp(")");
    return out;
  }

  void Macro(Stmt* s) {
    ++at_;
    s->kind = StmtKind::kMacro;
    s->text = ExpectName();
    CheckAssignable(s->text);
    s->parameters = Parameters();
    ExpectBlockEnd();
    MacroBody(s, "endmacro");
  }

  // Notes which of the magic names the body uses: Jinja accepts surplus arguments only then.
  void MacroBody(Stmt* s, const std::string& end) {
    const int loops = std::exchange(loops_, 0);
    std::set<std::string> outer = std::exchange(names_, {});
    s->body = BodyUpTo(end);
    s->uses_varargs = names_.count("varargs") > 0;
    s->uses_kwargs = names_.count("kwargs") > 0;
    s->uses_caller = names_.count("caller") > 0;
    outer.insert(names_.begin(), names_.end());
    names_ = std::move(outer);
    loops_ = loops;
  }

  void CallBlock(Stmt* s) {
    ++at_;
    s->kind = StmtKind::kCallBlock;
    if (IsOp("(")) s->parameters = Parameters();
    s->expr = Expression();
    if (s->expr->kind != ExprKind::kCall) Fail("a call is expected in a call block");
    ExpectBlockEnd();
    MacroBody(s, "endcall");
  }

  void With(Stmt* s) {
    ++at_;
    s->kind = StmtKind::kWith;
    while (Now().kind != TokenKind::kBlockEnd) {
      if (!s->bindings.empty()) ExpectOp(",");
      Target target = SingleTarget(/*in_for=*/true);
      ExpectOp("=");
      s->bindings.emplace_back(std::move(target), Expression());
    }
    ExpectBlockEnd();
    s->body = BodyUpTo("endwith");
  }

  // ---- expressions, in Jinja's order of binding
  ExprPtr Expression(bool with_if = true) {
    Deeper deeper(this);
    return with_if ? Conditional() : Or();
  }

  ExprPtr Conditional() {
    ExprPtr left = Or();
    while (IsName("if")) {
      ExprPtr e = Make(ExprKind::kIf);
      Link();
      ++at_;
      e->args.push_back(Or());
      e->args.push_back(std::move(left));
      if (TakeName("else")) {
        Deeper deeper(this);
        e->args.push_back(Conditional());
      } else {
        e->args.push_back(nullptr);
      }
      left = std::move(e);
    }
    return left;
  }

  ExprPtr Or() {
    ExprPtr left = And();
    while (IsName("or")) {
      ExprPtr e = Make(ExprKind::kOr);
      Link();
      ++at_;
      e->args.push_back(std::move(left));
      e->args.push_back(And());
      left = std::move(e);
    }
    return left;
  }

  ExprPtr And() {
    ExprPtr left = Not();
    while (IsName("and")) {
      ExprPtr e = Make(ExprKind::kAnd);
      Link();
      ++at_;
      e->args.push_back(std::move(left));
      e->args.push_back(Not());
      left = std::move(e);
    }
    return left;
  }

  ExprPtr Not() {
    if (!IsName("not")) return Compare();
    Deeper deeper(this);
    ExprPtr e = Make(ExprKind::kNot);
    ++at_;
    e->args.push_back(Not());
    return e;
  }

  ExprPtr Compare() {
    ExprPtr first = Sum();
    ExprPtr e;
    for (;;) {
      std::string op;
      for (const char* candidate : {"==", "!=", "<=", ">=", "<", ">"}) {
        if (IsOp(candidate)) op = candidate;
      }
      if (!op.empty()) {
        ++at_;
      } else if (TakeName("in")) {
        op = "in";
      } else if (IsName("not") && Next().kind == TokenKind::kName && Next().text == "in") {
        at_ += 2;
        op = "not in";
      } else {
        break;
      }
      if (!e) {
        e = Make(ExprKind::kCompare);
        e->args.push_back(std::move(first));
      }
      e->ops.push_back(op);
      e->args.push_back(Sum());
    }
    return e ? std::move(e) : std::move(first);
  }

  ExprPtr Binary(std::initializer_list<const char*> ops, ExprPtr (Parser::*operand)()) {
    ExprPtr left = (this->*operand)();
    for (;;) {
      const char* found = nullptr;
      for (const char* op : ops) {
        if (IsOp(op)) found = op;
      }
      if (!found) return left;
      Link();
      ExprPtr e = Make(ExprKind::kBinary);
      ++at_;
      e->name = found;
      e->args.push_back(std::move(left));
      e->args.push_back((this->*operand)());
      left = std::move(e);
    }
  }

  ExprPtr Sum() { return Binary({"+", "-"}, &Parser::Concat); }

  ExprPtr Concat() {
    ExprPtr first = Product();
    if (!IsOp("~")) return first;
    ExprPtr e = Make(ExprKind::kConcat);
    e->args.push_back(std::move(first));
    while (TakeOp("~")) e->args.push_back(Product());
    return e;
  }

  ExprPtr Product() { return Binary({"*", "/", "//", "%"}, &Parser::Power); }
  ExprPtr Power() { return Binary({"**"}, &Parser::UnaryWithFilter); }
  ExprPtr UnaryWithFilter() { return Unary(true); }

  ExprPtr Unary(bool with_filter) {
    Deeper deeper(this);
    ExprPtr e;
    if (IsOp("-") || IsOp("+")) {
      e = Make(IsOp("-") ? ExprKind::kNegate : ExprKind::kPlus);
      ++at_;
      e->args.push_back(Unary(false));
    } else {
      e = Primary();
    }
    e = Postfix(std::move(e));
    return with_filter ? FilterExpression(std::move(e)) : std::move(e);
  }

  ExprPtr Constant(Value v) {
    ExprPtr e = Make(ExprKind::kConst);
    e->value = std::move(v);
    return e;
  }

  ExprPtr Primary() {
    const Token& t = Now();
    switch (t.kind) {
      case TokenKind::kName: {
        ExprPtr e;
        if (t.text == "true" || t.text == "True") {
          e = Constant(true);
        } else if (t.text == "false" || t.text == "False") {
          e = Constant(false);
        } else if (t.text == "none" || t.text == "None") {
          e = Constant(nullptr);
        } else {
          e = Make(ExprKind::kName);
          e->name = t.text;
          names_.insert(t.text);
        }
        ++at_;
        return e;
      }
      case TokenKind::kString: {
        std::string text = Take().text;
        while (Now().kind == TokenKind::kString) text += Take().text;
        return Constant(Value(std::move(text)));
      }
      case TokenKind::kInteger: {
        int64_t v = 0;
        auto [end, error] = std::from_chars(t.text.data(), t.text.data() + t.text.size(), v);
        ExprPtr e = Constant(error == std::errc() ? Value(v) : Value::BigInt(t.text));
        ++at_;
        return e;
      }
      case TokenKind::kFloat: {
        ExprPtr e = Constant(std::strtod(t.text.c_str(), nullptr));
        ++at_;
        return e;
      }
      case TokenKind::kOperator:
        if (t.text == "(") {
          ++at_;
          ExprPtr e = Tuple(true, "", /*parentheses=*/true);
          ExpectOp(")");
          return e;
        }
        if (t.text == "[") {
          ExprPtr e = Make(ExprKind::kList);
          ++at_;
          while (!IsOp("]")) {
            if (!e->args.empty()) ExpectOp(",");
            if (IsOp("]")) break;
            e->args.push_back(Expression());
          }
          ExpectOp("]");
          return e;
        }
        if (t.text == "{") {
          ExprPtr e = Make(ExprKind::kDict);
          ++at_;
          while (!IsOp("}")) {
            if (!e->args.empty()) ExpectOp(",");
            if (IsOp("}")) break;
            e->args.push_back(Expression());
            ExpectOp(":");
            e->args.push_back(Expression());
          }
          ExpectOp("}");
          return e;
        }
        break;
      default: break;
    }
    Fail("an expression is expected, not " + Describe());
  }

  bool TupleEnds(const std::string& extra) const {
    return Now().kind == TokenKind::kVariableEnd || Now().kind == TokenKind::kBlockEnd || IsOp(")") || (!extra.empty() && IsName(extra));
  }

  // An expression, or a tuple when commas follow.
  ExprPtr Tuple(bool with_if = true, const std::string& extra_end = "", bool parentheses = false) {
    Deeper deeper(this);
    ExprPtr e = Make(ExprKind::kTuple);
    bool is_tuple = false;
    for (;;) {
      if (!e->args.empty()) ExpectOp(",");
      if (TupleEnds(extra_end)) break;
      e->args.push_back(Expression(with_if));
      if (!IsOp(",")) break;
      is_tuple = true;
    }
    if (is_tuple) return e;
    if (!e->args.empty()) {
      ExprPtr only = std::move(e->args[0]);
      return only;
    }
    if (!parentheses) Fail("an expression is expected, not " + Describe());
    return e;
  }

  ExprPtr Postfix(ExprPtr e) {
    for (;;) {
      Link();
      if (IsOp(".") || IsOp("[")) {
        e = Subscript(std::move(e));
      } else if (IsOp("(")) {
        e = Call(std::move(e));
      } else {
        return e;
      }
    }
  }

  ExprPtr FilterExpression(ExprPtr e) {
    for (;;) {
      Link();
      if (IsOp("|")) {
        e = Filters(std::move(e), false);
      } else if (IsName("is")) {
        e = Test(std::move(e));
      } else if (IsOp("(")) {
        e = Call(std::move(e));
      } else {
        return e;
      }
    }
  }

  ExprPtr Subscript(ExprPtr object) {
    if (TakeOp(".")) {
      if (Now().kind == TokenKind::kName) {
        ExprPtr e = Make(ExprKind::kGetAttr);
        e->name = Take().text;
        e->args.push_back(std::move(object));
        return e;
      }
      if (Now().kind != TokenKind::kInteger) Fail("a name or an integer is expected after '.', not " + Describe());
      ExprPtr e = Make(ExprKind::kGetItem);
      e->args.push_back(std::move(object));
      e->args.push_back(Primary());
      return e;
    }
    ExprPtr e = Make(ExprKind::kGetItem);
    ExpectOp("[");
    e->args.push_back(std::move(object));
    ExprPtr first = SubscriptItem();
    if (IsOp(",")) {
      ExprPtr tuple = Make(ExprKind::kTuple);
      tuple->args.push_back(std::move(first));
      while (TakeOp(",")) tuple->args.push_back(SubscriptItem());
      first = std::move(tuple);
    }
    ExpectOp("]");
    e->args.push_back(std::move(first));
    return e;
  }

  ExprPtr SubscriptItem() {
    ExprPtr start;
    if (!IsOp(":")) {
      start = Expression();
      if (!IsOp(":")) return start;
    }
    ExprPtr e = Make(ExprKind::kSlice);
    ExpectOp(":");
    e->args.push_back(std::move(start));
    auto part = [&]() -> ExprPtr { return IsOp(":") || IsOp("]") || IsOp(",") ? nullptr : Expression(); };
    e->args.push_back(part());
    e->args.push_back(TakeOp(":") ? part() : nullptr);
    return e;
  }

  // '(' … ')' after something callable, a filter or a test; appends to e.
  void Arguments(Expr* e) {
    ExpectOp("(");
    bool first = true;
    while (!IsOp(")")) {
      if (!first) ExpectOp(",");
      if (IsOp(")")) break;
      first = false;
      if (TakeOp("*")) {
        if (e->star || e->dstar) Fail("two starred arguments");
        e->star = Expression();
      } else if (TakeOp("**")) {
        if (e->dstar) Fail("two starred arguments");
        e->dstar = Expression();
      } else if (Now().kind == TokenKind::kName && Next().kind == TokenKind::kOperator && Next().text == "=") {
        std::string name = Take().text;
        ++at_;
        e->kwargs.emplace_back(std::move(name), Expression());
      } else {
        if (!e->kwargs.empty() || e->star || e->dstar) Fail("a positional argument after a named one");
        e->args.push_back(Expression());
      }
    }
    ExpectOp(")");
  }

  ExprPtr Call(ExprPtr callee) {
    ExprPtr e = Make(ExprKind::kCall);
    e->args.push_back(std::move(callee));
    Arguments(e.get());
    return e;
  }

  // `|name(…)|name…`; at the start of a filter block the first '|' is absent.
  ExprPtr Filters(ExprPtr operand, bool first_without_bar) {
    while (first_without_bar || IsOp("|")) {
      Link();
      if (!first_without_bar) ++at_;
      first_without_bar = false;
      ExprPtr e = Make(ExprKind::kFilter);
      e->name = ExpectName();
      while (TakeOp(".")) e->name += "." + ExpectName();
      e->index = FindFilter(e->name);
      if (e->index < 0) throw TemplateError{"the filter '" + e->name + "' is not supported", e->line};
      e->args.push_back(std::move(operand));
      if (IsOp("(")) Arguments(e.get());
      operand = std::move(e);
    }
    return operand;
  }

  ExprPtr Test(ExprPtr operand) {
    ExprPtr e = Make(ExprKind::kTest);
    ++at_;
    const bool negated = TakeName("not");
    e->name = ExpectName();
    while (TakeOp(".")) e->name += "." + ExpectName();
    e->index = FindTest(e->name);
    if (e->index < 0) throw TemplateError{"the test '" + e->name + "' is not supported", e->line};
    e->args.push_back(std::move(operand));
    const bool argument = Now().kind == TokenKind::kString || Now().kind == TokenKind::kInteger || Now().kind == TokenKind::kFloat ||
                          IsOp("[") || IsOp("{") ||
                          (Now().kind == TokenKind::kName && !IsName("else") && !IsName("or") && !IsName("and"));
    if (IsOp("(")) {
      Arguments(e.get());
    } else if (argument) {
      if (IsName("is")) Fail("tests cannot be chained with 'is'");
      e->args.push_back(Postfix(Primary()));
    }
    if (!negated) return e;
    ExprPtr out = Make(ExprKind::kNot);
    out->line = e->line;
    out->args.push_back(std::move(e));
    return out;
  }

  std::vector<Token> tokens_;
  size_t at_ = 0;
  int depth_ = 0;
  int loops_ = 0;
  int links_ = 0;
  std::set<std::string> names_;  // names read so far within the innermost macro
};

}  // namespace

Template ParseTemplate(std::string_view source) { return Parser(Lexer(source).Run()).Run(); }

}  // namespace temper::text::jinja
