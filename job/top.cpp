#include "job/top.h"

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <string>

#include "common/clock.h"
#include "common/config.h"
#include "common/file.h"
#include "datapool/listing.h"
#include "datapool/types.h"
#include "datapool/verify.h"
#include "job/job.h"
#include "job/run_folder.h"
#include "job/watcher.h"

namespace temper::job {
namespace {

constexpr double kOneLookS = 2;  // for a role's answer, where there is one look only

volatile sig_atomic_t interrupted = 0;

int Complain(const std::string& message) {
  std::fprintf(stderr, "temper top: %s\n", message.c_str());
  return 2;
}

bool SaysRunning(const RunState& state) { return state.phase == "running" || state.phase == "starting"; }

WatcherOptions Options(const Job& job, const std::string& run_dir, const RunState& state, bool ended, double now_s) {
  WatcherOptions options;
  options.run_dir = run_dir;
  options.name = job.name;
  options.steps = job.trainer.steps;
  options.staleness_bound = datapool::Plan(job.pool).bound;
  AddSources(PlanSources(job.pool), &options);
  options.rollouts_per_step = job.pool.P * job.pool.G;
  options.warm_up_tokens = job.trainer.sft ? job.trainer.sft->tokens : 0;
  options.elapsed_before_s = ended || state.began_s == 0 ? state.wall_s : now_s - state.began_s;
  if (ended) return options;
  for (const auto& [name, address] : state.endpoints) {
    if (name != "agent_plane") options.addresses[name] = address;
  }
  return options;
}

// Since the job's first token, as the supervisor last wrote it.
void ShowMeanRate(const RunState& state, ViewState* view) {
  double tokens = 0;
  for (const char* name : {"gateway.tokens_sampled", "gateway.tokens_sampled_eval"}) {
    if (auto it = state.counters.find(name); it != state.counters.end()) tokens += it->second;
  }
  view->sample_is_mean = state.sampling_s > 0;
  view->sample_tokens_per_s = state.sampling_s > 0 ? std::optional(tokens / state.sampling_s) : std::nullopt;
}

// What roles can no longer say stands in the ledger.
void ShowEnd(const Job& job, const std::string& run_dir, const RunState& state, const std::string& how, ViewState* view) {
  view->ended = true;
  view->phase = how;
  view->elapsed_s = state.wall_s;
  view->outcomes.clear();
  view->buried = 0;
  if (auto ledger = ReadFile(run_dir + "/ledger.jsonl"); ledger.ok()) {
    // Counted, not replayed: `pool verify` says whether it is right.
    datapool::Balance balance(job.pool);
    const auto records = datapool::ReadLedger(*ledger);
    for (size_t i = 0; records.ok() && i < records->size(); ++i) {
      if (!balance.Add((*records)[i]).ok()) break;
    }
    for (const auto& [outcome, count] : balance.outcomes()) view->outcomes[outcome] = static_cast<double>(count);
    for (const auto& [reason, count] : balance.tombstones()) view->buried += static_cast<double>(count);
  }
}

void ShowRestarts(const RunState& state, ViewState* view) {
  auto it = state.counters.find(kRestartsCounter);
  view->restarts = it == state.counters.end() ? 0 : static_cast<int64_t>(it->second);
}

}  // namespace

int Top(int argc, char** argv) {
  if (argc != 2 || argv[1][0] == '-') {
    std::fputs("usage: temper top RUN\nThe live view of a running job; one panel and out when not on a terminal.\n"
               "Exit code 0, or 1 when the job died: nobody supervises it, and it has not ended.\n", argc == 2 ? stdout : stderr);
    return argc == 2 ? 0 : 2;
  }
  RunFolder run(argv[1]);
  if (!Exists(run.File("state.json"))) return Complain(run.path() + ": no run (there is no state.json)");
  auto state = run.ReadState();
  if (!state.ok()) return Complain(state.status().message());
  auto config = Config::Load(run.File("job.yaml"));
  if (!config.ok()) return Complain(config.status().message());
  auto job = ReadJob(*config);
  if (!job.ok()) return Complain(job.status().message());

  // A run ends, and then gives up its lock: read once more after the lock was found free.
  auto died = [&] {
    if (!SaysRunning(*state) || run.Held()) return false;
    if (auto now = run.ReadState(); now.ok()) state = std::move(now);
    return SaysRunning(*state);
  };
  const bool terminal = isatty(STDOUT_FILENO);
  signal(SIGINT, [](int) { interrupted = 1; });
  SystemClock& clock = SystemClock::Get();
  bool dead = died();
  const bool ended = dead || !SaysRunning(*state);
  Watcher watcher(Options(*job, run.path(), *state, ended, clock.NowS()), clock);
  PanelPrinter printer(terminal);
  if (terminal && !ended) watcher.Start();
  else if (!ended) watcher.PollNow(kOneLookS);
  for (;;) {
    watcher.Refresh();
    ViewState& view = watcher.view();
    ShowRestarts(*state, &view);
    const bool over = dead || !SaysRunning(*state);
    if (over) ShowEnd(*job, run.path(), *state, dead ? "dead" : state->phase, &view);
    if (over || !terminal) ShowMeanRate(*state, &view);
    printer.Draw(view);
    if (dead) {
      std::printf("nobody supervises this job any more: its supervisor (pid %lld) was killed. To go on with it:\n%s\n",
                  static_cast<long long>(state->pid), ResumeCommand(run.path()).c_str());
      return 1;
    }
    if (over || !terminal || interrupted) return 0;
    clock.SleepS(0.5);
    if (auto now = run.ReadState(); now.ok()) state = std::move(now);
    dead = died();
  }
}

}  // namespace temper::job
