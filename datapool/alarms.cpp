#include "datapool/alarms.h"

#include <algorithm>
#include <cmath>

#include "fmt/format.h"

namespace temper::datapool {
namespace {

template <typename T>
void Push(std::deque<T>& last, T value, size_t keep) {
  last.push_back(value);
  if (last.size() > keep) last.pop_front();
}

bool AllEqual(const auto& rewards) {
  const auto [low, high] = std::minmax_element(rewards.begin(), rewards.end());
  return *high - *low <= kEqualRewards;
}

}  // namespace

void Alarms::Add(const LedgerLine& l) {
  switch (l.kind) {
    case LedgerLine::Kind::kAdmit:
      // The clock runs through a warm-up, in which nothing could be scored.
      if (!last_scored_) last_scored_ = l.t;
      return;
    case LedgerLine::Kind::kOutcome:
      if (l.outcome == "aborted" && l.reason == "supervisor") BeginAnew(l.t);
      if (l.outcome == "aborted" || !l.group) return;
      Push(infra_, l.outcome == "infra_failure", kAlarmAttempts);
      if (!l.reward) return;
      last_scored_ = l.t;
      rewards_differed_ |= first_reward_ && std::abs(*l.reward - *first_reward_) > kEqualRewards;
      if (!first_reward_) first_reward_ = *l.reward;
      Push(rewards_, *l.reward, kAlarmRewards);
      open_[*l.group].push_back(*l.reward);
      return;
    case LedgerLine::Kind::kConsume:
    case LedgerLine::Kind::kTombstone: {
      if (!l.group) return;
      auto it = open_.find(*l.group);
      if (it == open_.end()) return;
      const bool complete = l.kind == LedgerLine::Kind::kConsume || l.reason == "zero_signal";
      if (complete && it->second.size() > 1) Push(silent_, AllEqual(it->second), kAlarmGroups);
      open_.erase(it);
      return;
    }
    case LedgerLine::Kind::kRecover:
      if (l.who == "job") BeginAnew(l.t);
      return;
    default: return;
  }
}

void Alarms::BeginAnew(double t) {
  infra_.clear();
  silent_.clear();
  rewards_.clear();
  last_scored_ = t;
}

std::vector<std::string> Alarms::Raised(double now, const std::vector<SourceShape>& shapes) const {
  std::vector<std::string> out;
  auto share = [&](const char* name, const std::optional<double>& limit, const std::deque<bool>& last, size_t whole, const char* of) {
    if (!limit || last.size() < whole) return;
    const auto count = std::count(last.begin(), last.end(), true);
    if (static_cast<double>(count) > *limit * static_cast<double>(last.size())) out.push_back(fmt::format("{}: {} of the last {} {}", name, count, last.size(), of));
  };
  share("infra_share", limits_.infra_share, infra_, kAlarmAttempts, "attempts were infrastructure failures");
  share("zero_signal_share", limits_.zero_signal_share, silent_, kAlarmGroups, "groups had equal rewards");
  bool waiting = false;
  for (const SourceShape& s : shapes) {
    waiting |= s.head.has_value();
    if (limits_.head_wait_s && s.head && s.head_running > 0 && now - s.head_since > *limits_.head_wait_s) {
      out.push_back(fmt::format("head_wait: group {} of {} runs for {:.0f} s and is the head of the window", *s.head, s.source, now - s.head_since));
    }
  }
  if (limits_.reward_collapse && rewards_differed_ && rewards_.size() == kAlarmRewards && AllEqual(rewards_)) {
    out.push_back(fmt::format("reward_collapse: the last {} rewards are all {:g}", rewards_.size(), rewards_.back()));
  }
  if (limits_.nothing_scored_s && waiting && last_scored_ && now - *last_scored_ > *limits_.nothing_scored_s) {
    out.push_back(fmt::format("nothing_scored: no rollout ended with a reward for {:.0f} s", now - *last_scored_));
  }
  return out;
}

}  // namespace temper::datapool
