// One ratio s = exp(mean log r) for the whole sequence, clipped as PPO clips (2507.18071).
#include <algorithm>

#include "trainer/losses/kind.h"

namespace temper::trainer {
namespace {

void Evaluate(const LossParameters& p, std::span<LossSequence> batch) {
  const double low = p["clip_low"], high = p["clip_high"];
  for (LossSequence& sequence : batch) {
    const auto n = static_cast<double>(sequence.tokens.size());
    double mean = 0;
    for (const LossToken& t : sequence.tokens) mean += t.log_ratio / n;
    const double s = ClampedExp(mean);
    double slope = 0;  // of the sequence's weighted sum, with respect to the mean
    for (size_t k = 0; k < sequence.tokens.size(); ++k) {
      const LossToken& t = sequence.tokens[k];
      const double a = t.advantage;
      const bool clipped = !InsideClamp(mean) || (a > 0 && s > 1 + high) || (a < 0 && s < 1 - low);
      sequence.losses[k] = {std::max(-s * a, -std::clamp(s, 1 - low, 1 + high) * a), 0, clipped};
      if (!clipped) slope -= s * a * t.weight;
    }
    for (TokenLoss& loss : sequence.losses) loss.slope = slope / n;
  }
}

}  // namespace

LossKind Gspo() {
  return {.name = "gspo",
          .parameters = {{"clip_low", "3e-4"}, {"clip_high", "4e-4"}},
          .evaluate = Evaluate,
          .takes_drift = false,
          .per_sequence = true};
}

}  // namespace temper::trainer
