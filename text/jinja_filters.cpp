// Filters and tests, by Jinja's names and with its arguments; tojson as Hugging Face defines it.
#include <algorithm>
#include <cerrno>
#include <cmath>
#include <optional>

#include "text/jinja_runtime.h"
#include "text/json.h"
#include "text/unicode.h"
#include "text/utf8.h"

namespace temper::text::jinja {
namespace {

using Filter = Value (*)(Interpreter& in, const Value& v, Arguments& args);
using Test = bool (*)(Interpreter& in, const Value& v, Arguments& args);

Value Generator(List items) { return Value(std::shared_ptr<Object>(std::make_shared<GeneratorObject>(std::move(items)))); }

// What sort, unique, min and max compare: the attribute, without case unless asked for.
Value Key(Interpreter& in, const Value& item, const Value& attribute, bool case_sensitive) {
  Value key = item;
  if (attribute.is_int()) key = in.GetItem(item, attribute);
  if (attribute.is_string()) {
    const std::string& paths = attribute.as_string();
    if (paths.find(',') == std::string::npos) {
      key = in.GetPath(item, paths);
    } else {
      List keys;
      for (size_t at = 0; at <= paths.size();) {
        const size_t comma = std::min(paths.find(',', at), paths.size());
        Value one = in.GetPath(item, StripText(std::string_view(paths).substr(at, comma - at), nullptr, true, true));
        if (!case_sensitive && one.is_string()) one = Value(Lower(one.as_string()));
        keys.push_back(std::move(one));
        at = comma + 1;
      }
      return Value(std::move(keys));
    }
  }
  return !case_sensitive && key.is_string() ? Value(Lower(key.as_string())) : key;
}

void SortBy(Interpreter& in, List* items, const std::vector<Value>& keys, bool reverse) {
  std::vector<size_t> order(items->size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return reverse ? in.Less(keys[b], keys[a]) : in.Less(keys[a], keys[b]); });
  List out;
  for (size_t i : order) out.push_back((*items)[i]);
  *items = std::move(out);
}

Value SortFilter(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader reader(in, args, "sort");
  const bool reverse = reader.Flag("reverse", false), case_sensitive = reader.Flag("case_sensitive", false);
  const Value attribute = reader.Or("attribute", nullptr);
  reader.Done();
  List items = in.Iterate(v);
  std::vector<Value> keys;
  for (const Value& item : items) keys.push_back(Key(in, item, attribute, case_sensitive));
  SortBy(in, &items, keys, reverse);
  return Value(std::move(items));
}

Value DictSort(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader reader(in, args, "dictsort");
  const bool case_sensitive = reader.Flag("case_sensitive", false);
  const std::string by = reader.Text("by", "key");
  const bool reverse = reader.Flag("reverse", false);
  reader.Done();
  if (!v.is_dict()) in.Fail("dictsort needs a dict, not " + Interpreter::TypeName(v));
  if (by != "key" && by != "value") in.Fail("You can only sort by either \"key\" or \"value\"");
  List items;
  std::vector<Value> keys;
  for (const auto& [key, value] : v.as_dict().items()) {
    items.push_back(Value::Tuple({key, value}));
    keys.push_back(Key(in, by == "key" ? key : value, nullptr, case_sensitive));
  }
  SortBy(in, &items, keys, reverse);
  return Value(std::move(items));
}

Value MinMax(Interpreter& in, const Value& v, Arguments& args, bool max) {
  ArgumentReader reader(in, args, max ? "max" : "min");
  const bool case_sensitive = reader.Flag("case_sensitive", false);
  const Value attribute = reader.Or("attribute", nullptr);
  reader.Done();
  const List items = in.Iterate(v);
  if (items.empty()) return Value::Undefined("No aggregated item, sequence was empty.");
  size_t best = 0;
  for (size_t i = 1; i < items.size(); ++i) {
    const Value a = Key(in, items[i], attribute, case_sensitive), b = Key(in, items[best], attribute, case_sensitive);
    if (max ? in.Less(b, a) : in.Less(a, b)) best = i;
  }
  return items[best];
}

Value UniqueFilter(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader reader(in, args, "unique");
  const bool case_sensitive = reader.Flag("case_sensitive", false);
  const Value attribute = reader.Or("attribute", nullptr);
  reader.Done();
  List out;
  std::vector<Value> seen;
  for (const Value& item : in.Iterate(v)) {
    const Value key = Key(in, item, attribute, case_sensitive);
    if (std::any_of(seen.begin(), seen.end(), [&](const Value& s) { return in.Equal(s, key); })) continue;
    seen.push_back(key);
    out.push_back(item);
  }
  return Generator(std::move(out));
}

Value GroupBy(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader reader(in, args, "groupby");
  const Value attribute = reader.Required("attribute");
  const Value fallback = reader.Or("default", Value());
  const bool case_sensitive = reader.Flag("case_sensitive", false);
  reader.Done();
  List items = in.Iterate(v);
  std::vector<Value> keys;
  std::vector<std::pair<Value, Value>> paired;
  for (const Value& item : items) {
    Value key = attribute.is_string() ? in.GetPath(item, attribute.as_string(), fallback) : Key(in, item, attribute, true);
    if (key.is_undefined() && !fallback.is_undefined() && !fallback.is_none()) key = fallback;
    keys.push_back(!case_sensitive && key.is_string() ? Value(Lower(key.as_string())) : key);
    paired.emplace_back(key, item);
  }
  std::vector<size_t> order(items.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return in.Less(keys[a], keys[b]); });
  List out;
  for (size_t i = 0; i < order.size();) {
    List group;
    size_t end = i;
    for (; end < order.size() && in.Equal(keys[order[end]], keys[order[i]]); ++end) group.push_back(paired[order[end]].second);
    out.push_back(Value::Tuple({paired[order[i]].first, Value(std::move(group))}));
    i = end;
  }
  return Value(std::move(out));
}

