// `temper bench engine`: every row is a ratio of two figures of one run, peers answer for themselves.
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "common/file.h"
#include "common/json.h"
#include "tests/engine/test_models.h"
#include "trainer/bench/commands.h"
#include "trainer/bench/engine_bench.h"
#include "trainer/bench/floors.h"
#include "trainer/bench/peer.h"

namespace temper::trainer::bench {
namespace {

// Goes wrong if a row's figures are not of the samples, or a work is left out.
TEST(Bench, EveryWorkGivesItsRows) {
  auto engine = engine::MakeEngine(engine::CpuPath::kAuto, 2);
  Options options;
  options.samples = 3;
  options.layers = 1;
  options.works = {"attention", "step", "growth", "prefill"};
  options.step_rows = 2;
  options.step_length = 16;
  options.growth_tokens = 1024;
  std::map<std::string, int> rows;
  const Status status = RunEngineBench(*engine, options, [&](const Row& row) {
    ++rows[row.work];
    EXPECT_GT(row.ours, 0) << row.name;
    EXPECT_GT(row.theirs, 0) << row.name;
    EXPECT_GT(row.ratio, 0) << row.name;
    EXPECT_FALSE(row.reference.empty());
    auto sorted = row.samples;
    std::sort(sorted.begin(), sorted.end());
    EXPECT_EQ(row.ours, sorted[sorted.size() / 2]) << row.name << ": the median of an odd number of samples";
    EXPECT_LT(row.ratio, 3) << row.name << " of " << row.reference << ": no one is far faster than what the machine can do";
  });
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(rows["attention"], 2);
  EXPECT_EQ(rows["step"], 1);
  EXPECT_EQ(rows["prefill"], 1);
  EXPECT_EQ(rows["growth"], 1);
}

// Goes wrong if a peer that ends, errs or talks nonsense hangs the bench or counts as a figure.
TEST(Peer, AnswersForItself) {
  const std::string script = testing::TempDir() + "peer.sh";
  ASSERT_TRUE(
      WriteFile(
          script,
          "echo ready\nread a; echo '{\"seconds\": 0.25}'\nread a; echo '{\"error\": \"no such work\"}'\nread a; echo nonsense\n")
          .ok());
  auto peer = Peer::Start("sh", script, "torch", 2, "avx2", "wall");
  ASSERT_TRUE(peer.ok()) << peer.status().ToString();
  auto first = (*peer)->Measure("{}");
  ASSERT_TRUE(first.ok()) << first.status().ToString();
  EXPECT_EQ(*first, 0.25);
  auto second = (*peer)->Measure("{}");
  EXPECT_FALSE(second.ok());
  EXPECT_NE(second.status().message().find("no such work"), std::string::npos);
  EXPECT_FALSE((*peer)->Measure("{}").ok());
  EXPECT_FALSE((*peer)->Measure("{}").ok()) << "it ended";
  EXPECT_FALSE(Peer::Start("sh", "/nonexistent", "torch", 2, "avx2", "wall").ok());
  EXPECT_FALSE(Peer::Start("no-such-program-anywhere", script, "torch", 2, "avx2", "wall").ok());
}

TEST(Floors, AreRatesOfThisMachine) {
  auto engine = engine::MakeEngine(engine::CpuPath::kAuto, 1);
  EXPECT_GT(PeakFlops(*engine, Clock::kWall), 1e9);
  EXPECT_LT(PeakFlops(*engine, Clock::kWall), 1e13);
  const std::vector<std::byte> memory(64 << 20);
  EXPECT_GT(ReadBandwidth(*engine, memory, Clock::kWall), 1e8);
  EXPECT_LT(ReadBandwidth(*engine, memory, Clock::kWall), 1e12);
}

// Goes wrong if the compiler, or a loop for some count of rows, leaves out arithmetic: then it would be faster than the peak.
TEST(Floors, ALoopDoesItsArithmetic) {
  const std::vector<std::byte> memory(4 << 20);
  for (const engine::CpuPath path : engine::AvailableCpuPaths()) {
    auto engine = engine::MakeEngine(path, 1);
    for (const auto profile : {engine::Profile::kBf16, engine::Profile::kF32}) {
      for (const int rows : {3, 8, 24, 64}) {
        double seconds = 1;  // the best of several; other programs run
        for (int i = 0; i < 5; ++i) {
          seconds = std::min(seconds, ReadAndMultiply(*engine, profile, {{memory, rows}}, Clock::kCpu));
        }
        const int done = path == engine::CpuPath::kAvx2 ? rows / 2 * 2 : rows;
        const double numbers = static_cast<double>(memory.size()) / (profile == engine::Profile::kBf16 ? 2 : 4);
        EXPECT_LT(2 * numbers * done / seconds, 1.1 * PeakFlops(*engine, Clock::kCpu)) << engine::CpuPathName(path) << ", " << rows;
      }
    }
  }
}

}  // namespace
}  // namespace temper::trainer::bench
