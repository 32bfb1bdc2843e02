// The role `temper serve rollout`: a Worker, its gRPC service, and the subscriber that brings its weights.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "common/status.h"
#include "rollout/worker.h"

namespace temper::rollout {

struct ServerOptions {
  WorkerOptions worker;
  int listen_fd = -1;              // listening socket, inherited from the supervisor; taken over by Start
  std::string publisher_address;   // gRPC address of the trainer (weightsync)
  std::string name = "rollout-0";  // the worker's name in weight sync; the same after a restart
  uint64_t incarnation = 0;        // rises at each start of this role; 0 = taken from the clock
  // Instead of a publisher: weights from here; must outlive the server.
  WeightSource* source = nullptr;
  // Called (on a thread of gRPC's) when Role.Stop is asked for; must return at once.
  std::function<void(const std::string&)> on_stop;
};

class Server {
 public:
  explicit Server(ServerOptions options);
  ~Server();
  // Begins to serve; calls wait for the first weights. Fails when the socket cannot be served.
  Status Start();
  // Ends every call, stops in order: service, worker, subscriber. Idempotent.
  void Stop();
  // The worker, after Start: for the role's snapshot.
  Worker& worker();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace temper::rollout
