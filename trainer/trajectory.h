// A trajectory as the trainer sees it: the token runs of one rollout, checked. Plain values; the wire form is
// temper.v1.Trajectory (proto/temper/v1/types.proto).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/ids.h"
#include "common/status.h"

namespace temper::trainer {

// Tokens with one provenance and one version, hanging below the last token of `parent`.
struct TokenRun {
  int32_t parent = -1;  // index into Rollout::runs, smaller than the run's own; -1 = a root
  bool sampled = false;
  std::vector<int32_t> ids;      // may be empty
  std::vector<float> logprobs;   // sampled: one per id, of the distribution sampled from
  Version version;               // sampled: of the weights
  bool mixed = false;            // sampled: the KV was computed at several versions; never on-policy
  bool trainable = true;         // sampled
  float inv_temperature = 1;     // sampled: fp32 1/T of the call
  std::vector<std::string> kept = {};  // sampled: empty, or one per id, the tokens it was drawn from (engine/kept_set.h)
  int32_t call = 0, choice = 0;  // of the request that drew them; context: that brought them
};

struct Rollout {
  int32_t rollout = 0;  // index in the group
  std::string session;  // for messages
  Outcome outcome = Outcome::kScored;
  double reward = 0;
  std::vector<double> turn_rewards = {};  // empty, or one a turn: a call that sampled anything, in the order of the calls
  double wall_s = 0;
  std::vector<TokenRun> runs;
};

struct Group {
  int64_t group = 0;
  int64_t version_admitted = 0;
  std::vector<Rollout> rollouts;
};

// Parses a serialised temper.v1.Trajectory and checks everything the trainer relies on: parents before children, ids inside the
// vocabulary, finite logprobs and kept sets that are some and hold the id, one per sampled id, a finite reward where the outcome has
// one, finite rewards of turns for all turns or none. kInvalidArgument names session and run.
Result<Rollout> ParseTrajectory(std::string_view bytes, int vocab);

}  // namespace temper::trainer
