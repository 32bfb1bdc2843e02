// `temper pool sim` without its files: the window machine driven by a script, or by a generated world, in virtual time. Pure.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"
#include "datapool/format.h"
#include "datapool/window.h"

namespace temper::datapool {

using LineSink = std::function<void(const std::string& line)>;

// Runs events (one a line, blank lines skipped) against a pool. Every decision, an error in the place of each bad line, and
// the summary go to `sink`. Returns the number of bad lines. A pool crash drops the machine and rebuilds it from its store form.
int64_t RunScript(const PoolConfig& config, const std::vector<std::string_view>& events, const LineSink& sink);

// One run of a generated world (docs/pool_sim.md 6).
struct WorldReport {
  std::string policy;
  int64_t S = 0;
  PoolPlan plan;
  int64_t updates = 0;      // fewer than asked: nothing could move any more
  double time = 0;          // of the last update
  double trainer_idle = 0;  // share of the time between asking and being granted
  double staleness_mean = 0;
  int64_t staleness_max = 0;
  int64_t bypass_max = 0;    // younger groups of its source taken before a group
  std::vector<std::pair<std::string, int64_t>> tombstoned;
  double head_wait_max = 0;  // the longest time one group was its source's head
  double length_bias = 0;    // mean latency of the trained rollouts over the mean latency drawn
  std::vector<int64_t> staleness_by_batch;  // largest of each batch, for the picture
  std::vector<double> idle_by_batch;        // seconds between asking and being granted
};

// A recorded rollout: what a `ledger` latency replays in order of issue.
struct RecordedRollout {
  double latency_s = 0;
  bool failed = false;
  std::optional<double> reward;
  std::string source;
};

// `recorded` is for latency dist `ledger` (not empty then); of several sources each has its own rollouts, and one that has none has all. `event` sees every event of the world in order, `decision` every
// decision; either may be null.
Result<WorldReport> RunWorld(const PoolConfig& config, const World& world, const std::vector<RecordedRollout>& recorded,
                             const std::function<void(const TimedEvent&)>& event, const std::function<void(const Decision&)>& decision);

// The attempts of a ledger in order of issue, those that were aborted left out.
Result<std::vector<RecordedRollout>> ReadRecorded(std::string_view ledger);

// What a run's own ledger says of windows it did not have: its rollouts' times in order of issue, its trainer's time a step.
struct Advice {
  World world;                       // as measured
  int64_t steps = 0;                 // leases whose update was seen
  std::vector<WorldReport> reports;  // S of 0 to 3 and the run's own, each strict, 0.3, 0.5 and greedy
  size_t own = 0;                    // the one that is nearest to what the run has: its S, its W or the next wider one tried
  size_t best = 0;                   // the least bound among those within kAdviceSlack of the highest throughput
};
constexpr double kAdviceSlack = 0.05;

// `updates`: of each world tried. kInvalidArgument: the ledger has no finished rollout or no trained step.
Result<Advice> Advise(const PoolConfig& config, std::string_view ledger, int64_t updates);
// The last line of `pool sim --ledger` (docs/pool_sim.md 6).
std::string PrintAdvice(const Advice& advice);

std::string PrintReport(const WorldReport& report);
// A table of all reports, for people.
std::string PrintTable(const std::vector<WorldReport>& reports);

}  // namespace temper::datapool
