// One result, however computed: hidden states, logits, log-probabilities, keys and values of a token are the
// same bits whichever pass, chunk, batch, order, page, thread, cache and kernel computed them; and the test
// would see it if they were not.
//
// TEMPER_SWEEP_S=N sweeps for N seconds more (the long tier does).
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>

#include "engine/bf16.h"
#include "engine/cpu/ops.h"
#include "engine/decode/decoder.h"
#include "engine/decode/paged_model.h"
#include "engine/kv_pool.h"
#include "engine/paged_forward.h"
#include "engine/train_pass.h"
#include "tests/engine/amx_emulated.h"
#include "tests/engine/scalar_ops.h"
#include "tests/engine/test_models.h"

namespace temper::engine {
namespace {

using Rng = std::mt19937_64;
using IdRows = std::vector<std::vector<int32_t>>;
using Floats = std::vector<float>;

constexpr float kInverseTemperature = 0.8f;

// What a pass gives for a row, position after position.
struct Row {
  Floats hidden, logits, logprobs, keys_values;
};

bool Same(const Floats& a, const Floats& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}
bool Same(const Row& a, const Row& b) {
  return Same(a.hidden, b.hidden) && Same(a.logits, b.logits) && Same(a.logprobs, b.logprobs) &&
         Same(a.keys_values, b.keys_values);
}
bool Same(const std::vector<Row>& a, const std::vector<Row>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const Row& x, const Row& y) { return Same(x, y); });
}

struct Kernels {
  std::string name;
  std::function<std::unique_ptr<Engine>(int threads)> make;
  bool slow = false;
};
std::vector<Kernels> AllKernels() {
  std::vector<Kernels> out;
  for (CpuPath path : AvailableCpuPaths()) {
    out.push_back({CpuPathName(path), [path](int threads) { return MakeEngine(path, threads); }});
  }
  out.push_back({"scalar",
                 [](int threads) { return Engine::WithKernels(ScalarOps(true), ScalarOps(false), threads); },
                 true});
  const auto available = AvailableCpuPaths();
  // The code around the tiles is AVX-512.
  if (std::find(available.begin(), available.end(), CpuPath::kAvx512) != available.end()) {
    out.push_back({"amx (emulated)",
                   [](int threads) {
                     return Engine::WithKernels(cpu::EmulatedAmxOps(true), cpu::EmulatedAmxOps(false),
                                                threads);
                   },
                   true});
  }
  return out;
}

// A pool whose free pages lie in random order.
KvPool ShuffledPool(const ComputeWeights& weights, int pages, Rng& rng) {
  KvPool pool(weights.config(), weights.profile(), pages);
  std::vector<int> taken;
  for (int i = 0; i < pages; ++i) taken.push_back(pool.Allocate());
  std::shuffle(taken.begin(), taken.end(), rng);
  for (int page : taken) pool.Release(page);
  return pool;
}

void Append(Floats& to, const float* from, size_t n) { to.insert(to.end(), from, from + n); }

// ---- The ways to compute rows
// ----------------------------------------------------------------------------------------------

std::vector<Row> AsTree(Engine& engine, const ComputeWeights& weights, const IdRows& rows, bool merge) {
  TreeBuilder builder(merge);
  std::vector<std::vector<int32_t>> handles;
  for (const auto& row : rows) handles.push_back(builder.AddRow(row, std::span(&kInverseTemperature, 1)));
  std::vector<int32_t> index;
  const TreeBatch tree = builder.Build(&index);
  TrainPass pass(engine);
  const ModelConfig& c = weights.config();
  std::vector<Floats> logits(tree.size());
  ForwardOptions options;
  options.keep = false;
  options.row_inv_temperature = kInverseTemperature;
  options.on_row = [&](int node, const float* x, float) { logits[node].assign(x, x + c.vocab); };
  const auto logprobs = pass.Forward(weights, tree, options);
  EXPECT_TRUE(logprobs.ok());
  std::vector<Row> out(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    for (size_t j = 0; j < rows[i].size(); ++j) {
      const int node = index[handles[i][j]];
      Append(out[i].hidden, pass.hidden().data() + static_cast<size_t>(node) * c.width, c.width);
      Append(out[i].logits, logits[node].data(), c.vocab);
      if (j) out[i].logprobs.push_back((*logprobs)[node]);
      const Floats kv = pass.KeysValues(node);
      Append(out[i].keys_values, kv.data(), kv.size());
    }
  }
  return out;
}

