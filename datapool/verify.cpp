#include "datapool/verify.h"

#include <algorithm>
#include <deque>

#include "common/json.h"
#include "fmt/format.h"

namespace temper::datapool {
namespace {

Status Wrong(std::string what) { return DataLoss(std::move(what)); }

// The event that caused a line which nothing before it explains.
Result<Event> CauseOf(const LedgerLine& l, const Window& window) {
  Event e;
  switch (l.kind) {
    case LedgerLine::Kind::kOutcome: {
      if (!l.group || !l.rollout || !l.attempt) return Wrong("group, rollout or attempt is missing");
      // With `zero_signal` a deadline ends a group whose valid rewards are equal.
      const bool cut = l.reason == "deadline" || l.reason == "requeued" || l.reason == "zero_signal";
      if (l.outcome == "aborted" && (l.reason == "stopped" || l.reason == "job_end")) {
        e.kind = Event::Kind::kClose;
        e.reason = l.reason;
        return e;
      }
      if (l.outcome == "aborted" && cut && window.NextDeadline() && *window.NextDeadline() <= l.t) {
        // A tick, of this deadline alone: what else is due at this very time may have been left to a later event.
        e.number = 1;
        return e;
      }
      e.kind = l.outcome == "infra_failure" || l.outcome == "aborted" ? Event::Kind::kFail : Event::Kind::kFinish;
      e.group = *l.group;
      e.rollout = *l.rollout;
      e.attempt = *l.attempt;
      e.outcome = l.outcome;
      e.reason = l.reason;
      e.reward = l.reward;
      return e;
    }
    case LedgerLine::Kind::kAsk:
      e.kind = Event::Kind::kLease;
      e.reason = l.who;
      return e;
    case LedgerLine::Kind::kConsume:
      if (!l.step) return Wrong("step is missing");
      e.kind = Event::Kind::kUpdate;
      e.number = *l.step - 1;
      return e;
    case LedgerLine::Kind::kCommit:
      if (!l.step) return Wrong("step is missing");
      e.kind = Event::Kind::kCommit;
      e.number = *l.step;
      return e;
    case LedgerLine::Kind::kRecover:
      if (l.who != "trainer" && l.who != "pool" && l.who != "job") return Wrong("who: '" + l.who + "' is nobody known");
      e.kind = l.who == "trainer" ? Event::Kind::kCrashTrainer : l.who == "pool" ? Event::Kind::kCrashPool : Event::Kind::kReopen;
      return e;
    default: return Wrong(fmt::format("nothing leads to this {}", Name(l.kind)));
  }
}

// The machine beside the ledger: what it would have written and the ledger has not shown yet.
class Replay {
 public:
  explicit Replay(const PoolConfig& config) : window_(config) {}

  Status Add(const LedgerLine& line) {
    // The pool's own, between two events.
    if (line.kind == LedgerLine::Kind::kQuarantine || line.kind == LedgerLine::Kind::kRetire || line.kind == LedgerLine::Kind::kSpace) return Status::Ok();
    if (!window_.started()) Expect(window_.Start(line.t));
    if (expected_.empty()) {
      ASSIGN_OR_RETURN(Event cause, CauseOf(line, window_));
      ASSIGN_OR_RETURN(StepOutput out, window_.Apply(cause, line.t));
      Expect(out);
      if (expected_.empty()) return Wrong(fmt::format("the core would not write this {}", Name(line.kind)));
    }
    if (!(expected_.front() == line)) {
      return Wrong("the core would write " + PrintLedger({0, expected_.front()}) + " (but for seq)");
    }
    expected_.pop_front();
    return Status::Ok();
  }
  Status Finish() const {
    if (expected_.empty()) return Status::Ok();
    return Wrong("the ledger ends inside an event; the core would go on with " + PrintLedger({0, expected_.front()}) + " (but for seq)");
  }

