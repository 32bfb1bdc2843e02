#include "agents/server.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "agents/failure_row.h"
#include "agents/service.h"
#include "common/clock.h"
#include "common/faults.h"
#include "common/file.h"
#include "common/json.h"
#include "common/log.h"
#include "common/rpc.h"
#include "temper/v1/types.pb.h"

namespace temper::agents {
namespace {

constexpr int kEvaluationAttemptsMax = 3;
constexpr int kEvaluationAbortsMax = 20;
constexpr int kProbeRollouts = 8;
constexpr size_t kProbeVersions = 4;
constexpr uint32_t kTakeWaitMs = 500;
constexpr double kUnjudgedShareMax = 0.1;

int64_t SampledTokens(const v1::Trajectory& trajectory) {
  int64_t n = 0;
  for (const v1::TokenRun& run : trajectory.runs()) {
    if (run.provenance() == v1::SAMPLED) n += run.ids_size();
  }
  return n;
}

// The step at which every token of a trajectory was sampled, or -1: several versions, mixed, or nothing sampled.
int64_t OnlyVersion(const v1::Trajectory& trajectory) {
  int64_t version = -1;
  for (const v1::TokenRun& run : trajectory.runs()) {
    if (run.provenance() != v1::SAMPLED) continue;
    if (run.mixed() || (version >= 0 && run.version().step() != version)) return -1;
    version = run.version().step();
  }
  return version;
}

std::string SessionOf(const datapool::AttemptId& id) {
  return std::to_string(id.group) + "." + std::to_string(id.rollout) + "." + std::to_string(id.attempt);
}

// The smallest change there is, to the last sampled token: what the fault point `agents.change_logprob` does.
void ChangeOneLogprob(v1::Trajectory& trajectory) {
  for (int i = trajectory.runs_size() - 1; i >= 0; --i) {
    v1::TokenRun& run = *trajectory.mutable_runs(i);
    if (run.logprobs_size() == 0) continue;
    const int last = run.logprobs_size() - 1;
    run.set_logprobs(last, std::nextafter(run.logprobs(last), -1e9f));
    return;
  }
}

struct Play {
  size_t source = 0;
  AttemptSpec spec;
  std::shared_ptr<std::atomic<bool>> stopped = std::make_shared<std::atomic<bool>>(false);
  std::function<void(const AttemptSpec&, AttemptResult)> done;
};

// An evaluation being played.
struct Evaluation {
  std::mutex mutex;
  std::condition_variable done;
  int64_t open = 0;         // tasks without a final attempt
  EvaluationReport report;  // evaluation and version are fixed; the rest under the mutex, pass_rate a sum until the end

