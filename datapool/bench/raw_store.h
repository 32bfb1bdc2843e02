// RocksDB alone, as the floor of `temper bench pool`: batches of records under numbered keys, not compressed, written to the log without
// waiting for the disk. RocksDB's own defaults, which are faster here than the pool's smaller buffers.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "common/status.h"

namespace temper::datapool::bench {

class RawStore {
 public:
  static Result<std::unique_ptr<RawStore>> Open(const std::string& path);
  virtual ~RawStore() = default;
  // One atomic batch.
  virtual Status Write(const std::vector<const std::string*>& records) = 0;
};
std::string RocksVersion();

}  // namespace temper::datapool::bench
