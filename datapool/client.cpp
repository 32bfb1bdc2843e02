#include "datapool/client.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <vector>

#include "common/log.h"
#include "common/rpc.h"
#include "common/rpc_call.h"
#include "datapool/segment.h"
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

  // Attempts that end while a message is on its way gather and share the next one.
  Result<bool> Finish(const std::string& incarnation, const FinishedAttempt& attempt) override {
    Ending mine{incarnation, attempt};
    std::unique_lock lock(ending_mutex_);
    ending_.push_back(&mine);
    if (senders_ < kSenders) Send(lock);
    while (!mine.answer) {
      mine.changed.wait(lock, [&] { return mine.answer || mine.lead; });
      if (mine.lead && !mine.answer) Send(lock);
    }
    return *std::move(mine.answer);
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
    if (!reply.ready) return reply;
    const v1::PoolSegment& where = p.segment();
    ASSIGN_OR_RETURN(const SegmentView segment, SegmentView::Open({where.pid(), where.fd(), where.inode(), where.bytes()}));
    for (const v1::PoolLeasedGroup& g : p.groups()) {
      LeasedGroup group;
      group.group = g.group();
      group.version_admitted = g.version_admitted();
      group.task = g.task();
      group.source = g.source();
      group.rollouts.assign(g.rollouts().begin(), g.rollouts().end());
      for (const v1::PoolMember& m : g.members()) {
        ASSIGN_OR_RETURN(std::string bytes, segment.Read({m.offset(), m.bytes(), m.checksum()}));
        group.members.push_back(std::move(bytes));
      }
      if (group.members.size() != group.rollouts.size()) return Internal("the pool answered another group than it leased");
      reply.groups.push_back(std::move(group));
    }
    v1::PoolReceivedRequest received;
    received.set_batch(batch);
    v1::PoolReceivedReply nothing;
    // Should it not arrive, the memory goes with the batch's update.
    if (temper::Status s = Call(&Stub::Received, received, &nothing); !s.ok()) log::Warn("leased data not let go", {{"error", s.ToString()}});
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
  // One caller of Finish, on its own stack.
  struct Ending {
    const std::string& incarnation;
    const FinishedAttempt& attempt;
    std::optional<Result<bool>> answer = std::nullopt;
    bool lead = false;  // it is on this caller to send what waits
    std::condition_variable changed = {};
  };
  static constexpr int kSenders = 2;  // messages on their way at once
  static constexpr int kAttemptsPerMessage = 64;
  static constexpr size_t kBytesPerMessage = 32 << 20;

  // One message with the oldest that wait, and their answers.
  void Send(std::unique_lock<std::mutex>& lock) {
    ++senders_;
    std::vector<Ending*> sent;
    size_t bytes = 0;
    while (!ending_.empty() && sent.size() < kAttemptsPerMessage && bytes < kBytesPerMessage &&
           (sent.empty() || ending_.front()->incarnation == sent.front()->incarnation)) {
      sent.push_back(ending_.front());
      ending_.pop_front();
      bytes += sent.back()->attempt.trajectory.size();
    }
    lock.unlock();
    v1::PoolFinishReply p;
    temper::Status status = temper::Status::Ok();
    if (!sent.empty()) {
      v1::PoolFinishRequest q;
      q.set_incarnation(sent.front()->incarnation);
      for (const Ending* ending : sent) {
        const FinishedAttempt& attempt = ending->attempt;
        v1::PoolFinished* out = q.add_attempts();
        out->mutable_attempt()->set_group(attempt.id.group);
        out->mutable_attempt()->set_rollout(attempt.id.rollout);
        out->mutable_attempt()->set_attempt(attempt.id.attempt);
        out->set_outcome(attempt.outcome);
        out->set_reason(attempt.reason);
        if (attempt.reward) out->set_reward(*attempt.reward);
        out->set_trajectory(attempt.trajectory);
      }
      status = Call(&Stub::Finish, q, &p);
      if (status.ok() && static_cast<size_t>(p.answers_size()) != sent.size()) status = Internal("the pool answered other attempts than it was told of");
    }
    lock.lock();
    for (size_t i = 0; i < sent.size(); ++i) {
      if (!status.ok()) {
        sent[i]->answer = status;
      } else {
        const v1::PoolFinishAnswer& answer = p.answers(static_cast<int>(i));
        const auto code = static_cast<StatusCode>(answer.code());
        if (code == StatusCode::kOk) sent[i]->answer = !answer.ignored();
        else sent[i]->answer = temper::Status(code, answer.message()).WithContext("pool");
      }
      sent[i]->changed.notify_one();
    }
    --senders_;
    if (!ending_.empty() && senders_ < kSenders && !ending_.front()->lead) {
      ending_.front()->lead = true;
      ending_.front()->changed.notify_one();
    }
  }

  // Every call may be repeated, so all are retried while the pool restarts.
  template <typename Request, typename Reply>
  temper::Status Call(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Reply*), const Request& q, Reply* p, uint32_t wait_ms = 0) {
    CallOptions options;
    options.deadline_s = 30 + wait_ms / 1e3;
    return RpcCall(*channel_, *stub_, method, q, p, options).WithContext("pool");
  }

  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<Stub> stub_;
  std::mutex ending_mutex_;
  std::deque<Ending*> ending_;  // not sent yet
  int senders_ = 0;
  std::mutex taking_;
  int64_t received_ = 0;
};

}  // namespace

std::unique_ptr<DataPool> ConnectDataPool(const std::string& address) { return std::make_unique<RemoteDataPool>(address); }

}  // namespace temper::datapool
