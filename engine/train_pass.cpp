#include "engine/train_pass.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include <fmt/format.h>

#include "common/check.h"
#include "engine/bf16.h"
#include "engine/forward.h"
#include "engine/kept_set.h"
#include "engine/rope.h"

namespace temper::engine {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
// Logits of a batch are kept for the backward pass up to this size, else computed again: the same bits either way.
constexpr size_t kKeepLogitsBytes = size_t{256} << 20;
// Head rows whose dlogits live at once in the backward pass; a multiple of 32.
constexpr int kHeadBlock = 256;

// Rows [begin, end) of a tree, computed at once. What lies above them is there as pages only.
struct Chunk {
  int begin = 0, end = 0;
  Plan plan;  // row 0 is `begin`
  // Tiles and pages of one root belong together and touch nothing of another root: the units of attention backward.
  struct Root {
    int first_tile, end_tile;
    int first_page, end_page;  // of `pages`
  };
  std::vector<Root> roots;
  std::vector<int32_t> pages;  // that the tiles read, per root in increasing order
  struct Reader {
    int32_t tile;
    int32_t first_key;  // absolute position of the page
  };
  std::vector<int32_t> reader_begin;  // pages + 1
  std::vector<Reader> readers;        // tiles in increasing order
  int head_begin = 0, head_end = 0;   // of Heads::rows
};

// A tree in pre-order chunks. Whatever a chunk needs from outside lies on the root path of its first row (docs/engine.md), so the pages
// that more than one chunk touches are those of such paths; the others live as long as their chunk.
struct TreePlan {
  std::vector<Chunk> chunks;
  int shared_pages = 0;  // ids below are of pages that several chunks touch, with K and V and fp32 gradients for all layers
  int pages = 0;         // and the most that any chunk has of its own
};

// Where chunks of at most `rows` rows begin. A start close to a root has little above it, so the next chunk may begin up to a quarter early, at a
// row that is shallower by more than the rows given up for it.
std::vector<int32_t> Cuts(const TreeBatch& tree, int rows) {
  std::vector<int32_t> cuts = {0};
  while (rows > 0 && cuts.back() + rows < tree.size()) {
    const int begin = cuts.back();
    int best = begin + rows;
    for (int i = begin + rows; i > begin && i >= begin + rows - rows / 4; --i) {
      if (tree.pos[i] - i < tree.pos[best] - best) best = i;
    }
    cuts.push_back(best);
  }
  return cuts;
}

// A segment is an unforked run of nodes. It shares, by id, the pages that lie wholly above it, continues its parent's last
// page when it is the first child to do so, and otherwise copies the up to 63 positions of that page.
TreePlan PlanTree(const TreeBatch& tree, int tile_tokens, int chunk_rows) {
  TreePlan out;
  Plan plan;  // of the whole tree
  int pages = 0;
  const int n = tree.size();
  plan.token = tree.token;
  plan.position = tree.pos;
  const std::vector<int32_t> cuts = Cuts(tree, chunk_rows);
  std::vector<int32_t> children(n, 0);
  for (int i = 0; i < n; ++i) {
    if (tree.parent[i] >= 0) ++children[tree.parent[i]];
  }
  struct Placed {
    int32_t row, page, position;
  };
  std::vector<Placed> placed;
  std::vector<int32_t> table_of(n);  // per node: offset of its segment's page list
  std::vector<uint8_t> continued;    // per page: a child segment already goes on in it
  const auto new_page = [&] {
    continued.push_back(0);
    return pages++;
  };
  std::vector<int32_t> table;
  for (int begin = 0; begin < n;) {
    int end = begin + 1;
    while (end < n && tree.parent[end] == end - 1 && children[end - 1] == 1) ++end;
    const int u = tree.parent[begin], depth = tree.pos[begin];
    table.clear();
    const int whole = depth / kPagePositions, rest = depth % kPagePositions;
    if (u >= 0) table.assign(plan.tables.begin() + table_of[u], plan.tables.begin() + table_of[u] + whole);
    if (rest) {
      const int parent_page = plan.tables[table_of[u] + whole];
      if (!continued[parent_page]) {
        continued[parent_page] = 1;
        table.push_back(parent_page);
      } else {
        const int page = new_page();
        continued[page] = 1;
        table.push_back(page);
        for (int v = u, i = rest - 1; i >= 0; --i, v = tree.parent[v]) placed.push_back({v, page, i});
      }
    }
    const int last = tree.pos[end - 1];
    while (static_cast<int>(table.size()) <= last / kPagePositions) table.push_back(new_page());
    const auto offset = static_cast<int32_t>(plan.tables.size());
    plan.tables.insert(plan.tables.end(), table.begin(), table.end());
    for (int i = begin; i < end; ++i) {
      table_of[i] = offset;
      placed.push_back({i, table[tree.pos[i] / kPagePositions], tree.pos[i] % kPagePositions});
    }
    for (int i = begin; i < end;) {
      const auto cut = std::upper_bound(cuts.begin(), cuts.end(), i);
      const int tokens = std::min({tile_tokens, end - i, (cut == cuts.end() ? n : *cut) - i});
      plan.tiles.push_back({i, tokens, tree.pos[i], offset, tree.pos[i + tokens - 1] / kPagePositions + 1});
      i += tokens;
    }
    begin = end;
  }
  // Rows to slots, by counting: a row's slots stay in the order in which they were placed.
  plan.slot_begin.assign(n + 1, 0);
  for (const Placed& p : placed) ++plan.slot_begin[p.row + 1];
  for (int i = 0; i < n; ++i) plan.slot_begin[i + 1] += plan.slot_begin[i];
  plan.slots.resize(placed.size());
  std::vector<int32_t> at(plan.slot_begin.begin(), plan.slot_begin.end() - 1);
  for (const Placed& p : placed) plan.slots[at[p.row]++] = {p.page, p.position};
  // Which chunks touch a page, by writing a row into it or by reading it.
  const auto chunk_of = [&](int row) { return static_cast<int32_t>(std::upper_bound(cuts.begin(), cuts.end(), row) - cuts.begin()) - 1; };
  const auto count = static_cast<int32_t>(cuts.size());
  std::vector<int32_t> earliest(pages, count), latest(pages, -1);
  const auto touch = [&](int32_t page, int32_t chunk) {
    earliest[page] = std::min(earliest[page], chunk);
    latest[page] = std::max(latest[page], chunk);
  };
  for (const Placed& p : placed) touch(p.page, chunk_of(p.row));
  for (const Plan::Tile& t : plan.tiles) {
    for (int i = 0; i < t.pages; ++i) touch(plan.tables[t.table + i], chunk_of(t.first_row));
  }
  // Ids: shared pages first, then each chunk's own, which take each other's place.
  std::vector<int32_t> id(pages), own(count, 0);
  for (int page = 0; page < pages; ++page) {
    if (earliest[page] != latest[page]) id[page] = out.shared_pages++;
  }
  out.pages = out.shared_pages;
  for (int page = 0; page < pages; ++page) {
    if (earliest[page] != latest[page]) continue;
    id[page] = out.shared_pages + own[earliest[page]]++;
    out.pages = std::max(out.pages, id[page] + 1);
  }
  for (int32_t& page : plan.tables) page = id[page];
  for (Plan::Slot& slot : plan.slots) slot.page = id[slot.page];
  std::vector<int32_t> root(n);
  for (int i = 0; i < n; ++i) root[i] = tree.parent[i] < 0 ? i : root[tree.parent[i]];

  size_t tile = 0;
  std::vector<int32_t> index(out.pages, -1);
  for (int32_t k = 0; k < count; ++k) {
    Chunk& chunk = out.chunks.emplace_back();
    chunk.begin = cuts[k];
    chunk.end = k + 1 < count ? cuts[k + 1] : n;
    chunk.plan.token.assign(tree.token.begin() + chunk.begin, tree.token.begin() + chunk.end);
    chunk.plan.position.assign(tree.pos.begin() + chunk.begin, tree.pos.begin() + chunk.end);
    const int32_t first_slot = plan.slot_begin[chunk.begin];
    for (int i = chunk.begin; i <= chunk.end; ++i) chunk.plan.slot_begin.push_back(plan.slot_begin[i] - first_slot);
    chunk.plan.slots.assign(plan.slots.begin() + first_slot, plan.slots.begin() + plan.slot_begin[chunk.end]);
    int last_root = -1;
    for (; tile < plan.tiles.size() && plan.tiles[tile].first_row < chunk.end; ++tile) {
      Plan::Tile t = plan.tiles[tile];
      const auto here = static_cast<int>(chunk.plan.tiles.size());
      if (root[t.first_row] != last_root) {
        if (!chunk.roots.empty()) chunk.roots.back().end_tile = here;
        chunk.roots.push_back({here, 0, 0, 0});
        last_root = root[t.first_row];
      }
      const auto list = static_cast<int32_t>(chunk.plan.tables.size());
      // Tiles of one segment come one after the other and read from one list.
      const bool same = here > 0 && plan.tiles[tile - 1].table == t.table && plan.tiles[tile - 1].first_row >= chunk.begin;
      if (same) {
        const Plan::Tile& before = chunk.plan.tiles.back();
        t.table = before.table;
        for (int i = before.pages; i < t.pages; ++i) chunk.plan.tables.push_back(plan.tables[plan.tiles[tile].table + i]);
      } else {
        chunk.plan.tables.insert(chunk.plan.tables.end(), plan.tables.begin() + t.table, plan.tables.begin() + t.table + t.pages);
        t.table = list;
      }
      t.first_row -= chunk.begin;
      chunk.plan.tiles.push_back(t);
    }
    if (!chunk.roots.empty()) chunk.roots.back().end_tile = static_cast<int>(chunk.plan.tiles.size());
    // Pages to tiles.
    for (Chunk::Root& r : chunk.roots) {
      r.first_page = static_cast<int>(chunk.pages.size());
      for (int i = r.first_tile; i < r.end_tile; ++i) {
        const Plan::Tile& t = chunk.plan.tiles[i];
        for (int j = 0; j < t.pages; ++j) {
          const int32_t page = chunk.plan.tables[t.table + j];
          if (index[page] >= 0) continue;
          index[page] = 0;
          chunk.pages.push_back(page);
        }
      }
      std::sort(chunk.pages.begin() + r.first_page, chunk.pages.end());
      r.end_page = static_cast<int>(chunk.pages.size());
    }
    for (size_t i = 0; i < chunk.pages.size(); ++i) index[chunk.pages[i]] = static_cast<int32_t>(i);
    chunk.reader_begin.assign(chunk.pages.size() + 1, 0);
    for (const Plan::Tile& t : chunk.plan.tiles) {
      for (int i = 0; i < t.pages; ++i) ++chunk.reader_begin[index[chunk.plan.tables[t.table + i]] + 1];
    }
    for (size_t i = 0; i < chunk.pages.size(); ++i) chunk.reader_begin[i + 1] += chunk.reader_begin[i];
    chunk.readers.resize(chunk.reader_begin.back());
    at.assign(chunk.reader_begin.begin(), chunk.reader_begin.end() - 1);
    for (size_t t = 0; t < chunk.plan.tiles.size(); ++t) {
      for (int i = 0; i < chunk.plan.tiles[t].pages; ++i) {
        chunk.readers[at[index[chunk.plan.tables[chunk.plan.tiles[t].table + i]]]++] = {static_cast<int32_t>(t), i * kPagePositions};
      }
    }
    for (const int32_t page : chunk.pages) index[page] = -1;
  }
  return out;
}

// Head rows, the kept set each is a softmax over, and the items (children and targets beside them) whose log-probability it gives.
struct Heads {
  std::vector<HeadRow> rows;
  std::vector<int32_t> kept;  // TreeBatch::kept_index
  std::vector<int32_t> child_begin;  // rows + 1
  std::vector<int32_t> child;
};

Heads HeadOf(const TreeBatch& tree, std::span<const uint8_t> wanted) {
  const int n = tree.size(), items = tree.items();
  std::vector<int32_t> begin(n + 1, 0), children;
  // The node from whose logits the item is read; -1: none is.
  const auto source = [&](int item) {
    const int v = tree.node_of(item);
    return wanted.empty() || wanted[v] ? tree.parent[v] : -1;
  };
  for (int i = 0; i < items; ++i) {
    if (source(i) >= 0) ++begin[source(i) + 1];
  }
  for (int i = 0; i < n; ++i) begin[i + 1] += begin[i];
  children.resize(begin[n]);
  std::vector<int32_t> at(begin.begin(), begin.end() - 1);
  for (int i = 0; i < items; ++i) {
    if (source(i) >= 0) children[at[source(i)]++] = i;
  }
  // One head row per node and transform: children drawn at another temperature, or among others, are of another distribution.
  Heads out;
  out.child_begin.assign(1, 0);
  std::vector<int32_t> rest, later;
  for (int u = 0; u < n; ++u) {
    rest.assign(children.begin() + begin[u], children.begin() + begin[u + 1]);
    while (!rest.empty()) {
      const float t = tree.inv_temperature[tree.node_of(rest[0])];
      const int32_t kept = tree.kept_index(tree.node_of(rest[0]));
      later.clear();
      for (int i : rest) {
        const int v = tree.node_of(i);
        (tree.inv_temperature[v] == t && tree.kept_index(v) == kept ? out.child : later).push_back(i);
      }
      out.rows.push_back({u, t});
      out.kept.push_back(kept);
      out.child_begin.push_back(static_cast<int32_t>(out.child.size()));
      rest.swap(later);
    }
  }
  return out;
}

// What decides the size of every buffer.
struct Sizes {
  std::vector<int> rows;  // of the chunks
  int head_rows = 0, chunk_head_rows = 0;  // in all; the most of a chunk
  bool some_rows = false;  // on_row: logits of every row, which nobody keeps
  int64_t pages = 0, shared_pages = 0;
  int64_t root_rows = 0;  // the most queries of a root in a chunk, tiles padded
  int64_t units = 0;      // the most roots of a chunk, times KV heads
  bool keep = true, recompute = false;
};

// Queries of so many tokens in tiles.
int64_t PaddedQueries(const ModelConfig& c, int64_t tokens) {
  const int tile = TileTokens(c), group = c.heads / c.kv_heads;
  return tokens / tile * RoundUp(tile * group, 32) + RoundUp(static_cast<int>(tokens % tile) * group, 32);
}

Sizes SizesOf(const ModelConfig& c, const TreePlan& plan, const Heads& head, const ForwardOptions& options) {
  Sizes out;
  out.keep = options.keep;
  out.recompute = options.recompute;
  out.pages = plan.pages;
  out.shared_pages = plan.shared_pages;
  out.head_rows = static_cast<int>(head.rows.size());
  out.some_rows = static_cast<bool>(options.on_row);
  size_t next = 0;
  for (const Chunk& chunk : plan.chunks) {
    out.rows.push_back(chunk.plan.rows());
    const size_t first = next;
    while (next < head.rows.size() && head.rows[next].row < chunk.end) ++next;
    out.chunk_head_rows = std::max(out.chunk_head_rows, static_cast<int>(next - first));
    out.units = std::max(out.units, static_cast<int64_t>(chunk.roots.size()) * c.kv_heads);
    for (const Chunk::Root& root : chunk.roots) {
      int64_t rows = 0;
      for (int t = root.first_tile; t < root.end_tile; ++t) rows += PaddedQueries(c, chunk.plan.tiles[t].tokens);
      out.root_rows = std::max(out.root_rows, rows);
    }
  }
  return out;
}

// fp32 gradients of the keys, or of the values, of one page and layer.
size_t PageGradientBytes(const ModelConfig& c) { return size_t{4} * kPagePositions * c.kv_heads * Shapes(c).head_width; }

bool KeepsLogits(const ModelConfig& c, const Sizes& z) {
  return z.keep && z.rows.size() == 1 && static_cast<size_t>(z.head_rows) * c.vocab * sizeof(float) <= kKeepLogitsBytes;
}

// Every buffer of a TrainPass by its name: what this says and what State::bytes() counts are held equal by a test.
size_t PassBytes(const ModelConfig& c, Profile profile, int threads, const Sizes& z) {
  const Shapes s(c);
  const size_t e = profile == Profile::kBf16 ? 2 : 4;
  const auto r = [](size_t bytes) { return Buffer::Rounded(bytes); };
  const bool one = z.rows.size() == 1, kept = KeepsLogits(c, z);
  const size_t most = *std::max_element(z.rows.begin(), z.rows.end()), padded = RoundUp(static_cast<int>(most), 32);
  const LayerSpec spec = LayerOf(c, 0);
  const size_t vocab = s.vocab, width = s.width, width16 = RoundUp(s.width, 16), vocab_depth = RoundUp(s.vocab, 32);
  size_t n = z.pages * KvPool::PageBytes(c, profile);
  const Keep keep = !z.keep ? Keep::kNothing : z.recompute ? Keep::kInputs : Keep::kAll;
  const int head_rows = z.some_rows ? static_cast<int>(most) : one ? z.head_rows : z.chunk_head_rows;
  n += ForwardPass::PlannedBytes(c, profile, threads, z.rows, head_rows, kept && !z.some_rows, keep);
  if (kept) n += r(std::max<size_t>(1, z.head_rows) * vocab * 4);
  if (!z.keep) return n;
  // The head of the backward pass.
  n += r(width16 * vocab_depth * e) + r(2 * kHeadBlock * s.width_depth * e) + r(kHeadBlock * vocab_depth * e) + 2 * r(kHeadBlock * width * 4) +
       r(kHeadBlock * width16 * e);
  const bool capped = SpecOf(c).logit_cap != 0;
  size_t scratch = !kept || capped ? 13 * vocab * 4 : 0;
  // A layer.
  const size_t gu_depth = RoundUp(s.gate_up_rows, 32), dqkv_depth = RoundUp(s.qkv_rows, 32), ffn16 = RoundUp(s.ffn, 16), q16 = RoundUp(c.q_dim(), 16);
  n += 2 * r(most * width * 4) + r(most * c.heads * 4);                                                         // dx, dh, delta
  n += r(padded * s.width_depth * e) + r(padded * gu_depth * e) + r(padded * s.q_elements * e) + r(padded * dqkv_depth * e);
  n += r(std::max({ffn16, q16, width16}) * padded * e) + r(width16 * padded * e);                                // panel, panel2
  n += r(e * (ffn16 * s.width_depth + width16 * gu_depth + q16 * s.width_depth + width16 * dqkv_depth));         // wt
  if (spec.qk_norm) n += r(most * c.q_dim() * 4) + r(most * c.kv_dim() * 4);
  n += 2 * r((z.pages - z.shared_pages) * PageGradientBytes(c));
  if (!one) n += 2 * r(std::max<size_t>(4, c.layers * z.shared_pages * PageGradientBytes(c)));
  for (const int rows : z.rows) {
    scratch = std::max(scratch, static_cast<size_t>(RowBlocks(rows, threads).longest()) * std::max({s.ffn, c.q_dim(), s.width}) * 4);
  }
  const size_t attention = z.root_rows * (2 * (s.head_depth + s.head_width) * e + s.head_width * 4) + 2 * kPagePositions * s.head_depth * e +
                           cpu::AttentionScratchBytes(RoundUp(TileTokens(c) * s.group, 32), c.head_dim) + 7 * 64;
  const size_t busy = std::min<int64_t>(threads, z.units);  // threads that have a root and head of their own
  return n + busy * r(std::max(scratch, attention)) + (threads - busy) * r(scratch);
}

PassWork WorkOf(const ModelConfig& c, const TreePlan& plan, const Sizes& z) {
  std::vector<int> windows;
  for (int l = 0; l < c.layers; ++l) windows.push_back(LayerOf(c, l).window);
  PassWork w;
  w.chunks = static_cast<double>(plan.chunks.size());
  w.forward_head_rows = z.head_rows;
  for (const Chunk& chunk : plan.chunks) {
    double pairs = 0;
    for (const Plan::Tile& tile : chunk.plan.tiles) {
      for (const int window : windows) {
        const int passed = window ? std::max(0, tile.first_position - window + 1) / kPagePositions : 0;
        pairs += static_cast<double>(tile.tokens) * (tile.pages - passed) * kPagePositions / c.layers;
      }
    }
    w.forward_rows += chunk.plan.rows();
    w.forward_pairs += pairs;
    if (!z.keep) continue;
    // The last chunk is still there when the backward pass begins.
    const int times = (&chunk != &plan.chunks.back()) + z.recompute;
    w.again_rows += times * chunk.plan.rows();
    w.again_pairs += times * pairs;
  }
  if (!z.keep) return w;
  w.backward_rows = w.forward_rows;
  w.backward_pairs = w.forward_pairs;
  w.backward_head_rows = w.forward_head_rows;
  if (!KeepsLogits(c, z)) w.again_head_rows = w.forward_head_rows;
  return w;
}

}  // namespace