// What map and select run over: as in Jinja2, something false is nothing, whatever it is.
List Items(Interpreter& in, const Value& v) { return Interpreter::Truthy(v) ? in.Iterate(v) : List(); }

Value MapFilter(Interpreter& in, const Value& v, Arguments& args) {
  List out;
  if (args.positional.empty()) {
    ArgumentReader reader(in, args, "map");
    const Value attribute = reader.Required("attribute");
    const Value fallback = reader.Or("default", Value());
    reader.Done();
    for (const Value& item : Items(in, v)) {
      Value found = attribute.is_string() ? in.GetPath(item, attribute.as_string(), fallback) : in.GetItem(item, attribute);
      out.push_back(found.is_undefined() && !fallback.is_undefined() && !fallback.is_none() ? fallback : found);
    }
    return Generator(std::move(out));
  }
  if (!args.positional[0].is_string()) in.Fail("map needs the name of a filter");
  const std::string name = args.positional[0].as_string();
  const int filter = FindFilter(name);
  if (filter < 0) in.Fail("the filter '" + name + "' is not supported");
  Arguments rest;
  rest.positional.assign(args.positional.begin() + 1, args.positional.end());
  rest.named = args.named;
  for (const Value& item : Items(in, v)) {
    in.Charge(1);
    Arguments again = rest;
    out.push_back(in.ApplyFilter(filter, item, again));
  }
  return Generator(std::move(out));
}

// select, reject, selectattr, rejectattr.
Value SelectFilter(Interpreter& in, const Value& v, Arguments& args, bool keep, bool by_attribute) {
  Arguments rest = args;
  Value attribute;
  if (by_attribute) {
    if (rest.positional.empty()) in.Fail("Missing parameter for attribute name");
    attribute = rest.positional[0];
    rest.positional.erase(rest.positional.begin());
  }
  int test = -1;
  if (!rest.positional.empty()) {
    if (!rest.positional[0].is_string()) in.Fail("select needs the name of a test");
    const std::string name = rest.positional[0].as_string();
    test = FindTest(name);
    if (test < 0) in.Fail("the test '" + name + "' is not supported");
    rest.positional.erase(rest.positional.begin());
  }
  List out;
  for (const Value& item : Items(in, v)) {
    in.Charge(1);
    const Value what = !by_attribute ? item : attribute.is_string() ? in.GetPath(item, attribute.as_string()) : in.GetItem(item, attribute);
    Arguments again = rest;
    const bool yes = test < 0 ? Interpreter::Truthy(what) : in.ApplyTest(test, what, again);
    if (yes == keep) out.push_back(item);
  }
  return Generator(std::move(out));
}

