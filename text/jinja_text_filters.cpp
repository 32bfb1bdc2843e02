// Filters over texts, by Jinja's names and with its arguments.
#include <algorithm>
#include <cctype>
#include <functional>

#include "text/jinja_runtime.h"
#include "text/json.h"
#include "text/unicode.h"
#include "text/utf8.h"

namespace temper::text::jinja {
namespace {

using Points = std::vector<uint32_t>;

// \w of Python's regular expressions.
bool IsWord(uint32_t cp) { return cp == '_' || IsAlpha(cp) || IsPythonNumeric(cp) || IsPythonDigit(cp); }

Value IndentFilter(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader reader(in, args, "indent");
  const Value width = reader.Or("width", 4);
  const bool first = reader.Flag("first", false), blank = reader.Flag("blank", false);
  reader.Done();
  if (!v.is_string()) in.Fail("indent needs a text, not " + Interpreter::TypeName(v));
  std::string indention;
  if (width.is_string()) {
    if (width.is_markup() && !v.is_markup()) in.Fail("indent by a Markup is not supported");
    indention = width.as_string();
  } else if (width.is_int() || width.is_bool()) {
    const int64_t n = std::max<int64_t>(0, width.is_int() ? width.as_int() : width.as_bool());
    in.ChargeText(static_cast<uint64_t>(n));
    indention.assign(static_cast<size_t>(n), ' ');
  } else {
    in.Fail("indent needs a width, not " + Interpreter::TypeName(width));
  }
  const std::vector<std::string> lines = SplitLines(v.as_string() + "\n", false);
  std::string out = first ? indention : "";
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i) out += "\n";
    if (i && (blank || !lines[i].empty())) out += indention;
    out += lines[i];
    in.ChargeText(out.size() > kMaxText ? out.size() : lines[i].size() + indention.size());
  }
  return v.is_markup() ? Value::Markup(std::move(out)) : Value(std::move(out));
}

Value TruncateFilter(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader reader(in, args, "truncate");
  const int64_t length = reader.Int("length", 255);
  const bool kill_words = reader.Flag("killwords", false);
  const Value end = reader.Or("end", "...");
  const int64_t leeway = reader.IntOrNone("leeway", 5);
  reader.Done();
  const int64_t end_size = static_cast<int64_t>(in.Length(end));
  if (length < end_size) in.Fail("expected length >= " + std::to_string(end_size) + ", got " + std::to_string(length));
  if (leeway < 0) in.Fail("expected leeway >= 0, got " + std::to_string(leeway));
  const int64_t size = static_cast<int64_t>(in.Length(v));
  if (size - leeway <= length) return v;
  if (!v.is_string() || !end.is_string()) in.Fail("truncate cannot cut " + Interpreter::TypeName(v));
  Value cut = in.Slice(v, nullptr, length - end_size, nullptr);
  if (!kill_words) cut = in.CallMethod(cut, "rsplit", {" ", 1}).as_list()[0];
  return in.Arithmetic("+", cut, end);
}

Value TitleFilter(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader(in, args, "title").Done();
  std::string out, word;
  bool first = true;
  auto flush = [&] {
    out += Lower(word);
    word.clear();
  };
  for (uint32_t cp : ToCodePoints(in.Str(v))) {
    const bool separator = IsPythonSpace(cp) || cp == '-' || cp == '(' || cp == '{' || cp == '[' || cp == '<';
    if (separator) {
      flush();
      AppendUtf8(cp, &out);
      first = true;
    } else if (std::exchange(first, false)) {
      std::string one;
      AppendUtf8(cp, &one);
      out += Upper(one);
    } else {
      AppendUtf8(cp, &word);
    }
  }
  flush();
  return Value(std::move(out));
}

