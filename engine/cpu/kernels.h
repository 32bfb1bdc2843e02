// The kernels, written once over sixteen lanes and compiled per instruction set: each ops_*.cpp defines TEMPER_ISA (a
// namespace), is built with its own compile flags and includes this file. No standard-library templates in here: an inline
// function compiled with wide instructions could be picked by the linker for a machine that lacks them.
#pragma once

#include <cstring>

#include "engine/cpu/ops.h"
#include "engine/cpu/simd.h"

namespace temper::engine::cpu::TEMPER_ISA {
namespace {

// The two element types of docs/numerics.md 2.
struct Bf16 {
  using T = uint16_t;
  static constexpr bool kPairs = true;
  static F LoadE(const T* p) { return LoadBf16(p); }
  static void StoreE(T* p, F x) { StoreBf16(p, x); }
  static F Rounded(F x) { return RoundBf16(x); }
  static float Scalar(T x) {
    const uint32_t u = static_cast<uint32_t>(x) << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
  }
};
struct Fp32 {
  using T = float;
  static constexpr bool kPairs = false;
  static F LoadE(const T* p) { return Load(p); }
  static void StoreE(T* p, F x) { Store(p, x); }
  static F Rounded(F x) { return x; }
  static float Scalar(T x) { return x; }
};

constexpr int Up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }
constexpr int MinInt(int a, int b) { return a < b ? a : b; }

template <class E>
void StoreSome(typename E::T* p, F x, int n) {  // n < 16 lanes
  alignas(64) typename E::T t[16];
  E::StoreE(t, x);
  for (int i = 0; i < n; ++i) p[i] = t[i];
}
template <class E>
void ZeroTail(typename E::T* out, int from, int to) {
  for (int i = from; i < to; ++i) out[i] = 0;
}

// ---- GEMM -----------------------------------------------------------------------------------------------------------------
// A block of A is expanded to fp32 once (row-major with stride kRowStride, or when transposed a tile of rows at a time),
// then a register tile of R rows by one panel runs down the reduced axis. C is kept exactly in fp32 between blocks of 32.

constexpr int kRows = 96;                // rows of A expanded at a time
constexpr int kDepth = 640;              // reduced axis at a time
constexpr int kRowStride = kDepth + 16;  // not a power of two: spreads rows over cache sets

// What a tile asks for, since later ones read it: so many lines of 64 bytes with each block of its own. Never faults.
struct Ahead {
  const char* from;
  int lines;
};
template <class E>
constexpr int kBlockLines = 512 * sizeof(typename E::T) / 64;  // of a panel
template <class E>
inline Ahead WholePanel(const typename E::T* panel) { return {reinterpret_cast<const char*>(panel), kBlockLines<E>}; }
inline void Ask(const char* p) { _mm_prefetch(p, _MM_HINT_T1); }

#if defined(__AVX512F__)

// One panel and no more: each number of A is then the operand of one multiply-add, which broadcasts it as it loads. Sums, even
// and odd chains of eight rows are 24 registers.
template <class E>
constexpr int kTileRows = 8;
constexpr bool kSharesAhead = false;  // the last tile asks for all of the next panel

template <class E, int R, int RS, int KS>
__attribute__((noinline)) void Tile(const float* a, const typename E::T* b, Ahead ahead, int blocks, float* c,
                                    int64_t c_stride, bool start) {
  __m512 sum[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) sum[r] = start ? _mm512_setzero_ps() : _mm512_loadu_ps(c + r * c_stride);
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  for (int block = 0; block < blocks; ++block) {
    __m512 even[R], odd[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) even[r] = odd[r] = _mm512_setzero_ps();
    if constexpr (E::kPairs) {
      for (int i = 0; i < 16; ++i) {
        if (R > 2) Ask(ahead.from + i * 64);  // fewer do little between loads: then the processor alone fetches faster
        const __m512i w = _mm512_loadu_si512(b + i * 32);
        const __m512 x = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
        const __m512 y = _mm512_castsi512_ps(_mm512_and_si512(w, high));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          even[r] = _mm512_fmadd_ps(_mm512_set1_ps(a[r * RS + 2 * i * KS]), x, even[r]);
          odd[r] = _mm512_fmadd_ps(_mm512_set1_ps(a[r * RS + (2 * i + 1) * KS]), y, odd[r]);
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) even[r] = _mm512_add_ps(even[r], odd[r]);
    } else {
      for (int i = 0; i < 32; ++i) {
        Ask(ahead.from + i * 64);
        const __m512 w = _mm512_loadu_ps(b + i * 16);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) even[r] = _mm512_fmadd_ps(_mm512_set1_ps(a[r * RS + i * KS]), w, even[r]);
      }
    }
    a += 32 * KS;
    b += 512;
    ahead.from += kBlockLines<E> * 64;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sum[r] = _mm512_add_ps(sum[r], even[r]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) _mm512_storeu_ps(c + r * c_stride, sum[r]);
}

#else

// Sixteen columns are two registers. Pairs: both chains of three rows are twelve, and all of a block is written out, since a loop of
// sixteen turns costs as much at its end as two of them. Without pairs six rows have one chain each.
template <class E>
constexpr int kTileRows = E::kPairs ? 3 : 6;
constexpr bool kSharesAhead = true;  // each tile asks for its part of the next panel

template <class E, int R, int RS, int KS>
__attribute__((noinline)) void Tile(const float* a, const typename E::T* b, Ahead ahead, int blocks, float* c,
                                    int64_t c_stride, bool start) {
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  for (int block = 0; block < blocks; ++block) {
    if (R > 1) {  // one row: as above
      for (int i = 0; i < ahead.lines; ++i) Ask(ahead.from + i * 64);
      ahead.from += ahead.lines * 64;
    }
    __m256 even[R][2];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) even[r][0] = even[r][1] = _mm256_setzero_ps();
    if constexpr (E::kPairs) {
      __m256 odd[R][2];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) odd[r][0] = odd[r][1] = _mm256_setzero_ps();
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        const auto* w = reinterpret_cast<const __m256i*>(b + i * 32);
        const __m256i low = _mm256_loadu_si256(w), up = _mm256_loadu_si256(w + 1);
        const __m256 x = _mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), y = _mm256_castsi256_ps(_mm256_slli_epi32(up, 16));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const __m256 v = _mm256_broadcast_ss(a + r * RS + 2 * i * KS);
          even[r][0] = _mm256_fmadd_ps(v, x, even[r][0]);
          even[r][1] = _mm256_fmadd_ps(v, y, even[r][1]);
        }
        const __m256 p = _mm256_castsi256_ps(_mm256_and_si256(low, high)), q = _mm256_castsi256_ps(_mm256_and_si256(up, high));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const __m256 v = _mm256_broadcast_ss(a + r * RS + (2 * i + 1) * KS);
          odd[r][0] = _mm256_fmadd_ps(v, p, odd[r][0]);
          odd[r][1] = _mm256_fmadd_ps(v, q, odd[r][1]);
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        even[r][0] = _mm256_add_ps(even[r][0], odd[r][0]);
        even[r][1] = _mm256_add_ps(even[r][1], odd[r][1]);
      }
    } else {
      for (int i = 0; i < 32; ++i) {
        const __m256 x = _mm256_loadu_ps(reinterpret_cast<const float*>(b) + i * 16);
        const __m256 y = _mm256_loadu_ps(reinterpret_cast<const float*>(b) + i * 16 + 8);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const __m256 v = _mm256_broadcast_ss(a + r * RS + i * KS);
          even[r][0] = _mm256_fmadd_ps(v, x, even[r][0]);
          even[r][1] = _mm256_fmadd_ps(v, y, even[r][1]);
        }
      }
    }
    a += 32 * KS;
    b += 512;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      float* to = c + r * c_stride;
      const __m256 first = start ? _mm256_setzero_ps() : _mm256_loadu_ps(to), second = start ? _mm256_setzero_ps() : _mm256_loadu_ps(to + 8);
      _mm256_storeu_ps(to, _mm256_add_ps(first, even[r][0]));
      _mm256_storeu_ps(to + 8, _mm256_add_ps(second, even[r][1]));
    }
    start = false;
  }
}

