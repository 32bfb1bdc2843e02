#include "engine/threads.h"

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "common/check.h"

namespace temper::engine {

FlushDenormals::FlushDenormals() : saved_(_mm_getcsr()) {
  _mm_setcsr((saved_ & ~0x6000u) | 0x8040u);  // round to nearest, FTZ, DAZ
}
FlushDenormals::~FlushDenormals() { _mm_setcsr(saved_); }

namespace {
// How long a thread waits actively before it sleeps: longer than the gap between two loops of a pass, far shorter than a
// time slice that another process could use.
constexpr int kSpins = 4000;
}  // namespace

struct Threads::State {
  std::mutex mutex;
  std::condition_variable wake, done;
  std::atomic<uint64_t> generation{0};  // one more per loop; odd never means anything
  std::atomic<bool> stop{false};
  std::atomic<int> next{0};
  std::atomic<int> running{0};  // workers that have not finished the current loop
  int items = 0;
  const std::function<void(int, int)>* body = nullptr;
  std::vector<std::jthread> workers;

  void Work(int thread) {
    for (int item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items;) (*body)(item, thread);
  }

  void Loop(int thread) {
    FlushDenormals mode;
    uint64_t seen = 0;
    for (;;) {
      for (int i = 0; i < kSpins && generation.load(std::memory_order_acquire) == seen && !stop; ++i) _mm_pause();
      if (generation.load(std::memory_order_acquire) == seen) {
        std::unique_lock lock(mutex);
        // Woken by Run or by the destructor: no deadline is needed, and a worker that sleeps is idle, not stuck.
        wake.wait(lock, [&] { return generation.load(std::memory_order_acquire) != seen || stop; });
      }
      if (stop) return;
      seen = generation.load(std::memory_order_acquire);
      Work(thread);
      if (running.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        std::lock_guard lock(mutex);
        done.notify_one();
      }
    }
  }
};

Threads::Threads(int count) : count_(std::max(1, count)), state_(std::make_unique<State>()) {
  for (int i = 1; i < count_; ++i) {
    state_->workers.emplace_back([s = state_.get(), i] { s->Loop(i); });
  }
}

Threads::~Threads() {
  {
    std::lock_guard lock(state_->mutex);
    state_->stop = true;
  }
  state_->wake.notify_all();
  state_->workers.clear();
}

void Threads::Run(int items, const std::function<void(int, int)>& body) {
  if (items <= 0) return;
  FlushDenormals mode;
  State& s = *state_;
  if (count_ == 1 || items == 1) {
    for (int i = 0; i < items; ++i) body(i, 0);
    return;
  }
  {
    std::lock_guard lock(s.mutex);
    s.items = items;
    s.body = &body;
    s.next.store(0, std::memory_order_relaxed);
    s.running.store(count_ - 1, std::memory_order_relaxed);
    s.generation.fetch_add(1, std::memory_order_release);
  }
  s.wake.notify_all();
  s.Work(0);
  for (int i = 0; i < kSpins && s.running.load(std::memory_order_acquire); ++i) _mm_pause();
  if (s.running.load(std::memory_order_acquire)) {
    std::unique_lock lock(s.mutex);
    s.done.wait(lock, [&] { return s.running.load(std::memory_order_acquire) == 0; });
  }
}

}  // namespace temper::engine
