// Keeps the first and the last bytes of a stream and counts what lies between. Pure.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

#include "sandbox/types.h"

namespace temper::sandbox {

class Capture {
 public:
  // Keeps at most `bytes_max`: half of it from the beginning.
  explicit Capture(int64_t bytes_max) : head_max_(static_cast<size_t>(bytes_max - bytes_max / 2)), tail_max_(static_cast<size_t>(bytes_max / 2)) {}

  void Add(std::string_view bytes) {
    size_t n = std::min(bytes.size(), head_max_ - head_.size());
    head_.append(bytes.substr(0, n));
    bytes.remove_prefix(n);
    tail_.append(bytes);
    // Cut only when twice too long, so that a byte is moved once on average.
    if (tail_.size() > 2 * tail_max_) Cut();
  }

  Captured Take() {
    if (tail_.size() > tail_max_) Cut();
    Captured c;
    c.dropped = dropped_;
    c.bytes = std::move(head_);
    if (dropped_) c.bytes += "\n[" + std::to_string(dropped_) + " bytes left out]\n";
    c.bytes += tail_;
    return c;
  }
  uint64_t dropped() const { return dropped_ + (tail_.size() > tail_max_ ? tail_.size() - tail_max_ : 0); }

 private:
  void Cut() {
    dropped_ += tail_.size() - tail_max_;
    tail_.erase(0, tail_.size() - tail_max_);
  }
  size_t head_max_, tail_max_;
  std::string head_, tail_;
  uint64_t dropped_ = 0;
};

}  // namespace temper::sandbox
