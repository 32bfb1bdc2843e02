// A sigmoid instead of a clip: -(4/tau)·sigmoid(tau(r - 1))·A (2511.20347).
#include "trainer/losses/kind.h"

namespace temper::trainer {

LossKind Sapo() {
  return {.name = "sapo",
          .parameters = {{"tau_pos", "1", 1e-9}, {"tau_neg", "1.05", 1e-9}},
          .evaluate = PerToken([](const LossParameters& p, const LossToken& t) -> TokenLoss {
            const double tau = p[t.advantage > 0 ? "tau_pos" : "tau_neg"];
            const double gate = 1 / (1 + std::exp(-tau * (t.ratio - 1)));
            const double closed = 1 / (1 + std::exp(tau * (t.ratio - 1)));  // 1 - gate, without its rounding
            return {-4 / tau * gate * t.advantage, t.inside ? -4 * gate * closed * t.ratio * t.advantage : 0, !t.inside};
          })};
}

}  // namespace temper::trainer
