// The whole training loop in one process: a pool of scripted groups whose tokens are scored with the weights that were published, and ranks
// that are threads.
#pragma once

#include <arpa/inet.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/file.h"
#include "common/json.h"
#include "common/rng.h"
#include "engine/files/model_file.h"
#include "engine/kept_set.h"
#include "engine/train_pass.h"
#include "temper/v1/types.pb.h"
#include "tests/harness/scratch.h"
#include "tests/harness/tiny_model.h"
#include "trainer/batch.h"
#include "trainer/checkpoint.h"
#include "trainer/collective.h"
#include "trainer/loop.h"
#include "trainer/ranks.h"

namespace temper::trainer {

constexpr int kVocab = 48;
constexpr engine::Profile kBf16 = engine::Profile::kBf16;

inline engine::ModelConfig Tiny() { return TinyModel(kVocab); }

// Keeps the newest published bytes, as a worker would; can spoil one weight.
class Sink final : public WeightSink {
 public:
  explicit Sink(engine::Profile profile) : profile_(profile) {}
  Result<std::span<std::byte>> Begin() override {
    auto* memory = static_cast<std::byte*>(std::aligned_alloc(64, engine::ComputeBytes(Tiny(), profile_)));
    next_ = std::shared_ptr<std::byte>(memory, std::free);
    return std::span(memory, engine::ComputeBytes(Tiny(), profile_));
  }
  Status Publish(int64_t step, const engine::Digest& digest, const std::function<bool()>&) override {
    const std::span<const std::byte> bytes(next_.get(), engine::ComputeBytes(Tiny(), profile_));
    weights = engine::ComputeWeights::View(Tiny(), profile_, bytes, next_).value();
    EXPECT_EQ(weights.ComputeDigest(), digest);
    published.push_back(step);
    if (step == spoil_at) reinterpret_cast<uint16_t*>(next_.get())[64] ^= 0x40;  // one weight of the embedding, after the check
    return Status::Ok();
  }
  engine::ComputeWeights weights;
  std::vector<int64_t> published;
  int64_t spoil_at = -1;

 private:
  engine::Profile profile_;
  std::shared_ptr<std::byte> next_;
};

// What survives a crash of the trainer: the groups of every batch, once sampled.
using Store = std::map<int64_t, std::vector<datapool::LeasedGroup>>;

class ScriptedPool final : public datapool::DataPool {
 public:
  std::function<void(const char*)> seen;  // called by each lease and update

  ScriptedPool(engine::Engine& engine, Sink& sink, Store& store) : pass_(engine), sink_(sink), store_(store) {}

  Result<int64_t> AttachAgents(const std::string&) override { return Unimplemented(""); }
  Result<datapool::TakeIssuesReply> TakeIssues(const std::string&, int32_t, uint32_t) override { return Unimplemented(""); }
  Result<bool> Finish(const std::string&, const datapool::FinishedAttempt&) override { return Unimplemented(""); }
  Result<std::vector<int64_t>> AttachTrainer(const std::string&, int64_t step) override {
    if (step < committed) return FailedPrecondition("older than the committed step");
    attached = step;
    return std::vector<int64_t>{};
  }
  Result<datapool::LeaseReply> Lease(const std::string&, int64_t batch, uint32_t) override {
    if (away-- > 0) return Unavailable("the pool restarts");
    if (seen) seen("lease");
    EXPECT_FALSE(paused) << "nothing would ever be admitted";
    datapool::LeaseReply reply;
    reply.closed = batch == stop_at;
    reply.exhausted = batch == exhausted_at;
    if (reply.closed || reply.exhausted) return reply;
    if (!store_.count(batch)) store_[batch] = repeat && batch > 0 ? store_[batch - 1] : Sample(batch);
    reply.ready = true;
    reply.batch = batch;
    reply.groups = store_[batch];
    return reply;
  }
  Status Update(const std::string&, int64_t batch) override {
    if (away-- > 0) return Unavailable("the pool restarts");
    if (seen) seen("update");
    EXPECT_EQ(sink_.published.back(), batch + 1) << "slots were freed before the weights were served";
    updates.push_back(batch);
    if (paused) paused_updates.push_back(batch);
    return Status::Ok();
  }
  Status Commit(int64_t step) override {
    // The pool forgets the batches of a committed step: what they became must be on disk, and told.
    EXPECT_EQ(LoadNewestCheckpoint(run_dir)->step, step);
    const std::string told = ReadFile(run_dir + "/metrics.jsonl").value();
    EXPECT_EQ(std::count(told.begin(), told.end(), '\n'), step);
    commits.push_back(step);
    return Status::Ok();
  }
  Status Pause(bool on) override {
    paused = on;
    return Status::Ok();
  }
  Status Close(datapool::CloseReason) override { return Status::Ok(); }
  Result<std::map<std::string, double>> Metrics() override { return metrics; }
  std::map<std::string, double> metrics;

