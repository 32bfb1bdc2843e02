#include "common/status.h"
#include "trainer/losses/kind.h"

namespace temper::trainer {

#define TEMPER_LOSS(Name) LossKind Name();
#include "trainer/losses/table.inc"
#undef TEMPER_LOSS

const std::vector<LossKind>& LossKinds() {
  static const std::vector<LossKind> kinds = {
#define TEMPER_LOSS(Name) Name(),
#include "trainer/losses/table.inc"
#undef TEMPER_LOSS
  };
  return kinds;
}

const LossKind* FindLossKind(std::string_view name) {
  for (const LossKind& kind : LossKinds()) {
    if (name == kind.name) return &kind;
  }
  return nullptr;
}

std::optional<double> LossParameters::Optional(std::string_view name) const {
  for (const auto& [known, value] : values_) {
    if (known == name) return value;
  }
  TEMPER_CHECK(false) << "the loss has no parameter " << std::string(name);
  return std::nullopt;
}

}  // namespace temper::trainer
