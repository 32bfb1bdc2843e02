// The numbers of the live view, from roles that say what the test tells them to, on a clock that the test moves.
#include "job/watcher.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/file.h"
#include "common/metrics.h"
#include "common/rpc.h"
#include "trainer/loop.h"

namespace temper::job {
namespace {

// A role of which only the numbers exist.
class Role {
 public:
  explicit Role(const std::string& name) {
    const std::string socket = "temper-watcher-test-" + std::to_string(getpid()) + "-" + name;
    address = "unix-abstract:" + socket;
    server_ = std::make_unique<RpcServer>(ListenAbstract(socket).value());
    server_->RegisterRole(name, &metrics, [](const std::string&) {});
    EXPECT_TRUE(server_->Start().ok());
  }
  temper::Metrics metrics;
  std::string address;

 private:
  std::unique_ptr<RpcServer> server_;
};

class WatcherTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = testing::TempDir() + "temper_watcher_XXXXXX";
    ASSERT_TRUE(mkdtemp(pattern.data()));
    options_.run_dir = pattern;
    options_.steps = 9;
    for (Role* role : {&gateway_, &trainer_, &pool_}) options_.addresses[role == &gateway_ ? "gateway" : role == &trainer_ ? "trainer" : "pool"] = role->address;
  }
  void TearDown() override { EXPECT_TRUE(RemoveAll(options_.run_dir).ok()); }
  // A look at the roles after some seconds in which so many tokens were drawn.
  News Look(Watcher& watcher, double seconds, double tokens) {
    clock_.Advance(seconds);
    gateway_.metrics["tokens_sampled"].Add(tokens);
    watcher.PollNow(10);
    return watcher.Refresh();
  }
  void Step(int step) {
    EXPECT_TRUE(AppendFile(options_.run_dir + "/metrics.jsonl", "{\"step\":" + std::to_string(step) + ",\"reward_mean\":0.5}\n").ok());
  }

  FakeClock clock_{1000};
  Role gateway_{"gateway"}, trainer_{"trainer"}, pool_{"pool"};
  WatcherOptions options_;
};

// A worker that waits while the trainer trains draws nothing at the moment a step is done: its rate was said to be 0.
TEST_F(WatcherTest, AStepsRateIsOfItsWholeTime) {
  Watcher watcher(options_, clock_);
  Look(watcher, 0, 0);
  Look(watcher, 90, 0);    // warming up is no time of sampling
  Look(watcher, 10, 500);  // the first tokens came within these ten seconds
  Look(watcher, 40, 0);    // training
  Step(1);
  News news = Look(watcher, 0.5, 0);
  ASSERT_EQ(news.steps.size(), 1u);
  EXPECT_NEAR(news.steps[0].sample_tokens_per_s.value(), 500 / 50.5, 1e-9);
  EXPECT_EQ(watcher.view().sample_tokens_per_s, 0) << "nothing in the last seconds, which is what the panel says";
  Look(watcher, 10, 300);
  Step(2);
  Step(3);  // two between two looks share their time
  news = Look(watcher, 10, 100);
  ASSERT_EQ(news.steps.size(), 2u);
  EXPECT_EQ(news.steps[0].sample_tokens_per_s, 20);
  EXPECT_EQ(news.steps[1].sample_tokens_per_s, 20);
  // Right behind another one, of a batch that was ready: seen before the roles were looked at again, or before a token more.
  Step(4);
  news = watcher.Refresh();
  ASSERT_EQ(news.steps.size(), 1u);
  EXPECT_EQ(news.steps[0].sample_tokens_per_s, 20);
  Step(5);
  news = Look(watcher, 0.5, 0);
  ASSERT_EQ(news.steps.size(), 1u);
  EXPECT_NEAR(news.steps[0].sample_tokens_per_s.value(), 400 / 20.5, 1e-9);
  // Then from there on.
  Step(6);
  news = Look(watcher, 4, 40);
  ASSERT_EQ(news.steps.size(), 1u);
  EXPECT_EQ(news.steps[0].sample_tokens_per_s, 10);
}

