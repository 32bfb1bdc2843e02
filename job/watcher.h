// Watches a run: asks the roles for their numbers on a thread of its own, reads the new lines of the run's files, and keeps the
// view of both. Used by the supervisor and by `temper top`.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/clock.h"
#include "job/live_view.h"
#include "job/plan.h"

namespace temper::job {

// Among the counters of a run: restarts of its roles.
inline constexpr char kRestartsCounter[] = "supervisor.restarts";

struct WatcherOptions {
  std::string run_dir;
  std::string name;  // of the job
  int64_t steps = 0;
  std::optional<int64_t> staleness_bound;
  std::vector<SourceView> sources;
  int64_t slots = 0;  // of all sources
  int64_t rollouts_per_step = 0;
  int64_t warm_up_tokens = 0;  // 0 = no warm-up
  double elapsed_before_s = 0, sampling_before_s = 0;  // of earlier starts of the run
  std::map<std::string, double> counters;         // of processes that are gone
  std::map<std::string, std::string> addresses;  // role name -> control socket
};

void AddSources(const std::vector<PlannedSource>& sources, WatcherOptions* options);

// What is new since the last Refresh; what the files held before the first one is not new.
struct News {
  std::vector<StepView> steps;
  std::vector<std::pair<int64_t, double>> evaluations;
  std::vector<std::string> said;  // by the roles: alarms, failures, groups that were buried; among the view's notes too
};

// Single-threaded apart from its own polling thread.
class Watcher {
 public:
  Watcher(WatcherOptions options, Clock& clock);
  ~Watcher();  // stops
  void Start();
  void Stop();      // no more polling; the last numbers stay
  void PollNow(double answer_s = 0.3);  // before Start or after Stop: asks once, waiting so long for each role
  News Refresh();
  ViewState& view() { return view_; }
  // What survives the processes that say it: sums ("gateway.tokens_sampled", …), and the kernels that roles ran on
  // ("trainer.cpu_path.avx512" = 1).
  std::map<std::string, double> Counters() const;
  // Seconds from the first token drawn, in each start of the run.
  double SamplingS() const;

 private:
  class Poller;
  class Tail;
  double Metric(const std::string& role, const std::string& name) const;
  void TakeSnapshots();
  // What the roles said since the last look.
  void TakeLines(double now_s, News* news);
  void TakeDrawn(double now_s, double drawn);
  // Of the steps that are new now; they begin the next one's.
  std::optional<double> StepRate();
  // Appends the new lines of the files to the view.
  void ReadFiles(News* news);

  const WatcherOptions options_;
  Clock& clock_;
  const double started_s_;
  std::unique_ptr<Poller> poller_;
  std::unique_ptr<Tail> metrics_, evaluations_;
  ViewState view_;
  std::map<std::string, std::map<std::string, double>> metrics_of_;  // role -> name -> value
  std::map<std::string, double> finished_;
  std::map<std::string, std::pair<int64_t, double>> running_;        // pid and last value
  std::map<std::string, int64_t> pids_;
  std::map<std::string, std::vector<std::string>> lines_of_;  // role -> its last lines, of the process that is looked at
  std::vector<std::string> fresh_lines_;
  Chatter chatter_;
  double gateway_s_ = -1, gateway_taken_s_ = -1;                     // when it last answered; that look is in drawn_
  std::vector<std::pair<double, double>> drawn_;                     // time, tokens: looks of the last seconds
  std::vector<std::pair<double, double>> step_looks_;                // before the first token, then at steps: what they count from
  bool step_drawn_ = false;                                          // a token came since the first look
  std::optional<double> finished_at_step_;
  double drawn_before_ = 0;  // tokens, in earlier starts
  double sampling_from_s_ = -1;
};

// Draws the panel on standard output: over the former one on a terminal, else plainly.
class PanelPrinter {
 public:
  explicit PanelPrinter(bool terminal = true) : terminal_(terminal) {}
  void Draw(const ViewState& view);

 private:
  const bool terminal_;
  size_t lines_ = 0;
};

}  // namespace temper::job
