#include "trainer/bench/engine_bench.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <stdlib.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <memory>
#include <optional>
#include <random>
#include <thread>
#include <utility>

#include "common/check.h"
#include "common/file.h"
#include "common/process.h"
#include "engine/bf16.h"
#include "engine/buffer.h"
#include "engine/cpu/ops.h"
#include "engine/files/model_file.h"
#include "engine/forward.h"
#include "engine/kv_pool.h"
#include "engine/paged_forward.h"
#include "engine/train_pass.h"
#include "engine/weights.h"
#include "trainer/adamw.h"
#include "trainer/bench/floors.h"
#include "trainer/bench/peer.h"
#include "trainer/bench/roofline.h"

namespace temper::trainer::bench {
namespace {

using engine::Buffer;
using engine::ComputeWeights;
using engine::kPagePositions;
using engine::KvPool;
using engine::ModelConfig;
using engine::PagedForward;
using engine::PagedSequence;
using engine::Profile;

constexpr char kLoop[] = "a loop of the same bytes and arithmetic";

// Numbers that are no denormals and stay moderate.
void Fill(std::byte* to, size_t count, Profile profile, uint64_t seed) {
  std::mt19937_64 rng(seed);
  for (size_t i = 0; i < count; ++i) {
    const float x = static_cast<float>(static_cast<int>(rng() % 2001) - 1000) / 1000;
    if (profile == Profile::kBf16) {
      reinterpret_cast<uint16_t*>(to)[i] = engine::ToBf16(x);
    } else {
      reinterpret_cast<float*>(to)[i] = x;
    }
  }
}

// As its config.json has it.
ModelConfig SmolLm2Config() {
  ModelConfig c;
  c.vocab = 49152;
  c.layers = 30;
  c.width = 576;
  c.heads = 9;
  c.kv_heads = 3;
  c.head_dim = 64;
  c.ffn = 1536;
  c.max_positions = 32768;  // the model's own is 8192; `growth` goes on
  c.rope_theta = 100000;
  return c;
}

// The modes in which a peer does a work, none where it does not.
std::vector<std::string> ModesOf(const std::string& peer, const std::string& work) {
  if (work == "step") {
    if (peer != "torch") return {};
    return {"float32", "autocast", "bfloat16", "compiled float32", "compiled autocast", "compiled bfloat16"};
  }
  if (work == "gemm") {
    if (peer != "torch") return {};
    return {"float32", "bfloat16", "oneDNN float32", "OpenBLAS float32"};
  }
  if (peer == "llama.cpp") return {"float32", "float16", "bfloat16"};
  return {"float32", "bfloat16"};
}

class Bench {
 public:
  Bench(engine::Engine& engine, const Options& options, const std::function<void(const Row&)>& emit)
      : engine_(engine), options_(options), emit_(emit) {}
  ~Bench() {
    peers_.clear();
    if (!folder_.empty()) (void)RemoveAll(folder_);
  }

  Status Gemm();
  Status Decode();
  Status Prefill();
  Status Attention();
  Status Step();
  Status Growth();
  // Ok, or the first peer that had no figure.
  const Status& missing() const { return missing_; }

 private:
  static constexpr size_t kColdBytes = size_t{160} << 20;  // several times any last-level cache we know of a few cores' share

  // A work of a case that peers do too.
  struct Contest {
    std::string work, name, unit;
    double work_done = 0;  // of one call, in the unit
    std::string request;   // without its mode: members of a JSON object
    int batch = 0;
    double target = 0;     // the ratio to the best of the peers
  };
  // A mode of a peer beside ours.
  struct Entry {
    Row row;
    std::string peer, mode;
    double our_bytes = 0, their_bytes = 0;  // the most memory of a `step`
  };
  // Samples of `ours` (seconds each) beside those of the peers in each of their modes, in turn, the rows they make, and one of the best.
  // The most memory of ours and of that best (`step`) makes another. Returns that best, or if none counts the fastest that has a figure.
  std::optional<Entry> AgainstPeers(const Contest& contest, const std::function<double()>& ours);
  Entry BesideMode(const Contest& contest, const std::string& peer, const std::string& mode, int samples, const std::function<double()>& ours);
  void EmitMemory(const Entry& best);
  // The peer, started and known to compute our model; a failure is the same at every call.
  Result<Peer*> PeerFor(const std::string& name, const std::string& mode, bool with_model);
  Status CheckModel(Peer& peer, const std::string& mode);
  // What a peer should reach on this machine as it is now; 0: not known.
  double Expected(const Contest& contest, const std::string& peer);
  // A Hugging Face folder of the model that every side reads.
  Result<std::string> Folder();

  template <typename Body>
  double Seconds(const Body& body) const {
    const double begin = Now(options_.clock);
    body();
    return Now(options_.clock) - begin;
  }

  // Memory that no cache holds, in elements of the profile.
  const std::byte* Cold() {
    if (cold_.bytes() == 0) {
      cold_.Get<std::byte>(kColdBytes);
      Fill(cold_.as<std::byte>(), kColdBytes / engine_.ops(options_.profile).element_bytes, options_.profile, 1);
    }
    return cold_.as<std::byte>();
  }

