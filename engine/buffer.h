// Growable 64-byte aligned memory for activations and scratch: contents are undefined after growing.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

namespace temper::engine {

class Buffer {
 public:
  // At least `count` elements of T. Earlier pointers die when it grows.
  template <typename T>
  T* Get(size_t count) {
    const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
    if (bytes > bytes_) {
      data_.reset();
      data_.reset(new (std::align_val_t(64)) std::byte[bytes]);
      bytes_ = bytes;
    }
    return reinterpret_cast<T*>(data_.get());
  }
  template <typename T>
  T* as() const { return reinterpret_cast<T*>(data_.get()); }
  size_t bytes() const { return bytes_; }

 private:
  struct Free {
    void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t(64)); }
  };
  std::unique_ptr<std::byte, Free> data_;
  size_t bytes_ = 0;
};

}  // namespace temper::engine
