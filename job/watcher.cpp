#include "job/watcher.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <thread>

#include "common/file.h"
#include "common/json.h"
#include "common/rpc.h"

namespace temper::job {
namespace {

constexpr double kPollS = 0.5;
constexpr double kAnswerS = 0.3;
constexpr double kRateWindowS = 10;
// Sums that must survive the process that counts them.
constexpr char kCpuPath[] = "cpu_path.";
constexpr const char* kCounters[] = {"gateway.tokens_sampled", "gateway.tokens_sampled_eval"};

double NumberOr(const json::value& value, std::string_view key, double fallback) {
  auto number = JsonRef(value).DoubleOr(key, fallback);
  return number.ok() ? *number : fallback;
}

}  // namespace

// Asks every role for its snapshot, round and round.
class Watcher::Poller {
 public:
  explicit Poller(const std::map<std::string, std::string>& addresses) {
    for (const auto& [name, address] : addresses) channels_.emplace_back(name, RpcChannel(address));
  }
  ~Poller() { Stop(); }
  void Start() {
    thread_ = std::thread([this] {
      std::unique_lock lock(mutex_);
      while (!stop_) {
        lock.unlock();
        PollOnce();
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
  void PollOnce() {
    for (auto& [name, channel] : channels_) {
      auto snapshot = FetchSnapshot(*channel, kAnswerS);
      if (!snapshot.ok()) continue;
      std::lock_guard lock(mutex_);
      latest_[name] = std::move(*snapshot);
    }
  }
  std::map<std::string, RoleSnapshot> Latest() const {
    std::lock_guard lock(mutex_);
    return latest_;
  }

 private:
  std::vector<std::pair<std::string, std::shared_ptr<grpc::Channel>>> channels_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  std::map<std::string, RoleSnapshot> latest_;
  std::thread thread_;
};

// Reads whole new lines of a growing file.
class Watcher::Tail {
 public:
  explicit Tail(std::string path) : path_(std::move(path)) {}
  std::vector<json::value> NewLines() {
    std::vector<json::value> lines;
    auto text = ReadFile(path_);
    if (!text.ok()) return lines;
    if (text->size() < offset_) offset_ = 0;  // Cut on a rollback: begin anew.
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
      poller_(std::make_unique<Poller>(options_.addresses)),
      metrics_(std::make_unique<Tail>(options_.run_dir + "/metrics.jsonl")),
      evaluations_(std::make_unique<Tail>(options_.run_dir + "/eval.jsonl")),
      finished_(options_.counters) {
  for (const char* name : kCounters) drawn_before_ += finished_[name];
  view_.name = options_.name;
  view_.phase = "starting";
  view_.steps = options_.steps;
  view_.staleness_bound = options_.staleness_bound;
  view_.window = options_.window;
  view_.slots = options_.slots;
  view_.warm_up_tokens_all = static_cast<double>(options_.warm_up_tokens);
}

Watcher::~Watcher() = default;
void Watcher::Start() { poller_->Start(); }
void Watcher::Stop() { poller_->Stop(); }
void Watcher::PollNow() { poller_->PollOnce(); }

double Watcher::Metric(const std::string& role, const std::string& name) const {
  auto it = metrics_of_.find(role);
  if (it == metrics_of_.end()) return 0;
  auto metric = it->second.find(name);
  return metric == it->second.end() ? 0 : metric->second;
}

void Watcher::TakeSnapshots() {
  for (auto& [role, snapshot] : poller_->Latest()) {
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
  view_.elapsed_s = options_.elapsed_before_s + now_s - started_s_;
  std::map<std::string, double> counters = Counters();
  const double drawn = counters["gateway.tokens_sampled"] + counters["gateway.tokens_sampled_eval"];
  if (drawn > drawn_before_ && sampling_from_s_ < 0) sampling_from_s_ = now_s;
  drawn_.emplace_back(now_s, drawn);
  while (drawn_.size() > 2 && drawn_.front().first < now_s - kRateWindowS) drawn_.erase(drawn_.begin());
  const auto [from_s, from] = drawn_.front();
  view_.sample_tokens_per_s = now_s > from_s ? (drawn - from) / (now_s - from_s) : 0;
  view_.warm_up_tokens = Metric("trainer", "sft_tokens");
  view_.warm_up_loss = Metric("trainer", "sft_loss");
  view_.pool = metrics_of_["pool"];
  view_.outcomes.clear();
  for (const auto& [name, value] : view_.pool) {
    if (name.rfind("outcome.", 0) == 0) view_.outcomes[name.substr(8)] = value;
  }
  view_.attempts_running = Metric("agents", "attempts_running");
  view_.eval_done = Metric("agents", "eval_done");
  view_.eval_tasks = Metric("agents", "eval_tasks");
  for (const json::value& line : metrics_->NewLines()) {
    StepView step;
    step.step = static_cast<int64_t>(NumberOr(line, "step", 0));
    step.reward = NumberOr(line, "reward_mean", 0);
    step.staleness = static_cast<int64_t>(NumberOr(line, "staleness_max", 0));
    step.wait_s = NumberOr(line, "wait_s", 0);
    const double train_s = NumberOr(line, "forward_s", 0) + NumberOr(line, "backward_s", 0) + NumberOr(line, "optimizer_s", 0);
    step.train_tokens_per_s = train_s > 0 ? NumberOr(line, "logical_tokens", 0) / train_s : 0;
    while (!view_.history.empty() && view_.history.back().step >= step.step) view_.history.pop_back();
    view_.history.push_back(step);
    news.steps.push_back(step);
  }
  for (const json::value& line : evaluations_->NewLines()) {
    news.evaluations.emplace_back(static_cast<int64_t>(NumberOr(line, "version", 0)), NumberOr(line, "pass_rate", 0));
    view_.evaluations.push_back(news.evaluations.back());
  }
  const bool evaluating = view_.eval_tasks > view_.eval_done;
  view_.phase = evaluating ? "evaluating" : !view_.history.empty() || drawn > 0 ? "training" : view_.warm_up_tokens > 0 ? "warm-up" : "starting";
  return news;
}

void PanelPrinter::Draw(const ViewState& view) {
  winsize size{};
  const size_t width = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 20 ? size.ws_col - 1 : 100;
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
