#include "trainer/bench/tree_bench.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <stdlib.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <memory>
#include <thread>
#include <utility>

#include "common/check.h"
#include "common/file.h"
#include "engine/files/model_file.h"
#include "engine/train_pass.h"
#include "engine/weights.h"
#include "trainer/batch.h"
#include "trainer/bench/engine_bench.h"
#include "trainer/bench/peer.h"
#include "trainer/bench/tree_sets.h"

namespace temper::trainer::bench {
namespace {

using engine::ComputeWeights;
using engine::PassTime;
using engine::PassWork;
using engine::TrainPass;

constexpr double kShareOfPrediction = 0.9;  // of the predicted speed-up is to be reached
constexpr double kNothingToShare = 0.97;    // and where nothing is shared, so much of flat
constexpr double kNear = 1.15;              // how far a time may be from its prediction

std::vector<double> Rates(double work, const std::vector<double>& seconds) {
  std::vector<double> out;
  for (const double s : seconds) out.push_back(work / s);
  return out;
}

double Pairs(const engine::TreeBatch& tree) {
  double pairs = 0;
  for (const int32_t pos : tree.pos) pairs += pos + 1;
  return pairs;
}

class TreeBench {
 public:
  TreeBench(engine::Engine& engine, const TreeOptions& options, const std::function<void(const Row&, const std::optional<Sharing>&)>& emit)
      : engine_(engine), options_(options), emit_(emit), tree_pass_(engine), flat_pass_(engine), gauge_pass_(engine) {}
  ~TreeBench() {
    peers_.clear();
    if (!folder_.empty()) (void)RemoveAll(folder_);
  }

  Status Run() {
    RETURN_IF_ERROR(LoadWeights());
    Calibrate();
    if (!options_.rows.empty()) return Rows();
    std::vector<std::string> names = options_.sets;
    if (names.empty()) {
      names = TreeSetNames();
      names.push_back("budget");
    }
    for (const std::string& name : names) {
      RETURN_IF_ERROR(name == "budget" ? Budgets() : Set(MakeTreeSet(name, config().vocab)));
    }
    return missing_;
  }

 private:
  // A batch laid out, its coefficients, and what computing it is expected to take.
  struct Laid {
    const TreeSet* set = nullptr;
    BatchOptions options;
    Batch batch;
    std::vector<std::vector<float>> coef;
    double seconds = 0;  // predicted
  };
  const engine::ModelConfig& config() const { return weights_.config(); }

  Status LoadWeights() {
    engine::Parameters params;
    if (options_.model.empty()) {
      params = engine::InitParameters(BenchModel(options_.layers), 1);
      model_name_ = "SmolLM2-135M" + (options_.layers ? fmt::format(", {} layers", options_.layers) : "");
    } else {
      ASSIGN_OR_RETURN(engine::ModelFile file, engine::LoadModel(options_.model));
      params = std::move(file.params);
      model_name_ = std::filesystem::path(options_.model).filename().string();
    }
    weights_ = ComputeWeights::FromParameters(params, options_.profile);
    grads_ = std::move(params);
    return Status::Ok();
  }

  PassTime Time(TrainPass& pass, const engine::TreeBatch& tree, const engine::ForwardOptions& options, std::span<const float> coef) {
    PassTime t{.work = TrainPass::CountWork(config(), tree, options)};
    const double begin = Now(options_.clock);
    const auto logprobs = pass.Forward(weights_, tree, options);
    TEMPER_CHECK(logprobs.ok()) << logprobs.status().ToString();
    const double middle = Now(options_.clock);
    t.forward_s = middle - begin;
    if (!options.keep) return t;
    pass.Backward(coef, grads_);
    t.backward_s = Now(options_.clock) - middle;
    return t;
  }

