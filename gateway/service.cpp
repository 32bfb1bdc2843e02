#include "gateway/service.h"

#include <grpcpp/grpcpp.h>

#include "common/rpc_call.h"
#include "gateway/convert.h"
#include "temper/v1/gateway.grpc.pb.h"

namespace temper::gateway {
namespace {

class Service final : public v1::GatewayControl::Service {
 public:
  explicit Service(GatewayControl& control) : control_(control) {}

  grpc::Status Open(grpc::ServerContext*, const v1::GatewayOpenRequest* request, v1::GatewayOpenReply* reply) override {
    auto opened = control_.Open(FromProto(*request));
    if (!opened.ok()) return ToGrpc(opened.status());
    reply->set_api_key(opened->api_key);
    reply->set_base_url(opened->base_url);
    return grpc::Status::OK;
  }

  grpc::Status Seal(grpc::ServerContext*, const v1::GatewaySealRequest* request, v1::GatewaySealReply* reply) override {
    auto sealed = control_.Seal(request->session(), static_cast<int>(std::min(request->drain_ms(), 600'000u)));
    if (!sealed.ok()) return ToGrpc(sealed.status());
    *reply->mutable_trajectory() = *sealed->trajectory;
    reply->set_state(sealed->state);
    return grpc::Status::OK;
  }

  grpc::Status Abort(grpc::ServerContext*, const v1::GatewayAbortRequest* request, v1::GatewayAbortReply*) override {
    return ToGrpc(control_.Abort(request->session(), request->reason()));
  }

  grpc::Status Status(grpc::ServerContext*, const v1::GatewayStatusRequest*, v1::GatewayStatusReply* reply) override {
    auto status = control_.GetStatus();
    if (!status.ok()) return ToGrpc(status.status());
    reply->mutable_metrics()->insert(status->metrics.begin(), status->metrics.end());
    reply->set_base_url(status->base_url);
    return grpc::Status::OK;
  }

 private:
  GatewayControl& control_;
};

}  // namespace

std::unique_ptr<grpc::Service> NewGatewayService(GatewayControl& control) { return std::make_unique<Service>(control); }

}  // namespace temper::gateway
