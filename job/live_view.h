// What a person sees of a running job: a small panel on a terminal, plain lines elsewhere. Rendering is pure.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace temper::job {

// One line of metrics.jsonl, as far as it is shown.
struct StepView {
  int64_t step = 0;
  double reward = 0;
  int64_t staleness = 0;
  double train_tokens_per_s = 0;
  double wait_s = 0;
};

struct ViewState {
  std::string name;
  std::string phase;  // "starting", "warm-up", "training", "evaluating", "stopping"
  double elapsed_s = 0;
  int64_t steps = 0;  // of the whole job
  std::vector<StepView> history;
  double warm_up_tokens = 0, warm_up_tokens_all = 0, warm_up_loss = 0;
  double sample_tokens_per_s = 0;
  std::optional<int64_t> staleness_bound;
  int64_t slots = 0;              // B
  std::optional<int64_t> window;  // W
  std::map<std::string, double> pool;      // metrics of the pool role
  std::map<std::string, double> outcomes;  // attempts by outcome
  double attempts_running = 0, eval_done = 0, eval_tasks = 0;
  std::vector<std::pair<int64_t, double>> evaluations;  // version, pass rate
  int64_t restarts = 0;
  std::vector<std::string> notes;  // recent events, newest last
};

// The last `width` values as bars of eight heights, between the smallest and the largest.
std::string Sparkline(const std::vector<double>& values, size_t width);

// The panel: lines without line ends, each at most `width` columns.
std::vector<std::string> RenderPanel(const ViewState& view, size_t width);

// The plain line of one step.
std::string RenderStep(const ViewState& view, const StepView& step);

}  // namespace temper::job
