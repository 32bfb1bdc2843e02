// A store that outlives the pool which opens it: what a restart of the pool finds again.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "datapool/store.h"

namespace temper::datapool {

class BorrowedStore final : public Store {
 public:
  explicit BorrowedStore(Store& store) : store_(store) {}
  Status Write(const StoreWrite& write, bool sync) override { return store_.Write(write, sync); }
  Result<std::optional<std::string>> State() override { return store_.State(); }
  Result<std::vector<std::pair<int64_t, std::string>>> Ledger() override { return store_.Ledger(); }
  Result<std::string> Trajectory(const AttemptId& id) override { return store_.Trajectory(id); }
  Result<std::vector<std::pair<AttemptId, std::string>>> Records(int64_t group) override { return store_.Records(group); }
  Result<StoreSpace> Space() override { return store_.Space(); }

 private:
  Store& store_;
};

}  // namespace temper::datapool
