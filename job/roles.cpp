#include "job/roles.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <thread>

#include "agents/client.h"
#include "agents/demonstration_rows.h"
#include "agents/server.h"
#include "agents/terminal_tasks.h"
#include "common/json.h"
#include "common/log.h"
#include "common/process.h"
#include "common/rpc.h"
#include "common/strings.h"
#include "datapool/client.h"
#include "datapool/server.h"
#include "engine/files/model_file.h"
#include "gateway/client.h"
#include "gateway/server.h"
#include "job/initial_model.h"
#include "job/job.h"
#include "job/optimizers.h"
#include "job/plan.h"
#include "job/rank_processes.h"
#include "job/references.h"
#include "job/run_folder.h"
#include "rollout/server.h"
#include "sandbox/client.h"
#include "sandbox/server.h"
#include "trainer/server.h"
#include "verifiers/verifier.h"

namespace temper::job {
namespace {

constexpr int kStoppedEarly = 3;
constexpr int kRankLost = 4;  // the trainer and its ranks are to be started anew

// What a role knows of its run, and how it ends.
class RoleContext {
 public:
  static Result<std::unique_ptr<RoleContext>> Load(const std::string& run_dir) {
    auto context = std::make_unique<RoleContext>();
    context->run_dir = run_dir;
    ASSIGN_OR_RETURN(Config config, Config::Load(run_dir + "/job.yaml"));
    ASSIGN_OR_RETURN(context->job, ReadJob(config));
    ASSIGN_OR_RETURN(context->state, RunFolder(run_dir).ReadState());
    ASSIGN_OR_RETURN(const std::string plan, ReadFile(run_dir + "/plan.json"));
    RETURN_IF_ERROR(context->ReadPlan(plan));
    if (const char* text = std::getenv("TEMPER_INCARNATION")) {
      if (!ParseInt(text, &context->incarnation)) return InvalidArgument("TEMPER_INCARNATION is no number");
    }
    if (const char* table = std::getenv("TEMPER_SERVE_FDS")) {
      for (const std::string& entry : Split(table, ',')) {
        const size_t equals = entry.find('=');
        int64_t fd = -1;
        if (equals == std::string::npos || !ParseInt(entry.substr(equals + 1), &fd)) {
          return InvalidArgument("TEMPER_SERVE_FDS: '" + entry + "' is not NAME=FD");
        }
        context->fds[entry.substr(0, equals)] = static_cast<int>(fd);
      }
    }
    context->build_dir = BuildFolder();
    return context;
  }

  Result<int> TakeFd(const std::string& name) {
    auto it = fds.find(name);
    if (it == fds.end()) return FailedPrecondition("no descriptor '" + name + "' was inherited: roles are started by `temper run`");
    return it->second;
  }
  Result<std::string> Endpoint(const std::string& name) const {
    auto it = state.endpoints.find(name);
    if (it == state.endpoints.end()) return NotFound("state.json has no endpoint '" + name + "'");
    return it->second;
  }
  std::optional<double> JobBeganS() const { return state.began_s == 0 ? std::nullopt : std::optional(state.began_s); }
  std::string IncarnationName(const char* role) const { return std::string(role) + "-" + std::to_string(incarnation); }

  // Ends the role soon; the first call counts. Any thread.
  void End(int code, const std::string& reason) {
    bool expected = false;
    if (!ending_.compare_exchange_strong(expected, true)) return;
    code_ = code;
    reason_ = reason;
    kill(getpid(), SIGUSR1);
  }
  std::function<void(const std::string&)> OnStop() {
    return [this](const std::string& reason) { End(0, reason); };
  }
  std::function<void(const std::string&)> OnFatal() {
    return [this](const std::string& reason) { End(1, reason); };
  }
  // Until SIGTERM, SIGINT or End. The main thread's.
  int WaitForEnd() {
    sigset_t set = Signals();
    int signal = 0;
    while (sigwait(&set, &signal) != 0) {
    }
    return signal == SIGUSR1 ? code_.load() : 0;
  }
  const std::string& reason() const { return reason_; }
  bool ending() const { return ending_; }

