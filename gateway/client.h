// The control plane of the gateway: open a session for an attempt, hand its key to an agent, seal it, get its token tree.
//
// Callers hold a GatewayControl and do not know whether it is in this process (Gateway) or behind gRPC (NewGatewayClient);
// one contract test runs on both. Thread-safe. Every call ends by its own deadline.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "common/status.h"

namespace temper::v1 {
class Trajectory;  // temper/v1/types.pb.h
}

namespace temper::gateway {

// How a session draws tokens, whatever the client's request says.
struct SamplingPolicy {
  float temperature = 1;
  float top_p = 1;         // 1 = off
  uint32_t top_k = 0;      // 0 = off
  float min_p = 0;         // 0 = off
  uint32_t repetition_stop = 0;  // engine::Sampling has it
  uint32_t max_tokens = 0;  // cap on each call, 0 = none of its own (the context always caps)
};

// Names the random draws of a session (temper.v1.SampleKey without call and choice, which the gateway sets).
struct KeySpace {
  uint64_t seed = 0;
  uint32_t domain = 0;  // 0 training (a = group, b = rollout), 1 evaluation (a = evaluation, b = task), 2 ad hoc
  uint64_t a = 0;
  uint64_t b = 0;
};

struct OpenOptions {
  std::string session;  // GROUP.ROLLOUT.ATTEMPT or eN.TASK.ATTEMPT
  int64_t group = 0;
  int32_t rollout = 0;
  int32_t attempt = 1;
  std::string task_id;
  std::string family;
  std::optional<SamplingPolicy> sampling;  // absent: the client chooses
  int32_t max_turns = 0;                   // 0 = no limit
  KeySpace key_space;
  bool training = false;  // sampled tokens are trainable; a sampling policy is then required, and one that leaves more than one token
  double deadline_s = 0;  // from now; 0 = none
  // A session of this name that was used or closed is aborted, forgotten and begun anew (an evaluation that is repeated). Else
  // such a session is ALREADY_EXISTS.
  bool fresh = false;
};

struct Opened {
  std::string api_key;   // the session's capability: `Authorization: Bearer KEY`
  std::string base_url;  // of the agent plane, ends in /v1; inside a sandbox the relay's own address takes its place
};

struct Sealed {
  // The forest of the attempt. outcome, reason, reward, components are empty: the caller's to fill. `flags` name what
  // happened, among them `rollout_limit:turns|time|branches`, `context_length_exceeded` (each: a call was refused
  // for it), `gateway_restart`, `worker_error`, `empty` (no committed call), `edited_history`, `after_truncation`.
  std::shared_ptr<const v1::Trajectory> trajectory;
  std::string state;  // sealed | aborted
};

struct GatewayStatus {
  std::map<std::string, double> metrics;  // sessions_open, calls, calls_in_flight, tokens_sampled, ...
  std::string base_url;
};

class GatewayControl {
 public:
  virtual ~GatewayControl() = default;

  // The same session with the same fields again: the same answer. ALREADY_EXISTS: other fields, or the session was closed
  // (unless `fresh`).
  virtual Result<Opened> Open(const OpenOptions& options) = 0;

  // Refuses further calls (410), gives calls in flight `drain_ms`, cancels what is left, and answers when the trajectory is
  // on disk (fsync). Idempotent, also across a restart of the gateway. NOT_FOUND: unknown, or forgotten (the newest 8192 closed
  // sessions are kept). UNAVAILABLE: the gateway stops; after its restart the session is still there.
  virtual Result<Sealed> Seal(const std::string& session, int drain_ms) = 0;

  // Closes the session without waiting; calls in flight are cancelled. Idempotent; a sealed session stays sealed.
  virtual Status Abort(const std::string& session, const std::string& reason) = 0;

  virtual Result<GatewayStatus> GetStatus() = 0;
};

// A client of a gateway in another process. `address`: unix-abstract:NAME or any other RpcChannel address. While the gateway
// restarts, calls are retried until `patience_s` is over, then UNAVAILABLE.
std::unique_ptr<GatewayControl> NewGatewayClient(const std::string& address, double patience_s = 30);

}  // namespace temper::gateway
