// One token, one number: whichever pass, path, batch, page or thread computed it.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "engine/bf16.h"
#include "engine/cpu/ops.h"
#include "engine/kv_pool.h"
#include "engine/paged_forward.h"
#include "engine/train_pass.h"
#include "tests/engine/test_models.h"

namespace temper::engine {
namespace {

// Log-probabilities of a row's tokens (the first has none) and the logits rows behind them.
struct Scored {
  std::vector<float> logprobs;
  std::vector<float> logits;  // [tokens][vocab]
};

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

std::vector<int32_t> Pages(KvPool& pool, int tokens) {
  std::vector<int32_t> pages;
  for (int i = 0; i < tokens; i += kPagePositions) pages.push_back(pool.Allocate());
  return pages;
}

// Runs every row through pages, `chunk` tokens at a time, all rows together.
std::vector<Scored> ScorePaged(Engine& engine, const ComputeWeights& weights,
                               const std::vector<std::vector<int32_t>>& rows, int chunk, float inv_temperature) {
  KvPool pool(weights.config(), weights.profile(), 200);
  PagedForward pass(engine, pool);
  std::vector<std::vector<int32_t>> pages;
  std::vector<int32_t> all(4096);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int32_t>(i);
  size_t longest = 0;
  for (const auto& row : rows) {
    pages.push_back(Pages(pool, static_cast<int>(row.size())));
    longest = std::max(longest, row.size());
  }
  const int vocab = weights.config().vocab;
  std::vector<Scored> out(rows.size());
  for (size_t start = 0; start < longest; start += chunk) {
    std::vector<PagedSequence> batch;
    std::vector<size_t> who;
    for (size_t i = 0; i < rows.size(); ++i) {
      if (rows[i].size() <= start) continue;
      const size_t n = std::min<size_t>(chunk, rows[i].size() - start);
      batch.push_back({std::span(rows[i]).subspan(start, n), static_cast<int>(start), pages[i], std::span(all).first(n),
                       inv_temperature});
      who.push_back(i);
    }
    const auto logits = pass.Run(weights, batch);
    size_t at = 0;
    for (size_t b = 0; b < batch.size(); ++b) {
      Scored& s = out[who[b]];
      const auto& row = rows[who[b]];
      for (size_t j = 0; j < batch[b].tokens.size(); ++j, ++at) {
        const float* x = logits.data() + at * vocab;
        s.logits.insert(s.logits.end(), x, x + vocab);
        if (start + j + 1 < row.size()) s.logprobs.push_back(x[row[start + j + 1]] - pass.log_sum_exp()[at]);
      }
    }
  }
  return out;
}

std::vector<Scored> ScoreTree(Engine& engine, const ComputeWeights& weights, const std::vector<std::vector<int32_t>>& rows,
                              bool merge, float inv_temperature) {
  TreeBuilder builder(merge);
  std::vector<std::vector<int32_t>> handles;
  for (const auto& row : rows) handles.push_back(builder.AddRow(row, std::span(&inv_temperature, 1)));
  std::vector<int32_t> index;
  const TreeBatch tree = builder.Build(&index);
  TrainPass pass(engine);
  const int vocab = weights.config().vocab;
  std::vector<std::vector<float>> logits(tree.size());
  ForwardOptions options;
  options.row_inv_temperature = inv_temperature;
  options.on_row = [&](int node, const float* x, float) { logits[node].assign(x, x + vocab); };
  const auto logprobs = pass.Forward(weights, tree, options);
  EXPECT_TRUE(logprobs.ok());
  std::vector<Scored> out(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    for (size_t j = 0; j < rows[i].size(); ++j) {
      const int node = index[handles[i][j]];
      out[i].logits.insert(out[i].logits.end(), logits[node].begin(), logits[node].end());
      if (j) out[i].logprobs.push_back((*logprobs)[node]);
    }
  }
  return out;
}

void ExpectSame(const std::vector<Scored>& a, const std::vector<Scored>& b, const char* what) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(SameBits(a[i].logits, b[i].logits)) << what << ": logits of row " << i;
    EXPECT_TRUE(SameBits(a[i].logprobs, b[i].logprobs)) << what << ": logprobs of row " << i;
  }
}

class Exactness : public testing::TestWithParam<std::tuple<Profile, NamedConfig>> {
 protected:
  Profile profile() const { return std::get<0>(GetParam()); }
  ModelConfig config() const { return std::get<1>(GetParam()).config; }
};