// The pieces that textwrap cuts a text into: words, white space, and words at their hyphens where asked.
std::vector<std::pair<size_t, size_t>> WrapChunks(const Points& s, bool hyphens) {
  auto space = [&](size_t i) { return i < s.size() && ((s[i] >= 9 && s[i] <= 13) || s[i] == ' '); };
  auto at = [&](size_t i) -> uint32_t { return i < s.size() ? s[i] : 0; };
  auto word = [&](size_t i) { return i < s.size() && IsWord(s[i]); };
  auto letter = [&](size_t i) { return word(i) && DecimalValue(s[i]) < 0; };
  auto punctuated = [&](size_t i) {
    return word(i) || (i < s.size() && (s[i] == '!' || s[i] == '"' || s[i] == '\'' || s[i] == '&' || s[i] == '.' ||
                                        s[i] == ',' || s[i] == '?'));
  };
  // Two or more dashes before a word, as between words; the end of them, or 0.
  auto dashes = [&](size_t i) {
    size_t end = i;
    while (at(end) == '-') ++end;
    return end >= i + 2 && word(end) ? end : 0;
  };
  std::vector<std::pair<size_t, size_t>> out;
  for (size_t i = 0; i < s.size();) {
    size_t end = i;
    if (space(i)) {
      while (space(end)) ++end;
    } else if (!hyphens) {
      while (end < s.size() && !space(end)) ++end;
    } else if (i > 0 && punctuated(i - 1) && dashes(i)) {
      end = dashes(i);
    } else {
      for (end = i + 1;; ++end) {
        if (at(end) == '-' && end >= 1) {
          const bool before =
              end >= 2 && letter(end - 1) && (letter(end - 2) || (end >= 3 && at(end - 2) == '-' && letter(end - 3)));
          const bool after = letter(end + 1) && (letter(end + 2) || (at(end + 2) == '-' && letter(end + 3)));
          if (before && after) {
            ++end;
            break;
          }
        }
        if (end >= s.size() || space(end) || (punctuated(end - 1) && dashes(end))) break;
      }
    }
    out.emplace_back(i, end);
    i = end;
  }
  return out;
}

// textwrap.wrap of one line, tabs and newlines kept as they are.
std::vector<std::string> Wrapped(Interpreter& in, const std::string& line, int64_t given_width, bool break_words, bool hyphens) {
  if (given_width <= 0) in.Fail("invalid width " + std::to_string(given_width) + " (must be > 0)");
  const Points s = ToCodePoints(line);
  const size_t width = static_cast<size_t>(given_width);
  std::vector<std::pair<size_t, size_t>> chunks = WrapChunks(s, hyphens);
  in.Charge(chunks.size() + s.size() / 2);
  auto blank = [&](const std::pair<size_t, size_t>& c) {
    return std::all_of(s.begin() + static_cast<long>(c.first), s.begin() + static_cast<long>(c.second), IsPythonSpace);
  };
  std::vector<std::string> out;
  for (size_t at = 0; at < chunks.size();) {
    std::vector<std::pair<size_t, size_t>> now;
    size_t size = 0;
    if (!out.empty() && blank(chunks[at])) ++at;
    while (at < chunks.size() && size + chunks[at].second - chunks[at].first <= width) {
      size += chunks[at].second - chunks[at].first;
      now.push_back(chunks[at++]);
    }
    if (at < chunks.size() && chunks[at].second - chunks[at].first > width) {  // fits into no line
      auto& [begin, end] = chunks[at];
      const size_t room = width - size;
      if (break_words) {
        size_t cut = begin + room;
        if (hyphens) {  // after the last hyphen, when something else stands before it
          size_t hyphen = cut;
          while (hyphen > begin && s[hyphen - 1] != '-') --hyphen;
          const size_t dash = hyphen > begin ? hyphen - 1 : begin;
          if (hyphen > begin && dash > begin &&
              std::any_of(s.begin() + static_cast<long>(begin), s.begin() + static_cast<long>(dash),
                          [](uint32_t c) { return c != '-'; })) {
            cut = hyphen;
          }
        }
        now.emplace_back(begin, cut);
        begin = cut;
      } else if (now.empty()) {
        now.push_back(chunks[at++]);
      }
    }
    if (!now.empty() && blank(now.back())) now.pop_back();
    if (now.empty()) continue;
    in.Charge(now.back().second - now.front().first);
    out.push_back(FromCodePoints(s.data() + now.front().first, s.data() + now.back().second));
  }
  return out;
}

