// The Agents service over gRPC: proto <-> types, no decisions.
#pragma once

#include <memory>

#include "agents/client.h"
#include "common/rpc.h"

namespace temper::agents {

// `agents` is not owned. Register what grpc() gives with an RpcServer, which must stop before this goes.
class AgentsService {
 public:
  explicit AgentsService(Agents* agents);
  ~AgentsService();
  grpc::Service* grpc();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace temper::agents
