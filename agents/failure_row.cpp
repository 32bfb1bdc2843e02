#include "agents/failure_row.h"

namespace temper::agents {
namespace {

constexpr int64_t kTimesByEnd = 10;

}  // namespace

int64_t FailureRow::Begin() {
  places_.emplace_back();
  return first_ + static_cast<int64_t>(places_.size()) - 1;
}

void FailureRow::End(int64_t place) { Settle(place, Place::State::kEnded, ""); }

void FailureRow::Abort(int64_t place) { Settle(place, Place::State::kAborted, ""); }

void FailureRow::Fail(int64_t place, const std::string& cause, const std::string& detail) {
  const std::string named = cause.empty() ? "unknown" : cause;
  details_[named] = detail;
  Settle(place, Place::State::kEnded, named);
}

void FailureRow::Row::Add(const std::string& next) {
  if (next.empty() || next != cause) failures = 0;
  cause = next;
  if (!next.empty()) ++failures;
}

void FailureRow::Settle(int64_t place, Place::State state, const std::string& cause) {
  places_[static_cast<size_t>(place - first_)] = {state, cause};
  if (state == Place::State::kEnded) {
    by_end_.Add(cause);
    Judge(by_end_, kTimesByEnd * limit_);
  }
  while (!places_.empty() && places_.front().state != Place::State::kRunning) {
    if (places_.front().state == Place::State::kEnded) {
      by_begin_.Add(places_.front().cause);
      Judge(by_begin_, limit_);
    }
    places_.pop_front();
    ++first_;
  }
}

void FailureRow::Judge(const Row& row, int64_t limit) {
  if (row.failures >= limit && !too_long_) too_long_ = TooLong{row.failures, row.cause, details_[row.cause]};
}

}  // namespace temper::agents
