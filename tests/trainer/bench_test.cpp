// `temper bench engine`: every row is a ratio of two figures of one run, peers answer for themselves.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>

#include "common/file.h"
#include "common/json.h"
#include "engine/bf16.h"
#include "engine/train_pass.h"
#include "engine/files/model_file.h"
#include "tests/engine/test_models.h"
#include "tests/harness/tiny_model.h"
#include "trainer/batch.h"
#include "trainer/bench/commands.h"
#include "trainer/bench/counted_kernels.h"
#include "trainer/bench/engine_bench.h"
#include "trainer/bench/floors.h"
#include "trainer/bench/peer.h"
#include "trainer/bench/tree_bench.h"
#include "trainer/bench/tree_sets.h"

namespace temper::trainer::bench {
namespace {

// Goes wrong if a row's figures are not of the samples, or a work is left out.
TEST(Bench, EveryWorkGivesItsRows) {
  auto engine = engine::MakeEngine(engine::CpuPath::kAuto, 2);
  Options options;
  options.samples = 3;
  options.layers = 1;
  options.works = {"attention", "step", "growth", "prefill"};
  options.step_rows = 2;
  options.step_length = 16;
  options.growth_tokens = 1024;
  std::map<std::string, int> rows;
  const Status status = RunEngineBench(*engine, options, [&](const Row& row) {
    ++rows[row.work];
    EXPECT_GT(row.ours, 0) << row.name;
    EXPECT_GT(row.theirs, 0) << row.name;
    EXPECT_GT(row.ratio, 0) << row.name;
    EXPECT_FALSE(row.reference.empty());
    auto sorted = row.samples;
    std::sort(sorted.begin(), sorted.end());
    EXPECT_EQ(row.ours, sorted[sorted.size() / 2]) << row.name << ": the median of an odd number of samples";
  });
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(rows["attention"], 2);
  EXPECT_EQ(rows["step"], 1);
  EXPECT_EQ(rows["prefill"], 2);
  EXPECT_EQ(rows["growth"], 2);
}

PeerOptions With(const std::string& program, const std::string& script) {
  return {.program = program, .script = script, .name = "torch", .threads = 2, .cap = "avx2", .clock = "wall"};
}

// Goes wrong if a kernel's work is counted twice, not at all, or for another part.
TEST(Roofline, CountsTheArithmeticOfAStep) {
  engine::ModelConfig c = engine::AllConfigs().front().config;
  c.layers = 2;
  const auto plain = engine::MakeEngine(engine::CpuPath::kAuto, 2);
  const auto counted = CountedKernels::MakeEngine(*plain, c.vocab);
  const auto weights = engine::ComputeWeights::FromParameters(engine::InitParameters(c, 1), engine::Profile::kBf16);
  constexpr int kTokens = 40;
  std::vector<int32_t> ids(kTokens);
  for (int i = 0; i < kTokens; ++i) ids[i] = (i * 7) % c.vocab;
  engine::TreeBuilder builder;
  const float t = 1;
  builder.AddRow(ids, std::span(&t, 1));
  const engine::TreeBatch tree = builder.Build(nullptr);
  engine::TrainPass pass(*counted), sound(*plain);
  (void)CountedKernels::Take();
  CountedKernels::Enter(/*backward=*/false);
  const auto logprobs = pass.Forward(weights, tree);
  ASSERT_TRUE(logprobs.ok());
  engine::Gradients grads(c);
  CountedKernels::Enter(/*backward=*/true);
  pass.Backward(std::vector<float>(kTokens, 1.0f), grads);
  const auto counts = CountedKernels::Take();
  const auto expected = sound.Forward(weights, tree);
  ASSERT_TRUE(expected.ok());
  EXPECT_EQ(std::memcmp(logprobs->data() + 1, expected->data() + 1, (kTokens - 1) * sizeof(float)), 0) << "the same numbers";
  const auto operations = [&](Part part) { return counts[static_cast<size_t>(part)].operations; };
  const double matrices = c.width * (2.0 * c.q_dim() + 2.0 * c.kv_dim() + 3.0 * c.ffn) * c.layers;
  ASSERT_EQ(c.width % 32, 0) << "nothing is padded";
  EXPECT_EQ(operations(Part::kForwardProducts), 2 * kTokens * matrices);
  EXPECT_EQ(operations(Part::kInputGradients), 2 * kTokens * matrices);
  EXPECT_EQ(operations(Part::kWeightGradients), 2 * engine::RoundUp(kTokens, 32) * matrices) << "tokens are the reduced axis";
  const double pairs = kTokens * (kTokens + 1) / 2.0 * c.heads * c.layers;
  EXPECT_EQ(operations(Part::kForwardAttention), 4 * pairs * c.head_dim);
  EXPECT_EQ(operations(Part::kBackwardAttention), 10 * pairs * c.head_dim);
  EXPECT_GT(operations(Part::kHeadForward), 4.0 * (kTokens - 1) * c.width * c.vocab) << "both halves of the hidden state";
  EXPECT_GT(operations(Part::kHeadBackward), 4.0 * (kTokens - 1) * c.width * c.vocab);
  EXPECT_GT(operations(Part::kRows), 0);
  for (const Count& count : counts) EXPECT_GE(count.ticks, 0);
}

// Goes wrong if a part of the step is missing, or counted in two.
TEST(Roofline, PartsMakeTheStep) {
  auto engine = engine::MakeEngine(engine::CpuPath::kAuto, 1);
  Options options;
  options.samples = 1;
  options.layers = 1;
  options.works = {"roofline", "head"};
  options.step_length = 16;
  options.head_tokens = 64;
  options.head_vocabs = {500, 1000};
  options.prefill_tokens = 16;
  options.batches = {2};
  std::map<std::string, double> share;  // of a pass
  std::map<std::string, int> rows;
  const Status status = RunEngineBench(*engine, options, [&](const Row& row) {
    ++rows[row.work];
    EXPECT_GT(row.ours, 0) << row.name;
    EXPECT_GT(row.ratio, 0) << row.name;
    if (const size_t end = row.name.find(" %"); end != std::string::npos) {
      const std::string pass = row.name.substr(0, row.name.find(','));
      share[pass] += std::stod(row.name.substr(row.name.rfind(": ", end) + 2));
    }
  });
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(share.size(), 3);  // of the step, of prefill, of decoding
  for (const auto& [pass, sum] : share) EXPECT_NEAR(sum, 100, 1) << pass;
  EXPECT_EQ(rows["roofline"], 14 + 6 + 6);
  EXPECT_EQ(rows["head"], 12);
}

// Goes wrong if a peer that ends, errs or talks nonsense hangs the bench or counts as a figure.
TEST(Peer, AnswersForItself) {
  const std::string script = testing::TempDir() + "peer.sh";
  ASSERT_TRUE(WriteFile(script,
                        "echo '{\"ready\": \"fake 1\", \"isa\": \"avx2\", \"threads\": '$2'}'\n"
                        "read a; echo '{\"seconds\": 0.25, \"peak_bytes\": 7}'\nread a; echo '{\"error\": \"no such work\"}'\n"
                        "read a; echo '{\"logprobs\": [-1.5, -2.5]}'\nread a; echo '{\"seconds\": -1.0}'\nread a; echo nonsense\n")
                  .ok());
  auto peer = Peer::Start(With("sh", script));
  ASSERT_TRUE(peer.ok()) << peer.status().ToString();
  EXPECT_EQ((*peer)->version(), "fake 1");
  EXPECT_EQ((*peer)->runs_on(), "avx2, 2 threads");
  auto first = (*peer)->Ask("{}");
  ASSERT_TRUE(first.ok()) << first.status().ToString();
  EXPECT_EQ(first->seconds, 0.25);
  EXPECT_EQ(first->peak_bytes, 7);
  auto second = (*peer)->Ask("{}");
  EXPECT_FALSE(second.ok());
  EXPECT_NE(second.status().message().find("no such work"), std::string::npos);
  auto third = (*peer)->Ask("{}");
  ASSERT_TRUE(third.ok()) << third.status().ToString();
  EXPECT_EQ(third->logprobs, (std::vector<double>{-1.5, -2.5}));
  EXPECT_FALSE((*peer)->Ask("{}").ok()) << "no time is negative";
  EXPECT_FALSE((*peer)->Ask("{}").ok()) << "nonsense";
  EXPECT_FALSE((*peer)->Ask("{}").ok()) << "it ended";
  EXPECT_FALSE(Peer::Start(With("sh", "/nonexistent")).ok());
  EXPECT_FALSE(Peer::Start(With("no-such-program-anywhere", script)).ok());
}

// Goes wrong if a peer that cannot start, is not what was asked for or never answers counts as one.
TEST(Peer, StartsOrSaysWhyNot) {
  const std::string script = testing::TempDir() + "peer_start.sh";
  for (const auto& [says, expected] : std::map<std::string, std::string>{
           {R"(echo '{"error": "ImportError: no torch"}')", "ImportError: no torch"},
           {R"(echo '{"ready": "fake 1", "isa": "avx2", "threads": 1}')", "1 threads, not 2"},
           {R"(echo '{"ready": "fake 1"}')", "did not say what it is"},
           {"echo ready", "said 'ready'"},
           {"sleep 60", "did not answer in 1 s"}}) {
    ASSERT_TRUE(WriteFile(script, says + "\n").ok());
    PeerOptions options = With("sh", script);
    options.patience_s = 1;
    const auto peer = Peer::Start(options);
    ASSERT_FALSE(peer.ok()) << says;
    EXPECT_NE(peer.status().message().find(expected), std::string::npos) << peer.status().message();
  }
}

// Goes wrong if a peer that computes another model, cannot do a work or was not installed has a figure, if it ends the bench, or if a weak
// one counts.
TEST(Bench, OnlyPeersThatCountAreComparedWith) {
  auto engine = engine::MakeEngine(engine::CpuPath::kAuto, 2);
  // What the right model says of the row.
  const engine::ModelConfig config = BenchModel(1);
  const std::vector<int32_t> ids = CheckRow(config.vocab);
  engine::TreeBuilder builder;
  const float t = 1;
  builder.AddRow(ids, std::span(&t, 1));
  const engine::TreeBatch tree = builder.Build(nullptr);
  engine::TrainPass pass(*engine);
  const auto weights = engine::ComputeWeights::FromParameters(engine::InitParameters(config, 1), engine::Profile::kBf16);
  const auto logprobs = pass.Forward(weights, tree);
  ASSERT_TRUE(logprobs.ok());
  std::string right, wrong;
  for (size_t i = 1; i < ids.size(); ++i) {
    right += (i > 1 ? "," : "") + std::to_string((*logprobs)[i]);
    wrong += (i > 1 ? "," : "") + std::to_string((*logprobs)[i] + 0.2);
  }
  const std::string script = testing::TempDir() + "peers.sh";
  ASSERT_TRUE(WriteFile(script,
                        "echo '{\"ready\": \"fake 1\", \"isa\": \"avx2\", \"threads\": '$2'}'\n"
                        "while read line; do case $line in\n"
                        "*logprobs*) if [ $1 = torch ]; then echo '{\"logprobs\": [" + right + "]}'; else echo '{\"logprobs\": [" + wrong +
                            "]}'; fi;;\n"
                        "*bfloat16*) echo '{\"error\": \"no bf16 here\"}';;\n"
                        "*step*) echo '{\"seconds\": 1000.0, \"peak_bytes\": 1048576000000}';;\n"
                        "*) echo '{\"seconds\": 1000.0}';;\nesac; done\n")
                  .ok());
  Options options;
  options.samples = 1;
  options.layers = 1;
  options.works = {"prefill", "step"};
  options.step_rows = 1;
  options.step_length = 16;
  options.memory_length = 48;
  options.peers = {"torch", "vllm", "llama.cpp"};
  options.modes = {"float32", "bfloat16", "float16"};
  options.interpreters = {{"torch", "sh"}, {"vllm", "sh"}, {"llama.cpp", testing::TempDir() + "nowhere/bin/python3"}};
  options.peer_script = script;
  for (const bool weak : {false, true}) {
    options.expected = [&](const std::string& peer, const std::string& work, int, const MachineRates& here) {
      EXPECT_GT(here.read_bytes_s, 1e8);
      EXPECT_GT(here.fma_flops_s, 1e9);
      const double reached = work == "prefill" ? 0.512 : 0.016;
      return peer == "torch" ? reached / (weak ? 0.79 : 0.81) : 0;
    };
    std::map<std::string, Row> rows, memories;
    const Status status =
        RunEngineBench(*engine, options, [&](const Row& row) {
          if (row.unit == "MiB") memories[row.name] = row;
          rows[row.work + " " + row.unit + " " + row.reference] = row;
        });
    ASSERT_FALSE(status.ok()) << "peers are missing";
    EXPECT_NE(status.message().find("torch bfloat16: not run: peer torch: no bf16 here"), std::string::npos) << status.message();
    for (const std::string work : {"prefill", "step"}) {
      const Row& figure = rows[work + " tokens/s torch float32"];
      EXPECT_EQ(figure.peer, "fake 1, avx2, 2 threads");
      EXPECT_NEAR(figure.theirs, work == "prefill" ? 0.512 : 0.016, 1e-9);
      EXPECT_GT(figure.ratio, 1);
      EXPECT_EQ(figure.note.starts_with("weak"), weak) << figure.note;
      EXPECT_EQ(rows.count(work + " tokens/s the best: torch float32"), weak ? 0 : 1);
      const Row& refused = rows[work + " tokens/s torch bfloat16"];
      EXPECT_EQ(refused.theirs, 0);
      EXPECT_EQ(refused.note, "not run: peer torch: no bf16 here");
    }
    EXPECT_NE(rows["prefill tokens/s vllm float32"].note.find("differ from ours by 0.2"), std::string::npos);
    EXPECT_NE(rows["prefill tokens/s llama.cpp float16"].note.find("tests/setup_peers.sh makes it"), std::string::npos);
    EXPECT_EQ(rows.count("step tokens/s vllm float32"), 0) << "it trains nothing";
    EXPECT_EQ(memories.size(), 2);
    for (const auto& [name, row] : memories) EXPECT_EQ(row.note.starts_with("weak"), weak) << name;
    if (weak) continue;
    EXPECT_GT(rows["prefill tokens/s the best: torch float32"].target, 1);
    EXPECT_EQ(memories.count("SmolLM2-135M, 1 layers, 1 rows of 48 tokens"), 1);
    const Row& memory = memories["SmolLM2-135M, 1 layers, 1 rows of 16 tokens"];
    EXPECT_NEAR(memory.theirs, 1e6, 1);
    EXPECT_GT(memory.ours, 487) << "weights, gradients and moments in fp32, as they are resident";
    EXPECT_LT(memory.ours, 8000);
    EXPECT_EQ(memory.target, 0.6);
    EXPECT_EQ(memory.reference, "the best: torch float32");
  }
}

// Goes wrong if a figure is not scaled by what both machines can do, or by the wrong unit of theirs.
TEST(Peer, FiguresScaleWithTheMachine) {
  const MachineRates there = {.read_bytes_s = 23e9, .fma_flops_s = 302e9, .tiles = true};
  EXPECT_NEAR(ExpectedTokensPerSecond("llama.cpp", "prefill", 0, there), 586, 1e-6);
  EXPECT_NEAR(ExpectedTokensPerSecond("vllm", "decode", 64, there), 905, 1e-6);
  EXPECT_NEAR(ExpectedTokensPerSecond("torch", "step", 0, there), 184, 1e-6);
  MachineRates half = there;
  half.read_bytes_s /= 2;
  EXPECT_NEAR(ExpectedTokensPerSecond("llama.cpp", "decode", 1, half), 20, 1e-6) << "one sequence reads all weights";
  EXPECT_NEAR(ExpectedTokensPerSecond("llama.cpp", "prefill", 0, half), 586, 1e-6) << "prefill is arithmetic";
  half = there;
  half.fma_flops_s /= 2;
  EXPECT_NEAR(ExpectedTokensPerSecond("llama.cpp", "prefill", 0, half), 293, 1e-6);
  EXPECT_NEAR(ExpectedTokensPerSecond("llama.cpp", "decode", 1, half), 40, 1e-6);
  MachineRates no_tiles = there;
  no_tiles.tiles = false;
  EXPECT_NEAR(ExpectedTokensPerSecond("vllm", "prefill", 0, no_tiles), 5000 * 302e9 / 5.8e12, 1e-6);
  EXPECT_NEAR(ExpectedTokensPerSecond("llama.cpp", "prefill", 0, no_tiles), 586, 1e-6) << "it used none";
  EXPECT_EQ(ExpectedTokensPerSecond("vllm", "decode", 1, there), 0) << "not known";
  EXPECT_EQ(ExpectedTokensPerSecond("vllm", "step", 0, there), 0);
}

TEST(Floors, AreRatesOfThisMachine) {
  auto engine = engine::MakeEngine(engine::CpuPath::kAuto, 1);
  EXPECT_GT(PeakFlops(*engine, Clock::kWall), 1e9);
  EXPECT_LT(PeakFlops(*engine, Clock::kWall), 1e13);
  const std::vector<std::byte> memory(64 << 20);
  EXPECT_GT(ReadBandwidth(*engine, memory, Clock::kWall), 1e8);
  EXPECT_LT(ReadBandwidth(*engine, memory, Clock::kWall), 1e12);
}

// Goes wrong if the compiler, or a loop for some count of rows, leaves out arithmetic: then it would be faster than the peak.
TEST(Floors, ALoopDoesItsArithmetic) {
  const std::vector<std::byte> memory(4 << 20);
  for (const engine::CpuPath path : engine::AvailableCpuPaths()) {
    auto engine = engine::MakeEngine(path, 1);
    for (const auto profile : {engine::Profile::kBf16, engine::Profile::kF32}) {
      for (const int rows : {3, 8, 24, 64}) {
        const int done = path == engine::CpuPath::kAvx2 ? rows / 2 * 2 : rows;
        const double numbers = static_cast<double>(memory.size()) / (profile == engine::Profile::kBf16 ? 2 : 4);
        // Other programs may disturb either time; a loop that leaves arithmetic out is faster than the peak however often both are taken.
        bool as_counted = false;
        for (int i = 0; i < 20 && !as_counted; ++i) {
          const double seconds = ReadAndMultiply(*engine, profile, {{memory, rows}}, Clock::kCpu);
          as_counted = 2 * numbers * done / seconds < 1.1 * PeakFlops(*engine, Clock::kCpu);
        }
        EXPECT_TRUE(as_counted) << engine::CpuPathName(path) << " " << rows;
      }
    }
  }
}

// Could go wrong: a set shares other prefixes than it says, or a figure of the bench is of something else.
TEST(TreeBench, EverySetIsMeasuredBesideItsRowsAndItsPrediction) {
  // Tokens as rows and as a tree, by hand from what each set says of itself.
  const std::map<std::string, std::pair<int, int>> sizes = {
      {"grpo_short", {2 * 8 * 128, 2 * (64 + 8 * 64)}},
      {"grpo_long", {8 * 288, 256 + 8 * 32}},
      {"think_dropped", {2 * (6 * 128 + 32 * 15), 64 + 2 * (6 * 64 + 5 * 32)}},
      {"row_per_call", {2 * (6 * 64 + 32 * 21), 64 + 2 * 6 * 32}},
      {"compaction", {3 * (96 + 16 + 5 * 48 + 32 + 96 + 64 + 4 * 48 + 32), 96 + 3 * (16 + 5 * 48 + 32 + 64 + 4 * 48 + 32)}},
      {"sub_agents", {2 * (160 + 4 * 48 + 24 + 4 * 208), 160 + 128 + 2 * (4 * 48 + 24 + 4 * 80)}},
      {"nothing", {8 * 160, 8 * 160}}};
  const std::string model = testing::TempDir() + "tree_bench_model";
  engine::ModelConfig config = TinyModel(2048);
  config.max_positions = 1024;
  ASSERT_TRUE(engine::SaveHuggingFace(model, config, engine::InitParameters(config, 1), {}, engine::FileType::kBF16).ok());
  const std::string script = testing::TempDir() + "tree_peer.sh";
  ASSERT_TRUE(WriteFile(script, "echo '{\"ready\": \"fake 1\", \"isa\": \"avx2\", \"threads\": 1}'\n"
                                "while read line; do case $line in\n"
                                "*logprobs*) echo '{\"error\": \"no such model\"}';;\n*) echo '{\"seconds\": 1.0}';;\nesac; done\n")
                  .ok());
  auto engine = engine::MakeEngine(engine::CpuPath::kAuto, 1);
  TreeOptions options;
  options.samples = 3;
  options.clock = Clock::kCpu;
  options.model = model;
  options.torch = true;
  options.modes = {"float32"};
  options.interpreter = "sh";
  options.peer_script = script;
  ASSERT_EQ(TreeSetNames().size(), sizes.size());
  for (const auto& [name, size] : sizes) {
    options.sets = {name};
    std::vector<Row> rows;
    std::optional<Sharing> sharing;
    const Status status = RunTreeBench(*engine, options, [&](const Row& row, const std::optional<Sharing>& s) {
      rows.push_back(row);
      if (s) sharing = s;
    });
    EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition) << "a peer that computes another model has no figure";
    ASSERT_TRUE(sharing) << name;
    EXPECT_EQ(sharing->logical_tokens, size.first) << name;
    EXPECT_EQ(sharing->tree_tokens, size.second) << name;
    const bool shares = name != "nothing";
    EXPECT_EQ(sharing->logical_pairs > sharing->tree_pairs, shares) << name;
    if (shares) {
      EXPECT_GT(sharing->predicted, 1) << name;
      EXPECT_LT(sharing->predicted, static_cast<double>(size.first) / size.second + 0.5) << name;
    } else {
      EXPECT_EQ(sharing->predicted, 1);
    }
    ASSERT_EQ(rows.size(), 6u) << name << ": rates, speed-up, two times, memory, the peer";
    EXPECT_EQ(rows[1].work, "tree");
    EXPECT_NEAR(rows[1].target, shares ? 0.9 * sharing->predicted : 0.97, 1e-12);
    for (const size_t i : {2, 3}) {
      EXPECT_EQ(rows[i].work, "time");
      EXPECT_EQ(rows[i].target, 1.15);
      EXPECT_GT(rows[i].ratio, 0) << rows[i].name << ": how long it took here, of what was predicted, is no test's";
    }
    EXPECT_NEAR(size.first / rows[1].ours, rows[2].ours, 0.01 * rows[2].ours) << "tokens/s are of the tree's seconds";
    EXPECT_EQ(rows[4].work, "memory");
    EXPECT_GT(rows[4].ours, 0);
    EXPECT_NE(rows[5].note.find("not run: peer torch: no such model"), std::string::npos) << rows[5].note;
  }
  options.sets = {"budget"};
  int ways = 0;
  double least = 1e9;
  const Status status = RunTreeBench(*engine, options, [&](const Row& row, const std::optional<Sharing>&) {
    if (row.work != "memory") return;
    ++ways;
    EXPECT_EQ(row.ratio, 1) << row.name << ": what is planned is what is held";
    EXPECT_LE(row.ours, least + 1e-9) << row.name;
    least = row.ours;
  });
  EXPECT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(ways, 5);
}

// Could go wrong: a run's rows are measured as other trees than the trainer makes of them.
TEST(TreeBench, RowsOfARunAreItsTrees) {
  const std::string path = testing::TempDir() + "rows.jsonl";
  // Two calls of one rollout, the second with the first in its history, and another rollout; a token is drawn in the first row that holds it.
  ASSERT_TRUE(WriteFile(path,
                        R"({"step":1,"group":3,"rollout":0,"sequence":0,"inv_temperature":1,"ids":[1,2,3,4],"mask":[0,0,1,1],"versions":[null,null,0,0]})" "\n"
                        R"({"step":1,"group":3,"rollout":0,"sequence":1,"inv_temperature":1,"ids":[1,2,3,5],"mask":[0,0,0,1],"versions":[null,null,0,0]})" "\n"
                        R"({"step":1,"group":4,"rollout":1,"sequence":0,"inv_temperature":1,"ids":[1,2,7],"mask":[0,0,1],"versions":[null,null,1]})" "\n"
                        R"({"step":2,"group":5,"rollout":0,"sequence":0,"silent":true,"inv_temperature":1,"ids":[9,8],"mask":[0,1],"versions":[null,1]})" "\n")
                  .ok());
  const auto sets = TreeSetsOfRows(path, 16);
  ASSERT_TRUE(sets.ok()) << sets.status().ToString();
  ASSERT_EQ(sets->size(), 2u);
  const Batch batch = BuildBatch((*sets)[0].groups, {}).value();
  EXPECT_EQ(batch.chunks[0].tree.token, (std::vector<int32_t>{1, 2, 3, 4, 5, 7}));
  EXPECT_EQ(batch.chunks[0].wanted, (std::vector<uint8_t>{0, 0, 1, 1, 1, 1}));
  EXPECT_EQ(batch.logical_tokens, 11);
  const Batch flat = BuildBatch((*sets)[0].groups, {.merge = false}).value();
  EXPECT_EQ(flat.chunks[0].tree.token, (std::vector<int32_t>{1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 7}));
  EXPECT_EQ(flat.chunks[0].wanted, (std::vector<uint8_t>{0, 0, 1, 1, 0, 0, 0, 1, 0, 0, 1})) << "a row's history is scored where it was drawn";
  EXPECT_EQ((*sets)[0].silent, (std::vector<uint8_t>{0, 0}));
  EXPECT_EQ((*sets)[1].silent, (std::vector<uint8_t>{1}));
  const auto refused = TreeSetsOfRows(path, 9);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.status().message().find("line 4"), std::string::npos) << refused.status().message();

  // What the trainer only scores is only scored here.
  TreeOptions options;
  options.samples = 2;
  options.clock = Clock::kCpu;
  options.model = testing::TempDir() + "rows_model";
  options.rows = path;
  const engine::ModelConfig config = TinyModel(16);
  ASSERT_TRUE(engine::SaveHuggingFace(options.model, config, engine::InitParameters(config, 1), {}, engine::FileType::kBF16).ok());
  auto engine = engine::MakeEngine(engine::CpuPath::kAuto, 1);
  std::optional<Sharing> sharing;
  const Status status = RunTreeBench(*engine, options, [&](const Row&, const std::optional<Sharing>& s) {
    if (s) sharing = s;
  });
  ASSERT_TRUE(status.ok()) << status.ToString();
  ASSERT_TRUE(sharing);
  EXPECT_EQ(sharing->logical_tokens, 13);
  EXPECT_EQ(sharing->tree_tokens, 8);
  EXPECT_EQ(sharing->silent_tokens, 2);
}

}  // namespace
}  // namespace temper::trainer::bench
