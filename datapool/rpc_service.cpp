#include "datapool/rpc_service.h"

#include <algorithm>

#include "common/rpc_call.h"
#include "temper/v1/pool.grpc.pb.h"

namespace temper::datapool {
namespace {

// A long poll looks this often whether its caller is still there, so that the server can stop.
constexpr uint32_t kSliceMs = 250;

class PoolRpcService final : public v1::Pool::Service {
 public:
  explicit PoolRpcService(LocalDataPool& pool) : pool_(pool) {}

  grpc::Status AttachAgents(grpc::ServerContext*, const v1::PoolAttachAgentsRequest* q, v1::PoolAttachAgentsReply* p) override {
    Result<int64_t> n = pool_.AttachAgents(q->incarnation());
    if (n.ok()) p->set_reissued(*n);
    return ToGrpc(n.status());
  }

  grpc::Status TakeIssues(grpc::ServerContext* context, const v1::PoolTakeIssuesRequest* q, v1::PoolTakeIssuesReply* p) override {
    for (uint32_t left = q->wait_ms();; left -= std::min(left, kSliceMs)) {
      Result<LocalDataPool::Taken> taken = pool_.TakeIssuesAfter(q->incarnation(), q->max(), std::min(left, kSliceMs), q->received());
      if (!taken.ok()) return ToGrpc(taken.status());
      const TakeIssuesReply& reply = taken->reply;
      if (reply.issues.empty() && reply.cancelled.empty() && !reply.closed && left > kSliceMs && !context->IsCancelled()) continue;
      for (const Issue& i : reply.issues) {
        v1::PoolIssue* out = p->add_issues();
        out->set_group(i.id.group);
        out->set_rollout(i.id.rollout);
        out->set_attempt(i.id.attempt);
        out->set_task(i.task);
        out->set_source(i.source);
        out->set_version(i.version);
        out->set_deadline_left_s(i.deadline_left_s);
      }
      for (const AttemptId& id : reply.cancelled) {
        v1::PoolAttempt* out = p->add_cancelled();
        out->set_group(id.group);
        out->set_rollout(id.rollout);
        out->set_attempt(id.attempt);
      }
      p->set_closed(reply.closed);
      p->set_serial(taken->serial);
      return grpc::Status::OK;
    }
  }

  grpc::Status Finish(grpc::ServerContext*, const v1::PoolFinishRequest* q, v1::PoolFinishReply* p) override {
    std::vector<FinishedAttempt> attempts;
    for (const v1::PoolFinished& one : q->attempts()) {
      FinishedAttempt& f = attempts.emplace_back();
      f.id = {one.attempt().group(), one.attempt().rollout(), one.attempt().attempt()};
      f.outcome = one.outcome();
      f.reason = one.reason();
      if (one.has_reward()) f.reward = one.reward();
      f.trajectory = one.trajectory();
    }
    for (const Result<bool>& counted : pool_.FinishMany(q->incarnation(), attempts)) {
      v1::PoolFinishAnswer* answer = p->add_answers();
      if (counted.ok()) answer->set_ignored(!*counted);
      answer->set_code(static_cast<int32_t>(counted.status().code()));
      answer->set_message(counted.status().message());
    }
    return grpc::Status::OK;
  }

  grpc::Status AttachTrainer(grpc::ServerContext*, const v1::PoolAttachTrainerRequest* q, v1::PoolAttachTrainerReply* p) override {
    Result<std::vector<int64_t>> back = pool_.AttachTrainer(q->incarnation(), q->step());
    if (back.ok()) p->mutable_batches()->Add(back->begin(), back->end());
    return ToGrpc(back.status());
  }

  grpc::Status Lease(grpc::ServerContext* context, const v1::PoolLeaseRequest* q, v1::PoolLeaseReply* p) override {
    for (uint32_t left = q->wait_ms();; left -= std::min(left, kSliceMs)) {
      Result<LocalDataPool::Leased> leased = pool_.LeaseHandles(q->incarnation(), q->batch(), std::min(left, kSliceMs));
      if (!leased.ok()) return ToGrpc(leased.status());
      const LeaseReply* reply = &leased->reply;
      if (!reply->ready && !reply->closed && !reply->exhausted && left > kSliceMs && !context->IsCancelled()) continue;
      p->set_ready(reply->ready);
      p->set_batch(reply->batch);
      p->set_again(reply->again);
      p->set_closed(reply->closed);
      p->set_exhausted(reply->exhausted);
      if (reply->ready) {
        p->mutable_segment()->set_pid(leased->segment.pid);
        p->mutable_segment()->set_fd(leased->segment.fd);
        p->mutable_segment()->set_inode(leased->segment.inode);
        p->mutable_segment()->set_bytes(leased->segment.bytes);
      }
      for (size_t i = 0; i < reply->groups.size(); ++i) {
        const LeasedGroup& g = reply->groups[i];
        v1::PoolLeasedGroup* out = p->add_groups();
        out->set_group(g.group);
        out->set_version_admitted(g.version_admitted);
        out->set_task(g.task);
        out->set_source(g.source);
        out->mutable_rollouts()->Add(g.rollouts.begin(), g.rollouts.end());
        for (const MemberHandle& handle : leased->members[i]) {
          v1::PoolMember* member = out->add_members();
          member->set_offset(handle.offset);
          member->set_bytes(handle.bytes);
          member->set_checksum(handle.checksum);
        }
      }
      return grpc::Status::OK;
    }
  }

  grpc::Status Received(grpc::ServerContext*, const v1::PoolReceivedRequest* q, v1::PoolReceivedReply*) override {
    pool_.Received(q->batch());
    return grpc::Status::OK;
  }

  grpc::Status Update(grpc::ServerContext*, const v1::PoolUpdateRequest* q, v1::PoolUpdateReply*) override {
    return ToGrpc(pool_.Update(q->incarnation(), q->batch()));
  }
  grpc::Status Commit(grpc::ServerContext*, const v1::PoolCommitRequest* q, v1::PoolCommitReply*) override { return ToGrpc(pool_.Commit(q->step())); }
  grpc::Status Pause(grpc::ServerContext*, const v1::PoolPauseRequest* q, v1::PoolPauseReply*) override { return ToGrpc(pool_.Pause(q->on())); }

  grpc::Status Close(grpc::ServerContext*, const v1::PoolCloseRequest* q, v1::PoolCloseReply*) override {
    if (q->reason() != "job_end" && q->reason() != "stopped") {
      return ToGrpc(InvalidArgument("reason: '" + q->reason() + "' is not job_end or stopped"));
    }
    return ToGrpc(pool_.Close(q->reason() == "job_end" ? CloseReason::kJobEnd : CloseReason::kStopped));
  }

  grpc::Status Status(grpc::ServerContext*, const v1::PoolStatusRequest*, v1::PoolStatusReply* p) override {
    Result<std::map<std::string, double>> metrics = pool_.Metrics();
    if (metrics.ok()) p->mutable_metrics()->insert(metrics->begin(), metrics->end());
    return ToGrpc(metrics.status());
  }

 private:
  LocalDataPool& pool_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakePoolRpcService(LocalDataPool& pool) { return std::make_unique<PoolRpcService>(pool); }

}  // namespace temper::datapool
