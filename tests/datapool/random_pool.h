// Random pools and what drives them: every kind of event, or an adversary that holds one group back.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "common/rng.h"
#include "datapool/verify.h"
#include "tests/datapool/script.h"

namespace temper::datapool {

inline PoolConfig RandomConfig(Rng& rng) {
  for (;;) {
    PoolConfig c;
    c.P = rng.Between(1, 4);
    c.S = rng.Between(0, 3);
    c.G = static_cast<int32_t>(rng.Between(1, 3));
    c.extra = static_cast<int32_t>(rng.Between(0, 2));
    c.min_valid = static_cast<int32_t>(rng.Between(1, c.G));
    c.retries = static_cast<int32_t>(rng.Between(0, 2));
    if (rng.Chance(0.6)) c.deadline_s = static_cast<double>(rng.Between(1, 20));
    c.on_deadline = static_cast<OnDeadline>(rng.Below(3));
    c.refill = c.G > 1 && rng.Chance(0.5);
    c.max_leases = rng.Between(1, 2);
    if (rng.Chance(0.3)) c.max_staleness = rng.Between(c.max_leases, c.max_leases + 3);
    if (rng.Chance(0.2)) c.tasks = rng.Between(0, 40);
    switch (rng.Below(6)) {
      case 0: c.window.policy = Policy::kStrict; break;
      case 1: c.window.policy = Policy::kGreedy; break;
      case 2: c.window.policy = Policy::kAreal; break;
      case 3: c.window.size = rng.Between(1, (c.S + 1) * c.P); break;
      case 4: c.window.fraction = 0.5; break;
      default: break;
    }
    if (rng.Chance(0.3)) {
      c.sources = {SourceConfig{"a", 1, {}, {}}, SourceConfig{"b", 2.5, {}, {}}};
      if (c.P > 2 && rng.Chance(0.3)) c.sources.push_back(SourceConfig{"c", 0.5, {}, {}});
      for (SourceConfig& s : c.sources) {
        if (c.window.policy == Policy::kAreal || rng.Chance(0.5)) continue;
        s.window.emplace();
        if (rng.Chance(0.5)) s.window->policy = rng.Chance(0.5) ? Policy::kStrict : Policy::kGreedy;
        else s.window->fraction = 0.6;
      }
    } else if (rng.Chance(0.3)) {
      c.B = rng.Between(c.P, c.P * (c.S + 2));
    }
    if (Validate(c).ok()) return c;
  }
}

struct Driver {
  explicit Driver(uint64_t seed_in) : seed(seed_in), rng(seed_in), config(RandomConfig(rng)), window(config) { Keep(window.Start(0)); }

  void Keep(const StepOutput& out) {
    const std::vector<std::string> names = SourceNames(config);
    auto index = [&](const std::string& name) { return static_cast<size_t>(std::find(names.begin(), names.end(), name) - names.begin()); };
    for (const LedgerLine& line : out.ledger) {
      ledger += PrintLedger({++seq, line}) + "\n";
      if (line.kind == LedgerLine::Kind::kAdmit) source_of[*line.group] = index(line.source);
    }
    for (const Decision& d : out.decisions) {
      if (d.kind == Decision::Kind::kLease) {
        std::vector<int64_t> shares(names.size(), 0);
        for (size_t i = 0; i < d.groups.size(); ++i) {
          const size_t source = source_of.at(d.groups[i]);
          ++shares[source];
          const std::optional<int64_t>& bound = window.plan().bounds[source];
          if (bound) {
            EXPECT_LE(d.staleness[i], *bound) << "seed " << seed << " " << PrintPoolConfig(config);
          }
        }
        EXPECT_EQ(shares, window.plan().quota) << "seed " << seed << " " << PrintPoolConfig(config);
      }
      EXPECT_EQ(d.ledger[0], d.ledger[1] + d.ledger[2] + d.ledger[3]);
    }
  }

