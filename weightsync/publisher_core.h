// The publisher's state machine: members, versions, and who may still read which bytes. Pure: events and the time come in,
// answers go out. The Publisher (publisher.h) owns one under its lock.
//
// A version goes SEALED → DISTRIBUTING (offered) → COMMITTABLE (every blocking member has staged it) → COMMITTED (every
// blocking member serves it). Blocking = live and either a member when the version was sealed or one that serves something: a
// newcomer that serves nothing yet cannot draw a token at an older version, so it holds nobody up. A newer version supersedes
// one that is not committed yet.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "common/status.h"
#include "weightsync/types.h"

namespace temper::weightsync {

enum class VersionState : uint8_t { kSealed, kDistributing, kCommittable, kCommitted, kRejected };

class PublisherCore {
 public:
  PublisherCore(uint64_t epoch, int64_t lease_ms) : epoch_(epoch), lease_ms_(lease_ms) {}

  // The trainer has sealed `record`. kInvalidArgument unless its epoch is this one and its step above the last.
  Status Seal(const VersionRecord& record, int64_t now_ms);

  // A worker's report. Stale ones (an older incarnation or seq) change nothing.
  void OnReport(const Report& report, int64_t now_ms);
  // Where that worker should be; counts the offer in it as given, so call it once for each answer sent. Nothing new for an
  // older seq than the last one heard.
  Answer AnswerTo(const Report& report);
  // Whether AnswerTo would tell this worker something that it does not know.
  bool TellsNews(const Report& report) const;

  // The process of a worker is gone for certain: it reads nothing any more.
  void OnGone(const std::string& worker, uint64_t incarnation, int64_t now_ms);
  // Time passes: members not heard for the lease are fenced.
  void OnTick(int64_t now_ms);

  uint64_t epoch() const { return epoch_; }
  std::optional<Version> newest() const;     // sealed last
  std::optional<Version> committed() const;  // the highest COMMITTED
  VersionState newest_state() const { return state_; }
  const std::string& rejected_reason() const { return rejected_reason_; }

  // Who may still read the bytes of a version.
  enum class Readers : uint8_t {
    kNone,    // the arena may be written again
    kFenced,  // only workers that hang: never reuse these bytes, let go of them
    kLive,
  };
  Readers ReadersOf(const Version& version) const;

  struct Member {
    uint64_t incarnation = 0;
    uint64_t seq = 0;
    int32_t pid = 0;
    int64_t heard_ms = 0;
    bool fenced = false;
    bool at_seal = false;  // was a live member when the newest version was sealed
    std::optional<Version> active, staged;
    std::set<Version> leased;  // may read: what it maps and what the last answer offered
    int refusals = 0;          // of the newest version
  };
  const std::map<std::string, Member>& members() const { return members_; }
  int live() const;
  int lost() const { return lost_; }        // members dropped since the newest version was sealed
  int refused() const { return refused_; }  // refusals since then

 private:
  bool Blocks(const Member& m) const;
  void Advance();

  const uint64_t epoch_;
  const int64_t lease_ms_;
  std::map<std::string, Member> members_;
  // Former incarnations that were replaced before their process was seen to end: their leases count as fenced.
  std::vector<std::pair<std::string, Member>> ghosts_;
  std::optional<VersionRecord> record_;  // newest sealed
  VersionState state_ = VersionState::kSealed;
  std::optional<Version> committed_;
  std::string rejected_reason_;
  int lost_ = 0;
  int refused_ = 0;
};

}  // namespace temper::weightsync
