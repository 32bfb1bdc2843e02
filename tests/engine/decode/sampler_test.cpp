#include "engine/decode/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <random>

#include "engine/decode/random.h"
#include "engine/kept_set.h"

namespace temper::engine {
namespace {

std::vector<float> RandomLogits(std::mt19937_64& rng, int vocab, float scale) {
  std::normal_distribution<float> n(0.0f, scale);
  std::vector<float> logits(vocab);
  for (float& l : logits) l = n(rng);
  return logits;
}

float LogSumExp(std::span<const float> logits) {
  double m = *std::max_element(logits.begin(), logits.end()), s = 0;
  for (float l : logits) s += std::exp(l - m);
  return static_cast<float>(m + std::log(s));
}

// Probabilities after truncation, in double, by the definition.
std::map<int, double> Expected(const std::vector<float>& logits, const Sampling& s) {
  std::vector<std::pair<double, int>> p;
  double m = *std::max_element(logits.begin(), logits.end());
  for (size_t i = 0; i < logits.size(); ++i) p.push_back({std::exp(logits[i] - m), static_cast<int>(i)});
  std::sort(p.begin(), p.end(), [](auto& a, auto& b) { return a.first != b.first ? a.first > b.first : a.second < b.second; });
  if (s.top_k > 0 && s.top_k < p.size()) p.resize(s.top_k);
  double total = 0;
  for (auto& [w, id] : p) total += w;
  double sum = 0;
  size_t n = 0;
  while (n < p.size() && sum < s.top_p * total) sum += p[n++].first;
  if (s.top_p < 1) p.resize(std::max<size_t>(n, 1));
  std::erase_if(p, [&, top = p[0].first](auto& e) { return e.first < s.min_p * top; });
  total = 0;
  for (auto& [w, id] : p) total += w;
  std::map<int, double> out;
  for (auto& [w, id] : p) out[id] = w / total;
  return out;
}

// Goes wrong if a draw leaves the kept set, has the wrong frequency, or the logprob is of another distribution.
TEST(Sampler, DrawsTheTruncatedDistribution) {
  std::mt19937_64 rng(1);
  Sampler sampler(LogSumExp);
  for (const Sampling& s : {Sampling{.temperature = 1}, Sampling{.temperature = 1, .top_p = 0.7f}, Sampling{.temperature = 1, .top_k = 5},
                            Sampling{.temperature = 1, .min_p = 0.1f}, Sampling{.temperature = 1, .top_p = 0.9f, .top_k = 40, .min_p = 0.02f}}) {
    for (int vocab : {3, 256, 700}) {
      auto logits = RandomLogits(rng, vocab, 2.0f);
      float lse = LogSumExp(logits);
      auto expected = Expected(logits, s);
      const int draws = 5000;
      std::map<int, int> seen;
      for (int i = 0; i < draws; ++i) {
        Draw d = sampler.Sample(logits, lse, s, (i + 0.5) / draws);  // stratified: frequencies are exact up to 1/draws a token
        ASSERT_TRUE(expected.count(d.token)) << "token " << d.token << " was cut off";
        EXPECT_NEAR(d.logprob, std::log(expected[d.token]), 2e-5);
        ++seen[d.token];
      }
      for (auto& [id, p] : expected) EXPECT_NEAR(seen[id], p * draws, 1.5) << "token " << id << " of " << vocab;
    }
  }
}

// Goes wrong if the recorded set is not the one of the definition, lacks the token, is there where nothing was cut, or the logprob is not
// the subtraction that training performs for it.
TEST(Sampler, KeptSetIsTheDefinition) {
  std::mt19937_64 rng(3);
  Sampler sampler(LogSumExp);
  int cut = 0, whole = 0, borderline = 0;
  for (int trial = 0; trial < 2000; ++trial) {
    const int vocab = 2 + static_cast<int>(rng() % 600);
    std::vector<float> logits = RandomLogits(rng, vocab, 0.5f + static_cast<float>(rng() % 4));
    if (trial % 3 == 0) {
      for (float& l : logits) l = std::round(l);  // many equal ones: the lower ids stay
    }
    Sampling s;
    if (rng() % 2) s.top_k = 1 + static_cast<uint32_t>(rng() % (2 * vocab));
    if (rng() % 2) s.top_p = 0.01f + 0.99f * static_cast<float>(rng() % 1000) / 1000;
    if (rng() % 2) s.min_p = 0.3f * static_cast<float>(rng() % 1000) / 1000;
    const float lse = LogSumExp(logits);
    const double uniform = static_cast<double>(rng() >> 11) * 0x1p-53;
    const Draw d = sampler.Sample(logits, lse, s, uniform);
    const auto expected = Expected(logits, s);
    std::vector<int32_t> ids;
    if (d.kept.empty()) {
      ++whole;
      for (int32_t id = 0; id < vocab; ++id) ids.push_back(id);
      EXPECT_EQ(d.logprob, logits[d.token] - lse);
    } else {
      ++cut;
      ASSERT_TRUE(DecodeKept(d.kept, vocab, &ids).ok());
      EXPECT_LT(ids.size(), static_cast<size_t>(vocab));
      EXPECT_EQ(d.logprob, logits[d.token] - LogSumExp(KeptLogits(d.kept, logits.data()).values));
    }
    ASSERT_TRUE(std::binary_search(ids.begin(), ids.end(), d.token));
    std::vector<int32_t> want;
    for (const auto& [id, p] : expected) want.push_back(id);
    if (ids == want) continue;
    // The sampler's own exponential may decide a border otherwise: then the sets differ by tokens of one probability at the border.
    ++borderline;
    std::vector<int32_t> difference;
    std::set_symmetric_difference(ids.begin(), ids.end(), want.begin(), want.end(), std::back_inserter(difference));
    EXPECT_EQ(difference.size(), 1u) << "trial " << trial;
  }
  EXPECT_GT(cut, 1000);
  EXPECT_GT(whole, 150);
  EXPECT_LT(borderline, 20);
}

// Goes wrong if the logprob of a pure draw is not the very subtraction that training performs.
TEST(Sampler, PureLogprobIsLogitMinusLogSumExp) {
  std::mt19937_64 rng(2);
  Sampler sampler(LogSumExp);
  auto logits = RandomLogits(rng, 999, 3.0f);
  float lse = LogSumExp(logits);
  for (int i = 0; i < 1000; ++i) {
    Draw d = sampler.Sample(logits, lse, {.temperature = 1}, UniformAt({.seed = 3}, i));
    EXPECT_EQ(d.logprob, logits[d.token] - lse);
  }
}

// Goes wrong at the edges: first and last token, uniform at its ends, a tile without weight, NaN and infinities.
TEST(Sampler, Edges) {
  Sampler sampler(LogSumExp);
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const double last = 1.0 - 0x1p-53;
  std::vector<float> logits(1000, -inf);
  logits[0] = 0;
  EXPECT_EQ(sampler.Sample(logits, 0, {}, 0.0).token, 0);
  EXPECT_EQ(sampler.Sample(logits, 0, {}, last).token, 0);
  logits[0] = -inf;
  logits[999] = 0;
  EXPECT_EQ(sampler.Sample(logits, 0, {}, 0.0).token, 999);
  EXPECT_EQ(sampler.Sample(logits, 0, {}, last).token, 999);
  logits[300] = nan;
  EXPECT_EQ(sampler.Sample(logits, 0, {}, 0.5).token, 999);
  EXPECT_EQ(sampler.Sample(logits, 0, {.temperature = 0}, 0.5).token, 999);
  EXPECT_EQ(sampler.Sample(logits, 0, {.top_p = 0.5f}, 0.5).token, 999);
  logits = {1, 3, 3, 2};
  EXPECT_EQ(sampler.Sample(logits, LogSumExp(logits), {.temperature = 0}, 0.9).token, 1) << "the lowest id among equals";
  EXPECT_EQ(sampler.Sample(logits, LogSumExp(logits), {.top_k = 1}, 0.9).token, 1);
  EXPECT_EQ(sampler.Sample(logits, LogSumExp(logits), {.top_k = 1}, 0.9).logprob, 0.0f);
  logits.assign(5, nan);
  EXPECT_EQ(sampler.Sample(logits, nan, {}, 0.5).token, 0);
  logits.assign(600, 0.0f);
  EXPECT_EQ(sampler.Sample(logits, std::log(600.0f), {}, last).token, 599);
}

// Goes wrong if the draw order is not that of token ids: raising uniform must never lower the token.
TEST(Sampler, TokenRisesWithUniform) {
  std::mt19937_64 rng(4);
  Sampler sampler(LogSumExp);
  auto logits = RandomLogits(rng, 1500, 1.0f);
  float lse = LogSumExp(logits);
  int before = -1;
  for (int i = 0; i < 5000; ++i) {
    int t = sampler.Sample(logits, lse, {}, i / 5000.0).token;
    EXPECT_GE(t, before);
    before = t;
  }
}

TEST(Sampler, RefusesValuesOutOfRange) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const Sampling& s : {Sampling{.temperature = -1}, Sampling{.temperature = nan}, Sampling{.temperature = 1e-40f}, Sampling{.top_p = 0},
                            Sampling{.top_p = 1.5f}, Sampling{.top_p = nan}, Sampling{.min_p = -0.1f}, Sampling{.min_p = 2}, Sampling{.max_tokens = 0}}) {
    EXPECT_EQ(CheckSampling(s).code(), StatusCode::kInvalidArgument);
  }
  EXPECT_TRUE(CheckSampling({}).ok());
}

