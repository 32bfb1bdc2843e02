#include "trainer/server.h"

#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "common/clock.h"
#include "common/log.h"
#include "common/rpc.h"
#include "datapool/client.h"
#include "weightsync/manifest.h"
#include "weightsync/publisher.h"

namespace temper::trainer {
namespace {

// The loop's weight sink over the publisher of weight sync.
class PublisherSink final : public WeightSink {
 public:
  PublisherSink(weightsync::Publisher& publisher, Metrics& metrics, int64_t deadline_ms)
      : publisher_(publisher), metrics_(metrics), deadline_ms_(deadline_ms) {}

  Result<std::span<std::byte>> Begin() override { return publisher_.Begin(); }

  // Server::RequestStop stops the publisher too, which ends a Publish that waits.
  Status Publish(int64_t step, const engine::Digest& digest, const std::function<bool()>&) override {
    ASSIGN_OR_RETURN(const weightsync::PublishReport report, publisher_.Publish(step, digest, deadline_ms_));
    metrics_["publish_ms"].Set(report.wall_ms);
    metrics_["workers"].Set(report.workers);
    metrics_["weights_refused"].Add(report.refused);
    return Status::Ok();
  }

 private:
  weightsync::Publisher& publisher_;
  Metrics& metrics_;
  const int64_t deadline_ms_;
};

}  // namespace

struct Server::State {
  ServerOptions options;
  engine::Parameters initial;
  text::TextFiles text;
  Metrics metrics;
  std::atomic<bool> stopped{false};
  std::unique_ptr<engine::Engine> engine;
  std::unique_ptr<datapool::DataPool> pool;
  std::unique_ptr<weightsync::Publisher> publisher;
  std::unique_ptr<RpcServer> rpc;
};

Server::Server(std::unique_ptr<State> state) : state_(std::move(state)) {}

Server::~Server() { Stop(); }

Result<std::unique_ptr<Server>> Server::Create(Fd listening, ServerOptions options, engine::Parameters initial, text::TextFiles text) {
  auto state = std::make_unique<State>();
  state->options = std::move(options);
  state->initial = std::move(initial);
  state->text = std::move(text);
  const ServerOptions& o = state->options;
  ASSIGN_OR_RETURN(state->engine, engine::Engine::Create(o.engine));
  state->pool = datapool::ConnectDataPool(o.pool_address);
  weightsync::PublisherOptions publisher;
  publisher.manifest = weightsync::MakeManifest(state->initial.config(), o.trainer.profile);
  publisher.epoch = o.epoch;
  publisher.expected_workers = o.workers;
  ASSIGN_OR_RETURN(state->publisher, weightsync::Publisher::Create(publisher));
  state->rpc = std::make_unique<RpcServer>(std::move(listening));
  state->rpc->Register(state->publisher->service());
  auto server = std::unique_ptr<Server>(new Server(std::move(state)));
  Server* self = server.get();
  server->state_->rpc->RegisterRole("trainer", &server->state_->metrics, [self](const std::string& reason) {
    log::Info("stop requested", {{"reason", reason}});
    self->RequestStop();
  });
  return server;
}

Status Server::Start() { return state_->rpc->Start(); }

Status Server::Run() {
  PublisherSink sink(*state_->publisher, state_->metrics, state_->options.publish_deadline_ms);
  return RunTraining(state_->options.trainer, std::move(state_->initial), state_->text,
                     {.engine = *state_->engine,
                      .pool = *state_->pool,
                      .weights = sink,
                      .metrics = state_->metrics,
                      .clock = SystemClock::Get(),
                      .evaluator = state_->options.evaluator,
                      .sft_source = state_->options.sft_source,
                      .probe = state_->options.probe,
                      .stopped = state_->stopped,
                      .ranks = state_->options.ranks});
}

void Server::RequestStop() {
  state_->stopped = true;
  state_->publisher->Stop();
}

void Server::Stop() {
  RequestStop();
  state_->rpc->Stop();
}

}  // namespace temper::trainer
