// Builds the byte forms that protocol::Reader reads: little-endian numbers, and strings as length, bytes, NUL.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace temper::sandbox {

class WireWriter {
 public:
  WireWriter& U32(uint32_t v) { return Raw(&v, sizeof v); }
  WireWriter& U64(uint64_t v) { return Raw(&v, sizeof v); }
  WireWriter& Str(std::string_view s) {
    U32(static_cast<uint32_t>(s.size()));
    bytes_.append(s);
    bytes_.push_back('\0');
    return *this;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  WireWriter& Raw(const void* p, size_t n) {
    bytes_.append(static_cast<const char*>(p), n);
    return *this;
  }
  std::string bytes_;
};

}  // namespace temper::sandbox
