#include "engine/threads.h"

#include <gtest/gtest.h>

#include <atomic>

#include <vector>

namespace temper::engine {
namespace {

// Could go wrong: an item runs twice or not at all, or a thread of an earlier loop touches a later one.
TEST(Threads, RunsEveryItemOnceInThousandsOfLoops) {
  for (int count : {1, 2, 5}) {
    Threads threads(count);
    for (int loop = 0; loop < 3000; ++loop) {
      const int items = loop % 17;
      std::vector<std::atomic<int>> seen(items);
      threads.Run(items, [&](int item, int thread) {
        ASSERT_LT(thread, count);
        ++seen[item];
      });
      for (auto& n : seen) ASSERT_EQ(n, 1);
    }
  }
}

// Could go wrong: a thread computes with denormals, or the caller's mode is left changed.
TEST(Threads, FlushDenormalsInsideOnly) {
  Threads threads(3);
  volatile float tiny = 1e-40f;
  std::atomic<int> kept{0};
  threads.Run(50, [&](int, int) {
    volatile float x = tiny * 1.0f;
    kept += x != 0;
  });
  EXPECT_EQ(kept, 0);
  volatile float outside = tiny * 1.0f;
  EXPECT_NE(outside, 0.0f);
}

}  // namespace
}  // namespace temper::engine
