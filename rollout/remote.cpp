#include <grpcpp/grpcpp.h>

#include <mutex>

#include "common/rpc.h"
#include "common/rpc_call.h"
#include "rollout/client.h"
#include "rollout/wire.h"
#include "temper/v1/rollout.grpc.pb.h"

namespace temper::rollout {
namespace {

// One running call. Owned by gRPC until OnDone and by the caller's RemoteCall.
class Reader final : public grpc::ClientReadReactor<v1::GenerateChunk>, public std::enable_shared_from_this<Reader> {
 public:
  void Start(v1::Rollout::Stub& stub, const GenerateRequest& request, Callbacks callbacks) {
    self_ = shared_from_this();
    callbacks_ = std::move(callbacks);
    ToProto(request, &request_);
    // A worker that is being restarted is waited for; how long is the caller's deadline.
    context_.set_wait_for_ready(true);
    if (request.deadline_ms > 0) context_.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(request.deadline_ms));
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
    self_.reset();
  }

 private:
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
  std::unique_ptr<Call> Generate(GenerateRequest request, Callbacks callbacks) override {
    auto reader = std::make_shared<Reader>();
    reader->Start(*stub_, request, std::move(callbacks));
    return std::make_unique<RemoteCall>(std::move(reader));
  }

 private:
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Rollout::Stub> stub_;
};

}  // namespace

std::unique_ptr<RolloutClient> ConnectRollout(const std::string& address) { return std::make_unique<RemoteRollout>(address); }

}  // namespace temper::rollout