Value ToJson(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader reader(in, args, "tojson");
  JsonStyle style;
  style.ensure_ascii = reader.Flag("ensure_ascii", false);
  const Value indent = reader.Or("indent", nullptr), separators = reader.Or("separators", nullptr);
  style.sort_keys = reader.Flag("sort_keys", false);
  reader.Done();
  if (indent.is_int()) {
    style.indent = static_cast<int>(std::clamp<int64_t>(indent.as_int(), 0, 64));
  } else if (!indent.is_none()) {
    in.Fail("tojson with an indent of type " + Interpreter::TypeName(indent) + " is not supported");
  }
  if (!separators.is_none()) {
    const List pair = in.Iterate(separators);
    if (pair.size() != 2 || !pair[0].is_string() || !pair[1].is_string()) in.Fail("tojson needs two strings as separators");
    if (pair[0].as_string().empty()) in.Fail("tojson with an empty separator is not supported");
    style.item_separator = pair[0].as_string();
    style.key_separator = pair[1].as_string();
  }
  if (v.kind() == Value::Kind::kObject && dynamic_cast<GeneratorObject*>(v.as_object().get())) {
    in.Fail("Object of type generator is not JSON serializable");
  }
  auto out = DumpJson(v, style);
  if (!out.ok()) in.Fail(out.status().message());
  in.ChargeText(out->size());
  return Value(std::move(out).value());
}

Value IndentFilter(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader reader(in, args, "indent");
  const Value width = reader.Or("width", 4);
  const bool first = reader.Flag("first", false), blank = reader.Flag("blank", false);
  reader.Done();
  if (!v.is_string()) in.Fail("indent needs a text, not " + Interpreter::TypeName(v));
  std::string indention;
  if (width.is_string()) {
    indention = width.as_string();
  } else if (width.is_int()) {
    const int64_t n = std::max<int64_t>(0, width.as_int());
    in.ChargeText(static_cast<uint64_t>(n));
    indention.assign(static_cast<size_t>(n), ' ');
  } else {
    in.Fail("indent needs a width");
  }
  const std::vector<std::string> lines = SplitLines(in.Str(v) + "\n", false);
  std::string out = first ? indention : "";
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i) out += "\n";
    if (i && (blank || !lines[i].empty())) out += indention;
    out += lines[i];
    in.ChargeText(out.size() > kMaxText ? out.size() : lines[i].size() + indention.size());
  }
  return Value(std::move(out));
}

std::string WithoutUnderscores(const std::string& s) {
  std::string out = s;
  out.erase(std::remove(out.begin(), out.end(), '_'), out.end());
  return out;
}

// Python's float(str), or nullopt.
std::optional<double> ParseFloat(const std::string& text) {
  const std::string s = WithoutUnderscores(StripText(text, nullptr, true, true));
  if (s.empty() || s.find_first_of("xXpP()") != std::string::npos) return std::nullopt;
  char* end = nullptr;
  const double v = std::strtod(s.c_str(), &end);
  if (end != s.c_str() + s.size()) return std::nullopt;
  return v;
}

Value IntFilter(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader reader(in, args, "int");
  const Value fallback = reader.Or("default", 0);
  const int64_t base = reader.Int("base", 10);
  reader.Done();
  if (v.is_undefined()) in.FailUndefined(v);
  auto from_double = [&](double d) -> Value {
    if (std::isnan(d) || std::isinf(d)) return fallback;
    d = std::trunc(d);
    if (std::fabs(d) < 9e18) return static_cast<int64_t>(d);
    in.Fail("an integer beyond 64 bits is not supported");
  };
  if (v.is_int() || v.kind() == Value::Kind::kBigInt) return v;
  if (v.is_bool()) return static_cast<int64_t>(v.as_bool());
  if (v.is_float()) return from_double(v.as_float());
  if (!v.is_string()) return fallback;
  std::string s = WithoutUnderscores(StripText(v.as_string(), nullptr, true, true));
  const bool negative = !s.empty() && s[0] == '-';
  if (!s.empty() && (s[0] == '-' || s[0] == '+')) s.erase(0, 1);
  if (base >= 2 && base <= 36) {
    std::string digits = s;
    if (digits.size() > 2 && digits[0] == '0' && ((base == 16 && (digits[1] | 32) == 'x') || (base == 8 && (digits[1] | 32) == 'o') || (base == 2 && (digits[1] | 32) == 'b'))) {
      digits.erase(0, 2);
    }
    char* end = nullptr;
    errno = 0;
    const long long n = std::strtoll(digits.c_str(), &end, static_cast<int>(base));
    const bool clean = !digits.empty() && std::isalnum(static_cast<unsigned char>(digits[0])) && end == digits.c_str() + digits.size();
    if (clean && errno == ERANGE) {
      if (base == 10) {
        digits.erase(0, std::min(digits.find_first_not_of('0'), digits.size() - 1));
        return Value::BigInt((negative ? "-" : "") + digits);
      }
      in.Fail("an integer beyond 64 bits is not supported");
    }
    if (clean) return static_cast<int64_t>(negative ? -n : n);
  }
  if (const auto d = ParseFloat(v.as_string())) return from_double(*d);
  return fallback;
}

