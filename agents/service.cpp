#include "agents/service.h"

#include <grpcpp/grpcpp.h>

#include <utility>

#include "common/rpc_call.h"
#include "temper/v1/agents.grpc.pb.h"

namespace temper::agents {
namespace {

void ToProto(const EvaluationReport& from, v1::EvaluateReply* to) {
  to->set_evaluation(from.evaluation);
  to->set_version(from.version);
  to->set_tasks(from.tasks);
  to->set_unjudged(from.unjudged);
  to->set_pass_rate(from.pass_rate);
  to->set_tokens_sampled(from.tokens_sampled);
  to->set_wall_s(from.wall_s);
  for (const auto& [name, score] : from.families) {
    v1::FamilyReport& family = (*to->mutable_families())[name];
    family.set_tasks(score.tasks);
    family.set_passed(score.passed);
  }
  for (const auto& [name, count] : from.outcomes) (*to->mutable_outcomes())[name] = count;
  for (const std::string& trajectory : from.probe) to->add_probe(trajectory);
}

EvaluationReport FromProto(const v1::EvaluateReply& from) {
  EvaluationReport to;
  to.evaluation = from.evaluation();
  to.version = from.version();
  to.tasks = from.tasks();
  to.unjudged = from.unjudged();
  to.pass_rate = from.pass_rate();
  to.tokens_sampled = from.tokens_sampled();
  to.wall_s = from.wall_s();
  for (const auto& [name, family] : from.families()) to.families[name] = {family.tasks(), family.passed()};
  for (const auto& [name, count] : from.outcomes()) to.outcomes[name] = count;
  to.probe.assign(from.probe().begin(), from.probe().end());
  return to;
}

class RemoteAgents : public Agents {
 public:
  RemoteAgents(const std::string& address, double patience_s)
      : channel_(RpcChannel(address)), stub_(v1::Agents::NewStub(channel_)), patience_s_(patience_s) {}

  // A role that was killed comes back and plays the evaluation anew, so the call is repeated.
  Result<EvaluationReport> Evaluate(int64_t evaluation, int64_t version) override {
    v1::EvaluateRequest request;
    request.set_evaluation(evaluation);
    request.set_version(version);
    v1::EvaluateReply reply;
    CallOptions options;
    options.deadline_s = patience_s_;
    options.retry_s = patience_s_;
    Status status = RpcCall(*channel_, *stub_, &v1::Agents::Stub::Evaluate, request, &reply, options);
    if (!status.ok()) return status.WithContext("agents");
    return FromProto(reply);
  }

  Result<std::vector<std::string>> Probe(int64_t version) override {
    v1::ProbeRequest request;
    request.set_version(version);
    v1::ProbeReply reply;
    CallOptions options;
    options.retry_s = 0;  // a check that can be missed
    Status status = RpcCall(*channel_, *stub_, &v1::Agents::Stub::Probe, request, &reply, options);
    if (!status.ok()) return status.WithContext("agents");
    return std::vector<std::string>(reply.trajectories().begin(), reply.trajectories().end());
  }

 private:
  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<v1::Agents::Stub> stub_;
  const double patience_s_;
};

}  // namespace

struct AgentsService::Impl : v1::Agents::Service {
  explicit Impl(Agents* a) : agents(a) {}
  grpc::Status Evaluate(grpc::ServerContext*, const v1::EvaluateRequest* request, v1::EvaluateReply* reply) override {
    Result<EvaluationReport> report = agents->Evaluate(request->evaluation(), request->version());
    if (!report.ok()) return ToGrpc(report.status());
    ToProto(*report, reply);
    return grpc::Status::OK;
  }
  grpc::Status Probe(grpc::ServerContext*, const v1::ProbeRequest* request, v1::ProbeReply* reply) override {
    Result<std::vector<std::string>> trajectories = agents->Probe(request->version());
    if (!trajectories.ok()) return ToGrpc(trajectories.status());
    for (std::string& trajectory : *trajectories) reply->add_trajectories(std::move(trajectory));
    return grpc::Status::OK;
  }
  Agents* const agents;
};

AgentsService::AgentsService(Agents* agents) : impl_(std::make_unique<Impl>(agents)) {}
AgentsService::~AgentsService() = default;
grpc::Service* AgentsService::grpc() { return impl_.get(); }

std::unique_ptr<Agents> ConnectAgents(const std::string& address, double patience_s) {
  return std::make_unique<RemoteAgents>(address, patience_s);
}

}  // namespace temper::agents
