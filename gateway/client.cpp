#include "gateway/client.h"

#include <algorithm>

#include "common/rpc.h"
#include "common/rpc_call.h"
#include "gateway/convert.h"
#include "temper/v1/gateway.grpc.pb.h"

namespace temper::gateway {
namespace {

using Stub = v1::GatewayControl::Stub;

class Client : public GatewayControl {
 public:
  Client(const std::string& address, double patience_s)
      : channel_(RpcChannel(address)), stub_(v1::GatewayControl::NewStub(channel_)), patience_s_(patience_s) {}

  Result<Opened> Open(const OpenOptions& options) override {
    v1::GatewayOpenRequest request;
    ToProto(options, &request);
    v1::GatewayOpenReply reply;
    RETURN_IF_ERROR(RpcCall(*channel_, *stub_, &Stub::Open, request, &reply, Options(10)));
    return Opened{reply.api_key(), reply.base_url()};
  }

  Result<Sealed> Seal(const std::string& session, int drain_ms) override {
    v1::GatewaySealRequest request;
    request.set_session(session);
    request.set_drain_ms(static_cast<uint32_t>(std::max(drain_ms, 0)));
    v1::GatewaySealReply reply;
    RETURN_IF_ERROR(RpcCall(*channel_, *stub_, &Stub::Seal, request, &reply, Options(30 + drain_ms * 1e-3)));
    auto trajectory = std::make_shared<v1::Trajectory>(std::move(*reply.mutable_trajectory()));
    return Sealed{std::move(trajectory), reply.state()};
  }

  Status Abort(const std::string& session, const std::string& reason) override {
    v1::GatewayAbortRequest request;
    request.set_session(session);
    request.set_reason(reason);
    v1::GatewayAbortReply reply;
    return RpcCall(*channel_, *stub_, &Stub::Abort, request, &reply, Options(30));
  }

  Result<GatewayStatus> GetStatus() override {
    v1::GatewayStatusReply reply;
    RETURN_IF_ERROR(RpcCall(*channel_, *stub_, &Stub::Status, v1::GatewayStatusRequest(), &reply, Options(10)));
    return GatewayStatus{{reply.metrics().begin(), reply.metrics().end()}, reply.base_url()};
  }

 private:
  // Every call is idempotent, so it is repeated while the gateway restarts.
  CallOptions Options(double deadline_s) const { return {.deadline_s = deadline_s, .retry_s = patience_s_}; }

  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<Stub> stub_;
  const double patience_s_;
};

}  // namespace

std::unique_ptr<GatewayControl> NewGatewayClient(const std::string& address, double patience_s) {
  return std::make_unique<Client>(address, patience_s);
}

}  // namespace temper::gateway
