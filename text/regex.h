// Regex: the regular expressions of tokenizers (Oniguruma's syntax as Hugging Face uses it), on code points.
//
// Problem: the libraries at hand differ from Hugging Face in what white space is and in their Unicode version. Idea: a small
// backtracking matcher over our own tables. What it does not implement it refuses at Parse, by name. Work is polynomial:
// a search that backtracks much starts to remember the states that failed. Immutable; thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "common/status.h"
#include "text/unicode.h"

namespace temper::text {

class Regex {
 public:
  static Result<Regex> Parse(std::string_view pattern);
  // Matches exactly `text`.
  static Regex Literal(std::string_view text);
  // Matches one code point of `set`.
  static Regex OneOf(const CodeSet& set);
  Regex(Regex&&) noexcept;
  Regex& operator=(Regex&&) noexcept;
  ~Regex();

  // All leftmost non-overlapping matches, as [begin, end) in code points. An empty match counts unless it follows another match.
  std::vector<std::pair<size_t, size_t>> FindAll(std::span<const uint32_t> text) const;

  struct Program;

 private:
  explicit Regex(std::unique_ptr<const Program> program);
  std::unique_ptr<const Program> program_;
};

}  // namespace temper::text
