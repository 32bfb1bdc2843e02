// One unary gRPC call with a deadline, retried while the peer restarts. Includes grpcpp: for adapters' .cpp files only.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <memory>

#include "common/clock.h"
#include "common/status.h"

namespace temper {

// Codes are the same sixteen on both sides.
grpc::Status ToGrpc(const Status& status);
Status FromGrpc(const grpc::Status& status);

struct CallOptions {
  double deadline_s = 10;  // of one attempt, once connected; add a long-poll's wait
  // How long the peer may be away (restarting) in all. Retried calls may have been executed before the connection broke:
  // retry idempotent calls only, with 0 for others.
  double retry_s = 30;
  const std::atomic<bool>* cancelled = nullptr;  // looked at about every 0.2 s
};

// Waits until the channel is connected; kUnavailable after retry_s, kCancelled.
Status WaitConnected(grpc::Channel& channel, double retry_s, const std::atomic<bool>* cancelled);

// RpcCall(*channel, *stub, &v1::Pool::Stub::Lease, request, &reply)
template <typename Stub, typename Request, typename Reply>
Status RpcCall(grpc::Channel& channel, Stub& stub,
               grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Reply*), const Request& request,
               Reply* reply, const CallOptions& options = {}) {
  SystemClock& clock = SystemClock::Get();
  const double give_up_s = clock.NowS() + options.retry_s;
  for (;;) {
    RETURN_IF_ERROR(WaitConnected(channel, give_up_s - clock.NowS(), options.cancelled));
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() +
                         std::chrono::microseconds(static_cast<int64_t>(options.deadline_s * 1e6)));
    const grpc::Status status = (stub.*method)(&context, request, reply);
    // The server had no thread left: the call was not executed, so it may always be tried again.
    const bool refused = status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED && status.error_message() == "Server Threadpool Exhausted";
    if (!(refused || status.error_code() == grpc::StatusCode::UNAVAILABLE) || clock.NowS() >= give_up_s) return FromGrpc(status);
    clock.SleepS(0.02);
  }
}

}  // namespace temper
