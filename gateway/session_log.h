// The durable log of all sessions: RUN/gateway/sessions.log (format: temper/v1/gateway.proto).
//
// Append is a write to the file: it survives kill -9 of the process. Sync is fsync, shared by all who wait at the same time: it
// survives the machine. A write or fsync that fails ends the process (restarting recovers up to the last good frame), because
// nothing that was promised afterwards could be kept. Thread-safe.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "common/file.h"
#include "common/status.h"

namespace temper::gateway {

class SessionLog {
 public:
  struct Recovered {
    std::vector<std::string> payloads;  // in order
    uint64_t lost_bytes = 0;            // of a torn or damaged end, cut off
  };
  // Reads what is there without changing it.
  static Result<Recovered> Read(const std::string& path);
  // Replaces the file by `payloads` (durably) and appends to it from then on.
  static Result<std::unique_ptr<SessionLog>> Create(const std::string& path, const std::vector<std::string>& payloads);

  void Append(const std::vector<std::string>& payloads);
  // Everything appended before the call is on disk when it returns.
  void Sync();

 private:
  SessionLog(std::string path, Fd fd) : path_(std::move(path)), fd_(std::move(fd)) {}

  const std::string path_;
  const Fd fd_;
  std::mutex mutex_;
  std::condition_variable synced_changed_;
  uint64_t appended_ = 0;  // appends so far; guarded by mutex_
  uint64_t synced_ = 0;    // of which on disk; guarded by mutex_
  bool syncing_ = false;   // guarded by mutex_
};

// One frame, and the payloads of all whole frames at the start of `bytes` (`*used`: how long they are).
std::string Frame(std::string_view payload);
std::vector<std::string> Unframe(std::string_view bytes, uint64_t* used);

}  // namespace temper::gateway
