// The kernels a pass is made of, as one table per (CPU path, profile). Every path computes the same bits: the order of every
// operation is fixed here and in docs/numerics.md, never by the width of a register.
//
// E is the profile's element: uint16_t holding bf16, or float. A "panel" is a B operand: [n16/16][k/2][16] words of two bf16
// (even k in the low half), or [n16/16][k][16] floats. Rows of E that are GEMM inputs are padded with zeros to a multiple of
// 32 elements ("depth"). All functions run on one thread, with denormals flushed (engine/threads.h), and touch only what
// they are given. Sizes are in elements unless they say bytes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace temper::engine::cpu {

// C[m][n] = A[m][k] · B[n][k] in the pair-dot (bf16) or in blocks of 32 sequential FMAs (f32).
struct Gemm {
  const void* a = nullptr;  // E [m][a_stride], or transposed: E [k][a_stride] with m along the row
  int64_t a_stride = 0;
  bool a_transposed = false;
  const void* a2 = nullptr;  // a second stretch of the reduced axis after the first, against the same B (split head)
  const void* b = nullptr;   // the first panel; may be any panel of a matrix
  int64_t b_stride = 0;      // elements from panel to panel; 0: 16 * k
  int m = 0;
  int n = 0;  // columns written
  int k = 0;  // a multiple of 32
  float* c = nullptr;
  int64_t c_stride = 0;
  bool add = false;  // accumulators start from C instead of +0
};

// Attention of one tile: consecutive tokens of one path and the query heads of one KV head, over the path's pages in order,
// with online softmax (page maximum, rescale, add).
struct AttentionForward {
  const void* q = nullptr;  // E; token t, head h of the group at t * q_stride + h * depth, depth = head_dim padded to 32
  int64_t q_stride = 0;
  int tokens = 0, group = 0, head_dim = 0;
  int first_position = 0;
  const std::byte* keys = nullptr;    // of page id 0 for this layer and KV head
  const std::byte* values = nullptr;  // same
  int64_t page_bytes = 0;
  const int32_t* pages = nullptr;  // ids, from position 0 on
  float scale = 0;
  float cap = 0;   // scores s, scaled, become cap · tanh(s / cap); 0: they stay
  int window = 0;  // a row sees the keys at the last `window` positions, its own among them; 0: all
  float* o = nullptr;  // token t, head h at t * o_stride + h * head_dim
  int64_t o_stride = 0;
  float* row_max = nullptr;          // [tokens * group]
  float* row_inverse_sum = nullptr;  // [tokens * group]
  std::byte* scratch = nullptr;      // AttentionScratchBytes, 64-byte aligned
  const std::byte* next = nullptr;   // keys that the caller's next call reads first, or null: for few rows they are asked for in time
};

// One (tile, page) of attention backward: recomputes P, adds to dq, dk, dv.
struct AttentionBackward {
  int rows = 0;  // tokens * group, row = token * group + head
  int group = 0, head_dim = 0;
  int first_position = 0;
  int first_key = 0;              // absolute position of the page
  const void* q = nullptr;        // E [rows][depth]
  const void* d_o = nullptr;      // E [rows][depth]
  const void* q_panel = nullptr;  // the same numbers as B operands with the rows (padded to 32) as reduced axis
  const void* d_o_panel = nullptr;
  const float* row_max = nullptr;
  const float* row_inverse_sum = nullptr;
  const float* delta = nullptr;           // [rows]: dO · O
  const void* keys = nullptr;             // panel: columns keys, reduced axis head_dim
  const void* values_by_key = nullptr;    // the same form of the values
  const void* keys_by_dim = nullptr;      // panel: columns head_dim, reduced axis keys
  float scale = 0, cap = 0;
  int window = 0;
  float* dq = nullptr;  // [rows][head_dim padded to 16]
  float* dk = nullptr;  // [64][head_dim padded to 16]
  float* dv = nullptr;
  std::byte* scratch = nullptr;
};

// One AdamW update of n numbers; the factors are already fp32 (trainer/adamw.cpp gives their meaning). Every operation is a single
// rounding, in this order:
//   g' = g·clip;  m = beta1·m + rest1·g';  v = beta2·v + rest2·(g'·g');  p = p·shrink − rate·(m / (√v·root + eps))
struct AdamWUpdate {
  const float* g = nullptr;
  float* m = nullptr;
  float* v = nullptr;
  float* p = nullptr;
  int64_t n = 0;
  float clip = 1, beta1 = 0, rest1 = 0, beta2 = 0, rest2 = 0, rate = 0, root = 1, eps = 0, shrink = 1;
};

