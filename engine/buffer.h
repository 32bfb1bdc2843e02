// Memory that is read from one end to the other: weights, activations, scratch. 64-byte aligned; several MiB and more are asked
// for in pages of 2 MiB, which a core reads up to twice as fast as pages of 4 KiB (docs/engine_speed.md). A machine that has none
// to give gives small ones.
#pragma once

#include <cstddef>
#include <memory>

namespace temper::engine {

std::byte* AllocateBytes(size_t bytes);  // contents undefined; std::bad_alloc
void FreeBytes(std::byte* p, size_t bytes);
// Asks for pages of 2 MiB within memory that the caller mapped and has not touched.
void AskForLargePages(std::byte* p, size_t bytes);

// The same for std::vector.
template <typename T>
struct Allocator {
  using value_type = T;
  Allocator() = default;
  template <typename U>
  Allocator(const Allocator<U>&) {}  // NOLINT: allocators convert
  T* allocate(size_t n) { return reinterpret_cast<T*>(AllocateBytes(n * sizeof(T))); }
  void deallocate(T* p, size_t n) { FreeBytes(reinterpret_cast<std::byte*>(p), n * sizeof(T)); }
  bool operator==(const Allocator&) const = default;
};

// Growable: contents are undefined after growing.
class Buffer {
 public:
  // At least `count` elements of T. Earlier pointers die when it grows.
  template <typename T>
  T* Get(size_t count) {
    const size_t bytes = Rounded(count * sizeof(T));
    if (bytes > bytes_) {
      data_.reset();
      data_ = std::unique_ptr<std::byte, Free>(AllocateBytes(bytes), Free{bytes});
      bytes_ = bytes;
    }
    return reinterpret_cast<T*>(data_.get());
  }
  template <typename T>
  T* as() const { return reinterpret_cast<T*>(data_.get()); }
  size_t bytes() const { return bytes_; }
  // What bytes() is after Get of so many.
  static size_t Rounded(size_t bytes) { return (bytes + 63) / 64 * 64; }

 private:
  struct Free {
    size_t bytes;
    void operator()(std::byte* p) const { FreeBytes(p, bytes); }
  };
  std::unique_ptr<std::byte, Free> data_;
  size_t bytes_ = 0;
};

}  // namespace temper::engine
