// A million draws: the frequencies are those of the distribution whose log-probability is returned, and which
// sequences were drawn side by side never shows.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <utility>

#include "engine/decode/decoder.h"
#include "engine/decode/model.h"
#include "engine/decode/random.h"
#include "engine/decode/sampler.h"
#include "engine/weights.h"

namespace temper::engine {
namespace {

constexpr int kVocab = 300;

// The same logits whatever came before, so that all draws of a sequence are of one distribution.
class ConstantModel : public StepModel {
 public:
  ConstantModel(std::vector<float> logits, int pages) : logits_(std::move(logits)), pages_(pages) {
    for (int i = 0; i < pages; ++i) free_.push_back(i);
  }
  int vocab() const override { return kVocab; }
  int max_positions() const override { return 4096; }
  int pages() const override { return pages_; }
  int32_t AllocatePage() override {
    const int32_t page = free_.back();
    free_.pop_back();
    return page;
  }
  void FreePage(int32_t page) override { free_.push_back(page); }
  void CopyPage(int32_t, int32_t, int) override {}
  void SetWeights(const ComputeWeights&) override {}
  void Run(std::span<const StepRow> rows, std::vector<StepLogits>* out) override {
    out->assign(rows.size(), {});
    for (size_t r = 0; r < rows.size(); ++r) {
      if (rows[r].want_logits) (*out)[r] = Of(rows[r].inv_temperature);
    }
  }
  float LogSumExp(std::span<const float> logits) const override {
    double sum = 0;
    for (float x : logits) sum += std::exp(static_cast<double>(x));
    return static_cast<float>(std::log(sum));
  }
  StepLogits Of(float inv_temperature) {
    auto [it, is_new] = scaled_.try_emplace(inv_temperature);
    auto& [scaled, lse] = it->second;
    if (is_new) {
      double sum = 0;
      for (float x : logits_) scaled.push_back(x * inv_temperature);
      for (float x : scaled) sum += std::exp(static_cast<double>(x));
      lse = static_cast<float>(std::log(sum));
    }
    return {scaled, lse};
  }

