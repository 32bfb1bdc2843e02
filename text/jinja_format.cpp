// Python's two ways to format: format % values, and str.format with its specifications.
#include <algorithm>
#include <cmath>

#include "text/big_integer.h"
#include "text/jinja_runtime.h"
#include "text/json.h"
#include "text/unicode.h"
#include "text/utf8.h"

namespace temper::text::jinja {
namespace {

// The magnitude of a number as text, with its sign apart.
struct Digits {
  bool negative = false;
  std::string text;
};

Digits IntegerDigits(Interpreter& in, const Value& v, uint32_t base) {
  if (v.kind() == Value::Kind::kBigInt) {
    in.Charge(v.as_string().size() * v.as_string().size() / 256);
    if (v.as_string().size() > BigInteger::kMaxDigits + 1) in.Fail("an integer of more than 4300 digits has no text in Python");
  }
  const BigInteger big = v.is_bool()  ? BigInteger(v.as_bool())
                         : v.is_int() ? BigInteger(v.as_int())
                                      : BigInteger::FromDigits(v.as_string());
  std::string text = big.ToString(base);
  if (big.negative()) text.erase(0, 1);
  return {big.negative(), std::move(text)};
}

bool OneOf(char c, std::string_view these) { return these.find(c) != std::string_view::npos; }

void MakeUpper(std::string* s) {
  for (char& c : *s) {
    if (c >= 'a' && c <= 'z') c = static_cast<char>(c - 32);
  }
}

// |v| under e, f or g and a precision, as C and Python write it alike.
std::string FloatDigits(Interpreter& in, double v, char type, int precision, bool alternate) {
  v = std::fabs(v);
  if (!std::isfinite(v)) return std::isnan(v) ? "nan" : "inf";
  in.ChargeText(static_cast<size_t>(precision) + 400);
  const char format[] = {'%', '#', '.', '*', type, '\0'}, plain[] = {'%', '.', '*', type, '\0'};
  const char* const which = alternate ? format : plain;
  std::string out(static_cast<size_t>(std::snprintf(nullptr, 0, which, precision, v)), ' ');
  std::snprintf(out.data(), out.size() + 1, which, precision, v);
  return out;
}

// A run of decimal digits at `at`, moved past it; refuses what no text could be as long as.
size_t ReadCount(Interpreter& in, const std::string& s, size_t* at) {
  size_t out = 0;
  for (; *at < s.size() && s[*at] >= '0' && s[*at] <= '9'; ++*at) {
    out = out * 10 + static_cast<size_t>(s[*at] - '0');
    if (out > kMaxText) in.ChargeText(kMaxText + 1);
  }
  return out;
}

std::string Characters(std::string_view s, size_t most) {
  size_t at = 0;
  for (size_t n = 0; at < s.size() && n < most; ++n) at += ReadUtf8(s, at).length;
  return std::string(s.substr(0, at));
}

std::string Repeated(const std::string& fill, size_t times) {
  std::string out;
  for (size_t i = 0; i < times; ++i) out += fill;
  return out;
}

// ascii(v): repr with everything beyond ASCII escaped.
std::string Ascii(const std::string& repr) {
  std::string out;
  for (uint32_t cp : ToCodePoints(repr)) {
    if (cp < 0x80) {
      out.push_back(static_cast<char>(cp));
    } else {
      char buffer[16];
      std::snprintf(buffer, sizeof(buffer), cp < 0x100 ? "\\x%02x" : cp < 0x10000 ? "\\u%04x" : "\\U%08x", cp);
      out += buffer;
    }
  }
  return out;
}

// [[fill]align][sign][#][0][width][grouping][.precision][type]
struct Spec {
  std::string fill = " ";
  char align = '\0';
  char sign = '\0';
  bool alternate = false;
  bool zero = false;  // '0' before the width
  size_t width = 0;
  char grouping = '\0';
  int precision = -1;
  char type = '\0';
};

Spec ParseSpec(Interpreter& in, const std::string& text) {
  Spec out;
  size_t at = 0;
  auto is_align = [](char c) { return c == '<' || c == '>' || c == '=' || c == '^'; };
  const size_t first = text.empty() ? 0 : ReadUtf8(text, 0).length;
  bool filled = false;
  if (first < text.size() && is_align(text[first])) {
    out.fill = text.substr(0, first);
    out.align = text[first];
    at = first + 1;
    filled = true;
  } else if (!text.empty() && is_align(text[0])) {
    out.align = text[at++];
  }
  if (at < text.size() && (text[at] == '+' || text[at] == '-' || text[at] == ' ')) out.sign = text[at++];
  if (at < text.size() && text[at] == 'z') in.Fail("the option 'z' of a format is not supported");
  if (at < text.size() && text[at] == '#') {
    out.alternate = true;
    ++at;
  }
  if (at < text.size() && text[at] == '0') {
    if (!filled) out.fill = "0";
    out.zero = true;
    ++at;
  }
  out.width = ReadCount(in, text, &at);
  if (at < text.size() && (text[at] == ',' || text[at] == '_')) out.grouping = text[at++];
  if (at < text.size() && (text[at] == ',' || text[at] == '_')) in.Fail("Cannot specify both ',' and '_'.");
  if (at < text.size() && text[at] == '.') {
    const size_t start = ++at;
    out.precision = static_cast<int>(ReadCount(in, text, &at));
    if (at == start) in.Fail("Format specifier missing precision");
  }
  if (text.size() - at > 1) in.Fail("Invalid format specifier '" + text + "'");
  if (at < text.size() && !(out.type = text[at])) in.Fail("Unknown format code '\\x00'");
  return out;
}

// `digits` (before the point, the rest is `tail`) in groups; zeros fill up to `width` characters, tail included.
std::string Grouped(const std::string& digits, const std::string& tail, char sign, size_t group, size_t width) {
  std::string out;  // backwards
  size_t n = 0;
  for (size_t i = digits.size(); i > 0 || out.size() + tail.size() < width; ++n) {
    if (sign && n && n % group == 0) out.push_back(sign);
    out.push_back(i > 0 ? digits[--i] : '0');
  }
  std::reverse(out.begin(), out.end());
  return out + tail;
}

// A number that is made: its sign, what stands between sign and digits, its digits and what follows them, under the spec.
std::string Laid(Interpreter& in, const Spec& spec, bool negative, const std::string& prefix, const std::string& digits,
                 const std::string& tail, size_t group) {
  in.ChargeText(spec.width);
  const std::string head = (negative ? "-" : spec.sign == '+' ? "+" : spec.sign == ' ' ? " " : "") + prefix;
  const char align = spec.align ? spec.align : spec.zero ? '=' : '>';
  const bool zeros = align == '=' && spec.fill == "0";
  const std::string body =
      Grouped(digits, tail, spec.grouping, group, zeros && spec.width > head.size() ? spec.width - head.size() : 0);
  const size_t size = head.size() + body.size(), missing = spec.width > size ? spec.width - size : 0;
  in.ChargeText(missing * spec.fill.size() + size);
  if (align == '=') return head + Repeated(spec.fill, missing) + body;
  const size_t left = align == '<' ? 0 : align == '>' ? missing : missing / 2;
  return Repeated(spec.fill, left) + head + body + Repeated(spec.fill, missing - left);
}

std::string FormatFloat(Interpreter& in, double v, const Spec& spec, bool of_integer) {
  char type = spec.type;
  if (!OneOf(type, "eEfFgGn%") && type) in.Fail(std::string("Unknown format code '") + type + "' for object of type 'float'");
  if (spec.grouping && type == 'n') in.Fail("Cannot specify ',' with 'n'.");
  const bool upper = type == 'E' || type == 'F' || type == 'G', percent = type == '%';
  int precision = spec.precision;
  std::string text;
  if (!type && precision < 0 && !of_integer) {
    text = FloatRepr(std::fabs(v));
    const size_t e = text.find('e');
    if (spec.alternate && e != std::string::npos && text.find('.') == std::string::npos) text.insert(e, ".");
  } else if (!type) {  // as g, but always with a digit after the point
    precision = std::max(precision < 0 ? 6 : precision, 1);
    text = FloatDigits(in, v, 'e', precision - 1, spec.alternate);
    if (std::isfinite(v)) {
      const int exponent = std::atoi(text.c_str() + text.find('e') + 1);
      const bool scientific = exponent < -4 || exponent >= precision - 1;
      // %g of one digit more has the same digits where it does not turn to an exponent.
      if (!scientific) {
        text = FloatDigits(in, v, 'g', precision, spec.alternate);
        if (text.find('.') == std::string::npos) text += ".0";
      } else if (!spec.alternate) {  // zeros at the end of the mantissa go
        const size_t e = text.find('e');
        std::string mantissa = text.substr(0, e);
        if (mantissa.find('.') != std::string::npos) {
          mantissa.erase(mantissa.find_last_not_of('0') + 1);
          if (mantissa.back() == '.') mantissa.pop_back();
        }
        text = mantissa + text.substr(e);
      }
    }
  } else {
    if (percent) v *= 100;
    const char c = percent ? 'f' : type == 'n' ? 'g' : static_cast<char>(type | 32);
    if (precision < 0) precision = 6;
    text = FloatDigits(in, v, c, c == 'g' && precision == 0 ? 1 : precision, spec.alternate);
  }
  if (upper) MakeUpper(&text);
  if (percent) text += "%";
  const size_t whole = std::isfinite(v) ? std::min(text.find_first_not_of("0123456789"), text.size()) : 0;
  // inf and nan have no digits to fill up.
  if (!std::isfinite(v)) {
    Spec plain = spec;
    plain.grouping = '\0';
    return Laid(in, plain, std::signbit(v) && !std::isnan(v), "", text, "", 3);
  }
  return Laid(in, spec, std::signbit(v), "", text.substr(0, whole), text.substr(whole), 3);
}

std::string FormatInteger(Interpreter& in, const Value& v, const Spec& spec) {
  const char type = spec.type ? spec.type : 'd';
  if (OneOf(type, "eEfFgG%")) {
    const double d = Interpreter::ToDouble(v);
    if (std::isinf(d)) in.Fail("int too large to convert to float");
    return FormatFloat(in, d, spec, true);
  }
  if (!OneOf(type, "bcdoxXn")) in.Fail(std::string("Unknown format code '") + type + "' for object of type 'int'");
  if (spec.precision >= 0) in.Fail("Precision not allowed in integer format specifier");
  if (type == 'c') {
    if (spec.sign) in.Fail("Sign not allowed with integer format specifier 'c'");
    if (spec.alternate) in.Fail("Alternate form (#) not allowed with integer format specifier 'c'");
    if (spec.grouping) in.Fail("Cannot specify ',' with 'c'.");
    const int64_t cp = v.is_int() ? v.as_int() : v.is_bool() ? v.as_bool() : -1;
    if (cp < 0 || cp > 0x10FFFF) in.Fail("%c arg not in range(0x110000)");
    if (cp >= 0xD800 && cp < 0xE000) in.Fail("half of a surrogate pair is no character");
    std::string one;
    AppendUtf8(static_cast<uint32_t>(cp), &one);
    Spec text = spec;
    if (!text.align) text.align = spec.zero ? '=' : '>';
    const size_t missing = spec.width > 1 ? spec.width - 1 : 0;
    in.ChargeText(missing * spec.fill.size() + one.size());
    const size_t left = text.align == '<' ? 0 : text.align == '^' ? missing / 2 : missing;
    return Repeated(spec.fill, left) + one + Repeated(spec.fill, missing - left);
  }
  if (spec.grouping == ',' && OneOf(type, "boxX")) in.Fail(std::string("Cannot specify ',' with '") + type + "'.");
  if (spec.grouping && type == 'n') in.Fail("Cannot specify ',' with 'n'.");
  const uint32_t base = type == 'b' ? 2 : type == 'o' ? 8 : type == 'x' || type == 'X' ? 16 : 10;
  Digits digits = IntegerDigits(in, v, base);
  if (type == 'X') MakeUpper(&digits.text);
  const std::string prefix = spec.alternate && base != 10 ? std::string("0") + type : "";
  return Laid(in, spec, digits.negative, prefix, digits.text, "", base == 10 ? 3 : 4);
}

std::string FormatText(Interpreter& in, const std::string& s, const Spec& spec) {
  if (spec.type && spec.type != 's') in.Fail(std::string("Unknown format code '") + spec.type + "' for object of type 'str'");
  if (spec.sign) in.Fail("Sign not allowed in string format specifier");
  if (spec.alternate) in.Fail("Alternate form (#) not allowed in string format specifier");
  if (spec.align == '=') in.Fail("'=' alignment not allowed in string format specifier");
  if (spec.grouping) in.Fail("Cannot specify ',' with 's'.");
  const std::string text = spec.precision >= 0 ? Characters(s, static_cast<size_t>(spec.precision)) : s;
  const size_t size = CodePointCount(text), missing = spec.width > size ? spec.width - size : 0;
  in.ChargeText(missing * spec.fill.size() + text.size());
  const size_t left = spec.align == '>' ? missing : spec.align == '^' ? missing / 2 : 0;
  return Repeated(spec.fill, left) + text + Repeated(spec.fill, missing - left);
}

// The fields of one format string, filled in as string.Formatter does it.
class Braces {
 public:
  Braces(Interpreter& in, const Arguments& args, bool escaping) : in_(in), args_(args), escaping_(escaping) {}

