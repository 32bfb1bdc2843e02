// The one forward pass (engine-internal). TrainPass and PagedForward describe their tokens as a Plan and share everything
// else, which is why decode = prefill = flat row = tree to the bit.
//
// A row of the plan is one token. Its K and V go to one or more page slots (several where a fork copies a page); attention
// runs in tiles, consecutive tokens of one path that read the same list of pages. Rows are split over threads, or, when
// there are few, the columns of each GEMM are; neither can change a bit.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "engine/buffer.h"
#include "engine/cpu/ops.h"
#include "engine/engine.h"
#include "engine/kv_pool.h"
#include "engine/weights.h"

namespace temper::engine {

struct Plan {
  struct Slot {
    int32_t page;      // page id in the pool
    int32_t position;  // 0 … 63 inside it
  };
  struct Tile {
    int32_t first_row;
    int32_t tokens;
    int32_t first_position;
    int32_t table;  // offset of its page list in `tables`
    int32_t pages;
  };
  std::vector<int32_t> token, position;  // per row
  std::vector<int32_t> slot_begin;       // rows + 1 offsets into `slots`
  std::vector<Slot> slots;
  std::vector<Tile> tiles;
  std::vector<int32_t> tables;

  int rows() const { return static_cast<int>(token.size()); }
  void Clear();
};

// Tokens per tile, so that a tile has about a hundred rows of queries. Never changes a bit of the forward.
int TileTokens(const ModelConfig& config);

// Padded sizes of a model, in elements.
struct Shapes {
  explicit Shapes(const ModelConfig& c);
  int width, vocab, ffn;
  int width_depth, ffn_depth, q_depth;  // reduced axes padded to 32: residual, ffn, all heads' output
  int head_depth, head_width;           // head_dim padded to 32 and 16
  int q_rows, kv_rows, qkv_rows;        // panel rows of [q;k;v]
  int gate_rows, gate_up_rows;
  int q_elements;                       // heads * head_depth: a row of rotated queries
  int group;
};

// What a layer leaves for the backward pass. E buffers have rows padded to a multiple of 32. Those of the last lines are there
// only where the layer has such a part (engine/layer.h).
struct LayerState {
  Buffer x;            // fp32 [rows][width]: the residual at the layer's input
  Buffer h1, h2;       // E [rows][width_depth]: normed inputs of attention and MLP
  Buffer r1, r2;       // fp32 [rows]: inverse RMS
  Buffer q;            // E [rows][heads][head_depth], rotated
  Buffer o;            // fp32 [rows][q_dim]: attention output
  Buffer oe;           // E [rows][q_depth]
  Buffer row_max, row_inverse_sum;  // fp32 [kv_heads][rows * group]
  Buffer x_mid;        // fp32: residual between attention and MLP
  Buffer gate_up;      // fp32 [rows][gate_up_rows]
  Buffer act;          // E [rows][ffn_depth]
  Buffer q_raw, k_raw;  // fp32 [rows][q_dim], [rows][kv_dim]: heads before their norm
  Buffer rq, rk;        // fp32 [rows][heads], [rows][kv_heads]: inverse RMS
  Buffer attention, mlp;      // fp32 [rows][width]: outputs before their norm
  Buffer r_attention, r_mlp;  // fp32 [rows]
  size_t bytes() const;
};

// What Layers leaves for a backward pass.
enum class Keep {
  kNothing,
  kInputs,  // the residual at each layer's input; Again computes the rest of a layer when it is needed
  kAll,
};

struct HeadRow {
  int32_t row;
  float inv_temperature;
};

class ForwardPass {
 public:
  explicit ForwardPass(Engine& engine) : engine_(engine) {}

  // Runs all layers. kAll: every layer gets a LayerState of its own, else they share one.
  void Layers(const ComputeWeights& weights, KvPool& pool, const Plan& plan, Keep keep);
  // The same, but the last layer ends with the rows of `wanted` (increasing): final_x then holds them alone, one after the other. Every
  // row leaves its keys and values. Keeps nothing.
  void LayersFor(const ComputeWeights& weights, KvPool& pool, const Plan& plan, std::span<const int32_t> wanted);
  // After Layers with kInputs: state(layer) as kAll would have left it, to the bit. Each layer once, any order; final_x is gone.
  void Again(const ComputeWeights& weights, KvPool& pool, const Plan& plan, int layer);

  // Logits of the given rows, times their 1/T, and log-sum-exp. `logits` (stride vocab) may be null: then rows are computed
  // block by block and live only during `on_row`. on_row (may be empty) runs on engine threads.
  void Head(const ComputeWeights& weights, std::span<const HeadRow> rows, float* logits, float* log_sum_exp,
            const std::function<void(int index, const float* logits)>& on_row);

  // After Layers: the last residual, fp32 [rows][width].
  const float* final_x() const { return final_x_.as<float>(); }
  const LayerState& state(int layer) const { return states_[keep_ == Keep::kAll ? layer : 0]; }
  size_t bytes() const;
  // What bytes() comes to on `threads` threads: after Layers over each of `rows` in turn, the last time with `keep`, and Head of at most
  // `head_rows` of them, whose logits it was given or not.
  static size_t PlannedBytes(const ModelConfig& config, Profile profile, int threads, std::span<const int> rows, int head_rows,
                             bool logits_given, Keep keep);

  // One GEMM, its columns split over the threads when `split`.
  void RunGemm(const cpu::Ops& ops, cpu::Gemm g, bool split);

 private:
  // Layers [begin, end). `again`: the one layer is computed from its kept input. `wanted` (may be null): as in LayersFor.
  void Run(const ComputeWeights& weights, KvPool& pool, const Plan& plan, int begin, int end, bool again,
           const std::span<const int32_t>* wanted);

  Engine& engine_;
  Keep keep_ = Keep::kNothing;
  std::vector<LayerState> states_;
  std::vector<Buffer> inputs_;  // with kInputs, per layer: what stands in for LayerState::x
  Buffer final_x_;
  std::vector<Buffer> scratch_;  // per thread
  Buffer head_hi_, head_lo_;
};

// Row `token` of the embedding panel as fp32.
void EmbeddingRow(const ComputeWeights& weights, int token, float* out);

// Units in parts of near-equal length, the longer ones first: threads that take them one after the other end together.
struct Parts {
  int units = 0, count = 1;
  int begin(int part) const { return units / count * part + std::min(part, units % count); }  // of [0, count]: the end of the one before
};

// The rows a thread takes at a time when rows are split, cut between tiles of rows: one block each of few rows, else long blocks first (of
// `most`) and short ones last, so that all end together although no two run alike.
struct RowBlocks {
  RowBlocks(int rows, int threads, int most = 96);
  int count() const { return static_cast<int>(begins.size()) - 1; }
  int begin(int block) const { return begins[block]; }  // of [0, count()]: the end of the one before
  int longest() const { return begins[1]; }
  std::vector<int> begins;
};
// How many of the threads are worth waking for this many rows of a model whose compute form has so many bytes.
int UsefulThreads(size_t weight_bytes, int rows, int threads);
// True when the columns of GEMMs should be split instead of rows; split_rows is that of cpu::Ops.
bool SplitColumns(size_t weight_bytes, int rows, int threads, int split_rows);

}  // namespace temper::engine
