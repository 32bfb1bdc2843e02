// Normalizer: what a tokenizer.json does to the text before it is cut. Immutable after loading; thread-safe.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"
#include "text/replacement.h"
#include "text/value.h"

namespace temper::text {

class Normalizer {
 public:
  // NFC, NFD, NFKC, NFKD, Lowercase, Strip, Prepend, Replace and sequences of them; null: nothing.
  // Errors: InvalidArgument naming what is not supported.
  Status Load(const Value& node) { return Load(node, 0); }

  bool empty() const { return steps_.empty(); }
  // `text` must be valid UTF-8. goes_on: it stands behind text of the same piece, so that nothing is put in front of it.
  std::string Apply(std::string_view text, bool goes_on = false) const;
  // A text of n bytes becomes one of n / shrink() at least; 0 where nothing is certain.
  size_t shrink() const;
  // What the normalized text begins with stood at the beginning of the text.
  bool keeps_start() const;

 private:
  enum class Kind { kNfc, kNfd, kNfkc, kNfkd, kLowercase, kStripAccents, kStrip, kPrepend, kReplace };
  struct Step {
    Kind kind;
    bool left = false, right = false;          // kStrip
    std::string content{};                     // kPrepend
    std::optional<Replacement> replacement{};  // kReplace
  };
  Status Load(const Value& node, int depth);
  static std::string Run(const Step& step, std::string text);
  std::vector<Step> steps_;
  size_t growth_ = 1;  // how many times longer the replacements may make a text
};

}  // namespace temper::text
