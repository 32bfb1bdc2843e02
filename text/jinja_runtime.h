// The interpreter's inside, shared by jinja_runtime.cpp (statements, expressions), jinja_values.cpp (Python's operators and
// conversions), jinja_methods.cpp and jinja_strings.cpp (attributes and methods), jinja_format.cpp (% and
// str.format), jinja_filters.cpp and
// jinja_text_filters.cpp (filters), jinja_tests.cpp (tests).
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/jinja.h"
#include "text/value.h"

namespace temper::text::jinja {

constexpr size_t kMaxText = size_t{64} << 20;  // bytes of any one string
constexpr int64_t kMaxSteps = 20'000'000;
constexpr int kMaxCalls = 150;                 // macros within macros
constexpr int kMaxEvalDepth = 2000;            // expressions and statements within each other, over all macros
constexpr int kMaxValueDepth = 1000;           // of what is kept in a variable

struct Arguments {
  List positional;
  std::vector<std::pair<std::string, Value>> named;
};

// A variable scope. Each pass of a loop, each macro call and each inner block has one; names not found go on to `parent`.
struct Scope {
  explicit Scope(std::shared_ptr<Scope> p, const std::vector<std::string>* u = nullptr) : parent(std::move(p)), unset(u) {}
  Value* Find(std::string_view name) {
    for (auto& [n, v] : vars) {
      if (n == name) return &v;
    }
    return nullptr;
  }
  void Set(std::string_view name, Value v) {
    if (Value* found = Find(name)) {
      *found = std::move(v);
    } else {
      vars.emplace_back(name, std::move(v));
    }
  }
  bool Hides(std::string_view name) const { return unset && std::find(unset->begin(), unset->end(), name) != unset->end(); }

  std::vector<std::pair<std::string, Value>> vars;
  std::shared_ptr<Scope> parent;
  const std::vector<std::string>* unset;  // names undefined here until they are set, whatever `parent` has; null: none
  bool block = false;                     // of {% block %}: it sees what is set outside, but nothing hidden there
};

class Interpreter;

struct NamespaceObject final : Object {
  std::vector<std::pair<std::string, Value>> attributes;
  Value* Find(std::string_view name) {
    for (auto& [n, v] : attributes) {
      if (n == name) return &v;
    }
    return nullptr;
  }
};

struct FunctionObject final : Object {
  const char* type = "function";  // what Python calls its type; "type": a class, which has attributes of its own
  std::function<Value(Interpreter&, Arguments&)> call;
};

struct MacroObject final : Object {
  const Stmt* stmt = nullptr;
  std::shared_ptr<Scope> closure;
};

// What Python gives as a generator or iterator: true even when empty, without length, each item made when it is asked for and
// given once.
struct GeneratorObject final : Object {
  const char* type = "generator";
  std::function<bool(Interpreter&, Value*)> next;  // false at the end; empty when it has ended
};

// Python's range.
struct RangeObject final : Object {
  int64_t start = 0, stop = 0, step = 1;
  size_t length = 0;
  int64_t At(size_t i) const { return static_cast<int64_t>(start + static_cast<__int128>(step) * static_cast<__int128>(i)); }
};

// What dict.keys, values and items give.
struct ViewObject final : Object {
  enum class Kind : uint8_t { kKeys, kValues, kItems };
  Kind kind = Kind::kKeys;
  Value dict;
  Value At(size_t i) const {
    const auto& [key, value] = dict.as_dict().items()[i];
    return kind == Kind::kKeys ? key : kind == Kind::kValues ? value : Value::Tuple({key, value});
  }
};

struct LoopObject final : Object {
  const List* items = nullptr;  // alive while the loop runs; null afterwards
  // Takes the next item that the loop's condition lets through into `items`; false at the end. Empty: all stand there.
  std::function<bool()> more;
  size_t index0 = 0;
  size_t length = 0;
  int depth0 = 0;
  const Stmt* stmt = nullptr;
  std::shared_ptr<Scope> outer;  // null when the loop has ended, as `items`
  bool has_changed_value = false;
  Value changed_value;
};

struct CyclerObject final : Object {
  List items;
  size_t at = 0;
};

struct JoinerObject final : Object {
  std::string separator;
  bool used = false;
};

// v as an object of this kind; nullptr when it is something else.
template <typename T>
T* As(const Value& v) {
  return v.kind() == Value::Kind::kObject ? dynamic_cast<T*>(v.as_object().get()) : nullptr;
}

inline bool IsSequence(const Value& v) { return v.is_list() || v.is_tuple(); }
inline bool IsInteger(const Value& v) { return v.is_int() || v.is_bool() || v.kind() == Value::Kind::kBigInt; }
inline bool IsNumber(const Value& v) { return IsInteger(v) || v.is_float(); }

class Interpreter {
 public:
  // The items one after another; false at the end.
  using Items = std::function<bool(Value*)>;

  Interpreter(const Dict& variables, int64_t now_s);
  ~Interpreter();

  std::string Run(const Template& tmpl);

