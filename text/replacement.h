// "Replace" of tokenizer.json, in a normalizer and in a decoder alike: every occurrence of a text, or every match of a regular
// expression, becomes another text. Immutable after loading; thread-safe.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "common/status.h"
#include "text/component.h"
#include "text/regex.h"

namespace temper::text {

class Replacement {
 public:
  // `fields` of a component whose type is Replace. Errors: InvalidArgument naming what is not supported.
  static Result<Replacement> Load(const Component& fields);

  // `text` must be valid UTF-8 where the pattern is a regular expression.
  std::string Apply(std::string_view text) const;

  const std::string& pattern() const { return pattern_; }  // empty: a regular expression
  const std::string& content() const { return content_; }

 private:
  std::string pattern_, content_;
  std::optional<Regex> regex_;
};

}  // namespace temper::text
