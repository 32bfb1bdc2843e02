// The worker's state machine: what is served, what is staged, what the publisher said last. Pure; the Subscriber
// (subscriber.h) owns one under its lock.
//
//   JOINING → (offer) RECEIVING → (digest right) STAGED → (commit, at a step boundary) serving → …
//                          └ digest wrong: refused, told once, offered again
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "weightsync/types.h"

namespace temper::weightsync {

class SubscriberCore {
 public:
  SubscriberCore(std::string worker, uint64_t incarnation, int32_t pid);

  // The next report; `held` = versions still mapped.
  Report NextReport(std::vector<Version> held, int64_t now_ms);

  // The answer to the last report. Returns the record to stage now, if any. Answers of an older epoch than one seen are ignored.
  std::optional<VersionRecord> OnAnswer(const Answer& answer);
  // The last report found no publisher (connection refused or broken): nobody can have gone on without this worker.
  void OnAbsent();

  void OnStaged(const VersionRecord& record);
  void OnRefused(const VersionRecord& record, const std::string& reason);

  // The staged version is due, and not yet taken.
  bool SwapDue() const;
  // Takes it, when it is due: until OnSwapped nothing else is staged.
  std::optional<Version> TakeSwap();
  bool swapping() const { return taken_; }
  void OnSwapped(const Version& version);

  // Whether a step may run now: something is served, the lease holds, and nothing below the committed version is served.
  bool MayServe(int64_t now_ms) const;
  // When MayServe turns false by time alone; no value: never.
  std::optional<int64_t> LeaseEndsMs() const;

  const std::optional<Version>& active() const { return active_; }
  std::optional<Version> staged() const;
  int64_t lease_ms() const { return lease_ms_; }

 private:
  const std::string worker_;
  const uint64_t incarnation_;
  const int32_t pid_;
  uint64_t seq_ = 0;
  uint64_t epoch_ = 0;  // highest seen
  int64_t asked_ms_ = 0;    // when the last report was sent
  int64_t heard_ms_ = 0;    // when the last answered report was sent: the publisher counts from a later time
  int64_t lease_ms_ = 1000;
  bool absent_ = false;
  std::optional<Version> active_;
  std::optional<VersionRecord> staged_;
  bool taken_ = false;             // the engine is swapping to staged_
  std::optional<Version> commit_;  // highest told
  std::optional<Version> refused_;
  std::string refused_reason_;
};

}  // namespace temper::weightsync
