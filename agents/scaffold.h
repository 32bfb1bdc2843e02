// Scaffolds: what plays a task. The gateway knows no scaffold, a scaffold knows no token: it has a base URL and a key.
//
// A scaffold is registered by kind in MakeScaffold. `command` runs any program, inside the attempt's sandbox or beside it on the
// host; `builtin` is a loop in C++ that asks the model and runs its tool calls in the sandbox.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "agents/types.h"
#include "common/status.h"
#include "sandbox/client.h"

namespace temper::agents {

// Of the job's `scaffold:` block.
struct ScaffoldOptions {
  std::string name = "agent";
  std::string kind = "command";       // command | builtin
  std::vector<std::string> command;   // placeholders {build} {run} {task}
  bool host = false;                  // where: host
  int32_t max_turns = 0;              // 0 = no limit
  double timeout_s = 30;
  bool exit_is_policy = false;        // on_exit: policy
  std::string build_dir;              // {build}: the folder of the temper binary
  std::string run_dir;                // {run}
};

// What a scaffold is given for one attempt. The sandbox exists already, with the task's files in its work folder.
struct AttemptContext {
  const AttemptSpec& spec;
  std::string base_url;  // as the host reaches the agent plane, ends in /v1
  std::string api_key;
  sandbox::SandboxService& sandbox;
  std::string sandbox_id;
  std::string task_file;  // on the host
  const std::atomic<bool>& stopped;
};

class Scaffold {
 public:
  virtual ~Scaffold() = default;
  // Read-only folders and files the sandbox must show for it. `task_file`: host path of the attempt's task file.
  virtual std::vector<sandbox::Mount> Mounts(const std::string& task_file) const = 0;
  // Does the sandbox need the way to the gateway?
  virtual bool NeedsRelay() const = 0;
  // Plays the attempt to its end, at most timeout_s. Called from many threads.
  virtual AgentEnd Play(const AttemptContext& context) const = 0;
};

std::vector<std::string> ScaffoldKinds();
// kInvalidArgument names the wrong field.
Result<std::unique_ptr<Scaffold>> MakeScaffold(const ScaffoldOptions& options);

}  // namespace temper::agents
