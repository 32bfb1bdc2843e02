// RocksDB's errors as ours. Only for the .cpp files that include RocksDB.
#pragma once

#include <string>

#include "common/status.h"

namespace temper::datapool {

// `what`: the folder or the part, put before the message.
template <typename RocksStatus>
Status FromRocks(const RocksStatus& s, const std::string& what) {
  if (s.ok()) return Status::Ok();
  const std::string message = what + ": " + s.ToString();
  if (s.IsNotFound()) return NotFound(message);
  if (s.IsCorruption()) return DataLoss(message);
  if (s.IsNoSpace()) return ResourceExhausted(message);
  return Unavailable(message);
}

}  // namespace temper::datapool
