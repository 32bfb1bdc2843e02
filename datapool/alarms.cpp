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
    case LedgerLine::Kind::kAdmit: {
      if (!l.group) return;
      Group& group = open_[*l.group];
      if (!l.source.empty()) group.source = l.source;
      // The clock runs through a warm-up, in which nothing could be scored.
      Source& source = sources_[group.source];
      if (!source.last_scored) source.last_scored = l.t;
      return;
    }
    case LedgerLine::Kind::kOutcome: {
      if (l.outcome == "aborted" && l.reason == "supervisor") BeginAnew(l.t);
      if (l.outcome == "aborted" || !l.group) return;
      Group& group = open_[*l.group];
      Source& source = sources_[group.source];
      Push(source.infra, l.outcome == "infra_failure", kAlarmAttempts);
      if (!l.reward) return;
      source.last_scored = l.t;
      source.rewards_differed |= source.first_reward && std::abs(*l.reward - *source.first_reward) > kEqualRewards;
      if (!source.first_reward) source.first_reward = *l.reward;
      Push(source.rewards, *l.reward, kAlarmRewards);
      group.rewards.push_back(*l.reward);
      return;
    }
    case LedgerLine::Kind::kConsume:
    case LedgerLine::Kind::kTombstone: {
      if (!l.group) return;
      auto it = open_.find(*l.group);
      if (it == open_.end()) return;
      const bool complete = l.kind == LedgerLine::Kind::kConsume || l.reason == "zero_signal";
      if (complete && it->second.rewards.size() > 1) Push(sources_[it->second.source].silent, AllEqual(it->second.rewards), kAlarmGroups);
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
  began_ = t;
  for (auto& [name, source] : sources_) {
    source.infra.clear();
    source.silent.clear();
    source.rewards.clear();
    source.last_scored = t;
  }
}

std::vector<std::string> Alarms::Raised(double now, const std::vector<SourceShape>& shapes) const {
  std::vector<std::string> out;
  for (const SourceShape& s : shapes) {
    const auto it = sources_.find(s.source);
    const Source source = it == sources_.end() ? Source() : it->second;
    auto raise = [&](const char* name, const std::string& what) { out.push_back(name + (shapes.size() > 1 ? "." + s.source : "") + ": " + what); };
    auto share = [&](const char* name, const std::optional<double>& limit, const std::deque<bool>& last, size_t whole, const char* of) {
      if (!limit || last.size() < whole) return;
      const auto count = std::count(last.begin(), last.end(), true);
      if (static_cast<double>(count) > *limit * static_cast<double>(last.size())) raise(name, fmt::format("{} of the last {} {}", count, last.size(), of));
    };
    share("infra_share", limits_.infra_share, source.infra, kAlarmAttempts, "attempts were infrastructure failures");
    share("zero_signal_share", limits_.zero_signal_share, source.silent, kAlarmGroups, "groups had equal rewards");
    const double head_since = std::max(s.head_since, began_);
    if (limits_.head_wait_s && s.head && s.head_running > 0 && now - head_since > *limits_.head_wait_s) {
      raise("head_wait", fmt::format("group {} of {} runs for {:.0f} s and is the head of the window", *s.head, s.source, now - head_since));
    }
    if (limits_.reward_collapse && source.rewards_differed && source.rewards.size() == kAlarmRewards && AllEqual(source.rewards)) {
      raise("reward_collapse", fmt::format("the last {} rewards are all {:g}", source.rewards.size(), source.rewards.back()));
    }
    // Where nothing runs, nothing can be scored: the trainer is what is waited for.
    if (limits_.nothing_scored_s && s.running > 0 && source.last_scored && now - *source.last_scored > *limits_.nothing_scored_s) {
      raise("nothing_scored", fmt::format("no rollout ended with a reward for {:.0f} s", now - *source.last_scored));
    }
  }
  return out;
}

}  // namespace temper::datapool
