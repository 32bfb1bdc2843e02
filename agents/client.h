// The agents role as the trainer sees it: evaluations, and rollouts to check its own weights on.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "agents/types.h"
#include "common/status.h"

namespace temper::agents {

class Agents {
 public:
  virtual ~Agents() = default;
  // Plays every evaluation task once with the weights now served; blocks until all are judged. kAborted: more than a
  // tenth of the tasks could not be judged. kUnavailable: the role is stopping.
  virtual Result<EvaluationReport> Evaluate(int64_t evaluation, int64_t version) = 0;
  // Serialised temper.v1.Trajectory of a training rollout whose every token was sampled at `version`; empty when none was
  // sealed yet. Short.
  virtual Result<std::vector<std::string>> Probe(int64_t version) = 0;
};

// `address` as RpcChannel takes it. A call waits for the role to (re)start, at most `patience_s`.
std::unique_ptr<Agents> ConnectAgents(const std::string& address, double patience_s = 1800);

}  // namespace temper::agents
