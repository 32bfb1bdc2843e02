// Reads committed goldens.
#pragma once

#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "text/json.h"

namespace temper::text {

inline std::string ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  TEMPER_CHECK(in.good()) << path;
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

inline std::string GoldenPath(const std::string& name) { return std::string(TEMPER_SOURCE_DIR) + "/tests/golden/text/" + name; }

// The values of a JSON Lines file.
inline std::vector<Value> ReadLines(const std::string& path) {
  std::vector<Value> out;
  std::istringstream in(ReadFile(path));
  for (std::string line; std::getline(in, line);) {
    if (!line.empty()) out.push_back(ParseJson(line).value());
  }
  return out;
}

inline std::vector<int32_t> Ids(const Value& list) {
  std::vector<int32_t> out;
  for (const Value& v : list.as_list()) out.push_back(static_cast<int32_t>(v.as_int()));
  return out;
}

}  // namespace temper::text
