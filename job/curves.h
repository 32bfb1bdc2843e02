// What `temper plot` draws: the course of a run, read from its folder, or of another system, from a file of lines.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/status.h"

namespace temper::job {

struct CurvePoint {
  int64_t step = 0;
  double reward = 0;                       // mean over the step's rollouts
  double wall_s = 0;                       // since the job began, rising; breaks between a stop and a resume left out
  std::optional<double> staleness;         // the largest of the step, in updates
  std::optional<double> sample_tokens_per_s;  // sampled tokens the step trained on, by the time since the step before
  std::optional<double> train_tokens_per_s;   // logical tokens by the time of batch, passes and optimizer
};

struct CurveEvaluation {
  int64_t step = 0;  // the version that was evaluated
  double wall_s = 0;  // when it was judged, by the same clock
  double value = 0;   // mean reward
};

struct Curve {
  std::string name;
  bool run = false;  // of a run folder: has evaluations, staleness and speeds
  std::vector<CurvePoint> points;
  std::vector<CurveEvaluation> evaluations;
  std::optional<double> staleness_bound;
};

// `argument`: a run folder, FILE.jsonl, or NAME=ONE-OF-THESE to call it so. Lines of a file:
// {"step":n,"reward_mean":x,"wall_s":t}, steps and seconds rising, other fields unread. Failures name file, line and field. A run
// without a step yet is a curve without points.
//
// Times of a run are `job_s` of metrics.jsonl and eval.jsonl. Runs recorded before there was one have `wall_s` of each trainer's
// start, which goes on where the last step was; their evaluations stand behind the step they judged by their own duration, the
// first one behind the warm-up of sft.jsonl, or, without that file, where the waiting for the first step began at the latest.
Result<Curve> ReadCurve(const std::string& argument);

}  // namespace temper::job
