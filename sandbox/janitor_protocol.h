// What the service asks the janitor, and what it answers: one packet each, matched by `seq`. Pure.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"
#include "sandbox/types.h"

namespace temper::sandbox {

struct JanitorRequest {
  enum class Type : uint32_t { kReset = 1, kCreate = 2, kDestroy = 3 };
  Type type = Type::kReset;
  uint32_t seq = 0;
  uint32_t handle = 0;  // kDestroy
  // kCreate:
  int64_t memory_bytes = 0, processes = 0, disk_bytes = 0, files = 0;
  bool relay = false;
  std::string rootfs;
  std::vector<Mount> mounts;
  bool operator==(const JanitorRequest&) const = default;
};

// Descriptors of a kCreate answer come in this order; kRelay only when asked for, a counter only when its bit is set.
enum JanitorFd : uint32_t { kFdControl = 1, kFdWork = 2, kFdRelay = 4, kFdCpu = 8, kFdOom = 16, kFdPeak = 32, kFdRefused = 64 };

struct JanitorReply {
  uint32_t seq = 0;
  uint32_t handle = 0;
  uint32_t fds = 0;  // bits of JanitorFd
  uint32_t host_uid = 0;  // of the sandbox's uid 0; its uid N is host_uid + N
  std::string memory{}, processes{}, cpu{};  // how these limits are held: "cgroup", "rlimit", "no"
  StatusCode code = StatusCode::kOk;
  std::string message{};
  bool operator==(const JanitorReply&) const = default;
};

std::string Encode(const JanitorRequest& request);
std::string Encode(const JanitorReply& reply);
// kInvalidArgument on anything that Encode does not write.
Result<JanitorRequest> DecodeJanitorRequest(std::string_view bytes);
Result<JanitorReply> DecodeJanitorReply(std::string_view bytes);

}  // namespace temper::sandbox
