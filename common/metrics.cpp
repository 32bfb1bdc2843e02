#include "common/metrics.h"

namespace temper {

void Metric::Add(double amount) {
  double old = value_.load(std::memory_order_relaxed);
  while (!value_.compare_exchange_weak(old, old + amount, std::memory_order_relaxed)) {
  }
}

void Metric::Max(double value) {
  double old = value_.load(std::memory_order_relaxed);
  while (old < value && !value_.compare_exchange_weak(old, value, std::memory_order_relaxed)) {
  }
}

Metric& Metrics::operator[](std::string_view name) {
  std::lock_guard lock(mutex_);
  auto it = metrics_.find(name);
  if (it == metrics_.end()) it = metrics_.emplace(std::string(name), std::make_unique<Metric>()).first;
  return *it->second;
}

std::map<std::string, double> Metrics::Snapshot() const {
  std::lock_guard lock(mutex_);
  std::map<std::string, double> values;
  for (const auto& [name, metric] : metrics_) values.emplace_hint(values.end(), name, metric->value());
  return values;
}

void Metrics::Say(std::string line) {
  std::lock_guard lock(mutex_);
  if (lines_.size() == 20) lines_.erase(lines_.begin());
  lines_.push_back(std::move(line));
}

std::vector<std::string> Metrics::Lines() const {
  std::lock_guard lock(mutex_);
  return lines_;
}

}  // namespace temper
