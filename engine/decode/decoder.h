// Continuous batching over the paged forward pass: many sequences, one step at a time.
//
// Problem: sequences of different lengths start and end at any moment; every step should be one batch, and the batch must
// never show in the results. Idea: each step runs one row per decoding sequence plus chunks of waiting prompts, all through
// PagedForward, whose rows do not depend on each other; draws come from (key, position), so tokens and logprobs are the
// same whatever else runs. Prefixes come from the radix cache by (version, tokens).
// Threads: one owner thread calls everything. Memory: bounded by the page pool and `waiting_max`.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/status.h"
#include "engine/decode/types.h"

namespace temper::engine {

class ComputeWeights;
class StepModel;

enum class Finish : uint8_t { kNone, kStop, kLength, kRepetition, kAbort };

// "", "stop", "length", "repetition", "abort".
const char* FinishName(Finish finish);

// What SwapWeights does to sequences that have already drawn tokens. kRetract: prompt and drawn tokens are run again at the
// new version, drawn tokens keep their version and logprob, later ones belong wholly to the new one. kSpan: the old keys and
// values stay, later tokens are marked `mixed`.
enum class InFlight : uint8_t { kRetract, kSpan };

struct DecodeRequest {
  std::vector<int32_t> ids{};  // the prompt, at least one id
  Sampling sampling{};
  std::vector<int32_t> stop_ids{};  // a drawn stop id is part of the result and ends it; empty = none
  SampleKey key{};
};

// One event a drawn token, in the order drawn. An aborted sequence ends with an event without a token, and so does (kLength)
// one that alone fills every page.
struct DecodeEvent {
  uint64_t id = 0;
  int32_t token = -1;  // -1: no token
  float logprob = 0.0f;
  std::string kept;  // the tokens it was drawn from (engine/kept_set.h); empty = all
  Version version;
  bool mixed = false;
  Finish finish = Finish::kNone;
  uint32_t prompt_tokens = 0;
  uint32_t cached_tokens = 0;  // of the prompt, found in the cache when the sequence first started
};

struct DecoderOptions {
  int max_batch = 64;        // sequences running at once
  int chunk_tokens = 256;    // prompt tokens run in one step, at most (decode rows come on top)
  int waiting_max = 4096;    // sequences waiting for admission; beyond: kResourceExhausted
  InFlight in_flight = InFlight::kRetract;
};

struct DecoderStats {
  uint64_t tokens_sampled = 0;
  uint64_t prefill_tokens = 0;   // prompt tokens run, re-prefill after a swap or a preemption included
  uint64_t prompt_tokens = 0;    // prompt tokens of started sequences
  uint64_t cached_tokens = 0;    // of those, found in the cache
  uint64_t steps = 0;
  uint64_t batch_rows = 0;       // sum over steps of sequences that drew a token
  uint64_t preemptions = 0;      // sequences sent back to waiting because pages ran out
  uint64_t swaps = 0;
  int running = 0;
  int waiting = 0;
  int free_pages = 0;
  int total_pages = 0;
};

class Decoder {
 public:
  // `model` holds the weights and the key/value memory (engine/decode/model.h). Before the first SwapWeights nothing runs.
  Decoder(std::unique_ptr<StepModel> model, const DecoderOptions& options);
  ~Decoder();

  // Queues a sequence and returns its id, never reused. kInvalidArgument: no ids, an id outside the vocabulary, a prompt
  // that leaves no position or page for a token, sampling out of range. kResourceExhausted: `waiting_max` reached.
  // A sequence that reaches the model's last position ends with kLength.
  Result<uint64_t> Add(DecodeRequest request);

  // Ends the sequence at once; the next Step gives its kAbort event. An id that has ended is no error.
  void Cancel(uint64_t id);

  // One engine step; events are appended. False when there was nothing to do (or there are no weights yet).
  bool Step(std::vector<DecodeEvent>* events);

  // Between two steps: every later step reads `weights` and belongs to `version`, which must be above the former one (else
  // kFailedPrecondition, and nothing changes). The first call starts the decoder. Cached prefixes of other versions are dropped.
  Status SwapWeights(const ComputeWeights& weights, const Version& version);

  bool has_version() const;
  Version version() const;
  DecoderStats stats() const;
  StepModel& model();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace temper::engine
