#include "job/supervisor.h"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <future>
#include <memory>
#include <thread>

#include "common/clock.h"
#include "common/file.h"
#include "common/log.h"
#include "common/strings.h"
#include "datapool/client.h"
#include "job/role_process.h"
#include "job/watcher.h"

namespace temper::job {
namespace {

constexpr int kDeathsMax = 5;            // of one role within
constexpr double kDeathWindowS = 60;
constexpr double kViewEveryS = 0.5;
constexpr double kStateEveryS = 10;
constexpr double kOrderlyStopS = 3;      // for one group of roles

sigset_t SupervisorSignals() {
  sigset_t set;
  sigemptyset(&set);
  for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGCHLD}) sigaddset(&set, signal);
  return set;
}

// "ROLE: words", unless the words say so already.
std::string FromRole(const std::string& role, const std::string& words) {
  return words.rfind(role + ": ", 0) == 0 ? words : role + ": " + words;
}

JobEnd Ended(int exit_code, const std::string& phase, const std::string& reason) {
  JobEnd end;
  end.exit_code = exit_code;
  end.phase = phase;
  end.reason = reason;
  return end;
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
  Watcher watcher;
  PanelPrinter printer;
  Progress progress;
  double started_s = 0, state_written_s = 0;
  int64_t restarts = 0;  // over the run's life, like every counter
  double stop_asked_s = -1;
  bool hard = false;
  std::optional<JobEnd> end;
  std::jthread closing;  // asks the pool to close

  Impl(const Job& j, const Plan& p, RunFolder& r, RunState s, sandbox::Janitor& jan, std::vector<RoleSpec> specs, bool pan)
      : job(j), plan(p), run(r), state(std::move(s)), janitor(jan), panel(pan), watcher(WatchOptions(j, p, r, state, specs), clock) {
    for (RoleSpec& spec : specs) children.push_back({std::move(spec), -1, 0, 0, {}});
    if (auto it = state.counters.find(kRestartsCounter); it != state.counters.end()) restarts = static_cast<int64_t>(it->second);
  }

  static WatcherOptions WatchOptions(const Job& job, const Plan& plan, const RunFolder& run, const RunState& state, const std::vector<RoleSpec>& specs) {
    WatcherOptions options;
    options.run_dir = run.path();
    options.name = job.name;
    options.steps = job.trainer.steps;
    options.staleness_bound = plan.bound;
    AddSources(plan.sources, &options);
    options.rollouts_per_step = job.pool.P * job.pool.G;
    options.warm_up_tokens = job.trainer.sft ? job.trainer.sft->tokens : 0;
    options.elapsed_before_s = state.wall_s;
    options.sampling_before_s = state.sampling_s;
    options.counters = state.counters;
    for (const RoleSpec& spec : specs) options.addresses[spec.name] = spec.address;
    return options;
  }

  // ---- saying things

  void Note(const std::string& text) {
    std::vector<std::string>& notes = watcher.view().notes;
    notes.push_back(text);
    if (notes.size() > 20) notes.erase(notes.begin());
    if (!panel) Line(text);
    log::Info(text);
  }
  void Line(const std::string& text) {
    progress.Said(clock.NowS());
    std::fprintf(stdout, "%s\n", text.c_str());
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
    // An injected fault happens once a run, not at every restart.
    if (child.starts > 0) command.env.emplace_back("TEMPER_FAULTS", "");
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
      const std::string words = why.ok() ? std::string(Trim(*why)) : "";
      end = Ended(1, "failed", FromRole(child.spec.name, words.empty() ? "failed; last output: " + LastLines(log_path, 3) : words));
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
    watcher.view().restarts = restarts;
    WriteState("running");  // a supervisor that is killed next has counted it
    // A trainer that lost a rank has said which.
    auto why = ReadFile(run.File("logs/" + child.spec.name + ".error"), 1 << 16);
    Note(fmt::format("{} {}; restarting it", child.spec.name, why.ok() ? "ended: " + std::string(Trim(*why)) : ended.ToString()));
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

  void RefreshView() {
    const News news = watcher.Refresh();
    if (end) watcher.view().phase = "stopping";
    if (panel) {
      printer.Draw(watcher.view());
    } else {
      for (const std::string& line : news.said) Line(line);
      for (const StepView& step : news.steps) Line(RenderStep(watcher.view(), step));
      for (const auto& [version, rate] : news.evaluations) Line(fmt::format("held-out pass rate {:.3f} at version {}", rate, version));
      if (!end && progress.Due(watcher.view(), clock.NowS())) Line(RenderProgress(watcher.view()));
    }
    if (clock.NowS() - state_written_s > kStateEveryS) WriteState("running");
  }

  void WriteState(const std::string& phase) {
    state_written_s = clock.NowS();
    RunState now = state;
    now.phase = phase;
    now.counters = watcher.Counters();
    now.counters[kRestartsCounter] = static_cast<double>(restarts);
    now.wall_s = state.wall_s + clock.NowS() - started_s;
    now.sampling_s = watcher.SamplingS();
    if (Status s = run.WriteState(now); !s.ok()) log::Error("state not written", {{"error", s.ToString()}});
  }

  // ---- the loop

  // Waits for a signal, the janitor's end or the time; handles signals.
  void Wait(double seconds) {
    // Once the end is decided the janitor's own no longer matters.
    pollfd polled[2] = {{signals.get(), POLLIN, 0}, {end ? -1 : janitor.lifeline_fd(), POLLIN, 0}};
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

  // The trainer waits for the agents, so it may be the first to report what went wrong there.
  void NameTheCause() {
    if (end->exit_code != 1 || end->reason.rfind("trainer:", 0) != 0) return;
    auto why = ReadFile(run.File("logs/agents.error"), 1 << 16);
    if (why.ok() && !Trim(*why).empty()) end->reason = FromRole("agents", std::string(Trim(*why)));
  }

  // A pool that is dead, or dies of this very call, is started again: only it can write what became of open rollouts, and a job whose pool
  // was not closed is not done.
  void ClosePool() {
    Child* pool = nullptr;
    for (Child& child : children) {
      if (child.spec.role == "pool") pool = &child;
    }
    if (hard || !pool || (pool->pid <= 0 && end->exit_code != 0)) return;
    const auto reason = end->exit_code == 0 ? datapool::CloseReason::kJobEnd : datapool::CloseReason::kStopped;
    // On a thread of its own, since the child is seen to die, and started, on this one. It ends when the client gives up at the latest.
    auto answer = std::make_shared<std::promise<Status>>();
    std::future<Status> closed = answer->get_future();
    closing = std::jthread([answer, reason, address = pool->spec.address] {
      answer->set_value(datapool::ConnectDataPool(address)->Close(reason));
    });
    int starts = 0;
    while (closed.wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
      if (hard || starts > kDeathsMax) break;
      if (pool->pid <= 0) {
        ++starts;
        ++restarts;
        Note("pool died before it was closed; restarting it");
        if (Status s = Start(*pool); !s.ok()) log::Warn("pool not started", {{"error", s.ToString()}});
      }
      Wait(0.02);
      ReapAll();
    }
    if (hard) return;
    Status s;
    if (starts > kDeathsMax) {
      s = Unavailable(fmt::format("it died {} times; last output: {}", starts, LastLines(run.File("logs/pool.log"), 3)));
    } else {
      s = closed.get();
    }
    if (s.ok()) return;
    log::Warn("pool not closed", {{"error", s.ToString()}});
    if (end->exit_code != 0) return;
    end = Ended(1, "failed", fmt::format("all {} steps are done, but the pool could not be closed: {}; --resume tries again",
                                         job.trainer.steps, s.message()));
  }

  JobEnd Run() {
    started_s = clock.NowS();
    state.began_s = started_s - state.wall_s;
    const sigset_t set = SupervisorSignals();
    signals = Fd(signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
    TEMPER_CHECK(signals.valid());
    WriteState("running");
    RestartDue();
    watcher.Start();
    double next_view_s = 0;
    while (!end) {
      Wait(0.1);
      ReapAll();
      if (end) break;
      RestartDue();
      if (clock.NowS() >= next_view_s) {
        RefreshView();
        next_view_s = clock.NowS() + kViewEveryS;
      }
    }
    // The trainer and the agents first: they use everything else. The pool last: it writes what became of the rollouts.
    watcher.Stop();
    if (end->exit_code == 0) ClosePool();
    StopRoles({"trainer", "agents"});
    NameTheCause();
    if (end->exit_code != 0) ClosePool();
    if (!hard) watcher.PollNow();
    RefreshView();
    StopRoles({"gateway", "sandbox", "rollout"});
    StopRoles({"pool"});
    end->wall_s = state.wall_s + clock.NowS() - started_s;
    end->sampling_s = watcher.SamplingS();
    end->restarts = restarts;
    end->counters = watcher.Counters();
    WriteState(end->phase);
    return *end;
  }
};

Supervisor::Supervisor(const Job& job, const Plan& plan, RunFolder& run, RunState state, sandbox::Janitor& janitor, std::vector<RoleSpec> roles, bool panel)
    : impl_(std::make_unique<Impl>(job, plan, run, std::move(state), janitor, std::move(roles), panel)) {}
Supervisor::~Supervisor() = default;

JobEnd Supervisor::Run() { return impl_->Run(); }

}  // namespace temper::job
