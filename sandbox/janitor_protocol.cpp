#include "sandbox/janitor_protocol.h"

#include "sandbox/init/protocol.h"
#include "sandbox/wire.h"

namespace temper::sandbox {
namespace {

constexpr uint32_t kRequestMagic = 0x31514a54, kReplyMagic = 0x31524a54;
constexpr uint32_t kMountsMax = 256;

std::string Text(protocol::Reader& r) {
  uint32_t n = 0;
  const char* s = r.Bytes(&n);
  return s ? std::string(s, n) : std::string();
}

}  // namespace

std::string Encode(const JanitorRequest& q) {
  WireWriter w;
  w.U32(kRequestMagic).U32(static_cast<uint32_t>(q.type)).U32(q.seq).U32(q.handle);
  w.U64(q.memory_bytes).U64(q.processes).U64(q.disk_bytes).U64(q.files).U32(q.relay).Str(q.rootfs);
  w.U32(static_cast<uint32_t>(q.mounts.size()));
  for (const Mount& m : q.mounts) w.Str(m.source).Str(m.target);
  return w.bytes();
}

Result<JanitorRequest> DecodeJanitorRequest(std::string_view bytes) {
  protocol::Reader r(bytes.data(), bytes.size());
  JanitorRequest q;
  bool magic = r.U32() == kRequestMagic;
  uint32_t type = r.U32();
  q.type = static_cast<JanitorRequest::Type>(type);
  q.seq = r.U32();
  q.handle = r.U32();
  q.memory_bytes = static_cast<int64_t>(r.U64());
  q.processes = static_cast<int64_t>(r.U64());
  q.disk_bytes = static_cast<int64_t>(r.U64());
  q.files = static_cast<int64_t>(r.U64());
  uint32_t relay = r.U32();
  q.relay = relay == 1;
  q.rootfs = Text(r);
  uint32_t n = r.U32();
  if (!r.ok() || !magic || type < 1 || type > 3 || relay > 1 || n > kMountsMax) return InvalidArgument("not a janitor request");
  for (uint32_t i = 0; i < n; ++i) {
    Mount m;
    m.source = Text(r);
    m.target = Text(r);
    q.mounts.push_back(std::move(m));
  }
  if (!r.done()) return InvalidArgument("not a janitor request");
  if (q.type == JanitorRequest::Type::kCreate) {
    if (q.memory_bytes <= 0 || q.processes <= 0 || q.disk_bytes <= 0 || q.files <= 0) {
      return InvalidArgument("a limit of the sandbox is not positive");
    }
    // Paths go to system calls, which end at a NUL.
    auto has_nul = [](const std::string& s) { return s.find('\0') != std::string::npos; };
    bool bad = has_nul(q.rootfs) || (!q.rootfs.empty() && q.rootfs[0] != '/');
    for (const Mount& m : q.mounts) bad |= has_nul(m.source) || has_nul(m.target);
    if (bad) return InvalidArgument("rootfs and mounts are absolute paths without NUL");
  }
  return q;
}

std::string Encode(const JanitorReply& p) {
  WireWriter w;
  w.U32(kReplyMagic).U32(p.seq).U32(p.handle).U32(p.fds).U32(p.host_uid).Str(p.memory).Str(p.processes).Str(p.cpu);
  w.U32(static_cast<uint32_t>(p.code)).Str(p.message.substr(0, 4096));
  return w.bytes();
}

Result<JanitorReply> DecodeJanitorReply(std::string_view bytes) {
  protocol::Reader r(bytes.data(), bytes.size());
  JanitorReply p;
  bool magic = r.U32() == kReplyMagic;
  p.seq = r.U32();
  p.handle = r.U32();
  p.fds = r.U32();
  p.host_uid = r.U32();
  p.memory = Text(r);
  p.processes = Text(r);
  p.cpu = Text(r);
  uint32_t code = r.U32();
  p.message = Text(r);
  if (!r.done() || !magic || code > 16) return InvalidArgument("not a janitor reply");
  p.code = static_cast<StatusCode>(code);
  return p;
}

}  // namespace temper::sandbox