// Numbers from a row of queries to the next in the forward kernel's scratch: few values, since each has kernels of its own.
constexpr int QueryStride(int head_dim) { return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : head_dim <= 256 ? 256 : 1040; }
// Enough for both attention kernels.
size_t AttentionScratchBytes(int rows, int head_dim);

struct Ops {
  const char* name;
  int element_bytes;

  void (*gemm)(const Gemm& g);
  void (*attention_forward)(const AttentionForward& a);
  void (*attention_backward)(const AttentionBackward& a);

  // out[depth] = E(x * (1 / sqrt(mean(x²) + eps)) * gain), zero beyond width. lo (may be null): E of what rounding lost.
  void (*rms_norm)(const float* x, const float* gain, float eps, int width, int depth, void* out, void* lo,
                   float* inverse_rms);
  // dx += gradient of rms_norm at dy.
  void (*rms_norm_backward)(const float* dy, const float* x, const float* gain, float inverse_rms, int width, float* dx);
  // dgain[i] += Σ over rows in order of dy · x · inverse_rms, for columns [begin, end), begin a multiple of 16.
  void (*rms_gain_backward)(const float* dy, const float* x, const float* inverse_rms, int rows, int width, int begin,
                            int end, float* dgain);

  // out[depth] = E(x rotated by its position's cos and sin [head_dim / 2]); zero beyond head_dim.
  void (*rope)(const float* x, const float* cos, const float* sin, int head_dim, int depth, void* out);
  // The inverse rotation in fp32, in place.
  void (*rope_inverse)(float* x, const float* cos, const float* sin, int head_dim);

  // out[depth] = E(x), zero beyond n.
  void (*round)(const float* x, int n, int depth, void* out);
  // x += y.
  void (*add)(float* x, const float* y, int n);
  // Σ x·y over E rows, 16 lanes, then a tree.
  float (*dot_delta)(const void* d_o, const float* o, int n);

  // out[depth] = E(silu(gate) * up), the same with gelu in the form with tanh.
  void (*silu_mul)(const float* gate, const float* up, int n, int depth, void* out);
  void (*silu_mul_backward)(const float* gate, const float* up, const float* dact, int n, void* dgate, void* dup);
  void (*gelu_mul)(const float* gate, const float* up, int n, int depth, void* out);
  void (*gelu_mul_backward)(const float* gate, const float* up, const float* dact, int n, void* dgate, void* dup);

  // x = cap · tanh(x / cap), in place.
  void (*soft_cap)(float* x, float cap, int n);
  // d *= slope of soft_cap, of whose output y is a multiple: y · inverse is the tanh.
  void (*soft_cap_backward)(float* d, const float* y, float inverse, int n);
  // sum[i] += Σ of column i over E rows in order, for columns [begin, end), begin a multiple of 16.
  void (*column_sums)(const void* x, int64_t stride, int rows, int begin, int end, float* sum);

  // x *= factor.
  void (*scale)(float* x, float factor, int n);
  float (*log_sum_exp)(const float* logits, int n);
  // logits[i] = factor * exp(logits[i] - log_sum_exp), in place.
  void (*softmax_scaled)(float* logits, float log_sum_exp, float factor, int n);

  void (*adamw)(const AdamWUpdate& u);
  // Σ x² in double, eight lanes (element i in lane i mod 8), then the lanes in order.
  double (*sum_of_squares)(const float* x, int64_t n);

  // E rows [rows][stride] as a panel with the rows as reduced axis: columns [begin, end) (multiples of 16; beyond cols zero),
  // rows padded with zeros to `rows_padded` (a multiple of 32). `panel` is that of column 0.
  void (*pack_rows)(const void* x, int64_t stride, int rows, int cols, int rows_padded, int begin, int end, void* panel);
  // A panel [n16/16][k/2][16] transposed: columns k, reduced axis n padded to n_padded (a multiple of 32). Writes columns
  // [begin, end), multiples of 16.
  void (*transpose_panel)(const void* panel, int n16, int k, int n_padded, int begin, int end, void* out);

  // From so many rows a thread on, rows are split over threads: weights read by each cost less than handing out columns.
  int split_rows = 16;
};

// Null when this build or machine lacks the path.
const Ops* Avx2Ops(bool bf16);
const Ops* Avx512Ops(bool bf16);
const Ops* AmxOps(bool bf16);

}  // namespace temper::engine::cpu
