// Filters over sequences, mappings and numbers, by Jinja's names and with its arguments; tojson as Hugging Face defines it. Those
// over texts stand in jinja_text_filters.cpp.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include "text/big_integer.h"
#include "text/jinja_runtime.h"
#include "text/json.h"
#include "text/unicode.h"
#include "text/utf8.h"

namespace temper::text::jinja {
namespace {

Value IgnoreCase(const Value& v) { return v.is_string() ? Value(Lower(v.as_string())) : v; }

// item.attribute as make_attrgetter has it: a path in a text, or one key; none is the item itself. `fallback` (not none) stands
// for what is missing.
Value Attribute(Interpreter& in, const Value& item, const Value& attribute, const Value& fallback = Value()) {
  if (attribute.is_none()) return item;
  if (attribute.is_string()) return in.GetPath(item, attribute.as_string(), fallback);
  Value out = in.GetItem(item, attribute);
  return out.is_undefined() && !fallback.is_undefined() && !fallback.is_none() ? fallback : out;
}

// What unique, groupby, min and max compare: the attribute, without case unless asked for.
Value Key(Interpreter& in, const Value& item, const Value& attribute, bool case_sensitive, const Value& fallback = Value()) {
  const Value key = Attribute(in, item, attribute, fallback);
  return case_sensitive ? key : IgnoreCase(key);
}

// Sorts by the keys as Python does: stable, and nothing is compared where there is one item.
List SortedBy(Interpreter& in, const List& items, const std::vector<Value>& keys, bool reverse) {
  std::vector<size_t> order(items.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return reverse ? in.Less(keys[b], keys[a]) : in.Less(keys[a], keys[b]); });
  List out;
  for (size_t i : order) out.push_back(items[i]);
  return out;
}

Value SortFilter(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader reader(in, args, "sort");
  const bool reverse = reader.IntFlag("reverse", false), case_sensitive = reader.Flag("case_sensitive", false);
  const Value attribute = reader.Or("attribute", nullptr);
  reader.Done();
  std::vector<Value> attributes = {attribute};
  if (attribute.is_string()) attributes = in.CallMethod(attribute, "split", {","}).as_list();
  const List items = in.Iterate(v);
  std::vector<Value> keys;
  for (const Value& item : items) {
    List key;  // a list even of one: two that miss the attribute are equal, not without order
    for (const Value& a : attributes) key.push_back(Key(in, item, a, case_sensitive));
    in.Charge(key.size());
    keys.emplace_back(std::move(key));
  }
  return Value(SortedBy(in, items, keys, reverse));
}

Value DictSort(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader reader(in, args, "dictsort");
  const bool case_sensitive = reader.Flag("case_sensitive", false);
  const Value by = reader.Or("by", "key");
  const bool reverse = reader.IntFlag("reverse", false);
  reader.Done();
  if (!by.is_string() || (by.as_string() != "key" && by.as_string() != "value"))
    in.Fail("You can only sort by either \"key\" or \"value\"");
  if (v.is_undefined()) in.FailUndefined(v);
  if (!v.is_dict()) in.Fail("dictsort needs a dict, not " + Interpreter::TypeName(v));
  List items;
  std::vector<Value> keys;
  for (const auto& [key, value] : v.as_dict().items()) {
    items.push_back(Value::Tuple({key, value}));
    keys.push_back(Key(in, by.as_string() == "key" ? key : value, nullptr, case_sensitive));
  }
  in.Charge(items.size());
  return Value(SortedBy(in, items, keys, reverse));
}

template <bool max>
Value MinMax(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader reader(in, args, max ? "max" : "min");
  const bool case_sensitive = reader.Flag("case_sensitive", false);
  const Value attribute = reader.Or("attribute", nullptr);
  reader.Done();
  const Interpreter::Items items = in.Open(v);
  Value best, item;
  if (!items(&best)) return Value::Undefined("No aggregated item, sequence was empty.");
  Value best_key = Key(in, best, attribute, case_sensitive);
  while (items(&item)) {
    Value key = Key(in, item, attribute, case_sensitive);
    if (!in.Ordered(max ? ">" : "<", key, best_key)) continue;
    best = std::move(item);
    best_key = std::move(key);
  }
  return best;
}

// The items of v, opened when the first is asked for, as in the body of a Python generator.
class Lazily {
 public:
  explicit Lazily(Value v) : value_(std::move(v)) {}
  bool Next(Interpreter& in, Value* item) {
    if (!items_) items_ = in.Open(value_);
    return items_(item);
  }

