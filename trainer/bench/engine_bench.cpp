#include "trainer/bench/engine_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <memory>
#include <random>
#include <utility>

#include "common/check.h"
#include "common/json.h"
#include "engine/bf16.h"
#include "engine/buffer.h"
#include "engine/cpu/ops.h"
#include "engine/forward.h"
#include "engine/kv_pool.h"
#include "engine/paged_forward.h"
#include "engine/train_pass.h"
#include "engine/weights.h"
#include "trainer/adamw.h"
#include "trainer/bench/floors.h"
#include "trainer/bench/peer.h"

namespace temper::trainer::bench {
namespace {

using engine::Buffer;
using engine::ComputeWeights;
using engine::kPagePositions;
using engine::KvPool;
using engine::ModelConfig;
using engine::PagedForward;
using engine::PagedSequence;
using engine::Profile;

double Median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  const size_t n = x.size();
  return n == 0 ? 0 : n % 2 ? x[n / 2] : (x[n / 2 - 1] + x[n / 2]) / 2;
}

constexpr char kLoop[] = "a loop of the same bytes and arithmetic";

// Ours and something else in turn, as rates.
Row Compare(const std::string& work, const std::string& name, const std::string& unit, const std::string& reference,
            const std::vector<double>& ours, const std::vector<double>& theirs) {
  Row row{.work = work, .name = name, .unit = unit, .reference = reference, .samples = ours};
  std::vector<double> ratios;
  for (size_t i = 0; i < ours.size(); ++i) ratios.push_back(ours[i] / theirs[i]);
  row.ours = Median(ours);
  row.theirs = Median(theirs);
  row.ratio = Median(ratios);
  return row;
}

// Numbers that are no denormals and stay moderate.
void Fill(std::byte* to, size_t count, Profile profile, uint64_t seed) {
  std::mt19937_64 rng(seed);
  for (size_t i = 0; i < count; ++i) {
    const float x = static_cast<float>(static_cast<int>(rng() % 2001) - 1000) / 1000;
    if (profile == Profile::kBf16) {
      reinterpret_cast<uint16_t*>(to)[i] = engine::ToBf16(x);
    } else {
      reinterpret_cast<float*>(to)[i] = x;
    }
  }
}

// As its config.json has it.
ModelConfig SmolLm2Config() {
  ModelConfig c;
  c.vocab = 49152;
  c.layers = 30;
  c.width = 576;
  c.heads = 9;
  c.kv_heads = 3;
  c.head_dim = 64;
  c.ffn = 1536;
  c.max_positions = 32768;  // the model's own is 8192; `growth` goes on
  c.rope_theta = 100000;
  return c;
}

std::string ConfigJson(const ModelConfig& c) {
  json::object o{{"model_type", engine::FamilyName(c.family)},
                 {"vocab_size", c.vocab},
                 {"num_hidden_layers", c.layers},
                 {"hidden_size", c.width},
                 {"num_attention_heads", c.heads},
                 {"num_key_value_heads", c.kv_heads},
                 {"head_dim", c.head_dim},
                 {"intermediate_size", c.ffn},
                 {"max_position_embeddings", c.max_positions},
                 {"rope_theta", c.rope_theta},
                 {"rms_norm_eps", c.rms_eps},
                 {"tie_word_embeddings", c.tied}};
  return PrintJson(o);
}

class Bench {
 public:
  Bench(engine::Engine& engine, const Options& options, std::vector<std::unique_ptr<Peer>> peers,
        const std::function<void(const Row&)>& emit)
      : engine_(engine), options_(options), peers_(std::move(peers)), emit_(emit) {
    cold_.Get<std::byte>(kColdBytes);
    Fill(cold_.as<std::byte>(), kColdBytes / engine_.ops(options_.profile).element_bytes, options_.profile, 1);
  }

  Status Gemm();
  Status Decode();
  Status Prefill();
  Status Attention();
  Status Step();
  Status Growth();

 private:
  static constexpr size_t kColdBytes = size_t{160} << 20;  // several times any last-level cache we know of a few cores' share