  // Flat rows of such shapes tell a row's time from a pair's, a row of the head's and what comes once a pass.
  void Calibrate() {
    struct Shape {
      int rows, length, wanted;
    };
    std::vector<PassTime> times;
    TrainPass pass(engine_);
    for (Shape shape : {Shape{6, 64, 63}, Shape{6, 64, 4}, Shape{1, 1024, 16}, Shape{1, 384, 192}, Shape{1, 48, 16}}) {
      shape.length = std::min(shape.length, config().max_positions);
      engine::TreeBuilder builder(/*merge=*/false);
      const float one = 1;
      for (int r = 0; r < shape.rows; ++r) {
        std::vector<int32_t> ids(static_cast<size_t>(shape.length));
        for (int i = 0; i < shape.length; ++i) ids[static_cast<size_t>(i)] = (i * 7919 + r * 104729 + 3) % config().vocab;
        builder.AddRow(ids, std::span(&one, 1));
      }
      const engine::TreeBatch tree = builder.Build(nullptr);
      std::vector<uint8_t> wanted(static_cast<size_t>(tree.size()), 0);
      for (int v = 0; v < tree.size(); ++v) wanted[static_cast<size_t>(v)] = v % shape.length >= shape.length - shape.wanted;
      const std::vector<float> coef(wanted.begin(), wanted.end());
      engine::ForwardOptions options;
      options.wanted = wanted;
      PassTime best;
      std::vector<double> forward, backward;
      Time(pass, tree, options, coef);
      for (int i = 0; i < 3; ++i) {
        best = Time(pass, tree, options, coef);
        forward.push_back(best.forward_s);
        backward.push_back(best.backward_s);
      }
      best.forward_s = Median(forward);
      best.backward_s = Median(backward);
      times.push_back(best);
      if (times.size() == 1) gauge_ = {.tree = tree, .wanted = wanted, .coef = coef, .seconds = best.forward_s + best.backward_s};
    }
    rates_ = engine::FitRates(times);
    Row row{.work = "rates", .name = model_name_, .ours = 1 / (rates_.row + rates_.backward_row), .unit = "tokens/s"};
    row.reference = fmt::format("forward {:.4g} us a token, {:.3g} ns a pair, {:.4g} us a row of the head; backward {:.4g}, {:.3g}, {:.4g}; {:.3g} ms a pass",
                                rates_.row * 1e6, rates_.pair * 1e9, rates_.head_row * 1e6, rates_.backward_row * 1e6, rates_.backward_pair * 1e9,
                                rates_.backward_head_row * 1e6, rates_.chunk * 1e3);
    row.samples = {row.ours};
    emit_(row, std::nullopt);
  }

  // How slow the machine is now beside what it was when the rates were measured: what is predicted is predicted of now.
  double Slowness() {
    engine::ForwardOptions options;
    options.wanted = gauge_.wanted;
    const PassTime t = Time(gauge_pass_, gauge_.tree, options, gauge_.coef);
    return (t.forward_s + t.backward_s) / gauge_.seconds;
  }

  Laid Lay(const TreeSet& set, bool merge) const {
    Laid laid{.set = &set, .options = {.merge = merge, .silent = set.silent}, .batch = {}, .coef = {}};
    Result<Batch> batch = BuildBatch(set.groups, laid.options);
    TEMPER_CHECK(batch.ok()) << batch.status().ToString();
    laid.batch = *std::move(batch);
    for (const BatchChunk& chunk : laid.batch.chunks) {
      laid.coef.emplace_back(chunk.wanted.begin(), chunk.wanted.end());
      const PassWork work = TrainPass::CountWork(config(), chunk.tree, Wanting(chunk));
      laid.seconds += engine::ForwardSeconds(work, rates_) + engine::BackwardSeconds(work, rates_);
    }
    return laid;
  }

  // Seconds of laying the rollouts out and of both passes (of silent groups the first alone).
  double Step(TrainPass& pass, const Laid& laid) {
    std::vector<Group> copy = laid.set->groups;
    const double begin = Now(options_.clock);
    const Result<Batch> batch = BuildBatch(std::move(copy), laid.options);
    TEMPER_CHECK(batch.ok()) << batch.status().ToString();
    double seconds = Now(options_.clock) - begin;
    for (size_t c = 0; c < batch->chunks.size(); ++c) {
      const PassTime t = Time(pass, batch->chunks[c].tree, Wanting(batch->chunks[c]), laid.coef[c]);
      seconds += t.forward_s + t.backward_s;
    }
    return seconds;
  }

  size_t FreshBytes(const Laid& laid) {
    TrainPass pass(engine_);
    Step(pass, laid);
    return pass.bytes();
  }