// One call of PagedForward, its results handed to `take(sequence, token of it, hidden, logits, log-sum-exp)`.
using Take = std::function<void(size_t, size_t, const float*, const float*, float)>;
void RunPaged(PagedForward& pass, const ComputeWeights& weights, std::vector<PagedSequence> batch,
              const Take& take) {
  static const std::vector<int32_t> all = [] {
    std::vector<int32_t> v(4096);
    for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<int32_t>(i);
    return v;
  }();
  for (PagedSequence& q : batch) {
    q.logits = std::span(all).first(q.tokens.size());
    q.inv_temperature = kInverseTemperature;
  }
  const float* logits = pass.Run(weights, batch).data();
  const ModelConfig& c = weights.config();
  size_t at = 0;
  for (size_t b = 0; b < batch.size(); ++b) {
    for (size_t j = 0; j < batch[b].tokens.size(); ++j, ++at) {
      take(b, j, pass.hidden().data() + at * c.width, logits + at * c.vocab, pass.log_sum_exp()[at]);
    }
  }
}

// The call again, asked for the rows of some of its tokens alone: they are what they were.
void ExpectAlikeForSome(PagedForward& pass, const ComputeWeights& weights, std::vector<PagedSequence> batch, Rng& rng) {
  const ModelConfig& c = weights.config();
  std::vector<Floats> hidden, logits;
  Floats lse;
  RunPaged(pass, weights, batch, [&](size_t, size_t, const float* h, const float* x, float l) {
    hidden.emplace_back(h, h + c.width);
    logits.emplace_back(x, x + c.vocab);
    lse.push_back(l);
  });
  const unsigned of = 1 + rng() % 4;  // one in `of` tokens is asked for; by chance none of a sequence, or of all
  std::vector<std::vector<int32_t>> some(batch.size());
  std::vector<size_t> asked;  // of all tokens of the batch
  size_t at = 0;
  for (size_t b = 0; b < batch.size(); ++b) {
    for (size_t j = 0; j < batch[b].tokens.size(); ++j, ++at) {
      if (rng() % of) continue;
      some[b].push_back(static_cast<int32_t>(j));
      asked.push_back(at);
    }
    batch[b].logits = some[b];
    batch[b].inv_temperature = kInverseTemperature;
  }
  const std::span<const float> got = pass.Run(weights, batch);
  ASSERT_EQ(got.size(), asked.size() * c.vocab);
  ASSERT_EQ(pass.hidden().size(), asked.size() * c.width);
  const auto same = [](const Floats& x, std::span<const float> y) { return std::memcmp(x.data(), y.data(), y.size_bytes()) == 0; };
  for (size_t i = 0; i < asked.size(); ++i) {
    EXPECT_TRUE(same(hidden[asked[i]], pass.hidden().subspan(i * c.width, c.width))) << "row " << i << " of " << asked.size();
    EXPECT_TRUE(same(logits[asked[i]], got.subspan(i * c.vocab, c.vocab))) << "row " << i << " of " << asked.size();
    EXPECT_EQ(lse[asked[i]], pass.log_sum_exp()[i]);
  }
}