// Could go wrong: a fork, a page border, a chunk border, a batch mate, a thread or a kernel path leaves a trace in a number.
TEST_P(Exactness, EveryPassGivesTheSameBits) {
  std::mt19937_64 rng(5);
  const ModelConfig c = config();
  const ComputeWeights weights = ComputeWeights::FromParameters(TestParameters(c, 3), profile());
  const auto rows = ForkedRows(rng, c.vocab, 150);
  const float t = 0.8f;
  auto first = MakeEngine(AvailableCpuPaths().front(), 1);
  const auto flat = ScoreTree(*first, weights, rows, false, t);
  for (CpuPath path : AvailableCpuPaths()) {
    std::printf("[ path     ] %s\n", CpuPathName(path));
    for (int threads : {1, 3}) {
      auto engine = MakeEngine(path, threads);
      ExpectSame(flat, ScoreTree(*engine, weights, rows, true, t), "tree");
      ExpectSame(flat, ScoreTree(*engine, weights, rows, false, t), "flat");
      ExpectSame(flat, ScorePaged(*engine, weights, rows, 1, t), "decode");
      ExpectSame(flat, ScorePaged(*engine, weights, rows, 7, t), "prefill 7");
      ExpectSame(flat, ScorePaged(*engine, weights, rows, 64, t), "prefill 64");
      ExpectSame(flat, ScorePaged(*engine, weights, rows, 1000, t), "prefill");
      for (size_t i = 0; i < 3; ++i) {
        ExpectSame({flat[i]}, ScorePaged(*engine, weights, {rows[i]}, 1000, t), "alone");
        ExpectSame({flat[i]}, ScoreTree(*engine, weights, {rows[i]}, true, t), "alone as a tree");
      }
    }
  }
}

// Could go wrong: the comparison above cannot see a difference. One bf16 step in one weight, or a page that starts at
// another position, must be seen.
TEST_P(Exactness, ADifferenceWouldBeSeen) {
  std::mt19937_64 rng(5);
  const ModelConfig c = config();
  Parameters params = TestParameters(c, 3);
  const auto rows = ForkedRows(rng, c.vocab, 150);
  auto engine = MakeEngine(CpuPath::kAuto, 2);
  const auto a = ScoreTree(*engine, ComputeWeights::FromParameters(params, profile()), rows, true, 1);
  params.tensor(params.Find("model.layers.0.mlp.up_proj.weight"))[0] *= 1.01f;
  const auto b = ScoreTree(*engine, ComputeWeights::FromParameters(params, profile()), rows, true, 1);
  int differ = 0, all = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    for (size_t j = 0; j < a[i].logprobs.size(); ++j, ++all) {
      differ += std::bit_cast<uint32_t>(a[i].logprobs[j]) != std::bit_cast<uint32_t>(b[i].logprobs[j]);
    }
  }
  EXPECT_GT(differ, all / 10);
}

// Could go wrong: keys that a token must not see leak into it, or a token does not see what it must.
TEST_P(Exactness, OnlyAncestorsMatter) {
  std::mt19937_64 rng(11);
  const ModelConfig c = config();
  const ComputeWeights weights = ComputeWeights::FromParameters(TestParameters(c, 4), profile());
  auto engine = MakeEngine(CpuPath::kAuto, 2);
  const auto trunk = RandomIds(rng, 70, c.vocab);
  auto left = trunk, right = trunk;
  const auto a = RandomIds(rng, 40, c.vocab), b = RandomIds(rng, 40, c.vocab);
  left.insert(left.end(), a.begin(), a.end());
  right.insert(right.end(), b.begin(), b.end());
  const auto before = ScoreTree(*engine, weights, {left, right}, true, 1);
  auto other = right;
  other[75] = (other[75] + 1) % c.vocab;
  const auto sibling_changed = ScoreTree(*engine, weights, {left, other}, true, 1);
  EXPECT_TRUE(SameBits(before[0].logits, sibling_changed[0].logits));
  EXPECT_FALSE(SameBits(before[1].logits, sibling_changed[1].logits));
  const auto swapped = ScoreTree(*engine, weights, {right, left}, true, 1);
  EXPECT_TRUE(SameBits(before[0].logits, swapped[1].logits));
  left[3] = right[3] = (left[3] + 1) % c.vocab;
  const auto ancestor_changed = ScoreTree(*engine, weights, {left, right}, true, 1);
  // How far a token reaches: each windowed layer hands it on by its window, a layer that sees all by any distance.
  size_t reach = 3;
  for (int l = 0; l < c.layers; ++l) {
    const int window = LayerOf(c, l).window;
    reach = window ? std::min<size_t>(reach + window - 1, 1 << 20) : 1 << 20;
  }
  for (int i = 0; i < 2; ++i) {
    size_t same = 0;
    for (size_t j = 3; j + 1 < left.size(); ++j) {
      if (j > reach) {
        EXPECT_EQ(before[i].logprobs[j], ancestor_changed[i].logprobs[j]) << i << " " << j;
      } else {
        same += before[i].logprobs[j] == ancestor_changed[i].logprobs[j];
      }
    }
    // At the end of several windows next to nothing is left of it.
    EXPECT_LE(same, reach < left.size() ? reach / 4 : 0) << i;
  }
}

