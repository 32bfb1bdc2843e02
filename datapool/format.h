// The text forms of the data pool: the configuration and events of `temper pool sim`, decision lines, ledger lines
// (docs/pool_sim.md 2, 3, 7). Pure. Errors name the field.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"
#include "datapool/types.h"
#include "datapool/window.h"

namespace temper::datapool {

// Where they lie in a run folder.
inline constexpr char kLedgerFile[] = "/ledger.jsonl";
inline constexpr char kConfigFile[] = "/pool/config.json";  // PrintPoolConfig
inline constexpr char kArchiveDir[] = "/archive";           // records that have left the store
inline constexpr char kTasksFile[] = "/pool/tasks.json";    // how many tasks each source has: [n, …]

struct TimedEvent {
  double t = 0;
  Event event;
};

// Where rollouts of a generated world take their time from (docs/pool_sim.md 6).
struct Latency {
  std::string dist;  // lognormal pareto exp fixed list ledger
  double median = 0, sigma = 0;  // lognormal
  double min = 0, alpha = 0;     // pareto: P(x > v) = (min/v)^alpha
  double mean = 0;               // exp
  double value = 0;              // fixed
  std::vector<double> values;    // list
  std::string path;              // ledger
};

struct World {
  Latency latency;
  double fail = 0;       // probability that an attempt ends in infra_failure
  double zero = 0;       // probability that all rewards of a group are equal
  double trainer_s = 1;  // from a lease to its update
  int64_t updates = 100;
};

struct SimConfig {
  PoolConfig pool;
  std::optional<World> world;
  std::vector<WindowConfig> policies;  // to compare; empty: the pool's own
};

// The first line of the door's input. Keys, types, ranges and combinations are checked.
Result<SimConfig> ParseSimConfig(std::string_view text);
// The configuration alone, such that ParseSimConfig reads it back.
std::string PrintPoolConfig(const PoolConfig& config);

Result<TimedEvent> ParseEvent(std::string_view text);
std::string PrintEvent(const TimedEvent& event);

std::string PrintDecision(const Decision& decision);
// The last line of the door.
std::string PrintSummary(const Window& window);
// {"error":{"kind","message"}}
std::string PrintError(const Status& status);

struct LedgerRecord {
  int64_t seq = 0;
  LedgerLine line;
  friend bool operator==(const LedgerRecord&, const LedgerRecord&) = default;
};
std::string PrintLedger(const LedgerRecord& record);
Result<LedgerRecord> ParseLedger(std::string_view text);

}  // namespace temper::datapool
