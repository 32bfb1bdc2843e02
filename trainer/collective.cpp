#include "trainer/collective.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include <fmt/format.h>

namespace temper::trainer {
namespace {

constexpr size_t kBlockBytes = size_t{1} << 18;

class Chain final : public Collective {
 public:
  Chain(Link previous, Link next) : previous_(std::move(previous)), next_(std::move(next)) {}

  Status Reduce(std::span<float> values) override {
    constexpr size_t kBlock = kBlockBytes / sizeof(float);
    block_.resize(kBlock);
    for (size_t at = 0; at < values.size(); at += kBlock) {
      const std::span<float> own = values.subspan(at, std::min(kBlock, values.size() - at));
      if (next_.valid()) {
        RETURN_IF_ERROR(next_.Receive(std::as_writable_bytes(std::span(block_).first(own.size()))));
        for (size_t i = 0; i < own.size(); ++i) own[i] = block_[i] + own[i];
      }
      if (previous_.valid()) RETURN_IF_ERROR(previous_.Send(std::as_bytes(own)));
    }
    return Status::Ok();
  }

  Status Broadcast(std::span<std::byte> bytes) override {
    for (size_t at = 0; at < bytes.size(); at += kBlockBytes) {
      const std::span<std::byte> block = bytes.subspan(at, std::min(kBlockBytes, bytes.size() - at));
      if (previous_.valid()) RETURN_IF_ERROR(previous_.Receive(block));
      if (next_.valid()) RETURN_IF_ERROR(next_.Send(block));
    }
    return Status::Ok();
  }

 private:
  Link previous_, next_;
  std::vector<float> block_;
};

}  // namespace

Link::Link(Fd socket, std::string peer) : socket_(std::move(socket)), peer_(std::move(peer)) {}

Status Link::Gone(const char* what, int error) const {
  return Unavailable(fmt::format("{}: {}", peer_, error == 0 ? what : fmt::format("{}: {}", what, std::strerror(error))));
}

// Silence is counted in waits of a second, not read off a clock: while this process too is stopped, none of them ends.
Status Link::Send(std::span<const std::byte> bytes) {
  for (int silent_s = 0; !bytes.empty();) {
    const ssize_t sent = send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
      bytes = bytes.subspan(static_cast<size_t>(sent));
      silent_s = 0;
      continue;
    }
    if (errno == EINTR) continue;
    if (errno != EAGAIN && errno != EWOULDBLOCK) return Gone("it is gone", errno == EPIPE || errno == ECONNRESET ? 0 : errno);
    pollfd ready = {socket_.get(), POLLOUT, 0};
    if (poll(&ready, 1, 1000) == 0 && ++silent_s >= kSilentS) return Gone("it takes nothing", 0);
  }
  return Status::Ok();
}

Status Link::Receive(std::span<std::byte> bytes) {
  for (int silent_s = 0; !bytes.empty();) {
    const ssize_t got = recv(socket_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got > 0) {
      bytes = bytes.subspan(static_cast<size_t>(got));
      silent_s = 0;
      continue;
    }
    if (got == 0) return Gone("it is gone", 0);
    if (errno == EINTR) continue;
    if (errno != EAGAIN && errno != EWOULDBLOCK) return Gone("it is gone", errno == ECONNRESET ? 0 : errno);
    pollfd ready = {socket_.get(), POLLIN, 0};
    if (poll(&ready, 1, 1000) == 0 && ++silent_s >= kSilentS) return Gone("it sends nothing", 0);
  }
  return Status::Ok();
}

Status Link::Wait() {
  pollfd ready = {socket_.get(), POLLIN, 0};
  while (poll(&ready, 1, -1) < 0) {
    if (errno != EINTR) return Gone("poll", errno);
  }
  std::byte first;
  const ssize_t got = recv(socket_.get(), &first, 1, MSG_PEEK | MSG_DONTWAIT);
  return got > 0 ? Status::Ok() : Gone("it is gone", 0);
}

void Link::Close() {
  if (valid()) shutdown(socket_.get(), SHUT_RDWR);
}

std::unique_ptr<Collective> MakeChain(Link previous, Link next) { return std::make_unique<Chain>(std::move(previous), std::move(next)); }

}  // namespace temper::trainer
