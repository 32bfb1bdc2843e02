// One attempt from open to verdict: session, sandbox, agent, seal, export, verification, outcome.
//
// The order is the contract: the trajectory is sealed before anything is judged, and the judge sees a copy of the files in a
// fresh sandbox that the agent never touched.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "agents/scaffold.h"
#include "agents/types.h"
#include "gateway/client.h"
#include "sandbox/client.h"
#include "verifiers/verifier.h"

namespace temper::agents {

struct AttemptOptions {
  ScaffoldOptions scaffold;
  gateway::SamplingPolicy sampling;
  float eval_temperature = 1;
  uint64_t seed = 0;
  sandbox::Limits limits;
  std::string rootfs;
  std::vector<sandbox::Mount> mounts;
  std::optional<double> failure_reward;  // given: truncated and policy_failure are not verified
};

// Pure. Joins how the agent ended, what the gateway noted (`flags` of the trajectory) and the settings into outcome and
// reason; `scored` means: the verifier decides. Infrastructure comes before everything, so that it never looks like a policy.
struct OutcomeDecision {
  std::string outcome;
  std::string reason;
};
OutcomeDecision DecideOutcome(const AgentEnd& end, const std::vector<std::string>& flags, int calls, bool exit_is_policy);

// The task as the agent's task file shows it (without `hidden`), and as the verifier's case has it (with).
std::string TaskFileJson(const Task& task, const ScaffoldOptions& scaffold);
std::string TaskCaseJson(const Task& task);

// Thread-safe; everything passed in must outlive it.
class AttemptRunner {
 public:
  AttemptRunner(const AttemptOptions& options, const Scaffold& scaffold, gateway::GatewayControl& gateway,
                sandbox::SandboxService& sandbox, verifiers::Verifier& verifier);
  // Blocks until the attempt is over. When `stopped` becomes true (and Stop(session) is called) it ends early as aborted.
  AttemptResult Run(const AttemptSpec& spec, const std::atomic<bool>& stopped) const;
  // Makes a running attempt end soon: its sandbox is destroyed and its session aborted.
  void Stop(const std::string& session) const;

 private:
  AttemptResult RunInSandbox(const AttemptSpec& spec, const gateway::Opened& opened, const std::string& task_file,
                             const std::atomic<bool>& stopped) const;

  const AttemptOptions options_;
  const Scaffold& scaffold_;
  gateway::GatewayControl& gateway_;
  sandbox::SandboxService& sandbox_;
  verifiers::Verifier& verifier_;
};

}  // namespace temper::agents
