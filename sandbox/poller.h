// One epoll set with a callback for each descriptor; the base of the service's loop. Single-threaded.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>

#include "common/file.h"
#include "common/status.h"

namespace temper::sandbox {

class Poller {
 public:
  // `events` and the callback's argument are EPOLLIN, EPOLLOUT…; the callback may remove any descriptor, its own too.
  using Callback = std::function<void(uint32_t events)>;

  static Result<std::unique_ptr<Poller>> Make();
  void Add(int fd, uint32_t events, Callback callback);
  void Change(int fd, uint32_t events);
  // Must precede close(fd).
  void Remove(int fd);
  // Waits up to `timeout_s` and runs the callbacks of what is ready.
  void Wait(double timeout_s);

 private:
  explicit Poller(Fd epoll) : epoll_(std::move(epoll)) {}
  struct Entry {
    uint64_t generation;
    std::shared_ptr<Callback> callback;
  };
  Fd epoll_;
  uint32_t generation_ = 0;
  std::unordered_map<int, Entry> entries_;
};

}  // namespace temper::sandbox
