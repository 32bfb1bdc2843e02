// Reinforcement learning in one process with the real decoder: what the worker samples, the trainer scores, and the reward rises.
#include <gtest/gtest.h>

#include <cstring>
#include <map>

#include "common/file.h"
#include "common/json.h"
#include "engine/decode/decoder.h"
#include "engine/decode/paged_model.h"
#include "temper/v1/types.pb.h"
#include "tests/harness/scratch.h"
#include "tests/harness/tiny_model.h"
#include "trainer/loop.h"

namespace temper::trainer {
namespace {

constexpr int kVocab = 64;
constexpr int kTokens = 3;

// Of a batch.
struct Shape {
  int groups = 8, rollouts = 8;
};

engine::ModelConfig Tiny() {
  engine::ModelConfig c = TinyModel(kVocab);
  c.ffn = 64;
  return c;
}

// Trainer and worker share the bytes, as over shared memory.
class DecoderSink final : public WeightSink {
 public:
  explicit DecoderSink(engine::Decoder& decoder) : decoder_(decoder) {}
  Result<std::span<std::byte>> Begin() override {
    const size_t size = engine::ComputeBytes(Tiny(), engine::Profile::kBf16);
    next_ = std::shared_ptr<std::byte>(static_cast<std::byte*>(std::aligned_alloc(64, size)), std::free);
    return std::span(next_.get(), size);
  }
  Status Publish(int64_t step, const engine::Digest& digest, const std::function<bool()>&) override {
    const size_t size = engine::ComputeBytes(Tiny(), engine::Profile::kBf16);
    ASSIGN_OR_RETURN(const auto weights, engine::ComputeWeights::View(Tiny(), engine::Profile::kBf16, {next_.get(), size}, next_));
    EXPECT_EQ(weights.ComputeDigest(), digest);
    version = step;
    return decoder_.SwapWeights(weights, {.epoch = 1, .step = step});
  }
  int64_t version = 0;

 private:
  engine::Decoder& decoder_;
  std::shared_ptr<std::byte> next_;
};

// Half of the groups of batch b are sampled at version b-1 (from the second batch on), the others at b: staleness 1.
class SamplingPool final : public datapool::DataPool {
 public:
  SamplingPool(engine::Decoder& decoder, DecoderSink& sink, Shape shape) : decoder_(decoder), sink_(sink), shape_(shape) {}
  Result<int64_t> AttachAgents(const std::string&) override { return Unimplemented(""); }
  Result<datapool::TakeIssuesReply> TakeIssues(const std::string&, int32_t, uint32_t) override { return Unimplemented(""); }
  Result<bool> Finish(const std::string&, const datapool::FinishedAttempt&) override { return Unimplemented(""); }
  Result<std::vector<int64_t>> AttachTrainer(const std::string&, int64_t) override { return std::vector<int64_t>{}; }
  Result<datapool::LeaseReply> Lease(const std::string&, int64_t batch, uint32_t) override {
    datapool::LeaseReply reply;
    reply.ready = true;
    reply.batch = batch;
    reply.groups = std::move(early_);
    early_.clear();
    while (static_cast<int>(reply.groups.size()) < shape_.groups) reply.groups.push_back(Group());
    while (static_cast<int>(early_.size()) < shape_.groups / 2) early_.push_back(Group());
    for (const auto& g : reply.groups) rewards.back().second += reward_of_[g.group] / shape_.groups;
    rewards.emplace_back(batch + 1, 0);
    return reply;
  }
  Status Update(const std::string&, int64_t) override { return Status::Ok(); }
  Status Commit(int64_t) override { return Status::Ok(); }
  Status Pause(bool) override { return Status::Ok(); }
  Status Close(datapool::CloseReason) override { return Status::Ok(); }
  Result<std::map<std::string, double>> Metrics() override { return std::map<std::string, double>{}; }

  std::vector<std::pair<int64_t, double>> rewards = {{0, 0}};