Value WordWrapFilter(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader reader(in, args, "wordwrap");
  const int64_t width = reader.Int("width", 79);
  const bool break_words = reader.Flag("break_long_words", true);
  const Value given = reader.Or("wrapstring", nullptr);
  const bool hyphens = reader.Flag("break_on_hyphens", true);
  reader.Done();
  if (!v.is_string()) in.Fail("wordwrap needs a text, not " + Interpreter::TypeName(v));
  if (!given.is_none() && (!given.is_string() || given.is_markup() || v.is_markup()))
    in.Fail("wordwrap of such values is not supported");
  in.ChargeText(v.as_string().size());
  List lines;
  for (const std::string& line : SplitLines(v.as_string(), false)) {
    List parts;
    for (std::string& part : Wrapped(in, line, width, break_words, hyphens)) parts.emplace_back(std::move(part));
    lines.push_back(in.CallMethod(given.is_none() ? Value("\n") : given, "join", {Value(std::move(parts))}));
  }
  return in.CallMethod(given.is_none() ? Value("\n") : given, "join", {Value(std::move(lines))});
}

// Python's quote; in a query string a space is '+' and '/' is quoted.
std::string UrlQuote(std::string_view s, bool query) {
  std::string out;
  for (char c : s) {
    const unsigned char b = static_cast<unsigned char>(c);
    if (query && c == ' ') {
      out.push_back('+');
    } else if (std::isalnum(b) || c == '_' || c == '.' || c == '-' || c == '~' || (c == '/' && !query)) {
      out.push_back(c);
    } else {
      char buffer[4];
      std::snprintf(buffer, sizeof(buffer), "%%%02X", b);
      out += buffer;
    }
  }
  return out;
}

Value UrlEncodeFilter(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader(in, args, "urlencode").Done();
  const bool iterable = in.HasLength(v) || As<GeneratorObject>(v);
  if (v.is_string() || !iterable) return Value(UrlQuote(in.Str(v), false));
  std::string out;
  bool first = true;
  const Interpreter::Items items = in.Open(v.is_dict() ? in.CallMethod(v, "items") : v);
  for (Value item; items(&item);) {
    const List pair = in.Iterate(item);
    if (pair.size() != 2) in.Fail("urlencode needs pairs");
    if (!std::exchange(first, false)) out += "&";
    out += UrlQuote(in.Str(pair[0]), true) + "=" + UrlQuote(in.Str(pair[1]), true);
    in.ChargeText(out.size() > kMaxText ? out.size() : 64);
  }
  return Value(std::move(out));
}

Value JoinFilter(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader reader(in, args, "join");
  const Value d = reader.Or("d", "");
  const Value attribute = reader.Or("attribute", nullptr);
  reader.Done();
  List texts;
  const Interpreter::Items items = in.Open(v);
  bool markup = d.is_markup();
  for (Value item; items(&item);) {
    if (!attribute.is_none())
      item = attribute.is_string() ? in.GetPath(item, attribute.as_string()) : in.GetItem(item, attribute);
    markup = markup || item.is_markup();
    texts.push_back(in.SoftStr(item));
  }
  if (in.autoescape() && markup) return in.CallMethod(in.Escape(d), "join", {Value(std::move(texts))});
  return in.CallMethod(Value(in.Str(d)), "join", {Value(std::move(texts))});
}

