// max(-rA, -clip(r)A); dual clip: for A < 0 at most -cA (Ye et al. 1912.09729), or 0 there (MiniMax-01).
#include <algorithm>

#include <fmt/format.h>

#include "trainer/losses/kind.h"

namespace temper::trainer {

LossKind PpoClip() {
  return {
      .name = "ppo_clip",
      .parameters = {{"clip_low", "0.2"},
                     {"clip_high", "0.2"},
                     {.name = "dual_clip", .fallback = "null", .min = 1, .type = SettingType::kOptionalNumber},
                     {.name = "dual_clip_value", .fallback = "\"cap\"", .type = SettingType::kEnum, .values = "cap drop", .needs = "dual_clip"}},
      .evaluate = PerToken([](const LossParameters& p, const LossToken& t) -> TokenLoss {
        const double low = p["clip_low"], high = p["clip_high"], a = t.advantage;
        const auto dual = p.Optional("dual_clip");
        if (dual && a < 0 && t.ratio > *dual) {
          const bool drop = p["dual_clip_value"] == 1;
          return {drop ? 0 : -*dual * a, 0, true};
        }
        const bool clipped = !t.inside || (a > 0 && t.ratio > 1 + high) || (a < 0 && t.ratio < 1 - low);
        const double bounded = std::clamp(t.ratio, 1 - low, 1 + high);
        return {std::max(-t.ratio * a, -bounded * a), clipped ? 0 : -t.ratio * a, clipped};
      }),
      .check = [](const LossParameters& p) -> std::string {
        const auto dual = p.Optional("dual_clip");
        if (!dual || *dual > 1 + p["clip_high"]) return "";
        return fmt::format("dual_clip: {:g} must be above 1 + clip_high = {:g}", *dual, 1 + p["clip_high"]);
      }};
}

}  // namespace temper::trainer
