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

// kTile rows at a time, `repeats` times, of every line; lines in flight make up for few rows. kAhead: bytes ahead that are asked
// for.
template <int kTile, bool kPairs, int kAhead>
__attribute__((target("avx512f"))) void MultiplyWide(const std::byte* from, size_t bytes, int repeats) {
  constexpr int kLines = kTile >= 8 ? 1 : 8 / kTile;
  __m512 even[kLines][kTile], odd[kLines][kTile];
  for (auto* chains : {&even, &odd}) {
    for (auto& line : *chains) {
      for (__m512& x : line) {
        x = _mm512_setzero_ps();
        asm volatile("" : "+v"(x));  // chains that the compiler knows to be equal would be computed once
      }
    }
  }
  const __m512 a = _mm512_set1_ps(sink);
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  for (size_t i = 0; i + 64 * kLines <= bytes; i += 64 * kLines) {
#pragma GCC unroll 8
    for (int k = 0; k < kLines; ++k) {
      const std::byte* line = from + i + 64 * k;
      if (kAhead) _mm_prefetch(reinterpret_cast<const char*>(line + kAhead), kAhead > 4096 ? _MM_HINT_T1 : _MM_HINT_T0);
      const __m512i w = _mm512_loadu_si512(line);
      const __m512 x = kPairs ? _mm512_castsi512_ps(_mm512_slli_epi32(w, 16)) : _mm512_castsi512_ps(w);
      const __m512 y = _mm512_castsi512_ps(_mm512_and_si512(w, high));
      for (int repeat = 0; repeat < repeats; ++repeat) {
#pragma GCC unroll 8
        for (int r = 0; r < kTile; ++r) {
          even[k][r] = _mm512_fmadd_ps(a, x, even[k][r]);
          if (kPairs) odd[k][r] = _mm512_fmadd_ps(a, y, odd[k][r]);
        }
      }
    }
  }
  __m512 sum = _mm512_setzero_ps();
  for (auto& line : even) for (auto& x : line) sum = _mm512_add_ps(sum, x);
  for (auto& line : odd) for (auto& x : line) sum = _mm512_add_ps(sum, x);
  alignas(64) float lanes[16];
  _mm512_store_ps(lanes, sum);
  sink = lanes[0];
}

template <int kTile, bool kPairs, int kAhead>
__attribute__((target("avx2,fma"))) void Multiply(const std::byte* from, size_t bytes, int repeats) {
  constexpr int kLines = kTile > 1 ? 1 : 2;
  __m256 even[kLines][kTile][2], odd[kLines][kTile][2];
  for (auto* chains : {&even, &odd}) {
    for (auto& line : *chains) {
      for (auto& row : line) {
        for (__m256& x : row) {
          x = _mm256_setzero_ps();
          asm volatile("" : "+x"(x));  // as above
        }
      }
    }
  }
  const __m256 a = _mm256_set1_ps(sink);
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  for (size_t i = 0; i + 64 * kLines <= bytes; i += 64 * kLines) {
#pragma GCC unroll 2
    for (int k = 0; k < kLines; ++k) {
      const std::byte* line = from + i + 64 * k;
      if (kAhead) _mm_prefetch(reinterpret_cast<const char*>(line + kAhead), kAhead > 4096 ? _MM_HINT_T1 : _MM_HINT_T0);
      __m256 x[2], y[2];
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line) + half);
        x[half] = kPairs ? _mm256_castsi256_ps(_mm256_slli_epi32(w, 16)) : _mm256_castsi256_ps(w);
        y[half] = _mm256_castsi256_ps(_mm256_and_si256(w, high));
      }
      for (int repeat = 0; repeat < repeats; ++repeat) {
#pragma GCC unroll 2
        for (int r = 0; r < kTile; ++r) {
#pragma GCC unroll 2
          for (int half = 0; half < 2; ++half) {
            even[k][r][half] = _mm256_fmadd_ps(a, x[half], even[k][r][half]);
            if (kPairs) odd[k][r][half] = _mm256_fmadd_ps(a, y[half], odd[k][r][half]);
          }
        }
      }
    }
  }
  __m256 sum = _mm256_setzero_ps();
  for (auto& line : even) for (auto& x : line) sum = _mm256_add_ps(sum, _mm256_add_ps(x[0], x[1]));
  for (auto& line : odd) for (auto& x : line) sum = _mm256_add_ps(sum, _mm256_add_ps(x[0], x[1]));
  sink = _mm256_cvtss_f32(sum);
}

using MultiplyLoop = void (*)(const std::byte* from, size_t bytes, int repeats);
struct Loop {
  MultiplyLoop run;
  int repeats;
};

template <bool kPairs, int kAhead>
Loop LoopFor(int rows, bool wide) {
  if (!wide) return rows < 2 ? Loop{Multiply<1, kPairs, kAhead>, 1} : Loop{Multiply<2, kPairs, kAhead>, rows / 2};
  if (rows >= 8) return {MultiplyWide<8, kPairs, kAhead>, rows / 8};
  if (rows >= 4) return {MultiplyWide<4, kPairs, kAhead>, 1};
  if (rows == 3) return {MultiplyWide<3, kPairs, kAhead>, 1};
  return rows == 2 ? Loop{MultiplyWide<2, kPairs, kAhead>, 1} : Loop{MultiplyWide<1, kPairs, kAhead>, 1};
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

double ReadAndMultiply(engine::Engine& engine, engine::Profile profile, const std::vector<Stretch>& stretches, Clock clock) {
  const bool wide = engine.path() != engine::CpuPath::kAvx2, pairs = profile == engine::Profile::kBf16;
  const int threads = engine.threads().count();
  double total = 0;
  for (const Stretch& stretch : stretches) {
    const size_t part = stretch.memory.size() / static_cast<size_t>(threads) / 64 * 64;
    double best = 0;
    for (const auto loop_for : {pairs ? LoopFor<true, 0> : LoopFor<false, 0>, pairs ? LoopFor<true, 2048> : LoopFor<false, 2048>,
                                pairs ? LoopFor<true, 16384> : LoopFor<false, 16384>}) {
      const Loop loop = loop_for(stretch.rows, wide);
      const double begin = Now(clock);
      engine.threads().Run(threads, [&](int i, int) {
        loop.run(stretch.memory.data() + static_cast<size_t>(i) * part, part, loop.repeats);
      });
      const double seconds = Now(clock) - begin;
      if (best == 0 || seconds < best) best = seconds;
    }
    total += best;
  }
  return total;
}

}  // namespace temper::trainer::bench
