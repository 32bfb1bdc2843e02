// A queue between threads with a stated capacity. A full queue makes Push wait (with a deadline) and TryPush refuse:
// nothing is ever dropped silently.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>

#include "common/check.h"

namespace temper {

// Thread-safe, any number of producers and consumers. After Close pushes fail and pops drain what is left.
template <typename T>
class BoundedQueue {
 public:
  explicit BoundedQueue(size_t capacity) : capacity_(capacity) { TEMPER_CHECK(capacity > 0); }

  // False when it stayed full for `wait_s` or the queue is closed; the item is then untouched.
  bool Push(T&& item, double wait_s) {
    std::unique_lock lock(mutex_);
    if (!room_.wait_for(lock, Seconds(wait_s), [&] { return closed_ || items_.size() < capacity_; }) || closed_) return false;
    items_.push_back(std::move(item));
    ready_.notify_one();
    return true;
  }
  bool TryPush(T&& item) { return Push(std::move(item), 0); }

  // Nothing when it stayed empty for `wait_s`, or it is closed and empty.
  std::optional<T> Pop(double wait_s) {
    std::unique_lock lock(mutex_);
    ready_.wait_for(lock, Seconds(wait_s), [&] { return closed_ || !items_.empty(); });
    if (items_.empty()) return std::nullopt;
    std::optional<T> item(std::move(items_.front()));
    items_.pop_front();
    room_.notify_one();
    return item;
  }
  std::optional<T> TryPop() { return Pop(0); }

  void Close() {
    std::lock_guard lock(mutex_);
    closed_ = true;
    room_.notify_all();
    ready_.notify_all();
  }
  bool closed() const {
    std::lock_guard lock(mutex_);
    return closed_;
  }
  size_t size() const {
    std::lock_guard lock(mutex_);
    return items_.size();
  }
  size_t capacity() const { return capacity_; }

 private:
  static std::chrono::duration<double> Seconds(double s) { return std::chrono::duration<double>(s); }

  const size_t capacity_;
  mutable std::mutex mutex_;
  std::condition_variable room_, ready_;
  std::deque<T> items_;
  bool closed_ = false;
};

}  // namespace temper
