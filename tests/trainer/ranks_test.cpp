// Several ranks: sums in one order, batches cut alike, one result whatever their number, and no rank that dies unseen.
#include "trainer/ranks.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <set>
#include <thread>

#include "tests/trainer/scripted_job.h"

namespace temper::trainer {
namespace {

std::string Bytes(const std::string& path) { return ReadFile(path).value(); }

std::vector<json::value> Lines(const std::string& path) {
  std::vector<json::value> lines;
  const std::string text = Bytes(path);
  for (size_t at = 0, end; (end = text.find('\n', at)) != std::string::npos; at = end + 1) {
    lines.push_back(ParseJson(text.substr(at, end - at)).value());
  }
  return lines;
}

// Calls `act` for every rank, each in a thread.
void OnEach(int size, const std::function<void(int)>& act) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back(act, rank);
  for (std::thread& thread : threads) thread.join();
}

// Sums could depend on which rank is first, lose a block, or leave a rank with other weights.
TEST(Collective, AddsUpInOneOrderAndHandsOut) {
  for (const bool tcp : {false, true}) {
    for (const int size : {1, 2, 3, 5}) {
      RankSockets sockets(size, tcp);
      // Several blocks, the last not full; of magnitudes that make every order a sum of its own.
      constexpr size_t kValues = 200003;
      std::vector<std::vector<float>> values(static_cast<size_t>(size));
      std::vector<std::vector<std::byte>> bytes(values.size(), std::vector<std::byte>(700001));
      Rng rng(5);
      for (auto& own : values) {
        for (size_t i = 0; i < kValues; ++i) own.push_back(static_cast<float>(std::pow(10.0, rng.Below(12)) * (rng.Uniform() - 0.5)));
      }
      for (auto& byte : bytes[0]) byte = static_cast<std::byte>(rng.Below(256));
      std::vector<float> expected = values.back();
      for (int rank = size - 2; rank >= 0; --rank) {
        for (size_t i = 0; i < kValues; ++i) expected[i] = expected[i] + values[static_cast<size_t>(rank)][i];
      }
      OnEach(size, [&](int rank) {
        const auto chain = sockets.ChainOf(rank);
        std::this_thread::sleep_for(std::chrono::milliseconds(rank % 2 ? 20 : 0));
        EXPECT_TRUE(chain->Reduce(values[static_cast<size_t>(rank)]).ok());
        EXPECT_TRUE(chain->Broadcast(bytes[static_cast<size_t>(rank)]).ok());
      });
      EXPECT_EQ(values[0], expected) << size;
      for (const auto& copy : bytes) EXPECT_EQ(copy, bytes[0]) << size;
    }
  }
}

// The end of a stream could be waited at for ever: nothing comes, and nothing says so.
TEST(Link, APeerThatIsGoneIsNamed) {
  std::pair<Fd, Fd> ends = StreamPair();
  Link link = LinkTo(7, std::move(ends.first));
  ends.second.Reset();
  float value = 0;
  for (const Status& status : {link.Wait(), link.Receive(std::as_writable_bytes(std::span(&value, 1))), link.Send(std::as_bytes(std::span(&value, 1)))}) {
    EXPECT_EQ(status.code(), StatusCode::kUnavailable);
    EXPECT_EQ(status.message(), "trainer rank 7: it is gone");
  }
}

std::vector<Group> SomeGroups(int groups, int rollouts) {
  std::vector<Group> out;
  Rng rng(11);
  for (int g = groups; g-- > 0;) {
    Group& group = out.emplace_back();
    group.group = g;
    for (int i = rollouts; i-- > 0;) {
      Rollout& rollout = group.rollouts.emplace_back();
      rollout.rollout = i;
      rollout.reward = g % 3 == 0 ? 1 : static_cast<double>(rng.Below(2));
      TokenRun prompt, answer;
      prompt.ids = {1, g, 3};
      answer.parent = 0;
      answer.sampled = true;
      for (size_t k = 0; k < 4 + rng.Below(9); ++k) answer.ids.push_back(static_cast<int32_t>(rng.Below(kVocab)));
      answer.logprobs.assign(answer.ids.size(), -1);
      rollout.runs = {prompt, answer};
    }
  }
  return out;
}

// A rollout could be trained twice or never, ranks have nothing to do beside others with all, or the cut follow the order of arrival.
TEST(RankedBatch, HoldsEverythingOnceInEqualParts) {
  for (const auto& [groups, rollouts] : {std::pair(12, 4), std::pair(2, 6), std::pair(1, 7)}) {
    std::vector<uint8_t> silent;
    for (int g = 0; g < groups; ++g) silent.push_back(groups > 1 && g % 3 == 0);
    const Batch alone = BuildRankedBatch(SomeGroups(groups, rollouts), {.silent = silent}, 1).value();
    for (const int ranks : {2, 3, 4}) {
      std::vector<Group> shuffled = SomeGroups(groups, rollouts);
      Rng(static_cast<uint64_t>(ranks)).Shuffle(shuffled);
      const Batch batch = BuildRankedBatch(std::move(shuffled), {.silent = silent, .max_chunk_nodes = 60}, ranks).value();
      ASSERT_EQ(batch.groups.size(), alone.groups.size());
      std::vector<int64_t> loud(static_cast<size_t>(ranks));
      std::set<std::pair<int, int>> nodes;
      for (size_t g = 0; g < batch.groups.size(); ++g) {
        std::set<int> whose;
        ASSERT_EQ(batch.samples[g].size(), alone.samples[g].size());
        for (size_t i = 0; i < batch.samples[g].size(); ++i) {
          EXPECT_EQ(batch.groups[g].rollouts[i].rollout, static_cast<int32_t>(i));
          ASSERT_EQ(batch.samples[g][i].size(), alone.samples[g][i].size());
          for (size_t k = 0; k < batch.samples[g][i].size(); ++k) {
            const SampledToken& token = batch.samples[g][i][k];
            const BatchChunk& chunk = batch.chunks.at(static_cast<size_t>(token.chunk));
            EXPECT_EQ(chunk.tree.token.at(static_cast<size_t>(token.node)), batch.groups[g].rollouts[i].runs[1].ids[k]);
            EXPECT_EQ(chunk.silent, silent[g] != 0);
            whose.insert(chunk.rank);
            if (!silent[g]) ++loud[static_cast<size_t>(chunk.rank)];
            nodes.emplace(token.chunk, token.node);
          }
        }
        if (groups == 12 && !silent[g]) {
          EXPECT_EQ(whose.size(), 1u) << "a group was cut without need";
        }
      }
      EXPECT_EQ(batch.logical_tokens, alone.logical_tokens);
      int previous = 0;
      for (const BatchChunk& chunk : batch.chunks) {
        EXPECT_GE(chunk.rank, previous);
        previous = chunk.rank;
      }
      const auto [least, most] = std::minmax_element(loud.begin(), loud.end());
      EXPECT_GT(*least, 0) << groups << " groups on " << ranks;
      EXPECT_LE(*most, 2 * *least + 12) << groups << " groups on " << ranks;
    }
  }
  std::vector<Group> twice = SomeGroups(3, 2);
  twice[0].group = twice[2].group;
  EXPECT_EQ(BuildRankedBatch(twice, {}, 2).status().code(), StatusCode::kInvalidArgument);
}

struct Trained {
  std::string run;
  std::vector<float> weights;
  std::vector<json::value> lines;
};

Trained Train(const std::string& name, int ranks, const std::string& algorithm, bool tcp, const std::function<void(TrainerOptions&, World&)>& set = {}) {
  World world(engine::Profile::kF32);
  Trained out{.run = Scratch(name), .weights = {}, .lines = {}};
  TrainerOptions options = Options(out.run, engine::Profile::kF32);
  options.algorithm = ParseAlgorithm(ParseJson(algorithm).value()).value();
  options.steps = 2;
  options.optimizer.lr = 1e-3;
  options.optimizer.eps = 1e-4;  // else a gradient near 0 moves a weight as far as a large one
  world.pool.silent_every = 4;
  world.pool.repeat = true;  // the second batch is off policy
  if (set) set(options, world);
  std::unique_ptr<RankThreads> threads;
  if (ranks > 1) {
    threads = std::make_unique<RankThreads>(ranks, tcp);
    world.ranks = &threads->links;
  }
  const Status status = world.Run(options);
  EXPECT_TRUE(status.ok()) << status.ToString();
  if (!status.ok()) return out;
  const Checkpoint last = LoadNewestCheckpoint(out.run).value();
  out.weights.assign(last.params.flat().begin(), last.params.flat().end());
  out.lines = Lines(out.run + "/metrics.jsonl");
  return out;
}

double Distance(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += std::pow(static_cast<double>(a[i]) - b[i], 2);
    norm += std::pow(static_cast<double>(b[i]), 2);
  }
  return std::sqrt(difference / norm);
}

