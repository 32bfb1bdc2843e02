// Pool of proto/temper/v1/pool.proto over a LocalDataPool: shapes only, no decisions.
#pragma once

#include <memory>

#include "datapool/service.h"

namespace grpc {
class Service;
}

namespace temper::datapool {

// `pool` outlives it.
std::unique_ptr<grpc::Service> MakePoolRpcService(LocalDataPool& pool);

}  // namespace temper::datapool
