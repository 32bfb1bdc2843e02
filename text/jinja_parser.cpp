// Tokens -> syntax tree.
#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <set>

#include "text/jinja.h"
#include "text/jinja_lexer.h"
#include "text/jinja_runtime.h"

namespace temper::text::jinja {
namespace {

constexpr int kMaxDepth = 150;
constexpr int kMaxLinks = 1000;

class Parser {
 public:
  explicit Parser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

  Template Run() {
    Template out;
    out.body = Statements({});
    if (Now().kind != TokenKind::kEof) Fail("unexpected end tag");
    return out;
  }

 private:
  // ---- tokens
  const Token& Now() const { return tokens_[at_]; }
  const Token& Next() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  Token Take() {
    Token t = tokens_[at_];
    if (t.kind != TokenKind::kEof) ++at_;
    return t;
  }
  bool IsOp(std::string_view op) const { return Now().kind == TokenKind::kOperator && Now().text == op; }
  bool IsName(std::string_view name) const { return Now().kind == TokenKind::kName && Now().text == name; }
  bool TakeOp(std::string_view op) {
    if (!IsOp(op)) return false;
    ++at_;
    return true;
  }
  bool TakeName(std::string_view name) {
    if (!IsName(name)) return false;
    ++at_;
    return true;
  }
  [[noreturn]] void Fail(const std::string& what) const { throw TemplateError{what, Now().line}; }
  std::string Describe() const {
    switch (Now().kind) {
      case TokenKind::kEof: return "the end of the template";
      case TokenKind::kVariableEnd: return "'}}'";
      case TokenKind::kBlockEnd: return "'%}'";
      default: return "'" + Now().text + "'";
    }
  }
  void ExpectOp(std::string_view op) {
    if (!TakeOp(op)) Fail("'" + std::string(op) + "' is expected, not " + Describe());
  }
  std::string ExpectName() {
    if (Now().kind != TokenKind::kName) Fail("a name is expected, not " + Describe());
    return Take().text;
  }
  void ExpectBlockEnd() {
    if (Now().kind != TokenKind::kBlockEnd) Fail("'%}' is expected, not " + Describe());
    ++at_;
  }

  // Each link of a chain (a + b + c, a.b.c, a|b|c) makes the tree one deeper; `links_` counts those of one tag.
  void Link() {
    if (++links_ > kMaxLinks) Fail("an expression is too long");
  }

  struct Deeper {
    explicit Deeper(Parser* p) : parser(p) {
      if (++parser->depth_ > kMaxDepth) parser->Fail("nested too deeply");
    }
    ~Deeper() { --parser->depth_; }
    Parser* parser;
  };

  ExprPtr Make(ExprKind kind) const {
    auto e = std::make_unique<Expr>();
    e->kind = kind;
    e->line = Now().line;
    return e;
  }

  // ---- statements
  // Up to a block whose name is one of `ends` (its '{%' is read, its name is not).
  Body Statements(const std::set<std::string>& ends) {
    Deeper deeper(this);
    Body out;
    for (;;) {
      const int line = Now().line;
      switch (Now().kind) {
        case TokenKind::kEof:
          if (!ends.empty()) Fail("the template ends where '{% " + *ends.begin() + " %}' is expected");
          return out;
        case TokenKind::kData: {
          Stmt s;
          s.line = line;
          s.text = Take().text;
          out.push_back(std::move(s));
          break;
        }
        case TokenKind::kVariableBegin: {
          ++at_;
          links_ = 0;
          Stmt s;
          s.kind = StmtKind::kOutput;
          s.line = line;
          s.escapes = escapes_;
          s.expr = Tuple();
          CheckNamed();
          s.constant = IsConstant(*s.expr);
          if (Now().kind != TokenKind::kVariableEnd) Fail("'}}' is expected, not " + Describe());
          ++at_;
          out.push_back(std::move(s));
          break;
        }
        case TokenKind::kBlockBegin:
          if (Next().kind != TokenKind::kName) Fail("a tag needs a name");
          ++at_;
          links_ = 0;
          if (ends.count(Now().text)) return out;
          Statement(&out);
          break;
        default: Fail("unexpected " + Describe());
      }
    }
  }

