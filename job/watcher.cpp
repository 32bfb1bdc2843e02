#include "job/watcher.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <span>
#include <thread>

#include "common/file.h"
#include "common/json.h"
#include "common/rpc.h"
#include "trainer/loop.h"

namespace temper::job {
namespace {

constexpr double kPollS = 0.5;
constexpr double kAnswerS = 0.3;  // for one role, round and round
constexpr double kRateWindowS = 10;
constexpr double kStepWindowS = 2;  // at least, of a step's rate: batches that wait in a row are trained in less than a look
// Sums that must survive the process that counts them.
constexpr char kCpuPath[] = "cpu_path.";
constexpr const char* kCounters[] = {"gateway.tokens_sampled", "gateway.tokens_sampled_eval"};

const char* PhaseName(double phase) {
  switch (static_cast<trainer::Phase>(static_cast<int>(phase))) {
    case trainer::Phase::kStarting: return "starting";
    case trainer::Phase::kWarmUp: return "warm-up";
    case trainer::Phase::kEvaluating: return "evaluating";
    case trainer::Phase::kCollecting: return "collecting";
    case trainer::Phase::kProving: return "proving";
    case trainer::Phase::kTraining: return "training";
  }
  return "";
}

// A role tells its last lines: those behind what was known. With more new ones than it keeps, all of them are.
std::span<const std::string> NewLines(const std::vector<std::string>& known, const std::vector<std::string>& lines) {
  for (size_t gone = 0; gone < known.size(); ++gone) {
    const std::span<const std::string> kept = std::span(known).subspan(gone);
    if (kept.size() <= lines.size() && std::equal(kept.begin(), kept.end(), lines.begin())) return std::span(lines).subspan(kept.size());
  }
  return lines;
}

double NumberOr(const json::value& value, std::string_view key, double fallback) {
  auto number = JsonRef(value).DoubleOr(key, fallback);
  return number.ok() ? *number : fallback;
}

}  // namespace

void AddSources(const std::vector<PlannedSource>& sources, WatcherOptions* options) {
  for (const PlannedSource& source : sources) {
    options->sources.push_back({source.name, source.window});
    options->slots += source.slots;
  }
}

// Asks every role for its snapshot, round and round.
class Watcher::Poller {
 public:
  struct Answer {
    RoleSnapshot snapshot;
    double at_s = 0;
  };
  Poller(const std::map<std::string, std::string>& addresses, Clock& clock) : clock_(clock) {
    for (const auto& [name, address] : addresses) channels_.emplace_back(name, RpcChannel(address));
  }
  ~Poller() { Stop(); }
  void Start() {
    thread_ = std::thread([this] {
      std::unique_lock lock(mutex_);
      while (!stop_) {
        lock.unlock();
        PollOnce(kAnswerS);
        lock.lock();
        wake_.wait_for(lock, std::chrono::duration<double>(kPollS), [this] { return stop_; });
      }
    });
  }
  void Stop() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    if (thread_.joinable()) thread_.join();
  }
  void PollOnce(double answer_s) {
    for (auto& [name, channel] : channels_) {
      auto snapshot = FetchSnapshot(*channel, answer_s);
      if (!snapshot.ok()) continue;
      std::lock_guard lock(mutex_);
      latest_[name] = {std::move(*snapshot), clock_.NowS()};
    }
  }
  std::map<std::string, Answer> Latest() const {
    std::lock_guard lock(mutex_);
    return latest_;
  }

 private:
  Clock& clock_;
  std::vector<std::pair<std::string, std::shared_ptr<grpc::Channel>>> channels_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  std::map<std::string, Answer> latest_;
  std::thread thread_;
};

// Reads whole new lines of a growing file.
class Watcher::Tail {
 public:
  explicit Tail(std::string path) : path_(std::move(path)) {}
  // `again`: the file was cut, and these lines are all of it.
  std::vector<json::value> NewLines(bool* again) {
    std::vector<json::value> lines;
    *again = false;
    auto text = ReadFile(path_);
    if (!text.ok()) return lines;
    *again = text->size() < offset_;  // on a rollback
    if (*again) offset_ = 0;
    for (size_t end; (end = text->find('\n', offset_)) != std::string::npos; offset_ = end + 1) {
      if (auto value = ParseJson(std::string_view(*text).substr(offset_, end - offset_)); value.ok()) lines.push_back(std::move(*value));
    }
    return lines;
  }

 private:
  const std::string path_;
  size_t offset_ = 0;
};

