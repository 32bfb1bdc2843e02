// Seeded randomness (xoshiro256**), the same on every machine. Sampling of tokens does not use it: that is a pure function
// of a SampleKey. One Rng belongs to one thread; give each user a fork of its own, so that none changes another's draws.
#pragma once

#include <cstdint>
#include <string_view>
#include <utility>

namespace temper {

// Mixes 64 bits into 64 well spread bits (the finaliser of splitmix64). A bijection.
uint64_t Mix64(uint64_t x);
// A stable hash of bytes under a seed (FNV-1a, then mixed). Not against adversaries.
uint64_t HashName(uint64_t seed, std::string_view name);

class Rng {
 public:
  explicit Rng(uint64_t seed);
  // A generator that depends on this one's seed, the name and the index, and not on what was drawn before.
  Rng Fork(std::string_view name, uint64_t index = 0) const;

  uint64_t Next();
  double Uniform();               // [0, 1), 53 bits
  uint64_t Below(uint64_t n);     // 0..n-1, unbiased; n > 0
  int64_t Between(int64_t low, int64_t high);  // inclusive
  double Normal();                // mean 0, deviation 1
  bool Chance(double p) { return Uniform() < p; }
  template <typename Container>
  void Shuffle(Container& items) {
    for (uint64_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[Below(i)]);
  }
  template <typename Container>
  const auto& Pick(const Container& items) { return items[Below(items.size())]; }

  uint64_t seed() const { return seed_; }

 private:
  uint64_t seed_;
  uint64_t state_[4];
};

}  // namespace temper