  void Statement(Body* out) {
    const std::string name = Now().text;
    Stmt s;
    s.line = Now().line;
    s.escapes = escapes_;
    if (name == "for") {
      For(&s);
    } else if (name == "if") {
      If(&s);
    } else if (name == "set") {
      Set(&s);
    } else if (name == "macro") {
      Macro(&s);
    } else if (name == "call") {
      CallBlock(&s);
    } else if (name == "filter") {
      ++at_;
      s.kind = StmtKind::kFilterBlock;
      const bool soft = std::exchange(soft_, false);
      s.expr = Filters(nullptr, true);
      CheckNamed();
      ExpectBlockEnd();
      s.body = BodyUpTo("endfilter");
      soft_ = soft;
    } else if (name == "with") {
      With(&s);
    } else if (name == "generation") {
      ++at_;
      ExpectBlockEnd();
      s.kind = StmtKind::kScope;
      const bool soft = std::exchange(soft_, false);
      MacroBody(&s, "endgeneration");
      soft_ = soft;
    } else if (name == "autoescape") {
      Autoescape(&s);
    } else if (name == "block") {
      Block(&s);
    } else if (name == "break" || name == "continue") {
      if (loops_ == 0) Fail("'" + name + "' outside of a loop");
      ++at_;
      ExpectBlockEnd();
      s.kind = name == "break" ? StmtKind::kBreak : StmtKind::kContinue;
    } else if (name == "print") {
      ++at_;
      do {
        Stmt one;
        one.kind = StmtKind::kOutput;
        one.line = s.line;
        one.escapes = escapes_;
        one.expr = Expression();
        out->push_back(std::move(one));
      } while (TakeOp(","));
      CheckNamed();
      ExpectBlockEnd();
      return;
    } else {
      Fail("the tag '" + name + "' is not supported");
    }
    out->push_back(std::move(s));
  }

  Body BodyUpTo(const std::string& end) {
    Body body = Statements({end});
    ++at_;
    ExpectBlockEnd();
    return body;
  }

  void For(Stmt* s) {
    ++at_;
    s->kind = StmtKind::kFor;
    s->target = ParseTarget(/*in_for=*/true);
    if (loop_names_) Fail("the name 'loop' cannot be assigned to within a loop");
    if (!TakeName("in")) Fail("'in' is expected, not " + Describe());
    s->expr = Tuple(/*with_if=*/false, "recursive");
    CheckNamed();
    const bool soft = std::exchange(soft_, false);
    if (TakeName("if")) s->condition = Expression();
    CheckNamed();
    s->recursive = TakeName("recursive");
    ExpectBlockEnd();
    const int names = std::exchange(loop_names_, 0);
    ++loops_;
    s->body = Statements({"endfor", "else"});
    --loops_;
    if (TakeName("else")) {
      ExpectBlockEnd();
      s->otherwise = Statements({"endfor"});
    }
    if (loop_names_) Fail("the name 'loop' cannot be assigned to within a loop");
    loop_names_ = names;
    soft_ = soft;
    ++at_;
    ExpectBlockEnd();
  }

  void If(Stmt* s) {
    Deeper deeper(this);
    ++at_;
    s->kind = StmtKind::kIf;
    const bool soft = std::exchange(soft_, true);
    s->expr = Tuple(/*with_if=*/false);
    ExpectBlockEnd();
    s->body = Statements({"elif", "else", "endif"});
    if (IsName("elif")) {
      Stmt inner;
      inner.line = Now().line;
      If(&inner);
      s->otherwise.push_back(std::move(inner));
      soft_ = soft;
      return;  // the inner one read the endif
    }
    if (TakeName("else")) {
      ExpectBlockEnd();
      s->otherwise = Statements({"endif"});
    }
    soft_ = soft;
    ++at_;
    ExpectBlockEnd();
  }

  void Set(Stmt* s) {
    ++at_;
    s->target = ParseTarget(/*in_for=*/false);
    if (TakeOp("=")) {
      s->kind = StmtKind::kSet;
      s->expr = Tuple();
      CheckNamed();
      return ExpectBlockEnd();
    }
    s->kind = StmtKind::kSetBlock;
    const bool soft = std::exchange(soft_, false);
    if (IsOp("|")) s->expr = Filters(nullptr, false);
    CheckNamed();
    ExpectBlockEnd();
    s->body = BodyUpTo("endset");
    soft_ = soft;
  }

