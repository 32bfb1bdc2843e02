// Decoding on the real engine against training: every drawn token's logprob must be the trainer's, bit for bit, and nothing about
// the batch may show.
#include <gtest/gtest.h>

#include <bit>
#include <map>
#include <random>

#include <fmt/format.h>

#include "engine/decode/decoder.h"
#include "engine/decode/paged_model.h"
#include "engine/score.h"
#include "engine/train_pass.h"
#include "tests/engine/test_models.h"

namespace temper::engine {
namespace {

ModelConfig SmallConfig() {
  ModelConfig c = TinyConfig();
  c.heads = 4;
  c.kv_heads = 2;
  c.head_dim = 16;
  return c;
}

// The quickstart's shape and one model of every other family, over the vocabulary of Requests().
std::vector<NamedConfig> Models() {
  std::vector<NamedConfig> out = {{"small", SmallConfig()}};
  for (NamedConfig model : AllConfigs()) {
    if (model.config.family == Family::kLlama) continue;
    model.config.vocab = out[0].config.vocab;
    out.push_back(model);
  }
  return out;
}

// Initial weights are almost uniform; scaled up, the distribution has a shape.
ComputeWeights Weights(const ModelConfig& config, Profile profile, uint64_t seed) {
  Parameters p = InitParameters(config, seed);
  for (float& x : p.flat()) x *= 2.0f;
  return ComputeWeights::FromParameters(p, profile);
}

struct Drawn {
  std::vector<int32_t> ids;
  std::vector<float> logprobs;
  std::vector<std::string> kept;
  std::vector<Version> versions;
};

std::map<uint64_t, Drawn> RunAll(Decoder& decoder) {
  std::map<uint64_t, Drawn> out;
  std::vector<DecodeEvent> events;
  while (decoder.Step(&events)) {
  }
  for (const DecodeEvent& e : events) {
    if (e.token < 0) continue;
    out[e.id].ids.push_back(e.token);
    out[e.id].logprobs.push_back(e.logprob);
    out[e.id].kept.push_back(e.kept);
    out[e.id].versions.push_back(e.version);
  }
  return out;
}

std::vector<DecodeRequest> Requests() {
  std::mt19937_64 rng(5);
  std::vector<int32_t> shared(150);
  for (int32_t& t : shared) t = static_cast<int32_t>(rng() % 300);
  std::vector<DecodeRequest> requests;
  for (int i = 0; i < 12; ++i) {
    DecodeRequest r;
    r.ids.assign(shared.begin(), shared.begin() + static_cast<int64_t>(rng() % shared.size()));
    for (size_t n = 1 + rng() % 40; n > 0; --n) r.ids.push_back(static_cast<int32_t>(rng() % 300));
    r.sampling.temperature = i % 3 == 0 ? 0.7f : i % 3 == 1 ? 1.0f : 0.0f;
    if (i % 4 == 1) r.sampling.top_p = 0.8f;
    if (i % 4 == 2) r.sampling.top_k = 12;
    if (i % 4 == 3) r.sampling.min_p = 0.1f;
    r.sampling.max_tokens = 20 + static_cast<uint32_t>(rng() % 80);
    r.key = {.seed = 3, .domain = 2, .a = static_cast<uint64_t>(i)};
    requests.push_back(r);
  }
  return requests;
}

std::vector<float> TrainerLogprobs(Engine& engine, const ComputeWeights& weights, const DecodeRequest& r, const Drawn& d) {
  std::vector<int32_t> ids = r.ids;
  ids.insert(ids.end(), d.ids.begin(), d.ids.end());
  std::vector<float> inv(ids.size(), InvTemperature(r.sampling.temperature));
  TreeBuilder builder;
  std::vector<std::string> kept(r.ids.size());
  kept.insert(kept.end(), d.kept.begin(), d.kept.end());
  builder.AddRow(ids, inv, kept);
  std::vector<int32_t> index;
  TreeBatch tree = builder.Build(&index);
  TrainPass pass(engine);
  auto logprobs = pass.Forward(weights, tree, {.wanted = {}, .keep = false});
  EXPECT_TRUE(logprobs.ok());
  return {logprobs->begin() + static_cast<int64_t>(r.ids.size()), logprobs->end()};
}

void ExpectSameBits(const std::vector<float>& a, const std::vector<float>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(std::bit_cast<uint32_t>(a[i]), std::bit_cast<uint32_t>(b[i])) << "token " << i << ": " << a[i] << " and " << b[i];
  }
}

// Goes wrong if a page that every window has passed is still read, or one that is still seen is given back: with as few pages as a sequence
// can do with, decoding and scoring must say what the trainer says.
TEST(Agreement, WindowsNeedNoPagesBehindThem) {
  for (const int window : {20, 90}) {
    ModelConfig config = AllConfigs()[4].config;
    ASSERT_EQ(config.family, Family::kMistral);
    config.vocab = SmallConfig().vocab;
    config.window = window;
    for (const Profile profile : {Profile::kBf16, Profile::kF32}) {
      SCOPED_TRACE(fmt::format("window {} {}", window, ProfileName(profile)));
      const ComputeWeights weights = Weights(config, profile, 3);
      auto engine = MakeEngine(CpuPath::kAuto, 2);
      const int chunk = 50;
      Decoder decoder(std::make_unique<PagedModel>(*engine, config, profile, (window + chunk + 63) / 64 + 3), {.max_batch = 3, .chunk_tokens = chunk});
      ASSERT_TRUE(decoder.SwapWeights(weights, {1, 0}).ok());
      std::vector<DecodeRequest> requests = Requests();
      std::vector<uint64_t> ids;
      for (DecodeRequest& r : requests) {
        r.sampling.max_tokens += 150;
        ids.push_back(*decoder.Add(r));
      }
      auto out = RunAll(decoder);
      std::vector<ScoreRow> rows;
      for (size_t i = 0; i < requests.size(); ++i) {
        ExpectSameBits(out[ids[i]].logprobs, TrainerLogprobs(*engine, weights, requests[i], out[ids[i]]));
        ScoreRow& row = rows.emplace_back();
        row.ids = requests[i].ids;
        row.ids.insert(row.ids.end(), out[ids[i]].ids.begin(), out[ids[i]].ids.end());
      }
      const std::vector<RowScores> flat = Score(*engine, weights, rows, {});
      for (const ScoreOptions& options : {ScoreOptions{ScoreOptions::Mode::kPrefill, 7}, {ScoreOptions::Mode::kPrefill, 64}, {ScoreOptions::Mode::kDecode}}) {
        const std::vector<RowScores> paged = Score(*engine, weights, rows, options);
        for (size_t i = 0; i < rows.size(); ++i) {
          for (size_t j = 1; j < rows[i].ids.size(); ++j) ASSERT_EQ(paged[i].logprobs[j], flat[i].logprobs[j]) << i << " " << j;
        }
      }
    }
  }
}

// Goes wrong if the ratio of a fresh token is not exactly 1: another order of additions, a stale page, the wrong temperature.
TEST(Agreement, DrawnLogprobsAreTheTrainersBitForBit) {
  for (const auto& [name, config] : Models()) {
    for (Profile profile : {Profile::kBf16, Profile::kF32}) {
      // Paths give the same bits of every family (exactness_test.cpp): one is enough here.
      const bool all = config.family == Family::kLlama;
      for (CpuPath path : all ? AvailableCpuPaths() : std::vector<CpuPath>{CpuPath::kAuto}) {
        SCOPED_TRACE(fmt::format("{} {} {}", name, CpuPathName(path), ProfileName(profile)));
        auto engine = *Engine::Create({.cpu = path, .threads = 2});
        ComputeWeights weights = Weights(config, profile, 1);
        Decoder decoder(std::make_unique<PagedModel>(*engine, config, profile, 40), {.max_batch = 8, .chunk_tokens = 50});
        ASSERT_TRUE(decoder.SwapWeights(weights, {1, 0}).ok());
        auto requests = Requests();
        std::vector<uint64_t> ids;
        for (auto& r : requests) ids.push_back(*decoder.Add(r));
        auto out = RunAll(decoder);
        EXPECT_GT(decoder.stats().cached_tokens, 0u);
        for (size_t i = 0; i < requests.size(); ++i) {
          ASSERT_EQ(out[ids[i]].ids.size(), requests[i].sampling.max_tokens);
          const Sampling& s = requests[i].sampling;
          const bool may_cut = s.temperature > 0 && !IsPureTemperature(s);
          const auto& kept = out[ids[i]].kept;
          EXPECT_EQ(std::any_of(kept.begin(), kept.end(), [](const std::string& set) { return !set.empty(); }), may_cut) << i;
          ExpectSameBits(out[ids[i]].logprobs, TrainerLogprobs(*engine, weights, requests[i], out[ids[i]]));
        }
      }
    }
  }
}

// Goes wrong if batch size, chunking, threads or the kernel path change a draw.
TEST(Agreement, BatchNeverShows) {
  const ModelConfig config = SmallConfig();
  ComputeWeights weights = Weights(config, Profile::kBf16, 1);
  std::vector<Drawn> reference;
  auto run = [&](CpuPath path, int threads, int max_batch, int chunk, int pages) {
    auto engine = *Engine::Create({.cpu = path, .threads = threads});
    Decoder decoder(std::make_unique<PagedModel>(*engine, config, Profile::kBf16, pages), {.max_batch = max_batch, .chunk_tokens = chunk});
    EXPECT_TRUE(decoder.SwapWeights(weights, {1, 0}).ok());
    std::vector<uint64_t> ids;
    for (auto& r : Requests()) ids.push_back(*decoder.Add(r));
    auto out = RunAll(decoder);
    std::vector<Drawn> drawn;
    for (uint64_t id : ids) drawn.push_back(out[id]);
    if (reference.empty()) reference = drawn;
    for (size_t i = 0; i < drawn.size(); ++i) {
      EXPECT_EQ(drawn[i].ids, reference[i].ids);
      EXPECT_EQ(drawn[i].kept, reference[i].kept);
      ExpectSameBits(drawn[i].logprobs, reference[i].logprobs);
    }
  };
  for (CpuPath path : AvailableCpuPaths()) {
    run(path, 1, 1, 1000, 40);
    run(path, 2, 12, 7, 60);
    run(path, 1, 5, 64, 9);  // pages run out
  }
}

// Goes wrong if after a swap (retract) tokens come from keys of both versions: each must be its own version's, bit for bit.
TEST(Agreement, TokensAfterASwapBelongToTheNewVersion) {
  const ModelConfig config = SmallConfig();
  auto engine = *Engine::Create({});
  ComputeWeights weights[2] = {Weights(config, Profile::kBf16, 1), Weights(config, Profile::kBf16, 2)};
  Decoder decoder(std::make_unique<PagedModel>(*engine, config, Profile::kBf16, 60), {.max_batch = 8});
  ASSERT_TRUE(decoder.SwapWeights(weights[0], {1, 0}).ok());
  auto requests = Requests();
  std::vector<uint64_t> ids;
  for (auto& r : requests) ids.push_back(*decoder.Add(r));
  std::vector<DecodeEvent> events;
  for (int i = 0; i < 25; ++i) decoder.Step(&events);
  ASSERT_TRUE(decoder.SwapWeights(weights[1], {1, 1}).ok());
  while (decoder.Step(&events)) {
  }
  std::map<uint64_t, Drawn> out;
  for (const DecodeEvent& e : events) {
    out[e.id].ids.push_back(e.token);
    out[e.id].logprobs.push_back(e.logprob);
    out[e.id].kept.push_back(e.kept);
    out[e.id].versions.push_back(e.version);
  }
  int of_version[2] = {};
  for (size_t i = 0; i < requests.size(); ++i) {
    const Drawn& d = out[ids[i]];
    std::vector<float> scored[2] = {TrainerLogprobs(*engine, weights[0], requests[i], d), TrainerLogprobs(*engine, weights[1], requests[i], d)};
    for (size_t t = 0; t < d.ids.size(); ++t) {
      int64_t v = d.versions[t].step;
      ++of_version[v];
      EXPECT_EQ(std::bit_cast<uint32_t>(d.logprobs[t]), std::bit_cast<uint32_t>(scored[v][t]));
    }
  }
  EXPECT_GT(of_version[0], 50);
  EXPECT_GT(of_version[1], 50);
}

}  // namespace
}  // namespace temper::engine
