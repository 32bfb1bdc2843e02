// One piece of work in a process of its own: says what it plans to take, does it, and says the most it had resident.
//
//   memory_probe WORK MODEL PROFILE ROWS LENGTH [BUDGET]
//
// WORK: step (an optimizer step over ROWS rows of LENGTH tokens; BUDGET: bytes for the pass, chosen by ChoosePass), score (their logprobs) or
// decode (ROWS sequences until each has LENGTH tokens). MODEL: quickstart or smollm2, shapes with weights drawn from a seed.
// Prints {"planned":…,"before":…,"peak":…,"seconds":…,"chunk_nodes":…,"recompute":…}; both figures hold what was resident before the work.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>

#include "common/check.h"
#include "common/clock.h"
#include "common/json.h"
#include "common/process.h"
#include "engine/buffer.h"
#include "engine/decode/decoder.h"
#include "engine/decode/paged_model.h"
#include "engine/memory.h"
#include "engine/train_pass.h"
#include "engine/weights.h"
#include "trainer/adamw.h"
#include "trainer/bench/engine_bench.h"

namespace temper {
namespace {

using namespace engine;  // NOLINT

constexpr int kThreads = 2;
constexpr int kDrawn = 8;  // of each sequence of `decode`

struct Work {
  ModelConfig config;
  Profile profile = Profile::kBf16;
  int rows = 0, length = 0;
  int64_t budget = INT64_MAX;
};

struct Said {
  int64_t planned = 0, before = 0;
  PassChoice choice;
};

ModelConfig ConfigOf(const std::string& name) {
  if (name == "smollm2") return trainer::bench::BenchModel(0);
  TEMPER_CHECK(name == "quickstart") << name;
  ModelConfig c;
  c.max_positions = 32768;
  c.vocab = 800;
  c.layers = 4;
  c.width = 128;
  c.heads = 4;
  c.kv_heads = 2;
  c.head_dim = 32;
  c.ffn = 384;
  return c;
}

std::vector<int32_t> Row(const Work& w, int row, int length) {
  std::mt19937_64 rng(static_cast<uint64_t>(row));
  std::vector<int32_t> ids(length);
  for (int32_t& id : ids) id = static_cast<int32_t>(rng() % w.config.vocab);
  return ids;
}

TreeBatch Rows(const Work& w) {
  TreeBuilder builder(false);
  const float one = 1;
  for (int i = 0; i < w.rows; ++i) builder.AddRow(Row(w, i, w.length), std::span(&one, 1));
  return builder.Build(nullptr);
}

void Step(Engine& engine, const Work& w, Said& said) {
  const TreeBatch tree = Rows(w);
  said.choice = ChoosePass(w.config, w.profile, tree, {}, static_cast<size_t>(w.budget));
  ForwardOptions options;
  options.chunk_nodes = said.choice.chunk_nodes;
  options.recompute = said.choice.recompute;
  said.planned = said.before + TrainBytes(w.config, w.profile, tree.size(), w.length,
                                          static_cast<int64_t>(TrainPass::PlannedBytes(w.config, w.profile, kThreads, tree, options)));
  Parameters params = InitParameters(w.config, 3);
  trainer::AdamW optimizer(w.config);
  Gradients grads(w.config);
  Buffer packed;
  TrainPass pass(engine);
  const ComputeWeights weights = Repack(params, w.profile, engine.threads(), packed);
  TEMPER_CHECK(pass.Forward(weights, tree, options).ok());
  pass.Backward(std::vector<float>(tree.size(), 1e-3f), grads);
  const auto report = optimizer.Step(engine, {}, grads, params);
  TEMPER_CHECK(report.ok() && report->grad_norm > 0) << report.status().ToString();
}

void Score(Engine& engine, const Work& w, Said& said) {
  const TreeBatch tree = Rows(w);
  ForwardOptions options;
  options.keep = false;
  said.planned = said.before + ScoreBytes(w.config, w.profile, 0, tree.size(), w.length,
                                          static_cast<int64_t>(TrainPass::PlannedBytes(w.config, w.profile, kThreads, tree, options)));
  const ComputeWeights weights = ComputeWeights::FromParameters(InitParameters(w.config, 3), w.profile);
  TrainPass pass(engine);
  TEMPER_CHECK(pass.Forward(weights, tree, options).ok());
}

// As a worker does it, but that the weights are its own.
void Decode(Engine& engine, const Work& w, Said& said) {
  const DecoderOptions options{.max_batch = w.rows};
  const int64_t pages = int64_t{w.rows} * ((w.length + 63) / 64);
  const int64_t decode = DecodeBytes(w.config, w.profile, kThreads, pages, options.chunk_tokens + w.rows, w.rows);
  // Packed from fp32 before the first step.
  said.planned = said.before + ScoreBytes(w.config, w.profile, 0, 0, 0, decode);
  const ComputeWeights weights = ComputeWeights::FromParameters(InitParameters(w.config, 3), w.profile);
  Decoder decoder(std::make_unique<PagedModel>(engine, w.config, w.profile, static_cast<int>(pages)), options);
  for (int i = 0; i < w.rows; ++i) {
    // The shortest prompt first draws the most, so that all sequences are there at the end.
    DecodeRequest request{.ids = Row(w, i, w.length - kDrawn)};
    request.sampling.max_tokens = kDrawn;
    TEMPER_CHECK(decoder.Add(std::move(request)).ok());
  }
  TEMPER_CHECK(decoder.SwapWeights(weights, {1, 0}).ok());
  std::vector<DecodeEvent> events;
  while (decoder.Step(&events)) {
  }
}

int Run(int argc, char** argv) {
  TEMPER_CHECK(argc >= 6) << "memory_probe WORK MODEL PROFILE ROWS LENGTH [BUDGET]";
  Work w;
  w.config = ConfigOf(argv[2]);
  w.profile = *ParseProfile(argv[3]);
  w.rows = std::atoi(argv[4]);
  w.length = std::atoi(argv[5]);
  if (argc > 6) w.budget = std::atoll(argv[6]);
  auto engine = Engine::Create({CpuPath::kAuto, kThreads});
  TEMPER_CHECK(engine.ok()) << engine.status().ToString();
  Said said;
  said.before = RssBytes();
  const double begin_s = SystemClock::Get().NowS();
  const std::string work = argv[1];
  TEMPER_CHECK(work == "step" || work == "score" || work == "decode") << work;
  (work == "step" ? Step : work == "score" ? Score : Decode)(**engine, w, said);
  JsonWriter out;
  out.BeginObject().Key("planned").Int(said.planned).Key("before").Int(said.before).Key("peak").Int(PeakRssBytes());
  out.Key("seconds").Double(SystemClock::Get().NowS() - begin_s);
  out.Key("chunk_nodes").Int(said.choice.chunk_nodes).Key("recompute").Bool(said.choice.recompute).EndObject();
  std::printf("%s\n", out.Take().c_str());
  return 0;
}

}  // namespace
}  // namespace temper

int main(int argc, char** argv) { return temper::Run(argc, argv); }