struct TrainPass::State {
  explicit State(Engine& e) : engine(e), pass(e) {}

  Engine& engine;
  ForwardPass pass;
  std::unique_ptr<KvPool> pool;
  int held_pages = 0;
  TreePlan tree_plan;
  const ComputeWeights* weights = nullptr;
  const TreeBatch* tree = nullptr;
  const Chunk* chunk = nullptr;  // whose rows `pass` holds, or is about to
  bool ready = false;  // a forward with keep is done and not yet used
  bool recompute = false;  // of that forward

  Heads head;
  std::vector<float> log_sum_exp;
  bool logits_kept = false;
  Buffer logits;
  std::vector<float> logprobs;

  // Backward.
  Buffer dx, dh, dy, dgu, do_e, dqkv, dq_f, dk_f, delta, dk, dv, shared_dk, shared_dv, panel, panel2, wt, head_e, head_panel, head_dlogits, head_dh,
      head_x, head_wt;
  std::vector<float> head_rms;
  std::vector<Buffer> scratch;

  void PreparePages(const ModelConfig& c, Profile profile);
  // Zeroes the pages that chunks have one after the other.
  void RenewOwnPages();
  void ForwardChunk(const Chunk& next, Keep keep) {
    chunk = &next;
    RenewOwnPages();
    pass.Layers(*weights, *pool, next.plan, keep);
  }
  void Score(const ForwardOptions& options, float* kept_logits);
  void BackwardChunk(std::span<const float> coef, Gradients& grads);
  void MakeHeadRows(std::span<const uint8_t> wanted);
  void BackwardHead(std::span<const float> coef, Gradients& grads);
  void BackwardLayer(int l, Gradients& grads);
  void BackwardAttention(int l);
  size_t bytes() const;
};