  // A rollout of two turns; its tokens are scored with the weights now served. Of every second rollout they were drawn from few.
  std::string Trajectory(Rng rng, int64_t group, int32_t rollout, int64_t version) {
    Rollout r;
    auto ids = [&](int n) {
      std::vector<int32_t> out;
      for (int k = 0; k < n; ++k) out.push_back(static_cast<int32_t>(rng.Below(kVocab)));
      return out;
    };
    auto add = [&](int32_t parent, bool sampled, std::vector<int32_t> tokens, int call) {
      TokenRun run;
      run.parent = parent;
      run.sampled = sampled;
      run.ids = std::move(tokens);
      run.logprobs.assign(run.ids.size(), 0);
      run.version.step = version;
      run.call = call;
      run.inv_temperature = sampled ? 1.25f : 1.0f;
      for (size_t k = 0; sampled && rollout % 2 == 1 && k < run.ids.size(); ++k) {
        std::vector<int32_t> set;
        const double share = k % 3 * 0.3;  // of some nothing was cut
        for (int32_t id = 0; id < kVocab; ++id) {
          if (share == 0 || id == run.ids[k] || rng.Chance(share)) set.push_back(id);
        }
        run.kept.push_back(engine::EncodeKept(set, kVocab));
      }
      r.runs.push_back(run);
    };
    Rng prompt(static_cast<uint64_t>(group) * 7919 + 1);
    std::vector<int32_t> start;
    for (int k = 0; k < prompt_tokens; ++k) start.push_back(static_cast<int32_t>(prompt.Below(kVocab)));
    add(-1, false, start, 0);
    add(0, true, ids(5), 0);
    add(1, false, ids(3), 1);
    add(2, true, ids(4), 1);
    if (rng.Chance(0.3)) add(0, true, ids(6), 2);  // a branch of its own
    Group g;
    g.rollouts = {r};
    const Batch batch = BuildBatch({g}, {}).value();
    const auto logprobs = pass_.Forward(sink_.weights, batch.chunks[0].tree).value();
    v1::Trajectory wire;
    wire.set_session(std::to_string(group) + "." + std::to_string(rollout) + ".1");
    wire.set_group(group);
    wire.set_rollout(rollout);
    wire.set_outcome("scored");
    wire.set_reward(silent_every > 0 && group % silent_every == 0 ? 1 : rng.Chance(0.5));
    size_t k = 0;
    for (size_t i = 0; i < r.runs.size(); ++i) {
      v1::TokenRun* run = wire.add_runs();
      run->set_id(static_cast<int32_t>(i));
      run->set_parent(r.runs[i].parent);
      run->set_call(r.runs[i].call);
      run->set_trainable(true);
      run->set_inv_temperature(r.runs[i].inv_temperature);
      for (int32_t id : r.runs[i].ids) run->add_ids(static_cast<uint32_t>(id));
      if (!r.runs[i].sampled) continue;
      run->set_provenance(v1::SAMPLED);
      run->mutable_version()->set_step(version);
      for (const std::string& set : r.runs[i].kept) run->add_kept(set);
      for (size_t n = 0; n < r.runs[i].ids.size(); ++n) run->add_logprobs(logprobs[batch.samples[0][0][k++].node]);
    }
    return wire.SerializeAsString();
  }

  std::vector<datapool::LeasedGroup> Sample(int64_t batch) {
    std::vector<datapool::LeasedGroup> groups;
    for (int64_t g = 3 * batch + 2; g >= 3 * batch; --g) {
      datapool::LeasedGroup group;
      group.group = g;
      group.version_admitted = batch - (admitted_early ? std::min<int64_t>(batch, g % 3) : 0);
      for (int32_t i = 0; i < group_size; ++i) {
        group.rollouts.push_back(i);
        group.members.push_back(Trajectory(Rng(99).Fork("rollout", static_cast<uint64_t>(g * 16 + i)), g, i, batch - age));
      }
      groups.push_back(std::move(group));
    }
    return groups;
  }

  std::string run_dir;
  int64_t attached = -1, stop_at = -1, exhausted_at = -1;
  int64_t committed = 0;  // older checkpoints are refused
  bool admitted_early = false;
  int64_t silent_every = 0;  // groups with such a number have equal rewards
  int64_t age = 0;  // of the versions that sampled tokens claim, in updates
  int away = 0;     // calls that find no pool
  int32_t group_size = 4;
  int prompt_tokens = 12;
  bool repeat = false;  // every batch is the first one again: from the second step on off policy
  std::vector<int64_t> updates, commits;
  std::vector<int64_t> paused_updates;  // updates while nothing may be admitted
  bool paused = false;

