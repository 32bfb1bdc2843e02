// `temper bench pool`: every row is of samples taken in turn, and what cannot run says so.
#include "datapool/bench/pool_bench.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "common/file.h"
#include "temper/v1/types.pb.h"

namespace temper::datapool::bench {
namespace {

// What could go wrong: a work is left out, a figure is not of its samples, or a missing peer ends the bench.
TEST(PoolBench, EveryWorkGivesItsRows) {
  Options options;
  options.samples = 3;
  options.sample_bytes = 1 << 20;
  options.seconds = 2;
  options.dir = testing::TempDir() + "/pool-bench";
  options.program = std::string(TEMPER_BUILD_DIR) + "/temper";
  options.redis = "/nonexistent/redis-server";
  std::map<std::string, int> rows;
  std::vector<std::string> said;
  const Status run = RunPoolBench(
      options,
      [&](const Row& row) {
        ++rows[row.work];
        EXPECT_GT(row.ours, 0) << row.name;
        EXPECT_GT(row.theirs, 0) << row.name;
        EXPECT_GT(row.ratio, 0) << row.name;
        if (row.work == "sustain") return;
        std::vector<double> sorted = row.samples;
        std::sort(sorted.begin(), sorted.end());
        EXPECT_EQ(sorted.size(), 3u);
        EXPECT_EQ(row.ours, sorted[sorted.size() / 2]) << row.name << ": the median of an odd number of samples";
      },
      [&](const std::string& what) { said.push_back(what); });
  EXPECT_TRUE(run.ok()) << run.message();
  EXPECT_EQ(rows["write"], 6);
  EXPECT_EQ(rows["lease"], 2);
  EXPECT_EQ(rows["sustain"], 1);
  EXPECT_THAT(said, testing::ElementsAre(testing::AllOf(testing::StartsWith("not run: Redis Streams: "), testing::HasSubstr("tests/setup_redis.sh"))));
  EXPECT_TRUE(RemoveAll(options.dir).ok());
}

// What could go wrong: the records that are measured are not what a job writes.
TEST(PoolBench, RecordsAreTrajectories) {
  const std::string bytes = MakeTrajectory(1000, 7);
  v1::Trajectory t;
  ASSERT_TRUE(t.ParseFromString(bytes));
  int64_t tokens = 0, logprobs = 0;
  for (const v1::TokenRun& run : t.runs()) {
    tokens += run.ids_size();
    logprobs += run.logprobs_size();
    EXPECT_EQ(run.logprobs_size(), run.provenance() == v1::SAMPLED ? run.ids_size() : 0);
  }
  EXPECT_EQ(tokens, 1000);
  EXPECT_GT(logprobs, 700);
  EXPECT_NE(bytes, MakeTrajectory(1000, 8));
}

}  // namespace
}  // namespace temper::datapool::bench
