// Statements and expressions.
#include "text/jinja_runtime.h"

#include <algorithm>
#include <cmath>
#include <ctime>
#include <optional>

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
  root_ = std::make_shared<Scope>(nullptr, &tmpl.unset);
  Exec(tmpl.body, root_, &out);
  return out;
}

void Interpreter::FailUndefined(const Value& v) const {
  Fail(v.undefined_what().empty() ? "use of an undefined value" : v.undefined_what());
}

Value Interpreter::Function(std::function<Value(Interpreter&, Arguments&)> call, const char* type) const {
  auto f = std::make_shared<FunctionObject>();
  f->type = type;
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
    const std::string given = reader.RequiredText("format");
    reader.Done();
    std::string format;
    for (size_t i = 0; i < given.size(); ++i) {
      if (given[i] == '%' && i + 1 < given.size()) {
        // The clock is read in whole seconds.
        format += given[i + 1] == 'f' ? "000000" : given.substr(i, 2);
        ++i;
      } else {
        format.push_back(given[i]);
      }
    }
    if (format.empty()) return "";
    const std::time_t now = static_cast<std::time_t>(in.now_s());
    std::tm tm{};
    localtime_r(&now, &tm);
    tm.tm_isdst = -1;  // Python's datetime.now() knows of no zone: %z and %Z are empty
    tm.tm_zone = "";
    in.ChargeText(format.size() * 32);
    std::string out(format.size() * 32 + 256, '\0');
    out.resize(std::strftime(out.data(), out.size(), format.c_str(), &tm));
    return Value(ToValidUtf8(out));
  }));
  globals_.emplace_back("lipsum", Function([](Interpreter& in, Arguments&) -> Value {
    in.Fail("the function 'lipsum' is not supported: it makes another text each time");
  }));
  globals_.emplace_back("range", Function([](Interpreter& in, Arguments& args) -> Value {
    ArgumentReader reader(in, args, "range");
    const Value *first = &reader.Required(""), *second = reader.Next(""), *third = reader.Next("");
    reader.Done();
    auto number = [&](const Value& v) {
      if (v.is_bool()) return static_cast<int64_t>(v.as_bool());
      if (!v.is_int()) in.Fail("range needs integers of 64 bits, not " + TypeName(v));
      return v.as_int();
    };
    auto range = std::make_shared<RangeObject>();
    range->start = second ? number(*first) : 0;
    range->stop = second ? number(*second) : number(*first);
    range->step = third ? number(*third) : 1;
    if (range->step == 0) in.Fail("range() arg 3 must not be zero");
    const __int128 span =
        range->step > 0 ? static_cast<__int128>(range->stop) - range->start : static_cast<__int128>(range->start) - range->stop;
    const __int128 step = range->step > 0 ? static_cast<__int128>(range->step) : -static_cast<__int128>(range->step);
    const __int128 length = span > 0 ? (span - 1) / step + 1 : 0;
    if (length > 100000) in.Fail("Range too big. The sandbox blocks ranges larger than MAX_RANGE (100000).");
    range->length = static_cast<size_t>(length);
    return Value(std::shared_ptr<Object>(std::move(range)));
  }));
  auto dict_of = [](Interpreter& in, Arguments& args, const char* what) {
    Dict out;
    if (args.positional.size() > 1) in.Fail(std::string(what) + " takes at most one positional argument");
    if (!args.positional.empty()) {
      const Value& from = args.positional[0];
      if (from.is_undefined()) in.FailUndefined(from);
      if (from.is_dict()) {
        out = from.as_dict();
      } else {
        for (const Value& pair : in.Iterate(from)) {
          const List items = in.Iterate(pair);
          if (items.size() != 2) in.Fail(std::string(what) + " needs pairs");
          in.CheckHashable(items[0]);
          out.Set(items[0], items[1]);
        }
      }
    }
    for (auto& [name, value] : args.named) out.Set(name, std::move(value));
    return out;
  };
  globals_.emplace_back(
      "dict", Function([dict_of](Interpreter& in, Arguments& args) -> Value { return dict_of(in, args, "dict"); }, "type"));
  globals_.emplace_back("namespace", Function([dict_of](Interpreter& in, Arguments& args) -> Value {
    auto ns = std::make_shared<NamespaceObject>();
    const Dict from = dict_of(in, args, "namespace");
    for (const auto& [key, value] : from.items()) {
      if (!key.is_string()) in.Fail("a namespace with a key of type " + TypeName(key) + " is not supported");
      ns->attributes.emplace_back(key.as_string(), value);
    }
    in.namespaces_.push_back(ns);
    return Value(std::shared_ptr<Object>(ns));
  }, "type"));
  globals_.emplace_back("cycler", Function([](Interpreter& in, Arguments& args) -> Value {
    auto cycler = std::make_shared<CyclerObject>();
    cycler->items = std::move(args.positional);
    cycler->depth = Value(cycler->items).depth();
    if (cycler->items.empty() || !args.named.empty()) in.Fail("cycler needs positional arguments");
    return Value(std::shared_ptr<Object>(std::move(cycler)));
  }, "type"));
  globals_.emplace_back("joiner", Function([](Interpreter& in, Arguments& args) -> Value {
    ArgumentReader reader(in, args, "joiner");
    auto joiner = std::make_shared<JoinerObject>();
    joiner->separator = reader.Text("sep", ", ");
    reader.Done();
    return Value(std::shared_ptr<Object>(std::move(joiner)));
  }, "type"));
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
    case StmtKind::kOutput: {
      // What Jinja2 works out while it compiles may slice anything, and gets what is undefined; where that fails it is tried
      // again while rendering.
      Value value;
      try {
        constant_ = s.constant;
        value = Eval(*s.expr, scope);
        constant_ = false;
      } catch (const TemplateError& e) {
        if (!std::exchange(constant_, false) || e.limit) throw;
        value = Eval(*s.expr, scope);
      }
      Append(s.escapes ? Escape(value) : value, out);
      break;
    }
    case StmtKind::kIf: return Exec(Truthy(Eval(*s.expr, scope)) ? s.body : s.otherwise, scope, out);
    case StmtKind::kFor: return For(s, Eval(*s.expr, scope), scope, 0, out);
    case StmtKind::kSet: Assign(s.target, Eval(*s.expr, scope), scope); break;
    case StmtKind::kSetBlock: {
      std::string text;
      // A `break` leaves the block, and the loop around it, without its text.
      auto inner = std::make_shared<Scope>(scope, &s.unset);
      if (const Flow flow = Exec(s.body, inner, &text); flow != Flow::kNext) return flow;
      Value value = s.escapes && s.expr ? Value::Markup(std::move(text)) : Value(std::move(text));
      if (s.expr) value = FilterText(*s.expr, std::move(value), inner);  // the filter's arguments see what the body set
      if (autoescape_ && !value.is_markup()) value = Value::Markup(Str(value));
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
      for (const auto& [name, unused] : args.named) {
        if (name == "caller") Fail("a call block gives 'caller' itself");
      }
      args.named.emplace_back("caller", Value(std::shared_ptr<Object>(std::move(caller))));
      Append(CallValue(callee, args), out);
      break;
    }
    case StmtKind::kFilterBlock: {
      std::string text;
      auto inner = std::make_shared<Scope>(scope, &s.unset);
      if (const Flow flow = Exec(s.body, inner, &text); flow != Flow::kNext) return flow;
      Append(FilterText(*s.expr, s.escapes ? Value::Markup(std::move(text)) : Value(std::move(text)), inner), out);
      break;
    }
    case StmtKind::kWith: {
      auto inner = std::make_shared<Scope>(scope, &s.unset);
      for (const auto& [target, expr] : s.bindings) Assign(target, Eval(*expr, scope), inner);
      return Exec(s.body, inner, out);
    }
    case StmtKind::kScope: {  // the body of a macro that is called without arguments
      auto inner = std::make_shared<Scope>(scope, &s.unset);
      if (s.uses_varargs) inner->Set("varargs", Value::Tuple({}));
      if (s.uses_kwargs) inner->Set("kwargs", Value(Dict()));
      if (s.uses_caller) inner->Set("caller", Value::Undefined("No caller defined"));
      Exec(s.body, inner, out);
      break;
    }
    case StmtKind::kAutoescape: {
      const bool before = std::exchange(autoescape_, Truthy(Eval(*s.expr, scope)));
      const Flow flow = Exec(s.body, std::make_shared<Scope>(scope, &s.unset), out);
      if (flow != Flow::kNext) return flow;  // as in Jinja2, who leaves by `break` leaves the switch as it is
      autoescape_ = before;
      break;
    }
    case StmtKind::kBlock: {
      // A block sees what is set outside of all other statements, and where it is scoped what stands around it.
      auto inner = std::make_shared<Scope>(s.scoped ? scope : root_, &s.unset);
      inner->block = true;
      Exec(s.body, inner, out);
      break;
    }
    case StmtKind::kBreak: return Flow::kBreak;
    case StmtKind::kContinue: return Flow::kContinue;
  }
  return Flow::kNext;
}

