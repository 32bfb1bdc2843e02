#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>

namespace temper::agents {

/// Counts infrastructure failures in a row from one cause, to tell a part that is broken from a share of bad luck.
///
/// The row is that of the attempts as they *began*: failures are mostly quick and successes slow, so of many attempts at once the
/// failures end first, and in the order of ends even a small share of them stands in a row. An attempt that still runs
/// therefore holds back those behind it. So that one that hangs does not hide a broken part until its time limit, ten times as
/// many failures in the order of ends count too. Attempts that were aborted stand in no row.
///
/// Not thread-safe.
class FailureRow {
 public:
  /// `limit` failures in a row are one row too long; at least 1.
  explicit FailureRow(int64_t limit) : limit_(limit) {}

  /// An attempt begins; the answer is its place, to be given to one of the three below, once.
  int64_t Begin();

  /// It ended well, or by the policy's own doing.
  void End(int64_t place);
  void Abort(int64_t place);
  /// It failed. `cause` is the reason of its outcome, `detail` what it said last.
  void Fail(int64_t place, const std::string& cause, const std::string& detail);

  struct TooLong {
    int64_t failures = 0;
    std::string cause;
    std::string detail;  // of the cause's last failure
  };
  /// The first row that was too long, if there was one: whoever asks after each end sees it at once.
  const std::optional<TooLong>& too_long() const { return too_long_; }

 private:
  struct Row {
    std::string cause;
    int64_t failures = 0;
    void Add(const std::string& next);  // "" breaks the row
  };
  struct Place {
    enum class State { kRunning, kAborted, kEnded } state = State::kRunning;
    std::string cause;  // of a failure; "" is no failure
  };

  void Settle(int64_t place, Place::State state, const std::string& cause);
  void Judge(const Row& row, int64_t limit);

  int64_t limit_;
  std::deque<Place> places_;  // from `first_` on: the first of them runs
  int64_t first_ = 0;
  Row by_begin_, by_end_;
  std::map<std::string, std::string> details_;
  std::optional<TooLong> too_long_;
};

}  // namespace temper::agents
