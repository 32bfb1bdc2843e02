#include "datapool/retention.h"

#include <algorithm>

namespace temper::datapool {
namespace {

// A record lies in the log and in a buffer before it lies in its file; merging takes room for a while. So much of the bound is for that.
constexpr int64_t kCopies = 2, kSlackPart = 8, kSlackMost = int64_t{256} << 20, kBackPart = 16;

}  // namespace

const char* Name(Consumed consumed) {
  static constexpr const char* kNames[] = {"keep", "archive", "drop"};
  return kNames[static_cast<int>(consumed)];
}

void Retention::Add(const LedgerLine& l) {
  switch (l.kind) {
    case LedgerLine::Kind::kConsume: trained_[*l.step].insert(*l.group); break;
    case LedgerLine::Kind::kRollback: trained_.erase(trained_.upper_bound(*l.step), trained_.end()); break;
    case LedgerLine::Kind::kCommit: committed_ = *l.step; break;
    case LedgerLine::Kind::kTombstone: buried_.insert(*l.group); break;
    case LedgerLine::Kind::kRetire:
      for (int64_t group : l.groups) {
        buried_.erase(group);
        retired_.insert(group);
      }
      // Only what is due is retired, and all of it at once.
      trained_.erase(trained_.begin(), trained_.upper_bound(committed_));
      while (!retired_.empty() && *retired_.begin() == retired_below_) {
        retired_.erase(retired_.begin());
        ++retired_below_;
      }
      break;
    default: break;
  }
}

std::vector<int64_t> Retention::Due() const {
  std::vector<int64_t> due(buried_.begin(), buried_.end());
  for (auto it = trained_.begin(); it != trained_.end() && it->first <= committed_; ++it) due.insert(due.end(), it->second.begin(), it->second.end());
  std::sort(due.begin(), due.end());
  return due;
}

void SpaceGate::Look(const StoreSpace& space, int64_t out) {
  const bool shut = !reason_.empty();
  room_ = INT64_MAX;
  reason_.clear();
  const auto limit = [&](int64_t left, int64_t whole, const char* name) {
    if (shut) left -= whole / kBackPart;
    const int64_t fit = std::max<int64_t>(0, left) / (kCopies * largest_) - out;
    if (fit < room_) room_ = std::max<int64_t>(0, fit);
    if (fit <= 0 && reason_.empty()) reason_ = name;
  };
  if (config_.disk) limit(*config_.disk - std::min(*config_.disk / kSlackPart, kSlackMost) - space.used, *config_.disk, "store");
  if (config_.free > 0) limit(space.free - config_.free, config_.free, "disk");
}

}  // namespace temper::datapool
