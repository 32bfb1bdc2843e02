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
  // Tokens drawn since the step before, or since the first token, by the time since; over two seconds at least.
  std::optional<double> sample_tokens_per_s = std::nullopt;
};

// A source of tasks, and how wide its window is; nothing = none.
struct SourceView {
  std::string name;
  std::optional<int64_t> window;  // W
};

struct ViewState {
  std::string name;
  // "starting", "warm-up", "evaluating", "collecting", "proving", "training", "stopping"; of an ended run how it ended
  std::string phase;
  bool ended = false;  // nobody works on it any more
  double elapsed_s = 0;
  int64_t steps = 0;  // of the whole job
  std::vector<StepView> history;
  double warm_up_steps = 0, warm_up_tokens = 0, warm_up_tokens_all = 0, warm_up_loss = 0;
  std::optional<double> sample_tokens_per_s;  // over the last seconds; absent until there were two looks
  bool sample_is_mean = false;                // it is the mean since the job's first token instead
  std::optional<int64_t> staleness_bound;
  int64_t slots = 0;                // of all sources
  std::vector<SourceView> sources;  // at least one while it runs
  std::map<std::string, double> pool;      // metrics of the pool role
  std::map<std::string, double> outcomes;  // attempts by outcome, of the whole run
  double buried = 0;                       // groups that ended without being trained on, of the whole run
  int64_t rollouts_per_step = 0;
  double rollouts_since_step = 0;  // that came to their end
  double eval_done = 0, eval_tasks = 0;
  std::vector<std::pair<int64_t, double>> evaluations;  // version, pass rate
  int64_t restarts = 0;
  std::vector<std::string> notes;  // recent events, newest last
};

// The last `width` values as bars of eight heights, between the smallest and the largest.
std::string Sparkline(const std::vector<double>& values, size_t width);

// The panel: lines without line ends, each at most `width` columns.
std::vector<std::string> RenderPanel(const ViewState& view, size_t width);

// Where the job stands between two steps, in one plain line: "evaluating: 37 of 200 tasks judged (2:10)".
std::string RenderProgress(const ViewState& view);

// Says when such a line is due where there is no panel: at each change of the phase (between the steps of the training itself
// only before the first), and when nothing was said for 30 s.
class Progress {
 public:
  static constexpr double kSilenceS = 30;
  bool Due(const ViewState& view, double now_s);  // counts as said when true
  void Said(double now_s) { said_s_ = now_s; }    // some other line

 private:
  std::string phase_;
  double said_s_ = 0;
};

// What the roles have to say, as a person reads it: the first line of a kind at once; those like it that follow are counted, and the last of
// them is told when ten seconds are over. Two lines are of a kind when they begin alike but for their numbers.
class Chatter {
 public:
  static constexpr double kTogetherS = 10;
  // New lines, oldest first; gives what is to be told now. Call it without lines too, so that what was counted is told in its time.
  std::vector<std::string> Take(const std::vector<std::string>& lines, double now_s);

 private:
  struct Kind {
    double told_s = 0;
    int64_t more = 0;  // since then
    std::string last;
  };
  std::map<std::string, Kind> kinds_;
};

// The plain line of one step.
std::string RenderStep(const ViewState& view, const StepView& step);

}  // namespace temper::job
