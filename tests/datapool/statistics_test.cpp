#include "datapool/statistics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/datapool/script.h"

namespace temper::datapool {
namespace {

struct Counted {
  Counted(const std::string& config, std::vector<int64_t> tasks) : play(config), statistics(Config(config), std::move(tasks)) {
    Window fresh(Config(config));
    for (const LedgerLine& l : fresh.Start(0).ledger) statistics.Add(l);
  }
  void Do(const Event& e, double t) {
    ASSERT_NE(play.Do(e, t), "error");
    for (const LedgerLine& l : play.last.ledger) statistics.Add(l);
  }
  Play play;
  Statistics statistics;
};

// What could go wrong: a rollout is counted for another task, twice after a trainer crash, or a failure becomes a reward.
TEST(Statistics, HowEachTaskGoes) {
  Counted c(R"({"P":1,"S":1,"G":2,"retries":1,"zero_signal":"refill"})", {2});
  c.Do(FinishEvent(0, 0, 1), 1);
  c.Do(FailEvent(0, 1), 2);
  c.Do(FinishEvent(0, 1, 0.25), 3);
  c.Do(FinishEvent(1, 0, 0.5), 4);
  c.Do(FinishEvent(1, 1, 0.5), 5);  // no signal; group 2 takes its place: task 0 again
  c.Do(Of(Event::Kind::kLease), 6);
  c.Do(Of(Event::Kind::kUpdate, 0), 7);
  EXPECT_EQ(c.statistics.tasks().at({"default", 0}).trained, 1);
  EXPECT_NE(c.statistics.length_bias(), 1);
  c.Do(Of(Event::Kind::kCrashTrainer), 8);
  EXPECT_EQ(c.statistics.tasks().at({"default", 0}).trained, 0) << "its step is gone";
  EXPECT_EQ(c.statistics.length_bias(), 1) << "nothing is trained";
  c.Do(Of(Event::Kind::kLease), 9);
  c.Do(Of(Event::Kind::kUpdate, 0), 10);
  c.Do(Of(Event::Kind::kCommit, 1), 11);
  const TaskFacts& first = c.statistics.tasks().at({"default", 0});
  EXPECT_EQ(first.groups, 2);
  EXPECT_EQ(first.trained, 1);
  EXPECT_EQ(first.rewarded, 2);
  EXPECT_EQ(first.unrewarded, 1);
  EXPECT_EQ(first.reward_mean(), 0.625);
  EXPECT_EQ(first.reward_min, 0.25);
  EXPECT_EQ(first.zero_signal, 0);
  const TaskFacts& second = c.statistics.tasks().at({"default", 1});
  EXPECT_EQ(second.zero_signal, 1);
  EXPECT_EQ(second.buried, 1);
  EXPECT_EQ(second.trained, 0);
  EXPECT_EQ(c.statistics.zero_signal_groups(), 1);
  EXPECT_EQ(c.statistics.complete_groups(), 2);
  EXPECT_THAT(ListTasks(c.statistics).at(0), testing::StartsWith(R"({"source":"default","task":1,"groups":2,"trained":0,"zero_signal":1,"buried":1,"rewarded":2)"));
}

// What could go wrong: the bias of over-sampling is not seen, or seen where there is none.
TEST(Statistics, LengthBiasOfCutSpares) {
  Counted even(R"({"P":1,"S":0,"G":2})", {});
  even.Do(FinishEvent(0, 0, 1), 1);
  even.Do(FinishEvent(0, 1, 0), 9);
  EXPECT_EQ(even.statistics.length_bias(), 1) << "nothing is trained yet";
  even.Do(Of(Event::Kind::kLease), 9);
  even.Do(Of(Event::Kind::kUpdate, 0), 10);
  EXPECT_EQ(even.statistics.length_bias(), 1) << "all that was drawn is trained";

  // The spare, longer than both, is cut when it has had 3 seconds: trained (1 + 3) / 2, drawn (1 + 3 + 3) / 3.
  Counted cut(R"({"P":1,"S":0,"G":2,"extra":1})", {});
  cut.Do(FinishEvent(0, 0, 1), 1);
  cut.Do(FinishEvent(0, 2, 0), 3);
  cut.Do(Of(Event::Kind::kLease), 4);
  cut.Do(Of(Event::Kind::kUpdate, 0), 5);
  EXPECT_DOUBLE_EQ(cut.statistics.length_bias(), 2.0 / (7.0 / 3));
}

}  // namespace
}  // namespace temper::datapool