  std::string Fill(const std::string& s, int depth) {
    if (depth > 2) in_.Fail("Max string recursion exceeded");
    std::string out;
    for (size_t i = 0; i < s.size(); ++i) {
      const char c = s[i];
      if ((c == '{' || c == '}') && i + 1 < s.size() && s[i + 1] == c) {
        out.push_back(c);
        ++i;
      } else if (c == '}') {
        in_.Fail("Single '}' encountered in format string");
      } else if (c == '{') {
        out += Field(s, &i, depth);
        in_.ChargeText(out.size());
      } else {
        out.push_back(c);
      }
    }
    return out;
  }

 private:
  // {name!conversion:spec}; *at is at the '{', and then at its '}'.
  std::string Field(const std::string& s, size_t* at, int depth) {
    const size_t begin = *at + 1;
    size_t end = begin;
    int open = 1;
    size_t name_end = std::string::npos;
    for (bool bracket = false; end < s.size(); ++end) {
      const char c = s[end];
      if (c == '{') ++open;
      if (c == '}' && --open == 0) break;
      if (name_end == std::string::npos) {
        if (c == '[') bracket = true;
        if (c == ']') bracket = false;
        if (c == '{') in_.Fail("unexpected '{' in field name");
        if (!bracket && (c == '!' || c == ':')) name_end = end;
      }
    }
    if (end >= s.size())
      in_.Fail(begin >= s.size() ? "Single '{' encountered in format string" : "expected '}' before end of string");
    if (name_end == std::string::npos) name_end = end;
    *at = end;
    const std::string name = s.substr(begin, name_end - begin);
    char conversion = '\0';
    size_t spec_at = name_end;
    if (spec_at < end && s[spec_at] == '!') {
      if (spec_at + 1 >= end) in_.Fail("end of string while looking for conversion specifier");
      conversion = s[spec_at + 1];
      spec_at += 2;
      if (spec_at < end && s[spec_at] != ':') in_.Fail("expected ':' after conversion specifier");
    }
    std::string spec = spec_at < end ? s.substr(spec_at + 1, end - spec_at - 1) : "";
    Value value = Named(name);
    switch (conversion) {
      case '\0': break;
      case 's': value = Value(in_.Str(value)); break;
      case 'r': value = Value(in_.Repr(value)); break;
      case 'a': value = Value(Ascii(in_.Repr(value))); break;
      default: in_.Fail(std::string("Unknown conversion specifier ") + conversion);
    }
    if (spec.find_first_of("{}") != std::string::npos) spec = Fill(spec, depth + 1);
    if (!escaping_) return in_.FormatField(value, spec);
    if (value.is_markup()) {
      if (!spec.empty()) in_.Fail("Unsupported format specification for Markup.");
      return value.as_string();
    }
    return EscapeHtml(in_.FormatField(value, spec));
  }

