// The `algorithm:` block (docs/algorithm_block.md): one block says the whole objective, in a job file and in `temper train loss`.
//
// ParseAlgorithm merges the user's block into its recipe, checks every key (known, of the right type and range, read by the other
// settings, built) and fills the struct the losses read. Pure; no YAML here: job/ hands its block over as JSON values.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include <boost/json/fwd.hpp>

#include "common/status.h"

namespace temper::trainer {

enum class LossKind { kReinforce, kPpoClip, kCispo, kSft };
enum class DynamicSampling { kOff, kDrop, kRefill };
enum class Credit { kRollout, kTurn, kToken };
enum class Baseline { kNone, kGroupMean, kLeaveOneOut, kLengthWeighted, kBatchMean };
enum class Scale { kNone, kGroupStd, kBatchStd, kGroupMean };
enum class AggregationMode { kTokenMean, kPromptMean, kSeqMeanTokenMean, kSeqMeanTokenSum, kSeqMeanTokenSumNorm };

// The block with every default filled in. A field that the other settings do not read keeps its default and is not looked at.
struct Algorithm {
  struct Reward {
    double process_coef = 1;                 // alpha, weight of turn_rewards
    double speed_coef = 0;                   // beta, 0 = off
    std::optional<double> speed_baseline_s;  // absent = median wall_s of the group's valid rollouts
  } reward;
  struct Overlong {
    std::optional<int64_t> max_tokens, buffer_tokens;  // both or none
    double factor = 1;
    bool mask_truncated = false;
  } overlong;
  DynamicSampling dynamic_sampling = DynamicSampling::kOff;
  struct Advantage {
    Credit credit = Credit::kRollout;
    double gamma = 1;
    Baseline baseline = Baseline::kNone;
    Scale scale = Scale::kNone;
    bool population_std = false;
    double std_eps = 1e-6;
    bool whiten = false;
    bool balance = false;
  } advantage;
  struct Loss {
    LossKind kind = LossKind::kReinforce;
    double clip_low = 0.2, clip_high = 0.2;  // ppo_clip
    std::optional<double> dual_clip;         // ppo_clip
    bool dual_clip_drop = false;             // ppo_clip: log 0 instead of the cap
    double ratio_min = 0;                    // cispo: the bounds themselves
    std::optional<double> ratio_max = 5;     // cispo, absent = no bound
    std::optional<double> mask_low, mask_high;  // cispo: both or none
    double drift = 0;
  } loss;
  struct Aggregation {
    AggregationMode mode = AggregationMode::kTokenMean;
    int64_t length_norm = 0;  // seq-mean-token-sum-norm only
    bool per_segment = false;
  } aggregation;

  // Whether rewards and advantages enter the loss (not with sft).
  bool ReadsRewards() const { return loss.kind != LossKind::kSft; }
  // Whether the behaviour logprobs enter the loss: a ratio or the drift term.
  bool ReadsOldLogprobs() const {
    return loss.kind == LossKind::kPpoClip || loss.kind == LossKind::kCispo || loss.drift > 0;
  }
};

struct ParsedAlgorithm {
  Algorithm algorithm;
  // The block with all keys that are read, and only those: valid as input, with the same meaning.
  // (A string, so that this header stays light: one JSON object.)
  std::string expanded;
  // Where each key of `expanded` got its value, by dotted path ("loss.kind"): "default", "recipe" or "file".
  std::map<std::string, std::string> sources;
};

// What a training run adds: `reinforce` has no ratio, so it is refused when staleness (updates) makes logp_new differ from logp_old.
Status CheckAlgorithmForRun(const Algorithm& algorithm, int64_t staleness, const std::string& root = "algorithm");

// An error names the key by its path under `root` ("algorithm.loss.clip_low"), says why, and what would read it: kInvalidArgument,
// or kUnimplemented for a documented value that this build does not have yet.
Result<ParsedAlgorithm> ParseAlgorithm(const boost::json::value& block, const std::string& root = "algorithm");

}  // namespace temper::trainer
