// Carries bytes between a listening socket inside a sandbox and the gateway. All relays live on the service's loop.
#pragma once

#include <netinet/in.h>

#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "common/file.h"
#include "common/status.h"
#include "sandbox/poller.h"

namespace temper::sandbox {

struct RelayStats {
  int64_t connections = 0;  // open now
  int64_t accepted = 0;
  int64_t bytes = 0;
};

// "HOST:PORT" with a numeric IPv4 host.
Result<sockaddr_in> ParseAddress(const std::string& address);

// One sandbox's relay. `poller` and `stats` outlive it. Single-threaded.
class Relay {
 public:
  // Takes over the listening socket. More than `connections_max` at once wait in its queue.
  Relay(Poller* poller, Fd listener, const sockaddr_in& gateway, int connections_max, RelayStats* stats);
  ~Relay();
  Relay(const Relay&) = delete;

  // Tries again what the gateway refused; call about every 0.1 s. True while any connection waits for the gateway.
  bool Retry(double now_s);

 private:
  struct Pair;
  void Accept();
  void Connect(Pair* pair);
  void OnEvents(Pair* pair, bool inner, uint32_t events);
  void Update(Pair* pair);
  void Close(Pair* pair);

  Poller* poller_;
  Fd listener_;
  sockaddr_in gateway_;
  int connections_max_;
  RelayStats* stats_;
  bool accepting_ = true;
  std::list<std::unique_ptr<Pair>> pairs_;
};

}  // namespace temper::sandbox
