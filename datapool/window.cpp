#include "datapool/window.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <map>
#include <set>

#include "datapool/pack.h"
#include "fmt/format.h"

namespace temper::datapool {
namespace {

// Rewards this close are equal (docs/algorithm_block.md 3.2).
constexpr char kStoreTag[] = "temper-window-1";

enum class RolloutState : uint8_t { kRunning, kValid, kOver, kSuspended };
enum class GroupState : uint8_t { kRunning, kReady, kTaken };
enum class BatchState : uint8_t { kLeased, kUpdated, kReturned };
enum class Closed : uint8_t { kNo, kJobEnd, kStopped };

struct Rollout {
  RolloutState state = RolloutState::kRunning;
  int32_t attempt = 1;
  int32_t infra_failures = 0;
  double reward = 0;
};

struct Group {
  int64_t number = 0;
  int32_t source = 0;
  int64_t pos = 0;
  int64_t version = 0;  // at admission
  double admitted_t = 0;
  std::optional<int64_t> from;  // the group whose deadline put this one's task back
  int64_t task = 0;
  GroupState state = GroupState::kRunning;
  bool late = false;  // its deadline has fired under `wait`
  std::vector<Rollout> rollouts;

  int32_t Count(RolloutState s) const {
    return static_cast<int32_t>(std::count_if(rollouts.begin(), rollouts.end(), [&](const Rollout& r) { return r.state == s; }));
  }
};

struct BatchRecord {
  BatchState state = BatchState::kLeased;
  std::vector<int64_t> groups;  // as taken
};

struct Requeued {
  int64_t from = 0;
  int64_t task = 0;
};

struct Source {
  std::string name;
  int64_t quota = 0, slots = 0;
  std::optional<int64_t> window;
  std::optional<int64_t> tasks;

  int64_t next_pos = 0;
  int64_t next_task = 0;
  int64_t held = 0;  // slots in use
  std::deque<Requeued> requeued;
  std::set<int64_t> untaken;  // living groups in no batch; the first is the head
  std::set<int64_t> ready;    // of those, the ready ones
  int64_t filled = 0;         // groups of this source in the batch being filled

  bool TaskLeft() const { return !requeued.empty() || !tasks || next_task < *tasks; }
};

void Count(std::vector<std::pair<std::string, int64_t>>& counts, const std::string& name) {
  for (auto& [key, n] : counts) {
    if (key == name) {
      ++n;
      return;
    }
  }
  counts.emplace_back(name, 1);
}

}  // namespace

struct Window::State {
  PoolConfig config;
  PoolPlan plan;
  std::vector<Source> sources;

  bool started = false;
  Closed closed = Closed::kNo;
  double now = 0;
  int64_t version = 0;
  int64_t committed = 0;
  int64_t next_group = 0;
  // In flight, or updated and not yet committed (a trainer crash brings those back).
  std::map<int64_t, Group> groups;
  std::set<std::pair<double, int64_t>> deadlines;  // of running groups, (time, group)
  std::vector<int64_t> filling;                    // the batch being filled, as taken
  int64_t next_batch = 0;                          // its number
  std::map<int64_t, BatchRecord> batches;          // leased and not yet committed
  bool asking = false;
  std::string trainer;  // who asked last

  WindowTotals totals;

  // Valid only inside a step.
  StepOutput* out = nullptr;

  explicit State(PoolConfig c) : config(std::move(c)), plan(Plan(config)) {
    for (size_t i = 0; i < plan.quota.size(); ++i) {
      Source s;
      s.name = SourceNames(config)[i];
      s.quota = plan.quota[i];
      s.slots = plan.slots[i];
      s.window = plan.window[i];
      s.tasks = config.tasks;
      if (!config.sources.empty() && config.sources[i].tasks) s.tasks = config.sources[i].tasks;
      sources.push_back(std::move(s));
    }
    for (const char* outcome : {"scored", "policy_failure", "truncated", "infra_failure", "aborted"}) {
      totals.outcomes.emplace_back(outcome, 0);
    }
  }

  // ---- the two streams

  Decision Make(Decision::Kind kind) const {
    Decision d;
    d.kind = kind;
    d.t = now;
    return d;
  }
  void Emit(Decision d) {
    for (const Source& s : sources) {
      d.head.push_back(s.untaken.empty() ? std::nullopt : std::optional<int64_t>(*s.untaken.begin()));
    }
    d.ledger[0] = totals.admitted;
    d.ledger[1] = totals.consumed;
    d.ledger[2] = totals.tombstoned;
    d.ledger[3] = totals.admitted - totals.consumed - totals.tombstoned;
    out->decisions.push_back(std::move(d));
  }
  LedgerLine& Note(LedgerLine::Kind kind) {
    LedgerLine line;
    line.kind = kind;
    line.t = now;
    out->ledger.push_back(std::move(line));
    return out->ledger.back();
  }