// Denominators could be those of a rank's part, a rank's gradient be left out or added twice, a chunk be scored with old weights: each loss
// that sums over the whole batch would then be another with another number of ranks.
TEST(Ranks, GiveTheStepOfOne) {
  for (const char* algorithm : {R"({"recipe":"grpo"})", R"({"recipe":"cispo","dynamic_sampling":"off"})",
                                R"({"recipe":"dr_grpo","aggregation":{"length_norm":20},"kl":{"where":"loss","coef":0.1}})",
                                R"({"recipe":"m2po","loss":{"m2_max":1e-7}})", R"({"recipe":"reinforce_pp_baseline"})", R"({"recipe":"gspo"})"}) {
    const Trained one = Train("one", 1, algorithm, false);
    for (const int ranks : {2, 3}) {
      const Trained some = Train("some", ranks, algorithm, ranks == 3);
      ASSERT_EQ(some.lines.size(), one.lines.size());
      for (size_t step = 0; step < one.lines.size(); ++step) {
        for (const char* sum : {"tokens_trained", "sequences", "logical_tokens", "zero_signal_groups", "on_policy_tokens"}) {
          EXPECT_EQ(some.lines[step].at(sum), one.lines[step].at(sum)) << algorithm << " " << ranks << " " << sum;
        }
        const double loss = one.lines[step].at("loss").to_number<double>(), norm = one.lines[step].at("grad_norm").to_number<double>();
        EXPECT_NEAR(some.lines[step].at("loss").to_number<double>(), loss, 1e-5 * std::max(1.0, std::abs(loss))) << algorithm << " " << ranks;
        EXPECT_NEAR(some.lines[step].at("grad_norm").to_number<double>(), norm, 2e-5 * norm) << algorithm << " " << ranks;
      }
      EXPECT_LT(Distance(some.weights, one.weights), 1e-5) << algorithm << " " << ranks;
      // From run to run: to the bit, also over another kind of stream.
      const Trained again = Train("again", ranks, algorithm, false);
      for (const char* file : {"model.safetensors", "optimizer.safetensors"}) {
        EXPECT_EQ(Bytes(some.run + "/checkpoints/2/" + file), Bytes(again.run + "/checkpoints/2/" + file)) << algorithm << " " << ranks << " " << file;
      }
    }
  }
}

