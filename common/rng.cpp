#include "common/rng.h"

#include <cmath>

#include "common/check.h"

namespace temper {
namespace {

uint64_t Rotl(uint64_t x, int k) { return (x << k) | (x >> (64 - k)); }

}  // namespace

uint64_t Mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

uint64_t HashName(uint64_t seed, std::string_view name) {
  uint64_t h = 0xcbf29ce484222325ULL ^ Mix64(seed + 0x9e3779b97f4a7c15ULL);
  for (unsigned char c : name) h = (h ^ c) * 0x100000001b3ULL;
  return Mix64(h ^ name.size());
}

Rng::Rng(uint64_t seed) : seed_(seed) {
  for (int i = 0; i < 4; ++i) state_[i] = Mix64(seed + (i + 1) * 0x9e3779b97f4a7c15ULL);
}

Rng Rng::Fork(std::string_view name, uint64_t index) const {
  return Rng(Mix64(HashName(seed_, name) + Mix64(index + 0x632be59bd9b4e019ULL)));
}

uint64_t Rng::Next() {
  const uint64_t result = Rotl(state_[1] * 5, 7) * 9;
  const uint64_t t = state_[1] << 17;
  state_[2] ^= state_[0];
  state_[3] ^= state_[1];
  state_[1] ^= state_[2];
  state_[0] ^= state_[3];
  state_[2] ^= t;
  state_[3] = Rotl(state_[3], 45);
  return result;
}

double Rng::Uniform() { return static_cast<double>(Next() >> 11) * 0x1p-53; }

uint64_t Rng::Below(uint64_t n) {
  TEMPER_CHECK(n > 0);
  // Draws beyond the last whole multiple of n would favour small values.
  const uint64_t reject = (0 - n) % n;
  uint64_t x;
  do x = Next();
  while (x < reject);
  return x % n;
}

int64_t Rng::Between(int64_t low, int64_t high) {
  TEMPER_CHECK(low <= high) << low << " > " << high;
  const uint64_t span = static_cast<uint64_t>(high) - static_cast<uint64_t>(low);
  const uint64_t draw = span == UINT64_MAX ? Next() : Below(span + 1);
  return static_cast<int64_t>(static_cast<uint64_t>(low) + draw);
}

double Rng::Normal() {
  // Polar method; the second value is dropped so that the state is the four words alone.
  for (;;) {
    const double u = 2 * Uniform() - 1, v = 2 * Uniform() - 1;
    const double s = u * u + v * v;
    if (s > 0 && s < 1) return u * std::sqrt(-2 * std::log(s) / s);
  }
}

}  // namespace temper
