#include "trainer/batch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <set>
#include <tuple>

#include "common/json.h"
#include "common/rng.h"
#include "engine/kept_set.h"

namespace temper::trainer {
namespace {

TokenRun Context(int32_t parent, std::vector<int32_t> ids, int32_t call = 0) {
  TokenRun r;
  r.parent = parent;
  r.ids = std::move(ids);
  r.call = call;
  return r;
}

TokenRun Sampled(int32_t parent, std::vector<int32_t> ids, int32_t call, int64_t version = 3, float inv_temperature = 1) {
  TokenRun r = Context(parent, std::move(ids), call);
  r.sampled = true;
  r.logprobs.assign(r.ids.size(), -1.0f);
  r.version.step = version;
  r.inv_temperature = inv_temperature;
  return r;
}

// Two rollouts with the same prompt; the second one compacts its history: its second call starts a branch of its own.
std::vector<Group> TwoRollouts() {
  Rollout a;
  a.rollout = 0;
  a.reward = 1;
  a.runs = {Context(-1, {1, 2, 3}), Sampled(0, {4, 5}, 0), Context(1, {6}, 1), Sampled(2, {7}, 1)};
  Rollout b;
  b.rollout = 1;
  b.runs = {Context(-1, {1, 2, 3}), Sampled(0, {4, 8}, 0), Context(0, {9}, 1), Sampled(2, {7, 7}, 1)};
  Group g;
  g.group = 5;
  g.rollouts = {b, a};
  return {g};
}

// The tokens on the path to a node.
std::vector<int32_t> Path(const engine::TreeBatch& tree, int32_t node) {
  std::vector<int32_t> path;
  for (; node >= 0; node = tree.parent[node]) path.push_back(tree.token[node]);
  std::reverse(path.begin(), path.end());
  return path;
}

// A sampled token could land on a node with another history: trained on a context it was never drawn from.
TEST(Batch, SampledTokensStandBehindTheirOwnHistory) {
  for (bool merge : {true, false}) {
    const Batch batch = BuildBatch(TwoRollouts(), {.merge = merge}).value();
    ASSERT_EQ(batch.chunks.size(), 1u);
    const engine::TreeBatch& tree = batch.chunks[0].tree;
    EXPECT_EQ(batch.groups[0].rollouts[0].rollout, 0);
    const auto& a = batch.samples[0][0];
    const auto& b = batch.samples[0][1];
    ASSERT_EQ(a.size(), 3u);
    ASSERT_EQ(b.size(), 4u);
    EXPECT_EQ(Path(tree, a[1].node), (std::vector<int32_t>{1, 2, 3, 4, 5}));
    EXPECT_EQ(Path(tree, a[2].node), (std::vector<int32_t>{1, 2, 3, 4, 5, 6, 7}));
    EXPECT_EQ(Path(tree, b[1].node), (std::vector<int32_t>{1, 2, 3, 4, 8}));
    EXPECT_EQ(Path(tree, b[3].node), (std::vector<int32_t>{1, 2, 3, 9, 7, 7}));
    EXPECT_EQ(a[0].node == b[0].node, merge);
    EXPECT_EQ(batch.logical_tokens, 7 + 5 + 6);
    EXPECT_EQ(batch.tree_tokens, merge ? 11 : 18);
    EXPECT_EQ(a[2].turn, 1);
    EXPECT_EQ(a[2].segment, a[0].segment);
    EXPECT_NE(b[2].segment, b[0].segment);
  }
}

// Two tokens drawn at different temperatures have different logprobs and could be merged all the same.
TEST(Batch, AnotherTemperatureIsAnotherNode) {
  auto groups = TwoRollouts();
  groups[0].rollouts[0].runs[1].inv_temperature = 2;
  const Batch batch = BuildBatch(groups, {}).value();
  EXPECT_NE(batch.samples[0][0][0].node, batch.samples[0][1][0].node);
}

// A rollout as an agent may leave it: a forest of runs, some empty, some that say the same as others.
Rollout RandomRollout(Rng& rng, const std::vector<int32_t>& prompt, int32_t index) {
  Rollout r;
  r.rollout = index;
  r.runs = {Context(-1, prompt)};
  auto ids = [&](int least) {
    std::vector<int32_t> out(least + rng.Below(4));
    for (int32_t& id : out) id = static_cast<int32_t>(rng.Below(2));
    return out;
  };
  const int calls = 1 + static_cast<int>(rng.Below(5));
  for (int call = 0; call < calls; ++call) {
    const bool fresh = rng.Chance(0.2);
    const auto parent = fresh ? -1 : static_cast<int32_t>(rng.Below(r.runs.size()));
    r.runs.push_back(Context(parent, ids(fresh ? 1 : 0), call));
    const auto at = static_cast<int32_t>(r.runs.size()) - 1;
    for (int32_t choice = 0; choice <= static_cast<int32_t>(rng.Below(2)); ++choice) {
      r.runs.push_back(Sampled(at, ids(1), call, 3, rng.Chance(0.3) ? 1.25f : 1.0f));
      r.runs.back().choice = choice;
      if (rng.Chance(0.3)) {
        for (const int32_t id : r.runs.back().ids) {
          r.runs.back().kept.push_back(engine::EncodeKept(rng.Chance(0.5) ? std::vector<int32_t>{0, 1} : std::vector<int32_t>{id}, 64));
        }
      }
    }
  }
  return r;
}

// The gateway's nodes, handed over as they are, could merge what a trie of the rows' own tokens keeps apart, or the other way round.
TEST(Batch, TheGatewaysNodesMakeTheTreeOfTheRows) {
  Rng rng(11);
  for (int round = 0; round < 200; ++round) {
    std::vector<Group> groups;
    for (int64_t g = 0; g < 3; ++g) {
      Group& group = groups.emplace_back();
      group.group = g;
      std::vector<int32_t> prompt(1 + rng.Below(5));
      for (int32_t& id : prompt) id = static_cast<int32_t>(rng.Below(2));
      for (int32_t i = 0; i < 3; ++i) group.rollouts.push_back(RandomRollout(rng, prompt, i));
    }
    const Batch batch = BuildBatch(groups, {}).value();
    ASSERT_EQ(batch.chunks.size(), 1u) << "one forest of all groups";
    // Again from nothing but rows: every root-to-leaf path as ids, 1/T and kept sets.
    engine::TreeBuilder builder;
    for (const Group& group : groups) {
      for (const Rollout& r : group.rollouts) {
        const auto below = [&](int32_t parent) {
          std::vector<int32_t> out;
          for (size_t i = 0; i < r.runs.size(); ++i) {
            if (r.runs[i].parent == parent) out.push_back(static_cast<int32_t>(i));
          }
          std::sort(out.begin(), out.end(), [&](int32_t a, int32_t b) {
            return std::tuple(r.runs[a].call, r.runs[a].choice, a) < std::tuple(r.runs[b].call, r.runs[b].choice, b);
          });
          return out;
        };
        struct Row {
          std::vector<int32_t> ids;
          std::vector<float> inverse;
          std::vector<std::string> kept;
        };
        const std::function<void(int32_t, Row)> walk = [&](int32_t index, Row row) {
          const TokenRun& run = r.runs[index];
          row.ids.insert(row.ids.end(), run.ids.begin(), run.ids.end());
          row.inverse.resize(row.ids.size(), run.sampled ? run.inv_temperature : 1.0f);
          row.kept.insert(row.kept.end(), run.kept.begin(), run.kept.end());
          row.kept.resize(row.ids.size());
          const std::vector<int32_t> children = below(index);
          if (children.empty()) builder.AddRow(row.ids, row.inverse, row.kept);
          for (const int32_t child : children) walk(child, row);
        };
        for (const int32_t root : below(-1)) walk(root, {});
      }
    }
    const engine::TreeBatch again = builder.Build(nullptr), &tree = batch.chunks[0].tree;
    ASSERT_EQ(tree.token, again.token) << round;
    ASSERT_EQ(tree.parent, again.parent) << round;
    ASSERT_EQ(tree.tout, again.tout) << round;
    ASSERT_EQ(tree.inv_temperature, again.inv_temperature) << round;
    ASSERT_EQ(tree.logical_tokens, again.logical_tokens) << round;
    std::set<std::tuple<int32_t, int32_t, float, std::string>> nodes;
    for (int32_t v = 0; v < tree.size(); ++v) {
      ASSERT_EQ(tree.kept_set(tree.kept_index(v)), again.kept_set(again.kept_index(v))) << round;
      ASSERT_EQ(tree.pos[v], tree.parent[v] < 0 ? 0 : tree.pos[tree.parent[v]] + 1) << "a node's position is its depth";
      EXPECT_TRUE(nodes.emplace(tree.parent[v], tree.token[v], tree.inv_temperature[v], tree.kept_set(tree.kept_index(v))).second)
          << "two nodes agree in everything and were not merged";
    }
  }
}

// The order of arrival could change an optimizer step.
TEST(Batch, OrderOfArrivalNeverEnters) {
  Rng rng(3);
  std::vector<Group> groups;
  for (int g = 0; g < 6; ++g) {
    Group group = TwoRollouts()[0];
    group.group = 40 - g;
    for (Rollout& r : group.rollouts) {
      for (TokenRun& run : r.runs) {
        for (int32_t& id : run.ids) id = static_cast<int32_t>(rng.Below(3));
      }
    }
    groups.push_back(group);
  }
  const Batch reference = BuildBatch(groups, {}).value();
  for (int n = 0; n < 5; ++n) {
    rng.Shuffle(groups);
    for (Group& group : groups) rng.Shuffle(group.rollouts);
    const Batch batch = BuildBatch(groups, {}).value();
    EXPECT_EQ(batch.chunks[0].tree.token, reference.chunks[0].tree.token);
    EXPECT_EQ(batch.chunks[0].tree.parent, reference.chunks[0].tree.parent);
    for (size_t g = 0; g < groups.size(); ++g) EXPECT_EQ(batch.groups[g].group, reference.groups[g].group);
  }
}

// A coefficient of a shared token could be lost, or counted for one rollout only.
TEST(Batch, SharedNodesGetTheSumOfTheCoefficients) {
  for (bool merge : {true, false}) {
    const Batch batch = BuildBatch(TwoRollouts(), {.merge = merge}).value();
    const auto nodes = ItemCoefficients(batch, {{{1, 2, 3}, {10, 20, 30, 40}}});
    EXPECT_EQ(nodes[0][batch.samples[0][0][0].node], merge ? 11 : 1);
    EXPECT_EQ(std::accumulate(nodes[0].begin(), nodes[0].end(), 0.0f), 106);
    for (size_t v = 0; v < nodes[0].size(); ++v) {
      if (nodes[0][v] != 0) {
        EXPECT_TRUE(batch.chunks[0].wanted[v]);
      }
    }
  }
}

// Splitting for memory could lose tokens or move them to another tree.
TEST(Batch, ChunksHoldEverythingOnce) {
  std::vector<Group> groups;
  for (int g = 0; g < 5; ++g) {
    groups.push_back(TwoRollouts()[0]);
    groups.back().group = g;
  }
  const Batch whole = BuildBatch(groups, {}).value();
  for (int64_t limit : {1, 8, 20, 40}) {
    const Batch split = BuildBatch(groups, {.max_chunk_nodes = limit}).value();
    EXPECT_GT(split.chunks.size(), 1u);
    // A rollout that does not fit is computed piece by piece.
    for (const BatchChunk& chunk : split.chunks) {
      EXPECT_EQ(chunk.chunk_nodes, chunk.tree.size() > limit ? limit : 0);
      EXPECT_EQ(Wanting(chunk).chunk_nodes, chunk.chunk_nodes);
    }
    EXPECT_EQ(split.logical_tokens, whole.logical_tokens);
    for (size_t g = 0; g < groups.size(); ++g) {
      for (size_t i = 0; i < 2; ++i) {
        for (size_t k = 0; k < whole.samples[g][i].size(); ++k) {
          const SampledToken& a = whole.samples[g][i][k];
          const SampledToken& b = split.samples[g][i][k];
          EXPECT_EQ(Path(whole.chunks[a.chunk].tree, a.node), Path(split.chunks[b.chunk].tree, b.node));
        }
      }
    }
  }
}

// A way of computing chosen by memory could be lost on the way to the engine.
TEST(Batch, ChunksAreComputedAsChosen) {
  std::vector<Group> groups = TwoRollouts();
  groups.push_back(groups[0]);
  groups.back().group = 7;
  int asked = 0;
  BatchOptions options = {.max_chunk_nodes = 8, .choose = [&](const engine::TreeBatch& tree, std::span<const uint8_t> wanted) {
                            EXPECT_EQ(static_cast<size_t>(tree.size()), wanted.size());
                            ++asked;
                            return engine::PassChoice{.chunk_nodes = 64 * asked, .recompute = asked % 2 == 1};
                          }};
  const Batch batch = BuildBatch(groups, options).value();
  ASSERT_GT(batch.chunks.size(), 1u);
  for (size_t i = 0; i < batch.chunks.size(); ++i) {
    EXPECT_EQ(Wanting(batch.chunks[i]).chunk_nodes, 64 * static_cast<int>(i + 1));
    EXPECT_EQ(Wanting(batch.chunks[i]).recompute, i % 2 == 0);
  }
}

// Broken input could crash the trainer or be trained.
// A group left out of the backward pass could take others with it, or lose its own logprobs.
TEST(Batch, SilentGroupsGetChunksOfTheirOwn) {
  std::vector<Group> groups;
  for (int64_t g : {4, 2, 3, 1}) {
    groups.push_back(TwoRollouts()[0]);
    groups.back().group = g;
  }
  const Batch whole = BuildBatch(groups, {}).value();
  const Batch batch = BuildBatch(groups, {.silent = {0, 1, 0, 1}}).value();
  ASSERT_EQ(batch.chunks.size(), 2u);
  EXPECT_FALSE(batch.chunks[0].silent);
  EXPECT_TRUE(batch.chunks[1].silent);
  EXPECT_TRUE(Wanting(batch.chunks[0]).keep);
  EXPECT_FALSE(Wanting(batch.chunks[1]).keep);
  EXPECT_EQ(batch.logical_tokens, whole.logical_tokens);
  for (size_t g = 0; g < 4; ++g) {
    EXPECT_EQ(batch.groups[g].group, static_cast<int64_t>(g) + 1);
    for (size_t i = 0; i < 2; ++i) {
      ASSERT_EQ(batch.samples[g][i].size(), whole.samples[g][i].size());
      for (size_t k = 0; k < batch.samples[g][i].size(); ++k) {
        const SampledToken& token = batch.samples[g][i][k];
        EXPECT_EQ(token.chunk, g == 1 || g == 3 ? 1 : 0);
        EXPECT_EQ(Path(batch.chunks[token.chunk].tree, token.node), Path(whole.chunks[0].tree, whole.samples[g][i][k].node));
        EXPECT_TRUE(batch.chunks[token.chunk].wanted[token.node]);
      }
    }
  }
  const Batch quiet = BuildBatch(groups, {.silent = {1, 1, 1, 1}}).value();
  ASSERT_EQ(quiet.chunks.size(), 1u);
  EXPECT_TRUE(quiet.chunks[0].silent);
}

TEST(Batch, RefusesWhatHasNoLogprobOrIsThereTwice) {
  auto groups = TwoRollouts();
  groups[0].rollouts[0].runs = {Sampled(-1, {4}, 0)};
  EXPECT_FALSE(BuildBatch(groups, {}).ok());
  groups = TwoRollouts();
  groups.push_back(groups[0]);
  EXPECT_FALSE(BuildBatch(groups, {}).ok());
  groups.pop_back();
  groups[0].rollouts[1].rollout = groups[0].rollouts[0].rollout;
  EXPECT_FALSE(BuildBatch(groups, {}).ok());
}

// A disagreement in the last bit, which the ratio in fp32 would round away, could pass.
TEST(Batch, OneBitOfOneLogprobIsFound) {
  const Batch batch = BuildBatch(TwoRollouts(), {}).value();
  std::vector<std::vector<float>> logprobs = {std::vector<float>(static_cast<size_t>(batch.tree_tokens), -1.0f)};
  OnPolicyCheck check = CheckOnPolicy(batch, logprobs, 3);
  EXPECT_EQ(check.tokens, 7);
  EXPECT_EQ(check.max_deviation, 0);
  EXPECT_EQ(check.first_mismatch, "");
  logprobs[0][batch.samples[0][1][3].node] = std::nextafter(-1.0f, 0.0f);
  check = CheckOnPolicy(batch, logprobs, 3);
  EXPECT_GT(check.max_deviation, 0);
  EXPECT_NE(check.first_mismatch, "");
  EXPECT_EQ(CheckOnPolicy(batch, logprobs, 4).tokens, 0);
  // Tokens whose KV spans versions are never on policy.
  auto groups = TwoRollouts();
  for (Rollout& r : groups[0].rollouts) {
    for (TokenRun& run : r.runs) run.mixed = true;
  }
  EXPECT_EQ(CheckOnPolicy(BuildBatch(groups, {}).value(), logprobs, 3).tokens, 0);
}

// Tokens of parallel choices could be told in the order in which they happened to be recorded.
TEST(Batch, SamplesComeInTheOrderOfCallAndChoice) {
  Rollout r;
  r.runs = {Context(-1, {1}), Sampled(0, {20}, 0), Sampled(0, {10}, 0), Sampled(0, {30}, 1)};
  r.runs[1].choice = 1;
  Group g;
  g.rollouts = {r};
  const Batch batch = BuildBatch({g}, {}).value();
  std::vector<int32_t> told;
  for (const SampledToken& token : batch.samples[0][0]) told.push_back(batch.chunks[0].tree.token[token.node]);
  EXPECT_EQ(told, (std::vector<int32_t>{10, 20, 30}));
  EXPECT_EQ(batch.chunks[0].tree.token, (std::vector<int32_t>{1, 10, 20, 30}));
}

// Two calls that go on from one turn are two branches; as one segment a sequence would be counted that nobody sampled.
TEST(Batch, OneTurnIsContinuedByOneSegment) {
  Rollout r;
  r.runs = {Context(-1, {1}), Sampled(0, {2}, 0), Sampled(1, {3}, 1), Sampled(1, {4}, 2), Sampled(2, {5}, 3)};
  Group g;
  g.rollouts = {r};
  const auto samples = BuildBatch({g}, {}).value().samples[0][0];
  ASSERT_EQ(samples.size(), 4u);
  EXPECT_EQ(samples[1].segment, samples[0].segment);
  EXPECT_NE(samples[2].segment, samples[0].segment);
  EXPECT_EQ(samples[3].segment, samples[0].segment);
}

// Context was not drawn: with a temperature of its own it would not merge with the same tokens elsewhere.
TEST(Batch, ContextHasNoTemperature) {
  auto groups = TwoRollouts();
  const Batch plain = BuildBatch(groups, {}).value();
  groups[0].rollouts[0].runs[0].inv_temperature = 2;
  const Batch batch = BuildBatch(groups, {}).value();
  EXPECT_EQ(batch.tree_tokens, plain.tree_tokens);
  EXPECT_EQ(batch.chunks[0].tree.inv_temperature, plain.chunks[0].tree.inv_temperature);
}

// A group could be torn apart where it would fit, and its shared prompt be computed twice; or a chunk stay short of its limit.
TEST(Batch, ChunksAreFilledToTheLimitGroupByGroup) {
  std::vector<Group> groups = {TwoRollouts()[0], TwoRollouts()[0]};
  groups[1].group = 6;
  auto chunks = [&](int64_t limit) { return BuildBatch(groups, {.max_chunk_nodes = limit}).value(); };
  EXPECT_EQ(chunks(30).chunks.size(), 1u) << "both groups are 15 tokens before merging";
  const Batch batch = chunks(22);  // the second group's first rollout would fit beside the first group
  EXPECT_EQ(batch.chunks.size(), 2u);
  EXPECT_EQ(batch.samples[1][0][0].chunk, 1);
  EXPECT_EQ(batch.samples[1][1][0].chunk, 1);
  groups.pop_back();
  EXPECT_EQ(chunks(15).chunks.size(), 1u);
  EXPECT_EQ(chunks(14).chunks.size(), 2u);
}

// The loss could be told something else than what the rollouts say: new for old, tokens to be left alone as trained.
TEST(Batch, TheLossHearsWhatTheRolloutsSay) {
  auto groups = TwoRollouts();
  Rollout& a = groups[0].rollouts[1];
  a.outcome = Outcome::kTruncated;
  a.wall_s = 2.5;
  a.runs[3].trainable = false;
  a.runs[1].logprobs = {-0.25f, -0.5f};
  const Batch batch = BuildBatch(groups, {}).value();
  std::vector<std::vector<float>> logprobs = {std::vector<float>(static_cast<size_t>(batch.tree_tokens))};
  for (size_t v = 0; v < logprobs[0].size(); ++v) logprobs[0][v] = -10.0f - static_cast<float>(v);
  const std::vector<LossGroup> told = MakeLossGroups(batch, logprobs);
  ASSERT_EQ(told.size(), 1u);
  ASSERT_EQ(told[0].rollouts.size(), 2u);
  const LossRollout& r = told[0].rollouts[0];
  EXPECT_EQ(r.outcome, Outcome::kTruncated);
  EXPECT_EQ(r.reward, 1);
  EXPECT_EQ(r.wall_s, 2.5);
  EXPECT_EQ(r.mask, (std::vector<uint8_t>{1, 1, 0}));
  EXPECT_EQ(r.logp_old, (std::vector<double>{-0.25, -0.5, -1}));
  for (size_t k = 0; k < 3; ++k) EXPECT_EQ(r.logp_new[k], -10.0 - batch.samples[0][0][k].node);
  EXPECT_EQ(r.turn, (std::vector<int32_t>{0, 0, 1}));
  EXPECT_EQ(told[0].rollouts[1].outcome, Outcome::kScored);
}

// Tokens that are not trained (cancelled, drawn at temperature 0) have logprobs of another distribution: they would stop a good job.
TEST(Batch, OnlyTrainedTokensAreCheckedAndNanIsADeviation) {
  auto groups = TwoRollouts();
  groups[0].rollouts[1].runs[1].trainable = false;
  const Batch batch = BuildBatch(groups, {}).value();
  std::vector<std::vector<float>> logprobs = {std::vector<float>(static_cast<size_t>(batch.tree_tokens), -1.0f)};
  OnPolicyCheck check = CheckOnPolicy(batch, logprobs, 3);
  EXPECT_EQ(check.tokens, 5);
  logprobs[0][batch.samples[0][0][2].node] = std::nanf("");
  const OnPolicyCheck broken = CheckOnPolicy(batch, logprobs, 3);
  EXPECT_EQ(broken.max_deviation, std::numeric_limits<double>::infinity());
  EXPECT_NE(broken.first_mismatch, "");
  // Joined, the worst and the first stay.
  check.Merge(broken);
  check.Merge(OnPolicyCheck{.tokens = 2, .max_deviation = 0.5, .first_mismatch = "later"});
  EXPECT_EQ(check.tokens, 12);
  EXPECT_EQ(check.max_deviation, std::numeric_limits<double>::infinity());
  EXPECT_EQ(check.first_mismatch, broken.first_mismatch);
}

// The control could permute nothing, mix groups, or differ from run to run.
TEST(Batch, RewardsArePermutedWithinTheirGroup) {
  std::vector<Group> groups(20);
  for (size_t g = 0; g < groups.size(); ++g) {
    groups[g].group = static_cast<int64_t>(g);
    groups[g].rollouts.resize(8);
    for (size_t i = 0; i < 8; ++i) {
      groups[g].rollouts[i].rollout = static_cast<int32_t>(i);
      groups[g].rollouts[i].reward = static_cast<double>(8 * g + i);
    }
  }
  auto permuted = groups, again = groups, other = groups;
  std::reverse(again.begin(), again.end());
  for (Group& group : again) std::reverse(group.rollouts.begin(), group.rollouts.end());  // the order of arrival never enters
  PermuteRewards(7, permuted);
  PermuteRewards(7, again);
  PermuteRewards(8, other);
  int moved = 0, differ = 0;
  for (size_t g = 0; g < groups.size(); ++g) {
    std::vector<double> a, b;
    for (size_t i = 0; i < 8; ++i) {
      a.push_back(groups[g].rollouts[i].reward);
      b.push_back(permuted[g].rollouts[i].reward);
      EXPECT_EQ(permuted[g].rollouts[i].reward, again[groups.size() - 1 - g].rollouts[i].reward);
      differ += permuted[g].rollouts[i].reward != other[g].rollouts[i].reward;
    }
    moved += a != b;
    std::sort(b.begin(), b.end());
    EXPECT_EQ(a, b);
  }
  EXPECT_GT(moved, 15);
  EXPECT_GT(differ, 50);
}

}  // namespace
}  // namespace temper::trainer
