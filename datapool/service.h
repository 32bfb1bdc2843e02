// The data pool itself: the window machine, its clock, its store and its ledger, driven by calls.
//
// One state thread owns everything. Calls are put into a bounded queue and wait; the thread takes what is there, decides,
// makes all of it durable in one write, appends the ledger's lines, and only then answers. Long polls try again whenever
// something has changed. A write that fails ends the process: the state in memory is ahead of the disk then, and a restart is
// the recovery.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/env.h"
#include "common/metrics.h"
#include "common/status.h"
#include "datapool/alarms.h"
#include "datapool/client.h"
#include "datapool/segment.h"
#include "datapool/store.h"
#include "datapool/types.h"
#include "datapool/window.h"

namespace temper::datapool {

struct LocalPoolOptions {
  PoolConfig config;                 // valid
  std::vector<int64_t> task_counts;  // see ServerOptions
  std::string job_incarnation;
  std::string ledger_path;           // "": no file (the lines stay in the store)
  AlarmLimits alarms;
  RetentionConfig retention;
  std::string archive_dir;           // where retired records go under Consumed::kArchive
  // A write finds the store damaged: told why, before the process ends; on the thread that writes.
  std::function<void(const std::string&)> on_damage;
};

class LocalDataPool final : public DataPool {
 public:
  // Recovers what the store holds: repairs the ledger file, notes the restart. `metrics` and what `env` refers to outlive it.
  static Result<std::unique_ptr<LocalDataPool>> Open(LocalPoolOptions options, std::unique_ptr<Store> store, temper::Metrics& metrics, Env env);
  ~LocalDataPool() override;  // stops

  // Waiting calls end with kUnavailable; then the state thread ends. Nothing of the job is closed.
  void Stop();

  Result<int64_t> AttachAgents(const std::string& incarnation) override;
  Result<TakeIssuesReply> TakeIssues(const std::string& incarnation, int32_t max, uint32_t wait_ms) override;
  Result<bool> Finish(const std::string& incarnation, const FinishedAttempt& attempt) override;
  Result<std::vector<int64_t>> AttachTrainer(const std::string& incarnation, int64_t step) override;
  Result<LeaseReply> Lease(const std::string& incarnation, int64_t batch, uint32_t wait_ms) override;
  Status Update(const std::string& incarnation, int64_t batch) override;
  Status Commit(int64_t step) override;
  Status Pause(bool on) override;
  Status Close(CloseReason reason) override;
  Result<std::map<std::string, double>> Metrics() override;

  // Several at once, made durable together: one answer each.
  std::vector<Result<bool>> FinishMany(const std::string& incarnation, std::span<const FinishedAttempt> attempts);

  // ---- the same calls in the pieces that cross the wire one by one
  struct Taken {
    TakeIssuesReply reply;
    int64_t serial = 0;  // of the last answer with content
  };
  // `received`: the serial of the last answer that arrived; when it is behind, that answer is given again.
  Result<Taken> TakeIssuesAfter(const std::string& incarnation, int32_t max, uint32_t wait_ms, int64_t received);
  // A lease without the trajectories, but with where they lie in shared memory. A member whose stored record does not verify is
  // quarantined, with a line in the ledger, and is in neither: the group goes out without it. The memory is made once a batch, however
  // often it is asked for, and goes with Received, the batch's update, or another trainer.
  struct Leased {
    LeaseReply reply;
    SegmentHandle segment;                           // of a reply that is ready
    std::vector<std::vector<MemberHandle>> members;  // by group and rollout of the reply
  };
  Result<Leased> LeaseHandles(const std::string& incarnation, int64_t batch, uint32_t wait_ms);
  void Received(int64_t batch);

 private:
  // Reads the records of a leased batch into a new segment.
  Status Fill(int64_t batch, Leased& leased, std::unique_ptr<Segment>& segment);
  struct Impl;
  explicit LocalDataPool(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace temper::datapool