  Target ParseTarget(bool in_for) {
    std::vector<Target> items;
    bool comma = false;
    do {
      if (!items.empty() && (in_for ? IsName("in") : IsOp("=") || Now().kind == TokenKind::kBlockEnd))
        break;  // a comma at the end
      items.push_back(SingleTarget(in_for));
      comma = comma || IsOp(",");
    } while (TakeOp(","));
    if (!comma) return std::move(items[0]);
    Target out;
    out.is_tuple = true;
    out.items = std::move(items);
    return out;
  }

  Target SingleTarget(bool in_for) {
    Deeper deeper(this);
    Target out;
    if (TakeOp("(") || IsOp("[")) {
      const bool list = TakeOp("[");
      out.is_tuple = true;
      do {
        if (IsOp(")") || IsOp("]")) break;
        out.items.push_back(SingleTarget(in_for));
      } while (TakeOp(","));
      ExpectOp(list ? "]" : ")");
      if (out.items.empty()) Fail("nothing to assign to");
      return out;
    }
    out.name = ExpectName();
    CheckAssignable(out.name);
    if (!in_for && TakeOp(".")) {
      out.attribute = ExpectName();
    } else {
      Stored(out.name);
    }
    return out;
  }

  void CheckAssignable(const std::string& name) const {
    static const std::set<std::string> kReserved = {"true", "false", "none", "True", "False", "None", "not",
                                                    "and",  "or",    "in",   "is",   "if",    "else"};
    if (kReserved.count(name)) Fail("cannot assign to '" + name + "'");
  }

  // A name that is assigned to is none of the magic ones from there on.
  void Stored(const std::string& name) {
    stored_.insert(name);
    loop_names_ += name == "loop";
  }

  // The parameters of a macro or call block: '(' … ')'.
  std::vector<Parameter> Parameters() {
    std::vector<Parameter> out;
    ExpectOp("(");
    while (!IsOp(")")) {
      if (!out.empty()) ExpectOp(",");
      Parameter p;
      p.name = ExpectName();
      CheckAssignable(p.name);
      if (TakeOp("=")) {
        p.fallback = Expression();
      } else if (!out.empty() && out.back().fallback) {
        Fail("a parameter without default after one with default");
      }
      out.push_back(std::move(p));
    }
    ExpectOp(")");
    return out;
  }

  void Macro(Stmt* s) {
    ++at_;
    s->kind = StmtKind::kMacro;
    s->text = ExpectName();
    CheckAssignable(s->text);
    const bool soft = std::exchange(soft_, false);
    s->parameters = Parameters();
    CheckNamed();
    ExpectBlockEnd();
    MacroBody(s, "endmacro");
    soft_ = soft;
  }

  // Renders in its place: nothing extends a chat template.
  void Block(Stmt* s) {
    ++at_;
    s->kind = StmtKind::kBlock;
    s->text = ExpectName();
    if (!blocks_.insert(s->text).second) Fail("the block '" + s->text + "' is defined twice");
    s->scoped = TakeName("scoped");
    if (IsName("required")) Fail("a required block is not supported");
    ExpectBlockEnd();
    const int loops = std::exchange(loops_, 0);
    const bool soft = std::exchange(soft_, false);
    s->body = Statements({"endblock"});
    soft_ = soft;
    loops_ = loops;
    ++at_;
    TakeName(s->text);
    ExpectBlockEnd();
  }

  void Autoescape(Stmt* s) {
    ++at_;
    s->kind = StmtKind::kAutoescape;
    s->expr = Expression();
    if (s->expr->kind != ExprKind::kConst) Fail("autoescape by something that is no constant is not supported");
    ExpectBlockEnd();
    const bool soft = std::exchange(soft_, false);
    const Value& on = s->expr->value;
    const bool escapes = std::exchange(escapes_, Interpreter::Truthy(on));
    s->body = BodyUpTo("endautoescape");
    escapes_ = escapes;
    soft_ = soft;
  }

