// What should wake a person: a run that samples and learns nothing, or waits for ever. Pure; fed with the ledger's lines.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "datapool/window.h"

namespace temper::datapool {

// An alarm without a limit is off.
struct AlarmLimits {
  std::optional<double> infra_share = 0.5;          // of the last kAlarmAttempts attempts: infrastructure failures
  std::optional<double> zero_signal_share = 0.95;   // of the last kAlarmGroups complete groups: equal rewards
  std::optional<double> head_wait_s = 1800;         // the head of a source still runs, so long after its admission, pool clock
  bool reward_collapse = true;                      // the last kAlarmRewards rewards are all equal, and earlier ones were not
  std::optional<double> nothing_scored_s = 1800;    // no rollout has ended with a reward for so long, pool clock
  bool pause = false;                               // hand out nothing more while one is raised
};
constexpr size_t kAlarmAttempts = 64, kAlarmGroups = 32, kAlarmRewards = 128;

class Alarms {
 public:
  explicit Alarms(AlarmLimits limits) : limits_(limits) {}

  // Lines in order. A resumed job begins anew: `recover job` after an orderly stop, attempts `aborted(supervisor)` after another.
  void Add(const LedgerLine& line);
  // Names of what is raised at `now`, with the facts: "infra_share: 40 of the last 64 attempts …". Each source is judged by itself, so that
  // one that is broken does not hide behind the others; of several the name is "infra_share.SOURCE".
  std::vector<std::string> Raised(double now, const std::vector<SourceShape>& shapes) const;
  bool pause() const { return limits_.pause; }

 private:
  void BeginAnew(double t);

  struct Source {
    std::deque<bool> infra;        // of the last attempts
    std::deque<bool> silent;       // of the last complete groups
    std::deque<double> rewards;    // the last ones
    std::optional<double> first_reward;
    bool rewards_differed = false;  // ever
    std::optional<double> last_scored;  // or the first admission
  };
  struct Group {
    std::string source = "default";
    std::vector<double> rewards;
  };

  AlarmLimits limits_;
  double began_ = -1e300;  // of a resumed job
  std::map<std::string, Source> sources_;
  std::map<int64_t, Group> open_;  // in flight
};

}  // namespace temper::datapool