  // ---- rollouts

  void Issue(const Group& g, int32_t rollout) {
    ++totals.issued;
    LedgerLine& line = Note(LedgerLine::Kind::kIssue);
    line.group = g.number;
    line.rollout = rollout;
    line.attempt = g.rollouts[static_cast<size_t>(rollout)].attempt;
  }

  void Outcome(const Group& g, int32_t rollout, const std::string& outcome, const std::string& reason, std::optional<double> reward) {
    Count(totals.outcomes, outcome);
    if (outcome == "infra_failure") {
      ++totals.failed;
    } else if (outcome == "aborted") {
      ++totals.aborted;
    } else {
      ++totals.finished;
    }
    LedgerLine& line = Note(LedgerLine::Kind::kOutcome);
    line.group = g.number;
    line.rollout = rollout;
    line.attempt = g.rollouts[static_cast<size_t>(rollout)].attempt;
    line.outcome = outcome;
    line.reason = reason;
    line.reward = reward;
  }

  // Ends what still runs of a group.
  void Cut(Group& g, const std::string& reason) {
    for (size_t r = 0; r < g.rollouts.size(); ++r) {
      if (g.rollouts[r].state == RolloutState::kRunning) {
        Outcome(g, static_cast<int32_t>(r), "aborted", reason, std::nullopt);
      }
      if (g.rollouts[r].state == RolloutState::kRunning || g.rollouts[r].state == RolloutState::kSuspended) {
        g.rollouts[r].state = RolloutState::kOver;
      }
    }
  }

  void Reissue(Group& g, int32_t rollout) {
    Rollout& r = g.rollouts[static_cast<size_t>(rollout)];
    r.state = RolloutState::kRunning;
    ++r.attempt;
    Issue(g, rollout);
    Decision d = Make(Decision::Kind::kReissue);
    d.group = g.number;
    d.rollout = rollout;
    d.attempt = r.attempt;
    d.version = version;
    Emit(std::move(d));
  }

  // ---- the ends of a group

  void DropDeadline(const Group& g) {
    if (config.deadline_s) deadlines.erase({g.admitted_t + *config.deadline_s, g.number});
  }

  void Bury(Group& g, const std::string& reason) {
    Cut(g, reason);
    DropDeadline(g);
    Source& s = sources[static_cast<size_t>(g.source)];
    s.untaken.erase(g.number);
    s.ready.erase(g.number);
    --s.held;
    ++totals.tombstoned;
    Count(totals.tombstones, reason);
    LedgerLine& line = Note(LedgerLine::Kind::kTombstone);
    line.group = g.number;
    line.reason = reason;
  }

  void Tombstone(int64_t number, const std::string& reason) {
    Bury(groups.at(number), reason);
    groups.erase(number);
    Decision d = Make(Decision::Kind::kTombstone);
    d.group = number;
    d.reason = reason;
    Emit(std::move(d));
  }

  // The group has what it needs; `cut` is the reason with which the rest is aborted.
  void Complete(Group& g, const std::string& cut) {
    if (config.refill) {
      double low = 0, high = 0;
      bool first = true;
      for (const Rollout& r : g.rollouts) {
        if (r.state != RolloutState::kValid) continue;
        low = first ? r.reward : std::min(low, r.reward);
        high = first ? r.reward : std::max(high, r.reward);
        first = false;
      }
      if (high - low <= kEqualRewards) {
        Tombstone(g.number, "zero_signal");
        return;
      }
    }
    Cut(g, cut);
    DropDeadline(g);
    g.state = GroupState::kReady;
    sources[static_cast<size_t>(g.source)].ready.insert(g.number);
    Decision d = Make(Decision::Kind::kReady);
    d.group = g.number;
    d.valid = g.Count(RolloutState::kValid);
    d.partial = *d.valid < config.G;
    Emit(std::move(d));
  }

  // After a rollout of a running group ended.
  void Judge(Group& g) {
    int32_t valid = g.Count(RolloutState::kValid);
    if (valid >= config.G) {
      Complete(g, "extra");
    } else if (g.Count(RolloutState::kRunning) + g.Count(RolloutState::kSuspended) == 0) {
      if (valid >= config.MinValid()) {
        Complete(g, "");
      } else {
        Tombstone(g.number, "too_few_valid");
      }
    }
  }

  void Expire(int64_t number) {
    Group& g = groups.at(number);
    if (config.on_deadline == OnDeadline::kWait) {
      DropDeadline(g);
      g.late = true;
      Decision d = Make(Decision::Kind::kLate);
      d.group = number;
      Emit(std::move(d));
    } else if (g.Count(RolloutState::kValid) >= config.MinValid()) {
      Complete(g, "deadline");
    } else if (config.on_deadline == OnDeadline::kRequeue && !g.from) {
      Bury(g, "requeued");
      sources[static_cast<size_t>(g.source)].requeued.push_back({number, g.task});
      groups.erase(number);
      Decision d = Make(Decision::Kind::kRequeue);
      d.group = number;
      Emit(std::move(d));
    } else {
      Tombstone(number, "deadline");
    }
  }