  Sharing SharingOf(const Laid& tree, const Laid& flat) const {
    Sharing s{.logical_tokens = flat.batch.tree_tokens, .tree_tokens = tree.batch.tree_tokens};
    for (const BatchChunk& chunk : flat.batch.chunks) {
      s.logical_pairs += Pairs(chunk.tree);
      if (chunk.silent) s.silent_tokens += chunk.tree.logical_tokens;
    }
    for (const BatchChunk& chunk : tree.batch.chunks) s.tree_pairs += Pairs(chunk.tree);
    s.predicted = flat.seconds / tree.seconds;
    return s;
  }

  Row SpeedUp(const std::string& about, bool shares, const std::vector<double>& tree, const std::vector<double>& flat, const Sharing& s) const {
    Row row = Beside("tree", about, "tokens/s", "our rows", tree, flat);
    row.target = shares ? kShareOfPrediction * s.predicted : kNothingToShare;
    return row;
  }

  Row OfPrediction(const std::string& name, const std::vector<double>& seconds, const std::vector<double>& predicted) const {
    Row row = Beside("time", name, "s", "predicted", seconds, predicted);
    row.target = kNear;
    return row;
  }

  Status Set(const TreeSet& set) {
    const Laid tree = Lay(set, /*merge=*/true), flat = Lay(set, /*merge=*/false);
    const Sharing sharing = SharingOf(tree, flat);
    const double tokens = static_cast<double>(sharing.logical_tokens);
    std::vector<double> tree_s, flat_s, tree_expected, flat_expected;
    for (int i = -1; i < options_.samples; ++i) {  // the first of each warms up
      const double slowness = Slowness();
      const double a = Step(tree_pass_, tree), b = Step(flat_pass_, flat);
      if (i < 0) continue;
      tree_s.push_back(a);
      flat_s.push_back(b);
      tree_expected.push_back(slowness * tree.seconds);
      flat_expected.push_back(slowness * flat.seconds);
    }
    emit_(SpeedUp(set.about, set.shares, Rates(tokens, tree_s), Rates(tokens, flat_s), sharing), sharing);
    emit_(OfPrediction(set.about + ", tree", tree_s, tree_expected), std::nullopt);
    emit_(OfPrediction(set.about + ", rows", flat_s, flat_expected), std::nullopt);
    const double mib = 1 << 20;
    emit_(Beside("memory", set.about, "MiB", "our rows", {static_cast<double>(FreshBytes(tree)) / mib},
                 {static_cast<double>(FreshBytes(flat)) / mib}),
          std::nullopt);
    if (options_.torch) {
      for (const std::string& mode : options_.modes) RETURN_IF_ERROR(AgainstTorch(set, tree, flat, mode));
    }
    return Status::Ok();
  }

  // The job's own steps: one a sample, evenly spaced.
  Status Rows() {
    ASSIGN_OR_RETURN(const std::vector<TreeSet> steps, TreeSetsOfRows(options_.rows, config().vocab));
    const size_t count = std::min(steps.size(), static_cast<size_t>(options_.samples));
    Sharing sum;
    std::vector<double> tree_rates, flat_rates, tree_s, flat_s, tree_expected, flat_expected;
    double tree_all = 0, flat_all = 0;
    for (size_t i = 0; i < count; ++i) {
      const TreeSet& set = steps[i * steps.size() / count];
      const Laid tree = Lay(set, /*merge=*/true), flat = Lay(set, /*merge=*/false);
      const Sharing s = SharingOf(tree, flat);
      sum.logical_tokens += s.logical_tokens;
      sum.tree_tokens += s.tree_tokens;
      sum.silent_tokens += s.silent_tokens;
      sum.logical_pairs += s.logical_pairs;
      sum.tree_pairs += s.tree_pairs;
      tree_all += tree.seconds;
      flat_all += flat.seconds;
      if (i == 0) {
        Step(tree_pass_, tree);
        Step(flat_pass_, flat);
      }
      const double slowness = Slowness();
      tree_s.push_back(Step(tree_pass_, tree));
      flat_s.push_back(Step(flat_pass_, flat));
      tree_rates.push_back(static_cast<double>(s.logical_tokens) / tree_s.back());
      flat_rates.push_back(static_cast<double>(s.logical_tokens) / flat_s.back());
      tree_expected.push_back(slowness * tree.seconds);
      flat_expected.push_back(slowness * flat.seconds);
    }
    sum.predicted = flat_all / tree_all;
    const std::string about = fmt::format("{} of {} steps of {}", count, steps.size(), std::filesystem::path(options_.rows).filename().string());
    emit_(SpeedUp(about, true, tree_rates, flat_rates, sum), sum);
    emit_(OfPrediction(about + ", tree", tree_s, tree_expected), std::nullopt);
    emit_(OfPrediction(about + ", rows", flat_s, flat_expected), std::nullopt);
    return Status::Ok();
  }