// Pages, some of the rows at a time, in chunks of `chunk` tokens (0: of any size, a new one each time). `some_too`: now and then asked for
// some of the rows before.
std::vector<Row> InPages(Engine& engine, const ComputeWeights& weights, const IdRows& rows, int chunk,
                         Rng& rng, bool some_too = false) {
  int pages = 0;
  for (const auto& row : rows) pages += static_cast<int>(row.size()) / kPagePositions + 1;
  KvPool pool = ShuffledPool(weights, pages + 5, rng);
  PagedForward pass(engine, pool);
  std::vector<std::vector<int32_t>> tables(rows.size());
  std::vector<size_t> done(rows.size(), 0);
  std::vector<Row> out(rows.size());
  const ModelConfig& c = weights.config();
  for (;;) {
    std::vector<size_t> who;
    for (size_t i = 0; i < rows.size(); ++i) {
      if (done[i] < rows[i].size()) who.push_back(i);
    }
    if (who.empty()) break;
    std::shuffle(who.begin(), who.end(), rng);
    who.resize(1 + rng() % who.size());
    std::vector<PagedSequence> batch;
    for (size_t i : who) {
      const size_t left = rows[i].size() - done[i],
                   n = std::min<size_t>(left, chunk ? chunk : 1 + rng() % 90);
      while (tables[i].size() * kPagePositions < done[i] + n) tables[i].push_back(pool.Allocate());
      batch.push_back({std::span(rows[i]).subspan(done[i], n), static_cast<int>(done[i]), tables[i], {}, 1});
    }
    if (some_too && rng() % 2) ExpectAlikeForSome(pass, weights, batch, rng);
    RunPaged(pass, weights, batch,
             [&](size_t b, size_t j, const float* hidden, const float* logits, float lse) {
               Row& r = out[who[b]];
               const size_t position = done[who[b]] + j;
               Append(r.hidden, hidden, c.width);
               Append(r.logits, logits, c.vocab);
               if (position + 1 < rows[who[b]].size())
                 r.logprobs.push_back(logits[rows[who[b]][position + 1]] - lse);
             });
    for (size_t b = 0; b < who.size(); ++b) done[who[b]] += batch[b].tokens.size();
  }
  for (size_t i = 0; i < rows.size(); ++i) {
    for (size_t j = 0; j < rows[i].size(); ++j) {
      const Floats kv = pool.Read(tables[i][j / kPagePositions], static_cast<int>(j % kPagePositions));
      Append(out[i].keys_values, kv.data(), kv.size());
    }
  }
  return out;
}

// A tree of the rows computed forward in chunks of its nodes in pre-order: pages above a fork are shared, the
// page of the fork is copied.
std::vector<Row> AsTreeInChunks(Engine& engine, const ComputeWeights& weights, const IdRows& rows, int chunk,
                                Rng& rng) {
  TreeBuilder builder;
  std::vector<std::vector<int32_t>> handles;
  for (const auto& row : rows) handles.push_back(builder.AddRow(row, std::span(&kInverseTemperature, 1)));
  std::vector<int32_t> index;
  const TreeBatch tree = builder.Build(&index);
  const int n = tree.size();
  KvPool pool = ShuffledPool(weights, n + 64, rng);
  PagedForward pass(engine, pool);
  const ModelConfig& c = weights.config();
  std::vector<std::vector<int32_t>> table(n);  // per node: the pages of its path, its own last
  std::vector<Floats> hidden(n), logits(n);
  std::vector<float> lse(n);
  for (int begin = 0, size; begin < n; begin += size) {
    const int parent = tree.parent[begin], depth = tree.pos[begin];
    size = 1;
    while (size < chunk && begin + size < n && tree.parent[begin + size] == begin + size - 1) ++size;
    std::vector<int32_t> pages;
    if (parent >= 0) {
      for (int i = 0; i < depth / kPagePositions; ++i) {
        pages.push_back(table[parent][i]);
        pool.Retain(pages.back());
      }
    }
    if (depth % kPagePositions) {
      pages.push_back(pool.Allocate());
      pool.CopyPrefix(table[parent][depth / kPagePositions], pages.back(), depth % kPagePositions);
    }
    while (static_cast<int>(pages.size()) * kPagePositions < depth + size) pages.push_back(pool.Allocate());
    const std::span<const int32_t> tokens(tree.token.data() + begin, size);
    RunPaged(pass, weights, {{tokens, depth, pages, {}, 1}},
             [&](size_t, size_t j, const float* h, const float* x, float l) {
               hidden[begin + j].assign(h, h + c.width);
               logits[begin + j].assign(x, x + c.vocab);
               lse[begin + j] = l;
             });
    for (int i = begin; i < begin + size; ++i) table[i] = pages;
  }
  std::vector<Row> out(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    for (size_t j = 0; j < rows[i].size(); ++j) {
      const int node = index[handles[i][j]];
      Append(out[i].hidden, hidden[node].data(), c.width);
      Append(out[i].logits, logits[node].data(), c.vocab);
      if (j + 1 < rows[i].size()) out[i].logprobs.push_back(logits[node][rows[i][j + 1]] - lse[node]);
      const Floats kv = pool.Read(table[node][j / kPagePositions], static_cast<int>(j % kPagePositions));
      Append(out[i].keys_values, kv.data(), kv.size());
    }
  }
  return out;
}

