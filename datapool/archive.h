// Records that have left the store: RUN/archive/step-NNNNNNNN.records, one file a commit, written whole and synced before the store lets
// go of them. docs/formats/pool.md has the bytes; each record verifies by itself.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "common/file.h"
#include "common/status.h"
#include "datapool/types.h"

namespace temper::datapool {

// `records` in their stored form. Replaces a file of the same step.
Status WriteArchive(const std::string& dir, int64_t step, const std::vector<std::pair<AttemptId, std::string>>& records);

// Where the archived records of a run lie. Thread-compatible.
class Archive {
 public:
  // No folder: an empty one. kDataLoss: a file is cut short or is none of ours.
  static Result<Archive> Open(const std::string& dir);
  const std::map<AttemptId, std::pair<std::string, std::pair<int64_t, int64_t>>>& records() const { return records_; }
  // The trajectory. kNotFound; kDataLoss: it does not verify.
  Result<std::string> Read(const AttemptId& id) const;

 private:
  std::map<AttemptId, std::pair<std::string, std::pair<int64_t, int64_t>>> records_;  // file, offset, bytes
};

}  // namespace temper::datapool
