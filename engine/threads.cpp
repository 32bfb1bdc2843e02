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

// One word says everything about the current loop: its number, whether it still takes threads in, and how many workers are
// inside. A worker that wakes after the items are gone finds the door shut and touches nothing, so the caller never waits
// for a thread that the machine has not yet given a core.
struct Threads::State {
  static constexpr uint64_t kOpen = uint64_t{1} << 31, kInside = kOpen - 1, kLoop = uint64_t{1} << 32;

  std::mutex mutex;
  std::condition_variable wake, done;
  std::atomic<uint64_t> gate{0};
  std::atomic<bool> stop{false};
  std::atomic<int> next{0};
  int sleeping = 0;  // guarded by mutex
  int items = 0;
  const std::function<void(int, int)>* body = nullptr;
  std::vector<std::jthread> workers;

  void Work(int thread) {
    for (int item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items;) (*body)(item, thread);
  }

  bool Enter() {
    uint64_t g = gate.load(std::memory_order_acquire);
    while (g & kOpen) {
      if (gate.compare_exchange_weak(g, g + 1, std::memory_order_acq_rel)) return true;
    }
    return false;
  }

  void Leave() {
    const uint64_t g = gate.fetch_sub(1, std::memory_order_acq_rel) - 1;
    if (!(g & (kOpen | kInside))) {
      std::lock_guard lock(mutex);
      done.notify_one();
    }
  }

  void Loop(int thread) {
    FlushDenormals mode;
    uint64_t seen = 0;  // number of the last loop looked at
    const auto news = [&] { return gate.load(std::memory_order_acquire) / kLoop != seen || stop; };
    for (;;) {
      for (int i = 0; i < kSpins && !news(); ++i) _mm_pause();
      if (!news()) {
        std::unique_lock lock(mutex);
        ++sleeping;
        // Woken by Run or by the destructor: no deadline is needed, a worker that sleeps is idle, not stuck.
        wake.wait(lock, news);
        --sleeping;
      }
      if (stop) return;
      seen = gate.load(std::memory_order_acquire) / kLoop;
      if (!Enter()) continue;
      Work(thread);
      Leave();
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
  bool wake;
  {
    std::lock_guard lock(s.mutex);
    s.items = items;
    s.body = &body;
    s.next.store(0, std::memory_order_relaxed);
    const uint64_t loop = s.gate.load(std::memory_order_relaxed) / State::kLoop + 1;
    s.gate.store((loop & 0xffffffffu) * State::kLoop | State::kOpen, std::memory_order_release);
    wake = s.sleeping > 0;
  }
  if (wake) s.wake.notify_all();
  s.Work(0);
  s.gate.fetch_and(~State::kOpen, std::memory_order_acq_rel);
  const auto inside = [&] { return s.gate.load(std::memory_order_acquire) & State::kInside; };
  for (int i = 0; i < kSpins && inside(); ++i) _mm_pause();
  if (inside()) {
    std::unique_lock lock(s.mutex);
    s.done.wait(lock, [&] { return !inside(); });
  }
}

}  // namespace temper::engine
