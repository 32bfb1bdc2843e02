// What the sandbox's init and the outside say to each other, and what a tool client says to init. Freestanding: the init
// links nothing but libc, so there is no std:: here that needs a library.
//
// Control channel (SEQPACKET, the service and init): one Message a packet.
//   kExec  service -> init; descriptors payload, stdin, stdout, stderr and, with kHasFd3, fd 3. The payload is a file:
//            u32 kExecMagic | u32 role | u64 address_space | u64 processes | u64 file_size | u64 cpu_s | str cwd |
//            u32 n, n x str argv | u32 m, m x str "NAME=value"      (u64 limits: 0 = none)
//   kKill  service -> init: SIGKILL for every process of the user that runs exec_id
//   kExit  init -> service: `status` as wait() gives it, -1 when no process could be made
// Tool channel (SEQPACKET, abstract name kToolSocket, only uid kAgentUid is heard):
//   kTool  client -> init; descriptors payload, stdin, stdout, stderr. Payload: u32 kToolMagic | u32 n, n x str argv |
//            u32 m, m x str "NAME=value". The bytes come from the agent: every length is checked.
//   kExit  init -> client. The client closing its end kills the command's process group.
// Numbers are little endian; str = u32 length, that many bytes without NUL, one NUL.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

namespace temper::sandbox::protocol {

inline constexpr int kControlFd = 3;
inline constexpr int kLifelineFd = 4;
inline constexpr int kFilterFd = 5;

inline constexpr uint32_t kAgentUid = 1000;
inline constexpr uint32_t kToolUid = 1001;
inline constexpr uint32_t kWorkGid = 1000;  // of both, so that each may write what the other made

inline constexpr char kInitPath[] = "/temper/init";
inline constexpr char kToolExecPath[] = "/temper/tool-exec";
inline constexpr char kToolExecName[] = "tool-exec";
inline constexpr char kToolSocket[] = "temper-tool";  // after the NUL of an abstract name

inline constexpr uint32_t kExecMagic = 0x31585354;
inline constexpr uint32_t kToolMagic = 0x31545354;
inline constexpr uint32_t kPayloadBytesMax = 2u << 20;
inline constexpr uint32_t kArgumentsMax = 4096;

enum MessageType : uint32_t { kExec = 1, kKill = 2, kExit = 3, kTool = 4 };
inline constexpr uint32_t kHasFd3 = 1;

struct Message {
  uint32_t type;
  uint32_t exec_id;
  int32_t status;
  uint32_t flags;
  uint64_t cpu_us;  // kExit: of the command and the children it waited for
};

// Reads the payload forms above; after the first impossible length everything is 0 or null and ok() is false.
class Reader {
 public:
  Reader(const void* data, size_t size) : at_(static_cast<const char*>(data)), left_(size) {}
  bool ok() const { return ok_; }
  bool done() const { return ok_ && left_ == 0; }

  uint32_t U32() { return Number<uint32_t>(); }
  uint64_t U64() { return Number<uint64_t>(); }
  // A NUL-terminated string inside the data, without a NUL before its end; null when the data is bad.
  const char* Str(uint32_t* size = nullptr) {
    uint32_t n = U32();
    if (!ok_ || left_ < size_t{n} + 1 || at_[n] != 0 || memchr(at_, 0, n) != nullptr) return Fail();
    const char* s = at_;
    at_ += n + 1;
    left_ -= n + 1;
    if (size) *size = n;
    return s;
  }
  // The same for bytes that may hold NULs.
  const char* Bytes(uint32_t* size) {
    uint32_t n = U32();
    if (!ok_ || left_ < size_t{n} + 1 || at_[n] != 0) return Fail();
    const char* s = at_;
    at_ += n + 1;
    left_ -= n + 1;
    *size = n;
    return s;
  }

 private:
  template <typename T>
  T Number() {
    T v = 0;
    if (!ok_ || left_ < sizeof v) {
      Fail();
      return 0;
    }
    memcpy(&v, at_, sizeof v);
    at_ += sizeof v;
    left_ -= sizeof v;
    return v;
  }
  const char* Fail() {
    ok_ = false;
    left_ = 0;
    return nullptr;
  }
  const char* at_;
  size_t left_;
  bool ok_ = true;
};

// A command as parsed from a payload; pointers lead into it.
struct Command {
  uint32_t role;  // 0 agent, 1 tool
  uint64_t address_space, processes, file_size, cpu_s;
  const char* cwd;
  const char** argv;  // null-terminated
  const char** env;
};

// Fills `out` from a kExec payload, or a kTool payload when `tool`. `slots` takes the argument pointers and must hold
// 2 * kArgumentsMax + 2. False when the bytes are not a payload.
inline bool ParseCommand(const void* data, size_t size, bool tool, const char** slots, Command* out) {
  Reader r(data, size);
  if (r.U32() != (tool ? kToolMagic : kExecMagic)) return false;
  *out = Command{1, 0, 0, 0, 0, "/work", nullptr, nullptr};
  if (!tool) {
    out->role = r.U32();
    out->address_space = r.U64();
    out->processes = r.U64();
    out->file_size = r.U64();
    out->cpu_s = r.U64();
    out->cwd = r.Str();
    if (!r.ok() || out->role > 1) return false;
  }
  uint32_t n = r.U32();
  if (!r.ok() || n == 0 || n > kArgumentsMax) return false;
  out->argv = slots;
  for (uint32_t i = 0; i < n; ++i) *slots++ = r.Str();
  *slots++ = nullptr;
  uint32_t m = r.U32();
  if (!r.ok() || m > kArgumentsMax) return false;
  out->env = slots;
  for (uint32_t i = 0; i < m; ++i) *slots++ = r.Str();
  *slots++ = nullptr;
  return r.done();
}

}  // namespace temper::sandbox::protocol