  // ---- settling

  std::optional<int64_t> Pick(const Source& s) const {
    if (s.ready.empty()) return std::nullopt;
    int64_t oldest = *s.ready.begin();
    if (s.window && groups.at(oldest).pos >= groups.at(*s.untaken.begin()).pos + *s.window) return std::nullopt;
    return oldest;
  }

  void TakeGroup(Source& s, Group& g) {
    s.untaken.erase(g.number);
    s.ready.erase(g.number);
    ++s.filled;
    g.state = GroupState::kTaken;
    filling.push_back(g.number);
    Decision d = Make(Decision::Kind::kTake);
    d.group = g.number;
    d.batch = next_batch;
    d.stale = next_batch - g.version;
    Emit(std::move(d));
  }

  void LeaseBatch(int64_t number, bool again) {
    BatchRecord& batch = batches[number];
    batch.state = BatchState::kLeased;
    asking = false;
    Decision d = Make(Decision::Kind::kLease);
    d.batch = number;
    d.groups = batch.groups;
    d.again = again;
    for (int64_t g : batch.groups) {
      int64_t stale = number - groups.at(g).version;
      d.staleness.push_back(stale);
      totals.staleness_max = std::max(totals.staleness_max, stale);
    }
    if (!again) ++totals.batches;
    LedgerLine& line = Note(LedgerLine::Kind::kLease);
    line.step = number + 1;
    line.groups = batch.groups;
    line.who = trainer;
    Emit(std::move(d));
  }

  // One round of taking; returns whether anything moved, and the batch that was leased, if any.
  bool TakeRound(std::optional<int64_t>& leased) {
    bool moved = false;
    for (auto& [number, batch] : batches) {
      if (batch.state != BatchState::kReturned) continue;
      LeaseBatch(number, true);
      leased = number;
      return true;
    }
    for (Source& s : sources) {
      while (s.filled < s.quota) {
        std::optional<int64_t> pick = Pick(s);
        if (!pick) break;
        moved = true;
        Group& g = groups.at(*pick);
        if (config.max_staleness && next_batch - g.version > *config.max_staleness) {
          Tombstone(*pick, "stale");
        } else {
          TakeGroup(s, g);
        }
      }
    }
    if (static_cast<int64_t>(filling.size()) == config.P) {
      leased = next_batch++;
      batches[*leased].groups = std::move(filling);
      filling.clear();
      for (Source& s : sources) s.filled = 0;
      LeaseBatch(*leased, false);
    }
    return moved;
  }

  bool DropStale(int64_t leased) {
    std::vector<int64_t> stale;
    for (const auto& [number, g] : groups) {
      if (g.state != GroupState::kTaken && leased + 1 - g.version > *config.max_staleness) stale.push_back(number);
    }
    for (int64_t number : stale) Tombstone(number, "stale");
    return !stale.empty();
  }

  void Admit(int32_t source) {
    Source& s = sources[static_cast<size_t>(source)];
    Group g;
    g.number = next_group++;
    g.source = source;
    g.pos = s.next_pos++;
    g.version = version;
    g.admitted_t = now;
    if (!s.requeued.empty()) {
      g.from = s.requeued.front().from;
      g.task = s.requeued.front().task;
      s.requeued.pop_front();
    } else {
      g.task = s.next_task++;
    }
    g.rollouts.resize(static_cast<size_t>(config.G + config.extra));
    ++s.held;
    s.untaken.insert(g.number);
    if (config.deadline_s) deadlines.insert({now + *config.deadline_s, g.number});
    ++totals.admitted;

    LedgerLine& line = Note(LedgerLine::Kind::kAdmit);
    line.group = g.number;
    line.source = s.name;
    line.task = g.task;
    line.version_admitted = version;
    line.from = g.from;
    Decision d = Make(Decision::Kind::kAdmit);
    d.group = g.number;
    d.source = s.name;
    d.pos = g.pos;
    d.version = version;
    d.from = g.from;
    Group& kept = groups.emplace(g.number, std::move(g)).first->second;
    for (size_t r = 0; r < kept.rollouts.size(); ++r) Issue(kept, static_cast<int32_t>(r));
    Emit(std::move(d));
  }

