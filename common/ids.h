// Names of things that several parts speak about: versions, attempts, outcomes.
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <string_view>

#include "common/status.h"

namespace temper {

// The weights a token was drawn from. `step` alone is the "version" of ledgers, metrics and trajectories; the epoch rises at
// each start or rollback of the trainer, so that two different weights never share a version.
struct Version {
  uint64_t epoch = 0;
  int64_t step = 0;
  auto operator<=>(const Version&) const = default;
};

// One attempt at a task. Training: "GROUP.ROLLOUT.ATTEMPT"; evaluation N: "eN.TASK.ATTEMPT".
struct SessionId {
  bool evaluation = false;
  int64_t group = 0;    // evaluation: its number
  int32_t rollout = 0;  // index in the group; evaluation: index of the task
  int32_t attempt = 1;  // from 1
  auto operator<=>(const SessionId&) const = default;

  std::string ToString() const;
  static Result<SessionId> Parse(std::string_view text);
};

// How an attempt ended. The first three have a reward or may have one; the last two are never trained.
enum class Outcome { kScored, kPolicyFailure, kTruncated, kInfraFailure, kAborted };
inline constexpr int kOutcomes = 5;
// "scored", "policy_failure", "truncated", "infra_failure", "aborted".
const char* OutcomeName(Outcome outcome);
Result<Outcome> ParseOutcome(std::string_view name);

}  // namespace temper
