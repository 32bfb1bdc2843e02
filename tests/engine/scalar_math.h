#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

// The elementary functions of docs/numerics.md as one number at a time, for tests that restate the engine without its vectors.
namespace temper::engine::scalar {

// (std::fma of a float and an int is one of doubles.)
inline float Fma(float a, float b, float c) { return std::fma(a, b, c); }

// Sixteen lanes to one: halves added until one is left.
inline float Tree(const float* lane) {
  float x[16];
  std::copy(lane, lane + 16, x);
  for (int half = 8; half; half /= 2) {
    for (int i = 0; i < half; ++i) x[i] = x[i] + x[i + half];
  }
  return x[0];
}

inline float Exp(float x) {
  if (x < -87.3f) return 0;
  const float y = std::min(88.3f, x);
  const float n = std::nearbyint(y * 1.44269504088896341f);
  float r = Fma(-n, 0.693145751953125f, y);
  r = Fma(-n, 1.42860682030941723e-6f, r);
  float p = 1.0f / 5040;
  for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = Fma(p, r, c);
  return p * std::bit_cast<float>((static_cast<int>(n) + 127) << 23);
}

inline float Log(float x) {
  auto bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) >= 0x7f800000u) return x;
  int e = static_cast<int>(bits >> 23) - 127;
  bits = (bits & 0x7fffffu) | 0x3f800000u;
  if (bits > 0x3fb504f3u) {
    bits -= 0x800000u;
    ++e;
  }
  const float m = std::bit_cast<float>(bits), s = (m - 1) / (m + 1), q = s * s;
  float p = 2.0f / 9;
  for (float c : {2.0f / 7, 2.0f / 5, 2.0f / 3}) p = Fma(p, q, c);
  p = p * q;
  p = Fma(s, p, static_cast<float>(e) * 1.42860682030941723e-6f);
  p = Fma(s, 2, p);
  return Fma(static_cast<float>(e), 0.693145751953125f, p);
}

inline float Sigmoid(float x) { return 1 / (1 + Exp(0 - x)); }

inline float Tanh(float x) {
  if (std::max(x, 0 - x) >= 1) return 2 * Sigmoid(2 * x) - 1;
  const float q = x * x;
  return x * Fma(Fma(q + 378, q, 17325), q, 135135) / Fma(Fma(Fma(28, q, 3150), q, 62370), q, 135135);
}

}  // namespace temper::engine::scalar
