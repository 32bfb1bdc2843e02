// Random pools and random worlds with everything on: failures, re-issues, deadlines, requeue, refill, spares, sources, both
// crashes, stops. A failing seed is printed; run it alone with TEMPER_SEED.
#include <gtest/gtest.h>

#include <cstdlib>
#include <set>

#include "common/rng.h"
#include "common/strings.h"
#include "datapool/sim.h"
#include "datapool/verify.h"
#include "tests/datapool/random_pool.h"
#include "tests/datapool/script.h"
#include "tests/fuzz/mutate.h"

namespace temper::datapool {
namespace {

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