  static sigset_t Signals() {
    sigset_t set;
    sigemptyset(&set);
    for (int signal : {SIGTERM, SIGINT, SIGUSR1}) sigaddset(&set, signal);
    return set;
  }

  std::string run_dir, build_dir;
  Job job;
  RunState state;
  int64_t trainer_memory_bytes = 0, kv_memory_bytes = 0, concurrency = 0;
  int64_t incarnation = 1;
  std::map<std::string, int> fds;

 private:
  Status ReadPlan(const std::string& text) {
    ASSIGN_OR_RETURN(const json::value value, ParseJson(text));
    const JsonRef plan(value, "plan.json");
    ASSIGN_OR_RETURN(const JsonRef memory, plan.Field("memory"));
    ASSIGN_OR_RETURN(trainer_memory_bytes, memory.IntOr("trainer_bytes", 0));
    ASSIGN_OR_RETURN(kv_memory_bytes, memory.IntOr("kv_bytes", 0));
    ASSIGN_OR_RETURN(concurrency, plan.IntOr("concurrency", 32));
    return Status::Ok();
  }

  std::atomic<bool> ending_{false};
  std::atomic<int> code_{0};
  std::string reason_;
};

Result<std::unique_ptr<agents::TaskSource>> MakeTasks(const Job& job, const TaskList& list) {
  if (!list.jsonl.empty()) return agents::LoadJsonlTasks(list.jsonl);
  const agents::Split split = list.held_out ? agents::Split::kHeldOut : agents::Split::kTrain;
  if (list.generator == "sum") return agents::MakeSumTasks(job.seed, list.count, split);
  return agents::MakeTerminalTasks(job.seed, list.count, split);
}

// For the supervisor, which reads it when the role has ended.
void ReportFailure(const std::string& run_dir, const std::string& name, const std::string& reason) {
  log::Error("failed", {{"reason", reason}});
  if (Status s = WriteFile(run_dir + "/logs/" + name + ".error", reason + "\n"); !s.ok()) log::Error("reason not written", {{"error", s.ToString()}});
}

// ---- one function a role: starts, waits, stops. A failed Status ends the job.

template <typename Server>
Result<int> ServeUntilEnd(RoleContext& context, Server& server) {
  RETURN_IF_ERROR(server.Start());
  const int code = context.WaitForEnd();
  server.Stop();
  return code;
}

Result<int> ServePool(RoleContext& context) {
  datapool::ServerOptions options;
  options.run = context.run_dir;
  options.config = context.job.pool;
  for (const Job::Source& source : context.job.sources) {
    ASSIGN_OR_RETURN(const std::unique_ptr<agents::TaskSource> tasks, MakeTasks(context.job, source.train));
    options.task_counts.push_back(tasks->size());
  }
  options.alarms = context.job.alarms;
  options.retention = context.job.retention;
  options.job_incarnation = std::to_string(context.state.incarnation);
  ASSIGN_OR_RETURN(options.listen_fd, context.TakeFd("control"));
  options.on_stop = context.OnStop();
  options.on_damage = [&context](const std::string& reason) {
    ReportFailure(context.run_dir, "pool", reason);
    _exit(1);
  };
  datapool::Server server(std::move(options));
  return ServeUntilEnd(context, server);
}

Result<int> ServeSandbox(RoleContext& context) {
  sandbox::ServerOptions options;
  ASSIGN_OR_RETURN(options.listen_fd, context.TakeFd("control"));
  ASSIGN_OR_RETURN(options.service.janitor_fd, context.TakeFd("janitor"));
  ASSIGN_OR_RETURN(options.service.gateway_address, context.Endpoint("agent_plane"));
  options.on_stop = context.OnStop();
  sandbox::Server server(options);
  return ServeUntilEnd(context, server);
}

Result<int> ServeRollout(RoleContext& context, int index) {
  const Job& job = context.job;
  rollout::ServerOptions options;
  options.worker.cpu = job.cpu;
  options.worker.threads = static_cast<int>(job.rollout.threads.value_or(0));
  options.worker.max_batch = static_cast<int>(job.rollout.max_batch);
  options.worker.kv_bytes = static_cast<uint64_t>(context.kv_memory_bytes);
  options.worker.in_flight = job.weightsync.span ? engine::InFlight::kSpan : engine::InFlight::kRetract;
  ASSIGN_OR_RETURN(options.listen_fd, context.TakeFd("control"));
  ASSIGN_OR_RETURN(options.publisher_address, context.Endpoint("trainer"));
  options.name = "rollout-" + std::to_string(index);
  options.incarnation = static_cast<uint64_t>(context.incarnation);
  options.on_stop = context.OnStop();
  rollout::Server server(std::move(options));
  return ServeUntilEnd(context, server);
}

Result<int> ServeGateway(RoleContext& context) {
  gateway::ServerOptions options;
  options.log_dir = context.run_dir + "/gateway";
  ASSIGN_OR_RETURN(options.agent_fd, context.TakeFd("agent"));
  ASSIGN_OR_RETURN(options.control_fd, context.TakeFd("control"));
  for (int64_t i = 0; i < context.job.rollout.workers; ++i) {
    ASSIGN_OR_RETURN(const std::string worker, context.Endpoint("rollout-" + std::to_string(i)));
    options.workers.push_back(worker);
  }
  options.model_path = PolicyPath(context.job, context.run_dir);
  options.on_stop = context.OnStop();
  gateway::Server server(std::move(options));
  return ServeUntilEnd(context, server);
}

// Of every rank: they share the cores. How many threads compute a gradient changes no bit of it.
engine::EngineOptions EngineOf(const Job& job, engine::CpuPath cpu) {
  const auto ranks = static_cast<int>(job.trainer.ranks);
  return {.cpu = cpu, .threads = ranks == 1 ? 0 : std::max(1, CpuCount() / ranks)};
}

Result<int> ServeRank(RoleContext& context) {
  ASSIGN_OR_RETURN(const engine::CpuPath cpu, engine::ParseCpuPath(context.job.cpu));
  ASSIGN_OR_RETURN(const std::unique_ptr<engine::Engine> engine, engine::Engine::Create(EngineOf(context.job, cpu)));
  ASSIGN_OR_RETURN(const int control, context.TakeFd("control"));
  ASSIGN_OR_RETURN(const int previous, context.TakeFd("previous"));
  trainer::Link next;
  if (context.fds.count("next")) next = trainer::Link(Fd(context.fds["next"]), "the rank behind");
  const auto chain = trainer::MakeChain(trainer::Link(Fd(previous), "the rank before"), std::move(next));
  RETURN_IF_ERROR(trainer::ServeRank(*engine, trainer::Link(Fd(control), RankName(0)), *chain));
  return 0;
}

Result<int> ServeTrainer(RoleContext& context) {
  const Job& job = context.job;
  RankProcesses ranks;
  if (job.trainer.ranks > 1) RETURN_IF_ERROR(ranks.Start(context.run_dir, static_cast<int>(job.trainer.ranks)));
  ASSIGN_OR_RETURN(engine::ModelFile model, engine::LoadModel(PolicyPath(job, context.run_dir)));
  ASSIGN_OR_RETURN(const text::TextModel text, text::LoadTextModel(model.text));
  ASSIGN_OR_RETURN(const std::string agents_address, context.Endpoint("agents"));
  const std::unique_ptr<agents::Agents> agents = agents::ConnectAgents(agents_address);

  trainer::ServerOptions options;
  trainer::TrainerOptions& training = options.trainer;
  training.run_dir = context.run_dir;
  training.incarnation = context.IncarnationName("trainer");
  training.seed = job.seed;
  ASSIGN_OR_RETURN(training.profile, engine::ParseProfile(job.numerics));
  training.algorithm = job.algorithm;
  training.reference = job.trainer.reference;
  training.teacher = job.trainer.teacher;
  training.teacher_top = job.trainer.teacher_top;
  training.optimizer = MakeOptimizer(job);
  training.steps = job.trainer.steps;
  training.checkpoint_every = job.trainer.checkpoint_every;
  training.keep = static_cast<int>(job.trainer.keep);
  training.keep_best = job.trainer.keep_best;
  training.minibatches = job.trainer.minibatches;
  training.epochs = job.trainer.epochs;
  training.max_leases = job.pool.max_leases;
  if (const auto bound = datapool::Plan(job.pool).bound) training.staleness_bound_steps = datapool::BoundInOptimizerSteps(*bound, job.trainer.optimizer_steps());
  training.skip_limit = job.optimizer.skip_limit;
  training.memory_bytes = context.trainer_memory_bytes;
  training.tree = job.trainer.tree;
  training.prove_tree = job.trainer.prove_tree;
  training.prove_every = job.trainer.prove_every;
  training.permute_rewards = job.trainer.permute_rewards;
  training.eval_every = job.eval.every;
  training.evaluate = job.Evaluates();
  training.job_began_s = context.JobBeganS();
  if (job.trainer.sft) {
    trainer::SftOptions& sft = training.sft.emplace();
    sft.tokens = job.trainer.sft->tokens;
    sft.batch_tokens = job.trainer.sft->batch_tokens;
    sft.warmup_fraction = job.trainer.sft->warmup_fraction;
    sft.optimizer = MakeWarmUpOptimizer(job);
    options.sft_source = [&](int64_t index) -> Result<trainer::SftRow> {
      const agents::Demonstration demonstration = agents::TerminalDemonstration(job.seed, index, job.trainer.sft->poor_fraction);
      ASSIGN_OR_RETURN(agents::DemonstrationRow row, agents::ToRow(demonstration, text));
      return trainer::SftRow{std::move(row.ids), std::move(row.mask)};
    };
  }
  ASSIGN_OR_RETURN(const engine::CpuPath cpu, engine::ParseCpuPath(job.cpu));
  options.engine = EngineOf(job, cpu);
  if (job.trainer.ranks > 1) options.ranks = ranks.links();
  ASSIGN_OR_RETURN(options.pool_address, context.Endpoint("pool"));
  options.epoch = static_cast<uint64_t>(context.incarnation);
  options.workers = static_cast<int>(job.rollout.workers);
  options.evaluator = [&](int64_t evaluation, int64_t version) -> Result<trainer::Evaluation> {
    ASSIGN_OR_RETURN(agents::EvaluationReport report, agents->Evaluate(evaluation, version));
    trainer::Evaluation result;
    result.pass_rate = report.pass_rate;
    for (const auto& [family, score] : report.families) {
      result.families[family] = score.tasks > 0 ? score.passed / static_cast<double>(score.tasks) : 0;
    }
    result.probe = std::move(report.probe);
    return result;
  };
  options.probe = [&](int64_t version) -> Result<std::vector<std::string>> {
    Result<std::vector<std::string>> rollouts = agents->Probe(version);
    if (rollouts.ok()) return rollouts;
    // The role is being restarted; a missed check is counted by its absence, not taken for a failure of the job.
    log::Warn("no rollout to check the weights on", {{"version", version}, {"error", rollouts.status().ToString()}});
    return std::vector<std::string>();
  };

  ASSIGN_OR_RETURN(const int control, context.TakeFd("control"));
  ASSIGN_OR_RETURN(const std::unique_ptr<trainer::Server> server,
                   trainer::Server::Create(Fd(control), std::move(options), std::move(model.params), std::move(model.text)));
  RETURN_IF_ERROR(server->Start());
  Status trained;
  // A rank that dies is the end of the trainer, whatever that is doing: all begin again at the newest checkpoint.
  const auto end_of_ranks = [&context](const RankProcesses::Loss& loss) { context.End(loss.own_error ? 1 : kRankLost, loss.words); };
  std::thread training_thread([&] {
    trained = server->Run();
    // Whoever waits for a dead rank may know it before the parent does.
    if (const auto loss = trained.code() == StatusCode::kUnavailable ? ranks.LostWithin(1) : std::nullopt) return end_of_ranks(*loss);
    context.End(trained.ok() ? 0 : trained.code() == StatusCode::kCancelled ? kStoppedEarly : 1, trained.message());
  });
  const std::jthread watch([&](const std::stop_token& stop) {
    while (!stop.stop_requested() && !context.ending()) {
      if (const auto loss = ranks.Lost()) end_of_ranks(*loss);
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
  });
  int code = context.WaitForEnd();
  if (context.ending() && code == kRankLost) {
    // As good as killed, at once: what this process still computes is of no use, and what must outlive it is on disk.
    ReportFailure(context.run_dir, "trainer", context.reason());
    _exit(code);
  }
  server->RequestStop();
  training_thread.join();
  server->Stop();
  // A signal that came first: the loop's own answer counts, so that a stopped job is not taken for a finished one.
  if (trained.ok()) code = 0;
  else if (code == 0) code = kStoppedEarly;
  return code;
}

Result<std::unique_ptr<verifiers::Verifier>> MakeVerifier(const RoleContext& context, const Job::Verifier& verifier, sandbox::SandboxService* service) {
  const Job& job = context.job;
  if (verifier.kind == "builtin") return verifiers::MakeBuiltinVerifier(verifier.name);
  // Inside, the programs of {build} lie in one fixed folder, each mounted by itself.
  constexpr char kBuildInside[] = "/opt/temper";
  verifiers::CommandOptions options;
  options.name = verifier.name;
  options.timeout_s = verifier.timeout_s;
  options.limits = job.sandbox.limits;
  options.limits.wall_s = verifier.timeout_s;
  options.rootfs = job.sandbox.rootfs;
  options.mounts = job.sandbox.mounts;
  constexpr std::string_view kBuild = "{build}/";
  for (std::string word : verifier.command) {
    if (word.rfind(kBuild, 0) == 0) {
      const std::string program = word.substr(kBuild.size());
      options.mounts.push_back({context.build_dir + "/" + program, std::string(kBuildInside) + "/" + program});
      word = std::string(kBuildInside) + "/" + program;
    }
    options.command.push_back(word);
  }
  return verifiers::MakeCommandVerifier(options, service);
}

agents::AttemptOptions AttemptOf(const RoleContext& context, const Job::Source& source) {
  const Job& job = context.job;
  agents::AttemptOptions attempt;
  attempt.scaffold.name = source.scaffold.name;
  attempt.scaffold.kind = source.scaffold.kind;
  attempt.scaffold.command = source.scaffold.command;
  attempt.scaffold.host = source.scaffold.host;
  attempt.scaffold.max_turns = source.scaffold.max_turns;
  attempt.scaffold.timeout_s = source.scaffold.timeout_s;
  attempt.scaffold.exit_is_policy = source.scaffold.exit_is_policy;
  attempt.scaffold.build_dir = context.build_dir;
  attempt.scaffold.run_dir = context.run_dir;
  attempt.sampling.temperature = static_cast<float>(job.sampling.temperature);
  attempt.sampling.top_p = static_cast<float>(job.sampling.top_p);
  attempt.sampling.top_k = static_cast<uint32_t>(job.sampling.top_k);
  attempt.sampling.min_p = static_cast<float>(job.sampling.min_p);
  attempt.sampling.repetition_stop = static_cast<uint32_t>(job.sampling.repetition_stop);
  attempt.sampling.max_tokens = static_cast<uint32_t>(job.sampling.max_tokens);
  attempt.eval_temperature = static_cast<float>(job.eval.temperature);
  attempt.seed = job.seed;
  attempt.limits = job.sandbox.limits;
  attempt.rootfs = job.sandbox.rootfs;
  attempt.mounts = job.sandbox.mounts;
  attempt.failure_reward = source.verifier.failure_reward;
  return attempt;
}

// What agents::ServerSource points to.
struct OwnedSource {
  std::unique_ptr<agents::TaskSource> train, eval;
  std::unique_ptr<agents::Scaffold> scaffold;
  std::unique_ptr<verifiers::Verifier> verifier;
};

Result<int> ServeAgents(RoleContext& context) {
  const Job& job = context.job;
  ASSIGN_OR_RETURN(const std::string pool_address, context.Endpoint("pool"));
  ASSIGN_OR_RETURN(const std::string gateway_address, context.Endpoint("gateway"));
  ASSIGN_OR_RETURN(const std::string sandbox_address, context.Endpoint("sandbox"));
  const std::unique_ptr<datapool::DataPool> pool = datapool::ConnectDataPool(pool_address);
  const std::unique_ptr<gateway::GatewayControl> gateway = gateway::NewGatewayClient(gateway_address);
  const std::unique_ptr<sandbox::SandboxService> sandbox = sandbox::ConnectSandboxService(sandbox_address);
  std::vector<OwnedSource> owned;
  agents::ServerParts parts;
  for (const Job::Source& source : job.sources) {
    OwnedSource& own = owned.emplace_back();
    ASSIGN_OR_RETURN(own.train, MakeTasks(job, source.train));
    if (source.eval) {
      ASSIGN_OR_RETURN(own.eval, MakeTasks(job, *source.eval));
    }
    ASSIGN_OR_RETURN(own.verifier, MakeVerifier(context, source.verifier, sandbox.get()));
    agents::ServerSource& part = parts.sources.emplace_back();
    part.name = source.name;
    part.attempt = AttemptOf(context, source);
    ASSIGN_OR_RETURN(own.scaffold, agents::MakeScaffold(part.attempt.scaffold));
    part.train = own.train.get();
    part.eval = own.eval.get();
    part.scaffold = own.scaffold.get();
    part.verifier = own.verifier.get();
  }

  agents::ServerOptions options;
  options.concurrency = static_cast<int>(context.concurrency);
  options.group_size = job.pool.G;
  options.run_dir = context.run_dir;
  options.incarnation = context.IncarnationName("agents");
  options.job_began_s = context.JobBeganS();
  ASSIGN_OR_RETURN(options.control_fd, context.TakeFd("control"));
  options.on_fatal = context.OnFatal();
  options.on_stop = context.OnStop();

  parts.pool = pool.get();
  parts.gateway = gateway.get();
  parts.sandbox = sandbox.get();
  agents::Server server(options, parts);
  return ServeUntilEnd(context, server);
}

Result<int> Serve(const std::string& role, int index, RoleContext& context) {
  if (role == "pool") return ServePool(context);
  if (role == "sandbox") return ServeSandbox(context);
  if (role == "rollout") return ServeRollout(context, index);
  if (role == "gateway") return ServeGateway(context);
  if (role == "trainer") return ServeTrainer(context);
  if (role == "rank") return ServeRank(context);
  return ServeAgents(context);
}

}  // namespace

int ServeRole(const std::string& role, const std::string& run_dir, int index) {
  const sigset_t set = RoleContext::Signals();
  sigprocmask(SIG_BLOCK, &set, nullptr);
  signal(SIGPIPE, SIG_IGN);
  const std::string name = role == "rollout" || role == "rank" ? role + "-" + std::to_string(index) : role;
  log::Init(name);
  auto context = RoleContext::Load(run_dir);
  Result<int> code = context.ok() ? Serve(role, index, **context) : Result<int>(context.status());
  const std::string reason = !code.ok() ? code.status().message() : context.ok() ? (*context)->reason() : "";
  const int exit_code = code.ok() ? *code : 1;
  if (exit_code == 1) ReportFailure(run_dir, name, reason);
  return exit_code;
}

}  // namespace temper::job
