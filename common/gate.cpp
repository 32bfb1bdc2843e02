#include "common/gate.h"

#include <chrono>

#include "common/check.h"

namespace temper {

Gate::~Gate() { TEMPER_CHECK(inside() == 0) << inside() << " still inside a gate that is destroyed"; }

std::optional<Gate::Pass> Gate::Enter() {
  std::lock_guard lock(mutex_);
  if (closed_) return std::nullopt;
  ++inside_;
  return Pass(this);
}

void Gate::Leave() {
  // Notified under the lock: once Close returns the gate may be destroyed.
  std::lock_guard lock(mutex_);
  if (--inside_ == 0) empty_.notify_all();
}

bool Gate::Close(double wait_s) {
  std::unique_lock lock(mutex_);
  closed_ = true;
  return empty_.wait_for(lock, std::chrono::duration<double>(wait_s), [&] { return inside_ == 0; });
}

bool Gate::closed() const {
  std::lock_guard lock(mutex_);
  return closed_;
}

int Gate::inside() const {
  std::lock_guard lock(mutex_);
  return inside_;
}

}  // namespace temper