  // Notes which of the magic names the body uses: Jinja accepts surplus arguments only then.
  void MacroBody(Stmt* s, const std::string& end) {
    const int loops = std::exchange(loops_, 0);
    std::set<std::string> outer = std::exchange(names_, {}), stored = std::exchange(stored_, {});
    s->body = BodyUpTo(end);
    auto parameter = [&](const char* name) {
      return std::any_of(s->parameters.begin(), s->parameters.end(), [&](const Parameter& p) { return p.name == name; });
    };
    s->uses_varargs = names_.count("varargs") > 0 && !parameter("varargs");
    s->uses_kwargs = names_.count("kwargs") > 0 && !parameter("kwargs");
    s->uses_caller = names_.count("caller") > 0;
    if (s->uses_caller) {
      for (const Parameter& p : s->parameters) {
        if (p.name == "caller" && !p.fallback)
          throw TemplateError{"the argument 'caller' of a macro must be left out or have a default", s->line};
      }
    }
    outer.insert(names_.begin(), names_.end());
    names_ = std::move(outer);
    stored_ = std::move(stored);
    loops_ = loops;
  }

  void CallBlock(Stmt* s) {
    ++at_;
    s->kind = StmtKind::kCallBlock;
    if (IsOp("(")) s->parameters = Parameters();
    s->expr = Expression();
    CheckNamed();
    if (s->expr->kind != ExprKind::kCall) Fail("a call is expected in a call block");
    ExpectBlockEnd();
    const bool soft = std::exchange(soft_, false);
    MacroBody(s, "endcall");
    soft_ = soft;
  }

  void With(Stmt* s) {
    ++at_;
    s->kind = StmtKind::kWith;
    while (Now().kind != TokenKind::kBlockEnd) {
      if (!s->bindings.empty()) ExpectOp(",");
      Target target = SingleTarget(/*in_for=*/true);
      ExpectOp("=");
      s->bindings.emplace_back(std::move(target), Expression());
    }
    CheckNamed();
    ExpectBlockEnd();
    const bool soft = std::exchange(soft_, false);
    s->body = BodyUpTo("endwith");
    soft_ = soft;
  }

  // ---- expressions, in Jinja's order of binding
  ExprPtr Expression(bool with_if = true) {
    Deeper deeper(this);
    return with_if ? Conditional() : Or();
  }

  // Filters and tests that Jinja2 does not know fail where they are called when they stand in a branch, elsewhere at load.
  void CheckNamed() {
    if (!unknown_.empty()) throw unknown_[0];
  }

  static bool IsConstant(const Expr& e) {
    static const std::set<std::string> kOfContext = {"map", "select", "reject", "selectattr", "rejectattr"};
    if (e.kind == ExprKind::kName || e.kind == ExprKind::kCall || e.star || e.dstar) return false;
    if (e.kind == ExprKind::kFilter && kOfContext.count(e.name)) return false;
    for (const auto& a : e.args) {
      if (a && !IsConstant(*a)) return false;
    }
    return std::all_of(e.kwargs.begin(), e.kwargs.end(), [](const auto& k) { return IsConstant(*k.second); });
  }

  ExprPtr Conditional() {
    const size_t unknown = unknown_.size();
    ExprPtr left = Or();
    while (IsName("if")) {
      ExprPtr e = Make(ExprKind::kIf);
      Link();
      ++at_;
      e->args.push_back(Or());
      e->args.push_back(std::move(left));
      if (TakeName("else")) {
        Deeper deeper(this);
        e->args.push_back(Conditional());
      } else {
        e->args.push_back(nullptr);
      }
      left = std::move(e);
      unknown_.erase(unknown_.begin() + static_cast<long>(unknown), unknown_.end());
    }
    return left;
  }

  ExprPtr Or() {
    ExprPtr left = And();
    while (IsName("or")) {
      ExprPtr e = Make(ExprKind::kOr);
      Link();
      ++at_;
      e->args.push_back(std::move(left));
      e->args.push_back(And());
      left = std::move(e);
    }
    return left;
  }

  ExprPtr And() {
    ExprPtr left = Not();
    while (IsName("and")) {
      ExprPtr e = Make(ExprKind::kAnd);
      Link();
      ++at_;
      e->args.push_back(std::move(left));
      e->args.push_back(Not());
      left = std::move(e);
    }
    return left;
  }

  ExprPtr Not() {
    if (!IsName("not")) return Compare();
    Deeper deeper(this);
    ExprPtr e = Make(ExprKind::kNot);
    ++at_;
    e->args.push_back(Not());
    return e;
  }