// The advantage of a batch could be taken over a rank's rewards; one rank could hold the only groups with a signal.
TEST(Ranks, WithLittleToDo) {
  const std::string algorithm = R"({"recipe":"grpo"})";
  for (const int64_t silent_every : {1, 2}) {
    const auto set = [&](TrainerOptions& options, World& world) {
      world.pool.silent_every = silent_every;
      options.memory_bytes = 1 << 20;
    };
    const Trained one = Train("one", 1, algorithm, false, set), three = Train("three", 3, algorithm, false, set);
    EXPECT_LT(Distance(three.weights, one.weights), 1e-5) << silent_every;
  }
}

// A rank could ask another teacher, or score and pull other tokens than those of its own chunk.
TEST(Ranks, CompareWithTheTeachersLikeliestTokens) {
  const auto set = [](TrainerOptions& options, World&) {
    options.teacher = OtherModel(5);
    options.teacher_top = 6;
  };
  const std::string algorithm = R"({"recipe":"grpo","distillation":{"kind":"topk_forward_kl","task_reward":true}})";
  const Trained one = Train("one", 1, algorithm, false, set), three = Train("three", 3, algorithm, true, set);
  EXPECT_LT(Distance(three.weights, one.weights), 1e-5);
  for (size_t step = 0; step < 2; ++step) {
    const double loss = one.lines.at(step).at("loss").as_double();
    EXPECT_NEAR(three.lines.at(step).at("loss").as_double(), loss, 1e-5 * std::abs(loss));
  }
  EXPECT_GT(Distance(Train("without", 1, R"({"recipe":"grpo"})", false).weights, one.weights), 1e-3);
}

