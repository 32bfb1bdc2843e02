#include "common/bounded_queue.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "common/gate.h"
#include "common/metrics.h"

namespace temper {
namespace {

// A full queue that drops or grows instead of refusing would lose work or memory.
TEST(BoundedQueue, RefusesWhenFullAndLeavesTheItemAlone) {
  BoundedQueue<std::unique_ptr<int>> queue(1);
  EXPECT_TRUE(queue.TryPush(std::make_unique<int>(1)));
  auto second = std::make_unique<int>(2);
  EXPECT_FALSE(queue.Push(std::move(second), 0.01));
  ASSERT_TRUE(second);
  EXPECT_EQ(**queue.TryPop(), 1);
  EXPECT_TRUE(queue.TryPush(std::move(second)));
}

// Items pushed before Close must still come out, and waiters must wake.
TEST(BoundedQueue, CloseDrainsAndWakes) {
  BoundedQueue<int> queue(4);
  EXPECT_TRUE(queue.TryPush(7));
  std::atomic<bool> woke{false};
  BoundedQueue<int> empty(1);
  std::thread waiter([&] {
    EXPECT_FALSE(empty.Pop(30));
    woke = true;
  });
  empty.Close();
  waiter.join();
  EXPECT_TRUE(woke);
  queue.Close();
  EXPECT_FALSE(queue.TryPush(8));
  EXPECT_EQ(queue.Pop(0), 7);
  EXPECT_FALSE(queue.Pop(0));
}

// Each item must reach exactly one consumer.
TEST(BoundedQueue, ManyProducersAndConsumersLoseNothing) {
  BoundedQueue<int> queue(3);
  std::atomic<int> sum{0}, count{0};
  std::vector<std::thread> threads;
  for (int p = 0; p < 3; ++p) {
    threads.emplace_back([&, p] {
      for (int i = 0; i < 200; ++i) EXPECT_TRUE(queue.Push(p * 200 + i, 30));
    });
  }
  for (int c = 0; c < 2; ++c) {
    threads.emplace_back([&] {
      while (auto item = queue.Pop(30)) {
        sum += *item;
        ++count;
      }
    });
  }
  for (int p = 0; p < 3; ++p) threads[p].join();
  queue.Close();
  threads[3].join();
  threads[4].join();
  EXPECT_EQ(count, 600);
  EXPECT_EQ(sum, 599 * 600 / 2);
}

// Close must not return true while somebody is inside, else the object goes away under them.
TEST(Gate, CloseWaitsForThoseInside) {
  Gate gate;
  {
    auto pass = gate.Enter();
    ASSERT_TRUE(pass);
    EXPECT_FALSE(gate.Close(0.01));
    EXPECT_FALSE(gate.Enter());
    auto moved = std::move(*pass);
    pass.reset();
    EXPECT_EQ(gate.inside(), 1);
  }
  EXPECT_TRUE(gate.Close(0));
}

// Concurrent Adds on a plain read-modify-write would lose some.
TEST(Metrics, AddsFromManyThreadsAreAllCounted) {
  Metrics metrics;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 5000; ++i) metrics["n"].Add();
    });
  }
  for (auto& t : threads) t.join();
  metrics["peak"].Max(3);
  metrics["peak"].Max(2);
  EXPECT_EQ(metrics.Snapshot(), (std::map<std::string, double>{{"n", 20000}, {"peak", 3}}));
}

}  // namespace
}  // namespace temper
