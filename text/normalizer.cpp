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

std::string ReplaceAll(std::string_view text, std::string_view pattern, std::string_view content) {
  std::string out;
  size_t at = 0;
  for (size_t hit; (hit = text.find(pattern, at)) != std::string_view::npos; at = hit + pattern.size()) {
    out.append(text.substr(at, hit - at)).append(content);
  }
  return out.append(text.substr(at));
}

std::string ReplaceMatches(std::string_view text, const Regex& regex, std::string_view content) {
  const std::vector<uint32_t> points = ToCodePoints(text);
  std::string out;
  size_t at = 0;
  for (const auto& [a, b] : regex.FindAll(points)) {
    out += FromCodePoints(points.data() + at, points.data() + a);
    out += content;
    at = b;
  }
  return out + FromCodePoints(points.data() + at, points.data() + points.size());
}

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
      {"NFC", Kind::kNfc}, {"NFD", Kind::kNfd}, {"NFKC", Kind::kNfkc}, {"NFKD", Kind::kNfkd}, {"Lowercase", Kind::kLowercase}};
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
    RETURN_IF_ERROR(fields.Expect({"type", "pattern", "content"}));
    Step step{.kind = Kind::kReplaceText};
    ASSIGN_OR_RETURN(step.content, fields.String("content"));
    const Value* pattern = node.Find("pattern");
    const Value* text = pattern ? pattern->Find("String") : nullptr;
    const Value* regex = pattern ? pattern->Find("Regex") : nullptr;
    if (text && text->is_string() && !text->as_string().empty()) {
      step.pattern = text->as_string();
    } else if (regex && regex->is_string()) {
      auto parsed = Regex::Parse(regex->as_string());
      if (!parsed.ok()) return parsed.status().WithContext("tokenizer.json: normalizer(Replace).pattern");
      step.kind = Kind::kReplaceRegex;
      step.regex = std::move(parsed).value();
    } else {
      return fields.Bad(".pattern must hold a Regex or a String that is not empty");
    }
    growth_ *= 1 + step.content.size() / std::max<size_t>(step.pattern.size(), 1);
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
    case Kind::kStrip: return StripSpace(text, step.left, step.right);
    case Kind::kPrepend: return text.empty() ? text : step.content + text;
    case Kind::kReplaceText: return ReplaceAll(text, step.pattern, step.content);
    case Kind::kReplaceRegex: return ReplaceMatches(text, *step.regex, step.content);
  }
  return text;
}

std::string Normalizer::Apply(std::string_view text) const {
  std::string out(text);
  for (const Step& step : steps_) out = Run(step, std::move(out));
  return out;
}

size_t Normalizer::shrink() const {
  size_t out = 1;
  for (const Step& step : steps_) {
    if (step.kind == Kind::kPrepend || (step.kind == Kind::kReplaceText && step.content.size() >= step.pattern.size())) continue;
    // Canonical composition makes a text shorter, to a third at most (a Hangul syllable of three letters).
    if ((step.kind != Kind::kNfc && step.kind != Kind::kNfd) || out != 1) return 0;
    out = 3;
  }
  return out;
}

bool Normalizer::keeps_start() const {
  for (const Step& step : steps_) {
    const bool drops = step.kind == Kind::kReplaceText && step.content.empty();
    if (step.kind == Kind::kStrip || step.kind == Kind::kReplaceRegex || drops) return false;
  }
  return true;
}

}  // namespace temper::text