  ExprPtr Compare() {
    ExprPtr first = Sum();
    ExprPtr e;
    for (;;) {
      std::string op;
      for (const char* candidate : {"==", "!=", "<=", ">=", "<", ">"}) {
        if (IsOp(candidate)) op = candidate;
      }
      if (!op.empty()) {
        ++at_;
      } else if (TakeName("in")) {
        op = "in";
      } else if (IsName("not") && Next().kind == TokenKind::kName && Next().text == "in") {
        at_ += 2;
        op = "not in";
      } else {
        break;
      }
      if (!e) {
        e = Make(ExprKind::kCompare);
        e->args.push_back(std::move(first));
      }
      e->ops.push_back(op);
      e->args.push_back(Sum());
    }
    return e ? std::move(e) : std::move(first);
  }

  ExprPtr Binary(std::initializer_list<const char*> ops, ExprPtr (Parser::*operand)()) {
    ExprPtr left = (this->*operand)();
    for (;;) {
      const char* found = nullptr;
      for (const char* op : ops) {
        if (IsOp(op)) found = op;
      }
      if (!found) return left;
      Link();
      ExprPtr e = Make(ExprKind::kBinary);
      ++at_;
      e->name = found;
      e->args.push_back(std::move(left));
      e->args.push_back((this->*operand)());
      left = std::move(e);
    }
  }

  ExprPtr Sum() { return Binary({"+", "-"}, &Parser::Concat); }

  ExprPtr Concat() {
    ExprPtr first = Product();
    if (!IsOp("~")) return first;
    ExprPtr e = Make(ExprKind::kConcat);
    e->args.push_back(std::move(first));
    while (TakeOp("~")) e->args.push_back(Product());
    e->escapes = escapes_ && !IsConstant(*e);  // what Jinja2 joins while it compiles is plain text
    return e;
  }

  ExprPtr Product() { return Binary({"*", "/", "//", "%"}, &Parser::Power); }
  ExprPtr Power() {
    ExprPtr e = Binary({"**"}, &Parser::UnaryWithFilter);
    for (Expr* at = e.get(); at->kind == ExprKind::kBinary && at->name == "**"; at = at->args[0].get()) {
      at->bare = IsConstant(*at->args[0]) && !IsConstant(*at->args[1]);
      if (at->bare) break;
    }
    return e;
  }
  ExprPtr UnaryWithFilter() { return Unary(true); }

  ExprPtr Unary(bool with_filter) {
    Deeper deeper(this);
    ExprPtr e;
    if (IsOp("-") || IsOp("+")) {
      e = Make(IsOp("-") ? ExprKind::kNegate : ExprKind::kPlus);
      ++at_;
      e->args.push_back(Unary(false));
    } else {
      e = Primary();
    }
    e = Postfix(std::move(e));
    return with_filter ? FilterExpression(std::move(e)) : std::move(e);
  }

  ExprPtr Constant(Value v) {
    ExprPtr e = Make(ExprKind::kConst);
    e->value = std::move(v);
    return e;
  }

