// What the pool's store knows of the ledger: which line was the last one written, and a checksum of all lines up to it. So a ledger that
// was cut or changed is found out, and a store that lost what it had promised. Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/rng.h"
#include "common/status.h"
#include "datapool/pack.h"
#include "datapool/window.h"

namespace temper::datapool {

inline constexpr char kStateTag[] = "temper-pool-2";
inline constexpr char kFormerStateTag[] = "temper-pool-1";  // without a checksum of the ledger

struct LedgerEnd {
  int64_t seq = 0;                 // 0: nothing was written
  std::optional<uint64_t> sum = 0;  // of the lines 1 to seq; none: a former version of the program wrote the store
  std::vector<std::pair<int64_t, std::string>> lines;  // that the store still has, by seq, ascending
};

// The sum with one line more, given without its line end.
inline uint64_t AddToSum(uint64_t sum, std::string_view line) { return HashName(sum, line); }

// Reads the state's first fields, up to those of the ledger; `window` gets the machine in its store form.
inline Status UnpackLedgerEnd(Unpacker& u, std::string* window, LedgerEnd* end) {
  const std::string tag = u.Text();
  if (tag != kStateTag && tag != kFormerStateTag) return DataLoss("the pool's stored state is damaged, or of another version");
  *window = u.Text();
  end->seq = u.Int();
  end->sum.reset();
  if (tag == kStateTag) end->sum = static_cast<uint64_t>(u.Int());
  return u.ok() ? Status::Ok() : DataLoss("the pool's stored state is damaged");
}

// Lines of turns that are in the store for good before they are in the file: no crash, not even the machine's, leaves one in the file alone.
inline bool IsPromised(const LedgerLine& l) {
  using Kind = LedgerLine::Kind;
  switch (l.kind) {
    case Kind::kConsume:
    case Kind::kCommit:
    case Kind::kRollback:
    case Kind::kRecover:
    case Kind::kRetire:
    case Kind::kQuarantine: return true;
    case Kind::kOutcome: return l.outcome == "aborted" && (l.reason == "stopped" || l.reason == "job_end" || l.reason == "supervisor");
    case Kind::kTombstone: return l.reason == "job_end";
    default: return false;
  }
}

}  // namespace temper::datapool
