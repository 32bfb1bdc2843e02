// Plain types of the agents part: how an attempt at a task is described and how it ended.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "agents/task.h"

namespace temper::v1 {
class Trajectory;  // temper/v1/types.pb.h
}

namespace temper::agents {

// One attempt: training (group, rollout, attempt) or evaluation (evaluation, task index, attempt).
struct AttemptSpec {
  std::string session;  // G.R.A or eN.T.A
  Task task;
  bool training = false;
  int64_t group = 0;
  int32_t rollout = 0;
  int32_t attempt = 1;
  int64_t evaluation = 0;  // evaluation sessions: number and task index, the names of their random draws
  int64_t task_index = 0;
  double deadline_s = 0;   // time left to the group's deadline; 0 = none
};

// What became of it (docs/design.md 6). `outcome`: scored policy_failure truncated infra_failure aborted.
struct AttemptResult {
  std::string outcome;
  std::string reason;            // the kind: turns, time, limit, agent_exit, verifier, …; empty for scored
  std::optional<double> reward;  // of scored, policy_failure and truncated
  std::string detail;            // last words of an infrastructure failure, for people
  std::shared_ptr<v1::Trajectory> trajectory;  // outcome fields filled in; null when no session was sealed
};

// How the agent itself ended, as its scaffold saw it.
struct AgentEnd {
  enum class Kind {
    kDone,     // ended by itself, successfully
    kExit,     // ended with a non-zero exit code or by a signal of its own (a crash)
    kKilled,   // by a signal from inside its sandbox
    kTimeout,  // over scaffold.timeout_s
    kLimit,    // a sandbox limit ended it
    kInfra,    // our own parts failed; says nothing about the agent
    kGone,     // one of our own parts stopped or restarted under it
    kStopped,  // cancelled by us
  };
  Kind kind = Kind::kInfra;
  std::string detail;
};

struct FamilyScore {
  int64_t tasks = 0;
  double passed = 0;  // sum of rewards
};

// Result of one evaluation, and one line of eval.jsonl.
struct EvaluationReport {
  int64_t evaluation = 0;
  int64_t version = 0;
  int64_t tasks = 0;            // judged; tasks whose every attempt failed in our own parts are not
  int64_t unjudged = 0;
  double pass_rate = 0;         // mean reward over the judged
  std::map<std::string, FamilyScore> families;
  std::map<std::string, int64_t> outcomes;
  std::vector<std::optional<double>> rewards;  // by task; nullopt: not judged. Only in the file, not on the wire
  int64_t tokens_sampled = 0;
  double wall_s = 0;
  std::optional<double> job_s;  // time of the job at its end. Only in the file
  std::vector<std::string> probe;  // serialised temper.v1.Trajectory of up to 8 rollouts, for the trainer's on-policy check
};

}  // namespace temper::agents
