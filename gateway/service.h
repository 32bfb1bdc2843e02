// The gRPC service in front of a GatewayControl: messages to types and back, no decisions.
#pragma once

#include <memory>

#include "gateway/client.h"

namespace grpc {
class Service;
}

namespace temper::gateway {

// `control` must outlive the service.
std::unique_ptr<grpc::Service> NewGatewayService(GatewayControl& control);

}  // namespace temper::gateway