Watcher::Watcher(WatcherOptions options, Clock& clock)
    : options_(std::move(options)),
      clock_(clock),
      started_s_(clock.NowS()),
      poller_(std::make_unique<Poller>(options_.addresses, clock)),
      metrics_(std::make_unique<Tail>(options_.run_dir + "/metrics.jsonl")),
      evaluations_(std::make_unique<Tail>(options_.run_dir + "/eval.jsonl")),
      finished_(options_.counters) {
  for (const char* name : kCounters) drawn_before_ += finished_[name];
  view_.name = options_.name;
  view_.phase = "starting";
  view_.steps = options_.steps;
  view_.staleness_bound = options_.staleness_bound;
  view_.sources = options_.sources;
  view_.slots = options_.slots;
  view_.warm_up_tokens_all = static_cast<double>(options_.warm_up_tokens);
  view_.rollouts_per_step = options_.rollouts_per_step;
  News before;
  ReadFiles(&before);
}

Watcher::~Watcher() = default;
void Watcher::Start() { poller_->Start(); }
void Watcher::Stop() { poller_->Stop(); }
void Watcher::PollNow(double answer_s) { poller_->PollOnce(answer_s); }

double Watcher::Metric(const std::string& role, const std::string& name) const {
  auto it = metrics_of_.find(role);
  if (it == metrics_of_.end()) return 0;
  auto metric = it->second.find(name);
  return metric == it->second.end() ? 0 : metric->second;
}

void Watcher::TakeSnapshots() {
  for (auto& [role, answer] : poller_->Latest()) {
    const RoleSnapshot& snapshot = answer.snapshot;
    if (role == "gateway") gateway_s_ = answer.at_s;
    std::vector<std::string>& known = lines_of_[role];
    if (pids_[role] != snapshot.pid) known.clear();
    for (const std::string& line : NewLines(known, snapshot.lines)) {
      fresh_lines_.push_back(role + ": " + line);
      for (char& c : fresh_lines_.back()) c = static_cast<unsigned char>(c) < ' ' ? ' ' : c;  // words of a program: one line all the same
    }
    known = snapshot.lines;
    pids_[role] = snapshot.pid;
    metrics_of_[role] = snapshot.metrics;
    for (const auto& [name, value] : snapshot.metrics) {
      if (name.rfind(kCpuPath, 0) == 0) finished_[role + "." + name] = value;
    }
  }
  for (const char* name : kCounters) {
    const std::string full(name);
    const size_t dot = full.find('.');
    const std::string role = full.substr(0, dot);
    auto it = metrics_of_.find(role);
    if (it == metrics_of_.end() || !it->second.count(full.substr(dot + 1))) continue;
    auto& [pid, value] = running_[full];
    if (pid != 0 && pid != pids_[role]) finished_[full] += value;
    pid = pids_[role];
    value = it->second[full.substr(dot + 1)];
  }
}

std::map<std::string, double> Watcher::Counters() const {
  std::map<std::string, double> sums = finished_;
  for (const auto& [name, running] : running_) sums[name] += running.second;
  return sums;
}

double Watcher::SamplingS() const {
  return options_.sampling_before_s + (sampling_from_s_ < 0 ? 0 : clock_.NowS() - sampling_from_s_);
}

News Watcher::Refresh() {
  News news;
  TakeSnapshots();
  const double now_s = clock_.NowS();
  TakeLines(now_s, &news);
  view_.elapsed_s = options_.elapsed_before_s + now_s - started_s_;
  std::map<std::string, double> counters = Counters();
  const double drawn = counters["gateway.tokens_sampled"] + counters["gateway.tokens_sampled_eval"];
  if (drawn > drawn_before_ && sampling_from_s_ < 0) sampling_from_s_ = now_s;
  TakeDrawn(now_s, drawn);
  view_.warm_up_steps = Metric("trainer", "sft_steps");
  view_.warm_up_tokens = Metric("trainer", "sft_tokens");
  view_.warm_up_loss = Metric("trainer", "sft_loss");
  view_.pool = metrics_of_["pool"];
  view_.outcomes.clear();
  for (const auto& [name, value] : view_.pool) {
    if (name.rfind("outcome.", 0) == 0) view_.outcomes[name.substr(8)] = value;
  }
  view_.eval_done = Metric("agents", "eval_done");
  view_.eval_tasks = Metric("agents", "eval_tasks");
  view_.buried = Metric("pool", "tombstoned");
  const double finished = Metric("pool", "finished");
  if (!finished_at_step_ && metrics_of_.count("pool")) finished_at_step_ = finished;
  ReadFiles(&news);
  if (!news.steps.empty()) {
    const std::optional<double> rate = StepRate();
    for (StepView& step : news.steps) step.sample_tokens_per_s = rate;
    if (finished_at_step_) finished_at_step_ = finished;
  }
  view_.rollouts_since_step = std::max(0.0, finished - finished_at_step_.value_or(finished));
  if (metrics_of_.count("trainer")) view_.phase = PhaseName(Metric("trainer", "phase"));
  else view_.phase = view_.history.empty() ? "starting" : "training";
  return news;
}