  // name, name.attribute, name[item] …
  Value Named(const std::string& field) {
    size_t at = std::min(field.find_first_of(".["), field.size());
    std::string first = field.substr(0, at);
    const bool digits = !first.empty() && first.find_first_not_of("0123456789") == std::string::npos;
    if (field.empty()) {
      if (manual_) in_.Fail("cannot switch from manual field specification to automatic field numbering");
      first = std::to_string(next_++);
    } else if (digits) {
      if (next_) in_.Fail("cannot switch from manual field specification to automatic field numbering");
      manual_ = true;
    }
    Value value;
    if (field.empty() || digits) {
      const size_t index = first.size() < 9 ? static_cast<size_t>(std::stoul(first)) : SIZE_MAX;
      if (index >= args_.positional.size()) in_.Fail("Replacement index " + first + " out of range for positional args tuple");
      value = args_.positional[index];
    } else {
      bool found = false;
      for (const auto& [name, v] : args_.named) {
        if (name != first) continue;
        value = v;
        found = true;
      }
      if (!found) in_.Fail("the format field '{" + field + "}' has no argument");
    }
    while (at < field.size()) {
      const bool attribute = field[at] == '.';
      const size_t end = attribute ? std::min(field.find_first_of(".[", at + 1), field.size()) : field.find(']', at + 1);
      if (end == std::string::npos) in_.Fail("Missing ']' in format string");
      const std::string part = field.substr(at + 1, end - at - 1);
      if (part.empty()) in_.Fail("Empty attribute in format string");
      const bool index = !attribute && part.size() < 18 && part.find_first_not_of("0123456789") == std::string::npos;
      value = attribute ? in_.GetAttr(value, part)
                        : in_.GetItem(value, index ? Value(static_cast<int64_t>(std::stoll(part))) : Value(part));
      at = attribute ? end : end + 1;
      if (!attribute && at < field.size() && field[at] != '.' && field[at] != '[')
        in_.Fail("Only '.' or '[' may follow ']' in format field specifier");
    }
    return value;
  }

