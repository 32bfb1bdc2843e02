#include "job/supervisor.h"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <thread>

#include "common/clock.h"
#include "common/file.h"
#include "common/json.h"
#include "common/log.h"
#include "common/rpc.h"
#include "common/strings.h"
#include "datapool/client.h"
#include "job/live_view.h"
#include "job/role_process.h"

namespace temper::job {
namespace {

constexpr int kDeathsMax = 5;            // of one role within
constexpr double kDeathWindowS = 60;
constexpr double kPollS = 0.5;
constexpr double kStateEveryS = 10;
constexpr double kOrderlyStopS = 4;      // for one group of roles
// Sums that must survive the process that counts them.
constexpr const char* kCounters[] = {"gateway.tokens_sampled", "agents.tokens_sampled", "agents.attempts", "trainer.weight_updates"};

sigset_t SupervisorSignals() {
  sigset_t set;
  sigemptyset(&set);
  for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGCHLD}) sigaddset(&set, signal);
  return set;
}

// Asks every role for its snapshot, round and round, on a thread of its own.
class Poller {
 public:
  explicit Poller(const std::vector<RoleSpec>& roles) {
    for (const RoleSpec& role : roles) channels_.emplace_back(role.name, RpcChannel(role.address));
  }
  ~Poller() { Stop(); }
  void Start() {
    thread_ = std::thread([this] {
      std::unique_lock lock(mutex_);
      while (!stop_) {
        lock.unlock();
        PollOnce(0.3);
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
  void PollOnce(double deadline_s) {
    for (auto& [name, channel] : channels_) {
      auto snapshot = FetchSnapshot(*channel, deadline_s);
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
class Tail {
 public:
  explicit Tail(std::string path) : path_(std::move(path)) {}
  std::vector<std::string> NewLines() {
    std::vector<std::string> lines;
    auto text = ReadFile(path_);
    if (!text.ok()) return lines;
    if (text->size() < offset_) offset_ = 0;  // Cut on a rollback: begin anew.
    for (size_t end; (end = text->find('\n', offset_)) != std::string::npos; offset_ = end + 1) {
      lines.push_back(text->substr(offset_, end - offset_));
    }
    return lines;
  }

 private:
  const std::string path_;
  size_t offset_ = 0;
};

JobEnd Ended(int exit_code, const std::string& phase, const std::string& reason) {
  JobEnd end;
  end.exit_code = exit_code;
  end.phase = phase;
  end.reason = reason;
  return end;
}

double NumberOr(const json::value& value, std::string_view key, double fallback) {
  auto number = JsonRef(value).DoubleOr(key, fallback);
  return number.ok() ? *number : fallback;
}

}  // namespace

void BlockSupervisorSignals() {
  const sigset_t set = SupervisorSignals();
  TEMPER_CHECK(sigprocmask(SIG_BLOCK, &set, nullptr) == 0);
  // A peer that goes away is an error value, not a signal.
  signal(SIGPIPE, SIG_IGN);
}

struct Supervisor::Impl {
  struct Child {
    RoleSpec spec;
    pid_t pid = -1;  // -1: not running
    int64_t starts = 0;
    double restart_at_s = 0;       // when not running and not stopping
    std::vector<double> deaths_s;  // recent
  };

  const Job& job;
  const Plan& plan;
  RunFolder& run;
  RunState state;
  sandbox::Janitor& janitor;
  std::vector<Child> children;
  const bool panel;
  Clock& clock = SystemClock::Get();

  Fd signals;
  std::unique_ptr<Poller> poller;
  Tail metrics_tail, eval_tail;
  ViewState view;
  std::map<std::string, RoleSnapshot> snapshots;
  std::map<std::string, double> finished_counters;  // of processes that are gone
  std::map<std::string, std::pair<int64_t, double>> running_counters;  // pid and last value
  double started_s = 0, state_written_s = 0, drawn_s = 0;
  double sampling_from_s = -1;
  std::vector<std::pair<double, double>> drawn_tokens;  // time, tokens: for the rate
  size_t panel_lines = 0;
  int64_t restarts = 0;
  double stop_asked_s = -1;
  bool hard = false;
  std::optional<JobEnd> end;

  Impl(const Job& j, const Plan& p, RunFolder& r, RunState s, sandbox::Janitor& jan, std::vector<RoleSpec> specs, bool pan)
      : job(j), plan(p), run(r), state(std::move(s)), janitor(jan), panel(pan), metrics_tail(r.File("metrics.jsonl")), eval_tail(r.File("eval.jsonl")) {
    for (RoleSpec& spec : specs) children.push_back({std::move(spec), -1, 0, 0, {}});
    finished_counters = state.counters;
    view.name = job.name;
    view.steps = job.trainer.steps;
    view.staleness_bound = plan.bound;
    if (job.trainer.sft) view.warm_up_tokens_all = static_cast<double>(job.trainer.sft->tokens);
  }

  // ---- saying things

  void Note(const std::string& text) {
    view.notes.push_back(text);
    if (view.notes.size() > 20) view.notes.erase(view.notes.begin());
    if (!panel) Line(text);
    log::Info(text);
  }
  static void Line(const std::string& text) {
    std::fprintf(stdout, "%s\n", text.c_str());
    std::fflush(stdout);
  }

  void Draw() {
    if (!panel) return;
    winsize size{};
    const size_t width = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 20 ? size.ws_col - 1 : 100;
    std::string text;
    if (panel_lines > 0) text += fmt::format("\x1b[{}A", panel_lines);
    const std::vector<std::string> lines = RenderPanel(view, width);
    for (const std::string& line : lines) text += "\x1b[2K" + line + "\n";
    text += "\x1b[J";
    panel_lines = lines.size();
    std::fputs(text.c_str(), stdout);
    std::fflush(stdout);
  }

  // ---- children

  Status Start(Child& child) {
    RoleCommand command;
    command.name = child.spec.name;
    command.program = "/proc/self/exe";
    command.argv = {"temper", "serve", child.spec.role, "--run", run.path()};
    if (child.spec.role == "rollout") {
      command.argv.push_back("--index");
      command.argv.push_back(std::to_string(child.spec.index));
    }
    std::string table;
    for (const auto& [name, fd] : child.spec.fds) {
      table += (table.empty() ? "" : ",") + name + "=" + std::to_string(fd);
      command.fds.push_back(fd);
    }
    // Rises over restarts of the role and of the run.
    const int64_t incarnation = state.incarnation * 100000 + child.starts;
    command.env = {{"TEMPER_SERVE_FDS", table}, {"TEMPER_INCARNATION", std::to_string(incarnation)}};
    command.log_path = run.File("logs/" + child.spec.name + ".log");
    (void)RemoveAll(run.File("logs/" + child.spec.name + ".error"));
    ASSIGN_OR_RETURN(child.pid, StartRole(command));
    ++child.starts;
    if (Status s = janitor.Enroll(child.pid); !s.ok()) log::Warn("role not enrolled", {{"role", child.spec.name}, {"error", s.ToString()}});
    log::Info("role started", {{"role", child.spec.name}, {"pid", child.pid}});
    return Status::Ok();
  }

  void OnEnd(Child& child, const RoleEnd& ended) {
    log::Info("role ended", {{"role", child.spec.name}, {"how", ended.ToString()}});
    child.pid = -1;
    if (end) return;
    const std::string log_path = run.File("logs/" + child.spec.name + ".log");
    if (child.spec.role == "trainer" && !ended.signaled && ended.code == 0) {
      end = Ended(0, "done", fmt::format("all {} steps are done", job.trainer.steps));
      return;
    }
    if (!ended.signaled && (ended.code == 1 || ended.code == 2)) {
      auto why = ReadFile(run.File("logs/" + child.spec.name + ".error"), 1 << 16);
      std::string reason = child.spec.name + ": " + (why.ok() && !Trim(*why).empty() ? std::string(Trim(*why)) : "failed; last output: " + LastLines(log_path, 3));
      end = Ended(1, "failed", reason);
      return;
    }
    const double now = clock.NowS();
    std::erase_if(child.deaths_s, [&](double t) { return t < now - kDeathWindowS; });
    child.deaths_s.push_back(now);
    if (static_cast<int>(child.deaths_s.size()) > kDeathsMax) {
      end = Ended(1, "failed", fmt::format("{} died {} times within {:.0f} s ({}); last output: {}", child.spec.name, child.deaths_s.size(), kDeathWindowS,
                                            ended.ToString(), LastLines(log_path, 3)));
      return;
    }
    const double pause_s = std::min(5.0, 0.1 * static_cast<double>(1 << (child.deaths_s.size() - 1)));
    child.restart_at_s = now + pause_s;
    ++restarts;
    view.restarts = restarts;
    Note(fmt::format("{} {}; restarting it", child.spec.name, ended.ToString()));
  }

  void ReapAll() {
    for (Child& child : children) {
      RoleEnd ended;
      if (child.pid > 0 && Reap(child.pid, &ended)) OnEnd(child, ended);
    }
  }

  void RestartDue() {
    const double now = clock.NowS();
    for (Child& child : children) {
      if (child.pid > 0 || end || now < child.restart_at_s) continue;
      if (Status s = Start(child); !s.ok()) end = Ended(1, "failed", child.spec.name + ": " + s.ToString());
    }
  }

  // ---- numbers

  void TakeSnapshots() {
    snapshots = poller->Latest();
    for (const char* name : kCounters) {
      const std::string full(name);
      const size_t dot = full.find('.');
      for (const auto& [role, snapshot] : snapshots) {
        if (role != full.substr(0, dot)) continue;
        auto it = snapshot.metrics.find(full.substr(dot + 1));
        if (it == snapshot.metrics.end()) continue;
        auto& [pid, value] = running_counters[full];
        if (pid != 0 && pid != snapshot.pid) finished_counters[full] += value;
        pid = snapshot.pid;
        value = it->second;
      }
    }
  }

  std::map<std::string, double> Counters() const {
    std::map<std::string, double> sums = finished_counters;
    for (const auto& [name, running] : running_counters) sums[name] += running.second;
    return sums;
  }

  double Metric(const std::string& role, const std::string& name) const {
    auto it = snapshots.find(role);
    if (it == snapshots.end()) return 0;
    auto metric = it->second.metrics.find(name);
    return metric == it->second.metrics.end() ? 0 : metric->second;
  }

  void RefreshView() {
    TakeSnapshots();
    const double now = clock.NowS();
    view.elapsed_s = state.wall_s + now - started_s;
    const double drawn = Counters()["gateway.tokens_sampled"];
    if (drawn > 0 && sampling_from_s < 0) sampling_from_s = now;
    drawn_tokens.emplace_back(now, drawn);
    while (drawn_tokens.size() > 2 && drawn_tokens.front().first < now - 10) drawn_tokens.erase(drawn_tokens.begin());
    const auto& [from_s, from] = drawn_tokens.front();
    view.sample_tokens_per_s = now > from_s ? (drawn - from) / (now - from_s) : 0;
    view.warm_up_tokens = Metric("trainer", "sft_tokens");
    view.warm_up_loss = Metric("trainer", "sft_loss");
    if (auto it = snapshots.find("pool"); it != snapshots.end()) view.pool = it->second.metrics;
    view.outcomes.clear();
    if (auto it = snapshots.find("agents"); it != snapshots.end()) {
      for (const auto& [name, value] : it->second.metrics) {
        if (name.rfind("outcome.", 0) == 0) view.outcomes[name.substr(8)] = value;
      }
    }
    view.attempts_running = Metric("agents", "attempts_running");
    view.eval_done = Metric("agents", "eval_done");
    view.eval_tasks = Metric("agents", "eval_tasks");
    for (const std::string& line : metrics_tail.NewLines()) {
      auto value = ParseJson(line);
      if (!value.ok()) continue;
      StepView step;
      step.step = static_cast<int64_t>(NumberOr(*value, "step", 0));
      step.reward = NumberOr(*value, "reward_mean", 0);
      step.staleness = static_cast<int64_t>(NumberOr(*value, "staleness_max", 0));
      step.wait_s = NumberOr(*value, "wait_s", 0);
      const double train_s = NumberOr(*value, "forward_s", 0) + NumberOr(*value, "backward_s", 0) + NumberOr(*value, "optimizer_s", 0);
      step.train_tokens_per_s = train_s > 0 ? NumberOr(*value, "logical_tokens", 0) / train_s : 0;
      while (!view.history.empty() && view.history.back().step >= step.step) view.history.pop_back();
      view.history.push_back(step);
      if (!panel) Line(RenderStep(view, step));
    }
    for (const std::string& line : eval_tail.NewLines()) {
      auto value = ParseJson(line);
      if (!value.ok()) continue;
      const int64_t version = static_cast<int64_t>(NumberOr(*value, "version", 0));
      const double rate = NumberOr(*value, "pass_rate", 0);
      view.evaluations.emplace_back(version, rate);
      if (!panel) Line(fmt::format("held-out pass rate {:.3f} at version {}", rate, version));
    }
    if (!end) {
      const bool evaluating = view.eval_tasks > view.eval_done;
      view.phase = evaluating ? "evaluating" : !view.history.empty() || drawn > 0 ? "training" : view.warm_up_tokens > 0 ? "warm-up" : "starting";
    }
    Draw();
    if (now - state_written_s > kStateEveryS) WriteState("running");
  }

  void WriteState(const std::string& phase) {
    state_written_s = clock.NowS();
    RunState now = state;
    now.phase = phase;
    now.counters = Counters();
    now.wall_s = state.wall_s + clock.NowS() - started_s;
    if (Status s = run.WriteState(now); !s.ok()) log::Error("state not written", {{"error", s.ToString()}});
  }

  // ---- the loop

  // Waits for a signal, the janitor's end or the time; handles signals.
  void Wait(double seconds) {
    pollfd polled[2] = {{signals.get(), POLLIN, 0}, {janitor.lifeline_fd(), POLLIN, 0}};
    const int ready = poll(polled, 2, static_cast<int>(seconds * 1000));
    if (ready < 0 && errno != EINTR) end = Ended(1, "failed", ErrnoStatus("poll", errno).message());
    if (polled[1].revents && !end) {
      end = Ended(1, "failed", "janitor: it is gone; everything it held was removed, and the job can be resumed");
    }
    signalfd_siginfo info;
    while (read(signals.get(), &info, sizeof info) == static_cast<ssize_t>(sizeof info)) {
      if (info.ssi_signo == SIGCHLD) continue;
      if (stop_asked_s >= 0) {
        hard = true;
        continue;
      }
      stop_asked_s = clock.NowS();
      if (!end) end = Ended(130, "stopped", "stopped by a signal (" + std::string(strsignal(static_cast<int>(info.ssi_signo))) + "); --resume continues it");
      Note("stopping; press Ctrl-C again to stop hard");
    }
  }

  // SIGTERM to the roles named, SIGKILL to those that do not end in time.
  void StopRoles(const std::vector<std::string>& roles) {
    auto wanted = [&](const Child& child) {
      return child.pid > 0 && std::find(roles.begin(), roles.end(), child.spec.role) != roles.end();
    };
    for (Child& child : children) {
      if (wanted(child)) kill(child.pid, hard ? SIGKILL : SIGTERM);
    }
    const double until_s = clock.NowS() + kOrderlyStopS;
    bool killed = hard;
    while (std::any_of(children.begin(), children.end(), wanted)) {
      if (!killed && (hard || clock.NowS() > until_s)) {
        killed = true;
        for (Child& child : children) {
          if (!wanted(child)) continue;
          log::Warn("role did not stop in time", {{"role", child.spec.name}});
          kill(child.pid, SIGKILL);
        }
      }
      Wait(0.02);
      ReapAll();
    }
  }

  void ClosePool() {
    const Child* pool = nullptr;
    for (const Child& child : children) {
      if (child.spec.role == "pool") pool = &child;
    }
    if (hard || !pool || pool->pid <= 0) return;
    const auto reason = end->exit_code == 0 ? datapool::CloseReason::kJobEnd : datapool::CloseReason::kStopped;
    if (Status s = datapool::ConnectDataPool(pool->spec.address)->Close(reason); !s.ok()) log::Warn("pool not closed", {{"error", s.ToString()}});
  }

  JobEnd Run() {
    started_s = clock.NowS();
    const sigset_t set = SupervisorSignals();
    signals = Fd(signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
    TEMPER_CHECK(signals.valid());
    WriteState("running");
    RestartDue();
    poller = std::make_unique<Poller>([&] {
      std::vector<RoleSpec> specs;
      for (const Child& child : children) specs.push_back(child.spec);
      return specs;
    }());
    poller->Start();
    double next_view_s = 0;
    while (!end) {
      Wait(0.1);
      ReapAll();
      if (end) break;
      RestartDue();
      if (clock.NowS() >= next_view_s) {
        RefreshView();
        next_view_s = clock.NowS() + kPollS;
      }
    }
    view.phase = "stopping";
    // The trainer and the agents first: they use everything else. The pool last: it writes what became of the rollouts.
    poller->Stop();
    if (end->exit_code == 0) ClosePool();
    StopRoles({"trainer", "agents"});
    if (end->exit_code != 0) ClosePool();
    if (!hard) poller->PollOnce(0.3);
    RefreshView();
    StopRoles({"gateway", "sandbox", "rollout"});
    StopRoles({"pool"});
    poller.reset();
    end->wall_s = state.wall_s + clock.NowS() - started_s;
    end->sampling_s = sampling_from_s < 0 ? 0 : clock.NowS() - sampling_from_s;
    end->restarts = restarts;
    end->counters = Counters();
    WriteState(end->phase);
    return *end;
  }
};

Supervisor::Supervisor(const Job& job, const Plan& plan, RunFolder& run, RunState state, sandbox::Janitor& janitor, std::vector<RoleSpec> roles, bool panel)
    : impl_(std::make_unique<Impl>(job, plan, run, std::move(state), janitor, std::move(roles), panel)) {}
Supervisor::~Supervisor() = default;

JobEnd Supervisor::Run() { return impl_->Run(); }

}  // namespace temper::job
