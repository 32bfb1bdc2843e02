#include "trainer/bench/counted_kernels.h"

#include <x86intrin.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "engine/bf16.h"
#include "engine/cpu/ops.h"

namespace temper::trainer::bench {
namespace {

using engine::cpu::Ops;

struct State {
  const Ops* bf16 = nullptr;
  const Ops* f32 = nullptr;
  int vocab_depth = 0;  // padded as a reduced axis
  bool backward = false;
  std::mutex mutex;  // of the list
  std::vector<std::array<Count, kParts>*> threads;
};
State state;

// A thread's own counts, known to the list as long as it lives.
struct Counts {
  std::array<Count, kParts> of{};
  Counts() {
    std::lock_guard lock(state.mutex);
    state.threads.push_back(&of);
  }
  ~Counts() {
    std::lock_guard lock(state.mutex);
    std::erase(state.threads, &of);
  }
};
thread_local Counts counts;

struct Cost {
  Part part;
  double operations, bytes;
};

class Timed {
 public:
  explicit Timed(const Cost& cost) : cost_(cost), begin_(__rdtsc()) {}
  ~Timed() {
    Count& count = counts.of[static_cast<int>(cost_.part)];
    count.ticks += static_cast<double>(__rdtsc() - begin_);
    count.operations += cost_.operations;
    count.bytes += cost_.bytes;
  }

