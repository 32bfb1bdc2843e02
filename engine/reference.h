// The slow, clear path: the same model in double precision from the fp32 master weights, with no blocking, packing or
// threads. It judges the fast paths. Quadratic in path length and allocates freely.
#pragma once

#include <span>
#include <vector>

#include "engine/parameters.h"
#include "engine/tree_batch.h"

namespace temper::engine {

struct ReferenceResult {
  double objective = 0;          // Σ coef · logprob over non-roots
  std::vector<double> logprobs;  // per node, among its kept tokens; NaN at roots
  std::vector<double> gradient;  // dJ/dθ in the layout of Parameters::flat(); empty unless asked for
  // Per node the log-probabilities of the next token ([vocab], at T = 1 / row_inv_temperature); empty unless asked for.
  std::vector<std::vector<double>> rows;
};

struct ReferenceOptions {
  std::span<const double> coef;  // per node; empty: zeros
  // Per node 1/T in double; empty: the tree's own, which are fp32.
  std::span<const double> inv_temperature;
  bool gradient = false;
  bool rows = false;
  double row_inv_temperature = 1;
};

// `tree` must be valid for the config (tokens in the vocabulary, kept sets that hold them); checked.
ReferenceResult RunReference(const Parameters& params, const TreeBatch& tree, const ReferenceOptions& options);

}  // namespace temper::engine