 private:
  std::vector<float> logits_;
  int pages_;
  std::vector<int32_t> free_;
  std::map<float, std::pair<std::vector<float>, float>> scaled_;
};

// Beyond this a chi-square of so many degrees of freedom has probability 1e-6 (Wilson and Hilferty).
double ChiSquareLimit(double degrees) {
  const double z = 4.7534, k = 2 / (9 * degrees);
  return degrees * std::pow(1 - k + z * std::sqrt(k), 3);
}

struct Drawn {
  std::vector<int32_t> ids;
  std::vector<float> logprobs;
};

std::vector<DecodeRequest> Requests(int sequences, int tokens) {
  const Sampling kinds[] = {{.temperature = 1},
                            {.temperature = 0.7f, .top_p = 0.9f},
                            {.temperature = 1.5f, .top_k = 40},
                            {.temperature = 1, .min_p = 0.05f},
                            {.temperature = 1.2f, .top_p = 0.95f, .top_k = 200, .min_p = 0.01f}};
  std::vector<DecodeRequest> out;
  for (int i = 0; i < sequences; ++i) {
    DecodeRequest r;
    r.ids = {i % kVocab, i / kVocab};
    r.sampling = kinds[i % std::size(kinds)];
    r.sampling.max_tokens = static_cast<uint32_t>(tokens);
    r.key = {.seed = 11, .domain = 0, .a = static_cast<uint64_t>(i)};
    out.push_back(r);
  }
  return out;
}

std::vector<Drawn> RunAll(const std::vector<DecodeRequest>& requests, const std::vector<float>& logits,
                          int max_batch) {
  Decoder decoder(std::make_unique<ConstantModel>(logits, 20 * max_batch + 50),
                  {.max_batch = max_batch, .waiting_max = 1 << 20});
  EXPECT_TRUE(decoder.SwapWeights({}, {1, 0}).ok());
  std::map<uint64_t, size_t> index;
  for (size_t i = 0; i < requests.size(); ++i) index[*decoder.Add(requests[i])] = i;
  std::vector<Drawn> out(requests.size());
  std::vector<DecodeEvent> events;
  while (decoder.Step(&events)) {
    for (const DecodeEvent& e : events) {
      out[index[e.id]].ids.push_back(e.token);
      out[index[e.id]].logprobs.push_back(e.logprob);
    }
    events.clear();
  }
  return out;
}

// Goes wrong if a draw is of another distribution than the one whose log-probability it carries, or knows its
// batch.
TEST(Draws, AMillionFollowTheirOwnLogprobs) {
  std::mt19937_64 rng(7);
  std::normal_distribution<float> normal(0, 2);
  std::vector<float> logits(kVocab);
  for (float& x : logits) x = normal(rng);
  const int tokens = 1000, sequences = 1050;
  const auto requests = Requests(sequences, tokens);
  const auto drawn = RunAll(requests, logits, 64);
  std::map<std::pair<float, float>, std::map<int32_t, std::pair<int64_t, float>>>
      seen;  // by (temperature, top_p): count, logprob
  ConstantModel model(logits, 1);
  Sampler sampler([&](std::span<const float> some) { return model.LogSumExp(some); });
  int64_t total = 0;
  for (int i = 0; i < sequences; ++i) {
    ASSERT_EQ(drawn[i].ids.size(), static_cast<size_t>(tokens));
    const Sampling& s = requests[i].sampling;
    const StepLogits row = model.Of(InvTemperature(s.temperature));
    auto& counts = seen[{s.temperature, s.top_p * 2 + s.min_p}];
    for (int j = 0; j < tokens; ++j, ++total) {
      auto [it, is_new] = counts.try_emplace(drawn[i].ids[j], 0, drawn[i].logprobs[j]);
      ++it->second.first;
      ASSERT_EQ(it->second.second, drawn[i].logprobs[j]) << "one distribution gives a token one logprob";
      if (i % 50) continue;  // what the sampler gives alone at this key and position
      const Draw alone = sampler.Sample(row.logits, row.log_sum_exp, s, UniformAt(requests[i].key, 2 + j));
      ASSERT_EQ(alone.token, drawn[i].ids[j]);
      ASSERT_EQ(alone.logprob, drawn[i].logprobs[j]);
    }
  }
  EXPECT_GE(total, 1000000);
  EXPECT_EQ(seen.size(), 5u);
  for (const auto& [kind, counts] : seen) {
    int64_t draws = 0;
    double mass = 0, chi = 0, rest_expected = 0, rest_seen = 0;
    for (const auto& [id, c] : counts) {
      draws += c.first;
      mass += std::exp(static_cast<double>(c.second));
    }
    int bins = 0;
    for (const auto& [id, c] : counts) {
      const double expected = std::exp(static_cast<double>(c.second)) * static_cast<double>(draws);
      if (expected < 20) {  // too rare for the approximation: together
        rest_expected += expected;
        rest_seen += static_cast<double>(c.first);
        continue;
      }
      ++bins;
      chi += (static_cast<double>(c.first) - expected) * (static_cast<double>(c.first) - expected) / expected;
    }
    // Tokens never drawn are in no bin; what is missing of the mass is theirs.
    rest_expected += (1 - mass) * static_cast<double>(draws);
    if (rest_expected > 20) {
      ++bins;
      chi += (rest_seen - rest_expected) * (rest_seen - rest_expected) / rest_expected;
    }
    EXPECT_GT(bins, 10) << kind.first;
    EXPECT_GT(mass, 0.999) << kind.first;
    EXPECT_LT(mass, 1.0001) << kind.first;
    EXPECT_LT(chi, ChiSquareLimit(bins - 1)) << kind.first << ", " << bins << " bins";
  }
  // Drawn alone, by sevens, all at once: the same.
  for (int max_batch : {1, 7, 1050}) {
    const int some = max_batch == 1 ? 40 : sequences, few = 300;
    auto shorter = Requests(some, few);
    const auto again = RunAll(shorter, logits, max_batch);
    for (int i = 0; i < some; ++i) {
      ASSERT_TRUE(std::equal(again[i].ids.begin(), again[i].ids.end(), drawn[i].ids.begin()))
          << i << " in batches of " << max_batch;
      ASSERT_TRUE(std::equal(again[i].logprobs.begin(), again[i].logprobs.end(), drawn[i].logprobs.begin()))
          << i;
    }
  }
}

}  // namespace
}  // namespace temper::engine
