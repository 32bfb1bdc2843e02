// The sandbox role: LocalSandboxService behind gRPC (proto/temper/v1/sandbox.proto) on an inherited listening socket.
#pragma once

#include <memory>

#include "common/status.h"
#include "sandbox/service.h"

namespace temper::sandbox {

struct ServerOptions {
  int listen_fd = -1;  // listening unix socket, taken over
  ServiceOptions service;
};

class Server {
 public:
  explicit Server(const ServerOptions& options);
  ~Server();
  Status Start();
  void Stop();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace temper::sandbox
