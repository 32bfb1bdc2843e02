#include "rollout/server.h"

#include <grpcpp/impl/service_type.h>

#include <mutex>
#include <utility>

#include "common/rpc.h"
#include "rollout/service.h"
#include "weightsync/subscriber.h"

namespace temper::rollout {
namespace {

// The Subscriber as the worker's source of weights.
class Subscription final : public WeightSource {
 public:
  explicit Subscription(const weightsync::SubscriberOptions& options) : subscriber_(options, [this] { Wake(); }) {}
  ~Subscription() override { subscriber_.Stop(); }

  std::optional<Weights> TakeSwap() override {
    std::optional<weightsync::Staged> staged = subscriber_.TakeSwap();
    if (!staged) return std::nullopt;
    return Weights{std::move(staged->weights), staged->version};
  }
  void Swapped(const engine::Version& version) override { subscriber_.Swapped(version); }
  bool MayServe() override { return subscriber_.MayServe(); }
  void SetWake(std::function<void()> wake) override {
    std::lock_guard lock(mutex_);
    wake_ = std::move(wake);
  }
  void Stop() { subscriber_.Stop(); }

 private:
  void Wake() {
    std::lock_guard lock(mutex_);
    if (wake_) wake_();
  }
  std::mutex mutex_;
  std::function<void()> wake_;
  weightsync::Subscriber subscriber_;
};

}  // namespace

struct Server::State {
  ServerOptions options;
  std::unique_ptr<Subscription> subscription;
  std::unique_ptr<Worker> worker;
  std::unique_ptr<grpc::Service> service;
  std::unique_ptr<RpcServer> rpc;
};

Server::Server(ServerOptions options) : state_(std::make_unique<State>()) { state_->options = std::move(options); }
Server::~Server() { Stop(); }

Status Server::Start() {
  State& s = *state_;
  const ServerOptions& o = s.options;
  WeightSource* source = o.source;
  if (!source) {
    s.subscription = std::make_unique<Subscription>(weightsync::SubscriberOptions{
        .publisher_address = o.publisher_address, .worker = o.name, .incarnation = o.incarnation});
    source = s.subscription.get();
  }
  ASSIGN_OR_RETURN(s.worker, Worker::Start(o.worker, source));
  s.service = MakeRolloutService(s.worker.get());
  s.rpc = std::make_unique<RpcServer>(Fd(o.listen_fd));
  s.rpc->Register(s.service.get());
  s.rpc->RegisterRole("rollout", &s.worker->metrics(), o.on_stop ? o.on_stop : [](const std::string&) {});
  return s.rpc->Start();
}

void Server::Stop() {
  State& s = *state_;
  if (s.worker) s.worker->Stop();  // ends the streams
  if (s.rpc) s.rpc->Stop();
  if (s.subscription) s.subscription->Stop();
}

Worker& Server::worker() { return *state_->worker; }

}  // namespace temper::rollout