#endif

template <class E, int RS, int KS, int R = kTileRows<E>>
void TileRows(int rows, const float* a, const typename E::T* b, Ahead ahead, int blocks, float* c,
              int64_t c_stride, bool start) {
  if constexpr (R > 1) {
    if (rows < R) return TileRows<E, RS, KS, R - 1>(rows, a, b, ahead, blocks, c, c_stride, start);
  }
  Tile<E, R, RS, KS>(a, b, ahead, blocks, c, c_stride, start);
}

// Number k of row r is at a[r * RS + k * KS]; with RS = 1 only within a tile of kTileRows<E> rows, of which one follows the other.
template <class E, int RS, int KS>
void RunBlock(const Gemm& g, const float* a, int rows, int k0, int depth, float* c, bool start) {
  const auto* panel = static_cast<const typename E::T*>(g.b) + static_cast<int64_t>(k0) * 16;
  const int64_t b_stride = g.b_stride ? g.b_stride : static_cast<int64_t>(g.k) * 16;
  const int blocks = depth / 32;
  const int tiles = (rows + kTileRows<E> - 1) / kTileRows<E>, tile = RS == 1 ? kTileRows<E> : (rows + tiles - 1) / tiles;
  const int share = (kBlockLines<E> + tiles - 1) / tiles;
  for (int n = 0; n < g.n; n += 16, panel += b_stride) {
    const int columns = MinInt(16, g.n - n);
    for (int r = 0; r < rows; r += tile) {
      const int count = MinInt(tile, rows - r);
      // The next panel is asked for while this one is computed; few rows wait for memory otherwise.
      Ahead ahead = WholePanel<E>(r + tile < rows ? panel : panel + b_stride);
      if (kSharesAhead) {
        const int before = r / tile * share;
        ahead = {reinterpret_cast<const char*>(panel + b_stride) + static_cast<int64_t>(before) * blocks * 64, before < kBlockLines<E> ? share : 0};
      }
      const float* from = a + r * (RS == 1 ? depth : RS);
      float* to = c + r * g.c_stride + n;
      if (columns == 16) {
        TileRows<E, RS, KS>(count, from, panel, ahead, blocks, to, g.c_stride, start);
        continue;
      }
      alignas(64) float edge[kTileRows<E> * 16];
      std::memset(edge, 0, sizeof edge);
      if (!start) {
        for (int i = 0; i < count; ++i) std::memcpy(edge + i * 16, to + i * g.c_stride, columns * sizeof(float));
      }
      TileRows<E, RS, KS>(count, from, panel, ahead, blocks, edge, 16, start);
      for (int i = 0; i < count; ++i) std::memcpy(to + i * g.c_stride, edge + i * 16, columns * sizeof(float));
    }
  }
}

template <class E>
void GemmVector(const Gemm& g) {
  using T = typename E::T;
  alignas(64) float a[kRows * kRowStride];
  constexpr int kFewRows = kTileRows<Fp32>, kFewStride = kRows * kRowStride / kFewRows / 32 * 32, kFewDepth = kFewStride - 32;
  // Chunks of the reduced axis of near-equal length. Few rows read panels whole: one stream of memory.
  const bool few = !g.a_transposed && g.m <= kFewRows;
  const int most = few ? kFewDepth : kDepth;
  const int chunks = (g.k + most - 1) / most;
  const int chunk = chunks ? Up((g.k + chunks - 1) / chunks, 32) : 0;
  bool start = !g.add;
  for (int part = 0; part < (g.a2 ? 2 : 1); ++part) {
    const T* from = static_cast<const T*>(part ? g.a2 : g.a);
    for (int k0 = 0; k0 < g.k; k0 += chunk) {
      const int depth = MinInt(chunk, g.k - k0);
      for (int m0 = 0; m0 < g.m; m0 += kRows) {
        const int rows = MinInt(kRows, g.m - m0);
        float* c = g.c + m0 * g.c_stride;
        if (g.a_transposed) {
          constexpr int kColumns = 16;  // expanded before they are cut, so that no load waits for a store it straddles
          alignas(64) float columns[kColumns][kRows];
          for (int k = 0; k < depth; k += kColumns) {
            for (int j = 0; j < kColumns; ++j) {
              const T* row = from + (k0 + k + j) * g.a_stride + m0;
              int i = 0;
              for (; i + 16 <= rows; i += 16) Store(columns[j] + i, E::LoadE(row + i));
              for (; i < rows; ++i) columns[j][i] = E::Scalar(row[i]);
            }
            for (int i = 0; i < rows; i += kTileRows<E>) {
              float* to = a + i * depth + k * kTileRows<E>;
              for (int j = 0; j < kColumns; ++j) std::memcpy(to + j * kTileRows<E>, columns[j] + i, kTileRows<E> * sizeof(float));
            }
          }
          RunBlock<E, 1, kTileRows<E>>(g, a, rows, k0, depth, c, start);
        } else {
          const int stride = few ? kFewStride : kRowStride;
          for (int r = 0; r < rows; ++r) {
            const T* row = from + (m0 + r) * g.a_stride + k0;
            for (int k = 0; k < depth; k += 16) Store(a + r * stride + k, E::LoadE(row + k));
          }
          if (few) {
            RunBlock<E, kFewStride, 1>(g, a, rows, k0, depth, c, start);
          } else {
            RunBlock<E, kRowStride, 1>(g, a, rows, k0, depth, c, start);
          }
        }
      }
      start = false;
    }
  }
}

