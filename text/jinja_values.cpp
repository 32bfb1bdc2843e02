// Python's operators, conversions and iteration on values.
#include <algorithm>
#include <cmath>

#include "text/big_integer.h"
#include "text/jinja_runtime.h"
#include "text/json.h"
#include "text/unicode.h"
#include "text/utf8.h"

namespace temper::text::jinja {
namespace {

constexpr double kExact = 9007199254740992.0;  // up to here every integer is a double

BigInteger ToBig(const Value& integer) {
  if (integer.is_bool()) return BigInteger(integer.as_bool());
  return integer.is_int() ? BigInteger(integer.as_int()) : BigInteger::FromDigits(integer.as_string());
}

Value FromBig(Interpreter& in, const BigInteger& v) {
  if (const auto small = v.ToInt64()) return *small;
  if (v.bits() > BigInteger::kMaxDigits * 10 / 3) in.Fail("an integer of more than 4300 digits is not supported");
  return Value::BigInt(v.ToString());
}

// What a computation with these integers costs; refuses those that Python would not print.
void ChargeBig(Interpreter& in, const Value& a, const Value& b) {
  auto digits = [](const Value& v) { return v.kind() == Value::Kind::kBigInt ? v.as_string().size() : size_t{20}; };
  if (std::max(digits(a), digits(b)) > BigInteger::kMaxDigits + 1)
    in.Fail("an integer of more than 4300 digits is not supported");
  in.Charge((digits(a) + digits(b)) * (digits(a) + digits(b)) / 256);
}

// -1, 0, 1; 2 where one is not a number at all (NaN).
int CompareNumbers(Interpreter& in, const Value& a, const Value& b) {
  if (a.is_int() && b.is_int()) return a.as_int() < b.as_int() ? -1 : a.as_int() > b.as_int();
  if (!a.is_float() && !b.is_float()) {
    ChargeBig(in, a, b);
    return std::clamp(BigInteger::Compare(ToBig(a), ToBig(b)), -1, 1);
  }
  const double x = Interpreter::ToDouble(a), y = Interpreter::ToDouble(b);
  if (std::isnan(x) || std::isnan(y)) return 2;
  // An integer beyond 2^53 is not the double nearest to it.
  const Value& integer = a.is_float() ? b : a;
  const double other = a.is_float() ? x : y;
  if (!integer.is_float() && std::isfinite(other) && std::fabs(Interpreter::ToDouble(integer)) >= kExact) {
    ChargeBig(in, integer, 0);
    int order = BigInteger::Compare(ToBig(integer), BigInteger::FromDouble(other));
    if (order == 0 && other != std::trunc(other)) order = other > 0 ? -1 : 1;
    return std::clamp(&integer == &a ? order : -order, -1, 1);
  }
  return x < y ? -1 : x > y;
}

// Python's divmod of floats; y is not 0.
void DivideFloats(double x, double y, double* quotient, double* remainder) {
  double mod = std::fmod(x, y), div = (x - mod) / y;
  if (mod != 0) {
    if ((y < 0) != (mod < 0)) {
      mod += y;
      div -= 1;
    }
  } else {
    mod = std::copysign(0.0, y);
  }
  if (div != 0) {
    *quotient = std::floor(div);
    if (div - *quotient > 0.5) *quotient += 1;
  } else {
    *quotient = std::copysign(0.0, x / y);
  }
  *remainder = mod;
}

Value FloatArithmetic(Interpreter& in, std::string_view op, const Value& a, const Value& b) {
  const double x = Interpreter::ToDouble(a), y = Interpreter::ToDouble(b);
  if ((std::isinf(x) && !a.is_float()) || (std::isinf(y) && !b.is_float())) in.Fail("int too large to convert to float");
  if (op == "+") return x + y;
  if (op == "-") return x - y;
  if (op == "*") return x * y;
  if (op == "**") {
    if (x == 0 && y < 0) in.Fail("0.0 cannot be raised to a negative power");
    if (x < 0 && std::isfinite(x) && std::isfinite(y) && y != std::floor(y)) in.Fail("a complex number is not supported");
    const double power = std::pow(x, y);
    if (std::isinf(power) && std::isfinite(x) && std::isfinite(y)) in.Fail("Numerical result out of range");
    return power;
  }
  if (y == 0) in.Fail(op == "%" ? "float modulo" : "float division by zero");
  if (op == "/") return x / y;
  double quotient = 0, remainder = 0;
  DivideFloats(x, y, &quotient, &remainder);
  return op == "%" ? remainder : quotient;
}

Value BigArithmetic(Interpreter& in, std::string_view op, const Value& a, const Value& b) {
  ChargeBig(in, a, b);
  const BigInteger x = ToBig(a), y = ToBig(b);
  if (op == "+") return FromBig(in, BigInteger::Add(x, y));
  if (op == "-") return FromBig(in, BigInteger::Add(x, y.Negated()));
  if (op == "*") return FromBig(in, BigInteger::Multiply(x, y));
  if (op == "**") {
    if (y.negative()) return FloatArithmetic(in, op, Interpreter::ToDouble(a), Interpreter::ToDouble(b));
    const bool trivial = x.bits() <= 1;  // -1, 0, 1 to any power stay small
    if (!trivial && (!y.ToInt64() || static_cast<uint64_t>(*y.ToInt64()) * (x.bits() - 1) > BigInteger::kMaxDigits * 10 / 3)) {
      in.Fail("an integer of more than 4300 digits is not supported");
    }
    if (trivial) return y.is_zero() ? Value(1) : x.is_zero() ? Value(0) : Value(x.negative() && y.odd() ? -1 : 1);
    BigInteger out(1), base = x;
    for (int64_t e = *y.ToInt64(); e > 0; e >>= 1) {
      if (e & 1) out = BigInteger::Multiply(out, base);
      if (e > 1) base = BigInteger::Multiply(base, base);
    }
    in.Charge(out.bits() * out.bits() / 4096);
    return FromBig(in, out);
  }
  if (y.is_zero()) in.Fail(op == "/" ? "division by zero" : "integer division or modulo by zero");
  if (op == "/") {
    const double quotient = BigInteger::TrueDivide(x, y);
    if (std::isinf(quotient)) in.Fail("integer division result too large for a float");
    return quotient;
  }
  BigInteger quotient, remainder;
  BigInteger::Divide(x, y, &quotient, &remainder);
  return FromBig(in, op == "%" ? remainder : quotient);
}

}  // namespace

std::string QuotedRepr(std::string_view s, bool ascii) {
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
    } else if (cp < 0x80 ? cp >= 0x20 && cp != 0x7F : !ascii && IsPrintable(cp)) {
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

std::string EscapeHtml(std::string_view s) {
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

double Interpreter::ToDouble(const Value& number) {
  if (number.is_float()) return number.as_float();
  if (number.is_bool()) return number.as_bool();
  if (number.is_int()) return static_cast<double>(number.as_int());
  return std::strtod(number.as_string().c_str(), nullptr);  // rounds once, infinite beyond the range
}

Value Interpreter::ToInteger(double v) {
  if (std::isnan(v)) Fail("cannot convert float NaN to integer");
  if (std::isinf(v)) Fail("cannot convert float infinity to integer");
  return FromBig(*this, BigInteger::FromDouble(v));
}

std::string Interpreter::TypeName(const Value& v) {
  switch (v.kind()) {
    case Value::Kind::kUndefined: return "Undefined";
    case Value::Kind::kNone: return "NoneType";
    case Value::Kind::kBool: return "bool";
    case Value::Kind::kInt:
    case Value::Kind::kBigInt: return "int";
    case Value::Kind::kFloat: return "float";
    case Value::Kind::kString: return v.is_markup() ? "Markup" : "str";
    case Value::Kind::kList: return "list";
    case Value::Kind::kTuple: return v.is_group() ? "_GroupTuple" : "tuple";
    case Value::Kind::kDict: return "dict";
    case Value::Kind::kObject: break;
  }
  if (As<NamespaceObject>(v)) return "Namespace";
  if (As<MacroObject>(v)) return "Macro";
  if (As<RangeObject>(v)) return "range";
  if (As<LoopObject>(v)) return "LoopContext";
  if (As<CyclerObject>(v)) return "Cycler";
  if (As<JoinerObject>(v)) return "Joiner";
  if (auto* view = As<ViewObject>(v)) {
    return view->kind == ViewObject::Kind::kKeys     ? "dict_keys"
           : view->kind == ViewObject::Kind::kValues ? "dict_values"
                                                     : "dict_items";
  }
  if (auto* generator = As<GeneratorObject>(v)) return generator->type;
  auto* function = As<FunctionObject>(v);
  return function ? function->type : "object";
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
    case Value::Kind::kObject:
      if (auto* range = As<RangeObject>(v)) return range->length > 0;
      if (auto* view = As<ViewObject>(v)) return view->dict.as_dict().size() > 0;
      return true;
  }
  return false;
}

std::string Interpreter::Str(const Value& v) {
  if (v.is_string()) return v.as_string();
  if (v.is_undefined()) return "";
  return Repr(v);
}

Value Interpreter::Escape(const Value& v) {
  if (v.is_markup()) return v;
  std::string out = EscapeHtml(Str(v));
  ChargeText(out.size());
  return Value::Markup(std::move(out));
}

std::string Interpreter::Repr(const Value& v, int depth) {
  Charge(1);
  if (depth > 200) Fail("a value nested too deeply to print");
  auto list = [&](const char* open, const char* close, size_t size, const std::function<std::string(size_t)>& item) {
    std::string out = open;
    for (size_t i = 0; i < size; ++i) {
      if (i) out += ", ";
      out += item(i);
      ChargeText(out.size() > kMaxText ? out.size() : 0);
    }
    return out + close;
  };
  switch (v.kind()) {
    case Value::Kind::kUndefined: return "Undefined";
    case Value::Kind::kNone: return "None";
    case Value::Kind::kBool: return v.as_bool() ? "True" : "False";
    case Value::Kind::kInt: return std::to_string(v.as_int());
    case Value::Kind::kBigInt:
      if (v.as_string().size() > BigInteger::kMaxDigits + (v.as_string()[0] == '-'))
        Fail("an integer of more than 4300 digits has no text in Python");
      return v.as_string();
    case Value::Kind::kFloat: return FloatRepr(v.as_float());
    case Value::Kind::kString:
      ChargeText(v.as_string().size());
      return v.is_markup() ? "Markup(" + QuotedRepr(v.as_string()) + ")" : QuotedRepr(v.as_string());
    case Value::Kind::kList:
    case Value::Kind::kTuple: {
      const List& items = v.as_list();
      return list(v.is_list() ? "[" : "(", v.is_list() ? "]" : items.size() == 1 ? ",)" : ")", items.size(),
                  [&](size_t i) { return Repr(items[i], depth + 1); });
    }
    case Value::Kind::kDict: {
      const auto& items = v.as_dict().items();
      return list("{", "}", items.size(),
                  [&](size_t i) { return Repr(items[i].first, depth + 1) + ": " + Repr(items[i].second, depth + 1); });
    }
    case Value::Kind::kObject: break;
  }
  if (auto* ns = As<NamespaceObject>(v)) {
    return list("<Namespace {", "}>", ns->attributes.size(), [&](size_t i) {
      return QuotedRepr(ns->attributes[i].first) + ": " + Repr(ns->attributes[i].second, depth + 1);
    });
  }
  if (auto* range = As<RangeObject>(v)) {
    const std::string ends = "range(" + std::to_string(range->start) + ", " + std::to_string(range->stop);
    return ends + (range->step == 1 ? ")" : ", " + std::to_string(range->step) + ")");
  }
  if (auto* view = As<ViewObject>(v)) {
    return list((TypeName(v) + "([").c_str(), "])", view->dict.as_dict().size(),
                [&](size_t i) { return Repr(view->At(i), depth + 1); });
  }
  if (auto* macro = As<MacroObject>(v)) {
    return macro->stmt->kind == StmtKind::kMacro ? "<Macro " + QuotedRepr(macro->stmt->text) + ">" : "<Macro anonymous>";
  }
  if (auto* loop = As<LoopObject>(v))
    return "<LoopContext " + Repr(LoopAttribute(loop, "index")) + "/" + Repr(LoopAttribute(loop, "length")) + ">";
  Fail("printing a " + TypeName(v) + " is not supported: Python prints its address");
}

bool Interpreter::Equal(const Value& a, const Value& b, int depth) {
  Charge(1);
  if (depth > 200) Fail("values nested too deeply to compare");
  if (a.is_undefined() || b.is_undefined()) return a.is_undefined() && b.is_undefined();
  if (IsNumber(a) && IsNumber(b)) return CompareNumbers(*this, a, b) == 0;
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
    default: break;
  }
  if (a.as_object() == b.as_object()) return true;
  auto *x = As<RangeObject>(a), *y = As<RangeObject>(b);
  if (x && y)
    return x->length == y->length && (x->length == 0 || (x->start == y->start && (x->length == 1 || x->step == y->step)));
  auto *v = As<ViewObject>(a), *w = As<ViewObject>(b);
  if (v && w && v->kind != ViewObject::Kind::kValues && w->kind != ViewObject::Kind::kValues) {  // as sets
    const size_t size = Length(a);
    if (size != Length(b)) return false;
    for (size_t i = 0; i < size; ++i) {
      if (!In(v->At(i), b)) return false;
    }
    return true;
  }
  return false;
}

bool Interpreter::Ordered(std::string_view op, const Value& a, const Value& b, int depth) {
  Charge(1);
  if (depth > 200) Fail("values nested too deeply to compare");
  if (a.is_undefined()) FailUndefined(a);
  if (b.is_undefined()) FailUndefined(b);
  auto holds = [&](int order) {
    return op[0] == '<' ? (op.size() == 1 ? order < 0 : order <= 0) : (op.size() == 1 ? order > 0 : order >= 0);
  };
  if (IsNumber(a) && IsNumber(b)) {
    const int order = CompareNumbers(*this, a, b);
    return order != 2 && holds(order);
  }
  if (a.is_string() && b.is_string()) {
    Charge(std::min(a.as_string().size(), b.as_string().size()) / 256);
    return holds(a.as_string().compare(b.as_string()));  // UTF-8 keeps the order of code points
  }
  if (IsSequence(a) && a.kind() == b.kind()) {
    const List &x = a.as_list(), &y = b.as_list();
    for (size_t i = 0; i < x.size() && i < y.size(); ++i) {
      if (!Equal(x[i], y[i], depth + 1)) return Ordered(op, x[i], y[i], depth + 1);
    }
    return holds(x.size() < y.size() ? -1 : x.size() > y.size());
  }
  if (As<ViewObject>(a) || As<ViewObject>(b)) Fail("comparing " + TypeName(a) + " and " + TypeName(b) + " is not supported");
  Fail("'" + std::string(op) + "' not supported between instances of '" + TypeName(a) + "' and '" + TypeName(b) + "'");
}

void Interpreter::CheckHashable(const Value& v) const {
  auto* view = As<ViewObject>(v);
  if (v.is_list() || v.is_dict() || (view && view->kind != ViewObject::Kind::kValues))
    Fail("unhashable type: '" + TypeName(v) + "'");
  if (v.is_float() && std::isnan(v.as_float())) Fail("NaN as a key is not supported");
  if (As<RangeObject>(v)) Fail("a range as a key is not supported");
  if (!v.is_tuple()) return;
  if (v.depth() > 100) Fail("a key nested too deeply");
  for (const Value& item : v.as_list()) CheckHashable(item);
}

const Value* Interpreter::FindKey(const Dict& dict, const Value& key) const {
  CheckHashable(key);
  return dict.Find(key);
}

bool Interpreter::In(const Value& item, const Value& container) {
  if (container.is_string()) {
    if (!item.is_string()) Fail("'in <string>' requires string as left operand, not " + TypeName(item));
    Charge(container.as_string().size() / 64);
    return container.as_string().find(item.as_string()) != std::string::npos;
  }
  if (container.is_dict()) return FindKey(container.as_dict(), item) != nullptr;
  if (auto* view = As<ViewObject>(container)) {
    if (view->kind == ViewObject::Kind::kKeys) return In(item, view->dict);
    if (view->kind == ViewObject::Kind::kItems) {
      if (!item.is_tuple() || item.as_list().size() != 2) return false;
      const Value* value = FindKey(view->dict.as_dict(), item.as_list()[0]);
      return value && Equal(*value, item.as_list()[1]);
    }
  }
  if (IsSequence(container)) {
    for (const Value& v : container.as_list()) {
      if (Equal(v, item)) return true;
    }
    return false;
  }
  if (!HasLength(container) && !As<GeneratorObject>(container))
    Fail("argument of type '" + TypeName(container) + "' is not iterable");
  const Items items = Open(container);
  for (Value v; items(&v);) {
    if (Equal(v, item)) return true;
  }
  return false;
}

bool Interpreter::HasLength(const Value& v) const {
  return v.is_undefined() || v.is_string() || IsSequence(v) || v.is_dict() || As<RangeObject>(v) || As<ViewObject>(v);
}

size_t Interpreter::Length(const Value& v) {
  switch (v.kind()) {
    case Value::Kind::kUndefined: return 0;
    case Value::Kind::kString: Charge(v.as_string().size() / 64); return CodePointCount(v.as_string());
    case Value::Kind::kList:
    case Value::Kind::kTuple: return v.as_list().size();
    case Value::Kind::kDict: return v.as_dict().size();
    default: break;
  }
  if (auto* range = As<RangeObject>(v)) return range->length;
  if (auto* view = As<ViewObject>(v)) return view->dict.as_dict().size();
  if (auto* loop = As<LoopObject>(v)) return static_cast<size_t>(LoopAttribute(loop, "length").as_int());
  Fail("object of type '" + TypeName(v) + "' has no len()");
}

Value Interpreter::ItemAt(const Value& v, size_t i) {
  if (IsSequence(v)) return v.as_list()[i];
  if (v.is_dict()) return v.as_dict().items()[i].first;
  if (auto* range = As<RangeObject>(v)) return range->At(i);
  return As<ViewObject>(v)->At(i);
}

Interpreter::Items Interpreter::Open(const Value& v) {
  if (v.is_undefined()) return [](Value*) { return false; };
  if (v.is_string()) {
    return [this, v, at = size_t{0}](Value* item) mutable {
      const std::string& s = v.as_string();
      if (at >= s.size()) return false;
      Charge(1);
      const size_t length = ReadUtf8(s, at).length;
      *item = Value(s.substr(at, length));
      at += length;
      return true;
    };
  }
  if (v.kind() == Value::Kind::kObject && As<GeneratorObject>(v)) {
    return [this, v](Value* item) {
      auto* generator = As<GeneratorObject>(v);
      if (!generator->next) return false;
      const Deeper deeper(this), twice(this);  // generators over generators: a level is several calls
      Charge(1);
      // Ended by its end as well as by an error, and never entered twice.
      auto next = std::exchange(generator->next, nullptr);
      if (!next(*this, item)) return false;
      CheckDepth(*item);
      generator->next = std::move(next);
      return true;
    };
  }
  if (!HasLength(v)) Fail("'" + TypeName(v) + "' object is not iterable");
  return [this, v, at = size_t{0}, size = Length(v)](Value* item) mutable {
    if (at >= size) return false;
    Charge(1);
    *item = ItemAt(v, at++);
    return true;
  };
}

List Interpreter::Iterate(const Value& v) {
  if (IsSequence(v)) {
    Charge(v.as_list().size());
    return v.as_list();
  }
  List out;
  const Items items = Open(v);
  for (Value item; items(&item);) out.push_back(std::move(item));
  return out;
}

Value Interpreter::Generator(std::function<bool(Interpreter&, Value*)> next, std::initializer_list<const Value*> sources,
                             const char* type) {
  auto out = std::make_shared<GeneratorObject>();
  for (const Value* source : sources) out->depth = std::max(out->depth, source->depth());
  ++out->depth;
  out->type = type;
  out->next = std::move(next);
  return Value(std::shared_ptr<Object>(std::move(out)));
}

Value Interpreter::Negate(const Value& v) {
  if (v.is_float()) return -v.as_float();
  if (!IsNumber(v) && !v.is_undefined()) Fail("bad operand type for unary -: '" + TypeName(v) + "'");
  return Arithmetic("-", 0, v);
}

Value Interpreter::Arithmetic(std::string_view op, const Value& a, const Value& b) {
  if (a.is_undefined()) FailUndefined(a);
  if (a.is_string() && op == "%") return FormatPercent(a, b);
  if (b.is_undefined()) FailUndefined(b);
  auto unsupported = [&] {
    Fail("unsupported operand type(s) for " + std::string(op) + ": '" + TypeName(a) + "' and '" + TypeName(b) + "'");
  };
  if (op == "+" && a.is_string() && b.is_string()) {
    if (a.is_markup() != b.is_markup()) return Arithmetic(op, Escape(a), Escape(b));
    ChargeText(a.as_string().size() + b.as_string().size());
    std::string out = a.as_string() + b.as_string();
    return a.is_markup() ? Value::Markup(std::move(out)) : Value(std::move(out));
  }
  if (op == "+" && IsSequence(a) && a.kind() == b.kind()) {
    Charge(a.as_list().size() + b.as_list().size());
    List out = a.as_list();
    out.insert(out.end(), b.as_list().begin(), b.as_list().end());
    return a.is_list() ? Value(std::move(out)) : Value::Tuple(std::move(out));
  }
  if (op == "*" && ((a.is_string() || IsSequence(a)) != (b.is_string() || IsSequence(b)))) {
    const Value &repeated = a.is_string() || IsSequence(a) ? a : b, &times = &repeated == &a ? b : a;
    if (!IsInteger(times)) Fail("can't multiply sequence by non-int of type '" + TypeName(times) + "'");
    if (times.kind() == Value::Kind::kBigInt) Fail("cannot fit 'int' into an index-sized integer");
    const int64_t n = std::max<int64_t>(0, times.is_bool() ? times.as_bool() : times.as_int());
    const size_t size = repeated.is_string() ? repeated.as_string().size() : repeated.as_list().size() * 64;
    if (size && static_cast<uint64_t>(n) > kMaxText / size) ChargeText(kMaxText + 1);
    ChargeText(size * static_cast<size_t>(n));
    if (repeated.is_string()) {
      std::string out;
      for (int64_t i = 0; i < n && size; ++i) out += repeated.as_string();
      return repeated.is_markup() ? Value::Markup(std::move(out)) : Value(std::move(out));
    }
    List out;
    for (int64_t i = 0; i < n && size; ++i) out.insert(out.end(), repeated.as_list().begin(), repeated.as_list().end());
    Charge(out.size());
    return repeated.is_list() ? Value(std::move(out)) : Value::Tuple(std::move(out));
  }
  if (!IsNumber(a) || !IsNumber(b)) {
    if (As<ViewObject>(a) || As<ViewObject>(b))
      Fail("sets, as " + std::string(op) + " makes of " + TypeName(a) + ", are not supported");
    unsupported();
  }
  if (a.is_float() || b.is_float()) return FloatArithmetic(*this, op, a, b);
  if (a.kind() == Value::Kind::kBigInt || b.kind() == Value::Kind::kBigInt) return BigArithmetic(*this, op, a, b);
  const int64_t x = a.is_bool() ? a.as_bool() : a.as_int(), y = b.is_bool() ? b.as_bool() : b.as_int();
  int64_t out = 0;
  if (op == "+" && !__builtin_add_overflow(x, y, &out)) return out;
  if (op == "-" && !__builtin_sub_overflow(x, y, &out)) return out;
  if (op == "*" && !__builtin_mul_overflow(x, y, &out)) return out;
  if (op == "/" && y != 0 && std::abs(static_cast<double>(x)) < kExact && std::abs(static_cast<double>(y)) < kExact) {
    return static_cast<double>(x) / static_cast<double>(y);
  }
  if ((op == "//" || op == "%") && y != 0 && y != -1) {
    const bool round = x % y != 0 && (x % y < 0) != (y < 0);
    return op == "%" ? x % y + (round ? y : 0) : x / y - (round ? 1 : 0);
  }
  return BigArithmetic(*this, op, a, b);
}

}  // namespace temper::text::jinja
