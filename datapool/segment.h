// The token data of one leased batch, in memory that the pool shares with the trainer's process: the answer to a lease holds
// handles, and the data is read where it lies instead of travelling through a socket.
//
// The pool owns the memory: an anonymous file (memfd) without a name anywhere, sealed against every change once it is whole. A reader
// opens it as /proc/PID/fd/FD, which takes the same user. It is gone when the pool has let go of it and no reader maps it: a crash of
// either side leaves nothing behind. Offsets and sizes are bytes.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "common/file.h"
#include "common/status.h"

namespace temper::datapool {

struct SegmentHandle {
  int32_t pid = 0, fd = 0;
  uint64_t inode = 0;  // of the memfd: another file under the same number is found out
  int64_t bytes = 0;
};

// One trajectory in a segment.
struct MemberHandle {
  int64_t offset = 0, bytes = 0;
  uint64_t checksum = 0;  // XXH3 (64 bits) of the bytes
};

// The pool's side.
class Segment {
 public:
  // kResourceExhausted: no memory, or too many open files.
  static Result<std::unique_ptr<Segment>> Create();
  // Thread-safe, before Seal.
  Result<MemberHandle> Put(std::string_view bytes);
  // From here on nobody can change it, the pool included. Once.
  Status Seal();
  // After Seal; good as long as this object lives.
  const SegmentHandle& handle() const { return handle_; }

 private:
  Segment() = default;
  Fd fd_;
  std::atomic<int64_t> end_{0};
  SegmentHandle handle_;
};

// The reader's side: a mapping, which stays good when the pool has gone. Thread-compatible; move-only.
class SegmentView {
 public:
  // kUnavailable: the pool that made it is gone, or has let go of it: lease again. kPermissionDenied: of another user.
  static Result<SegmentView> Open(const SegmentHandle& handle);
  SegmentView(SegmentView&& other) noexcept;
  SegmentView& operator=(SegmentView&&) = delete;
  ~SegmentView();
  // A copy. kDataLoss: outside the segment, or the bytes do not verify.
  Result<std::string> Read(const MemberHandle& member) const;

 private:
  SegmentView(const char* at, size_t bytes) : at_(at), bytes_(bytes) {}
  const char* at_;
  size_t bytes_;
};

}  // namespace temper::datapool
