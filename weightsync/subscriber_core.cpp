#include "weightsync/subscriber_core.h"

#include <algorithm>
#include <utility>

#include "common/check.h"

namespace temper::weightsync {

SubscriberCore::SubscriberCore(std::string worker, uint64_t incarnation, int32_t pid)
    : worker_(std::move(worker)), incarnation_(incarnation), pid_(pid) {}

Report SubscriberCore::NextReport(std::vector<Version> held, int64_t now_ms) {
  Report r;
  r.worker = worker_;
  r.incarnation = incarnation_;
  r.seq = ++seq_;
  r.pid = pid_;
  r.active = active_;
  if (staged_) {
    r.staged = staged_->version;
    r.staged_digest = staged_->digest;
    r.staged_bytes = staged_->bytes;
  }
  r.refused = std::exchange(refused_, std::nullopt);
  r.refused_reason = std::exchange(refused_reason_, "");
  r.held = std::move(held);
  asked_ms_ = now_ms;
  return r;
}

std::optional<VersionRecord> SubscriberCore::OnAnswer(const Answer& answer) {
  if (answer.epoch < epoch_ || !answer.refuse.empty()) return std::nullopt;
  epoch_ = answer.epoch;
  absent_ = false;
  heard_ms_ = asked_ms_;
  lease_ms_ = answer.lease_ms;
  if (answer.commit && (!commit_ || *answer.commit > *commit_)) commit_ = answer.commit;
  if (!answer.offer || taken_) return std::nullopt;  // while swapping: it is offered again
  const Version v = answer.offer->version;
  if (v.epoch != epoch_ || (active_ && v <= *active_)) return std::nullopt;
  if (staged_ && *answer.offer == *staged_) return std::nullopt;
  if (staged_ && staged_->version > v) return std::nullopt;
  staged_.reset();  // superseded
  return answer.offer;
}

void SubscriberCore::OnAbsent() { absent_ = true; }

void SubscriberCore::OnStaged(const VersionRecord& record) { staged_ = record; }

void SubscriberCore::OnRefused(const VersionRecord& record, const std::string& reason) {
  refused_ = record.version;
  refused_reason_ = reason;
}

bool SubscriberCore::SwapDue() const { return staged_ && !taken_ && commit_ == staged_->version; }

std::optional<Version> SubscriberCore::TakeSwap() {
  if (!SwapDue()) return std::nullopt;
  taken_ = true;
  return staged_->version;
}

void SubscriberCore::OnSwapped(const Version& version) {
  TEMPER_CHECK(taken_ && staged_->version == version) << "swapped to " << ToString(version) << ", which was not taken";
  TEMPER_CHECK(!active_ || version > *active_) << "served version went back from " << ToString(*active_) << " to " << ToString(version);
  active_ = version;
  staged_.reset();
  taken_ = false;
}

bool SubscriberCore::MayServe(int64_t now_ms) const {
  if (!active_) return false;
  if (commit_ && *active_ < *commit_) return false;
  std::optional<int64_t> end = LeaseEndsMs();
  return !end || now_ms < *end;
}

std::optional<int64_t> SubscriberCore::LeaseEndsMs() const {
  if (absent_) return std::nullopt;
  return heard_ms_ + lease_ms_;
}

std::optional<Version> SubscriberCore::staged() const {
  return staged_ ? std::optional<Version>(staged_->version) : std::nullopt;
}

}  // namespace temper::weightsync