 private:
  // Two turns of kTokens; reward = share of sampled ids in the lower half of the vocabulary.
  datapool::LeasedGroup Group() {
    datapool::LeasedGroup group;
    group.group = next_group_++;
    group.version_admitted = sink_.version;
    std::vector<v1::Trajectory> rollouts(static_cast<size_t>(shape_.rollouts));
    for (int i = 0; i < shape_.rollouts; ++i) {
      rollouts[i].set_session(std::to_string(group.group) + "." + std::to_string(i) + ".1");
      rollouts[i].set_outcome("scored");
      AddRun(rollouts[i], {1, 2, 3, static_cast<int32_t>(group.group % 7)}, 0);
    }
    for (uint32_t call = 0; call < 2; ++call) {
      if (call > 0) {
        for (auto& r : rollouts) AddRun(r, {9, 10}, call);
      }
      Turn(group.group, call, rollouts);
    }
    double total = 0;
    for (int i = 0; i < shape_.rollouts; ++i) {
      int hits = 0;
      for (const auto& run : rollouts[i].runs()) {
        for (uint32_t id : run.ids()) hits += run.provenance() == v1::SAMPLED && id < kVocab / 2;
      }
      rollouts[i].set_reward(static_cast<double>(hits) / (2 * kTokens));
      total += rollouts[i].reward();
      group.rollouts.push_back(i);
      group.members.push_back(rollouts[i].SerializeAsString());
    }
    reward_of_[group.group] = total / shape_.rollouts;
    return group;
  }

  void AddRun(v1::Trajectory& trajectory, const std::vector<int32_t>& ids, uint32_t call) {
    v1::TokenRun* run = trajectory.add_runs();
    run->set_id(trajectory.runs_size() - 1);
    run->set_parent(trajectory.runs_size() - 2);
    run->set_call(static_cast<int32_t>(call));
    for (int32_t id : ids) run->add_ids(static_cast<uint32_t>(id));
  }

  void Turn(int64_t group, uint32_t call, std::vector<v1::Trajectory>& rollouts) {
    std::map<uint64_t, v1::TokenRun*> open;
    for (int i = 0; i < shape_.rollouts; ++i) {
      engine::DecodeRequest request;
      for (const auto& run : rollouts[i].runs()) request.ids.insert(request.ids.end(), run.ids().begin(), run.ids().end());
      request.sampling.temperature = 0.8f;
      request.sampling.max_tokens = kTokens;
      request.key = {.seed = 5, .domain = 0, .a = static_cast<uint64_t>(group), .b = static_cast<uint64_t>(i), .call = call};
      AddRun(rollouts[i], {}, call);
      v1::TokenRun* run = rollouts[i].mutable_runs(rollouts[i].runs_size() - 1);
      run->set_provenance(v1::SAMPLED);
      run->set_trainable(true);
      run->set_inv_temperature(engine::InvTemperature(0.8f));
      open[decoder_.Add(request).value()] = run;
    }
    std::vector<engine::DecodeEvent> events;
    while (decoder_.Step(&events)) {
    }
    for (const engine::DecodeEvent& event : events) {
      v1::TokenRun* run = open.at(event.id);
      run->add_ids(static_cast<uint32_t>(event.token));
      run->add_logprobs(event.logprob);
      run->mutable_version()->set_step(event.version.step);
    }
  }

