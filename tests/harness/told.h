// What a test tells its agent or verifier to do in one attempt: "G.R.A=WORD;…", where G, R and A (group, rollout, attempt) are
// numbers or `*`. The first rule that fits counts.
#pragma once

#include <array>
#include <cstdio>
#include <sstream>
#include <string>

namespace temper {

inline std::string Told(const std::string& rules, const std::array<int, 3>& attempt, const std::string& otherwise) {
  std::stringstream list(rules);
  for (std::string rule; std::getline(list, rule, ';');) {
    const size_t equals = rule.find('=');
    if (equals == std::string::npos) continue;
    std::stringstream parts(rule.substr(0, equals));
    bool fits = true;
    for (int number : attempt) {
      std::string part;
      std::getline(parts, part, '.');
      fits &= part == "*" || part == std::to_string(number);
    }
    if (fits) return rule.substr(equals + 1);
  }
  return otherwise;
}

}  // namespace temper
