// Python's operators, conversions and methods on values.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "text/jinja_runtime.h"
#include "text/json.h"
#include "text/unicode.h"
#include "text/utf8.h"

namespace temper::text::jinja {
namespace {

bool IsSequence(const Value& v) { return v.is_list() || v.kind() == Value::Kind::kTuple; }
bool IsNumber(const Value& v) { return v.is_int() || v.is_float() || v.is_bool() || v.kind() == Value::Kind::kBigInt; }

double AsDouble(const Value& v) {
  if (v.is_float()) return v.as_float();
  if (v.is_bool()) return v.as_bool();
  if (v.is_int()) return static_cast<double>(v.as_int());
  return std::strtod(v.as_string().c_str(), nullptr);  // a big integer
}

// An integer as its sign and digits, to compare integers of any length.
std::string IntegerDigits(const Value& v) {
  if (v.is_bool()) return v.as_bool() ? "1" : "0";
  return v.is_int() ? std::to_string(v.as_int()) : v.as_string();
}

int CompareIntegers(const Value& a, const Value& b) {
  std::string x = IntegerDigits(a), y = IntegerDigits(b);
  const bool x_negative = x[0] == '-', y_negative = y[0] == '-';
  if (x_negative != y_negative) return x_negative ? -1 : 1;
  int order = x.size() != y.size() ? (x.size() < y.size() ? -1 : 1) : x.compare(y);
  return x_negative ? -order : order;
}

bool IsPrintable(uint32_t cp) {
  static const CodeSet printable = [] {
    CodeSet out;
    for (const char* name : {"L", "M", "N", "P", "S"}) out = Union(out, *UnicodeProperty(name));
    return Union(out, {{' ', ' '}});
  }();
  return Contains(printable, cp);
}

std::string QuotedRepr(std::string_view s) {
  const bool has_single = s.find('\'') != std::string_view::npos, has_double = s.find('"') != std::string_view::npos;
  const char quote = has_single && !has_double ? '"' : '\'';
  std::string out(1, quote);
  for (uint32_t cp : ToCodePoints(s)) {
    if (cp == static_cast<uint32_t>(quote) || cp == '\\') {
      out.push_back('\\');
      out.push_back(static_cast<char>(cp));
    } else if (cp == '\n') {
      out += "\\n";
    } else if (cp == '\r') {
      out += "\\r";
    } else if (cp == '\t') {
      out += "\\t";
    } else if (IsPrintable(cp)) {
      AppendUtf8(cp, &out);
    } else {
      char buffer[16];
      std::snprintf(buffer, sizeof(buffer), cp < 0x100 ? "\\x%02x" : cp < 0x10000 ? "\\u%04x" : "\\U%08x", cp);
      out += buffer;
    }
  }
  out.push_back(quote);
  return out;
}

}  // namespace

int64_t ArgumentReader::Int(std::string_view name, int64_t fallback) {
  const Value* v = Next(name);
  if (!v || v->is_none()) return fallback;
  if (v->is_bool()) return v->as_bool();
  if (!v->is_int()) in_.Fail(what_ + " needs an integer for '" + std::string(name) + "', not " + Interpreter::TypeName(*v));
  return v->as_int();
}

std::string ArgumentReader::Text(std::string_view name, std::string fallback) {
  const Value* v = Next(name);
  if (!v) return fallback;
  if (!v->is_string()) in_.Fail(what_ + " needs a string for '" + std::string(name) + "', not " + Interpreter::TypeName(*v));
  return v->as_string();
}

std::string Interpreter::TypeName(const Value& v) {
  switch (v.kind()) {
    case Value::Kind::kUndefined: return "Undefined";
    case Value::Kind::kNone: return "NoneType";
    case Value::Kind::kBool: return "bool";
    case Value::Kind::kInt:
    case Value::Kind::kBigInt: return "int";
    case Value::Kind::kFloat: return "float";
    case Value::Kind::kString: return "str";
    case Value::Kind::kList: return "list";
    case Value::Kind::kTuple: return "tuple";
    case Value::Kind::kDict: return "dict";
    case Value::Kind::kObject: {
      const Object* o = v.as_object().get();
      if (dynamic_cast<const NamespaceObject*>(o)) return "Namespace";
      if (dynamic_cast<const MacroObject*>(o)) return "Macro";
      if (dynamic_cast<const GeneratorObject*>(o)) return "generator";
      if (dynamic_cast<const LoopObject*>(o)) return "LoopContext";
      return "function";
    }
  }
  return "?";
}

bool Interpreter::Truthy(const Value& v) {
  switch (v.kind()) {
    case Value::Kind::kUndefined:
    case Value::Kind::kNone: return false;
    case Value::Kind::kBool: return v.as_bool();
    case Value::Kind::kInt: return v.as_int() != 0;
    case Value::Kind::kBigInt: return true;
    case Value::Kind::kFloat: return v.as_float() != 0;
    case Value::Kind::kString: return !v.as_string().empty();
    case Value::Kind::kList:
    case Value::Kind::kTuple: return !v.as_list().empty();
    case Value::Kind::kDict: return v.as_dict().size() > 0;
    case Value::Kind::kObject: return true;
  }
  return false;
}

std::string Interpreter::Str(const Value& v) {
  if (v.is_string()) return v.as_string();
  if (v.is_undefined()) return "";
  return Repr(v);
}

std::string Interpreter::Repr(const Value& v, int depth) {
  Charge(1);
  if (depth > 200) Fail("a value nested too deeply to print");
  switch (v.kind()) {
    case Value::Kind::kUndefined: return "Undefined";
    case Value::Kind::kNone: return "None";
    case Value::Kind::kBool: return v.as_bool() ? "True" : "False";
    case Value::Kind::kInt: return std::to_string(v.as_int());
    case Value::Kind::kBigInt: return v.as_string();
    case Value::Kind::kFloat: return FloatRepr(v.as_float());
    case Value::Kind::kString: return QuotedRepr(v.as_string());
    case Value::Kind::kList:
    case Value::Kind::kTuple: {
      std::string out = v.is_list() ? "[" : "(";
      const List& list = v.as_list();
      for (size_t i = 0; i < list.size(); ++i) {
        if (i) out += ", ";
        out += Repr(list[i], depth + 1);
        ChargeText(out.size() > kMaxText ? out.size() : 0);
      }
      if (!v.is_list() && list.size() == 1) out += ",";
      return out + (v.is_list() ? "]" : ")");
    }
    case Value::Kind::kDict: {
      std::string out = "{";
      bool first = true;
      for (const auto& [key, value] : v.as_dict().items()) {
        if (!first) out += ", ";
        first = false;
        out += Repr(key, depth + 1) + ": " + Repr(value, depth + 1);
        ChargeText(out.size() > kMaxText ? out.size() : 0);
      }
      return out + "}";
    }
    case Value::Kind::kObject: {
      if (auto* ns = dynamic_cast<NamespaceObject*>(v.as_object().get())) {
        std::string out = "<Namespace {";
        for (size_t i = 0; i < ns->attributes.size(); ++i) {
          if (i) out += ", ";
          out += QuotedRepr(ns->attributes[i].first) + ": " + Repr(ns->attributes[i].second, depth + 1);
        }
        return out + "}>";
      }
      Fail("printing a " + TypeName(v) + " is not supported");
    }
  }
  return "";
}

bool Interpreter::Equal(const Value& a, const Value& b, int depth) {
  Charge(1);
  if (depth > 200) Fail("values nested too deeply to compare");
  if (a.is_undefined() || b.is_undefined()) return a.is_undefined() && b.is_undefined();
  if (IsNumber(a) && IsNumber(b)) {
    if (a.is_float() || b.is_float()) return AsDouble(a) == AsDouble(b);
    return CompareIntegers(a, b) == 0;
  }
  if (a.kind() != b.kind()) return false;
  switch (a.kind()) {
    case Value::Kind::kNone: return true;
    case Value::Kind::kString:
      Charge(a.as_string().size() / 256);
      return a.as_string() == b.as_string();
    case Value::Kind::kList:
    case Value::Kind::kTuple: {
      const List &x = a.as_list(), &y = b.as_list();
      if (x.size() != y.size()) return false;
      for (size_t i = 0; i < x.size(); ++i) {
        if (!Equal(x[i], y[i], depth + 1)) return false;
      }
      return true;
    }
    case Value::Kind::kDict: {
      if (a.as_dict().size() != b.as_dict().size()) return false;
      for (const auto& [key, value] : a.as_dict().items()) {
        const Value* other = b.as_dict().Find(key);
        if (!other || !Equal(value, *other, depth + 1)) return false;
      }
      return true;
    }
    case Value::Kind::kObject: return a.as_object() == b.as_object();
    default: return false;
  }
}

bool Interpreter::Less(const Value& a, const Value& b, int depth) {
  Charge(1);
  if (depth > 200) Fail("values nested too deeply to compare");
  if (a.is_undefined()) FailUndefined(a);
  if (b.is_undefined()) FailUndefined(b);
  if (IsNumber(a) && IsNumber(b)) {
    if (a.is_float() || b.is_float()) return AsDouble(a) < AsDouble(b);
    return CompareIntegers(a, b) < 0;
  }
  if (a.is_string() && b.is_string()) return a.as_string() < b.as_string();  // UTF-8 keeps the order of code points
  if (IsSequence(a) && a.kind() == b.kind()) {
    const List &x = a.as_list(), &y = b.as_list();
    for (size_t i = 0; i < x.size() && i < y.size(); ++i) {
      if (!Equal(x[i], y[i], depth + 1)) return Less(x[i], y[i], depth + 1);
    }
    return x.size() < y.size();
  }
  Fail("'<' not supported between '" + TypeName(a) + "' and '" + TypeName(b) + "'");
}

bool Interpreter::In(const Value& item, const Value& container) {
  if (container.is_string()) {
    if (!item.is_string()) Fail("'in <string>' requires string as left operand, not " + TypeName(item));
    Charge(container.as_string().size() / 64);
    return container.as_string().find(item.as_string()) != std::string::npos;
  }
  if (container.is_dict()) {
    if (item.is_list() || item.is_dict()) Fail("unhashable type: '" + TypeName(item) + "'");
    return !item.is_undefined() && container.as_dict().Find(item) != nullptr;
  }
  if (IsSequence(container)) {
    for (const Value& v : container.as_list()) {
      if (Equal(v, item)) return true;
    }
    return false;
  }
  for (const Value& v : Iterate(container)) {
    if (Equal(v, item)) return true;
  }
  return false;
}

List Interpreter::Iterate(const Value& v) {
  switch (v.kind()) {
    case Value::Kind::kUndefined: return {};
    case Value::Kind::kList:
    case Value::Kind::kTuple: Charge(v.as_list().size()); return v.as_list();
    case Value::Kind::kDict: {
      List out;
      for (const auto& [key, value] : v.as_dict().items()) out.push_back(key);
      Charge(out.size());
      return out;
    }
    case Value::Kind::kString: {
      List out;
      const std::string& s = v.as_string();
      Charge(s.size());
      for (size_t i = 0; i < s.size();) {
        const size_t length = ReadUtf8(s, i).length;
        out.emplace_back(s.substr(i, length));
        i += length;
      }
      return out;
    }
    case Value::Kind::kObject:
      if (auto* g = dynamic_cast<GeneratorObject*>(v.as_object().get())) {
        if (std::exchange(g->read, true)) return {};
        Charge(g->items.size());
        return std::move(g->items);
      }
      [[fallthrough]];
    default: Fail("'" + TypeName(v) + "' object is not iterable");
  }
}

size_t Interpreter::Length(const Value& v) {
  switch (v.kind()) {
    case Value::Kind::kUndefined: return 0;
    case Value::Kind::kString: Charge(v.as_string().size() / 64); return CodePointCount(v.as_string());
    case Value::Kind::kList:
    case Value::Kind::kTuple: return v.as_list().size();
    case Value::Kind::kDict: return v.as_dict().size();
    default: Fail("object of type '" + TypeName(v) + "' has no len()");
  }
}

Value Interpreter::Arithmetic(std::string_view op, const Value& a, const Value& b) {
  if (a.is_undefined()) FailUndefined(a);
  if (b.is_undefined() && !(a.is_string() && op == "%")) FailUndefined(b);
  auto unsupported = [&] { Fail("unsupported operand type(s) for " + std::string(op) + ": '" + TypeName(a) + "' and '" + TypeName(b) + "'"); };
  if (a.is_string() && op == "%") return Value(FormatPercent(a.as_string(), b));
  if (op == "+" && a.is_string() && b.is_string()) {
    ChargeText(a.as_string().size() + b.as_string().size());
    return Value(a.as_string() + b.as_string());
  }
  if (op == "+" && IsSequence(a) && a.kind() == b.kind()) {
    List out = a.as_list();
    out.insert(out.end(), b.as_list().begin(), b.as_list().end());
    Charge(out.size());
    return a.is_list() ? Value(std::move(out)) : Value::Tuple(std::move(out));
  }
  if (op == "*" && ((a.is_string() || IsSequence(a)) != (b.is_string() || IsSequence(b)))) {
    const Value &repeated = a.is_string() || IsSequence(a) ? a : b, &times = &repeated == &a ? b : a;
    if (!times.is_int() && !times.is_bool()) unsupported();
    const int64_t n = std::max<int64_t>(0, times.is_bool() ? times.as_bool() : times.as_int());
    const size_t size = repeated.is_string() ? repeated.as_string().size() : repeated.as_list().size() * 64;
    if (size && static_cast<uint64_t>(n) > kMaxText / size) ChargeText(kMaxText + 1);
    ChargeText(size * static_cast<size_t>(n));
    if (repeated.is_string()) {
      std::string out;
      for (int64_t i = 0; i < n && size; ++i) out += repeated.as_string();
      return Value(std::move(out));
    }
    List out;
    for (int64_t i = 0; i < n && size; ++i) out.insert(out.end(), repeated.as_list().begin(), repeated.as_list().end());
    Charge(out.size());
    return repeated.is_list() ? Value(std::move(out)) : Value::Tuple(std::move(out));
  }
  if (!IsNumber(a) || !IsNumber(b)) unsupported();
  if (a.kind() == Value::Kind::kBigInt || b.kind() == Value::Kind::kBigInt) {
    if (a.is_int() && a.as_int() == 0 && op == "+") return b;
    if (a.is_int() && a.as_int() == 0 && op == "-") {
      return Value::BigInt(b.as_string()[0] == '-' ? b.as_string().substr(1) : "-" + b.as_string());
    }
    if (!a.is_float() && !b.is_float() && op != "/") Fail("arithmetic with integers beyond 64 bits is not supported");
  }
  if (a.is_float() || b.is_float() || op == "/") {
    const double x = AsDouble(a), y = AsDouble(b);
    if (op == "+") return x + y;
    if (op == "-") return x - y;
    if (op == "*") return x * y;
    if (op == "**") return std::pow(x, y);
    if (y == 0) Fail("float division by zero");
    if (op == "/") return x / y;
    double remainder = std::fmod(x, y);
    if (remainder != 0 && (remainder < 0) != (y < 0)) remainder += y;
    return op == "%" ? Value(remainder) : Value(std::floor((x - remainder) / y + 0.5));
  }
  const int64_t x = a.is_bool() ? a.as_bool() : a.as_int(), y = b.is_bool() ? b.as_bool() : b.as_int();
  int64_t out = 0;
  bool overflow = false;
  if (op == "+") {
    overflow = __builtin_add_overflow(x, y, &out);
  } else if (op == "-") {
    overflow = __builtin_sub_overflow(x, y, &out);
  } else if (op == "*") {
    overflow = __builtin_mul_overflow(x, y, &out);
  } else if (op == "**") {
    if (y < 0) {
      if (x == 0) Fail("0.0 cannot be raised to a negative power");
      return std::pow(static_cast<double>(x), static_cast<double>(y));
    }
    out = 1;
    int64_t base = x;
    for (int64_t e = y; e > 0 && !overflow; e >>= 1) {
      if (e & 1) overflow = __builtin_mul_overflow(out, base, &out);
      if (e > 1 && !overflow) overflow = __builtin_mul_overflow(base, base, &base);
    }
  } else {
    if (y == 0) Fail("integer division or modulo by zero");
    if (y == -1) {  // the one quotient that can overflow
      if (op == "%") return 0;
      overflow = __builtin_sub_overflow(int64_t{0}, x, &out);
    } else {
      const bool round = x % y != 0 && (x % y < 0) != (y < 0);
      out = op == "%" ? x % y + (round ? y : 0) : x / y - (round ? 1 : 0);
    }
  }
  if (overflow) Fail("an integer beyond 64 bits is not supported");
  return out;
}

Value Interpreter::Slice(const Value& object, const Value& start, const Value& stop, const Value& step) {
  if (object.is_undefined()) FailUndefined(object);
  auto number = [&](const Value& v, int64_t fallback) {
    if (v.is_none()) return fallback;
    if (v.is_bool()) return static_cast<int64_t>(v.as_bool());
    if (!v.is_int()) Fail("slice indices must be integers or None");
    return v.as_int();
  };
  if (!object.is_string() && !IsSequence(object)) Fail("'" + TypeName(object) + "' object is not subscriptable");
  const std::vector<uint32_t> points = object.is_string() ? ToCodePoints(object.as_string()) : std::vector<uint32_t>();
  const int64_t size = static_cast<int64_t>(object.is_string() ? points.size() : object.as_list().size());
  Charge(static_cast<size_t>(size) / 16);
  const int64_t by = number(step, 1);
  if (by == 0) Fail("slice step cannot be zero");
  auto clamp = [&](int64_t i, int64_t low, int64_t high) {
    if (i < 0) i = i < -size ? -1 : i + size;  // -1 stands for "before the first"
    return std::clamp(i, low, high);
  };
  const int64_t first = by > 0 ? clamp(number(start, 0), 0, size) : (start.is_none() ? size - 1 : clamp(number(start, 0), -1, size - 1));
  const int64_t last = by > 0 ? (stop.is_none() ? size : clamp(number(stop, 0), 0, size)) : (stop.is_none() ? -1 : clamp(number(stop, 0), -1, size - 1));
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
  if (object.is_string()) return Value(std::move(text));
  return object.is_list() ? Value(std::move(out)) : Value::Tuple(std::move(out));
}

// The pairs of groupby have names.
static bool IsGroup(const Value& object, std::string_view name) {
  return object.kind() == Value::Kind::kTuple && object.as_list().size() == 2 && (name == "grouper" || name == "list");
}

Value Interpreter::GetItem(const Value& object, const Value& key) {
  if (object.is_undefined()) FailUndefined(object);
  if (object.is_dict()) {
    if (const Value* v = key.is_undefined() || key.is_list() || key.is_dict() ? nullptr : object.as_dict().Find(key)) return *v;
  } else if ((object.is_string() || IsSequence(object)) && (key.is_int() || key.is_bool())) {
    const int64_t size = static_cast<int64_t>(Length(object));
    int64_t i = key.is_bool() ? key.as_bool() : key.as_int();
    if (i < 0) i += size;
    if (i >= 0 && i < size) {
      if (!object.is_string()) return object.as_list()[static_cast<size_t>(i)];
      size_t at = 0;
      for (; i > 0; --i) at += ReadUtf8(object.as_string(), at).length;
      return Value(object.as_string().substr(at, ReadUtf8(object.as_string(), at).length));
    }
  } else if (object.kind() == Value::Kind::kObject && key.is_string()) {
    return GetAttr(object, key.as_string());
  }
  if (key.is_string()) {
    if (HasMethod(object, key.as_string()) || IsGroup(object, key.as_string())) return GetAttr(object, key.as_string());
    return Value::Undefined("'" + TypeName(object) + " object' has no attribute '" + key.as_string() + "'");
  }
  return Value::Undefined("'" + TypeName(object) + " object' has no element " + (IsNumber(key) ? Repr(key) : TypeName(key)));
}

Value Interpreter::GetPath(Value object, std::string_view path, const Value& fallback) {
  while (true) {
    const size_t dot = path.find('.');
    const std::string part(path.substr(0, dot));
    const bool is_index = !part.empty() && part.find_first_not_of("0123456789") == std::string::npos && part.size() < 10;
    object = GetItem(object, is_index ? Value(static_cast<int64_t>(std::stol(part))) : Value(part));
    if (object.is_undefined() && !fallback.is_undefined() && !fallback.is_none()) object = fallback;
    if (dot == std::string_view::npos) return object;
    path.remove_prefix(dot + 1);
  }
}

Value Interpreter::GetAttr(const Value& object, const std::string& name) {
  if (object.is_undefined()) FailUndefined(object);
  if (HasMethod(object, name)) {
    auto bound = std::make_shared<FunctionObject>();
    bound->depth = object.depth() + 1;
    bound->call = [object, name](Interpreter& in, Arguments& args) { return in.CallMethod(object, name, args); };
    return Value(std::shared_ptr<Object>(std::move(bound)));
  }
  if (object.is_dict()) {
    static constexpr std::string_view kUnsafe[] = {"update", "pop", "popitem", "clear", "setdefault"};
    if (std::find(std::begin(kUnsafe), std::end(kUnsafe), name) != std::end(kUnsafe)) {
      return Value::Undefined("access to attribute '" + name + "' of 'dict' object is unsafe");
    }
    if (const Value* v = object.as_dict().Find(std::string_view(name))) return *v;
  } else if (IsGroup(object, name)) {
    return object.as_list()[name == "list"];
  } else if (object.kind() == Value::Kind::kObject) {
    Object* o = object.as_object().get();
    if (auto* ns = dynamic_cast<NamespaceObject*>(o)) {
      if (Value* v = ns->Find(name)) return *v;
    } else if (auto* loop = dynamic_cast<LoopObject*>(o)) {
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
      if (name == "previtem") return loop->items && i > 0 ? (*loop->items)[loop->index0 - 1] : Value::Undefined("there is no previous item");
      if (name == "nextitem") return loop->items && i + 1 < n ? (*loop->items)[loop->index0 + 1] : Value::Undefined("there is no next item");
    } else if (auto* cycler = dynamic_cast<CyclerObject*>(o)) {
      if (name == "current") return cycler->items[cycler->at];
    } else if (auto* macro = dynamic_cast<MacroObject*>(o)) {
      if (name == "name") return macro->stmt->kind == StmtKind::kMacro ? Value(macro->stmt->text) : Value(nullptr);
    }
  }
  return Value::Undefined("'" + TypeName(object) + " object' has no attribute '" + name + "'");
}

// ---- methods

bool Interpreter::HasMethod(const Value& object, std::string_view name) {
  auto one_of = [&](std::initializer_list<std::string_view> names) { return std::find(names.begin(), names.end(), name) != names.end(); };
  switch (object.kind()) {
    case Value::Kind::kString:
      return one_of({"split",   "rsplit",  "strip",   "lstrip",    "rstrip",    "startswith", "endswith",  "replace",   "upper",
                     "lower",   "title",   "capitalize", "find",   "rfind",     "index",      "rindex",    "count",     "join",
                     "splitlines", "isdigit", "isalpha", "isspace", "isalnum",  "isupper",    "islower",   "isnumeric", "isdecimal", "istitle",
                     "zfill",   "ljust",   "rjust",   "center",    "format",    "partition",  "rpartition", "removeprefix",
                     "removesuffix", "swapcase", "casefold", "expandtabs"});
    case Value::Kind::kList:
    case Value::Kind::kTuple: return one_of({"index", "count"}) || (object.is_list() && name == "copy");
    case Value::Kind::kDict: return one_of({"items", "keys", "values", "get", "copy"});
    case Value::Kind::kObject: {
      const Object* o = object.as_object().get();
      if (dynamic_cast<const LoopObject*>(o)) return one_of({"cycle", "changed"});
      if (dynamic_cast<const CyclerObject*>(o)) return one_of({"next", "reset"});
      return false;
    }
    default: return false;
  }
}

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
    const bool ends = (c.cp >= 0xA && c.cp <= 0xD) || (c.cp >= 0x1C && c.cp <= 0x1E) || c.cp == 0x85 || c.cp == 0x2028 || c.cp == 0x2029;
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

bool All(const std::string& s, const CodeSet& set) {
  const std::vector<uint32_t> points = ToCodePoints(s);
  return !points.empty() && std::all_of(points.begin(), points.end(), [&](uint32_t c) { return Contains(set, c); });
}

bool StartsOrEnds(Interpreter& in, std::string_view s, const Value& what, bool starts) {
  if (what.kind() == Value::Kind::kTuple) {
    for (const Value& v : what.as_list()) {
      if (StartsOrEnds(in, s, v, starts)) return true;
    }
    return false;
  }
  if (!what.is_string()) in.Fail("startswith or endswith needs a string or a tuple of strings, not " + Interpreter::TypeName(what));
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

// str.format with plain fields: {}, {0}, {name}, {{ and }}.
std::string FormatBraces(Interpreter& in, const std::string& s, const Arguments& args) {
  std::string out;
  size_t next = 0;
  for (size_t i = 0; i < s.size(); ++i) {
    if ((s[i] == '{' || s[i] == '}') && i + 1 < s.size() && s[i + 1] == s[i]) {
      out.push_back(s[i++]);
      continue;
    }
    if (s[i] == '}') in.Fail("Single '}' encountered in format string");
    if (s[i] != '{') {
      out.push_back(s[i]);
      continue;
    }
    const size_t end = s.find('}', i);
    if (end == std::string::npos) in.Fail("Single '{' encountered in format string");
    const std::string field = s.substr(i + 1, end - i - 1);
    i = end;
    if (field.find_first_of(":!.[{") != std::string::npos) in.Fail("the format field '{" + field + "}' is not supported");
    const Value* value = nullptr;
    if (field.empty() || field.find_first_not_of("0123456789") == std::string::npos) {
      const size_t at = field.empty() ? next++ : field.size() < 6 ? static_cast<size_t>(std::stoul(field)) : SIZE_MAX;
      if (at < args.positional.size()) value = &args.positional[at];
    } else {
      for (const auto& [name, v] : args.named) {
        if (name == field) value = &v;
      }
    }
    if (!value) in.Fail("the format field '{" + field + "}' has no argument");
    out += in.Str(*value);
    in.ChargeText(out.size());
  }
  return out;
}

// Python's %d, %i, %x, %X and %o (`spec` is all before the letter): the sign stands before the prefix, octal's is 0o, and
// zeros fill up to the width even after a precision. C differs in all three.
std::string FormatInteger(const std::string& spec, char type, int64_t n) {
  const size_t flags_end = std::min(spec.find_first_not_of("-+ 0#", 1), spec.size());
  const std::string_view flags = std::string_view(spec).substr(1, flags_end - 1);
  auto has = [&](char flag) { return flags.find(flag) != std::string_view::npos; };
  const size_t dot = spec.find('.');
  const size_t width = static_cast<size_t>(std::atoi(spec.c_str() + flags_end));
  const size_t precision = dot == std::string::npos ? 0 : static_cast<size_t>(std::atoi(spec.c_str() + dot + 1));
  const uint64_t base = type == 'o' ? 8 : type == 'x' || type == 'X' ? 16 : 10;
  uint64_t left = n < 0 ? -static_cast<uint64_t>(n) : static_cast<uint64_t>(n);
  std::string digits;
  do {
    digits.insert(digits.begin(), (type == 'X' ? "0123456789ABCDEF" : "0123456789abcdef")[left % base]);
    left /= base;
  } while (left);
  if (digits.size() < precision) digits.insert(0, precision - digits.size(), '0');
  std::string head = n < 0 ? "-" : has('+') ? "+" : has(' ') ? " " : "";
  if (has('#') && base != 10) head += std::string("0") + type;
  const size_t size = head.size() + digits.size(), fill = width > size ? width - size : 0;
  if (has('-')) return head + digits + std::string(fill, ' ');
  return has('0') ? head + std::string(fill, '0') + digits : std::string(fill, ' ') + head + digits;
}

}  // namespace

std::string Interpreter::FormatPercent(const std::string& format, const Value& values) {
  const List list = values.kind() == Value::Kind::kTuple ? values.as_list() : List{values};
  size_t next = 0;
  std::string out;
  for (size_t i = 0; i < format.size(); ++i) {
    if (format[i] != '%') {
      out.push_back(format[i]);
      continue;
    }
    std::string spec = "%";
    for (++i; i < format.size() && std::strchr("-+ 0#123456789.", format[i]); ++i) spec.push_back(format[i]);
    if (i >= format.size()) Fail("incomplete format");
    const char type = format[i];
    if (type == '%') {
      out.push_back('%');
      continue;
    }
    if (spec.size() > 8) Fail("the format '" + spec + type + "' is not supported");
    const Value* value = nullptr;
    if (type == '(') {
      const size_t close = format.find(')', i);
      if (close == std::string::npos || close + 1 >= format.size() || (format[close + 1] != 's' && format[close + 1] != 'd')) {
        Fail("this format is not supported");
      }
      value = values.Find(std::string_view(format).substr(i + 1, close - i - 1));
      if (!value) Fail("the format has no value");
      out += Str(*value);
      i = close + 1;
      continue;
    }
    if (next >= list.size()) Fail("not enough arguments for format string");
    value = &list[next++];
    if (type == 's' || type == 'r') {
      std::string text = type == 's' ? Str(*value) : Repr(*value);
      const size_t dot = spec.find('.');
      if (dot != std::string::npos) text = Slice(Value(text), nullptr, static_cast<int64_t>(std::atoi(spec.c_str() + dot + 1)), nullptr).as_string();
      const int width = std::atoi(spec.c_str() + 1);
      out += Pad(*this, text, std::abs(width), " ", width < 0 ? 0.0 : 1.0);
    } else if ((type == 'd' || type == 'i' || type == 'x' || type == 'X' || type == 'o') && (value->is_int() || value->is_bool() || (value->is_float() && type == 'd'))) {
      const long long n = value->is_int() ? value->as_int() : value->is_bool() ? value->as_bool() : static_cast<long long>(value->as_float());
      const std::string text = FormatInteger(spec, type, n);
      ChargeText(text.size());
      out += text;
    } else if (std::strchr("feEgG", type) && (value->is_int() || value->is_float() || value->is_bool())) {
      spec.push_back(type);
      const double number = AsDouble(*value);
      if (std::fabs(number) > 1e100) Fail("a number too large for a format");
      std::string text(static_cast<size_t>(std::snprintf(nullptr, 0, spec.c_str(), number)), ' ');
      std::snprintf(text.data(), text.size() + 1, spec.c_str(), number);
      ChargeText(text.size());
      out += text;
    } else {
      Fail(std::string("the format '%") + type + "' of a " + TypeName(*value) + " is not supported");
    }
    ChargeText(out.size());
  }
  if (next < list.size() && !values.is_dict() && !values.is_list()) Fail("not all arguments converted during string formatting");
  return out;
}

std::string ArgumentReader::RequiredText(std::string_view name) {
  const Value& v = Required(name);
  if (!v.is_string()) in_.Fail(what_ + " needs a string for '" + std::string(name) + "', not " + Interpreter::TypeName(v));
  return v.as_string();
}

Value Interpreter::CallMethod(const Value& object, std::string_view name, Arguments& args) {
  Charge(1);
  ArgumentReader reader(*this, args, std::string(name));
  if (object.is_dict()) {
    const Dict& dict = object.as_dict();
    if (name == "get") {
      const Value key = reader.Required("key");
      Value fallback = reader.Or("default", nullptr);
      reader.Done();
      if (key.is_list() || key.is_dict()) Fail("unhashable type: '" + TypeName(key) + "'");
      const Value* v = key.is_undefined() ? nullptr : dict.Find(key);
      return v ? *v : fallback;
    }
    reader.Done();
    if (name == "copy") return object;
    List out;
    for (const auto& [key, value] : dict.items()) {
      out.push_back(name == "keys" ? key : name == "values" ? value : Value::Tuple({key, value}));
    }
    Charge(out.size());
    return Value(std::move(out));
  }
  if (IsSequence(object)) {
    if (name == "copy") return object;
    const Value item = reader.Required("value");
    reader.Done();
    int64_t count = 0;
    for (size_t i = 0; i < object.as_list().size(); ++i) {
      if (!Equal(object.as_list()[i], item)) continue;
      if (name == "index") return static_cast<int64_t>(i);
      ++count;
    }
    if (name == "index") Fail(Repr(item) + " is not in list");
    return count;
  }
  if (object.kind() == Value::Kind::kObject) {
    Object* o = object.as_object().get();
    if (auto* cycler = dynamic_cast<CyclerObject*>(o)) {
      reader.Done();
      const Value current = cycler->items[cycler->at];
      cycler->at = name == "reset" ? 0 : (cycler->at + 1) % cycler->items.size();
      return name == "reset" ? Value(nullptr) : current;
    }
    auto* loop = dynamic_cast<LoopObject*>(o);
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
  const std::string& s = object.as_string();
  ChargeText(s.size());
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
    const bool keep = reader.Flag("keepends", false);
    reader.Done();
    const std::vector<std::string> lines = SplitLines(s, keep);
    return Value(List(lines.begin(), lines.end()));
  }
  if (name == "startswith" || name == "endswith") {
    const Value what = reader.Required("prefix");
    const Value start = reader.Or("", nullptr), stop = reader.Or("", nullptr);
    reader.Done();
    const Value part = start.is_none() && stop.is_none() ? object : Slice(object, start, stop, nullptr);
    return StartsOrEnds(*this, part.as_string(), what, name == "startswith");
  }
  if (name == "replace") {
    const std::string from = reader.RequiredText("old"), to = reader.RequiredText("new");
    const int64_t count = reader.Int("count", -1);
    reader.Done();
    return Value(ReplaceText(*this, s, from, to, count));
  }
  if (name == "find" || name == "rfind" || name == "index" || name == "rindex" || name == "count") {
    const std::string what = reader.RequiredText("sub");
    const int64_t start = reader.Int("", 0);
    const Value stop = reader.Or("", nullptr);
    reader.Done();
    const std::string part = Slice(object, start, stop, nullptr).as_string();
    if (name == "count") {
      if (what.empty()) return static_cast<int64_t>(CodePointCount(part)) + 1;
      int64_t n = 0;
      for (size_t at = part.find(what); at != std::string::npos; at = part.find(what, at + what.size())) ++n;
      return n;
    }
    const size_t at = name[0] == 'r' ? part.rfind(what) : part.find(what);
    if (at == std::string::npos) {
      if (name == "find" || name == "rfind") return -1;
      Fail("substring not found");
    }
    const int64_t size = static_cast<int64_t>(CodePointCount(s));
    const int64_t skipped = start < 0 ? std::max<int64_t>(0, start + size) : std::min(start, size);
    return static_cast<int64_t>(CodePointCount(std::string_view(part).substr(0, at))) + skipped;
  }
  if (name == "join") {
    const Value& list = reader.Required("iterable");
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
    const std::string sep = reader.RequiredText("sep");
    reader.Done();
    if (sep.empty()) Fail("empty separator");
    const size_t at = name == "partition" ? s.find(sep) : s.rfind(sep);
    if (at == std::string::npos) return name == "partition" ? Value::Tuple({s, "", ""}) : Value::Tuple({"", "", s});
    return Value::Tuple({s.substr(0, at), sep, s.substr(at + sep.size())});
  }
  if (name == "removeprefix" || name == "removesuffix") {
    const std::string what = reader.RequiredText("prefix");
    reader.Done();
    if (name == "removeprefix") return s.starts_with(what) ? s.substr(what.size()) : s;
    return s.ends_with(what) && !what.empty() ? s.substr(0, s.size() - what.size()) : s;
  }
  if (name == "format") return Value(FormatBraces(*this, s, args));
  if (name == "zfill") {
    const int64_t width = reader.Int("width", 0);
    reader.Done();
    const bool sign = !s.empty() && (s[0] == '-' || s[0] == '+');
    return Value((sign ? s.substr(0, 1) : "") + Pad(*this, s.substr(sign), width - sign, "0", 1.0));
  }
  if (name == "ljust" || name == "rjust" || name == "center") {
    const int64_t width = reader.Int("width", 0);
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
  reader.Done();
  if (name == "upper") return Value(Upper(s));
  if (name == "lower" || name == "casefold") return Value(Lower(s));
  if (name == "title") return Value(Title(s));
  if (name == "capitalize") return Value(Capitalize(s));
  if (name == "swapcase") {
    std::string out;
    for (uint32_t cp : ToCodePoints(s)) {
      std::string one;
      AppendUtf8(cp, &one);
      out += SimpleLower(cp) == cp && cp != 0x130 ? Upper(one) : Lower(one);
    }
    return Value(std::move(out));
  }
  if (name == "isdecimal") return All(s, DigitSet());
  if (name == "isdigit") {
    static const CodeSet digits = Union(DigitSet(), {{0xB2, 0xB3}, {0xB9, 0xB9}, {0x2070, 0x2070}, {0x2074, 0x2079}, {0x2080, 0x2089},
                                                     {0x2460, 0x2468}, {0x2474, 0x247C}, {0x2488, 0x2490}});
    return All(s, digits);
  }
  if (name == "isnumeric") return All(s, NumericSet());
  if (name == "isalpha") return All(s, *UnicodeProperty("L"));
  if (name == "isalnum") return All(s, Union(*UnicodeProperty("L"), NumericSet()));
  if (name == "isspace") {
    const std::vector<uint32_t> points = ToCodePoints(s);
    return !points.empty() && std::all_of(points.begin(), points.end(), IsPythonSpace);
  }
  bool cased = false;
  if (name == "istitle") {  // words begin with a capital and go on with small letters
    bool inside = false;
    for (uint32_t cp : ToCodePoints(s)) {
      const bool upper = SimpleLower(cp) != cp, lower = SimpleUpper(cp) != cp && !upper;
      if ((upper && inside) || (lower && !inside)) return false;
      inside = upper || lower;
      cased = cased || inside;
    }
    return cased;
  }
  // isupper, islower: at least one cased character and none of the other case.
  for (uint32_t cp : ToCodePoints(s)) {
    const bool upper = SimpleLower(cp) != cp, lower = SimpleUpper(cp) != cp && !upper;
    if (name == "isupper" ? lower : upper) return false;
    cased = cased || upper || lower;
  }
  return cased;
}

}  // namespace temper::text::jinja
