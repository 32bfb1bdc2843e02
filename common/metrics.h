// Counters and gauges of one process, by name; what Role.Snapshot answers.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace temper {

// One number. Thread-safe.
class Metric {
 public:
  void Add(double amount = 1);
  void Set(double value) { value_.store(value, std::memory_order_relaxed); }
  void Max(double value);  // keeps the larger
  double value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<double> value_{0};
};

// Thread-safe. Metrics live as long as the registry, so callers keep the reference for hot paths.
class Metrics {
 public:
  // The metric of that name, made at 0 when new. Names: `tokens_sampled`, `outcome.scored`; units last.
  Metric& operator[](std::string_view name);
  std::map<std::string, double> Snapshot() const;
  // A line worth showing in the live view; the last 20 are kept.
  void Say(std::string line);
  std::vector<std::string> Lines() const;

 private:
  mutable std::mutex mutex_;
  std::map<std::string, std::unique_ptr<Metric>, std::less<>> metrics_;
  std::vector<std::string> lines_;
};

}  // namespace temper