  void Settle() {
    if (closed != Closed::kNo) return;
    for (bool moved = true; moved;) {
      moved = false;
      std::optional<int64_t> leased;
      if (asking) moved = TakeRound(leased);
      if (leased && config.max_staleness) moved |= DropStale(*leased);
      for (size_t i = 0; i < sources.size(); ++i) {
        while (sources[i].held < sources[i].slots && sources[i].TaskLeft()) {
          Admit(static_cast<int32_t>(i));
          moved = true;
        }
      }
    }
  }

  void Hold() {
    if (!asking || closed != Closed::kNo) return;
    Decision d = Make(Decision::Kind::kHold);
    d.batch = next_batch;
    d.have = static_cast<int64_t>(filling.size());
    d.need = config.P - *d.have;
    for (const Source& s : sources) {
      if (s.filled == s.quota || !s.window || s.untaken.empty()) continue;
      int64_t end = groups.at(*s.untaken.begin()).pos + *s.window;
      for (int64_t g : s.ready) {
        if (groups.at(g).pos >= end) d.groups.push_back(g);
      }
    }
    std::sort(d.groups.begin(), d.groups.end());
    Emit(std::move(d));
  }

  // ---- events

  bool Due(double t, bool inclusive) const {
    if (closed != Closed::kNo || deadlines.empty()) return false;
    return inclusive ? deadlines.begin()->first <= t : deadlines.begin()->first < t;
  }

  void FireDeadlines(double t, bool inclusive, int64_t at_most = 0) {
    for (int64_t fired = 0; Due(t, inclusive) && (at_most == 0 || fired < at_most); ++fired) {
      auto [due, group] = *deadlines.begin();
      now = std::max(now, due);
      Expire(group);
      Settle();
      Hold();
    }
  }

  // The running rollout an event speaks of; null: over already.
  Rollout* Target(const Event& e) {
    auto it = groups.find(e.group);
    if (it == groups.end() || it->second.state != GroupState::kRunning) return nullptr;
    Rollout& r = it->second.rollouts[static_cast<size_t>(e.rollout)];
    if (r.state != RolloutState::kRunning) return nullptr;
    if (e.attempt != 0 && e.attempt != r.attempt) return nullptr;
    return &r;
  }

  void Ended(const Event& e) {
    Rollout* r = Target(e);
    if (r == nullptr) {
      Decision d = Make(Decision::Kind::kIgnore);
      d.group = e.group;
      d.rollout = e.rollout;
      Emit(std::move(d));
      return;
    }
    Group& g = groups.at(e.group);
    if (e.kind == Event::Kind::kFinish) {
      Outcome(g, e.rollout, e.outcome, e.reason, e.reward);
      r->state = e.reward ? RolloutState::kValid : RolloutState::kOver;
      if (e.reward) r->reward = *e.reward;
      Judge(g);
      return;
    }
    Outcome(g, e.rollout, e.outcome, e.reason, std::nullopt);
    r->state = RolloutState::kOver;
    // A rollout that one of our own parts lost is always played again; infrastructure gets its retries.
    if (e.outcome == "aborted" || r->infra_failures++ < config.retries) {
      Reissue(g, e.rollout);
    } else {
      Judge(g);
    }
  }

  void Refuse(const char* event, const char* reason, std::optional<int64_t> batch, std::optional<int64_t> step) {
    Decision d = Make(Decision::Kind::kRefuse);
    d.event = event;
    d.reason = reason;
    d.batch = batch;
    d.step = step;
    Emit(std::move(d));
  }

  void Ask(const Event& e) {
    int64_t out_now = 0;
    for (const auto& [number, batch] : batches) out_now += batch.state == BatchState::kLeased;
    if (closed != Closed::kNo) return Refuse("lease", "closed", {}, {});
    if (asking) return Refuse("lease", "open", {}, {});
    if (out_now >= config.max_leases) return Refuse("lease", "outstanding", {}, {});
    asking = true;
    trainer = e.reason;
    Note(LedgerLine::Kind::kAsk).who = trainer;
  }

  void Update(int64_t number) {
    if (number < version) {
      Decision d = Make(Decision::Kind::kIgnore);
      d.batch = number;
      return Emit(std::move(d));
    }
    if (closed != Closed::kNo) return Refuse("update", "closed", number, {});
    auto it = batches.find(number);
    if (it == batches.end() || it->second.state != BatchState::kLeased) return Refuse("update", "no_lease", number, {});
    if (number > version) return Refuse("update", "order", number, {});
    it->second.state = BatchState::kUpdated;
    ++version;
    for (int64_t member : it->second.groups) {
      const Group& g = groups.at(member);
      --sources[static_cast<size_t>(g.source)].held;
      ++totals.consumed;
      LedgerLine& line = Note(LedgerLine::Kind::kConsume);
      line.group = member;
      line.step = number + 1;
      line.version_admitted = g.version;
      line.version_consumed = number;
    }
    Decision d = Make(Decision::Kind::kUpdate);
    d.batch = number;
    d.version = version;
    d.groups = it->second.groups;
    Emit(std::move(d));
  }

