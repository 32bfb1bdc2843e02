// -K·r·A: the tokens whose ratio moved most are left out until the batch's second moment of log r is small enough (2510.01161).
#include <algorithm>

#include "trainer/losses/kind.h"

namespace temper::trainer {
namespace {

struct Moved {
  double squared = 0;  // log r, squared
  TokenLoss* loss = nullptr;
};

void Evaluate(const LossParameters& p, std::span<LossSequence> batch) {
  std::vector<Moved> all;
  for (LossSequence& sequence : batch) {
    for (size_t k = 0; k < sequence.tokens.size(); ++k) {
      const LossToken& t = sequence.tokens[k];
      sequence.losses[k] = {-t.ratio * t.advantage, t.inside ? -t.ratio * t.advantage * t.weight : 0, !t.inside};
      all.push_back({t.log_ratio * t.log_ratio, &sequence.losses[k]});
    }
  }
  std::stable_sort(all.begin(), all.end(), [](const Moved& a, const Moved& b) { return a.squared < b.squared; });
  // The mean over the smallest n grows with n, so what is left is the longest beginning whose mean is small enough.
  double sum = 0;
  size_t kept = 0;
  for (size_t n = 1; n <= all.size(); ++n) {
    sum += all[n - 1].squared;
    if (sum <= p["m2_max"] * static_cast<double>(n)) kept = n;
  }
  for (size_t n = kept; n < all.size(); ++n) *all[n].loss = {0, 0, true};
}

}  // namespace

LossKind M2po() {
  return {.name = "m2po", .parameters = {{"m2_max", "0.04"}}, .evaluate = Evaluate, .whole_batch = true};
}

}  // namespace temper::trainer