  // Samples of `ours` (seconds each) beside those of the peers, and the rows they make. `work_done` turns seconds into the unit.
  Status AgainstPeers(const std::string& work, const std::string& name, const std::string& unit, double work_done,
                      const std::vector<std::pair<std::string, std::string>>& requests, const std::function<double()>& ours) {
    for (const auto& peer : peers_) {
      for (const auto& [label, request] : requests) {
        std::vector<double> mine, theirs;
        for (int i = -1; i < options_.samples; ++i) {  // the first of each warms up
          const double s = ours();
          ASSIGN_OR_RETURN(const double t, peer->Measure(request));
          if (i < 0) continue;
          mine.push_back(work_done / s);
          theirs.push_back(work_done / t);
        }
        emit_(Compare(work, name, unit, peer->name() + " " + label, mine, theirs));
      }
    }
    return Status::Ok();
  }

  template <typename Body>
  double Seconds(const Body& body) const {
    const double begin = Now(options_.clock);
    body();
    return Now(options_.clock) - begin;
  }

  // Seconds of [m][k] times cold [k][n] as a pass of the engine computes it, at each call.
  std::function<double()> Product(int m, int n, int k) {
    struct State {
      explicit State(engine::Engine& engine) : pass(engine) {}
      engine::ForwardPass pass;
      Buffer a, c;
      size_t turn = 0;
    };
    const engine::cpu::Ops& ops = engine_.ops(options_.profile);
    const size_t row_bytes = static_cast<size_t>(k) * ops.element_bytes, bytes = row_bytes * n;
    auto state = std::make_shared<State>(engine_);
    Fill(state->a.Get<std::byte>(row_bytes * m), static_cast<size_t>(m) * k, options_.profile, 2);
    state->c.Get<float>(static_cast<size_t>(m) * n);
    return [=, this, &ops] {
      engine::cpu::Gemm g;
      g.a = state->a.as<std::byte>();
      g.a_stride = g.k = k;
      g.b = cold_.as<std::byte>() + state->turn++ % std::max<size_t>(1, kColdBytes / bytes) * bytes;
      g.m = m;
      g.n = g.c_stride = n;
      g.c = state->c.as<float>();
      const int threads = engine_.threads().count();
      if (m < 192 * threads) return Seconds([&] { state->pass.RunGemm(ops, g, threads > 1); });
      const int block = engine::RowBlock(m, threads);
      return Seconds([&] {
        engine_.threads().Run((m + block - 1) / block, [&](int i, int) {
          engine::cpu::Gemm mine = g;
          mine.a = state->a.as<std::byte>() + static_cast<size_t>(i) * block * row_bytes;
          mine.c = g.c + static_cast<size_t>(i) * block * n;
          mine.m = std::min(block, m - i * block);
          ops.gemm(mine);
        });
      });
    };
  }

  const ComputeWeights& SmolWeights() {
    if (weights_.empty()) {
      ModelConfig c = Model();
      weights_ = ComputeWeights::FromParameters(engine::InitParameters(c, 1), options_.profile);
    }
    return weights_;
  }
  ModelConfig Model() const {
    ModelConfig c = SmolLm2Config();
    if (options_.layers) c.layers = options_.layers;
    return c;
  }
  std::string ModelName() const {
    return options_.layers ? fmt::format("SmolLM2-135M, {} layers", options_.layers) : std::string("SmolLM2-135M");
  }

