#include "engine/decode/types.h"

namespace temper::engine {

std::string ToString(const Version& version) {
  return std::to_string(version.epoch) + "." + std::to_string(version.step);
}

float InvTemperature(float temperature) { return temperature > 0.0f ? 1.0f / temperature : 1.0f; }

bool IsPureTemperature(const Sampling& sampling) {
  return sampling.top_p >= 1.0f && sampling.top_k == 0 && sampling.min_p <= 0.0f;
}

}  // namespace temper::engine
