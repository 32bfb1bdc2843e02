// The rollout worker: one engine thread that runs a Decoder, fed by a bounded queue of requests.
//
// Problem: many callers stream tokens while weights change under them. Idea: one thread owns the decoder; requests and
// cancels reach it through a bounded queue, weights through a WeightSource that it asks between two steps; chunks leave by the
// callers' callbacks. Idle, the thread spins shortly and then sleeps on the queue.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "common/metrics.h"
#include "common/status.h"
#include "engine/decode/decoder.h"
#include "engine/decode/types.h"
#include "engine/weights.h"
#include "rollout/client.h"

namespace temper::rollout {

// The model is made when the first weights tell its configuration; later ones must have the same.
struct WorkerOptions {
  std::string cpu = "auto";          // auto | avx2 | avx512 | amx
  int threads = 0;                   // 0 = the cores of the machine
  int max_batch = 64;
  int queue_max = 4096;              // requests waiting or running; beyond: kResourceExhausted
  uint64_t kv_bytes = 0;             // memory for keys and values; 0 = twice max_batch full sequences, at most 1 GiB
  int chunk_tokens = 256;            // prompt tokens in one engine step
  size_t chunk_kept_bytes = size_t{1} << 20;  // of kept sets in one chunk, from which on it is sent: far below what a message may hold
  engine::InFlight in_flight = engine::InFlight::kRetract;
};

// Weights for the worker, asked by the engine thread between two steps. The weightsync Subscriber is one; a fixed model is another.
class WeightSource {
 public:
  struct Weights {
    engine::ComputeWeights weights;  // holds its mapping
    engine::Version version;
  };
  virtual ~WeightSource() = default;
  // New weights to swap to now, if any. Must be cheap: asked every step.
  virtual std::optional<Weights> TakeSwap() = 0;
  // The worker now serves `version`: every later step reads it and no former weights are read any more.
  virtual void Swapped(const engine::Version& version) = 0;
  // False: do not run a step now (fenced until the publisher has been heard again).
  virtual bool MayServe() = 0;
  // `wake` is called from any thread when one of the answers above has changed; an empty one ends that, and none runs afterwards.
  virtual void SetWake(std::function<void()> wake) = 0;
};

// Weights that never change; there at once.
std::unique_ptr<WeightSource> FixedWeights(engine::ComputeWeights weights, const engine::Version& version);

class Worker : public RolloutClient {
 public:
  // `source` must outlive the worker.
  static Result<std::unique_ptr<Worker>> Start(const WorkerOptions& options, WeightSource* source);
  ~Worker() override;

  std::unique_ptr<Call> Generate(GenerateRequest request, Callbacks callbacks) override;

  // Ends every call with kUnavailable, joins the engine thread. Idempotent.
  void Stop();

  // Looks at the source now instead of at the next event. Any thread.
  void Wake();

  // tokens_sampled, prefill_tokens, prompt_tokens, cached_tokens, cache_hit, steps, batch_mean, tokens_per_s, running, waiting,
  // version_epoch, version_step, swaps, preemptions, free_pages, total_pages, refused; updated a few times a second.
  // cpu_path.NAME = 1: the kernels it runs on.
  const temper::Metrics& metrics() const;

 private:
  struct State;
  explicit Worker(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;  // shared with calls that outlive the worker
};

}  // namespace temper::rollout