TrainPass::TrainPass(Engine& engine) : state_(std::make_unique<State>(engine)) {}
TrainPass::~TrainPass() = default;

size_t TrainPass::State::bytes() const {
  size_t n = pass.bytes();
  if (pool) n += KvPool::PageBytes(pool->config(), pool->profile()) * held_pages;
  for (const Buffer* b : {&logits, &dx, &dh, &dy, &dgu, &do_e, &dqkv, &dq_f, &dk_f, &delta, &dk, &dv, &shared_dk, &shared_dv, &panel, &panel2, &wt,
                          &head_e, &head_panel, &head_dlogits, &head_dh, &head_x, &head_wt}) {
    n += b->bytes();
  }
  for (const Buffer& b : scratch) n += b.bytes();
  return n;
}

size_t TrainPass::bytes() const { return state_->bytes(); }

size_t TrainPass::PlannedBytes(const ModelConfig& c, Profile profile, int threads, const TreeBatch& tree, const ForwardOptions& options) {
  const TreePlan plan = PlanTree(tree, TileTokens(c), options.chunk_nodes);
  return PassBytes(c, profile, threads, SizesOf(c, plan, HeadOf(tree, options.wanted), options));
}

PassWork TrainPass::CountWork(const ModelConfig& c, const TreeBatch& tree, const ForwardOptions& options) {
  const TreePlan plan = PlanTree(tree, TileTokens(c), options.chunk_nodes);
  return WorkOf(c, plan, SizesOf(c, plan, HeadOf(tree, options.wanted), options));
}

size_t TrainPass::EstimateBytes(const ModelConfig& c, Profile profile, int64_t nodes, int64_t branches, bool recompute) {
  Sizes z;
  z.rows = {static_cast<int>(nodes)};
  // Every node a row of logits of its own; all queries below one root, or a root a branch, whichever is more; tiles cut at every branch.
  z.head_rows = z.chunk_head_rows = static_cast<int>(nodes);
  z.pages = nodes / kPagePositions + 2 * branches + 1;
  z.root_rows = PaddedQueries(c, nodes) + 32 * branches;
  z.units = c.kv_heads;
  z.recompute = recompute;
  const size_t bytes = PassBytes(c, profile, kPlannedThreads, z);
  // Logits beyond what is kept are computed again, in scratch: the bound is that of the costlier side.
  z.head_rows = static_cast<int>(std::min<size_t>(nodes, kKeepLogitsBytes / (size_t{4} * c.vocab)));
  return std::max(bytes, PassBytes(c, profile, kPlannedThreads, z));
}

