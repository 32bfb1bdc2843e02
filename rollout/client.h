// The rollout service as its callers see it: tokens for a prompt, by callbacks. Two forms behind one interface: RemoteRollout
// (gRPC to worker processes) and the in-process Worker of rollout/worker.h.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/status.h"
#include "engine/decode/types.h"

namespace temper::rollout {

struct GenerateRequest {
  std::string request_id{};  // for logs only
  std::vector<int32_t> prompt_ids{};
  engine::Sampling sampling{};
  std::vector<int32_t> stop_ids{};
  engine::SampleKey key{};
  uint32_t coalesce_ms = 0;    // merge tokens for so long; kOneChunk: only at the end (or where the version changes)
  int64_t deadline_ms = 0;     // from now; 0 = none of its own (the worker still bounds the length by max_tokens)
};
inline constexpr uint32_t kOneChunk = 0xffffffffu;

// Tokens drawn at one version with one value of `mixed`. The last chunk has `finish` "stop", "length", "repetition" or "abort"; it may
// hold no ids.
struct Chunk {
  std::vector<int32_t> ids;
  std::vector<float> logprobs;  // one per id
  std::vector<std::string> kept;  // empty, or one per id: the tokens it was drawn from (engine/kept_set.h)
  engine::Version version;
  bool mixed = false;
  std::string finish;
  uint32_t prompt_tokens = 0;
  uint32_t cached_tokens = 0;
  uint64_t ids_hash = 0;  // IdsHash of the prompt and every id drawn so far, as the worker saw them
};

// Both are called from a thread of the service, one at a time for one call, on_chunk in order and on_done last, exactly once.
// They must not block and must not destroy the Call they belong to. on_done has OK after a chunk with `finish`; otherwise kCancelled,
// kDeadlineExceeded, kUnavailable (the worker died: what was drawn is lost, the caller may repeat with the same key),
// kInvalidArgument or kResourceExhausted.
struct Callbacks {
  std::function<void(const Chunk&)> on_chunk{};
  std::function<void(const Status&)> on_done{};
};

// A running request. Destroying it cancels it and waits for a callback that is running; afterwards none is called, on_done neither.
class Call {
 public:
  virtual ~Call() = default;
  virtual void Cancel() = 0;  // at most one more on_chunk; on_done follows. Any thread; repeating is harmless
};

class RolloutClient {
 public:
  virtual ~RolloutClient() = default;
  // Never blocks; every error comes through on_done. Thread-safe. Destroying a client cancels what still runs and waits for it.
  virtual std::unique_ptr<Call> Generate(GenerateRequest request, Callbacks callbacks) = 0;
};

// A worker at a gRPC address ("unix-abstract:NAME"). Waits for the worker to come up: a call made before that is sent when
// it does, within its deadline.
std::unique_ptr<RolloutClient> ConnectRollout(const std::string& address);

// Several workers as one. All calls of one (seed, domain, a, b) of the key, that is, of one rollout, go to one worker, where its
// prefix is cached; a new one goes to the worker with the fewest calls running.
std::unique_ptr<RolloutClient> SpreadRollout(std::vector<std::unique_ptr<RolloutClient>> workers);

// Collects a whole call: blocks until done. For tests, evaluation probes and tools.
struct Generated {
  std::vector<Chunk> chunks;
  std::vector<int32_t> ids;
  std::vector<float> logprobs;
  std::vector<std::string> kept;  // one per id
  std::string finish;
  uint32_t prompt_tokens = 0;
  uint32_t cached_tokens = 0;
};
Result<Generated> GenerateBlocking(RolloutClient& client, GenerateRequest request);

// Order-dependent 64-bit hash of ids, extendable: IdsHash(b, IdsHash(a)) = IdsHash(a ++ b).
inline constexpr uint64_t kIdsHashStart = 0x9e3779b97f4a7c15ull;
uint64_t IdsHash(std::span<const int32_t> ids, uint64_t hash = kIdsHashStart);

}  // namespace temper::rollout
