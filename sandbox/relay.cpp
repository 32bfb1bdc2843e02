#include "sandbox/relay.h"

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>

#include "common/clock.h"
#include "common/strings.h"

namespace temper::sandbox {
namespace {

constexpr size_t kBufferBytes = 64 << 10;
constexpr double kGatewayWaitS = 60;

// Bytes on their way in one direction.
struct Flow {
  std::string buffer;
  bool ended = false;   // the reader's side said end of file
  bool shut = false;    // and that has been passed on
};

}  // namespace

struct Relay::Pair {
  Fd inner, outer;        // agent's side, gateway's side
  Flow out, in;           // agent -> gateway, gateway -> agent
  bool connected = false; // outer
  bool registered = false;  // outer is in the poller
  double give_up_s = 0;
};

Result<sockaddr_in> ParseAddress(const std::string& address) {
  size_t colon = address.rfind(':');
  int64_t port = 0;
  sockaddr_in a = {};
  a.sin_family = AF_INET;
  if (colon == std::string::npos || !ParseInt(std::string_view(address).substr(colon + 1), &port) || port < 1 || port > 65535 ||
      inet_pton(AF_INET, address.substr(0, colon).c_str(), &a.sin_addr) != 1) {
    return InvalidArgument("'" + address + "' is not IPV4:PORT");
  }
  a.sin_port = htons(static_cast<uint16_t>(port));
  return a;
}

Relay::Relay(Poller* poller, Fd listener, const sockaddr_in& gateway, int connections_max, RelayStats* stats)
    : poller_(poller), listener_(std::move(listener)), gateway_(gateway), connections_max_(connections_max), stats_(stats) {
  poller_->Add(listener_.get(), EPOLLIN, [this](uint32_t) { Accept(); });
}

Relay::~Relay() {
  poller_->Remove(listener_.get());
  listener_.Reset();  // a place that becomes free is for nobody any more
  while (!pairs_.empty()) Close(pairs_.front().get());
}

void Relay::Accept() {
  if (static_cast<int>(pairs_.size()) >= connections_max_) {
    accepting_ = false;
    poller_->Change(listener_.get(), 0);
    return;
  }
  Fd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!fd.valid()) return;
  int one = 1;
  setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  auto pair = std::make_unique<Pair>();
  Pair* p = pair.get();
  p->inner = std::move(fd);
  p->give_up_s = SystemClock::Get().NowS() + kGatewayWaitS;
  pairs_.push_back(std::move(pair));
  ++stats_->connections;
  ++stats_->accepted;
  poller_->Add(p->inner.get(), 0, [this, p](uint32_t events) { OnEvents(p, true, events); });
  Connect(p);
}

void Relay::Connect(Pair* p) {
  p->outer = Fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!p->outer.valid()) return Update(p);
  int one = 1;
  setsockopt(p->outer.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  int r = connect(p->outer.get(), reinterpret_cast<sockaddr*>(&gateway_), sizeof gateway_);
  if (r != 0 && errno != EINPROGRESS) {
    p->outer.Reset();  // Retry() tries again
    return Update(p);
  }
  poller_->Add(p->outer.get(), EPOLLOUT, [this, p](uint32_t events) { OnEvents(p, false, events); });
  p->registered = true;
  Update(p);
}

bool Relay::Retry(double now_s) {
  bool waiting = false;
  for (auto it = pairs_.begin(); it != pairs_.end();) {
    Pair* p = (it++)->get();
    if (p->connected) continue;
    if (now_s > p->give_up_s) {
      Close(p);
      continue;
    }
    waiting = true;
    if (!p->outer.valid()) Connect(p);
  }
  return waiting;
}

void Relay::OnEvents(Pair* p, bool inner, uint32_t events) {
  if (!inner && !p->connected) {
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(p->outer.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) {
      poller_->Remove(p->outer.get());
      p->registered = false;
      p->outer.Reset();
      return Update(p);
    }
    p->connected = true;
    return Update(p);
  }
  // A reset, or the agent went before the gateway came.
  if ((events & EPOLLERR) || (inner && (events & EPOLLHUP) && !p->connected)) return Close(p);
  Flow& reading = inner ? p->out : p->in;
  Flow& writing = inner ? p->in : p->out;
  int fd = inner ? p->inner.get() : p->outer.get();
  if (events & (EPOLLIN | EPOLLHUP) && !reading.ended && reading.buffer.size() < kBufferBytes) {
    char bytes[kBufferBytes];
    ssize_t n = read(fd, bytes, kBufferBytes - reading.buffer.size());
    if (n > 0) {
      reading.buffer.append(bytes, static_cast<size_t>(n));
      stats_->bytes += n;
    } else if (n == 0) {
      reading.ended = true;
    } else if (errno != EAGAIN && errno != EINTR) {
      return Close(p);
    }
  }
  // What was just read, towards the other end; and what waited, towards this one.
  for (Flow* flow : {&reading, &writing}) {
    int to = flow == &p->out ? p->outer.get() : p->inner.get();
    if (!p->connected || flow->buffer.empty()) continue;
    ssize_t n = send(to, flow->buffer.data(), flow->buffer.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n > 0) flow->buffer.erase(0, static_cast<size_t>(n));
    if (n < 0 && errno != EAGAIN && errno != EINTR) return Close(p);
  }
  Update(p);
}

// Passes on ends of file, closes what is over, and sets what each side waits for.
void Relay::Update(Pair* p) {
  for (Flow* flow : {&p->out, &p->in}) {
    if (flow->ended && flow->buffer.empty() && !flow->shut && p->connected) {
      shutdown(flow == &p->out ? p->outer.get() : p->inner.get(), SHUT_WR);
      flow->shut = true;
    }
  }
  if (p->out.shut && p->in.shut) return Close(p);
  auto wants = [](const Flow& reading, const Flow& writing) {
    uint32_t events = 0;
    if (!reading.ended && reading.buffer.size() < kBufferBytes) events |= EPOLLIN;
    if (!writing.buffer.empty()) events |= EPOLLOUT;
    return events;
  };
  poller_->Change(p->inner.get(), p->connected ? wants(p->out, p->in) : p->out.ended ? 0 : wants(p->out, p->in) & EPOLLIN);
  if (p->registered) poller_->Change(p->outer.get(), p->connected ? wants(p->in, p->out) : static_cast<uint32_t>(EPOLLOUT));
}

void Relay::Close(Pair* p) {
  poller_->Remove(p->inner.get());
  if (p->registered) poller_->Remove(p->outer.get());
  for (auto it = pairs_.begin(); it != pairs_.end(); ++it) {
    if (it->get() == p) {
      pairs_.erase(it);
      break;
    }
  }
  --stats_->connections;
  if (!accepting_ && listener_.valid()) {
    accepting_ = true;
    poller_->Change(listener_.get(), EPOLLIN);
  }
}

}  // namespace temper::sandbox