  Event RandomEvent() {
    std::vector<OpenRollout> running = window.Running();
    const uint64_t dice = rng.Below(100);
    if (dice < 60 && !running.empty()) {
      // The head a little less often, so that windows fill behind it.
      OpenRollout r = running[rng.Below(running.size())];
      if (r.id.group == running[0].id.group && rng.Chance(0.7)) r = running[rng.Below(running.size())];
      if (rng.Chance(0.8)) {
        return FinishEvent(r.id.group, r.id.rollout, rng.Chance(0.1) ? std::nullopt : std::optional<double>(static_cast<double>(rng.Below(2))));
      }
      return FailEvent(r.id.group, r.id.rollout, rng.Chance(0.7) ? "infra_failure" : "aborted");
    }
    if (dice < 75) return Of(Event::Kind::kLease);
    if (dice < 85) return Of(Event::Kind::kUpdate, window.version() + rng.Between(-1, 1) * (rng.Chance(0.2) ? 1 : 0));
    if (dice < 90) return Of(Event::Kind::kCommit, rng.Between(window.committed(), window.version()));
    if (dice < 92) return Of(Event::Kind::kCrashTrainer);
    if (dice < 94) return Of(Event::Kind::kCrashPool);
    if (dice < 95) {
      Event stop = Of(Event::Kind::kClose);
      stop.reason = "stopped";
      return stop;
    }
    if (dice < 98 || running.empty()) return Of(Event::Kind::kTick);
    return FinishEvent(rng.Between(0, running[0].id.group), 0);
  }

  // Holds the youngest group of an admission back as long as anything else can move, and lets everything else move at once: what
  // the bound is about. With a little chance anything happens.
  Event AdversarialEvent() {
    if (rng.Chance(0.05)) return RandomEvent();
    const std::vector<int64_t> out = window.Outstanding();
    if (!out.empty() && rng.Chance(0.9)) return Of(Event::Kind::kUpdate, window.version());
    if (!window.asking() && static_cast<int64_t>(out.size()) < config.max_leases) return Of(Event::Kind::kLease);
    const std::vector<OpenRollout> running = window.Running();
    bool alive = false;
    for (const OpenRollout& r : running) alive |= r.id.group == held;
    if (!alive && !running.empty()) held = running.back().id.group;
    // Different rewards, so that a refill has nothing to bury.
    for (const OpenRollout& r : running) {
      if (r.id.group != held) return FinishEvent(r.id.group, r.id.rollout, r.id.rollout);
    }
    for (const OpenRollout& r : running) return FinishEvent(r.id.group, r.id.rollout, r.id.rollout);
    return Of(Event::Kind::kTick);
  }

  // The same without a copy: for many schedules.
  void Play(const Event& e) {
    if ((e.kind == Event::Kind::kUpdate || e.kind == Event::Kind::kCommit) && e.number < 0) return;
    now += rng.Chance(0.5) ? 0 : static_cast<double>(rng.Below(8)) * 0.25;
    Result<StepOutput> out = window.Apply(window.closed() ? Of(Event::Kind::kReopen) : e, now);
    if (out.ok()) Keep(*out);
  }

  // Applies an event to the window and to a copy that went through its store form: both must do the same.
  void Step() {
    Event e = RandomEvent();
    if ((e.kind == Event::Kind::kUpdate || e.kind == Event::Kind::kCommit) && e.number < 0) return;
    if (window.closed()) e = Of(Event::Kind::kReopen);
    now += rng.Chance(0.5) ? 0 : static_cast<double>(rng.Below(8)) * 0.25;
    Result<Window> copy = Window::Rebuild(config, window.Store());
    ASSERT_TRUE(copy.ok()) << "seed " << seed;
    Result<StepOutput> out = window.Apply(e, now);
    Result<StepOutput> again = copy->Apply(e, now);
    ASSERT_EQ(out.ok(), again.ok());
    if (!out.ok()) return;
    ASSERT_EQ(Short(*out), Short(*again)) << "seed " << seed;
    ASSERT_EQ(out->ledger, again->ledger) << "seed " << seed;
    ASSERT_EQ(window.Store(), copy->Store()) << "seed " << seed;
    Keep(*out);
  }

  uint64_t seed;
  Rng rng;
  PoolConfig config;
  Window window;
  double now = 0;
  int64_t seq = 0;
  int64_t held = -1;  // the group the adversary holds back
  std::map<int64_t, size_t> source_of;  // of every group admitted
  std::string ledger;
};

}  // namespace temper::datapool