  void Commit(int64_t step) {
    if (step <= committed) {
      Decision d = Make(Decision::Kind::kIgnore);
      d.step = step;
      return Emit(std::move(d));
    }
    if (step > version) return Refuse("commit", "order", {}, step);
    committed = step;
    while (!batches.empty() && batches.begin()->first < step) {
      for (int64_t member : batches.begin()->second.groups) groups.erase(member);
      batches.erase(batches.begin());
    }
    Note(LedgerLine::Kind::kCommit).step = step;
    Decision d = Make(Decision::Kind::kCommit);
    d.step = step;
    Emit(std::move(d));
  }

  void RecoverTrainer() {
    Note(LedgerLine::Kind::kRecover).who = "trainer";
    Decision d = Make(Decision::Kind::kRecover);
    d.who = "trainer";
    for (auto& [number, batch] : batches) {
      if (batch.state == BatchState::kUpdated) {
        for (int64_t member : batch.groups) ++sources[static_cast<size_t>(groups.at(member).source)].held;
        totals.consumed -= static_cast<int64_t>(batch.groups.size());
      }
      batch.state = BatchState::kReturned;
      d.groups.push_back(number);
    }
    if (version > committed) Note(LedgerLine::Kind::kRollback).step = committed;
    version = committed;
    asking = false;
    Emit(std::move(d));
  }

  void RecoverPool() {
    Note(LedgerLine::Kind::kRecover).who = "pool";
    Decision d = Make(Decision::Kind::kRecover);
    d.who = "pool";
    Emit(std::move(d));
  }

  void Close(const std::string& reason) {
    if (closed != Closed::kNo) return;
    // An open request stays: a close that ends no rollout leaves no line in the ledger, so it must change nothing else either.
    std::vector<int64_t> running;
    for (const auto& [number, g] : groups) {
      if (g.state == GroupState::kRunning) running.push_back(number);
    }
    for (int64_t number : running) {
      if (reason == "job_end") {
        Tombstone(number, "job_end");
        continue;
      }
      Group& g = groups.at(number);
      for (size_t r = 0; r < g.rollouts.size(); ++r) {
        if (g.rollouts[r].state != RolloutState::kRunning) continue;
        Outcome(g, static_cast<int32_t>(r), "aborted", "stopped", std::nullopt);
        g.rollouts[r].state = RolloutState::kSuspended;
      }
    }
    closed = reason == "job_end" ? Closed::kJobEnd : Closed::kStopped;
  }

  void Reopen() {
    closed = Closed::kNo;
    Note(LedgerLine::Kind::kRecover).who = "job";
    Decision d = Make(Decision::Kind::kRecover);
    d.who = "job";
    Emit(std::move(d));
    for (auto& [number, g] : groups) {
      for (size_t r = 0; r < g.rollouts.size(); ++r) {
        if (g.rollouts[r].state == RolloutState::kSuspended) Reissue(g, static_cast<int32_t>(r));
      }
    }
  }

  // What is wrong with an event whatever the state, apart from the group's existence.
  Status Check(const Event& e) const {
    bool ended = e.kind == Event::Kind::kFinish || e.kind == Event::Kind::kFail;
    if (ended) {
      if (e.group < 0) return InvalidArgument(fmt::format("group: {} is negative", e.group));
      if (e.rollout < 0 || e.rollout >= config.G + config.extra) {
        return InvalidArgument(fmt::format("rollout: {} is out of range [0, {}]", e.rollout, config.G + config.extra - 1));
      }
    }
    if (e.kind == Event::Kind::kFinish) {
      if (e.outcome != "scored" && e.outcome != "policy_failure" && e.outcome != "truncated") {
        return InvalidArgument("outcome: '" + e.outcome + "' is not scored, policy_failure or truncated");
      }
      if (e.reward && !std::isfinite(*e.reward)) return InvalidArgument("reward: not a finite number");
    }
    if (e.kind == Event::Kind::kFail && e.outcome != "infra_failure" && e.outcome != "aborted") {
      return InvalidArgument("outcome: '" + e.outcome + "' is not infra_failure or aborted");
    }
    if (e.kind == Event::Kind::kUpdate && e.number < 0) return InvalidArgument(fmt::format("batch: {} is negative", e.number));
    if (e.kind == Event::Kind::kCommit && e.number < 0) return InvalidArgument(fmt::format("step: {} is negative", e.number));
    if (e.kind == Event::Kind::kClose && e.reason != "job_end" && e.reason != "stopped") {
      return InvalidArgument("reason: '" + e.reason + "' is not job_end or stopped");
    }
    if (e.kind == Event::Kind::kReopen && closed == Closed::kJobEnd) return FailedPrecondition("the job has ended");
    return Status::Ok();
  }

