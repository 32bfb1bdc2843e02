// No policy term: the batch is trained on the distillation term alone.
#include "trainer/losses/kind.h"

namespace temper::trainer {

LossKind Distill() {
  return {.name = "distill",
          .evaluate = PerToken([](const LossParameters&, const LossToken&) -> TokenLoss { return {}; }),
          .reads_advantages = false,
          .reads_old = false,
          .takes_drift = false,
          .only_distills = true};
}

}  // namespace temper::trainer
