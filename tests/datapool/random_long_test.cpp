// A hundred thousand schedules of random pools.
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>

#include "datapool/verify.h"
#include "tests/datapool/random_pool.h"

namespace temper::datapool {
namespace {

constexpr uint64_t kSchedules = 100'000;
constexpr int kEvents = 120;

// What could go wrong: a rare mix of rules, failures and delays breaks the bound, the balance, or the way back from the ledger to the
// decisions. Half of the schedules are chance, half an adversary that holds one group back. Run one again with TEMPER_SEED.
TEST(WindowRandomLong, HundredThousandSchedules) {
  std::map<int64_t, int64_t> reached;  // S: schedules that reached their bound
  int64_t consumed = 0, tombstoned = 0, requeued = 0;
  const char* one = std::getenv("TEMPER_SEED");
  const uint64_t first = one ? std::strtoull(one, nullptr, 10) : 0;
  for (uint64_t seed = first; seed < (one ? first + 1 : kSchedules) && !HasFailure(); ++seed) {
    Driver d(seed);
    for (int i = 0; i < kEvents; ++i) d.Play(seed % 2 == 0 ? d.RandomEvent() : d.AdversarialEvent());
    const VerifyReport report = VerifyLedger(d.config, d.ledger);
    ASSERT_TRUE(report.ok()) << "seed " << seed << " " << PrintPoolConfig(d.config) << "\n" << PrintVerify(report);
    const WindowTotals t = d.window.totals();
    ASSERT_EQ(report.consumed, t.consumed) << "seed " << seed;
    ASSERT_EQ(report.in_flight, t.in_flight) << "seed " << seed;
    const std::optional<int64_t>& bound = d.window.plan().bound;
    if (bound && t.staleness_max == *bound) ++reached[d.config.S];
    consumed += t.consumed;
    tombstoned += t.tombstoned;
    for (const auto& [reason, n] : t.tombstones) requeued += reason == "requeued" ? n : 0;
  }
  if (one) return;
  for (int64_t S : {1, 2, 3}) EXPECT_GT(reached[S], 1000) << "S = " << S << ": a bound never approached proves nothing";
  EXPECT_GT(consumed, 500'000);
  EXPECT_GT(tombstoned, 100'000);
  EXPECT_GT(requeued, 1000);
  std::printf("measured: %llu schedules, %lld groups trained, bound reached in %lld, %lld and %lld of them at S = 1, 2, 3\n",
              static_cast<unsigned long long>(kSchedules), static_cast<long long>(consumed), static_cast<long long>(reached[1]),
              static_cast<long long>(reached[2]), static_cast<long long>(reached[3]));
}

}  // namespace
}  // namespace temper::datapool