  // One tree computed in less and less memory, as the trainer would choose.
  Status Budgets() {
    const TreeSet set = MakeTreeSet("grpo_long", config().vocab);
    const Laid whole = Lay(set, /*merge=*/true);
    const BatchChunk& chunk = whole.batch.chunks[0];
    const size_t all = engine::ChoosePass(config(), options_.profile, chunk.tree, chunk.wanted, SIZE_MAX).bytes;
    for (const double share : {1.0, 0.8, 0.6, 0.4, 0.2}) {
      const auto bytes = static_cast<size_t>(share * static_cast<double>(all));
      const engine::PassChoice choice = engine::ChoosePass(config(), options_.profile, chunk.tree, chunk.wanted, bytes);
      engine::ForwardOptions options = Wanting(chunk);
      options.chunk_nodes = choice.chunk_nodes;
      options.recompute = choice.recompute;
      TrainPass pass(engine_);
      std::vector<double> seconds, expected;
      for (int i = -1; i < options_.samples; ++i) {
        const double slowness = Slowness();
        const PassTime t = Time(pass, chunk.tree, options, whole.coef[0]);
        if (i < 0) continue;
        seconds.push_back(t.forward_s + t.backward_s);
        expected.push_back(slowness * (engine::ForwardSeconds(t.work, rates_) + engine::BackwardSeconds(t.work, rates_)));
      }
      std::string way = choice.chunk_nodes ? fmt::format("chunks of {}", choice.chunk_nodes) : "whole";
      if (choice.recompute) way += ", layers again";
      const std::string name = fmt::format("{}, in {:.0f} MiB: {}", set.about, static_cast<double>(bytes) / (1 << 20), way);
      emit_(OfPrediction(name, seconds, expected), std::nullopt);
      const double mib = 1 << 20;
      emit_(Beside("memory", name, "MiB", "planned", {static_cast<double>(pass.bytes()) / mib},
                   {static_cast<double>(TrainPass::PlannedBytes(config(), options_.profile, engine_.threads().count(), chunk.tree, options)) / mib}),
            std::nullopt);
    }
    return Status::Ok();
  }

  // Separate rows in PyTorch: the engine's ratio, and the whole one.
  Status AgainstTorch(const TreeSet& set, const Laid& tree, const Laid& flat, const std::string& mode) {
    std::vector<int> lengths, wanted;
    for (const BatchChunk& chunk : flat.batch.chunks) {
      for (int v = 0; v < chunk.tree.size(); ++v) {
        if (chunk.tree.parent[v] < 0) {
          lengths.push_back(0);
          wanted.push_back(0);
        }
        ++lengths.back();
        wanted.back() += chunk.wanted[v];
      }
    }
    const double tokens = static_cast<double>(flat.batch.tree_tokens);
    std::vector<double> ours_tree, ours_flat, theirs;
    std::string about;
    double their_bytes = 0;
    const auto measure = [&]() -> Status {
      ASSIGN_OR_RETURN(Peer * peer, Torch(mode));
      about = peer->version() + ", " + peer->runs_on();
      const std::string request = fmt::format(R"({{"work":"gradient","model":"{}","mode":"{}","lengths":[{}],"wanted":[{}]}})", folder_, mode,
                                              fmt::join(lengths, ","), fmt::join(wanted, ","));
      for (int i = -1; i < options_.samples; ++i) {
        const double a = Step(tree_pass_, tree), b = Step(flat_pass_, flat);
        ASSIGN_OR_RETURN(const Peer::Answer answer, peer->Ask(request));
        std::this_thread::sleep_for(std::chrono::milliseconds(10));  // its threads look for more work for a while
        if (i < 0) continue;
        ours_tree.push_back(tokens / a);
        ours_flat.push_back(tokens / b);
        theirs.push_back(tokens / answer.seconds);
        their_bytes = std::max(their_bytes, static_cast<double>(answer.peak_bytes));
      }
      return Status::Ok();
    };
    const Status status = measure();
    const std::string name = "torch " + mode + ", rows";
    if (!status.ok()) {
      Row row{.work = "tree", .name = set.about, .unit = "tokens/s", .reference = name, .peer = about, .note = "not run: " + status.message()};
      emit_(row, std::nullopt);
      if (missing_.ok()) missing_ = FailedPrecondition(name + ": not run: " + status.message());
      return Status::Ok();
    }
    for (const bool merged : {false, true}) {
      Row row = Beside("tree", set.about + (merged ? "" : ", our rows"), "tokens/s", name, merged ? ours_tree : ours_flat, theirs);
      row.peer = about;
      emit_(row, std::nullopt);
    }
    return Status::Ok();
  }