 private:
  Value value_;
  Interpreter::Items items_;
};

Value UniqueFilter(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader reader(in, args, "unique");
  const bool case_sensitive = reader.Flag("case_sensitive", false);
  const Value attribute = reader.Or("attribute", nullptr);
  reader.Done();
  return Interpreter::Generator(
      [source = Lazily(v), attribute, case_sensitive, seen = Dict()](Interpreter& i, Value* item) mutable {
        while (source.Next(i, item)) {
          const Value key = Key(i, *item, attribute, case_sensitive);
          if (i.FindKey(seen, key)) continue;
          seen.Set(key, nullptr);
          return true;
        }
        return false;
      },
      {&v});
}

Value GroupBy(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader reader(in, args, "groupby");
  const Value attribute = reader.Required("attribute");
  const Value fallback = reader.Or("default", Value());
  const bool case_sensitive = reader.Flag("case_sensitive", false);
  reader.Done();
  const List items = in.Iterate(v);
  std::vector<Value> keys;
  List numbers;  // the items by their numbers, to find both after sorting
  for (size_t i = 0; i < items.size(); ++i) {
    keys.push_back(Key(in, items[i], attribute, case_sensitive, fallback));
    numbers.emplace_back(static_cast<int64_t>(i));
  }
  const List order = SortedBy(in, numbers, keys, false);
  auto number = [&](size_t i) { return static_cast<size_t>(order[i].as_int()); };
  List out;
  for (size_t i = 0; i < order.size();) {
    List group;
    size_t end = i;
    for (; end < order.size() && in.Equal(keys[number(end)], keys[number(i)]); ++end) group.push_back(items[number(end)]);
    if (end == i) in.Fail("groupby by something that is not equal to itself is not supported");
    // The key in the case of the first of the group.
    const Value grouper = Attribute(in, group[0], attribute, fallback);
    out.push_back(Value::Group(grouper, Value(std::move(group))));
    i = end;
  }
  return Value(std::move(out));
}

// The filter or test of this name, called within map or select.
int Named(Interpreter& in, const Value& name, bool filter) {
  const std::string text = in.Str(name);
  const int found = filter ? FindFilter(text) : FindTest(text);
  if (filter && IsUnsupportedFilter(text)) in.Fail("the filter '" + text + "' is not supported");
  if (found < 0) in.Fail(std::string("No ") + (filter ? "filter" : "test") + " named '" + text + "'.");
  return found;
}

int DepthOf(const Arguments& args) {
  int out = 0;
  for (const Value& v : args.positional) out = std::max(out, v.depth());
  for (const auto& [name, v] : args.named) out = std::max(out, v.depth());
  return out;
}

// A generator that begins, when its first item is asked for, by `prepare`, and only where v is true: so map and select do.
Value Prepared(Interpreter& in, const Value& v, const Arguments& args,
               std::function<std::function<bool(Interpreter&, Value*)>(Interpreter&)> prepare) {
  // What the arguments hold lies as deep in the generator as in a list.
  if (DepthOf(args) >= kMaxValueDepth) in.Fail("a value nested too deeply");
  const Value held = Value::Tuple(args.positional);
  return Interpreter::Generator(
      [v, prepare = std::move(prepare), next = std::function<bool(Interpreter&, Value*)>()](Interpreter& i, Value* item) mutable {
        if (!next) {
          if (!Interpreter::Truthy(v)) return false;
          next = prepare(i);
        }
        return next(i, item);
      },
      {&v, &held});
}

Value MapFilter(Interpreter& in, const Value& v, Arguments& args) {
  return Prepared(in, v, args, [v, args](Interpreter& i) -> std::function<bool(Interpreter&, Value*)> {
    Lazily source(v);
    const bool by_attribute =
        std::any_of(args.named.begin(), args.named.end(), [](const auto& n) { return n.first == "attribute"; });
    if (args.positional.empty() && by_attribute) {
      ArgumentReader reader(i, args, "map");
      const Value attribute = reader.Required("attribute");
      const Value fallback = reader.Or("default", nullptr);
      reader.Done();
      return [source, attribute, fallback](Interpreter& interpreter, Value* item) mutable {
        if (!source.Next(interpreter, item)) return false;
        *item = Attribute(interpreter, *item, attribute, fallback);
        return true;
      };
    }
    if (args.positional.empty()) i.Fail("map requires a filter argument");
    Arguments rest = args;
    rest.positional.erase(rest.positional.begin());
    return [source, name = args.positional[0], rest](Interpreter& interpreter, Value* item) mutable {
      if (!source.Next(interpreter, item)) return false;
      interpreter.Charge(rest.positional.size() + rest.named.size());
      Arguments again = rest;
      *item = interpreter.ApplyFilter(Named(interpreter, name, /*filter=*/true), *item, again);
      return true;
    };
  });
}

// select, reject, selectattr, rejectattr.
template <bool keep, bool by_attribute>
Value SelectFilter(Interpreter& in, const Value& v, Arguments& args) {
  return Prepared(in, v, args, [v, args](Interpreter& i) -> std::function<bool(Interpreter&, Value*)> {
    Arguments rest = args;
    auto take = [&rest] {
      const Value out = rest.positional[0];
      rest.positional.erase(rest.positional.begin());
      return out;
    };
    if (by_attribute && rest.positional.empty()) i.Fail("Missing parameter for attribute name");
    const Value attribute = by_attribute ? take() : Value(nullptr);
    const Value test = rest.positional.empty() ? Value() : take();
    return [source = Lazily(v), attribute, test, rest](Interpreter& interpreter, Value* item) mutable {
      while (source.Next(interpreter, item)) {
        const Value what = Attribute(interpreter, *item, attribute);
        interpreter.Charge(rest.positional.size() + rest.named.size());
        Arguments again = rest;
        const bool yes = test.is_undefined() ? Interpreter::Truthy(what)
                                             : interpreter.ApplyTest(Named(interpreter, test, /*filter=*/false), what, again);
        if (yes == keep) return true;
      }
      return false;
    };
  });
}

// The same value with the keys of its dicts in order.
Value WithSortedKeys(Interpreter& in, const Value& v) {
  if (v.depth() > 500) in.Fail("a value nested too deeply for JSON");
  in.Charge(1);
  if (IsSequence(v)) {
    List out;
    for (const Value& item : v.as_list()) out.push_back(WithSortedKeys(in, item));
    return Value(std::move(out));
  }
  if (!v.is_dict()) return v;
  List items;
  std::vector<Value> keys;
  for (const auto& [key, value] : v.as_dict().items()) {
    items.push_back(Value::Tuple({key, value}));
    keys.push_back(key);
  }
  Dict out;
  for (const Value& pair : SortedBy(in, items, keys, false)) out.Set(pair.as_list()[0], WithSortedKeys(in, pair.as_list()[1]));
  return Value(std::move(out));
}

Value ToJson(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader reader(in, args, "tojson");
  JsonStyle style;
  style.ensure_ascii = reader.Flag("ensure_ascii", false);
  const Value indent = reader.Or("indent", nullptr), separators = reader.Or("separators", nullptr);
  const bool sort_keys = reader.Flag("sort_keys", false);
  reader.Done();
  if (indent.is_int() || indent.is_bool()) {
    const int64_t n = indent.is_int() ? indent.as_int() : indent.as_bool();
    if (n > 64) in.Fail("tojson with an indent above 64 is not supported");
    style.indent = static_cast<int>(std::max<int64_t>(n, 0));
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
  if (v.kind() == Value::Kind::kObject) in.Fail("Object of type " + Interpreter::TypeName(v) + " is not JSON serializable");
  auto out = DumpJson(sort_keys ? WithSortedKeys(in, v) : v, style);
  if (!out.ok()) in.Fail(out.status().message());
  in.ChargeText(out->size());
  return Value(std::move(out).value());
}

Value IntFilter(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader reader(in, args, "int");
  const Value fallback = reader.Or("default", 0);
  const int64_t base = reader.Int("base", 10);
  reader.Done();
  if (v.is_undefined()) in.FailUndefined(v);
  if (v.is_int() || v.kind() == Value::Kind::kBigInt) return v;
  if (v.is_bool()) return static_cast<int64_t>(v.as_bool());
  if (v.is_float()) return std::isnan(v.as_float()) ? fallback : in.ToInteger(v.as_float());
  if (!v.is_string()) return fallback;
  in.ChargeText(v.as_string().size());
  if (const auto n = ParseInteger(v.as_string(), base)) return *n;
  const auto d = ParseFloat(v.as_string());
  return d && std::isfinite(*d) ? in.ToInteger(*d) : fallback;
}

Value FloatFilter(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader reader(in, args, "float");
  const Value fallback = reader.Or("default", 0.0);
  reader.Done();
  if (v.is_undefined()) in.FailUndefined(v);
  if (IsNumber(v)) {
    const double d = Interpreter::ToDouble(v);
    if (std::isinf(d) && !v.is_float()) in.Fail("int too large to convert to float");
    return d;
  }
  if (!v.is_string()) return fallback;
  in.ChargeText(v.as_string().size());
  const auto d = ParseFloat(v.as_string());
  return d ? Value(*d) : fallback;
}

// Python's round(float, digits): the exact value to the nearest, ties to even.
double RoundFloat(double v, int64_t digits) {
  if (!std::isfinite(v) || v == 0 || digits > 323) return v;
  if (digits < -308) return std::copysign(0.0, v);
  char buffer[800];
  std::snprintf(buffer, sizeof(buffer), "%.25e", v);
  const int64_t kept = std::atoi(std::strchr(buffer, 'e') + 1) + 1 + digits;  // significant digits that stay
  if (kept < 0) return std::copysign(0.0, v);
  if (kept == 0) {  // 0 or one unit, whichever is nearer
    std::snprintf(buffer, sizeof(buffer), "5e%d", static_cast<int>(-digits - 1));
    const double half = std::strtod(buffer, nullptr);
    if (std::fabs(v) <= half) return std::copysign(0.0, v);
    std::snprintf(buffer, sizeof(buffer), "1e%d", static_cast<int>(-digits));
    return std::copysign(std::strtod(buffer, nullptr), v);
  }
  std::snprintf(buffer, sizeof(buffer), "%.*e", static_cast<int>(std::min<int64_t>(kept - 1, 770)), v);
  return std::strtod(buffer, nullptr);
}

Value RoundFilter(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader reader(in, args, "round");
  const Value given = reader.Or("precision", 0);
  const std::string method = reader.Text("method", "common");
  reader.Done();
  if (method != "common" && method != "ceil" && method != "floor") in.Fail("method must be common, ceil or floor");
  if (v.is_undefined()) in.FailUndefined(v);
  if (!IsNumber(v)) in.Fail("round needs a number, not " + Interpreter::TypeName(v));
  if (method != "common") {
    const Value power = in.Arithmetic("**", 10, given), scaled = in.Arithmetic("*", v, power);
    if (!scaled.is_float()) return in.Arithmetic("/", scaled, power);
    return in.Arithmetic("/", in.ToInteger(method == "ceil" ? std::ceil(scaled.as_float()) : std::floor(scaled.as_float())),
                         power);
  }
  if (given.is_none()) return v.is_float() ? in.ToInteger(std::nearbyint(v.as_float())) : in.Arithmetic("+", 0, v);
  if (!IsInteger(given)) in.Fail("'" + Interpreter::TypeName(given) + "' object cannot be interpreted as an integer");
  if (given.kind() == Value::Kind::kBigInt) in.Fail("a precision beyond 64 bits is not supported");
  const int64_t precision = given.is_bool() ? given.as_bool() : given.as_int();
  if (v.is_float()) {
    const double out = RoundFloat(v.as_float(), precision);
    if (std::isinf(out) && !std::isinf(v.as_float())) in.Fail("rounded value too large to represent");
    return out;
  }
  const Value plain = in.Arithmetic("+", 0, v);
  if (precision >= 0) return plain;
  const Value unit = in.Arithmetic("**", 10, -precision);
  const Value low = in.Arithmetic("//", plain, unit), rest = in.Arithmetic("%", plain, unit), twice = in.Arithmetic("*", 2, rest);
  const bool odd = in.Equal(in.Arithmetic("%", low, 2), 1);
  const bool up = in.Less(unit, twice) || (in.Equal(unit, twice) && odd);
  return in.Arithmetic("*", in.Arithmetic("+", low, up), unit);
}

Value SumFilter(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader reader(in, args, "sum");
  const Value attribute = reader.Or("attribute", nullptr);
  Value total = reader.Or("start", 0);
  reader.Done();
  if (total.is_string()) in.Fail("sum() can't sum strings [use ''.join(seq) instead]");
  const Interpreter::Items items = in.Open(v);
  for (Value item; items(&item);) total = in.Arithmetic("+", total, Attribute(in, item, attribute));
  return total;
}

Value SliceFilter(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader reader(in, args, "slice");
  const int64_t slices = reader.RequiredInt("slices");
  const Value fill = reader.Or("fill_with", nullptr);
  reader.Done();
  return Interpreter::Generator(
      [v, slices, fill, items = List(), number = int64_t{-1}, at = size_t{0}](Interpreter& i, Value* item) mutable {
        if (number < 0) {
          items = i.Iterate(v);
          if (slices == 0) i.Fail("integer division or modulo by zero");
        }
        if (++number >= slices) return false;
        const int64_t n = static_cast<int64_t>(items.size());
        const bool extra = number < n % slices;
        List part;
        i.Charge(20);  // for the list, which may be empty
        for (int64_t k = 0; k < n / slices + (extra ? 1 : 0); ++k) part.push_back(items[at++]);
        if (!fill.is_none() && !extra) part.push_back(fill);
        *item = Value(std::move(part));
        return true;
      },
      {&v, &fill});
}

Value BatchFilter(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader reader(in, args, "batch");
  const int64_t count = reader.RequiredInt("linecount");
  const Value fill = reader.Or("fill_with", nullptr);
  reader.Done();
  return Interpreter::Generator(
      [source = Lazily(v), count, fill, part = List(), over = false](Interpreter& i, Value* item) mutable {
        Value next;
        while (!over && source.Next(i, &next)) {
          const bool full = static_cast<int64_t>(part.size()) == count;
          if (full) *item = Value(std::exchange(part, {}));
          part.push_back(std::move(next));
          if (full) return true;
        }
        if (std::exchange(over, true) || part.empty()) return false;
        if (!fill.is_none() && static_cast<int64_t>(part.size()) < count) {
          i.Charge(static_cast<size_t>(std::min<int64_t>(count, kMaxSteps)) + 1);
          part.resize(static_cast<size_t>(count), fill);
        }
        *item = Value(std::move(part));
        return true;
      },
      {&v, &fill});
}

Value ReverseFilter(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader(in, args, "reverse").Done();
  if (v.is_string()) return in.Slice(v, nullptr, nullptr, -1);
  if (!in.HasLength(v)) {
    List items = in.Iterate(v);
    std::reverse(items.begin(), items.end());
    return Value(std::move(items));
  }
  const char* const type = v.is_list() ? "list_reverseiterator" : v.is_dict() ? "dict_reversekeyiterator" : "reversed";
  return Interpreter::Generator(
      [v, left = in.Length(v)](Interpreter& i, Value* item) mutable {
        if (left == 0) return false;
        *item = i.ItemAt(v, --left);
        return true;
      },
      {&v}, type);
}

Value LastFilter(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader(in, args, "last").Done();
  if (!in.HasLength(v)) in.Fail("'" + Interpreter::TypeName(v) + "' object is not reversible");
  const size_t size = in.Length(v);
  if (size == 0) return Value::Undefined("No last item, sequence was empty.");
  return v.is_string() ? in.GetItem(v, -1) : in.ItemAt(v, size - 1);
}

Value ItemsFilter(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader(in, args, "items").Done();
  return Interpreter::Generator(
      [v, at = size_t{0}](Interpreter& i, Value* item) mutable {
        if (v.is_undefined()) return false;
        if (!v.is_dict()) i.Fail("Can only get item pairs from a mapping.");
        if (at >= v.as_dict().size()) return false;
        const auto& [key, value] = v.as_dict().items()[at++];
        *item = Value::Tuple({key, value});
        return true;
      },
      {&v});
}

Value DefaultFilter(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader reader(in, args, "default");
  const Value fallback = reader.Or("default_value", "");
  const bool boolean = reader.Flag("boolean", false);
  reader.Done();
  return v.is_undefined() || (boolean && !Interpreter::Truthy(v)) ? fallback : v;
}

Value AttrFilter(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader reader(in, args, "attr");
  const std::string name = reader.RequiredText("name");
  reader.Done();
  if (v.is_dict() && !Interpreter::HasMethod(v, name)) return Value::Undefined("'dict object' has no attribute '" + name + "'");
  return in.GetAttr(v, name);
}

// Filters without arguments.
template <Value (*body)(Interpreter&, const Value&)>
Value Plain(Interpreter& in, const Value& v, Arguments& args) {
  if (!args.positional.empty() || !args.named.empty()) in.Fail("a filter got arguments that it does not take");
  return body(in, v);
}

const FilterEntry kFilters[] = {
    {"tojson", ToJson},
    {"length", Plain<[](Interpreter& in, const Value& v) -> Value { return static_cast<int64_t>(in.Length(v)); }>},
    {"count", Plain<[](Interpreter& in, const Value& v) -> Value { return static_cast<int64_t>(in.Length(v)); }>},
    {"default", DefaultFilter},
    {"d", DefaultFilter},
    {"int", IntFilter},
    {"float", FloatFilter},
    {"abs", Plain<[](Interpreter& in, const Value& v) -> Value {
       if (v.is_undefined()) in.FailUndefined(v);
       if (!IsNumber(v)) in.Fail("bad operand type for abs(): '" + Interpreter::TypeName(v) + "'");
       if (v.is_float()) return std::fabs(v.as_float());
       return in.Arithmetic(in.Less(v, 0) ? "-" : "+", 0, v);
     }>},
    {"round", RoundFilter},
    {"first", Plain<[](Interpreter& in, const Value& v) -> Value {
       Value item;
       return in.Open(v)(&item) ? item : Value::Undefined("No first item, sequence was empty.");
     }>},
    {"last", LastFilter},
    {"list", Plain<[](Interpreter& in, const Value& v) -> Value { return Value(in.Iterate(v)); }>},
    {"items", ItemsFilter},
    {"reverse", ReverseFilter},
    {"sort", SortFilter},
    {"dictsort", DictSort},
    {"unique", UniqueFilter},
    {"groupby", GroupBy},
    {"min", MinMax<false>},
    {"max", MinMax<true>},
    {"sum", SumFilter},
    {"map", MapFilter},
    {"select", SelectFilter<true, false>},
    {"reject", SelectFilter<false, false>},
    {"selectattr", SelectFilter<true, true>},
    {"rejectattr", SelectFilter<false, true>},
    {"attr", AttrFilter},
    {"batch", BatchFilter},
    {"slice", SliceFilter},
};

// What stands before the digits of an integer in this base; empty: nothing may.
bool TakePrefix(std::string* s, int64_t base) {
  if (s->size() < 2 || (*s)[0] != '0') return false;
  const char letter = static_cast<char>((*s)[1] | 32);
  if (letter != (base == 16 ? 'x' : base == 8 ? 'o' : base == 2 ? 'b' : '\0')) return false;
  s->erase(0, 2);
  return true;
}

// The text without outer white space, decimal digits of every script as ASCII; nullopt where anything else lies beyond ASCII.
std::optional<std::string> AsciiNumber(const std::string& text) {
  std::string out;
  for (uint32_t cp : ToCodePoints(StripText(text, nullptr, true, true))) {
    const int digit = DecimalValue(cp);
    if (digit < 0 && (cp >= 0x80 || cp == 0)) return std::nullopt;
    out.push_back(digit >= 0 ? static_cast<char>('0' + digit) : static_cast<char>(cp));
  }
  return out;
}

}  // namespace

std::optional<Value> ParseInteger(const std::string& text, int64_t base) {
  if (base != 0 && (base < 2 || base > 36)) return std::nullopt;
  std::optional<std::string> number = AsciiNumber(text);
  if (!number) return std::nullopt;
  std::string& s = *number;
  const bool negative = !s.empty() && s[0] == '-';
  if (!s.empty() && (s[0] == '-' || s[0] == '+')) s.erase(0, 1);
  bool prefixed = false;
  for (int64_t b : {16, 8, 2}) {
    if (!prefixed && (base == 0 || base == b) && TakePrefix(&s, b)) {
      prefixed = true;
      base = b;
    }
  }
  const bool literal = base == 0;  // as in a program: no zeros before other digits
  if (literal) base = 10;
  std::string digits;
  for (size_t i = 0; i < s.size(); ++i) {
    if (s[i] == '_') {  // between digits, or after a prefix
      if ((i == 0 && !prefixed) || i + 1 == s.size() || s[i + 1] == '_') return std::nullopt;
      continue;
    }
    const char lower = static_cast<char>(s[i] >= 'A' && s[i] <= 'Z' ? s[i] | 32 : s[i]);
    const int digit = lower >= '0' && lower <= '9' ? lower - '0' : lower >= 'a' && lower <= 'z' ? lower - 'a' + 10 : 99;
    if (digit >= base) return std::nullopt;
    digits.push_back(lower);
  }
  if (digits.empty()) return std::nullopt;
  if (literal && digits[0] == '0' && digits.find_first_not_of('0') != std::string::npos) return std::nullopt;
  if (digits.size() > BigInteger::kMaxDigits) return std::nullopt;  // Python refuses as many decimal digits
  BigInteger out;
  if (base == 10) {
    out = BigInteger::FromDigits(digits);
  } else {
    for (char c : digits) out = BigInteger::Add(BigInteger::Multiply(out, base), c <= '9' ? c - '0' : c - 'a' + 10);
  }
  if (negative) out = out.Negated();
  if (const auto small = out.ToInt64()) return Value(*small);
  return Value::BigInt(out.ToString());
}

std::optional<double> ParseFloat(const std::string& text) {
  std::optional<std::string> number = AsciiNumber(text);
  if (!number) return std::nullopt;
  std::string s;
  auto digit = [](char c) { return c >= '0' && c <= '9'; };
  for (size_t i = 0; i < number->size(); ++i) {
    const char c = (*number)[i];
    if (c != '_') {
      s.push_back(c);
    } else if (i == 0 || i + 1 == number->size() || !digit((*number)[i - 1]) || !digit((*number)[i + 1])) {
      return std::nullopt;
    }
  }
  if (s.empty()) return std::nullopt;
  if (s.find_first_not_of("0123456789+-.eE") != std::string::npos) {
    const std::string word = Lower(s.substr(s[0] == '-' || s[0] == '+'));
    const bool negative = s[0] == '-';
    if (word == "inf" || word == "infinity") return negative ? -HUGE_VAL : HUGE_VAL;
    if (word == "nan") return std::nan("");
    return std::nullopt;
  }
  char* end = nullptr;
  const double v = std::strtod(s.c_str(), &end);
  if (end != s.c_str() + s.size()) return std::nullopt;
  return v;
}

int FindFilter(std::string_view name) {
  const int general = static_cast<int>(std::size(kFilters));
  for (int i = 0; i < general; ++i) {
    if (name == kFilters[i].name) return i;
  }
  for (int i = 0; kTextFilters[i].name; ++i) {
    if (name == kTextFilters[i].name) return general + i;
  }
  return -1;
}

// random is another text each time, so no prompt can be held to it; urlize makes links of HTML.
bool IsUnsupportedFilter(std::string_view name) { return name == "random" || name == "urlize"; }

Value Interpreter::ApplyFilter(int index, const Value& operand, Arguments& args) {
  Charge(1);
  const int general = static_cast<int>(std::size(kFilters));
  const FilterEntry& entry = index < general ? kFilters[index] : kTextFilters[index - general];
  return entry.filter(*this, operand, args);
}

}  // namespace temper::text::jinja