#if defined(TEMPER_AMX)
// Tiles of 16 rows by 32 bf16. Rows that do not fill a tile are copied to zeroed scratch; a transposed A is turned there.
struct __attribute__((packed)) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t column_bytes[16] = {};
  uint8_t rows[16] = {};
};

void GemmAmx(const Gemm& g) {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.column_bytes[i] = 64;
    config.rows[i] = 16;
  }
  _tile_loadconfig(&config);
  const int64_t b_stride = g.b_stride ? g.b_stride : static_cast<int64_t>(g.k) * 16;
  alignas(64) uint16_t block[32 * kDepth];
  alignas(64) float c[32 * 32];
  bool start = !g.add;
  for (int part = 0; part < (g.a2 ? 2 : 1); ++part) {
    const auto* from = static_cast<const uint16_t*>(part ? g.a2 : g.a);
    for (int k0 = 0; k0 < g.k; k0 += kDepth) {
      const int depth = MinInt(kDepth, g.k - k0);
      for (int m0 = 0; m0 < g.m; m0 += 32) {
        const int rows = MinInt(32, g.m - m0);
        const uint16_t* a = from + m0 * g.a_stride + k0;
        int64_t a_stride = g.a_stride;
        if (g.a_transposed || rows < 32) {
          std::memset(block, 0, sizeof block);
          for (int r = 0; r < rows; ++r) {
            if (g.a_transposed) {
              for (int k = 0; k < depth; ++k) block[r * kDepth + k] = from[(k0 + k) * g.a_stride + m0 + r];
            } else {
              std::memcpy(block + r * kDepth, a + r * g.a_stride, depth * sizeof(uint16_t));
            }
          }
          a = block;
          a_stride = kDepth;
        }
        for (int n = 0; n < g.n; n += 32) {
          const int columns = MinInt(32, g.n - n);
          const bool two = columns > 16;
          const bool whole = rows == 32 && columns == 32;
          float* to = g.c + m0 * g.c_stride + n;
          float* at = whole ? to : c;
          const int64_t at_stride = whole ? g.c_stride : 32;
          if (start) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
          } else {
            if (!whole) {
              std::memset(c, 0, sizeof c);
              for (int r = 0; r < rows; ++r) std::memcpy(c + r * 32, to + r * g.c_stride, columns * sizeof(float));
            }
            _tile_loadd(0, at, at_stride * 4);
            _tile_loadd(1, at + 16, at_stride * 4);
            _tile_loadd(2, at + 16 * at_stride, at_stride * 4);
            _tile_loadd(3, at + 16 * at_stride + 16, at_stride * 4);
          }
          const auto* b0 = static_cast<const uint16_t*>(g.b) + n / 16 * b_stride + static_cast<int64_t>(k0) * 16;
          const auto* b1 = two ? b0 + b_stride : b0;  // without a second panel its columns are computed and dropped
          for (int k = 0; k < depth; k += 32) {
            _tile_loadd(4, a + k, a_stride * 2);
            _tile_loadd(6, b0 + k * 16, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, b1 + k * 16, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, a + 16 * a_stride + k, a_stride * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
          }
          _tile_stored(0, at, at_stride * 4);
          _tile_stored(1, at + 16, at_stride * 4);
          _tile_stored(2, at + 16 * at_stride, at_stride * 4);
          _tile_stored(3, at + 16 * at_stride + 16, at_stride * 4);
          if (!whole) {
            for (int r = 0; r < rows; ++r) std::memcpy(to + r * g.c_stride, c + r * 32, columns * sizeof(float));
          }
        }
      }
      start = false;
    }
  }
  _tile_release();
}
#endif

template <class E>
void RunColumns(const Gemm& g) {
#if defined(TEMPER_AMX)
  if constexpr (E::kPairs) return GemmAmx(g);
#endif
  GemmVector<E>(g);
}

// Columns of a split head at a time: its panels stay in the second cache until the second stretch has read them too.
constexpr int kColumns = 256;

template <class E>
void RunGemm(const Gemm& g) {
  if (!g.a2) return RunColumns<E>(g);
  const int64_t b_stride = g.b_stride ? g.b_stride : static_cast<int64_t>(g.k) * 16;
  for (int n = 0; n < g.n; n += kColumns) {
    Gemm part = g;
    part.b = static_cast<const typename E::T*>(g.b) + n / 16 * b_stride;
    part.b_stride = b_stride;
    part.n = MinInt(kColumns, g.n - n);
    part.c = g.c + n;
    RunColumns<E>(part);
  }
}

// ---- Rows -----------------------------------------------------------------------------------------------------------------

template <class E>
void RmsNorm(const float* x, const float* gain, float eps, int width, int depth, void* out, void* lo, float* inverse_rms) {
  using T = typename E::T;
  F squares = Zero();
  int i = 0;
  for (; i + 16 <= width; i += 16) {
    const F v = Load(x + i);
    squares = Fma(v, v, squares);
  }
  if (i < width) {
    const F v = LoadN(x + i, width - i);
    squares = Fma(v, v, squares);
  }
  const float mean = SumTree(squares) / static_cast<float>(width);
  const float r = 1.0f / _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(mean + eps)));
  *inverse_rms = r;
  T* to = static_cast<T*>(out);
  T* to_lo = static_cast<T*>(lo);
  const F scale = Set(r);
  for (i = 0; i < width; i += 16) {
    const int n = MinInt(16, width - i);
    const F v = n == 16 ? Load(x + i) : LoadN(x + i, n);
    const F g = n == 16 ? Load(gain + i) : LoadN(gain + i, n);
    const F y = Mul(Mul(v, scale), g);
    if (n == 16) {
      E::StoreE(to + i, y);
      if (to_lo) E::StoreE(to_lo + i, Sub(y, E::Rounded(y)));
    } else {
      StoreSome<E>(to + i, y, n);
      if (to_lo) StoreSome<E>(to_lo + i, Sub(y, E::Rounded(y)), n);
    }
  }
  ZeroTail<E>(to, width, depth);
  if (to_lo) ZeroTail<E>(to_lo, width, depth);
}