// ---- The sweep
// -------------------------------------------------------------------------------------------------------------

struct Model {
  std::string name;
  ComputeWeights weights;
  IdRows rows;
  std::vector<Row> want;  // rows one by one, flat, on the first path and one thread
};

Model MakeModel(const NamedConfig& named, Profile profile, int longest, uint64_t seed) {
  Rng rng(seed);
  Model m;
  m.name = std::string(named.name) + " " + ProfileName(profile);
  m.weights = ComputeWeights::FromParameters(TestParameters(named.config, seed), profile);
  m.rows = ForkedRows(rng, named.config.vocab, longest);
  auto engine = MakeEngine(AvailableCpuPaths().front(), 1);
  for (const auto& row : m.rows) m.want.push_back(AsTree(*engine, m.weights, {row}, true)[0]);
  return m;
}

// One random way to compute some of the rows on the kernels, held against `want`. Returns what differs, or
// "".
std::string OneWay(const Model& m, const Kernels& kernels, Rng& rng) {
  const int threads = 1 + static_cast<int>(rng() % 3);
  auto engine = kernels.make(threads);
  std::vector<size_t> who(m.rows.size());
  for (size_t i = 0; i < who.size(); ++i) who[i] = i;
  std::shuffle(who.begin(), who.end(), rng);
  who.resize(1 + rng() % (kernels.slow ? 3 : who.size()));
  IdRows rows;
  std::vector<Row> want;
  for (size_t i : who) {
    rows.push_back(m.rows[i]);
    want.push_back(m.want[i]);
  }
  static constexpr int kChunks[] = {1, 2, 7, 16, 33, 63, 64, 65, 100, 1000, 0};
  const int chunk = kChunks[rng() % std::size(kChunks)], way = static_cast<int>(rng() % 4);
  static constexpr const char* kWays[] = {"rows apart", "tree", "tree in chunks", "pages"};
  const auto got = way < 2    ? AsTree(*engine, m.weights, rows, way == 1)
                   : way == 2 ? AsTreeInChunks(*engine, m.weights, rows, chunk ? chunk : 5, rng)
                              : InPages(*engine, m.weights, rows, chunk, rng, /*some_too=*/true);
  if (Same(got, want)) return "";
  std::string text = m.name + ", " + kernels.name + ", " + std::to_string(threads) + " threads, " +
                     kWays[way] + " of " + std::to_string(rows.size()) + " rows, chunks of " +
                     std::to_string(chunk);
  for (size_t i = 0; i < got.size(); ++i) {
    if (Same(got[i], want[i])) continue;
    text += "; row " + std::to_string(who[i]) + ":" + (Same(got[i].hidden, want[i].hidden) ? "" : " hidden") +
            (Same(got[i].logits, want[i].logits) ? "" : " logits") +
            (Same(got[i].logprobs, want[i].logprobs) ? "" : " logprobs") +
            (Same(got[i].keys_values, want[i].keys_values) ? "" : " keys and values");
  }
  return text;
}

