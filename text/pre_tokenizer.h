// Pre-tokenizer: cuts a text into the words whose tokens the model merges. Immutable after loading; thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "common/status.h"
#include "text/regex.h"
#include "text/value.h"

namespace temper::text {

// What stands before a piece of text: nothing, an added token, or more of the same piece, encoded before.
enum class Before : uint8_t { kNothing, kAddedToken, kText };

// A text on its way through the pre-tokenizer.
struct Words {
  std::vector<uint32_t> points;
  std::vector<std::pair<size_t, size_t>> spans;  // in `points`, in order, none empty
  Before before = Before::kAddedToken;           // points[0]
};

class PreTokenizer {
 public:
  // Split, Digits, Punctuation, Metaspace, Whitespace, WhitespaceSplit, CharDelimiterSplit, ByteLevel (as the last) and sequences
  // of them; null: the text is one word. Errors: InvalidArgument naming what is not supported.
  Status Load(const Value& node) { return Load(node, 0); }

  // Cuts the spans of `words` further; may rewrite the points.
  void Apply(Words* words) const;

  bool empty() const { return steps_.empty(); }
  // Words are spelled in GPT-2's byte alphabet (the mapping itself is left to the model).
  bool byte_level() const { return byte_level_; }
  bool drops_text() const;
  // What it does depends on whether a piece begins the text.
  bool needs_start() const;
  // Only the first step depends on it.
  bool start_first() const { return !steps_.empty() && steps_[0].prepend == Prepend::kFirst; }

 private:
  enum class Behavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };
  enum class Prepend { kNever, kFirst, kAlways };
  struct Step {
    std::optional<Regex> cut;  // absent: nothing is cut
    Behavior behavior = Behavior::kIsolated;
    bool invert = false;
    // Before cutting: spaces become `space`, and every word gets one in front unless it begins with it.
    uint32_t space = ' ';
    Prepend prepend = Prepend::kNever;
  };
  struct Segment {
    size_t begin, end;
    bool match;
  };

  Status Load(const Value& node, int depth);
  Status Add(Step step, std::string_view type);
  static void Cut(const Step& step, Words* words);
  static void Rewrite(const Step& step, Words* words);

  std::vector<Step> steps_;
  bool byte_level_ = false;
};

}  // namespace temper::text
