// The plan of a job: what follows from the job file and the machine before anything starts. Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "datapool/types.h"
#include "engine/config.h"
#include "job/job.h"

namespace temper::job {

struct Machine {
  int cores = 1;
  int64_t memory_bytes = 0;            // that could be taken now
  std::vector<std::string> cpu_paths;  // the engine's, slowest first
};

// Sizes of the models beside the policy that the algorithm reads.
struct OtherModels {
  std::optional<engine::ModelConfig> reference, teacher;
};

struct PlannedProcess {
  std::string name;  // "trainer", "rollout-0", …; one of them is the supervisor itself
  std::string does;
  int64_t memory_bytes = 0;  // at its peak, without
  int64_t mapped_bytes = 0;  // weights that it maps read-only and another process holds: resident, but once for the machine
};

// What one source of tasks has of the pool.
struct PlannedSource {
  std::string name;
  int64_t groups = 0;             // of each batch
  int64_t slots = 0;              // B
  std::optional<int64_t> window;  // W; nothing with areal
  std::optional<int64_t> bound;   // of its own groups, staleness in updates; nothing with areal
};
std::vector<PlannedSource> PlanSources(const datapool::PoolConfig& pool);

struct Plan {
  engine::ModelConfig model;
  int64_t parameters = 0;
  int64_t weight_bytes = 0;  // of one version on its way to a worker
  std::string cpu_path;
  std::vector<PlannedSource> sources;  // in the order of the file; at least one
  int64_t slots = 0;                // of all sources
  std::optional<int64_t> bound;     // the largest of the sources' bounds; nothing with areal
  int64_t rollouts = 0;             // of a whole job without failures
  int64_t concurrency = 0;          // attempts played at once
  int64_t reference_bytes = 0, teacher_bytes = 0;  // of the models beside the policy; 0 = none
  int64_t trainer_memory_bytes = 0;  // for activations; fixed here, kept on resume
  int64_t kv_memory_bytes = 0;       // of each worker
  std::vector<PlannedProcess> processes;
  int64_t memory_bytes = 0;  // sum over the processes, weights that several map counted once
};

// `others`: the models beside the policy. kInvalidArgument: the job cannot run on this machine, and which key to change.
Result<Plan> MakePlan(const Job& job, const engine::ModelConfig& model, const Machine& machine, const OtherModels& others = {});

// The values of the job with their sources, then the plan, for people. `entries` in the order of the schema.
std::string PrintValues(const std::vector<ConfigEntry>& entries);
std::string PrintPlan(const Job& job, const Plan& plan);

// RUN/plan.json. From a stored one only what must not change on resume is read back.
std::string PlanToJson(const Job& job, const Plan& plan);
Status RestorePlan(const std::string& json, Plan* plan);

}  // namespace temper::job
