#include "engine/decode/random.h"

namespace temper::engine {
namespace {

// Finaliser of splitmix64: every input bit reaches every output bit.
uint64_t Mix64(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ull;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

uint64_t HashKey(const SampleKey& key, uint64_t start) {
  uint64_t h = start;
  for (uint64_t word : {key.seed, uint64_t{key.domain}, key.a, key.b, uint64_t{key.call}, uint64_t{key.choice}}) {
    h = Mix64((h + 0x9e3779b97f4a7c15ull) ^ word);
  }
  return h;
}

}  // namespace

std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    uint64_t a = uint64_t{0xD2511F53u} * counter[0];
    uint64_t b = uint64_t{0xCD9E8D57u} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return counter;
}

double UniformAt(const SampleKey& key, int64_t position) {
  // The key has more bits than Philox takes: 64 go to its key, 64 more to the upper half of its counter.
  uint64_t k = HashKey(key, 0x243f6a8885a308d3ull);
  uint64_t c = HashKey(key, 0x13198a2e03707344ull);
  uint64_t p = static_cast<uint64_t>(position);
  std::array<uint32_t, 4> r = Philox4x32({static_cast<uint32_t>(p), static_cast<uint32_t>(p >> 32), static_cast<uint32_t>(c),
                                          static_cast<uint32_t>(c >> 32)},
                                         {static_cast<uint32_t>(k), static_cast<uint32_t>(k >> 32)});
  uint64_t bits = (uint64_t{r[1]} << 32 | r[0]) >> 11;
  return static_cast<double>(bits) * 0x1p-53;
}

}  // namespace temper::engine
