#include "text/json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>

#include "text/utf8.h"

namespace temper::text {
namespace {

constexpr int kMaxDepth = 512;

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Result<Value> Parse() {
    Value value;
    SkipSpace();
    if (!ParseValue(&value, 0)) return Error();
    SkipSpace();
    if (at_ != text_.size()) {
      Fail("text after the end of the document");
      return Error();
    }
    return value;
  }

 private:
  bool Fail(const char* what) {
    if (problem_.empty()) problem_ = what, problem_at_ = at_;
    return false;
  }

  Status Error() const {
    size_t line = 1, column = 1;
    for (size_t i = 0; i < problem_at_ && i < text_.size(); ++i) {
      if (text_[i] == '\n') {
        ++line, column = 1;
      } else {
        ++column;
      }
    }
    return InvalidArgument("JSON line " + std::to_string(line) + " column " + std::to_string(column) + ": " + problem_);
  }

  void SkipSpace() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t' || text_[at_] == '\r')) ++at_;
  }

  bool Take(char c) {
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }

  bool Word(std::string_view word, Value v, Value* out) {
    if (text_.substr(at_, word.size()) != word) return Fail("no such literal");
    at_ += word.size();
    *out = std::move(v);
    return true;
  }

  bool ParseValue(Value* out, int depth) {
    if (depth > kMaxDepth) return Fail("nested too deeply");
    if (at_ >= text_.size()) return Fail("the text ends where a value is expected");
    switch (text_[at_]) {
      case '{': return ParseObject(out, depth);
      case '[': return ParseArray(out, depth);
      case '"': {
        std::string s;
        if (!ParseString(&s)) return false;
        *out = Value(std::move(s));
        return true;
      }
      case 't': return Word("true", true, out);
      case 'f': return Word("false", false, out);
      case 'n': return Word("null", nullptr, out);
      default: return ParseNumber(out);
    }
  }

  bool ParseObject(Value* out, int depth) {
    ++at_;
    Dict dict;
    SkipSpace();
    if (Take('}')) {
      *out = Value(std::move(dict));
      return true;
    }
    for (;;) {
      SkipSpace();
      std::string key;
      if (at_ >= text_.size() || text_[at_] != '"') return Fail("a key in quotes is expected");
      if (!ParseString(&key)) return false;
      SkipSpace();
      if (!Take(':')) return Fail("':' is expected after a key");
      SkipSpace();
      Value value;
      if (!ParseValue(&value, depth + 1)) return false;
      dict.Set(Value(std::move(key)), std::move(value));
      SkipSpace();
      if (Take('}')) break;
      if (!Take(',')) return Fail("',' or '}' is expected");
    }
    *out = Value(std::move(dict));
    return true;
  }

  bool ParseArray(Value* out, int depth) {
    ++at_;
    List list;
    SkipSpace();
    if (Take(']')) {
      *out = Value(std::move(list));
      return true;
    }
    for (;;) {
      SkipSpace();
      list.emplace_back();
      if (!ParseValue(&list.back(), depth + 1)) return false;
      SkipSpace();
      if (Take(']')) break;
      if (!Take(',')) return Fail("',' or ']' is expected");
    }
    *out = Value(std::move(list));
    return true;
  }

  bool ParseHex4(uint32_t* out) {
    if (text_.size() - at_ < 4) return Fail("\\u needs four hexadecimal digits");
    uint32_t v = 0;
    auto [end, error] = std::from_chars(text_.data() + at_, text_.data() + at_ + 4, v, 16);
    if (error != std::errc() || end != text_.data() + at_ + 4) return Fail("\\u needs four hexadecimal digits");
    at_ += 4;
    *out = v;
    return true;
  }

