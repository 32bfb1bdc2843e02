// The agents role: takes issues from the pool, plays them, reports how they ended; plays evaluations for the trainer.
//
// One thread asks the pool, `concurrency` threads play attempts; attempts of an evaluation go before training attempts (of
// which none are handed out while the pool is paused). A cancelled rollout is stopped and reports nothing. Everything passed
// in must outlive the server.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "agents/attempt.h"
#include "agents/client.h"
#include "agents/scaffold.h"
#include "agents/task.h"
#include "common/metrics.h"
#include "common/status.h"
#include "datapool/client.h"
#include "gateway/client.h"
#include "sandbox/client.h"
#include "verifiers/verifier.h"

namespace temper::agents {

struct ServerOptions {
  int concurrency = 32;
  int group_size = 8;          // 3·group_size infrastructure failures in a row, of one source and from one cause, are fatal
  std::string run_dir;         // eval.jsonl, attempts/
  std::optional<double> job_began_s;  // the clock's reading that `job_s` of eval.jsonl counts from; absent: no `job_s`
  std::string incarnation;     // names this process to the pool
  int control_fd = -1;         // inherited listening socket of the Agents and Role services; -1 = none
  // Told once, with part, cause and last words; must return at once.
  std::function<void(const std::string&)> on_fatal;
  std::function<void(const std::string&)> on_stop;  // Role.Stop was called
};

// Where some of the tasks come from, what plays them and what judges them.
struct ServerSource {
  std::string name;  // as the pool's issues say it
  AttemptOptions attempt;
  const TaskSource* train = nullptr;
  const TaskSource* eval = nullptr;  // null: none of an evaluation's tasks are of this source
  const Scaffold* scaffold = nullptr;
  verifiers::Verifier* verifier = nullptr;
};

struct ServerParts {
  std::vector<ServerSource> sources;  // at least one; an evaluation has their tasks in this order
  datapool::DataPool* pool = nullptr;
  gateway::GatewayControl* gateway = nullptr;
  sandbox::SandboxService* sandbox = nullptr;
};

class Server : public Agents {
 public:
  Server(const ServerOptions& options, const ServerParts& parts);
  ~Server() override;  // stops
  Status Start();
  // Stops every attempt within seconds; nothing more is reported to the pool.
  void Stop();
  // True once the pool said that nothing will come again.
  bool pool_closed() const;

  Result<EvaluationReport> Evaluate(int64_t evaluation, int64_t version) override;
  Result<std::vector<std::string>> Probe(int64_t version) override;
  Metrics& metrics();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// One line of eval.jsonl, and back.
std::string ReportToJson(const EvaluationReport& report);
Result<EvaluationReport> ReportFromJson(const std::string& line);

}  // namespace temper::agents
