// A file mapped read-only. Owned by value, movable; the bytes live as long as the object. Thread-safe to read.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "common/status.h"

namespace temper::engine {

class MappedFile {
 public:
  // NotFound, or InvalidArgument when `path` is no regular file. An empty file gives no bytes.
  static Result<MappedFile> Open(const std::string& path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  std::span<const std::byte> bytes() const { return {data_, size_}; }
  const std::string& path() const { return path_; }

 private:
  MappedFile() = default;
  std::string path_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace temper::engine