PassChoice ChoosePass(const ModelConfig& c, Profile profile, const TreeBatch& tree, std::span<const uint8_t> wanted, size_t bytes) {
  // Of the arithmetic only what the ways differ in: what is done again, and what each chunk adds. (A fixed price, and no rate of this machine:
  // with the choice the last bits of a gradient would be the machine's.)
  const double layer = static_cast<double>(c.width) * (2.0 * c.q_dim() + 2.0 * c.kv_dim() + 3.0 * c.ffn), row = 2 * c.layers * layer;
  const double pair = 4.0 * c.layers * c.q_dim(), head_row = 2.0 * c.width * c.vocab;
  // A chunk reads and writes the gradient of every weight and turns every matrix: as long as so many rows take.
  constexpr double kChunkRows = 64;
  const Heads head = HeadOf(tree, wanted);
  PassChoice best, least;
  double best_cost = 0;
  // Whether this way fits.
  const auto consider = [&](int chunk_nodes, bool recompute) {
    ForwardOptions options;
    options.wanted = wanted;
    options.chunk_nodes = chunk_nodes;
    options.recompute = recompute;
    const TreePlan plan = PlanTree(tree, TileTokens(c), chunk_nodes);
    const Sizes sizes = SizesOf(c, plan, head, options);
    const size_t need = PassBytes(c, profile, kPlannedThreads, sizes);
    if (least.bytes == 0 || need < least.bytes) least = {chunk_nodes, recompute, need};
    if (need > bytes) return false;
    const PassWork w = WorkOf(c, plan, sizes);
    const double cost = w.again_rows * row + w.again_pairs * pair + w.again_head_rows * head_row + w.chunks * kChunkRows * (row + head_row);
    if (best.bytes == 0 || cost < best_cost) {
      best = {chunk_nodes, recompute, need};
      best_cost = cost;
    }
    return true;
  };
  if (consider(0, false)) return best;
  consider(0, true);
  std::vector<int> sizes;
  for (int64_t n = 64; n < tree.size(); n *= 2) {
    sizes.push_back(static_cast<int>(n));
    if (n + n / 2 < tree.size()) sizes.push_back(static_cast<int>(n + n / 2));
  }
  for (size_t i = sizes.size(); i-- > 0;) {
    if (!consider(sizes[i], false)) consider(sizes[i], true);
  }
  return best.bytes ? best : least;
}

void TrainPass::State::PreparePages(const ModelConfig& c, Profile profile) {
  const int needed = tree_plan.pages;
  const bool fits = pool && pool->capacity() >= needed && pool->profile() == profile &&
                    KvPool::PageBytes(pool->config(), profile) == KvPool::PageBytes(c, profile) &&
                    pool->config().layers == c.layers && pool->config().kv_heads == c.kv_heads;
  if (!fits) {
    pool.reset();
    pool = std::make_unique<KvPool>(c, profile, needed + needed / 4 + 1);
    held_pages = 0;
  }
  // The pool is ours alone, so the plan's page numbers are its ids: released from the last to the first, then taken again.
  for (int i = held_pages - 1; i >= 0; --i) pool->Release(i);
  for (int i = 0; i < needed; ++i) {
    const int page = pool->Allocate();
    TEMPER_CHECK(page == i) << page;
  }
  held_pages = needed;
}

void TrainPass::State::RenewOwnPages() {
  if (tree_plan.chunks.size() == 1) return;  // as they were prepared
  for (int i = held_pages - 1; i >= tree_plan.shared_pages; --i) pool->Release(i);
  for (int i = tree_plan.shared_pages; i < held_pages; ++i) {
    const int page = pool->Allocate();
    TEMPER_CHECK(page == i) << page;
  }
}

void TrainPass::State::MakeHeadRows(std::span<const uint8_t> wanted) {
  head = HeadOf(*tree, wanted);
  int i = 0;
  for (Chunk& c : tree_plan.chunks) {
    c.head_begin = i;
    while (i < static_cast<int>(head.rows.size()) && head.rows[i].row < c.end) ++i;
    c.head_end = i;
  }
}

Result<std::span<const float>> TrainPass::Forward(const ComputeWeights& weights, const TreeBatch& tree,
                                                  const ForwardOptions& options) {
  State& s = *state_;
  const ModelConfig& c = weights.config();
  s.ready = false;
  const int n = tree.size();
  if (n == 0) return InvalidArgument("an empty tree batch");
  TEMPER_CHECK(options.wanted.empty() || static_cast<int>(options.wanted.size()) == n);
  // What is scored where `node` was drawn: its own token, or a target's.
  const auto check_token = [&](int node, int32_t token) -> Status {
    if (token < 0 || token >= c.vocab) return InvalidArgument(fmt::format("token {} is outside the vocabulary of {}", token, c.vocab));
    return tree.kept_index(node) < 0 ? Status::Ok() : CheckKept(tree.kept_set(tree.kept_index(node)), c.vocab, token);
  };
  for (int i = 0; i < n; ++i) {
    if (tree.pos[i] >= c.max_positions) {
      return InvalidArgument(fmt::format("node {}: position {}, the model has {}", i, tree.pos[i], c.max_positions));
    }
    if (!std::isfinite(tree.inv_temperature[i])) {
      return InvalidArgument(fmt::format("node {}: 1/temperature is {}", i, tree.inv_temperature[i]));
    }
    const Status good = check_token(i, tree.token[i]);
    if (!good.ok()) return good.WithContext(fmt::format("node {}", i));
  }
  for (size_t i = 0; i < tree.targets.size(); ++i) {
    const auto [node, token] = tree.targets[i];
    if (node < 0 || node >= n || tree.parent[node] < 0) return InvalidArgument(fmt::format("target {}: node {} was not drawn", i, node));
    const Status good = check_token(node, token);
    if (!good.ok()) return good.WithContext(fmt::format("target {}", i));
  }
  s.weights = &weights;
  s.tree = &tree;
  s.tree_plan = PlanTree(tree, TileTokens(c), options.chunk_nodes);
  s.PreparePages(c, weights.profile());
  s.MakeHeadRows(options.wanted);
  s.recompute = options.recompute;
  s.logprobs.assign(tree.items(), kNan);
  s.log_sum_exp.assign(s.head.rows.size(), 0);
  const bool one = s.tree_plan.chunks.size() == 1;
  s.logits_kept = options.keep && one && s.head.rows.size() * c.vocab * sizeof(float) <= kKeepLogitsBytes;
  float* logits = s.logits_kept ? s.logits.Get<float>(std::max<size_t>(1, s.head.rows.size()) * c.vocab) : nullptr;
  for (const Chunk& chunk : s.tree_plan.chunks) {
    // Of several chunks nothing stays but the shared pages and the last chunk, with which the backward pass begins; it computes the others again.
    const bool stays = options.keep && &chunk == &s.tree_plan.chunks.back();
    s.ForwardChunk(chunk, !stays ? Keep::kNothing : options.recompute ? Keep::kInputs : Keep::kAll);
    s.Score(options, logits);
  }
  s.ready = options.keep;
  return std::span<const float>(s.logprobs);
}

// The log-probabilities that the rows of the chunk give.
void TrainPass::State::Score(const ForwardOptions& options, float* kept_logits) {
  std::vector<HeadRow> rows(head.rows.begin() + chunk->head_begin, head.rows.begin() + chunk->head_end);
  for (HeadRow& row : rows) row.row -= chunk->begin;
  pass.Head(*weights, rows, kept_logits, log_sum_exp.data() + chunk->head_begin, [&](int i, const float* row) {
    i += chunk->head_begin;
    if (head.kept[i] >= 0) log_sum_exp[i] = RowLogSumExp(engine, KeptLogits(tree->kept_set(head.kept[i]), row).values);
    for (int j = head.child_begin[i]; j < head.child_begin[i + 1]; ++j) {
      const int item = head.child[j];
      logprobs[item] = row[tree->token_of(item)] - log_sum_exp[i];
      if (options.on_draw && item < tree->size()) options.on_draw(item, row, log_sum_exp[i]);
    }
  });
  if (!options.on_row) return;
  const int n = chunk->end - chunk->begin;
  std::vector<HeadRow> all(n);
  const float t = options.row_inv_temperature;
  for (int i = 0; i < n; ++i) all[i] = {i, std::isnan(t) ? tree->inv_temperature[chunk->begin + i] : t};
  std::vector<float> lse(n);
  pass.Head(*weights, all, nullptr, lse.data(), [&](int i, const float* row) { options.on_row(chunk->begin + i, row, lse[i]); });
}

std::span<const float> TrainPass::hidden() const {
  const State& s = *state_;
  return {s.pass.final_x(), static_cast<size_t>(s.chunk->plan.rows()) * s.weights->config().width};
}

std::vector<float> TrainPass::KeysValues(int node) const {
  const Chunk& chunk = *state_->chunk;
  TEMPER_CHECK(node >= chunk.begin && node < chunk.end) << "node " << node << " is in no chunk that is held";
  const Plan::Slot& slot = chunk.plan.slots[chunk.plan.slot_begin[node - chunk.begin]];
  return state_->pool->Read(slot.page, slot.position);
}

