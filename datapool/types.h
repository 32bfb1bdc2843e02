// Plain shapes of the data pool: its configuration, and what the agents and the trainer exchange with it.
//
// The rules behind every field are docs/pool_sim.md 1 and 2; names follow them (P groups per optimizer step, S staleness in
// updates, G rollouts per group, B slots, W window).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/status.h"

namespace temper::datapool {

enum class Policy { kAnchored, kStrict, kGreedy, kAreal };
enum class OnDeadline { kWait, kTombstone, kRequeue };

// `size` and `fraction` exclude each other; neither = 0.3 of the slots.
struct WindowConfig {
  Policy policy = Policy::kAnchored;
  std::optional<int64_t> size;
  std::optional<double> fraction;
};

struct SourceConfig {
  std::string name = "default";
  double weight = 1;
  std::optional<int64_t> tasks;        // nullopt: as many as are asked for
  std::optional<WindowConfig> window;  // nullopt: the pool's
};

struct PoolConfig {
  int64_t P = 1;                    // groups per optimizer step
  int64_t S = 0;                    // allowed staleness, updates
  WindowConfig window;
  std::optional<int64_t> B;         // slots; nullopt: (S+1)·P
  int32_t G = 1;                    // rollouts per group
  int32_t extra = 0;                // started beyond G; the first G valid ones count
  std::optional<int32_t> min_valid;  // nullopt: min(2, G)
  int32_t retries = 0;              // re-issues after an infrastructure failure, per rollout
  std::optional<double> deadline_s;  // after admission, pool clock
  OnDeadline on_deadline = OnDeadline::kTombstone;
  bool refill = false;              // zero_signal: bury groups whose valid rewards are all equal
  std::optional<int64_t> max_staleness;
  int64_t max_leases = 1;           // batches out at once
  std::optional<int64_t> tasks;     // groups ever admitted from new tasks; nullopt: endless
  uint64_t seed = 0;                // of generated worlds
  std::vector<SourceConfig> sources;  // empty: one, named "default"

  int32_t MinValid() const { return min_valid ? *min_valid : (G < 2 ? G : 2); }
};

// Ranges and combinations of docs/pool_sim.md 2. The message names the key.
Status Validate(const PoolConfig& config);

// The sizes that follow from a valid configuration, one entry a source. `bound` is nullopt under areal (there is none).
struct PoolPlan {
  std::vector<int64_t> quota;                 // P of each source
  std::vector<int64_t> slots;                 // B
  std::vector<std::optional<int64_t>> window;  // W; nullopt: no window
  std::vector<std::optional<int64_t>> bounds;  // staleness no trained group of the source exceeds, in updates
  std::optional<int64_t> bound;               // the largest of them
};
// `bound`, in updates, where every update is so many optimizer steps (docs/pool_sim.md 4): the last of them trains on what the weights of
// the first have left behind.
inline int64_t BoundInOptimizerSteps(int64_t bound, int64_t steps) { return bound * steps + steps - 1; }
// In the order of the other lists; "default" without sources.
std::vector<std::string> SourceNames(const PoolConfig& config);
PoolPlan Plan(const PoolConfig& config);

struct AttemptId {
  int64_t group = 0;
  int32_t rollout = 0;
  int32_t attempt = 0;  // from 1
  friend bool operator==(const AttemptId&, const AttemptId&) = default;
  friend auto operator<=>(const AttemptId&, const AttemptId&) = default;
};

// One rollout to play.
struct Issue {
  AttemptId id;
  int64_t task = 0;  // index into the source's task list
  std::string source;
  int64_t version = 0;          // step whose weights are served at the time of issue
  double deadline_left_s = -1;  // to the group's deadline; negative: none
};

struct TakeIssuesReply {
  std::vector<Issue> issues;         // each is handed out once
  std::vector<AttemptId> cancelled;  // handed out earlier and over meanwhile: stop them, report nothing
  bool closed = false;               // nothing will come again
};

struct FinishedAttempt {
  AttemptId id;
  std::string outcome;           // scored | policy_failure | truncated | infra_failure | aborted
  std::string reason;            // the kind, may be empty for scored
  std::optional<double> reward;  // finite; of the first three outcomes only. Without one: over and not valid
  std::string trajectory;        // serialised temper.v1.Trajectory with its outcome fields filled in; may be empty
};

struct LeasedGroup {
  int64_t group = 0;
  int64_t version_admitted = 0;
  int64_t task = 0;
  std::string source;
  std::vector<int32_t> rollouts;     // the valid ones, ascending
  std::vector<std::string> members;  // serialised temper.v1.Trajectory, parallel to `rollouts`
};

struct LeaseReply {
  bool ready = false;
  int64_t batch = 0;  // trained, it turns version `batch` into `batch`+1
  std::vector<LeasedGroup> groups;  // in the order taken; exactly P
  bool again = false;      // has been out before, to a trainer that is gone; same members, same order
  bool closed = false;     // the pool was closed: nothing will come
  bool exhausted = false;  // no task is left and what still runs cannot fill the batch
};

enum class CloseReason { kJobEnd, kStopped };

// The pool's metric NAME about the window of a source (docs/pool.md).
inline std::string WindowMetric(const std::string& source, const std::string& name) { return "window." + source + "." + name; }

}  // namespace temper::datapool
