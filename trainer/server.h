// The trainer's role: the training loop with the weight publisher and the Role service on one listening socket.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "common/file.h"
#include "common/metrics.h"
#include "common/status.h"
#include "engine/engine.h"
#include "text/text_model.h"
#include "trainer/loop.h"

namespace temper::trainer {

struct ServerOptions {
  TrainerOptions trainer;
  engine::EngineOptions engine;
  std::string pool_address;      // "unix-abstract:NAME"
  uint64_t epoch = 1;            // of the versions published: above that of every earlier start of this run's trainer
  int workers = 1;               // the first publish waits for so many
  int64_t publish_deadline_ms = 120000;  // how long one version may take to be served everywhere
  Evaluator evaluator;           // see loop.h; may be empty without evaluations
  SftSource sft_source;          // may be empty without SFT
  ProbeSource probe;             // see loop.h; may be empty
  RankLinks* ranks = nullptr;    // see loop.h; outlives the server
};

// Create, Start, Run (blocks until training is over), Stop from any thread. Metrics are served by Role.Snapshot from Start on.
class Server {
 public:
  // `listening`: the trainer's socket. `initial` and `text`: the model, read when no checkpoint is there.
  static Result<std::unique_ptr<Server>> Create(Fd listening, ServerOptions options, engine::Parameters initial, text::TextFiles text);
  ~Server();

  Status Start();
  // The status of RunTraining (loop.h): OK done, kCancelled stopped, else why the job cannot go on.
  Status Run();
  // Ends Run soon. Idempotent, thread-safe.
  void RequestStop();
  // Closes the socket; after Run has returned.
  void Stop();

 private:
  struct State;
  explicit Server(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace temper::trainer
