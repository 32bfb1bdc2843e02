// The engine beside what the machine can do, and beside its peers: every figure is a ratio, both sides measured in one run,
// sample by sample in turn.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "common/status.h"
#include "engine/engine.h"
#include "trainer/bench/floors.h"

namespace temper::trainer::bench {

struct Options {
  int samples = 10;
  Clock clock = Clock::kWall;
  engine::Profile profile = engine::Profile::kBf16;
  std::vector<std::string> works;  // gemm, decode, prefill, attention, step, growth; empty: all
  std::vector<std::string> peers;  // torch
  std::string peer_program;        // the interpreter of peers.py
  std::string peer_script;
  int step_rows = 2, step_length = 256;  // the batch of `step`
  int growth_tokens = 4096;              // the longest row of `growth`
  int layers = 0;                        // of the model; 0: all
};
// The words `works` may hold.
const std::vector<std::string>& Works();
const std::vector<std::string>& Peers();

struct Row {
  std::string work;             // "gemm"
  std::string name;             // the case: "SmolLM2-135M gate and up, 64 x 3072 x 576"
  double ours = 0;              // the median
  std::string unit;             // "GFLOP/s", "tokens/s", …: more is better; "bytes": less is
  std::string reference;        // what `theirs` is: "read bandwidth", "FMA peak", "torch float32", …
  double theirs = 0;            // the median
  double ratio = 0;             // the median of ours / theirs of the samples taken in turn
  std::vector<double> samples;  // ours
};

// Runs what `options` names; `emit` gets each row as soon as it is there. FailedPrecondition: a peer does not start or fails.
Status RunEngineBench(engine::Engine& engine, const Options& options, const std::function<void(const Row&)>& emit);

}  // namespace temper::trainer::bench