// Goes wrong if Philox is not Philox: known answers of the authors' reference.
TEST(Random, PhiloxKnownAnswers) {
  EXPECT_EQ(Philox4x32({0, 0, 0, 0}, {0, 0}), (std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(Philox4x32({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (std::array<uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
}

// Goes wrong if a field of the key does not enter, or draws are not uniform.
TEST(Random, EveryFieldOfTheKeyCounts) {
  SampleKey base{.seed = 1, .domain = 0, .a = 2, .b = 3, .call = 4, .choice = 5};
  double u = UniformAt(base, 6);
  EXPECT_EQ(u, UniformAt(base, 6));
  SampleKey k = base;
  k.seed = 2; EXPECT_NE(u, UniformAt(k, 6)); k = base;
  k.domain = 1; EXPECT_NE(u, UniformAt(k, 6)); k = base;
  k.a = 3; EXPECT_NE(u, UniformAt(k, 6)); k = base;
  k.b = 2; EXPECT_NE(u, UniformAt(k, 6)); k = base;
  k.call = 5; EXPECT_NE(u, UniformAt(k, 6)); k = base;
  k.choice = 4; EXPECT_NE(u, UniformAt(k, 6)); k = base;
  EXPECT_NE(u, UniformAt(k, 7));
  std::swap(k.a, k.b);
  EXPECT_NE(u, UniformAt(k, 6));
  std::vector<int> bins(64);
  for (int i = 0; i < 64000; ++i) ++bins[static_cast<int>(UniformAt({.seed = 9, .a = static_cast<uint64_t>(i % 250)}, i / 250) * 64)];
  double chi = 0;
  for (int b : bins) chi += (b - 1000.0) * (b - 1000.0) / 1000.0;
  EXPECT_LT(chi, 120.0);  // 63 degrees of freedom: beyond 120 has probability 2e-5
}

}  // namespace
}  // namespace temper::engine