  void Add(const AttemptSpec& spec, const AttemptResult& result) {
    ++report.outcomes[result.outcome];
    report.rewards[static_cast<size_t>(spec.task_index)] = result.reward;
    if (result.reward) {
      ++report.tasks;
      report.pass_rate += *result.reward;
      FamilyScore& family = report.families[spec.task.family];
      ++family.tasks;
      family.passed += *result.reward;
    } else {
      ++report.unjudged;
    }
    if (!result.trajectory) return;
    report.tokens_sampled += SampledTokens(*result.trajectory);
    if (spec.task_index < kProbeRollouts) report.probe.push_back(result.trajectory->SerializeAsString());
  }
};

}  // namespace

std::string ReportToJson(const EvaluationReport& report) {
  json::object families;
  for (const auto& [name, score] : report.families) {
    families[name] = {{"tasks", score.tasks},
                      {"pass_rate", score.tasks ? score.passed / static_cast<double>(score.tasks) : 0.0},
                      {"passed", score.passed}};
  }
  json::object outcomes;
  for (const auto& [name, count] : report.outcomes) outcomes[name] = count;
  json::array rewards;
  for (const auto& reward : report.rewards) rewards.push_back(reward ? json::value(*reward) : json::value());
  json::object line{{"evaluation", report.evaluation},
                    {"version", report.version},
                    {"tasks", report.tasks},
                    {"unjudged", report.unjudged},
                    {"pass_rate", report.pass_rate},
                    {"families", families},
                    {"outcomes", outcomes},
                    {"rewards", rewards},
                    {"tokens_sampled_eval", report.tokens_sampled},
                    {"wall_s", report.wall_s}};
  if (report.job_s) line["job_s"] = *report.job_s;
  return PrintJson(line);
}

Result<EvaluationReport> ReportFromJson(const std::string& line) {
  ASSIGN_OR_RETURN(json::value value, ParseJson(line));
  const JsonRef ref(value, "eval.jsonl");
  EvaluationReport out;
  ASSIGN_OR_RETURN(out.evaluation, ref.IntOr("evaluation", -1));
  ASSIGN_OR_RETURN(out.version, ref.IntOr("version", -1));
  ASSIGN_OR_RETURN(out.tasks, ref.IntOr("tasks", 0));
  ASSIGN_OR_RETURN(out.unjudged, ref.IntOr("unjudged", 0));
  ASSIGN_OR_RETURN(out.pass_rate, ref.DoubleOr("pass_rate", 0));
  ASSIGN_OR_RETURN(out.tokens_sampled, ref.IntOr("tokens_sampled_eval", 0));
  ASSIGN_OR_RETURN(out.wall_s, ref.DoubleOr("wall_s", 0));
  if (ref.Has("job_s")) {
    ASSIGN_OR_RETURN(out.job_s, ref.DoubleOr("job_s", 0));
  }
  ASSIGN_OR_RETURN(JsonRef families, ref.Field("families"));
  if (!families.value().is_object()) return families.Error("must be an object");
  for (const auto& [name, unused] : families.value().as_object()) {
    ASSIGN_OR_RETURN(JsonRef family, families.Field(name));
    FamilyScore score;
    ASSIGN_OR_RETURN(score.tasks, family.IntOr("tasks", 0));
    ASSIGN_OR_RETURN(score.passed, family.DoubleOr("passed", 0));
    out.families[name] = score;
  }
  if (ref.Has("rewards")) {
    ASSIGN_OR_RETURN(JsonRef all, ref.Field("rewards"));
    ASSIGN_OR_RETURN(std::vector<JsonRef> rewards, all.Items());
    for (const JsonRef& reward : rewards) {
      if (reward.is_null()) {
        out.rewards.push_back(std::nullopt);
        continue;
      }
      ASSIGN_OR_RETURN(const double number, reward.Double());
      out.rewards.push_back(number);
    }
  }
  return out;
}

struct Server::Impl {
  // What plays the tasks of one source. A source that is broken shows in its own row, whatever the others come to.
  struct Player {
    AttemptRunner runner;
    FailureRow failures;  // under `mutex`
  };

  Impl(const ServerOptions& o, const ServerParts& p) : options(o), parts(p) {
    for (const ServerSource& s : parts.sources) {
      player_of.push_back(std::make_unique<Player>(Player{AttemptRunner(s.attempt, *s.scaffold, *p.gateway, *p.sandbox, *s.verifier),
                                                          FailureRow(3 * int64_t{o.group_size})}));
    }
  }

  const ServerOptions options;
  const ServerParts parts;
  std::vector<std::unique_ptr<Player>> player_of;  // of each source
  Metrics metrics;
  Clock& clock = SystemClock::Get();

  std::mutex mutex;
  std::condition_variable work, idle;
  std::deque<Play> evaluation_queue, training_queue;  // bounded: by the evaluation's tasks, and by `concurrency`
  std::map<std::string, std::shared_ptr<std::atomic<bool>>> running;
  int training_open = 0;  // queued or running
  bool stopping = false;
  bool closed = false;
  std::vector<std::thread> players;
  std::thread asker;

  std::mutex probe_mutex;
  std::map<int64_t, std::string> probes;  // the last rollout sampled wholly at a version; the newest kProbeVersions of them

  std::mutex evaluate_mutex;  // one evaluation at a time
  std::optional<EvaluationReport> last_report;

  std::unique_ptr<AgentsService> service;
  std::unique_ptr<RpcServer> rpc;

  void PlayLoop() {
    for (;;) {
      Play play;
      int64_t place = 0;
      {
        std::unique_lock lock(mutex);
        work.wait(lock, [&] { return stopping || !evaluation_queue.empty() || !training_queue.empty(); });
        if (stopping) return;
        std::deque<Play>& queue = evaluation_queue.empty() ? training_queue : evaluation_queue;
        play = std::move(queue.front());
        queue.pop_front();
        running[play.spec.session] = play.stopped;
        place = player_of[play.source]->failures.Begin();
        metrics["attempts_running"].Set(static_cast<double>(running.size()));
      }
      const double start_s = clock.NowS();
      AttemptResult result = *play.stopped ? AttemptResult{"aborted", "stopped", {}, "", nullptr} : player_of[play.source]->runner.Run(play.spec, *play.stopped);
      if (result.trajectory) result.trajectory->set_wall_s(clock.NowS() - start_s);
      Count(play, place, result);
      play.done(play.spec, std::move(result));
      std::lock_guard lock(mutex);
      running.erase(play.spec.session);
      if (play.spec.training) --training_open;
      metrics["attempts_running"].Set(static_cast<double>(running.size()));
      idle.notify_all();
    }
  }

