// The sandbox role: LocalSandboxService and the Role service behind gRPC (proto/temper/v1/sandbox.proto) on an
// inherited listening socket. Exec calls hold no thread while their command runs.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "common/metrics.h"
#include "common/status.h"
#include "sandbox/service.h"

namespace temper::sandbox {

struct ServerOptions {
  int listen_fd = -1;      // listening unix socket, taken over
  ServiceOptions service;  // its `metrics` is replaced by the role's own
  std::function<void(const std::string& reason)> on_stop;  // Role.Stop was called; must return at once
};

class Server {
 public:
  explicit Server(const ServerOptions& options);
  ~Server();
  Status Start();
  // Destroys every sandbox; running Exec calls end. Idempotent.
  void Stop();
  Metrics& metrics();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace temper::sandbox
