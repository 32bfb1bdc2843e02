// What a ledger says about tasks and rollouts, counted as it grows: how each task goes, and how much the cutting of slow rollouts
// favours short ones. Pure; the pool feeds it line by line, `temper pool tasks` a whole file.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "datapool/types.h"
#include "datapool/window.h"

namespace temper::datapool {

// One task's groups so far. A rollback of the trainer takes back what was trained, not what was sampled.
struct TaskFacts {
  int64_t groups = 0;       // admitted
  int64_t trained = 0;      // groups consumed, but for those that a rollback gave back
  int64_t zero_signal = 0;  // groups complete with equal rewards
  int64_t buried = 0;       // groups tombstoned, those with zero_signal included
  int64_t rewarded = 0;     // rollouts that ended with a reward
  int64_t unrewarded = 0;   // infrastructure failures, and ends without a reward; aborted ones are in neither
  double reward_sum = 0, reward_min = 0, reward_max = 0;
  int64_t last_version = -1;  // at its last admission

  double reward_mean() const { return rewarded > 0 ? reward_sum / static_cast<double>(rewarded) : 0; }
};

class Statistics {
 public:
  // `task_counts` as in ServerOptions: a task's number is taken modulo its source's count. Empty: as in the ledger.
  Statistics(const PoolConfig& config, std::vector<int64_t> task_counts);

  // Lines in order. A line that contradicts the earlier ones is left out (the balance says so elsewhere).
  void Add(const LedgerLine& line);

  // By source, then number.
  const std::map<std::pair<std::string, int64_t>, TaskFacts>& tasks() const { return tasks_; }
  int64_t zero_signal_groups() const { return zero_signal_; }
  int64_t complete_groups() const { return complete_; }

  // Mean time of the rollouts of trained groups over the mean time of all that ended by themselves or were cut as spares (`extra`) or at
  // a deadline; 1 while nothing was trained. A cut rollout counts with the time it had, less than it would have taken: the true value is
  // at most this. Below 1: what is trained is shorter than what was drawn.
  double length_bias() const;

 private:
  struct OpenGroup {
    std::pair<std::string, int64_t> task;
    std::map<int32_t, double> issued;             // of running rollouts: when
    std::vector<std::pair<double, double>> ended;  // with a reward: reward, seconds
    bool counted = false;                          // among the complete ones
    bool trained = false;
  };
  void Complete(OpenGroup& group);

  std::map<std::string, int64_t> counts_;
  std::map<std::pair<std::string, int64_t>, TaskFacts> tasks_;
  std::map<int64_t, OpenGroup> groups_;   // in flight, or consumed and not yet committed
  std::map<int64_t, int64_t> consumed_;   // group -> step, not yet committed
  int64_t zero_signal_ = 0, complete_ = 0;
  double drawn_s_ = 0, trained_s_ = 0;
  int64_t drawn_ = 0, trained_ = 0;
};

// One JSON object a task, the least mean reward first: {"source","task","groups","trained","zero_signal","buried","rewarded","unrewarded",
// "reward_mean","reward_min","reward_max","last_version"}; reward fields only where there is a reward.
std::vector<std::string> ListTasks(const Statistics& statistics);

}  // namespace temper::datapool
