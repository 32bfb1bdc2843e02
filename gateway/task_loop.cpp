#include "gateway/task_loop.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace temper::gateway {

TaskLoop::TaskLoop(Clock& clock) : clock_(clock), thread_([this] { Run(); }) {}

TaskLoop::~TaskLoop() { Stop(); }

void TaskLoop::Post(std::function<void()> task) {
  {
    std::lock_guard lock(mutex_);
    if (stopping_) return;
    ready_.push_back(std::move(task));
  }
  wake_.notify_one();
}

void TaskLoop::PostAfter(double seconds, std::function<void()> task) {
  {
    std::lock_guard lock(mutex_);
    if (stopping_) return;
    later_.emplace(clock_.NowS() + seconds, std::move(task));
  }
  wake_.notify_one();
}

void TaskLoop::Stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void TaskLoop::Run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    const double now = clock_.NowS();
    while (!later_.empty() && later_.begin()->first <= now) {
      ready_.push_back(std::move(later_.begin()->second));
      later_.erase(later_.begin());
    }
    if (!ready_.empty()) {
      auto task = std::move(ready_.front());
      ready_.pop_front();
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
      continue;
    }
    if (stopping_) return;
    const double wait_s = later_.empty() ? 60.0 : std::clamp(later_.begin()->first - now, 0.0, 60.0);
    wake_.wait_for(lock, std::chrono::duration<double>(wait_s));
  }
}

}  // namespace temper::gateway
