#include "datapool/client.h"

#include <mutex>

#include "common/rpc.h"
#include "common/rpc_call.h"
#include "temper/v1/pool.grpc.pb.h"

namespace temper::datapool {
namespace {

class RemoteDataPool final : public DataPool {
 public:
  explicit RemoteDataPool(const std::string& address) : channel_(RpcChannel(address)), stub_(v1::Pool::NewStub(channel_)) {}

  Result<int64_t> AttachAgents(const std::string& incarnation) override {
    v1::PoolAttachAgentsRequest q;
    q.set_incarnation(incarnation);
    v1::PoolAttachAgentsReply p;
    RETURN_IF_ERROR(Call(&Stub::AttachAgents, q, &p));
    return p.reissued();
  }

  Result<TakeIssuesReply> TakeIssues(const std::string& incarnation, int32_t max, uint32_t wait_ms) override {
    // One at a time: each call acknowledges the answer before it.
    std::lock_guard lock(taking_);
    v1::PoolTakeIssuesRequest q;
    q.set_incarnation(incarnation);
    q.set_max(max);
    q.set_wait_ms(wait_ms);
    q.set_received(received_);
    v1::PoolTakeIssuesReply p;
    RETURN_IF_ERROR(Call(&Stub::TakeIssues, q, &p, wait_ms));
    received_ = p.serial();
    TakeIssuesReply reply;
    for (const v1::PoolIssue& i : p.issues()) {
      Issue issue;
      issue.id = {i.group(), i.rollout(), i.attempt()};
      issue.task = i.task();
      issue.source = i.source();
      issue.version = i.version();
      issue.deadline_left_s = i.deadline_left_s();
      reply.issues.push_back(std::move(issue));
    }
    for (const v1::PoolAttempt& a : p.cancelled()) reply.cancelled.push_back({a.group(), a.rollout(), a.attempt()});
    reply.closed = p.closed();
    return reply;
  }

  Result<bool> Finish(const std::string& incarnation, const FinishedAttempt& attempt) override {
    v1::PoolFinishRequest q;
    q.set_incarnation(incarnation);
    q.mutable_attempt()->set_group(attempt.id.group);
    q.mutable_attempt()->set_rollout(attempt.id.rollout);
    q.mutable_attempt()->set_attempt(attempt.id.attempt);
    q.set_outcome(attempt.outcome);
    q.set_reason(attempt.reason);
    if (attempt.reward) q.set_reward(*attempt.reward);
    q.set_trajectory(attempt.trajectory);
    v1::PoolFinishReply p;
    RETURN_IF_ERROR(Call(&Stub::Finish, q, &p));
    return !p.ignored();
  }

  Result<std::vector<int64_t>> AttachTrainer(const std::string& incarnation, int64_t step) override {
    v1::PoolAttachTrainerRequest q;
    q.set_incarnation(incarnation);
    q.set_step(step);
    v1::PoolAttachTrainerReply p;
    RETURN_IF_ERROR(Call(&Stub::AttachTrainer, q, &p));
    return std::vector<int64_t>(p.batches().begin(), p.batches().end());
  }

  Result<LeaseReply> Lease(const std::string& incarnation, int64_t batch, uint32_t wait_ms) override {
    v1::PoolLeaseRequest q;
    q.set_incarnation(incarnation);
    q.set_batch(batch);
    q.set_wait_ms(wait_ms);
    v1::PoolLeaseReply p;
    RETURN_IF_ERROR(Call(&Stub::Lease, q, &p, wait_ms));
    LeaseReply reply;
    reply.ready = p.ready();
    reply.batch = p.batch();
    reply.again = p.again();
    reply.closed = p.closed();
    reply.exhausted = p.exhausted();
    for (const v1::PoolLeasedGroup& g : p.groups()) {
      LeasedGroup group;
      group.group = g.group();
      group.version_admitted = g.version_admitted();
      group.task = g.task();
      group.source = g.source();
      group.rollouts.assign(g.rollouts().begin(), g.rollouts().end());
      v1::PoolReadGroupRequest read;
      read.set_group(g.group());
      v1::PoolReadGroupReply members;
      RETURN_IF_ERROR(Call(&Stub::ReadGroup, read, &members));
      for (std::string& bytes : *members.mutable_members()) group.members.push_back(std::move(bytes));
      if (group.members.size() != group.rollouts.size()) return Internal("the pool answered another group than it leased");
      reply.groups.push_back(std::move(group));
    }
    return reply;
  }

  temper::Status Update(const std::string& incarnation, int64_t batch) override {
    v1::PoolUpdateRequest q;
    q.set_incarnation(incarnation);
    q.set_batch(batch);
    v1::PoolUpdateReply p;
    return Call(&Stub::Update, q, &p);
  }

  temper::Status Commit(int64_t step) override {
    v1::PoolCommitRequest q;
    q.set_step(step);
    v1::PoolCommitReply p;
    return Call(&Stub::Commit, q, &p);
  }

  temper::Status Pause(bool on) override {
    v1::PoolPauseRequest q;
    q.set_on(on);
    v1::PoolPauseReply p;
    return Call(&Stub::Pause, q, &p);
  }

  temper::Status Close(CloseReason reason) override {
    v1::PoolCloseRequest q;
    q.set_reason(reason == CloseReason::kJobEnd ? "job_end" : "stopped");
    v1::PoolCloseReply p;
    return Call(&Stub::Close, q, &p);
  }

  Result<std::map<std::string, double>> Metrics() override {
    v1::PoolStatusReply p;
    RETURN_IF_ERROR(Call(&Stub::Status, v1::PoolStatusRequest(), &p));
    return std::map<std::string, double>(p.metrics().begin(), p.metrics().end());
  }

 private:
  using Stub = v1::Pool::Stub;

  // Every call may be repeated, so all are retried while the pool restarts.
  template <typename Request, typename Reply>
  temper::Status Call(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Reply*), const Request& q, Reply* p, uint32_t wait_ms = 0) {
    CallOptions options;
    options.deadline_s = 30 + wait_ms / 1e3;
    return RpcCall(*channel_, *stub_, method, q, p, options).WithContext("pool");
  }

  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<Stub> stub_;
  std::mutex taking_;
  int64_t received_ = 0;
};

}  // namespace

std::unique_ptr<DataPool> ConnectDataPool(const std::string& address) { return std::make_unique<RemoteDataPool>(address); }

}  // namespace temper::datapool