Interpreter::Flow Interpreter::For(const Stmt& s, const Value& iterable, const ScopePtr& scope, int depth, std::string* out) {
  if (depth > kMaxCalls) Fail("a recursive loop is too deep");
  List items;
  auto loop = std::make_shared<LoopObject>();
  Items source;
  if (s.condition || As<GeneratorObject>(iterable)) {
    // As in Jinja2 an item is made, and the condition asked, when the loop comes to it: it sees what the turns before set in a
    // namespace.
    source = Open(iterable);
    loop->more = [&] {
      for (Value item; source(&item);) {
        if (s.condition) {
          auto inner = std::make_shared<Scope>(scope);
          Assign(s.target, item, inner);
          if (!Truthy(Eval(*s.condition, inner))) continue;
        }
        items.push_back(std::move(item));
        return true;
      }
      return false;
    };
  } else {
    items = Iterate(iterable);
  }
  loop->items = &items;
  loop->length = items.size();
  loop->depth0 = depth;
  loop->stmt = &s;
  loop->outer = scope;
  // However the loop ends, a template that kept its object finds it ended, and what the object holds (itself, perhaps) is let go.
  const std::shared_ptr<void> at_end(nullptr, [&](void*) {
    loop->length = items.size();
    loop->items = nullptr;
    loop->more = nullptr;
    loop->outer = nullptr;
    loop->changed_value = Value();
  });
  const Value loop_value{std::shared_ptr<Object>(loop)};
  bool whole = false;  // a turn came to the end of its body
  for (size_t i = 0; i < items.size() || (loop->more && loop->more()); ++i) {
    Charge(1);
    loop->index0 = i;
    auto inner = std::make_shared<Scope>(scope, &s.unset);
    inner->Set("loop", loop_value);
    Assign(s.target, items[i], inner);
    const Flow flow = Exec(s.body, inner, out);
    if (flow == Flow::kBreak) break;
    whole = whole || flow == Flow::kNext;
  }
  // A `break` in what is done otherwise leaves the loop around this one.
  return whole ? Flow::kNext : Exec(s.otherwise, std::make_shared<Scope>(scope, &s.unset_otherwise), out);
}

