#include "text/pre_tokenizer.h"

#include <algorithm>
#include <string>

#include "text/component.h"
#include "text/unicode.h"

namespace temper::text {
namespace {

constexpr const char* kGpt2Regex =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
constexpr int kMaxDepth = 8;
constexpr size_t kMaxSteps = 32;

}  // namespace

Status PreTokenizer::Add(Step step, std::string_view type) {
  if (byte_level_) return InvalidArgument("tokenizer.json: pre_tokenizer(" + std::string(type) + ") after ByteLevel is not supported");
  if (steps_.size() >= kMaxSteps) return InvalidArgument("tokenizer.json: more than 32 pre_tokenizers");
  steps_.push_back(std::move(step));
  return Status::Ok();
}

Status PreTokenizer::Load(const Value& node, int depth) {
  if (node.is_undefined() || node.is_none()) return Status::Ok();
  const Component fields(node, "pre_tokenizer");
  const std::string& type = fields.type();
  auto behavior = [&](Behavior* out) -> Status {
    static constexpr std::pair<const char*, Behavior> kBehaviors[] = {{"Removed", Behavior::kRemoved},
                                                                       {"Isolated", Behavior::kIsolated},
                                                                       {"MergedWithPrevious", Behavior::kMergedWithPrevious},
                                                                       {"MergedWithNext", Behavior::kMergedWithNext},
                                                                       {"Contiguous", Behavior::kContiguous}};
    const std::string name = node.StringOr("behavior", "?");
    for (const auto& [known, value] : kBehaviors) {
      if (name == known) {
        *out = value;
        return Status::Ok();
      }
    }
    return fields.Bad(".behavior '" + name + "' is not supported");
  };
  Step step;
  if (type == "Sequence") {
    RETURN_IF_ERROR(fields.Expect({"type", "pretokenizers"}));
    if (depth > kMaxDepth) return fields.Bad(" is nested too deeply");
    ASSIGN_OR_RETURN(const List* children, fields.Children("pretokenizers"));
    for (const Value& child : *children) RETURN_IF_ERROR(Load(child, depth + 1));
    return Status::Ok();
  }
  if (type == "ByteLevel") {
    RETURN_IF_ERROR(fields.Expect({"type", "add_prefix_space", "trim_offsets", "use_regex"}));
    ASSIGN_OR_RETURN(const bool prefix, fields.Bool("add_prefix_space", true));
    ASSIGN_OR_RETURN(const bool use_regex, fields.Bool("use_regex", true));
    if (prefix) step.prepend = Prepend::kAlways;
    if (use_regex) {
      ASSIGN_OR_RETURN(step.cut, Regex::Parse(kGpt2Regex));
    }
    RETURN_IF_ERROR(Add(std::move(step), type));
    byte_level_ = true;
    return Status::Ok();
  }
  if (type == "Digits") {
    RETURN_IF_ERROR(fields.Expect({"type", "individual_digits"}));
    ASSIGN_OR_RETURN(const bool individual, fields.Bool("individual_digits", false));
    step.cut = Regex::OneOf(NumericSet());
    step.behavior = individual ? Behavior::kIsolated : Behavior::kContiguous;
    return Add(std::move(step), type);
  }
  if (type == "Punctuation") {
    RETURN_IF_ERROR(fields.Expect({"type", "behavior"}));
    if (node.Find("behavior")) RETURN_IF_ERROR(behavior(&step.behavior));
    step.cut = Regex::OneOf(PunctuationSet());
    return Add(std::move(step), type);
  }
  if (type == "WhitespaceSplit" || type == "Whitespace") {
    RETURN_IF_ERROR(fields.Expect({"type"}));
    if (type == "Whitespace") {  // rows of what is in words, and rows of the rest
      step.cut = Regex::OneOf(RustWordSet());
      step.behavior = Behavior::kContiguous;
      RETURN_IF_ERROR(Add(std::move(step), type));
      step = Step();
    }
    step.cut = Regex::OneOf(SpaceSet());
    step.behavior = Behavior::kRemoved;
    return Add(std::move(step), type);
  }
  if (type == "CharDelimiterSplit") {
    RETURN_IF_ERROR(fields.Expect({"type", "delimiter"}));
    ASSIGN_OR_RETURN(const uint32_t delimiter, fields.Character("delimiter"));
    step.cut = Regex::OneOf({{delimiter, delimiter}});
    step.behavior = Behavior::kRemoved;
    return Add(std::move(step), type);
  }
  if (type == "Metaspace") {
    RETURN_IF_ERROR(fields.Expect({"type", "replacement", "add_prefix_space", "prepend_scheme", "split", "str_rep"}));
    ASSIGN_OR_RETURN(step.space, fields.Character("replacement"));
    ASSIGN_OR_RETURN(const bool prefix, fields.Bool("add_prefix_space", true));
    ASSIGN_OR_RETURN(const bool split, fields.Bool("split", true));
    const std::string scheme = node.StringOr("prepend_scheme", "always");
    static constexpr std::pair<const char*, Prepend> kSchemes[] = {
        {"never", Prepend::kNever}, {"first", Prepend::kFirst}, {"always", Prepend::kAlways}};
    const auto* known = std::find_if(std::begin(kSchemes), std::end(kSchemes), [&](const auto& s) { return scheme == s.first; });
    if (known == std::end(kSchemes)) return fields.Bad(".prepend_scheme '" + scheme + "' is not supported");
    step.prepend = known->second;
    if (!prefix && step.prepend != Prepend::kNever) return fields.Bad(".add_prefix_space contradicts prepend_scheme");
    if (split) {
      step.cut = Regex::OneOf({{step.space, step.space}});
      step.behavior = Behavior::kMergedWithNext;
    }
    return Add(std::move(step), type);
  }
  if (type == "Split") {
    RETURN_IF_ERROR(fields.Expect({"type", "pattern", "behavior", "invert"}));
    ASSIGN_OR_RETURN(step.invert, fields.Bool("invert", false));
    RETURN_IF_ERROR(behavior(&step.behavior));
    const Value* pattern = node.Find("pattern");
    const Value* regex = pattern ? pattern->Find("Regex") : nullptr;
    const Value* text = pattern ? pattern->Find("String") : nullptr;
    if (regex && regex->is_string()) {
      auto parsed = Regex::Parse(regex->as_string());
      if (!parsed.ok()) return parsed.status().WithContext("tokenizer.json: pre_tokenizer(Split).pattern");
      step.cut = std::move(parsed).value();
    } else if (text && text->is_string() && !text->as_string().empty()) {
      step.cut = Regex::Literal(text->as_string());
    } else {
      return fields.Bad(".pattern must hold a Regex or a String that is not empty");
    }
    return Add(std::move(step), type);
  }
  return fields.Unsupported();
}

bool PreTokenizer::drops_text() const {
  return std::any_of(steps_.begin(), steps_.end(), [](const Step& s) { return s.cut && s.behavior == Behavior::kRemoved; });
}

bool PreTokenizer::needs_start() const {
  return std::any_of(steps_.begin(), steps_.end(), [](const Step& s) { return s.prepend == Prepend::kFirst; });
}

void PreTokenizer::Rewrite(const Step& step, Words* words) {
  if (step.space != ' ') std::replace(words->points.begin(), words->points.end(), static_cast<uint32_t>(' '), step.space);
  const bool first_only = step.prepend == Prepend::kFirst;
  if (step.prepend == Prepend::kNever || (first_only && words->before != Before::kNothing)) return;
  std::vector<uint32_t> points;
  points.reserve(words->points.size() + words->spans.size());
  for (auto& [begin, end] : words->spans) {
    const size_t start = points.size();
    const bool takes = begin == 0 ? words->before != Before::kText : !first_only;
    if (takes && words->points[begin] != step.space) points.push_back(step.space);
    points.insert(points.end(), words->points.begin() + static_cast<long>(begin), words->points.begin() + static_cast<long>(end));
    begin = start;
    end = points.size();
  }
  words->points.swap(points);
}

void PreTokenizer::Cut(const Step& step, Words* words) {
  const std::span<const uint32_t> points = words->points;
  std::vector<std::pair<size_t, size_t>> spans;
  std::vector<Segment> segments, joined;
  spans.reserve(words->spans.size());
  for (const auto& [begin, end] : words->spans) {
    const auto matches = step.cut->FindAll(points.subspan(begin, end - begin));
    size_t at = begin;
    if (step.behavior == Behavior::kIsolated) {
      for (const auto& [a, b] : matches) {
        if (begin + a > at) spans.emplace_back(at, begin + a);
        if (b > a) spans.emplace_back(begin + a, begin + b);
        at = begin + b;
      }
      if (at < end) spans.emplace_back(at, end);
      continue;
    }
    segments.clear();
    for (const auto& [a, b] : matches) {
      if (begin + a > at) segments.push_back({at, begin + a, step.invert});
      segments.push_back({begin + a, begin + b, !step.invert});
      at = begin + b;
    }
    if (at < end) segments.push_back({at, end, step.invert});
    if (step.behavior == Behavior::kMergedWithNext) std::reverse(segments.begin(), segments.end());
    joined.clear();
    for (const Segment& s : segments) {
      bool join = false;
      if (!joined.empty()) {
        if (step.behavior == Behavior::kContiguous) join = s.match == joined.back().match;
        if (step.behavior == Behavior::kMergedWithPrevious || step.behavior == Behavior::kMergedWithNext) {
          join = s.match && !joined.back().match;
        }
      }
      if (join) {
        joined.back() = {std::min(joined.back().begin, s.begin), std::max(joined.back().end, s.end), s.match};
      } else if (step.behavior != Behavior::kRemoved || !s.match) {
        joined.push_back(s);
      }
    }
    if (step.behavior == Behavior::kMergedWithNext) std::reverse(joined.begin(), joined.end());
    for (const Segment& s : joined) {
      if (s.begin < s.end) spans.emplace_back(s.begin, s.end);
    }
  }
  words->spans.swap(spans);
}

void PreTokenizer::Apply(Words* words) const {
  for (const Step& step : steps_) {
    Rewrite(step, words);
    if (step.cut) Cut(step, words);
  }
}

}  // namespace temper::text
