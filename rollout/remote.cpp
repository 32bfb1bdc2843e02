#include <grpcpp/grpcpp.h>

#include <condition_variable>
#include <mutex>
#include <set>

#include "common/rpc.h"
#include "common/rpc_call.h"
#include "rollout/client.h"
#include "rollout/wire.h"
#include "temper/v1/rollout.grpc.pb.h"

namespace temper::rollout {
namespace {

class Reader;

// The calls of one client that gRPC still owns. The last reference to a channel must not go on one of gRPC's callback threads
// (it would wait there for that thread to end), and a call's context holds one: so the client outlives its calls.
struct Outstanding {
  std::mutex mutex;
  std::condition_variable none;
  std::set<Reader*> readers;  // may be cancelled
  int count = 0;
};

// One running call. Owned by gRPC until OnDone and by the caller's RemoteCall.
class Reader final : public grpc::ClientReadReactor<v1::GenerateChunk>, public std::enable_shared_from_this<Reader> {
 public:
  explicit Reader(std::shared_ptr<Outstanding> outstanding) : outstanding_(std::move(outstanding)) {}

  void Start(v1::Rollout::Stub& stub, const GenerateRequest& request, Callbacks callbacks) {
    self_ = shared_from_this();
    {
      std::lock_guard lock(outstanding_->mutex);
      outstanding_->readers.insert(this);
      ++outstanding_->count;
    }
    callbacks_ = std::move(callbacks);
    ToProto(request, &request_);
    // A worker that is being restarted is waited for; how long is the caller's deadline.
    context_.set_wait_for_ready(true);
    if (request.deadline_ms > 0) {
      context_.set_deadline(gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_millis(request.deadline_ms, GPR_TIMESPAN)));
    }
    stub.async()->Generate(&context_, &request_, this);
    StartRead(&chunk_);
    StartCall();
  }
  void Cancel() { context_.TryCancel(); }
  void Detach() {
    Cancel();
    std::lock_guard lock(mutex_);
    callbacks_ = {};
  }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    {
      std::lock_guard lock(mutex_);
      if (callbacks_.on_chunk) callbacks_.on_chunk(FromProto(chunk_));
    }
    StartRead(&chunk_);
  }
  void OnDone(const grpc::Status& status) override {
    {
      std::lock_guard lock(mutex_);
      if (callbacks_.on_done) callbacks_.on_done(FromGrpc(status));
      callbacks_ = {};
    }
    const std::shared_ptr<Outstanding> outstanding = outstanding_;
    {
      std::lock_guard lock(outstanding->mutex);
      outstanding->readers.erase(this);
    }
    self_.reset();  // often the end of this object
    std::lock_guard lock(outstanding->mutex);
    if (--outstanding->count == 0) outstanding->none.notify_all();
  }

 private:
  const std::shared_ptr<Outstanding> outstanding_;
  std::shared_ptr<Reader> self_;
  std::mutex mutex_;  // held while a callback runs
  Callbacks callbacks_;
  grpc::ClientContext context_;
  v1::GenerateRequest request_;
  v1::GenerateChunk chunk_;
};

class RemoteCall final : public Call {
 public:
  explicit RemoteCall(std::shared_ptr<Reader> reader) : reader_(std::move(reader)) {}
  ~RemoteCall() override { reader_->Detach(); }
  void Cancel() override { reader_->Cancel(); }

 private:
  std::shared_ptr<Reader> reader_;
};

class RemoteRollout final : public RolloutClient {
 public:
  explicit RemoteRollout(const std::string& address) : channel_(RpcChannel(address)), stub_(v1::Rollout::NewStub(channel_)) {}
  ~RemoteRollout() override {
    std::unique_lock lock(outstanding_->mutex);
    for (Reader* reader : outstanding_->readers) reader->Cancel();
    outstanding_->none.wait(lock, [&] { return outstanding_->count == 0; });
  }
  std::unique_ptr<Call> Generate(GenerateRequest request, Callbacks callbacks) override {
    auto reader = std::make_shared<Reader>(outstanding_);
    reader->Start(*stub_, request, std::move(callbacks));
    return std::make_unique<RemoteCall>(std::move(reader));
  }

 private:
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Rollout::Stub> stub_;
  std::shared_ptr<Outstanding> outstanding_ = std::make_shared<Outstanding>();
};

}  // namespace

std::unique_ptr<RolloutClient> ConnectRollout(const std::string& address) { return std::make_unique<RemoteRollout>(address); }

}  // namespace temper::rollout
