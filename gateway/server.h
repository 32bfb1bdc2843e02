// The gateway role: agent plane (HTTP), control plane (gRPC), sessions with a durable log, one model behind a rollout worker.
//
// Owns its parts in construction order; Start and Stop do nothing else. Not thread-safe except AddListener and gateway().
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/status.h"
#include "gateway/client.h"

namespace temper::gateway {

struct ServerOptions {
  std::string log_dir;  // RUN/gateway, made if missing; "" = memory only (no recovery)

  // Agent plane: an inherited listening socket (the caller gives up ownership), or -1: binds `bind`:`port` (0 = any free one).
  int agent_fd = -1;
  std::string bind = "127.0.0.1";
  int port = 0;

  // Control plane: an inherited listening socket of an abstract unix address, or -1: no control plane (local use only).
  int control_fd = -1;

  std::vector<std::string> workers;  // addresses of rollout workers (RpcChannel form); a session keeps to one worker
  std::string model_path;            // tokenizer and chat template: a folder, a GGUF file, or a checkpoint
  std::string model_name = "policy";  // what GET /v1/models shows; requests may name anything
  int32_t context_tokens = 0;        // longest prompt + completion; 0 = the model's max_positions
  int worker_threads = 2;            // render, tokenise, parse
  double worker_patience_s = 60;     // how long a call is held while no worker answers
  uint64_t body_bytes_max = 64ull << 20;
  std::function<void(const std::string& reason)> on_stop;  // Role.Stop was called; must return at once
};

class Server {
 public:
  explicit Server(ServerOptions options);
  ~Server();  // stops
  // Recovers the log, then listens. An error names the file, port or model that failed.
  Status Start();
  // Refuses new calls, cancels those in flight, closes every connection and thread. Open sessions stay open in the log.
  void Stop();

  // Also accepts agent connections on this listening stream socket (for example one made inside a sandbox's network namespace
  // and handed out). Takes ownership; closed when the other side is gone or at Stop.
  Status AddListener(int fd);

  int port() const;              // of the agent plane
  std::string base_url() const;  // http://BIND:PORT/v1
  GatewayControl& control();     // the same object that the gRPC service serves; valid after Start

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace temper::gateway
