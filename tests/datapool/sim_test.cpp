// Generated worlds and what is learnt from them.
#include "datapool/sim.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/strings.h"
#include "tests/datapool/script.h"

namespace temper::datapool {
namespace {

// The ledger of a run of groups of one: rollout i takes latencies[i % n] seconds, a step of the trainer `trainer_s`.
std::string LedgerOf(const std::vector<double>& latencies, double trainer_s) {
  std::string text;
  int64_t seq = 0;
  auto add = [&](LedgerLine line) { text += PrintLedger({++seq, std::move(line)}) + "\n"; };
  double t = 0;
  for (int64_t i = 0; i < 40; ++i) {
    const double latency = latencies[static_cast<size_t>(i) % latencies.size()];
    LedgerLine line;
    line.kind = LedgerLine::Kind::kIssue;
    line.t = t;
    line.group = i;
    line.rollout = 0;
    line.attempt = 1;
    add(line);
    line.kind = LedgerLine::Kind::kOutcome;
    line.t = t + latency;
    line.outcome = "scored";
    line.reward = 1;
    add(line);
    LedgerLine lease;
    lease.kind = LedgerLine::Kind::kLease;
    lease.t = t + latency;
    lease.step = i + 1;
    lease.groups = {i};
    add(lease);
    LedgerLine consume;
    consume.kind = LedgerLine::Kind::kConsume;
    consume.t = t = lease.t + trainer_s;
    consume.group = i;
    consume.step = i + 1;
    consume.version_admitted = consume.version_consumed = i;
    add(consume);
  }
  return text;
}

// What could go wrong: the advice is to be staler than what pays, or not stale enough to keep the trainer busy, or the trainer's time
// is misread.
TEST(Advice, IsTheLeastBoundThatIsFast) {
  const PoolConfig config = Config(R"({"P":2,"S":1,"window":{"fraction":0.5}})");
  auto advise = [&](const std::vector<double>& latencies, double trainer_s) {
    Result<Advice> advice = Advise(config, LedgerOf(latencies, trainer_s), 100);
    TEMPER_CHECK(advice.ok()) << advice.status().message();
    return *std::move(advice);
  };
  // The trainer is all there is: fresh groups cost one second in a hundred.
  const Advice slow_trainer = advise({1}, 100);
  EXPECT_EQ(slow_trainer.world.trainer_s, 100);
  EXPECT_EQ(slow_trainer.steps, 40);
  EXPECT_EQ(slow_trainer.reports[slow_trainer.best].S, 0);
  // Both take equally long: one batch ahead hides sampling behind training, more does nothing.
  const Advice even = advise({1}, 1);
  EXPECT_EQ(even.reports[even.best].S, 1);
  EXPECT_EQ(even.reports[even.best].plan.bound, 1);
  // One rollout in eight takes sixteen times as long: a window lets the others pass it.
  const Advice tail = advise({1, 1, 1, 1, 1, 1, 1, 16}, 1);
  EXPECT_GT(*tail.reports[tail.best].plan.window[0], 1);
  EXPECT_GE(tail.reports[tail.best].S, 2);
  // What the run has: two of four slots.
  EXPECT_EQ(even.reports[even.own].S, 1);
  EXPECT_EQ(even.reports[even.own].plan.window[0], 2);
  EXPECT_THAT(PrintAdvice(even), testing::StartsWith(R"({"recommend":{"S":1,"policy":"strict","W":[1],"bound":1})"));
  EXPECT_FALSE(Advise(config, "", 100).ok());
  EXPECT_FALSE(Advise(config, PrintLedger({1, {}}) + "\n", 100).ok());
}

// What could go wrong: a slow source's rollouts are mixed into a quick one's, and what waits for it goes unseen. Each step needs a
// group of both: it takes as long as the slow one.
TEST(Advice, EachSourceTakesTheTimesOfItsOwn) {
  const PoolConfig config = Config(R"({"P":2,"S":0,"sources":[{"name":"quick"},{"name":"slow"}]})");
  World world;
  world.latency.dist = "ledger";
  world.updates = 10;
  world.trainer_s = 1;
  std::vector<RecordedRollout> recorded;
  for (int i = 0; i < 12; ++i) {
    recorded.push_back({1, false, 1.0, "quick"});
    if (i % 3 == 0) recorded.push_back({8, false, 1.0, "slow"});
  }
  const Result<WorldReport> own = RunWorld(config, world, recorded, nullptr, nullptr);
  ASSERT_TRUE(own.ok());
  EXPECT_EQ(own->time, 10 * (8 + 1));
  // One that recorded nothing has what there is.
  for (RecordedRollout& r : recorded) r.source = "quick";
  const Result<WorldReport> mixed = RunWorld(config, world, recorded, nullptr, nullptr);
  ASSERT_TRUE(mixed.ok());
  EXPECT_LT(mixed->time, 10 * (8 + 1));
}

}  // namespace
}  // namespace temper::datapool