TEST(OneResult, HoweverComputed) {
  const auto kernels = AllKernels();
  std::string names;
  for (const Kernels& k : kernels) names += " " + k.name;
  std::printf("[ kernels  ]%s\n", names.c_str());
  const char* seconds = std::getenv("TEMPER_SWEEP_S");
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds ? std::atoi(seconds) : 0);
  std::map<std::string, int> ways;
  for (uint64_t round = 0;; ++round) {
    Rng rng(round);
    for (const NamedConfig& named : AllConfigs()) {
      for (Profile profile : {Profile::kBf16, Profile::kF32}) {
        const Model m = MakeModel(named, profile, 110 + static_cast<int>(rng() % 60), round);
        for (const Kernels& k : kernels) {
          for (int i = 0; i < (k.slow ? 1 : 4); ++i) {
            const std::string wrong = OneWay(m, k, rng);
            ASSERT_EQ(wrong, "") << "round " << round;
            ++ways[k.name];
          }
        }
      }
    }
    if (std::chrono::steady_clock::now() >= end) break;
  }
  std::string text;
  for (const auto& [name, count] : ways)
    text += (text.empty() ? "" : ", ") + std::to_string(count) + " on " + name;
  std::printf("measured: random ways to compute rows of every family in both profiles, every bit alike: %s\n",
              text.c_str());
}

// Could go wrong: a token's numbers depend on how many others are drawn in the same step.
TEST(OneResult, BatchesOfOneToAThousand) {
  const bool sweep = std::getenv("TEMPER_SWEEP_S") != nullptr;
  for (const NamedConfig& named : AllConfigs()) {
    if (!sweep && std::string(named.name) != "tiny" && std::string(named.name) != "gemma3") continue;
    for (Profile profile : {Profile::kBf16, Profile::kF32}) {
      SCOPED_TRACE(std::string(named.name) + " " + ProfileName(profile));
      Rng rng(3);
      const ComputeWeights weights = ComputeWeights::FromParameters(TestParameters(named.config, 3), profile);
      const int vocab = named.config.vocab, width = named.config.width;
      const auto prompt = RandomIds(rng, 5, vocab), next = RandomIds(rng, 1024, vocab);
      // Sequence i: the prompt, then token i, each in a page of its own.
      KvPool pool(named.config, profile, 1024);
      std::vector<std::vector<int32_t>> pages(1024);
      auto first = MakeEngine(AvailableCpuPaths().front(), 1);
      {
        PagedForward pass(*first, pool);
        for (int i = 0; i < 1024; ++i) {
          pages[i] = {pool.Allocate()};
          if (i == 0) {
            pass.Run(weights, std::vector<PagedSequence>{{prompt, 0, pages[0], {}, 1}});
          } else {
            pool.CopyPrefix(pages[0][0], pages[i][0], 5);
          }
        }
      }
      const auto run = [&](PagedForward& pass, const std::vector<int>& who, const Take& take) {
        std::vector<PagedSequence> batch;
        for (int i : who) batch.push_back({std::span(next).subspan(i, 1), 5, pages[i], {}, 1});
        RunPaged(pass, weights, batch, take);
      };
      std::vector<Floats> hidden(1024), logits(1024);
      PagedForward alone(*first, pool);
      for (int i = 0; i < 1024; ++i) {
        run(alone, {i}, [&](size_t, size_t, const float* h, const float* x, float) {
          hidden[i].assign(h, h + width);
          logits[i].assign(x, x + vocab);
        });
      }
      for (const Kernels& k : AllKernels()) {
        for (int threads : {1, 2}) {
          auto engine = k.make(threads);
          PagedForward pass(*engine, pool);
          std::vector<int> sizes = {1, 2, 3, 5, 6, 7, 11, 12, 13, 16, 31, 32, 33, 48};
          if (!k.slow) sizes.insert(sizes.end(), {64, 95, 96, 97, 127, 200, 383, 384, 385, 512, 1000, 1024});
          if (sweep && !k.slow) {
            for (int extra = 0; extra < 40; ++extra) sizes.push_back(1 + static_cast<int>(rng() % 1024));
          }
          for (int size : sizes) {
            std::vector<int> who(1024);
            for (int i = 0; i < 1024; ++i) who[i] = i;
            std::shuffle(who.begin(), who.end(), rng);
            who.resize(size);
            int differ = 0;
            run(pass, who, [&](size_t b, size_t, const float* h, const float* x, float) {
              const int i = who[b];
              differ += std::memcmp(h, hidden[i].data(), width * sizeof(float)) != 0;
              differ += std::memcmp(x, logits[i].data(), vocab * sizeof(float)) != 0;
            });
            ASSERT_EQ(differ, 0) << k.name << ", batch of " << size;
          }
        }
      }
    }
  }
}

