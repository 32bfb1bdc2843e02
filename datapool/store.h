// Where the pool keeps what must survive it: its state, the trajectories, and ledger lines on their way to the file.
//
// One Write is atomic. It survives kill -9 of the process when it returns, and the machine's death when `sync` was asked for.
// Writes come from one thread; reads may come from any.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/status.h"
#include "datapool/retention.h"
#include "datapool/types.h"

namespace temper::datapool {

struct StoreWrite {
  std::string state;  // replaces the former one; empty: none in this write
  std::vector<std::pair<AttemptId, std::string>> records;  // trajectories in their stored form (PackRecord)
  std::vector<std::pair<int64_t, std::string>> ledger;  // by seq, ascending
  int64_t drop_ledger_to = 0;  // lines up to this seq are in the file for good
  std::vector<int64_t> drop_groups;  // ascending: their records go. The space is given back some time later
};

class Store {
 public:
  virtual ~Store() = default;
  virtual Status Write(const StoreWrite& write, bool sync) = 0;
  // nullopt: a new store.
  virtual Result<std::optional<std::string>> State() = 0;
  // Lines not dropped yet, ascending.
  virtual Result<std::vector<std::pair<int64_t, std::string>>> Ledger() = 0;
  // kNotFound: none. kDataLoss: what is stored does not verify.
  virtual Result<std::string> Trajectory(const AttemptId& id) = 0;
  // All of a group, in their stored form, ascending.
  virtual Result<std::vector<std::pair<AttemptId, std::string>>> Records(int64_t group) = 0;
  virtual Result<StoreSpace> Space() = 0;
};

// Forgets everything at its end.
std::unique_ptr<Store> MakeMemoryStore();
// A folder, made if missing. One process at a time: kUnavailable when another holds it.
Result<std::unique_ptr<Store>> OpenRocksStore(const std::string& path);

}  // namespace temper::datapool
