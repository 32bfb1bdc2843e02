// Seeded damage for fuzz tests: what a broken program, a bad disk or a stranger makes of good bytes.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "common/rng.h"

namespace temper {

// One to four edits: a byte or bit changed, a piece cut, doubled or moved in from elsewhere in the text, the end lost, or one of
// `words` (the tokens of the format) put in or over. Deterministic in `rng`; never longer than the text and 4 edits make it.
inline std::string Mutated(std::string text, const std::vector<std::string>& words, Rng& rng) {
  for (uint64_t edit = 1 + rng.Below(4); edit > 0; --edit) {
    if (text.empty()) return text;
    const size_t at = rng.Below(text.size());
    const size_t piece = 1 + rng.Below(std::min<size_t>(text.size() - at, 16));
    switch (rng.Below(words.empty() ? 5 : 8)) {
      case 0: text[at] = static_cast<char>(rng.Below(256)); break;
      case 1: text[at] = static_cast<char>(text[at] ^ (1 << rng.Below(8))); break;
      case 2: text.erase(at, piece); break;
      case 3: text.insert(at, text.substr(rng.Below(text.size()), piece)); break;
      case 4: if (rng.Below(8) == 0) text.resize(at); break;
      case 5: text.insert(at, words[rng.Below(words.size())]); break;
      default: {  // a value for a value: the whole word at `at`
        const char* ends = " \n\t:,[]{}\"'=";
        const size_t before = text.find_last_of(ends, at), begin = before == std::string::npos ? 0 : before + 1;
        const size_t end = std::min(text.find_first_of(ends, begin), text.size());
        text.replace(begin, end - begin, words[rng.Below(words.size())]);
      }
    }
  }
  return text;
}

}  // namespace temper
