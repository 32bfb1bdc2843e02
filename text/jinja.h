// The template language inside text/: syntax tree, parser and interpreter of Jinja with Python's semantics. Internal to the part;
// the door is text/chat_template.h. Failures travel as the exception TemplateError from wherever in a deep expression they happen
// to the door, which turns them into a Status; nothing else in the project sees it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/value.h"

namespace temper::text::jinja {

struct TemplateError {
  std::string message;
  int line = 0;        // 0: not known yet; the innermost statement fills it in
  bool limit = false;  // a bound on work was hit
};

struct Expr;
struct Stmt;
using ExprPtr = std::unique_ptr<Expr>;
using Body = std::vector<Stmt>;

enum class ExprKind : uint8_t {
  kConst,
  kName,
  kList,
  kTuple,
  kDict,     // args: key, value, key, value, …
  kGetAttr,  // args[0].name
  kGetItem,  // args[0][args[1]]
  kSlice,    // args: start, stop, step, each may be null
  kCall,     // args[0](args[1…], kwargs, *star, **dstar)
  kFilter,   // args[0]|name(…); args[0] null in a filter block
  kTest,     // args[0] is name(…)
  kNegate,
  kPlus,
  kNot,
  kBinary,   // args[0] name args[1]; name is the operator
  kConcat,
  kCompare,  // args[0] ops[0] args[1] ops[1] args[2] …
  kAnd,
  kOr,
  kIf,       // args: condition, then, else (may be null)
};

struct Expr {
  ExprKind kind = ExprKind::kConst;
  bool escapes = false;  // kConcat: within {% autoescape true %}
  bool bare = false;     // kBinary: a constant ** something, which Jinja2 writes into its program without brackets: -2 ** n
  int line = 0;
  int index = -1;  // of the filter or test in the interpreter's table; -1: Jinja2 has none of that name
  Value value;
  std::string name;
  std::vector<ExprPtr> args;
  std::vector<std::pair<std::string, ExprPtr>> kwargs;
  ExprPtr star, dstar;
  std::vector<std::string> ops;
};

// What `for` and `set` assign to.
struct Target {
  std::string name;       // a name, or the namespace of `name.attribute`
  std::string attribute;  // empty: a plain name
  std::vector<Target> items;
  bool is_tuple = false;
};

enum class StmtKind : uint8_t {
  kText,
  kOutput,
  kFor,
  kIf,
  kSet,
  kSetBlock,
  kMacro,
  kCallBlock,
  kFilterBlock,
  kWith,
  kScope,
  kAutoescape,
  kBlock,
  kBreak,
  kContinue,
};

struct Parameter {
  std::string name;
  ExprPtr fallback;  // null: none
};

struct Stmt {
  StmtKind kind = StmtKind::kText;
  int line = 0;
  bool escapes = false;                     // it stands within {% autoescape true %}
  std::string text;                         // kText; the name of a macro
  ExprPtr expr;                             // kOutput, kFor's iterable, kIf's condition, kSet's value, kCallBlock's call, filter
  bool constant = false;                    // kOutput: Jinja2 works it out while it compiles
  ExprPtr condition;                        // kFor's `if`
  bool recursive = false;
  bool scoped = false;                      // kBlock
  Target target;                            // kFor, kSet, kSetBlock
  std::vector<Parameter> parameters;        // kMacro, kCallBlock
  std::vector<std::pair<Target, ExprPtr>> bindings;  // kWith
  bool uses_varargs = false, uses_kwargs = false, uses_caller = false;  // kMacro, kCallBlock: what the body names
  Body body, otherwise;
  std::vector<std::string> unset, unset_otherwise;  // names that the frames of these bodies hide until they set them
};

struct Template {
  Body body;
  std::vector<std::string> unset;
};

// Fills in the `unset` of all frames; see jinja_scopes.cpp. ParseTemplate does it.
void FindUnset(Template* tmpl);

// Throws TemplateError: syntax, and every construct, filter or test that is not implemented.
Template ParseTemplate(std::string_view source);

// Indices into the interpreter's tables; -1 when there is no such filter or test.
int FindFilter(std::string_view name);
int FindTest(std::string_view name);
// Whether Jinja2 has a filter that is not implemented here.
bool IsUnsupportedFilter(std::string_view name);

// Throws TemplateError. `now_s`: seconds since the epoch for strftime_now.
std::string RenderTemplate(const Template& tmpl, const Dict& variables, int64_t now_s);

}  // namespace temper::text::jinja
