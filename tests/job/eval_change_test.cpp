// The paired bootstrap against cases whose answer is known, and against its definition restated.
#include "job/eval_change.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>

#include "common/file.h"

namespace temper::job {
namespace {

using Rewards = std::vector<std::optional<double>>;

// An interval could have a width where nothing varies, or a lost task could count as a zero.
TEST(EvalChange, HandComputed) {
  const auto same = PairedChange({0, 1, 0.5}, {0, 1, 0.5}, Rng(1)).value();
  EXPECT_EQ(same.mean, 0);
  EXPECT_EQ(same.low, 0);
  EXPECT_EQ(same.high, 0);
  EXPECT_EQ(same.tasks, 3);
  EXPECT_EQ(same.resamples, 10000);
  // Unequal tasks, but each rises by a quarter: only pairing makes the interval a point.
  const auto shifted = PairedChange({0, 0.75, 0.5}, {0.25, 1, 0.75}, Rng(1)).value();
  EXPECT_EQ(shifted.mean, 0.25);
  EXPECT_EQ(shifted.low, 0.25);
  EXPECT_EQ(shifted.high, 0.25);
  const auto lost = PairedChange({0, std::nullopt, 1, std::nullopt, 0}, {1, 1, std::nullopt, std::nullopt, 1}, Rng(1)).value();
  EXPECT_EQ(lost.mean, 1);
  EXPECT_EQ(lost.first, 0);
  EXPECT_EQ(lost.last, 1);
  EXPECT_EQ(lost.tasks, 2);
  EXPECT_EQ(lost.unpaired, 3);
  EXPECT_FALSE(PairedChange({0, 1}, {0, 1, 1}, Rng(1)));
  EXPECT_FALSE(PairedChange({std::nullopt, 1}, {0, std::nullopt}, Rng(1)));
  EXPECT_FALSE(PairedChange({}, {}, Rng(1)));
}

// Of n tasks k rise from 0 to 1 and the others stay: the resampled mean is Binomial(n, k/n) / n, whose percentiles a sum of its
// probabilities gives without any drawing.
TEST(EvalChange, PercentilesOfTheBinomial) {
  for (const auto& [n, k] : {std::pair{40, 12}, {200, 49}, {100, 3}}) {
    Rewards first(static_cast<size_t>(n), 0.0), last(static_cast<size_t>(n), 0.0);
    for (int i = 0; i < k; ++i) last[static_cast<size_t>(i * 3 % n)] = 1;
    const double p = static_cast<double>(std::count(last.begin(), last.end(), std::optional(1.0))) / n;
    auto percentile = [&, count = n](double share) {
      double all = 0;
      for (int hits = 0; hits <= count; ++hits) {
        all += std::exp(std::lgamma(count + 1) - std::lgamma(hits + 1) - std::lgamma(count - hits + 1) + hits * std::log(p) +
                        (count - hits) * std::log1p(-p));
        if (all >= share) return static_cast<double>(hits) / count;
      }
      return 1.0;
    };
    const auto change = PairedChange(first, last, Rng(7)).value();
    EXPECT_DOUBLE_EQ(change.mean, p);
    // One step of the grid: where the sum comes within the noise of 10,000 draws of the share.
    EXPECT_NEAR(change.low, percentile(0.025), 1.0 / n + 1e-12) << n;
    EXPECT_NEAR(change.high, percentile(0.975), 1.0 / n + 1e-12) << n;
    const auto again = PairedChange(first, last, Rng(7)).value();
    EXPECT_EQ(again.low, change.low);
    EXPECT_EQ(again.high, change.high);
  }
}

// The definition, slowly: tasks drawn as pairs, both means taken, their difference; percentiles by counting how many lie below.
TEST(EvalChange, IsThePairedBootstrapRestated) {
  Rng make(3);
  Rewards first, last;
  for (int i = 0; i < 30; ++i) {
    first.push_back(make.Uniform());
    last.push_back(*first.back() + 0.3 * make.Normal());
  }
  const auto change = PairedChange(first, last, Rng(11)).value();
  Rng draw(99);  // other draws: equal up to the noise of drawing
  std::vector<double> differences;
  for (int r = 0; r < 40000; ++r) {
    double before = 0, after = 0;
    for (int i = 0; i < 30; ++i) {
      const uint64_t task = draw.Below(30);
      before += *first[task];
      after += *last[task];
    }
    differences.push_back(after / 30 - before / 30);
  }
  auto below = [&](double x) {
    return static_cast<double>(std::count_if(differences.begin(), differences.end(), [x](double d) { return d < x; })) / 40000;
  };
  EXPECT_NEAR(below(change.low), 0.025, 0.006);  // four deviations of both draws
  EXPECT_NEAR(below(change.high), 0.975, 0.006);
}

// What the interval promises: over many evaluations of a known gain it holds the gain about 95 times in 100.
TEST(EvalChange, CoversTheTruth) {
  Rng make(5);
  int covered = 0, significant = 0;
  constexpr int kCases = 600;
  for (int c = 0; c < kCases; ++c) {
    Rewards first, last;
    for (int i = 0; i < 100; ++i) {
      const double skill = make.Uniform();  // of the task: what pairing takes out
      first.push_back(make.Chance(skill * 0.6) ? 1.0 : 0.0);
      last.push_back(make.Chance(0.2 + skill * 0.6) ? 1.0 : 0.0);
    }
    const auto change = PairedChange(first, last, Rng(static_cast<uint64_t>(c)), 1000).value();
    covered += change.low <= 0.2 && 0.2 <= change.high;
    significant += change.low > 0;
  }
  EXPECT_GE(covered, kCases * 0.92);
  EXPECT_LE(covered, kCases * 0.98);
  EXPECT_GE(significant, kCases * 0.75);
}

// The file of an older run, a torn line, or one evaluation alone could be read as a change.
TEST(EvalChange, OfTheFile) {
  const std::string run = testing::TempDir() + "eval_change-" + std::to_string(getpid());
  ASSERT_TRUE(MakeDirs(run).ok());
  auto read = [&](const std::string& text) {
    EXPECT_TRUE(WriteFile(run + "/eval.jsonl", text).ok());
    return ReadEvalChange(run, 1);
  };
  EXPECT_FALSE(read("{\"rewards\":[0,1]}\n"));
  EXPECT_FALSE(read("{\"pass_rate\":0}\n{\"rewards\":[0,1]}\n"));
  EXPECT_FALSE(read("{\"rewards\":[0]}\n{\"rewards\":[0,1]}\n"));
  const auto change =
      read("{\"rewards\":[0,0,null,1]}\n{\"rewards\":[1,1,1,1]}\n{\"rewards\":[0.5,0.5,1,1.5]}\n{\"rewards\":[9,");
  ASSERT_TRUE(change);
  EXPECT_EQ(change->mean, 0.5);
  EXPECT_EQ(PrintEvalChange(*change), "held-out 0.333 → 0.833, +0.500 [0.500, 0.500] over 3 tasks (1 unpaired)");
  ASSERT_TRUE(RemoveAll(run).ok());
  EXPECT_FALSE(ReadEvalChange(run, 1));
}

}  // namespace
}  // namespace temper::job
