// The `algorithm:` block (docs/algorithm_block.md): one block says the whole objective, in a job file and in `temper train loss`.
//
// ParseAlgorithm merges the user's block into its recipe, checks every key (known, of the right type and range, read by the other
// settings, built) and fills the struct the losses read. Pure; no YAML here: job/ hands its block over as JSON values.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <boost/json/fwd.hpp>

#include "common/status.h"
#include "trainer/losses/kind.h"

namespace temper::trainer {

// Each in the order of the words in the block.
enum class DynamicSampling { kOff, kDrop, kRefill };
enum class Credit { kRollout, kTurn, kToken, kGae };
enum class Baseline { kNone, kGroupMean, kLeaveOneOut, kLengthWeighted, kBatchMean };
enum class Scale { kNone, kGroupStd, kBatchStd, kGroupMean };
enum class AggregationMode { kTokenMean, kPromptMean, kSeqMeanTokenMean, kSeqMeanTokenSum, kSeqMeanTokenSumNorm };
enum class KlWhere { kNone, kLoss, kReward };
enum class KlEstimator { kK1, kK2, kK3, kK1Plus, kK3Plus, kSgProb };
enum class OffPolicyWeight { kNone, kToken, kSequence };
enum class Measure { kRatio, kK2, kK3 };
enum class RejectLevel { kToken, kSequenceSum, kSequenceMean, kSequenceAny };
enum class DistillationKind { kNone, kPolicyGradient, kTopkForwardKl };

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
    double gamma = 1, lambda = 1;
    Baseline baseline = Baseline::kNone;
    Scale scale = Scale::kNone;
    bool population_std = false;
    double std_eps = 1e-6;
    bool whiten = false;
    bool balance = false;
  } advantage;
  struct Loss {
    const LossKind* kind = nullptr;  // never null in a parsed block
    LossParameters parameters;
    double drift = 0;
  } loss;
  struct Aggregation {
    AggregationMode mode = AggregationMode::kTokenMean;
    int64_t length_norm = 0;  // seq-mean-token-sum-norm only
    bool per_segment = false;
  } aggregation;

  struct Kl {
    KlWhere where = KlWhere::kNone;
    KlEstimator estimator = KlEstimator::kK3;
    double coef = 0;
    bool importance_weighted = false;
  } kl;
  struct Reject {
    Measure measure = Measure::kRatio;
    RejectLevel level = RejectLevel::kToken;
    std::optional<double> min, max;
    bool only_negative = false;
  };
  struct OffPolicy {
    bool decoupled = false;
    OffPolicyWeight weight = OffPolicyWeight::kNone;
    std::optional<double> weight_min, weight_max = 2;
    bool zero_outside = false;
    bool normalize = false;
    std::vector<Reject> reject;
  } off_policy;
  struct Distillation {
    DistillationKind kind = DistillationKind::kNone;
    double coef = 1;
    bool student_new = false;
    bool task_reward = false;
  } distillation;

  // Whether advantages come from rewards: not where the loss reads none, nor where a teacher alone gives them.
  bool TakesTaskAdvantage() const {
    return loss.kind->reads_advantages && (distillation.kind == DistillationKind::kNone || distillation.task_reward);
  }
  // Which data of a rollout the settings read.
  bool ReadsRewards() const { return TakesTaskAdvantage() || loss.kind->pairs; }
  bool ReadsOldLogprobs() const;
  bool ReadsRolloutLogprobs() const { return off_policy.decoupled; }
  bool ReadsReference() const { return kl.where != KlWhere::kNone || loss.kind->pairs; }
  bool ReadsTeacher() const { return distillation.kind == DistillationKind::kPolicyGradient; }
  bool ReadsTeacherTop() const { return distillation.kind == DistillationKind::kTopkForwardKl; }
  bool HasTeacher() const { return distillation.kind != DistillationKind::kNone; }
  bool ReadsValues() const { return TakesTaskAdvantage() && advantage.credit == Credit::kGae; }
  // Whether tokens of a rollout may have different advantages.
  bool AdvantagesDifferByToken() const { return advantage.credit != Credit::kRollout || ReadsTeacher(); }
  // Whether a token's coefficient is 0 where its advantage is.
  bool SilentWithoutAdvantage() const {
    return loss.kind->reads_advantages && loss.drift == 0 && kl.where == KlWhere::kNone && distillation.kind == DistillationKind::kNone;
  }
  // Whether a token's coefficient depends on the logprobs of other rollouts.
  bool NeedsWholeBatch() const {
    // A KL in the reward reads logp_old, which is logp_new in a decoupled job, and a group's advantages read all its rewards.
    return loss.kind->whole_batch || loss.kind->pairs || off_policy.normalize || (kl.where == KlWhere::kReward && off_policy.decoupled);
  }
};

struct ParsedAlgorithm {
  Algorithm algorithm;
  // The block with all keys that are read, and only those: valid as input, with the same meaning.
  // (A string, so that this header stays light: one JSON object.)
  std::string expanded;
  // Where each key of `expanded` got its value, by dotted path ("loss.kind"): "default", "recipe" or "file".
  std::map<std::string, std::string> sources;
  // Where the recipe's settings were published, one line; empty without a recipe.
  std::string recipe_source;
};

// What a training run cannot do, or not yet, though `temper train loss` does: kInvalidArgument for `reinforce` where staleness (updates)
// or several optimizer steps on a batch make logp_new differ from logp_old, as it has no ratio; kUnimplemented, with what is missing, for
// whatever needs a critic.
Status CheckAlgorithmForRun(const Algorithm& algorithm, int64_t staleness, int64_t optimizer_steps = 1, const std::string& root = "algorithm");

// An error names the key by its path under `root` ("algorithm.loss.clip_low"), says why, and what would read it: kInvalidArgument.
Result<ParsedAlgorithm> ParseAlgorithm(const boost::json::value& block, const std::string& root = "algorithm");

}  // namespace temper::trainer
