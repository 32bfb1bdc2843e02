// -(1-e)·log sigmoid(x) - e·log sigmoid(-x), x = beta·(log-ratio to the reference of the chosen minus that of the rejected) (2305.18290).
#include "trainer/losses/kind.h"

namespace temper::trainer {
namespace {

// Sum of logp_new - logp_ref. In double: in float the sign of a difference of two long sums can flip.
double LogRatio(const LossSequence& sequence) {
  double sum = 0;
  for (const LossToken& t : sequence.tokens) sum += t.logp_new - t.logp_ref;
  return sum;
}

// log(1 + exp(x)) without overflow.
double SoftPlus(double x) { return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x)); }

void Evaluate(const LossParameters& p, std::span<LossSequence> batch) {
  const double beta = p["beta"], smoothing = p["label_smoothing"];
  for (size_t s = 0; s + 1 < batch.size(); s += 2) {
    LossSequence &chosen = batch[s], &rejected = batch[s + 1];
    const double x = beta * (LogRatio(chosen) - LogRatio(rejected));
    chosen.value = (1 - smoothing) * SoftPlus(-x) + smoothing * SoftPlus(x);
    const double slope = beta * (smoothing / (1 + std::exp(-x)) - (1 - smoothing) / (1 + std::exp(x)));
    for (TokenLoss& loss : chosen.losses) loss.slope = slope;
    for (TokenLoss& loss : rejected.losses) loss.slope = -slope;
  }
}

}  // namespace

LossKind Dpo() {
  return {.name = "dpo",
          .parameters = {{"beta", "0.1", 1e-12}, {"label_smoothing", "0", 0, 1}},
          .evaluate = Evaluate,
          .reads_advantages = false,
          .reads_old = false,
          .takes_drift = false,
          .pairs = true};
}

}  // namespace temper::trainer
