// Tests, by Jinja's names and with its arguments.
#include <algorithm>

#include "text/jinja_runtime.h"

namespace temper::text::jinja {
namespace {

using Test = bool (*)(Interpreter& in, const Value& v, Arguments& args);

// The tests `is == 3` and kin.
template <int kind>
bool CompareTest(Interpreter& in, const Value& v, Arguments& args) {
  static constexpr std::string_view kOrders[] = {"<", "<=", ">", ">="};
  ArgumentReader reader(in, args, "test");
  const Value& other = reader.Required("");
  reader.Done();
  if (kind < 2) return in.Equal(v, other) == (kind == 0);
  return in.Ordered(kOrders[kind - 2], v, other);
}

template <bool (*body)(Interpreter&, const Value&)>
bool PlainTest(Interpreter& in, const Value& v, Arguments& args) {
  if (!args.positional.empty() || !args.named.empty()) in.Fail("a test got arguments that it does not take");
  return body(in, v);
}

bool Remainder(Interpreter& in, const Value& v, const Value& by, int64_t want) {
  return in.Equal(in.Arithmetic("%", v, by), want);
}

// `v is other` of Python. Equal texts and numbers may or may not be one object there, as its caches and parsers have it: that is
// no ground for a prompt, so it is refused.
bool SameAs(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader reader(in, args, "sameas");
  const Value other = reader.Required("other");
  reader.Done();
  if (Value::Same(v, other)) return true;
  if (v.kind() != other.kind() || v.is_list() || v.is_dict() || v.kind() == Value::Kind::kObject || !in.Equal(v, other))
    return false;
  if (v.is_undefined()) return false;
  in.Fail("whether two equal values of type " + Interpreter::TypeName(v) + " are one object is up to Python's caches");
}

bool FilterTest(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader(in, args, "filter").Done();
  in.CheckHashable(v);
  return v.is_string() && (FindFilter(v.as_string()) >= 0 || IsUnsupportedFilter(v.as_string()));
}

bool TestTest(Interpreter& in, const Value& v, Arguments& args) {
  ArgumentReader(in, args, "test").Done();
  in.CheckHashable(v);
  return v.is_string() && FindTest(v.as_string()) >= 0;
}

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
    {"integer", PlainTest<[](Interpreter&, const Value& v) { return IsInteger(v) && !v.is_bool(); }>},
    {"float", PlainTest<[](Interpreter&, const Value& v) { return v.is_float(); }>},
    {"number", PlainTest<[](Interpreter&, const Value& v) { return IsNumber(v); }>},
    {"string", PlainTest<[](Interpreter&, const Value& v) { return v.is_string(); }>},
    {"mapping", PlainTest<[](Interpreter&, const Value& v) { return v.is_dict(); }>},
    {"sequence", PlainTest<[](Interpreter& in, const Value& v) { return in.HasLength(v) && !As<ViewObject>(v); }>},
    {"iterable", PlainTest<[](Interpreter& in, const Value& v) {
       return in.HasLength(v) || As<GeneratorObject>(v) != nullptr || As<LoopObject>(v) != nullptr;
     }>},
    {"callable", PlainTest<[](Interpreter&, const Value& v) {
       return v.is_undefined() || As<FunctionObject>(v) || As<MacroObject>(v) || As<JoinerObject>(v) || As<LoopObject>(v);
     }>},
    {"escaped", PlainTest<[](Interpreter&, const Value& v) { return v.is_markup(); }>},
    {"upper", PlainTest<[](Interpreter& in, const Value& v) { return in.CallMethod(Value(in.Str(v)), "isupper").as_bool(); }>},
    {"lower", PlainTest<[](Interpreter& in, const Value& v) { return in.CallMethod(Value(in.Str(v)), "islower").as_bool(); }>},
    {"odd", PlainTest<[](Interpreter& in, const Value& v) { return Remainder(in, v, 2, 1); }>},
    {"even", PlainTest<[](Interpreter& in, const Value& v) { return Remainder(in, v, 2, 0); }>},
    {"divisibleby",
     [](Interpreter& in, const Value& v, Arguments& args) {
       ArgumentReader reader(in, args, "divisibleby");
       const Value& by = reader.Required("num");
       reader.Done();
       return Remainder(in, v, by, 0);
     }},
    {"in",
     [](Interpreter& in, const Value& v, Arguments& args) {
       ArgumentReader reader(in, args, "in");
       const Value& container = reader.Required("seq");
       reader.Done();
       return in.In(v, container);
     }},
    {"sameas", SameAs},
    {"filter", FilterTest},
    {"test", TestTest},
    {"eq", CompareTest<0>},   {"==", CompareTest<0>}, {"equalto", CompareTest<0>},
    {"ne", CompareTest<1>},   {"!=", CompareTest<1>},
    {"lt", CompareTest<2>},   {"<", CompareTest<2>},  {"lessthan", CompareTest<2>},
    {"le", CompareTest<3>},   {"<=", CompareTest<3>},
    {"gt", CompareTest<4>},   {">", CompareTest<4>},  {"greaterthan", CompareTest<4>},
    {"ge", CompareTest<5>},   {">=", CompareTest<5>},
};

}  // namespace

int FindTest(std::string_view name) {
  for (size_t i = 0; i < std::size(kTests); ++i) {
    if (name == kTests[i].name) return static_cast<int>(i);
  }
  return -1;
}

bool Interpreter::ApplyTest(int index, const Value& operand, Arguments& args) {
  Charge(1);
  return kTests[static_cast<size_t>(index)].test(*this, operand, args);
}

}  // namespace temper::text::jinja
