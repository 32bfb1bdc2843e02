#include "datapool/sim.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <tuple>

#include "common/json.h"
#include "common/rng.h"
#include "common/strings.h"
#include "fmt/format.h"

namespace temper::datapool {
namespace {

constexpr double kPi = 3.14159265358979323846;
// A world in which groups die as fast as they are admitted would never end.
constexpr int64_t kEventsPerRollout = 1000;

Status RebuildFromStore(Window& window) {
  ASSIGN_OR_RETURN(window, Window::Rebuild(window.config(), window.Store()));
  return Status::Ok();
}

// The world beside the pool: rollouts that take their time, and a trainer.
class WorldRun {
 public:
  WorldRun(const PoolConfig& config, const World& world, const std::vector<RecordedRollout>& recorded,
           const std::function<void(const TimedEvent&)>& event, const std::function<void(const Decision&)>& decision)
      : config_(config), world_(world), on_event_(event), on_decision_(decision), window_(config), rng_(config.seed) {
    report_.policy = Name(config.window.policy);
    report_.S = config.S;
    report_.plan = window_.plan();
    heads_.resize(report_.plan.quota.size());
    for (const std::string& name : SourceNames(config)) {
      std::vector<const RecordedRollout*>& own = recorded_of_[name].rollouts;
      for (const RecordedRollout& r : recorded) {
        if (several() && r.source == name) own.push_back(&r);
      }
      if (!own.empty()) continue;
      for (const RecordedRollout& r : recorded) own.push_back(&r);
    }
  }

  Result<WorldReport> Run() {
    Observe(window_.Start(0));
    Schedule({0, kLease, 0, 0});
    const double limit = static_cast<double>(kEventsPerRollout) * (static_cast<double>(world_.updates) + static_cast<double>(config_.S) + 2) *
                         static_cast<double>(config_.P) * (config_.G + config_.extra);
    for (double steps = 0; report_.updates < world_.updates && !pending_.empty(); ++steps) {
      if (steps > limit) return ResourceExhausted("the world does not get anywhere: groups die as fast as they are admitted");
      RETURN_IF_ERROR(Step());
    }
    Finish();
    return std::move(report_);
  }

 private:
  // In the order of ties.
  enum Class { kUpdate, kCommit, kLease, kRollout };
  struct Pending {
    double t = 0;
    Class what = kUpdate;
    int64_t number = 0;   // batch, step or group
    int32_t rollout = 0;
    auto operator<=>(const Pending&) const = default;
  };
  struct Playing {
    double ends = 0;
    double latency = 0;
    bool fails = false;
    std::optional<double> reward;
  };
  struct GroupFacts {
    int32_t source = 0;
    std::map<int32_t, double> latency;  // of the last attempt of each rollout that ended by itself
    int64_t staleness = 0;
    int64_t bypassed = 0;
    bool taken = false;
  };
  struct Head {
    std::optional<int64_t> group;
    double since = 0;
  };

  void Schedule(Pending p) { pending_.insert(p); }

  Status Step() {
    Pending next = *pending_.begin();
    std::optional<double> due = window_.NextDeadline();
    if (due && *due < next.t) {
      // A finish at exactly the deadline counts; everything later does not.
      Event tick;
      tick.kind = Event::Kind::kTick;
      return Feed(tick, *due);
    }
    pending_.erase(pending_.begin());
    Event e;
    switch (next.what) {
      case kUpdate:
        e.kind = Event::Kind::kUpdate;
        e.number = next.number;
        break;
      case kCommit:
        e.kind = Event::Kind::kCommit;
        e.number = next.number;
        break;
      case kLease:
        e.kind = Event::Kind::kLease;
        asked_ = next.t;
        break;
      case kRollout: {
        auto it = playing_.find({next.number, next.rollout});
        Playing played = it->second;
        playing_.erase(it);
        e.kind = played.fails ? Event::Kind::kFail : Event::Kind::kFinish;
        e.group = next.number;
        e.rollout = next.rollout;
        e.outcome = played.fails ? "infra_failure" : "scored";
        e.reward = played.reward;
        if (!played.fails) facts_[next.number].latency[next.rollout] = played.latency;
        break;
      }
    }
    return Feed(e, next.t);
  }

  Status Feed(const Event& e, double t) {
    if (on_event_) on_event_({t, e});
    ASSIGN_OR_RETURN(StepOutput out, window_.Apply(e, t));
    Observe(out);
    return Status::Ok();
  }