Value ReplaceFilter(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader reader(in, args, "replace");
  const Value old = reader.Required("old"), now = reader.Required("new");
  const Value count = reader.IntOrNone("count", -1);
  reader.Done();
  if (!in.autoescape()) return in.CallMethod(Value(in.Str(v)), "replace", {Value(in.Str(old)), Value(in.Str(now)), count});
  const bool escapes = old.is_markup() || (now.is_markup() && !v.is_markup());
  return in.CallMethod(escapes ? in.Escape(v) : in.SoftStr(v), "replace", {in.SoftStr(old), in.SoftStr(now), count});
}

Value TrimFilter(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader reader(in, args, "trim");
  const Value chars = reader.Or("chars", nullptr);
  reader.Done();
  return in.CallMethod(in.SoftStr(v), "strip", {chars});
}

Value CenterFilter(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader reader(in, args, "center");
  const Value width = reader.Int("width", 80);
  reader.Done();
  return in.CallMethod(in.SoftStr(v), "center", {width});
}

Value FormatFilter(Interpreter& in, const Value& v, Arguments& args) {
  if (!args.positional.empty() && !args.named.empty()) in.Fail("can't handle positional and keyword arguments at the same time");
  Dict named;
  for (const auto& [name, value] : args.named) named.Set(name, value);
  return in.FormatPercent(in.SoftStr(v), args.named.empty() ? Value::Tuple(args.positional) : Value(std::move(named)));
}

Value XmlAttrFilter(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader reader(in, args, "xmlattr");
  const bool space = reader.Flag("autospace", true);
  reader.Done();
  if (!v.is_dict()) in.Fail("xmlattr needs a dict, not " + Interpreter::TypeName(v));
  std::string out;
  for (const auto& [key, value] : v.as_dict().items()) {
    if (value.is_none() || value.is_undefined()) continue;
    if (!key.is_string()) in.Fail("xmlattr needs strings as keys, not " + Interpreter::TypeName(key));
    if (key.as_string().find_first_of(" \t\n\r\f\v/>=") != std::string::npos)
      in.Fail("Invalid character in attribute name: " + in.Repr(key));
    if (!out.empty() || space) out += " ";
    out += in.Escape(key).as_string() + "=\"" + in.Escape(value).as_string() + "\"";
    in.ChargeText(out.size() > kMaxText ? out.size() : 64);
  }
  return in.autoescape() ? Value::Markup(std::move(out)) : Value(std::move(out));
}

Value FileSizeFilter(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader reader(in, args, "filesizeformat");
  const bool binary = reader.Flag("binary", false);
  reader.Done();
  if (v.is_undefined()) in.FailUndefined(v);
  const auto parsed = v.is_string() ? ParseFloat(v.as_string()) : std::nullopt;
  if (!IsNumber(v) && !parsed) in.Fail("filesizeformat needs a number, not " + Interpreter::TypeName(v));
  const Value bytes = parsed ? *parsed : Interpreter::ToDouble(v), base = binary ? 1024 : 1000;
  if (in.Equal(bytes, 1)) return "1 Byte";
  if (in.Less(bytes, base)) return Value(in.Str(in.ToInteger(bytes.as_float())) + " Bytes");
  const std::string_view prefixes = binary ? "KMGTPEZY" : "kMGTPEZY";
  Value unit = base;
  size_t i = 0;
  for (;; ++i) {
    unit = in.Arithmetic("*", unit, base);
    if (i + 1 == prefixes.size() || in.Less(bytes, unit)) break;
  }
  const Value scaled = in.Arithmetic("/", in.Arithmetic("*", base, bytes), unit);
  return Value(in.FormatField(scaled, ".1f") + " " + std::string(prefixes.substr(i, 1)) + (binary ? "iB" : "B"));
}

// pprint.pformat with its defaults: as repr, but keys sorted, and what is longer than 80 characters laid over lines.
class PrettyPrinter {
 public:
  explicit PrettyPrinter(Interpreter& in) : in_(in) {}

  std::string Run(const Value& v) {
    Format(v, 0, 0, 1);
    return std::move(out_);
  }