 private:
  void Expect(const StepOutput& out) { expected_.insert(expected_.end(), out.ledger.begin(), out.ledger.end()); }
  Window window_;
  std::deque<LedgerLine> expected_;
};

}  // namespace

Balance::Balance(const PoolConfig& config) : per_step_(config.P), rollouts_(config.G + config.extra) {
  const PoolPlan plan = Plan(config);
  for (size_t i = 0; i < plan.slots.size(); ++i) {
    Source& source = sources_[SourceNames(config)[i]];
    source.quota = plan.quota[i];
    source.slots = plan.slots[i];
  }
  for (const char* name : {"scored", "policy_failure", "truncated", "infra_failure", "aborted"}) outcomes_[name] = 0;
}

bool Balance::Running(int64_t group) const {
  auto it = running_.lower_bound({group, 0});
  return it != running_.end() && it->first == group;
}

void Balance::Forget(int64_t group) { attempts_.erase(attempts_.lower_bound({group, 0}), attempts_.lower_bound({group + 1, 0})); }

Status Balance::Add(const LedgerRecord& record) {
  if (next_seq_ >= 0 && record.seq != next_seq_) return Wrong(fmt::format("seq: {} where {} must follow", record.seq, next_seq_));
  if (next_seq_ < 0 && record.seq != 1) return Wrong(fmt::format("seq: begins with {} instead of 1", record.seq));
  next_seq_ = record.seq + 1;
  if (record.line.t < t_) return Wrong(fmt::format("t: {} is before {}", record.line.t, t_));
  t_ = record.line.t;
  RETURN_IF_ERROR(Line(record.line));
  // Everything of C and X was admitted, and C∩X is empty, by the checks of each line; what is left is the slots.
  for (auto& [name, source] : sources_) {
    if (source.in_flight() > source.slots + source.rolled_back) {
      return Wrong(fmt::format("{} groups of source {} in flight, but only {} slots{}", source.in_flight(), name, source.slots,
                               source.rolled_back ? fmt::format(" and {} groups rolled back", source.rolled_back) : ""));
    }
    source.rolled_back = std::min(source.rolled_back, std::max<int64_t>(0, source.in_flight() - source.slots));
  }
  return Status::Ok();
}

Status Balance::Line(const LedgerLine& l) {
  if (open_count_ > 0 && !(l.kind == LedgerLine::Kind::kConsume && l.step == open_step_)) RETURN_IF_ERROR(Finish());
  if (open_count_ == per_step_) open_count_ = 0;

  const int64_t group = l.group.value_or(-1);
  const bool of_group = l.kind == LedgerLine::Kind::kAdmit || l.kind == LedgerLine::Kind::kIssue || l.kind == LedgerLine::Kind::kOutcome ||
                        l.kind == LedgerLine::Kind::kConsume || l.kind == LedgerLine::Kind::kTombstone || l.kind == LedgerLine::Kind::kQuarantine;
  if (of_group && !l.group) return Wrong("group is missing");
  if (of_group && l.kind != LedgerLine::Kind::kAdmit && !admitted_.count(group)) return Wrong(fmt::format("group {} was never admitted", group));
  const bool over = consumed_.count(group) || dead_.count(group);

  switch (l.kind) {
    case LedgerLine::Kind::kAdmit:
      if (!l.version_admitted) return Wrong("version_admitted is missing");
      if (!sources_.count(l.source)) return Wrong("source: '" + l.source + "' is none of the pool's");
      if (!admitted_.emplace(group, Admission{*l.version_admitted, l.source}).second) return Wrong(fmt::format("group {} is admitted twice", group));
      if (*l.version_admitted != version_) return Wrong(fmt::format("version_admitted: {}, but version {} is served", *l.version_admitted, version_));
      ++sources_[l.source].admitted;
      return Status::Ok();

    case LedgerLine::Kind::kIssue: {
      if (!l.rollout || !l.attempt) return Wrong("rollout or attempt is missing");
      if (*l.rollout < 0 || *l.rollout >= rollouts_) return Wrong(fmt::format("rollout: {} is out of range", *l.rollout));
      if (over) return Wrong(fmt::format("group {} is over", group));
      int32_t& last = attempts_[{group, *l.rollout}];
      if (*l.attempt != last + 1) return Wrong(fmt::format("attempt: {} where {} must follow", *l.attempt, last + 1));
      last = *l.attempt;
      if (!running_.insert({group, *l.rollout}).second) return Wrong("issued while its last attempt runs");
      return Status::Ok();
    }

    case LedgerLine::Kind::kOutcome: {
      if (!l.rollout || !l.attempt) return Wrong("rollout or attempt is missing");
      auto known = outcomes_.find(l.outcome);
      if (known == outcomes_.end()) return Wrong("outcome: '" + l.outcome + "' is none of the five");
      auto issued = attempts_.find({group, *l.rollout});
      if (issued == attempts_.end() || issued->second != *l.attempt) return Wrong(fmt::format("attempt {} was not issued last", *l.attempt));
      if (!running_.erase({group, *l.rollout})) return Wrong("a second outcome of one attempt");
      ++known->second;
      return Status::Ok();
    }

    case LedgerLine::Kind::kAsk:
    case LedgerLine::Kind::kQuarantine:
    case LedgerLine::Kind::kSpace:
    case LedgerLine::Kind::kRecover: return Status::Ok();

    case LedgerLine::Kind::kRetire:
      for (int64_t member : l.groups) {
        const auto trained = consumed_.find(member);
        if (!dead_.count(member) && (trained == consumed_.end() || trained->second > committed_)) {
          return Wrong(fmt::format("group {} is retired, but no committed step has trained it and it is not buried", member));
        }
      }
      return Status::Ok();

    case LedgerLine::Kind::kLease: {
      if (!l.step) return Wrong("step is missing");
      if (static_cast<int64_t>(l.groups.size()) != per_step_) return Wrong(fmt::format("groups: {} of them instead of {}", l.groups.size(), per_step_));
      if (std::set<int64_t>(l.groups.begin(), l.groups.end()).size() != l.groups.size()) return Wrong("groups: one occurs twice");
      std::map<std::string, int64_t> shares;
      for (int64_t member : l.groups) {
        if (!admitted_.count(member) || consumed_.count(member) || dead_.count(member)) return Wrong(fmt::format("group {} is not in flight", member));
        if (Running(member)) return Wrong(fmt::format("group {} still runs", member));
        for (const auto& [step, groups] : leases_) {
          if (step != *l.step && std::count(groups.begin(), groups.end(), member)) return Wrong(fmt::format("group {} is leased in step {} too", member, step));
        }
        ++shares[admitted_.at(member).source];
      }
      for (const auto& [name, source] : sources_) {
        if (shares[name] != source.quota) return Wrong(fmt::format("step {} has {} groups of source {} instead of {}", *l.step, shares[name], name, source.quota));
      }
      auto [lease, fresh] = leases_.try_emplace(*l.step, l.groups);
      if (!fresh && lease->second != l.groups) return Wrong(fmt::format("step {} comes back with other members or in another order", *l.step));
      return Status::Ok();
    }

    case LedgerLine::Kind::kConsume: {
      if (!l.step || !l.version_admitted || !l.version_consumed) return Wrong("step, version_admitted or version_consumed is missing");
      if (dead_.count(group)) return Wrong(fmt::format("group {} is tombstoned", group));
      if (consumed_.count(group)) return Wrong(fmt::format("group {} is consumed already, in step {}", group, consumed_.at(group)));
      if (Running(group)) return Wrong(fmt::format("a rollout of group {} still runs", group));
      if (*l.version_consumed != *l.step - 1) return Wrong(fmt::format("version_consumed: {} in step {}", *l.version_consumed, *l.step));
      if (*l.version_admitted != admitted_.at(group).version) return Wrong(fmt::format("version_admitted: {}, but it was {}", *l.version_admitted, admitted_.at(group).version));
      if (open_count_ == 0 && *l.step != version_ + 1) return Wrong(fmt::format("step {} where {} must follow", *l.step, version_ + 1));
      auto lease = leases_.find(*l.step);
      if (lease == leases_.end() || !std::count(lease->second.begin(), lease->second.end(), group)) {
        return Wrong(fmt::format("group {} is not in the last lease of step {}", group, *l.step));
      }
      consumed_[group] = *l.step;
      Source& source = sources_[admitted_.at(group).source];
      ++source.consumed;
      open_step_ = *l.step;
      ++open_count_;
      if (open_count_ == per_step_) version_ = *l.step;
      source.staleness_max = std::max(source.staleness_max, *l.version_consumed - *l.version_admitted);
      staleness_max_ = std::max(staleness_max_, source.staleness_max);
      return Status::Ok();
    }

    case LedgerLine::Kind::kCommit:
      if (!l.step) return Wrong("step is missing");
      if (*l.step <= committed_ || *l.step > version_) return Wrong(fmt::format("step {} is not after {} and within {}", *l.step, committed_, version_));
      committed_ = *l.step;
      // Nothing of a group that is over for good is issued again; a long run need not remember its attempts.
      for (auto it = leases_.begin(); it != leases_.upper_bound(committed_); ++it) {
        for (int64_t member : it->second) Forget(member);
      }
      leases_.erase(leases_.begin(), leases_.upper_bound(committed_));
      return Status::Ok();

    case LedgerLine::Kind::kRollback:
      if (!l.step) return Wrong("step is missing");
      if (*l.step != committed_) return Wrong(fmt::format("step {}, but {} is committed", *l.step, committed_));
      for (auto it = consumed_.begin(); it != consumed_.end();) {
        if (it->second > *l.step) {
          Source& source = sources_[admitted_.at(it->first).source];
          --source.consumed;
          ++source.rolled_back;
          it = consumed_.erase(it);
        } else {
          ++it;
        }
      }
      version_ = *l.step;
      return Status::Ok();

    case LedgerLine::Kind::kTombstone:
      if (consumed_.count(group)) return Wrong(fmt::format("group {} is consumed", group));
      if (Running(group)) return Wrong(fmt::format("a rollout of group {} still runs", group));
      if (l.reason.empty()) return Wrong("reason is missing");
      if (!dead_.insert(group).second) return Wrong(fmt::format("group {} is tombstoned twice", group));
      ++tombstones_[l.reason];
      Forget(group);
      ++sources_[admitted_.at(group).source].tombstoned;
      return Status::Ok();
  }
  return Status::Ok();
}

Status Balance::Finish() const {
  if (open_count_ == 0 || open_count_ == per_step_) return Status::Ok();
  return Wrong(fmt::format("step {} has {} groups instead of {}", open_step_, open_count_, per_step_));
}

VerifyReport VerifyLedger(const PoolConfig& config, std::string_view ledger) {
  VerifyReport report;
  report.plan = Plan(config);
  Balance balance(config);
  Replay replay(config);
  auto complain = [](int64_t line, const Status& status, int64_t* at, std::string* error) {
    if (status.ok() || !error->empty()) return;
    *at = line;
    *error = status.message();
  };
  while (!ledger.empty()) {
    const size_t end = ledger.find('\n');
    if (end == std::string_view::npos) {
      report.torn = true;
      break;
    }
    const std::string_view text = ledger.substr(0, end);
    ledger.remove_prefix(end + 1);
    ++report.lines;
    Result<LedgerRecord> record = ParseLedger(text);
    const Status status = record.status();
    if (report.balance_error.empty()) {
      complain(report.lines, status.ok() ? balance.Add(*record) : status, &report.balance_line, &report.balance_error);
    }
    if (report.replay_error.empty()) {
      complain(report.lines, status.ok() ? replay.Add(record->line) : status, &report.replay_line, &report.replay_error);
    }
    if (!report.balance_error.empty() && !report.replay_error.empty()) break;
  }
  // A line that was being written when the pool died may be the middle of an event; its recovery completes the event.
  if (!report.torn) {
    complain(0, balance.Finish(), &report.balance_line, &report.balance_error);
    complain(0, replay.Finish(), &report.replay_line, &report.replay_error);
  }
  report.balanced = report.balance_error.empty();
  report.replayed = report.replay_error.empty();
  report.outcomes = balance.outcomes();
  report.tombstoned = balance.tombstones();
  report.sources = balance.sources();
  report.admitted = balance.admitted();
  report.consumed = balance.consumed();
  report.in_flight = balance.in_flight();
  report.running = balance.running();
  report.staleness_max = balance.staleness_max();
  return report;
}

std::string PrintVerify(const VerifyReport& r) {
  JsonWriter w;
  w.BeginObject().Key("balanced").Bool(r.balanced).Key("replayed").Bool(r.replayed).Key("lines").Int(r.lines).Key("torn").Bool(r.torn);
  w.Key("admitted").Int(r.admitted).Key("consumed").Int(r.consumed).Key("tombstoned").BeginObject();
  for (const auto& [reason, n] : r.tombstoned) w.Key(reason).Int(n);
  w.EndObject().Key("in_flight").Int(r.in_flight).Key("running").Int(r.running).Key("outcomes").BeginObject();
  for (const auto& [name, n] : r.outcomes) w.Key(name).Int(n);
  w.EndObject().Key("staleness_max").Int(r.staleness_max).Key("bound");
  r.plan.bound ? w.Int(*r.plan.bound) : w.Null();
  if (r.sources.size() > 1) {
    w.Key("sources").BeginObject();
    for (const auto& [name, source] : r.sources) {
      w.Key(name).BeginObject().Key("of_every_step").Int(source.quota).Key("admitted").Int(source.admitted).Key("consumed").Int(source.consumed);
      w.Key("tombstoned").Int(source.tombstoned).Key("in_flight").Int(source.in_flight()).Key("staleness_max").Int(source.staleness_max).EndObject();
    }
    w.EndObject();
  }
  w.Key("errors").BeginArray();
  auto error = [&](const char* kind, int64_t line, const std::string& what) {
    if (!what.empty()) w.BeginObject().Key("kind").String(kind).Key("line").Int(line).Key("message").String(what).EndObject();
  };
  error("balance", r.balance_line, r.balance_error);
  error("replay", r.replay_line, r.replay_error);
  w.EndArray().EndObject();
  return w.Take();
}

}  // namespace temper::datapool
