// The window machine: which groups are admitted, which the trainer may take, what becomes of each.
//
// Pure: state + event + now -> decisions, no clock, thread, file or random number. The service runs it with real events,
// `temper pool sim` with scripted ones, `temper pool verify` with those of a ledger. The rules are docs/pool_sim.md 1; this
// file adds none. Two streams come out of each step: the decisions (docs/pool_sim.md 3) and the ledger's lines (7).
// Single-threaded; the owner serialises.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/status.h"
#include "datapool/types.h"

namespace temper::datapool {

struct Event {
  enum class Kind { kFinish, kFail, kLease, kUpdate, kCommit, kCrashPool, kCrashTrainer, kTick, kClose, kReopen };
  Kind kind = Kind::kTick;
  int64_t group = 0;             // finish, fail
  int32_t rollout = 0;           // finish, fail
  int32_t attempt = 0;           // finish, fail: 0 = the current one; an older one is ignored
  std::string outcome;           // finish: scored policy_failure truncated; fail: infra_failure aborted
  std::string reason;            // finish, fail: the kind. close: job_end | stopped. lease, crash: the trainer's incarnation
  std::optional<double> reward;  // finish
  int64_t number = 0;            // update: batch; commit: step; tick: fire at most so many deadlines, 0 = all that are due
};

// One line of the decision stream.
struct Decision {
  enum class Kind {
    kAdmit, kReady, kReissue, kLate, kTombstone, kRequeue, kTake, kLease, kHold, kUpdate, kCommit, kRefuse, kIgnore, kRecover,
  };
  Kind kind = Kind::kAdmit;
  double t = 0;
  std::vector<std::optional<int64_t>> head;  // one a source
  int64_t ledger[4] = {0, 0, 0, 0};          // admitted, consumed, tombstoned, in flight; after the decision

  std::optional<int64_t> group, pos, version, from, batch, step, have, need;
  std::optional<int32_t> rollout, attempt, valid;
  std::optional<int64_t> stale;        // take
  std::optional<bool> partial, again;
  std::string source, reason, event, who;
  std::vector<int64_t> groups;         // lease, update: as taken. hold: blocked. recover: batches
  std::vector<int64_t> staleness;      // lease
};

// One line of RUN/ledger.jsonl, without its seq.
// Rewards of a group that are this close are the same: no signal.
inline constexpr double kEqualRewards = 1e-9;

struct LedgerLine {
  enum class Kind {
    kAdmit, kIssue, kOutcome, kAsk, kLease, kConsume, kCommit, kRollback, kTombstone, kRecover,
    // The pool's own, no decisions of the machine:
    kQuarantine,  // a stored record does not verify
    kRetire,      // records of groups that are over for good have left the store; reason: archive | drop
    kSpace,       // reason store | disk: nothing more is handed out for want of space; back: there is space again
  };
  Kind kind = Kind::kAdmit;
  double t = 0;
  std::optional<int64_t> group, task, from, version_admitted, version_consumed, step;
  std::optional<int32_t> rollout, attempt;
  std::optional<double> reward;
  std::string source, outcome, reason, who;
  std::vector<int64_t> groups;  // lease, retire
  friend bool operator==(const LedgerLine&, const LedgerLine&) = default;
};

struct StepOutput {
  std::vector<Decision> decisions;
  std::vector<LedgerLine> ledger;
};

// What the pool is asked to have played right now.
struct OpenRollout {
  AttemptId id;
  int64_t task = 0;
  int32_t source = 0;
  std::optional<double> deadline;  // pool clock
};

struct BatchMember {
  int64_t group = 0;
  int64_t version_admitted = 0;
  int64_t task = 0;
  int32_t source = 0;
  std::vector<int32_t> rollouts;  // valid, ascending
  std::vector<int32_t> attempts;  // of each, the one that was valid
};

// Where one source stands, for people: what its positions from the head on hold.
struct SourceShape {
  std::string source;
  std::optional<int64_t> window;       // W
  std::optional<int64_t> head;         // number of the oldest living group in no batch
  double head_since = 0;               // when it was admitted, pool clock
  int32_t head_running = 0;            // its rollouts still open
  int64_t running = 0;                 // rollouts still open, of all its groups
  int64_t quota = 0, filled = 0;       // of the batch being filled
  int64_t ready_inside = 0, ready_outside = 0;
  std::string positions;  // from the head: 'o' running, '!' running and late, '#' ready, '.' taken or dead
};

struct WindowTotals {
  int64_t admitted = 0, consumed = 0, tombstoned = 0, in_flight = 0;
  std::vector<std::pair<std::string, int64_t>> tombstones;  // reason, count; in the order of first use
  int64_t issued = 0, finished = 0, failed = 0, aborted = 0, running = 0;
  std::vector<std::pair<std::string, int64_t>> outcomes;  // the five, by attempt
  int64_t batches = 0;
  int64_t staleness_max = 0;  // over leased groups
};

class Window {
 public:
  // `config` must be valid. Nothing is admitted before Start.
  explicit Window(PoolConfig config);
  Window(const Window&);
  Window& operator=(const Window&);
  Window(Window&&) noexcept;
  Window& operator=(Window&&) noexcept;
  ~Window();

  // The settling at the beginning: the first admissions. Once.
  StepOutput Start(double now);
  bool started() const;

  // Fires what is due before `now`, then the event, then settles. An error changes nothing, not even the clock.
  Result<StepOutput> Apply(const Event& event, double now);

  // When the next deadline fires (a tick is due then); nullopt: none.
  std::optional<double> NextDeadline() const;

  // Everything a later decision depends on. Rebuild(Store()) decides as the original would.
  std::string Store() const;
  static Result<Window> Rebuild(const PoolConfig& config, const std::string& stored);

  // ---- questions
  double now() const;
  int64_t version() const;
  int64_t committed() const;
  bool asking() const;            // a lease request is open
  bool closed() const;
  std::vector<int64_t> Outstanding() const;  // batches leased and not updated, ascending
  bool exhausted() const;         // the next batch can never be filled: too few groups and tasks are left
  std::optional<int32_t> RunningAttempt(int64_t group, int32_t rollout) const;  // nullopt: over
  std::vector<OpenRollout> Running() const;  // oldest first
  std::vector<BatchMember> Batch(int64_t batch) const;  // of a leased or updated batch not yet committed; else empty
  const PoolConfig& config() const;
  const PoolPlan& plan() const;
  WindowTotals totals() const;
  std::vector<SourceShape> Shape() const;  // one a source

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// The words of the formats.
const char* Name(Policy policy);
const char* Name(Decision::Kind kind);
const char* Name(LedgerLine::Kind kind);

}  // namespace temper::datapool