Value RoundFilter(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader reader(in, args, "round");
  const int64_t precision = reader.Int("precision", 0);
  const std::string method = reader.Text("method", "common");
  reader.Done();
  if (!v.is_int() && !v.is_float() && !v.is_bool()) in.Fail("round needs a number, not " + Interpreter::TypeName(v));
  const double d = v.is_float() ? v.as_float() : v.is_int() ? static_cast<double>(v.as_int()) : v.as_bool();
  if (std::abs(precision) > 300) in.Fail("round with such a precision is not supported");
  if (method == "ceil" || method == "floor") {
    const double scale = std::pow(10.0, static_cast<double>(precision));
    return (method == "ceil" ? std::ceil(d * scale) : std::floor(d * scale)) / scale;
  }
  if (method != "common") in.Fail("method must be common, ceil or floor");
  if (!v.is_float() && precision >= 0) return v.is_bool() ? Value(static_cast<int64_t>(v.as_bool())) : v;
  if (precision < 0) {
    const double scale = std::pow(10.0, static_cast<double>(-precision));
    const double r = std::nearbyint(d / scale) * scale;
    return v.is_float() ? Value(r) : Value(static_cast<int64_t>(r));
  }
  char buffer[700];
  std::snprintf(buffer, sizeof(buffer), "%.*f", static_cast<int>(precision), d);  // rounds the exact value, ties to even
  return std::strtod(buffer, nullptr);
}

std::string Escaped(const std::string& s) {
  std::string out;
  for (char c : s) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&#34;"; break;
      case '\'': out += "&#39;"; break;
      default: out.push_back(c);
    }
  }
  return out;
}

Value TruncateFilter(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader reader(in, args, "truncate");
  const int64_t length = reader.Int("length", 255);
  const bool kill_words = reader.Flag("killwords", false);
  const std::string end = reader.Text("end", "...");
  const int64_t leeway = reader.Int("leeway", 5);
  reader.Done();
  const Value& s = v;
  const int64_t size = static_cast<int64_t>(in.Length(s)), end_size = static_cast<int64_t>(CodePointCount(end));
  if (length < end_size) in.Fail("expected length >= " + std::to_string(end_size) + ", got " + std::to_string(length));
  if (size <= length + leeway) return s;
  if (!s.is_string()) in.Fail("truncate cannot cut " + Interpreter::TypeName(s));
  std::string cut = in.Slice(s, nullptr, length - end_size, nullptr).as_string();
  if (!kill_words) cut = cut.substr(0, cut.rfind(' '));  // npos keeps all
  return Value(cut + end);
}

std::string JinjaTitle(const std::string& s) {
  std::string out;
  bool start = true;
  for (uint32_t cp : ToCodePoints(s)) {
    std::string one;
    AppendUtf8(cp, &one);
    out += start ? Upper(one) : Lower(one);
    start = IsPythonSpace(cp) || cp == '-' || cp == '(' || cp == '{' || cp == '[' || cp == '<';
  }
  return out;
}

Value SliceFilter(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader reader(in, args, "slice");
  const int64_t slices = reader.Int("slices", 0);
  const Value fill = reader.Or("fill_with", nullptr);
  reader.Done();
  const List items = in.Iterate(v);
  if (slices <= 0 || slices > 100000) in.Fail("slice needs a positive number of slices");
  in.Charge(static_cast<size_t>(slices));
  const int64_t n = static_cast<int64_t>(items.size()), per = n / slices, extra = n % slices;
  List out;
  for (int64_t i = 0, at = 0; i < slices; ++i) {
    List part;
    const int64_t size = per + (i < extra ? 1 : 0);
    for (int64_t k = 0; k < size; ++k) part.push_back(items[static_cast<size_t>(at++)]);
    if (!fill.is_none() && i >= extra) part.push_back(fill);
    out.push_back(Value(std::move(part)));
  }
  return Generator(std::move(out));
}

