// Scoring rows of ids by every path the engine has: what `temper engine score` prints, and what tests compare.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/status.h"
#include "engine/engine.h"
#include "engine/parameters.h"
#include "engine/weights.h"

namespace temper::engine {

struct ScoreRow {
  std::vector<int32_t> ids;  // at least one, inside the vocabulary
  double temperature = 1;    // see CheckTemperature
  std::vector<std::string> kept = {};  // empty, or per id the tokens it was drawn from (engine/kept_set.h)
};

struct ScoreOptions {
  enum class Mode {
    kFlat,     // every row a batch of its own, through the training forward
    kTree,     // all rows merged into one tree batch
    kPrefill,  // pages, `chunk` tokens at a time, row by row
    kDecode,   // pages, one token at a time, all rows together
  };
  Mode mode = Mode::kFlat;
  int chunk = 64;
  int top = 0;  // how many of the likeliest next tokens to give after each token
};

struct RowScores {
  std::vector<double> logprobs;  // [i] of ids[i] given those before, among its kept tokens; NaN for the first
  // After each token: (id, logprob), likeliest first, equal ones by id. Empty unless asked for.
  std::vector<std::vector<std::pair<int32_t, double>>> top;
};

// The `count` likeliest tokens of a row of logits (fewer where there are fewer): (id, logits[id] - log_sum_exp), likeliest first, equal ones
// by id. `among`: none but these ids; empty: all.
std::vector<std::pair<int32_t, double>> Likeliest(std::span<const float> logits, float log_sum_exp, int count,
                                                  std::span<const int32_t> among = {});

// What logits may be divided by: beyond 1e-30 to 1e30 a float, or the sum of two, no longer holds what comes out.
Status CheckTemperature(double temperature);
// InvalidArgument says what is wrong with the row.
Status CheckScoreRow(const ModelConfig& config, const ScoreRow& row);
// Rows must pass CheckScoreRow.
std::vector<RowScores> Score(Engine& engine, const ComputeWeights& weights, const std::vector<ScoreRow>& rows,
                             const ScoreOptions& options);
// The same in double from the master weights; `mode` changes nothing.
std::vector<RowScores> ScoreReference(const Parameters& params, const std::vector<ScoreRow>& rows, const ScoreOptions& options);

}  // namespace temper::engine
