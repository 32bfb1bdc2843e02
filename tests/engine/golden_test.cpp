// Numbers recorded in the repository: PyTorch's float64 gradients, and digests that make machines agree with each other.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <bit>
#include <cstring>
#include <map>

#include <fmt/format.h>

#include "common/file.h"
#include "common/json.h"
#include "engine/reference.h"
#include "engine/score.h"
#include "engine/train_pass.h"
#include "tests/engine/golden_model.h"
#include "tests/engine/test_models.h"

namespace temper::engine {
namespace {

const char kFolder[] = TEMPER_SOURCE_DIR "/tests/golden/engine/";

json::value ReadGolden(const std::string& name) {
  auto text = ReadFile(kFolder + name);
  TEMPER_CHECK(text.ok()) << text.status().ToString();
  auto value = ParseJson(*text);
  TEMPER_CHECK(value.ok()) << value.status().ToString();
  return *std::move(value);
}

// Could go wrong: our float64 path, or the tree, is not the model that everyone else means.
TEST(Golden, PyTorchFloat64) {
  const json::value golden = ReadGolden("llama_f64.json");
  const JsonRef ref(golden);
  const ModelConfig c = GoldenConfig(golden.at("config"));
  ASSERT_TRUE(c.Validate().ok());
  const Parameters params = GoldenParameters(c, static_cast<uint64_t>(*(*ref.Field("seed")).Int()));
  const double temperature = *(*ref.Field("temperature")).Double();

  TreeBuilder builder;
  std::vector<std::vector<int32_t>> handles;
  const auto rows = *(*ref.Field("rows")).Items();
  const auto coefs = *(*ref.Field("coef")).Items();
  const float t = static_cast<float>(1 / temperature);
  for (const JsonRef& row : rows) {
    const auto ids = *row.Ints();
    handles.push_back(builder.AddRow(std::vector<int32_t>(ids.begin(), ids.end()), std::span(&t, 1)));
  }
  std::vector<int32_t> index;
  const TreeBatch tree = builder.Build(&index);
  EXPECT_LT(tree.size(), tree.logical_tokens);
  std::vector<double> coef(tree.size(), 0), inverse(tree.size(), 1 / temperature);
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto values = *coefs[i].Doubles();
    for (size_t j = 0; j < values.size(); ++j) coef[index[handles[i][j]]] += values[j];
  }
  ReferenceOptions options;
  options.coef = coef;
  options.inv_temperature = inverse;
  options.gradient = true;
  const ReferenceResult result = RunReference(params, tree, options);
  EXPECT_NEAR(result.objective, *(*ref.Field("objective")).Double(), 1e-10);
  const auto logprobs = *(*ref.Field("logprobs")).Items();
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto values = *logprobs[i].Items();
    for (size_t j = 1; j < values.size(); ++j) {
      EXPECT_NEAR(result.logprobs[index[handles[i][j]]], *values[j].Double(), 1e-11);
    }
  }
  const JsonRef gradient = *ref.Field("gradient");
  Parameters fast = params;
  const std::vector<float> coef32(coef.begin(), coef.end());
  auto engine = MakeEngine(CpuPath::kAuto, 2);
  TrainPass pass(*engine);
  const ComputeWeights weights = ComputeWeights::FromParameters(params, Profile::kF32);
  ASSERT_TRUE(pass.Forward(weights, tree).ok());
  fast.SetZero();
  pass.Backward(coef32, fast);
  for (size_t i = 0; i < params.tensors().size(); ++i) {
    const TensorSpec& spec = params.tensors()[i];
    const auto want = *(*gradient.Field(spec.name)).Doubles();
    ASSERT_EQ(static_cast<int64_t>(want.size()), spec.size);
    double error = 0, error32 = 0, norm = 0;
    for (size_t j = 0; j < want.size(); ++j) {
      error += std::pow(result.gradient[spec.offset + j] - want[j], 2);
      error32 += std::pow(fast.tensor(i)[j] - want[j], 2);
      norm += want[j] * want[j];
    }
    EXPECT_LT(std::sqrt(error / norm), 1e-9) << spec.name;
    EXPECT_LT(std::sqrt(error32 / norm), 1e-5) << spec.name;
  }
}

