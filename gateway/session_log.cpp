#include "gateway/session_log.h"

#include <fcntl.h>
#include <unistd.h>
#include <xxhash.h>

#include <cerrno>
#include <chrono>
#include <cstring>

#include "common/check.h"
#include "common/faults.h"

namespace temper::gateway {
namespace {

constexpr size_t kHead = 12;
constexpr uint32_t kPayloadMax = 1u << 30;

void PutLittle(std::string* out, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out->push_back(static_cast<char>(value >> (8 * i)));
}
uint64_t GetLittle(std::string_view in, int bytes) {
  uint64_t value = 0;
  for (int i = 0; i < bytes; ++i) value |= static_cast<uint64_t>(static_cast<unsigned char>(in[i])) << (8 * i);
  return value;
}

}  // namespace

std::string Frame(std::string_view payload) {
  TEMPER_CHECK(payload.size() < kPayloadMax) << "a log record of " << payload.size() << " bytes";
  std::string frame;
  frame.reserve(kHead + payload.size());
  PutLittle(&frame, payload.size(), 4);
  PutLittle(&frame, XXH64(payload.data(), payload.size(), 0), 8);
  frame += payload;
  return frame;
}

std::vector<std::string> Unframe(std::string_view bytes, uint64_t* used) {
  std::vector<std::string> payloads;
  size_t at = 0;
  while (bytes.size() - at >= kHead) {
    const uint64_t length = GetLittle(bytes.substr(at), 4);
    if (length >= kPayloadMax || length > bytes.size() - at - kHead) break;
    const std::string_view payload = bytes.substr(at + kHead, length);
    if (XXH64(payload.data(), payload.size(), 0) != GetLittle(bytes.substr(at + 4), 8)) break;
    payloads.emplace_back(payload);
    at += kHead + length;
  }
  *used = at;
  return payloads;
}

Result<SessionLog::Recovered> SessionLog::Read(const std::string& path) {
  Recovered recovered;
  if (!Exists(path)) return recovered;
  ASSIGN_OR_RETURN(const std::string bytes, ReadFile(path));
  uint64_t used = 0;
  recovered.payloads = Unframe(bytes, &used);
  recovered.lost_bytes = bytes.size() - used;
  return recovered;
}

Result<std::unique_ptr<SessionLog>> SessionLog::Create(const std::string& path, const std::vector<std::string>& payloads) {
  std::string bytes;
  for (const std::string& payload : payloads) bytes += Frame(payload);
  RETURN_IF_ERROR(WriteFileAtomic(path, bytes));
  Fd fd(::open(path.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC));
  if (!fd.valid()) return ErrnoStatus("open " + path, errno);
  return std::unique_ptr<SessionLog>(new SessionLog(path, std::move(fd)));
}

void SessionLog::Append(const std::vector<std::string>& payloads) {
  if (payloads.empty()) return;
  std::string bytes;
  for (const std::string& payload : payloads) bytes += Frame(payload);
  std::lock_guard lock(mutex_);
  Status status = Faults::Get().Hit("gateway.log_write");
  if (status.ok()) status = WriteAll(fd_.get(), bytes);
  if (status.ok()) status = Faults::Get().Hit("gateway.log_written");
  TEMPER_CHECK(status.ok()) << path_ << ": " << status.ToString() << " (is the disk full?)";
  ++appended_;
}

void SessionLog::Sync() {
  std::unique_lock lock(mutex_);
  const uint64_t target = appended_;
  while (synced_ < target) {
    if (syncing_) {
      synced_changed_.wait_for(lock, std::chrono::seconds(1));
      continue;
    }
    syncing_ = true;
    const uint64_t reached = appended_;
    lock.unlock();
    const int rc = ::fdatasync(fd_.get());
    TEMPER_CHECK(rc == 0) << "fdatasync " << path_ << ": " << std::strerror(errno);
    lock.lock();
    syncing_ = false;
    synced_ = reached;
    synced_changed_.notify_all();
  }
}

}  // namespace temper::gateway
