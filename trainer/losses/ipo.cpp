// (D - 1/(2·beta))^2, D = log-ratio to the reference of the chosen minus that of the rejected, per token or summed (2310.12036).
#include "trainer/losses/kind.h"

namespace temper::trainer {
namespace {

void Evaluate(const LossParameters& p, std::span<LossSequence> batch) {
  const bool average = p["length_average"] != 0;
  for (size_t s = 0; s + 1 < batch.size(); s += 2) {
    double difference = 0, share[2] = {1, -1};  // d(difference) / d(logp_new) of a token
    for (int side = 0; side < 2; ++side) {
      const LossSequence& sequence = batch[s + static_cast<size_t>(side)];
      if (average && !sequence.tokens.empty()) share[side] /= static_cast<double>(sequence.tokens.size());
      for (const LossToken& t : sequence.tokens) difference += share[side] * (t.logp_new - t.logp_ref);
    }
    const double off = difference - 1 / (2 * p["beta"]);
    batch[s].value = off * off;
    for (int side = 0; side < 2; ++side) {
      for (TokenLoss& loss : batch[s + static_cast<size_t>(side)].losses) loss.slope = 2 * off * share[side];
    }
  }
}

}  // namespace

LossKind Ipo() {
  return {.name = "ipo",
          .parameters = {{"beta", "0.1", 1e-12}, {.name = "length_average", .fallback = "true", .type = SettingType::kBool}},
          .evaluate = Evaluate,
          .reads_advantages = false,
          .reads_old = false,
          .takes_drift = false,
          .pairs = true};
}

}  // namespace temper::trainer
