#include "rollout/service.h"

#include <grpcpp/grpcpp.h>

#include <deque>
#include <mutex>

#include "common/rpc_call.h"
#include "rollout/wire.h"
#include "temper/v1/rollout.grpc.pb.h"

namespace temper::rollout {
namespace {

// One stream. Chunks come from the engine thread and are written one at a time; those that wait for a slow reader are bounded by
// the call's max_tokens. gRPC deletes it through OnDone, after the last callback (which destroying the Call waits for).
class Stream final : public grpc::ServerWriteReactor<v1::GenerateChunk> {
 public:
  void Run(RolloutClient* client, const v1::GenerateRequest& request) {
    Callbacks callbacks;
    callbacks.on_chunk = [this](const Chunk& chunk) {
      std::lock_guard lock(mutex_);
      ToProto(chunk, &waiting_.emplace_back());
      Next();
    };
    callbacks.on_done = [this](const Status& status) {
      std::lock_guard lock(mutex_);
      status_ = status;
      Next();
    };
    auto call = client->Generate(FromProto(request), std::move(callbacks));
    std::lock_guard lock(mutex_);
    call_ = std::move(call);
    if (cancelled_) call_->Cancel();
    Next();
  }

  void OnWriteDone(bool) override {
    std::lock_guard lock(mutex_);
    writing_ = false;
    waiting_.pop_front();
    Next();
  }
  void OnCancel() override {
    std::lock_guard lock(mutex_);
    cancelled_ = true;
    if (call_) call_->Cancel();
  }
  void OnDone() override { delete this; }

 private:
  void Next() {
    // Until the call is known here the stream must not end: OnDone would delete what Run still uses.
    if (writing_ || finished_ || !call_) return;
    if (!waiting_.empty()) {
      writing_ = true;
      StartWrite(&waiting_.front());
    } else if (status_) {
      finished_ = true;
      Finish(ToGrpc(*status_));
    }
  }

  std::mutex mutex_;
  std::deque<v1::GenerateChunk> waiting_;
  bool writing_ = false;
  bool finished_ = false;
  bool cancelled_ = false;
  std::optional<Status> status_;
  std::unique_ptr<Call> call_;
};

class Service final : public v1::Rollout::CallbackService {
 public:
  explicit Service(RolloutClient* client) : client_(client) {}
  grpc::ServerWriteReactor<v1::GenerateChunk>* Generate(grpc::CallbackServerContext*, const v1::GenerateRequest* request) override {
    auto* stream = new Stream();  // deletes itself
    stream->Run(client_, *request);
    return stream;
  }

 private:
  RolloutClient* const client_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeRolloutService(RolloutClient* client) { return std::make_unique<Service>(client); }

}  // namespace temper::rollout
