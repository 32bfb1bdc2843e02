// Shorthand for tests of the window machine: events as one-word calls, decisions as the short words of docs/pool_sim.md 5.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "datapool/format.h"
#include "datapool/window.h"
#include "fmt/format.h"
#include "fmt/ranges.h"

namespace temper::datapool {

inline PoolConfig Config(const std::string& text) {
  Result<SimConfig> sim = ParseSimConfig(text);
  TEMPER_CHECK(sim.ok()) << sim.status().message();
  return sim->pool;
}

// "A5@1" admit 5 at version 1 (from F: "A5@1<F"); "T4/2" take 4 with staleness 2; "L0[2,3]" lease (again: "L0[2,3]!");
// "R4" ready (partial: "R4~"); "X1:zero_signal"; "Q0" requeue; "I1.0:2" re-issue of rollout 0 as attempt 2; "H1+2[5]" hold
// with 1, needing 2, 5 blocked; "U1[..]" version is now 1; "C1"; "refuse:outstanding"; "ignore"; "late0"; "recover:trainer[0]".
inline std::string Short(const Decision& d) {
  switch (d.kind) {
    case Decision::Kind::kAdmit: return fmt::format("A{}@{}", *d.group, *d.version) + (d.from ? fmt::format("<{}", *d.from) : "");
    case Decision::Kind::kReady: return fmt::format("R{}{}", *d.group, *d.partial ? "~" : "");
    case Decision::Kind::kReissue: return fmt::format("I{}.{}:{}", *d.group, *d.rollout, *d.attempt);
    case Decision::Kind::kLate: return fmt::format("late{}", *d.group);
    case Decision::Kind::kTombstone: return fmt::format("X{}:{}", *d.group, d.reason);
    case Decision::Kind::kRequeue: return fmt::format("Q{}", *d.group);
    case Decision::Kind::kTake: return fmt::format("T{}/{}", *d.group, *d.stale);
    case Decision::Kind::kLease: return fmt::format("L{}[{}]{}", *d.batch, fmt::join(d.groups, ","), *d.again ? "!" : "");
    case Decision::Kind::kHold: return fmt::format("H{}+{}[{}]", *d.have, *d.need, fmt::join(d.groups, ","));
    case Decision::Kind::kUpdate: return fmt::format("U{}", *d.version);
    case Decision::Kind::kCommit: return fmt::format("C{}", *d.step);
    case Decision::Kind::kRefuse: return "refuse:" + d.reason;
    case Decision::Kind::kIgnore: return "ignore";
    case Decision::Kind::kRecover: return fmt::format("recover:{}[{}]", d.who, fmt::join(d.groups, ","));
  }
  return "?";
}

inline std::string Short(const StepOutput& out) {
  std::string text;
  for (const Decision& d : out.decisions) text += (text.empty() ? "" : " ") + Short(d);
  return text;
}

inline Event FinishEvent(int64_t group, int32_t rollout = 0, std::optional<double> reward = 1) {
  Event e;
  e.kind = Event::Kind::kFinish;
  e.group = group;
  e.rollout = rollout;
  e.outcome = "scored";
  e.reward = reward;
  return e;
}
inline Event FailEvent(int64_t group, int32_t rollout = 0, std::string outcome = "infra_failure") {
  Event e;
  e.kind = Event::Kind::kFail;
  e.group = group;
  e.rollout = rollout;
  e.outcome = std::move(outcome);
  e.reason = "test";
  return e;
}
inline Event Of(Event::Kind kind, int64_t number = 0) {
  Event e;
  e.kind = kind;
  e.number = number;
  return e;
}

// A window and its clock; every call returns the short words.
struct Play {
  explicit Play(const std::string& config) : window(Config(config)) { started = Short(window.Start(0)); }
  std::string Do(const Event& e, double t) {
    now = t;
    Result<StepOutput> out = window.Apply(e, t);
    if (!out.ok()) return "error";
    last = *std::move(out);
    return Short(last);
  }
  std::string Do(const Event& e) { return Do(e, now); }
  std::string Finish(int64_t group, int32_t rollout = 0, std::optional<double> reward = 1) { return Do(FinishEvent(group, rollout, reward)); }
  std::string Fail(int64_t group, int32_t rollout = 0, std::string outcome = "infra_failure") { return Do(FailEvent(group, rollout, std::move(outcome))); }
  std::string Lease() { return Do(Of(Event::Kind::kLease)); }
  std::string Update(int64_t batch) { return Do(Of(Event::Kind::kUpdate, batch)); }
  std::string Commit(int64_t step) { return Do(Of(Event::Kind::kCommit, step)); }
  std::string CrashTrainer() { return Do(Of(Event::Kind::kCrashTrainer)); }
  std::string Tick(double t) { return Do(Of(Event::Kind::kTick), t); }

  Window window;
  std::string started;
  StepOutput last;
  double now = 0;
};

}  // namespace temper::datapool
