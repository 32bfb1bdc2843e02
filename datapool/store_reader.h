// Reads stored trajectories from a run folder: while the pool runs (a RocksDB secondary, so nothing of the pool's is locked
// or changed) or after the job.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/status.h"
#include "datapool/types.h"

namespace temper::datapool {

class StoreReader {
 public:
  // `run` is the run folder (its pool is RUN/pool). kNotFound: no pool there.
  static Result<std::unique_ptr<StoreReader>> Open(const std::string& run);
  virtual ~StoreReader() = default;

  // The serialised temper.v1.Trajectory of an attempt; without `attempt` the last one stored. kNotFound: none.
  // kDataLoss: what is stored does not verify.
  virtual Result<std::string> Read(int64_t group, int32_t rollout, std::optional<int32_t> attempt) = 0;
  // All attempts stored, ascending; `group` narrows it.
  virtual Result<std::vector<AttemptId>> List(std::optional<int64_t> group) = 0;
};

// "GROUP.ROLLOUT" or "GROUP.ROLLOUT.ATTEMPT"; attempt 0 = none given.
Result<AttemptId> ParseAttemptId(const std::string& text);

}  // namespace temper::datapool
