#include "sandbox/poller.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace temper::sandbox {

Result<std::unique_ptr<Poller>> Poller::Make() {
  Fd fd(epoll_create1(EPOLL_CLOEXEC));
  if (!fd.valid()) return ErrnoStatus("epoll_create1", errno);
  return std::unique_ptr<Poller>(new Poller(std::move(fd)));
}

void Poller::Add(int fd, uint32_t events, Callback callback) {
  // The generation tells an event of a closed descriptor from one of its successor with the same number.
  Entry entry{++generation_, std::make_shared<Callback>(std::move(callback))};
  epoll_event e = {};
  e.events = events;
  e.data.u64 = entry.generation << 32 | static_cast<uint32_t>(fd);
  TEMPER_CHECK(epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &e) == 0) << "epoll add " << fd << ": " << std::strerror(errno);
  entries_[fd] = std::move(entry);
}

void Poller::Change(int fd, uint32_t events) {
  auto it = entries_.find(fd);
  TEMPER_CHECK(it != entries_.end());
  epoll_event e = {};
  e.events = events;
  e.data.u64 = it->second.generation << 32 | static_cast<uint32_t>(fd);
  TEMPER_CHECK(epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &e) == 0) << "epoll change " << fd << ": " << std::strerror(errno);
}

void Poller::Remove(int fd) {
  if (entries_.erase(fd)) epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
}

void Poller::Wait(double timeout_s) {
  epoll_event events[64];
  int timeout_ms = static_cast<int>(std::clamp(timeout_s * 1e3 + 1, 0.0, 60000.0));
  int n = epoll_wait(epoll_.get(), events, 64, timeout_ms);
  for (int i = 0; i < n; ++i) {
    int fd = static_cast<int>(events[i].data.u64 & 0xffffffff);
    auto it = entries_.find(fd);
    if (it == entries_.end() || it->second.generation != events[i].data.u64 >> 32) continue;
    std::shared_ptr<Callback> callback = it->second.callback;  // it may remove itself
    (*callback)(events[i].events);
  }
}

}  // namespace temper::sandbox
