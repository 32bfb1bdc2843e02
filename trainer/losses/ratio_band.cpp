// -sg(r inside the band, else 0)·A·logp, whatever the sign of A (Kimi K2.5, GLM-5).
#include <fmt/format.h>

#include "trainer/losses/kind.h"

namespace temper::trainer {

LossKind RatioBand() {
  return {.name = "ratio_band",
          .parameters = {{"ratio_min", "0.5"}, {.name = "ratio_max", .fallback = "2", .type = SettingType::kOptionalNumber}},
          .evaluate = PerToken([](const LossParameters& p, const LossToken& t) -> TokenLoss {
            const auto bound = p.Optional("ratio_max");
            const bool outside = t.ratio < p["ratio_min"] || (bound && t.ratio > *bound);
            const double weight = outside ? 0 : t.ratio;
            return {-weight * t.advantage * t.logp_new, -weight * t.advantage, outside || !t.inside};
          }),
          .check = [](const LossParameters& p) -> std::string {
            const auto bound = p.Optional("ratio_max");
            if (!bound || *bound >= p["ratio_min"]) return "";
            return fmt::format("ratio_max: {:g} is below ratio_min {:g}", *bound, p["ratio_min"]);
          }};
}

}  // namespace temper::trainer
