// The AMX GEMM on a machine without AMX. What is tested is ours: tiling, tails, transposed A, split reduced axis, accumulators
// kept between stretches; the instructions themselves are emulated.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "engine/engine.h"
#include "tests/engine/amx_emulated.h"

namespace temper::engine {
namespace {

// Could go wrong: a machine with AMX computes other bits, which no machine without it would notice.
TEST(Amx, TheTiledGemmIsThePairDot) {
  const auto available = AvailableCpuPaths();
  if (std::find(available.begin(), available.end(), CpuPath::kAvx512) == available.end()) {
    GTEST_SKIP() << "hardware: the code around the tiles needs AVX-512";
  }
  std::mt19937_64 rng(4);
  std::normal_distribution<float> normal;
  auto engine = Engine::Create({CpuPath::kAvx2, 1});
  ASSERT_TRUE(engine.ok());
  FlushDenormals mode;
  for (int m : {1, 16, 31, 33, 70}) {
    for (int n : {16, 30, 48, 70}) {
      for (int k : {32, 544}) {
        for (int flags = 0; flags < 8; ++flags) {
          const bool transposed = flags & 1, two = (flags & 2) && !transposed, add = flags & 4;
          const int n16 = (n + 15) / 16 * 16;
          std::vector<uint16_t> a(m * k), a2(m * k), b(n16 * k);
          for (auto* v : {&a, &a2, &b}) {
            for (uint16_t& x : *v) {
              const float f = normal(rng);
              uint32_t bits;
              std::memcpy(&bits, &f, 4);
              x = static_cast<uint16_t>(bits >> 16);
            }
          }
          std::vector<float> want(m * n);
          for (float& x : want) x = normal(rng);
          std::vector<float> got(want);
          cpu::Gemm g;
          g.a = a.data();
          g.a_stride = transposed ? m : k;
          g.a_transposed = transposed;
          if (two) g.a2 = a2.data();
          g.b = b.data();
          g.m = m;
          g.n = n;
          g.k = k;
          g.c_stride = n;
          g.add = add;
          g.c = want.data();
          (*engine)->ops(Profile::kBf16).gemm(g);
          g.c = got.data();
          cpu::EmulatedAmxGemm(g);
          ASSERT_EQ(std::memcmp(want.data(), got.data(), want.size() * 4), 0)
              << m << "x" << n << "x" << k << " transposed " << transposed << " two " << two << " add " << add;
        }
      }
    }
  }
}

}  // namespace
}  // namespace temper::engine
