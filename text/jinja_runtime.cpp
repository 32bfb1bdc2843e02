// Statements and expressions.
#include "text/jinja_runtime.h"

#include <ctime>

#include "text/json.h"
#include "text/utf8.h"

namespace temper::text::jinja {

Interpreter::Interpreter(const Dict& variables, int64_t now_s) : variables_(variables), now_s_(now_s) { DefineGlobals(); }

Interpreter::~Interpreter() {
  for (auto& scope : macro_scopes_) scope->vars.clear();
  for (auto& ns : namespaces_) ns->attributes.clear();
}

std::string Interpreter::Run(const Template& tmpl) {
  std::string out;
  Exec(tmpl.body, std::make_shared<Scope>(nullptr), &out);
  return out;
}

void Interpreter::FailUndefined(const Value& v) const {
  Fail(v.undefined_what().empty() ? "use of an undefined value" : v.undefined_what());
}

Value Interpreter::Function(std::function<Value(Interpreter&, Arguments&)> call) const {
  auto f = std::make_shared<FunctionObject>();
  f->call = std::move(call);
  return Value(std::shared_ptr<Object>(std::move(f)));
}

void Interpreter::DefineGlobals() {
  globals_.emplace_back("raise_exception", Function([](Interpreter& in, Arguments& args) -> Value {
    ArgumentReader reader(in, args, "raise_exception");
    const std::string message = in.Str(reader.Required("message"));
    reader.Done();
    in.Fail(message);
  }));
  globals_.emplace_back("strftime_now", Function([](Interpreter& in, Arguments& args) -> Value {
    ArgumentReader reader(in, args, "strftime_now");
    const std::string format = reader.Text("format", "");
    reader.Done();
    if (format.empty()) return "";
    const std::time_t now = static_cast<std::time_t>(in.now_s());
    std::tm tm{};
    localtime_r(&now, &tm);
    std::string out(format.size() * 32 + 256, '\0');
    out.resize(std::strftime(out.data(), out.size(), format.c_str(), &tm));
    return Value(ToValidUtf8(out));
  }));
  globals_.emplace_back("range", Function([](Interpreter& in, Arguments& args) -> Value {
    ArgumentReader reader(in, args, "range");
    const Value &first = reader.Required(""), *second = reader.Next(""), *third = reader.Next("");
    reader.Done();
    auto number = [&](const Value& v) {
      if (v.is_bool()) return static_cast<int64_t>(v.as_bool());
      if (!v.is_int()) in.Fail("range needs integers, not " + TypeName(v));
      return v.as_int();
    };
    const int64_t start = second ? number(first) : 0, stop = second ? number(*second) : number(first), step = third ? number(*third) : 1;
    if (step == 0) in.Fail("range() arg 3 must not be zero");
    List out;
    const __int128 end = stop;
    for (__int128 i = start; step > 0 ? i < end : i > end; i += step) {
      if (out.size() >= 100000) in.Fail("a range above 100000 items");
      out.push_back(static_cast<int64_t>(i));
    }
    in.Charge(out.size());
    return Value(std::move(out));
  }));
  auto dict_of = [](Interpreter& in, Arguments& args, const char* what) {
    Dict out;
    if (args.positional.size() > 1) in.Fail(std::string(what) + " takes at most one positional argument");
    if (!args.positional.empty()) {
      const Value& from = args.positional[0];
      if (from.is_dict()) {
        out = from.as_dict();
      } else {
        for (const Value& pair : in.Iterate(from)) {
          const List items = in.Iterate(pair);
          if (items.size() != 2) in.Fail(std::string(what) + " needs pairs");
          out.Set(items[0], items[1]);
        }
      }
    }
    for (auto& [name, value] : args.named) out.Set(name, std::move(value));
    return out;
  };
  globals_.emplace_back("dict", Function([dict_of](Interpreter& in, Arguments& args) -> Value { return dict_of(in, args, "dict"); }));
  globals_.emplace_back("namespace", Function([dict_of](Interpreter& in, Arguments& args) -> Value {
    auto ns = std::make_shared<NamespaceObject>();
    const Dict from = dict_of(in, args, "namespace");
    for (const auto& [key, value] : from.items()) {
      if (key.is_string() && !key.as_string().empty() && key.as_string()[0] == '_') {
        in.Fail("a namespace cannot hold the underscore-prefixed attribute '" + key.as_string() + "'");
      }
      ns->attributes.emplace_back(in.Str(key), value);
    }
    in.namespaces_.push_back(ns);
    return Value(std::shared_ptr<Object>(ns));
  }));
  globals_.emplace_back("cycler", Function([](Interpreter& in, Arguments& args) -> Value {
    auto cycler = std::make_shared<CyclerObject>();
    cycler->items = std::move(args.positional);
    cycler->depth = Value(cycler->items).depth();
    if (cycler->items.empty() || !args.named.empty()) in.Fail("cycler needs positional arguments");
    return Value(std::shared_ptr<Object>(std::move(cycler)));
  }));
  globals_.emplace_back("joiner", Function([](Interpreter& in, Arguments& args) -> Value {
    ArgumentReader reader(in, args, "joiner");
    auto joiner = std::make_shared<JoinerObject>();
    joiner->separator = reader.Text("sep", ", ");
    reader.Done();
    return Value(std::shared_ptr<Object>(std::move(joiner)));
  }));
}

void Interpreter::Append(const Value& v, std::string* out) {
  if (v.is_string()) {
    ChargeText(out->size() + v.as_string().size() > kMaxText ? kMaxText + 1 : v.as_string().size());
    out->append(v.as_string());
    return;
  }
  const std::string text = Str(v);
  ChargeText(out->size() + text.size() > kMaxText ? kMaxText + 1 : text.size());
  out->append(text);
}

Interpreter::Flow Interpreter::Exec(const Body& body, const ScopePtr& scope, std::string* out) {
  for (const Stmt& s : body) {
    if (const Flow flow = Exec(s, scope, out); flow != Flow::kNext) return flow;
  }
  return Flow::kNext;
}

Interpreter::Flow Interpreter::Exec(const Stmt& s, const ScopePtr& scope, std::string* out) {
  const Deeper deeper(this);
  Charge(1);
  line_ = s.line;
  switch (s.kind) {
    case StmtKind::kText: {
      ChargeText(out->size() + s.text.size() > kMaxText ? kMaxText + 1 : s.text.size());
      out->append(s.text);
      break;
    }
    case StmtKind::kOutput: Append(Eval(*s.expr, scope), out); break;
    case StmtKind::kIf: return Exec(Truthy(Eval(*s.expr, scope)) ? s.body : s.otherwise, scope, out);
    case StmtKind::kFor: return For(s, Eval(*s.expr, scope), scope, 0, out);
    case StmtKind::kSet: Assign(s.target, Eval(*s.expr, scope), scope); break;
    case StmtKind::kSetBlock: {
      std::string text;
      // A `break` leaves the block, and the loop around it, without its text.
      if (const Flow flow = Exec(s.body, std::make_shared<Scope>(scope), &text); flow != Flow::kNext) return flow;
      Value value(std::move(text));
      if (s.expr) value = FilterText(*s.expr, std::move(value), scope);
      Assign(s.target, value, scope);
      break;
    }
    case StmtKind::kMacro: {
      auto macro = std::make_shared<MacroObject>();
      macro->stmt = &s;
      macro->closure = scope;
      Charge(20);  // the scope now lives to the end
      macro_scopes_.push_back(scope);
      scope->Set(s.text, Value(std::shared_ptr<Object>(std::move(macro))));
      break;
    }
    case StmtKind::kCallBlock: {
      auto caller = std::make_shared<MacroObject>();
      caller->stmt = &s;
      caller->closure = scope;
      Charge(20);
      macro_scopes_.push_back(scope);
      const Expr& call = *s.expr;
      const Value callee = Eval(*call.args[0], scope);
      Arguments args = EvalArguments(call, 1, scope);
      args.named.emplace_back("caller", Value(std::shared_ptr<Object>(std::move(caller))));
      Append(CallValue(callee, args), out);
      break;
    }
    case StmtKind::kFilterBlock: {
      std::string text;
      if (const Flow flow = Exec(s.body, std::make_shared<Scope>(scope), &text); flow != Flow::kNext) return flow;
      Append(FilterText(*s.expr, Value(std::move(text)), scope), out);
      break;
    }
    case StmtKind::kWith: {
      auto inner = std::make_shared<Scope>(scope);
      for (const auto& [target, expr] : s.bindings) Assign(target, Eval(*expr, scope), inner);
      return Exec(s.body, inner, out);
    }
    case StmtKind::kScope: Exec(s.body, std::make_shared<Scope>(scope), out); break;
    case StmtKind::kBreak: return Flow::kBreak;
    case StmtKind::kContinue: return Flow::kContinue;
  }
  return Flow::kNext;
}

Interpreter::Flow Interpreter::For(const Stmt& s, const Value& iterable, const ScopePtr& scope, int depth, std::string* out) {
  if (depth > kMaxCalls) Fail("a recursive loop is too deep");
  List items = Iterate(iterable);
  auto loop = std::make_shared<LoopObject>();
  List source;
  size_t asked = 0;
  if (s.condition) {
    // As in Jinja2 the condition is asked when the loop comes to an item: it sees what the turns before set in a namespace.
    source.swap(items);
    loop->more = [&] {
      while (asked < source.size()) {
        Value& item = source[asked++];
        auto inner = std::make_shared<Scope>(scope);
        Assign(s.target, item, inner);
        if (!Truthy(Eval(*s.condition, inner))) continue;
        items.push_back(std::move(item));
        return true;
      }
      return false;
    };
  }
  loop->items = &items;
  loop->length = items.size();
  loop->depth0 = depth;
  loop->stmt = &s;
  loop->outer = scope;
  const Value loop_value{std::shared_ptr<Object>(loop)};
  bool whole = false;  // a turn came to the end of its body
  for (size_t i = 0; i < items.size() || (loop->more && loop->more()); ++i) {
    Charge(1);
    loop->index0 = i;
    auto inner = std::make_shared<Scope>(scope);
    inner->Set("loop", loop_value);
    Assign(s.target, items[i], inner);
    const Flow flow = Exec(s.body, inner, out);
    if (flow == Flow::kBreak) break;
    whole = whole || flow == Flow::kNext;
  }
  loop->length = items.size();
  loop->items = nullptr;  // a template that kept the loop object finds it ended
  loop->more = nullptr;
  loop->outer = nullptr;
  // A `break` in what is done otherwise leaves the loop around this one.
  return whole ? Flow::kNext : Exec(s.otherwise, std::make_shared<Scope>(scope), out);
}

void Interpreter::Assign(const Target& target, const Value& value, const ScopePtr& scope) {
  CheckDepth(value);
  if (target.is_tuple) {
    const List items = Iterate(value);
    if (items.size() != target.items.size()) {
      Fail("cannot unpack " + std::to_string(items.size()) + " values into " + std::to_string(target.items.size()) + " names");
    }
    for (size_t i = 0; i < items.size(); ++i) Assign(target.items[i], items[i], scope);
    return;
  }
  if (target.attribute.empty()) return scope->Set(target.name, value);
  const Value object = Name(target.name, scope);
  auto ns = object.kind() == Value::Kind::kObject ? std::dynamic_pointer_cast<NamespaceObject>(object.as_object()) : nullptr;
  if (!ns) Fail("cannot assign attribute on non-namespace object");
  if (target.attribute[0] == '_') Fail("a namespace cannot hold the underscore-prefixed attribute '" + target.attribute + "'");
  if (Value* found = ns->Find(target.attribute)) {
    *found = value;
  } else {
    ns->attributes.emplace_back(target.attribute, value);
  }
}

Value Interpreter::Name(const std::string& name, const ScopePtr& scope) {
  for (Scope* s = scope.get(); s; s = s->parent.get()) {
    if (Value* v = s->Find(name)) return *v;
  }
  if (const Value* v = variables_.Find(std::string_view(name))) return *v;
  for (const auto& [n, v] : globals_) {
    if (n == name) return v;
  }
  return Value::Undefined("'" + name + "' is undefined");
}

Value Interpreter::CallMacro(const MacroObject& macro, Arguments& args) {
  const Stmt& s = *macro.stmt;
  const std::string name = s.kind == StmtKind::kMacro ? s.text : "caller";
  if (++calls_ > kMaxCalls) Fail("macros call each other too deeply");
  auto scope = std::make_shared<Scope>(macro.closure);
  std::vector<bool> given(s.parameters.size());
  for (size_t i = 0; i < s.parameters.size() && i < args.positional.size(); ++i) {
    CheckDepth(args.positional[i]);
    scope->Set(s.parameters[i].name, args.positional[i]);
    given[i] = true;
  }
  List varargs;
  for (size_t i = s.parameters.size(); i < args.positional.size(); ++i) varargs.push_back(args.positional[i]);
  Dict kwargs;
  bool has_caller = false;
  for (auto& [key, value] : args.named) {
    bool known = false;
    for (size_t i = 0; i < s.parameters.size(); ++i) {
      if (s.parameters[i].name != key) continue;
      if (given[i]) Fail("macro '" + name + "' got two values for '" + key + "'");
      CheckDepth(value);
      scope->Set(key, value);
      given[i] = known = true;
    }
    if (known) continue;
    if (key == "caller") {
      if (!s.uses_caller) Fail("macro '" + name + "' was invoked with two values for the special caller argument or takes none");
      scope->Set("caller", value);
      has_caller = true;
    } else if (s.uses_kwargs) {
      kwargs.Set(key, value);
    } else {
      Fail("macro '" + name + "' takes no keyword argument '" + key + "'");
    }
  }
  if (!varargs.empty() && !s.uses_varargs) {
    Fail("macro '" + name + "' takes not more than " + std::to_string(s.parameters.size()) + " argument(s)");
  }
  for (size_t i = 0; i < s.parameters.size(); ++i) {
    if (given[i]) continue;
    const Parameter& p = s.parameters[i];
    scope->Set(p.name, p.fallback ? Eval(*p.fallback, scope) : Value::Undefined("parameter '" + p.name + "' was not provided"));
  }
  if (s.uses_varargs) scope->Set("varargs", Value::Tuple(std::move(varargs)));
  if (s.uses_kwargs) scope->Set("kwargs", Value(std::move(kwargs)));
  if (s.uses_caller && !has_caller) scope->Set("caller", Value::Undefined("No caller defined"));
  std::string out;
  Exec(s.body, scope, &out);
  --calls_;
  return Value(std::move(out));
}

Arguments Interpreter::EvalArguments(const Expr& e, size_t first, const ScopePtr& scope) {
  Arguments out;
  for (size_t i = first; i < e.args.size(); ++i) out.positional.push_back(Eval(*e.args[i], scope));
  if (e.star) {
    for (Value& v : Iterate(Eval(*e.star, scope))) out.positional.push_back(std::move(v));
  }
  auto add = [&](const std::string& name, Value v) {
    for (const auto& [n, unused] : out.named) {
      if (n == name) Fail("two values for the argument '" + name + "'");
    }
    out.named.emplace_back(name, std::move(v));
  };
  for (const auto& [name, expr] : e.kwargs) add(name, Eval(*expr, scope));
  if (e.dstar) {
    const Value v = Eval(*e.dstar, scope);
    if (!v.is_dict()) Fail("'**' needs a dict, not " + TypeName(v));
    for (const auto& [key, value] : v.as_dict().items()) {
      if (!key.is_string()) Fail("'**' needs a dict with strings as keys");
      add(key.as_string(), value);
    }
  }
  return out;
}

Value Interpreter::EvalCall(const Expr& e, const ScopePtr& scope) {
  const Expr& callee = *e.args[0];
  if (callee.kind == ExprKind::kGetAttr) {  // a method: no bound object in between
    const Value object = Eval(*callee.args[0], scope);
    line_ = e.line;
    if (HasMethod(object, callee.name)) {
      Arguments args = EvalArguments(e, 1, scope);
      line_ = e.line;
      return CallMethod(object, callee.name, args);
    }
    const Value function = GetAttr(object, callee.name);
    Arguments args = EvalArguments(e, 1, scope);
    line_ = e.line;
    return CallValue(function, args);
  }
  const Value function = Eval(callee, scope);
  Arguments args = EvalArguments(e, 1, scope);
  line_ = e.line;
  return CallValue(function, args);
}

Value Interpreter::CallValue(const Value& callee, Arguments& args) {
  Charge(1);
  if (callee.is_undefined()) FailUndefined(callee);
  if (callee.kind() == Value::Kind::kObject) {
    const std::shared_ptr<Object> object = callee.as_object();
    if (auto* f = dynamic_cast<FunctionObject*>(object.get())) return f->call(*this, args);
    if (auto* m = dynamic_cast<MacroObject*>(object.get())) {
      const int line = line_;
      Value out = CallMacro(*m, args);
      line_ = line;
      return out;
    }
    if (auto* loop = dynamic_cast<LoopObject*>(object.get())) {
      if (!loop->stmt->recursive) Fail("the loop is not recursive: it cannot be called");
      if (!loop->outer) Fail("the loop has ended: it cannot be called");
      ArgumentReader reader(*this, args, "loop");
      const Value& iterable = reader.Required("iterable");
      reader.Done();
      std::string out;
      For(*loop->stmt, iterable, loop->outer, loop->depth0 + 1, &out);
      return Value(std::move(out));
    }
    if (auto* joiner = dynamic_cast<JoinerObject*>(object.get())) {
      if (std::exchange(joiner->used, true)) return joiner->separator;
      return "";
    }
  }
  Fail("'" + TypeName(callee) + "' object is not callable");
}

Value Interpreter::ApplyFilterExpr(const Expr& e, const Value& operand, const ScopePtr& scope) {
  Arguments args = EvalArguments(e, 1, scope);
  line_ = e.line;
  Charge(1);
  return ApplyFilter(e.index, operand, args);
}

// The filters of a filter or set block: the innermost has no operand, which is `text`.
Value Interpreter::FilterText(const Expr& e, Value text, const ScopePtr& scope) {
  if (e.args[0]) text = FilterText(*e.args[0], std::move(text), scope);
  return ApplyFilterExpr(e, text, scope);
}

bool Interpreter::CompareOp(const std::string& op, const Value& a, const Value& b) {
  if (op == "==") return Equal(a, b);
  if (op == "!=") return !Equal(a, b);
  if (op == "<") return Less(a, b);
  if (op == ">") return Less(b, a);
  if (op == "<=") return !Less(b, a);
  if (op == ">=") return !Less(a, b);
  if (op == "in") return In(a, b);
  return !In(a, b);
}

Value Interpreter::Eval(const Expr& e, const ScopePtr& scope) {
  const Deeper deeper(this);
  Charge(1);
  line_ = e.line;
  switch (e.kind) {
    case ExprKind::kConst: return e.value;
    case ExprKind::kName: return Name(e.name, scope);
    case ExprKind::kList:
    case ExprKind::kTuple: {
      List out;
      out.reserve(e.args.size());
      for (const auto& a : e.args) out.push_back(Eval(*a, scope));
      return e.kind == ExprKind::kList ? Value(std::move(out)) : Value::Tuple(std::move(out));
    }
    case ExprKind::kDict: {
      Dict out;
      for (size_t i = 0; i + 1 < e.args.size(); i += 2) {
        Value key = Eval(*e.args[i], scope);
        if (key.is_list() || key.is_dict() || key.kind() == Value::Kind::kTuple || key.kind() == Value::Kind::kObject || key.is_undefined()) {
          Fail("a dict key of type " + TypeName(key) + " is not supported");
        }
        out.Set(key, Eval(*e.args[i + 1], scope));
      }
      return Value(std::move(out));
    }
    case ExprKind::kGetAttr: {
      const Value object = Eval(*e.args[0], scope);
      line_ = e.line;
      return GetAttr(object, e.name);
    }
    case ExprKind::kGetItem: {
      const Value object = Eval(*e.args[0], scope);
      const Expr& index = *e.args[1];
      if (index.kind == ExprKind::kSlice) {
        Value parts[3] = {nullptr, nullptr, nullptr};
        for (size_t i = 0; i < 3; ++i) {
          if (index.args[i]) parts[i] = Eval(*index.args[i], scope);
        }
        line_ = e.line;
        return Slice(object, parts[0], parts[1], parts[2]);
      }
      const Value key = Eval(index, scope);
      line_ = e.line;
      return GetItem(object, key);
    }
    case ExprKind::kSlice: Fail("a slice is not supported here");
    case ExprKind::kCall: return EvalCall(e, scope);
    case ExprKind::kFilter: return ApplyFilterExpr(e, Eval(*e.args[0], scope), scope);
    case ExprKind::kTest: {
      const Value operand = Eval(*e.args[0], scope);
      Arguments args = EvalArguments(e, 1, scope);
      line_ = e.line;
      return ApplyTest(e.index, operand, args);
    }
    case ExprKind::kNegate: {
      const Value v = Eval(*e.args[0], scope);
      line_ = e.line;
      return v.is_float() ? Value(-v.as_float()) : Arithmetic("-", 0, v);
    }
    case ExprKind::kPlus: {
      const Value v = Eval(*e.args[0], scope);
      line_ = e.line;
      return Arithmetic("+", 0, v);
    }
    case ExprKind::kNot: return !Truthy(Eval(*e.args[0], scope));
    case ExprKind::kBinary: {
      const Value a = Eval(*e.args[0], scope);
      const Value b = Eval(*e.args[1], scope);
      line_ = e.line;
      return Arithmetic(e.name, a, b);
    }
    case ExprKind::kConcat: {
      std::string out;
      for (const auto& a : e.args) Append(Eval(*a, scope), &out);
      return Value(std::move(out));
    }
    case ExprKind::kCompare: {
      Value left = Eval(*e.args[0], scope);
      for (size_t i = 0; i < e.ops.size(); ++i) {
        Value right = Eval(*e.args[i + 1], scope);
        line_ = e.line;
        if (!CompareOp(e.ops[i], left, right)) return false;
        left = std::move(right);
      }
      return true;
    }
    case ExprKind::kAnd: {
      Value a = Eval(*e.args[0], scope);
      return Truthy(a) ? Eval(*e.args[1], scope) : a;
    }
    case ExprKind::kOr: {
      Value a = Eval(*e.args[0], scope);
      return Truthy(a) ? a : Eval(*e.args[1], scope);
    }
    case ExprKind::kIf: {
      if (Truthy(Eval(*e.args[0], scope))) return Eval(*e.args[1], scope);
      if (e.args[2]) return Eval(*e.args[2], scope);
      return Value::Undefined("the inline if-expression evaluated to false and no else section was defined");
    }
  }
  return {};
}

std::string RenderTemplate(const Template& tmpl, const Dict& variables, int64_t now_s) {
  Interpreter interpreter(variables, now_s);
  return interpreter.Run(tmpl);
}

}  // namespace temper::text::jinja
