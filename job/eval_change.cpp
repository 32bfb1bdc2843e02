#include "job/eval_change.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "common/file.h"
#include "common/json.h"
#include "common/strings.h"

namespace temper::job {
namespace {

// Between the two neighbours, in proportion. `sorted` is not empty.
double Percentile(const std::vector<double>& sorted, double share) {
  const double at = share * static_cast<double>(sorted.size() - 1);
  const size_t below = static_cast<size_t>(at), above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (at - std::floor(at)) * (sorted[above] - sorted[below]);
}

// Nullopt when the line is no evaluation, or of a run from before rewards were kept by task.
std::optional<std::vector<std::optional<double>>> Rewards(const std::string& line) {
  auto value = ParseJson(line);
  if (!value.ok() || !value->is_object()) return std::nullopt;
  const json::value* rewards = value->as_object().if_contains("rewards");
  if (!rewards || !rewards->is_array()) return std::nullopt;
  std::vector<std::optional<double>> all;
  for (const json::value& one : rewards->as_array()) {
    auto number = JsonRef(one).Double();
    all.push_back(number.ok() ? std::optional(*number) : std::nullopt);
  }
  return all;
}

}  // namespace

std::optional<EvalChange> PairedChange(const std::vector<std::optional<double>>& first,
                                       const std::vector<std::optional<double>>& last, Rng rng, int64_t resamples) {
  if (first.size() != last.size()) return std::nullopt;
  EvalChange change;
  std::vector<double> differences;
  for (size_t i = 0; i < first.size(); ++i) {
    if (!first[i] || !last[i]) {
      ++change.unpaired;
      continue;
    }
    change.first += *first[i];
    change.last += *last[i];
    differences.push_back(*last[i] - *first[i]);
    change.mean += differences.back();
  }
  if (differences.empty()) return std::nullopt;
  const double count = static_cast<double>(differences.size());
  change.first /= count;
  change.last /= count;
  change.mean /= count;
  change.tasks = static_cast<int64_t>(differences.size());
  change.resamples = resamples;

  std::vector<double> means(static_cast<size_t>(resamples));
  for (double& mean : means) {
    double sum = 0;
    for (size_t i = 0; i < differences.size(); ++i) sum += differences[rng.Below(differences.size())];
    mean = sum / count;
  }
  std::sort(means.begin(), means.end());
  change.low = Percentile(means, 0.025);
  change.high = Percentile(means, 0.975);
  return change;
}

std::optional<EvalChange> ReadEvalChange(const std::string& run_dir, uint64_t seed) {
  auto text = ReadFile(run_dir + "/eval.jsonl");
  if (!text.ok()) return std::nullopt;
  std::vector<std::string> lines;
  for (std::string& line : Split(*text, '\n')) {
    if (ParseJson(line).ok()) lines.push_back(std::move(line));
  }
  if (lines.size() < 2) return std::nullopt;
  const auto first = Rewards(lines.front()), last = Rewards(lines.back());
  if (!first || !last) return std::nullopt;
  return PairedChange(*first, *last, Rng(seed).Fork("eval_change"));
}

std::string PrintEvalChange(const EvalChange& change) {
  return fmt::format("held-out {:.3f} → {:.3f}, {:+.3f} [{:.3f}, {:.3f}] over {} tasks{}", change.first, change.last, change.mean,
                     change.low, change.high, change.tasks,
                     change.unpaired ? fmt::format(" ({} unpaired)", change.unpaired) : "");
}

}  // namespace temper::job