  bool several() const { return parts.sources.size() > 1; }

  void Count(const Play& play, int64_t place, const AttemptResult& result) {
    const AttemptSpec& spec = play.spec;
    const std::string prefix = spec.training ? "" : "eval_";
    metrics[prefix + "attempts"].Add();
    metrics[prefix + "outcome." + result.outcome].Add();
    if (result.trajectory) metrics[prefix + "tokens_sampled"].Add(static_cast<double>(SampledTokens(*result.trajectory)));
    if (result.outcome == "infra_failure") {
      log::Warn("infrastructure failure", {{"session", spec.session}, {"cause", result.reason}, {"detail", result.detail}});
      metrics.Say(spec.session + " infra_failure " + result.reason + ": " + result.detail.substr(0, 200));
    }
    std::string last_words;
    {
      std::lock_guard lock(mutex);
      FailureRow& failures = player_of[play.source]->failures;
      const bool told = failures.too_long().has_value();
      if (result.outcome == "infra_failure") {
        failures.Fail(place, result.reason, result.detail);
      } else if (result.outcome == "aborted") {
        failures.Abort(place);
      } else {
        failures.End(place);
      }
      if (failures.too_long() && !told) {
        const FailureRow::TooLong& row = *failures.too_long();
        last_words = std::to_string(row.failures) + " infrastructure failures in a row" +
                     (several() ? " of source '" + parts.sources[play.source].name + "'" : "") + ", cause '" + row.cause + "'; last words: " + row.detail;
      }
    }
    if (!last_words.empty()) {
      log::Error("giving up", {{"why", last_words}});
      if (options.on_fatal) options.on_fatal(last_words);
    }
  }

  void AskLoop() {
    bool attached = false;
    while (true) {
      int free = 0;
      {
        std::unique_lock lock(mutex);
        idle.wait_for(lock, std::chrono::milliseconds(200), [&] { return stopping || training_open < options.concurrency; });
        if (stopping) return;
        free = options.concurrency - training_open;
      }
      if (!attached) {
        Result<int64_t> again = parts.pool->AttachAgents(options.incarnation);
        if (!again.ok()) {
          log::Warn("pool not reached", {{"error", again.status().ToString()}});
          clock.SleepS(0.2);
          continue;
        }
        attached = true;
        if (*again > 0) log::Info("rollouts issued again", {{"count", *again}});
      }
      // With no free hands the call still brings cancellations.
      Result<datapool::TakeIssuesReply> reply = parts.pool->TakeIssues(options.incarnation, free, kTakeWaitMs);
      if (!reply.ok()) {
        log::Warn("no answer from the pool", {{"error", reply.status().ToString()}});
        if (reply.status().code() == StatusCode::kFailedPrecondition) attached = false;
        clock.SleepS(0.2);
        continue;
      }
      for (const datapool::AttemptId& id : reply->cancelled) Cancel(SessionOf(id));
      for (const datapool::Issue& issue : reply->issues) Enqueue(issue);
      if (reply->closed) {
        std::lock_guard lock(mutex);
        closed = true;
        metrics["pool_closed"].Set(1);
        return;
      }
    }
  }

  void Enqueue(const datapool::Issue& issue) {
    Play play;
    while (play.source < parts.sources.size() && parts.sources[play.source].name != issue.source) ++play.source;
    if (play.source == parts.sources.size()) {
      if (options.on_fatal) options.on_fatal("the pool issued a task of source '" + issue.source + "', which this job does not have");
      return;
    }
    const TaskSource& train = *parts.sources[play.source].train;
    play.spec.session = SessionOf(issue.id);
    play.spec.task = train.Get(issue.task % train.size());
    play.spec.training = true;
    play.spec.group = issue.id.group;
    play.spec.rollout = issue.id.rollout;
    play.spec.attempt = issue.id.attempt;
    play.spec.deadline_s = std::max(0.0, issue.deadline_left_s);
    play.done = [this, id = issue.id](const AttemptSpec& spec, AttemptResult result) { Report(id, spec, std::move(result)); };
    std::lock_guard lock(mutex);
    ++training_open;
    training_queue.push_back(std::move(play));
    work.notify_one();
  }

