#include "trainer/losses/kind.h"

namespace temper::trainer {

LossKind Sft() {
  return {.name = "sft",
          .evaluate = PerToken([](const LossParameters&, const LossToken& t) -> TokenLoss { return {-t.logp_new, -1}; }),
          .reads_advantages = false,
          .reads_old = false,
          .takes_drift = false};
}

}  // namespace temper::trainer
