#include "tests/engine/scalar_ops.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "engine/bf16.h"
#include "tests/engine/scalar_math.h"

namespace temper::engine {
namespace {

struct Bf16 {
  using T = uint16_t;
  static constexpr bool kPairs = true;
  static float Get(T x) { return FromBf16(x); }
  static T Put(float x) { return ToBf16(x); }
};
struct Fp32 {
  using T = float;
  static constexpr bool kPairs = false;
  static float Get(T x) { return x; }
  static T Put(float x) { return x; }
};

using namespace scalar;

enum class Order { kDefined, kSequential };

// Element k of column n of a panel whose stretch of 16 columns is `stride` elements long.
template <class E>
float PanelAt(const void* panel, int64_t stride, int n, int k) {
  const auto* p = static_cast<const typename E::T*>(panel) + n / 16 * stride;
  return E::Get(E::kPairs ? p[k / 2 * 32 + n % 16 * 2 + k % 2] : p[static_cast<int64_t>(k) * 16 + n % 16]);
}

template <class E, Order order, class A, class B>
float Dot(A a, B b, int k, float c) {
  if (order == Order::kSequential) {
    for (int i = 0; i < k; ++i) c = Fma(a(i), b(i), c);
    return c;
  }
  for (int block = 0; block < k; block += 32) {
    float even = 0, odd = 0;
    if (E::kPairs) {
      for (int i = block; i < block + 32; i += 2) {
        even = Fma(a(i), b(i), even);
        odd = Fma(a(i + 1), b(i + 1), odd);
      }
      c = c + (even + odd);
    } else {
      for (int i = block; i < block + 32; ++i) even = Fma(a(i), b(i), even);
      c = c + even;
    }
  }
  return c;
}

template <class E, Order order>
void Multiply(const cpu::Gemm& g) {
  const int64_t stride = g.b_stride ? g.b_stride : static_cast<int64_t>(g.k) * 16;
  for (int m = 0; m < g.m; ++m) {
    for (int n = 0; n < g.n; ++n) {
      float& c = g.c[m * g.c_stride + n];
      float sum = g.add ? c : 0;
      for (const void* from : {g.a, g.a2}) {
        if (!from) continue;
        const auto* a = static_cast<const typename E::T*>(from);
        const auto a_at = [&](int k) {
          return E::Get(g.a_transposed ? a[k * g.a_stride + m] : a[m * g.a_stride + k]);
        };
        sum = Dot<E, order>(
            a_at, [&](int k) { return PanelAt<E>(g.b, stride, n, k); }, g.k, sum);
      }
      c = sum;
    }
  }
}

template <class E>
void RmsNorm(const float* x, const float* gain, float eps, int width, int depth, void* out, void* lo,
             float* inverse_rms) {
  float lanes[16] = {};
  for (int i = 0; i < width; ++i) lanes[i % 16] = Fma(x[i], x[i], lanes[i % 16]);
  const float r = 1.0f / std::sqrt(Tree(lanes) / static_cast<float>(width) + eps);
  *inverse_rms = r;
  for (int i = 0; i < depth; ++i) {
    const float y = i < width ? x[i] * r * gain[i] : 0;
    const auto high = E::Put(y);
    static_cast<typename E::T*>(out)[i] = high;
    if (lo) static_cast<typename E::T*>(lo)[i] = E::Put(y - E::Get(high));
  }
}

template <class E>
void Rope(const float* x, const float* cos, const float* sin, int head_dim, int depth, void* out) {
  auto* to = static_cast<typename E::T*>(out);
  const int half = head_dim / 2;
  for (int i = 0; i < half; ++i) {
    to[i] = E::Put(Fma(-x[half + i], sin[i], x[i] * cos[i]));
    to[half + i] = E::Put(Fma(x[i], sin[i], x[half + i] * cos[i]));
  }
  std::fill(to + head_dim, to + depth, typename E::T{});
}

template <class E>
void Round(const float* x, int n, int depth, void* out) {
  auto* to = static_cast<typename E::T*>(out);
  for (int i = 0; i < depth; ++i) to[i] = i < n ? E::Put(x[i]) : typename E::T{};
}

void AddTo(float* x, const float* y, int n) {
  for (int i = 0; i < n; ++i) x[i] = x[i] + y[i];
}

template <class E>
void SiluMul(const float* gate, const float* up, int n, int depth, void* out) {
  auto* to = static_cast<typename E::T*>(out);
  for (int i = 0; i < depth; ++i)
    to[i] = i < n ? E::Put(gate[i] * Sigmoid(gate[i]) * up[i]) : typename E::T{};
}

template <class E>
void GeluMul(const float* gate, const float* up, int n, int depth, void* out) {
  auto* to = static_cast<typename E::T*>(out);
  for (int i = 0; i < depth; ++i) {
    const float x = i < n ? gate[i] : 0;
    const float s = Sigmoid(x * 1.5957691216057308f * Fma(x * x, 0.044715f, 1));
    to[i] = i < n ? E::Put(x * s * up[i]) : typename E::T{};
  }
}

void SoftCap(float* x, float cap, int n) {
  for (int i = 0; i < n; ++i) x[i] = cap * Tanh(x[i] / cap);
}

void Scale(float* x, float factor, int n) {
  for (int i = 0; i < n; ++i) x[i] = x[i] * factor;
}

float LogSumExp(const float* x, int n) {
  float max = -INFINITY, sum = 0;
  for (int t = 0; t < n; t += 256) {
    const int end = std::min(n, t + 256);
    const float m = std::max(max, *std::max_element(x + t, x + end));
    float lanes[16] = {};
    for (int i = t; i < end; ++i) lanes[i % 16] = lanes[i % 16] + Exp(x[i] - m);
    sum = Fma(sum, Exp(max - m), Tree(lanes));
    max = m;
  }
  return max + Log(sum);
}

// `aligned`: tiles of 64 keys from position 0; else from the first query's position, downwards and upwards.
template <class E, Order order, bool aligned>
void Attend(const cpu::AttentionForward& a) {
  using T = typename E::T;
  const int depth = (a.head_dim + 31) / 32 * 32;
  const int64_t values_stride = 64 * 16;
  const auto key = [&](int position, int d) {
    return PanelAt<E>(a.keys + a.pages[position / 64] * a.page_bytes, static_cast<int64_t>(depth) * 16,
                      position % 64, d);
  };
  const auto value = [&](int position, int d) {
    return PanelAt<E>(a.values + a.pages[position / 64] * a.page_bytes, values_stride, d, position % 64);
  };
  const int shift = aligned ? 0 : a.first_position % 64;
  for (int r = 0; r < a.tokens * a.group; ++r) {
    const int position = a.first_position + r / a.group;
    const auto* q = static_cast<const T*>(a.q) + r / a.group * a.q_stride + r % a.group * depth;
    std::vector<float> o(a.head_dim, 0);
    float max = -INFINITY, sum = 0;
    for (int first = shift ? shift - 64 : 0; first <= position; first += 64) {
      float score[64], e[64] = {}, lanes[16], page_max = -INFINITY;
      const auto seen = [&](int j) {
        const int p = first + j;
        return p >= 0 && p <= position && (!a.window || p > position - a.window);
      };
      bool any = false;
      for (int j = 0; j < 64; ++j) {
        if (!seen(j)) continue;
        any = true;
        const float dot = Dot<E, order>([&](int d) { return E::Get(q[d]); },
                                        [&](int d) { return key(first + j, d); }, depth, 0.0f);
        score[j] = dot * a.scale;
        if (a.cap != 0) score[j] = a.cap * Tanh(score[j] / a.cap);
        page_max = std::max(page_max, score[j]);
      }
      if (!any) continue;
      const float new_max = std::max(max, page_max), alpha = Exp(max - new_max);
      for (int j = 0; j < 64; ++j) {
        if (seen(j)) e[j] = Exp(score[j] - new_max);
      }
      for (int i = 0; i < 16; ++i) lanes[i] = (e[i] + e[16 + i]) + (e[32 + i] + e[48 + i]);
      sum = Fma(sum, alpha, Tree(lanes));
      max = new_max;
      for (int d = 0; d < a.head_dim; ++d) {
        const float pv = Dot<E, order>([&](int j) { return E::Get(E::Put(e[j])); },
                                       [&](int j) { return seen(j) ? value(first + j, d) : 0; }, 64, 0.0f);
        o[d] = Fma(o[d], alpha, pv + 0.0f);
      }
    }
    a.row_max[r] = max;
    a.row_inverse_sum[r] = 1.0f / sum;
    float* to = a.o + r / a.group * a.o_stride + r % a.group * a.head_dim;
    for (int d = 0; d < a.head_dim; ++d) to[d] = (o[d] + 0.0f) * a.row_inverse_sum[r];
  }
}

template <class E, Order order, bool aligned>
cpu::Ops Table(const char* name) {
  cpu::Ops ops = *cpu::Avx2Ops(E::kPairs);
  ops.name = name;
  ops.gemm = Multiply<E, order>;
  ops.attention_forward = Attend<E, order, aligned>;
  ops.rms_norm = RmsNorm<E>;
  ops.rope = Rope<E>;
  ops.round = Round<E>;
  ops.add = AddTo;
  ops.silu_mul = SiluMul<E>;
  ops.gelu_mul = GeluMul<E>;
  ops.soft_cap = SoftCap;
  ops.scale = Scale;
  ops.log_sum_exp = LogSumExp;
  return ops;
}

template <Order order, bool aligned>
const cpu::Ops& TableOf(bool bf16, const char* name) {
  static const cpu::Ops pairs = Table<Bf16, order, aligned>(name), single = Table<Fp32, order, aligned>(name);
  return bf16 ? pairs : single;
}

}  // namespace

const cpu::Ops& ScalarOps(bool bf16) { return TableOf<Order::kDefined, true>(bf16, "scalar"); }
const cpu::Ops& SequentialOps(bool bf16) { return TableOf<Order::kSequential, true>(bf16, "sequential"); }
const cpu::Ops& NodeAlignedOps(bool bf16) { return TableOf<Order::kDefined, false>(bf16, "node-aligned"); }

}  // namespace temper::engine
