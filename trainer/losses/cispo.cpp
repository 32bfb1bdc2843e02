// -sg(clip(r))·A·M·logp: the clipped ratio is a weight, so no token loses its gradient (M1, 2506.13585 eq 4 to 7; M = 1 without mask).
#include <algorithm>

#include <fmt/format.h>

#include "trainer/losses/kind.h"

namespace temper::trainer {

LossKind Cispo() {
  return {
      .name = "cispo",
      .parameters = {{"ratio_min", "0"},
                     {.name = "ratio_max", .fallback = "5", .type = SettingType::kOptionalNumber},
                     {.name = "mask_low", .fallback = "null", .type = SettingType::kOptionalNumber},
                     {.name = "mask_high", .fallback = "null", .type = SettingType::kOptionalNumber}},
      .evaluate = PerToken([](const LossParameters& p, const LossToken& t) -> TokenLoss {
        double weight = std::max(t.ratio, p["ratio_min"]);
        if (const auto bound = p.Optional("ratio_max")) weight = std::min(weight, *bound);
        bool clipped = weight != t.ratio || !t.inside;
        if (const auto low = p.Optional("mask_low")) {
          const bool above = t.advantage > 0 && t.ratio > 1 + p["mask_high"];
          const bool below = t.advantage < 0 && t.ratio < 1 - *low;
          if (above || below) weight = 0, clipped = true;
        }
        return {-weight * t.advantage * t.logp_new, -weight * t.advantage, clipped};
      }),
      .check = [](const LossParameters& p) -> std::string {
        const auto bound = p.Optional("ratio_max"), low = p.Optional("mask_low"), high = p.Optional("mask_high");
        if (bound && *bound < p["ratio_min"]) {
          return fmt::format("ratio_max: {:g} is below ratio_min {:g} (they are the bounds themselves)", *bound, p["ratio_min"]);
        }
        if (low.has_value() == high.has_value()) return "";
        return fmt::format("{}: has no effect without {}; give both or none", low ? "mask_low" : "mask_high", low ? "mask_high" : "mask_low");
      }};
}

}  // namespace temper::trainer
