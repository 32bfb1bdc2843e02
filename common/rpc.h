// gRPC between roles on one machine: a server on an inherited listening socket, channels, and errors across the wire.
//
// Roles listen on abstract unix sockets. The supervisor opens them and keeps them open, so a client of a role that is being
// restarted queues in the socket's backlog instead of being refused. Each accepted connection must come from a process of
// the same user (SO_PEERCRED); everything else is closed unread.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/file.h"
#include "common/metrics.h"
#include "common/status.h"

namespace grpc {
class Channel;
class Service;
}  // namespace grpc

namespace temper {

// Listens on "unix-abstract:NAME". The name lives as long as some process holds the socket.
Result<Fd> ListenAbstract(const std::string& name);
// Listens on an IPv4 address; port 0 takes any free one. A port in use: kFailedPrecondition.
Result<Fd> ListenTcp(const std::string& host, int port);
Result<int> BoundPort(int listening_fd);

struct RpcServerOptions {
  // Calls served at once, long-polls included; threads are made as they are needed. Beyond, calls are refused before they are
  // executed, and RpcCall tries again.
  int max_threads = 256;
};

// Serves gRPC services on a listening unix socket. Services are registered before Start and outlive the server.
// Handlers run on gRPC's threads, several at once. Thread-compatible.
class RpcServer {
 public:
  explicit RpcServer(Fd listening, RpcServerOptions options = {});
  ~RpcServer();  // stops

  void Register(grpc::Service* service);
  // Adds the Role service (proto/temper/v1/role.proto): snapshots of `metrics`; `on_stop` gets the reason, on a thread of
  // gRPC's, and must return at once.
  void RegisterRole(const std::string& role, const Metrics* metrics, std::function<void(const std::string&)> on_stop);
  Status Start();
  // No new connections; running calls get `drain_s` seconds, then they are cancelled. Waits for the handlers: a long-poll
  // must return soon after its context is cancelled. Idempotent.
  void Stop(double drain_s = 0.5);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// A channel to "unix-abstract:NAME" that reconnects quickly. Making one never blocks. Messages up to 256 MiB.
std::shared_ptr<grpc::Channel> RpcChannel(const std::string& address);

struct RoleSnapshot {
  std::string role;
  int64_t pid = 0;
  std::map<std::string, double> metrics;
  std::vector<std::string> lines;
};
// Role.Snapshot and Role.Stop of the role behind a channel.
Result<RoleSnapshot> FetchSnapshot(grpc::Channel& channel, double deadline_s);
Status RequestStop(grpc::Channel& channel, const std::string& reason, double deadline_s);

}  // namespace temper
