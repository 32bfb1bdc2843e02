// The pool role: LocalDataPool over RocksDB in RUN/pool and RUN/ledger.jsonl, behind gRPC (proto/temper/v1/pool.proto) on an
// inherited listening socket, with the Role service beside it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/env.h"
#include "common/metrics.h"
#include "common/status.h"
#include "datapool/alarms.h"
#include "datapool/client.h"
#include "datapool/retention.h"
#include "datapool/types.h"

namespace temper::datapool {

struct ServerOptions {
  std::string run;  // the run folder; must exist
  PoolConfig config;
  // How many tasks each source has (in the order of config.sources; one entry without sources): an issue's task is the
  // admission number modulo it, so a list is repeated. Empty: not wrapped.
  std::vector<int64_t> task_counts;
  // Names one `temper run`, not one process of this role: under a new one (--resume) every open rollout ends
  // aborted(supervisor) and is issued again, and nothing is handed out before the trainer has attached.
  std::string job_incarnation;
  AlarmLimits alarms;
  RetentionConfig retention;
  int listen_fd = -1;  // listening unix socket, taken over; -1: no gRPC (the pool is used in this process only)
  std::function<void(const std::string&)> on_stop;  // Role.Stop was called
  std::function<void(const std::string&)> on_damage;  // see LocalPoolOptions
};

class Server {
 public:
  explicit Server(ServerOptions options, Env env = Env::System());
  ~Server();  // stops
  // Opens or recovers the store, repairs the ledger, listens. kFailedPrecondition: RUN/pool is of another configuration.
  Status Start();
  // Ends waiting calls with kUnavailable, then the state thread, then the store. Closes nothing of the job: see DataPool::Close.
  void Stop();
  DataPool& pool();    // after Start
  Metrics& metrics();  // counters by name, docs/pool.md

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace temper::datapool
