// A small job whose finishes come from a script: pool, agents and trainer in one process, which goes on from whatever its folder
// holds. Whenever and however it is interrupted, its batches are those of a run that was not.
#pragma once

#include <string>

#include "common/env.h"
#include "common/file.h"
#include "datapool/service.h"
#include "tests/datapool/script.h"

namespace temper::datapool {

inline constexpr char kScriptedPool[] = R"({"P":2,"S":1,"G":2,"retries":1,"window":{"size":2}})";
inline constexpr int64_t kScriptedSteps = 6, kCheckpointEvery = 2;

struct ScriptedJob {
  std::string run;
  std::string name;              // of this life
  size_t record_bytes = 20'000;  // of each rollout
  RetentionConfig retention;
  Env env = Env::System();  // its faults too
};

// Incompressible, and known again by its id.
inline std::string ScriptedRecord(const AttemptId& id, size_t bytes) {
  std::string out = fmt::format("{}.{}:", id.group, id.rollout);
  Rng rng(static_cast<uint64_t>(id.group * 100 + id.rollout));
  while (out.size() < bytes) {
    const uint64_t word = rng.Next();
    out.append(reinterpret_cast<const char*>(&word), sizeof word);
  }
  return out;
}

// An issue's place in the script: groups in pairs, the second of a pair first, rollout 1 before rollout 0.
inline std::pair<int64_t, int32_t> Place(const AttemptId& id) { return {id.group ^ 1, -id.rollout}; }

// The rollout 1 of every seventh group is broken, however often it is issued: that group ends too_few_valid.
inline FinishedAttempt ScriptedFinish(const AttemptId& id, size_t bytes) {
  FinishedAttempt f;
  f.id = id;
  const bool broken = id.group % 7 == 3 && id.rollout == 1;
  f.outcome = broken ? "infra_failure" : "scored";
  f.reason = broken ? "script" : "";
  if (!broken) f.reward = id.rollout;
  f.trajectory = ScriptedRecord(id, bytes);
  return f;
}

// Until all steps are trained. An error is what the pool said. RUN/batch-N holds what was trained as step N+1; a batch that comes back
// with other members is kDataLoss.
inline Status PlayScript(const ScriptedJob& job, std::unique_ptr<Store> store) {
  Metrics metrics;
  LocalPoolOptions options;
  options.config = Config(kScriptedPool);
  options.job_incarnation = "job";
  options.ledger_path = job.run + "/ledger.jsonl";
  options.retention = job.retention;
  options.archive_dir = job.run + "/archive";
  ASSIGN_OR_RETURN(std::unique_ptr<LocalDataPool> pool, LocalDataPool::Open(options, std::move(store), metrics, job.env));
  const std::string checkpoint = job.run + "/checkpoint";
  int64_t step = 0;
  if (Exists(checkpoint)) {
    ASSIGN_OR_RETURN(const std::string text, ReadFile(checkpoint));
    step = std::atoll(text.c_str());
  }
  RETURN_IF_ERROR(pool->AttachAgents(job.name).status());
  const Status attached = pool->AttachTrainer(job.name, step).status();
  // Died after it had closed the pool: everything is done.
  if (step == kScriptedSteps && attached.code() == StatusCode::kFailedPrecondition) return Status::Ok();
  RETURN_IF_ERROR(attached);
  std::vector<AttemptId> open;
  while (step < kScriptedSteps) {
    ASSIGN_OR_RETURN(const LeaseReply lease, pool->Lease(job.name, step, 0));
    if (lease.ready) {
      std::string members;
      for (const LeasedGroup& g : lease.groups) {
        for (size_t i = 0; i < g.members.size(); ++i) {
          if (g.members[i] != ScriptedRecord({g.group, g.rollouts[i], 0}, job.record_bytes)) return DataLoss("a record came back changed");
          members += fmt::format("{}.{}@{} ", g.group, g.rollouts[i], g.version_admitted);
        }
      }
      const std::string path = job.run + "/batch-" + std::to_string(step);
      if (Exists(path)) {
        ASSIGN_OR_RETURN(const std::string before, ReadFile(path));
        if (before != members) return DataLoss(fmt::format("batch {} came back as {}, it was {}", step, members, before));
      }
      RETURN_IF_ERROR(WriteFileAtomic(path, members));
      RETURN_IF_ERROR(job.env.faults.Hit("trainer.batch_written"));
      RETURN_IF_ERROR(pool->Pause(true));
      RETURN_IF_ERROR(pool->Update(job.name, step));
      RETURN_IF_ERROR(pool->Pause(false));
      ++step;
      if (step % kCheckpointEvery == 0) {
        RETURN_IF_ERROR(WriteFileAtomic(checkpoint, std::to_string(step)));
        RETURN_IF_ERROR(job.env.faults.Hit("trainer.checkpoint_written"));
        RETURN_IF_ERROR(pool->Commit(step));
      }
      continue;
    }
    ASSIGN_OR_RETURN(const TakeIssuesReply taken, pool->TakeIssues(job.name, 1000, 0));
    for (const Issue& issue : taken.issues) open.push_back(issue.id);
    std::erase_if(open, [&](const AttemptId& id) { return std::count(taken.cancelled.begin(), taken.cancelled.end(), id) > 0; });
    if (open.empty()) return Internal("nothing is open and no batch is ready");
    const auto next = std::min_element(open.begin(), open.end(), [](const AttemptId& a, const AttemptId& b) { return Place(a) < Place(b); });
    const AttemptId id = *next;
    open.erase(next);
    RETURN_IF_ERROR(pool->Finish(job.name, ScriptedFinish(id, job.record_bytes)).status());
  }
  return pool->Close(CloseReason::kJobEnd);
}

}  // namespace temper::datapool