  Result<Peer*> Torch(const std::string& mode) {
    const auto found = peers_.find(mode);
    if (found != peers_.end()) return found->second.get();
    if (folder_.empty()) {
      std::string name = (std::filesystem::temp_directory_path() / "temper-bench-XXXXXX").string();
      if (!mkdtemp(name.data())) return ErrnoStatus("mkdtemp " + name, errno);
      folder_ = name;
      engine::Parameters params;
      if (options_.model.empty()) {
        params = engine::InitParameters(BenchModel(options_.layers), 1);
      } else {
        ASSIGN_OR_RETURN(engine::ModelFile file, engine::LoadModel(options_.model));
        params = std::move(file.params);
      }
      RETURN_IF_ERROR(engine::SaveHuggingFace(folder_, config(), params, {}, engine::FileType::kBF16));
    }
    if (options_.interpreter.find('/') != std::string::npos && !Exists(options_.interpreter))
      return FailedPrecondition("peer torch: there is no " + options_.interpreter + " (tests/setup_peers.sh makes it)");
    ASSIGN_OR_RETURN(auto peer, Peer::Start({.program = options_.interpreter,
                                             .script = options_.peer_script,
                                             .name = "torch",
                                             .threads = engine_.threads().count(),
                                             .cap = options_.best_peers ? "best" : engine::CpuPathName(engine_.path()),
                                             .clock = options_.clock == Clock::kCpu ? "cpu" : "wall"}));
    // It computes our model.
    const std::vector<int32_t> ids = CheckRow(config().vocab);
    engine::TreeBuilder builder;
    const float one = 1;
    builder.AddRow(ids, std::span(&one, 1));
    const engine::TreeBatch tree = builder.Build(nullptr);
    ASSIGN_OR_RETURN(const auto ours, tree_pass_.Forward(weights_, tree));
    RETURN_IF_ERROR(CheckPeer(*peer, folder_, ids, ours, mode == "bfloat16" ? mode : "float32"));
    return peers_.emplace(mode, std::move(peer)).first->second.get();
  }

  engine::Engine& engine_;
  const TreeOptions& options_;
  const std::function<void(const Row&, const std::optional<Sharing>&)>& emit_;
  ComputeWeights weights_;
  engine::Gradients grads_;
  TrainPass tree_pass_, flat_pass_, gauge_pass_;
  struct {
    engine::TreeBatch tree;
    std::vector<uint8_t> wanted;
    std::vector<float> coef;
    double seconds = 0;
  } gauge_;  // the first of the batches that the rates are of
  engine::PassRates rates_;
  std::string model_name_, folder_;  // the folder: a Hugging Face one that a peer reads
  std::map<std::string, std::unique_ptr<Peer>> peers_;  // by mode
  Status missing_ = Status::Ok();
};

}  // namespace

Status RunTreeBench(engine::Engine& engine, const TreeOptions& options,
                    const std::function<void(const Row&, const std::optional<Sharing>&)>& emit) {
  TreeBench bench(engine, options, emit);
  return bench.Run();
}

}  // namespace temper::trainer::bench
