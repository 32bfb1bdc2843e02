#include "common/env.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <set>
#include <vector>

namespace temper {
namespace {

// A generator whose values changed would change every job of a given seed.
TEST(Rng, ValuesAreFixed) {
  Rng rng(7);
  const uint64_t first = rng.Next();
  EXPECT_EQ(Rng(7).Next(), first);
  EXPECT_NE(Rng(8).Next(), first);
  EXPECT_EQ(HashName(1, "tasks"), HashName(1, "tasks"));
  EXPECT_NE(HashName(1, "tasks"), HashName(2, "tasks"));
  EXPECT_NE(HashName(1, "tasks"), HashName(1, "tasksx"));
}

// A fork that depended on earlier draws would couple parts that should be independent.
TEST(Rng, ForksDoNotDependOnDraws) {
  Rng a(7), b(7);
  b.Next();
  EXPECT_EQ(a.Fork("x").Next(), b.Fork("x").Next());
  EXPECT_NE(a.Fork("x").Next(), a.Fork("y").Next());
  EXPECT_NE(a.Fork("x", 0).Next(), a.Fork("x", 1).Next());
}

// A biased or out-of-range draw would show in the moments and the range.
TEST(Rng, MomentsAndRanges) {
  Rng rng(1);
  double sum = 0, square = 0, uniform = 0;
  const int n = 40000;
  std::set<int64_t> seen;
  for (int i = 0; i < n; ++i) {
    const double x = rng.Normal();
    sum += x;
    square += x * x;
    const double u = rng.Uniform();
    ASSERT_TRUE(u >= 0 && u < 1);
    uniform += u;
    seen.insert(rng.Between(-2, 2));
    ASSERT_LT(rng.Below(3), 3u);
  }
  EXPECT_NEAR(sum / n, 0, 0.03);
  EXPECT_NEAR(square / n, 1, 0.04);
  EXPECT_NEAR(uniform / n, 0.5, 0.01);
  EXPECT_EQ(seen, (std::set<int64_t>{-2, -1, 0, 1, 2}));
  EXPECT_EQ(rng.Between(INT64_MIN, INT64_MIN), INT64_MIN);
  rng.Between(INT64_MIN, INT64_MAX);
}

// A shuffle that loses or repeats items would corrupt task lists.
TEST(Rng, ShuffleIsAPermutation) {
  Rng rng(3);
  std::vector<int> items{1, 2, 3, 4, 5, 6, 7, 8};
  auto shuffled = items;
  rng.Shuffle(shuffled);
  EXPECT_NE(shuffled, items);
  EXPECT_EQ(std::multiset<int>(shuffled.begin(), shuffled.end()), std::multiset<int>(items.begin(), items.end()));
}

// Code under a fake clock must see time move only when the test says so.
TEST(FakeClock, MovesByHand) {
  FakeClock clock(5, 1000);
  clock.SleepS(2.5);
  EXPECT_EQ(clock.NowS(), 7.5);
  EXPECT_EQ(clock.WallS(), 1002.5);
}

// A point that fires at the wrong hit, or more than once, would make crash tests test something else.
TEST(Faults, FireOnceAtTheirTurn) {
  Faults faults;
  ASSERT_TRUE(Faults::Parse("a=fail@2; ", &faults).ok() == false);
  Faults good;
  ASSERT_TRUE(Faults::Parse("a=fail@2;b=sleep:0", &good).ok());
  EXPECT_TRUE(good.Hit("a").ok());
  EXPECT_FALSE(good.Hit("a").ok());
  EXPECT_TRUE(good.Hit("a").ok());
  EXPECT_TRUE(good.Hit("b").ok());
  EXPECT_TRUE(good.Hit("other").ok());
}

// Nonsense must be named rather than armed as something else.
TEST(Faults, BadListsAreRefused) {
  for (const char* text : {"a", "=exit", "a=boom", "a=fail@0", "a=fail@x", "a=sleep:", "a=sleep:-1", "a=fail@2z"}) {
    Faults faults;
    EXPECT_FALSE(Faults::Parse(text, &faults).ok()) << text;
  }
}

// `exit` stands for kill -9: no destructor, no buffer flush.
TEST(Faults, ExitKills) {
  const pid_t child = fork();
  if (child == 0) {
    Faults faults;
    faults.Arm("x", "exit");
    (void)faults.Hit("x");
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

}  // namespace
}  // namespace temper