// Could go wrong: a copied fork page differs from one that was computed.
TEST_P(Exactness, CopiedPagesContinueLikeComputedOnes) {
  std::mt19937_64 rng(12);
  const ModelConfig c = config();
  const ComputeWeights weights = ComputeWeights::FromParameters(TestParameters(c, 4), profile());
  auto engine = MakeEngine(CpuPath::kAuto, 2);
  for (int keep : {1, 2, 33, 63, 64, 65, 97}) {
    const auto prefix = RandomIds(rng, 100, c.vocab), tail = RandomIds(rng, 30, c.vocab);
    std::vector<int32_t> row(prefix.begin(), prefix.begin() + keep);
    row.insert(row.end(), tail.begin(), tail.end());
    const auto expected = ScorePaged(*engine, weights, {row}, 1000, 1);
    KvPool pool(c, profile(), 16);
    PagedForward pass(*engine, pool);
    const auto original = Pages(pool, 100);
    pass.Run(weights, std::vector<PagedSequence>{{prefix, 0, original, {}, 1}});
    std::vector<int32_t> pages(original.begin(), original.begin() + keep / 64);
    for (int32_t p : pages) pool.Retain(p);
    if (keep % 64) {
      pages.push_back(pool.Allocate());
      pool.CopyPrefix(original[keep / 64], pages.back(), keep % 64);
    }
    while (pages.size() * 64 < row.size()) pages.push_back(pool.Allocate());
    const int32_t last[] = {29};
    const auto logits = pass.Run(weights, std::vector<PagedSequence>{{tail, keep, pages, last, 1}});
    const std::vector<float> got(logits.begin(), logits.end());
    const std::vector<float> want(expected[0].logits.end() - c.vocab, expected[0].logits.end());
    EXPECT_TRUE(SameBits(got, want)) << keep;
  }
}

// Could go wrong: the gradient depends on who computed it.
TEST_P(Exactness, GradientsAreTheSameForAllThreadsAndPaths) {
  std::mt19937_64 rng(6);
  const ModelConfig c = config();
  const ComputeWeights weights = ComputeWeights::FromParameters(TestParameters(c, 3), profile());
  const TreeBatch tree = ForkedTree(rng, c.vocab, 140);
  const std::vector<float> coef = RandomCoefficients(rng, tree);
  std::vector<float> expected;
  for (CpuPath path : AvailableCpuPaths()) {
    for (int threads : {1, 2, 3}) {
      auto engine = MakeEngine(path, threads);
      TrainPass pass(*engine);
      for (int repeat = 0; repeat < 2; ++repeat) {  // the second time in used buffers
        ASSERT_TRUE(pass.Forward(weights, tree).ok());
        Gradients grads(c);
        pass.Backward(coef, grads);
        const std::vector<float> got(grads.flat().begin(), grads.flat().end());
        if (expected.empty()) expected = got;
        EXPECT_TRUE(SameBits(expected, got)) << CpuPathName(path) << " " << threads;
      }
    }
  }
}