void RmsNormBackward(const float* dy, const float* x, const float* gain, float inverse_rms, int width, float* dx) {
  // y = x r g, r = (mean x² + eps)^-1/2:  dx = r (g dy) - x r³/width Σ x g dy.
  F dot = Zero();
  for (int i = 0; i < width; i += 16) {
    const int n = MinInt(16, width - i);
    dot = Fma(Mul(LoadN(dy + i, n), LoadN(gain + i, n)), LoadN(x + i, n), dot);
  }
  const float r = inverse_rms;
  const F factor = Set(SumTree(dot) * (r * r * r) / static_cast<float>(width)), scale = Set(r);
  for (int i = 0; i < width; i += 16) {
    const int n = MinInt(16, width - i);
    const F g = Mul(Mul(LoadN(dy + i, n), LoadN(gain + i, n)), scale);
    StoreN(dx + i, Add(LoadN(dx + i, n), Fnma(LoadN(x + i, n), factor, g)), n);
  }
}

void RmsGainBackward(const float* dy, const float* x, const float* inverse_rms, int rows, int width, int begin, int end,
                     float* dgain) {
  for (int i = begin; i < end; i += 16) {
    const int n = MinInt(16, end - i);
    F sum = LoadN(dgain + i, n);
    for (int r = 0; r < rows; ++r) {
      const int64_t at = static_cast<int64_t>(r) * width + i;
      sum = Fma(LoadN(dy + at, n), Mul(LoadN(x + at, n), Set(inverse_rms[r])), sum);
    }
    StoreN(dgain + i, sum, n);
  }
}

template <class E>
void Rope(const float* x, const float* cos, const float* sin, int head_dim, int depth, void* out) {
  using T = typename E::T;
  T* to = static_cast<T*>(out);
  const int half = head_dim / 2;
  for (int i = 0; i < half; i += 16) {
    const int n = MinInt(16, half - i);
    const F c = LoadN(cos + i, n), s = LoadN(sin + i, n), a = LoadN(x + i, n), b = LoadN(x + half + i, n);
    const F y = Fnma(b, s, Mul(a, c)), z = Fma(a, s, Mul(b, c));
    if (n == 16) {
      E::StoreE(to + i, y);
      E::StoreE(to + half + i, z);
    } else {
      StoreSome<E>(to + i, y, n);
      StoreSome<E>(to + half + i, z, n);
    }
  }
  ZeroTail<E>(to, head_dim, depth);
}

void RopeInverse(float* x, const float* cos, const float* sin, int head_dim) {
  const int half = head_dim / 2;
  for (int i = 0; i < half; i += 16) {
    const int n = MinInt(16, half - i);
    const F c = LoadN(cos + i, n), s = LoadN(sin + i, n), a = LoadN(x + i, n), b = LoadN(x + half + i, n);
    StoreN(x + i, Fma(b, s, Mul(a, c)), n);
    StoreN(x + half + i, Fnma(a, s, Mul(b, c)), n);
  }
}

template <class E>
void Round(const float* x, int n, int depth, void* out) {
  using T = typename E::T;
  T* to = static_cast<T*>(out);
  int i = 0;
  for (; i + 16 <= n; i += 16) E::StoreE(to + i, Load(x + i));
  if (i < n) StoreSome<E>(to + i, LoadN(x + i, n - i), n - i);
  ZeroTail<E>(to, n, depth);
}

void AddTo(float* x, const float* y, int n) {
  int i = 0;
  for (; i + 16 <= n; i += 16) Store(x + i, Add(Load(x + i), Load(y + i)));
  if (i < n) StoreN(x + i, Add(LoadN(x + i, n - i), LoadN(y + i, n - i)), n - i);
}

template <class E>
float DotDelta(const void* d_o, const float* o, int n) {
  using T = typename E::T;
  const T* d = static_cast<const T*>(d_o);  // padded with zeros to 32
  F sum = Zero();
  for (int i = 0; i < n; i += 16) sum = Fma(E::LoadE(d + i), LoadN(o + i, MinInt(16, n - i)), sum);
  return SumTree(sum);
}

inline F Sigmoid(F x) { return Div(Set(1), Add(Set(1), Exp(Sub(Zero(), x)))); }

// What an activation multiplies its input by, and its derivative.
struct Activated {
  F factor, slope;
};
struct Silu {  // x · sigmoid(x)
  static Activated At(F x) {
    const F s = Sigmoid(x);
    return {s, Mul(s, Fma(x, Sub(Set(1), s), Set(1)))};
  }
};
struct Gelu {  // x · sigmoid(2u), u = √(2/π) (x + 0.044715 x³): 1 + tanh(u) without its cancellation
  static Activated At(F x) {
    constexpr float kTwice = 1.5957691216057308f, kCube = 0.044715f;
    const F square = Mul(x, x);
    const F s = Sigmoid(Mul(Mul(x, Set(kTwice)), Fma(square, Set(kCube), Set(1))));
    const F inner = Mul(Set(kTwice), Fma(square, Set(3 * kCube), Set(1)));
    return {s, Fma(Mul(Mul(x, s), Sub(Set(1), s)), inner, s)};
  }
};

template <class E>
void StoreUpTo16(typename E::T* to, F y, int count) {
  if (count == 16) {
    E::StoreE(to, y);
  } else {
    StoreSome<E>(to, y, count);
  }
}

template <class E, class Activation>
void GateMul(const float* gate, const float* up, int n, int depth, void* out) {
  auto* to = static_cast<typename E::T*>(out);
  for (int i = 0; i < n; i += 16) {
    const int count = MinInt(16, n - i);
    const F g = LoadN(gate + i, count);
    StoreUpTo16<E>(to + i, Mul(Mul(g, Activation::At(g).factor), LoadN(up + i, count)), count);
  }
  ZeroTail<E>(to, n, depth);
}

template <class E, class Activation>
void GateMulBackward(const float* gate, const float* up, const float* dact, int n, void* dgate, void* dup) {
  using T = typename E::T;
  for (int i = 0; i < n; i += 16) {
    const int count = MinInt(16, n - i);
    const F g = LoadN(gate + i, count), d = LoadN(dact + i, count);
    const Activated a = Activation::At(g);
    StoreUpTo16<E>(static_cast<T*>(dgate) + i, Mul(Mul(d, LoadN(up + i, count)), a.slope), count);
    StoreUpTo16<E>(static_cast<T*>(dup) + i, Mul(d, Mul(g, a.factor)), count);
  }
}

