// How much the last evaluation of a run is better than its first, task by task, and how sure that is.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/rng.h"
#include "common/status.h"

namespace temper::job {

struct EvalChange {
  double first = 0, last = 0;  // mean rewards of the paired tasks
  double mean = 0;             // of their differences
  double low = 0, high = 0;    // 95 %: percentiles 2.5 and 97.5 of the means of the resamples
  int64_t tasks = 0;           // pairs
  int64_t unpaired = 0;        // tasks without a valid reward in one evaluation or both
  int64_t resamples = 0;
};

inline constexpr int64_t kResamples = 10000;

// The paired percentile bootstrap: tasks are drawn with replacement, each with both of its rewards. Element i of both lists is
// task i; nullopt: our own parts failed it. Nullopt when the lists are not of the same tasks (other lengths) or no pair is left.
std::optional<EvalChange> PairedChange(const std::vector<std::optional<double>>& first,
                                       const std::vector<std::optional<double>>& last, Rng rng, int64_t resamples = kResamples);

// Of the first and the last line of RUN/eval.jsonl; nullopt where there are not two evaluations that say their rewards by task.
std::optional<EvalChange> ReadEvalChange(const std::string& run_dir, uint64_t seed);

// "held-out 0.225 → 0.470, +0.245 [0.180, 0.310] over 200 tasks"
std::string PrintEvalChange(const EvalChange& change);

}  // namespace temper::job