  // The k-th issue of a world draws the same under every policy.
  Playing Draw(int64_t group, int32_t rollout) {
    const uint64_t k = issued_++;
    Playing p;
    const Latency& l = world_.latency;
    Rng rng = rng_.Fork("latency", k);
    p.reward = rollout % 2 == 0 ? 1.0 : 0.0;
    if (l.dist == "lognormal") {
      // Own Box-Muller on two uniforms, so that one issue takes exactly two draws.
      double u = 1 - rng.Uniform(), v = rng.Uniform();
      p.latency = l.median * std::exp(l.sigma * std::sqrt(-2 * std::log(u)) * std::cos(2 * kPi * v));
    } else if (l.dist == "pareto") {
      p.latency = l.min * std::pow(1 - rng.Uniform(), -1 / l.alpha);
    } else if (l.dist == "exp") {
      p.latency = -l.mean * std::log(1 - rng.Uniform());
    } else if (l.dist == "fixed") {
      p.latency = l.value;
    } else if (l.dist == "list") {
      p.latency = l.values[k % l.values.size()];
      p.reward = k % 2 == 0 ? 1.0 : 0.0;
    } else {
      Recorded& recorded = recorded_of_[several() ? source_of_.at(group) : recorded_of_.begin()->first];
      const RecordedRollout& r = *recorded.rollouts[recorded.issued++ % recorded.rollouts.size()];
      p.latency = r.latency_s;
      p.fails = r.failed;
      p.reward = r.reward;
    }
    if (world_.fail > 0 && rng_.Fork("fail", k).Chance(world_.fail)) p.fails = true;
    if (world_.zero > 0 && p.reward && rng_.Fork("zero", static_cast<uint64_t>(group)).Chance(world_.zero)) p.reward = 1.0;
    latency_sum_ += p.latency;
    return p;
  }

  void Observe(const StepOutput& out) {
    for (const LedgerLine& l : out.ledger) {
      if (several() && l.kind == LedgerLine::Kind::kAdmit) source_of_[*l.group] = l.source;
      if (several() && (l.kind == LedgerLine::Kind::kTombstone || l.kind == LedgerLine::Kind::kConsume)) source_of_.erase(*l.group);
      if (l.kind == LedgerLine::Kind::kIssue) {
        Playing p = Draw(*l.group, *l.rollout);
        p.ends = l.t + p.latency;
        Schedule({p.ends, kRollout, *l.group, *l.rollout});
        playing_[{*l.group, *l.rollout}] = p;
      } else if (l.kind == LedgerLine::Kind::kOutcome && l.outcome == "aborted") {
        auto it = playing_.find({*l.group, *l.rollout});
        if (it != playing_.end()) {
          pending_.erase({it->second.ends, kRollout, *l.group, *l.rollout});
          playing_.erase(it);
        }
      }
    }
    for (const Decision& d : out.decisions) {
      if (on_decision_) on_decision_(d);
      for (size_t i = 0; i < heads_.size(); ++i) MoveHead(heads_[i], d.head[i], d.t);
      switch (d.kind) {
        case Decision::Kind::kAdmit: {
          GroupFacts& f = facts_[*d.group];
          f.source = SourceIndex(d.source);
          waiting_[f.source].insert(*d.group);
          break;
        }
        case Decision::Kind::kTombstone:
        case Decision::Kind::kRequeue:
          Leave(*d.group);
          facts_.erase(*d.group);
          break;
        case Decision::Kind::kTake: {
          Leave(*d.group);
          GroupFacts& f = facts_[*d.group];
          f.staleness = *d.stale;
          for (int64_t older : waiting_[f.source]) {
            if (older > *d.group) break;
            report_.bypass_max = std::max(report_.bypass_max, ++facts_[older].bypassed);
          }
          break;
        }
        case Decision::Kind::kLease:
          idle_ += d.t - asked_;
          report_.idle_by_batch.push_back(d.t - asked_);
          report_.staleness_by_batch.push_back(*std::max_element(d.staleness.begin(), d.staleness.end()));
          Schedule({d.t + world_.trainer_s, kUpdate, *d.batch, 0});
          break;
        case Decision::Kind::kUpdate:
          ++report_.updates;
          report_.time = d.t;
          for (int64_t g : d.groups) Trained(g);
          Schedule({d.t, kCommit, *d.version, 0});
          Schedule({d.t, kLease, 0, 0});
          break;
        default: break;
      }
    }
  }