// A resumed run could add up in another order than before, or a run be resumed with other ranks and no word.
TEST(Ranks, ResumeIsExactAndKeepsTheirNumber) {
  TrainerOptions options = Options(Scratch("whole"), kBf16);
  {
    RankThreads threads(2);
    World whole(kBf16);
    whole.ranks = &threads.links;
    ASSERT_TRUE(whole.Run(options).ok());
  }
  TrainerOptions cut = options;
  cut.run_dir = Scratch("cut");
  World world(kBf16);
  world.pool.stop_at = 3;
  {
    RankThreads threads(2);
    world.ranks = &threads.links;
    ASSERT_EQ(world.Run(cut).code(), StatusCode::kCancelled);
  }
  world.pool.stop_at = -1;
  world.ranks = nullptr;
  const Status other = world.Run(cut);
  EXPECT_EQ(other.code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(other.message().find("trainer.ranks: 2, not 1"), std::string::npos) << other.message();
  RankThreads threads(2);
  world.ranks = &threads.links;
  ASSERT_TRUE(world.Run(cut).ok());
  for (const char* file : {"model.safetensors", "optimizer.safetensors"}) {
    EXPECT_EQ(Bytes(options.run_dir + "/checkpoints/6/" + file), Bytes(cut.run_dir + "/checkpoints/6/" + file)) << file;
  }
}

// A rank as a process that can be killed. (Forked before this process has threads.)
struct RankProcess {
  pid_t pid = -1;
  Link control, next;  // rank 0's ends
};
RankProcess Fork() {
  std::pair<Fd, Fd> control = StreamPair(), chain = StreamPair();
  RankProcess rank;
  rank.pid = fork();
  if (rank.pid == 0) {
    control.first.Reset();
    chain.first.Reset();
    const auto engine = engine::Engine::Create({.threads = 1}).value();
    const auto collective = MakeChain(LinkTo(0, std::move(chain.second)), Link());
    _exit(ServeRank(*engine, LinkTo(0, std::move(control.second)), *collective).ok() ? 0 : 1);
  }
  rank.control = LinkTo(1, std::move(control.first));
  rank.next = LinkTo(1, std::move(chain.first));
  return rank;
}

// A trainer could wait for ever for a rank that was killed: while it computes, or while nobody asks it for anything.
TEST(Ranks, ADeadRankIsAnErrorThatNamesIt) {
  for (const bool at_work : {false, true}) {
    RankProcess rank = Fork();
    World world(kBf16);
    RankLinks links;
    links.collective = MakeChain(Link(), std::move(rank.next));
    links.control.push_back(std::move(rank.control));
    world.ranks = &links;
    std::chrono::steady_clock::time_point killed;
    std::jthread killer;
    int leases = 0;
    world.pool.seen = [&](const char* call) {
      if (*call != 'l' || ++leases != 3) return;
      killed = std::chrono::steady_clock::now();
      if (at_work) {
        // As soon as it computes again: it is stopped before its first chunk.
        kill(rank.pid, SIGSTOP);
        killer = std::jthread([pid = rank.pid] {
          std::this_thread::sleep_for(std::chrono::milliseconds(300));
          kill(pid, SIGKILL);
        });
      } else {
        kill(rank.pid, SIGKILL);
      }
    };
    const Status status = world.Run(Options(Scratch("dead"), kBf16));
    EXPECT_EQ(status.code(), StatusCode::kUnavailable) << status.ToString();
    EXPECT_NE(status.message().find("trainer rank 1: it is gone"), std::string::npos) << status.message();
    EXPECT_LT(std::chrono::steady_clock::now() - killed, std::chrono::seconds(10));
    EXPECT_EQ(waitpid(rank.pid, nullptr, 0), rank.pid);
  }
}

// A rank could outlive its trainer, or take what it cannot read for a chunk.
TEST(Ranks, EndWithTheirTrainerAndRefuseRubbish) {
  {
    RankSockets sockets(2);
    sockets.control[0].Close();
    const auto engine = engine::Engine::Create({.threads = 1}).value();
    const auto chain = sockets.ChainOf(1);
    EXPECT_TRUE(ServeRank(*engine, std::move(sockets.ends[1].control), *chain).ok());
  }
  RankThreads threads(2);
  const auto engine = engine::Engine::Create({.threads = 1}).value();
  engine::TrainPass pass(*engine);
  Ranks ranks(pass, &threads.links);
  Batch batch = BuildRankedBatch(SomeGroups(4, 2), {}, 2).value();
  ASSERT_EQ(batch.chunks.back().rank, 1);
  batch.chunks.front().rank = 1;
  EXPECT_EQ(ranks.Score(RankModel::kPolicy, batch).status().message(), "trainer rank 1: the model was not loaded");
  batch.chunks.front().rank = 0;
  ASSERT_TRUE(ranks.Load(RankModel::kPolicy, engine::ComputeWeights::FromParameters(engine::InitParameters(Tiny(), 3), kBf16)).ok());
  ASSERT_TRUE(ranks.Score(RankModel::kPolicy, batch).ok());
  batch.chunks.back().tree.token[1] = kVocab;
  const Status refused = ranks.Score(RankModel::kPolicy, batch).status();
  EXPECT_EQ(refused.message().rfind("trainer rank 1: ", 0), 0u) << refused.ToString();
}

}  // namespace
}  // namespace temper::trainer