  ExprPtr Primary() {
    const Token& t = Now();
    switch (t.kind) {
      case TokenKind::kName: {
        ExprPtr e;
        if (t.text == "true" || t.text == "True") {
          e = Constant(true);
        } else if (t.text == "false" || t.text == "False") {
          e = Constant(false);
        } else if (t.text == "none" || t.text == "None") {
          e = Constant(nullptr);
        } else {
          e = Make(ExprKind::kName);
          e->name = t.text;
          if (t.text == "self") Fail("'self' is not supported");
          if (!stored_.count(t.text)) names_.insert(t.text);
        }
        ++at_;
        return e;
      }
      case TokenKind::kString: {
        std::string text = Take().text;
        while (Now().kind == TokenKind::kString) text += Take().text;
        return Constant(Value(std::move(text)));
      }
      case TokenKind::kInteger: {
        int64_t v = 0;
        auto [end, error] = std::from_chars(t.text.data(), t.text.data() + t.text.size(), v);
        ExprPtr e = Constant(error == std::errc() ? Value(v) : Value::BigInt(t.text));
        ++at_;
        return e;
      }
      case TokenKind::kFloat: {
        ExprPtr e = Constant(std::strtod(t.text.c_str(), nullptr));
        ++at_;
        return e;
      }
      case TokenKind::kOperator:
        if (t.text == "(") {
          ++at_;
          ExprPtr e = Tuple(true, "", /*parentheses=*/true);
          ExpectOp(")");
          return e;
        }
        if (t.text == "[") {
          ExprPtr e = Make(ExprKind::kList);
          ++at_;
          while (!IsOp("]")) {
            if (!e->args.empty()) ExpectOp(",");
            if (IsOp("]")) break;
            e->args.push_back(Expression());
          }
          ExpectOp("]");
          return e;
        }
        if (t.text == "{") {
          ExprPtr e = Make(ExprKind::kDict);
          ++at_;
          while (!IsOp("}")) {
            if (!e->args.empty()) ExpectOp(",");
            if (IsOp("}")) break;
            e->args.push_back(Expression());
            ExpectOp(":");
            e->args.push_back(Expression());
          }
          ExpectOp("}");
          return e;
        }
        break;
      default: break;
    }
    Fail("an expression is expected, not " + Describe());
  }

  bool TupleEnds(const std::string& extra) const {
    return Now().kind == TokenKind::kVariableEnd || Now().kind == TokenKind::kBlockEnd || IsOp(")") ||
           (!extra.empty() && IsName(extra));
  }

  // An expression, or a tuple when commas follow.
  ExprPtr Tuple(bool with_if = true, const std::string& extra_end = "", bool parentheses = false) {
    Deeper deeper(this);
    ExprPtr e = Make(ExprKind::kTuple);
    bool is_tuple = false;
    for (;;) {
      if (!e->args.empty()) ExpectOp(",");
      if (TupleEnds(extra_end)) break;
      e->args.push_back(Expression(with_if));
      if (!IsOp(",")) break;
      is_tuple = true;
    }
    if (is_tuple) return e;
    if (!e->args.empty()) {
      ExprPtr only = std::move(e->args[0]);
      return only;
    }
    if (!parentheses) Fail("an expression is expected, not " + Describe());
    return e;
  }

  ExprPtr Postfix(ExprPtr e) {
    for (;;) {
      Link();
      if (IsOp(".") || IsOp("[")) {
        e = Subscript(std::move(e));
      } else if (IsOp("(")) {
        e = Call(std::move(e));
      } else {
        return e;
      }
    }
  }

  ExprPtr FilterExpression(ExprPtr e) {
    for (;;) {
      Link();
      if (IsOp("|")) {
        e = Filters(std::move(e), false);
      } else if (IsName("is")) {
        e = Test(std::move(e));
      } else if (IsOp("(")) {
        e = Call(std::move(e));
      } else {
        return e;
      }
    }
  }

  ExprPtr Subscript(ExprPtr object) {
    if (TakeOp(".")) {
      if (Now().kind == TokenKind::kName) {
        ExprPtr e = Make(ExprKind::kGetAttr);
        e->name = Take().text;
        e->args.push_back(std::move(object));
        return e;
      }
      if (Now().kind != TokenKind::kInteger) Fail("a name or an integer is expected after '.', not " + Describe());
      ExprPtr e = Make(ExprKind::kGetItem);
      e->args.push_back(std::move(object));
      e->args.push_back(Primary());
      return e;
    }
    ExprPtr e = Make(ExprKind::kGetItem);
    ExpectOp("[");
    e->args.push_back(std::move(object));
    ExprPtr first = SubscriptItem();
    if (IsOp(",")) {
      ExprPtr tuple = Make(ExprKind::kTuple);
      tuple->args.push_back(std::move(first));
      while (TakeOp(",")) tuple->args.push_back(SubscriptItem());
      first = std::move(tuple);
    }
    ExpectOp("]");
    e->args.push_back(std::move(first));
    return e;
  }

  ExprPtr SubscriptItem() {
    ExprPtr start;
    if (!IsOp(":")) {
      start = Expression();
      if (!IsOp(":")) return start;
    }
    ExprPtr e = Make(ExprKind::kSlice);
    ExpectOp(":");
    e->args.push_back(std::move(start));
    auto part = [&]() -> ExprPtr { return IsOp(":") || IsOp("]") || IsOp(",") ? nullptr : Expression(); };
    e->args.push_back(part());
    e->args.push_back(TakeOp(":") ? part() : nullptr);
    return e;
  }

