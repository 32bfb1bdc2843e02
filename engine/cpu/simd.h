// Sixteen fp32 lanes, whatever the register width: one 512-bit register or two of 256. Included only by the kernel files, each
// compiled for its own instruction set, inside that file's namespace (so the linker can never mix them). Every operation
// here is exact by IEEE or done on integers; there are no approximate instructions.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace temper::engine::cpu::TEMPER_ISA {

#if defined(__AVX512F__)

struct F {
  __m512 v;
};
static inline F Set(float x) { return {_mm512_set1_ps(x)}; }
static inline F Zero() { return {_mm512_setzero_ps()}; }
static inline F Load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline F LoadN(const float* p, int n) { return {_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p)}; }
static inline void Store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
static inline void StoreN(float* p, F a, int n) { _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), a.v); }
static inline F Add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline F Sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline F Mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline F Div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline F Sqrt(F a) { return {_mm512_sqrt_ps(a.v)}; }
static inline F Fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline F Fnma(F a, F b, F c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
static inline F Max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }  // b when either is NaN
static inline F Min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
static inline F RoundToInt(F a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// x * 2^n for integral n in [-126, 127], by an exact multiplication.
static inline F Pow2(F n) {
  return {_mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23))};
}
// a unless x < limit, then 0 (NaN in x keeps a).
static inline F UnlessLess(F x, F limit, F a) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_NLT_UQ), a.v)};
}
// Lanes [0, n) of a, the others of b.
static inline F FirstN(F a, F b, int n) {
  return {_mm512_mask_blend_ps(static_cast<__mmask16>(n >= 16 ? 0xffff : (1u << n) - 1), b.v, a.v)};
}
static inline float SumTree(F a) {
  __m256 x = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
static inline float MaxTree(F a) {
  __m256 x = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
static inline F LoadBf16(const uint16_t* p) {
  return {_mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16))};
}
static inline __m512i RoundBits(F a) {
  const __m512i u = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i r = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd), 16);
  const __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(0x40));
  return _mm512_mask_mov_epi32(r, _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), quiet);
}
static inline void StoreBf16(uint16_t* p, F a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(RoundBits(a)));
}
static inline F RoundBf16(F a) { return {_mm512_castsi512_ps(_mm512_slli_epi32(RoundBits(a), 16))}; }

#else

struct F {
  __m256 a, b;
};
static inline __m256i MaskN(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
static inline F Set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline F Zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline F Load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline F LoadN(const float* p, int n) {
  return {_mm256_maskload_ps(p, MaskN(n)), n > 8 ? _mm256_maskload_ps(p + 8, MaskN(n - 8)) : _mm256_setzero_ps()};
}
static inline void Store(float* p, F x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
static inline void StoreN(float* p, F x, int n) {
  _mm256_maskstore_ps(p, MaskN(n), x.a);
  if (n > 8) _mm256_maskstore_ps(p + 8, MaskN(n - 8), x.b);
}
static inline F Add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline F Sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline F Mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline F Div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
static inline F Sqrt(F x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
static inline F Fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
static inline F Fnma(F x, F y, F z) { return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)}; }
static inline F Max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline F Min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
static inline F RoundToInt(F x) {
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, kMode), _mm256_round_ps(x.b, kMode)};
}
static inline __m256 Pow2Half(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
static inline F Pow2(F n) { return {Pow2Half(n.a), Pow2Half(n.b)}; }
static inline F UnlessLess(F x, F limit, F y) {
  return {_mm256_and_ps(_mm256_cmp_ps(x.a, limit.a, _CMP_NLT_UQ), y.a),
          _mm256_and_ps(_mm256_cmp_ps(x.b, limit.b, _CMP_NLT_UQ), y.b)};
}
static inline F FirstN(F x, F y, int n) {
  return {_mm256_blendv_ps(y.a, x.a, _mm256_castsi256_ps(MaskN(n))),
          _mm256_blendv_ps(y.b, x.b, _mm256_castsi256_ps(MaskN(n - 8)))};
}
static inline float SumTree(F x) {
  const __m256 h = _mm256_add_ps(x.a, x.b);
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
static inline float MaxTree(F x) {
  const __m256 h = _mm256_max_ps(x.a, x.b);
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
static inline __m256 LoadBf16Half(const uint16_t* p) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
static inline F LoadBf16(const uint16_t* p) { return {LoadBf16Half(p), LoadBf16Half(p + 8)}; }
static inline __m256i RoundBitsHalf(__m256 x) {
  const __m256i u = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i r = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd), 16);
  const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x40));
  return _mm256_blendv_epi8(r, quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
static inline void StoreBf16(uint16_t* p, F x) {
  const __m256i packed = _mm256_packus_epi32(RoundBitsHalf(x.a), RoundBitsHalf(x.b));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
static inline F RoundBf16(F x) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(RoundBitsHalf(x.a), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(RoundBitsHalf(x.b), 16))};
}

#endif

// exp by Taylor's series of degree 7 on |r| <= ln2 / 2 (relative error below 1e-7): exact at 0, 0 below -87.3,
// saturated above 88.3, NaN at NaN.
static inline F Exp(F x) {
  const F low = Set(-87.3f);
  const F y = Min(Set(88.3f), x);  // NaN stays: Min gives its second operand
  const F n = RoundToInt(Mul(Max(low, y), Set(1.44269504088896341f)));
  F r = Fnma(n, Set(0.693145751953125f), y);  // ln2 in two parts; n * the first is exact
  r = Fnma(n, Set(1.42860682030941723e-6f), r);
  F p = Set(1.0f / 5040);
  p = Fma(p, r, Set(1.0f / 720));
  p = Fma(p, r, Set(1.0f / 120));
  p = Fma(p, r, Set(1.0f / 24));
  p = Fma(p, r, Set(1.0f / 6));
  p = Fma(p, r, Set(0.5f));
  p = Fma(p, r, Set(1.0f));
  p = Fma(p, r, Set(1.0f));
  return UnlessLess(x, low, Mul(p, Pow2(n)));
}

}  // namespace temper::engine::cpu::TEMPER_ISA
