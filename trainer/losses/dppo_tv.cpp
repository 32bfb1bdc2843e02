// A trust region on the difference of probabilities instead of their ratio (2602.04879).
#include <algorithm>

#include "trainer/losses/kind.h"

namespace temper::trainer {

LossKind DppoTv() {
  return {.name = "dppo_tv",
          .parameters = {{"tv_low", "0.2"},
                         {"tv_high", "0.2"},
                         {.name = "ratio_max", .fallback = "20", .type = SettingType::kOptionalNumber}},
          .evaluate = PerToken([](const LossParameters& p, const LossToken& t) -> TokenLoss {
            const double moved = std::exp(t.logp_new) - std::exp(t.logp_old);
            const bool kept = t.advantage > 0 ? moved <= p["tv_high"] : moved >= -p["tv_low"];
            const auto bound = p.Optional("ratio_max");
            const double capped = bound ? std::min(t.ratio, *bound) : t.ratio;
            const double weight = kept ? capped : 0;
            return {-weight * t.advantage * t.logp_new, -weight * t.advantage, !kept || capped != t.ratio || !t.inside};
          })};
}

}  // namespace temper::trainer