  bool ParseString(std::string* out) {
    ++at_;
    for (;;) {
      if (at_ >= text_.size()) return Fail("a string has no end");
      const unsigned char c = static_cast<unsigned char>(text_[at_]);
      if (c == '"') {
        ++at_;
        return true;
      }
      if (c < 0x20) return Fail("a control character within a string");
      if (c < 0x80 && c != '\\') {
        out->push_back(static_cast<char>(c));
        ++at_;
        continue;
      }
      if (c >= 0x80) {
        const Utf8Char u = ReadUtf8(text_, at_);
        if (!u.valid) return Fail("invalid UTF-8 within a string");
        out->append(text_.substr(at_, u.length));
        at_ += u.length;
        continue;
      }
      ++at_;
      if (at_ >= text_.size()) return Fail("a string has no end");
      const char escape = text_[at_++];
      switch (escape) {
        case '"': case '\\': case '/': out->push_back(escape); break;
        case 'b': out->push_back('\b'); break;
        case 'f': out->push_back('\f'); break;
        case 'n': out->push_back('\n'); break;
        case 'r': out->push_back('\r'); break;
        case 't': out->push_back('\t'); break;
        case 'u': {
          uint32_t cp = 0;
          if (!ParseHex4(&cp)) return false;
          if (cp >= 0xD800 && cp < 0xDC00) {
            uint32_t low = 0;
            if (!Take('\\') || !Take('u')) return Fail("half of a surrogate pair");
            if (!ParseHex4(&low)) return false;
            if (low < 0xDC00 || low > 0xDFFF) return Fail("half of a surrogate pair");
            cp = 0x10000 + ((cp - 0xD800) << 10) + (low - 0xDC00);
          } else if (cp >= 0xDC00 && cp <= 0xDFFF) {
            return Fail("half of a surrogate pair");
          }
          AppendUtf8(cp, out);
          break;
        }
        default: return Fail("no such escape");
      }
    }
  }

  bool ParseNumber(Value* out) {
    const size_t start = at_;
    auto digit = [&] { return at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; };
    Take('-');
    if (!digit()) {
      at_ = start;
      return Fail("a value is expected");
    }
    if (Take('0')) {
      if (digit()) return Fail("a number with a leading zero");
    } else {
      while (digit()) ++at_;
    }
    bool is_float = false;
    if (at_ < text_.size() && text_[at_] == '.') {
      ++at_;
      is_float = true;
      if (!digit()) return Fail("a digit is expected after '.'");
      while (digit()) ++at_;
    }
    if (at_ < text_.size() && (text_[at_] == 'e' || text_[at_] == 'E')) {
      ++at_;
      is_float = true;
      if (!Take('+')) Take('-');
      if (!digit()) return Fail("a digit is expected in an exponent");
      while (digit()) ++at_;
    }
    const std::string_view number = text_.substr(start, at_ - start);
    if (!is_float) {
      int64_t v = 0;
      auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), v);
      *out = error == std::errc() ? Value(v) : Value::BigInt(std::string(number));
      return true;
    }
    double v = 0;
    auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), v);
    if (error == std::errc::result_out_of_range) v = std::strtod(std::string(number).c_str(), nullptr);
    if (std::isinf(v)) return Fail("a number beyond the range of floats");
    *out = Value(v);
    return true;
  }

  std::string_view text_;
  size_t at_ = 0;
  std::string problem_;
  size_t problem_at_ = 0;
};

void AppendQuoted(std::string_view s, bool ensure_ascii, std::string* out) {
  static constexpr char kHex[] = "0123456789abcdef";
  auto escape = [&](uint32_t unit) {
    out->append("\\u");
    for (int shift = 12; shift >= 0; shift -= 4) out->push_back(kHex[unit >> shift & 15]);
  };
  out->push_back('"');
  for (size_t i = 0; i < s.size();) {
    const Utf8Char u = ReadUtf8(s, i);
    const char c = s[i];
    if (c == '"') {
      out->append("\\\"");
    } else if (c == '\\') {
      out->append("\\\\");
    } else if (c == '\n') {
      out->append("\\n");
    } else if (c == '\r') {
      out->append("\\r");
    } else if (c == '\t') {
      out->append("\\t");
    } else if (c == '\b') {
      out->append("\\b");
    } else if (c == '\f') {
      out->append("\\f");
    } else if (u.cp < 0x20) {
      escape(u.cp);
    } else if (u.cp < 0x80 || !ensure_ascii) {
      AppendUtf8(u.cp, out);
    } else if (u.cp < 0x10000) {
      escape(u.cp);
    } else {
      escape(0xD800 + ((u.cp - 0x10000) >> 10));
      escape(0xDC00 + ((u.cp - 0x10000) & 0x3FF));
    }
    i += u.length;
  }
  out->push_back('"');
}

class Dumper {
 public:
  Dumper(const JsonStyle& style, std::string* out)
      : style_(style), out_(out), item_separator_(style.item_separator.empty() ? (style.indent < 0 ? ", " : ",") : style.item_separator) {}