  // Counts work; throws when there was too much.
  void Charge(size_t steps) {
    if ((steps_ += static_cast<int64_t>(steps)) > kMaxSteps) throw TemplateError{"the template does too much work", line_, true};
  }
  void ChargeText(size_t bytes) {
    if (bytes > kMaxText) throw TemplateError{"the template makes a text above 64 MiB", line_, true};
    Charge(bytes / 64);
  }
  [[noreturn]] void Fail(const std::string& what) const { throw TemplateError{what, line_}; }
  // Refuses a value nested so deeply that it could not be taken apart.
  void CheckDepth(const Value& v) const {
    if (v.depth() > kMaxValueDepth) Fail("a value nested too deeply");
  }
  [[noreturn]] void FailUndefined(const Value& v) const;

  // Python's operators.
  static bool Truthy(const Value& v);
  std::string Str(const Value& v);
  std::string Repr(const Value& v, int depth = 0);
  static std::string TypeName(const Value& v);
  bool Equal(const Value& a, const Value& b, int depth = 0);
  // a < b, a <= b, a > b, a >= b; fails for types without order.
  bool Ordered(std::string_view op, const Value& a, const Value& b, int depth = 0);
  bool Less(const Value& a, const Value& b) { return Ordered("<", a, b); }
  bool In(const Value& item, const Value& container);
  Value Arithmetic(std::string_view op, const Value& a, const Value& b);
  Value Negate(const Value& v);
  bool HasLength(const Value& v) const;
  List Iterate(const Value& v);   // list(v)
  Items Open(const Value& v);     // iter(v)
  size_t Length(const Value& v);
  // A list, tuple, range, view or dict by position; requires i < Length(v).
  Value ItemAt(const Value& v, size_t i);
  void CheckHashable(const Value& v) const;
  // Markup of v: itself, or its text with HTML's signs escaped.
  Value Escape(const Value& v);
  // v when it is a string of any kind, else its text.
  Value SoftStr(const Value& v) { return v.is_string() ? v : Value(Str(v)); }
  static double ToDouble(const Value& number);  // infinite for integers beyond the range
  Value ToInteger(double v);                    // int(v); fails for what is none
  // The value at a key of a dict; nullptr when missing. Fails for keys that cannot be hashed.
  const Value* FindKey(const Dict& dict, const Value& key) const;
  Value GetAttr(const Value& object, const std::string& name);
  Value GetItem(const Value& object, const Value& key);
  Value Slice(const Value& object, const Value& start, const Value& stop, const Value& step);
  // environment.getitem along "a.b.0"; `fallback`, unless undefined or none, stands for every step that is missing.
  Value GetPath(Value object, std::string_view path, const Value& fallback = Value());
  static bool HasMethod(const Value& object, std::string_view name);
  Value CallMethod(const Value& object, std::string_view name, Arguments& args);
  Value CallMethod(const Value& object, std::string_view name, List positional = {}) {
    Arguments args;
    args.positional = std::move(positional);
    return CallMethod(object, name, args);
  }
  Value CallValue(const Value& callee, Arguments& args);
  Value FormatPercent(const Value& format, const Value& values);  // format % values
  // format.format(…); with `escaping` as Markup does it.
  std::string FormatBraces(const std::string& format, const Arguments& args, bool escaping);
  std::string FormatField(const Value& v, const std::string& spec);  // format(v, spec)
  bool autoescape() const { return autoescape_; }
  // A generator that draws from `sources`.
  static Value Generator(std::function<bool(Interpreter&, Value*)> next, std::initializer_list<const Value*> sources,
                         const char* type = "generator");

  Value ApplyFilter(int index, const Value& operand, Arguments& args);
  bool ApplyTest(int index, const Value& operand, Arguments& args);
  int64_t now_s() const { return now_s_; }

 private:
  enum class Flow { kNext, kBreak, kContinue };
  // Counts how deep the interpreter has recursed; its stack is what is bounded.
  struct Deeper {
    explicit Deeper(Interpreter* i) : interpreter(i) {
      if (++interpreter->eval_depth_ > kMaxEvalDepth) interpreter->Fail("the template recurses too deeply");
    }
    ~Deeper() { --interpreter->eval_depth_; }
    Interpreter* interpreter;
  };
  using ScopePtr = std::shared_ptr<Scope>;

