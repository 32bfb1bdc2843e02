// The engine beside what the machine can do, and beside its peers: every figure is a ratio, both sides measured in one run,
// sample by sample in turn.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "common/status.h"
#include "engine/engine.h"
#include "trainer/bench/floors.h"
#include "trainer/bench/peer_figures.h"
#include "trainer/bench/row.h"

namespace temper::trainer::bench {

constexpr int kDecodeContext = 128;  // positions behind each token of `decode`

struct Options {
  int samples = 10;
  Clock clock = Clock::kWall;
  engine::Profile profile = engine::Profile::kBf16;
  std::vector<std::string> works;  // see Works(); empty: all
  std::vector<std::string> peers;  // torch, vllm, llama.cpp
  std::vector<std::string> modes;  // of peers: float32, bfloat16, …; empty: all that each has
  std::vector<int> batches = {1, 4, 16, 64};       // of `decode`
  std::map<std::string, std::string> interpreters;  // of each peer, for peers.py
  std::string peer_script;
  // Whether peers may use what of this CPU our path does not (`avx512`: the instructions for bf16), or are capped alike.
  bool best_peers = false;
  int prefill_tokens = 512;                         // of `prefill`
  int step_rows = 2, step_length = 256;  // the batch of `step`
  int memory_length = 1024;              // of its rows where only memory is compared; no longer than step_length: not at all
  int growth_tokens = 4096;              // the longest row of `growth`
  int head_tokens = 2048;                // the longest row of `head`, and its vocabularies
  std::vector<int> head_vocabs = {49152, 151936};
  int layers = 0;                        // of the model; 0: all
  // What a peer should reach here, in tokens/s; 0: not known. Asked only where the model is whole.
  std::function<double(const std::string& peer, const std::string& work, int batch, const MachineRates& here)> expected =
      ExpectedTokensPerSecond;
};
// The model that is measured, and the row whose log-probabilities say that a peer computes the same one.
engine::ModelConfig BenchModel(int layers);
std::vector<int32_t> CheckRow(int vocab);
// The words `works`, `peers` and `modes` may hold.
const std::vector<std::string>& Works();
const std::vector<std::string>& Peers();
const std::vector<std::string>& Modes();

// Runs what `options` names; `emit` gets each row as soon as it is there. A peer that does not start or cannot do a work has a row that
// says so, and when all is done FailedPrecondition names the first.
Status RunEngineBench(engine::Engine& engine, const Options& options, const std::function<void(const Row&)>& emit);

}  // namespace temper::trainer::bench
