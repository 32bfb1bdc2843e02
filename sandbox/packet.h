// Packets with descriptors over a SEQPACKET socket.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "common/file.h"
#include "common/status.h"

namespace temper::sandbox {

inline constexpr size_t kPacketBytesMax = 128 << 10;
inline constexpr int kPacketFdsMax = 16;

struct Packet {
  std::string bytes;
  std::vector<Fd> fds;  // close-on-exec
};

// Whole or not at all; never raises SIGPIPE. A full buffer blocks for at most `timeout_s`.
Status SendPacket(int socket, std::string_view bytes, const std::vector<int>& fds = {}, double timeout_s = 10);
// Does not wait. kNotFound: nothing there; kUnavailable: the other end is closed.
Result<Packet> ReceivePacket(int socket);

}  // namespace temper::sandbox