  Flow Exec(const Body& body, const ScopePtr& scope, std::string* out);
  Flow Exec(const Stmt& s, const ScopePtr& scope, std::string* out);
  Flow For(const Stmt& s, const Value& iterable, const ScopePtr& scope, int depth, std::string* out);
  void Assign(const Target& target, const Value& value, const ScopePtr& scope);
  Value CallMacro(const MacroObject& macro, Arguments& args);
  Value Eval(const Expr& e, const ScopePtr& scope);
  Value EvalCall(const Expr& e, const ScopePtr& scope);
  Arguments EvalArguments(const Expr& e, size_t first, const ScopePtr& scope);
  Value ApplyFilterExpr(const Expr& e, const Value& operand, const ScopePtr& scope);
  Value FilterText(const Expr& e, Value text, const ScopePtr& scope);
  bool CompareOp(const std::string& op, const Value& a, const Value& b);
  Value Name(const std::string& name, const ScopePtr& scope);
  void Append(const Value& v, std::string* out);
  Value CallDict(const Value& dict, std::string_view name, Arguments& args);
  Value CallSequence(const Value& sequence, std::string_view name, Arguments& args);
  Value CallNumber(const Value& number, std::string_view name, Arguments& args);
  Value CallObject(const Value& object, std::string_view name, Arguments& args);
  Value CallMarkup(const Value& markup, std::string_view name, Arguments& args);
  Value CallString(const std::string& s, std::string_view name, Arguments& args, bool escaping = false);
  Value LoopAttribute(LoopObject* loop, const std::string& name);

  Value Function(std::function<Value(Interpreter&, Arguments&)> call, const char* type = "function") const;
  void DefineGlobals();

  const Dict& variables_;
  int64_t now_s_;
  std::vector<std::pair<std::string, Value>> globals_;
  int64_t steps_ = 0;
  int calls_ = 0;
  int eval_depth_ = 0;
  int line_ = 0;
  bool autoescape_ = false;  // the program is within {% autoescape true %}; a macro called from there may stand elsewhere
  bool constant_ = false;    // within an output that Jinja2 works out while it compiles
  ScopePtr root_;            // what a block sees
  // Scopes with macros and namespaces can hold themselves; they are emptied at the end.
  std::vector<ScopePtr> macro_scopes_;
  std::vector<std::shared_ptr<NamespaceObject>> namespaces_;
};

// The arguments of a filter, test or method by position or name, with checks of Python's kind.
class ArgumentReader {
 public:
  ArgumentReader(Interpreter& in, const Arguments& args, std::string what) : in_(in), args_(args), what_(std::move(what)) {}
  // The next declared argument; `name` "" = positional only. nullptr when not given.
  const Value* Next(std::string_view name) {
    const Value* found = nullptr;
    if (next_ < args_.positional.size()) found = &args_.positional[next_];
    ++next_;
    for (const auto& [n, v] : args_.named) {
      if (!name.empty() && n == name) {
        if (found) in_.Fail(what_ + " got two values for '" + n + "'");
        found = &v;
        ++named_;
      }
    }
    return found;
  }
  Value Or(std::string_view name, Value fallback) {
    const Value* v = Next(name);
    return v ? *v : fallback;
  }
  bool Flag(std::string_view name, bool fallback) {
    const Value* v = Next(name);
    return v ? Interpreter::Truthy(*v) : fallback;
  }
  // What Python wants as an integer and takes for yes or no.
  bool IntFlag(std::string_view name, bool fallback) { return Int(name, fallback) != 0; }
  const Value& Required(std::string_view name) {
    const Value* v = Next(name);
    if (!v) in_.Fail(what_ + " needs an argument '" + std::string(name) + "'");
    return *v;
  }
  int64_t Int(std::string_view name, int64_t fallback) {
    const Value* v = Next(name);
    return v ? AsInt(name, *v) : fallback;
  }
  // None is as nothing given.
  int64_t IntOrNone(std::string_view name, int64_t fallback) {
    const Value* v = Next(name);
    return v && !v->is_none() ? AsInt(name, *v) : fallback;
  }
  int64_t RequiredInt(std::string_view name) { return AsInt(name, Required(name)); }
  std::string Text(std::string_view name, std::string fallback);
  std::string RequiredText(std::string_view name);
  // After the last Next: refuses surplus arguments.
  void Done() {
    if (args_.positional.size() > next_ || args_.named.size() > named_) in_.Fail(what_ + " got too many or unknown arguments");
  }

 private:
  int64_t AsInt(std::string_view name, const Value& v) const;

  Interpreter& in_;
  const Arguments& args_;
  std::string what_;
  size_t next_ = 0;
  size_t named_ = 0;
};

// Helpers over strings, shared by methods and filters.
std::string StripText(std::string_view s, const Value& chars, bool left, bool right);
std::vector<std::string> SplitLines(std::string_view s, bool keep_ends);
std::string QuotedRepr(std::string_view s, bool ascii = false);  // repr(s), or ascii(s)
std::string EscapeHtml(std::string_view s);
// html.unescape(s), up to entities that few know, which it refuses.
std::string UnescapeHtml(Interpreter& in, const std::string& s);
// Markup.striptags.
std::string StripTags(Interpreter& in, std::string s);
// A number as text: int(text, base) and float(text); nullopt where Python fails.
std::optional<Value> ParseInteger(const std::string& text, int64_t base);
std::optional<double> ParseFloat(const std::string& text);

using Filter = Value (*)(Interpreter& in, const Value& v, Arguments& args);
struct FilterEntry {
  const char* name;
  Filter filter;
};
// The filters over texts (jinja_text_filters.cpp), ended by a null name; FindFilter numbers them after the others.
extern const FilterEntry kTextFilters[];

}  // namespace temper::text::jinja