void TrainPass::Backward(std::span<const float> coef, Gradients& grads) {
  State& s = *state_;
  TEMPER_CHECK(s.ready) << "Backward needs a Forward with keep, and one Forward each";
  TEMPER_CHECK(static_cast<int>(coef.size()) == s.tree->items()) << coef.size() << " coefficients";
  TEMPER_CHECK(grads.flat().size() == static_cast<size_t>(grads.tensors().back().offset + grads.tensors().back().size));
  s.ready = false;
  FlushDenormals mode;
  s.scratch.resize(s.engine.threads().count());
  const std::vector<Chunk>& chunks = s.tree_plan.chunks;
  if (chunks.size() == 1) return s.BackwardChunk(coef, grads);
  // From the last chunk to the first: what a chunk's queries pull on keys above it waits there, in fp32, until their own chunk comes.
  const ModelConfig& c = s.weights->config();
  const size_t floats = static_cast<size_t>(c.layers) * s.tree_plan.shared_pages * c.kv_heads * kPagePositions * Shapes(c).head_width;
  for (Buffer* b : {&s.shared_dk, &s.shared_dv}) std::memset(b->Get<float>(std::max<size_t>(1, floats)), 0, floats * sizeof(float));
  for (size_t k = chunks.size(); k-- > 0;) {
    if (k + 1 < chunks.size()) s.ForwardChunk(chunks[k], s.recompute ? Keep::kInputs : Keep::kAll);
    s.BackwardChunk(coef, grads);
  }
}

void TrainPass::State::BackwardChunk(std::span<const float> coef, Gradients& grads) {
  const ModelConfig& c = weights->config();
  const int rows = chunk->plan.rows();
  const cpu::Ops& ops = engine.ops(weights->profile());
  const auto embedding_scale = static_cast<float>(weights->spec().embedding_scale);
  std::memset(dx.Get<float>(static_cast<size_t>(rows) * c.width), 0, static_cast<size_t>(rows) * c.width * sizeof(float));
  BackwardHead(coef, grads);
  for (int l = c.layers - 1; l >= 0; --l) {
    if (recompute) pass.Again(*weights, *pool, chunk->plan, l);
    BackwardLayer(l, grads);
  }
  // The embedding of every row, in batch order.
  float* embedding = grads.tensor(0).data();
  for (int r = 0; r < rows; ++r) {
    float* row = dx.as<float>() + static_cast<size_t>(r) * c.width;
    if (embedding_scale != 1) ops.scale(row, embedding_scale, c.width);
    ops.add(embedding + static_cast<size_t>(chunk->plan.token[r]) * c.width, row, c.width);
  }
}

void TrainPass::State::BackwardHead(std::span<const float> coef, Gradients& grads) {
  const ModelConfig& c = weights->config();
  const Shapes s(c);
  const cpu::Ops& ops = engine.ops(weights->profile());
  const size_t e = ops.element_bytes;
  Threads& threads = engine.threads();
  // Rows in which nothing pulls are left out.
  std::vector<int> used;
  for (int i = chunk->head_begin; i < chunk->head_end; ++i) {
    for (int j = head.child_begin[i]; j < head.child_begin[i + 1]; ++j) {
      if (coef[head.child[j]] != 0) {
        used.push_back(i);
        break;
      }
    }
  }
  if (used.empty()) return;

  const int vocab_depth = RoundUp(s.vocab, 32), width16 = RoundUp(s.width, 16);
  const Panel& panel_head = weights->head();
  auto* turned = head_wt.Get<std::byte>(static_cast<size_t>(width16) * vocab_depth * e);
  threads.Run(width16 / 16, [&](int i, int) {
    ops.transpose_panel(panel_head.data, panel_head.rows, panel_head.depth, vocab_depth, i * 16, i * 16 + 16, turned);
  });

  auto* hi = head_e.Get<std::byte>(2 * static_cast<size_t>(kHeadBlock) * s.width_depth * e);
  auto* lo = hi + static_cast<size_t>(kHeadBlock) * s.width_depth * e;
  auto* dlogits = head_dlogits.Get<std::byte>(static_cast<size_t>(kHeadBlock) * vocab_depth * e);
  float* dnorm = head_dh.Get<float>(static_cast<size_t>(kHeadBlock) * s.width);
  float* x = head_x.Get<float>(static_cast<size_t>(kHeadBlock) * s.width);
  auto* hi_panel = head_panel.Get<std::byte>(static_cast<size_t>(kHeadBlock) * width16 * e);
  head_rms.resize(kHeadBlock);
  const int head_tensor = HeadIndex(c), norm_tensor = FinalGainIndex(c);
  const auto cap = static_cast<float>(weights->spec().logit_cap);
  float* dw = grads.tensor(head_tensor).data();

  for (size_t begin = 0; begin < used.size(); begin += kHeadBlock) {
    const int count = static_cast<int>(std::min<size_t>(kHeadBlock, used.size() - begin));
    const int padded = RoundUp(count, 32);
    constexpr int kRows = 12;
    threads.Run((count + kRows - 1) / kRows, [&](int block, int thread) {
      const int r0 = block * kRows, r1 = std::min(count, r0 + kRows);
      for (int r = r0; r < r1; ++r) {
        const size_t at = static_cast<size_t>(r) * s.width_depth * e;
        std::memcpy(x + static_cast<size_t>(r) * s.width,
                    pass.final_x() + static_cast<size_t>(head.rows[used[begin + r]].row - chunk->begin) * s.width, s.width * sizeof(float));
        ops.rms_norm(x + static_cast<size_t>(r) * s.width, weights->final_gain(), static_cast<float>(c.rms_eps), s.width,
                     s.width_depth, hi + at, e == 2 ? lo + at : nullptr, &head_rms[r]);
      }
      float* again = nullptr;
      float* capped = nullptr;  // a row of logits before its gradient takes their place
      if (!logits_kept || cap != 0) capped = scratch[thread].Get<float>(static_cast<size_t>(kRows + 1) * s.vocab);
      if (!logits_kept) {
        again = capped + s.vocab;
        cpu::Gemm g;
        g.a = hi + static_cast<size_t>(r0) * s.width_depth * e;
        g.a2 = e == 2 ? lo + static_cast<size_t>(r0) * s.width_depth * e : nullptr;
        g.a_stride = s.width_depth;
        g.b = panel_head.data;
        g.m = r1 - r0;
        g.n = s.vocab;
        g.k = s.width_depth;
        g.c = again;
        g.c_stride = s.vocab;
        ops.gemm(g);
      }
      for (int r = r0; r < r1; ++r) {
        const int i = used[begin + r];
        const float t = head.rows[i].inv_temperature;
        float* row = again ? again + static_cast<size_t>(r - r0) * s.vocab : logits.as<float>() + static_cast<size_t>(i) * s.vocab;
        if (again && cap != 0) ops.soft_cap(row, cap, s.vocab);
        if (again && t != 1) ops.scale(row, t, s.vocab);
        if (cap != 0) std::memcpy(capped, row, s.vocab * sizeof(float));
        // dlogits = 1/T (Σ coef onehot - (Σ coef) softmax), the softmax over the kept tokens and 0 elsewhere
        float total = 0;
        for (int j = head.child_begin[i]; j < head.child_begin[i + 1]; ++j) total += coef[head.child[j]];
        if (head.kept[i] >= 0) {
          KeptLogits kept(tree->kept_set(head.kept[i]), row);
          ops.softmax_scaled(kept.values.data(), log_sum_exp[i], -(total * t), static_cast<int>(kept.values.size()));
          std::memset(row, 0, s.vocab * sizeof(float));
          kept.Scatter(row);
        } else {
          ops.softmax_scaled(row, log_sum_exp[i], -(total * t), s.vocab);
        }
        for (int j = head.child_begin[i]; j < head.child_begin[i + 1]; ++j) {
          row[tree->token_of(head.child[j])] += coef[head.child[j]] * t;
        }
        if (cap != 0) ops.soft_cap_backward(row, capped, 1.0f / (cap * t), s.vocab);
        ops.round(row, s.vocab, vocab_depth, dlogits + static_cast<size_t>(r) * vocab_depth * e);
      }
      cpu::Gemm g;
      g.a = dlogits + static_cast<size_t>(r0) * vocab_depth * e;
      g.a_stride = vocab_depth;
      g.b = turned;
      g.m = r1 - r0;
      g.n = s.width;
      g.k = vocab_depth;
      g.c = dnorm + static_cast<size_t>(r0) * s.width;
      g.c_stride = s.width;
      ops.gemm(g);
    });
    std::memset(dlogits + static_cast<size_t>(count) * vocab_depth * e, 0, static_cast<size_t>(padded - count) * vocab_depth * e);
    threads.Run(width16 / 16, [&](int i, int) {
      ops.pack_rows(hi, s.width_depth, count, s.width, padded, i * 16, i * 16 + 16, hi_panel);
      ops.rms_gain_backward(dnorm, x, head_rms.data(), count, s.width, i * 16, std::min(s.width, i * 16 + 16),
                            grads.tensor(norm_tensor).data());
    });
    constexpr int kVocabRows = 96;
    threads.Run((s.vocab + kVocabRows - 1) / kVocabRows, [&](int i, int) {
      cpu::Gemm g;
      g.a = dlogits + static_cast<size_t>(i) * kVocabRows * e;
      g.a_stride = vocab_depth;
      g.a_transposed = true;
      g.b = hi_panel;
      g.m = std::min(kVocabRows, s.vocab - i * kVocabRows);
      g.n = s.width;
      g.k = padded;
      g.c = dw + static_cast<size_t>(i) * kVocabRows * s.width;
      g.c_stride = s.width;
      g.add = true;
      ops.gemm(g);
    });
    for (int r = 0; r < count; ++r) {  // in order: two head rows may share a row
      const size_t at = static_cast<size_t>(r) * s.width;
      ops.rms_norm_backward(dnorm + at, x + at, weights->final_gain(), head_rms[r], s.width,
                            dx.as<float>() + static_cast<size_t>(head.rows[used[begin + r]].row - chunk->begin) * s.width);
    }
  }
}