  // Seconds of [m][k] times cold [k][n] as a pass of the engine computes it, at each call.
  std::function<double()> Product(int m, int n, int k) {
    struct State {
      explicit State(engine::Engine& engine) : pass(engine) {}
      engine::ForwardPass pass;
      Buffer a, c;
      size_t turn = 0;
    };
    const engine::cpu::Ops& ops = engine_.ops(options_.profile);
    const size_t row_bytes = static_cast<size_t>(k) * ops.element_bytes, bytes = row_bytes * n;
    auto state = std::make_shared<State>(engine_);
    Fill(state->a.Get<std::byte>(row_bytes * m), static_cast<size_t>(m) * k, options_.profile, 2);
    state->c.Get<float>(static_cast<size_t>(m) * n);
    Cold();
    return [=, this, &ops] {
      engine::cpu::Gemm g;
      g.a = state->a.as<std::byte>();
      g.a_stride = g.k = k;
      g.b = cold_.as<std::byte>() + state->turn++ % std::max<size_t>(1, kColdBytes / bytes) * bytes;
      g.m = m;
      g.n = g.c_stride = n;
      g.c = state->c.as<float>();
      const int threads = engine_.threads().count();
      if (m < ops.split_rows * threads) return Seconds([&] { state->pass.RunGemm(ops, g, threads > 1); });
      const engine::RowBlocks blocks(m, threads);
      return Seconds([&] {
        engine_.threads().Run(blocks.count(), [&](int i, int) {
          const int begin = blocks.begin(i);
          engine::cpu::Gemm mine = g;
          mine.a = state->a.as<std::byte>() + static_cast<size_t>(begin) * row_bytes;
          mine.c = g.c + static_cast<size_t>(begin) * n;
          mine.m = blocks.begin(i + 1) - begin;
          ops.gemm(mine);
        });
      });
    };
  }

  // The folder's weights in fp32, and as the forward reads them.
  Result<engine::Parameters> SmolParameters() {
    ASSIGN_OR_RETURN(const std::string folder, Folder());
    ASSIGN_OR_RETURN(engine::ModelFile file, engine::LoadModel(folder));
    return std::move(file.params);
  }
  Result<const ComputeWeights*> SmolWeights() {
    if (weights_.empty()) {
      ASSIGN_OR_RETURN(const engine::Parameters params, SmolParameters());
      weights_ = ComputeWeights::FromParameters(params, options_.profile);
    }
    return &weights_;
  }
  bool Tiles() const { return engine_.path() == engine::CpuPath::kAmx; }
  ModelConfig Model() const { return BenchModel(options_.layers); }
  std::string ModelName() const {
    return options_.layers ? fmt::format("SmolLM2-135M, {} layers", options_.layers) : std::string("SmolLM2-135M");
  }

