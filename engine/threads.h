// Worker threads of an engine and the floating-point mode they run in.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace temper::engine {

// Sets DAZ and FTZ for the current thread and restores the former mode when it dies. Every engine entry holds one: the
// pair-dot is defined with denormals flushed. Never alive across a call into another library.
class FlushDenormals {
 public:
  FlushDenormals();
  ~FlushDenormals();
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  uint32_t saved_;
};

// A fixed set of threads that run the items of a loop. The caller takes part. Which thread runs which item is open, so a
// loop body may depend on its item only. Threads spin shortly and then sleep between loops. One loop at a time; Run from
// one thread at a time. The body runs with denormals flushed.
class Threads {
 public:
  explicit Threads(int count);
  ~Threads();
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  int count() const { return count_; }
  // body(item, thread) for item in [0, items), thread in [0, count). Returns when all are done.
  void Run(int items, const std::function<void(int item, int thread)>& body);

 private:
  struct State;
  int count_;
  std::unique_ptr<State> state_;
};

}  // namespace temper::engine
