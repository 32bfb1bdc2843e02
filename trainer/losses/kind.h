// What a loss is: its parameters and one pure function from the tokens of an optimizer step to a value and a slope each. A loss is one
// file in this folder and one line in table.inc; docs/adding_a_loss.md adds one.
//
// Everything is in double. Advantages, weights and whatever a loss calls detached are constants; denominators, the drift term and the KL
// term are not the loss's business (trainer/loss.h).
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace temper::trainer {

// What a key of the `algorithm:` block may hold. The optional ones admit null.
enum class SettingType { kNumber, kOptionalNumber, kOptionalInt, kBool, kEnum, kList };

struct LossParameter {
  const char* name = "";
  const char* fallback = "0";  // JSON text of the default
  double min = 0, max = std::numeric_limits<double>::infinity();
  SettingType type = SettingType::kNumber;
  const char* values = "";     // kEnum: the words, space separated; the loss sees the index of the word
  const char* needs = "";      // read only when this other, optional parameter is not null
};

// The values of a loss's parameters, by name.
class LossParameters {
 public:
  void Set(std::string name, std::optional<double> value) { values_.emplace_back(std::move(name), value); }
  // Absent for null. Asking for a name that the loss did not declare is a programming error.
  std::optional<double> Optional(std::string_view name) const;
  double operator[](std::string_view name) const { return Optional(name).value(); }

 private:
  std::vector<std::pair<std::string, std::optional<double>>> values_;
};

// A trainable token of the batch.
struct LossToken {
  double advantage = 0;
  double logp_new = 0, logp_old = 0, logp_ref = 0;  // those that the loss does not read are 0
  double log_ratio = 0;  // logp_new - logp_old
  double ratio = 1;      // exp of log_ratio clamped to [-20, 20]
  bool inside = true;    // log_ratio is in [-20, 20]; outside the ratio is a constant
  double weight = 1;     // detached, >= 0: off-policy weight, 0 where rejected
};

struct TokenLoss {
  double value = 0;      // of this token, without its weight
  double slope = 0;      // d(sum of weight * value over all tokens) / d(logp_new of this token)
  bool clipped = false;  // the coefficient was zeroed or capped, by a rule of the loss or by the clamp of the log-ratio; for the metrics
};

// A rollout, or a segment of one; its tokens in the order in which they were sampled.
struct LossSequence {
  std::vector<LossToken> tokens;
  std::vector<TokenLoss> losses;  // per token, to be filled
  double value = 0;               // of a pair, on its first sequence; only losses of pairs
};

// Fills `losses` of every sequence of the batch.
using LossFunction = std::function<void(const LossParameters&, std::span<LossSequence>)>;

struct LossKind {
  const char* name = "";
  std::vector<LossParameter> parameters = {};
  LossFunction evaluate = {};
  bool reads_advantages = true;
  bool reads_old = true;         // logp_old enters the ratio
  bool takes_drift = true;       // loss.drift is read
  bool per_sequence = false;     // one ratio for a sequence: aggregation.mode must be seq-mean-token-mean
  bool one_advantage = false;    // all tokens of a sequence must have the same advantage
  bool whole_batch = false;      // a token's coefficient needs the logprobs of all others
  bool pairs = false;            // sequences 2k and 2k+1 are chosen and rejected; reads logp_ref; the loss is the mean over pairs
  bool only_distills = false;    // no policy term: the distillation term alone
  // What is wrong between parameters: "name: why"; empty = nothing.
  std::function<std::string(const LossParameters&)> check = {};
};

// A clamped log-ratio (what every exp takes), exp of one, and whether it still moves with it.
inline double Clamp20(double x) { return std::clamp(x, -20.0, 20.0); }
inline double ClampedExp(double x) { return std::exp(Clamp20(x)); }
inline bool InsideClamp(double x) { return x >= -20 && x <= 20; }

// A loss whose tokens do not know of each other: `token(parameters, LossToken)` gives value and d(value)/d(logp_new).
template <class Token>
LossFunction PerToken(Token token) {
  return [token](const LossParameters& parameters, std::span<LossSequence> batch) {
    for (LossSequence& sequence : batch) {
      for (size_t k = 0; k < sequence.tokens.size(); ++k) {
        sequence.losses[k] = token(parameters, sequence.tokens[k]);
        sequence.losses[k].slope *= sequence.tokens[k].weight;
      }
    }
  };
}

// All kinds, in the order of table.inc. Thread-safe; lives for ever.
const std::vector<LossKind>& LossKinds();
// nullptr when there is none of this name.
const LossKind* FindLossKind(std::string_view name);

}  // namespace temper::trainer
