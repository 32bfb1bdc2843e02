#include "text/token_decoder.h"

#include <algorithm>
#include <optional>

#include "text/byte_alphabet.h"
#include "text/component.h"
#include "text/utf8.h"

namespace temper::text {
namespace {

constexpr int kMaxDepth = 8;
constexpr size_t kMaxSteps = 32;
constexpr size_t kMaxReplacements = 4;
constexpr size_t kMaxContent = 64;  // bytes of a replacement

// The byte that "<0xAB>" stands for, as Rust reads the number: a plus sign for the first digit is one.
std::optional<uint8_t> ByteOf(std::string_view token) {
  if (token.size() != 6 || token.substr(0, 3) != "<0x" || token[5] != '>') return std::nullopt;
  unsigned value = 0;
  for (size_t i = 3; i < 5; ++i) {
    const char c = token[i];
    if (i == 3 && c == '+') continue;
    if (c >= '0' && c <= '9') {
      value = value * 16 + static_cast<unsigned>(c - '0');
    } else if ((c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F')) {
      value = value * 16 + static_cast<unsigned>((c | 32) - 'a' + 10);
    } else {
      return std::nullopt;
    }
  }
  return static_cast<uint8_t>(value);
}

// Without up to `left` leading `character`s; `left` becomes how many more may follow.
std::string_view StripStart(std::string_view token, uint32_t character, size_t* left) {
  while (*left > 0 && !token.empty()) {
    const Utf8Char c = ReadUtf8(token, 0);
    *left = c.cp == character ? *left - 1 : 0;
    if (c.cp == character) token.remove_prefix(c.length);
  }
  return token;
}

}  // namespace

Status TokenDecoder::Load(const Value& node) {
  if (node.is_undefined() || node.is_none()) {
    spaces_between_ = true;
    return Status::Ok();
  }
  bool fused = false;
  return Load(node, &fused, 0);
}

Status TokenDecoder::Load(const Value& node, bool* fused, int depth) {
  const Component fields(node, "decoder");
  const std::string& type = fields.type();
  if (type == "Sequence") {
    RETURN_IF_ERROR(fields.Expect({"type", "decoders"}));
    if (depth > kMaxDepth) return fields.Bad(" is nested too deeply");
    ASSIGN_OR_RETURN(const List* children, fields.Children("decoders"));
    for (const Value& child : *children) RETURN_IF_ERROR(Load(child, fused, depth + 1));
    return Status::Ok();
  }
  if (steps_.size() >= kMaxSteps) return fields.Bad(": too many decoders");
  Step step{};
  step.fused = *fused;
  if (type == "Fuse") {
    RETURN_IF_ERROR(fields.Expect({"type"}));
    *fused = true;
    return Status::Ok();
  }
  if (type == "Strip") {
    RETURN_IF_ERROR(fields.Expect({"type", "content", "start", "stop"}));
    step.kind = Kind::kStrip;
    ASSIGN_OR_RETURN(step.character, fields.Character("content"));
    const Value *start = node.Find("start"), *stop = node.Find("stop");
    if (!start || !start->is_int() || start->as_int() < 0 || start->as_int() > 1000) return fields.Bad(".start must be 0..1000");
    if (!stop || !stop->is_int() || stop->as_int() != 0) return fields.Bad(".stop other than 0 is not supported");
    step.count = static_cast<size_t>(start->as_int());
    steps_.push_back(std::move(step));
    return Status::Ok();
  }
  if (*fused) return fields.Bad(" after Fuse or ByteLevel is not supported");
  if (type == "ByteLevel") {
    RETURN_IF_ERROR(fields.Expect({"type", "add_prefix_space", "trim_offsets", "use_regex"}));
    step.kind = Kind::kByteLevel;
    *fused = true;
  } else if (type == "ByteFallback") {
    RETURN_IF_ERROR(fields.Expect({"type"}));
    step.kind = Kind::kByteFallback;
  } else if (type == "Metaspace") {
    RETURN_IF_ERROR(fields.Expect({"type", "replacement", "add_prefix_space", "prepend_scheme", "split", "str_rep"}));
    step.kind = Kind::kMetaspace;
    ASSIGN_OR_RETURN(step.character, fields.Character("replacement"));
    step.keep_first = node.StringOr("prepend_scheme", "always") == "never";
  } else if (type == "Replace") {
    step.kind = Kind::kReplace;
    ASSIGN_OR_RETURN(step.replacement, Replacement::Load(fields));
    const auto replacements = std::count_if(steps_.begin(), steps_.end(), [](const Step& s) { return s.kind == Kind::kReplace; });
    if (step.replacement->content().size() > kMaxContent || static_cast<size_t>(replacements) >= kMaxReplacements) {
      return fields.Bad(": more than 4 of them, or a content above 64 bytes");
    }
  } else {
    return fields.Unsupported();
  }
  steps_.push_back(std::move(step));
  return Status::Ok();
}

TokenDecoder::Run TokenDecoder::Begin() const {
  Run run;
  run.held.resize(steps_.size());
  for (const Step& step : steps_) run.seen.push_back(step.kind == Kind::kStrip ? step.count : 0);
  return run;
}

void TokenDecoder::Feed(std::string_view token, Run* run, std::string* out) const {
  if (spaces_between_ && run->any) out->push_back(' ');
  run->any = true;
  Feed(0, token, run, out);
}

void TokenDecoder::Feed(size_t at, std::string_view token, Run* run, std::string* out) const {
  if (at == steps_.size()) {
    out->append(token);
    return;
  }
  const Step& step = steps_[at];
  std::string& held = run->held[at];
  switch (step.kind) {
    case Kind::kReplace: return Feed(at + 1, step.replacement->Apply(token), run, out);
    case Kind::kStrip: {
      size_t each = step.count;
      return Feed(at + 1, StripStart(token, step.character, step.fused ? &run->seen[at] : &each), run, out);
    }
    case Kind::kMetaspace: {
      const bool drop = run->seen[at]++ == 0 && !step.keep_first;
      std::string text;
      for (uint32_t cp : ToCodePoints(token)) {
        if (cp != step.character) {
          AppendUtf8(cp, &text);
        } else if (!drop) {
          text.push_back(' ');
        }
      }
      return Feed(at + 1, text, run, out);
    }
    case Kind::kByteFallback:
      if (const auto byte = ByteOf(token)) {
        held.push_back(static_cast<char>(*byte));
        return;
      }
      EndStep(at, run, out);
      return Feed(at + 1, token, run, out);
    case Kind::kByteLevel: {
      held += FromByteAlphabet(token).value_or(std::string(token));
      std::string text;
      size_t done = 0;
      while (done < held.size()) {
        const Utf8Char c = ReadUtf8(held, done);
        if (c.cut) break;
        AppendUtf8(c.cp, &text);
        done += c.length;
      }
      held.erase(0, done);
      return Feed(at + 1, text, run, out);
    }
  }
}

// Gives on what the step held back: no more bytes follow.
void TokenDecoder::EndStep(size_t at, Run* run, std::string* out) const {
  const std::string held = std::move(run->held[at]);
  run->held[at].clear();
  if (held.empty()) return;
  if (steps_[at].kind == Kind::kByteLevel || IsValidUtf8(held)) return Feed(at + 1, ToValidUtf8(held), run, out);
  // As Hugging Face: one broken character makes every byte of the run a replacement character, each a token of its own.
  for (size_t i = 0; i < held.size(); ++i) Feed(at + 1, "\uFFFD", run, out);
}

void TokenDecoder::End(Run* run, std::string* out) const {
  for (size_t at = 0; at < steps_.size(); ++at) EndStep(at, run, out);
}

std::string TokenDecoder::Bytes(std::string_view token) const {
  std::string text(token);
  for (const Step& step : steps_) {
    switch (step.kind) {
      case Kind::kReplace: text = step.replacement->Apply(text); break;
      case Kind::kStrip: {
        size_t each = step.fused ? 0 : step.count;  // fused, it strips the beginning of the whole text
        text = std::string(StripStart(text, step.character, &each));
        break;
      }
      case Kind::kMetaspace: {
        std::string spaced;
        for (uint32_t cp : ToCodePoints(text)) AppendUtf8(cp == step.character ? ' ' : cp, &spaced);
        text = spaced;
        break;
      }
      case Kind::kByteFallback:
        if (const auto byte = ByteOf(text)) return std::string(1, static_cast<char>(*byte));
        break;
      case Kind::kByteLevel: return FromByteAlphabet(text).value_or(text);
    }
  }
  return text;
}

}  // namespace temper::text
