// Builds the AMX kernels with their tile instructions replaced by functions that do what docs/numerics.md 1 says they do
// (measured there, bit for bit, on a machine that has them). Compiled for AVX-512 like the file it stands for.
#include "tests/engine/amx_emulated.h"

#include <immintrin.h>

#include <cmath>
#include <cstring>

namespace {

struct EmulatedTiles {
  uint32_t words[8][16][16];
};
thread_local EmulatedTiles tiles;

void TileZero(int t) { std::memset(tiles.words[t], 0, sizeof tiles.words[t]); }
void TileLoad(int t, const void* from, int64_t stride) {
  for (int r = 0; r < 16; ++r) std::memcpy(tiles.words[t][r], static_cast<const char*>(from) + r * stride, 64);
}
void TileStore(int t, void* to, int64_t stride) {
  for (int r = 0; r < 16; ++r) std::memcpy(static_cast<char*>(to) + r * stride, tiles.words[t][r], 64);
}
float AsFloat(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
void TileDot(int c, int a, int b) {
  for (int m = 0; m < 16; ++m) {
    for (int n = 0; n < 16; ++n) {
      float even = 0, odd = 0;
      for (int i = 0; i < 16; ++i) {
        const uint32_t x = tiles.words[a][m][i], y = tiles.words[b][i][n];
        even = std::fma(AsFloat(x << 16), AsFloat(y << 16), even);
        odd = std::fma(AsFloat(x & 0xffff0000u), AsFloat(y & 0xffff0000u), odd);
      }
      const float sum = AsFloat(tiles.words[c][m][n]) + (even + odd);
      std::memcpy(&tiles.words[c][m][n], &sum, 4);
    }
  }
}

}  // namespace

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) static_cast<void>(config)
#define _tile_release() static_cast<void>(0)
#define _tile_zero(t) TileZero(t)
#define _tile_loadd(t, from, stride) TileLoad(t, from, stride)
#define _tile_stored(t, to, stride) TileStore(t, to, stride)
#define _tile_dpbf16ps(c, a, b) TileDot(c, a, b)
#define TEMPER_ISA amx_emulated
#define TEMPER_ISA_NAME "amx (emulated)"
#define TEMPER_AMX 1
#include "engine/cpu/kernels.h"

namespace temper::engine::cpu {

void EmulatedAmxGemm(const Gemm& g) { amx_emulated::GemmAmx(g); }
const Ops& EmulatedAmxOps(bool bf16) { return bf16 ? amx_emulated::kBf16Ops : amx_emulated::kFp32Ops; }

}  // namespace temper::engine::cpu