 private:
  engine::TrainPass pass_;
  Sink& sink_;
  Store& store_;
};

// A batch as the trainer reads it.
inline std::vector<Group> GroupsOf(const std::vector<datapool::LeasedGroup>& batch) {
  std::vector<Group> groups;
  for (const datapool::LeasedGroup& leased : batch) {
    Group& group = groups.emplace_back();
    group.group = leased.group;
    for (size_t i = 0; i < leased.members.size(); ++i) {
      group.rollouts.push_back(ParseTrajectory(leased.members[i], kVocab).value());
      group.rollouts.back().rollout = leased.rollouts[i];
    }
  }
  return groups;
}

inline std::string Scratch(const std::string& name) { return ScratchFolder("loop_" + name); }

inline text::TextFiles SomeText() {
  text::TextFiles files;
  files.tokenizer_json = R"({"version":"1.0","model":{"type":"BPE","vocab":{},"merges":[]}})";
  return files;
}

inline TrainerOptions Options(const std::string& run_dir, engine::Profile profile) {
  TrainerOptions o;
  o.run_dir = run_dir;
  o.incarnation = "test";
  o.profile = profile;
  o.algorithm = ParseAlgorithm(ParseJson(R"({"recipe":"cispo","dynamic_sampling":"off"})").value()).value();
  o.optimizer.lr = 1e-2;
  o.steps = 6;
  o.checkpoint_every = 2;
  o.memory_bytes = 256 << 20;
  o.evaluate = false;
  return o;
}

// A model of the same tokens as the policy, on disk.
inline std::string OtherModel(uint64_t seed) {
  const std::string path = Scratch("model_" + std::to_string(seed));
  EXPECT_TRUE(engine::SaveHuggingFace(path, Tiny(), engine::InitParameters(Tiny(), seed), SomeText(), engine::FileType::kF32).ok());
  return path;
}

// Two ends of a stream: a pair of sockets, or a connection over TCP.
inline std::pair<Fd, Fd> StreamPair(bool tcp = false) {
  int fds[2];
  if (!tcp) {
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    return {Fd(fds[0]), Fd(fds[1])};
  }
  const Fd listening(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  EXPECT_EQ(bind(listening.get(), reinterpret_cast<sockaddr*>(&address), size), 0);
  EXPECT_EQ(listen(listening.get(), 1), 0);
  EXPECT_EQ(getsockname(listening.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
  Fd there(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(connect(there.get(), reinterpret_cast<sockaddr*>(&address), size), 0);
  return {Fd(accept(listening.get(), nullptr, nullptr)), std::move(there)};
}

// A link's name as the job gives it.
inline Link LinkTo(int rank, Fd socket) { return socket.valid() ? Link(std::move(socket), fmt::format("trainer rank {}", rank)) : Link(); }

// The sockets of a trainer of `size` ranks: by rank, to rank 0 (control; not at rank 0), to the rank before and to the one behind.
struct RankSockets {
  explicit RankSockets(int size, bool tcp = false) : ends(static_cast<size_t>(size)) {
    for (size_t rank = 1; rank < ends.size(); ++rank) {
      std::pair<Fd, Fd> to = StreamPair(tcp), chain = StreamPair(tcp);
      control.push_back(LinkTo(static_cast<int>(rank), std::move(to.first)));
      ends[rank].control = LinkTo(0, std::move(to.second));
      ends[rank - 1].next = LinkTo(static_cast<int>(rank), std::move(chain.first));
      ends[rank].previous = LinkTo(static_cast<int>(rank) - 1, std::move(chain.second));
    }
  }
  struct End {
    Link control, previous, next;
  };
  std::vector<Link> control;  // of rank 0
  std::vector<End> ends;
  std::unique_ptr<Collective> ChainOf(int rank) {
    return MakeChain(std::move(ends[static_cast<size_t>(rank)].previous), std::move(ends[static_cast<size_t>(rank)].next));
  }
};

// Ranks above 0 as threads with engines of their own.
class RankThreads {
 public:
  explicit RankThreads(int size, bool tcp = false) : sockets_(size, tcp) {
    links.collective = sockets_.ChainOf(0);
    links.control = std::move(sockets_.control);
    for (int rank = 1; rank < size; ++rank) {
      threads_.emplace_back([this, rank] {
        const auto engine = engine::Engine::Create({.threads = 1 + rank}).value();
        const std::unique_ptr<Collective> chain = sockets_.ChainOf(rank);
        const Status served = ServeRank(*engine, std::move(sockets_.ends[static_cast<size_t>(rank)].control), *chain);
        EXPECT_TRUE(served.ok()) << served.ToString();
      });
    }
  }
  ~RankThreads() {
    for (Link& link : links.control) link.Close();
    for (std::thread& thread : threads_) thread.join();
  }
  RankLinks links;

 private:
  RankSockets sockets_;
  std::vector<std::thread> threads_;
};

// One run of the loop against a pool of its own; what outlives it is in `store` and the run folder.
struct World {
  explicit World(engine::Profile p) : profile(p), engine(engine::Engine::Create({.threads = 2}).value()), sink(p), pool(*engine, sink, store) {}
  Status Run(const TrainerOptions& options, Evaluator evaluator = {}, SftSource sft = {}, ProbeSource probe = {}) {
    sink.published.clear();
    pool.run_dir = options.run_dir;
    return RunTraining(options, engine::InitParameters(Tiny(), 3), SomeText(),
                       {*engine, pool, sink, metrics, SystemClock::Get(), std::move(evaluator), std::move(sft), std::move(probe), stopped, ranks});
  }
  engine::Profile profile;
  std::unique_ptr<engine::Engine> engine;
  Store store;
  Sink sink;
  ScriptedPool pool;
  Metrics metrics;
  std::atomic<bool> stopped{false};
  RankLinks* ranks = nullptr;
};

}  // namespace temper::trainer