// Within (-1, 1) Padé's form of order 7 over 6, which keeps the relative error of small arguments; else 2 sigmoid(2x) - 1.
inline F Tanh(F x) {
  const F one = Set(1);
  const F size = Max(x, Sub(Zero(), x)), inside = Max(Set(-1), Min(one, x)), q = Mul(inside, inside);
  const F above = Fma(Fma(Add(q, Set(378)), q, Set(17325)), q, Set(135135));
  const F below = Fma(Fma(Fma(Set(28), q, Set(3150)), q, Set(62370)), q, Set(135135));
  const F small = Div(Mul(inside, above), below), large = Sub(Mul(Set(2), Sigmoid(Mul(Set(2), x))), one);
  return Add(UnlessLess(size, one, large), Sub(small, UnlessLess(size, one, small)));
}

inline F SoftCapped(F x, F cap) { return Mul(cap, Tanh(Div(x, cap))); }

void SoftCap(float* x, float cap, int n) {
  for (int i = 0; i < n; i += 16) {
    const int count = MinInt(16, n - i);
    StoreN(x + i, SoftCapped(LoadN(x + i, count), Set(cap)), count);
  }
}

void SoftCapBackward(float* d, const float* y, float inverse, int n) {
  for (int i = 0; i < n; i += 16) {
    const int count = MinInt(16, n - i);
    const F t = Mul(LoadN(y + i, count), Set(inverse));
    StoreN(d + i, Mul(LoadN(d + i, count), Fnma(t, t, Set(1))), count);
  }
}

template <class E>
void ColumnSums(const void* x, int64_t stride, int rows, int begin, int end, float* sum) {
  using T = typename E::T;
  for (int i = begin; i < end; i += 16) {
    const int n = MinInt(16, end - i);
    const T* from = static_cast<const T*>(x) + i;
    F total = LoadN(sum + i, n);
    alignas(64) T row[16] = {};
    for (int r = 0; r < rows; ++r) {
      std::memcpy(row, from + r * stride, static_cast<size_t>(n) * sizeof(T));
      total = Add(total, E::LoadE(row));
    }
    StoreN(sum + i, total, n);
  }
}

void Scale(float* x, float factor, int n) {
  const F f = Set(factor);
  int i = 0;
  for (; i + 16 <= n; i += 16) Store(x + i, Mul(Load(x + i), f));
  if (i < n) StoreN(x + i, Mul(LoadN(x + i, n - i), f), n - i);
}

// log of a positive normal number: x = m 2^e with m in [0.7, 1.42), log m = 2 atanh((m-1)/(m+1)) by its series.
inline float Log(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) >= 0x7f800000u) return x;  // inf, NaN
  int e = static_cast<int>(bits >> 23) - 127;
  bits = (bits & 0x7fffffu) | 0x3f800000u;
  if (bits > 0x3fb504f3u) {
    bits -= 0x800000u;
    ++e;
  }
  float m;
  std::memcpy(&m, &bits, 4);
  const __m128 s = _mm_set_ss((m - 1.0f) / (m + 1.0f));
  const __m128 q = _mm_mul_ss(s, s);
  __m128 p = _mm_set_ss(2.0f / 9);
  p = _mm_fmadd_ss(p, q, _mm_set_ss(2.0f / 7));
  p = _mm_fmadd_ss(p, q, _mm_set_ss(2.0f / 5));
  p = _mm_fmadd_ss(p, q, _mm_set_ss(2.0f / 3));
  p = _mm_mul_ss(p, q);
  // e ln2 + 2 s + s p, small terms first.
  p = _mm_fmadd_ss(s, p, _mm_mul_ss(_mm_set_ss(static_cast<float>(e)), _mm_set_ss(1.42860682030941723e-6f)));
  p = _mm_fmadd_ss(s, _mm_set_ss(2), p);
  return _mm_cvtss_f32(_mm_fmadd_ss(_mm_set_ss(static_cast<float>(e)), _mm_set_ss(0.693145751953125f), p));
}

constexpr int kVocabTile = 256;

float LogSumExp(const float* x, int n) {
  float max = -__builtin_inff(), sum = 0;
  for (int t = 0; t < n; t += kVocabTile) {
    const int count = MinInt(kVocabTile, n - t);
    const float* p = x + t;
    F m = Set(-__builtin_inff());
    int i = 0;
    for (; i + 16 <= count; i += 16) m = Max(m, Load(p + i));
    if (i < count) m = Max(m, FirstN(LoadN(p + i, count - i), m, count - i));
    const float tile_max = MaxTree(m);
    const float new_max = tile_max > max ? tile_max : max;
    const F shift = Set(new_max);
    F s = Zero();
    for (i = 0; i + 16 <= count; i += 16) s = Add(s, Exp(Sub(Load(p + i), shift)));
    if (i < count) s = Add(s, FirstN(Exp(Sub(LoadN(p + i, count - i), shift)), Zero(), count - i));
    alignas(64) float old[16];
    Store(old, Exp(Set(max - new_max)));
    sum = _mm_cvtss_f32(_mm_fmadd_ss(_mm_set_ss(sum), _mm_set_ss(old[0]), _mm_set_ss(SumTree(s))));
    max = new_max;
  }
  return max + Log(sum);
}

void SoftmaxScaled(float* logits, float log_sum_exp, float factor, int n) {
  const F shift = Set(log_sum_exp), f = Set(factor);
  for (int i = 0; i < n; i += 16) {
    const int count = MinInt(16, n - i);
    StoreN(logits + i, Mul(f, Exp(Sub(LoadN(logits + i, count), shift))), count);
  }
}

// ---- Packing --------------------------------------------------------------------------------------------------------------

template <class E>
void PackRows(const void* x, int64_t stride, int rows, int cols, int rows_padded, int begin, int end, void* panel) {
  using T = typename E::T;
  const T* from = static_cast<const T*>(x);
  for (int c0 = begin; c0 < end; c0 += 16) {
    T* out = static_cast<T*>(panel) + static_cast<int64_t>(c0) * rows_padded;
    const int n = MinInt(16, cols - c0);
    if constexpr (E::kPairs) {
      int r = 0;
      if (n == 16) {
        for (; r + 2 <= rows; r += 2) {
          const auto lo = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + r * stride + c0));
          const auto hi = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + (r + 1) * stride + c0));
          const __m256i a = _mm256_unpacklo_epi16(lo, hi), b = _mm256_unpackhi_epi16(lo, hi);
          auto* to = reinterpret_cast<__m256i*>(out + r * 16);
          _mm256_storeu_si256(to, _mm256_permute2x128_si256(a, b, 0x20));
          _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(a, b, 0x31));
        }
      }
      for (; r < rows_padded; r += 2) {
        for (int i = 0; i < 16; ++i) {
          out[r * 16 + 2 * i] = r < rows && i < n ? from[r * stride + c0 + i] : 0;
          out[r * 16 + 2 * i + 1] = r + 1 < rows && i < n ? from[(r + 1) * stride + c0 + i] : 0;
        }
      }
    } else {
      for (int r = 0; r < rows_padded; ++r) {
        for (int i = 0; i < 16; ++i) out[r * 16 + i] = r < rows && i < n ? from[r * stride + c0 + i] : 0;
      }
    }
  }
}

