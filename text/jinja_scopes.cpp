// Which names a frame of the template hides before it sets them.
//
// Problem: Jinja2 compiles each frame (the template, the body of a loop, a macro, a block of `set`, `filter`, `with`, …) to a
// piece of Python in which a name is one local variable. A name that its frame assigns to before it reads it begins unset, and
// where the frame is not yet at the assignment (in a loop or a macro that stands before it) it is undefined, even when the
// caller of the template gave a variable of that name. Idea: the walk of Jinja2's own idtracking, which decides this from the
// text alone; the interpreter then looks names up scope by scope and stops where one is unset.
#include <set>

#include "text/jinja.h"

namespace temper::text::jinja {
namespace {

using Names = std::set<std::string>;

struct Frame {
  const Frame* parent = nullptr;
  Names refs, unset;  // mentioned so far; of those, the ones that were set first

  bool Outer(const std::string& name) const {
    for (const Frame* f = parent; f; f = f->parent) {
      if (f->refs.count(name)) return true;
    }
    return false;
  }
  void Parameter(const std::string& name) {
    refs.insert(name);
    unset.erase(name);
  }
  void Store(const std::string& name) {
    if (refs.insert(name).second && !Outer(name)) unset.insert(name);
  }
  void Load(const std::string& name) {
    if (!Outer(name)) refs.insert(name);
  }
};

void Loads(const Expr& e, Frame* frame) {
  if (e.kind == ExprKind::kName) frame->Load(e.name);
  for (const auto& a : e.args) {
    if (a) Loads(*a, frame);
  }
  for (const auto& [name, a] : e.kwargs) Loads(*a, frame);
  if (e.star) Loads(*e.star, frame);
  if (e.dstar) Loads(*e.dstar, frame);
}

void Stores(const Target& target, Frame* frame) {
  if (target.is_tuple) {
    for (const Target& t : target.items) Stores(t, frame);
  } else if (target.attribute.empty()) {
    frame->Store(target.name);
  } else {
    frame->Load(target.name);
  }
}

void Parameters(const Target& target, Frame* frame) {
  if (!target.is_tuple) return frame->Parameter(target.name);
  for (const Target& t : target.items) Parameters(t, frame);
}

void Body(const std::vector<Stmt>& body, Frame* frame);

// The frame's own view of a statement: what stands in frames within it is not its own.
void Own(const Stmt& s, Frame* frame) {
  switch (s.kind) {
    case StmtKind::kOutput: Loads(*s.expr, frame); break;
    case StmtKind::kFor: Loads(*s.expr, frame); break;
    case StmtKind::kSet:
      Loads(*s.expr, frame);
      Stores(s.target, frame);
      break;
    case StmtKind::kSetBlock: Stores(s.target, frame); break;
    case StmtKind::kMacro: frame->Store(s.text); break;
    case StmtKind::kCallBlock: Loads(*s.expr, frame); break;
    case StmtKind::kFilterBlock: Loads(*s.expr, frame); break;
    case StmtKind::kWith:
      for (const auto& [target, expr] : s.bindings) Loads(*expr, frame);
      break;
    case StmtKind::kIf: {
      Loads(*s.expr, frame);
      // What a branch sets is known from there on, but never unset: where the branch was not taken it is looked up outside.
      Frame taken = *frame, not_taken = *frame;
      Body(s.body, &taken);
      Body(s.otherwise, &not_taken);
      frame->refs.insert(taken.refs.begin(), taken.refs.end());
      frame->refs.insert(not_taken.refs.begin(), not_taken.refs.end());
      break;
    }
    default: break;
  }
}

void Body(const std::vector<Stmt>& body, Frame* frame) {
  for (const Stmt& s : body) Own(s, frame);
}

void Inner(std::vector<Stmt>* body, const Frame& frame);

// A frame over this body, with its parameters declared already.
void Finish(std::vector<Stmt>* body, Frame* frame, std::vector<std::string>* unset) {
  Body(*body, frame);
  unset->assign(frame->unset.begin(), frame->unset.end());
  Inner(body, *frame);
}

void Inner(std::vector<Stmt>* body, const Frame& frame) {
  for (Stmt& s : *body) {
    Frame inner;
    inner.parent = &frame;
    switch (s.kind) {
      case StmtKind::kIf:
        Inner(&s.body, frame);
        Inner(&s.otherwise, frame);
        break;
      case StmtKind::kFor: {
        inner.Parameter("loop");
        Parameters(s.target, &inner);
        Finish(&s.body, &inner, &s.unset);
        Frame otherwise;
        otherwise.parent = &frame;
        Finish(&s.otherwise, &otherwise, &s.unset_otherwise);
        break;
      }
      case StmtKind::kMacro:
      case StmtKind::kCallBlock:
      case StmtKind::kScope:
        for (const Parameter& p : s.parameters) inner.Parameter(p.name);
        if (s.uses_caller) inner.Parameter("caller");
        if (s.uses_kwargs) inner.Parameter("kwargs");
        if (s.uses_varargs) inner.Parameter("varargs");
        for (const Parameter& p : s.parameters) {
          if (p.fallback) Loads(*p.fallback, &inner);
        }
        Finish(&s.body, &inner, &s.unset);
        break;
      case StmtKind::kWith:
        for (const auto& [target, expr] : s.bindings) Parameters(target, &inner);
        Finish(&s.body, &inner, &s.unset);
        break;
      case StmtKind::kBlock:
        inner.parent = nullptr;
        Finish(&s.body, &inner, &s.unset);
        break;
      case StmtKind::kSetBlock:
      case StmtKind::kFilterBlock:
      case StmtKind::kAutoescape: Finish(&s.body, &inner, &s.unset); break;
      default: break;
    }
  }
}

}  // namespace

void FindUnset(Template* tmpl) {
  Frame root;
  Finish(&tmpl->body, &root, &tmpl->unset);
}

}  // namespace temper::text::jinja