// The attention of one layer: from do_e (dO, rounded), q, and the pages to dqkv (rounded, rotated back, through the norms of the
// heads, whose own gradients need dq_f and dk_f: fp32, rotated back).
void TrainPass::State::BackwardAttention(int l) {
  const ModelConfig& c = weights->config();
  const Shapes s(c);
  const cpu::Ops& ops = engine.ops(weights->profile());
  const size_t e = ops.element_bytes;
  const Plan& plan = chunk->plan;
  const int rows = plan.rows();
  const LayerState& state = pass.state(l);
  const ComputeWeights::Layer& w = weights->layer(l);
  const RopeTable& rope = *w.rope;
  const int dqkv_depth = RoundUp(s.qkv_rows, 32);
  const size_t page_floats = static_cast<size_t>(kPagePositions) * s.head_width;
  // Gradients of a page's keys and values: a chunk's own pages for this layer alone, shared ones for all.
  const int shared = tree_plan.shared_pages, own = tree_plan.pages - shared;
  dk.Get<float>(static_cast<size_t>(own) * c.kv_heads * page_floats);
  dv.Get<float>(static_cast<size_t>(own) * c.kv_heads * page_floats);
  const auto gradient_of = [&](const Buffer& own_pages, const Buffer& shared_pages, int page, int h) {
    if (page >= shared) return own_pages.as<float>() + (static_cast<size_t>(page - shared) * c.kv_heads + h) * page_floats;
    return shared_pages.as<float>() + ((static_cast<size_t>(l) * shared + page) * c.kv_heads + h) * page_floats;
  };
  if (w.spec.qk_norm) {
    dq_f.Get<float>(static_cast<size_t>(rows) * c.q_dim());
    dk_f.Get<float>(static_cast<size_t>(rows) * c.kv_dim());
  }
  // The gradient of head h of a row as it was projected, from that of its rotated form, rounded to `out`; `row` is overwritten.
  const auto unrotate = [&](float* row, int r, int h, int heads, const float* gain, Buffer& kept, const Buffer& raw,
                            const Buffer& inverse, std::byte* out) {
    ops.rope_inverse(row, rope.cos(plan.position[r]), rope.sin(plan.position[r]), c.head_dim);
    if (gain) {
      const size_t at = static_cast<size_t>(r) * heads + h;
      float* d_head = kept.as<float>() + at * c.head_dim;
      std::memcpy(d_head, row, c.head_dim * sizeof(float));
      std::memset(row, 0, c.head_dim * sizeof(float));
      ops.rms_norm_backward(d_head, raw.as<float>() + at * c.head_dim, gain, inverse.as<float>()[at], c.head_dim, row);
    }
    ops.round(row, c.head_dim, c.head_dim, out);
  };

  const int units = static_cast<int>(chunk->roots.size()) * c.kv_heads;
  engine.threads().Run(units, [&](int unit, int thread) {
    const Chunk::Root& root = chunk->roots[unit / c.kv_heads];
    const int h = unit % c.kv_heads;
    // Per tile of the root: its rows of q and dO gathered, the same as panels over rows, and dq.
    const int tiles = root.end_tile - root.first_tile;
    std::vector<size_t> first(tiles + 1, 0);  // padded rows before each tile
    for (int t = 0; t < tiles; ++t) {
      first[t + 1] = first[t] + RoundUp(plan.tiles[root.first_tile + t].tokens * s.group, 32);
    }
    const size_t total = first[tiles];
    const int max_rows = RoundUp(TileTokens(c) * s.group, 32);
    const size_t e_bytes = total * s.head_depth * e, panel_bytes = total * s.head_width * e;
    const size_t transposed = static_cast<size_t>(kPagePositions) * s.head_depth * e;
    const size_t dq_bytes = total * s.head_width * sizeof(float);
    const size_t scratch_bytes = cpu::AttentionScratchBytes(max_rows, c.head_dim);
    std::byte* memory =
        scratch[thread].Get<std::byte>(2 * e_bytes + 2 * panel_bytes + 2 * transposed + dq_bytes + scratch_bytes + 7 * 64);
    const auto take = [&](size_t bytes) {
      std::byte* p = memory;
      memory += (bytes + 63) / 64 * 64;
      return p;
    };
    std::byte* q = take(e_bytes);
    std::byte* d_o = take(e_bytes);
    std::byte* q_panel = take(panel_bytes);
    std::byte* do_panel = take(panel_bytes);
    std::byte* values_by_key = take(transposed);
    std::byte* keys_by_dim = take(transposed);
    auto* dq = reinterpret_cast<float*>(take(dq_bytes));
    std::byte* inner = take(scratch_bytes);
    std::memset(dq, 0, dq_bytes);
    const size_t head_bytes = static_cast<size_t>(s.group) * s.head_depth * e;
    for (int t = 0; t < tiles; ++t) {
      const Plan::Tile& tile = plan.tiles[root.first_tile + t];
      for (int i = 0; i < tile.tokens; ++i) {
        const size_t from = (static_cast<size_t>(tile.first_row + i) * s.q_elements + static_cast<size_t>(h) * s.group * s.head_depth) * e;
        const size_t to = (first[t] + static_cast<size_t>(i) * s.group) * s.head_depth * e;
        std::memcpy(q + to, state.q.as<std::byte>() + from, head_bytes);
        std::memcpy(d_o + to, do_e.as<std::byte>() + from, head_bytes);
      }
      const int count = tile.tokens * s.group, padded = RoundUp(count, 32);
      const size_t at = first[t] * s.head_depth * e, panel_at = first[t] * s.head_width * e;
      ops.pack_rows(q + at, s.head_depth, count, s.head_width, padded, 0, s.head_width, q_panel + panel_at);
      ops.pack_rows(d_o + at, s.head_depth, count, s.head_width, padded, 0, s.head_width, do_panel + panel_at);
    }
    for (int p = root.first_page; p < root.end_page; ++p) {
      const int page = chunk->pages[p];
      float* dk_page = gradient_of(dk, shared_dk, page, h);
      float* dv_page = gradient_of(dv, shared_dv, page, h);
      if (page >= shared) {
        std::memset(dk_page, 0, page_floats * sizeof(float));
        std::memset(dv_page, 0, page_floats * sizeof(float));
      }
      ops.transpose_panel(pool->values(page, l, h), s.head_width, kPagePositions, s.head_depth, 0, kPagePositions, values_by_key);
      ops.transpose_panel(pool->keys(page, l, h), kPagePositions, s.head_depth, kPagePositions, 0, s.head_width, keys_by_dim);
      for (int i = chunk->reader_begin[p]; i < chunk->reader_begin[p + 1]; ++i) {
        const int t = chunk->readers[i].tile - root.first_tile;
        const Plan::Tile& tile = plan.tiles[root.first_tile + t];
        // Every row's window may have passed the page.
        if (w.spec.window && tile.first_position - w.spec.window >= chunk->readers[i].first_key + kPagePositions - 1) continue;
        const size_t row = (static_cast<size_t>(h) * rows + tile.first_row) * s.group;
        cpu::AttentionBackward a;
        a.rows = tile.tokens * s.group;
        a.group = s.group;
        a.head_dim = c.head_dim;
        a.first_position = tile.first_position;
        a.first_key = chunk->readers[i].first_key;
        a.q = q + first[t] * s.head_depth * e;
        a.d_o = d_o + first[t] * s.head_depth * e;
        a.q_panel = q_panel + first[t] * s.head_width * e;
        a.d_o_panel = do_panel + first[t] * s.head_width * e;
        a.row_max = state.row_max.as<float>() + row;
        a.row_inverse_sum = state.row_inverse_sum.as<float>() + row;
        a.delta = delta.as<float>() + row;
        a.keys = pool->keys(page, l, h);
        a.values_by_key = values_by_key;
        a.keys_by_dim = keys_by_dim;
        a.scale = static_cast<float>(w.spec.score_scale);
        a.cap = static_cast<float>(w.spec.score_cap);
        a.window = w.spec.window;
        a.dq = dq + first[t] * s.head_width;
        a.dk = dk_page;
        a.dv = dv_page;
        a.scratch = inner;
        ops.attention_backward(a);
      }
    }
    for (int t = 0; t < tiles; ++t) {
      const Plan::Tile& tile = plan.tiles[root.first_tile + t];
      for (int i = 0; i < tile.tokens; ++i) {
        const int r = tile.first_row + i;
        for (int g = 0; g < s.group; ++g) {
          float* row = dq + (first[t] + static_cast<size_t>(i) * s.group + g) * s.head_width;
          const int which = h * s.group + g;
          unrotate(row, r, which, c.heads, w.q_gain, dq_f, state.q_raw, state.rq,
                   dqkv.as<std::byte>() + (static_cast<size_t>(r) * dqkv_depth + which * c.head_dim) * e);
        }
      }
    }
  });

  // A row's dK and dV: the sum over its copies, in slot order.
  const int block = 64;
  engine.threads().Run((rows + block - 1) / block, [&](int item, int) {
    alignas(64) float k[1024], v[1024];  // head_dim <= 1024
    for (int r = item * block; r < std::min(rows, (item + 1) * block); ++r) {
      std::byte* out = dqkv.as<std::byte>() + static_cast<size_t>(r) * dqkv_depth * e;
      for (int h = 0; h < c.kv_heads; ++h) {
        for (int i = plan.slot_begin[r]; i < plan.slot_begin[r + 1]; ++i) {
          const Plan::Slot& slot = plan.slots[i];
          const size_t at = static_cast<size_t>(slot.position) * s.head_width;
          const float* dk_row = gradient_of(dk, shared_dk, slot.page, h) + at;
          const float* dv_row = gradient_of(dv, shared_dv, slot.page, h) + at;
          if (i == plan.slot_begin[r]) {
            std::memcpy(k, dk_row, c.head_dim * sizeof(float));
            std::memcpy(v, dv_row, c.head_dim * sizeof(float));
          } else {
            ops.add(k, dk_row, c.head_dim);
            ops.add(v, dv_row, c.head_dim);
          }
        }
        unrotate(k, r, h, c.kv_heads, w.k_gain, dk_f, state.k_raw, state.rk,
                 out + static_cast<size_t>(s.q_rows + h * c.head_dim) * e);
        ops.round(v, c.head_dim, c.head_dim, out + static_cast<size_t>(s.q_rows + s.kv_rows + h * c.head_dim) * e);
      }
    }
  });
}