  void Report(const datapool::AttemptId& id, const AttemptSpec& spec, AttemptResult result) {
    // Stopped by us: the pool knows, it cancelled the attempt or will issue it again. Other aborts are reported, so that it does.
    if (result.outcome == "aborted" && result.reason == "stopped") return;
    datapool::FinishedAttempt finished;
    finished.id = id;
    finished.outcome = result.outcome;
    finished.reason = result.reason;
    finished.reward = result.reward;
    if (result.trajectory) {
      KeepProbe(*result.trajectory);
      // A stored logprob that is not what the worker drew with must stop the job: the trainer's own forward pass tells.
      if (!Faults::Get().Hit("agents.change_logprob").ok()) ChangeOneLogprob(*result.trajectory);
      result.trajectory->SerializeToString(&finished.trajectory);
    }
    for (int tries = 0;; ++tries) {
      Result<bool> counted = parts.pool->Finish(options.incarnation, finished);
      if (counted.ok()) return;
      // The pool restarts with every issue still open, so a report that cannot be delivered now is delivered later.
      if (counted.status().code() != StatusCode::kUnavailable || tries > 300 || Stopping()) {
        log::Warn("report refused", {{"session", spec.session}, {"error", counted.status().ToString()}});
        return;
      }
      clock.SleepS(0.2);
    }
  }

  void KeepProbe(const v1::Trajectory& trajectory) {
    const int64_t version = OnlyVersion(trajectory);
    if (version < 0) return;
    std::lock_guard lock(probe_mutex);
    probes[version] = trajectory.SerializeAsString();
    while (probes.size() > kProbeVersions) probes.erase(probes.begin());
  }

  bool Stopping() {
    std::lock_guard lock(mutex);
    return stopping;
  }

  void Cancel(const std::string& session) {
    {
      std::lock_guard lock(mutex);
      for (auto it = training_queue.begin(); it != training_queue.end(); ++it) {
        if (it->spec.session != session) continue;
        training_queue.erase(it);
        --training_open;
        return;
      }
      auto it = running.find(session);
      if (it == running.end()) return;
      *it->second = true;
    }
    StopAttempt(session);
  }

  // Which source it is of makes no difference here.
  void StopAttempt(const std::string& session) { player_of[0]->runner.Stop(session); }

  int64_t EvaluationTasks() const {
    int64_t tasks = 0;
    for (const ServerSource& source : parts.sources) tasks += source.eval ? source.eval->size() : 0;
    return tasks;
  }

  Result<EvaluationReport> Evaluate(int64_t evaluation, int64_t version) {
    std::lock_guard one(evaluate_mutex);
    const int64_t tasks = EvaluationTasks();
    if (tasks == 0) return FailedPrecondition("the job has no tasks.eval");
    if (last_report && last_report->evaluation == evaluation && last_report->version == version) return *last_report;
    ASSIGN_OR_RETURN(std::optional<EvaluationReport> before, Recorded(evaluation, version));
    if (before) return *before;

    auto state = std::make_shared<Evaluation>();
    state->report.evaluation = evaluation;
    state->report.version = version;
    state->open = tasks;
    state->report.rewards.resize(static_cast<size_t>(state->open));
    const double start_s = clock.NowS();
    metrics["eval_tasks"].Set(static_cast<double>(tasks));
    metrics["eval_done"].Set(0);
    for (int64_t i = 0; i < tasks; ++i) PlayTask(state, i, 1);
    {
      std::unique_lock lock(state->mutex);
      while (!state->done.wait_for(lock, std::chrono::milliseconds(200), [&] { return state->open == 0; })) {
        if (Stopping()) return Unavailable("agents are stopping");
      }
    }
    EvaluationReport report = state->report;  // nobody else writes it any more
    if (report.tasks > 0) report.pass_rate /= static_cast<double>(report.tasks);
    report.wall_s = clock.NowS() - start_s;
    if (options.job_began_s) report.job_s = clock.NowS() - *options.job_began_s;
    if (static_cast<double>(report.unjudged) > kUnjudgedShareMax * static_cast<double>(tasks)) {
      return Aborted("evaluation " + std::to_string(evaluation) + ": " + std::to_string(report.unjudged) + " of " +
                         std::to_string(tasks) + " tasks could not be judged; see the agents' log");
    }
    RETURN_IF_ERROR(AppendFile(options.run_dir + "/eval.jsonl", ReportToJson(report) + "\n"));
    last_report = report;
    return report;
  }