 private:
  static constexpr int64_t kWidth = 80;

  // Pairs by key; keys without order by the names of their types.
  std::vector<std::pair<Value, Value>> Sorted(const Dict& dict) {
    std::vector<std::pair<Value, Value>> items = dict.items();
    std::stable_sort(items.begin(), items.end(), [&](const auto& a, const auto& b) {
      const Value &x = a.first, &y = b.first;
      if ((IsNumber(x) && IsNumber(y)) || (x.is_string() && y.is_string()) || (x.is_tuple() && y.is_tuple()))
        return in_.Less(x, y);
      if (Interpreter::TypeName(x) == Interpreter::TypeName(y))
        in_.Fail("pprint of such keys is not supported: Python orders them by their addresses");
      return Interpreter::TypeName(x) < Interpreter::TypeName(y);
    });
    in_.Charge(items.size());
    return items;
  }

  // repr with sorted keys.
  std::string Repr(const Value& v, int depth = 0) {
    if (depth > 200) in_.Fail("a value nested too deeply to print");
    if (v.is_dict()) {
      std::string out;
      for (const auto& [key, value] : Sorted(v.as_dict()))
        out += (out.empty() ? "" : ", ") + Repr(key, depth + 1) + ": " + Repr(value, depth + 1);
      in_.ChargeText(out.size());
      return "{" + out + "}";
    }
    if (!IsSequence(v) || v.is_group()) return in_.Repr(v);
    std::string out;
    for (size_t i = 0; i < v.as_list().size(); ++i) out += (i ? ", " : "") + Repr(v.as_list()[i], depth + 1);
    in_.ChargeText(out.size());
    return v.is_list() ? "[" + out + "]" : "(" + out + (v.as_list().size() == 1 ? ",)" : ")");
  }

  static int64_t Size(const std::string& s) { return static_cast<int64_t>(CodePointCount(s)); }
  void Write(const std::string& s) {
    in_.ChargeText(out_.size() + s.size() > kMaxText ? kMaxText + 1 : s.size());
    out_ += s;
  }

  void Format(const Value& v, int64_t indent, int64_t allowance, int level) {
    if (level > 200) in_.Fail("a value nested too deeply to print");
    const std::string repr = Repr(v);
    if (Size(repr) <= kWidth - indent - allowance || v.is_group()) return Write(repr);
    if (v.is_dict()) {
      Write("{");
      const auto items = Sorted(v.as_dict());
      for (size_t i = 0; i < items.size(); ++i) {
        const std::string key = Repr(items[i].first);
        Write(key + ": ");
        const bool last = i + 1 == items.size();
        Format(items[i].second, indent + 1 + Size(key) + 2, last ? allowance + 1 : 1, level + 1);
        if (!last) Write(",\n" + std::string(static_cast<size_t>(indent + 1), ' '));
      }
      return Write("}");
    }
    if (IsSequence(v)) {
      const std::string close = v.is_list() ? "]" : v.as_list().size() == 1 ? ",)" : ")";
      Write(v.is_list() ? "[" : "(");
      for (size_t i = 0; i < v.as_list().size(); ++i) {
        if (i) Write(",\n" + std::string(static_cast<size_t>(indent + 1), ' '));
        const bool last = i + 1 == v.as_list().size();
        Format(v.as_list()[i], indent + 1, last ? allowance + static_cast<int64_t>(close.size()) : 1, level + 1);
      }
      return Write(close);
    }
    if (v.is_string() && !v.is_markup() && !v.as_string().empty()) return Text(v.as_string(), indent, allowance, level);
    Write(repr);
  }

