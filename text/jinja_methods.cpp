// Attributes and methods of values, as Python and the immutable sandbox of transformers have them. Those of texts stand in
// jinja_strings.cpp.
#include <algorithm>
#include <cmath>

#include "text/big_integer.h"
#include "text/jinja_runtime.h"
#include "text/json.h"
#include "text/unicode.h"
#include "text/utf8.h"

namespace temper::text::jinja {
namespace {

using Names = std::initializer_list<std::string_view>;

bool OneOf(std::string_view name, Names names) { return std::find(names.begin(), names.end(), name) != names.end(); }

BigInteger ToBig(Interpreter& in, const Value& v) {
  if (v.kind() == Value::Kind::kBigInt) {
    in.Charge(v.as_string().size() * v.as_string().size() / 256);
    if (v.as_string().size() > BigInteger::kMaxDigits + 1) in.Fail("an integer of more than 4300 digits is not supported");
    return BigInteger::FromDigits(v.as_string());
  }
  return v.is_bool() ? BigInteger(v.as_bool()) : BigInteger(v.as_int());
}

// What Python's float.as_integer_ratio gives.
Value Ratio(Interpreter& in, double v) {
  if (!std::isfinite(v)) in.Fail("cannot convert " + FloatRepr(v) + " to integer ratio");
  int exponent = 0;
  double mantissa = std::frexp(v, &exponent);
  for (int i = 0; i < 300 && mantissa != std::floor(mantissa); ++i) {
    mantissa *= 2;
    --exponent;
  }
  const Value power = in.Arithmetic("**", 2, std::abs(exponent)), top = in.ToInteger(mantissa);
  return exponent >= 0 ? Value::Tuple({in.Arithmetic("*", top, power), 1}) : Value::Tuple({top, power});
}

// Python's float.hex.
std::string Hex(double v) {
  if (!std::isfinite(v)) return FloatRepr(v);
  const std::string sign = std::signbit(v) ? "-" : "";
  v = std::fabs(v);
  if (v == 0) return sign + "0x0.0p+0";
  int exponent = 0;
  double fraction = std::frexp(v, &exponent);
  const int shift = 1 - std::max(-1021 - exponent, 0);  // a small number keeps its exponent and begins with 0
  fraction = std::ldexp(fraction, shift);
  exponent -= shift;
  std::string out = sign + "0x";
  for (int i = 0; i < 14; ++i) {
    const int digit = static_cast<int>(fraction);
    out.push_back("0123456789abcdef"[digit]);
    if (i == 0) out.push_back('.');
    fraction = (fraction - digit) * 16;
  }
  return out + "p" + (exponent < 0 ? "-" : "+") + std::to_string(std::abs(exponent));
}

}  // namespace

int64_t ArgumentReader::AsInt(std::string_view name, const Value& v) const {
  if (v.is_bool()) return v.as_bool();
  if (!v.is_int()) {
    const std::string what = v.kind() == Value::Kind::kBigInt ? "a larger one" : Interpreter::TypeName(v);
    in_.Fail(what_ + " needs an integer" + (name.empty() ? "" : " for '" + std::string(name) + "'") + " of 64 bits, not " + what);
  }
  return v.as_int();
}

std::string ArgumentReader::Text(std::string_view name, std::string fallback) {
  const Value* v = Next(name);
  if (!v) return fallback;
  if (!v->is_string()) in_.Fail(what_ + " needs a string for '" + std::string(name) + "', not " + Interpreter::TypeName(*v));
  return v->as_string();
}

std::string ArgumentReader::RequiredText(std::string_view name) {
  const Value& v = Required(name);
  if (!v.is_string()) in_.Fail(what_ + " needs a string for '" + std::string(name) + "', not " + Interpreter::TypeName(v));
  return v.as_string();
}

Value Interpreter::Slice(const Value& object, const Value& start, const Value& stop, const Value& step) {
  if (object.is_undefined()) FailUndefined(object);
  // What lies beyond 64 bits lies beyond every end as well.
  auto number = [&](const Value& v, int64_t fallback) {
    if (v.is_none()) return fallback;
    if (v.is_bool()) return static_cast<int64_t>(v.as_bool());
    if (v.kind() == Value::Kind::kBigInt) return v.as_string()[0] == '-' ? INT64_MIN + 1 : INT64_MAX;
    if (!v.is_int()) Fail("slice indices must be integers or None");
    return std::max(v.as_int(), INT64_MIN + 1);
  };
  auto* range = As<RangeObject>(object);
  if (!object.is_string() && !IsSequence(object) && !range) Fail("'" + TypeName(object) + "' object cannot be sliced");
  const std::vector<uint32_t> points = object.is_string() ? ToCodePoints(object.as_string()) : std::vector<uint32_t>();
  const int64_t size = static_cast<int64_t>(object.is_string() ? points.size() : Length(object));
  Charge(static_cast<size_t>(size) / 16);
  const int64_t by = number(step, 1);
  if (by == 0) Fail("slice step cannot be zero");
  auto clamp = [&](int64_t i, int64_t low, int64_t high) {
    if (i < 0) i = i < -size ? -1 : i + size;  // -1 stands for "before the first"
    return std::clamp(i, low, high);
  };
  const int64_t first =
      by > 0 ? clamp(number(start, 0), 0, size) : (start.is_none() ? size - 1 : clamp(number(start, 0), -1, size - 1));
  const int64_t last = by > 0 ? (stop.is_none() ? size : clamp(number(stop, 0), 0, size))
                              : (stop.is_none() ? -1 : clamp(number(stop, 0), -1, size - 1));
  if (range) {
    auto out = std::make_shared<RangeObject>();
    const __int128 wide = static_cast<__int128>(range->step) * by;
    out->start = static_cast<int64_t>(range->start + static_cast<__int128>(range->step) * first);
    out->stop = static_cast<int64_t>(range->start + static_cast<__int128>(range->step) * last);
    if (wide > INT64_MAX || wide < INT64_MIN) Fail("a step beyond 64 bits is not supported");
    out->step = static_cast<int64_t>(wide);
    const int64_t span = by > 0 ? last - first : first - last, magnitude = std::abs(by);
    out->length = span > 0 ? static_cast<size_t>((span - 1) / magnitude + 1) : 0;
    return Value(std::shared_ptr<Object>(std::move(out)));
  }
  List out;
  std::string text;
  for (__int128 i = first; by > 0 ? i < last : i > last; i += by) {
    if (object.is_string()) {
      AppendUtf8(points[static_cast<size_t>(i)], &text);
    } else {
      out.push_back(object.as_list()[static_cast<size_t>(i)]);
    }
  }
  Charge(out.size());
  if (object.is_string()) return object.is_markup() ? Value::Markup(std::move(text)) : Value(std::move(text));
  return object.is_list() ? Value(std::move(out)) : Value::Tuple(std::move(out));
}

Value Interpreter::GetItem(const Value& object, const Value& key) {
  if (object.is_undefined()) FailUndefined(object);
  if (object.is_dict()) {
    const bool hashable = !key.is_list() && !key.is_dict() && !(key.is_tuple() && key.depth() > 1);
    if (const Value* v = hashable ? FindKey(object.as_dict(), key) : nullptr) return *v;
  } else if ((object.is_string() || IsSequence(object) || As<RangeObject>(object)) && (key.is_int() || key.is_bool())) {
    const int64_t size = static_cast<int64_t>(Length(object));
    int64_t i = key.is_bool() ? key.as_bool() : key.as_int();
    if (i < 0) i += size;
    if (i >= 0 && i < size) {
      if (!object.is_string()) return ItemAt(object, static_cast<size_t>(i));
      size_t at = 0;
      for (; i > 0; --i) at += ReadUtf8(object.as_string(), at).length;
      std::string one = object.as_string().substr(at, ReadUtf8(object.as_string(), at).length);
      return object.is_markup() ? Value::Markup(std::move(one)) : Value(std::move(one));
    }
  }
  auto* function = As<FunctionObject>(object);
  if (function && function->type == std::string_view("type")) Fail("an item of a class is not supported");
  if (key.is_string()) {
    if (object.is_dict() && !HasMethod(object, key.as_string())) {
      return Value::Undefined("'dict object' has no attribute '" + key.as_string() + "'");
    }
    return GetAttr(object, key.as_string());
  }
  return Value::Undefined("'" + TypeName(object) + " object' has no element " + (IsNumber(key) ? Repr(key) : TypeName(key)));
}

Value Interpreter::GetPath(Value object, std::string_view path, const Value& fallback) {
  while (true) {
    const size_t dot = path.find('.');
    const std::string part(path.substr(0, dot));
    const std::vector<uint32_t> points = ToCodePoints(part);
    const bool is_index = !points.empty() && std::all_of(points.begin(), points.end(), IsPythonDigit);
    if (is_index) {
      const std::optional<Value> index = ParseInteger(part, 10);
      if (!index) Fail("invalid literal for int() with base 10: " + QuotedRepr(part));
      object = GetItem(object, *index);
    } else {
      object = GetItem(object, Value(part));
    }
    if (object.is_undefined() && !fallback.is_undefined() && !fallback.is_none()) object = fallback;
    if (dot == std::string_view::npos) return object;
    path.remove_prefix(dot + 1);
  }
}

Value Interpreter::LoopAttribute(LoopObject* loop, const std::string& name) {
  const int64_t i = static_cast<int64_t>(loop->index0);
  // Looks ahead as far as Jinja2 does: by one item, or to the end for what counts them all.
  const bool counts = name == "length" || name == "revindex" || name == "revindex0";
  const bool peeks = name == "last" || name == "nextitem";
  while (loop->more && (counts || (peeks && loop->items->size() == loop->index0 + 1)) && loop->more()) {
  }
  const int64_t n = static_cast<int64_t>(loop->items ? loop->items->size() : loop->length);
  if (name == "index") return i + 1;
  if (name == "index0") return i;
  if (name == "revindex") return n - i;
  if (name == "revindex0") return n - i - 1;
  if (name == "first") return i == 0;
  if (name == "last") return i + 1 >= n;
  if (name == "length") return n;
  if (name == "depth") return loop->depth0 + 1;
  if (name == "depth0") return loop->depth0;
  if (name == "previtem")
    return loop->items && i > 0 ? (*loop->items)[loop->index0 - 1] : Value::Undefined("there is no previous item");
  if (name == "nextitem")
    return loop->items && i + 1 < n ? (*loop->items)[loop->index0 + 1] : Value::Undefined("there is no next item");
  return Value::Undefined("'LoopContext object' has no attribute '" + name + "'");
}

Value Interpreter::GetAttr(const Value& object, const std::string& name) {
  if (object.is_undefined()) FailUndefined(object);
  if (HasMethod(object, name)) {
    auto bound = std::make_shared<FunctionObject>();
    bound->type = object.kind() == Value::Kind::kObject && !As<RangeObject>(object) && !As<ViewObject>(object)
                      ? "method"
                      : "builtin_function_or_method";
    bound->depth = object.depth() + 1;
    bound->call = [object, name](Interpreter& in, Arguments& args) { return in.CallMethod(object, name, args); };
    return Value(std::shared_ptr<Object>(std::move(bound)));
  }
  if (object.is_dict()) {
    if (OneOf(name, {"update", "pop", "popitem", "clear", "setdefault"})) {
      return Value::Undefined("access to attribute '" + name + "' of 'dict' object is unsafe");
    }
    if (const Value* v = object.as_dict().Find(std::string_view(name))) return *v;
  } else if (object.is_group() && (name == "grouper" || name == "list")) {
    return object.as_list()[name == "list"];
  } else if (IsInteger(object)) {
    if (name == "real" || name == "numerator") return Arithmetic("+", 0, object);
    if (name == "imag") return 0;
    if (name == "denominator") return 1;
  } else if (object.is_float()) {
    if (name == "real") return object;
    if (name == "imag") return 0.0;
  } else if (auto* ns = As<NamespaceObject>(object)) {
    Value* v = ns->Find(name);
    if (v && name[0] == '_') return Value::Undefined("access to attribute '" + name + "' of 'Namespace' object is unsafe");
    if (v) return *v;
  } else if (auto* loop = As<LoopObject>(object)) {
    return LoopAttribute(loop, name);
  } else if (auto* cycler = As<CyclerObject>(object)) {
    if (name == "current") return cycler->items[cycler->at];
    if (name == "pos") return static_cast<int64_t>(cycler->at);
    if (name == "items") return Value::Tuple(cycler->items);
  } else if (auto* joiner = As<JoinerObject>(object)) {
    if (name == "sep") return joiner->separator;
    if (name == "used") return joiner->used;
  } else if (auto* range = As<RangeObject>(object)) {
    if (name == "start") return range->start;
    if (name == "stop") return range->stop;
    if (name == "step") return range->step;
  } else if (As<ViewObject>(object)) {
    if (name == "mapping") Fail("the attribute mapping of a " + TypeName(object) + " is not supported");
  } else if (auto* macro = As<MacroObject>(object)) {
    const Stmt& s = *macro->stmt;
    if (name == "name") return s.kind == StmtKind::kMacro ? Value(s.text) : Value(nullptr);
    if (name == "arguments") {
      List out;
      for (const Parameter& p : s.parameters) out.emplace_back(p.name);
      return Value::Tuple(std::move(out));
    }
    if (name == "catch_kwargs") return s.uses_kwargs;
    if (name == "catch_varargs") return s.uses_varargs;
    if (name == "caller") return s.uses_caller;
    if (name == "explicit_caller") {
      return std::any_of(s.parameters.begin(), s.parameters.end(), [](const Parameter& p) { return p.name == "caller"; });
    }
  } else if (auto* function = As<FunctionObject>(object)) {
    if (function->type == std::string_view("type")) Fail("attributes of a class, as '" + name + "', are not supported");
  } else if (As<GeneratorObject>(object) && name[0] != '_') {
    Fail("attributes of a " + TypeName(object) + ", as '" + name + "', are not supported");
  }
  return Value::Undefined("'" + TypeName(object) + " object' has no attribute '" + name + "'");
}

bool Interpreter::HasMethod(const Value& object, std::string_view name) {
  switch (object.kind()) {
    case Value::Kind::kString:
      return OneOf(name, {"capitalize", "casefold",     "center",       "count",   "encode",     "endswith",    "expandtabs",
                          "find",       "format",       "format_map",   "index",   "isalnum",    "isalpha",     "isascii",
                          "isdecimal",  "isdigit",      "isidentifier", "islower", "isnumeric",  "isprintable", "isspace",
                          "istitle",    "isupper",      "join",         "ljust",   "lower",      "lstrip",      "maketrans",
                          "partition",  "removeprefix", "removesuffix", "replace", "rfind",      "rindex",      "rjust",
                          "rpartition", "rsplit",       "rstrip",       "split",   "splitlines", "startswith",  "strip",
                          "swapcase",   "title",        "translate",    "upper",   "zfill"}) ||
             (object.is_markup() && OneOf(name, {"escape", "striptags", "unescape"}));
    case Value::Kind::kList:
    case Value::Kind::kTuple: return OneOf(name, {"index", "count"}) || (object.is_list() && name == "copy");
    case Value::Kind::kDict: return OneOf(name, {"items", "keys", "values", "get", "copy", "fromkeys"});
    case Value::Kind::kBool:
    case Value::Kind::kInt:
    case Value::Kind::kBigInt:
      return OneOf(name, {"as_integer_ratio", "bit_count", "bit_length", "conjugate", "from_bytes", "to_bytes"});
    case Value::Kind::kFloat: return OneOf(name, {"as_integer_ratio", "conjugate", "fromhex", "hex", "is_integer"});
    case Value::Kind::kObject: {
      if (As<LoopObject>(object)) return OneOf(name, {"cycle", "changed"});
      if (As<CyclerObject>(object)) return OneOf(name, {"next", "reset"});
      if (As<RangeObject>(object)) return OneOf(name, {"count", "index"});
      auto* view = As<ViewObject>(object);
      return view && view->kind != ViewObject::Kind::kValues && name == "isdisjoint";
    }
    default: return false;
  }
}

Value Interpreter::CallMethod(const Value& object, std::string_view name, Arguments& args) {
  Charge(1);
  switch (object.kind()) {
    case Value::Kind::kDict: return CallDict(object, name, args);
    case Value::Kind::kList:
    case Value::Kind::kTuple: return CallSequence(object, name, args);
    case Value::Kind::kObject: return As<RangeObject>(object) ? CallSequence(object, name, args) : CallObject(object, name, args);
    case Value::Kind::kString:
      ChargeText(object.as_string().size());
      return object.is_markup() ? CallMarkup(object, name, args) : CallString(object.as_string(), name, args);
    default: return CallNumber(object, name, args);
  }
}

Value Interpreter::CallDict(const Value& object, std::string_view name, Arguments& args) {
  ArgumentReader reader(*this, args, std::string(name));
  const Dict& dict = object.as_dict();
  if (name == "get") {
    const Value key = reader.Required("");
    Value fallback = reader.Or("", nullptr);
    reader.Done();
    const Value* v = FindKey(dict, key);
    return v ? *v : fallback;
  }
  if (name == "fromkeys") {
    const Value keys = reader.Required(""), value = reader.Or("", nullptr);
    reader.Done();
    Dict out;
    const Items items = Open(keys);
    for (Value key; items(&key);) {
      CheckHashable(key);
      out.Set(key, value);
    }
    return Value(std::move(out));
  }
  reader.Done();
  if (name == "copy") return Value(Dict(dict));
  auto view = std::make_shared<ViewObject>();
  view->kind = name == "keys" ? ViewObject::Kind::kKeys : name == "values" ? ViewObject::Kind::kValues : ViewObject::Kind::kItems;
  view->dict = object;
  view->depth = object.depth() + 1;
  return Value(std::shared_ptr<Object>(std::move(view)));
}

Value Interpreter::CallSequence(const Value& object, std::string_view name, Arguments& args) {
  ArgumentReader reader(*this, args, std::string(name));
  if (name == "copy") {
    reader.Done();
    Charge(object.as_list().size());
    return Value(List(object.as_list()));
  }
  const Value item = reader.Required("");
  const int64_t size = static_cast<int64_t>(Length(object));
  int64_t start = 0, stop = size;
  if (name == "index" && !As<RangeObject>(object)) {
    start = reader.Int("", 0);
    stop = reader.Int("", size);
    if (start < 0) start = std::max<int64_t>(0, start + size);
    if (stop < 0) stop += size;
  }
  reader.Done();
  int64_t count = 0;
  for (int64_t i = start; i < std::min(stop, size); ++i) {
    if (!Equal(ItemAt(object, static_cast<size_t>(i)), item)) continue;
    if (name == "index") return i;
    ++count;
  }
  if (name == "index") Fail("the item is not in the " + TypeName(object));
  return count;
}

Value Interpreter::CallNumber(const Value& object, std::string_view name, Arguments& args) {
  if (name == "to_bytes" || name == "from_bytes") Fail("'" + std::string(name) + "' is not supported: there are no bytes here");
  ArgumentReader reader(*this, args, std::string(name));
  if (name == "fromhex") Fail("'fromhex' is not supported");
  reader.Done();
  if (object.is_float()) {
    const double v = object.as_float();
    if (name == "is_integer") return std::isfinite(v) && v == std::floor(v);
    if (name == "hex") return Hex(v);
    return name == "conjugate" ? object : Ratio(*this, v);
  }
  const Value plain = Arithmetic("+", 0, object);
  if (name == "bit_length") return static_cast<int64_t>(ToBig(*this, object).bits());
  if (name == "bit_count") return static_cast<int64_t>(ToBig(*this, object).ones());
  return name == "conjugate" ? plain : Value::Tuple({plain, 1});
}

Value Interpreter::CallObject(const Value& object, std::string_view name, Arguments& args) {
  ArgumentReader reader(*this, args, std::string(name));
  if (auto* cycler = As<CyclerObject>(object)) {
    reader.Done();
    const Value current = cycler->items[cycler->at];
    cycler->at = name == "reset" ? 0 : (cycler->at + 1) % cycler->items.size();
    return name == "reset" ? Value(nullptr) : current;
  }
  if (As<ViewObject>(object)) {  // isdisjoint
    const Value other = reader.Required("");
    reader.Done();
    const Items items = Open(other);
    for (Value item; items(&item);) {
      if (In(item, object)) return false;
    }
    return true;
  }
  auto* loop = As<LoopObject>(object);
  if (!args.named.empty()) Fail(std::string(name) + " got an unexpected keyword argument");
  if (name == "cycle") {
    if (args.positional.empty()) Fail("no items for cycling given");
    return args.positional[loop->index0 % args.positional.size()];
  }
  const Value now = Value::Tuple(args.positional);
  const bool changed = !loop->has_changed_value || !Equal(loop->changed_value, now);
  loop->has_changed_value = true;
  CheckDepth(now);
  loop->changed_value = now;
  loop->depth = std::max(loop->depth, now.depth() + 1);
  return changed;
}

}  // namespace temper::text::jinja
