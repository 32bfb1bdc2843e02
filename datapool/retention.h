// What may leave the store, and when nothing more may come in. Pure: fed with the ledger's lines and with figures.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "datapool/window.h"

namespace temper::datapool {

// What becomes of the records of groups that are over for good: trained by a step that a checkpoint holds, or buried. The ledger keeps
// their story in any case.
enum class Consumed { kKeep, kArchive, kDrop };
const char* Name(Consumed consumed);

// Bytes on disk: what the store takes, and what is free on its file system.
struct StoreSpace {
  int64_t used = 0, free = INT64_MAX;
};

struct RetentionConfig {
  Consumed consumed = Consumed::kKeep;
  std::optional<int64_t> disk;  // the store's files, bytes; none: no bound
  int64_t free = 0;             // bytes left to others on the file system; 0: all of it may be taken
  friend bool operator==(const RetentionConfig&, const RetentionConfig&) = default;
};

class Retention {
 public:
  // Lines in order, those of former lives included.
  void Add(const LedgerLine& line);
  // Groups that are over for good and whose records are still in the store, ascending.
  std::vector<int64_t> Due() const;
  // Its records have left the store, or its next ones may not enter it.
  bool Retired(int64_t group) const { return group < retired_below_ || retired_.count(group) > 0; }

 private:
  int64_t committed_ = 0;
  std::map<int64_t, std::set<int64_t>> trained_;  // by step, of groups not retired
  std::set<int64_t> buried_;                      // not retired
  // Which are: all below a number, and some above.
  int64_t retired_below_ = 0;
  std::set<int64_t> retired_;
};

// Says how many attempts may be out, so that what they bring still fits.
class SpaceGate {
 public:
  explicit SpaceGate(RetentionConfig config) : config_(config) {}

  // A record came in, so many bytes of it.
  void Saw(int64_t bytes) { largest_ = std::max(largest_, bytes); }
  // `out`: attempts that are being played. Afterwards `room` attempts more may be handed out, and where there is none, `reason` says why:
  // "store" (its bound is near) or "disk" (too little is free). Once shut it opens when a sixteenth of the limit is back.
  void Look(const StoreSpace& space, int64_t out);
  int64_t room() const { return room_; }
  // So many were handed out since.
  void HandedOut(int64_t count) { room_ -= std::min(room_, count); }
  const std::string& reason() const { return reason_; }

 private:
  static constexpr int64_t kSmallest = 64 << 10;  // the least that a record is taken for
  RetentionConfig config_;
  int64_t largest_ = kSmallest;
  int64_t room_ = INT64_MAX;
  std::string reason_;
};

}  // namespace temper::datapool
