// The whole training loop in one process.
#include "trainer/loop.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <google/protobuf/stubs/logging.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <thread>

#include "common/faults.h"
#include "common/file.h"
#include "common/json.h"
#include "common/rng.h"
#include "engine/files/model_file.h"
#include "engine/kept_set.h"
#include "engine/train_pass.h"
#include "temper/v1/types.pb.h"
#include "tests/harness/scratch.h"
#include "tests/harness/tiny_model.h"
#include "tests/trainer/scripted_job.h"
#include "trainer/batch.h"
#include "trainer/checkpoint.h"
#include "trainer/prove.h"

namespace temper::trainer {
namespace {

std::string Bytes(const std::string& path) { return ReadFile(path).value(); }

std::vector<json::value> Lines(const std::string& path) {
  std::vector<json::value> lines;
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) lines.push_back(ParseJson(line).value());
  return lines;
}

class LoopTest : public testing::TestWithParam<engine::Profile> {};
INSTANTIATE_TEST_SUITE_P(Profiles, LoopTest, testing::Values(engine::Profile::kBf16, engine::Profile::kF32),
                         [](const auto& p) { return std::string(engine::ProfileName(p.param)); });

// A job could claim agreement with the workers without having checked, or free slots before its weights are served.
TEST_P(LoopTest, TrainsProvesAndCounts) {
  World world(GetParam());
  const std::string run = Scratch("trains");
  const Status status = world.Run(Options(run, GetParam()));
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(world.pool.attached, 0);
  EXPECT_EQ(world.sink.published, (std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(world.pool.updates, (std::vector<int64_t>{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(world.pool.commits, (std::vector<int64_t>{2, 4, 6}));
  const std::vector<std::string> said = world.metrics.Lines();
  EXPECT_TRUE(std::any_of(said.begin(), said.end(), [](const std::string& line) { return line.rfind("tree = rows", 0) == 0; }));
  const TrainTotals totals = ReadTrainTotals(run).value();
  EXPECT_EQ(totals.steps, 6);
  EXPECT_EQ(totals.on_policy_versions, (std::vector<int64_t>{1, 2, 3, 4, 5}));
  EXPECT_EQ(totals.ratio_max_dev_on_policy, 0);
  EXPECT_GE(totals.on_policy_tokens, 6 * 12 * 9);
  EXPECT_EQ(totals.on_policy_tokens, totals.tokens_trained);
  EXPECT_GT(totals.logical_tokens, totals.tree_tokens);
  const Checkpoint last = LoadNewestCheckpoint(run).value();
  EXPECT_EQ(last.step, 6);
  EXPECT_EQ(last.optimizer.steps(), 6);
  EXPECT_EQ(ListDir(run + "/checkpoints").value(), (std::vector<std::string>{"2", "4", "6"}));
}

// A resumed run could differ from one that was never interrupted: other moments, other order, another plan.
TEST_P(LoopTest, ResumeEqualsNoInterruptionToTheBit) {
  World whole(GetParam());
  const std::string run = Scratch("whole");
  ASSERT_TRUE(whole.Run(Options(run, GetParam())).ok());

  const std::string run2 = Scratch("resumed");
  World first(GetParam());
  first.pool.stop_at = 3;
  EXPECT_EQ(first.Run(Options(run2, GetParam())).code(), StatusCode::kCancelled);
  World second(GetParam());
  second.store = first.store;
  second.pool.paused = true;  // as an evaluation that was cut short leaves it
  for (auto& [batch, groups] : second.store) std::reverse(groups.begin(), groups.end());  // the order of a lease never enters
  const Status status = second.Run(Options(run2, GetParam()));
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(second.pool.attached, 2);
  EXPECT_EQ(second.sink.published.front(), 2);
  for (const char* file : {"model.safetensors", "optimizer.safetensors"}) {
    EXPECT_EQ(Bytes(run + "/checkpoints/6/" + file), Bytes(run2 + "/checkpoints/6/" + file)) << file;
  }
  EXPECT_EQ(ReadTrainTotals(run2)->steps, 6);
  EXPECT_EQ(ReadTrainTotals(run2)->tokens_trained, ReadTrainTotals(run)->tokens_trained);
}

// An end at any moment could cost a step, repeat one, or leave moments of another step behind.
TEST(Loop, ResumeAfterRandomEndsEqualsNoInterruption) {
  World whole(kBf16);
  TrainerOptions options = Options(Scratch("uncut"), kBf16);
  options.algorithm = ParseAlgorithm(ParseJson(R"({"recipe":"grpo","kl":{"where":"loss","coef":0.1}})").value()).value();
  ASSERT_TRUE(whole.Run(options).ok());
  const std::string end = "/checkpoints/6/";
  const char* const points[] = {"trainer.before_update", "trainer.before_checkpoint", "trainer.checkpoint_half", "trainer.before_commit"};
  int ends = 0;
  for (uint64_t seed = 0; seed < 6; ++seed) {
    Rng rng(seed);
    World cut(kBf16);
    TrainerOptions again = options;
    again.run_dir = Scratch("cut");
    for (int i = 0; i < 5; ++i) {
      Faults::Get().Arm(points[rng.Below(4)], "fail", 1 + static_cast<int>(rng.Below(3)));
      ends += !cut.Run(again).ok();
    }
    for (const char* point : points) Faults::Get().Arm(point, "fail", 1 << 30);
    ASSERT_TRUE(cut.Run(again).ok());
    for (const char* file : {"model.safetensors", "optimizer.safetensors"}) {
      EXPECT_EQ(Bytes(options.run_dir + end + file), Bytes(again.run_dir + end + file)) << seed << " " << file;
    }
    EXPECT_EQ(ReadTrainTotals(again.run_dir)->steps, 6);
    EXPECT_EQ(ReadTrainTotals(again.run_dir)->tokens_trained, ReadTrainTotals(options.run_dir)->tokens_trained);
  }
  EXPECT_GE(ends, 10);
}

// Several optimizer steps on one batch could be one after all, see weights or moments of another step, be published in between, or hide
// how stale their last tokens are.
TEST_P(LoopTest, MinibatchesAreOptimizerStepsOfTheirOwn) {
  World parts(GetParam());
  TrainerOptions options = Options(Scratch("parts"), GetParam());
  options.steps = 1;
  options.minibatches = 3;
  options.staleness_bound_steps = 2;
  const Status status = parts.Run(options);
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(parts.sink.published, (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(parts.pool.updates, std::vector<int64_t>{0});

  // The same groups, each a batch of its own.
  World each(GetParam());
  for (const datapool::LeasedGroup& group : parts.store.at(0)) each.store[group.group] = {group};
  TrainerOptions single = Options(Scratch("each"), GetParam());
  single.steps = 3;
  const Status trained = each.Run(single);
  ASSERT_TRUE(trained.ok()) << trained.ToString();
  for (const char* file : {"model.safetensors", "optimizer.safetensors"}) {
    EXPECT_EQ(Bytes(options.run_dir + "/checkpoints/1/" + file), Bytes(single.run_dir + "/checkpoints/3/" + file)) << file;
  }
  EXPECT_EQ(LoadNewestCheckpoint(options.run_dir)->optimizer.steps(), 3);
  const std::vector<json::value> whole = Lines(options.run_dir + "/metrics.jsonl"), three = Lines(single.run_dir + "/metrics.jsonl");
  ASSERT_EQ(whole.size(), 1u);
  for (const char* sum : {"tokens_trained", "sequences", "logical_tokens", "rollouts"}) {
    int64_t of_three = 0;
    for (const json::value& line : three) of_three += line.at(sum).as_int64();
    EXPECT_EQ(whole[0].at(sum).as_int64(), of_three) << sum;
  }
  EXPECT_EQ(whole[0].at("on_policy_tokens"), three[0].at("on_policy_tokens")) << "only the first part has the version's weights";
  EXPECT_EQ(whole[0].at("staleness_max").as_int64(), 0);
  EXPECT_EQ(whole[0].at("staleness_steps_max").as_int64(), 2);

  World stale(GetParam());
  options.run_dir = Scratch("stale");
  options.staleness_bound_steps = 1;
  const Status refused = stale.Run(options);
  EXPECT_EQ(refused.code(), StatusCode::kInternal);
  EXPECT_NE(refused.message().find("group 2 of step 1 would be trained 2 optimizer steps stale; the bound is 1"), std::string::npos) << refused.message();
}

// Rewards of turns could be lost between the record and the loss, go to other turns, or leave a group without a signal out that has one
// through them alone.
TEST_P(LoopTest, RewardsOfTurnsAreTrained) {
  World world(GetParam());
  TrainerOptions options = Options(Scratch("turns"), GetParam());
  options.algorithm = ParseAlgorithm(ParseJson(R"({"recipe":"grpo","advantage":{"credit":"turn","gamma":0.9,"scale":"none"},
      "reward":{"process_coef":0.5,"speed_coef":0.25}})").value()).value();
  options.steps = 1;
  world.pool.stop_at = 0;
  ASSERT_EQ(world.Run(options).code(), StatusCode::kCancelled);  // publishes what the groups are drawn with
  world.pool.stop_at = -1;
  world.store[0] = world.pool.Sample(0);
  std::vector<std::vector<std::vector<double>>> rewards;
  for (datapool::LeasedGroup& group : world.store[0]) {
    std::vector<std::vector<double>>& of_group = rewards.emplace_back();
    for (std::string& member : group.members) {
      v1::Trajectory wire;
      ASSERT_TRUE(wire.ParseFromString(member));
      std::set<int32_t> calls;
      for (const v1::TokenRun& run : wire.runs()) {
        if (run.provenance() == v1::SAMPLED) calls.insert(run.call());
      }
      wire.set_reward(1);
      wire.set_wall_s(3.0 + static_cast<double>(of_group.size()));
      of_group.emplace_back();
      for (size_t turn = 0; turn < calls.size(); ++turn) {
        of_group.back().push_back(static_cast<double>((group.group + 3 * static_cast<int64_t>(of_group.size()) + 5 * static_cast<int64_t>(turn)) % 7) / 4);
        wire.add_turn_rewards(of_group.back().back());
      }
      member = wire.SerializeAsString();
    }
  }
  const Status status = world.Run(options);
  ASSERT_TRUE(status.ok()) << status.ToString();

  // The same from the formulas: the loss over what was drawn, with these rewards.
  engine::Parameters params = engine::InitParameters(Tiny(), 3);
  engine::TrainPass pass(*world.engine);
  const Batch batch = BuildBatch(GroupsOf(world.store[0]), {.max_chunk_nodes = int64_t{1} << 20}).value();
  const auto weights = engine::ComputeWeights::FromParameters(params, GetParam());
  const auto logprobs = pass.Forward(weights, batch.chunks[0].tree).value();
  std::vector<LossGroup> loss_groups;
  for (size_t g = 0; g < batch.groups.size(); ++g) {
    LossGroup& group = loss_groups.emplace_back();
    const auto& leased = *std::find_if(world.store[0].begin(), world.store[0].end(), [&](const auto& l) { return l.group == batch.groups[g].group; });
    for (size_t i = 0; i < batch.groups[g].rollouts.size(); ++i) {
      LossRollout& r = group.rollouts.emplace_back();
      r.reward = 1;
      r.wall_s = 3.0 + static_cast<double>(i);
      r.turn_rewards = rewards[static_cast<size_t>(&leased - world.store[0].data())][i];
      for (const SampledToken& token : batch.samples[g][i]) {
        r.mask.push_back(1);
        r.logp_new.push_back(logprobs[static_cast<size_t>(token.node)]);
        r.logp_old.push_back(token.logprob);
        r.turn.push_back(token.turn);
      }
    }
  }
  const LossResult loss = ComputeLoss(options.algorithm.algorithm, loss_groups);
  const json::value line = Lines(options.run_dir + "/metrics.jsonl").at(0);
  double sum = 0, least = 1e9, most = -1e9;
  for (const LossGroup& group : loss_groups) {
    for (const LossRollout& r : group.rollouts) {
      const double reward = 1 + 0.5 * std::accumulate(r.turn_rewards.begin(), r.turn_rewards.end(), 0.0);
      sum += reward;
      least = std::min(least, reward);
      most = std::max(most, reward);
    }
  }
  EXPECT_GT(most, least);
  EXPECT_NEAR(line.at("reward_mean").to_number<double>(), sum / 12, 1e-12) << "outcome and turns, as std, min and max have them";
  EXPECT_NEAR(line.at("reward_min").to_number<double>(), least, 1e-12);
  EXPECT_NEAR(line.at("reward_max").to_number<double>(), most, 1e-12);
  EXPECT_NEAR(line.at("loss").to_number<double>(), loss.loss, 1e-12);
  EXPECT_NEAR(line.at("advantage_std").to_number<double>(), loss.metrics.advantage.deviation, 1e-12);
  EXPECT_GT(loss.metrics.advantage.deviation, 0.1) << "all outcomes are equal";
  engine::Gradients grads(Tiny());
  pass.Backward(ItemCoefficients(batch, loss.coef)[0], grads);
  double squares = 0;
  for (const float g : grads.flat()) squares += static_cast<double>(g) * g;
  EXPECT_NEAR(line.at("grad_norm").to_number<double>(), std::sqrt(squares), 1e-4 * std::sqrt(squares));

  v1::Trajectory wire;
  ASSERT_TRUE(wire.ParseFromString(world.store[0][0].members[0]));
  wire.add_turn_rewards(1);
  EXPECT_NE(ParseTrajectory(wire.SerializeAsString(), kVocab).status().message().find("rewards of turns, "), std::string::npos);
  wire.clear_turn_rewards();
  wire.add_turn_rewards(std::numeric_limits<double>::infinity());
  EXPECT_NE(ParseTrajectory(wire.SerializeAsString(), kVocab).status().message().find("not finite"), std::string::npos);
}

// A checkpoint could be a model that only the trainer reads, or one that a rollback left behind half old and half new.
TEST(Loop, EveryCheckpointIsAModelAlsoAfterARollback) {
  World world(kBf16);
  TrainerOptions options = Options(Scratch("models"), kBf16);
  options.keep = 9;
  ASSERT_TRUE(world.Run(options).ok());
  ASSERT_TRUE(AppendFile(options.run_dir + "/checkpoints/6/model.safetensors", "x").ok());  // the run goes back to 4
  ASSERT_TRUE(world.Run(options).ok());
  engine::TrainPass pass(*world.engine);
  const Batch batch = BuildBatch(GroupsOf(world.store.at(0)), {.max_chunk_nodes = int64_t{1} << 20}).value();
  const auto score = [&](const engine::Parameters& params) {
    const auto weights = engine::ComputeWeights::FromParameters(params, kBf16);
    std::vector<float> scores;
    engine::ForwardOptions forward;
    std::map<int, std::vector<float>> logits;
    std::mutex mutex;
    forward.on_row = [&](int node, const float* row, float) {
      const std::lock_guard lock(mutex);
      logits[node].assign(row, row + kVocab);
    };
    EXPECT_TRUE(pass.Forward(weights, batch.chunks[0].tree, forward).ok());
    for (const auto& [node, row] : logits) scores.insert(scores.end(), row.begin(), row.end());
    return scores;
  };
  std::vector<std::vector<float>> seen;
  const std::vector<std::string> steps = ListDir(options.run_dir + "/checkpoints").value();
  for (const std::string& step : steps) {
    const Result<engine::ModelFile> model = engine::LoadModel(options.run_dir + "/checkpoints/" + step);
    ASSERT_TRUE(model.ok()) << model.status().ToString();
    EXPECT_EQ(model->config, Tiny());
    EXPECT_EQ(model->text.tokenizer_json, SomeText().tokenizer_json);
    const std::string exported = Scratch("exported");
    ASSERT_TRUE(engine::SaveHuggingFace(exported, model->config, model->params, model->text, engine::FileType::kF32).ok());
    const std::vector<float> logits = score(model->params);
    EXPECT_EQ(score(engine::LoadModel(exported)->params), logits) << step;
    for (const std::vector<float>& other : seen) EXPECT_NE(other, logits) << step;
    seen.push_back(logits);
  }
  ASSERT_EQ(seen.size(), 4u);  // 0, 2, 4, 6
  EXPECT_EQ(score(LoadNewestCheckpoint(options.run_dir)->params), seen.back());
}

// A batch that is gone through again could be trained as another one would: with ratios to other weights, other moments, another schedule.
TEST_P(LoopTest, EpochsAreTheSameBatchAgain) {
  World twice(GetParam());
  TrainerOptions options = Options(Scratch("epochs"), GetParam());
  options.steps = 1;
  options.epochs = 3;
  options.staleness_bound_steps = 2;
  const Status status = twice.Run(options);
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(twice.sink.published, (std::vector<int64_t>{0, 1}));

  World again(GetParam());
  again.pool.repeat = true;
  TrainerOptions single = Options(Scratch("again"), GetParam());
  single.steps = 3;
  single.checkpoint_every = 3;
  const Status trained = again.Run(single);
  ASSERT_TRUE(trained.ok()) << trained.ToString();
  for (const char* file : {"model.safetensors", "optimizer.safetensors"}) {
    EXPECT_EQ(Bytes(options.run_dir + "/checkpoints/1/" + file), Bytes(single.run_dir + "/checkpoints/3/" + file)) << file;
  }
  EXPECT_EQ(LoadNewestCheckpoint(options.run_dir)->optimizer.steps(), 3);
  const std::vector<json::value> one = Lines(options.run_dir + "/metrics.jsonl"), three = Lines(single.run_dir + "/metrics.jsonl");
  ASSERT_EQ(one.size(), 1u);
  for (const char* once : {"tokens_trained", "sequences", "logical_tokens", "tree_tokens", "rollouts", "on_policy_tokens"}) {
    EXPECT_EQ(one[0].at(once), three[0].at(once)) << once << ": each token counts once";
  }
  // Loss and metrics are those of the last time.
  for (const char* last : {"loss", "mismatch_k3", "clip_fraction_high"}) EXPECT_EQ(one[0].at(last), three[2].at(last)) << last;
  EXPECT_EQ(one[0].at("staleness_steps_max").as_int64(), 2);
}

// What several optimizer steps on decoupled batches must come to, from the formulas: the policy before a batch's first step is logp_old of
// all of them, what was recorded is logp_rollout.
engine::Parameters DecoupledByHand(engine::Engine& engine, const Algorithm& algorithm, const TrainerOptions& options,
                                   const std::vector<std::vector<Group>>& batches) {
  engine::Parameters params = engine::InitParameters(Tiny(), 3);
  AdamW optimizer(Tiny());
  engine::TrainPass pass(engine);
  for (const std::vector<Group>& groups : batches) {
    const auto parts = static_cast<size_t>(options.minibatches);
    std::vector<std::vector<Group>> dealt(parts);
    for (size_t g = 0; g < groups.size(); ++g) dealt[g % parts].push_back(groups[g]);
    std::vector<std::vector<std::vector<double>>> old(parts);  // [part][rollout of it][token]
    for (int64_t step = 0; step < options.minibatches * options.epochs; ++step) {
      const auto weights = engine::ComputeWeights::FromParameters(params, options.profile);
      engine::Gradients grads(Tiny());
      for (size_t p = 0; p < parts; ++p) {
        if (step > 0 && p != static_cast<size_t>(step) % parts) continue;
        const Batch batch = BuildBatch(dealt[p], {.max_chunk_nodes = int64_t{1} << 20}).value();
        const auto logprobs = pass.Forward(weights, batch.chunks[0].tree).value();
        std::vector<LossGroup> loss_groups;
        size_t rollout = 0;
        for (size_t g = 0; g < batch.groups.size(); ++g) {
          LossGroup& group = loss_groups.emplace_back();
          for (size_t i = 0; i < batch.groups[g].rollouts.size(); ++i, ++rollout) {
            LossRollout& r = group.rollouts.emplace_back();
            r.reward = batch.groups[g].rollouts[i].reward;
            for (const SampledToken& token : batch.samples[g][i]) {
              r.mask.push_back(1);
              r.logp_new.push_back(logprobs[static_cast<size_t>(token.node)]);
              r.logp_rollout.push_back(token.logprob);
            }
            if (step == 0) old[p].push_back(r.logp_new);
            r.logp_old = old[p][rollout];
          }
        }
        if (p != static_cast<size_t>(step) % parts) continue;
        pass.Backward(ItemCoefficients(batch, ComputeLoss(algorithm, loss_groups).coef)[0], grads);
      }
      EXPECT_TRUE(optimizer.Step(engine, options.optimizer, grads, params).ok());
    }
  }
  return params;
}

// logp_old could be recomputed at each step (every ratio 1 again), be the recorded one, or be another after a crash between two steps.
TEST_P(LoopTest, DecoupledBatchesKeepTheirOldPolicy) {
  World world(GetParam());
  world.pool.repeat = true;  // from the second batch on the workers' policy is another than the batch's first
  TrainerOptions options = Options(Scratch("decoupled"), GetParam());
  options.algorithm = ParseAlgorithm(ParseJson(R"({"recipe":"grpo","off_policy":{"mode":"decoupled","weight":"token","weight_max":1.5},
      "loss":{"clip_low":0.05,"clip_high":0.05}})").value()).value();
  options.steps = 3;
  options.minibatches = 3;
  options.epochs = 2;
  options.checkpoint_every = 1;
  const Status status = world.Run(options);
  ASSERT_TRUE(status.ok()) << status.ToString();
  std::vector<Group> groups = GroupsOf(world.store.at(0));
  std::sort(groups.begin(), groups.end(), [](const Group& a, const Group& b) { return a.group < b.group; });
  const engine::Parameters expected = DecoupledByHand(*world.engine, options.algorithm.algorithm, options, {groups, groups, groups});
  const Checkpoint last = LoadNewestCheckpoint(options.run_dir).value();
  ASSERT_EQ(last.optimizer.steps(), 18);
  const std::span<const float> got = last.params.flat(), wanted = expected.flat();
  EXPECT_TRUE(std::equal(got.begin(), got.end(), wanted.begin(), wanted.end()));
  const std::vector<json::value> lines = Lines(options.run_dir + "/metrics.jsonl");
  EXPECT_EQ(lines[0].at("mismatch_k3").to_number<double>(), 0) << "the first batch was drawn by the policy that is its logp_old";
  EXPECT_GT(lines[2].at("mismatch_k3").to_number<double>(), 1e-6);
  EXPECT_GT(lines[0].at("clip_fraction_low").to_number<double>() + lines[0].at("clip_fraction_high").to_number<double>(), 0) << "every ratio was 1";

  // A death between two optimizer steps of a batch: it begins again with the batch's first weights.
  World cut(GetParam());
  cut.store = world.store;
  cut.pool.repeat = true;
  TrainerOptions again = options;
  again.run_dir = Scratch("decoupled_cut");
  Faults::Get().Arm("trainer.before_optimizer_step", "fail", 10);
  EXPECT_FALSE(cut.Run(again).ok());
  EXPECT_EQ(LoadNewestCheckpoint(again.run_dir)->step, 1);
  ASSERT_TRUE(cut.Run(again).ok());
  for (const char* file : {"model.safetensors", "optimizer.safetensors"}) {
    EXPECT_EQ(Bytes(options.run_dir + "/checkpoints/3/" + file), Bytes(again.run_dir + "/checkpoints/3/" + file)) << file;
  }
}

// The next batch could be asked for only when this one is trained, or one behind the last step be taken from groups that nobody trains.
TEST(Loop, AsksForTheNextBatchesWhileItTrains) {
  for (const auto& [leases, order] : std::map<int64_t, std::string>{{1, "lulululu"}, {2, "llululuu"}, {3, "llluluuu"}}) {
    World world(kBf16);
    TrainerOptions options = Options(Scratch("ahead"), kBf16);
    options.steps = 4;
    options.max_leases = leases;
    // All drawn at version 0, whenever they are asked for.
    world.pool.stop_at = 0;
    ASSERT_EQ(world.Run(options).code(), StatusCode::kCancelled);
    world.pool.stop_at = -1;
    for (int64_t batch = 0; batch < options.steps; ++batch) {
      world.pool.age = batch;
      world.store[batch] = world.pool.Sample(batch);
    }
    std::string seen;
    world.pool.seen = [&](const char* call) { seen += *call; };
    const Status status = world.Run(options);
    ASSERT_TRUE(status.ok()) << status.ToString();
    EXPECT_EQ(seen, order) << leases;
    EXPECT_EQ(world.pool.updates, (std::vector<int64_t>{0, 1, 2, 3}));
  }
}

// A stored logprob that is off by one bit could go unnoticed: the ratio would be 1 after rounding.
TEST_P(LoopTest, OneChangedLogprobStopsTheJob) {
  World world(GetParam());
  const std::string run = Scratch("logprob");
  world.pool.stop_at = 2;
  ASSERT_EQ(world.Run(Options(run, GetParam())).code(), StatusCode::kCancelled);
  world.pool.stop_at = -1;
  world.store[2] = world.pool.Sample(2);
  v1::Trajectory wire;
  ASSERT_TRUE(wire.ParseFromString(world.store[2][1].members[2]));
  float* logprob = wire.mutable_runs(3)->mutable_logprobs()->Mutable(1);
  *logprob = std::nextafter(*logprob, 0.0f);
  world.store[2][1].members[2] = wire.SerializeAsString();
  const Status status = world.Run(Options(run, GetParam()));
  EXPECT_EQ(status.code(), StatusCode::kDataLoss) << status.ToString();
  EXPECT_NE(status.message().find("disagree at version 2"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find(wire.session()), std::string::npos) << status.message();
  EXPECT_EQ(status.message().find("quarantined"), std::string::npos) << status.message();
  // Damage that the pool knows of is the likelier cause.
  world.pool.metrics["quarantined"] = 3;
  const Status damaged = world.Run(Options(run, GetParam()));
  EXPECT_NE(damaged.message().find("The pool has quarantined 3 damaged records"), std::string::npos) << damaged.message();
}

// A kept set that is off by one bit could be trained on: another distribution than the one that was sampled.
TEST_P(LoopTest, OneChangedBitOfAKeptSetStopsTheJob) {
  World world(GetParam());
  TrainerOptions options = Options(Scratch("kept"), GetParam());
  options.steps = 1;
  ASSERT_TRUE(world.Run(options).ok());
  // Of the record's member by member and bit by bit: it is refused as no such set, or the logprob of its token is another.
  const auto weights = engine::ComputeWeights::FromParameters(engine::InitParameters(Tiny(), 3), GetParam());
  engine::TrainPass pass(*world.engine);
  const std::string member = world.store[0][1].members[1];
  int refused = 0, seen = 0;
  std::string spoiled;
  const auto look = [&](const std::string& bytes, bool changed) {
    Result<Rollout> rollout = ParseTrajectory(bytes, kVocab);
    if (!rollout.ok()) {
      EXPECT_NE(rollout.status().message().find("kept set"), std::string::npos) << rollout.status().message();
      ++refused;
      return;
    }
    Group group;
    group.rollouts = {*std::move(rollout)};
    const Batch batch = BuildBatch({group}, {}).value();
    const OnPolicyCheck check = CheckOnPolicy(batch, ScoreBatch(pass, weights, batch).value(), 0);
    EXPECT_EQ(check.max_deviation > 0, changed);
    EXPECT_EQ(!check.first_mismatch.empty(), changed);
    seen += changed;
    if (changed && spoiled.empty()) spoiled = bytes;
  };
  look(member, false);
  v1::Trajectory wire;
  ASSERT_TRUE(wire.ParseFromString(member));
  for (int r = 0; r < wire.runs_size(); ++r) {
    for (int k = 0; k < wire.runs(r).kept_size(); ++k) {
      for (size_t bit = 0; bit < 8 * wire.runs(r).kept(k).size(); ++bit) {
        v1::Trajectory other = wire;
        std::string& set = *other.mutable_runs(r)->mutable_kept(k);
        set[bit / 8] = static_cast<char>(set[bit / 8] ^ (1 << (bit % 8)));
        look(other.SerializeAsString(), true);
      }
    }
  }
  EXPECT_GT(refused, 20);
  EXPECT_GT(seen, 100);

  World job(GetParam());
  job.store = world.store;
  job.store[0][1].members[1] = spoiled;
  options.run_dir = Scratch("kept_job");
  const Status status = job.Run(options);
  EXPECT_EQ(status.code(), StatusCode::kDataLoss) << status.ToString();
  EXPECT_NE(status.message().find("disagree at version 0"), std::string::npos) << status.message();
  EXPECT_TRUE(job.pool.updates.empty()) << "the step was taken";
}

// A proof of tree = rows that fails could be written down and trained over.
TEST_P(LoopTest, AFailedProofOfTheTreeStopsTheJob) {
  World world(GetParam());
  TrainerOptions options = Options(Scratch("proof"), GetParam());
  options.prove_tree = true;
  Faults::Get().Arm("trainer.change_tree", "fail");
  const Status status = world.Run(options);
  EXPECT_EQ(status.code(), StatusCode::kDataLoss) << status.ToString();
  EXPECT_NE(status.message().find("tree training differs from separate rows"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find(": 1 logprobs differ"), std::string::npos) << status.message();
  EXPECT_TRUE(world.pool.updates.empty()) << "the step was taken";
}

// A node that reads another branch's keys could pass for the tree of the rollouts; and after the first step nobody would look again.
TEST_P(LoopTest, AWrongSubtreeStopsTheJobWheneverItIsProved) {
  for (const int64_t proof : {1, 2}) {
    World world(GetParam());
    TrainerOptions options = Options(Scratch("subtree"), GetParam());
    options.prove_every = 3;  // steps 1 and 3
    Faults::Get().Arm("trainer.change_tout", "fail", static_cast<int>(proof));
    const Status status = world.Run(options);
    EXPECT_EQ(status.code(), StatusCode::kDataLoss) << status.ToString();
    const std::string& said = status.message();
    EXPECT_NE(said.find("tree training differs from separate rows"), std::string::npos) << said;
    // Which tokens and which gradient: a session of the batch, both numbers, a parameter.
    EXPECT_NE(said.find(fmt::format("(first: session {}", proof == 1 ? "0." : "6.")), std::string::npos) << said;
    EXPECT_NE(said.find(" as a tree, "), std::string::npos) << said;
    EXPECT_NE(said.find(", the most in model."), std::string::npos) << said;
    EXPECT_EQ(world.pool.updates.size(), proof == 1 ? 0u : 2u) << "the step was taken";
  }
}

// A worker could serve weights that differ in one number from the trainer's.
TEST_P(LoopTest, OneChangedWeightOfTheWorkerStopsTheJob) {
  World world(GetParam());
  world.sink.spoil_at = 2;
  const Status status = world.Run(Options(Scratch("weight"), GetParam()));
  EXPECT_EQ(status.code(), StatusCode::kDataLoss) << status.ToString();
  EXPECT_EQ(world.sink.published.back(), 2);
}

// Groups without a gradient could change the step, go unchecked, or drop out of what is counted.
TEST_P(LoopTest, SilentGroupsAreCheckedAndChangeNothing) {
  World silent(GetParam());
  silent.pool.silent_every = 1;
  TrainerOptions options = Options(Scratch("silent"), GetParam());
  ASSERT_TRUE(silent.Run(options).ok());
  const TrainTotals totals = ReadTrainTotals(options.run_dir).value();
  EXPECT_EQ(totals.on_policy_tokens, totals.tokens_trained);
  EXPECT_GE(totals.on_policy_tokens, 6 * 12 * 9);
  const engine::Parameters start = engine::InitParameters(Tiny(), 3), end = LoadNewestCheckpoint(options.run_dir)->params;
  EXPECT_TRUE(std::equal(start.flat().begin(), start.flat().end(), end.flat().begin()));

  World spoiled(GetParam());
  spoiled.pool.silent_every = 1;
  spoiled.sink.spoil_at = 2;
  EXPECT_EQ(spoiled.Run(Options(Scratch("silent_weight"), GetParam())).code(), StatusCode::kDataLoss);

  // One silent group of three: the step is that of the engine differentiating all three as one tree.
  World mixed(GetParam());
  mixed.pool.silent_every = 3;
  options = Options(Scratch("mixed"), GetParam());
  options.steps = 1;
  options.optimizer.eps = 1;
  options.optimizer.clip_norm = 0;
  ASSERT_TRUE(mixed.Run(options).ok());
  const Batch batch = BuildBatch(GroupsOf(mixed.store.at(0)), {}).value();
  ASSERT_EQ(batch.chunks.size(), 1u);
  engine::TrainPass pass(*mixed.engine);
  const auto weights = engine::ComputeWeights::FromParameters(start, GetParam());
  const auto row = pass.Forward(weights, batch.chunks[0].tree, Wanting(batch.chunks[0])).value();
  const std::vector<std::vector<float>> logprobs = {{row.begin(), row.end()}};
  const LossResult loss = ComputeLoss(options.algorithm.algorithm, MakeLossGroups(batch, logprobs));
  EXPECT_EQ(loss.metrics.zero_signal_groups, 1);
  engine::Gradients grads(Tiny());
  pass.Backward(ItemCoefficients(batch, loss.coef)[0], grads);
  engine::Parameters expected = start;
  AdamW optimizer(Tiny());
  ASSERT_TRUE(optimizer.Step(*mixed.engine, options.optimizer, grads, expected).ok());
  const json::value line = Lines(options.run_dir + "/metrics.jsonl").at(0);
  EXPECT_GT(JsonRef(line).Field("grad_norm")->Double().value(), 0);
  EXPECT_EQ(line.at("grad_norm_clipped"), line.at("grad_norm")) << "clip_norm 0 clips nothing";
  const engine::Parameters got = LoadNewestCheckpoint(options.run_dir)->params;
  double difference = 0, norm = 0;
  for (size_t i = 0; i < start.flat().size(); ++i) {
    difference += std::pow(static_cast<double>(got.flat()[i]) - expected.flat()[i], 2);
    norm += std::pow(static_cast<double>(expected.flat()[i]) - start.flat()[i], 2);
  }
  EXPECT_GT(norm, 0);
  EXPECT_LT(std::sqrt(difference / norm), GetParam() == engine::Profile::kF32 ? 1e-3 : 3e-2);
}

// Splitting for memory, or training on rows, could change the gradient.
TEST_P(LoopTest, ChunksAndRowsGiveTheSameStep) {
  std::vector<engine::Parameters> results;
  for (int variant = 0; variant < 3; ++variant) {
    World world(GetParam());
    TrainerOptions options = Options(Scratch("variant"), GetParam());
    options.steps = 1;
    if (variant == 1) options.memory_bytes = 1;  // as many chunks as the smallest limit makes
    if (variant == 2) options.tree = false;
    // With AdamW's first step only signs would show.
    options.optimizer.eps = 1;
    ASSERT_TRUE(world.Run(options).ok());
    results.push_back(LoadNewestCheckpoint(options.run_dir)->params);
  }
  const engine::Parameters start = engine::InitParameters(Tiny(), 3);
  for (int variant = 1; variant < 3; ++variant) {
    double difference = 0, norm = 0;
    for (size_t i = 0; i < start.flat().size(); ++i) {
      const double d = static_cast<double>(results[variant].flat()[i]) - results[0].flat()[i];
      const double s = static_cast<double>(results[0].flat()[i]) - start.flat()[i];
      difference += d * d;
      norm += s * s;
    }
    EXPECT_GT(norm, 0);
    EXPECT_LT(std::sqrt(difference / norm), GetParam() == engine::Profile::kF32 ? 1e-3 : 3e-2) << variant;
  }
}

// With the tree off, the first step could have another loss or gradient than with it, or than the rows that the proof compares with.
TEST_P(LoopTest, RowsGiveTheFirstStepOfTheTreeAndOfItsProof) {
  std::vector<json::value> lines;
  std::vector<Group> groups;
  for (const bool tree : {true, false}) {
    World world(GetParam());
    TrainerOptions options = Options(Scratch("first_step"), GetParam());
    options.tree = tree;
    options.steps = 1;
    ASSERT_TRUE(world.Run(options).ok());
    lines.push_back(Lines(options.run_dir + "/metrics.jsonl").at(0));
    groups = GroupsOf(world.store.at(0));
  }
  EXPECT_LT(JsonRef(lines[0]).Field("tree_tokens")->Int().value(), JsonRef(lines[0]).Field("logical_tokens")->Int().value());
  EXPECT_EQ(JsonRef(lines[1]).Field("tree_tokens")->Int().value(), JsonRef(lines[1]).Field("logical_tokens")->Int().value());
  EXPECT_EQ(lines[0].at("logical_tokens"), lines[1].at("logical_tokens"));
  EXPECT_EQ(lines[0].at("loss"), lines[1].at("loss")) << "the same logprobs, so the same bits";

  World world(GetParam());
  engine::TrainPass pass(*world.engine);
  const auto weights = engine::ComputeWeights::FromParameters(engine::InitParameters(Tiny(), 3), GetParam());
  const Batch batch = BuildBatch(groups, {}).value();
  const auto logprobs = ScoreBatch(pass, weights, batch).value();
  const LossResult loss = ComputeLoss(Options("", GetParam()).algorithm.algorithm, MakeLossGroups(batch, logprobs));
  EXPECT_EQ(JsonRef(lines[1]).Field("loss")->Double().value(), loss.loss);
  const TreeProof proof = ProveTree(pass, weights, batch.groups, loss.coef, {}, 1 << 16).value();
  EXPECT_TRUE(proof.holds()) << proof.Text();
  EXPECT_EQ(proof.logical_tokens, batch.logical_tokens) << "the whole batch was proved";
  EXPECT_GT(proof.rows_norm, 0);
  const double near = GetParam() == engine::Profile::kF32 ? 1e-5 : 1e-2;
  EXPECT_NEAR(JsonRef(lines[0]).Field("grad_norm")->Double().value() / proof.tree_norm, 1, near);
  EXPECT_NEAR(JsonRef(lines[1]).Field("grad_norm")->Double().value() / proof.rows_norm, 1, near);
}

// A rollout that does not fit into the memory could be trained by other arithmetic than one that does, or not at all.
TEST_P(LoopTest, RolloutsBeyondTheMemoryAreComputedInPieces) {
  std::vector<engine::Parameters> ends;
  const engine::Parameters start = engine::InitParameters(Tiny(), 3);
  for (const int64_t memory : {int64_t{256} << 20, int64_t{1}}) {
    World world(GetParam());
    world.pool.prompt_tokens = 80;  // each rollout is larger than the smallest chunk
    TrainerOptions options = Options(Scratch("beyond"), GetParam());
    options.steps = 1;
    options.memory_bytes = memory;
    options.optimizer.eps = 1;
    ASSERT_TRUE(world.Run(options).ok());
    ends.push_back(LoadNewestCheckpoint(options.run_dir)->params);
  }
  double difference = 0, norm = 0;
  for (size_t i = 0; i < start.flat().size(); ++i) {
    difference += std::pow(static_cast<double>(ends[1].flat()[i]) - ends[0].flat()[i], 2);
    norm += std::pow(static_cast<double>(ends[0].flat()[i]) - start.flat()[i], 2);
  }
  EXPECT_GT(norm, 0);
  EXPECT_LT(std::sqrt(difference / norm), GetParam() == engine::Profile::kF32 ? 1e-3 : 3e-2);
}

// A loss could look at more than its own chunk when memory splits a batch, or leave out groups of equal rewards that it moves all the same.
// Off policy: the second step trains once more on what version 0 has drawn.
TEST(Loop, EveryLossGivesTheSameStepWholeAndInChunks) {
  const engine::Profile profile = engine::Profile::kF32;
  const engine::Parameters start = engine::InitParameters(Tiny(), 3);
  for (const char* text :
       {R"({"recipe":"grpo","loss":{"drift":0.5}})", R"({"recipe":"gspo","loss":{"clip_low":0.5,"clip_high":0.5}})", R"({"recipe":"gmpo"})",
        R"({"recipe":"sapo"})", R"({"recipe":"m2po","loss":{"m2_max":0.02}})",
        R"({"recipe":"reinforce","off_policy":{"mode":"decoupled","weight":"token","normalize":true}})",
        R"({"recipe":"dr_grpo","aggregation":{"length_norm":16},"off_policy":{"mode":"decoupled","weight":"sequence"}})",
        R"({"recipe":"minimax_01"})", R"({"recipe":"grpo","kl":{"where":"loss","coef":0.5}})",
        R"({"recipe":"grpo","kl":{"where":"reward","estimator":"k3","coef":0.5},"off_policy":{"mode":"decoupled","weight":"token"}})",
        R"({"recipe":"reinforce_pp"})", R"({"recipe":"opd"})", R"({"recipe":"opd","distillation":{"student":"new"}})",
        R"({"recipe":"grpo","distillation":{"kind":"topk_forward_kl","task_reward":true}})"}) {
    std::vector<engine::Parameters> ends;
    for (const int64_t memory : {int64_t{256} << 20, int64_t{1}}) {
      World world(profile);
      world.pool.silent_every = 3;
      TrainerOptions options = Options(Scratch("every_loss"), profile);
      options.algorithm = ParseAlgorithm(ParseJson(text).value()).value();
      options.memory_bytes = memory;
      options.checkpoint_every = 1;
      options.steps = 2;
      options.optimizer.eps = 1;  // with AdamW's first step only signs would show
      options.optimizer.clip_norm = 0;
      options.optimizer.lr = 1;
      options.teacher = OtherModel(5);
      options.teacher_top = 6;
      options.prove_tree = false;
      world.pool.repeat = true;
      const Status status = world.Run(options);
      ASSERT_TRUE(status.ok()) << text << ": " << status.ToString();
      ends.push_back(LoadNewestCheckpoint(options.run_dir)->params);
      const json::value second = Lines(options.run_dir + "/metrics.jsonl").at(1);
      EXPECT_GT(JsonRef(second).Field("mismatch_k3").value().Double().value(), 1e-3) << text;
      EXPECT_GT(JsonRef(second).Field("grad_norm").value().Double().value(), 0.1) << text;
    }
    double difference = 0, norm = 0;
    for (size_t i = 0; i < start.flat().size(); ++i) {
      difference += std::pow(static_cast<double>(ends[1].flat()[i]) - ends[0].flat()[i], 2);
      norm += std::pow(static_cast<double>(ends[0].flat()[i]) - start.flat()[i], 2);
    }
    EXPECT_GT(norm, 0) << text;
    EXPECT_LT(std::sqrt(difference / norm), 1e-3) << text;
  }
}

// A KL or a distillation could compare with the weights of now, with another model, or at another temperature than the token was drawn.
TEST_P(LoopTest, OtherModelsAreWhatTheJobNames) {
  struct Case {
    const char* block;
    uint64_t reference;  // seed of a named model; 0 = the start weights
    int32_t group_size = 4;
  };
  for (const Case& c : {Case{R"({"recipe":"grpo","kl":{"where":"loss","estimator":"k3","coef":0.3}})", 0},
                        Case{R"({"recipe":"grpo","kl":{"where":"loss","estimator":"k1+","coef":0.3}})", 7},
                        Case{R"({"recipe":"grpo","kl":{"where":"reward","estimator":"k2","coef":0.3}})", 0},
                        Case{R"({"recipe":"reinforce_pp","kl":{"coef":0.3}})", 7}, Case{R"({"recipe":"minimax_01"})", 0},
                        Case{R"({"recipe":"dpo"})", 0, 2}, Case{R"({"recipe":"ipo"})", 7, 2}, Case{R"({"recipe":"opd"})", 0}}) {
    World world(GetParam());
    world.pool.group_size = c.group_size;
    TrainerOptions options = Options(Scratch("others"), GetParam());
    options.algorithm = ParseAlgorithm(ParseJson(c.block).value()).value();
    options.steps = 2;
    options.checkpoint_every = 1;
    options.teacher = OtherModel(5);
    if (c.reference != 0) options.reference = OtherModel(c.reference);
    const Status status = world.Run(options);
    ASSERT_TRUE(status.ok()) << c.block << ": " << status.ToString();

    // The second step, done again by hand.
    const Batch batch = BuildBatch(GroupsOf(world.store[1]), {}).value();
    engine::TrainPass pass(*world.engine);
    auto score = [&](const engine::Parameters& params) {
      const auto weights = engine::ComputeWeights::FromParameters(params, GetParam());
      const auto row = pass.Forward(weights, batch.chunks[0].tree).value();
      return std::vector<std::vector<float>>{{row.begin(), row.end()}};
    };
    const Algorithm& algorithm = options.algorithm.algorithm;
    const auto now = score(engine::LoadModel(options.run_dir + "/checkpoints/1").value().params);
    const auto reference = score(engine::InitParameters(Tiny(), c.reference != 0 ? c.reference : 3));
    const auto teacher = score(engine::InitParameters(Tiny(), 5));
    std::vector<LossGroup> input = MakeLossGroups(batch, now);
    for (size_t g = 0; g < input.size(); ++g) {
      for (size_t i = 0; i < input[g].rollouts.size(); ++i) {
        for (const SampledToken& token : batch.samples[g][i]) {
          input[g].rollouts[i].logp_ref.push_back(reference[0][static_cast<size_t>(token.node)]);
          input[g].rollouts[i].logp_teacher.push_back(teacher[0][static_cast<size_t>(token.node)]);
        }
      }
    }
    const LossResult expected = ComputeLoss(algorithm, input);
    const auto lines = Lines(options.run_dir + "/metrics.jsonl");
    auto number = [&](size_t line, const char* name) { return JsonRef(lines.at(line)).Field(name).value().Double().value(); };
    EXPECT_NEAR(number(1, "loss"), expected.loss, 1e-12 * (1 + std::abs(expected.loss))) << c.block;
    EXPECT_NE(number(1, "grad_norm"), 0) << c.block;
    if (algorithm.ReadsReference()) {
      EXPECT_NEAR(number(1, "kl_reference"), expected.metrics.kl_reference, 1e-12 * expected.metrics.kl_reference) << c.block;
      EXPECT_GT(number(1, "kl_reference"), 0) << c.block;
      // At version 0 the start weights are the policy's own, to the bit.
      if (c.reference == 0) {
        EXPECT_EQ(number(0, "kl_reference"), 0) << c.block;
      }
    } else {
      EXPECT_NEAR(number(1, "kl_teacher"), expected.metrics.kl_teacher, 1e-12 * expected.metrics.kl_teacher) << c.block;
      EXPECT_GT(number(0, "kl_teacher"), 0) << c.block;
    }
  }
}

// The divergence could be from other tokens than the teacher's likeliest, from tokens that were cut, at another temperature or of another
// draw; or nothing of it could reach the weights.
TEST_P(LoopTest, TheTeachersLikeliestTokensAreWhatIsLearnt) {
  constexpr int kTop = 24;
  World world(GetParam());
  world.pool.repeat = true;
  TrainerOptions options = Options(Scratch("likeliest"), GetParam());
  options.algorithm = ParseAlgorithm(ParseJson(R"({"loss":{"kind":"distill"},"aggregation":{"mode":"token-mean"},
                                                  "distillation":{"kind":"topk_forward_kl"}})").value()).value();
  options.teacher = OtherModel(5);
  options.teacher_top = kTop;
  options.steps = 12;
  options.optimizer.lr = 5e-3;
  const Status status = world.Run(options);
  ASSERT_TRUE(status.ok()) << status.ToString();
  const auto lines = Lines(options.run_dir + "/metrics.jsonl");
  auto number = [&](size_t line, const char* name) { return JsonRef(lines.at(line)).Field(name).value().Double().value(); };

  // The first step by hand: both models asked for every token that a draw could have been.
  Batch batch = BuildBatch(GroupsOf(world.store[0]), {}).value();
  engine::TreeBatch& tree = batch.chunks[0].tree;
  std::vector<std::pair<int, int>> targets_of(static_cast<size_t>(tree.size()));
  int few = 0;
  for (int v = 0; v < tree.size(); ++v) {
    targets_of[v].first = static_cast<int>(tree.targets.size());
    if (batch.chunks[0].wanted[v]) {
      std::vector<int32_t> ids;
      const std::string_view kept = tree.kept_set(tree.kept_index(v));
      ASSERT_TRUE(kept.empty() || engine::DecodeKept(kept, Tiny().vocab, &ids).ok());
      for (int32_t id = 0; kept.empty() && id < Tiny().vocab; ++id) ids.push_back(id);
      few += ids.size() < kTop;
      for (int32_t id : ids) tree.targets.push_back({v, id});
    }
    targets_of[v].second = static_cast<int>(tree.targets.size());
  }
  EXPECT_GT(few, 0) << "no draw is from fewer tokens than are compared with";
  engine::TrainPass pass(*world.engine);
  auto score = [&](uint64_t seed) {
    const auto row = pass.Forward(engine::ComputeWeights::FromParameters(engine::InitParameters(Tiny(), seed), GetParam()), tree).value();
    return std::vector<float>(row.begin() + tree.size(), row.end());
  };
  const std::vector<float> teacher = score(5), policy = score(3);
  double sum = 0;
  int64_t tokens = 0;
  for (const auto& group : batch.samples) {
    for (const auto& rollout : group) {
      for (const SampledToken& token : rollout) {
        if (!token.trainable) continue;
        const auto [begin, end] = targets_of[token.node];
        std::vector<int> order(static_cast<size_t>(end - begin));
        std::iota(order.begin(), order.end(), begin);
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return teacher[a] > teacher[b]; });
        order.resize(std::min<size_t>(order.size(), kTop));
        for (int t : order) sum += std::exp(static_cast<double>(teacher[t])) * (static_cast<double>(teacher[t]) - policy[t]);
        ++tokens;
      }
    }
  }
  EXPECT_NEAR(number(0, "loss"), sum / static_cast<double>(tokens), 1e-9);
  EXPECT_GT(number(0, "grad_norm"), 0);
  EXPECT_LT(number(11, "loss"), 0.5 * number(0, "loss"));
}

// The weights a KL compares with could be those of the checkpoint that a run is resumed from, or a folder that has changed since.
TEST(Loop, TheReferenceOutlivesItsCheckpoint) {
  std::vector<std::string> ends;
  for (const bool interrupted : {false, true}) {
    World world(kBf16);
    TrainerOptions options = Options(Scratch("reference"), kBf16);
    options.algorithm = ParseAlgorithm(ParseJson(R"({"recipe":"grpo","kl":{"where":"loss","coef":1}})").value()).value();
    options.keep = 1;
    if (interrupted) {
      world.pool.stop_at = 3;
      ASSERT_EQ(world.Run(options).code(), StatusCode::kCancelled);
      EXPECT_EQ(ListDir(options.run_dir + "/checkpoints").value(), (std::vector<std::string>{"2"}));
      world.pool.stop_at = -1;
      TrainerOptions other = options;
      other.reference = OtherModel(7);
      const Status status = world.Run(other);
      EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition) << status.ToString();
      EXPECT_NE(status.message().find("trainer.reference"), std::string::npos) << status.message();
    }
    ASSERT_TRUE(world.Run(options).ok());
    ends.push_back(Bytes(options.run_dir + "/checkpoints/6/model.safetensors"));
  }
  EXPECT_EQ(ends[0], ends[1]);
}

// A teacher of other tokens would score something else than what was sampled.
TEST(Loop, AModelOfOtherTokensIsRefused) {
  World world(kBf16);
  TrainerOptions options = Options(Scratch("other_tokens"), kBf16);
  options.algorithm = ParseAlgorithm(ParseJson(R"({"recipe":"opd"})").value()).value();
  options.teacher = Scratch("other_tokens_teacher");
  const auto refused = [&](const engine::ModelConfig& config, const text::TextFiles& text, const std::string& why) {
    ASSERT_TRUE(engine::SaveHuggingFace(options.teacher, config, engine::InitParameters(config, 1), text, engine::FileType::kF32).ok());
    const Status status = world.Run(options);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status.ToString();
    EXPECT_NE(status.message().find("trainer.teacher"), std::string::npos) << status.message();
    EXPECT_NE(status.message().find(why), std::string::npos) << status.message();
  };
  refused(TinyModel(kVocab + 1), SomeText(), "49 tokens, the policy 48");
  engine::ModelConfig shorter = Tiny();
  shorter.max_positions /= 2;
  refused(shorter, SomeText(), fmt::format("{} positions, the policy {}", shorter.max_positions, Tiny().max_positions));
  text::TextFiles other;
  other.tokenizer_json = R"({"version":"1.0","model":{"type":"BPE","vocab":{"a":0},"merges":[]}})";
  refused(Tiny(), other, "token 0 differs");
}

// A run could go on with another teacher than it began with.
TEST(Loop, TheTeacherStaysTheSame) {
  World world(kBf16);
  TrainerOptions options = Options(Scratch("teacher"), kBf16);
  options.algorithm = ParseAlgorithm(ParseJson(R"({"recipe":"opd"})").value()).value();
  options.teacher = OtherModel(5);
  world.pool.stop_at = 3;
  ASSERT_EQ(world.Run(options).code(), StatusCode::kCancelled);
  world.pool.stop_at = -1;
  TrainerOptions other = options;
  other.teacher = OtherModel(6);
  const Status status = world.Run(other);
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition) << status.ToString();
  EXPECT_NE(status.message().find("trainer.teacher"), std::string::npos) << status.message();
  EXPECT_TRUE(world.Run(options).ok());
}

// Evaluations could run while rollouts are admitted, at another version than they claim, or twice under two numbers.
TEST(Loop, EvaluationsHoldTheirVersion) {
  World world(kBf16);
  TrainerOptions options = Options(Scratch("evaluations"), kBf16);
  options.evaluate = true;
  options.eval_every = 4;
  std::vector<std::pair<int64_t, int64_t>> asked;
  auto evaluator = [&](int64_t number, int64_t version) -> Result<Evaluation> {
    EXPECT_TRUE(world.pool.paused);
    EXPECT_EQ(world.sink.published.back(), version);
    asked.emplace_back(number, version);
    Evaluation e;
    e.pass_rate = 0.25;
    v1::Trajectory untrained;  // as evaluation sessions are
    EXPECT_TRUE(untrained.ParseFromString(world.pool.Trajectory(Rng(5), 900, 0, version)));
    for (auto& run : *untrained.mutable_runs()) run.set_trainable(false);
    e.probe = {untrained.SerializeAsString()};
    return e;
  };
  const Status status = world.Run(options, evaluator);
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(asked, (std::vector<std::pair<int64_t, int64_t>>{{0, 0}, {1, 4}, {2, 6}}));
  // The update frees slots: whatever it let in would be admitted at the version under evaluation.
  EXPECT_EQ(world.pool.paused_updates, (std::vector<int64_t>{3, 5}));
  EXPECT_EQ(ReadTrainTotals(options.run_dir)->on_policy_versions, (std::vector<int64_t>{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(Lines(options.run_dir + "/evaluations.jsonl").size(), 3u);
  // Asking again after a restart repeats the last one under its number.
  ASSERT_TRUE(world.Run(options, evaluator).ok());
  EXPECT_EQ(asked.back(), (std::pair<int64_t, int64_t>{2, 6}));
  EXPECT_EQ(Lines(options.run_dir + "/evaluations.jsonl").size(), 3u);
}

// A disagreement that only an evaluation can see could be passed over.
TEST(Loop, AnEvaluationThatDisagreesStopsTheJob) {
  World world(kBf16);
  TrainerOptions options = Options(Scratch("disagrees"), kBf16);
  options.evaluate = true;
  auto evaluator = [&](int64_t, int64_t version) -> Result<Evaluation> {
    v1::Trajectory drawn;
    EXPECT_TRUE(drawn.ParseFromString(world.pool.Trajectory(Rng(5), 900, 0, version)));
    float* logprob = drawn.mutable_runs(1)->mutable_logprobs()->Mutable(2);
    *logprob = std::nextafter(*logprob, 0.0f);
    Evaluation e;
    e.probe = {drawn.SerializeAsString()};
    world.stopped = true;  // a Ctrl-C at the same time does not excuse it
    return e;
  };
  const Status status = world.Run(options, evaluator);
  EXPECT_EQ(status.code(), StatusCode::kDataLoss) << status.ToString();
  EXPECT_TRUE(world.pool.updates.empty());
}

// metrics.jsonl could tell another batch than the one that was trained.
TEST(Loop, MetricsSayWhatTheBatchWas) {
  World world(kBf16);
  world.pool.admitted_early = true;
  TrainerOptions options = Options(Scratch("says"), kBf16);
  options.steps = 3;
  ASSERT_TRUE(world.Run(options).ok());
  const auto lines = Lines(options.run_dir + "/metrics.jsonl");
  ASSERT_EQ(lines.size(), 3u);
  for (int64_t batch = 0; batch < 3; ++batch) {
    double reward = 0, staleness = 0;
    int64_t oldest = 0;
    double surprise = 0;
    int64_t tokens = 0, turns = 0, longest = 0;
    std::vector<double> rewards;
    for (const datapool::LeasedGroup& group : world.store[batch]) {
      staleness += static_cast<double>(batch - group.version_admitted);
      oldest = std::max(oldest, batch - group.version_admitted);
      for (const std::string& member : group.members) {
        const Rollout rollout = ParseTrajectory(member, kVocab).value();
        reward += rollout.reward;
        rewards.push_back(rollout.reward);
        for (const TokenRun& run : rollout.runs) {
          if (!run.sampled) continue;
          ++turns;  // every call here samples one run
          tokens += static_cast<int64_t>(run.ids.size());
          longest = std::max(longest, static_cast<int64_t>(run.ids.size()));
          for (float logprob : run.logprobs) surprise -= logprob;
        }
      }
    }
    double squares = 0;
    for (double r : rewards) squares += (r - reward / 12) * (r - reward / 12);
    const json::value& line = lines[static_cast<size_t>(batch)];
    EXPECT_EQ(JsonRef(line).Field("version")->Int().value(), batch);
    EXPECT_EQ(JsonRef(line).Field("reward_mean")->Double().value(), reward / 12);
    EXPECT_EQ(JsonRef(line).Field("groups")->Int().value(), 3);
    EXPECT_EQ(JsonRef(line).Field("rollouts")->Int().value(), 12);
    EXPECT_EQ(JsonRef(line).Field("staleness_max")->Int().value(), oldest);
    EXPECT_EQ(JsonRef(line).Field("staleness_mean")->Double().value(), staleness / 3);
    EXPECT_EQ(line.at("outcomes").at("scored").as_int64(), 12);
    auto number = [&](const char* name) { return JsonRef(line).Field(name)->Double().value(); };
    EXPECT_NEAR(number("reward_std"), std::sqrt(squares / 11), 1e-12);
    EXPECT_EQ(number("reward_min"), *std::min_element(rewards.begin(), rewards.end()));
    EXPECT_EQ(number("reward_max"), *std::max_element(rewards.begin(), rewards.end()));
    EXPECT_NEAR(number("turn_tokens_mean"), static_cast<double>(tokens) / static_cast<double>(turns), 1e-12);
    EXPECT_EQ(number("turn_tokens_min"), 4);
    EXPECT_EQ(number("turn_tokens_max"), static_cast<double>(longest));
    EXPECT_NEAR(number("entropy"), surprise / static_cast<double>(tokens), 1e-9);
    EXPECT_EQ(number("rejected_tokens"), 0);
    EXPECT_GT(number("advantage_max"), 0);
    EXPECT_LT(number("advantage_min"), 0);
    EXPECT_GT(number("grad_norm"), 1);
    EXPECT_EQ(number("grad_norm_clipped"), 1);  // clip_norm
  }
  EXPECT_EQ(ReadTrainTotals(options.run_dir)->staleness_max, 2);
}

// A number that is none could be trained into the weights and their checkpoint.
TEST(Loop, ALossThatIsNoNumberEndsTheJob) {
  World world(kBf16);
  const TrainerOptions options = Options(Scratch("nan"), kBf16);
  world.pool.stop_at = 2;
  ASSERT_EQ(world.Run(options).code(), StatusCode::kCancelled);
  world.pool.stop_at = -1;
  world.store[2] = world.pool.Sample(2);
  for (datapool::LeasedGroup& group : world.store[2]) {
    for (size_t i = 0; i < group.members.size(); ++i) {
      v1::Trajectory wire;
      ASSERT_TRUE(wire.ParseFromString(group.members[i]));
      wire.set_reward(i > 0 ? std::numeric_limits<double>::max() : std::numeric_limits<double>::lowest());
      group.members[i] = wire.SerializeAsString();
    }
  }
  const Status status = world.Run(options);
  EXPECT_NE(status.message().find("not finite at step 3"), std::string::npos) << status.ToString();
  EXPECT_EQ(world.sink.published.back(), 2);
  EXPECT_EQ(LoadNewestCheckpoint(options.run_dir)->step, 2);
}

// One batch that is no number could end a long job, or be trained; a job that goes nowhere could go on for ever.
TEST(Loop, StepsThatAreNoNumberAreSkippedUpToALimit) {
  World world(kBf16);
  TrainerOptions options = Options(Scratch("skips"), kBf16);
  options.checkpoint_every = 1;
  options.keep = 9;
  options.skip_limit = 1;
  const auto spoil = [&](int64_t batch) {
    world.store[batch] = world.pool.Sample(batch);
    for (datapool::LeasedGroup& group : world.store[batch]) {
      for (size_t i = 0; i < group.members.size(); ++i) {
        v1::Trajectory wire;
        ASSERT_TRUE(wire.ParseFromString(group.members[i]));
        wire.set_reward(i > 0 ? std::numeric_limits<double>::max() : std::numeric_limits<double>::lowest());
        group.members[i] = wire.SerializeAsString();
      }
    }
  };
  world.pool.stop_at = 2;
  ASSERT_EQ(world.Run(options).code(), StatusCode::kCancelled);
  spoil(2);
  world.pool.stop_at = 4;
  ASSERT_EQ(world.Run(options).code(), StatusCode::kCancelled);  // step 3 is skipped, step 4 taken
  const std::string checkpoints = options.run_dir + "/checkpoints/";
  EXPECT_EQ(Bytes(checkpoints + "2/model.safetensors"), Bytes(checkpoints + "3/model.safetensors"));
  EXPECT_EQ(Bytes(checkpoints + "2/optimizer.safetensors"), Bytes(checkpoints + "3/optimizer.safetensors"));
  EXPECT_NE(Bytes(checkpoints + "3/model.safetensors"), Bytes(checkpoints + "4/model.safetensors"));
  const auto lines = Lines(options.run_dir + "/metrics.jsonl");
  EXPECT_NE(std::string(lines.at(2).at("skipped").as_string()).find("not finite at step 3"), std::string::npos);
  EXPECT_FALSE(lines.at(3).as_object().contains("skipped"));
  world.store[4] = world.store[2];
  world.store[5] = world.store[2];
  world.pool.stop_at = -1;
  const Status status = world.Run(options);
  EXPECT_EQ(status.code(), StatusCode::kInternal) << status.ToString();
  EXPECT_NE(status.message().find("2 steps in a row"), std::string::npos) << status.message();
  EXPECT_EQ(LoadNewestCheckpoint(options.run_dir)->step, 5);
  // One step between two that are skipped: they are not in a row.
  ASSERT_TRUE(RemoveAll(checkpoints + "5").ok());
  ASSERT_TRUE(RemoveAll(checkpoints + "4").ok());
  ASSERT_TRUE(RemoveAll(checkpoints + "3").ok());
  world.store[4] = world.store[2];
  world.store.erase(5);
  EXPECT_TRUE(world.Run(options).ok());
  EXPECT_EQ(LoadNewestCheckpoint(options.run_dir)->step, 6);
}

// The best policy of a run could be gone when the run ends.
TEST(Loop, TheBestCheckpointStays) {
  World world(kBf16);
  TrainerOptions options = Options(Scratch("best"), kBf16);
  options.evaluate = true;
  options.eval_every = 2;
  options.checkpoint_every = 3;
  options.keep = 1;
  options.keep_best = true;
  const double rates[] = {0.25, 0.75, 0.75, 0.5};  // at 0, 2, 4, 6: of equals the first
  ASSERT_TRUE(world.Run(options, [&](int64_t evaluation, int64_t) -> Result<Evaluation> {
    Evaluation result;
    result.pass_rate = rates[evaluation];
    return result;
  }).ok());
  EXPECT_EQ(ListDir(options.run_dir + "/checkpoints").value(), (std::vector<std::string>{"2", "6"}));
}

// A resumed run could go on in another number format, or cut its batches by the memory of another moment: other bits either way.
TEST(Loop, ThePlanOfTheRunStays) {
  constexpr engine::Profile kF32 = engine::Profile::kF32;
  std::vector<std::string> ends;
  for (const bool resumed : {false, true}) {
    World world(kF32);
    TrainerOptions options = Options(Scratch(resumed ? "plan_resumed" : "plan"), kF32);
    options.memory_bytes = 1;  // as many chunks as the smallest limit makes
    if (resumed) {
      world.pool.stop_at = 3;
      ASSERT_EQ(world.Run(options).code(), StatusCode::kCancelled);
      world.pool.stop_at = -1;
      options.memory_bytes = 256 << 20;
    }
    const Status status = world.Run(options);
    ASSERT_TRUE(status.ok()) << status.ToString();
    ends.push_back(Bytes(options.run_dir + "/checkpoints/6/model.safetensors"));
    options.profile = kBf16;
    World other(kBf16);
    EXPECT_EQ(other.Run(options).code(), StatusCode::kFailedPrecondition);
  }
  EXPECT_EQ(ends[0], ends[1]);
}

// A job whose tasks are used up could wait for ever.
TEST(Loop, AnExhaustedPoolEndsTheJob) {
  World world(kBf16);
  world.pool.exhausted_at = 3;
  const Status status = world.Run(Options(Scratch("exhausted"), kBf16));
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(status.message().find("give more tasks"), std::string::npos) << status.ToString();
}

// A run that is given more steps could differ from one that had them from the start.
TEST_P(LoopTest, MoreStepsContinueToTheBit) {
  World whole(GetParam());
  const std::string run = Scratch("more_whole");
  ASSERT_TRUE(whole.Run(Options(run, GetParam())).ok());
  World raised(GetParam());
  TrainerOptions options = Options(Scratch("more"), GetParam());
  options.steps = 5;
  raised.pool.stop_at = 3;
  ASSERT_EQ(raised.Run(options).code(), StatusCode::kCancelled);
  raised.pool.stop_at = -1;
  options.steps = 6;
  ASSERT_TRUE(raised.Run(options).ok());
  for (const char* file : {"model.safetensors", "optimizer.safetensors"}) {
    EXPECT_EQ(Bytes(run + "/checkpoints/6/" + file), Bytes(options.run_dir + "/checkpoints/6/" + file)) << file;
  }
}

// With staleness a batch may hold nothing that can be checked; the probe that stands in could disturb the step.
TEST(Loop, TheProbeChecksAndChangesNothing) {
  std::vector<std::string> runs;
  for (bool probing : {false, true}) {
    World world(kBf16);
    world.pool.age = 1;
    const std::string run = Scratch(probing ? "probe" : "no_probe");
    ProbeSource probe;
    if (probing) {
      probe = [&](int64_t version) -> Result<std::vector<std::string>> {
        return std::vector<std::string>{world.pool.Trajectory(Rng(5), 900, 0, version)};
      };
    }
    const Status status = world.Run(Options(run, kBf16), {}, {}, probe);
    ASSERT_TRUE(status.ok()) << status.ToString();
    EXPECT_EQ(ReadTrainTotals(run)->on_policy_versions.size(), probing ? 5u : 0u);
    runs.push_back(run);
  }
  EXPECT_EQ(Bytes(runs[0] + "/checkpoints/6/model.safetensors"), Bytes(runs[1] + "/checkpoints/6/model.safetensors"));
}

// Whoever watches a job is told what the trainer is at; and when a step was done, by the clock of the job and not of the process.
TEST(Loop, SaysWhatItIsAtAndWhen) {
  World world(kBf16);
  TrainerOptions options = Options(Scratch("phases"), kBf16);
  options.steps = 2;
  options.evaluate = true;
  options.sft.emplace().tokens = 8;
  options.sft->batch_tokens = 8;  // one row
  options.job_began_s = SystemClock::Get().NowS() - 1000;
  std::vector<std::string> seen;
  auto see = [&](const char* what) {
    const double phase = world.metrics.Snapshot()["phase"];
    for (const auto& [value, name] : {std::pair{Phase::kWarmUp, "warm-up"}, {Phase::kEvaluating, "evaluating"},
                                      {Phase::kCollecting, "collecting"}, {Phase::kTraining, "training"}}) {
      if (phase == static_cast<double>(value)) seen.push_back(std::string(what) + " " + name);
    }
  };
  world.pool.seen = see;
  auto evaluator = [&](int64_t, int64_t) -> Result<Evaluation> {
    see("evaluation");
    return Evaluation{};
  };
  const Status status = world.Run(options, evaluator, [&](int64_t) -> Result<SftRow> {
    see("row");
    return SftRow{{1, 2, 3, 4, 5, 6, 7, 8}, {0, 1, 1, 1, 1, 1, 1, 1}};
  });
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(seen, (std::vector<std::string>{"row warm-up", "evaluation evaluating", "lease collecting", "update training",
                                            "lease collecting", "update training", "evaluation evaluating"}));
  const std::vector<json::value> lines = Lines(options.run_dir + "/metrics.jsonl");
  ASSERT_EQ(lines.size(), 2u);
  for (const json::value& line : lines) {
    const double later_s = *JsonRef(line).DoubleOr("job_s", 0) - *JsonRef(line).DoubleOr("wall_s", 0);
    EXPECT_GE(later_s, 1000);
    EXPECT_LT(later_s, 1100);
    double parts_s = 0;
    for (const char* part : {"wait_s", "batch_s", "forward_s", "backward_s", "optimizer_s", "publish_s", "checkpoint_s"}) {
      const double seconds = JsonRef(line).Field(part)->Double().value();
      EXPECT_GT(seconds + (part == std::string("checkpoint_s")), 0) << part;
      parts_s += seconds;
    }
    EXPECT_LE(parts_s, *JsonRef(line).DoubleOr("wall_s", 0)) << "no time counts twice";
  }
}

// A part that restarts could end the job, or one that is stopped be waited for.
TEST(Loop, WaitsForPartsThatRestartAndEndsWhenStopped) {
  World world(kBf16);
  TrainerOptions options = Options(Scratch("away"), kBf16);
  options.steps = 2;
  options.evaluate = true;
  world.pool.away = 3;
  int asked = 0;
  auto evaluator = [&](int64_t, int64_t) -> Result<Evaluation> {
    if (asked++ == 0) return Unavailable("the agents restart");
    world.pool.away = 1;
    return Evaluation{};
  };
  const Status status = world.Run(options, evaluator);
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(asked, 3);
  world.pool.away = 1 << 30;
  options.steps = 3;
  std::thread stopper([&] { world.stopped = true; });
  EXPECT_EQ(world.Run(options, evaluator).code(), StatusCode::kCancelled);
  stopper.join();
}

// A torn or spoilt newest checkpoint could be loaded, or hide an older good one.
TEST(Loop, BrokenCheckpointsArePassedOver) {
  World world(kBf16);
  const std::string run = Scratch("broken");
  ASSERT_TRUE(world.Run(Options(run, kBf16)).ok());
  std::string bytes = Bytes(run + "/checkpoints/6/model.safetensors");
  bytes[bytes.size() / 2] ^= 1;
  ASSERT_TRUE(WriteFile(run + "/checkpoints/6/model.safetensors", bytes).ok());
  EXPECT_EQ(LoadNewestCheckpoint(run)->step, 4);
  // The pool knows of more than the checkpoint before has: the fault is the damaged file, and the message must say so.
  world.pool.committed = 6;
  const Status refused = world.Run(Options(run, kBf16));
  EXPECT_NE(refused.message().find("checkpoints/6: "), std::string::npos) << refused.ToString();
  EXPECT_NE(refused.message().find("older than the committed step"), std::string::npos) << refused.ToString();
  world.pool.committed = 0;
  ASSERT_TRUE(RemoveAll(run + "/checkpoints/4/optimizer.safetensors").ok());
  EXPECT_EQ(LoadNewestCheckpoint(run)->step, 2);
  ASSERT_TRUE(WriteFile(run + "/checkpoints/2/checkpoint.json", "{").ok());
  EXPECT_EQ(LoadNewestCheckpoint(run).status().code(), StatusCode::kNotFound);
}

// Lines of steps that are done again could be counted twice.
TEST(Loop, MetricsAreCutAtTheCheckpoint) {
  World world(kBf16);
  const std::string run = Scratch("cut");
  world.pool.stop_at = 3;
  ASSERT_EQ(world.Run(Options(run, kBf16)).code(), StatusCode::kCancelled);
  EXPECT_EQ(Lines(run + "/metrics.jsonl").size(), 3u);
  ASSERT_TRUE(AppendFile(run + "/metrics.jsonl", "{\"step\":4,\"torn").ok());
  ASSERT_EQ(world.Run(Options(run, kBf16)).code(), StatusCode::kCancelled);
  EXPECT_EQ(Lines(run + "/metrics.jsonl").size(), 3u);
  world.pool.stop_at = -1;
  ASSERT_TRUE(world.Run(Options(run, kBf16)).ok());
  const auto lines = Lines(run + "/metrics.jsonl");
  ASSERT_EQ(lines.size(), 6u);
  for (size_t i = 0; i < 6; ++i) EXPECT_EQ(JsonRef(lines[i]).Field("step")->Int().value(), static_cast<int64_t>(i + 1));
}

// The warm-up could train context tokens, count itself as training, or leave its moments behind.
TEST(Loop, SftComesBeforeVersionZero) {
  World world(kBf16);
  TrainerOptions options = Options(Scratch("sft"), kBf16);
  options.steps = 1;
  options.sft = SftOptions{.tokens = 4000, .batch_tokens = 100, .optimizer = {.lr = 1e-2}};
  auto source = [](int64_t index) -> Result<SftRow> {
    SftRow row;
    const int32_t start = static_cast<int32_t>(index % 5);
    for (int32_t t = 0; t < 10; ++t) {
      row.ids.push_back(t < 4 ? start : start + t);
      row.mask.push_back(t >= 4);
    }
    return row;
  };
  const Status status = world.Run(options, {}, source);
  ASSERT_TRUE(status.ok()) << status.ToString();
  const auto lines = Lines(options.run_dir + "/sft.jsonl");
  ASSERT_EQ(lines.size(), 40u);
  EXPECT_GT(JsonRef(lines.front()).Field("loss")->Double().value(), 3);
  EXPECT_LT(JsonRef(lines.back()).Field("loss")->Double().value(), 0.3);
  EXPECT_EQ(JsonRef(lines.back()).Field("trained_tokens")->Int().value(), 2400);
  EXPECT_EQ(ReadTrainTotals(options.run_dir)->steps, 1);
  EXPECT_EQ(LoadNewestCheckpoint(options.run_dir)->sft_tokens, 4000);
  EXPECT_EQ(LoadNewestCheckpoint(options.run_dir)->optimizer.steps(), 1);
}

// An optimizer step without a token would still move the weights (moments, decay) and count.
TEST(Loop, ABatchWithNothingToTrainLeavesTheWeightsAlone) {
  World world(kBf16);
  TrainerOptions options = Options(Scratch("nothing"), kBf16);
  options.steps = 2;
  options.optimizer.weight_decay = 0.1;
  ASSERT_TRUE(world.Run(options).ok());
  const Checkpoint trained = LoadNewestCheckpoint(options.run_dir).value();
  World idle(kBf16);
  idle.store = world.store;
  options.run_dir = Scratch("nothing_more");
  options.steps = 3;
  idle.store[2] = world.pool.Sample(2);
  for (datapool::LeasedGroup& group : idle.store[2]) {
    for (std::string& member : group.members) {
      v1::Trajectory wire;
      ASSERT_TRUE(wire.ParseFromString(member));
      for (auto& run : *wire.mutable_runs()) run.set_trainable(false);
      member = wire.SerializeAsString();
    }
  }
  const Status status = idle.Run(options);
  ASSERT_TRUE(status.ok()) << status.ToString();
  const Checkpoint after = LoadNewestCheckpoint(options.run_dir).value();
  EXPECT_EQ(after.step, 3);
  EXPECT_EQ(after.optimizer.steps(), 2);
  EXPECT_TRUE(std::equal(trained.params.flat().begin(), trained.params.flat().end(), after.params.flat().begin()));
}

// The control with exchanged rewards could train on the true ones.
TEST(Loop, PermutedRewardsAreWhatIsTrained) {
  std::vector<std::string> ends, rewards;
  for (const bool permuted : {false, true}) {
    World world(kBf16);
    TrainerOptions options = Options(Scratch(permuted ? "permuted" : "unpermuted"), kBf16);
    options.steps = 1;
    options.permute_rewards = permuted;
    ASSERT_TRUE(world.Run(options).ok());
    ends.push_back(Bytes(options.run_dir + "/checkpoints/1/model.safetensors"));
    rewards.push_back(PrintJson(Lines(options.run_dir + "/metrics.jsonl").at(0).at("reward_mean")));
  }
  EXPECT_NE(ends[0], ends[1]);
  EXPECT_EQ(rewards[0], rewards[1]);
}

// The sums of a run could leave out what evaluations checked, or claim version 0 as proof of a weight update.
TEST(TrainTotals, JoinStepsAndEvaluations) {
  const std::string run = Scratch("totals");
  EXPECT_EQ(ReadTrainTotals(run)->steps, 0);
  ASSERT_TRUE(WriteFile(run + "/metrics.jsonl",
                        R"({"step":1,"version":0,"tokens_trained":5,"tree_tokens":7,"logical_tokens":9,"on_policy_tokens":5,)"
                        R"("importance_ratio_max_dev_on_policy":0,"staleness_max":0,"batch_s":16,"forward_s":1,"backward_s":2,"optimizer_s":4,"wait_s":8})"
                        "\n"
                        R"({"step":2,"version":1,"tokens_trained":50,"tree_tokens":70,"logical_tokens":90,"on_policy_tokens":0,)"
                        R"("importance_ratio_max_dev_on_policy":0,"staleness_max":3,"forward_s":0.5,"backward_s":0.25,"optimizer_s":0.125})"
                        "\n{\"step\":3,\"torn").ok());
  ASSERT_TRUE(WriteFile(run + "/evaluations.jsonl",
                        R"({"evaluation":0,"version":0,"pass_rate":0.5,"on_policy_tokens":10,"importance_ratio_max_dev_on_policy":0})"
                        "\n"
                        R"({"evaluation":1,"version":2,"pass_rate":0.5,"on_policy_tokens":100,"importance_ratio_max_dev_on_policy":0.25})"
                        "\n").ok());
  const TrainTotals totals = ReadTrainTotals(run).value();
  EXPECT_EQ(totals.steps, 2);
  EXPECT_EQ(totals.tokens_trained, 55);
  EXPECT_EQ(totals.tree_tokens, 77);
  EXPECT_EQ(totals.logical_tokens, 99);
  EXPECT_EQ(totals.on_policy_tokens, 115);
  EXPECT_EQ(totals.on_policy_versions, (std::vector<int64_t>{2}));
  EXPECT_EQ(totals.ratio_max_dev_on_policy, 0.25);
  EXPECT_EQ(totals.staleness_max, 3);
  EXPECT_EQ(totals.train_s, 23.875);
}

// Bytes from outside could crash the trainer.
TEST(Wire, MutatedTrajectoriesNeverCrash) {
  World world(engine::Profile::kF32);
  TrainerOptions options = Options(Scratch("wire"), engine::Profile::kF32);
  options.steps = 0;
  ASSERT_TRUE(world.Run(options).ok());
  const std::string good = world.pool.Trajectory(Rng(1), 0, 1, 0);
  ASSERT_TRUE(ParseTrajectory(good, kVocab).ok());
  EXPECT_FALSE(ParseTrajectory(good, 3).ok());
  const google::protobuf::LogSilencer silence;
  Rng rng(17);
  int accepted = 0;
  for (int n = 0; n < 20000; ++n) {
    std::string bytes = good;
    for (int e = 0; e < 1 + n % 3; ++e) bytes[rng.Below(bytes.size())] = static_cast<char>(rng.Below(256));
    Result<Rollout> rollout = ParseTrajectory(bytes, kVocab);
    if (!rollout.ok()) continue;
    ++accepted;
    Group group;
    group.rollouts = {*rollout};
    if (auto batch = BuildBatch({group}, {}); batch.ok()) {
      EXPECT_GE(batch->logical_tokens, batch->tree_tokens);
    }
  }
  EXPECT_GT(accepted, 100);
}

}  // namespace
}  // namespace temper::trainer
