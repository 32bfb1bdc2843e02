#include "weightsync/publisher_core.h"

#include <algorithm>

namespace temper::weightsync {

Status PublisherCore::Seal(const VersionRecord& record, int64_t now_ms) {
  if (record.version.epoch != epoch_) {
    return InvalidArgument("version " + ToString(record.version) + " is not of epoch " + std::to_string(epoch_));
  }
  if (record_ && record.version <= record_->version) {
    return InvalidArgument("version " + ToString(record.version) + " is not above " + ToString(record_->version));
  }
  record_ = record;
  state_ = VersionState::kSealed;
  rejected_reason_.clear();
  lost_ = refused_ = 0;
  for (auto& [name, m] : members_) {
    m.at_seal = !m.fenced;
    m.refusals = 0;
  }
  OnTick(now_ms);
  return Status::Ok();
}

void PublisherCore::OnReport(const Report& report, int64_t now_ms) {
  auto [it, added] = members_.try_emplace(report.worker);
  Member& m = it->second;
  if (!added) {
    if (report.incarnation < m.incarnation || (report.incarnation == m.incarnation && report.seq <= m.seq)) return;
    if (report.incarnation > m.incarnation) {
      // A restarted worker under the same name. The former process may still be there (stopped, or exiting).
      if (!m.leased.empty()) ghosts_.emplace_back(report.worker, m);
      if (!m.fenced) ++lost_;
      m = Member();
    }
  }
  m.incarnation = report.incarnation;
  m.seq = report.seq;
  m.pid = report.pid;
  m.heard_ms = now_ms;
  m.fenced = false;
  m.active = report.active;
  m.staged.reset();
  if (report.staged && record_ && *report.staged == record_->version && report.staged_digest == record_->digest &&
      report.staged_bytes == record_->bytes) {
    m.staged = report.staged;
  }
  // Every earlier answer is settled, so what it maps is all that it may read.
  m.leased = std::set<Version>(report.held.begin(), report.held.end());
  if (report.active) m.leased.insert(*report.active);
  if (report.staged) m.leased.insert(*report.staged);
  if (report.refused && record_ && *report.refused == record_->version) {
    ++refused_;
    if (++m.refusals >= 2 && state_ != VersionState::kCommitted) {
      state_ = VersionState::kRejected;
      rejected_reason_ = "worker " + report.worker + ": " + report.refused_reason;
    }
  }
  OnTick(now_ms);
}

bool PublisherCore::TellsNews(const Report& report) const {
  auto it = members_.find(report.worker);
  if (it == members_.end() || it->second.incarnation != report.incarnation || it->second.seq != report.seq) return true;  // stale: end it
  const Member& m = it->second;
  if (!record_ || state_ == VersionState::kRejected) return false;
  const Version v = record_->version;
  if (m.active == v) return false;
  if (m.staged != v) return true;
  return state_ == VersionState::kCommittable || state_ == VersionState::kCommitted;
}

Answer PublisherCore::AnswerTo(const Report& report) {
  Answer answer{.epoch = epoch_, .offer = {}, .commit = {}, .lease_ms = lease_ms_, .refuse = ""};
  auto it = members_.find(report.worker);
  if (it == members_.end() || it->second.incarnation > report.incarnation) {
    answer.refuse = "incarnation " + std::to_string(report.incarnation) + " of " + report.worker + " was replaced by a newer one";
    return answer;
  }
  Member& m = it->second;
  answer.commit = committed_;
  if (m.incarnation != report.incarnation || m.seq != report.seq || !record_ || state_ == VersionState::kRejected) return answer;
  answer.offer = record_;
  m.leased.insert(record_->version);
  if (state_ == VersionState::kCommittable) answer.commit = record_->version;
  if (state_ == VersionState::kSealed) state_ = VersionState::kDistributing;
  return answer;
}

void PublisherCore::OnGone(const std::string& worker, uint64_t incarnation, int64_t now_ms) {
  std::erase_if(ghosts_, [&](const auto& g) { return g.first == worker && g.second.incarnation == incarnation; });
  auto it = members_.find(worker);
  if (it == members_.end() || it->second.incarnation != incarnation) return;
  if (!it->second.fenced) ++lost_;
  members_.erase(it);
  OnTick(now_ms);
}

void PublisherCore::OnTick(int64_t now_ms) {
  for (auto& [name, m] : members_) {
    if (m.fenced || now_ms - m.heard_ms <= lease_ms_) continue;
    m.fenced = true;
    ++lost_;
  }
  Advance();
}

bool PublisherCore::Blocks(const Member& m) const {
  return !m.fenced && (m.at_seal || (m.active && *m.active != record_->version));
}

void PublisherCore::Advance() {
  if (!record_ || state_ == VersionState::kCommitted || state_ == VersionState::kRejected) return;
  const Version v = record_->version;
  bool all_staged = true;
  bool all_active = true;
  for (const auto& [name, m] : members_) {
    if (!Blocks(m)) continue;
    all_active &= m.active == v;
    all_staged &= m.active == v || m.staged == v;
  }
  // COMMITTABLE is never taken back: a worker that was told to swap may have done so.
  if (all_staged && state_ != VersionState::kCommittable) state_ = VersionState::kCommittable;
  if (state_ == VersionState::kCommittable && all_active) {
    state_ = VersionState::kCommitted;
    committed_ = v;
  }
}

std::optional<Version> PublisherCore::newest() const {
  return record_ ? std::optional<Version>(record_->version) : std::nullopt;
}

std::optional<Version> PublisherCore::committed() const { return committed_; }

PublisherCore::Readers PublisherCore::ReadersOf(const Version& version) const {
  Readers readers = Readers::kNone;
  for (const auto& [name, ghost] : ghosts_) {
    if (ghost.leased.count(version)) readers = Readers::kFenced;
  }
  for (const auto& [name, m] : members_) {
    if (!m.leased.count(version)) continue;
    if (!m.fenced) return Readers::kLive;
    readers = Readers::kFenced;
  }
  return readers;
}

int PublisherCore::live() const {
  return static_cast<int>(std::count_if(members_.begin(), members_.end(), [](const auto& e) { return !e.second.fenced; }));
}

}  // namespace temper::weightsync