// A product of M rows, [k] by [n][k], held against the same rows alone. Returns how many M gave other bits.
int ProductsThatShowTheirRows(Engine& engine, Profile profile, int n, int k, const std::vector<int>& sizes) {
  FlushDenormals mode;
  const cpu::Ops& ops = engine.ops(profile);
  const int most = 1024;
  Rng rng(8);
  std::normal_distribution<float> normal;
  const bool pairs = profile == Profile::kBf16;
  std::vector<std::byte> a(static_cast<size_t>(most) * k * 4 + 64), b(static_cast<size_t>(n) * k * 4 + 64);
  const auto aligned = [](std::vector<std::byte>& v) {
    return reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(v.data()) + 63) & ~uintptr_t{63});
  };
  const auto fill = [&](std::byte* to, int count) {
    for (int i = 0; i < count; ++i) {
      const float x = normal(rng);
      if (pairs) {
        reinterpret_cast<uint16_t*>(to)[i] = ToBf16(x);
      } else {
        reinterpret_cast<float*>(to)[i] = x;
      }
    }
  };
  fill(aligned(a), most * k);
  fill(aligned(b), n * k);
  const auto multiply = [&](int first, int m) {
    Floats c(static_cast<size_t>(m) * n);
    cpu::Gemm g;
    g.a = aligned(a) + static_cast<size_t>(first) * k * ops.element_bytes;
    g.a_stride = g.k = k;
    g.b = aligned(b);
    g.m = m;
    g.n = g.c_stride = n;
    g.c = c.data();
    ops.gemm(g);
    return c;
  };
  std::vector<Floats> alone;
  for (int i = 0; i < most; ++i) alone.push_back(multiply(i, 1));
  int wrong = 0;
  for (int m : sizes) {
    const int first = static_cast<int>(rng() % (most - m + 1));
    const Floats c = multiply(first, m);
    bool same = true;
    for (int i = 0; i < m && same; ++i) {
      same =
          std::memcmp(c.data() + static_cast<size_t>(i) * n, alone[first + i].data(), n * sizeof(float)) == 0;
    }
    wrong += !same;
  }
  return wrong;
}

std::vector<int> EveryM(bool slow) {
  std::vector<int> sizes;
  for (int m = 1; m <= 1024; m += slow ? 1 + m : 1) sizes.push_back(m);
  return sizes;
}

const std::vector<int> kSomeM = {2, 3, 4, 5, 8, 16, 17, 31, 64, 100, 256, 1000};

TEST(OneResult, AProductDoesNotShowItsNumberOfRows) {
  for (const Kernels& k : AllKernels()) {
    auto engine = k.make(1);
    for (Profile profile : {Profile::kBf16, Profile::kF32}) {
      EXPECT_EQ(ProductsThatShowTheirRows(*engine, profile, 48, 96, EveryM(k.slow)), 0)
          << k.name << " " << ProfileName(profile);
      if (!k.slow) {
        EXPECT_EQ(ProductsThatShowTheirRows(*engine, profile, 192, 1536, kSomeM), 0)
            << k.name << " " << ProfileName(profile);
      }
    }
  }
}

