// Kept sets of truncated sampling: their bytes, and the softmax over them in every pass of the engine.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include <fmt/format.h>

#include "common/rng.h"
#include "engine/kept_json.h"
#include "engine/kept_set.h"
#include "engine/reference.h"
#include "engine/score.h"
#include "engine/train_pass.h"
#include "tests/engine/test_models.h"
#include "tests/fuzz/mutate.h"

namespace temper::engine {
namespace {

std::vector<int32_t> RandomSet(Rng& rng, int vocab, double share) {
  std::vector<int32_t> ids;
  for (int32_t id = 0; id < vocab; ++id) {
    if (rng.Chance(share)) ids.push_back(id);
  }
  if (ids.empty()) ids.push_back(static_cast<int32_t>(rng.Below(static_cast<uint64_t>(vocab))));
  return ids;
}

// Goes wrong if a set comes back as another one, or takes more room than the shorter of the two forms.
TEST(KeptSet, ComesBackInTheShorterForm) {
  Rng rng(1);
  int forms[3] = {};
  for (int trial = 0; trial < 3000; ++trial) {
    const int vocab = 2 + static_cast<int>(rng.Below(trial % 10 ? 400 : 152000));
    const double shares[] = {0.0005, 0.01, 0.1, 0.12, 0.14, 0.5, 0.99};
    const std::vector<int32_t> ids = RandomSet(rng, vocab, shares[rng.Below(7)]);
    const std::string bytes = EncodeKept(ids, vocab);
    if (ids.size() == static_cast<size_t>(vocab)) {
      EXPECT_TRUE(bytes.empty());
      continue;
    }
    ++forms[static_cast<int>(bytes[0])];
    EXPECT_LE(bytes.size(), 1u + static_cast<size_t>(vocab + 7) / 8);
    size_t gaps = 1;
    for (size_t i = 0; i < ids.size(); ++i) {
      const int gap = ids[i] - (i ? ids[i - 1] : -1) - 1;
      gaps += gap < 128 ? 1 : gap < 16384 ? 2 : 3;
    }
    EXPECT_EQ(bytes.size(), std::min(gaps, 2 + static_cast<size_t>(ids.back()) / 8));
    std::vector<int32_t> back;
    ASSERT_TRUE(DecodeKept(bytes, vocab, &back).ok());
    EXPECT_EQ(back, ids);
    EXPECT_FALSE(DecodeKept(bytes, ids.back(), &back).ok()) << "an id outside a smaller vocabulary";
    for (int32_t token : {ids[0], ids.back(), static_cast<int32_t>(rng.Below(static_cast<uint64_t>(vocab)))}) {
      EXPECT_EQ(CheckKept(bytes, vocab, token).ok(), std::binary_search(ids.begin(), ids.end(), token));
    }
  }
  EXPECT_GT(forms[1], 500);
  EXPECT_GT(forms[2], 500);
}

// Goes wrong if two spellings pass for one set: sets are compared by their bytes.
TEST(KeptSet, HasOneSpelling) {
  int read = 0;
  std::vector<int32_t> ids;
  const auto look = [&](const std::string& bytes, int vocab) {
    if (!DecodeKept(bytes, vocab, &ids).ok()) return;
    ++read;
    ASSERT_TRUE(std::is_sorted(ids.begin(), ids.end()) && std::adjacent_find(ids.begin(), ids.end()) == ids.end());
    ASSERT_GE(ids.front(), 0);
    ASSERT_LT(ids.back(), vocab);
    ASSERT_EQ(EncodeKept(ids, vocab), bytes);
  };
  for (int a = 0; a < 256; ++a) {
    look({static_cast<char>(a)}, 40);
    for (int b = 0; b < 256; ++b) {
      look({static_cast<char>(a), static_cast<char>(b)}, 40);
      for (int c = 0; c < 256 && a < 4; ++c) look({static_cast<char>(a), static_cast<char>(b), static_cast<char>(c)}, 40);
    }
  }
  EXPECT_GT(read, 500);
  for (const std::string& bad : {std::string(), std::string("\0", 1), std::string("\1", 1), std::string("\2", 1), std::string("\3\5", 2),
                                std::string("\1\x80", 2), std::string("\1\x80\0", 3), std::string("\2\0", 2), std::string("\1\xff\xff\xff\xff\xff\x01", 7),
                                std::string("\1\xff\xff\xff\xff\x7f", 6), std::string("\1\x05\x05\x80", 4)}) {
    EXPECT_EQ(DecodeKept(bad, 1000, &ids).code(), StatusCode::kInvalidArgument) << bad.size();
  }
}

// Goes wrong if damaged bytes crash the reader, make it hold more than eight ids a byte, or pass as a set that is spelled otherwise.
TEST(KeptSet, SurvivesMutations) {
  Rng rng(2);
  std::vector<int32_t> ids;
  int read = 0;
  for (int trial = 0; trial < 60000; ++trial) {
    const int vocab = 2 + static_cast<int>(rng.Below(3000));
    std::string bytes = EncodeKept(RandomSet(rng, vocab, trial % 2 ? 0.02 : 0.3), vocab);
    if (bytes.empty()) continue;
    bytes = Mutated(std::move(bytes), {}, rng);
    const Status status = DecodeKept(bytes, vocab, &ids);
    ASSERT_LE(ids.size(), 8 * bytes.size());
    if (!status.ok()) {
      ASSERT_FALSE(status.message().empty());
      continue;
    }
    ++read;
    ASSERT_EQ(EncodeKept(ids, vocab), bytes);
  }
  EXPECT_GT(read, 1000);
}

// Goes wrong if a list of the doors is read as another one, or a bad one is taken.
TEST(KeptSet, OfTheDoors) {
  const std::vector<int32_t> tokens = {3, 5, 7};
  const auto read = [&](const std::string& text) {
    const auto value = ParseJson(text);
    return ReadKept(JsonRef(*value), tokens, 9);
  };
  const std::string good = "[null,[0,5,8],[7]]";
  const auto kept = read(good);
  ASSERT_TRUE(kept.ok()) << kept.status().ToString();
  JsonWriter w;
  WriteKept(w, *kept);
  EXPECT_EQ(w.Take(), good);
  EXPECT_TRUE((*read("[[0,1,2,3,4,5,6,7,8],null,null]"))[0].empty()) << "all of the vocabulary";
  for (const char* bad : {"[null,null]", "[null,null,null,null]", "[null,[4],[7]]", "[null,[],[7]]", "[null,[5,5],[7]]", "[null,[5,2],[7]]",
                          "[null,[5,9],[7]]", "[null,[-1,5],[7]]", "[null,5,[7]]", "{}", "[null,[5.5],null]"}) {
    EXPECT_EQ(read(bad).status().code(), StatusCode::kInvalidArgument) << bad;
  }
}

// Goes wrong if two draws of one token from different sets are trained as one, or two from one set as two.
TEST(KeptTree, OneNodeForOneTransform) {
  TreeBuilder builder;
  const int32_t root = builder.AddNode(-1, 1, 1);
  const std::string a = EncodeKept(std::vector<int32_t>{2, 5}, 9), b = EncodeKept(std::vector<int32_t>{2, 6}, 9);
  const int32_t of_all = builder.AddNode(root, 2, 1), of_a = builder.AddNode(root, 2, 1, a);
  EXPECT_EQ(builder.AddNode(root, 2, 1, a), of_a);
  EXPECT_EQ(builder.AddNode(root, 2, 1), of_all);
  EXPECT_NE(of_a, of_all);
  EXPECT_NE(builder.AddNode(root, 2, 1, b), of_a);
  EXPECT_NE(builder.AddNode(root, 2, 0.5f, a), of_a);
  const TreeBatch tree = builder.Build(nullptr);
  ASSERT_EQ(tree.size(), 5);
  EXPECT_EQ(tree.kept_sets.size(), 2u);
  EXPECT_EQ(tree.kept_set(tree.kept_index(0)), "");
  EXPECT_EQ(tree.kept_set(tree.kept_index(2)), a);
  EXPECT_EQ(tree.kept_set(tree.kept_index(3)), b);
  EXPECT_TRUE(TreeBatch().kept.empty());
}

// Goes wrong if the masked logprob is not that of the whole row less the log of what the set holds of it (in double).
TEST(KeptReference, IsTheWholeDistributionRenormalised) {
  const ModelConfig c = OddConfig();
  const Parameters params = TestParameters(c, 3);
  std::mt19937_64 rng(5);
  const std::vector<int32_t> ids = RandomIds(rng, 40, c.vocab);
  const std::vector<std::string> kept = SomeKept(ids, c.vocab);
  TreeBuilder builder;
  const float t = 1;
  builder.AddRow(ids, std::span(&t, 1), kept);
  const TreeBatch tree = builder.Build(nullptr);
  ReferenceOptions options;
  options.rows = true;
  const ReferenceResult r = RunReference(params, tree, options);
  int cut = 0;
  for (size_t i = 1; i < ids.size(); ++i) {
    double held = 0;
    std::vector<int32_t> set;
    if (kept[i].empty()) {
      held = 1;
    } else {
      ++cut;
      ASSERT_TRUE(DecodeKept(kept[i], c.vocab, &set).ok());
      for (int32_t id : set) held += std::exp(r.rows[i - 1][id]);
    }
    EXPECT_NEAR(r.logprobs[i], r.rows[i - 1][ids[i]] - std::log(held), 1e-12) << i;
  }
  EXPECT_GT(cut, 15);
}

// Goes wrong if flat rows, a tree, pages in chunks or one by one, another kernel path, chunks of the tree, or a second computation of the
// layers give a token drawn among few another logprob; or if the gradient depends on kernels, threads, or where layers are kept.
TEST(KeptPass, EveryPassGivesTheSameBits) {
  for (const auto& [name, c] : AllConfigs()) {
    const Parameters params = TestParameters(c, 11);
    std::mt19937_64 rng(6);
    std::vector<ScoreRow> rows;
    for (const auto& ids : ForkedRows(rng, c.vocab, 100)) rows.push_back({ids, 0.8, SomeKept(ids, c.vocab)});
    TreeBuilder builder;
    const float t = 1.0f / 0.8f;
    for (const ScoreRow& row : rows) builder.AddRow(row.ids, std::span(&t, 1), row.kept);
    const TreeBatch tree = builder.Build(nullptr);
    ASSERT_LT(tree.size(), tree.logical_tokens);
    const std::vector<float> coef = RandomCoefficients(rng, tree);
    for (Profile profile : {Profile::kBf16, Profile::kF32}) {
      const ComputeWeights weights = ComputeWeights::FromParameters(params, profile);
      std::vector<RowScores> want;
      std::vector<float> forward, slope;
      int threads = 1;
      for (CpuPath path : AvailableCpuPaths()) {
        SCOPED_TRACE(fmt::format("{} {} {}", name, ProfileName(profile), CpuPathName(path)));
        auto engine = MakeEngine(path, threads);
        threads = 3 - threads;
        using Mode = ScoreOptions::Mode;
        for (Mode mode : {Mode::kFlat, Mode::kTree, Mode::kPrefill, Mode::kDecode}) {
          ScoreOptions options;
          options.mode = mode;
          options.chunk = 17;
          const auto got = Score(*engine, weights, rows, options);
          if (want.empty()) want = got;
          for (size_t i = 0; i < rows.size(); ++i) {
            for (size_t j = 1; j < rows[i].ids.size(); ++j) ASSERT_EQ(got[i].logprobs[j], want[i].logprobs[j]) << i << " " << j;
          }
        }
        TrainPass pass(*engine);
        for (const auto& [chunk, recompute] : {std::pair(0, false), {0, true}, {64, false}, {33, true}}) {
          ForwardOptions options;
          options.chunk_nodes = chunk;
          options.recompute = recompute;
          const auto logprobs = pass.Forward(weights, tree, options);
          ASSERT_TRUE(logprobs.ok()) << logprobs.status().ToString();
          if (forward.empty()) forward.assign(logprobs->begin(), logprobs->end());
          EXPECT_EQ(std::memcmp(forward.data(), logprobs->data(), forward.size() * sizeof(float)), 0) << chunk;
          Gradients grads(c);
          pass.Backward(coef, grads);
          if (slope.empty()) slope.assign(grads.flat().begin(), grads.flat().end());
          double error = 0, norm = 0;
          for (size_t i = 0; i < slope.size(); ++i) {
            error += std::pow(static_cast<double>(grads.flat()[i]) - slope[i], 2);
            norm += std::pow(static_cast<double>(slope[i]), 2);
          }
          if (chunk == 0) {
            EXPECT_EQ(error, 0);
          }
          EXPECT_LT(std::sqrt(error / norm), profile == Profile::kBf16 ? 1e-2 : 1e-5) << chunk;
        }
      }
    }
  }
}

// Goes wrong if anything pulls on a logit that was cut: with a head of its own, the row of a token that no set holds has no gradient.
TEST(KeptPass, CutLogitsHaveNoGradient) {
  const ModelConfig c = OddConfig();
  ASSERT_FALSE(c.tied);
  const Parameters params = TestParameters(c, 4);
  std::mt19937_64 rng(8);
  std::vector<int32_t> ids;
  std::vector<int32_t> half;
  for (int32_t id = 0; id < c.vocab; id += 2) half.push_back(id);
  for (int i = 0; i < 50; ++i) ids.push_back(half[rng() % half.size()]);
  const std::vector<std::string> kept(ids.size(), EncodeKept(half, c.vocab));
  TreeBuilder builder;
  const float t = 1;
  builder.AddRow(ids, std::span(&t, 1), kept);
  const TreeBatch tree = builder.Build(nullptr);
  auto engine = MakeEngine(CpuPath::kAuto, 2);
  for (Profile profile : {Profile::kBf16, Profile::kF32}) {
    TrainPass pass(*engine);
    const ComputeWeights weights = ComputeWeights::FromParameters(params, profile);
    ASSERT_TRUE(pass.Forward(weights, tree).ok());
    Gradients grads(c);
    pass.Backward(RandomCoefficients(rng, tree), grads);
    for (int32_t id = 0; id < c.vocab; ++id) {
      double norm = 0;
      for (int i = 0; i < c.width; ++i) norm += std::abs(grads.tensor(HeadIndex(c))[static_cast<size_t>(id) * c.width + i]);
      EXPECT_EQ(norm > 0, id % 2 == 0) << id;
    }
  }
}

// Goes wrong if a set that is none, or lacks the token drawn from it, is trained on.
TEST(KeptPass, BadSetsAreRefused) {
  const ModelConfig c = TinyConfig();
  auto engine = MakeEngine(CpuPath::kAuto, 1);
  const ComputeWeights weights = ComputeWeights::FromParameters(TestParameters(c, 4), Profile::kF32);
  TrainPass pass(*engine);
  for (const std::string& bad : {std::string("\1\3", 2), std::string("\1\2\x80", 3), std::string("x", 1), std::string("\1\2\xff\xff\x7f", 5)}) {
    TreeBuilder builder;
    builder.AddNode(builder.AddNode(-1, 1, 1), 2, 1, bad);
    const TreeBatch tree = builder.Build(nullptr);
    const auto forward = pass.Forward(weights, tree);
    EXPECT_EQ(forward.status().code(), StatusCode::kInvalidArgument);
    EXPECT_NE(forward.status().message().find("node 1"), std::string::npos) << forward.status().message();
  }
}

}  // namespace
}  // namespace temper::engine