template <class E>
void TransposePanel(const void* panel, int n16, int k, int n_padded, int begin, int end, void* out) {
  using T = typename E::T;
  for (int k0 = begin; k0 < end; k0 += 16) {
    T* to = static_cast<T*>(out) + static_cast<int64_t>(k0) * n_padded;
    for (int n0 = 0; n0 < n16; n0 += 16, to += 256) {
      const T* from = static_cast<const T*>(panel) + static_cast<int64_t>(n0) * k + k0 * 16;
      if constexpr (E::kPairs) {
        // Two neighbouring words hold a 2 x 2 block: (n, k) (n, k+1) (n+1, k) (n+1, k+1). Turned, it is two words again.
        for (int pair = 0; pair < 8; ++pair) {
          for (int n = 0; n < 16; n += 4) {
            __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + pair * 32 + n * 2));
            x = _mm_shufflehi_epi16(_mm_shufflelo_epi16(x, 0xd8), 0xd8);
            _mm_storel_epi64(reinterpret_cast<__m128i*>(to + n * 16 + pair * 4), x);
            _mm_storeh_pd(reinterpret_cast<double*>(to + (n + 2) * 16 + pair * 4), _mm_castsi128_pd(x));
          }
        }
      } else {
        for (int n = 0; n < 16; ++n) {
          for (int i = 0; i < 16; ++i) to[n * 16 + i] = from[i * 16 + n];
        }
      }
    }
    std::memset(to, 0, static_cast<size_t>(n_padded - n16) * 16 * sizeof(T));
  }
}

// ---- Optimizer ------------------------------------------------------------------------------------------------------------

void AdamW(const AdamWUpdate& u) {
  const F clip = Set(u.clip), beta1 = Set(u.beta1), rest1 = Set(u.rest1), beta2 = Set(u.beta2), rest2 = Set(u.rest2);
  const F rate = Set(u.rate), root = Set(u.root), eps = Set(u.eps), shrink = Set(u.shrink);
  for (int64_t i = 0; i < u.n; i += 16) {
    const int here = u.n - i < 16 ? static_cast<int>(u.n - i) : 16;
    const auto load = [&](const float* x) { return here == 16 ? Load(x + i) : LoadN(x + i, here); };
    const auto store = [&](float* x, F y) { here == 16 ? Store(x + i, y) : StoreN(x + i, y, here); };
    const F g = Mul(load(u.g), clip);
    const F m = Add(Mul(beta1, load(u.m)), Mul(rest1, g));
    const F v = Add(Mul(beta2, load(u.v)), Mul(rest2, Mul(g, g)));
    store(u.m, m);
    store(u.v, v);
    store(u.p, Sub(Mul(load(u.p), shrink), Mul(rate, Div(m, Add(Mul(Sqrt(v), root), eps)))));
  }
}

double SumOfSquares(const float* x, int64_t n) {
  alignas(64) double lanes[8];
#if defined(__AVX512F__)
  __m512d sum = _mm512_setzero_pd();
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m512d y = _mm512_cvtps_pd(_mm256_loadu_ps(x + i));
    sum = _mm512_fmadd_pd(y, y, sum);  // the square of a float is exact in double
  }
  _mm512_store_pd(lanes, sum);
#else
  __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256d y = _mm256_cvtps_pd(_mm_loadu_ps(x + i)), z = _mm256_cvtps_pd(_mm_loadu_ps(x + i + 4));
    low = _mm256_fmadd_pd(y, y, low);
    high = _mm256_fmadd_pd(z, z, high);
  }
  _mm256_store_pd(lanes, low);
  _mm256_store_pd(lanes + 4, high);
#endif
  for (; i < n; ++i) lanes[i & 7] += static_cast<double>(x[i]) * x[i];
  double total = 0;
  for (double lane : lanes) total += lane;
  return total;
}

// ---- Attention ------------------------------------------------------------------------------------------------------------

template <class T>
T* Take(std::byte*& scratch, size_t count) {
  T* p = reinterpret_cast<T*>(scratch);
  scratch += (count * sizeof(T) + 63) / 64 * 64;
  return p;
}

// How many of a page's 64 keys a row at `position` sees.
inline int Visible(int position, int first_key) {
  const int n = position - first_key + 1;
  return n < 0 ? 0 : n > 64 ? 64 : n;
}

// How many of a page's 64 keys lie before the window of a row at `position`.
inline int Passed(int position, int first_key, int window) {
  if (window == 0) return 0;
  const int n = position - window + 1 - first_key;
  return n < 0 ? 0 : n > 64 ? 64 : n;
}

// b in lanes [0, n), n of any sign, else a.
inline F WithoutFirst(F a, F b, int n) { return n <= 0 ? a : FirstN(b, a, n); }

// Few rows a page means waiting for memory: ask for the next stretch while this one is computed.
inline void Prefetch(const std::byte* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch(reinterpret_cast<const char*>(p + i), _MM_HINT_T0);
}

// What rows are in a product of attention: made once instead of in each.
#if defined(TEMPER_AMX)
template <class E>
constexpr bool kOnTiles = E::kPairs;
#else
template <class E>
constexpr bool kOnTiles = false;
#endif
template <class E, bool kTiles>
struct Operand {  // numbers of E, as a tile loads them
  using A = typename E::T;
  static void Store(A* p, F x) { E::StoreE(p, x); }
};
template <class E>
struct Operand<E, false> {  // the same numbers in fp32
  using A = float;
  static void Store(A* p, F x) { cpu::TEMPER_ISA::Store(p, E::Rounded(x)); }
};

