// Holds a ledger to its word (docs/pool_sim.md 7), in two independent ways: the balance by sets after every line, which knows
// nothing of the window machine; and the machine itself, fed the ledger's events, which must write the same lines. Pure.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/status.h"
#include "datapool/format.h"
#include "datapool/types.h"
#include "datapool/window.h"

namespace temper::datapool {

// The balance by sets. Feed every line in order; the first error is final.
class Balance {
 public:
  // Of one source of tasks.
  struct Source {
    int64_t quota = 0;  // groups of every step
    int64_t slots = 0;  // B
    int64_t admitted = 0, consumed = 0, tombstoned = 0;
    int64_t rolled_back = 0;  // groups that came back and may exceed the slots
    int64_t staleness_max = 0;
    int64_t in_flight() const { return admitted - consumed - tombstoned; }
  };
  explicit Balance(const PoolConfig& config);
  Status Add(const LedgerRecord& record);
  // What must hold at the end: no step was left half written.
  Status Finish() const;

  int64_t admitted() const { return static_cast<int64_t>(admitted_.size()); }
  int64_t consumed() const { return static_cast<int64_t>(consumed_.size()); }
  int64_t tombstoned() const { return static_cast<int64_t>(dead_.size()); }
  int64_t in_flight() const { return admitted() - consumed() - tombstoned(); }
  int64_t running() const { return static_cast<int64_t>(running_.size()); }
  int64_t staleness_max() const { return staleness_max_; }
  const std::map<std::string, Source>& sources() const { return sources_; }
  const std::map<std::string, int64_t>& outcomes() const { return outcomes_; }
  const std::map<std::string, int64_t>& tombstones() const { return tombstones_; }

 private:
  Status Line(const LedgerLine& line);
  bool Running(int64_t group) const;
  void Forget(int64_t group);  // its attempts

  const int64_t per_step_;
  const int32_t rollouts_;
  int64_t next_seq_ = -1;
  double t_ = 0;
  struct Admission {
    int64_t version = 0;
    std::string source;
  };
  std::map<std::string, Source> sources_;
  std::map<int64_t, Admission> admitted_;
  std::map<int64_t, int64_t> consumed_;   // group -> step
  std::set<int64_t> dead_;
  std::map<std::pair<int64_t, int32_t>, int32_t> attempts_;  // the last issued
  std::set<std::pair<int64_t, int32_t>> running_;
  std::map<int64_t, std::vector<int64_t>> leases_;  // step -> groups of its last lease
  int64_t version_ = 0, committed_ = 0;
  int64_t open_step_ = 0, open_count_ = 0;  // the step whose consumes are being written
  int64_t staleness_max_ = 0;
  std::map<std::string, int64_t> outcomes_, tombstones_;
};

struct VerifyReport {
  bool balanced = false;
  bool replayed = false;
  bool torn = false;  // the last line was cut short and left out
  int64_t lines = 0;
  // The first complaint of each kind: line number from 1 (0: the end), and what.
  int64_t balance_line = 0, replay_line = 0;
  std::string balance_error, replay_error;
  PoolPlan plan;
  std::map<std::string, int64_t> outcomes, tombstoned;
  std::map<std::string, Balance::Source> sources;
  int64_t admitted = 0, consumed = 0, in_flight = 0, running = 0, staleness_max = 0;

  bool ok() const { return balanced && replayed; }
};

VerifyReport VerifyLedger(const PoolConfig& config, std::string_view ledger);
std::string PrintVerify(const VerifyReport& report);

}  // namespace temper::datapool
