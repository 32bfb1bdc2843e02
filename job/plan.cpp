#include "job/plan.h"

#include <fmt/format.h>

#include <algorithm>

#include "common/json.h"
#include "common/strings.h"
#include "datapool/types.h"
#include "engine/kv_pool.h"
#include "engine/memory.h"
#include "engine/weights.h"
#include "rollout/worker.h"

namespace temper::job {
namespace {

constexpr int64_t kMiB = 1 << 20;
constexpr int64_t kProcessBytes = 40 * kMiB;  // code, gRPC, buffers of any role
constexpr int64_t kAutoTrainerBytes = 4096 * kMiB;

}  // namespace

std::vector<PlannedSource> PlanSources(const datapool::PoolConfig& pool) {
  const datapool::PoolPlan plan = datapool::Plan(pool);
  std::vector<PlannedSource> sources;
  for (size_t i = 0; i < plan.quota.size(); ++i) {
    sources.push_back({datapool::SourceNames(pool)[i], plan.quota[i], plan.slots[i], plan.window[i], plan.bounds[i]});
  }
  return sources;
}

Result<Plan> MakePlan(const Job& job, const engine::ModelConfig& model, const Machine& machine, const OtherModels& others) {
  Plan plan;
  plan.model = model;
  plan.parameters = engine::ParameterCount(model);
  ASSIGN_OR_RETURN(const engine::Profile profile, engine::ParseProfile(job.numerics));
  plan.weight_bytes = static_cast<int64_t>(engine::ComputeBytes(model, profile));

  if (machine.cpu_paths.empty()) return InvalidArgument("cpu: the engine needs at least AVX2 and FMA, which this machine lacks");
  plan.cpu_path = machine.cpu_paths.back();
  if (job.cpu != "auto") {
    if (std::find(machine.cpu_paths.begin(), machine.cpu_paths.end(), job.cpu) == machine.cpu_paths.end()) {
      return InvalidArgument("cpu: this machine lacks " + job.cpu + " (it has " + Join(machine.cpu_paths, ", ") + ")");
    }
    plan.cpu_path = job.cpu;
  }
  if (job.sampling.max_tokens > model.max_positions) {
    return InvalidArgument(fmt::format("sampling.max_tokens: {} is more than the model has positions ({})", job.sampling.max_tokens, model.max_positions));
  }

  if (job.sampling.top_k >= model.vocab) {
    return InvalidArgument(
        fmt::format("sampling.top_k: {} has no effect, the model has {} tokens; 0 turns it off", job.sampling.top_k, model.vocab));
  }

  plan.sources = PlanSources(job.pool);
  for (const PlannedSource& source : plan.sources) plan.slots += source.slots;
  plan.bound = datapool::Plan(job.pool).bound;
  plan.rollouts = job.trainer.steps * job.pool.P * job.pool.G;
  const int64_t started = plan.slots * (job.pool.G + job.pool.extra);
  plan.concurrency = job.concurrency.value_or(std::min<int64_t>(started, 32));

  const auto page = static_cast<int64_t>(engine::KvPool::PageBytes(model, profile));
  const int64_t one_sequence = page * ((model.max_positions + engine::kPagePositions - 1) / engine::kPagePositions);
  plan.kv_memory_bytes = job.rollout.kv_memory_bytes.value_or(std::clamp<int64_t>(one_sequence * job.rollout.max_batch, kMiB, 1024 * kMiB));
  if (plan.kv_memory_bytes < one_sequence) {
    return InvalidArgument(fmt::format("rollout.kv_memory: {} does not hold one sequence of {} tokens ({})", FormatSize(plan.kv_memory_bytes),
                                       model.max_positions, FormatSize(one_sequence)));
  }
  // A constant where it fits: chunks follow from it, and with them the last bits of a gradient.
  plan.trainer_memory_bytes = job.trainer.memory_bytes.value_or(std::clamp<int64_t>(machine.memory_bytes / 4, 64 * kMiB, kAutoTrainerBytes));
  if (job.trainer.memory_bytes && machine.memory_bytes > 0 && *job.trainer.memory_bytes > machine.memory_bytes) {
    return InvalidArgument(fmt::format("trainer.memory: {} is more than is free on this machine ({})", FormatSize(*job.trainer.memory_bytes),
                                       FormatSize(machine.memory_bytes)));
  }

  if (others.reference) plan.reference_bytes = static_cast<int64_t>(engine::ComputeBytes(*others.reference, profile));
  if (others.teacher) plan.teacher_bytes = static_cast<int64_t>(engine::ComputeBytes(*others.teacher, profile));
  // The version that is served and the next one lie in memory files of the trainer; while it changes, a worker maps both.
  const int64_t versions = 2 * plan.weight_bytes;
  const int64_t trainer_fixed = engine::TrainBytes(model, profile, 0, model.max_positions, 0) + versions + plan.reference_bytes + plan.teacher_bytes;
  const auto batch = static_cast<int>(job.rollout.max_batch);
  const int64_t decode = engine::DecodeBytes(model, profile, static_cast<int>(job.rollout.threads.value_or(machine.cores)),
                                             plan.kv_memory_bytes / page, rollout::WorkerOptions{}.chunk_tokens + batch, batch);
  plan.processes = {
      {"supervisor", "starts, watches and ends the others", kProcessBytes},
      {"janitor", "makes sandboxes, removes everything at the end", 4 * kMiB},
      {"pool", "window, ledger, trajectories (RocksDB)", kProcessBytes + 64 * kMiB},
      {"sandbox", "sandboxes and their commands", kProcessBytes},
  };
  for (int64_t i = 0; i < job.rollout.workers; ++i) {
    plan.processes.push_back({"rollout-" + std::to_string(i), "draws tokens", kProcessBytes + decode, versions});
  }
  plan.processes.push_back({"gateway", "OpenAI API for agents, token capture", kProcessBytes});
  plan.processes.push_back({"trainer", "losses, gradients, AdamW, checkpoints, weights", kProcessBytes + trainer_fixed + plan.trainer_memory_bytes});
  // Of what rank 0 holds the others lack the fp32 weights, both moments and the versions that are served.
  const int64_t rank = trainer_fixed - versions - 12 * plan.parameters;
  for (int64_t i = 1; i < job.trainer.ranks; ++i) {
    plan.processes.push_back({"rank-" + std::to_string(i), "computes a part of every batch", kProcessBytes + rank + plan.trainer_memory_bytes});
  }
  plan.processes.push_back({"agents", "plays tasks, verifies, evaluates", kProcessBytes});
  for (const PlannedProcess& process : plan.processes) plan.memory_bytes += process.memory_bytes;
  if (machine.memory_bytes > 0 && trainer_fixed > machine.memory_bytes) {
    return InvalidArgument(fmt::format("model: training {:.1f} M parameters needs {} besides activations; {} are free", plan.parameters * 1e-6,
                                       FormatSize(trainer_fixed), FormatSize(machine.memory_bytes)));
  }
  return plan;
}

std::string PrintValues(const std::vector<ConfigEntry>& entries) {
  std::string text;
  for (const ConfigEntry& entry : entries) {
    text += fmt::format("  {:<34} {:<40} {}\n", entry.path, entry.json, ConfigSourceName(entry.source));
  }
  return text;
}

std::string PrintPlan(const Job& job, const Plan& plan) {
  std::string text;
  auto line = [&](const char* what, const std::string& value) { text += fmt::format("  {:<12} {}\n", what, value); };
  const engine::ModelConfig& m = plan.model;
  line("policy", fmt::format("{:.2f} M parameters ({} layers, width {}, vocabulary {}, {} positions), numerics {}, {}", plan.parameters * 1e-6,
                             m.layers, m.width, m.vocab, m.max_positions, job.numerics, plan.cpu_path));
  line("training", fmt::format("{} steps of {} groups of {} rollouts: {} rollouts{}", job.trainer.steps, job.pool.P, job.pool.G, plan.rollouts,
                               job.trainer.sft ? fmt::format(", after {} tokens of warm-up", job.trainer.sft->tokens) : ""));
  if (job.trainer.ranks > 1) {
    line("ranks", fmt::format("{} trainer processes, each with a part of every batch; gradients are added up in one order, so a run is the same to the last bit "
                              "only with as many", job.trainer.ranks));
  }
  if (!job.algorithm.recipe_source.empty()) line("objective", "recipe as in " + job.algorithm.recipe_source);
  if (plan.reference_bytes > 0) {
    const bool start = job.trainer.reference.empty();
    line("reference", fmt::format("{}, {} in the trainer", start ? "the weights of version 0" : job.trainer.reference, FormatSize(plan.reference_bytes)));
  }
  if (plan.teacher_bytes > 0) line("teacher", fmt::format("{}, {} in the trainer", job.trainer.teacher, FormatSize(plan.teacher_bytes)));
  const auto never_above = [](const std::optional<int64_t>& bound) { return bound ? fmt::format("never above {} updates", *bound) : "no bound with areal"; };
  const auto width = [](const std::optional<int64_t>& window) { return window ? std::to_string(*window) : "none"; };
  const bool several = plan.sources.size() > 1;
  line("pool", fmt::format("B = {} slots, {}staleness S = {}, {}", plan.slots,
                           several ? "" : "window W = " + width(plan.sources.at(0).window) + ", ", job.pool.S, never_above(plan.bound)));
  for (const PlannedSource& source : plan.sources) {
    if (!several) break;
    text += fmt::format("    {:<12} {} of the {} groups of every batch, B = {} slots, window W = {}, {}\n", source.name, source.groups, job.pool.P, source.slots,
                        width(source.window), never_above(source.bound));
  }
  std::string rule = "counted in updates, and an update counts once every worker serves its weights: those on their way add nothing; ";
  const int64_t steps = job.trainer.optimizer_steps();
  if (steps == 1) {
    rule += "one optimizer step an update";
  } else {
    rule += fmt::format("{} optimizer steps an update", steps);
    if (job.trainer.epochs > 1) rule += fmt::format(" ({} epochs of {})", job.trainer.epochs, job.trainer.minibatches);
    if (plan.bound) {
      rule += fmt::format(", so that a token is at most {0}·{1} + {2} = {3} optimizer steps old", steps, *plan.bound, steps - 1,
                          datapool::BoundInOptimizerSteps(*plan.bound, steps));
    }
    rule += job.algorithm.algorithm.off_policy.decoupled ? "; logp_old stays that of the weights before the first of them" : "";
  }
  if (job.pool.max_leases > 1) rule += fmt::format("; {} batches out at once are within the bound", job.pool.max_leases);
  line("staleness", rule);
  const datapool::RetentionConfig& keep = job.retention;
  static constexpr const char* kFate[] = {"kept", "archived in the run folder", "dropped"};
  line("disk", fmt::format("records of groups that are over: {}{}; {}", kFate[static_cast<int>(keep.consumed)],
                           keep.disk ? fmt::format("; the pool's store takes at most {}", FormatSize(*keep.disk)) : "",
                           keep.free > 0 ? fmt::format("no new rollouts while less than {} are free", FormatSize(keep.free)) : "until the disk is full"));
  line("weights", fmt::format("{} a version through shared memory, served whole by {} worker{} before an update counts", FormatSize(plan.weight_bytes),
                              job.rollout.workers, job.rollout.workers == 1 ? "" : "s"));
  std::vector<std::string> agents;
  for (const Job::Source& source : job.sources) {
    const Job::Scaffold& s = source.scaffold;
    agents.push_back(fmt::format("{}{} ({}{}), {} s each", several ? source.name + ": " : "", s.name, s.kind,
                                 s.kind == "command" ? (s.host ? " on the host" : " in its sandbox") : "", FormatDouble(s.timeout_s)));
  }
  line("agents", fmt::format("{} at once; {}", plan.concurrency, Join(agents, "; ")));
  line("activations", fmt::format("at most {} in {} (trainer.memory); gradients are the same to the last bit only with the same figure",
                                 FormatSize(plan.trainer_memory_bytes), job.trainer.ranks == 1 ? "the trainer" : "each rank of the trainer"));
  line("sandbox", fmt::format("{} memory, {} processes, {} disk each; network: none", FormatSize(job.sandbox.limits.memory_bytes),
                              job.sandbox.limits.processes, FormatSize(job.sandbox.limits.disk_bytes)));
  line("ports", fmt::format("gateway {}:{}; everything else on unix sockets", job.gateway.bind, job.gateway.port ? std::to_string(job.gateway.port) : "any"));
  line("processes", fmt::format("{}, at most {} in all", plan.processes.size(), FormatSize(plan.memory_bytes / kMiB * kMiB)));
  for (const PlannedProcess& process : plan.processes) {
    const std::string mapped = process.mapped_bytes ? fmt::format("; maps up to {} of the trainer's", FormatSize(process.mapped_bytes)) : "";
    text += fmt::format("    {:<12} {:>10}  {}{}\n", process.name, FormatSize(process.memory_bytes / kMiB * kMiB), process.does, mapped);
  }
  return text;
}

std::string PlanToJson(const Job& job, const Plan& plan) {
  JsonWriter w;
  w.BeginObject();
  w.Key("name").String(job.name);
  w.Key("model").BeginObject().Key("parameters").Int(plan.parameters).Key("layers").Int(plan.model.layers).Key("width").Int(plan.model.width);
  w.Key("vocab").Int(plan.model.vocab).Key("max_positions").Int(plan.model.max_positions).EndObject();
  w.Key("numerics").String(job.numerics).Key("cpu_path").String(plan.cpu_path);
  w.Key("pool").BeginObject().Key("P").Int(job.pool.P).Key("S").Int(job.pool.S).Key("B").Int(plan.slots);
  auto number = [&](const char* key, const std::optional<int64_t>& value) {
    w.Key(key);
    if (value) w.Int(*value);
    else w.Null();
  };
  // Of several sources the widest; each has its own.
  std::optional<int64_t> widest = plan.sources.at(0).window;
  for (const PlannedSource& source : plan.sources) widest = widest && source.window ? std::optional(std::max(*widest, *source.window)) : std::nullopt;
  number("W", widest);
  number("bound", plan.bound);
  if (job.trainer.optimizer_steps() > 1 && plan.bound) {
    w.Key("bound_optimizer_steps").Int(datapool::BoundInOptimizerSteps(*plan.bound, job.trainer.optimizer_steps()));
  }
  if (plan.sources.size() > 1) {
    w.Key("sources").BeginArray();
    for (const PlannedSource& source : plan.sources) {
      w.BeginObject().Key("name").String(source.name).Key("P").Int(source.groups).Key("B").Int(source.slots);
      number("W", source.window);
      number("bound", source.bound);
      w.EndObject();
    }
    w.EndArray();
  }
  w.EndObject();
  w.Key("ranks").Int(job.trainer.ranks).Key("steps").Int(job.trainer.steps).Key("rollouts").Int(plan.rollouts).Key("concurrency").Int(plan.concurrency);
  w.Key("weightsync").BeginObject().Key("transport").String("shm").Key("bytes").Int(plan.weight_bytes).Key("workers").Int(job.rollout.workers).EndObject();
  w.Key("memory").BeginObject().Key("trainer_bytes").Int(plan.trainer_memory_bytes).Key("kv_bytes").Int(plan.kv_memory_bytes);
  if (plan.reference_bytes > 0) w.Key("reference_bytes").Int(plan.reference_bytes);
  if (plan.teacher_bytes > 0) w.Key("teacher_bytes").Int(plan.teacher_bytes);
  w.Key("all_bytes").Int(plan.memory_bytes).EndObject();
  w.Key("processes").BeginArray();
  for (const PlannedProcess& process : plan.processes) {
    w.BeginObject().Key("name").String(process.name).Key("bytes").Int(process.memory_bytes);
    w.Key("mapped_bytes").Int(process.mapped_bytes).EndObject();
  }
  w.EndArray().EndObject();
  return w.Take() + "\n";
}

Status RestorePlan(const std::string& text, Plan* plan) {
  ASSIGN_OR_RETURN(const json::value value, ParseJson(text));
  ASSIGN_OR_RETURN(const JsonRef memory, JsonRef(value, "plan.json").Field("memory"));
  ASSIGN_OR_RETURN(const JsonRef trainer, memory.Field("trainer_bytes"));
  ASSIGN_OR_RETURN(plan->trainer_memory_bytes, trainer.Int());
  return Status::Ok();
}

}  // namespace temper::job