// Could go wrong: a prefix read from the cache continues otherwise than one that is computed.
TEST(OneResult, ColdAndWarmCache) {
  for (const NamedConfig& named : AllConfigs()) {
    SCOPED_TRACE(named.name);
    for (Profile profile : {Profile::kBf16, Profile::kF32}) {
      Rng rng(2);
      const ComputeWeights weights = ComputeWeights::FromParameters(TestParameters(named.config, 2), profile);
      auto engine = MakeEngine(CpuPath::kAuto, 2);
      std::vector<DecodeRequest> requests(5);
      const auto shared = RandomIds(rng, 140, named.config.vocab);
      for (size_t i = 0; i < requests.size(); ++i) {
        requests[i].ids.assign(shared.begin(), shared.begin() + 60 + 20 * static_cast<long>(i));
        for (int32_t id : RandomIds(rng, 9, named.config.vocab)) requests[i].ids.push_back(id);
        requests[i].sampling.max_tokens = 12;
        requests[i].key.a = i;
      }
      const auto run = [](Decoder& decoder, const std::vector<DecodeRequest>& these) {
        std::map<uint64_t, Floats> drawn;
        std::vector<uint64_t> ids;
        for (const auto& r : these) ids.push_back(*decoder.Add(r));
        std::vector<DecodeEvent> events;
        while (decoder.Step(&events)) {
        }
        for (const DecodeEvent& e : events) {
          drawn[e.id].push_back(static_cast<float>(e.token));
          drawn[e.id].push_back(e.logprob);
        }
        std::vector<Floats> out;
        for (uint64_t id : ids) out.push_back(drawn[id]);
        return out;
      };
      std::vector<Floats> cold;
      for (const auto& r : requests) {  // each in a decoder that has seen nothing
        Decoder decoder(std::make_unique<PagedModel>(*engine, named.config, profile, 40), {});
        ASSERT_TRUE(decoder.SwapWeights(weights, {1, 0}).ok());
        cold.push_back(run(decoder, {r})[0]);
        EXPECT_EQ(decoder.stats().cached_tokens, 0u);
      }
      Decoder decoder(std::make_unique<PagedModel>(*engine, named.config, profile, 40), {});
      ASSERT_TRUE(decoder.SwapWeights(weights, {1, 0}).ok());
      for (int repeat = 0; repeat < 2; ++repeat) {
        const auto warm = run(decoder, requests);
        for (size_t i = 0; i < cold.size(); ++i) EXPECT_TRUE(Same(cold[i], warm[i])) << i << " " << repeat;
      }
      EXPECT_GT(decoder.stats().cached_tokens, 600u);
    }
  }
}

// Could go wrong: a gradient depends on who computed it, in how many threads.
TEST(OneResult, Gradients) {
  for (const NamedConfig& named : AllConfigs()) {
    for (Profile profile : {Profile::kBf16, Profile::kF32}) {
      Rng rng(6);
      const ComputeWeights weights = ComputeWeights::FromParameters(TestParameters(named.config, 6), profile);
      IdRows rows = ForkedRows(rng, named.config.vocab, 80);
      rows.resize(4);
      TreeBuilder builder;
      for (const auto& row : rows) builder.AddRow(row, std::span(&kInverseTemperature, 1));
      const TreeBatch tree = builder.Build(nullptr);
      Floats coef(tree.size()), want;
      for (float& x : coef) x = static_cast<float>(rng() % 2001) / 1000 - 1;
      for (const Kernels& k : AllKernels()) {
        for (int threads : {1, 2}) {
          if (k.slow && threads == 1) continue;
          auto engine = k.make(threads);
          TrainPass pass(*engine);
          ASSERT_TRUE(pass.Forward(weights, tree).ok());
          Gradients grads(named.config);
          pass.Backward(coef, grads);
          const Floats got(grads.flat().begin(), grads.flat().end());
          if (want.empty()) want = got;
          EXPECT_TRUE(Same(want, got)) << named.name << " " << ProfileName(profile) << " on " << k.name;
        }
      }
    }
  }
}

// ---- Negative controls: with a fault built in the checks above must fail
// ----------------------------------------------------

// How many of the ways to compute the rows differ from the rows one by one, on the same kernels.
int WaysThatDiffer(const NamedConfig& named, Profile profile, Engine& engine) {
  Rng rng(1);
  const ComputeWeights weights = ComputeWeights::FromParameters(TestParameters(named.config, 1), profile);
  IdRows rows = ForkedRows(rng, named.config.vocab, 110);
  rows.resize(5);
  std::vector<Row> want;
  for (const auto& row : rows) want.push_back(AsTree(engine, weights, {row}, true)[0]);
  int differ = !Same(AsTree(engine, weights, rows, true), want);
  differ += !Same(AsTreeInChunks(engine, weights, rows, 33, rng), want);
  differ += !Same(InPages(engine, weights, rows, 1, rng), want);
  differ += !Same(InPages(engine, weights, rows, 7, rng), want);
  return differ;
}