uint64_t Fnv(std::span<const float> values, uint64_t hash = 0xcbf29ce484222325u) {
  for (float x : values) {
    const auto bits = std::bit_cast<uint32_t>(x);
    for (int i = 0; i < 4; ++i) hash = (hash ^ (bits >> (8 * i) & 255)) * 0x100000001b3u;
  }
  return hash;
}

// Could go wrong: another machine, compiler or kernel gives other bits for the same model. TEMPER_UPDATE_GOLDEN=1 rewrites the
// file; a change of it changes what every recorded run means.
TEST(Golden, DigestsOfLogitsAndGradients) {
  std::map<std::string, std::string> got;
  for (const auto& [model, c] : AllConfigs()) {
    for (Profile profile : {Profile::kBf16, Profile::kF32}) {
      const Parameters params = GoldenParameters(c, 9);
      const ComputeWeights weights = ComputeWeights::FromParameters(params, profile);
      std::mt19937_64 rng(77);
      const TreeBatch tree = ForkedTree(rng, c.vocab, 150);
      const std::vector<float> coef = RandomCoefficients(rng, tree);
      const std::string name = fmt::format("{}/{}/", model, ProfileName(profile));
      got[name + "weights"] = weights.ComputeDigest().Hex();
      for (CpuPath path : AvailableCpuPaths()) {
        auto engine = MakeEngine(path, 2);
        TrainPass pass(*engine);
        std::vector<uint64_t> rows(tree.size());
        ForwardOptions options;
        options.on_row = [&](int node, const float* logits, float) { rows[node] = Fnv({logits, static_cast<size_t>(c.vocab)}); };
        ASSERT_TRUE(pass.Forward(weights, tree, options).ok());
        Gradients grads(c);
        pass.Backward(coef, grads);
        uint64_t logits = 0;
        for (uint64_t x : rows) logits = logits * 0x9e3779b97f4a7c15u + x;
        for (const auto& [what, value] : {std::pair{"logits", logits}, std::pair{"gradients", Fnv(grads.flat())}}) {
          std::string& entry = got[name + what];
          const std::string text = fmt::format("{:016x}", value);
          if (entry.empty()) entry = text;
          EXPECT_EQ(entry, text) << name << what << " on " << CpuPathName(path);
        }
      }
    }
  }
  std::string paths;
  for (CpuPath path : AvailableCpuPaths()) paths += std::string(" ") + CpuPathName(path);
  std::printf("[ paths    ]%s\n", paths.c_str());
  const std::string file = "digests.json";
  if (std::getenv("TEMPER_UPDATE_GOLDEN")) {
    std::string text = "{\n";
    for (const auto& [key, value] : got) text += fmt::format("{}\"{}\": \"{}\"", text.size() > 2 ? ",\n" : "", key, value);
    ASSERT_TRUE(WriteFile(kFolder + file, text + "\n}\n").ok());
  }
  const json::value golden = ReadGolden(file);
  for (const auto& [key, value] : got) {
    const auto want = (*JsonRef(golden).Field(key)).String();
    ASSERT_TRUE(want.ok()) << key;
    EXPECT_EQ(*want, value) << key;
  }
}

