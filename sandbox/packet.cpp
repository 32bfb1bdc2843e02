#include "sandbox/packet.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

namespace temper::sandbox {

Status SendPacket(int socket, std::string_view bytes, const std::vector<int>& fds, double timeout_s) {
  TEMPER_CHECK(fds.size() <= kPacketFdsMax);
  if (bytes.size() > kPacketBytesMax) {
    return InvalidArgument("request of " + std::to_string(bytes.size()) + " bytes; at most " + std::to_string(kPacketBytesMax));
  }
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kPacketFdsMax)] = {};
  iovec io = {const_cast<char*>(bytes.data()), bytes.size()};
  msghdr h = {};
  h.msg_iov = &io;
  h.msg_iovlen = 1;
  if (!fds.empty()) {
    h.msg_control = control;
    h.msg_controllen = CMSG_SPACE(sizeof(int) * fds.size());
    cmsghdr* c = CMSG_FIRSTHDR(&h);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int) * fds.size());
    std::memcpy(CMSG_DATA(c), fds.data(), sizeof(int) * fds.size());
  }
  for (;;) {
    if (sendmsg(socket, &h, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0) return Status::Ok();
    if (errno == EINTR) continue;
    if (errno == EPIPE || errno == ECONNRESET) return Unavailable("the other end of the channel is closed");
    if (errno != EAGAIN) return ErrnoStatus("sendmsg", errno);
    pollfd p = {socket, POLLOUT, 0};
    int r = poll(&p, 1, static_cast<int>(timeout_s * 1e3));
    if (r == 0) return DeadlineExceeded("the other end of the channel does not read");
  }
}

Result<Packet> ReceivePacket(int socket) {
  Packet packet;
  packet.bytes.resize(kPacketBytesMax);
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kPacketFdsMax)];
  iovec io = {packet.bytes.data(), packet.bytes.size()};
  msghdr h = {};
  h.msg_iov = &io;
  h.msg_iovlen = 1;
  h.msg_control = control;
  h.msg_controllen = sizeof control;
  ssize_t n;
  do {
    n = recvmsg(socket, &h, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  } while (n < 0 && errno == EINTR);
  if (n < 0) {
    if (errno == EAGAIN) return NotFound("no packet");
    if (errno == ECONNRESET) return Unavailable("the channel was reset");
    return ErrnoStatus("recvmsg", errno);
  }
  for (cmsghdr* c = CMSG_FIRSTHDR(&h); c; c = CMSG_NXTHDR(&h, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof fd);
      packet.fds.emplace_back(fd);
    }
  }
  if (n == 0) return Unavailable("the channel is closed");
  if (h.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) return InvalidArgument("packet cut short");
  packet.bytes.resize(static_cast<size_t>(n));
  return packet;
}

}  // namespace temper::sandbox