  // A long text in pieces that fit, at its ends of lines and at white space.
  void Text(const std::string& s, int64_t indent, int64_t allowance, int level) {
    if (level == 1) {
      ++indent;
      ++allowance;
    }
    const int64_t width = kWidth - indent;
    std::vector<std::string> chunks;
    const std::vector<std::string> lines = SplitLines(s, true);
    std::string repr;
    for (size_t i = 0; i < lines.size(); ++i) {
      repr = QuotedRepr(lines[i]);
      in_.ChargeText(repr.size());
      const bool last_line = i + 1 == lines.size();
      if (Size(repr) <= width - (last_line ? allowance : 0)) {
        chunks.push_back(repr);
        continue;
      }
      const std::vector<std::string> parts = Parts(lines[i]);
      std::string current;
      for (size_t j = 0; j < parts.size(); ++j) {
        const bool last = last_line && j + 1 == parts.size();
        const std::string candidate = current + parts[j];
        in_.Charge(candidate.size() + 1);
        if (Size(QuotedRepr(candidate)) > width - (last ? allowance : 0)) {
          if (!current.empty()) chunks.push_back(QuotedRepr(current));
          current = parts[j];
        } else {
          current = candidate;
        }
      }
      if (!current.empty()) chunks.push_back(QuotedRepr(current));
    }
    if (chunks.size() == 1) return Write(repr);
    if (level == 1) Write("(");
    for (size_t i = 0; i < chunks.size(); ++i) {
      if (i) Write("\n" + std::string(static_cast<size_t>(indent), ' '));
      Write(chunks[i]);
    }
    if (level == 1) Write(")");
  }

  // Words with the white space after them.
  static std::vector<std::string> Parts(const std::string& line) {
    std::vector<std::string> out;
    bool spaces = true;
    for (uint32_t cp : ToCodePoints(line)) {
      const bool space = IsPythonSpace(cp);
      if (out.empty() || (spaces && !space)) out.emplace_back();
      spaces = space;
      AppendUtf8(cp, &out.back());
    }
    return out;
  }

  Interpreter& in_;
  std::string out_;
};

// A filter that is a method of strings.
template <auto& method>
Value Method(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader(in, args, method).Done();
  return in.CallMethod(in.SoftStr(v), method);
}

constexpr char kUpper[] = "upper", kLower[] = "lower", kCapitalize[] = "capitalize";

// Filters without arguments.
template <Value (*body)(Interpreter&, const Value&)>
Value Plain(Interpreter& in, const Value& v, Arguments& args) {
  if (!args.positional.empty() || !args.named.empty()) in.Fail("a filter got arguments that it does not take");
  return body(in, v);
}

Value Escaped(Interpreter& in, const Value& v) { return in.Escape(v); }

}  // namespace

const FilterEntry kTextFilters[] = {
    {"string", Plain<[](Interpreter& in, const Value& v) -> Value { return in.SoftStr(v); }>},
    {"safe", Plain<[](Interpreter& in, const Value& v) -> Value { return v.is_markup() ? v : Value::Markup(in.Str(v)); }>},
    {"e", Plain<Escaped>},
    {"escape", Plain<Escaped>},
    {"forceescape", Plain<[](Interpreter& in, const Value& v) -> Value { return in.Escape(Value(in.Str(v))); }>},
    {"upper", Method<kUpper>},
    {"lower", Method<kLower>},
    {"capitalize", Method<kCapitalize>},
    {"title", TitleFilter},
    {"trim", TrimFilter},
    {"join", JoinFilter},
    {"replace", ReplaceFilter},
    {"indent", IndentFilter},
    {"truncate", TruncateFilter},
    {"center", CenterFilter},
    {"wordwrap", WordWrapFilter},
    {"wordcount", Plain<[](Interpreter& in, const Value& v) -> Value {
       int64_t n = 0;
       bool inside = false;
       for (uint32_t cp : ToCodePoints(in.Str(v))) {
         const bool word = IsWord(cp);
         n += word && !inside;
         inside = word;
       }
       return n;
     }>},
    {"format", FormatFilter},
    {"urlencode", UrlEncodeFilter},
    {"xmlattr", XmlAttrFilter},
    {"striptags", Plain<[](Interpreter& in, const Value& v) -> Value { return Value(StripTags(in, in.Str(v))); }>},
    {"filesizeformat", FileSizeFilter},
    {"pprint", Plain<[](Interpreter& in, const Value& v) -> Value { return Value(PrettyPrinter(in).Run(v)); }>},
    {nullptr, nullptr},
};

