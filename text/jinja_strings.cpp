// Python's methods of strings, and of Markup, which escapes what is put into it.
#include <algorithm>

#include "text/jinja_runtime.h"
#include "text/unicode.h"
#include "text/utf8.h"

namespace temper::text::jinja {

std::string StripText(std::string_view s, const Value& chars, bool left, bool right) {
  const std::vector<uint32_t> points = ToCodePoints(s);
  const std::vector<uint32_t> set = chars.is_string() ? ToCodePoints(chars.as_string()) : std::vector<uint32_t>();
  auto strips = [&](uint32_t cp) {
    return chars.is_string() ? std::find(set.begin(), set.end(), cp) != set.end() : IsPythonSpace(cp);
  };
  size_t begin = 0, end = points.size();
  while (left && begin < end && strips(points[begin])) ++begin;
  while (right && end > begin && strips(points[end - 1])) --end;
  return FromCodePoints(points.data() + begin, points.data() + end);
}

std::vector<std::string> SplitLines(std::string_view s, bool keep_ends) {
  std::vector<std::string> out;
  std::string line;
  for (size_t i = 0; i < s.size();) {
    const Utf8Char c = ReadUtf8(s, i);
    const bool ends =
        (c.cp >= 0xA && c.cp <= 0xD) || (c.cp >= 0x1C && c.cp <= 0x1E) || c.cp == 0x85 || c.cp == 0x2028 || c.cp == 0x2029;
    size_t length = c.length;
    if (c.cp == '\r' && i + 1 < s.size() && s[i + 1] == '\n') length = 2;
    if (!ends || keep_ends) line.append(s.substr(i, length));
    if (ends) out.push_back(std::exchange(line, ""));
    i += length;
  }
  if (!line.empty()) out.push_back(line);
  return out;
}

std::string ReplaceText(Interpreter& in, const std::string& s, const std::string& from, const std::string& to, int64_t count) {
  std::string out;
  auto put = [&](std::string_view piece) {
    out.append(piece);
    in.ChargeText(out.size() > kMaxText ? out.size() : piece.size());
  };
  if (from.empty()) {  // between all characters
    size_t i = 0;
    for (;; ) {
      if (count == 0) break;
      if (count > 0) --count;
      put(to);
      if (i >= s.size()) break;
      const size_t length = ReadUtf8(s, i).length;
      put(std::string_view(s).substr(i, length));
      i += length;
    }
    if (i < s.size()) put(std::string_view(s).substr(i));
    return out;
  }
  size_t at = 0;
  while (count != 0) {
    const size_t found = s.find(from, at);
    if (found == std::string::npos) break;
    put(std::string_view(s).substr(at, found - at));
    put(to);
    at = found + from.size();
    if (count > 0) --count;
  }
  put(std::string_view(s).substr(at));
  return out;
}

namespace {

List SplitText(Interpreter& in, const std::string& s, const Value& separator, int64_t most, bool from_right) {
  std::vector<std::string> parts;
  if (!separator.is_none()) {
    if (!separator.is_string()) in.Fail("must be str or None, not " + Interpreter::TypeName(separator));
    const std::string& sep = separator.as_string();
    if (sep.empty()) in.Fail("empty separator");
    if (!from_right) {
      size_t at = 0;
      for (size_t found; most != 0 && (found = s.find(sep, at)) != std::string::npos; at = found + sep.size(), --most) {
        parts.push_back(s.substr(at, found - at));
      }
      parts.push_back(s.substr(at));
    } else {
      size_t end = s.size();
      while (most != 0 && end >= sep.size()) {
        const size_t found = s.rfind(sep, end - sep.size());
        if (found == std::string::npos) break;
        parts.push_back(s.substr(found + sep.size(), end - found - sep.size()));
        end = found;
        --most;
      }
      parts.push_back(s.substr(0, end));
      std::reverse(parts.begin(), parts.end());
    }
  } else {
    const std::vector<uint32_t> points = ToCodePoints(s);
    auto text = [&](size_t a, size_t b) { return FromCodePoints(points.data() + a, points.data() + b); };
    if (!from_right) {
      size_t i = 0;
      for (;;) {
        while (i < points.size() && IsPythonSpace(points[i])) ++i;
        if (i >= points.size()) break;
        if (most == 0) {
          parts.push_back(text(i, points.size()));
          break;
        }
        size_t end = i;
        while (end < points.size() && !IsPythonSpace(points[end])) ++end;
        parts.push_back(text(i, end));
        i = end;
        --most;
      }
    } else {
      size_t end = points.size();
      for (;;) {
        while (end > 0 && IsPythonSpace(points[end - 1])) --end;
        if (end == 0) break;
        if (most == 0) {
          parts.push_back(text(0, end));
          break;
        }
        size_t begin = end;
        while (begin > 0 && !IsPythonSpace(points[begin - 1])) --begin;
        parts.push_back(text(begin, end));
        end = begin;
        --most;
      }
      std::reverse(parts.begin(), parts.end());
    }
  }
  in.Charge(parts.size());
  return List(parts.begin(), parts.end());
}

bool All(const std::string& s, bool (*holds)(uint32_t)) {
  const std::vector<uint32_t> points = ToCodePoints(s);
  return !points.empty() && std::all_of(points.begin(), points.end(), holds);
}

bool StartsOrEnds(Interpreter& in, std::string_view s, const Value& what, bool starts) {
  if (what.kind() == Value::Kind::kTuple) {
    for (const Value& v : what.as_list()) {
      if (StartsOrEnds(in, s, v, starts)) return true;
    }
    return false;
  }
  if (!what.is_string())
    in.Fail("startswith or endswith needs a string or a tuple of strings, not " + Interpreter::TypeName(what));
  return starts ? s.starts_with(what.as_string()) : s.ends_with(what.as_string());
}

std::string Pad(Interpreter& in, const std::string& s, int64_t width, const std::string& fill, double left_share) {
  const int64_t missing = width - static_cast<int64_t>(CodePointCount(s));
  if (missing <= 0) return s;
  in.ChargeText(static_cast<uint64_t>(missing) > kMaxText ? kMaxText + 1 : static_cast<size_t>(missing) * fill.size());
  int64_t left = static_cast<int64_t>(static_cast<double>(missing) * left_share);
  if (left_share == 0.5) left = missing / 2 + (missing & width & 1);  // as CPython's str.center
  std::string out;
  for (int64_t i = 0; i < left; ++i) out += fill;
  out += s;
  for (int64_t i = left; i < missing; ++i) out += fill;
  return out;
}

// The part of s between two positions as Python's find, count and startswith take them; nullopt when they cross.
struct Part {
  std::string text;
  int64_t start = 0;  // in characters
};

std::optional<Part> PartOf(const std::string& s, int64_t start, int64_t stop) {
  const std::vector<uint32_t> points = ToCodePoints(s);
  const int64_t size = static_cast<int64_t>(points.size());
  if (start < 0) start = std::max<int64_t>(0, start + size);
  if (stop < 0) stop = std::max<int64_t>(0, stop + size);
  stop = std::min(stop, size);
  if (start > stop) return std::nullopt;
  return Part{FromCodePoints(points.data() + start, points.data() + stop), start};
}

// The table of str.translate at a code point: what stands for it, or nullopt to leave it.
std::optional<std::string> Translated(Interpreter& in, const Value& table, uint32_t cp) {
  const Value* found = nullptr;
  Value item;
  if (table.is_dict()) {
    found = table.as_dict().Find(Value(static_cast<int64_t>(cp)));
  } else if (IsSequence(table) || table.is_string() || As<RangeObject>(table)) {
    item = in.GetItem(table, Value(static_cast<int64_t>(cp)));
    if (!item.is_undefined()) found = &item;
  } else {
    in.Fail("'" + Interpreter::TypeName(table) + "' object is not subscriptable");
  }
  if (!found) return std::nullopt;
  if (found->is_none()) return "";
  if (found->is_string()) return found->as_string();
  if (!found->is_int()) in.Fail("character mapping must return integer, None or str");
  if (found->as_int() < 0 || found->as_int() > 0x10FFFF) in.Fail("character mapping must be in range(0x110000)");
  if (found->as_int() >= 0xD800 && found->as_int() < 0xE000) in.Fail("half of a surrogate pair is no character");
  std::string out;
  AppendUtf8(static_cast<uint32_t>(found->as_int()), &out);
  return out;
}

Value MakeTranslation(Interpreter& in, ArgumentReader& reader) {
  const Value& first = reader.Required("");
  const Value *second = reader.Next(""), *third = reader.Next("");
  reader.Done();
  Dict out;
  if (!second) {
    if (!first.is_dict()) in.Fail("if you give only one argument to maketrans it must be a dict");
    for (const auto& [key, value] : first.as_dict().items()) {
      const bool character = key.is_string() && CodePointCount(key.as_string()) == 1;
      if (!character && !key.is_int()) in.Fail("keys in translate table must be strings of length 1 or integers");
      out.Set(character ? Value(static_cast<int64_t>(ReadUtf8(key.as_string(), 0).cp)) : key, value);
    }
    return Value(std::move(out));
  }
  if (!first.is_string() || !second->is_string() || (third && !third->is_string())) in.Fail("maketrans needs strings");
  const std::vector<uint32_t> from = ToCodePoints(first.as_string()), to = ToCodePoints(second->as_string());
  if (from.size() != to.size()) in.Fail("the first two maketrans arguments must have equal length");
  in.Charge(from.size());
  for (size_t i = 0; i < from.size(); ++i) out.Set(static_cast<int64_t>(from[i]), static_cast<int64_t>(to[i]));
  for (uint32_t cp : third ? ToCodePoints(third->as_string()) : std::vector<uint32_t>())
    out.Set(static_cast<int64_t>(cp), nullptr);
  return Value(std::move(out));
}

bool OneOf(std::string_view name, std::initializer_list<std::string_view> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace

Value Interpreter::CallMarkup(const Value& markup, std::string_view name, Arguments& args) {
  if (name == "format" || name == "format_map")
    return Value::Markup(CallString(markup.as_string(), name, args, /*escaping=*/true).as_string());
  if (name == "escape" || name == "striptags" || name == "unescape") {
    ArgumentReader reader(*this, args, std::string(name));
    if (name == "escape") {
      const Value& v = reader.Required("s");
      reader.Done();
      return Escape(v);
    }
    reader.Done();
    return name == "striptags" ? StripTags(*this, markup.as_string()) : UnescapeHtml(*this, markup.as_string());
  }
  if (name == "replace" || OneOf(name, {"ljust", "rjust", "center"})) {
    if (args.positional.size() > 1) args.positional[1] = Escape(args.positional[1]);
  }
  if (name == "join" && args.positional.size() == 1) {
    List items = Iterate(args.positional[0]);
    for (Value& item : items) item = Escape(item);
    args.positional[0] = Value(std::move(items));
  }
  Value out = CallString(markup.as_string(), name, args);
  if (name == "maketrans") return out;
  if (out.is_string()) return Value::Markup(out.as_string());
  if (!IsSequence(out)) return out;
  List parts;
  for (const Value& part : out.as_list()) parts.push_back(Value::Markup(part.as_string()));
  return out.is_list() ? Value(std::move(parts)) : Value::Tuple(std::move(parts));
}

Value Interpreter::CallString(const std::string& s, std::string_view name, Arguments& args, bool escaping) {
  ArgumentReader reader(*this, args, std::string(name));
  if (name == "strip" || name == "lstrip" || name == "rstrip") {
    const Value chars = reader.Or("", nullptr);
    reader.Done();
    if (!chars.is_none() && !chars.is_string()) Fail(std::string(name) + " arg must be None or str");
    return Value(StripText(s, chars, name != "rstrip", name != "lstrip"));
  }
  if (name == "split" || name == "rsplit") {
    const Value separator = reader.Or("sep", nullptr);
    const int64_t most = reader.Int("maxsplit", -1);
    reader.Done();
    return Value(SplitText(*this, s, separator, most, name == "rsplit"));
  }
  if (name == "splitlines") {
    const bool keep = reader.IntFlag("keepends", false);
    reader.Done();
    const std::vector<std::string> lines = SplitLines(s, keep);
    Charge(lines.size());
    return Value(List(lines.begin(), lines.end()));
  }
  if (name == "startswith" || name == "endswith") {
    const Value what = reader.Required("");
    const int64_t start = reader.IntOrNone("", 0), stop = reader.IntOrNone("", INT64_MAX);
    reader.Done();
    const std::optional<Part> part = PartOf(s, start, stop);
    // Crossed ends hold nothing, not even what is empty; what is asked is checked all the same.
    return StartsOrEnds(*this, part ? part->text : "", what, name == "startswith") && part.has_value();
  }
  if (name == "replace") {
    const std::string from = reader.RequiredText(""), to = reader.RequiredText("");
    const int64_t count = reader.Int("count", -1);
    reader.Done();
    return Value(ReplaceText(*this, s, from, to, count));
  }
  if (OneOf(name, {"find", "rfind", "index", "rindex", "count"})) {
    const std::string what = reader.RequiredText("");
    const int64_t start = reader.IntOrNone("", 0), stop = reader.IntOrNone("", INT64_MAX);
    reader.Done();
    const std::optional<Part> part = PartOf(s, start, stop);
    if (name == "count") {
      if (!part) return 0;
      if (what.empty()) return static_cast<int64_t>(CodePointCount(part->text)) + 1;
      int64_t n = 0;
      for (size_t at = part->text.find(what); at != std::string::npos; at = part->text.find(what, at + what.size())) ++n;
      return n;
    }
    const size_t at = !part ? std::string::npos : name[0] == 'r' ? part->text.rfind(what) : part->text.find(what);
    if (at == std::string::npos) {
      if (name == "find" || name == "rfind") return -1;
      Fail("substring not found");
    }
    return static_cast<int64_t>(CodePointCount(std::string_view(part->text).substr(0, at))) + part->start;
  }
  if (name == "join") {
    const Value& list = reader.Required("");
    reader.Done();
    std::string out;
    bool first = true;
    for (const Value& v : Iterate(list)) {
      if (!v.is_string()) Fail("sequence item: expected str instance, " + TypeName(v) + " found");
      if (!first) out += s;
      first = false;
      out += v.as_string();
      ChargeText(out.size() > kMaxText ? out.size() : v.as_string().size() + s.size());
    }
    return Value(std::move(out));
  }
  if (name == "partition" || name == "rpartition") {
    const std::string sep = reader.RequiredText("");
    reader.Done();
    if (sep.empty()) Fail("empty separator");
    const size_t at = name == "partition" ? s.find(sep) : s.rfind(sep);
    if (at == std::string::npos) return name == "partition" ? Value::Tuple({s, "", ""}) : Value::Tuple({"", "", s});
    return Value::Tuple({s.substr(0, at), sep, s.substr(at + sep.size())});
  }
  if (name == "removeprefix" || name == "removesuffix") {
    const std::string what = reader.RequiredText("");
    reader.Done();
    if (name == "removeprefix") return s.starts_with(what) ? s.substr(what.size()) : s;
    return s.ends_with(what) ? s.substr(0, s.size() - what.size()) : s;
  }
  if (name == "format") return Value(FormatBraces(s, args, escaping));
  if (name == "format_map") {
    const Value& mapping = reader.Required("");
    reader.Done();
    if (!mapping.is_dict()) Fail("format_map with a " + TypeName(mapping) + " is not supported");
    Arguments named;
    for (const auto& [key, value] : mapping.as_dict().items()) {
      if (key.is_string()) named.named.emplace_back(key.as_string(), value);
    }
    return Value(FormatBraces(s, named, escaping));
  }
  if (name == "zfill") {
    const int64_t width = reader.RequiredInt("");
    reader.Done();
    const bool sign = !s.empty() && (s[0] == '-' || s[0] == '+');
    return Value((sign ? s.substr(0, 1) : "") + Pad(*this, s.substr(sign), width - sign, "0", 1.0));
  }
  if (name == "ljust" || name == "rjust" || name == "center") {
    const int64_t width = reader.RequiredInt("");
    const std::string fill = reader.Text("", " ");
    reader.Done();
    if (CodePointCount(fill) != 1) Fail("The fill character must be exactly one character long");
    return Value(Pad(*this, s, width, fill, name == "ljust" ? 0.0 : name == "rjust" ? 1.0 : 0.5));
  }
  if (name == "expandtabs") {
    const int64_t size = reader.Int("tabsize", 8);
    reader.Done();
    std::string out;
    int64_t column = 0;
    for (uint32_t cp : ToCodePoints(s)) {
      if (cp == '\t') {
        const int64_t n = size > 0 ? size - column % size : 0;
        ChargeText(static_cast<uint64_t>(n) + out.size());
        out.append(static_cast<size_t>(n), ' ');
        column += n;
      } else {
        AppendUtf8(cp, &out);
        column = cp == '\n' || cp == '\r' ? 0 : column + 1;
      }
    }
    return Value(std::move(out));
  }
  if (name == "translate") {
    const Value table = reader.Required("");
    reader.Done();
    std::string out;
    for (uint32_t cp : ToCodePoints(s)) {
      if (const auto instead = Translated(*this, table, cp)) {
        out += *instead;
      } else {
        AppendUtf8(cp, &out);
      }
      ChargeText(out.size() > kMaxText ? out.size() : 64);
    }
    return Value(std::move(out));
  }
  if (name == "maketrans") return MakeTranslation(*this, reader);
  if (name == "encode") Fail("the method 'encode' of a string is not supported: there are no bytes here");
  reader.Done();
  if (name == "upper") return Value(Upper(s));
  if (name == "lower") return Value(Lower(s));
  if (name == "casefold") return Value(CaseFold(s));
  if (name == "title") return Value(Title(s));
  if (name == "capitalize") return Value(Capitalize(s));
  if (name == "swapcase") return Value(SwapCase(s));
  if (name == "isdecimal") return All(s, [](uint32_t cp) { return DecimalValue(cp) >= 0; });
  if (name == "isdigit") return All(s, IsPythonDigit);
  if (name == "isnumeric") return All(s, IsPythonNumeric);
  if (name == "isalpha") return All(s, IsAlpha);
  if (name == "isalnum") return All(s, [](uint32_t cp) { return IsAlpha(cp) || IsPythonNumeric(cp); });
  if (name == "isspace") return All(s, IsPythonSpace);
  if (name == "isascii") return s.empty() || All(s, [](uint32_t cp) { return cp < 0x80; });
  if (name == "isprintable") return s.empty() || All(s, IsPrintable);
  if (name == "isidentifier") return All(s, ContinuesIdentifier) && BeginsIdentifier(ReadUtf8(s, 0).cp);
  bool cased = false;
  if (name == "istitle") {  // words begin with a capital and go on with small letters
    bool inside = false;
    for (uint32_t cp : ToCodePoints(s)) {
      const bool upper = IsUppercase(cp) || IsTitlecase(cp), lower = IsLowercase(cp);
      if ((upper && inside) || (lower && !inside)) return false;
      inside = upper || lower;
      cased = cased || inside;
    }
    return cased;
  }
  // isupper, islower: at least one cased character and none of the other case.
  for (uint32_t cp : ToCodePoints(s)) {
    const bool upper = IsUppercase(cp), lower = IsLowercase(cp);
    if (IsTitlecase(cp) || (name == "isupper" ? lower : upper)) return false;
    cased = cased || upper || lower;
  }
  return cased;
}

}  // namespace temper::text::jinja