// Could go wrong: a mode of the score door, or its list of likeliest tokens, differs from the others.
TEST(Score, AllModesAgree) {
  const ModelConfig c = TinyConfig();
  const Parameters params = TestParameters(c, 5);
  std::mt19937_64 rng(5);
  std::vector<ScoreRow> rows;
  for (const auto& ids : ForkedRows(rng, c.vocab, 90)) rows.push_back({ids, rows.size() % 2 ? 0.7 : 1.0});
  auto engine = MakeEngine(CpuPath::kAuto, 2);
  ScoreOptions options;
  options.top = 3;
  for (Profile profile : {Profile::kBf16, Profile::kF32}) {
    const ComputeWeights weights = ComputeWeights::FromParameters(params, profile);
    options.mode = ScoreOptions::Mode::kFlat;
    const auto flat = Score(*engine, weights, rows, options);
    const auto reference = ScoreReference(params, rows, options);
    for (auto [mode, chunk] : {std::pair{ScoreOptions::Mode::kTree, 0}, {ScoreOptions::Mode::kDecode, 0},
                               {ScoreOptions::Mode::kPrefill, 1}, {ScoreOptions::Mode::kPrefill, 50}}) {
      options.mode = mode;
      options.chunk = chunk;
      const auto got = Score(*engine, weights, rows, options);
      for (size_t i = 0; i < rows.size(); ++i) {
        ASSERT_TRUE(std::isnan(got[i].logprobs[0]));
        for (size_t j = 0; j < rows[i].ids.size(); ++j) {
          if (j) {
            EXPECT_EQ(flat[i].logprobs[j], got[i].logprobs[j]);
          }
          EXPECT_EQ(flat[i].top[j], got[i].top[j]);
          ASSERT_EQ(got[i].top[j].size(), 3u);
          EXPECT_GE(got[i].top[j][0].second, got[i].top[j][1].second);
          if (profile == Profile::kF32) {
            EXPECT_NEAR(got[i].top[j][0].second, reference[i].top[j][0].second, 2e-5);
            if (j) {
              EXPECT_NEAR(got[i].logprobs[j], reference[i].logprobs[j], 2e-5);
            }
          }
        }
      }
    }
  }
  EXPECT_FALSE(CheckScoreRow(c, {{}, 1}).ok());
  EXPECT_FALSE(CheckScoreRow(c, {{c.vocab}, 1}).ok());
  EXPECT_FALSE(CheckScoreRow(c, {{1}, 0}).ok());
  EXPECT_FALSE(CheckScoreRow(c, {std::vector<int32_t>(c.max_positions + 1, 1), 1}).ok());
}

// Could go wrong: the digest of a version depends on the layout's padding, or misses a number.
class WeightsOf : public testing::TestWithParam<NamedConfig> {};
TEST_P(WeightsOf, DigestSeesEveryNumberAndNoPadding) {
  const ModelConfig c = GetParam().config;
  Parameters params = TestParameters(c, 5);
  for (Profile profile : {Profile::kBf16, Profile::kF32}) {
    const Digest first = ComputeWeights::FromParameters(params, profile).ComputeDigest();
    for (size_t i = 0; i < params.tensors().size(); ++i) {
      for (size_t j : {size_t{0}, params.tensor(i).size() - 1}) {
        const float saved = params.tensor(i)[j];
        params.tensor(i)[j] = saved * 1.5f + 1;
        EXPECT_NE(ComputeWeights::FromParameters(params, profile).ComputeDigest(), first) << params.tensors()[i].name;
        params.tensor(i)[j] = saved;
      }
    }
    const size_t bytes = ComputeBytes(c, profile);
    std::unique_ptr<std::byte, decltype(&std::free)> memory(static_cast<std::byte*>(std::aligned_alloc(64, bytes)), &std::free);
    std::memset(memory.get(), 0x55, bytes);
    Pack(params, profile, {memory.get(), bytes});
    auto view = ComputeWeights::View(c, profile, {memory.get(), bytes}, nullptr);
    ASSERT_TRUE(view.ok());
    EXPECT_EQ(view->ComputeDigest(), first);
    EXPECT_FALSE(ComputeWeights::View(c, profile, {memory.get(), bytes - 64}, nullptr).ok());
    EXPECT_FALSE(ComputeWeights::View(c, profile, {memory.get() + 4, bytes}, nullptr).ok());
  }
}
INSTANTIATE_TEST_SUITE_P(All, WeightsOf, testing::ValuesIn(AllConfigs()),
                         [](const auto& which) { return std::string(which.param.name); });

}  // namespace
}  // namespace temper::engine