std::string UnescapeHtml(Interpreter& in, const std::string& s) {
  static constexpr std::pair<std::string_view, const char*> kNamed[] = {
      {"amp;", "&"}, {"lt;", "<"}, {"gt;", ">"}, {"quot;", "\""}, {"apos;", "'"}, {"nbsp;", "\u00a0"}};
  std::string out;
  for (size_t i = 0; i < s.size(); ++i) {
    const bool number = s[i] == '&' && i + 1 < s.size() && s[i + 1] == '#';
    if (s[i] != '&' || (!number && (i + 1 >= s.size() || !std::isalpha(static_cast<unsigned char>(s[i + 1]))))) {
      out.push_back(s[i]);
      continue;
    }
    if (!number) {
      const auto* named = std::find_if(std::begin(kNamed), std::end(kNamed),
                                       [&](const auto& n) { return std::string_view(s).substr(i + 1).starts_with(n.first); });
      if (named == std::end(kNamed)) in.Fail("the HTML entity at '" + s.substr(i, 12) + "' is not supported");
      out += named->second;
      i += named->first.size();
      continue;
    }
    size_t end = i + 2;
    const bool hex = end < s.size() && (s[end] | 32) == 'x';
    end += hex;
    uint32_t cp = 0;
    const size_t digits = end;
    for (; end < s.size() &&
           (hex ? std::isxdigit(static_cast<unsigned char>(s[end])) : std::isdigit(static_cast<unsigned char>(s[end])));
         ++end) {
      const uint32_t digit =
          s[end] <= '9' ? static_cast<uint32_t>(s[end] - '0') : static_cast<uint32_t>((s[end] | 32) - 'a' + 10);
      cp = std::min<uint32_t>(cp * (hex ? 16 : 10) + digit, 0x200000);
    }
    if (end == digits) {  // no number after all
      out.push_back('&');
      continue;
    }
    const bool plain = (cp >= 0x20 && cp < 0x7F) || (cp >= 0xA0 && cp < 0xD800) || (cp >= 0xE000 && cp < 0xFDD0) ||
                       cp == '\n' || cp == '\t' || (cp >= 0x10000 && cp <= 0x10FFFF && (cp & 0xFFFE) != 0xFFFE) ||
                       (cp >= 0xFDF0 && cp < 0xFFFE);
    if (!plain) in.Fail("the HTML entity at '" + s.substr(i, 12) + "' is not supported");
    AppendUtf8(cp, &out);
    i = end < s.size() && s[end] == ';' ? end : end - 1;
  }
  return out;
}

std::string StripTags(Interpreter& in, std::string s) {
  in.ChargeText(s.size());
  std::string kept;
  size_t at = 0;
  for (size_t start; (start = s.find('<', at)) != std::string::npos;) {
    const bool comment = s.compare(start, 4, "<!--") == 0;
    const size_t end = comment ? s.find("-->", start + 4) : s.find('>', start);
    if (end == std::string::npos) break;
    kept.append(s, at, start - at);
    at = end + (comment ? 3 : 1);
  }
  if (at > 0) s = kept + s.substr(at);
  std::string out;
  bool gap = false;
  for (uint32_t cp : ToCodePoints(s)) {  // white space, whatever it is, is one space between words
    if (IsPythonSpace(cp)) {
      gap = true;
      continue;
    }
    if (std::exchange(gap, false) && !out.empty()) out.push_back(' ');
    AppendUtf8(cp, &out);
  }
  return UnescapeHtml(in, out);
}

}  // namespace temper::text::jinja