  void PlayTask(std::shared_ptr<Evaluation> state, int64_t index, int32_t attempt) {
    Play play;
    play.spec.session = "e" + std::to_string(state->report.evaluation) + "." + std::to_string(index) + "." + std::to_string(attempt);
    int64_t of_source = index;
    for (;; ++play.source) {
      const TaskSource* eval = parts.sources[play.source].eval;
      if (eval && of_source < eval->size()) break;
      of_source -= eval ? eval->size() : 0;
    }
    play.spec.task = parts.sources[play.source].eval->Get(of_source);
    // Two sources may call a family the same.
    std::string& family = play.spec.task.family;
    if (several()) family = parts.sources[play.source].name + (family.empty() ? "" : "/" + family);
    play.spec.evaluation = state->report.evaluation;
    play.spec.task_index = index;
    play.spec.attempt = attempt;
    play.done = [this, state](const AttemptSpec& spec, AttemptResult result) {
      // Attempts that one of our own parts cut short do not use up the tries of the task, within reason.
      const int attempts_max = result.outcome == "aborted" ? kEvaluationAbortsMax : kEvaluationAttemptsMax;
      if (!result.reward && spec.attempt < attempts_max && !Stopping()) {
        PlayTask(state, spec.task_index, spec.attempt + 1);
        return;
      }
      metrics["eval_done"].Add();
      std::lock_guard lock(state->mutex);
      state->Add(spec, result);
      if (--state->open == 0) state->done.notify_all();
    };
    std::lock_guard lock(mutex);
    evaluation_queue.push_back(std::move(play));
    work.notify_one();
  }

  // The report of an evaluation that an earlier process finished.
  Result<std::optional<EvaluationReport>> Recorded(int64_t evaluation, int64_t version) {
    const std::string path = options.run_dir + "/eval.jsonl";
    if (!Exists(path)) return std::optional<EvaluationReport>();
    ASSIGN_OR_RETURN(std::string text, ReadFile(path));
    size_t begin = 0;
    for (size_t end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1) {
      Result<EvaluationReport> report = ReportFromJson(text.substr(begin, end - begin));
      if (report.ok() && report->evaluation == evaluation && report->version == version) return std::optional(*report);
    }
    return std::optional<EvaluationReport>();
  }
};

Server::Server(const ServerOptions& options, const ServerParts& parts) : impl_(std::make_unique<Impl>(options, parts)) {}

Server::~Server() { Stop(); }

Status Server::Start() {
  RETURN_IF_ERROR(MakeDirs(impl_->options.run_dir + "/attempts"));
  for (int i = 0; i < impl_->options.concurrency; ++i) impl_->players.emplace_back([this] { impl_->PlayLoop(); });
  if (impl_->parts.pool) impl_->asker = std::thread([this] { impl_->AskLoop(); });
  if (impl_->options.control_fd >= 0) {
    impl_->service = std::make_unique<AgentsService>(this);
    impl_->rpc = std::make_unique<RpcServer>(Fd(impl_->options.control_fd));
    impl_->rpc->Register(impl_->service->grpc());
    impl_->rpc->RegisterRole("agents", &impl_->metrics, [this](const std::string& reason) {
      if (impl_->options.on_stop) impl_->options.on_stop(reason);
    });
    RETURN_IF_ERROR(impl_->rpc->Start());
  }
  return Status::Ok();
}

void Server::Stop() {
  std::vector<std::string> sessions;
  {
    std::lock_guard lock(impl_->mutex);
    if (impl_->stopping) return;
    impl_->stopping = true;
    for (auto& [session, stopped] : impl_->running) {
      *stopped = true;
      sessions.push_back(session);
    }
    impl_->work.notify_all();
    impl_->idle.notify_all();
  }
  for (const std::string& session : sessions) impl_->StopAttempt(session);
  if (impl_->asker.joinable()) impl_->asker.join();
  for (std::thread& player : impl_->players) player.join();
  if (impl_->rpc) impl_->rpc->Stop();
}

bool Server::pool_closed() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->closed;
}

Result<EvaluationReport> Server::Evaluate(int64_t evaluation, int64_t version) { return impl_->Evaluate(evaluation, version); }

Result<std::vector<std::string>> Server::Probe(int64_t version) {
  std::lock_guard lock(impl_->probe_mutex);
  auto it = impl_->probes.find(version);
  return it == impl_->probes.end() ? std::vector<std::string>() : std::vector<std::string>{it->second};
}

Metrics& Server::metrics() { return impl_->metrics; }

}  // namespace temper::agents