  engine::Engine& engine_;
  const Options& options_;
  const std::function<void(const Row&)>& emit_;
  std::map<std::pair<std::string, std::string>, Result<std::unique_ptr<Peer>>> peers_;  // by name and mode
  Status missing_ = Status::Ok();                                                     // the first peer that had no figure
  std::string folder_;
  std::vector<float> check_;  // our log-probabilities of CheckRow
  Buffer cold_;
  ComputeWeights weights_;
};

Result<std::string> Bench::Folder() {
  if (folder_.empty()) {
    std::string name = (std::filesystem::temp_directory_path() / "temper-bench-XXXXXX").string();
    if (!mkdtemp(name.data())) return ErrnoStatus("mkdtemp " + name, errno);
    folder_ = name;
    const ModelConfig c = Model();
    RETURN_IF_ERROR(engine::SaveHuggingFace(folder_, c, engine::InitParameters(c, 1), {}, engine::FileType::kBF16));
  }
  return folder_;
}

Result<Peer*> Bench::PeerFor(const std::string& name, const std::string& mode, bool with_model) {
  const auto key = std::make_pair(name, mode);
  auto found = peers_.find(key);
  if (found == peers_.end()) {
    const auto start = [&]() -> Result<std::unique_ptr<Peer>> {
      const auto interpreter = options_.interpreters.find(name);
      if (interpreter == options_.interpreters.end()) return FailedPrecondition("peer " + name + ": no interpreter is known");
      // One with a path is a file of an environment that tests/setup_peers.sh makes.
      if (interpreter->second.find('/') != std::string::npos && !Exists(interpreter->second))
        return FailedPrecondition("peer " + name + ": there is no " + interpreter->second + " (tests/setup_peers.sh makes it)");
      ASSIGN_OR_RETURN(auto peer, Peer::Start({.program = interpreter->second,
                                               .script = options_.peer_script,
                                               .name = name,
                                               .threads = engine_.threads().count(),
                                               .cap = options_.best_peers ? "best" : engine::CpuPathName(engine_.path()),
                                               .clock = options_.clock == Clock::kCpu ? "cpu" : "wall"}));
      if (with_model) RETURN_IF_ERROR(CheckModel(*peer, mode));
      return peer;
    };
    found = peers_.emplace(key, start()).first;
  }
  if (!found->second.ok()) return found->second.status();
  return found->second->get();
}

Status Bench::CheckModel(Peer& peer, const std::string& mode) {
  ASSIGN_OR_RETURN(const std::string folder, Folder());
  const std::vector<int32_t> ids = CheckRow(Model().vocab);
  if (check_.empty()) {
    ASSIGN_OR_RETURN(const engine::Parameters params, SmolParameters());
    engine::TreeBuilder builder;
    const float t = 1;
    builder.AddRow(ids, std::span(&t, 1));
    const engine::TreeBatch tree = builder.Build(nullptr);
    engine::TrainPass pass(engine_);
    const ComputeWeights weights = ComputeWeights::FromParameters(params, options_.profile);
    ASSIGN_OR_RETURN(const auto ours, pass.Forward(weights, tree));
    check_.assign(ours.begin(), ours.end());
  }
  const std::string dtype = mode.ends_with("float16") ? mode.substr(mode.rfind(' ') + 1) : "float32";
  return CheckPeer(peer, folder, ids, check_, dtype);
}

double Bench::Expected(const Contest& contest, const std::string& peer) {
  if (!options_.expected || contest.work == "gemm") return 0;
  return options_.expected(peer, contest.work, contest.batch,
                           {.read_bytes_s = ReadBandwidth(engine_, {Cold(), kColdBytes}, options_.clock),
                            .fma_flops_s = PeakFlops(engine_, options_.clock),
                            .tiles = Tiles()});
}

Bench::Entry Bench::BesideMode(const Contest& contest, const std::string& name, const std::string& mode, int samples,
                               const std::function<double()>& ours) {
  const bool step = contest.work == "step";
  std::vector<double> mine, theirs;
  Entry entry = {.row = {}, .peer = name, .mode = mode};
  const auto measure = [&]() -> Status {
    std::string request = fmt::format(R"({{"work":"{}",{},"{}":"{}")", contest.work, contest.request, step ? "mode" : "dtype", mode);
    if (contest.work != "gemm") {
      ASSIGN_OR_RETURN(const std::string folder, Folder());
      request += fmt::format(R"(,"model":"{}")", folder);
    }
    ASSIGN_OR_RETURN(Peer * peer, PeerFor(name, mode, contest.work != "gemm"));
    entry.row.peer = peer->version() + ", " + peer->runs_on();
    for (int i = -1; i < samples; ++i) {  // the first of each warms up
      if (step) RETURN_IF_ERROR(ForgetPeakRss());
      const double s = ours();
      if (step) entry.our_bytes = std::max(entry.our_bytes, static_cast<double>(PeakRssBytes()));
      ASSIGN_OR_RETURN(const Peer::Answer answer, peer->Ask(request + "}"));
      // Its threads look for more work for a while.
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      if (i < 0) continue;
      mine.push_back(contest.work_done / s);
      theirs.push_back(contest.work_done / answer.seconds);
      entry.their_bytes = std::max(entry.their_bytes, static_cast<double>(answer.peak_bytes));
    }
    return Status::Ok();
  };
  const Status status = measure();
  const std::string about = entry.row.peer;
  if (status.ok()) {
    entry.row = Beside(contest.work, contest.name, contest.unit, name + " " + mode, mine, theirs);
  } else {
    entry.row = {.work = contest.work, .name = contest.name, .unit = contest.unit, .reference = name + " " + mode};
    entry.row.note = "not run: " + status.message();
    if (missing_.ok()) missing_ = FailedPrecondition(contest.work + ", " + name + " " + mode + ": not run: " + status.message());
  }
  entry.row.peer = about;
  if (step) peers_.clear();  // one mode's memory is not another's
  return entry;
}

std::optional<Bench::Entry> Bench::AgainstPeers(const Contest& contest, const std::function<double()>& ours) {
  std::vector<Entry> entries;
  for (const std::string& name : options_.peers) {
    std::vector<Entry> of_peer;
    for (const std::string& mode : ModesOf(name, contest.work)) {
      if (!options_.modes.empty() && std::find(options_.modes.begin(), options_.modes.end(), mode) == options_.modes.end()) continue;
      of_peer.push_back(BesideMode(contest, name, mode, options_.samples, ours));
    }
    // What a peer reaches in its best mode says whether it is set up well.
    double reached = 0;
    for (const Entry& entry : of_peer) reached = std::max(reached, entry.row.theirs);
    const double expected = Expected(contest, name);
    for (Entry& entry : of_peer) {
      if (entry.row.note.empty() && reached < kWeakBelow * expected)
        entry.row.note = fmt::format("weak: it should reach {:.0f} tokens/s here", expected);
      emit_(entry.row);
      entries.push_back(std::move(entry));
    }
  }
  const Entry* best = nullptr;     // of those that count
  const Entry* fastest = nullptr;  // of all that have a figure: what is held does not depend on how fast it goes
  for (const Entry& entry : entries) {
    if (entry.row.theirs > 0 && (!fastest || entry.row.theirs > fastest->row.theirs)) fastest = &entry;
    if (entry.row.note.empty() && (!best || entry.row.theirs > best->row.theirs)) best = &entry;
  }
  if (best) {
    Row row = best->row;
    row.reference = "the best: " + row.reference;
    row.target = contest.target;
    emit_(row);
    fastest = best;
  }
  if (!fastest) return std::nullopt;
  if (contest.work == "step") EmitMemory(*fastest);
  return *fastest;
}

void Bench::EmitMemory(const Entry& best) {
  Row row = best.row;
  row.reference = "the best: " + row.reference;
  row.unit = "MiB";
  row.ours = best.our_bytes / (1 << 20);
  row.theirs = best.their_bytes / (1 << 20);
  row.ratio = row.ours / row.theirs;
  row.samples = {row.ours};
  row.target = 0.6;
  emit_(row);
}

Status Bench::Gemm() {
  struct Shape {
    const char* name;
    int n, k;
  };
  const size_t element_bytes = engine_.ops(options_.profile).element_bytes;
  for (const Shape& shape : {Shape{"SmolLM2-135M gate and up", 3072, 576}, Shape{"SmolLM2-135M down", 576, 1536},
                             Shape{"Qwen3-0.6B gate and up", 6144, 1024}, Shape{"Qwen3-0.6B down", 1024, 3072}}) {
    const size_t elements = static_cast<size_t>(shape.n) * shape.k, bytes = elements * element_bytes;
    for (int m : {1, 4, 8, 16, 32, 64, 256, 512}) {
      // Several in a row, as a pass computes them: one alone would begin with caches full of what others have read.
      const int repeats = m <= 64 ? 8 : 1;
      const auto ours = [&, product = Product(m, shape.n, shape.k)] {
        double seconds = 0;
        for (int i = 0; i < repeats; ++i) seconds += product();
        return seconds / repeats;
      };
      const double flops = 2.0 * m * static_cast<double>(elements);
      const std::string name = fmt::format("{}, {} x {} x {}", shape.name, m, shape.n, shape.k);
      std::vector<double> rates, floors, limits;
      bool memory = false;
      ours();
      for (int i = 0; i < options_.samples; ++i) {
        const double by_memory =
            static_cast<double>(bytes) / ReadBandwidth(engine_, {Cold(), kColdBytes}, options_.clock);
        const double by_arithmetic = flops / PeakFlops(engine_, options_.clock);
        memory = by_memory > by_arithmetic;
        floors.push_back(flops / std::max(by_memory, by_arithmetic) / 1e9);
        if (m <= 64) {
          const std::vector<Stretch> all = {{{cold_.as<std::byte>(), kColdBytes}, m}};
          limits.push_back(flops / (ReadAndMultiply(engine_, options_.profile, all, options_.clock) * bytes / kColdBytes) / 1e9);
        }
        rates.push_back(flops / ours() / 1e9);
      }
      emit_(Beside("gemm", name, "GFLOP/s", memory ? "read bandwidth, weights cold" : "peak of fp32 multiply-adds", rates,
                   floors));
      if (m <= 64) emit_(Beside("gemm", name, "GFLOP/s", kLoop, rates, limits));
      AgainstPeers({.work = "gemm",
                    .name = name,
                    .unit = "GFLOP/s",
                    .work_done = flops / 1e9,
                    .request = fmt::format(R"("m":{},"n":{},"k":{},"repeats":{})", m, shape.n, shape.k, repeats),
                    .target = m <= 64 ? 1.3 : 0},
                   ours);
    }
  }
  return Status::Ok();
}

// Multiply-adds of a forward pass over a token, times two; attention not counted.
double ForwardFlops(const ModelConfig& c, bool head) {
  const double layer = static_cast<double>(c.width) * (c.q_dim() * 2 + 2 * c.kv_dim() + 3.0 * c.ffn);
  return 2 * (c.layers * layer + (head ? static_cast<double>(c.width) * c.vocab : 0));
}

Status Bench::Decode() {
  constexpr int kContext = kDecodeContext;
  ASSIGN_OR_RETURN(const ComputeWeights* held, SmolWeights());
  const ComputeWeights& weights = *held;
  const ModelConfig& c = weights.config();
  const size_t element_bytes = engine_.ops(options_.profile).element_bytes;
  for (int batch : options_.batches) {
    const int pages_each = (kContext + kPagePositions) / kPagePositions;
    KvPool pool(c, options_.profile, batch * pages_each);
    PagedForward pass(engine_, pool);
    std::vector<std::vector<int32_t>> pages(batch);
    std::vector<int32_t> prompt(kContext);
    for (int i = 0; i < kContext; ++i) prompt[i] = (i * 7919 + 3) % c.vocab;
    for (int b = 0; b < batch; ++b) {
      for (int i = 0; i < pages_each; ++i) pages[b].push_back(pool.Allocate());
      if (b == 0) {
        pass.Run(weights, std::vector<PagedSequence>{{prompt, 0, pages[0], {}, 1}});
      } else {
        for (int i = 0; i < kContext / kPagePositions; ++i) pool.CopyPrefix(pages[0][i], pages[b][i], kPagePositions);
      }
    }
    std::vector<int32_t> next(batch);
    for (int b = 0; b < batch; ++b) next[b] = (b * 104729 + 11) % c.vocab;
    const int32_t last[] = {0};
    const auto ours = [&] {
      std::vector<PagedSequence> step;
      for (int b = 0; b < batch; ++b) step.push_back({std::span(next).subspan(b, 1), kContext, pages[b], last, 1});
      return Seconds([&] { pass.Run(weights, step); });
    };
    const double positions = static_cast<double>(batch) * (kContext + 1);
    const double kv_bytes = positions / kPagePositions * static_cast<double>(KvPool::PageBytes(c, options_.profile));
    const double bytes = static_cast<double>(weights.bytes().size()) + kv_bytes;
    // The head's panels meet a batch twice (its split), a sequence's keys and values the query heads that share them.
    const size_t head_bytes = static_cast<size_t>(weights.head().rows) * weights.head().depth * element_bytes;
    const std::vector<Stretch> stretches = {
        {weights.bytes().subspan(head_bytes), batch},
        {weights.bytes().first(head_bytes), options_.profile == Profile::kBf16 ? 2 * batch : batch},
        {{pool.keys(0, 0, 0), static_cast<size_t>(kv_bytes)}, c.heads / c.kv_heads}};
    std::vector<double> rates, floors, limits;
    ours();
    for (int i = 0; i < options_.samples; ++i) {
      floors.push_back(batch / (bytes / ReadBandwidth(engine_, weights.bytes(), options_.clock)));
      limits.push_back(batch / ReadAndMultiply(engine_, options_.profile, stretches, options_.clock));
      rates.push_back(batch / ours());
    }
    const std::string name = fmt::format("{}, batch {}, context {}", ModelName(), batch, kContext);
    emit_(Beside("decode", name, "tokens/s", "read bandwidth of weights and pages", rates, floors));
    emit_(Beside("decode", name, "tokens/s", kLoop, rates, limits));
    AgainstPeers({.work = "decode",
                  .name = name,
                  .unit = "tokens/s",
                  .work_done = static_cast<double>(batch),
                  .request = fmt::format(R"("batch":{},"context":{})", batch, kContext),
                  .batch = batch,
                  .target = batch < 64 ? 0 : Tiles() ? 2 : 1.3},
                 ours);
  }
  return Status::Ok();
}

Status Bench::Prefill() {
  const int kTokens = options_.prefill_tokens, kPages = (kTokens + kPagePositions - 1) / kPagePositions;
  ASSIGN_OR_RETURN(const ComputeWeights* held, SmolWeights());
  const ComputeWeights& weights = *held;
  const ModelConfig& c = weights.config();
  KvPool pool(c, options_.profile, kPages);
  PagedForward pass(engine_, pool);
  std::vector<int32_t> pages, ids(kTokens);
  for (int i = 0; i < kPages; ++i) pages.push_back(pool.Allocate());
  for (int i = 0; i < kTokens; ++i) ids[i] = (i * 7919 + 3) % c.vocab;
  const int32_t last[] = {kTokens - 1};
  const auto ours = [&] { return Seconds([&] { pass.Run(weights, std::vector<PagedSequence>{{ids, 0, pages, last, 1}}); }); };
  // What the pass multiplies: every matrix meets every token, but those behind the last layer's keys and values only the last one. A page
  // meets the queries of the tokens at and behind its own, half of them on average where it is their own.
  std::vector<Stretch> stretches;
  const size_t element_bytes = engine_.ops(options_.profile).element_bytes;
  double flops = 0;  // of the products: those that the last layer leaves out are no floor's either
  const auto matrix = [&](const engine::Panel& panel, int rows) {
    flops += 2.0 * rows * panel.rows * panel.depth;
    stretches.push_back({{static_cast<const std::byte*>(panel.data), static_cast<size_t>(panel.rows) * panel.depth * element_bytes}, rows});
  };
  for (int l = 0; l < c.layers; ++l) {
    const ComputeWeights::Layer& w = weights.layer(l);
    matrix(w.qkv, kTokens);
    for (const engine::Panel& panel : {w.o, w.gate_up, w.down}) matrix(panel, l + 1 < c.layers ? kTokens : 1);
  }
  matrix(weights.head(), options_.profile == Profile::kBf16 ? 2 : 1);
  for (int i = 0; i < kPages; ++i) {
    stretches.push_back({{pool.keys(pages[i], 0, 0), KvPool::PageBytes(c, options_.profile)},
                         (kTokens - i * kPagePositions - kPagePositions / 2) * c.heads / c.kv_heads});
  }
  std::vector<double> rates, floors, limits;
  ours();
  for (int i = 0; i < options_.samples; ++i) {
    floors.push_back(kTokens * PeakFlops(engine_, options_.clock) / flops);
    limits.push_back(kTokens / ReadAndMultiply(engine_, options_.profile, stretches, options_.clock));
    rates.push_back(kTokens / ours());
  }
  const std::string name = fmt::format("{}, {} tokens", ModelName(), kTokens);
  emit_(Beside("prefill", name, "tokens/s", "peak of fp32 multiply-adds, attention not counted", rates, floors));
  emit_(Beside("prefill", name, "tokens/s", kLoop, rates, limits));
  AgainstPeers({.work = "prefill",
                .name = name,
                .unit = "tokens/s",
                .work_done = static_cast<double>(kTokens),
                .request = fmt::format(R"("tokens":{})", kTokens),
                .target = Tiles() ? 1.5 : 1.2},
               ours);
  return Status::Ok();
}

Status Bench::Attention() {
  constexpr int kTokens = 1024;
  const ModelConfig c = SmolLm2Config();
  const engine::cpu::Ops& ops = engine_.ops(options_.profile);
  const engine::Shapes s(c);
  const int pages = kTokens / kPagePositions, tile = engine::TileTokens(c), rows = tile * s.group;
  const auto e = static_cast<size_t>(ops.element_bytes);
  const auto key_bytes = static_cast<int64_t>(e) * kPagePositions * s.head_depth;
  const auto value_bytes = static_cast<int64_t>(e) * kPagePositions * s.head_width;
  Buffer q, kv, o, d_o;
  Fill(q.Get<std::byte>(e * kTokens * s.q_elements), static_cast<size_t>(kTokens) * s.q_elements, options_.profile, 3);
  Fill(d_o.Get<std::byte>(e * kTokens * s.q_elements), static_cast<size_t>(kTokens) * s.q_elements, options_.profile, 5);
  const size_t kv_elements = static_cast<size_t>(pages) * c.kv_heads * (key_bytes + value_bytes) / e;
  Fill(kv.Get<std::byte>(kv_elements * e), kv_elements, options_.profile, 4);
  o.Get<float>(static_cast<size_t>(kTokens) * c.q_dim());
  std::vector<float> row_max(static_cast<size_t>(c.kv_heads) * kTokens * s.group), inverse(row_max.size()),
      delta(row_max.size(), 0.1f);
  std::vector<int32_t> table(pages);
  for (int i = 0; i < pages; ++i) table[i] = i;
  std::vector<Buffer> scratch(engine_.threads().count()), backward(engine_.threads().count());
  for (Buffer& b : scratch) b.Get<std::byte>(engine::cpu::AttentionScratchBytes(rows, c.head_dim));
  const int64_t page_bytes = c.kv_heads * (key_bytes + value_bytes);
  const int tiles = (kTokens + tile - 1) / tile;
  const auto forward = [&] {
    return Seconds([&] {
      engine_.threads().Run(tiles * c.kv_heads, [&](int item, int thread) {
        const int first = item / c.kv_heads * tile, h = item % c.kv_heads;
        engine::cpu::AttentionForward a;
        a.q =
            q.as<std::byte>() + (static_cast<size_t>(first) * s.q_elements + static_cast<size_t>(h) * s.group * s.head_depth) * e;
        a.q_stride = s.q_elements;
        a.tokens = std::min(tile, kTokens - first);
        a.group = s.group;
        a.head_dim = c.head_dim;
        a.first_position = first;
        a.keys = kv.as<std::byte>() + h * (key_bytes + value_bytes);
        a.values = a.keys + key_bytes;
        a.page_bytes = page_bytes;
        a.pages = table.data();
        a.scale = 0.125f;
        a.o = o.as<float>() + static_cast<size_t>(first) * c.q_dim() + h * s.group * c.head_dim;
        a.o_stride = c.q_dim();
        const size_t at = (static_cast<size_t>(h) * kTokens + first) * s.group;
        a.row_max = row_max.data() + at;
        a.row_inverse_sum = inverse.data() + at;
        a.scratch = scratch[thread].as<std::byte>();
        ops.attention_forward(a);
      });
    });
  };
  // Every (tile, page) with its products; panels are made once, as TrainPass makes them once a tile or page.
  const int padded = (rows + 31) / 32 * 32;
  Buffer q_rows, panel;
  Fill(q_rows.Get<std::byte>(e * padded * s.head_depth), static_cast<size_t>(padded) * s.head_depth, options_.profile, 6);
  Fill(panel.Get<std::byte>(e * 16 * padded * s.head_depth), static_cast<size_t>(16) * padded * s.head_depth, options_.profile,
       7);
  for (Buffer& b : backward) b.Get<float>(static_cast<size_t>(rows + 2 * kPagePositions) * s.head_width);
  const auto back = [&] {
    return Seconds([&] {
      engine_.threads().Run(tiles * c.kv_heads, [&](int item, int thread) {
        const int first = item / c.kv_heads * tile, h = item % c.kv_heads;
        engine::cpu::AttentionBackward a;
        a.rows = std::min(tile, kTokens - first) * s.group;
        a.group = s.group;
        a.head_dim = c.head_dim;
        a.first_position = first;
        a.q = a.d_o = q_rows.as<std::byte>();
        a.q_panel = a.d_o_panel = panel.as<std::byte>();
        const size_t at = (static_cast<size_t>(h) * kTokens + first) * s.group;
        a.row_max = row_max.data() + at;
        a.row_inverse_sum = inverse.data() + at;
        a.delta = delta.data() + at;
        a.scale = 0.125f;
        a.dq = backward[thread].as<float>();
        a.dk = a.dq + static_cast<size_t>(rows) * s.head_width;
        a.dv = a.dk + static_cast<size_t>(kPagePositions) * s.head_width;
        a.scratch = scratch[thread].as<std::byte>();
        for (int page = 0; page * kPagePositions < first + a.rows / s.group; ++page) {
          a.first_key = page * kPagePositions;
          a.keys = kv.as<std::byte>() + page * page_bytes + h * (key_bytes + value_bytes);
          a.values_by_key = a.keys;
          a.keys_by_dim = static_cast<const std::byte*>(a.keys) + key_bytes;
          ops.attention_backward(a);
        }
      });
    });
  };
  // Products of this model: gate and up.
  const auto product = Product(512, 3072, 576);
  const double flops = 2.0 * 512 * 3072 * 576;
  // What a causal row needs: query i sees i + 1 keys.
  const double pairs = static_cast<double>(kTokens) * (kTokens + 1) / 2 * c.heads;
  forward();
  back();
  product();
  std::vector<double> f, b, rate;
  for (int i = 0; i < options_.samples; ++i) {
    f.push_back(pairs * 2 * 2 * c.head_dim / forward() / 1e9);
    b.push_back(pairs * 2 * 5 * c.head_dim / back() / 1e9);
    rate.push_back(flops / product() / 1e9);
  }
  const std::string name = fmt::format("SmolLM2-135M, one layer, {} tokens", kTokens);
  emit_(Beside("attention", name + ", forward", "GFLOP/s", "our product of 512 rows", f, rate));
  emit_(Beside("attention", name + ", backward", "GFLOP/s", "our product of 512 rows", b, rate));
  return Status::Ok();
}

Status Bench::Step() {
  const ModelConfig c = Model();
  // What other works hold is no memory of a step.
  cold_ = Buffer();
  weights_ = ComputeWeights();
  peers_.clear();
  ASSIGN_OR_RETURN(engine::Parameters params, SmolParameters());
  engine::Gradients grads(c);
  AdamW adamw(c);
  const AdamWOptions adam;
  engine::TrainPass pass(engine_);
  Buffer memory;
  // A step on rows of a length, beside peers or not.
  const auto contest = [&](int length) -> Contest {
    return {.work = "step",
            .name = fmt::format("{}, {} rows of {} tokens", ModelName(), options_.step_rows, length),
            .unit = "tokens/s",
            .work_done = static_cast<double>(options_.step_rows) * length,
            .request = fmt::format(R"("rows":{},"length":{})", options_.step_rows, length),
            .target = Tiles() ? 4.0 : 1.3};
  };
  const auto step = [&](int length) -> std::function<double()> {
    engine::TreeBuilder builder;
    const float t = 1;
    for (int r = 0; r < options_.step_rows; ++r) {
      std::vector<int32_t> ids(length);
      for (int i = 0; i < length; ++i) ids[i] = (i * 7919 + r * 104729 + 3) % c.vocab;
      builder.AddRow(ids, std::span(&t, 1));
    }
    engine::TreeBatch tree = builder.Build(nullptr);
    std::vector<float> coef(tree.size(), 1.0f / static_cast<float>(tree.size()));
    return [&, tree = std::move(tree), coef = std::move(coef)] {
      return Seconds([&] {
        const ComputeWeights weights = engine::Repack(params, options_.profile, engine_.threads(), memory);
        const auto logprobs = pass.Forward(weights, tree);
        TEMPER_CHECK(logprobs.ok()) << logprobs.status().ToString();
        grads.SetZero();
        pass.Backward(coef, grads);
        const auto report = adamw.Step(engine_, adam, grads, params);
        TEMPER_CHECK(report.ok()) << report.status().ToString();
      });
    };
  };
  const Contest timed = contest(options_.step_length);
  const std::function<double()> ours = step(options_.step_length);
  std::vector<double> rates, floors;
  ours();
  for (int i = 0; i < options_.samples; ++i) {
    floors.push_back(PeakFlops(engine_, options_.clock) / (3 * ForwardFlops(c, true)));
    rates.push_back(timed.work_done / ours());
  }
  emit_(Beside("step", timed.name, "tokens/s", "peak of fp32 multiply-adds, attention not counted", rates, floors));
  const std::optional<Entry> best = AgainstPeers(timed, ours);
  // In a short batch most of either side's memory is weights, gradients and moments in fp32; longer rows say what a step adds to them.
  if (best && options_.memory_length > options_.step_length) {
    Entry longer = BesideMode(contest(options_.memory_length), best->peer, best->mode, 1, step(options_.memory_length));
    if (longer.row.note.empty()) {
      longer.row.note = best->row.note;
      EmitMemory(longer);
    } else {
      emit_(longer.row);
    }
  }
  return Status::Ok();
}

Status Bench::Growth() {
  ASSIGN_OR_RETURN(const ComputeWeights* held, SmolWeights());
  const ComputeWeights& weights = *held;
  const ModelConfig& c = weights.config();
  constexpr int kChunk = 512;
  // Lengths double up to the longest.
  const int longest = std::min(options_.growth_tokens, c.max_positions);
  KvPool pool(c, options_.profile, longest / kPagePositions + 1);
  PagedForward pass(engine_, pool);
  std::vector<int32_t> pages, ids(longest);
  for (int i = 0; i <= longest / kPagePositions; ++i) pages.push_back(pool.Allocate());
  for (int i = 0; i < longest; ++i) ids[i] = (i * 7919 + 3) % c.vocab;
  const auto run = [&](int from, int to) {
    return Seconds([&] {
      for (int at = from; at < to; at += kChunk) {
        pass.Run(weights, std::vector<PagedSequence>{{std::span(ids).subspan(at, std::min(kChunk, to - at)), at, pages, {}, 1}});
      }
    });
  };
  struct Segment {
    int from, to;
    double seconds, pairs;  // pairs: of a token and one that it sees
  };
  std::vector<Segment> segments;
  for (int to = std::min(kChunk, longest), from = 0; from < longest; from = to, to = std::min(2 * to, longest)) {
    const double a = from, b = to;
    segments.push_back({from, to, run(from, to), (b * (b + 1) - a * (a + 1)) / 2});
  }
  // Seconds = x tokens + y pairs, fitted to the relative error: what it costs is linear in tokens but for attention as computed.
  double tt = 0, tp = 0, pp = 0, t1 = 0, p1 = 0;
  for (const Segment& s : segments) {
    const double t = (s.to - s.from) / s.seconds, p = s.pairs / s.seconds;
    tt += t * t;
    tp += t * p;
    pp += p * p;
    t1 += t;
    p1 += p;
  }
  const double determinant = tt * pp - tp * tp;
  const double x = (t1 * pp - p1 * tp) / determinant, y = (p1 * tt - t1 * tp) / determinant;
  for (const Segment& s : segments) {
    Row row;
    row.work = "growth";
    row.name = fmt::format("{}, one row, tokens {} to {}", ModelName(), s.from, s.to);
    row.unit = "tokens/s";
    row.reference = fmt::format("{:.3g} us a token, {:.3g} ns a pair", x * 1e6, y * 1e9);
    row.ours = (s.to - s.from) / s.seconds;
    row.theirs = (s.to - s.from) / (x * (s.to - s.from) + y * s.pairs);
    row.ratio = row.ours / row.theirs;
    row.samples = {row.ours};
    emit_(row);
  }
  return Status::Ok();
}

}  // namespace

ModelConfig BenchModel(int layers) {
  ModelConfig c = SmolLm2Config();
  if (layers) c.layers = layers;
  return c;
}

std::vector<int32_t> CheckRow(int vocab) {
  std::vector<int32_t> ids(32);
  for (int i = 0; i < 32; ++i) ids[i] = (i * i * 31 + 7) % vocab;
  return ids;
}

const std::vector<std::string>& Works() {
  static const std::vector<std::string> works = {"gemm", "decode", "prefill", "attention", "head", "step", "roofline", "growth"};
  return works;
}

const std::vector<std::string>& Peers() {
  static const std::vector<std::string> peers = {"torch", "vllm", "llama.cpp"};
  return peers;
}

const std::vector<std::string>& Modes() {
  static const std::vector<std::string> modes = {"float32",          "bfloat16",          "float16",          "autocast",
                                                 "compiled float32", "compiled autocast", "compiled bfloat16",
                                                 "oneDNN float32",   "OpenBLAS float32"};
  return modes;
}

Status RunEngineBench(engine::Engine& engine, const Options& options, const std::function<void(const Row&)>& emit) {
  Bench bench(engine, options, emit);
  for (const std::string& work : options.works.empty() ? Works() : options.works) {
    if (work == "gemm") RETURN_IF_ERROR(bench.Gemm());
    if (work == "decode") RETURN_IF_ERROR(bench.Decode());
    if (work == "prefill") RETURN_IF_ERROR(bench.Prefill());
    if (work == "attention") RETURN_IF_ERROR(bench.Attention());
    if (work == "head") RETURN_IF_ERROR(RunHead(engine, options, BenchModel(0), emit));
    if (work == "step") RETURN_IF_ERROR(bench.Step());
    if (work == "roofline") RETURN_IF_ERROR(RunRoofline(engine, options, BenchModel(options.layers), emit));
    if (work == "growth") RETURN_IF_ERROR(bench.Growth());
  }
  return bench.missing();
}

}  // namespace temper::trainer::bench