// C [rows][n] = rows A, RS numbers apart, times panels; at most kTileRows<E> of them where there are no tiles. `ahead` (a line for each line
// of B) is asked for meanwhile.
template <class E, int RS>
void AttentionProduct(int rows, const typename Operand<E, kOnTiles<E>>::A* a, const typename E::T* b, int64_t b_stride,
                      const typename E::T* ahead, int n, int k, float* c, int64_t c_stride) {
#if defined(TEMPER_AMX)
  if constexpr (kOnTiles<E>) {
    Gemm g;
    g.a = a;
    g.a_stride = RS;
    g.b = b;
    g.b_stride = b_stride;
    g.m = rows;
    g.n = n;
    g.k = k;
    g.c = c;
    g.c_stride = c_stride;
    return GemmAmx(g);
  } else
#endif
  {
    for (int i = 0; i < n; i += 16, b += b_stride, ahead += b_stride) {
      TileRows<E, RS, 1>(rows, a, b, WholePanel<E>(ahead), k / 32, c + i, c_stride, /*start=*/true);
    }
  }
}

template <class E, int QS>  // QueryStride
void AttendForwardAt(const AttentionForward& a) {
  using T = typename E::T;
  using Operands = Operand<E, kOnTiles<E>>;
  using A = typename Operands::A;
  const int rows = a.tokens * a.group, depth = Up(a.head_dim, 32), width = Up(a.head_dim, 16);
  std::byte* scratch = a.scratch;
  A* q = Take<A>(scratch, static_cast<size_t>(rows) * QS);
  float* o = Take<float>(scratch, static_cast<size_t>(rows) * width);
  // Few rows at a time go through both products and the softmax between them, and with the page stay in the first cache.
  const int most = kOnTiles<E> ? rows : MinInt(rows, kTileRows<E>);
  float* s = Take<float>(scratch, static_cast<size_t>(most) * 64);
  A* p = Take<A>(scratch, static_cast<size_t>(most) * 64);
  float* pv = Take<float>(scratch, static_cast<size_t>(most) * width);
  float* alpha = Take<float>(scratch, most);
  float* max = a.row_max;
  float* sum = a.row_inverse_sum;
  for (int t = 0; t < a.tokens; ++t) {
    for (int h = 0; h < a.group; ++h) {
      const T* from = static_cast<const T*>(a.q) + t * a.q_stride + static_cast<int64_t>(h) * depth;
      A* to = q + (static_cast<int64_t>(t) * a.group + h) * QS;
      for (int i = 0; i < depth; i += 16) Operands::Store(to + i, E::LoadE(from + i));
    }
  }
  for (int r = 0; r < rows; ++r) {
    max[r] = -__builtin_inff();
    sum[r] = 0;
  }
  std::memset(o, 0, static_cast<size_t>(rows) * width * sizeof(float));
  const int last = a.first_position + a.tokens - 1;
  const F scale = Set(a.scale), minus_inf = Set(-__builtin_inff());
  const F factor = a.cap != 0 ? Set(1) : scale;  // capped scores are scaled before
  const int first_page = a.window && a.first_position >= a.window ? (a.first_position - a.window + 1) / 64 : 0;
  for (int page = first_page; page * 64 <= last; ++page) {
    const int first_key = page * 64;
    // Rows before the first that sees the page would be left as they are, and so are rows whose window has passed it.
    const int first_token = a.first_position >= first_key ? 0 : first_key - a.first_position;
    const int end_token = a.window ? MinInt(a.tokens, first_key + 63 + a.window - a.first_position) : a.tokens;
    const int first_row = first_token * a.group, end_row = end_token * a.group;
    const int64_t offset = a.pages[page] * a.page_bytes;
    const auto* keys = reinterpret_cast<const T*>(a.keys + offset);
    const auto* values = reinterpret_cast<const T*>(a.values + offset);
    // What is read after these values. The first rows ask for the values and the last ones for that, line by line.
    const std::byte* after = (page + 1) * 64 <= last ? a.keys + a.pages[page + 1] * a.page_bytes : a.next;
    if (rows <= 2) {  // for them Tile asks for nothing
      Prefetch(a.values + offset, static_cast<int64_t>(width) * 64 * sizeof(T));
      if (after) Prefetch(after, static_cast<int64_t>(depth) * 64 * sizeof(T));
    }
    const int steps = (end_row - first_row + most - 1) / most, step = steps > 0 ? (end_row - first_row + steps - 1) / steps : most;
    for (int begin = first_row; begin < end_row; begin += step) {
      const int count = MinInt(step, end_row - begin);
      const int seen = Visible(a.first_position + (begin + count - 1) / a.group, first_key);
      const int span = seen > 32 ? 64 : 32;  // a block of zero probabilities adds +0: skipping it is exact
      AttentionProduct<E, QS>(count, q + static_cast<int64_t>(begin) * QS, keys, static_cast<int64_t>(depth) * 16,
                              begin == first_row ? values : keys, Up(seen, 16), depth, s, 64);
      for (int i = 0; i < count; ++i) {
        const int r = begin + i, position = a.first_position + r / a.group;
        const int n = Visible(position, first_key), passed = Passed(position, first_key, a.window);
        float* row = s + i * 64;
        if (a.cap != 0) {
          for (int j = 0; j < n; j += 16) Store(row + j, SoftCapped(Mul(Load(row + j), scale), Set(a.cap)));
        }
        F v[4];
        if (n == 64 && !passed) {
          for (int j = 0; j < 4; ++j) v[j] = Mul(Load(row + 16 * j), factor);
        } else {
          for (int j = 0; j < 4; ++j) {
            const int here = n - 16 * j;
            v[j] = here <= 0 ? minus_inf : FirstN(Mul(Load(row + 16 * j), factor), minus_inf, here);
            if (passed) v[j] = WithoutFirst(v[j], minus_inf, passed - 16 * j);
          }
        }
        const float page_max = MaxTree(Max(Max(v[0], v[1]), Max(v[2], v[3])));
        const float new_max = page_max > max[r] ? page_max : max[r];
        const F shift = Set(new_max);
        A* out = p + i * 64;
        F e[4];
        for (int j = 0; j < 4; ++j) {
          e[j] = n > 16 * j ? Exp(Sub(v[j], shift)) : Zero();
          if (16 * j < span) Operands::Store(out + 16 * j, e[j]);
        }
        if (new_max == max[r] && new_max > -__builtin_inff()) {
          alpha[i] = 1;  // exp(0)
        } else {
          alignas(64) float first[16];
          Store(first, Exp(Set(max[r] - new_max)));
          alpha[i] = first[0];
        }
        sum[r] = _mm_cvtss_f32(_mm_fmadd_ss(_mm_set_ss(sum[r]), _mm_set_ss(alpha[i]),
                                            _mm_set_ss(SumTree(Add(Add(e[0], e[1]), Add(e[2], e[3]))))));
        max[r] = new_max;
      }
      const auto* ahead = begin + step >= end_row && after ? reinterpret_cast<const T*>(after) : values;
      AttentionProduct<E, 64>(count, p, values, 64 * 16, ahead, width, span, pv, width);
      for (int i = 0; i < count; ++i) {
        const F f = Set(alpha[i]);
        float* to = o + static_cast<int64_t>(begin + i) * width;
        const float* from = pv + static_cast<int64_t>(i) * width;
        // + 0 makes -0 of either origin +0: masked keys then leave no trace, not even a sign.
        for (int j = 0; j < width; j += 16) Store(to + j, Fma(Load(to + j), f, Add(Load(from + j), Zero())));
      }
    }
  }
  for (int t = 0; t < a.tokens; ++t) {
    for (int h = 0; h < a.group; ++h) {
      const int r = t * a.group + h;
      sum[r] = 1.0f / sum[r];
      const F f = Set(sum[r]);
      float* to = a.o + t * a.o_stride + h * a.head_dim;
      const float* from = o + static_cast<int64_t>(r) * width;
      for (int i = 0; i < a.head_dim; i += 16) {
        const F y = Mul(Add(Load(from + i), Zero()), f);
        const int n = MinInt(16, a.head_dim - i);
        if (n == 16) {
          Store(to + i, y);
        } else {
          StoreN(to + i, y, n);
        }
      }
    }
  }
}