  int32_t SourceIndex(const std::string& name) const {
    for (size_t i = 0; i < config_.sources.size(); ++i) {
      if (config_.sources[i].name == name) return static_cast<int32_t>(i);
    }
    return 0;
  }

  void Leave(int64_t group) { waiting_[facts_[group].source].erase(group); }

  bool several() const { return config_.sources.size() > 1; }

  void MoveHead(Head& head, std::optional<int64_t> group, double t) {
    if (head.group == group) return;
    if (head.group) report_.head_wait_max = std::max(report_.head_wait_max, t - head.since);
    head = {group, t};
  }

  void Trained(int64_t group) {
    const GroupFacts& f = facts_[group];
    ++trained_groups_;
    staleness_sum_ += static_cast<double>(f.staleness);
    report_.staleness_max = std::max(report_.staleness_max, f.staleness);
    for (const auto& [rollout, latency] : f.latency) {
      trained_latency_ += latency;
      ++trained_rollouts_;
    }
    facts_.erase(group);
  }

  void Finish() {
    for (Head& head : heads_) MoveHead(head, std::nullopt, report_.time);
    report_.tombstoned = window_.totals().tombstones;
    if (report_.time > 0) report_.trainer_idle = idle_ / report_.time;
    if (trained_groups_ > 0) report_.staleness_mean = staleness_sum_ / static_cast<double>(trained_groups_);
    if (trained_rollouts_ > 0 && latency_sum_ > 0) {
      report_.length_bias = trained_latency_ / static_cast<double>(trained_rollouts_) / (latency_sum_ / static_cast<double>(issued_));
    }
  }