  Status Dump(const Value& v, int depth) {
    if (depth > kMaxDepth) return InvalidArgument("a value nested too deeply for JSON");
    switch (v.kind()) {
      case Value::Kind::kUndefined: return InvalidArgument("Object of type Undefined is not JSON serializable");
      case Value::Kind::kObject: return InvalidArgument("an object of the template is not JSON serializable");
      case Value::Kind::kNone: out_->append("null"); break;
      case Value::Kind::kBool: out_->append(v.as_bool() ? "true" : "false"); break;
      case Value::Kind::kInt: out_->append(std::to_string(v.as_int())); break;
      case Value::Kind::kBigInt: out_->append(v.as_string()); break;
      case Value::Kind::kFloat: {
        const double d = v.as_float();
        out_->append(std::isnan(d) ? "NaN" : std::isinf(d) ? (d > 0 ? "Infinity" : "-Infinity") : FloatRepr(d));
        break;
      }
      case Value::Kind::kString: AppendQuoted(v.as_string(), style_.ensure_ascii, out_); break;
      case Value::Kind::kList:
      case Value::Kind::kTuple: {
        const List& list = v.as_list();
        if (list.empty()) {
          out_->append("[]");
          break;
        }
        out_->push_back('[');
        for (size_t i = 0; i < list.size(); ++i) {
          if (i) out_->append(item_separator_);
          NewLine(depth + 1);
          RETURN_IF_ERROR(Dump(list[i], depth + 1));
        }
        NewLine(depth);
        out_->push_back(']');
        break;
      }
      case Value::Kind::kDict: {
        const auto& items = v.as_dict().items();
        if (items.empty()) {
          out_->append("{}");
          break;
        }
        std::vector<size_t> order(items.size());
        for (size_t i = 0; i < order.size(); ++i) order[i] = i;
        if (style_.sort_keys) {
          std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
            const Value &x = items[a].first, &y = items[b].first;
            return x.is_string() && y.is_string() && x.as_string() < y.as_string();
          });
        }
        out_->push_back('{');
        for (size_t i = 0; i < order.size(); ++i) {
          if (i) out_->append(item_separator_);
          NewLine(depth + 1);
          RETURN_IF_ERROR(DumpKey(items[order[i]].first));
          out_->append(style_.key_separator);
          RETURN_IF_ERROR(Dump(items[order[i]].second, depth + 1));
        }
        NewLine(depth);
        out_->push_back('}');
        break;
      }
    }
    return Status::Ok();
  }

 private:
  Status DumpKey(const Value& key) {
    if (key.is_string()) {
      AppendQuoted(key.as_string(), style_.ensure_ascii, out_);
      return Status::Ok();
    }
    if (key.kind() == Value::Kind::kTuple) return InvalidArgument("keys must be str, int, float, bool or None, not tuple");
    out_->push_back('"');
    RETURN_IF_ERROR(Dump(key, 0));
    out_->push_back('"');
    return Status::Ok();
  }

  void NewLine(int depth) {
    if (style_.indent < 0) return;
    out_->push_back('\n');
    out_->append(static_cast<size_t>(depth) * static_cast<size_t>(style_.indent), ' ');
  }

  const JsonStyle& style_;
  std::string* out_;
  std::string item_separator_;
};

}  // namespace

Result<Value> ParseJson(std::string_view text) { return Parser(text).Parse(); }

Result<std::string> DumpJson(const Value& value, const JsonStyle& style) {
  std::string out;
  RETURN_IF_ERROR(Dumper(style, &out).Dump(value, 0));
  return out;
}

std::string CompactJson(const Value& value) {
  JsonStyle style;
  style.item_separator = ",";
  style.key_separator = ":";
  return DumpJson(value, style).value();
}

std::string FloatRepr(double v) {
  if (std::isnan(v)) return "nan";
  if (std::isinf(v)) return v > 0 ? "inf" : "-inf";
  char buffer[64];
  auto [end, error] = std::to_chars(buffer, buffer + sizeof(buffer), v, std::chars_format::scientific);
  std::string_view text(buffer, static_cast<size_t>(end - buffer));
  std::string out;
  if (text[0] == '-') {
    out = "-";
    text.remove_prefix(1);
  }
  const size_t e = text.find('e');
  std::string digits;
  for (char c : text.substr(0, e)) {
    if (c != '.') digits.push_back(c);
  }
  const int exponent = std::atoi(std::string(text.substr(e + 1)).c_str());
  if (exponent < -4 || exponent >= 16) {
    out += digits.substr(0, 1);
    if (digits.size() > 1) out += "." + digits.substr(1);
    const int magnitude = std::abs(exponent);
    out += exponent < 0 ? "e-" : "e+";
    out += (magnitude < 10 ? "0" : "") + std::to_string(magnitude);
  } else if (exponent < 0) {
    out += "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
  } else {
    const size_t whole = static_cast<size_t>(exponent) + 1;
    if (digits.size() < whole) digits.append(whole - digits.size(), '0');
    out += digits.substr(0, whole) + "." + (digits.size() > whole ? digits.substr(whole) : "0");
  }
  return out;
}

}  // namespace temper::text
