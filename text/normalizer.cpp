#include "text/normalizer.h"

#include <algorithm>

#include "text/component.h"
#include "text/unicode.h"
#include "text/utf8.h"

namespace temper::text {
namespace {

constexpr int kMaxDepth = 8;
constexpr size_t kMaxSteps = 32;
constexpr size_t kMaxGrowth = 4096;  // how many times longer a text may become

std::string StripSpace(std::string_view text, bool left, bool right) {
  while (left && !text.empty() && Contains(SpaceSet(), ReadUtf8(text, 0).cp)) text.remove_prefix(ReadUtf8(text, 0).length);
  while (right && !text.empty()) {
    size_t last = text.size() - 1;
    while (last > 0 && (static_cast<uint8_t>(text[last]) & 0xC0) == 0x80) --last;
    if (!Contains(SpaceSet(), ReadUtf8(text, last).cp)) break;
    text = text.substr(0, last);
  }
  return std::string(text);
}

std::string WithoutMarks(std::string_view text) {
  std::string out;
  for (uint32_t cp : ToCodePoints(text)) {
    if (!Contains(MarkSet(), cp)) AppendUtf8(cp, &out);
  }
  return out;
}

}  // namespace

Status Normalizer::Load(const Value& node, int depth) {
  if (node.is_undefined() || node.is_none()) return Status::Ok();
  const Component fields(node, "normalizer");
  const std::string& type = fields.type();
  if (type == "Sequence") {
    RETURN_IF_ERROR(fields.Expect({"type", "normalizers"}));
    if (depth > kMaxDepth) return fields.Bad(" is nested too deeply");
    ASSIGN_OR_RETURN(const List* children, fields.Children("normalizers"));
    for (const Value& child : *children) RETURN_IF_ERROR(Load(child, depth + 1));
    return Status::Ok();
  }
  if (steps_.size() >= kMaxSteps) return fields.Bad(": too many normalizers");
  static constexpr std::pair<const char*, Kind> kPlain[] = {
      {"NFC", Kind::kNfc}, {"NFD", Kind::kNfd}, {"NFKC", Kind::kNfkc}, {"NFKD", Kind::kNfkd}, {"Lowercase", Kind::kLowercase},
      {"StripAccents", Kind::kStripAccents}};
  for (const auto& [name, kind] : kPlain) {
    if (type != name) continue;
    RETURN_IF_ERROR(fields.Expect({"type"}));
    steps_.push_back({.kind = kind});
    return Status::Ok();
  }
  if (type == "Strip") {
    RETURN_IF_ERROR(fields.Expect({"type", "strip_left", "strip_right"}));
    Step step{.kind = Kind::kStrip};
    ASSIGN_OR_RETURN(step.left, fields.Bool("strip_left", true));
    ASSIGN_OR_RETURN(step.right, fields.Bool("strip_right", true));
    steps_.push_back(std::move(step));
    return Status::Ok();
  }
  if (type == "Prepend") {
    RETURN_IF_ERROR(fields.Expect({"type", "prepend"}));
    Step step{.kind = Kind::kPrepend};
    ASSIGN_OR_RETURN(step.content, fields.String("prepend"));
    steps_.push_back(std::move(step));
    return Status::Ok();
  }
  if (type == "Replace") {
    Step step{.kind = Kind::kReplace};
    ASSIGN_OR_RETURN(step.replacement, Replacement::Load(fields));
    const Replacement& r = *step.replacement;
    growth_ *= 1 + r.content().size() / std::max<size_t>(r.pattern().size(), 1);
    if (growth_ > kMaxGrowth) return fields.Bad(": a text could become " + std::to_string(growth_) + " times longer");
    steps_.push_back(std::move(step));
    return Status::Ok();
  }
  return fields.Unsupported();
}

std::string Normalizer::Run(const Step& step, std::string text) {
  switch (step.kind) {
    case Kind::kNfc: return ToNfc(text);
    case Kind::kNfd: return ToNfd(text);
    case Kind::kNfkc: return ToNfkc(text);
    case Kind::kNfkd: return ToNfkd(text);
    case Kind::kLowercase: return TokenizerLower(text);
    case Kind::kStripAccents: return WithoutMarks(text);
    case Kind::kStrip: return StripSpace(text, step.left, step.right);
    case Kind::kPrepend: return text.empty() ? text : step.content + text;
    case Kind::kReplace: return step.replacement->Apply(text);
  }
  return text;
}

std::string Normalizer::Apply(std::string_view text, bool goes_on) const {
  std::string out(text);
  for (const Step& step : steps_) {
    if (!(goes_on && step.kind == Kind::kPrepend)) out = Run(step, std::move(out));
  }
  return out;
}

size_t Normalizer::shrink() const {
  size_t out = 1;
  for (const Step& step : steps_) {
    const auto& r = step.replacement;
    if (step.kind == Kind::kPrepend || (r && !r->pattern().empty() && r->content().size() >= r->pattern().size())) continue;
    // Canonical composition makes a text shorter, to a third at most (a Hangul syllable of three letters).
    if ((step.kind != Kind::kNfc && step.kind != Kind::kNfd) || out != 1) return 0;
    out = 3;
  }
  return out;
}

bool Normalizer::keeps_start() const {
  for (const Step& step : steps_) {
    const auto& r = step.replacement;
    const bool strips = step.kind == Kind::kStrip || step.kind == Kind::kStripAccents;
    if (strips || (r && (r->pattern().empty() || r->content().empty()))) return false;
  }
  return true;
}

}  // namespace temper::text