void Interpreter::Assign(const Target& target, const Value& value, const ScopePtr& scope) {
  CheckDepth(value);
  if (target.is_tuple) {
    if (!HasLength(value) && !As<GeneratorObject>(value)) Fail("cannot unpack non-iterable " + TypeName(value) + " object");
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
  if (Value* found = ns->Find(target.attribute)) {
    *found = value;
  } else {
    ns->attributes.emplace_back(target.attribute, value);
  }
}

Value Interpreter::Name(const std::string& name, const ScopePtr& scope) {
  bool outside = false;  // of a block
  for (Scope* s = scope.get(); s; s = s->parent.get()) {
    if (Value* v = s->Find(name)) return *v;
    if (!outside && s->Hides(name)) return Value::Undefined("'" + name + "' is undefined");
    outside = outside || s->block;
  }
  if (const Value* v = variables_.Find(std::string_view(name))) return *v;
  for (const auto& [n, v] : globals_) {
    if (n == name) return v;
  }
  return Value::Undefined("'" + name + "' is undefined");
}

// As Macro.__call__ of Jinja2, whose order of steps decides which surplus arguments are refused and which are kept.
Value Interpreter::CallMacro(const MacroObject& macro, Arguments& args) {
  const Stmt& s = *macro.stmt;
  const std::string what = "macro " + (s.kind == StmtKind::kMacro ? QuotedRepr(s.text) : std::string("None"));
  if (++calls_ > kMaxCalls) Fail("macros call each other too deeply");
  auto scope = std::make_shared<Scope>(macro.closure, &s.unset);
  for (const Value& v : args.positional) CheckDepth(v);
  for (const auto& [name, v] : args.named) CheckDepth(v);
  auto take = [&](std::string_view name) -> std::optional<Value> {
    for (size_t i = 0; i < args.named.size(); ++i) {
      if (args.named[i].first != name) continue;
      Value out = std::move(args.named[i].second);
      args.named.erase(args.named.begin() + static_cast<long>(i));
      return out;
    }
    return std::nullopt;
  };
  const size_t count = s.parameters.size(), positional = std::min(count, args.positional.size());
  std::vector<bool> given(count);
  bool found_caller = false;
  for (size_t i = 0; i < count; ++i) {
    const std::string& name = s.parameters[i].name;
    if (i < positional) {
      scope->Set(name, args.positional[i]);
      given[i] = true;
    } else if (std::optional<Value> v = take(name)) {
      scope->Set(name, std::move(*v));
      given[i] = true;
    }
    found_caller = found_caller || (name == "caller" && (i >= positional || positional == count));
  }
  if (s.uses_caller && !found_caller) {
    std::optional<Value> caller = take("caller");
    scope->Set("caller", caller && !caller->is_none() ? std::move(*caller) : Value::Undefined("No caller defined"));
  }
  if (s.uses_kwargs) {
    Dict kwargs;
    for (auto& [name, v] : args.named) kwargs.Set(name, std::move(v));
    scope->Set("kwargs", Value(std::move(kwargs)));
  } else if (!args.named.empty()) {
    Fail(what + " takes no keyword argument '" + args.named[0].first + "'");
  }
  if (s.uses_varargs) {
    scope->Set("varargs", Value::Tuple(List(args.positional.begin() + static_cast<long>(positional), args.positional.end())));
  } else if (args.positional.size() > count) {
    Fail(what + " takes not more than " + std::to_string(count) + " argument(s)");
  }
  for (size_t i = 0; i < count; ++i) {
    if (given[i]) continue;
    const Parameter& p = s.parameters[i];
    scope->Set(p.name, p.fallback ? Eval(*p.fallback, scope) : Value::Undefined("parameter '" + p.name + "' was not provided"));
  }
  std::string out;
  Exec(s.body, scope, &out);
  --calls_;
  return autoescape_ ? Value::Markup(std::move(out)) : Value(std::move(out));
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
      return loop->stmt->escapes ? Value::Markup(std::move(out)) : Value(std::move(out));
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
  if (e.index < 0) Fail("No filter named '" + e.name + "' found.");
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
  if (op == "in") return In(a, b);
  if (op == "not in") return !In(a, b);
  return Ordered(op, a, b);
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
        CheckDepth(key);
        Value value = Eval(*e.args[i + 1], scope);
        CheckHashable(key);
        out.Set(key, std::move(value));
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
        const bool sliceable = (object.is_string() || IsSequence(object) || object.is_undefined() || As<RangeObject>(object)) &&
                               std::all_of(parts, parts + 3, [](const Value& v) { return v.is_none() || IsInteger(v); });
        if (constant_ && !sliceable) return Value::Undefined("'" + TypeName(object) + " object' has no such element");
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
      if (e.index < 0) Fail("No test named '" + e.name + "' found.");
      return ApplyTest(e.index, operand, args);
    }
    case ExprKind::kNegate: {
      const Value v = Eval(*e.args[0], scope);
      line_ = e.line;
      return Negate(v);
    }
    case ExprKind::kPlus: {
      const Value v = Eval(*e.args[0], scope);
      line_ = e.line;
      if (v.is_undefined()) FailUndefined(v);
      if (!IsNumber(v)) Fail("bad operand type for unary +: '" + TypeName(v) + "'");
      return v.is_float() ? v : Arithmetic("+", 0, v);
    }
    case ExprKind::kNot: return !Truthy(Eval(*e.args[0], scope));
    case ExprKind::kBinary: {
      const Value a = Eval(*e.args[0], scope);
      const Value b = Eval(*e.args[1], scope);
      line_ = e.line;
      if (e.bare && IsNumber(a) && (a.is_float() ? std::signbit(a.as_float()) && !std::isnan(a.as_float()) : Less(a, 0))) {
        return Negate(Arithmetic(e.name, Negate(a), b));
      }
      return Arithmetic(e.name, a, b);
    }
    case ExprKind::kConcat: {
      List parts;
      for (const auto& a : e.args) parts.push_back(SoftStr(Eval(*a, scope)));
      // Under autoescape the rest is escaped from the first Markup on.
      bool markup = false;
      std::string out;
      for (const Value& part : parts) {
        markup = markup || (part.is_markup() && e.escapes);
        Append(markup ? Escape(part) : part, &out);
      }
      if (!markup) return Value(std::move(out));
      std::string text;  // what stood before it is escaped as well
      for (const Value& part : parts) text += Escape(part).as_string();
      return Value::Markup(std::move(text));
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