TEST(OneResultControl, TilesAlignedToNodesAreSeen) {
  for (Profile profile : {Profile::kBf16, Profile::kF32}) {
    auto sound = Engine::WithKernels(ScalarOps(true), ScalarOps(false), 2);
    auto faulty = Engine::WithKernels(NodeAlignedOps(true), NodeAlignedOps(false), 2);
    EXPECT_EQ(WaysThatDiffer(AllConfigs()[0], profile, *sound), 0);
    EXPECT_EQ(WaysThatDiffer(AllConfigs()[0], profile, *faulty), 4)
        << "decode, chunks, and trees must all show it";
  }
}

TEST(OneResultControl, AnotherOrderOfAdditionsIsSeen) {
  for (Profile profile : {Profile::kBf16, Profile::kF32}) {
    const Model m = MakeModel(AllConfigs()[0], profile, 110, 1);
    const auto make = [](int threads) {
      return Engine::WithKernels(SequentialOps(true), SequentialOps(false), threads);
    };
    const Kernels faulty{"sequential", make, true};
    Rng rng(1);
    for (int i = 0; i < 4; ++i) EXPECT_NE(OneWay(m, faulty, rng), "");
  }
}

// A library's product in place of ours. TEMPER_BLAS names a shared library with a cblas_sgemm;
// engine_library_gemm_test sets it.
using Sgemm = void (*)(int order, int trans_a, int trans_b, int64_t m, int64_t n, int64_t k, float alpha,
                       const float* a, int64_t lda, const float* b, int64_t ldb, float beta, float* c,
                       int64_t ldc);
Sgemm library_sgemm = nullptr;

void LibraryGemm(const cpu::Gemm& g) {
  Floats b(static_cast<size_t>(g.k) * g.n), a(static_cast<size_t>(g.m) * g.k);
  const int64_t stride = g.b_stride ? g.b_stride : static_cast<int64_t>(g.k) * 16;
  for (int k = 0; k < g.k; ++k) {
    for (int n = 0; n < g.n; ++n) {
      b[static_cast<size_t>(k) * g.n + n] = static_cast<const float*>(g.b)[n / 16 * stride + k * 16 + n % 16];
    }
  }
  for (int m = 0; m < g.m; ++m) {
    std::memcpy(&a[static_cast<size_t>(m) * g.k], static_cast<const float*>(g.a) + m * g.a_stride,
                g.k * sizeof(float));
  }
  constexpr int kRowMajor = 101, kNoTrans = 111;
  library_sgemm(kRowMajor, kNoTrans, kNoTrans, g.m, g.n, g.k, 1, a.data(), g.k, b.data(), g.n,
                g.add ? 1.0f : 0.0f, g.c, g.c_stride);
}

TEST(OneResultControl, DISABLED_ALibrarysProductIsSeen) {
  const char* path = std::getenv("TEMPER_BLAS");
  ASSERT_NE(path, nullptr);
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(library, nullptr) << dlerror();
  for (const char* name : {"scipy_cblas_sgemm64_", "cblas_sgemm64_"}) {
    if (!library_sgemm) library_sgemm = reinterpret_cast<Sgemm>(dlsym(library, name));
  }
  ASSERT_NE(library_sgemm, nullptr) << "no cblas_sgemm with 64-bit integers";
  static cpu::Ops f32 = *cpu::Avx2Ops(false);
  f32.gemm = LibraryGemm;
  auto faulty = Engine::WithKernels(*cpu::Avx2Ops(true), f32, 1);
  const int wrong = ProductsThatShowTheirRows(*faulty, Profile::kF32, 192, 1536, kSomeM);
  EXPECT_GT(wrong, 0);
  const Model m = MakeModel(AllConfigs()[0], Profile::kF32, 110, 1);
  const Kernels kernels{"library", [](int) { return Engine::WithKernels(*cpu::Avx2Ops(true), f32, 1); },
                        true};
  Rng rng(1);
  for (int i = 0; i < 4; ++i) EXPECT_NE(OneWay(m, kernels, rng), "");
  std::printf("measured: a library's float32 product shows the number of rows in %d of %zu cases\n", wrong,
              kSomeM.size());
}

}  // namespace
}  // namespace temper::engine
