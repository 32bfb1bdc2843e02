#include "trainer/bench/floors.h"

#include <immintrin.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace temper::trainer::bench {
namespace {

// So that no loop is thrown away as useless.
std::atomic<float> sink;

constexpr int kChains = 12;  // more than latency times units of any CPU with these registers

__attribute__((target("avx512f"))) double FmaAvx512(int64_t rounds) {
  __m512 x[kChains];
  for (int i = 0; i < kChains; ++i) x[i] = _mm512_set1_ps(1.0f + static_cast<float>(i));
  const __m512 a = _mm512_set1_ps(0.999999f), b = _mm512_set1_ps(1e-6f);
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) x[i] = _mm512_fmadd_ps(x[i], a, b);
  }
  __m512 sum = x[0];
  for (int i = 1; i < kChains; ++i) sum = _mm512_add_ps(sum, x[i]);
  alignas(64) float lanes[16];
  _mm512_store_ps(lanes, sum);
  sink = lanes[0];
  return static_cast<double>(rounds) * kChains * 16 * 2;
}

__attribute__((target("avx2,fma"))) double FmaAvx2(int64_t rounds) {
  __m256 x[kChains];
  for (int i = 0; i < kChains; ++i) x[i] = _mm256_set1_ps(1.0f + static_cast<float>(i));
  const __m256 a = _mm256_set1_ps(0.999999f), b = _mm256_set1_ps(1e-6f);
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) x[i] = _mm256_fmadd_ps(x[i], a, b);
  }
  __m256 sum = x[0];
  for (int i = 1; i < kChains; ++i) sum = _mm256_add_ps(sum, x[i]);
  sink = _mm256_cvtss_f32(sum);
  return static_cast<double>(rounds) * kChains * 8 * 2;
}

__attribute__((target("avx2"))) void Read(const std::byte* from, size_t bytes) {
  __m256i sum[4] = {};
  for (size_t i = 0; i + 128 <= bytes; i += 128) {
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      sum[k] = _mm256_xor_si256(sum[k], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + 32 * k)));
    }
  }
  const __m256i all = _mm256_xor_si256(_mm256_xor_si256(sum[0], sum[1]), _mm256_xor_si256(sum[2], sum[3]));
  sink = static_cast<float>(_mm256_extract_epi32(all, 0));
}

__attribute__((target("avx512f"))) void ReadWide(const std::byte* from, size_t bytes) {
  __m512i sum[4] = {};
  for (size_t i = 0; i + 256 <= bytes; i += 256) {
    _mm_prefetch(reinterpret_cast<const char*>(from + i + 2048), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(from + i + 2048 + 128), _MM_HINT_T0);
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) sum[k] = _mm512_xor_si512(sum[k], _mm512_loadu_si512(from + i + 64 * k));
  }
  const __m512i all = _mm512_xor_si512(_mm512_xor_si512(sum[0], sum[1]), _mm512_xor_si512(sum[2], sum[3]));
  alignas(64) int lanes[16];
  _mm512_store_si512(lanes, all);
  sink = static_cast<float>(lanes[0]);
}

}  // namespace

double Now(Clock clock) {
  timespec t;
  clock_gettime(clock == Clock::kWall ? CLOCK_MONOTONIC : CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

double PeakFlops(engine::Engine& engine, Clock clock) {
  const bool wide = engine.path() != engine::CpuPath::kAvx2;
  const int threads = engine.threads().count();
  double best = 0;
  for (int repeat = 0; repeat < 4; ++repeat) {
    std::atomic<int64_t> flops{0};
    const double begin = Now(clock);
    engine.threads().Run(threads, [&](int, int) { flops += static_cast<int64_t>(wide ? FmaAvx512(400000) : FmaAvx2(400000)); });
    best = std::max(best, static_cast<double>(flops.load()) / (Now(clock) - begin));
  }
  return best;
}

double ReadBandwidth(engine::Engine& engine, std::span<const std::byte> memory, Clock clock) {
  const bool wide = engine.path() != engine::CpuPath::kAvx2;
  const int threads = engine.threads().count();
  const size_t part = memory.size() / static_cast<size_t>(threads) / 128 * 128;
  double best = 0;
  for (const auto loop : {Read, ReadWide}) {
    if (loop == ReadWide && !wide) continue;
    const double begin = Now(clock);
    engine.threads().Run(threads, [&](int i, int) { loop(memory.data() + static_cast<size_t>(i) * part, part); });
    best = std::max(best, static_cast<double>(part) * threads / (Now(clock) - begin));
  }
  return best;
}

}  // namespace temper::trainer::bench