  const PoolConfig config_;
  const World world_;
  struct Recorded {
    std::vector<const RecordedRollout*> rollouts;
    size_t issued = 0;
  };
  std::map<std::string, Recorded> recorded_of_;   // by source
  std::map<int64_t, std::string> source_of_;      // of groups in flight; where there are several
  const std::function<void(const TimedEvent&)>& on_event_;
  const std::function<void(const Decision&)>& on_decision_;
  Window window_;
  const Rng rng_;
  std::set<Pending> pending_;
  std::map<std::pair<int64_t, int32_t>, Playing> playing_;
  std::map<int64_t, GroupFacts> facts_;
  std::map<int32_t, std::set<int64_t>> waiting_;  // untaken living groups, by source
  std::vector<Head> heads_;
  WorldReport report_;
  uint64_t issued_ = 0;
  double asked_ = 0, idle_ = 0;
  double latency_sum_ = 0, trained_latency_ = 0, staleness_sum_ = 0;
  int64_t trained_groups_ = 0, trained_rollouts_ = 0;
};

}  // namespace

int64_t RunScript(const PoolConfig& config, const std::vector<std::string_view>& events, const LineSink& sink) {
  Window window(config);
  for (const Decision& d : window.Start(0).decisions) sink(PrintDecision(d));
  int64_t bad = 0;
  for (std::string_view line : events) {
    if (Trim(line).empty()) continue;
    auto run = [&]() -> Result<StepOutput> {
      ASSIGN_OR_RETURN(TimedEvent timed, ParseEvent(line));
      ASSIGN_OR_RETURN(StepOutput out, window.Apply(timed.event, timed.t));
      if (timed.event.kind == Event::Kind::kCrashPool) RETURN_IF_ERROR(RebuildFromStore(window));
      return out;
    };
    Result<StepOutput> out = run();
    if (!out.ok()) {
      sink(PrintError(out.status()));
      ++bad;
      continue;
    }
    for (const Decision& d : out->decisions) sink(PrintDecision(d));
  }
  sink(PrintSummary(window));
  return bad;
}

Result<WorldReport> RunWorld(const PoolConfig& config, const World& world, const std::vector<RecordedRollout>& recorded,
                             const std::function<void(const TimedEvent&)>& event, const std::function<void(const Decision&)>& decision) {
  if (world.latency.dist == "ledger" && recorded.empty()) return InvalidArgument("world.latency.path: the ledger has no finished rollout");
  return WorldRun(config, world, recorded, event, decision).Run();
}

namespace {

// Blank lines, and a last line without its end, are a person's.
Status ForEachLine(std::string_view ledger, const std::function<Status(const LedgerLine&)>& visit) {
  int64_t number = 0;
  for (const std::string& text : Split(ledger, '\n')) {
    ++number;
    if (Trim(text).empty()) continue;
    const Result<LedgerRecord> record = ParseLedger(text);
    const Status status = record.ok() ? visit(record->line) : record.status();
    if (!status.ok()) return status.WithContext(fmt::format("line {}", number));
  }
  return Status::Ok();
}

}  // namespace

Result<std::vector<RecordedRollout>> ReadRecorded(std::string_view ledger) {
  struct Attempt {
    double issued = 0;
    std::optional<RecordedRollout> ended;
  };
  std::vector<Attempt> attempts;
  std::map<AttemptId, size_t> open;
  std::map<int64_t, std::string> source_of;
  RETURN_IF_ERROR(ForEachLine(ledger, [&](const LedgerLine& l) -> Status {
    if (l.kind == LedgerLine::Kind::kAdmit && l.group) source_of[*l.group] = l.source;
    if (l.kind != LedgerLine::Kind::kIssue && l.kind != LedgerLine::Kind::kOutcome) return Status::Ok();
    if (!l.group || !l.rollout || !l.attempt) return InvalidArgument("group, rollout or attempt is missing");
    const AttemptId id{*l.group, *l.rollout, *l.attempt};
    if (l.kind == LedgerLine::Kind::kIssue) {
      open[id] = attempts.size();
      attempts.push_back({l.t, std::nullopt});
      return Status::Ok();
    }
    auto it = open.find(id);
    if (it == open.end()) return InvalidArgument("an outcome without its issue");
    if (l.outcome != "aborted") {
      attempts[it->second].ended = RecordedRollout{std::max(0.0, l.t - attempts[it->second].issued), l.outcome == "infra_failure", l.reward, source_of[*l.group]};
    }
    open.erase(it);
    return Status::Ok();
  }));
  std::vector<RecordedRollout> out;
  for (const Attempt& a : attempts) {
    if (a.ended) out.push_back(*a.ended);
  }
  return out;
}

namespace {

// Seconds from a lease to the first line of its update, one a step; a step that was rolled back counts each time.
Result<std::vector<double>> TrainerTimes(std::string_view ledger) {
  std::map<int64_t, double> leased;
  std::vector<double> times;
  RETURN_IF_ERROR(ForEachLine(ledger, [&](const LedgerLine& l) {
    if (l.kind == LedgerLine::Kind::kLease && l.step) leased[*l.step] = l.t;
    if (l.kind != LedgerLine::Kind::kConsume || !l.step) return Status::Ok();
    if (auto it = leased.find(*l.step); it != leased.end()) {
      times.push_back(std::max(0.0, l.t - it->second));
      leased.erase(it);
    }
    return Status::Ok();
  }));
  return times;
}

double Throughput(const WorldReport& r) { return r.time > 0 ? static_cast<double>(r.updates) / r.time : 0; }

}  // namespace

Result<Advice> Advise(const PoolConfig& config, std::string_view ledger, int64_t updates) {
  ASSIGN_OR_RETURN(const std::vector<RecordedRollout> recorded, ReadRecorded(ledger));
  ASSIGN_OR_RETURN(std::vector<double> trained, TrainerTimes(ledger));
  if (recorded.empty()) return InvalidArgument("the ledger has no finished rollout");
  if (trained.empty()) return InvalidArgument("the ledger has no trained step");
  Advice advice;
  advice.steps = static_cast<int64_t>(trained.size());
  std::nth_element(trained.begin(), trained.begin() + static_cast<std::ptrdiff_t>(trained.size() / 2), trained.end());
  advice.world.latency.dist = "ledger";
  advice.world.trainer_s = trained[trained.size() / 2];
  advice.world.updates = updates;

  const PoolPlan own = Plan(config);
  std::set<int64_t> staleness = {0, 1, 2, 3, config.S};
  bool own_found = false;
  for (int64_t S : staleness) {
    std::vector<WindowConfig> windows(4);
    windows[0].policy = Policy::kStrict;
    windows[1].fraction = 0.3;
    windows[2].fraction = 0.5;
    windows[3].policy = Policy::kGreedy;
    for (const WindowConfig& window : windows) {
      PoolConfig pool = config;
      pool.S = S;
      pool.window = window;
      pool.B.reset();
      pool.tasks.reset();  // of the run, not of the world
      for (SourceConfig& source : pool.sources) {
        source.window.reset();
        source.tasks.reset();
      }
      if (!Validate(pool).ok()) continue;
      ASSIGN_OR_RETURN(WorldReport report, RunWorld(pool, advice.world, recorded, nullptr, nullptr));
      if (S == config.S && !own_found) {
        advice.own = advice.reports.size();
        own_found = !own.window[0] || *report.plan.window[0] >= *own.window[0];
      }
      advice.reports.push_back(std::move(report));
    }
  }
  double fastest = 0;
  for (const WorldReport& r : advice.reports) fastest = std::max(fastest, Throughput(r));
  auto less = [](const WorldReport& a, const WorldReport& b) {
    return std::tuple(*a.plan.bound, a.S, *a.plan.window[0]) < std::tuple(*b.plan.bound, b.S, *b.plan.window[0]);
  };
  bool found = false;
  for (size_t i = 0; i < advice.reports.size(); ++i) {
    if (Throughput(advice.reports[i]) < (1 - kAdviceSlack) * fastest) continue;
    if (!found || less(advice.reports[i], advice.reports[advice.best])) advice.best = i;
    found = true;
  }
  return advice;
}

std::string PrintAdvice(const Advice& advice) {
  const WorldReport& best = advice.reports[advice.best];
  const WorldReport& own = advice.reports[advice.own];
  JsonWriter w;
  w.BeginObject().Key("recommend").BeginObject().Key("S").Int(best.S).Key("policy").String(best.policy).Key("W").BeginArray();
  for (const std::optional<int64_t>& size : best.plan.window) w.Int(*size);
  w.EndArray().Key("bound").Int(*best.plan.bound).EndObject();
  w.Key("updates_per_s").Double(Throughput(best)).Key("trainer_idle").Double(best.trainer_idle).Key("staleness_mean").Double(best.staleness_mean);
  w.Key("now").BeginObject().Key("S").Int(own.S).Key("W").BeginArray();
  for (const std::optional<int64_t>& size : own.plan.window) w.Int(*size);
  w.EndArray().Key("bound").Int(*own.plan.bound).Key("updates_per_s").Double(Throughput(own)).EndObject();
  w.Key("measured").BeginObject().Key("trainer_s").Double(advice.world.trainer_s).Key("steps").Int(advice.steps).EndObject();
  w.EndObject();
  return w.Take();
}

std::string PrintReport(const WorldReport& r) {
  JsonWriter w;
  w.BeginObject().Key("policy").String(r.policy).Key("S").Int(r.S).Key("updates").Int(r.updates).Key("time").Double(r.time);
  w.Key("trainer_idle").Double(r.trainer_idle).Key("staleness_mean").Double(r.staleness_mean).Key("staleness_max").Int(r.staleness_max);
  w.Key("bound");
  r.plan.bound ? w.Int(*r.plan.bound) : w.Null();
  w.Key("W").BeginArray();
  for (const std::optional<int64_t>& size : r.plan.window) size ? w.Int(*size) : w.Null();
  w.EndArray().Key("bypass_max").Int(r.bypass_max).Key("tombstoned").BeginObject();
  for (const auto& [reason, n] : r.tombstoned) w.Key(reason).Int(n);
  w.EndObject().Key("head_wait_max").Double(r.head_wait_max).Key("length_bias").Double(r.length_bias).EndObject();
  return w.Take();
}

std::string PrintTable(const std::vector<WorldReport>& reports) {
  std::string out = fmt::format("{:<10} {:>3} {:>6} {:>8} {:>10} {:>6} {:>10} {:>5} {:>6} {:>7} {:>10} {:>9} {:>10}\n", "policy", "S", "W", "updates", "time", "idle",
                                "stale mean", "max", "bound", "bypass", "head wait", "len bias", "tombstones");
  for (const WorldReport& r : reports) {
    int64_t dead = 0;
    for (const auto& [reason, n] : r.tombstoned) dead += n;
    std::vector<std::string> sizes;
    for (const std::optional<int64_t>& size : r.plan.window) sizes.push_back(size ? fmt::format("{}", *size) : "-");
    out += fmt::format("{:<10} {:>3} {:>6} {:>8} {:>10.6g} {:>6.3f} {:>10.3f} {:>5} {:>6} {:>7} {:>10.4g} {:>9.3f} {:>10}\n", r.policy, r.S, Join(sizes, "+"), r.updates,
                       r.time, r.trainer_idle, r.staleness_mean, r.staleness_max, r.plan.bound ? fmt::format("{}", *r.plan.bound) : "none",
                       r.bypass_max, r.head_wait_max, r.length_bias, dead);
  }
  return out;
}

}  // namespace temper::datapool