Value BatchFilter(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader reader(in, args, "batch");
  const int64_t count = reader.Int("linecount", 0);
  const Value fill = reader.Or("fill_with", nullptr);
  reader.Done();
  if (count <= 0 || count > 100000) in.Fail("batch needs a positive number of items");
  List out, part;
  for (const Value& item : in.Iterate(v)) {
    if (static_cast<int64_t>(part.size()) == count) out.push_back(Value(std::exchange(part, {})));
    part.push_back(item);
  }
  if (!part.empty()) {
    in.Charge(static_cast<size_t>(count));
    while (!fill.is_none() && static_cast<int64_t>(part.size()) < count) part.push_back(fill);
    out.push_back(Value(std::move(part)));
  }
  return Generator(std::move(out));
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

// Filters without arguments.
template <Value (*body)(Interpreter&, const Value&)>
Value Plain(Interpreter& in, const Value& v, Arguments& args) {
  if (!args.positional.empty() || !args.named.empty()) in.Fail("a filter got arguments that it does not take");
  return body(in, v);
}

struct FilterEntry {
  const char* name;
  Filter filter;
};

const FilterEntry kFilters[] = {
    {"tojson", ToJson},
    {"length", Plain<[](Interpreter& in, const Value& v) -> Value { return static_cast<int64_t>(in.Length(v)); }>},
    {"count", Plain<[](Interpreter& in, const Value& v) -> Value { return static_cast<int64_t>(in.Length(v)); }>},
    {"default",
     [](Interpreter& in, const Value& v, Arguments& args) -> Value {
       ArgumentReader reader(in, args, "default");
       const Value fallback = reader.Or("default_value", "");
       const bool boolean = reader.Flag("boolean", false);
       reader.Done();
       return v.is_undefined() || (boolean && !Interpreter::Truthy(v)) ? fallback : v;
     }},
    {"d", [](Interpreter& in, const Value& v, Arguments& args) -> Value { return in.ApplyFilter(FindFilter("default"), v, args); }},
    {"trim",
     [](Interpreter& in, const Value& v, Arguments& args) -> Value {
       ArgumentReader reader(in, args, "trim");
       const Value chars = reader.Or("chars", nullptr);
       reader.Done();
       const std::string s = in.Str(v);
       in.ChargeText(s.size());
       return Value(StripText(s, chars, true, true));
     }},
    {"string", Plain<[](Interpreter& in, const Value& v) -> Value { return Value(in.Str(v)); }>},
    {"safe", Plain<[](Interpreter& in, const Value& v) -> Value { return Value(in.Str(v)); }>},
    {"e", Plain<[](Interpreter& in, const Value& v) -> Value { return Value(Escaped(in.Str(v))); }>},
    {"escape", Plain<[](Interpreter& in, const Value& v) -> Value { return Value(Escaped(in.Str(v))); }>},
    {"forceescape", Plain<[](Interpreter& in, const Value& v) -> Value { return Value(Escaped(in.Str(v))); }>},
    {"upper", Plain<[](Interpreter& in, const Value& v) -> Value { return Value(Upper(in.Str(v))); }>},
    {"lower", Plain<[](Interpreter& in, const Value& v) -> Value { return Value(Lower(in.Str(v))); }>},
    {"title", Plain<[](Interpreter& in, const Value& v) -> Value { return Value(JinjaTitle(in.Str(v))); }>},
    {"capitalize", Plain<[](Interpreter& in, const Value& v) -> Value { return Value(Capitalize(in.Str(v))); }>},
    {"int", IntFilter},
    {"float",
     [](Interpreter& in, const Value& v, Arguments& args) -> Value {
       ArgumentReader reader(in, args, "float");
       const Value fallback = reader.Or("default", 0.0);
       reader.Done();
       if (v.is_undefined()) in.FailUndefined(v);
       if (v.is_float()) return v;
       if (v.is_int()) return static_cast<double>(v.as_int());
       if (v.is_bool()) return v.as_bool() ? 1.0 : 0.0;
       if (v.is_string()) {
         if (const auto d = ParseFloat(v.as_string())) return *d;
       }
       return fallback;
     }},
    {"abs", Plain<[](Interpreter& in, const Value& v) -> Value {
       if (v.is_float()) return std::fabs(v.as_float());
       return in.Less(v, 0) ? in.Arithmetic("-", 0, v) : in.Arithmetic("+", 0, v);
     }>},
    {"round", RoundFilter},
    {"first", Plain<[](Interpreter& in, const Value& v) -> Value {
       const List items = in.Iterate(v);
       return items.empty() ? Value::Undefined("No first item, sequence was empty.") : items.front();
     }>},
    {"last", Plain<[](Interpreter& in, const Value& v) -> Value {
       const List items = in.Iterate(v);
       return items.empty() ? Value::Undefined("No last item, sequence was empty.") : items.back();
     }>},
    {"list", Plain<[](Interpreter& in, const Value& v) -> Value { return Value(in.Iterate(v)); }>},
    {"items", Plain<[](Interpreter& in, const Value& v) -> Value {
       if (v.is_undefined()) return Generator({});
       if (!v.is_dict()) in.Fail("Can only get item pairs from a mapping.");
       List out;
       for (const auto& [key, value] : v.as_dict().items()) out.push_back(Value::Tuple({key, value}));
       return Generator(std::move(out));
     }>},
    {"reverse", Plain<[](Interpreter& in, const Value& v) -> Value {
       if (v.is_string()) return in.Slice(v, nullptr, nullptr, -1);
       List items = in.Iterate(v);
       std::reverse(items.begin(), items.end());
       return Generator(std::move(items));
     }>},
    {"join",
     [](Interpreter& in, const Value& v, Arguments& args) -> Value {
       ArgumentReader reader(in, args, "join");
       const std::string separator = in.Str(reader.Or("d", ""));
       const Value attribute = reader.Or("attribute", nullptr);
       reader.Done();
       std::string out;
       bool first = true;
       for (const Value& item : in.Iterate(v)) {
         if (!first) out += separator;
         first = false;
         const std::string text = in.Str(attribute.is_none() ? item : Key(in, item, attribute, true));
         out += text;
         in.ChargeText(out.size() > kMaxText ? out.size() : text.size() + separator.size());
       }
       return Value(std::move(out));
     }},
    {"replace",
     [](Interpreter& in, const Value& v, Arguments& args) -> Value {
       ArgumentReader reader(in, args, "replace");
       const std::string from = in.Str(reader.Required("old")), to = in.Str(reader.Required("new"));
       const int64_t count = reader.Int("count", -1);
       reader.Done();
       return Value(ReplaceText(in, in.Str(v), from, to, count));
     }},
    {"indent", IndentFilter},
    {"sort", SortFilter},
    {"dictsort", DictSort},
    {"unique", UniqueFilter},
    {"groupby", GroupBy},
    {"min", [](Interpreter& in, const Value& v, Arguments& args) -> Value { return MinMax(in, v, args, false); }},
    {"max", [](Interpreter& in, const Value& v, Arguments& args) -> Value { return MinMax(in, v, args, true); }},
    {"sum",
     [](Interpreter& in, const Value& v, Arguments& args) -> Value {
       ArgumentReader reader(in, args, "sum");
       const Value attribute = reader.Or("attribute", nullptr);
       Value total = reader.Or("start", 0);
       reader.Done();
       for (const Value& item : in.Iterate(v)) total = in.Arithmetic("+", total, attribute.is_none() ? item : Key(in, item, attribute, true));
       return total;
     }},
    {"map", MapFilter},
    {"select", [](Interpreter& in, const Value& v, Arguments& args) -> Value { return SelectFilter(in, v, args, true, false); }},
    {"reject", [](Interpreter& in, const Value& v, Arguments& args) -> Value { return SelectFilter(in, v, args, false, false); }},
    {"selectattr", [](Interpreter& in, const Value& v, Arguments& args) -> Value { return SelectFilter(in, v, args, true, true); }},
    {"rejectattr", [](Interpreter& in, const Value& v, Arguments& args) -> Value { return SelectFilter(in, v, args, false, true); }},
    {"attr",
     [](Interpreter& in, const Value& v, Arguments& args) -> Value {
       ArgumentReader reader(in, args, "attr");
       const std::string name = in.Str(reader.Required("name"));
       reader.Done();
       if (v.is_dict() && !Interpreter::HasMethod(v, name)) return Value::Undefined("'dict object' has no attribute '" + name + "'");
       return in.GetAttr(v, name);
     }},
    {"batch", BatchFilter},
    {"slice", SliceFilter},
    {"truncate", TruncateFilter},
    {"center",
     [](Interpreter& in, const Value& v, Arguments& args) -> Value {
       ArgumentReader reader(in, args, "center");
       Arguments width;
       width.positional.push_back(reader.Int("width", 80));
       reader.Done();
       return in.CallMethod(Value(in.Str(v)), "center", width);
     }},
    {"wordcount", Plain<[](Interpreter& in, const Value& v) -> Value {
       int64_t n = 0;
       bool inside = false;
       for (uint32_t cp : ToCodePoints(in.Str(v))) {
         const bool word = Contains(WordSet(), cp);
         n += word && !inside;
         inside = word;
       }
       return n;
     }>},
    {"format",
     [](Interpreter& in, const Value& v, Arguments& args) -> Value {
       if (!args.positional.empty() && !args.named.empty()) in.Fail("can't handle positional and keyword arguments at the same time");
       Dict named;
       for (const auto& [name, value] : args.named) named.Set(name, value);
       return Value(in.FormatPercent(in.Str(v), args.named.empty() ? Value::Tuple(args.positional) : Value(std::move(named))));
     }},
    {"urlencode", Plain<[](Interpreter& in, const Value& v) -> Value {
       if (v.is_string() || (!v.is_dict() && !v.is_list())) return Value(UrlQuote(in.Str(v), false));
       std::string out;
       Arguments none;
       for (const Value& pair : in.Iterate(v.is_dict() ? in.CallMethod(v, "items", none) : v)) {
         const List items = in.Iterate(pair);
         if (items.size() != 2) in.Fail("urlencode needs pairs");
         if (!out.empty()) out += "&";
         out += UrlQuote(in.Str(items[0]), true) + "=" + UrlQuote(in.Str(items[1]), true);
       }
       return Value(std::move(out));
     }>},
};

bool IsNumber(const Value& v) { return v.is_int() || v.is_float() || v.is_bool() || v.kind() == Value::Kind::kBigInt; }

// The tests `is == 3` and kin.
template <int kind>
bool CompareTest(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader reader(in, args, "test");
  const Value& other = reader.Required("other");
  reader.Done();
  switch (kind) {
    case 0: return in.Equal(v, other);
    case 1: return !in.Equal(v, other);
    case 2: return in.Less(v, other);
    case 3: return !in.Less(other, v);
    case 4: return in.Less(other, v);
    default: return !in.Less(v, other);
  }
}

template <bool (*body)(Interpreter&, const Value&)>
bool PlainTest(Interpreter& in, const Value& v, Arguments& args) {
  if (!args.positional.empty() || !args.named.empty()) in.Fail("a test got arguments that it does not take");
  return body(in, v);
}

bool Remainder(Interpreter& in, const Value& v, int64_t by, int64_t want) { return in.Equal(in.Arithmetic("%", v, by), want); }

struct TestEntry {
  const char* name;
  Test test;
};

const TestEntry kTests[] = {
    {"defined", PlainTest<[](Interpreter&, const Value& v) { return !v.is_undefined(); }>},
    {"undefined", PlainTest<[](Interpreter&, const Value& v) { return v.is_undefined(); }>},
    {"none", PlainTest<[](Interpreter&, const Value& v) { return v.is_none(); }>},
    {"boolean", PlainTest<[](Interpreter&, const Value& v) { return v.is_bool(); }>},
    {"true", PlainTest<[](Interpreter&, const Value& v) { return v.is_bool() && v.as_bool(); }>},
    {"false", PlainTest<[](Interpreter&, const Value& v) { return v.is_bool() && !v.as_bool(); }>},
    {"integer", PlainTest<[](Interpreter&, const Value& v) { return v.is_int() || v.kind() == Value::Kind::kBigInt; }>},
    {"float", PlainTest<[](Interpreter&, const Value& v) { return v.is_float(); }>},
    {"number", PlainTest<[](Interpreter&, const Value& v) { return IsNumber(v); }>},
    {"string", PlainTest<[](Interpreter&, const Value& v) { return v.is_string(); }>},
    {"mapping", PlainTest<[](Interpreter&, const Value& v) { return v.is_dict(); }>},
    {"sequence", PlainTest<[](Interpreter&, const Value& v) {
       return v.is_undefined() || v.is_string() || v.is_list() || v.is_dict() || v.kind() == Value::Kind::kTuple;
     }>},
    {"iterable", PlainTest<[](Interpreter&, const Value& v) {
       if (v.kind() == Value::Kind::kObject) return dynamic_cast<GeneratorObject*>(v.as_object().get()) != nullptr;
       return v.is_undefined() || v.is_string() || v.is_list() || v.is_dict() || v.kind() == Value::Kind::kTuple;
     }>},
    {"callable", PlainTest<[](Interpreter&, const Value& v) {
       if (v.kind() != Value::Kind::kObject) return false;
       Object* o = v.as_object().get();
       return dynamic_cast<FunctionObject*>(o) || dynamic_cast<MacroObject*>(o) || dynamic_cast<JoinerObject*>(o) || dynamic_cast<LoopObject*>(o);
     }>},
    {"escaped", PlainTest<[](Interpreter&, const Value&) { return false; }>},
    {"upper", PlainTest<[](Interpreter& in, const Value& v) {
       Arguments none;
       return in.CallMethod(Value(in.Str(v)), "isupper", none).as_bool();
     }>},
    {"lower", PlainTest<[](Interpreter& in, const Value& v) {
       Arguments none;
       return in.CallMethod(Value(in.Str(v)), "islower", none).as_bool();
     }>},
    {"odd", PlainTest<[](Interpreter& in, const Value& v) { return Remainder(in, v, 2, 1); }>},
    {"even", PlainTest<[](Interpreter& in, const Value& v) { return Remainder(in, v, 2, 0); }>},
    {"divisibleby",
     [](Interpreter& in, const Value& v, Arguments& args) {
       ArgumentReader reader(in, args, "divisibleby");
       const Value& by = reader.Required("num");
       reader.Done();
       return in.Equal(in.Arithmetic("%", v, by), 0);
     }},
    {"in",
     [](Interpreter& in, const Value& v, Arguments& args) {
       ArgumentReader reader(in, args, "in");
       const Value& container = reader.Required("seq");
       reader.Done();
       return in.In(v, container);
     }},
    {"sameas",
     [](Interpreter& in, const Value& v, Arguments& args) {
       ArgumentReader reader(in, args, "sameas");
       const Value& other = reader.Required("other");
       reader.Done();
       return v.kind() == other.kind() && in.Equal(v, other);
     }},
    {"filter",
     [](Interpreter& in, const Value& v, Arguments& args) {
       if (!args.positional.empty()) in.Fail("the test filter takes no arguments");
       return v.is_string() && FindFilter(v.as_string()) >= 0;
     }},
    {"test",
     [](Interpreter& in, const Value& v, Arguments& args) {
       if (!args.positional.empty()) in.Fail("the test test takes no arguments");
       return v.is_string() && FindTest(v.as_string()) >= 0;
     }},
    {"eq", CompareTest<0>},   {"==", CompareTest<0>}, {"equalto", CompareTest<0>},
    {"ne", CompareTest<1>},   {"!=", CompareTest<1>},
    {"lt", CompareTest<2>},   {"<", CompareTest<2>},  {"lessthan", CompareTest<2>},
    {"le", CompareTest<3>},   {"<=", CompareTest<3>},
    {"gt", CompareTest<4>},   {">", CompareTest<4>},  {"greaterthan", CompareTest<4>},
    {"ge", CompareTest<5>},   {">=", CompareTest<5>},
};

}  // namespace

int FindFilter(std::string_view name) {
  for (size_t i = 0; i < std::size(kFilters); ++i) {
    if (name == kFilters[i].name) return static_cast<int>(i);
  }
  return -1;
}

int FindTest(std::string_view name) {
  for (size_t i = 0; i < std::size(kTests); ++i) {
    if (name == kTests[i].name) return static_cast<int>(i);
  }
  return -1;
}

Value Interpreter::ApplyFilter(int index, const Value& operand, Arguments& args) {
  return kFilters[static_cast<size_t>(index)].filter(*this, operand, args);
}

bool Interpreter::ApplyTest(int index, const Value& operand, Arguments& args) {
  Charge(1);
  return kTests[static_cast<size_t>(index)].test(*this, operand, args);
}

}  // namespace temper::text::jinja
