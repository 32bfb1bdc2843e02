// Between the plain structs of client.h and their messages, one to one.
#pragma once

#include "gateway/client.h"

namespace temper::v1 {
class GatewayOpenRequest;
}

namespace temper::gateway {

void ToProto(const OpenOptions& options, v1::GatewayOpenRequest* out);
OpenOptions FromProto(const v1::GatewayOpenRequest& in);

}  // namespace temper::gateway