// Could go wrong: a layer computed again in the backward pass is another one than the forward pass saw.
TEST_P(Exactness, LayersComputedAgainAreTheSame) {
  std::mt19937_64 rng(6);
  const ModelConfig c = config();
  const ComputeWeights weights = ComputeWeights::FromParameters(TestParameters(c, 3), profile());
  const TreeBatch tree = ForkedTree(rng, c.vocab, 140);
  const std::vector<float> coef = RandomCoefficients(rng, tree);
  auto engine = MakeEngine(CpuPath::kAuto, 2);
  TrainPass pass(*engine);
  std::vector<float> logprobs, gradient;
  for (const bool recompute : {false, true, true, false}) {  // also after each other, in used buffers
    ForwardOptions options;
    options.recompute = recompute;
    const auto row = pass.Forward(weights, tree, options);
    ASSERT_TRUE(row.ok());
    const std::vector<float> got_logprobs(row->begin(), row->end());
    Gradients grads(c);
    pass.Backward(coef, grads);
    const std::vector<float> got(grads.flat().begin(), grads.flat().end());
    if (gradient.empty()) {
      logprobs = got_logprobs;
      gradient = got;
    }
    EXPECT_TRUE(SameBits(logprobs, got_logprobs)) << recompute;
    EXPECT_TRUE(SameBits(gradient, got)) << recompute;
  }
}

INSTANTIATE_TEST_SUITE_P(All, Exactness,
                         testing::Combine(testing::Values(Profile::kBf16, Profile::kF32), testing::ValuesIn(AllConfigs())),
                         [](const auto& which) {
                           return std::string(ProfileName(std::get<0>(which.param))) + "_" + std::get<1>(which.param).name;
                         });

// ---- Kernels against their definition ------------------------------------------------------------------------------------

float PairDot(const uint16_t* a, const uint16_t* b, int k, float c) {
  for (int block = 0; block < k; block += 32) {
    float even = 0, odd = 0;
    for (int i = 0; i < 16; ++i) {
      even = std::fma(FromBf16(a[block + 2 * i]), FromBf16(b[block + 2 * i]), even);
      odd = std::fma(FromBf16(a[block + 2 * i + 1]), FromBf16(b[block + 2 * i + 1]), odd);
    }
    volatile float sum = even + odd;
    c = c + sum;
  }
  return c;
}

// Could go wrong: a kernel adds in another order, or a tile's edge, a transposed A, a split reduced axis or a second stretch
// is handled by other arithmetic.
TEST(Gemm, IsThePairDotOnEveryPath) {
  std::mt19937_64 rng(9);
  std::normal_distribution<float> normal;
  struct Case {
    int m, n, k;
    bool transposed, two, add;
  };
  const Case cases[] = {{1, 16, 32, false, false, false},    {1, 48, 96, false, true, false},  {5, 33, 64, true, false, false},
                        {17, 100, 1056, false, true, false}, {98, 40, 544, true, false, true}, {33, 17, 32, false, false, true},
                        {64, 64, 2080, true, false, true},   {6, 7, 1024, false, true, true},
                        {3, 40, 16448, false, true, true},   {8, 32, 1536, false, false, false}};
  for (const Case& t : cases) {
    FlushDenormals mode;
    std::vector<uint16_t> a(t.m * t.k), a2(t.m * t.k), b(t.n * t.k);
    // Wide exponents, so that order shows and some products are denormal.
    for (auto* v : {&a, &a2, &b}) {
      for (uint16_t& x : *v) x = ToBf16(normal(rng) * std::exp2(static_cast<float>(static_cast<int>(rng() % 130) - 70)));
    }
    std::vector<float> start(t.m * t.n);
    for (float& x : start) x = normal(rng);
    const int n16 = RoundUp(t.n, 16);
    std::vector<uint16_t> panel(n16 * t.k + 32);
    auto* p = reinterpret_cast<uint16_t*>((reinterpret_cast<uintptr_t>(panel.data()) + 63) & ~uintptr_t{63});
    for (int i = 0; i < n16; ++i) {
      for (int j = 0; j < t.k; ++j) p[i / 16 * t.k * 16 + j / 2 * 32 + i % 16 * 2 + j % 2] = i < t.n ? b[i * t.k + j] : 0;
    }
    std::vector<uint16_t> turned(t.m * t.k);
    for (int i = 0; i < t.m; ++i) {
      for (int j = 0; j < t.k; ++j) turned[j * t.m + i] = a[i * t.k + j];
    }
    std::vector<float> want(t.m * t.n);
    for (int i = 0; i < t.m; ++i) {
      for (int j = 0; j < t.n; ++j) {
        float c = PairDot(&a[i * t.k], &b[j * t.k], t.k, t.add ? start[i * t.n + j] : 0);
        if (t.two) c = PairDot(&a2[i * t.k], &b[j * t.k], t.k, c);
        want[i * t.n + j] = c;
      }
    }
    for (CpuPath path : AvailableCpuPaths()) {
      auto engine = MakeEngine(path, 1);
      std::vector<float> got(start);
      cpu::Gemm g;
      g.a = t.transposed ? turned.data() : a.data();
      g.a_stride = t.transposed ? t.m : t.k;
      g.a_transposed = t.transposed;
      if (t.two) g.a2 = a2.data();
      g.b = p;
      g.m = t.m;
      g.n = t.n;
      g.k = t.k;
      g.c = got.data();
      g.c_stride = t.n;
      g.add = t.add;
      engine->ops(Profile::kBf16).gemm(g);
      EXPECT_TRUE(SameBits(want, got)) << CpuPathName(path) << " " << t.m << "x" << t.n << "x" << t.k;
    }
  }
}

