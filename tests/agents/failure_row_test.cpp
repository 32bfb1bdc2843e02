#include "agents/failure_row.h"

#include <gtest/gtest.h>

#include <queue>
#include <string>
#include <vector>

#include "common/rng.h"

namespace temper::agents {
namespace {

TEST(FailureRow, CountsOneCauseUpToItsLimit) {
  FailureRow row(3);
  row.Fail(row.Begin(), "agent_exit", "exit code 1");
  row.Fail(row.Begin(), "agent_exit", "exit code 2");
  row.Abort(row.Begin());
  EXPECT_FALSE(row.too_long());
  row.Fail(row.Begin(), "agent_exit", "exit code 3");
  ASSERT_TRUE(row.too_long());
  EXPECT_EQ(row.too_long()->failures, 3);
  EXPECT_EQ(row.too_long()->cause, "agent_exit");
  EXPECT_EQ(row.too_long()->detail, "exit code 3");
  row.Fail(row.Begin(), "agent_exit", "later");
  EXPECT_EQ(row.too_long()->failures, 3) << "the first row is the one that is told";
}

TEST(FailureRow, WhatHasNoCauseIsACauseToo) {
  FailureRow row(3);
  for (int i = 0; i < 3; ++i) row.Fail(row.Begin(), "", "nothing said");
  ASSERT_TRUE(row.too_long());
  EXPECT_EQ(row.too_long()->cause, "unknown");
}

TEST(FailureRow, AnotherCauseOrAnyOtherEndBreaksIt) {
  FailureRow row(3);
  for (const char* cause : {"a", "a", "b", "b", "a", "a"}) row.Fail(row.Begin(), cause, "");
  row.End(row.Begin());
  for (const char* cause : {"a", "a"}) row.Fail(row.Begin(), cause, "");
  EXPECT_FALSE(row.too_long());
  row.Fail(row.Begin(), "a", "");
  EXPECT_TRUE(row.too_long());
}

TEST(FailureRow, AnAttemptThatRunsHoldsBackThoseBehindIt) {
  FailureRow row(3);
  const int64_t slow = row.Begin();
  for (int i = 0; i < 2; ++i) row.Fail(row.Begin(), "a", "");
  const int64_t second = row.Begin();
  for (int i = 0; i < 2; ++i) row.Fail(row.Begin(), "a", "");
  EXPECT_FALSE(row.too_long());
  row.End(second);
  row.End(slow);
  EXPECT_FALSE(row.too_long()) << "two and two, with a success between them";
  row.Fail(row.Begin(), "a", "");
  EXPECT_TRUE(row.too_long());
}

TEST(FailureRow, AHangHidesABrokenPartOnlySoLong) {
  FailureRow row(3);
  row.Begin();
  for (int i = 0; i < 29; ++i) row.Fail(row.Begin(), "a", "");
  EXPECT_FALSE(row.too_long());
  row.Fail(row.Begin(), "a", "");
  ASSERT_TRUE(row.too_long());
  EXPECT_EQ(row.too_long()->failures, 30);
}

// 32 attempts at once, failures a hundred times as quick as successes. A share that fails by luck of its own stops nothing
// (0.3^12 a start), all failing stops after the limit.
TEST(FailureRow, AShareOfQuickFailuresIsNoRow) {
  struct End {
    double at;
    int64_t place;
    bool failed;
    bool operator<(const End& other) const { return at > other.at; }
  };
  int64_t ended = 0;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    for (const double share : {0.1, 0.3, 1.0}) {
      FailureRow row(12);
      Rng rng(seed);
      std::priority_queue<End> running;
      double now = 0;
      const auto begin = [&] {
        const bool failed = rng.Chance(share);
        running.push({now + (failed ? 0.01 : 1.0) * (0.5 + rng.Uniform()), row.Begin(), failed});
      };
      for (int i = 0; i < 32; ++i) begin();
      for (int i = 0; i < 400 && !row.too_long(); ++i, ++ended) {
        const End end = running.top();
        running.pop();
        now = end.at;
        if (end.failed) {
          row.Fail(end.place, "agent_exit", "");
        } else {
          row.End(end.place);
        }
        begin();
      }
      EXPECT_EQ(row.too_long().has_value(), share == 1.0) << "seed " << seed << ", share " << share;
    }
  }
  EXPECT_GT(ended, 20 * 2 * 400) << "the shares were played to their end";
}

}  // namespace
}  // namespace temper::agents