  Interpreter& in_;
  const Arguments& args_;
  const bool escaping_;
  size_t next_ = 0;
  bool manual_ = false;
};

}  // namespace

std::string Interpreter::FormatField(const Value& v, const std::string& spec) {
  if (spec.empty()) return Str(v);
  if (!v.is_string() && !IsNumber(v)) Fail("unsupported format string passed to " + TypeName(v) + ".__format__");
  const Spec parsed = ParseSpec(*this, spec);
  if (v.is_string()) return FormatText(*this, v.as_string(), parsed);
  return v.is_float() ? FormatFloat(*this, v.as_float(), parsed, false) : FormatInteger(*this, v, parsed);
}

std::string Interpreter::FormatBraces(const std::string& format, const Arguments& args, bool escaping) {
  return Braces(*this, args, escaping).Fill(format, 0);
}

Value Interpreter::FormatPercent(const Value& format_value, const Value& values) {
  const std::string& format = format_value.as_string();
  const bool escaping = format_value.is_markup();
  auto escaped = [&](std::string text) { return escaping ? EscapeHtml(text) : text; };
  const List list = values.is_tuple() ? values.as_list() : List{values};
  // What Python takes for a mapping, so that it may be left unread.
  const bool mapping = values.is_dict() || values.is_list() || values.is_undefined() || As<RangeObject>(values);
  size_t next = 0;
  bool keyed = false;
  auto take = [&]() -> const Value& {
    if (keyed || next >= list.size()) Fail("not enough arguments for format string");
    return list[next++];
  };
  std::string out;
  for (size_t i = 0; i < format.size(); ++i) {
    if (format[i] != '%') {
      out.push_back(format[i]);
      continue;
    }
    if (++i >= format.size()) Fail("incomplete format");
    if (format[i] == '%') {
      out.push_back('%');
      continue;
    }
    const Value* value = nullptr;
    if (format[i] == '(') {
      const size_t begin = i + 1;
      int open = 1;
      for (++i; i < format.size() && open > 0; ++i) open += format[i] == '(' ? 1 : format[i] == ')' ? -1 : 0;
      if (open > 0 || i >= format.size()) Fail("incomplete format key");
      if (!mapping) Fail("format requires a mapping");
      if (!values.is_dict()) Fail("the format has no value '" + format.substr(begin, i - 1 - begin) + "'");
      value = values.as_dict().Find(std::string_view(format).substr(begin, i - 1 - begin));
      if (!value) Fail("the format has no value '" + format.substr(begin, i - 1 - begin) + "'");
      keyed = true;
    }
    bool left = false, plus = false, blank = false, alternate = false, zero = false;
    for (; i < format.size() && OneOf(format[i], "-+ #0"); ++i) {
      (format[i] == '-' ? left : format[i] == '+' ? plus : format[i] == ' ' ? blank : format[i] == '#' ? alternate : zero) = true;
    }
    auto star = [&]() -> int64_t {
      const Value& v = take();
      if (!v.is_int()) Fail("* wants int");
      if (std::abs(static_cast<double>(v.as_int())) > static_cast<double>(kMaxText)) ChargeText(kMaxText + 1);
      return v.as_int();
    };
    size_t width = 0;
    if (i < format.size() && format[i] == '*') {
      const int64_t w = star();
      left = left || w < 0;
      width = static_cast<size_t>(std::abs(w));
      ++i;
    } else {
      width = ReadCount(*this, format, &i);
    }
    int precision = -1;
    if (i < format.size() && format[i] == '.') {
      if (++i < format.size() && format[i] == '*') {
        precision = static_cast<int>(std::max<int64_t>(0, star()));
        ++i;
      } else {
        precision = static_cast<int>(ReadCount(*this, format, &i));
      }
    }
    if (i < format.size() && (format[i] == 'h' || format[i] == 'l' || format[i] == 'L')) ++i;
    if (i >= format.size()) Fail("incomplete format");
    const char type = format[i];
    if (!OneOf(type, "sradiuxXoeEfFgGc")) Fail(std::string("unsupported format character '") + type + "'");
    const Value& v = value ? *value : take();
    std::string sign, prefix, text;
    bool numeric = true;
    if (type == 's' || type == 'r' || type == 'a') {
      numeric = false;
      text = type == 's' ? (escaping ? Escape(v).as_string() : Str(v)) : escaped(type == 'r' ? Repr(v) : Ascii(Repr(v)));
      if (precision >= 0) text = Characters(text, static_cast<size_t>(precision));
    } else if (type == 'c') {
      if (escaping) Fail("the format '%c' of a Markup is not supported");
      numeric = false;
      if (v.is_string() && CodePointCount(v.as_string()) == 1) {
        text = v.as_string();
      } else if (v.is_int() || v.is_bool()) {
        const int64_t cp = v.is_int() ? v.as_int() : v.as_bool();
        if (cp < 0 || cp > 0x10FFFF) Fail("%c arg not in range(0x110000)");
        if (cp >= 0xD800 && cp < 0xE000) Fail("half of a surrogate pair is no character");
        AppendUtf8(static_cast<uint32_t>(cp), &text);
      } else {
        Fail("%c requires int or char");
      }
    } else if (OneOf(type, "diuxXo")) {
      const bool whole = type == 'd' || type == 'i' || type == 'u';
      if (!IsInteger(v) && !(v.is_float() && whole)) {
        Fail(std::string("%") + type + " format: " + (whole ? "a real number" : "an integer") + " is required, not " +
             TypeName(v));
      }
      if (escaping && !whole) Fail(std::string("%") + type + " format: an integer is required, not _MarkupEscapeHelper");
      Digits digits = IntegerDigits(*this, v.is_float() ? ToInteger(v.as_float()) : v,
                                    type == 'o'                  ? 8
                                    : type == 'x' || type == 'X' ? 16
                                                                 : 10);
      if (type == 'X') MakeUpper(&digits.text);
      if (precision > 0) ChargeText(static_cast<size_t>(precision));
      if (precision > static_cast<int>(digits.text.size()))
        digits.text.insert(0, static_cast<size_t>(precision) - digits.text.size(), '0');
      sign = digits.negative ? "-" : "";
      text = std::move(digits.text);
      if (alternate && !whole) prefix = std::string("0") + type;
    } else {
      if (!IsNumber(v)) Fail("must be real number, not " + TypeName(v));
      const double number = ToDouble(v);
      if (std::isinf(number) && !v.is_float()) Fail("int too large to convert to float");
      const char c = static_cast<char>(type | 32);
      if (precision < 0) precision = 6;
      text = FloatDigits(*this, number, c, c == 'g' && precision == 0 ? 1 : precision, alternate);
      if (type != c) MakeUpper(&text);
      sign = std::signbit(number) && !std::isnan(number) ? "-" : "";
    }
    if (numeric && sign.empty()) sign = plus ? "+" : blank ? " " : "";
    const size_t size = sign.size() + prefix.size() + CodePointCount(text), missing = width > size ? width - size : 0;
    ChargeText(out.size() + missing + text.size() > kMaxText ? kMaxText + 1 : missing + text.size());
    if (left) {
      out += sign + prefix + text + std::string(missing, ' ');
    } else if (zero && numeric) {
      out += sign + prefix + std::string(missing, '0') + text;
    } else {
      out += std::string(missing, ' ') + sign + prefix + text;
    }
  }
  if (!keyed && next < list.size() && !mapping) Fail("not all arguments converted during string formatting");
  return escaping ? Value::Markup(std::move(out)) : Value(std::move(out));
}

}  // namespace temper::text::jinja
