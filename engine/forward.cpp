#include "engine/forward.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "common/check.h"
#include "engine/bf16.h"
#include "engine/rope.h"

namespace temper::engine {
namespace {

constexpr int kHeadBlock = 48;       // rows of logits at a time, where nobody keeps them
constexpr int kMostSplitRows = 192;  // of cpu::Ops::split_rows on any path: what is planned must be enough for each

}  // namespace

void Plan::Clear() {
  token.clear();
  position.clear();
  slot_begin.clear();
  slots.clear();
  tiles.clear();
  tables.clear();
}

int TileTokens(const ModelConfig& c) {
  const int group = c.heads / c.kv_heads;
  return std::clamp(96 / group, 8, 32);
}

Shapes::Shapes(const ModelConfig& c)
    : width(c.width),
      vocab(c.vocab),
      ffn(c.ffn),
      width_depth(RoundUp(c.width, 32)),
      ffn_depth(RoundUp(c.ffn, 32)),
      q_depth(RoundUp(c.q_dim(), 32)),
      head_depth(RoundUp(c.head_dim, 32)),
      head_width(RoundUp(c.head_dim, 16)),
      q_rows(RoundUp(c.q_dim(), 16)),
      kv_rows(RoundUp(c.kv_dim(), 16)),
      qkv_rows(q_rows + 2 * kv_rows),
      gate_rows(RoundUp(c.ffn, 16)),
      gate_up_rows(2 * gate_rows),
      q_elements(c.heads * head_depth),
      group(c.heads / c.kv_heads) {}

size_t LayerState::bytes() const {
  size_t n = 0;
  for (const Buffer* b : {&x, &h1, &h2, &r1, &r2, &q, &o, &oe, &row_max, &row_inverse_sum, &x_mid, &gate_up, &act, &q_raw, &k_raw,
                          &rq, &rk, &attention, &mlp, &r_attention, &r_mlp}) {
    n += b->bytes();
  }
  return n;
}

size_t ForwardPass::bytes() const {
  size_t n = final_x_.bytes() + head_hi_.bytes() + head_lo_.bytes();
  for (const LayerState& s : states_) n += s.bytes();
  for (const Buffer& b : inputs_) n += b.bytes();
  for (const Buffer& b : scratch_) n += b.bytes();
  return n;
}

size_t ForwardPass::PlannedBytes(const ModelConfig& c, Profile profile, int threads, std::span<const int> rows_in_turn, int head_rows,
                                 bool logits_given, Keep keep) {
  const Shapes s(c);
  const size_t e = profile == Profile::kBf16 ? 2 : 4, weight_bytes = ComputeBytes(c, profile);
  const int most = rows_in_turn.empty() ? 0 : *std::max_element(rows_in_turn.begin(), rows_in_turn.end());
  const auto f = [&](int columns) { return Buffer::Rounded(static_cast<size_t>(most) * columns * sizeof(float)); };
  const auto padded = [&](int columns) { return Buffer::Rounded(static_cast<size_t>(RoundUp(most, 32)) * columns * e); };
  size_t n = f(s.width);  // final_x_
  for (int l = 0; l < (keep == Keep::kAll ? c.layers : 1); ++l) {
    const LayerSpec spec = LayerOf(c, l);
    n += 2 * f(s.width) + 2 * padded(s.width_depth) + 2 * f(1) + padded(s.q_elements) + f(c.q_dim()) + padded(s.q_depth) + 2 * f(c.heads) +
         f(s.gate_up_rows) + padded(s.ffn_depth);
    if (spec.qk_norm) n += f(c.q_dim()) + f(c.kv_dim()) + f(c.heads) + f(c.kv_heads);
    if (spec.output_norms) n += 2 * f(s.width) + 2 * f(1);
  }
  if (keep == Keep::kInputs) n += c.layers * f(s.width);
  size_t scratch = cpu::AttentionScratchBytes(TileTokens(c) * s.group, c.head_dim);
  for (const int rows : rows_in_turn) {
    const int useful = UsefulThreads(weight_bytes, rows, threads);
    const size_t stage_rows = SplitColumns(weight_bytes, rows, useful, kMostSplitRows) ? rows : RowBlocks(rows, useful).longest();
    scratch = std::max(scratch, stage_rows * s.qkv_rows * sizeof(float));
  }
  n += threads * Buffer::Rounded(scratch);
  if (head_rows > 0) {
    n += 2 * Buffer::Rounded(static_cast<size_t>(head_rows) * s.width_depth * e);
    const size_t logits = Buffer::Rounded(static_cast<size_t>(kHeadBlock) * s.vocab * sizeof(float));
    const int useful = UsefulThreads(weight_bytes, head_rows, threads);
    const int blocks = SplitColumns(weight_bytes, head_rows, useful, kMostSplitRows) ? 1 : RowBlocks(head_rows, useful, kHeadBlock).count();
    if (!logits_given && logits > scratch) n += std::min(useful, blocks) * (logits - Buffer::Rounded(scratch));
  }
  return n;
}

void EmbeddingRow(const ComputeWeights& weights, int token, float* out) {
  const Panel& e = weights.embedding();
  const size_t base = static_cast<size_t>(token / 16) * e.depth * 16;
  const int width = weights.config().width;
  if (weights.profile() == Profile::kBf16) {
    const auto* p = reinterpret_cast<const uint16_t*>(e.data) + base + token % 16 * 2;
    for (int i = 0; i < width; ++i) out[i] = FromBf16(p[i / 2 * 32 + i % 2]);
  } else {
    const auto* p = reinterpret_cast<const float*>(e.data) + base + token % 16;
    for (int i = 0; i < width; ++i) out[i] = p[i * 16];
  }
}

RowBlocks::RowBlocks(int rows, int threads, int most) : begins{0} {
  constexpr int kTile = 8, kLeast = 16;
  const int least = rows >= 192 * threads ? std::min(kLeast, most) : std::min(most, RoundUp((rows + threads - 1) / threads, kTile));
  while (begins.back() < rows || begins.size() == 1) {
    const int left = rows - begins.back(), share = threads == 1 ? left : left / (2 * threads);
    begins.push_back(std::min(rows, begins.back() + std::clamp(RoundUp(share, kTile), least, most)));
  }
}

int UsefulThreads(size_t weight_bytes, int rows, int threads) {
  // Below about a third of a millisecond of arithmetic, handing work over costs more than it saves.
  return static_cast<int64_t>(weight_bytes) * rows < (16 << 20) ? 1 : threads;
}

bool SplitColumns(size_t weight_bytes, int rows, int threads, int split_rows) {
  if (threads == 1) return false;
  // A small model's weights stay in each core's cache, so rows can be split early; a large one is read once if columns are.
  const bool small = weight_bytes < (4u << 20);
  return rows < threads * (small ? 6 : split_rows);
}

namespace {

// Writes one rounded key (or value) row into its slot of a page (engine/kv_pool.h, docs/numerics.md 3).
template <typename T>
void StoreKey(const T* row, int depth, int position, std::byte* page) {
  if constexpr (sizeof(T) == 2) {
    auto* out = reinterpret_cast<uint32_t*>(page) + position / 16 * (depth / 2) * 16 + position % 16;
    for (int i = 0; i < depth / 2; ++i) std::memcpy(out + i * 16, row + 2 * i, 4);
  } else {
    auto* out = reinterpret_cast<float*>(page) + position / 16 * depth * 16 + position % 16;
    for (int i = 0; i < depth; ++i) out[i * 16] = row[i];
  }
}

template <typename T>
void StoreValue(const T* row, int width, int position, std::byte* page) {
  for (int d0 = 0; d0 < width; d0 += 16) {
    T* out = reinterpret_cast<T*>(page) + d0 * kPagePositions;
    if constexpr (sizeof(T) == 2) {
      out += position / 2 * 32 + position % 2;
      for (int i = 0; i < 16; ++i) out[2 * i] = row[d0 + i];
    } else {
      std::memcpy(out + position * 16, row + d0, 64);
    }
  }
}

// C [m][n] = rows A [m][k] times the panels B, all rows close together.
cpu::Gemm Product(const void* a, int k, const void* b, int m, int n, float* c) {
  cpu::Gemm g;
  g.a = a;
  g.a_stride = k;
  g.b = b;
  g.m = m;
  g.n = n;
  g.k = k;
  g.c = c;
  g.c_stride = n;
  return g;
}

}  // namespace

void ForwardPass::RunGemm(const cpu::Ops& ops, cpu::Gemm g, bool split) {
  if (!split || g.n < 64) return ops.gemm(g);
  // Pairs of panels, so that no tile is cut.
  const int panels = (g.n + 15) / 16, pairs = (panels + 1) / 2;
  const Parts parts{pairs, std::min(pairs, engine_.threads().count() * 2)};
  engine_.threads().Run(parts.count, [&](int part, int) {
    const int begin = parts.begin(part) * 2, end = std::min(panels, parts.begin(part + 1) * 2);
    cpu::Gemm mine = g;
    mine.b_stride = g.b_stride ? g.b_stride : static_cast<int64_t>(g.k) * 16;
    mine.b = static_cast<const std::byte*>(g.b) + begin * mine.b_stride * ops.element_bytes;
    mine.c = g.c + begin * 16;
    mine.n = std::min(g.n, end * 16) - begin * 16;
    ops.gemm(mine);
  });
}

void ForwardPass::Layers(const ComputeWeights& weights, KvPool& pool, const Plan& plan, Keep keep) {
  keep_ = keep;
  Run(weights, pool, plan, 0, weights.config().layers, /*again=*/false, nullptr);
}

void ForwardPass::LayersFor(const ComputeWeights& weights, KvPool& pool, const Plan& plan, std::span<const int32_t> wanted) {
  keep_ = Keep::kNothing;
  const bool all = static_cast<int>(wanted.size()) == plan.rows();
  Run(weights, pool, plan, 0, weights.config().layers, /*again=*/false, all ? nullptr : &wanted);
}

void ForwardPass::Again(const ComputeWeights& weights, KvPool& pool, const Plan& plan, int layer) {
  TEMPER_CHECK(keep_ == Keep::kInputs) << "no inputs of layers were kept";
  Run(weights, pool, plan, layer, layer + 1, /*again=*/true, nullptr);
}

void ForwardPass::Run(const ComputeWeights& weights, KvPool& pool, const Plan& plan, int begin, int end, bool again,
                      const std::span<const int32_t>* wanted) {
  FlushDenormals mode;
  const ModelConfig& c = weights.config();
  const Shapes s(c);
  const cpu::Ops& ops = engine_.ops(weights.profile());
  const cpu::Ops& f32 = engine_.ops(Profile::kF32);  // for norms whose output stays fp32
  const int element = ops.element_bytes;
  const int rows = plan.rows(), padded = RoundUp(rows, 32);
  const auto eps = static_cast<float>(c.rms_eps);
  const bool all = keep_ == Keep::kAll;
  states_.resize(std::max<size_t>(states_.size(), all ? c.layers : 1));
  if (keep_ == Keep::kInputs) {
    inputs_.resize(c.layers);
    // An input moves into the layer's state, where the backward pass looks for it.
    if (again) std::swap(states_[0].x, inputs_[begin]);
    else for (Buffer& b : inputs_) b.Get<float>(static_cast<size_t>(rows) * s.width);
  }
  scratch_.resize(engine_.threads().count());

  for (int l = 0; l < (all ? c.layers : 1); ++l) {
    LayerState& state = states_[l];
    const auto e_rows = [&](Buffer& b, int depth) { b.Get<std::byte>(static_cast<size_t>(padded) * depth * element); };
    state.x.Get<float>(static_cast<size_t>(rows) * s.width);
    e_rows(state.h1, s.width_depth);
    e_rows(state.h2, s.width_depth);
    state.r1.Get<float>(rows);
    state.r2.Get<float>(rows);
    e_rows(state.q, s.q_elements);
    state.o.Get<float>(static_cast<size_t>(rows) * c.q_dim());
    e_rows(state.oe, s.q_depth);
    state.row_max.Get<float>(static_cast<size_t>(rows) * c.heads);
    state.row_inverse_sum.Get<float>(static_cast<size_t>(rows) * c.heads);
    state.x_mid.Get<float>(static_cast<size_t>(rows) * s.width);
    state.gate_up.Get<float>(static_cast<size_t>(rows) * s.gate_up_rows);
    e_rows(state.act, s.ffn_depth);
    if (const LayerSpec& spec = weights.layer(l).spec; spec.qk_norm || spec.output_norms) {
      const auto f_rows = [&](Buffer& b, int columns) { b.Get<float>(static_cast<size_t>(rows) * columns); };
      if (spec.qk_norm) {
        f_rows(state.q_raw, c.q_dim());
        f_rows(state.k_raw, c.kv_dim());
        f_rows(state.rq, c.heads);
        f_rows(state.rk, c.kv_heads);
      }
      if (spec.output_norms) {
        f_rows(state.attention, s.width);
        f_rows(state.mlp, s.width);
        f_rows(state.r_attention, 1);
        f_rows(state.r_mlp, 1);
      }
    }
  }
  final_x_.Get<float>(static_cast<size_t>(rows) * s.width);
  const auto state_of = [&](int l) -> LayerState& { return states_[all ? l : 0]; };
  const auto input_of = [&](int l) { return (keep_ == Keep::kInputs && !again ? inputs_[l] : state_of(l).x).as<float>(); };

  const int tile_rows = TileTokens(c) * s.group;
  int threads = UsefulThreads(weights.bytes().size(), rows, engine_.threads().count());
  bool split = SplitColumns(weights.bytes().size(), rows, threads, ops.split_rows);
  const size_t stage_rows = split ? rows : RowBlocks(rows, threads).longest();
  const auto run = [&](int items, const std::function<void(int item, int thread)>& body) {
    if (threads > 1) return engine_.threads().Run(items, body);
    for (int i = 0; i < items; ++i) body(i, 0);
  };
  const size_t scratch_bytes =
      std::max(cpu::AttentionScratchBytes(tile_rows, c.head_dim), stage_rows * s.qkv_rows * sizeof(float));  // as in PlannedBytes
  for (Buffer& b : scratch_) b.Get<std::byte>(scratch_bytes);
  // What is done row by row. Where columns are split the rows are not yet shared out: then they are here, but for so few that it is not worth it.
  const auto each = [&](int r0, int r1, const std::function<void(int row)>& body) {
    const Parts parts{r1 - r0, split && r1 - r0 >= 8 ? threads : 1};
    if (parts.count == 1) {
      for (int r = r0; r < r1; ++r) body(r);
      return;
    }
    run(parts.count, [&](int i, int) {
      for (int r = r0 + parts.begin(i); r < r0 + parts.begin(i + 1); ++r) body(r);
    });
  };

  // The first half of layer l for rows [r0, r1): norm, q, k, v, rotation, pages.
  const auto before_attention = [&](int l, int r0, int r1, int thread) {
    LayerState& state = state_of(l);
    const ComputeWeights::Layer& w = weights.layer(l);
    auto* h1 = state.h1.as<std::byte>() + static_cast<size_t>(r0) * s.width_depth * element;
    each(r0, r1, [&](int r) {
      ops.rms_norm(input_of(l) + static_cast<size_t>(r) * s.width, w.input_gain, eps, s.width, s.width_depth,
                   state.h1.as<std::byte>() + static_cast<size_t>(r) * s.width_depth * element, nullptr,
                   state.r1.as<float>() + r);
    });
    float* qkv = scratch_[thread].as<float>();
    cpu::Gemm product = Product(h1, s.width_depth, w.qkv.data, r1 - r0, s.qkv_rows, qkv);
    if (w.qkv_bias) {  // the bias is the start of the accumulators
      for (int r = 0; r < r1 - r0; ++r) {
        std::memcpy(qkv + static_cast<size_t>(r) * s.qkv_rows, w.qkv_bias, s.qkv_rows * sizeof(float));
      }
      product.add = true;
    }
    RunGemm(ops, product, split);
    // Head h of a row as it is rotated: as it came, or normed and its raw form kept.
    const auto head_of = [&](const float* row, int r, int h, int heads, const float* gain, Buffer& raw, Buffer& inverse, float* normed) {
      const float* x = row + h * c.head_dim;
      if (!gain) return x;
      const size_t at = static_cast<size_t>(r) * heads + h;
      std::memcpy(raw.as<float>() + at * c.head_dim, x, c.head_dim * sizeof(float));
      f32.rms_norm(x, gain, eps, c.head_dim, c.head_dim, normed, nullptr, inverse.as<float>() + at);
      return static_cast<const float*>(normed);
    };
    each(r0, r1, [&](int r) {
      alignas(64) std::byte row_e[1024 * 4 + 64];  // one rounded head; head_dim <= 1024
      alignas(64) float normed[1024];
      const float* row = qkv + static_cast<size_t>(r - r0) * s.qkv_rows;
      const float* cos = w.rope->cos(plan.position[r]);
      const float* sin = w.rope->sin(plan.position[r]);
      auto* q = state.q.as<std::byte>() + static_cast<size_t>(r) * s.q_elements * element;
      for (int h = 0; h < c.heads; ++h) {
        const float* x = head_of(row, r, h, c.heads, w.q_gain, state.q_raw, state.rq, normed);
        ops.rope(x, cos, sin, c.head_dim, s.head_depth, q + static_cast<size_t>(h) * s.head_depth * element);
      }
      for (int h = 0; h < c.kv_heads; ++h) {
        const float* x = head_of(row + s.q_rows, r, h, c.kv_heads, w.k_gain, state.k_raw, state.rk, normed);
        ops.rope(x, cos, sin, c.head_dim, s.head_depth, row_e);
        for (int i = plan.slot_begin[r]; i < plan.slot_begin[r + 1]; ++i) {
          const Plan::Slot& slot = plan.slots[i];
          std::byte* page = pool.keys(slot.page, l, h);
          if (element == 2) {
            StoreKey(reinterpret_cast<const uint16_t*>(row_e), s.head_depth, slot.position, page);
          } else {
            StoreKey(reinterpret_cast<const float*>(row_e), s.head_depth, slot.position, page);
          }
        }
        ops.round(row + s.q_rows + s.kv_rows + h * c.head_dim, c.head_dim, s.head_width, row_e);
        for (int i = plan.slot_begin[r]; i < plan.slot_begin[r + 1]; ++i) {
          const Plan::Slot& slot = plan.slots[i];
          std::byte* page = pool.values(slot.page, l, h);
          if (element == 2) {
            StoreValue(reinterpret_cast<const uint16_t*>(row_e), s.head_width, slot.position, page);
          } else {
            StoreValue(reinterpret_cast<const float*>(row_e), s.head_width, slot.position, page);
          }
        }
      }
    });
  };

  // Head h of a tile. `next`: the keys that this thread's next tile or head begins with, or null.
  const auto attend = [&](int l, const Plan::Tile& tile, int h, const std::byte* next_keys, int thread) {
    LayerState& state = state_of(l);
    cpu::AttentionForward a;
    a.q = state.q.as<std::byte>() +
          (static_cast<size_t>(tile.first_row) * s.q_elements + static_cast<size_t>(h) * s.group * s.head_depth) * element;
    a.q_stride = s.q_elements;
    a.tokens = tile.tokens;
    a.group = s.group;
    a.head_dim = c.head_dim;
    a.first_position = tile.first_position;
    a.keys = pool.keys(0, l, h);
    a.values = pool.values(0, l, h);
    a.page_bytes = static_cast<int64_t>(KvPool::PageBytes(c, weights.profile()));
    a.pages = plan.tables.data() + tile.table;
    const LayerSpec& spec = weights.layer(l).spec;
    a.scale = static_cast<float>(spec.score_scale);
    a.cap = static_cast<float>(spec.score_cap);
    a.window = spec.window;
    a.o = state.o.as<float>() + static_cast<size_t>(tile.first_row) * c.q_dim() + h * s.group * c.head_dim;
    a.o_stride = c.q_dim();
    const size_t first = (static_cast<size_t>(h) * rows + tile.first_row) * s.group;
    a.row_max = state.row_max.as<float>() + first;
    a.row_inverse_sum = state.row_inverse_sum.as<float>() + first;
    a.scratch = scratch_[thread].as<std::byte>();
    a.next = next_keys;
    ops.attention_forward(a);
  };
  const auto attention = [&](int l, std::span<const Plan::Tile> tiles) {
    const auto count = static_cast<int>(tiles.size());
    const int window = weights.layer(l).spec.window;
    const auto first_keys = [&](const Plan::Tile& tile, int h) {
      const int first = window && tile.first_position >= window ? (tile.first_position - window + 1) / kPagePositions : 0;
      return pool.keys(plan.tables[tile.table + first], l, h);
    };
    // From the last tile on: the last of a row see the most pages, and long items first let threads end together.
    const auto tile_at = [&](int i) -> const Plan::Tile& { return tiles[count - 1 - i]; };
    if (count < 8 * threads) {
      return run(count * c.kv_heads, [&](int item, int thread) { attend(l, tile_at(item / c.kv_heads), item % c.kv_heads, nullptr, thread); });
    }
    const Parts parts{count, 8 * threads};
    run(parts.count, [&](int part, int thread) {
      for (int i = parts.begin(part), end_tile = parts.begin(part + 1); i < end_tile; ++i) {
        for (int h = 0; h < c.kv_heads; ++h) {
          const bool last_head = h + 1 == c.kv_heads;
          const std::byte* next_keys = !last_head ? first_keys(tile_at(i), h + 1) : i + 1 < end_tile ? first_keys(tile_at(i + 1), 0) : nullptr;
          attend(l, tile_at(i), h, next_keys, thread);
        }
      }
    });
  };

  // out = residual + input · Wᵀ: the residual is the start of the accumulators, or is added to the normed product.
  const auto add_product = [&](const void* input, int depth, const Panel& matrix, const float* gain, Buffer& product,
                               Buffer& inverse, const float* residual, int r0, int r1, float* out) {
    const size_t first = static_cast<size_t>(r0) * s.width;
    cpu::Gemm g = Product(input, depth, matrix.data, r1 - r0, s.width, gain ? product.as<float>() + first : out);
    if (!gain) {
      each(0, r1 - r0, [&](int r) {
        const size_t at = static_cast<size_t>(r) * s.width;
        std::memcpy(out + at, residual + at, s.width * sizeof(float));
      });
    }
    g.add = !gain;
    RunGemm(ops, g, split);
    if (!gain) return;
    each(r0, r1, [&](int r) {
      const size_t at = static_cast<size_t>(r - r0) * s.width;
      f32.rms_norm(product.as<float>() + first + at, gain, eps, s.width, s.width, out + at, nullptr, inverse.as<float>() + r);
      f32.add(out + at, residual + at, s.width);
    });
  };

  // The second half: output projection, norm, MLP.
  const auto after_attention = [&](int l, int r0, int r1) {
    LayerState& state = state_of(l);
    const ComputeWeights::Layer& w = weights.layer(l);
    float* next = l + 1 < c.layers && !again ? input_of(l + 1) : final_x_.as<float>();
    const auto e_row = [&](Buffer& b, int r, int depth) {
      return b.as<std::byte>() + static_cast<size_t>(r) * depth * element;
    };
    const size_t residual = static_cast<size_t>(r0) * s.width;
    each(r0, r1, [&](int r) {
      ops.round(state.o.as<float>() + static_cast<size_t>(r) * c.q_dim(), c.q_dim(), s.q_depth, e_row(state.oe, r, s.q_depth));
    });
    float* mid = state.x_mid.as<float>() + residual;
    add_product(e_row(state.oe, r0, s.q_depth), s.q_depth, w.o, w.attention_gain, state.attention, state.r_attention,
                input_of(l) + residual, r0, r1, mid);
    each(r0, r1, [&](int r) {
      ops.rms_norm(state.x_mid.as<float>() + static_cast<size_t>(r) * s.width, w.mlp_gain, eps, s.width, s.width_depth,
                   e_row(state.h2, r, s.width_depth), nullptr, state.r2.as<float>() + r);
    });
    RunGemm(ops,
            Product(e_row(state.h2, r0, s.width_depth), s.width_depth, w.gate_up.data, r1 - r0, s.gate_up_rows,
                    state.gate_up.as<float>() + static_cast<size_t>(r0) * s.gate_up_rows),
            split);
    const auto activate = w.spec.activation == Activation::kSilu ? ops.silu_mul : ops.gelu_mul;
    each(r0, r1, [&](int r) {
      const float* gate = state.gate_up.as<float>() + static_cast<size_t>(r) * s.gate_up_rows;
      activate(gate, gate + s.gate_rows, s.ffn, s.ffn_depth, e_row(state.act, r, s.ffn_depth));
    });
    if (again && !w.out_gain) return;  // nothing before the layer's output needs it
    add_product(e_row(state.act, r0, s.ffn_depth), s.ffn_depth, w.down, w.out_gain, state.mlp, state.r_mlp, mid, r0, r1,
                next + residual);
  };

  // Rows [r0, r1) of a stage on one thread, or all of them here with the columns split.
  const auto stage = [&](int count, const std::function<void(int r0, int r1, int thread)>& body) {
    if (split) return body(0, count, 0);
    const RowBlocks blocks(count, threads);
    run(blocks.count(), [&](int i, int thread) { body(blocks.begin(i), blocks.begin(i + 1), thread); });
  };

  float* x0 = input_of(begin);
  stage(rows, [&](int r0, int r1, int thread) {
    each(r0, again ? r0 : r1, [&](int r) {
      float* row = x0 + static_cast<size_t>(r) * s.width;
      EmbeddingRow(weights, plan.token[r], row);
      if (weights.spec().embedding_scale != 1) ops.scale(row, static_cast<float>(weights.spec().embedding_scale), s.width);
    });
    before_attention(begin, r0, r1, thread);
  });
  const int whole_layers = wanted ? end - 1 : end;
  for (int l = begin; l < whole_layers; ++l) {
    attention(l, plan.tiles);
    stage(rows, [&](int r0, int r1, int thread) {
      after_attention(l, r0, r1);
      if (l + 1 < end) before_attention(l + 1, r0, r1, thread);
    });
  }
  if (!wanted) return;

  // The last layer goes on for the wanted rows alone: every other has left its keys and values, and nothing reads more of it.
  const auto count = static_cast<int>(wanted->size());
  std::vector<Plan::Tile> tiles;
  size_t next = 0;
  for (const Plan::Tile& tile : plan.tiles) {
    const size_t first = next;
    while (next < wanted->size() && (*wanted)[next] < tile.first_row + tile.tokens) ++next;
    if (next == first) continue;
    const int skipped = (*wanted)[first] - tile.first_row;
    tiles.push_back({(*wanted)[first], (*wanted)[next - 1] - (*wanted)[first] + 1, tile.first_position + skipped, tile.table, tile.pages});
  }
  if (count == 0) return;
  attention(end - 1, tiles);
  for (int i = 0; i < count; ++i) {  // they move together; each to the left or nowhere
    const size_t from = (*wanted)[i], to = i;
    std::memmove(input_of(end - 1) + to * s.width, input_of(end - 1) + from * s.width, s.width * sizeof(float));
    float* o = state_of(end - 1).o.as<float>();
    std::memmove(o + to * c.q_dim(), o + from * c.q_dim(), c.q_dim() * sizeof(float));
  }
  threads = UsefulThreads(weights.bytes().size(), count, engine_.threads().count());
  split = SplitColumns(weights.bytes().size(), count, threads, ops.split_rows);
  stage(count, [&](int r0, int r1, int) { after_attention(end - 1, r0, r1); });
}

void ForwardPass::Head(const ComputeWeights& weights, std::span<const HeadRow> rows, float* logits, float* log_sum_exp,
                       const std::function<void(int, const float*)>& on_row) {
  FlushDenormals mode;
  const ModelConfig& c = weights.config();
  const Shapes s(c);
  const cpu::Ops& ops = engine_.ops(weights.profile());
  const int element = ops.element_bytes;
  const bool bf16 = weights.profile() == Profile::kBf16;
  const auto cap = static_cast<float>(weights.spec().logit_cap);
  const auto count = static_cast<int>(rows.size());
  if (!count) return;
  const int threads = UsefulThreads(weights.bytes().size(), count, engine_.threads().count());
  const bool split = SplitColumns(weights.bytes().size(), count, threads, ops.split_rows);
  scratch_.resize(engine_.threads().count());
  // Rows at a time: all of them when columns are split and the caller keeps them, else a block whose logits fit a cache.
  const RowBlocks blocks(count, split ? 1 : threads, split && logits ? RoundUp(count, 8) : kHeadBlock);
  auto* hi = head_hi_.Get<std::byte>(static_cast<size_t>(count) * s.width_depth * element);
  auto* lo = head_lo_.Get<std::byte>(static_cast<size_t>(count) * s.width_depth * element);
  const auto body = [&](int r0, int r1, int thread) {
    for (int i = r0; i < r1; ++i) {
      const size_t at = static_cast<size_t>(i) * s.width_depth * element;
      float inverse_rms;
      ops.rms_norm(final_x_.as<float>() + static_cast<size_t>(rows[i].row) * s.width, weights.final_gain(),
                   static_cast<float>(c.rms_eps), s.width, s.width_depth, hi + at, bf16 ? lo + at : nullptr, &inverse_rms);
    }
    float* out = logits ? logits + static_cast<size_t>(r0) * s.vocab
                        : scratch_[thread].Get<float>(static_cast<size_t>(kHeadBlock) * s.vocab);
    const size_t first = static_cast<size_t>(r0) * s.width_depth * element;
    cpu::Gemm g = Product(hi + first, s.width_depth, weights.head().data, r1 - r0, s.vocab, out);
    g.a2 = bf16 ? lo + first : nullptr;
    RunGemm(ops, g, split);
    const auto finish = [&](int i) {
      float* row = out + static_cast<size_t>(i - r0) * s.vocab;
      if (cap != 0) ops.soft_cap(row, cap, s.vocab);
      if (rows[i].inv_temperature != 1) ops.scale(row, rows[i].inv_temperature, s.vocab);
      log_sum_exp[i] = ops.log_sum_exp(row, s.vocab);
      if (on_row) on_row(i, row);
    };
    if (split) {
      engine_.threads().Run(r1 - r0, [&](int i, int) { finish(r0 + i); });
    } else {
      for (int i = r0; i < r1; ++i) finish(i);
    }
  };
  if (split || threads == 1) {
    for (int i = 0; i < blocks.count(); ++i) body(blocks.begin(i), blocks.begin(i + 1), 0);
  } else {
    engine_.threads().Run(blocks.count(), [&](int i, int thread) { body(blocks.begin(i), blocks.begin(i + 1), thread); });
  }
}

}  // namespace temper::engine
