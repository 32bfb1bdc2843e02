#include "datapool/window.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/json.h"
#include "common/strings.h"
#include "datapool/listing.h"
#include "datapool/sim.h"
#include "tests/datapool/script.h"

namespace temper::datapool {
namespace {

// What could go wrong: the published figure of the design (window 4 of 8 slots, lag 10) comes out differently.
TEST(WindowTrace, ForgesFigure) {
  Play p(R"({"P":1,"S":7,"window":{"size":4}})");
  EXPECT_EQ(p.started, "A0@0 A1@0 A2@0 A3@0 A4@0 A5@0 A6@0 A7@0");
  EXPECT_EQ(p.window.plan().bound, 10);
  for (int g = 0; g <= 6; ++g) EXPECT_EQ(p.Finish(g), fmt::format("R{}", g));
  for (int b = 0; b < 7; ++b) {
    EXPECT_EQ(p.Lease(), fmt::format("T{}/{} L{}[{}]", b, b, b, b));
    EXPECT_EQ(p.Update(b), fmt::format("U{} A{}@{}", b + 1, 8 + b, b + 1));
  }
  for (int g = 8; g <= 14; ++g) p.Finish(g);
  EXPECT_EQ(p.Lease(), "T8/6 L7[8]");
  EXPECT_EQ(p.Update(7), "U8 A15@8");
  EXPECT_EQ(p.Lease(), "T9/6 L8[9]");
  EXPECT_EQ(p.Update(8), "U9 A16@9");
  EXPECT_EQ(p.Lease(), "T10/6 L9[10]");
  EXPECT_EQ(p.Update(9), "U10 A17@10");
  for (int g : {15, 16, 17}) p.Finish(g);
  EXPECT_EQ(p.Lease(), "H0+1[11,12,13,14,15,16,17]");
  EXPECT_EQ(p.last.decisions.back().batch, 10);
  EXPECT_EQ(p.last.decisions.back().head, std::vector<std::optional<int64_t>>{7});
  EXPECT_EQ(p.Finish(7), "R7 T7/10 L10[7]");
  EXPECT_EQ(p.last.decisions.back().head, std::vector<std::optional<int64_t>>{11});
  EXPECT_EQ(p.Update(10), "U11 A18@11");
  EXPECT_EQ(p.Lease(), "T11/7 L11[11]");
  EXPECT_EQ(p.window.totals().staleness_max, 10);
}

// What could go wrong: the same figure with four groups a step.
TEST(WindowTrace, ForgesFigureInBatchesOfFour) {
  Play p(R"({"P":4,"S":1,"window":{"size":4}})");
  EXPECT_EQ(p.window.plan().bound, 2);
  for (int g : {0, 1, 2, 3, 4, 5, 6}) p.Finish(g);
  EXPECT_EQ(p.Lease(), "T0/0 T1/0 T2/0 T3/0 L0[0,1,2,3]");
  EXPECT_EQ(p.Update(0), "U1 A8@1 A9@1 A10@1 A11@1");
  for (int g : {8, 9, 10, 11}) p.Finish(g);
  EXPECT_EQ(p.Lease(), "T4/1 T5/1 T6/1 T8/0 L1[4,5,6,8]");
  EXPECT_EQ(p.Update(1), "U2 A12@2 A13@2 A14@2 A15@2");
  EXPECT_EQ(p.Lease(), "T9/1 T10/1 H2+2[11]");
  EXPECT_EQ(p.Finish(7), "R7 T7/2 T11/1 L2[9,10,7,11]");
}

// What could go wrong: a fractional window, or taking group by group while the trainer waits.
TEST(WindowTrace, TorchtitansExample) {
  Play p(R"({"P":3,"S":1,"window":{"fraction":0.5}})");
  EXPECT_EQ(p.started, "A0@0 A1@0 A2@0 A3@0 A4@0 A5@0");
  EXPECT_EQ(p.window.plan().slots, std::vector<int64_t>{6});
  EXPECT_EQ(p.window.plan().window, std::vector<std::optional<int64_t>>{3});
  EXPECT_EQ(p.window.plan().bound, 2);
  for (int g : {0, 1, 3, 4, 5}) p.Finish(g);
  EXPECT_EQ(p.Lease(), "T0/0 T1/0 T3/0 L0[0,1,3]");
  EXPECT_EQ(p.last.decisions[1].head, std::vector<std::optional<int64_t>>{2});
  EXPECT_EQ(p.Update(0), "U1 A6@1 A7@1 A8@1");
  for (int g : {6, 7}) p.Finish(g);
  EXPECT_EQ(p.Lease(), "T4/1 H1+2[5,6,7]");
  EXPECT_EQ(p.Do(FinishEvent(2), 50), "R2 T2/1 T5/1 L1[4,2,5]");
  EXPECT_EQ(p.last.decisions[1].head, std::vector<std::optional<int64_t>>{5});
  EXPECT_EQ(p.Update(1), "U2 A9@2 A10@2 A11@2");
}

std::vector<std::string> Script(const std::string& config, const std::string& events) {
  std::vector<std::string> lines = Split(events, '\n');
  std::vector<std::string> out;
  RunScript(Config(config), {lines.begin(), lines.end()}, [&](const std::string& line) { out.push_back(line); });
  return out;
}

constexpr char kDeathAndCrash[] = R"({"P":2,"S":1,"G":2,"window":{"policy":"anchored","size":2},"zero_signal":"refill","deadline_s":10,"on_deadline":"requeue"})";
constexpr char kDeathAndCrashEvents[] = R"({"t":1,"event":"lease"}
{"t":2,"event":"finish","group":1,"rollout":0,"outcome":"scored","reward":1}
{"t":2,"event":"finish","group":1,"rollout":1,"outcome":"scored","reward":1}
{"t":3,"event":"finish","group":2,"rollout":0,"outcome":"scored","reward":0}
{"t":3,"event":"finish","group":2,"rollout":1,"outcome":"scored","reward":1}
{"t":4,"event":"finish","group":3,"rollout":0,"outcome":"scored","reward":1}
{"t":4,"event":"finish","group":3,"rollout":1,"outcome":"scored","reward":0}
{"t":11,"event":"tick"}
{"t":12,"event":"crash","who":"trainer"}
{"t":12,"event":"finish","group":4,"rollout":0,"outcome":"scored","reward":1}
{"t":12,"event":"finish","group":4,"rollout":1,"outcome":"scored","reward":0}
{"t":13,"event":"lease"}
{"t":14,"event":"update","batch":0}
{"t":14,"event":"commit","step":1})";

// What could go wrong: a field, an order or a number of the printed lines drifts from docs/pool_sim.md 5 (c).
TEST(WindowTrace, DeathAndCrashWordForWord) {
  EXPECT_THAT(Script(kDeathAndCrash, kDeathAndCrashEvents),
              testing::ElementsAre(
                  R"({"t":0,"decision":"admit","group":0,"source":"default","pos":0,"version":0,"head":[0],"ledger":[1,0,0,1]})",
                  R"({"t":0,"decision":"admit","group":1,"source":"default","pos":1,"version":0,"head":[0],"ledger":[2,0,0,2]})",
                  R"({"t":0,"decision":"admit","group":2,"source":"default","pos":2,"version":0,"head":[0],"ledger":[3,0,0,3]})",
                  R"({"t":0,"decision":"admit","group":3,"source":"default","pos":3,"version":0,"head":[0],"ledger":[4,0,0,4]})",
                  R"({"t":1,"decision":"hold","batch":0,"have":0,"need":2,"blocked":[],"head":[0],"ledger":[4,0,0,4]})",
                  R"({"t":2,"decision":"hold","batch":0,"have":0,"need":2,"blocked":[],"head":[0],"ledger":[4,0,0,4]})",
                  R"({"t":2,"decision":"tombstone","group":1,"reason":"zero_signal","head":[0],"ledger":[4,0,1,3]})",
                  R"({"t":2,"decision":"admit","group":4,"source":"default","pos":4,"version":0,"head":[0],"ledger":[5,0,1,4]})",
                  R"({"t":2,"decision":"hold","batch":0,"have":0,"need":2,"blocked":[],"head":[0],"ledger":[5,0,1,4]})",
                  R"({"t":3,"decision":"hold","batch":0,"have":0,"need":2,"blocked":[],"head":[0],"ledger":[5,0,1,4]})",
                  R"({"t":3,"decision":"ready","group":2,"valid":2,"partial":false,"head":[0],"ledger":[5,0,1,4]})",
                  R"({"t":3,"decision":"hold","batch":0,"have":0,"need":2,"blocked":[2],"head":[0],"ledger":[5,0,1,4]})",
                  R"({"t":4,"decision":"hold","batch":0,"have":0,"need":2,"blocked":[2],"head":[0],"ledger":[5,0,1,4]})",
                  R"({"t":4,"decision":"ready","group":3,"valid":2,"partial":false,"head":[0],"ledger":[5,0,1,4]})",
                  R"({"t":4,"decision":"hold","batch":0,"have":0,"need":2,"blocked":[2,3],"head":[0],"ledger":[5,0,1,4]})",
                  R"({"t":10,"decision":"requeue","group":0,"head":[2],"ledger":[5,0,2,3]})",
                  R"({"t":10,"decision":"take","group":2,"batch":0,"staleness":0,"head":[3],"ledger":[5,0,2,3]})",
                  R"({"t":10,"decision":"take","group":3,"batch":0,"staleness":0,"head":[4],"ledger":[5,0,2,3]})",
                  R"({"t":10,"decision":"lease","batch":0,"groups":[2,3],"staleness":[0,0],"again":false,"head":[4],"ledger":[5,0,2,3]})",
                  R"({"t":10,"decision":"admit","group":5,"source":"default","pos":5,"version":0,"from":0,"head":[4],"ledger":[6,0,2,4]})",
                  R"({"t":12,"decision":"recover","who":"trainer","batches":[0],"head":[4],"ledger":[6,0,2,4]})",
                  R"({"t":12,"decision":"ready","group":4,"valid":2,"partial":false,"head":[4],"ledger":[6,0,2,4]})",
                  R"({"t":13,"decision":"lease","batch":0,"groups":[2,3],"staleness":[0,0],"again":true,"head":[4],"ledger":[6,0,2,4]})",
                  R"({"t":14,"decision":"update","batch":0,"version":1,"groups":[2,3],"head":[4],"ledger":[6,2,2,2]})",
                  R"({"t":14,"decision":"admit","group":6,"source":"default","pos":6,"version":1,"head":[4],"ledger":[7,2,2,3]})",
                  R"({"t":14,"decision":"admit","group":7,"source":"default","pos":7,"version":1,"head":[4],"ledger":[8,2,2,4]})",
                  R"({"t":14,"decision":"commit","step":1,"head":[4],"ledger":[8,2,2,4]})",
                  R"({"bound":2,"max_staleness":0,"B":[4],"W":[2],"quota":[2],"version":1,"batches":1,"ledger":{"admitted":8,"consumed":2,"tombstoned":{"zero_signal":1,"requeued":1},"in_flight":4},"rollouts":{"issued":16,"finished":8,"failed":0,"aborted":2,"in_flight":6}})"));
}

// What could go wrong: a bad line changes the state or the clock, or ends the run.
TEST(WindowScript, BadLinesChangeNothing) {
  std::vector<std::string> out = Script(R"({"P":1})", R"(not json
{"t":5,"event":"dance"}
{"t":5,"event":"finish","group":9,"reward":1}
{"t":5,"event":"finish","group":0,"rollout":1,"reward":1}
{"t":5,"event":"finish","group":0,"outcome":"aborted","reward":1}
{"t":5,"event":"fail","group":0,"outcome":"scored"}
{"t":5,"event":"update"}
{"t":5,"event":"crash","who":"me"}
{"t":5,"event":"finish","group":0,"reward":"1"}
{"t":1,"event":"finish","group":0,"reward":1}
{"t":0.5,"event":"tick"})");
  ASSERT_EQ(out.size(), 13u);
  for (size_t i : {1, 2, 3, 4, 5, 6, 7, 8, 9, 11}) EXPECT_THAT(out[i], testing::StartsWith(R"({"error":{"kind":"invalid_argument","message":")")) << i;
  EXPECT_THAT(out[10], testing::StartsWith(R"({"t":1,"decision":"ready","group":0)"));
}

// What could go wrong: an impossible configuration is run instead of refused.
TEST(WindowScript, BadConfigurations) {
  for (const char* text : {
           R"([])", R"({})", R"({"P":0})", R"({"P":1,"Q":2})", R"({"P":1.5})", R"({"P":2,"B":1})", R"({"P":1,"S":-1})", R"({"P":1,"window":{"size":2}})",
           R"({"P":1,"window":{"size":1,"fraction":0.5}})", R"({"P":1,"window":{"policy":"strict","size":1}})", R"({"P":1,"window":{"fraction":1.5}})",
           R"({"P":1,"window":{"policy":"wide"}})", R"({"P":1,"zero_signal":"refill"})", R"({"P":1,"G":2,"min_valid":3})", R"({"P":1,"min_valid":0})",
           R"({"P":1,"deadline_s":0})", R"({"P":1,"on_deadline":"explode"})", R"({"P":1,"max_leases":2,"max_staleness":1})", R"({"P":1,"max_leases":0})",
           R"({"P":1,"sources":[{"name":"a","weight":1},{"name":"b","weight":1}]})", R"({"P":2,"B":4,"sources":[{"name":"a"},{"name":"b"}]})",
           R"({"P":2,"sources":[{"name":"a"},{"name":"a"}]})", R"({"P":1,"sources":[{"name":"a","weight":0}]})", R"({"P":1,"tasks":-1})",
           R"({"P":1,"world":{}})", R"({"P":1,"world":{"latency":{"dist":"fixed"}}})", R"({"P":1,"policies":[{"policy":"strict"}]})",
           R"({"P":1000000000,"S":1000000000})", R"({"P":1,"G":99999999999})",
           R"({"P":500000,"G":1000})", R"({"P":2,"B":900000,"G":2,"extra":3})"}) {
    EXPECT_FALSE(ParseSimConfig(text).ok()) << text;
  }
  // The defaults of docs/pool_sim.md 2.
  PoolConfig c = Config(R"({"P":10,"S":1,"G":8})");
  EXPECT_EQ(c.MinValid(), 2);
  EXPECT_EQ(Plan(c).window, std::vector<std::optional<int64_t>>{6});
  EXPECT_EQ(Plan(c).bound, 2);
  EXPECT_EQ(c.retries, 0);
  EXPECT_EQ(c.max_leases, 1);
}

// What could go wrong: a field that an event does not have is passed over, and the script means something else.
TEST(WindowScript, EachEventHasItsOwnFields) {
  for (const char* text : {R"({"t":1,"event":"fail","group":0,"reward":1})", R"({"t":1,"event":"lease","group":0})", R"({"t":1,"event":"tick","batch":0})",
                           R"({"t":1,"event":"update","batch":0,"step":1})", R"({"t":1,"event":"commit","step":1,"who":"pool"})",
                           R"({"t":1,"event":"crash","who":"pool","outcome":"aborted"})", R"({"t":1,"event":"finish","group":0,"step":1})"}) {
    const Result<TimedEvent> event = ParseEvent(text);
    ASSERT_FALSE(event.ok()) << text;
    EXPECT_NE(event.status().message().find("unknown key"), std::string::npos) << event.status().message();
  }
  EXPECT_EQ(ParseEvent(R"({"t":1,"event":"fail","group":0,"reward":1})").status().message().find("a fail"), 0u);
  Play endless(R"({"P":1})");
  EXPECT_EQ(endless.window.Apply(Of(Event::Kind::kLease), INFINITY).status().message(), "t: not a finite time");
}

// What could go wrong: a printed configuration reads back as another one.
TEST(WindowScript, ConfigurationRoundTrip) {
  for (const char* text : {R"({"P":3})", R"({"P":4,"S":2,"G":4,"extra":2,"min_valid":3,"retries":2,"deadline_s":0.1,"on_deadline":"wait","zero_signal":"refill","max_staleness":3,"max_leases":2,"tasks":9,"seed":5,"sources":[{"name":"a","weight":2.5,"tasks":7},{"name":"b","window":{"policy":"greedy"}}]})",
                           R"({"P":3,"B":7,"window":{"size":5}})", R"({"P":3,"window":{"policy":"areal"}})"}) {
    const std::string printed = PrintPoolConfig(Config(text));
    EXPECT_EQ(PrintPoolConfig(Config(printed)), printed);
    EXPECT_EQ(Config(printed).sources.size(), Config(text).sources.size());
    EXPECT_EQ(Plan(Config(printed)).window, Plan(Config(text)).window);
  }
}

// What could go wrong: failures are counted against the wrong budget, or end a rollout that should be played again.
TEST(Window, FailuresAreRetriedAndAbortsAreFree) {
  Play p(R"({"P":1,"G":2,"retries":1,"min_valid":1})");
  EXPECT_EQ(p.Fail(0, 0, "aborted"), "I0.0:2");
  EXPECT_EQ(p.Fail(0, 0), "I0.0:3");
  EXPECT_EQ(p.Fail(0, 0, "aborted"), "I0.0:4");
  EXPECT_EQ(p.Fail(0, 0), "");
  EXPECT_EQ(p.Fail(0, 0), "ignore");
  EXPECT_EQ(p.Finish(0, 1), "R0~");
  EXPECT_EQ(p.Finish(0, 1), "ignore");
}

// What could go wrong: a group that cannot become valid stays in flight for ever.
TEST(Window, TooFewValidIsBuried) {
  Play p(R"({"P":1,"G":3})");
  EXPECT_EQ(p.Finish(0, 0), "");
  EXPECT_EQ(p.Finish(0, 1, std::nullopt), "");
  EXPECT_EQ(p.Fail(0, 2), "X0:too_few_valid A1@0");
}

// What could go wrong: the spare rollouts of an over-sampled group keep running, or count as valid.
TEST(Window, SparesAreCutWhenEnoughAreValid) {
  Play p(R"({"P":1,"G":2,"extra":2})");
  p.Finish(0, 3);
  EXPECT_EQ(p.Finish(0, 1), "R0");
  EXPECT_EQ(p.window.totals().aborted, 2);
  EXPECT_EQ(p.Finish(0, 0), "ignore");
  p.Lease();
  std::vector<BatchMember> batch = p.window.Batch(0);
  ASSERT_EQ(batch.size(), 1u);
  EXPECT_EQ(batch[0].rollouts, (std::vector<int32_t>{1, 3}));
}

// What could go wrong: each way of meeting a deadline.
TEST(Window, Deadlines) {
  Play wait(R"({"P":1,"deadline_s":5,"on_deadline":"wait"})");
  EXPECT_EQ(wait.Tick(4.9), "");
  EXPECT_EQ(wait.Tick(5), "late0");
  EXPECT_EQ(wait.Tick(50), "");
  EXPECT_EQ(wait.Finish(0), "R0");

  Play at(R"({"P":1,"deadline_s":5})");
  EXPECT_EQ(at.Do(FinishEvent(0), 5), "R0") << "a finish at exactly that time counts";

  Play partial(R"({"P":1,"G":4,"deadline_s":5,"on_deadline":"requeue"})");
  partial.Finish(0, 1);
  partial.Finish(0, 2);
  EXPECT_EQ(partial.Tick(6), "R0~");
  EXPECT_EQ(partial.window.totals().aborted, 2);

  Play requeue(R"({"P":1,"S":1,"deadline_s":5,"on_deadline":"requeue"})");
  EXPECT_EQ(requeue.started, "A0@0 A1@0");
  requeue.Do(FinishEvent(1), 1);
  EXPECT_EQ(requeue.Tick(7), "Q0 A2@0<0");
  EXPECT_EQ(requeue.last.ledger.at(1).reason, "requeued");
  EXPECT_EQ(requeue.Tick(10), "X2:deadline A3@0") << "a second deadline is the end";
}

// What could go wrong: a deadline that fires first admits the very group an event speaks of, or fires for an event that is refused.
TEST(Window, DeadlinesBeforeAnEventOfANewGroup) {
  Play p(R"({"P":1,"deadline_s":5})");
  const std::string before = p.window.Store();
  EXPECT_EQ(p.Do(FinishEvent(7), 6), "error");
  EXPECT_EQ(p.window.Store(), before);
  EXPECT_EQ(p.Do(FinishEvent(1), 6), "X0:deadline A1@0 R1");
}

// What could go wrong: refusals and repeats are taken for the real thing.
TEST(Window, RefusalsAndRepeats) {
  Play p(R"({"P":1,"S":1})");
  EXPECT_EQ(p.Update(0), "refuse:no_lease");
  EXPECT_EQ(p.Lease(), "H0+1[]");
  EXPECT_EQ(p.Lease(), "refuse:open H0+1[]");
  EXPECT_EQ(p.Finish(0), "R0 T0/0 L0[0]");
  EXPECT_EQ(p.Lease(), "refuse:outstanding");
  EXPECT_EQ(p.Commit(1), "refuse:order");
  EXPECT_EQ(p.Update(0), "U1 A2@1");
  EXPECT_EQ(p.Update(0), "ignore");
  EXPECT_EQ(p.Commit(1), "C1");
  EXPECT_EQ(p.Commit(1), "ignore");
  EXPECT_EQ(p.Commit(0), "ignore");

  Play two(R"({"P":1,"S":2,"max_leases":2})");
  two.Finish(0);
  two.Finish(1);
  two.Lease();
  EXPECT_EQ(two.Lease(), "T1/1 L1[1]");
  EXPECT_EQ(two.Update(1), "refuse:order");
}

// What could go wrong: a trainer crash loses, doubles or reorders batches, or forgets that their groups hold slots again.
TEST(Window, TrainerCrashBringsBatchesBackUnchanged) {
  Play p(R"({"P":2,"S":1,"window":{"policy":"greedy"}})");
  for (int g : {3, 1, 0, 2}) p.Finish(g);
  EXPECT_EQ(p.Lease(), "T0/0 T1/0 L0[0,1]");
  EXPECT_EQ(p.Update(0), "U1 A4@1 A5@1");
  EXPECT_EQ(p.Lease(), "T2/1 T3/1 L1[2,3]");
  EXPECT_EQ(p.Update(1), "U2 A6@2 A7@2");
  EXPECT_EQ(p.Finish(5), "R5");
  EXPECT_EQ(p.Lease(), "T5/1 H1+1[]");
  EXPECT_EQ(p.CrashTrainer(), "recover:trainer[0,1]");
  EXPECT_EQ(p.window.version(), 0);
  EXPECT_EQ(p.window.totals().in_flight, 8);
  EXPECT_EQ(p.Update(0), "refuse:no_lease");
  EXPECT_EQ(p.Lease(), "L0[0,1]!");
  EXPECT_EQ(p.Update(0), "U1");
  EXPECT_EQ(p.Commit(1), "C1");
  EXPECT_EQ(p.CrashTrainer(), "recover:trainer[1]");
  EXPECT_EQ(p.Lease(), "L1[2,3]!");
  EXPECT_EQ(p.Update(1), "U2");
  EXPECT_EQ(p.Finish(4), "R4");
  EXPECT_EQ(p.Lease(), "T4/1 L2[5,4]") << "the batch being filled stayed as it was";
}

// What could go wrong: a crash of the pool closes the open request, or answers it with a hold of its own.
TEST(Window, PoolCrashKeepsTheOpenRequest) {
  std::vector<std::string> out = Script(R"({"P":1})", R"({"t":1,"event":"lease"}
{"t":2,"event":"crash","who":"pool"}
{"t":3,"event":"finish","group":0,"reward":1})");
  ASSERT_EQ(out.size(), 7u);
  EXPECT_EQ(out[2], R"({"t":2,"decision":"recover","who":"pool","batches":[],"head":[0],"ledger":[1,0,0,1]})");
  EXPECT_THAT(out[5], testing::HasSubstr(R"("decision":"lease","batch":0,"groups":[0])"));
}

// What could go wrong: shares, positions and windows of sources mix.
TEST(Window, SourcesKeepTheirShares) {
  Play p(R"({"P":3,"S":1,"sources":[{"name":"a","weight":1,"tasks":3},{"name":"b","weight":3}]})");
  EXPECT_EQ(p.window.plan().quota, (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(p.started, "A0@0 A1@0 A2@0 A3@0 A4@0 A5@0");
  for (int g : {2, 3, 4, 5}) p.Finish(g);
  EXPECT_EQ(p.Lease(), "T2/0 T3/0 H2+1[]");
  EXPECT_EQ(p.Finish(1), "R1 H2+1[1]") << "the window of a is one position";
  EXPECT_EQ(p.Finish(0), "R0 T0/0 L0[2,3,0]");
  EXPECT_EQ(p.last.decisions.back().head, (std::vector<std::optional<int64_t>>{1, 4}));
  EXPECT_EQ(p.Update(0), "U1 A6@1 A7@1 A8@1");
  EXPECT_EQ(p.Lease(), "T1/1 T4/1 T5/1 L1[1,4,5]");
  EXPECT_EQ(p.Update(1), "U2 A9@2 A10@2") << "a has no task left";
  EXPECT_FALSE(p.window.exhausted());
  p.Fail(6);
  EXPECT_TRUE(p.window.exhausted());
}

// What could go wrong: groups too old for the safety net reach the trainer, or the net catches others.
TEST(Window, MaxStaleness) {
  Play p(R"({"P":1,"S":3,"window":{"size":4},"max_staleness":1})");
  for (int g : {1, 2, 3}) p.Finish(g);
  EXPECT_EQ(p.Lease(), "T1/0 L0[1]");
  EXPECT_EQ(p.Update(0), "U1 A4@1");
  EXPECT_EQ(p.Lease(), "T2/1 L1[2] X0:stale X3:stale A5@1 A6@1");
}

// What could go wrong: stopping loses groups, or the end of a job leaves rollouts open.
TEST(Window, CloseAndReopen) {
  Play p(R"({"P":1,"S":1,"G":2})");
  p.Finish(1, 0);
  p.Finish(1, 1);
  p.Finish(0, 1);
  Event close = Of(Event::Kind::kClose);
  close.reason = "stopped";
  EXPECT_EQ(p.Do(close), "");
  EXPECT_EQ(p.window.totals().running, 0);
  EXPECT_EQ(p.window.totals().in_flight, 2);
  EXPECT_EQ(p.Lease(), "refuse:closed");
  EXPECT_EQ(p.Finish(0, 0), "ignore");
  p.window = *Window::Rebuild(p.window.config(), p.window.Store());
  EXPECT_EQ(p.Do(Of(Event::Kind::kReopen)), "recover:job[] I0.0:2");
  EXPECT_EQ(p.Finish(0, 0), "R0");
  EXPECT_EQ(p.Lease(), "T0/0 L0[0]");
  EXPECT_EQ(p.Update(0), "U1 A2@1");
  close.reason = "job_end";
  EXPECT_EQ(p.Do(close), "X2:job_end");
  EXPECT_EQ(p.window.totals().running, 0);
  EXPECT_EQ(p.Commit(1), "C1");
  EXPECT_EQ(p.Do(Of(Event::Kind::kReopen)), "error");
}

// What could go wrong: a listing contradicts the ledger.
TEST(Listing, GroupsAndTheirStories) {
  Play p(R"({"P":1,"S":1,"G":2,"retries":1})");
  std::vector<LedgerRecord> ledger;
  auto keep = [&] {
    for (const LedgerLine& line : p.last.ledger) ledger.push_back({static_cast<int64_t>(ledger.size()) + 1, line});
  };
  Window fresh(p.window.config());
  p.last = fresh.Start(0);
  keep();
  for (const Event& e : {FailEvent(0, 0), FinishEvent(0, 0, 0.5), FinishEvent(0, 1, 1), Of(Event::Kind::kLease), Of(Event::Kind::kUpdate, 0), Of(Event::Kind::kCommit, 1),
                         FinishEvent(1, 0, std::nullopt), FinishEvent(1, 1)}) {
    p.Do(e);
    keep();
  }
  std::string text;
  for (const LedgerRecord& r : ledger) text += PrintLedger(r) + "\n";
  Result<std::vector<LedgerRecord>> read = ReadLedger(text + "{\"seq\":");
  ASSERT_TRUE(read.ok());
  EXPECT_EQ(*read, ledger);
  EXPECT_FALSE(ReadLedger("{}\n").ok());
  std::vector<std::string> groups = ListGroups(ledger);
  ASSERT_EQ(groups.size(), 4u);
  EXPECT_EQ(groups[0], R"({"group":0,"source":"default","task":0,"version_admitted":0,"state":"consumed","step":1,"attempts":3,"running":0,"outcomes":{"infra_failure":1,"scored":2},"reward_mean":0.75})");
  EXPECT_EQ(groups[1], R"({"group":1,"source":"default","task":1,"version_admitted":0,"state":"tombstoned","reason":"too_few_valid","attempts":2,"running":0,"outcomes":{"scored":2},"reward_mean":1})");
  EXPECT_THAT(groups[3], testing::HasSubstr(R"("state":"running","attempts":2,"running":2)"));
  Result<std::vector<std::string>> story = ExplainGroup(ledger, 0);
  ASSERT_TRUE(story.ok());
  EXPECT_EQ(story->size(), 10u);
  EXPECT_THAT(story->back(), testing::HasSubstr(R"("event":"commit","step":1)"));
  EXPECT_EQ(ExplainGroup(ledger, 9).status().code(), StatusCode::kNotFound);
}

}  // namespace
}  // namespace temper::datapool