  engine::Engine& engine_;
  const Options& options_;
  std::vector<std::unique_ptr<Peer>> peers_;
  const std::function<void(const Row&)>& emit_;
  Buffer cold_;
  ComputeWeights weights_;
};

Status Bench::Gemm() {
  struct Shape {
    const char* name;
    int n, k;
  };
  const size_t element_bytes = engine_.ops(options_.profile).element_bytes;
  for (const Shape& shape : {Shape{"SmolLM2-135M gate and up", 3072, 576}, Shape{"SmolLM2-135M down", 576, 1536},
                             Shape{"Qwen3-0.6B gate and up", 6144, 1024}, Shape{"Qwen3-0.6B down", 1024, 3072}}) {
    const size_t elements = static_cast<size_t>(shape.n) * shape.k, bytes = elements * element_bytes;
    for (int m : {1, 4, 8, 16, 32, 64, 256, 512}) {
      // Several in a row, as a pass computes them: one alone would begin with caches full of what others have read.
      const int repeats = m <= 64 ? 8 : 1;
      const auto ours = [&, product = Product(m, shape.n, shape.k)] {
        double seconds = 0;
        for (int i = 0; i < repeats; ++i) seconds += product();
        return seconds / repeats;
      };
      const double flops = 2.0 * m * static_cast<double>(elements);
      const std::string name = fmt::format("{}, {} x {} x {}", shape.name, m, shape.n, shape.k);
      std::vector<double> rates, floors, limits;
      bool memory = false;
      ours();
      for (int i = 0; i < options_.samples; ++i) {
        const double by_memory =
            static_cast<double>(bytes) / ReadBandwidth(engine_, {cold_.as<std::byte>(), kColdBytes}, options_.clock);
        const double by_arithmetic = flops / PeakFlops(engine_, options_.clock);
        memory = by_memory > by_arithmetic;
        floors.push_back(flops / std::max(by_memory, by_arithmetic) / 1e9);
        if (m <= 64) {
          const std::vector<Stretch> all = {{{cold_.as<std::byte>(), kColdBytes}, m}};
          limits.push_back(flops / (ReadAndMultiply(engine_, options_.profile, all, options_.clock) * bytes / kColdBytes) / 1e9);
        }
        rates.push_back(flops / ours() / 1e9);
      }
      emit_(Compare("gemm", name, "GFLOP/s", memory ? "read bandwidth, weights cold" : "peak of fp32 multiply-adds", rates,
                    floors));
      if (m <= 64) emit_(Compare("gemm", name, "GFLOP/s", kLoop, rates, limits));
      std::vector<std::pair<std::string, std::string>> requests;
      for (const auto& [label, library, dtype] : std::initializer_list<std::array<const char*, 3>>{
               {"float32", "torch", "float32"},
               {"bfloat16", "torch", "bfloat16"},
               {"oneDNN float32, weights packed before", "onednn", "float32"},
               {"OpenBLAS float32", "openblas", "float32"}}) {
        requests.emplace_back(
            label, fmt::format(R"({{"work":"gemm","m":{},"n":{},"k":{},"library":"{}","dtype":"{}","repeats":{}}})", m, shape.n,
                               shape.k, library, dtype, repeats));
      }
      RETURN_IF_ERROR(AgainstPeers("gemm", name, "GFLOP/s", flops / 1e9, requests, ours));
    }
  }
  return Status::Ok();
}

// Multiply-adds of a forward pass over a token, times two; attention not counted.
double ForwardFlops(const ModelConfig& c, bool head) {
  const double layer = static_cast<double>(c.width) * (c.q_dim() * 2 + 2 * c.kv_dim() + 3.0 * c.ffn);
  return 2 * (c.layers * layer + (head ? static_cast<double>(c.width) * c.vocab : 0));
}

Status Bench::Decode() {
  constexpr int kContext = 128;
  const ComputeWeights& weights = SmolWeights();
  const ModelConfig& c = weights.config();
  const size_t element_bytes = engine_.ops(options_.profile).element_bytes;
  for (int batch : {1, 4, 16, 64}) {
    const int pages_each = (kContext + kPagePositions) / kPagePositions;
    KvPool pool(c, options_.profile, batch * pages_each);
    PagedForward pass(engine_, pool);
    std::vector<std::vector<int32_t>> pages(batch);
    std::vector<int32_t> prompt(kContext);
    for (int i = 0; i < kContext; ++i) prompt[i] = (i * 7919 + 3) % c.vocab;
    for (int b = 0; b < batch; ++b) {
      for (int i = 0; i < pages_each; ++i) pages[b].push_back(pool.Allocate());
      if (b == 0) {
        pass.Run(weights, std::vector<PagedSequence>{{prompt, 0, pages[0], {}, 1}});
      } else {
        for (int i = 0; i < kContext / kPagePositions; ++i) pool.CopyPrefix(pages[0][i], pages[b][i], kPagePositions);
      }
    }
    std::vector<int32_t> next(batch);
    for (int b = 0; b < batch; ++b) next[b] = (b * 104729 + 11) % c.vocab;
    const int32_t last[] = {0};
    const auto ours = [&] {
      std::vector<PagedSequence> step;
      for (int b = 0; b < batch; ++b) step.push_back({std::span(next).subspan(b, 1), kContext, pages[b], last, 1});
      return Seconds([&] { pass.Run(weights, step); });
    };
    const double positions = static_cast<double>(batch) * (kContext + 1);
    const double kv_bytes = positions / kPagePositions * static_cast<double>(KvPool::PageBytes(c, options_.profile));
    const double bytes = static_cast<double>(weights.bytes().size()) + kv_bytes;
    // The head's panels meet a batch twice (its split), a sequence's keys and values the query heads that share them.
    const size_t head_bytes = static_cast<size_t>(weights.head().rows) * weights.head().depth * element_bytes;
    const std::vector<Stretch> stretches = {
        {weights.bytes().subspan(head_bytes), batch},
        {weights.bytes().first(head_bytes), options_.profile == Profile::kBf16 ? 2 * batch : batch},
        {{pool.keys(0, 0, 0), static_cast<size_t>(kv_bytes)}, c.heads / c.kv_heads}};
    std::vector<double> rates, floors, limits;
    ours();
    for (int i = 0; i < options_.samples; ++i) {
      floors.push_back(batch / (bytes / ReadBandwidth(engine_, weights.bytes(), options_.clock)));
      limits.push_back(batch / ReadAndMultiply(engine_, options_.profile, stretches, options_.clock));
      rates.push_back(batch / ours());
    }
    const std::string name = fmt::format("{}, batch {}, context {}", ModelName(), batch, kContext);
    emit_(Compare("decode", name, "tokens/s", "read bandwidth of weights and pages", rates, floors));
    emit_(Compare("decode", name, "tokens/s", kLoop, rates, limits));
    std::vector<std::pair<std::string, std::string>> requests;
    for (const char* dtype : {"float32", "bfloat16"}) {
      requests.emplace_back(dtype, fmt::format(R"({{"work":"decode","config":{},"batch":{},"context":{},"dtype":"{}"}})",
                                               ConfigJson(c), batch, kContext, dtype));
    }
    RETURN_IF_ERROR(AgainstPeers("decode", name, "tokens/s", batch, requests, ours));
  }
  return Status::Ok();
}

Status Bench::Prefill() {
  constexpr int kTokens = 512;
  const ComputeWeights& weights = SmolWeights();
  const ModelConfig& c = weights.config();
  KvPool pool(c, options_.profile, kTokens / kPagePositions);
  PagedForward pass(engine_, pool);
  std::vector<int32_t> pages, ids(kTokens);
  for (int i = 0; i < kTokens / kPagePositions; ++i) pages.push_back(pool.Allocate());
  for (int i = 0; i < kTokens; ++i) ids[i] = (i * 7919 + 3) % c.vocab;
  const int32_t last[] = {kTokens - 1};
  const auto ours = [&] { return Seconds([&] { pass.Run(weights, std::vector<PagedSequence>{{ids, 0, pages, last, 1}}); }); };
  std::vector<double> rates, floors;
  ours();
  for (int i = 0; i < options_.samples; ++i) {
    floors.push_back(PeakFlops(engine_, options_.clock) / ForwardFlops(c, false));
    rates.push_back(kTokens / ours());
  }
  const std::string name = fmt::format("{}, {} tokens", ModelName(), kTokens);
  emit_(Compare("prefill", name, "tokens/s", "peak of fp32 multiply-adds, attention not counted", rates, floors));
  std::vector<std::pair<std::string, std::string>> requests;
  for (const char* dtype : {"float32", "bfloat16"}) {
    requests.emplace_back(
        dtype, fmt::format(R"({{"work":"prefill","config":{},"tokens":{},"dtype":"{}"}})", ConfigJson(c), kTokens, dtype));
  }
  return AgainstPeers("prefill", name, "tokens/s", kTokens, requests, ours);
}

Status Bench::Attention() {
  constexpr int kTokens = 1024;
  const ModelConfig c = SmolLm2Config();
  const engine::cpu::Ops& ops = engine_.ops(options_.profile);
  const engine::Shapes s(c);
  const int pages = kTokens / kPagePositions, tile = engine::TileTokens(c), rows = tile * s.group;
  const auto e = static_cast<size_t>(ops.element_bytes);
  const auto key_bytes = static_cast<int64_t>(e) * kPagePositions * s.head_depth;
  const auto value_bytes = static_cast<int64_t>(e) * kPagePositions * s.head_width;
  Buffer q, kv, o, d_o;
  Fill(q.Get<std::byte>(e * kTokens * s.q_elements), static_cast<size_t>(kTokens) * s.q_elements, options_.profile, 3);
  Fill(d_o.Get<std::byte>(e * kTokens * s.q_elements), static_cast<size_t>(kTokens) * s.q_elements, options_.profile, 5);
  const size_t kv_elements = static_cast<size_t>(pages) * c.kv_heads * (key_bytes + value_bytes) / e;
  Fill(kv.Get<std::byte>(kv_elements * e), kv_elements, options_.profile, 4);
  o.Get<float>(static_cast<size_t>(kTokens) * c.q_dim());
  std::vector<float> row_max(static_cast<size_t>(c.kv_heads) * kTokens * s.group), inverse(row_max.size()),
      delta(row_max.size(), 0.1f);
  std::vector<int32_t> table(pages);
  for (int i = 0; i < pages; ++i) table[i] = i;
  std::vector<Buffer> scratch(engine_.threads().count()), backward(engine_.threads().count());
  for (Buffer& b : scratch) b.Get<std::byte>(engine::cpu::AttentionScratchBytes(rows, c.head_dim));
  const int64_t page_bytes = c.kv_heads * (key_bytes + value_bytes);
  const int tiles = (kTokens + tile - 1) / tile;
  const auto forward = [&] {
    return Seconds([&] {
      engine_.threads().Run(tiles * c.kv_heads, [&](int item, int thread) {
        const int first = item / c.kv_heads * tile, h = item % c.kv_heads;
        engine::cpu::AttentionForward a;
        a.q =
            q.as<std::byte>() + (static_cast<size_t>(first) * s.q_elements + static_cast<size_t>(h) * s.group * s.head_depth) * e;
        a.q_stride = s.q_elements;
        a.tokens = std::min(tile, kTokens - first);
        a.group = s.group;
        a.head_dim = c.head_dim;
        a.first_position = first;
        a.keys = kv.as<std::byte>() + h * (key_bytes + value_bytes);
        a.values = a.keys + key_bytes;
        a.page_bytes = page_bytes;
        a.pages = table.data();
        a.scale = 0.125f;
        a.o = o.as<float>() + static_cast<size_t>(first) * c.q_dim() + h * s.group * c.head_dim;
        a.o_stride = c.q_dim();
        const size_t at = (static_cast<size_t>(h) * kTokens + first) * s.group;
        a.row_max = row_max.data() + at;
        a.row_inverse_sum = inverse.data() + at;
        a.scratch = scratch[thread].as<std::byte>();
        ops.attention_forward(a);
      });
    });
  };
  // Every (tile, page) with its products; panels are made once, as TrainPass makes them once a tile or page.
  const int padded = (rows + 31) / 32 * 32;
  Buffer q_rows, panel;
  Fill(q_rows.Get<std::byte>(e * padded * s.head_depth), static_cast<size_t>(padded) * s.head_depth, options_.profile, 6);
  Fill(panel.Get<std::byte>(e * 16 * padded * s.head_depth), static_cast<size_t>(16) * padded * s.head_depth, options_.profile,
       7);
  for (Buffer& b : backward) b.Get<float>(static_cast<size_t>(rows + 2 * kPagePositions) * s.head_width);
  const auto back = [&] {
    return Seconds([&] {
      engine_.threads().Run(tiles * c.kv_heads, [&](int item, int thread) {
        const int first = item / c.kv_heads * tile, h = item % c.kv_heads;
        engine::cpu::AttentionBackward a;
        a.rows = std::min(tile, kTokens - first) * s.group;
        a.group = s.group;
        a.head_dim = c.head_dim;
        a.first_position = first;
        a.q = a.d_o = q_rows.as<std::byte>();
        a.q_panel = a.d_o_panel = panel.as<std::byte>();
        const size_t at = (static_cast<size_t>(h) * kTokens + first) * s.group;
        a.row_max = row_max.data() + at;
        a.row_inverse_sum = inverse.data() + at;
        a.delta = delta.data() + at;
        a.scale = 0.125f;
        a.dq = backward[thread].as<float>();
        a.dk = a.dq + static_cast<size_t>(rows) * s.head_width;
        a.dv = a.dk + static_cast<size_t>(kPagePositions) * s.head_width;
        a.scratch = scratch[thread].as<std::byte>();
        for (int page = 0; page * kPagePositions < first + a.rows / s.group; ++page) {
          a.first_key = page * kPagePositions;
          a.keys = kv.as<std::byte>() + page * page_bytes + h * (key_bytes + value_bytes);
          a.values_by_key = a.keys;
          a.keys_by_dim = static_cast<const std::byte*>(a.keys) + key_bytes;
          ops.attention_backward(a);
        }
      });
    });
  };
  // Products of this model: gate and up.
  const auto product = Product(512, 3072, 576);
  const double flops = 2.0 * 512 * 3072 * 576;
  // What a causal row needs: query i sees i + 1 keys.
  const double pairs = static_cast<double>(kTokens) * (kTokens + 1) / 2 * c.heads;
  forward();
  back();
  product();
  std::vector<double> f, b, rate;
  for (int i = 0; i < options_.samples; ++i) {
    f.push_back(pairs * 2 * 2 * c.head_dim / forward() / 1e9);
    b.push_back(pairs * 2 * 5 * c.head_dim / back() / 1e9);
    rate.push_back(flops / product() / 1e9);
  }
  const std::string name = fmt::format("SmolLM2-135M, one layer, {} tokens", kTokens);
  emit_(Compare("attention", name + ", forward", "GFLOP/s", "our product of 512 rows", f, rate));
  emit_(Compare("attention", name + ", backward", "GFLOP/s", "our product of 512 rows", b, rate));
  return Status::Ok();
}

Status Bench::Step() {
  const ModelConfig c = Model();
  engine::Parameters params = engine::InitParameters(c, 1);
  engine::Gradients grads(c);
  AdamW adamw(c);
  const AdamWOptions adam;
  engine::TreeBuilder builder;
  const float t = 1;
  for (int r = 0; r < options_.step_rows; ++r) {
    std::vector<int32_t> ids(options_.step_length);
    for (int i = 0; i < options_.step_length; ++i) ids[i] = (i * 7919 + r * 104729 + 3) % c.vocab;
    builder.AddRow(ids, std::span(&t, 1));
  }
  const engine::TreeBatch tree = builder.Build(nullptr);
  const std::vector<float> coef(tree.size(), 1.0f / static_cast<float>(tree.size()));
  engine::TrainPass pass(engine_);
  Buffer memory;
  const auto ours = [&] {
    return Seconds([&] {
      const ComputeWeights weights = engine::Repack(params, options_.profile, engine_.threads(), memory);
      const auto logprobs = pass.Forward(weights, tree);
      TEMPER_CHECK(logprobs.ok()) << logprobs.status().ToString();
      grads.SetZero();
      pass.Backward(coef, grads);
      const auto report = adamw.Step(engine_, adam, grads, params);
      TEMPER_CHECK(report.ok()) << report.status().ToString();
    });
  };
  std::vector<double> rates, floors;
  const double tokens = tree.size();
  ours();
  for (int i = 0; i < options_.samples; ++i) {
    floors.push_back(PeakFlops(engine_, options_.clock) / (3 * ForwardFlops(c, true)));
    rates.push_back(tokens / ours());
  }
  const std::string name = fmt::format("{}, {} rows of {} tokens", ModelName(), options_.step_rows, options_.step_length);
  emit_(Compare("step", name, "tokens/s", "peak of fp32 multiply-adds, attention not counted", rates, floors));
  std::vector<std::pair<std::string, std::string>> requests;
  for (const char* mode : {"float32", "autocast", "bfloat16"}) {
    requests.emplace_back(mode, fmt::format(R"({{"work":"step","config":{},"rows":{},"length":{},"mode":"{}"}})", ConfigJson(c),
                                            options_.step_rows, options_.step_length, mode));
  }
  return AgainstPeers("step", name, "tokens/s", tokens, requests, ours);
}

Status Bench::Growth() {
  const ComputeWeights& weights = SmolWeights();
  const ModelConfig& c = weights.config();
  constexpr int kChunk = 512;
  // Lengths double up to the longest; what each doubling costs beside twice the half of it.
  const int longest = std::min(options_.growth_tokens, c.max_positions);
  KvPool pool(c, options_.profile, longest / kPagePositions + 1);
  PagedForward pass(engine_, pool);
  std::vector<int32_t> pages, ids(longest);
  for (int i = 0; i <= longest / kPagePositions; ++i) pages.push_back(pool.Allocate());
  for (int i = 0; i < longest; ++i) ids[i] = (i * 7919 + 3) % c.vocab;
  const auto run = [&](int from, int to) {
    return Seconds([&] {
      for (int at = from; at < to; at += kChunk) {
        pass.Run(weights, std::vector<PagedSequence>{{std::span(ids).subspan(at, std::min(kChunk, to - at)), at, pages, {}, 1}});
      }
    });
  };
  double done = run(0, std::min(kChunk, longest));
  for (int length = kChunk; length < longest; length *= 2) {
    const int to = std::min(2 * length, longest);
    const double more = run(length, to);
    Row row;
    row.work = "growth";
    row.name = fmt::format("{}, one row, tokens {} to {}", ModelName(), length, to);
    row.unit = "tokens/s";
    row.reference = fmt::format("tokens 0 to {}", length);
    row.ours = (to - length) / more;
    row.theirs = length / done;
    row.ratio = row.ours / row.theirs;
    row.samples = {row.ours};
    emit_(row);
    done += more;
  }
  return Status::Ok();
}

}  // namespace