template <class E>
void AttendForward(const AttentionForward& a) {
  switch (QueryStride(a.head_dim)) {
    case 64: return AttendForwardAt<E, 64>(a);
    case 128: return AttendForwardAt<E, 128>(a);
    case 256: return AttendForwardAt<E, 256>(a);
    default: return AttendForwardAt<E, QueryStride(1024)>(a);
  }
}

template <class E>
void AttendBackward(const AttentionBackward& a) {
  using T = typename E::T;
  const int depth = Up(a.head_dim, 32), width = Up(a.head_dim, 16), padded = Up(a.rows, 32);
  std::byte* scratch = a.scratch;
  float* s = Take<float>(scratch, static_cast<size_t>(a.rows) * 64);
  float* dp = Take<float>(scratch, static_cast<size_t>(a.rows) * 64);
  T* p = Take<T>(scratch, static_cast<size_t>(padded) * 64);
  T* ds = Take<T>(scratch, static_cast<size_t>(padded) * 64);
  const int tokens = a.rows / a.group;
  const int seen = Visible(a.first_position + tokens - 1, a.first_key);
  const int columns = Up(seen, 16), span = seen > 32 ? 64 : 32;
  Gemm g;
  g.a = a.q;
  g.a_stride = depth;
  g.b = a.keys;
  g.m = a.rows;
  g.n = columns;
  g.k = depth;
  g.c = s;
  g.c_stride = 64;
  RunGemm<E>(g);
  g.a = a.d_o;
  g.b = a.values_by_key;
  g.c = dp;
  RunGemm<E>(g);
  const F scale = Set(a.scale);
  for (int r = 0; r < a.rows; ++r) {
    const int position = a.first_position + r / a.group;
    const int n = Visible(position, a.first_key), passed = Passed(position, a.first_key, a.window);
    const F max = Set(a.row_max[r]), inverse = Set(a.row_inverse_sum[r]), delta = Set(a.delta[r]);
    for (int i = 0; i < 4; ++i) {
      const int at = r * 64 + 16 * i, here = n - 16 * i;
      if (here <= 0) {
        E::StoreE(p + at, Zero());
        E::StoreE(ds + at, Zero());
        continue;
      }
      F score = Mul(Load(s + at), scale), slope = scale;
      if (a.cap != 0) {
        const F cap = Set(a.cap), t = Tanh(Div(score, cap));
        score = Mul(cap, t);
        slope = Mul(scale, Fnma(t, t, Set(1)));
      }
      F y = FirstN(Mul(Exp(Sub(score, max)), inverse), Zero(), here);
      F d = FirstN(Mul(Mul(y, Sub(Load(dp + at), delta)), slope), Zero(), here);
      if (passed) {
        y = WithoutFirst(y, Zero(), passed - 16 * i);
        d = WithoutFirst(d, Zero(), passed - 16 * i);
      }
      E::StoreE(p + at, y);
      E::StoreE(ds + at, d);
    }
  }
  for (int i = a.rows * 64; i < padded * 64; ++i) p[i] = ds[i] = 0;
  Gemm h;  // dK += dSᵀ Q, dV += Pᵀ dO: the rows are the reduced axis
  h.a = ds;
  h.a_stride = 64;
  h.a_transposed = true;
  h.b = a.q_panel;
  h.m = seen;
  h.n = width;
  h.k = padded;
  h.c = a.dk;
  h.c_stride = width;
  h.add = true;
  RunGemm<E>(h);
  h.a = p;
  h.b = a.d_o_panel;
  h.c = a.dv;
  RunGemm<E>(h);
  Gemm d;  // dQ += dS K
  d.a = ds;
  d.a_stride = 64;
  d.b = a.keys_by_dim;
  d.b_stride = 64 * 16;
  d.m = a.rows;
  d.n = width;
  d.k = span;
  d.c = a.dq;
  d.c_stride = width;
  d.add = true;
  RunGemm<E>(d);
}

template <class E>
constexpr Ops MakeOps(const char* name) {
  return {name,
          sizeof(typename E::T),
          RunGemm<E>,
          AttendForward<E>,
          AttendBackward<E>,
          RmsNorm<E>,
          RmsNormBackward,
          RmsGainBackward,
          Rope<E>,
          RopeInverse,
          Round<E>,
          AddTo,
          DotDelta<E>,
          GateMul<E, Silu>,
          GateMulBackward<E, Silu>,
          GateMul<E, Gelu>,
          GateMulBackward<E, Gelu>,
          SoftCap,
          SoftCapBackward,
          ColumnSums<E>,
          Scale,
          LogSumExp,
          SoftmaxScaled,
          AdamW,
          SumOfSquares,
          PackRows<E>,
          TransposePanel<E>,
          kOnTiles<E> ? 192 : 16};
}

constexpr Ops kBf16Ops = MakeOps<Bf16>(TEMPER_ISA_NAME);
constexpr Ops kFp32Ops = MakeOps<Fp32>(TEMPER_ISA_NAME);

}  // namespace
}  // namespace temper::engine::cpu::TEMPER_ISA