  // '(' … ')' after something callable, a filter or a test; appends to e.
  void Arguments(Expr* e) {
    ExpectOp("(");
    bool first = true;
    while (!IsOp(")")) {
      if (!first) ExpectOp(",");
      if (IsOp(")")) break;
      first = false;
      if (TakeOp("*")) {
        if (e->star || e->dstar) Fail("two starred arguments");
        e->star = Expression();
      } else if (TakeOp("**")) {
        if (e->dstar) Fail("two starred arguments");
        e->dstar = Expression();
      } else if (Now().kind == TokenKind::kName && Next().kind == TokenKind::kOperator && Next().text == "=") {
        if (e->dstar) Fail("a named argument after '**'");
        std::string name = Take().text;
        ++at_;
        e->kwargs.emplace_back(std::move(name), Expression());
      } else {
        if (!e->kwargs.empty() || e->star || e->dstar) Fail("a positional argument after a named one");
        e->args.push_back(Expression());
      }
    }
    ExpectOp(")");
  }

  ExprPtr Call(ExprPtr callee) {
    ExprPtr e = Make(ExprKind::kCall);
    e->args.push_back(std::move(callee));
    Arguments(e.get());
    return e;
  }

  // `|name(…)|name…`; at the start of a filter block the first '|' is absent.
  ExprPtr Filters(ExprPtr operand, bool first_without_bar) {
    while (first_without_bar || IsOp("|")) {
      Link();
      if (!first_without_bar) ++at_;
      first_without_bar = false;
      ExprPtr e = Make(ExprKind::kFilter);
      e->name = ExpectName();
      while (TakeOp(".")) e->name += "." + ExpectName();
      e->index = FindFilter(e->name);
      if (IsUnsupportedFilter(e->name)) throw TemplateError{"the filter '" + e->name + "' is not supported", e->line};
      if (e->index < 0 && !soft_) unknown_.push_back({"there is no filter '" + e->name + "' in Jinja2", e->line});
      e->args.push_back(std::move(operand));
      if (IsOp("(")) Arguments(e.get());
      operand = std::move(e);
    }
    return operand;
  }

  ExprPtr Test(ExprPtr operand) {
    ExprPtr e = Make(ExprKind::kTest);
    ++at_;
    const bool negated = TakeName("not");
    e->name = ExpectName();
    while (TakeOp(".")) e->name += "." + ExpectName();
    e->index = FindTest(e->name);
    if (e->index < 0 && !soft_) unknown_.push_back({"there is no test '" + e->name + "' in Jinja2", e->line});
    e->args.push_back(std::move(operand));
    const bool argument = Now().kind == TokenKind::kString || Now().kind == TokenKind::kInteger ||
                          Now().kind == TokenKind::kFloat || IsOp("[") || IsOp("{") ||
                          (Now().kind == TokenKind::kName && !IsName("else") && !IsName("or") && !IsName("and"));
    if (IsOp("(")) {
      Arguments(e.get());
    } else if (argument) {
      if (IsName("is")) Fail("tests cannot be chained with 'is'");
      e->args.push_back(Postfix(Primary()));
    }
    if (!negated) return e;
    ExprPtr out = Make(ExprKind::kNot);
    out->line = e->line;
    out->args.push_back(std::move(e));
    return out;
  }

  std::vector<Token> tokens_;
  size_t at_ = 0;
  int depth_ = 0;
  int loops_ = 0;
  int links_ = 0;
  bool soft_ = false;     // in a branch: what Jinja2 compiles there may name filters that it does not know
  bool escapes_ = false;  // within {% autoescape true %}
  int loop_names_ = 0;    // assignments to `loop` within the innermost loop
  std::vector<TemplateError> unknown_;
  std::set<std::string> blocks_;
  std::set<std::string> names_;   // names read so far within the innermost macro that it did not assign to before
  std::set<std::string> stored_;
};

}  // namespace

Template ParseTemplate(std::string_view source) {
  Template out = Parser(Tokens(source)).Run();
  FindUnset(&out);
  return out;
}

}  // namespace temper::text::jinja
