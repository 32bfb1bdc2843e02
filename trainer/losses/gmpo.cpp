// -A·exp(mean of log r, each clipped on the side its advantage pushes to): the geometric mean of the ratios (2507.20673).
#include "trainer/losses/kind.h"

namespace temper::trainer {
namespace {

void Evaluate(const LossParameters& p, std::span<LossSequence> batch) {
  const double low = p["log_clip_low"], high = p["log_clip_high"];
  for (LossSequence& sequence : batch) {
    const auto n = static_cast<double>(sequence.tokens.size());
    double mean = 0, pull = 0;
    for (size_t k = 0; k < sequence.tokens.size(); ++k) {
      const LossToken& t = sequence.tokens[k];
      const bool above = t.advantage > 0 && t.log_ratio > high;
      const bool below = t.advantage < 0 && t.log_ratio < -low;
      sequence.losses[k].clipped = above || below;
      mean += (above ? high : below ? -low : t.log_ratio) / n;
      pull += t.weight * t.advantage;
    }
    const double ratio = ClampedExp(mean);
    for (size_t k = 0; k < sequence.tokens.size(); ++k) {
      TokenLoss& loss = sequence.losses[k];
      loss.value = -sequence.tokens[k].advantage * ratio;
      loss.clipped = loss.clipped || !InsideClamp(mean);
      loss.slope = loss.clipped ? 0 : -pull * ratio / n;
    }
  }
}

}  // namespace

LossKind Gmpo() {
  return {.name = "gmpo",
          .parameters = {{"log_clip_low", "0.4"}, {"log_clip_high", "0.4"}},
          .evaluate = Evaluate,
          .takes_drift = false,
          .per_sequence = true,
          .one_advantage = true};
}

}  // namespace temper::trainer