  engine::Decoder& decoder_;
  DecoderSink& sink_;
  const Shape shape_;
  int64_t next_group_ = 0;
  std::vector<datapool::LeasedGroup> early_;
  std::map<int64_t, double> reward_of_;
};

// Mean reward of the first and of the last three batches.
std::pair<double, double> Train(const std::string& algorithm, bool permute, uint64_t seed = 0, Shape shape = {}, const std::optional<SftOptions>& sft = {},
                                const SftSource& source = {}) {
  auto trainer_engine = engine::Engine::Create({.threads = 2}).value();
  auto worker_engine = engine::Engine::Create({.threads = 1}).value();
  engine::Decoder decoder(std::make_unique<engine::PagedModel>(*worker_engine, Tiny(), engine::Profile::kBf16, 256), {});
  DecoderSink sink(decoder);
  SamplingPool pool(decoder, sink, shape);
  TrainerOptions options;
  options.run_dir = ScratchFolder("learn");
  options.incarnation = "test";
  options.algorithm = ParseAlgorithm(ParseJson(algorithm).value()).value();
  options.optimizer.lr = 1e-2;
  options.steps = 25;
  options.checkpoint_every = 100;
  options.memory_bytes = 256 << 20;
  options.evaluate = false;
  options.permute_rewards = permute;
  options.seed = seed;
  options.sft = sft;
  text::TextFiles text;
  text.tokenizer_json = R"({"version":"1.0","model":{"type":"BPE","vocab":{},"merges":[]}})";
  Metrics metrics;
  std::atomic<bool> stopped{false};
  const Status status = RunTraining(options, engine::InitParameters(Tiny(), 3), text,
                                    {*trainer_engine, pool, sink, metrics, SystemClock::Get(), {}, source, {}, stopped});
  EXPECT_TRUE(status.ok()) << status.ToString();
  const TrainTotals totals = ReadTrainTotals(options.run_dir).value();
  EXPECT_EQ(totals.ratio_max_dev_on_policy, 0);
  EXPECT_EQ(totals.on_policy_versions.size(), 24u);
  EXPECT_EQ(totals.staleness_max, 1);
  // Two equal rewards are no pair.
  const int64_t drawn = 25 * shape.groups * shape.rollouts * 2 * kTokens;
  EXPECT_TRUE(shape.rollouts > 2 ? totals.tokens_trained == drawn : totals.tokens_trained < drawn) << totals.tokens_trained << " of " << drawn;
  auto mean = [&](size_t from) { return (pool.rewards[from].second + pool.rewards[from + 1].second + pool.rewards[from + 2].second) / 3; };
  return {mean(0), mean(22)};
}

// Everything could be right in its parts and yet push the policy the wrong way, or nowhere.
TEST(Learn, CispoRaisesTheReward) {
  const auto [start, end] = Train(R"({"recipe":"cispo","dynamic_sampling":"off"})", false);
  EXPECT_LT(start, 0.7);
  EXPECT_GT(end, 0.9);
}

TEST(Learn, GrpoRaisesTheReward) {
  const auto [start, end] = Train(R"({"recipe":"grpo"})", false);
  EXPECT_LT(start, 0.7);
  EXPECT_GT(end, 0.9);
}

// Pairs: the better one of two draws is preferred, as far from the start weights as `beta` lets it go.
TEST(Learn, DpoRaisesTheReward) {
  const auto [start, end] = Train(R"({"recipe":"dpo"})", false, 0, {.groups = 32, .rollouts = 2});
  std::printf("[ dpo ] %.3f -> %.3f\n", start, end);
  EXPECT_LT(start, 0.7);
  EXPECT_GT(end, 0.9);
}

// Rows whose masked tokens are what is rewarded: the warm-up alone teaches it, and as well the contrary.
TEST(Learn, SftLearnsWhatItsRowsShow) {
  SftOptions sft;
  sft.tokens = 20000;
  sft.batch_tokens = 256;
  sft.optimizer.lr = 1e-2;
  const auto rows = [](int shown) -> SftSource {
    return [shown](int64_t index) -> Result<SftRow> {
      SftRow row;
      row.ids = {1, 2, 3, static_cast<int32_t>(index % 7)};
      for (int turn = 0; turn < 2; ++turn) {
        if (turn > 0) row.ids.insert(row.ids.end(), {9, 10});
        row.mask.resize(row.ids.size(), 0);
        for (int i = 0; i < kTokens; ++i) row.ids.push_back(static_cast<int32_t>((index * 13 + turn * 5 + i * 3) % (kVocab / 2)) + shown);
        row.mask.resize(row.ids.size(), 1);
      }
      return row;
    };
  };
  const double good = Train(R"({"recipe":"grpo"})", false, 0, {}, sft, rows(0)).first;
  const double poor = Train(R"({"recipe":"grpo"})", false, 0, {}, sft, rows(kVocab / 2)).first;
  std::printf("[ sft ] rows of what is rewarded %.3f, of what is not %.3f\n", good, poor);
  EXPECT_GT(good, 0.9);
  EXPECT_LT(poor, 0.1);
}

// A reward that rises without its signal would be an artefact. At this rate a policy wanders even without one, up or down by chance,
// so it is the mean over many permutations that must stay where it was.
TEST(Learn, PermutedRewardsTeachNothing) {
  constexpr int kSeeds = 16;
  double start_mean = 0, end_mean = 0;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    const auto [start, end] = Train(R"({"recipe":"cispo","dynamic_sampling":"off"})", true, seed);
    start_mean += start / kSeeds;
    end_mean += end / kSeeds;
  }
  std::printf("[ permuted ] %.3f -> %.3f\n", start_mean, end_mean);
  EXPECT_LT(start_mean, 0.7);
  EXPECT_NEAR(end_mean, start_mean, 0.15);
}

}  // namespace
}  // namespace temper::trainer
