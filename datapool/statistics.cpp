#include "datapool/statistics.h"

#include <algorithm>

#include "common/json.h"

namespace temper::datapool {
Statistics::Statistics(const PoolConfig& config, std::vector<int64_t> task_counts) {
  for (size_t i = 0; i < task_counts.size(); ++i) counts_[SourceNames(config)[i]] = task_counts[i];
}

// Once, when nothing of the group runs any more: it was leased, or buried.
void Statistics::Complete(OpenGroup& group) {
  if (group.counted || group.ended.size() < 2) return;
  group.counted = true;
  ++complete_;
  const auto [low, high] = std::minmax_element(group.ended.begin(), group.ended.end());
  if (high->first - low->first > kEqualRewards) return;
  ++zero_signal_;
  ++tasks_[group.task].zero_signal;
}

void Statistics::Add(const LedgerLine& l) {
  auto it = groups_.end();
  if (l.kind == LedgerLine::Kind::kAdmit && l.group && l.task) {
    OpenGroup group;
    auto count = counts_.find(l.source);
    group.task = {l.source, count != counts_.end() && count->second > 0 ? *l.task % count->second : *l.task};
    TaskFacts& task = tasks_[group.task];
    ++task.groups;
    task.last_version = l.version_admitted.value_or(-1);
    groups_[*l.group] = std::move(group);
    return;
  }
  if (l.group && (it = groups_.find(*l.group)) == groups_.end()) return;
  switch (l.kind) {
    case LedgerLine::Kind::kIssue:
      if (l.group && l.rollout) it->second.issued[*l.rollout] = l.t;
      return;
    case LedgerLine::Kind::kOutcome: {
      if (!l.group || !l.rollout) return;
      OpenGroup& group = it->second;
      auto issued = group.issued.find(*l.rollout);
      if (issued == group.issued.end()) return;
      const double took = std::max(0.0, l.t - issued->second);
      group.issued.erase(issued);
      const bool aborted = l.outcome == "aborted";
      // What our own parts stopped says nothing about how long rollouts take.
      if (!aborted || l.reason == "extra" || l.reason == "deadline") {
        drawn_s_ += took;
        ++drawn_;
      }
      if (aborted) return;
      TaskFacts& task = tasks_[group.task];
      if (!l.reward) {
        ++task.unrewarded;
        return;
      }
      group.ended.emplace_back(*l.reward, took);
      task.reward_min = task.rewarded == 0 ? *l.reward : std::min(task.reward_min, *l.reward);
      task.reward_max = task.rewarded == 0 ? *l.reward : std::max(task.reward_max, *l.reward);
      ++task.rewarded;
      task.reward_sum += *l.reward;
      return;
    }
    case LedgerLine::Kind::kLease:
      for (int64_t member : l.groups) {
        if (auto leased = groups_.find(member); leased != groups_.end()) Complete(leased->second);
      }
      return;
    case LedgerLine::Kind::kConsume: {
      if (!l.group || !l.step) return;
      OpenGroup& group = it->second;
      consumed_[*l.group] = *l.step;
      if (std::exchange(group.trained, true)) return;
      ++tasks_[group.task].trained;
      for (const auto& [reward, seconds] : group.ended) trained_s_ += seconds;
      trained_ += static_cast<int64_t>(group.ended.size());
      return;
    }
    case LedgerLine::Kind::kTombstone:
      if (!l.group) return;
      if (l.reason == "zero_signal") Complete(it->second);
      ++tasks_[it->second.task].buried;
      groups_.erase(it);
      return;
    case LedgerLine::Kind::kRollback:
      for (auto c = consumed_.begin(); c != consumed_.end();) {
        if (!l.step || c->second <= *l.step) {
          ++c;
          continue;
        }
        // Not trained, until it is again; it may yet be buried.
        if (auto back = groups_.find(c->first); back != groups_.end()) {
          OpenGroup& group = back->second;
          group.trained = false;
          --tasks_[group.task].trained;
          for (const auto& [reward, seconds] : group.ended) trained_s_ -= seconds;
          trained_ -= static_cast<int64_t>(group.ended.size());
        }
        c = consumed_.erase(c);
      }
      return;
    case LedgerLine::Kind::kCommit:
      for (auto c = consumed_.begin(); c != consumed_.end();) {
        if (l.step && c->second <= *l.step) {
          groups_.erase(c->first);
          c = consumed_.erase(c);
        } else {
          ++c;
        }
      }
      return;
    default: return;
  }
}

double Statistics::length_bias() const {
  if (trained_ == 0 || drawn_ == 0 || drawn_s_ <= 0) return 1;
  return (trained_s_ / static_cast<double>(trained_)) / (drawn_s_ / static_cast<double>(drawn_));
}

std::vector<std::string> ListTasks(const Statistics& statistics) {
  std::vector<std::pair<std::pair<std::string, int64_t>, TaskFacts>> tasks(statistics.tasks().begin(), statistics.tasks().end());
  std::stable_sort(tasks.begin(), tasks.end(), [](const auto& a, const auto& b) { return a.second.reward_mean() < b.second.reward_mean(); });
  std::vector<std::string> out;
  for (const auto& [id, t] : tasks) {
    JsonWriter w;
    w.BeginObject().Key("source").String(id.first).Key("task").Int(id.second).Key("groups").Int(t.groups).Key("trained").Int(t.trained);
    w.Key("zero_signal").Int(t.zero_signal).Key("buried").Int(t.buried).Key("rewarded").Int(t.rewarded).Key("unrewarded").Int(t.unrewarded);
    if (t.rewarded > 0) w.Key("reward_mean").Double(t.reward_mean()).Key("reward_min").Double(t.reward_min).Key("reward_max").Double(t.reward_max);
    w.Key("last_version").Int(t.last_version).EndObject();
    out.push_back(w.Take());
  }
  return out;
}

}  // namespace temper::datapool