// Could go wrong: numbers are rounded eight at a time otherwise than one by one, at ties, NaN, infinity or a row's end.
TEST(Weights, ArePackedAsTheyRound) {
  ModelConfig c = AllConfigs().front().config;
  c.width = 84;  // not a multiple of what is rounded at a time
  c.tied = true;
  Parameters params(c);
  std::mt19937_64 rng(21);
  for (float& x : params.flat()) {
    auto bits = static_cast<uint32_t>(rng());
    if (rng() % 4 == 0) bits = (bits & 0xffff0000u) | 0x8000u;    // a tie
    if (rng() % 16 == 0) bits |= 0x7f800000u;                     // NaN or infinity
    if (rng() % 16 == 0) bits = 0x7f800000u | (bits & 0x8000ffffu);  // NaN whose upper half alone would be infinity
    std::memcpy(&x, &bits, 4);
  }
  const ComputeWeights weights = ComputeWeights::FromParameters(params, Profile::kBf16);
  const Panel& e = weights.embedding();
  const auto* words = reinterpret_cast<const uint16_t*>(e.data);
  const auto from = params.tensor(0);
  for (int n = 0; n < c.vocab; ++n) {
    for (int k = 0; k < e.depth; ++k) {
      const uint16_t got = words[static_cast<size_t>(n / 16) * e.depth * 16 + k / 2 * 32 + n % 16 * 2 + k % 2];
      const uint16_t want = k < c.width ? ToBf16(from[static_cast<size_t>(n) * c.width + k]) : 0;
      ASSERT_EQ(got, want) << n << ", " << k;
    }
  }
}

// Could go wrong: the choice at run time takes a slower path than the machine has, or one that it lacks.
TEST(Engine, TakesTheFastestPathThereIs) {
  const auto available = AvailableCpuPaths();
  ASSERT_FALSE(available.empty());
  EXPECT_TRUE(std::is_sorted(available.begin(), available.end()));
  if (!std::getenv("TEMPER_CPU")) {
    EXPECT_EQ((*Engine::Create({}))->path(), available.back());
  }
  for (CpuPath path : {CpuPath::kAvx2, CpuPath::kAvx512, CpuPath::kAmx}) {
    const auto engine = Engine::Create({path, 1});
    const bool present = std::find(available.begin(), available.end(), path) != available.end();
    EXPECT_EQ(engine.ok(), present) << CpuPathName(path);
    if (present) {
      EXPECT_EQ((*engine)->path(), path);
    } else {
      EXPECT_EQ(engine.status().code(), StatusCode::kFailedPrecondition);
    }
  }
}

// Could go wrong: our exp and log are off, or log-sum-exp overflows.
TEST(Kernels, LogSumExpIsAccurate) {
  std::mt19937_64 rng(10);
  std::normal_distribution<float> normal;
  auto engine = MakeEngine(CpuPath::kAuto, 1);
  for (int n : {1, 15, 16, 255, 256, 257, 5000}) {
    for (float spread : {0.0f, 1.0f, 30.0f, 1000.0f}) {
      std::vector<float> x(n);
      for (float& v : x) v = normal(rng) * spread + 3;
      double max = -1e300, sum = 0;
      for (float v : x) max = std::max<double>(max, v);
      for (float v : x) sum += std::exp(v - max);
      const double want = max + std::log(sum);
      EXPECT_NEAR(RowLogSumExp(*engine, {x.data(), static_cast<size_t>(n)}), want, 2e-6 + std::abs(want) * 2e-7) << n << " " << spread;
    }
  }
}

}  // namespace
}  // namespace temper::engine
