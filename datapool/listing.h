// A ledger as people ask about it: the groups and where they stand (`temper pool ls`), one group's story (`pool explain`). Pure.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"
#include "datapool/format.h"

namespace temper::datapool {

// The whole lines of a ledger; a torn last one is left out. Errors name the line.
Result<std::vector<LedgerRecord>> ReadLedger(std::string_view ledger);

// One JSON object a group, in order of admission: group, source, task, version_admitted, from, state (running, ready, leased,
// consumed, tombstoned), step or reason, attempts, running, outcomes{}, mean reward of the attempts that have one.
std::vector<std::string> ListGroups(const std::vector<LedgerRecord>& ledger);

// The ledger lines that concern a group, the leases, rollbacks and commits of its step included. kNotFound: never admitted.
Result<std::vector<std::string>> ExplainGroup(const std::vector<LedgerRecord>& ledger, int64_t group);

}  // namespace temper::datapool