// Who begins to watch in the midst of a run took all its tokens for those of the first half second.
TEST_F(WatcherTest, TheRateIsBetweenTwoLooks) {
  gateway_.metrics["tokens_sampled"].Set(1e6);
  Watcher watcher(options_, clock_);
  watcher.Refresh();
  EXPECT_FALSE(watcher.view().sample_tokens_per_s);
  Look(watcher, 1, 0);
  EXPECT_FALSE(watcher.view().sample_tokens_per_s) << "one look";
  watcher.Refresh();  // the same look again
  EXPECT_FALSE(watcher.view().sample_tokens_per_s);
  Look(watcher, 2, 100);
  EXPECT_EQ(watcher.view().sample_tokens_per_s, 50);
  Look(watcher, 2, 0);
  EXPECT_EQ(watcher.view().sample_tokens_per_s, 25);
  for (int i = 0; i < 10; ++i) Look(watcher, 2, 20);
  EXPECT_EQ(watcher.view().sample_tokens_per_s, 10) << "only the last seconds count";
  clock_.Advance(60);
  watcher.Refresh();
  EXPECT_EQ(watcher.view().sample_tokens_per_s, 0) << "the gateway is gone";
}

// What the trainer is at comes from the trainer, and what stood in the files before is no news.
TEST_F(WatcherTest, PhasesAndNews) {
  Step(1);
  Step(2);
  Watcher watcher(options_, clock_);
  EXPECT_TRUE(watcher.Refresh().steps.empty());
  EXPECT_EQ(watcher.view().history.size(), 2u);
  for (const auto& [phase, name] : {std::pair{trainer::Phase::kStarting, "starting"}, {trainer::Phase::kWarmUp, "warm-up"},
                                    {trainer::Phase::kEvaluating, "evaluating"}, {trainer::Phase::kCollecting, "collecting"},
                                    {trainer::Phase::kProving, "proving"}, {trainer::Phase::kTraining, "training"}}) {
    trainer_.metrics["phase"].Set(static_cast<double>(phase));
    Look(watcher, 1, 0);
    EXPECT_EQ(watcher.view().phase, name);
  }
  pool_.metrics["finished"].Set(40);
  Look(watcher, 1, 0);
  Step(3);
  Look(watcher, 1, 0);
  pool_.metrics["finished"].Set(47);
  Look(watcher, 1, 0);
  EXPECT_EQ(watcher.view().rollouts_since_step, 7);
  // A rollback cuts the file; its steps are done again, and said again.
  ASSERT_TRUE(WriteFile(options_.run_dir + "/metrics.jsonl", "").ok());
  Step(1);
  EXPECT_TRUE(watcher.Refresh().steps.empty());
  Step(2);
  EXPECT_EQ(watcher.Refresh().steps.size(), 1u);
}

// An alarm that stands in a log alone wakes nobody.
TEST_F(WatcherTest, WhatTheRolesSayIsNews) {
  Watcher watcher(options_, clock_);
  EXPECT_TRUE(Look(watcher, 1, 0).said.empty());
  pool_.metrics.Say("alarm: head_wait: group 3 runs");
  trainer_.metrics.Say("alarm: head_wait: group 3 runs");
  EXPECT_EQ(Look(watcher, 1, 0).said, (std::vector<std::string>{"pool: alarm: head_wait: group 3 runs", "trainer: alarm: head_wait: group 3 runs"}));
  EXPECT_EQ(watcher.view().notes.size(), 2u);
  EXPECT_TRUE(Look(watcher, 1, 0).said.empty()) << "once";
  // More than the roles keep, of different kinds; and then some that push the former ones out.
  auto say = [&](char from, char to) {
    for (char c = from; c <= to; ++c) pool_.metrics.Say(std::string("line ") + c);
    return Look(watcher, 1, 0).said;
  };
  EXPECT_EQ(say('a', 'f').size(), 6u);
  EXPECT_EQ(say('g', 'z').size(), 20u);
  EXPECT_EQ(say('A', 'C'), (std::vector<std::string>{"pool: line A", "pool: line B", "pool: line C"}));
  EXPECT_EQ(watcher.view().notes.size(), 20u);
  EXPECT_EQ(watcher.view().notes.back(), "pool: line C");
}

}  // namespace
}  // namespace temper::job