const std::vector<std::string>& Works() {
  static const std::vector<std::string> works = {"gemm", "decode", "prefill", "attention", "step", "growth"};
  return works;
}

const std::vector<std::string>& Peers() {
  static const std::vector<std::string> peers = {"torch"};
  return peers;
}

Status RunEngineBench(engine::Engine& engine, const Options& options, const std::function<void(const Row&)>& emit) {
  std::vector<std::unique_ptr<Peer>> peers;
  for (const std::string& name : options.peers) {
    ASSIGN_OR_RETURN(auto peer, Peer::Start(options.peer_program, options.peer_script, name, engine.threads().count(),
                                            engine::CpuPathName(engine.path()), options.clock == Clock::kCpu ? "cpu" : "wall"));
    peers.push_back(std::move(peer));
  }
  Bench bench(engine, options, std::move(peers), emit);
  for (const std::string& work : options.works.empty() ? Works() : options.works) {
    if (work == "gemm") RETURN_IF_ERROR(bench.Gemm());
    if (work == "decode") RETURN_IF_ERROR(bench.Decode());
    if (work == "prefill") RETURN_IF_ERROR(bench.Prefill());
    if (work == "attention") RETURN_IF_ERROR(bench.Attention());
    if (work == "step") RETURN_IF_ERROR(bench.Step());
    if (work == "growth") RETURN_IF_ERROR(bench.Growth());
  }
  return Status::Ok();
}

}  // namespace temper::trainer::bench