  void Dispatch(const Event& e) {
    switch (e.kind) {
      case Event::Kind::kFinish:
      case Event::Kind::kFail: return Ended(e);
      case Event::Kind::kLease: return Ask(e);
      case Event::Kind::kUpdate: return Update(e.number);
      case Event::Kind::kCommit: return Commit(e.number);
      case Event::Kind::kCrashPool: return RecoverPool();
      case Event::Kind::kCrashTrainer: return RecoverTrainer();
      case Event::Kind::kClose: return Close(e.reason);
      case Event::Kind::kReopen: return Reopen();
      case Event::Kind::kTick: return;
    }
  }

  // Derives the indexes from the groups (after a rebuild).
  void Index() {
    for (auto& [number, g] : groups) {
      if (g.state == GroupState::kTaken) continue;
      Source& s = sources[static_cast<size_t>(g.source)];
      s.untaken.insert(number);
      if (g.state == GroupState::kReady) s.ready.insert(number);
      if (g.state == GroupState::kRunning && config.deadline_s && !g.late) {
        deadlines.insert({g.admitted_t + *config.deadline_s, number});
      }
    }
    for (int64_t member : filling) ++sources[static_cast<size_t>(groups.at(member).source)].filled;
  }
};

Window::Window(PoolConfig config) : state_(std::make_unique<State>(std::move(config))) {}
Window::Window(const Window& other) : state_(std::make_unique<State>(*other.state_)) {}
Window& Window::operator=(const Window& other) {
  *state_ = *other.state_;
  return *this;
}
Window::Window(Window&&) noexcept = default;
Window& Window::operator=(Window&&) noexcept = default;
Window::~Window() = default;

StepOutput Window::Start(double now) {
  TEMPER_CHECK(!state_->started) << "a window starts once";
  StepOutput out;
  state_->started = true;
  state_->now = now;
  state_->out = &out;
  state_->Settle();
  state_->out = nullptr;
  return out;
}

bool Window::started() const { return state_->started; }

Result<StepOutput> Window::Apply(const Event& event, double now) {
  State& s = *state_;
  if (!s.started) return FailedPrecondition("the pool has not started");
  if (!std::isfinite(now)) return InvalidArgument("t: not a finite time");
  if (now < s.now) {
    return InvalidArgument(fmt::format("t: {} is before {}, and time never falls", now, s.now));
  }
  RETURN_IF_ERROR(s.Check(event));

  StepOutput out;
  const bool inclusive = event.kind == Event::Kind::kTick;
  const bool of_group = event.kind == Event::Kind::kFinish || event.kind == Event::Kind::kFail;
  if (of_group && event.group >= s.next_group) {
    // Only a deadline that fires first can still admit it; what fired is undone if it does not.
    const Status unknown = InvalidArgument(fmt::format("group: {} has not been admitted", event.group));
    if (!s.Due(now, inclusive)) return unknown;
    State before = s;
    s.out = &out;
    s.FireDeadlines(now, inclusive);
    if (event.group >= s.next_group) {
      s = std::move(before);
      return unknown;
    }
  }
  s.out = &out;
  s.FireDeadlines(now, inclusive, event.kind == Event::Kind::kTick ? event.number : 0);
  s.now = now;
  s.Dispatch(event);
  s.Settle();
  if (event.kind != Event::Kind::kCrashPool && event.kind != Event::Kind::kCrashTrainer) s.Hold();
  s.out = nullptr;
  return out;
}

std::optional<double> Window::NextDeadline() const {
  if (state_->closed != Closed::kNo || state_->deadlines.empty()) return std::nullopt;
  return state_->deadlines.begin()->first;
}

std::string Window::Store() const {
  const State& s = *state_;
  Packer w;
  w.Text(kStoreTag);
  w.Int(s.started);
  w.Int(static_cast<int64_t>(s.closed));
  w.Real(s.now);
  w.Int(s.version);
  w.Int(s.committed);
  w.Int(s.next_group);
  w.Int(s.next_batch);
  w.Int(s.asking);
  w.Text(s.trainer);
  w.Ints(s.filling);

  w.Int(static_cast<int64_t>(s.sources.size()));
  for (const Source& source : s.sources) {
    w.Text(source.name);
    w.Int(source.next_pos);
    w.Int(source.next_task);
    w.Int(source.held);
    w.Int(static_cast<int64_t>(source.requeued.size()));
    for (const Requeued& r : source.requeued) {
      w.Int(r.from);
      w.Int(r.task);
    }
  }

  w.Int(static_cast<int64_t>(s.groups.size()));
  for (const auto& [number, g] : s.groups) {
    w.Int(number);
    w.Int(g.source);
    w.Int(g.pos);
    w.Int(g.version);
    w.Real(g.admitted_t);
    w.Int(g.from.value_or(-1));
    w.Int(g.task);
    w.Int(static_cast<int64_t>(g.state));
    w.Int(g.late);
    w.Int(static_cast<int64_t>(g.rollouts.size()));
    for (const Rollout& r : g.rollouts) {
      w.Int(static_cast<int64_t>(r.state));
      w.Int(r.attempt);
      w.Int(r.infra_failures);
      w.Real(r.reward);
    }
  }

  w.Int(static_cast<int64_t>(s.batches.size()));
  for (const auto& [number, batch] : s.batches) {
    w.Int(number);
    w.Int(static_cast<int64_t>(batch.state));
    w.Ints(batch.groups);
  }

  const WindowTotals& t = s.totals;
  for (int64_t v : {t.admitted, t.consumed, t.tombstoned, t.issued, t.finished, t.failed, t.aborted, t.batches, t.staleness_max}) w.Int(v);
  for (const auto* counts : {&t.tombstones, &t.outcomes}) {
    w.Int(static_cast<int64_t>(counts->size()));
    for (const auto& [name, n] : *counts) {
      w.Text(name);
      w.Int(n);
    }
  }
  return w.Take();
}

Result<Window> Window::Rebuild(const PoolConfig& config, const std::string& stored) {
  const Status broken = DataLoss("the pool's stored state is damaged or of another configuration");
  Window window(config);
  State& s = *window.state_;
  Unpacker r(stored);
  if (r.Text() != kStoreTag) return broken;
  s.started = r.Int() != 0;
  s.closed = r.Choice<Closed>(3);
  s.now = r.Real();
  s.version = r.Int();
  s.committed = r.Int();
  s.next_group = r.Int();
  s.next_batch = r.Int();
  s.asking = r.Int() != 0;
  s.trainer = r.Text();
  s.filling = r.Ints();

  if (r.Count(1) != s.sources.size()) return broken;
  for (Source& source : s.sources) {
    if (r.Text() != source.name) return broken;
    source.next_pos = r.Int();
    source.next_task = r.Int();
    source.held = r.Int();
    for (size_t n = r.Count(16); n > 0; --n) {
      Requeued q;
      q.from = r.Int();
      q.task = r.Int();
      source.requeued.push_back(q);
    }
  }

  for (size_t n = r.Count(8 * 10); n > 0 && r.ok(); --n) {
    Group g;
    g.number = r.Int();
    g.source = r.Choice<int32_t>(static_cast<int>(s.sources.size()));
    g.pos = r.Int();
    g.version = r.Int();
    g.admitted_t = r.Real();
    int64_t from = r.Int();
    if (from >= 0) g.from = from;
    g.task = r.Int();
    g.state = r.Choice<GroupState>(3);
    g.late = r.Int() != 0;
    g.rollouts.resize(r.Count(8 * 4));
    if (g.rollouts.size() != static_cast<size_t>(config.G + config.extra)) return broken;
    for (Rollout& rollout : g.rollouts) {
      rollout.state = r.Choice<RolloutState>(4);
      rollout.attempt = static_cast<int32_t>(r.Int());
      rollout.infra_failures = static_cast<int32_t>(r.Int());
      rollout.reward = r.Real();
    }
    s.groups.emplace(g.number, std::move(g));
  }

  for (size_t n = r.Count(8 * 3); n > 0 && r.ok(); --n) {
    int64_t number = r.Int();
    BatchRecord& batch = s.batches[number];
    batch.state = r.Choice<BatchState>(3);
    batch.groups = r.Ints();
    for (int64_t member : batch.groups) {
      if (!s.groups.count(member)) return broken;
    }
  }
  for (int64_t member : s.filling) {
    if (!s.groups.count(member)) return broken;
  }

  WindowTotals& t = s.totals;
  for (int64_t* v : {&t.admitted, &t.consumed, &t.tombstoned, &t.issued, &t.finished, &t.failed, &t.aborted, &t.batches, &t.staleness_max}) {
    *v = r.Int();
  }
  for (auto* counts : {&t.tombstones, &t.outcomes}) {
    counts->clear();
    for (size_t n = r.Count(16); n > 0; --n) {
      std::string name = r.Text();
      counts->emplace_back(std::move(name), r.Int());
    }
  }
  if (!r.AtEnd()) return broken;
  s.Index();
  return window;
}

double Window::now() const { return state_->now; }
int64_t Window::version() const { return state_->version; }
int64_t Window::committed() const { return state_->committed; }
bool Window::asking() const { return state_->asking; }
bool Window::closed() const { return state_->closed != Closed::kNo; }

std::vector<int64_t> Window::Outstanding() const {
  std::vector<int64_t> out;
  for (const auto& [number, batch] : state_->batches) {
    if (batch.state == BatchState::kLeased) out.push_back(number);
  }
  return out;
}

bool Window::exhausted() const {
  const State& s = *state_;
  for (const auto& [number, batch] : s.batches) {
    if (batch.state == BatchState::kReturned) return false;
  }
  for (const Source& source : s.sources) {
    if (!source.tasks) continue;
    int64_t left = *source.tasks - source.next_task + static_cast<int64_t>(source.requeued.size() + source.untaken.size());
    if (left < source.quota - source.filled) return true;
  }
  return false;
}

std::optional<int32_t> Window::RunningAttempt(int64_t group, int32_t rollout) const {
  auto it = state_->groups.find(group);
  if (it == state_->groups.end() || rollout < 0 || static_cast<size_t>(rollout) >= it->second.rollouts.size()) return std::nullopt;
  const Rollout& r = it->second.rollouts[static_cast<size_t>(rollout)];
  if (it->second.state != GroupState::kRunning || r.state != RolloutState::kRunning) return std::nullopt;
  return r.attempt;
}

std::vector<OpenRollout> Window::Running() const {
  std::vector<OpenRollout> out;
  for (const auto& [number, g] : state_->groups) {
    if (g.state != GroupState::kRunning) continue;
    for (size_t r = 0; r < g.rollouts.size(); ++r) {
      if (g.rollouts[r].state != RolloutState::kRunning) continue;
      OpenRollout open;
      open.id = {number, static_cast<int32_t>(r), g.rollouts[r].attempt};
      open.task = g.task;
      open.source = g.source;
      if (state_->config.deadline_s && !g.late) open.deadline = g.admitted_t + *state_->config.deadline_s;
      out.push_back(open);
    }
  }
  return out;
}

std::vector<BatchMember> Window::Batch(int64_t batch) const {
  std::vector<BatchMember> out;
  auto it = state_->batches.find(batch);
  if (it == state_->batches.end()) return out;
  for (int64_t number : it->second.groups) {
    const Group& g = state_->groups.at(number);
    BatchMember m;
    m.group = number;
    m.version_admitted = g.version;
    m.task = g.task;
    m.source = g.source;
    for (size_t r = 0; r < g.rollouts.size(); ++r) {
      if (g.rollouts[r].state != RolloutState::kValid) continue;
      m.rollouts.push_back(static_cast<int32_t>(r));
      m.attempts.push_back(g.rollouts[r].attempt);
    }
    out.push_back(std::move(m));
  }
  return out;
}

const PoolConfig& Window::config() const { return state_->config; }
const PoolPlan& Window::plan() const { return state_->plan; }

WindowTotals Window::totals() const {
  WindowTotals t = state_->totals;
  t.in_flight = t.admitted - t.consumed - t.tombstoned;
  t.running = t.issued - t.finished - t.failed - t.aborted;
  return t;
}

std::vector<SourceShape> Window::Shape() const {
  std::vector<SourceShape> out;
  for (const Source& s : state_->sources) {
    SourceShape shape;
    shape.source = s.name;
    shape.window = s.window;
    shape.quota = s.quota;
    shape.filled = s.filled;
    if (!s.untaken.empty()) {
      const Group& head = state_->groups.at(*s.untaken.begin());
      shape.head = head.number;
      shape.head_since = head.admitted_t;
      shape.head_running = head.Count(RolloutState::kRunning);
      shape.positions.assign(static_cast<size_t>(s.next_pos - head.pos), '.');
      for (int64_t number : s.untaken) {
        const Group& g = state_->groups.at(number);
        const bool ready = g.state == GroupState::kReady;
        shape.running += g.Count(RolloutState::kRunning);
        shape.positions[static_cast<size_t>(g.pos - head.pos)] = ready ? '#' : g.late ? '!' : 'o';
        if (ready) ++(!s.window || g.pos < head.pos + *s.window ? shape.ready_inside : shape.ready_outside);
      }
    }
    out.push_back(std::move(shape));
  }
  return out;
}

const char* Name(Policy policy) {
  switch (policy) {
    case Policy::kAnchored: return "anchored";
    case Policy::kStrict: return "strict";
    case Policy::kGreedy: return "greedy";
    case Policy::kAreal: return "areal";
  }
  return "";
}

const char* Name(Decision::Kind kind) {
  static constexpr const char* kNames[] = {"admit", "ready", "reissue", "late", "tombstone", "requeue", "take",
                                           "lease", "hold", "update", "commit", "refuse", "ignore", "recover"};
  return kNames[static_cast<int>(kind)];
}

const char* Name(LedgerLine::Kind kind) {
  static constexpr const char* kNames[] = {"admit", "issue", "outcome", "ask", "lease", "consume", "commit", "rollback", "tombstone", "recover",
                                           "quarantine", "retire", "space"};
  return kNames[static_cast<int>(kind)];
}

}  // namespace temper::datapool
