#include "text/jinja_lexer.h"

#include <algorithm>
#include <charconv>
#include <optional>

#include "text/big_integer.h"
#include "text/jinja_runtime.h"
#include "text/unicode.h"
#include "text/utf8.h"

namespace temper::text::jinja {
namespace {

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
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
         static_cast<uint8_t>(c) >= 0x80;
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
  bool At(size_t i, std::string_view what) const {
    return std::string_view(src_).substr(std::min(i, src_.size()), what.size()) == what;
  }

  // Text up to the next tag, then the tag.
  void Text() {
    size_t tag = at_;
    while (tag < src_.size() && !(src_[tag] == '{' && tag + 1 < src_.size() &&
                                  (src_[tag + 1] == '{' || src_[tag + 1] == '%' || src_[tag + 1] == '#'))) {
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
    if (at_ == src_.size()) return true;  // Jinja2 misses an end only where something stands before it
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
        const std::string name = src_.substr(at_, end - at_);
        const std::vector<uint32_t> points = ToCodePoints(name);
        if (!BeginsIdentifier(points[0]) || !std::all_of(points.begin(), points.end(), ContinuesIdentifier))
          Fail("'" + name + "' is no name");
        Emit(TokenKind::kName, name);
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
      const std::optional<Value> v = ParseInteger(digits, base);
      if (!v) Fail("a malformed number");
      Emit(TokenKind::kInteger, v->is_int() ? std::to_string(v->as_int()) : v->as_string());
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
    if (!is_float && digits.size() > 1 && digits[0] == '0' && digits.find_first_not_of('0') != std::string::npos)
      Fail("a malformed number");
    if (!is_float && digits.size() > BigInteger::kMaxDigits) Fail("an integer of more than 4300 digits");
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

}  // namespace

std::vector<Token> Tokens(std::string_view source) { return Lexer(source).Run(); }

}  // namespace temper::text::jinja
