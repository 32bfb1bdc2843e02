// Random pools and random worlds with everything on: failures, re-issues, deadlines, requeue, refill, spares, sources, both
// crashes, stops. A failing seed is printed; run it alone with TEMPER_SEED.
#include <gtest/gtest.h>

#include <cstdlib>
#include <set>

#include "common/rng.h"
#include "common/strings.h"
#include "datapool/sim.h"
#include "datapool/verify.h"
#include "tests/datapool/script.h"
#include "tests/fuzz/mutate.h"

namespace temper::datapool {
namespace {

PoolConfig RandomConfig(Rng& rng) {
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
    } else if (rng.Chance(0.3)) {
      c.B = rng.Between(c.P, c.P * (c.S + 2));
    }
    if (Validate(c).ok()) return c;
  }
}

struct Driver {
  explicit Driver(uint64_t seed_in) : seed(seed_in), rng(seed_in), config(RandomConfig(rng)), window(config) { Keep(window.Start(0)); }

  void Keep(const StepOutput& out) {
    for (const LedgerLine& line : out.ledger) ledger += PrintLedger({++seq, line}) + "\n";
    for (const Decision& d : out.decisions) {
      if (d.kind == Decision::Kind::kLease && window.plan().bound) {
        for (int64_t stale : d.staleness) EXPECT_LE(stale, *window.plan().bound) << "seed " << seed;
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
  std::string ledger;
};

template <typename Body>
void ForSeeds(uint64_t count, Body body) {
  if (const char* one = std::getenv("TEMPER_SEED")) {
    body(std::strtoull(one, nullptr, 10));
    return;
  }
  for (uint64_t seed = 0; seed < count && !testing::Test::HasFailure(); ++seed) body(seed);
}

// What could go wrong: a crash of the pool changes a later decision; the bound breaks under some mix of rules; the ledger does
// not balance, or does not lead back to the decisions.
TEST(WindowRandom, StoreFormBoundBalanceAndReplay) {
  int64_t consumed = 0, tombstoned = 0;
  ForSeeds(150, [&](uint64_t seed) {
    Driver d(seed);
    for (int i = 0; i < 250 && !testing::Test::HasFatalFailure(); ++i) d.Step();
    VerifyReport report = VerifyLedger(d.config, d.ledger);
    EXPECT_TRUE(report.ok()) << "seed " << seed << " " << PrintPoolConfig(d.config) << "\n" << PrintVerify(report);
    if (std::getenv("TEMPER_SEED")) std::fputs(d.ledger.c_str(), stdout);
    const WindowTotals t = d.window.totals();
    EXPECT_EQ(report.admitted, t.admitted);
    EXPECT_EQ(report.consumed, t.consumed);
    EXPECT_EQ(report.in_flight, t.in_flight);
    EXPECT_EQ(report.running, t.running);
    consumed += t.consumed;
    tombstoned += t.tombstoned;
  });
  if (!std::getenv("TEMPER_SEED")) {
    EXPECT_GT(consumed, 1000) << "the worlds are too dull to show anything";
    EXPECT_GT(tombstoned, 1000);
  }
}

// What could go wrong: a changed ledger passes. Every line dropped, doubled, swapped with the next, or with one number or word
// changed must be seen by at least one of the two checks.
TEST(WindowRandom, ATamperedLedgerIsCaught) {
  ForSeeds(25, [&](uint64_t seed) {
    Driver d(seed + 1000);
    for (int i = 0; i < 120 && !testing::Test::HasFatalFailure(); ++i) d.Step();
    std::vector<std::string> lines = Split(d.ledger, '\n');
    lines.pop_back();
    ASSERT_TRUE(VerifyLedger(d.config, d.ledger).ok());
    for (int k = 0; k < 40; ++k) {
      std::vector<std::string> bad = lines;
      const size_t at = d.rng.Below(bad.size() - 1);
      Result<LedgerRecord> record = ParseLedger(bad[at]);
      ASSERT_TRUE(record.ok());
      LedgerLine& l = record->line;
      std::string what;
      switch (d.rng.Below(7)) {
        case 0: bad.erase(bad.begin() + static_cast<std::ptrdiff_t>(at)); what = "dropped"; break;
        case 1: bad.insert(bad.begin() + static_cast<std::ptrdiff_t>(at), bad[at]); what = "doubled"; break;
        case 2: std::swap(bad[at], bad[at + 1]); what = "swapped"; break;
        case 3:
          if (!l.group) continue;
          *l.group += 1;
          what = "group";
          break;
        case 4:
          if (!l.version_admitted) continue;
          *l.version_admitted += 1;
          what = "version_admitted";
          break;
        case 5:
          if (l.groups.size() < 2) continue;
          std::swap(l.groups[0], l.groups[1]);
          what = "order of the groups";
          break;
        case 6:
          if (l.outcome.empty()) continue;
          l.outcome = "lost";
          what = "outcome";
          break;
      }
      if (bad.size() == lines.size() && bad == lines) bad[at] = PrintLedger(*record);
      VerifyReport report = VerifyLedger(d.config, Join(bad, "\n") + "\n");
      EXPECT_FALSE(report.ok()) << "seed " << d.seed << ": " << what << " at line " << at + 1 << ": " << lines[at];
    }
  });
}

// What could go wrong: a generated world and the script written from it decide differently.
TEST(WindowRandom, AWorldIsItsScript) {
  ForSeeds(40, [&](uint64_t seed) {
    Rng rng(seed);
    PoolConfig config = RandomConfig(rng);
    config.tasks.reset();
    config.seed = seed;
    World world;
    world.latency.dist = seed % 3 == 0 ? "list" : seed % 3 == 1 ? "lognormal" : "pareto";
    world.latency.values = {1, 2, 2, 7, 0.5};
    world.latency.median = 3;
    world.latency.sigma = 1;
    world.latency.min = 1;
    world.latency.alpha = 1.5;
    world.fail = 0.1;
    world.zero = 0.2;
    world.trainer_s = 1.5;
    world.updates = 12;
    std::vector<std::string> script, decided, scripted;
    Result<WorldReport> report = RunWorld(
        config, world, {}, [&](const TimedEvent& e) { script.push_back(PrintEvent(e)); }, [&](const Decision& d) { decided.push_back(PrintDecision(d)); });
    ASSERT_TRUE(report.ok()) << "seed " << seed << ": " << report.status().message();
    EXPECT_EQ(report->updates, world.updates);
    RunScript(config, {script.begin(), script.end()}, [&](const std::string& line) { scripted.push_back(line); });
    scripted.pop_back();
    EXPECT_EQ(decided, scripted) << "seed " << seed;
    if (report->plan.bound) {
      EXPECT_LE(report->staleness_max, *report->plan.bound);
      int64_t widest = 0;
      for (const std::optional<int64_t>& w : report->plan.window) widest = std::max(widest, *w);
      EXPECT_LE(report->bypass_max, widest - 1) << "seed " << seed;
    }
  });
}

// What could go wrong: bytes from outside end the process. Mutated configurations, events and ledger lines either parse or say why.
TEST(WindowRandom, ParsersSurviveMutatedBytes) {
  const std::vector<std::string> seeds = {
      R"({"P":4,"S":2,"G":4,"extra":2,"min_valid":3,"retries":2,"deadline_s":0.1,"on_deadline":"wait","window":{"fraction":0.3},"sources":[{"name":"a","weight":2.5}]})",
      R"({"P":1,"world":{"latency":{"dist":"list","values":[1,2]},"fail":0.1,"updates":3},"policies":[{"policy":"areal"}]})",
      R"({"t":1,"event":"finish","group":7,"rollout":0,"outcome":"scored","reward":1})", R"({"t":1,"event":"crash","who":"pool"})",
      R"({"seq":1,"t":0,"event":"lease","step":1,"groups":[0,1],"trainer":"x"})", R"({"seq":3,"t":1.5,"event":"outcome","group":0,"rollout":1,"attempt":1,"outcome":"scored","reward":0.5})"};
  Driver d(7);
  for (int i = 0; i < 50; ++i) d.Step();
  const std::string store = d.window.Store();
  Rng rng(11);
  auto mutate = [&](std::string text) {
    for (uint64_t n = 1 + rng.Below(4); n > 0 && !text.empty(); --n) {
      const size_t at = rng.Below(text.size());
      switch (rng.Below(4)) {
        case 0: text[at] = static_cast<char>(rng.Below(256)); break;
        case 1: text.erase(at, 1 + rng.Below(8)); break;
        case 2: text.insert(at, text.substr(rng.Below(text.size()), rng.Below(12))); break;
        default: text[at] = "0123456789-.e\"{}[],:"[rng.Below(20)]; break;
      }
    }
    return text;
  };
  for (int i = 0; i < 4000; ++i) {
    const std::string text = mutate(seeds[rng.Below(seeds.size())]);
    Result<SimConfig> config = ParseSimConfig(text);
    if (config.ok()) Plan(config->pool);
    Result<TimedEvent> event = ParseEvent(text);
    if (event.ok()) (void)d.window.Apply(event->event, event->t);
    (void)ParseLedger(text);
    VerifyLedger(d.config, mutate(d.ledger.substr(0, 600)));
    (void)Window::Rebuild(d.config, mutate(store));
  }
}

// What could go wrong: a ledger that lost, doubled or changed lines ends `pool verify`, or passes for a good one.
TEST(WindowRandom, VerifySurvivesMutatedLedgers) {
  Rng rng(12);
  const std::vector<std::string> words = {"0", "1", "2", "7", "-1", "null", "\"scored\"", "\"infra_failure\"", "\"cancelled\"", "[0,1]", "[]", "true"};
  int changed = 0, seen = 0;
  for (uint64_t seed = 1; seed <= 24; ++seed) {
    Driver d(seed);
    for (int i = 0; i < 120; ++i) d.Step();
    std::vector<std::string> good;
    for (const std::string& line : Split(d.ledger, '\n')) {
      if (!line.empty()) good.push_back(line + "\n");
    }
    for (int i = 0; i < 60; ++i) {
      std::vector<std::string> lines(good.begin(), good.begin() + static_cast<int64_t>(rng.Below(good.size()) + 1));
      const size_t at = rng.Below(lines.size());
      switch (i == 0 ? 5 : rng.Below(5)) {
        case 0: lines.erase(lines.begin() + static_cast<int64_t>(at)); break;
        case 1: lines.insert(lines.begin() + static_cast<int64_t>(at), lines[rng.Below(lines.size())]); break;
        case 2: std::swap(lines[at], lines[rng.Below(lines.size())]); break;
        case 3: lines[at] = good[rng.Below(good.size())]; break;
        case 4: lines[at] = Mutated(lines[at], words, rng); break;
        default: break;  // as it was, up to some line
      }
      std::string ledger;
      for (const std::string& line : lines) ledger += line;
      const VerifyReport report = VerifyLedger(d.config, ledger);
      EXPECT_FALSE(PrintVerify(report).empty());
      if (i == 0) continue;
      const bool same = ledger == d.ledger.substr(0, ledger.size());
      changed += !same;
      seen += !same && !(report.balanced && report.replayed);
    }
    EXPECT_TRUE(VerifyLedger(d.config, d.ledger).balanced) << "seed " << seed;
  }
  EXPECT_GT(seen, changed * 9 / 10) << "of " << changed;  // an end that is cut off between two events is no mistake
}

}  // namespace
}  // namespace temper::datapool