void Watcher::TakeLines(double now_s, News* news) {
  constexpr size_t kKept = 20;
  news->said = chatter_.Take(std::exchange(fresh_lines_, {}), now_s);
  view_.notes.insert(view_.notes.end(), news->said.begin(), news->said.end());
  if (view_.notes.size() > kKept) view_.notes.erase(view_.notes.begin(), view_.notes.end() - kKept);
}

// One look at the gateway's count is worth one entry, however often the view is refreshed.
void Watcher::TakeDrawn(double now_s, double drawn) {
  if (gateway_s_ > gateway_taken_s_) {
    gateway_taken_s_ = gateway_s_;
    drawn_.emplace_back(gateway_s_, drawn);
    while (drawn_.size() > 2 && drawn_[1].first < gateway_s_ - kRateWindowS) drawn_.erase(drawn_.begin());
    // Until a token comes, the count has not begun: loading and warming up are no time of sampling.
    step_drawn_ = step_drawn_ || (!step_looks_.empty() && drawn > step_looks_[0].second);
    if (!step_drawn_) step_looks_ = {drawn_.back()};
  }
  if (drawn_.size() < 2) return;
  const auto [from_s, from] = drawn_.front();
  const auto [to_s, to] = drawn_.back();
  view_.sample_tokens_per_s = now_s - to_s > kRateWindowS ? 0 : (to - from) / (to_s - from_s);
}

std::optional<double> Watcher::StepRate() {
  if (step_looks_.empty()) return std::nullopt;
  const auto [now_s, now] = drawn_.back();
  while (step_looks_.size() > 1 && step_looks_[1].first <= now_s - kStepWindowS) step_looks_.erase(step_looks_.begin());
  const auto [from_s, from] = step_looks_[0];
  if (now_s > step_looks_.back().first) step_looks_.push_back(drawn_.back());
  return now_s > from_s ? std::optional((now - from) / (now_s - from_s)) : std::nullopt;
}

void Watcher::ReadFiles(News* news) {
  bool again = false;
  const std::vector<json::value> lines = metrics_->NewLines(&again);
  const int64_t known = again && !view_.history.empty() ? view_.history.back().step : -1;
  for (const json::value& line : lines) {
    StepView step;
    step.step = static_cast<int64_t>(NumberOr(line, "step", 0));
    step.reward = NumberOr(line, "reward_mean", 0);
    step.staleness = static_cast<int64_t>(NumberOr(line, "staleness_max", 0));
    step.wait_s = NumberOr(line, "wait_s", 0);
    double train_s = 0;
    for (const char* part : {"batch_s", "forward_s", "backward_s", "optimizer_s"}) train_s += NumberOr(line, part, 0);
    step.train_tokens_per_s = train_s > 0 ? NumberOr(line, "logical_tokens", 0) / train_s : 0;
    while (!view_.history.empty() && view_.history.back().step >= step.step) view_.history.pop_back();
    view_.history.push_back(step);
    if (step.step > known) news->steps.push_back(step);
  }
  for (const json::value& line : evaluations_->NewLines(&again)) {
    news->evaluations.emplace_back(static_cast<int64_t>(NumberOr(line, "version", 0)), NumberOr(line, "pass_rate", 0));
    view_.evaluations.push_back(news->evaluations.back());
  }
}

void PanelPrinter::Draw(const ViewState& view) {
  winsize size{};
  const size_t width = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 20 ? size.ws_col - 1 : 120;
  std::string text;
  if (lines_ > 0) text += fmt::format("\x1b[{}A", lines_);
  const std::vector<std::string> lines = RenderPanel(view, width);
  for (const std::string& line : lines) text += (terminal_ ? "\x1b[2K" : "") + line + "\n";
  if (terminal_) {
    text += "\x1b[J";
    lines_ = lines.size();
  }
  std::fputs(text.c_str(), stdout);
  std::fflush(stdout);
}

}  // namespace temper::job
