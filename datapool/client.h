// What the rest of Temper sees of the data pool. Callers hold a DataPool& and do not know whether the pool lives in this
// process (LocalDataPool in datapool/service.h) or behind gRPC (ConnectDataPool).
//
// Thread-safe. Calls marked (waits) block up to `wait_ms`; all others are short. Every call may be repeated after a lost
// answer. Errors: kUnavailable the pool cannot be reached or is stopping (try again), kFailedPrecondition a call out of
// order (a stale incarnation, a batch never leased), kInvalidArgument a malformed field.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/status.h"
#include "datapool/types.h"

namespace temper::datapool {

class DataPool {
 public:
  virtual ~DataPool() = default;

  // ---- agents. `incarnation` names the process; a new one takes over everything its predecessor had open.
  // Returns how many rollouts were issued again.
  virtual Result<int64_t> AttachAgents(const std::string& incarnation) = 0;
  // (waits) At most `max` issues; returns at once when there are any, or cancellations, or the pool is closed. Nothing is
  // handed out while the pool is paused. kFailedPrecondition: another incarnation has taken over.
  virtual Result<TakeIssuesReply> TakeIssues(const std::string& incarnation, int32_t max, uint32_t wait_ms) = 0;
  // Returns when the trajectory and the outcome are durable. True: counted; false: ignored (a repeat, or over already).
  virtual Result<bool> Finish(const std::string& incarnation, const FinishedAttempt& attempt) = 0;

  // ---- trainer
  // "This process serves checkpoint `step`": commit `step`, then roll back what came after. Returns the batches that come
  // back. The first call of a job starts admission. kFailedPrecondition: a later step has been committed.
  virtual Result<std::vector<int64_t>> AttachTrainer(const std::string& incarnation, int64_t step) = 0;
  // (waits) The next batch, which must be number `batch`. Asking twice is asking once; asking again for a batch that is
  // leased already answers it again, so a lost answer costs nothing.
  virtual Result<LeaseReply> Lease(const std::string& incarnation, int64_t batch, uint32_t wait_ms) = 0;
  // Batch trained AND its weights served by every worker. Durable (fsync) when it returns. A repeat is OK.
  virtual Status Update(const std::string& incarnation, int64_t batch) = 0;
  // The checkpoint after `step` updates is durable. Durable (fsync) when it returns. A repeat is OK.
  virtual Status Commit(int64_t step) = 0;
  // Around an evaluation: nothing is handed out, and the deadlines' clock stands still. Stays as it was set, over a restart of
  // the pool and of the trainer (which says what it wants before it attaches); a resumed job begins with it off.
  virtual Status Pause(bool on) = 0;

  // ---- job
  virtual Status Close(CloseReason reason) = 0;
  // Counters by name; see docs/pool.md.
  virtual Result<std::map<std::string, double>> Metrics() = 0;
};

// A client of the pool behind `address` (an RpcChannel address such as "unix-abstract:NAME"). Connects lazily.
std::unique_ptr<DataPool> ConnectDataPool(const std::string& address);

}  // namespace temper::datapool
