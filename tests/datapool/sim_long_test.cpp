// The size and speed that `temper pool sim` promises.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include "datapool/sim.h"
#include "tests/datapool/script.h"

namespace temper::datapool {
namespace {

double CpuSeconds() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  auto of = [](const timeval& t) { return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) / 1e6; };
  return of(usage.ru_utime) + of(usage.ru_stime);
}

// What could go wrong: a list that grows with the run, or a search that grows with the window, makes a million groups take minutes.
// Processor seconds of this one thread, so that what else runs does not count.
TEST(SimSpeed, AMillionGroupsAPolicy) {
  std::string measured;
  for (const char* window : {R"({"policy":"strict"})", R"({"fraction":0.3})", R"({"policy":"greedy"})", R"({"policy":"areal"})"}) {
    PoolConfig config = Config(std::string(R"({"P":16,"S":1,"G":8,"deadline_s":60,"retries":1,"window":)") + window + "}");
    World world;
    world.latency.dist = "lognormal";
    world.latency.median = 5;
    world.latency.sigma = 1;
    world.fail = 0.01;
    world.updates = 1'000'000 / config.P;
    const double before = CpuSeconds();
    Result<WorldReport> report = RunWorld(config, world, {}, nullptr, nullptr);
    const double took = CpuSeconds() - before;
    ASSERT_TRUE(report.ok()) << report.status().message();
    EXPECT_EQ(report->updates, world.updates);
    EXPECT_LE(took, 15) << window;
    measured += fmt::format("{}{} {:.1f} s", measured.empty() ? "" : ", ", report->policy, took);
  }
  std::printf("measured: 1e6 groups of 8 rollouts: %s\n", measured.c_str());
}

}  // namespace
}  // namespace temper::datapool
