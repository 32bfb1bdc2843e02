#include "gateway/server.h"

#include <grpcpp/impl/codegen/service_type.h>

#include <optional>
#include <utility>

#include "common/check.h"
#include "common/clock.h"
#include "common/log.h"
#include "common/metrics.h"
#include "common/rpc.h"
#include "engine/files/model_file.h"
#include "gateway/gateway.h"
#include "gateway/http/server.h"
#include "gateway/service.h"
#include "rollout/client.h"
#include "text/text_model.h"

namespace temper::gateway {

struct Server::Parts {
  ServerOptions options;
  // In order of construction; destroyed the other way round.
  Metrics metrics;
  std::unique_ptr<PolicyText> text;
  std::unique_ptr<rollout::RolloutClient> rollout;
  std::unique_ptr<Gateway> gateway;
  std::unique_ptr<http::Server> http;
  std::unique_ptr<grpc::Service> service;
  std::unique_ptr<RpcServer> rpc;
  int port = 0;
  std::string base_url;
};

Server::Server(ServerOptions options) : parts_(std::make_unique<Parts>()) { parts_->options = std::move(options); }

Server::~Server() { Stop(); }

Status Server::Start() {
  Parts& p = *parts_;
  TEMPER_CHECK(!p.gateway) << "started twice";
  const ServerOptions& o = p.options;
  Fd agent(o.agent_fd), control(o.control_fd);  // ours from here, also when something fails
  ASSIGN_OR_RETURN(const engine::ModelFile model, engine::LoadModelConfig(o.model_path));
  ASSIGN_OR_RETURN(text::TextModel text, text::LoadTextModel(model.text));
  if (!text.chat_template) return FailedPrecondition(o.model_path + " has no chat template");
  if (text.end_ids.empty()) return FailedPrecondition(o.model_path + " names no end-of-sequence token");
  p.text = NewPolicyText(std::move(text));

  if (o.workers.empty()) return InvalidArgument("no rollout worker");
  std::vector<std::unique_ptr<rollout::RolloutClient>> workers;
  for (const std::string& address : o.workers) workers.push_back(rollout::ConnectRollout(address));
  p.rollout = workers.size() == 1 ? std::move(workers[0]) : rollout::SpreadRollout(std::move(workers));

  const int positions = model.config.max_positions;
  p.gateway = std::make_unique<Gateway>(
      GatewayOptions{.log_dir = o.log_dir,
                     .model_name = o.model_name,
                     .context_tokens = o.context_tokens > 0 ? std::min(o.context_tokens, positions) : positions,
                     .worker_patience_s = o.worker_patience_s},
      *p.text, *p.rollout, SystemClock::Get(), p.metrics);
  if (!agent.valid()) {
    ASSIGN_OR_RETURN(agent, ListenTcp(o.bind, o.port));
  }
  auto port = BoundPort(agent.get());
  p.port = port.ok() ? *port : 0;
  p.base_url = "http://" + o.bind + ":" + std::to_string(p.port) + "/v1";
  p.gateway->SetBaseUrl(p.base_url);
  RETURN_IF_ERROR(p.gateway->Start());

  p.http = std::make_unique<http::Server>(
      http::ServerOptions{.worker_threads = o.worker_threads, .body_bytes_max = o.body_bytes_max, .refuse = &Gateway::RefusalBody},
      [g = p.gateway.get()](http::Request request, std::shared_ptr<http::Responder> out) { g->Handle(std::move(request), std::move(out)); });
  RETURN_IF_ERROR(p.http->AddListener(agent.Release()));
  p.http->Start();
  if (control.valid()) {
    p.service = NewGatewayService(*p.gateway);
    p.rpc = std::make_unique<RpcServer>(std::move(control));
    p.rpc->Register(p.service.get());
    p.rpc->RegisterRole("gateway", &p.metrics, o.on_stop ? o.on_stop : [](const std::string&) {});
    RETURN_IF_ERROR(p.rpc->Start());
  }
  log::Info("gateway ready", {{"base_url", p.base_url}, {"context_tokens", positions}});
  return Status::Ok();
}

void Server::Stop() {
  Parts& p = *parts_;
  if (p.gateway) p.gateway->Interrupt();
  if (p.rpc) p.rpc->Stop();
  if (p.http) p.http->Stop();
  if (p.gateway) p.gateway->Stop();
}

Status Server::AddListener(int fd) {
  TEMPER_CHECK(parts_->http) << "not started";
  return parts_->http->AddListener(fd);
}

int Server::port() const { return parts_->port; }
std::string Server::base_url() const { return parts_->base_url; }
GatewayControl& Server::control() {
  TEMPER_CHECK(parts_->gateway) << "not started";
  return *parts_->gateway;
}

}  // namespace temper::gateway
