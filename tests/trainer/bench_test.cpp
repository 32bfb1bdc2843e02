// `temper bench engine`: every row is a ratio of two figures of one run, peers answer for themselves.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>

#include "common/file.h"
#include "common/json.h"
#include "engine/bf16.h"
#include "engine/train_pass.h"
#include "tests/engine/test_models.h"
#include "trainer/bench/commands.h"
#include "trainer/bench/counted_kernels.h"
#include "trainer/bench/engine_bench.h"
#include "trainer/bench/floors.h"
#include "trainer/bench/peer.h"

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
    EXPECT_LT(row.ratio, 3) << row.name << " of " << row.reference << ": no one is far faster than what the machine can do";
  });
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(rows["attention"], 2);
  EXPECT_EQ(rows["step"], 1);
  EXPECT_EQ(rows["prefill"], 1);
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
  double share = 0;
  std::map<std::string, int> rows;
  const Status status = RunEngineBench(*engine, options, [&](const Row& row) {
    ++rows[row.work];
    EXPECT_GT(row.ours, 0) << row.name;
    EXPECT_GT(row.ratio, 0) << row.name;
    if (const size_t end = row.name.find(" %"); end != std::string::npos) {
      share += std::stod(row.name.substr(row.name.rfind(": ", end) + 2));
    }
  });
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_NEAR(share, 100, 1);
  EXPECT_EQ(rows["roofline"], 14);
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
    std::map<std::string, Row> rows;
    const Status status =
        RunEngineBench(*engine, options, [&](const Row& row) { rows[row.work + " " + row.unit + " " + row.reference] = row; });
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
    if (weak) continue;
    EXPECT_GT(rows["prefill tokens/s the best: torch float32"].target, 1);
    const Row& memory = rows["step MiB the best: torch float32"];
    EXPECT_NEAR(memory.theirs, 1e6, 1);
    EXPECT_GT(memory.ours, 487) << "weights, gradients and moments in fp32, as they are resident";
    EXPECT_LT(memory.ours, 8000);
    EXPECT_EQ(memory.target, 0.6);
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
        double seconds = 1;  // the best of several; other programs run
        for (int i = 0; i < 5; ++i) {
          seconds = std::min(seconds, ReadAndMultiply(*engine, profile, {{memory, rows}}, Clock::kCpu));
        }
        const int done = path == engine::CpuPath::kAvx2 ? rows / 2 * 2 : rows;
        const double numbers = static_cast<double>(memory.size()) / (profile == engine::Profile::kBf16 ? 2 : 4);
        EXPECT_LT(2 * numbers * done / seconds, 1.1 * PeakFlops(*engine, Clock::kCpu)) << engine::CpuPathName(path) << " " << rows;
      }
    }
  }
}

}  // namespace
}  // namespace temper::trainer::bench
