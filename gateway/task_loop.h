// One thread that runs small tasks in order, some of them later. The gateway's calls live on it: whatever touches a running call
// is a task, so a call needs no lock.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

#include "common/clock.h"

namespace temper::gateway {

// Thread-safe. The queue's bound is that of its producers: a few tasks per call in flight and drawn chunk.
class TaskLoop {
 public:
  explicit TaskLoop(Clock& clock);
  ~TaskLoop();  // stops
  void Post(std::function<void()> task);
  void PostAfter(double seconds, std::function<void()> task);
  // Runs what was posted, drops what is not due, joins. Later posts are dropped.
  void Stop();

 private:
  void Run();

  Clock& clock_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> ready_;              // guarded by mutex_
  std::multimap<double, std::function<void()>> later_;  // by time due; guarded by mutex_
  bool stopping_ = false;                                // guarded by mutex_
  std::thread thread_;
};

}  // namespace temper::gateway
