// The gRPC face of a RolloutClient (proto/temper/v1/rollout.proto): one to one, no decisions. Streams are callback reactors, so
// that many open calls need no threads of their own.
#pragma once

#include <memory>

#include "rollout/client.h"

namespace grpc {
class Service;
}

namespace temper::rollout {

// `client` must outlive the service.
std::unique_ptr<grpc::Service> MakeRolloutService(RolloutClient* client);

}  // namespace temper::rollout