void TrainPass::State::BackwardLayer(int l, Gradients& grads) {
  const ModelConfig& c = weights->config();
  const Shapes s(c);
  const cpu::Ops& ops = engine.ops(weights->profile());
  const size_t e = ops.element_bytes;
  Threads& threads = engine.threads();
  const int rows = chunk->plan.rows(), padded = RoundUp(rows, 32);
  const LayerState& state = pass.state(l);
  const ComputeWeights::Layer& w = weights->layer(l);
  const int gu_depth = RoundUp(s.gate_up_rows, 32), dqkv_depth = RoundUp(s.qkv_rows, 32), width16 = RoundUp(s.width, 16);

  // The four matrices turned.
  struct Turn {
    const Panel* from;
    int columns, depth;
    std::byte* to;
  };
  const int ffn16 = RoundUp(s.ffn, 16), q16 = RoundUp(c.q_dim(), 16);
  Turn turns[] = {{&w.down, ffn16, s.width_depth, nullptr},
                  {&w.gate_up, width16, gu_depth, nullptr},
                  {&w.o, q16, s.width_depth, nullptr},
                  {&w.qkv, width16, dqkv_depth, nullptr}};
  size_t bytes = 0;
  int items = 0;
  for (const Turn& t : turns) {
    bytes += static_cast<size_t>(t.columns) * t.depth * e;
    items += t.columns / 16;
  }
  std::byte* memory = wt.Get<std::byte>(bytes);
  for (Turn& t : turns) {
    t.to = memory;
    memory += static_cast<size_t>(t.columns) * t.depth * e;
  }
  threads.Run(items, [&](int item, int) {
    for (const Turn& t : turns) {
      if (item < t.columns / 16) {
        return ops.transpose_panel(t.from->data, t.from->rows, t.from->depth, t.depth, item * 16, item * 16 + 16, t.to);
      }
      item -= t.columns / 16;
    }
  });

  float* residual = dx.as<float>();
  auto* dy_e = dy.Get<std::byte>(static_cast<size_t>(padded) * s.width_depth * e);
  auto* dgu_e = dgu.Get<std::byte>(static_cast<size_t>(padded) * gu_depth * e);
  auto* d_o = do_e.Get<std::byte>(static_cast<size_t>(padded) * s.q_elements * e);
  auto* dqkv_e = dqkv.Get<std::byte>(static_cast<size_t>(padded) * dqkv_depth * e);
  float* dh_f = dh.Get<float>(static_cast<size_t>(rows) * s.width);
  float* delta_f = delta.Get<float>(static_cast<size_t>(rows) * c.heads);
  const auto clear_tail = [&](std::byte* p, int depth) {
    std::memset(p + static_cast<size_t>(rows) * depth * e, 0, static_cast<size_t>(padded - rows) * depth * e);
  };
  clear_tail(dy_e, s.width_depth);
  clear_tail(dgu_e, gu_depth);
  clear_tail(dqkv_e, dqkv_depth);
  // Columns between stacked matrices and beyond them are inputs of a GEMM.
  if (gu_depth != 2 * s.ffn) std::memset(dgu_e, 0, static_cast<size_t>(padded) * gu_depth * e);
  if (dqkv_depth != c.q_dim() + 2 * c.kv_dim()) std::memset(dqkv_e, 0, static_cast<size_t>(padded) * dqkv_depth * e);

  const RowBlocks blocks(rows, threads.count());
  const auto row_gemm = [&](const void* a, int depth, const Turn& turn, int count, int n, float* out, int64_t stride) {
    cpu::Gemm g;
    g.a = a;
    g.a_stride = depth;
    g.b = turn.to;
    g.m = count;
    g.n = n;
    g.k = depth;
    g.c = out;
    g.c_stride = stride;
    ops.gemm(g);
  };
  // dW += dYᵀ X for output rows of a matrix, with X packed over the tokens.
  struct WeightGemm {
    const std::byte* dy;  // E, column of output 0
    int dy_stride;
    int outputs, inputs;
    const std::byte* x_panel;
    float* dw;
  };
  const auto weight_gemms = [&](std::span<const WeightGemm> list) {
    constexpr int kRows = 48;
    int count = 0;
    for (const WeightGemm& m : list) count += (m.outputs + kRows - 1) / kRows;
    threads.Run(count, [&](int item, int) {
      for (const WeightGemm& m : list) {
        const int here = (m.outputs + kRows - 1) / kRows;
        if (item >= here) {
          item -= here;
          continue;
        }
        cpu::Gemm g;
        g.a = m.dy + static_cast<size_t>(item) * kRows * e;
        g.a_stride = m.dy_stride;
        g.a_transposed = true;
        g.b = m.x_panel;
        g.m = std::min(kRows, m.outputs - item * kRows);
        g.n = m.inputs;
        g.k = padded;
        g.c = m.dw + static_cast<size_t>(item) * kRows * m.inputs;
        g.c_stride = m.inputs;
        g.add = true;
        return ops.gemm(g);
      }
    });
  };
  const LayerIndex index(c, l);
  const auto grad = [&](Role role) { return grads.tensor(index[role]).data(); };
  const auto pack = [&](Buffer& to, const std::byte* x, int depth, int cols) {
    const int panels = RoundUp(cols, 16) / 16;
    auto* out = to.Get<std::byte>(static_cast<size_t>(panels) * 16 * padded * e);
    threads.Run(panels, [&](int i, int) { ops.pack_rows(x, depth, rows, cols, padded, i * 16, i * 16 + 16, out); });
    return out;
  };
  // Of `count` vectors of n numbers.
  const auto gain = [&](const float* dnorm, const float* x, const float* r, int count, int n, float* out) {
    threads.Run((n + 15) / 16, [&](int i, int) {
      ops.rms_gain_backward(dnorm, x, r, count, n, i * 16, std::min(n, i * 16 + 16), out);
    });
  };
  // dy_rows = the gradient of what was added to the residual, rounded: the residual's own, or that before the norm of the output.
  const auto output_gradient = [&](int r0, int r1, const float* norm_gain, const Buffer& product, const Buffer& inverse,
                                   float* before, std::byte* dy_rows) {
    for (int r = r0; r < r1; ++r) {
      const float* from = residual + static_cast<size_t>(r) * s.width;
      if (norm_gain) {
        std::memset(before, 0, s.width * sizeof(float));
        ops.rms_norm_backward(from, product.as<float>() + static_cast<size_t>(r) * s.width, norm_gain, inverse.as<float>()[r],
                              s.width, before);
        from = before;
      }
      ops.round(from, s.width, s.width_depth, dy_rows + static_cast<size_t>(r - r0) * s.width_depth * e);
    }
  };
  const auto activate_backward = w.spec.activation == Activation::kSilu ? ops.silu_mul_backward : ops.gelu_mul_backward;

  // MLP and the output projection, row by row.
  // The gain of an output's norm reads the residual's gradient before the layer adds to it.
  if (w.out_gain) gain(residual, state.mlp.as<float>(), state.r_mlp.as<float>(), rows, s.width, grad(Role::kOutGain));
  const size_t stage_floats = static_cast<size_t>(blocks.longest()) * std::max({s.ffn, c.q_dim(), s.width});
  threads.Run(blocks.count(), [&](int item, int thread) {
    const int r0 = blocks.begin(item), r1 = blocks.begin(item + 1);
    float* out = scratch[thread].Get<float>(stage_floats);
    auto* dy_rows = dy_e + static_cast<size_t>(r0) * s.width_depth * e;
    auto* dgu_rows = dgu_e + static_cast<size_t>(r0) * gu_depth * e;
    output_gradient(r0, r1, w.out_gain, state.mlp, state.r_mlp, out, dy_rows);
    row_gemm(dy_rows, s.width_depth, turns[0], r1 - r0, s.ffn, out, s.ffn);
    for (int r = r0; r < r1; ++r) {
      const float* gate = state.gate_up.as<float>() + static_cast<size_t>(r) * s.gate_up_rows;
      auto* to = dgu_rows + static_cast<size_t>(r - r0) * gu_depth * e;
      activate_backward(gate, gate + s.gate_rows, out + static_cast<size_t>(r - r0) * s.ffn, s.ffn, to,
                            to + static_cast<size_t>(s.gate_rows) * e);
    }
    float* dnorm = dh_f + static_cast<size_t>(r0) * s.width;
    row_gemm(dgu_rows, gu_depth, turns[1], r1 - r0, s.width, dnorm, s.width);
    for (int r = r0; r < r1; ++r) {
      const size_t at = static_cast<size_t>(r) * s.width;
      ops.rms_norm_backward(dh_f + at, state.x_mid.as<float>() + at, w.mlp_gain, state.r2.as<float>()[r], s.width, residual + at);
    }
  });
  {
    const std::byte* act = pack(panel, state.act.as<std::byte>(), s.ffn_depth, s.ffn);
    const std::byte* h2 = pack(panel2, state.h2.as<std::byte>(), s.width_depth, s.width);
    const WeightGemm list[] = {
        {dy_e, s.width_depth, s.width, s.ffn, act, grad(Role::kDown)},
        {dgu_e, gu_depth, s.ffn, s.width, h2, grad(Role::kGate)},
        {dgu_e + static_cast<size_t>(s.gate_rows) * e, gu_depth, s.ffn, s.width, h2, grad(Role::kUp)},
    };
    weight_gemms(list);
    gain(dh_f, state.x_mid.as<float>(), state.r2.as<float>(), rows, s.width, grad(Role::kMlpGain));
  }

  if (w.attention_gain) {
    gain(residual, state.attention.as<float>(), state.r_attention.as<float>(), rows, s.width, grad(Role::kAttentionGain));
  }
  threads.Run(blocks.count(), [&](int item, int thread) {
    const int r0 = blocks.begin(item), r1 = blocks.begin(item + 1);
    float* out = scratch[thread].Get<float>(stage_floats);
    auto* dy_rows = dy_e + static_cast<size_t>(r0) * s.width_depth * e;
    output_gradient(r0, r1, w.attention_gain, state.attention, state.r_attention, out, dy_rows);
    row_gemm(dy_rows, s.width_depth, turns[2], r1 - r0, c.q_dim(), out, c.q_dim());
    for (int r = r0; r < r1; ++r) {
      for (int h = 0; h < c.heads; ++h) {
        std::byte* to = d_o + (static_cast<size_t>(r) * s.q_elements + static_cast<size_t>(h) * s.head_depth) * e;
        ops.round(out + static_cast<size_t>(r - r0) * c.q_dim() + h * c.head_dim, c.head_dim, s.head_depth, to);
        delta_f[(static_cast<size_t>(h / s.group) * rows + r) * s.group + h % s.group] =
            ops.dot_delta(to, state.o.as<float>() + static_cast<size_t>(r) * c.q_dim() + h * c.head_dim, c.head_dim);
      }
    }
  });
  {
    const std::byte* o = pack(panel, state.oe.as<std::byte>(), s.q_depth, c.q_dim());
    const WeightGemm list[] = {{dy_e, s.width_depth, s.width, c.q_dim(), o, grad(Role::kO)}};
    weight_gemms(list);
  }
  BackwardAttention(l);
  if (w.spec.qk_norm) {
    gain(dq_f.as<float>(), state.q_raw.as<float>(), state.rq.as<float>(), rows * c.heads, c.head_dim, grad(Role::kQGain));
    gain(dk_f.as<float>(), state.k_raw.as<float>(), state.rk.as<float>(), rows * c.kv_heads, c.head_dim, grad(Role::kKGain));
  }
  if (w.spec.qkv_bias) {
    // A bias is a column of weights whose input is 1: the sum of the rounded gradients.
    const auto sums = [&](int first, int n, float* out) {
      threads.Run((n + 15) / 16, [&](int i, int) {
        ops.column_sums(dqkv_e + static_cast<size_t>(first) * e, dqkv_depth, rows, i * 16, std::min(n, i * 16 + 16), out);
      });
    };
    sums(0, c.q_dim(), grad(Role::kQBias));
    sums(s.q_rows, c.kv_dim(), grad(Role::kKBias));
    sums(s.q_rows + s.kv_rows, c.kv_dim(), grad(Role::kVBias));
  }
  threads.Run(blocks.count(), [&](int item, int) {
    const int r0 = blocks.begin(item), r1 = blocks.begin(item + 1);
    row_gemm(dqkv_e + static_cast<size_t>(r0) * dqkv_depth * e, dqkv_depth, turns[3], r1 - r0, s.width,
             dh_f + static_cast<size_t>(r0) * s.width, s.width);
    for (int r = r0; r < r1; ++r) {
      const size_t at = static_cast<size_t>(r) * s.width;
      ops.rms_norm_backward(dh_f + at, state.x.as<float>() + at, w.input_gain, state.r1.as<float>()[r], s.width, residual + at);
    }
  });
  const std::byte* h1 = pack(panel, state.h1.as<std::byte>(), s.width_depth, s.width);
  const WeightGemm list[] = {
      {dqkv_e, dqkv_depth, c.q_dim(), s.width, h1, grad(Role::kQ)},
      {dqkv_e + static_cast<size_t>(s.q_rows) * e, dqkv_depth, c.kv_dim(), s.width, h1, grad(Role::kK)},
      {dqkv_e + static_cast<size_t>(s.q_rows + s.kv_rows) * e, dqkv_depth, c.kv_dim(), s.width, h1, grad(Role::kV)},
  };
  weight_gemms(list);
  gain(dh_f, state.x.as<float>(), state.r1.as<float>(), rows, s.width, grad(Role::kInputGain));
}

}  // namespace temper::engine
