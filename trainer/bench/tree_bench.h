// What merging prefixes gives: forward and backward over trees beside the same rollouts as separate rows, ours and a peer's, and
// beside what was predicted before.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "common/status.h"
#include "engine/engine.h"
#include "engine/pass_time.h"
#include "trainer/bench/floors.h"
#include "trainer/bench/row.h"

namespace temper::trainer::bench {

struct TreeOptions {
  int samples = 5;
  Clock clock = Clock::kWall;
  engine::Profile profile = engine::Profile::kBf16;
  std::vector<std::string> sets;  // TreeSetNames() and `budget`; empty: all
  std::string model;              // MODEL of the command line; empty: weights of SmolLM2-135M's shape, drawn from a seed
  int layers = 0;                 // of that shape; 0: all
  std::string rows;               // a file of `temper pool export`: its steps in place of the sets, one a sample; needs `model`
  bool torch = false;             // beside PyTorch on separate rows
  std::vector<std::string> modes = {"float32", "bfloat16"};  // of it
  std::string interpreter, peer_script;
  bool best_peers = false;
};

// Of a set, beside its speed-up.
struct Sharing {
  int64_t logical_tokens = 0, tree_tokens = 0;
  int64_t silent_tokens = 0;                 // of the logical ones: of groups that are scored and not differentiated
  double logical_pairs = 0, tree_pairs = 0;  // a token and one that it sees, itself included
  double predicted = 0;                      // speed-up
};

// Rows of kinds `tree` (logical tokens/s of a forward and backward pass), `time` (seconds, beside those predicted: the ratio is to be within
// 15 % of 1), `memory` (MiB of a pass, the tree's beside the rows', or measured beside planned). Each set's first row has its Sharing. As
// RunEngineBench otherwise.
Status RunTreeBench(engine::Engine& engine, const TreeOptions& options,
                    const std::function<void(const Row&, const std::optional<Sharing>&)>& emit);

}  // namespace temper::trainer::bench
