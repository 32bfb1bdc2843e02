// The keys of the pool's RocksDB, shared by the writer and the reader beside it. Big-endian numbers, so that keys sort by them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "datapool/types.h"

namespace temper::datapool {

inline constexpr char kStateKey[] = "s";

inline void PutBig(std::string& out, uint64_t v, int bytes) {
  for (int i = bytes - 1; i >= 0; --i) out.push_back(static_cast<char>(v >> (8 * i)));
}
inline uint64_t GetBig(std::string_view in) {
  uint64_t v = 0;
  for (unsigned char c : in) v = (v << 8) | c;
  return v;
}

inline std::string LedgerKey(int64_t seq) {
  std::string key = "l";
  PutBig(key, static_cast<uint64_t>(seq), 8);
  return key;
}
inline std::string TrajectoryKey(const AttemptId& id) {
  std::string key = "t";
  PutBig(key, static_cast<uint64_t>(id.group), 8);
  PutBig(key, static_cast<uint32_t>(id.rollout), 4);
  PutBig(key, static_cast<uint32_t>(id.attempt), 4);
  return key;
}
inline std::optional<AttemptId> ParseTrajectoryKey(std::string_view key) {
  if (key.size() != 17 || key[0] != 't') return std::nullopt;
  return AttemptId{static_cast<int64_t>(GetBig(key.substr(1, 8))), static_cast<int32_t>(GetBig(key.substr(9, 4))),
                   static_cast<int32_t>(GetBig(key.substr(13, 4)))};
}

}  // namespace temper::datapool