 private:
  Cost cost_;
  unsigned long long begin_;
};

// The kernel of the table, timed, at the cost that kCost says of its arguments.
template <bool kBf16, auto kKernel, auto kCost>
struct Counted;
template <bool kBf16, typename R, typename... A, R (*Ops::*kKernel)(A...), auto kCost>
struct Counted<kBf16, kKernel, kCost> {
  static R Call(A... a) {
    const Timed timed(kCost(kBf16 ? 2 : 4, a...));
    return ((kBf16 ? state.bf16 : state.f32)->*kKernel)(a...);
  }
};

Cost OfGemm(double e, const engine::cpu::Gemm& g) {
  const double stretches = g.a2 ? 2 : 1, m = g.m, n = g.n, k = g.k;
  const bool head = g.a2 || g.k == state.vocab_depth || (g.a_transposed && g.a_stride == state.vocab_depth);
  const Part part = head              ? (state.backward ? Part::kHeadBackward : Part::kHeadForward)
                    : !state.backward ? Part::kForwardProducts
                    : g.a_transposed  ? Part::kWeightGradients
                                      : Part::kInputGradients;
  return {part, 2 * m * n * k * stretches, e * (m * k * stretches + n * k) + 4 * m * n * (g.add ? 2 : 1)};
}

// Pairs of a query row and a key it sees, at absolute positions [0, last].
double Pairs(int tokens, int group, int first_position, int first_key, int keys, int window) {
  double pairs = 0;
  for (int t = 0; t < tokens; ++t) {
    const int position = first_position + t;
    const int end = std::min(position + 1, first_key + keys), begin = std::max(first_key, window ? position - window + 1 : 0);
    pairs += std::max(0, end - begin);
  }
  return pairs * group;
}

Cost OfAttentionForward(double e, const engine::cpu::AttentionForward& a) {
  const int keys = a.first_position + a.tokens;
  const double pairs = Pairs(a.tokens, a.group, a.first_position, 0, keys, a.window), rows = a.tokens * a.group;
  return {Part::kForwardAttention, 4 * pairs * a.head_dim, a.head_dim * (2 * e * keys + (e + 4) * rows)};
}
Cost OfAttentionBackward(double e, const engine::cpu::AttentionBackward& a) {
  const double pairs = Pairs(a.rows / a.group, a.group, a.first_position, a.first_key, 64, a.window);
  return {Part::kBackwardAttention, 10 * pairs * a.head_dim, a.head_dim * (64 * (3 * e + 16) + a.rows * (4 * e + 8))};
}

// Operations an element of exp and of what is made of it, by the forms in engine/cpu/simd.h.
constexpr double kExp = 23, kSigmoid = kExp + 3;
Part HeadOf(int n, Part otherwise) {
  return n + 32 > state.vocab_depth ? (state.backward ? Part::kHeadBackward : Part::kHeadForward) : otherwise;
}

template <bool kBf16>
Ops MakeOps(const Ops& inner) {
  using P = const void*;
  using F = const float*;
  Ops o = inner;
  o.gemm = Counted<kBf16, &Ops::gemm, OfGemm>::Call;
  o.attention_forward = Counted<kBf16, &Ops::attention_forward, OfAttentionForward>::Call;
  o.attention_backward = Counted<kBf16, &Ops::attention_backward, OfAttentionBackward>::Call;
  o.rms_norm = Counted<kBf16, &Ops::rms_norm, [](double e, F, F, float, int n, int, void*, void* lo, float*) {
    return Cost{Part::kRows, 6.0 * n, (8 + e * (lo ? 2 : 1)) * n};
  }>::Call;
  o.rms_norm_backward = Counted<kBf16, &Ops::rms_norm_backward, [](double, F, F, F, float, int n, float*) {
    return Cost{Part::kRows, 9.0 * n, 20.0 * n};
  }>::Call;
  o.rms_gain_backward = Counted<kBf16, &Ops::rms_gain_backward, [](double, F, F, F, int rows, int, int begin, int end, float*) {
    return Cost{Part::kRows, 3.0 * rows * (end - begin), 8.0 * rows * (end - begin)};
  }>::Call;
  o.rope = Counted<kBf16, &Ops::rope, [](double e, F, F, F, int n, int, void*) {
    return Cost{Part::kRows, 3.0 * n, (8 + e) * n};
  }>::Call;
  o.rope_inverse = Counted<kBf16, &Ops::rope_inverse, [](double, float*, F, F, int n) {
    return Cost{Part::kRows, 3.0 * n, 12.0 * n};
  }>::Call;
  o.round = Counted<kBf16, &Ops::round, [](double e, F, int n, int, void*) {
    return Cost{HeadOf(n, Part::kRows), 4.0 * n, (4 + e) * n};
  }>::Call;
  o.add = Counted<kBf16, &Ops::add, [](double, float*, F, int n) { return Cost{Part::kRows, 1.0 * n, 12.0 * n}; }>::Call;
  o.dot_delta = Counted<kBf16, &Ops::dot_delta, [](double e, P, F, int n) {
    return Cost{Part::kRows, 2.0 * n, (4 + e) * n};
  }>::Call;
  o.silu_mul = Counted<kBf16, &Ops::silu_mul, [](double e, F, F, int n, int, void*) {
    return Cost{Part::kRows, (kSigmoid + 2) * n, (8 + e) * n};
  }>::Call;
  o.silu_mul_backward = Counted<kBf16, &Ops::silu_mul_backward, [](double e, F, F, F, int n, void*, void*) {
    return Cost{Part::kRows, (kSigmoid + 8) * n, (12 + 2 * e) * n};
  }>::Call;
  o.scale = Counted<kBf16, &Ops::scale, [](double, float*, float, int n) {
    return Cost{HeadOf(n, Part::kRows), 1.0 * n, 8.0 * n};
  }>::Call;
  o.log_sum_exp = Counted<kBf16, &Ops::log_sum_exp, [](double, F, int n) {
    return Cost{HeadOf(n, Part::kRows), (kExp + 3) * n, 4.0 * n};
  }>::Call;
  o.softmax_scaled = Counted<kBf16, &Ops::softmax_scaled, [](double, float*, float, float, int n) {
    return Cost{HeadOf(n, Part::kRows), (kExp + 2) * n, 8.0 * n};
  }>::Call;
  o.adamw = Counted<kBf16, &Ops::adamw, [](double, const engine::cpu::AdamWUpdate& u) {
    return Cost{Part::kOptimizer, 16.0 * static_cast<double>(u.n), 28.0 * static_cast<double>(u.n)};
  }>::Call;
  o.sum_of_squares = Counted<kBf16, &Ops::sum_of_squares, [](double, F, int64_t n) {
    return Cost{Part::kOptimizer, 2.0 * static_cast<double>(n), 4.0 * static_cast<double>(n)};
  }>::Call;
  o.pack_rows = Counted<kBf16, &Ops::pack_rows, [](double e, P, int64_t, int rows, int, int padded, int begin, int end, void*) {
    return Cost{Part::kPacking, 0, e * (rows + padded) * (end - begin)};
  }>::Call;
  o.transpose_panel = Counted<kBf16, &Ops::transpose_panel, [](double e, P, int n, int, int padded, int begin, int end, void*) {
    return Cost{Part::kPacking, 0, e * (n + padded) * (end - begin)};
  }>::Call;
  return o;
}

}  // namespace

const char* PartName(Part part) {
  static constexpr std::array<const char*, kParts> names = {
      "products, forward",  "products, dX", "products, dW", "attention, forward",        "attention, backward",
      "head, forward",      "head, backward", "norms, rotations, activations, rounding", "packing for the backward pass",
      "gradient norm and AdamW"};
  return names[static_cast<size_t>(part)];
}

std::unique_ptr<engine::Engine> CountedKernels::MakeEngine(engine::Engine& like, int vocab) {
  state.bf16 = &like.ops(engine::Profile::kBf16);
  state.f32 = &like.ops(engine::Profile::kF32);
  state.vocab_depth = engine::RoundUp(vocab, 32);
  state.backward = false;
  static Ops bf16, f32;
  bf16 = MakeOps<true>(*state.bf16);
  f32 = MakeOps<false>(*state.f32);
  (void)Take();
  return engine::Engine::WithKernels(bf16, f32, like.threads().count());
}

void CountedKernels::Enter(bool backward) { state.backward = backward; }

std::array<Count, kParts> CountedKernels::Take() {
  std::lock_guard lock(state.mutex);
  std::array<Count, kParts> sum{};
  for (auto* of : state.threads) {
    for (int i = 0; i < kParts; ++i) {
      sum[i].ticks += (*of)[i].ticks;
      sum[i].operations += (*of)[i].operations;
      sum[i].bytes += (*of)[i].bytes;
    }
    *of = {};
  }
  return sum;
}

double CountedKernels::Ticks() { return static_cast<double>(__rdtsc()); }

}  // namespace temper::trainer::bench
