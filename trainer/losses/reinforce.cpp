#include "trainer/losses/kind.h"

namespace temper::trainer {

LossKind Reinforce() {
  return {.name = "reinforce",
          .evaluate = PerToken([](const LossParameters&, const LossToken& t) -> TokenLoss {
            return {-t.advantage * t.logp_new, -t.advantage};
          }),
          .reads_old = false};
}

}  // namespace temper::trainer
