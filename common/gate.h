// A gate counts who is inside and lets the last one out before an object goes: every asynchronous piece of work enters,
// and Close() refuses newcomers and waits for the others.
#pragma once

#include <condition_variable>
#include <mutex>
#include <optional>

namespace temper {

// Thread-safe. Must outlive its passes.
class Gate {
 public:
  // Held while inside; leaves when destroyed.
  class Pass {
   public:
    Pass(Pass&& other) noexcept : gate_(other.gate_) { other.gate_ = nullptr; }
    Pass& operator=(Pass&&) = delete;
    ~Pass() {
      if (gate_) gate_->Leave();
    }

   private:
    friend class Gate;
    explicit Pass(Gate* gate) : gate_(gate) {}
    Gate* gate_;
  };

  ~Gate();
  // Nothing once the gate is closed.
  std::optional<Pass> Enter();
  // Refuses newcomers from now on; true when all are out within `wait_s`. May be called again to wait on.
  bool Close(double wait_s);
  bool closed() const;
  int inside() const;

 private:
  void Leave();
  mutable std::mutex mutex_;
  std::condition_variable empty_;
  int inside_ = 0;
  bool closed_ = false;
};

}  // namespace temper
