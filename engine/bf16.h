// bf16 as stored: the high half of an fp32. Rounding is to nearest even; NaN stays NaN.
#pragma once

#include <bit>
#include <cstdint>

namespace temper::engine {

inline float FromBf16(uint16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }

inline uint16_t ToBf16(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

constexpr int RoundUp(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

}  // namespace temper::engine
