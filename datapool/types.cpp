#include "datapool/types.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "fmt/format.h"

namespace temper::datapool {
namespace {

// Sizes beyond these are typing errors, and would only end in a lack of memory.
constexpr int64_t kMaxSlots = 1'000'000;
constexpr int64_t kMaxRollouts = 100'000;
constexpr double kMaxRunning = 4'000'000;  // rollouts of all slots

constexpr double kDefaultFraction = 0.3;

Status InRange(const char* key, double value, double low, double high) {
  if (value >= low && value <= high) return Status::Ok();
  return InvalidArgument(fmt::format("{}: {:.17g} is out of range [{:.17g}, {:.17g}]", key, value, low, high));
}

Status ValidateWindow(const std::string& key, const WindowConfig& window, int64_t slots) {
  if (window.size && window.fraction) {
    return InvalidArgument(key + ": give either size or fraction, not both");
  }
  if (window.policy != Policy::kAnchored && (window.size || window.fraction)) {
    return InvalidArgument(key + ": size and fraction have an effect under policy anchored only");
  }
  if (window.size) {
    if (*window.size < 1) return InvalidArgument(fmt::format("{}.size: {} is below 1", key, *window.size));
    if (*window.size > slots) {
      return InvalidArgument(fmt::format("{}.size: {} exceeds the {} slots (B)", key, *window.size, slots));
    }
  }
  // Written so that a NaN fails too.
  if (window.fraction && !(*window.fraction > 0 && *window.fraction <= 1)) {
    return InvalidArgument(fmt::format("{}.fraction: {:.17g} is out of range (0, 1]", key, *window.fraction));
  }
  return Status::Ok();
}

std::optional<int64_t> WindowSize(const WindowConfig& window, int64_t slots) {
  switch (window.policy) {
    case Policy::kStrict: return 1;
    case Policy::kGreedy: return slots;
    case Policy::kAreal: return std::nullopt;
    case Policy::kAnchored: break;
  }
  if (window.size) return *window.size;
  double fraction = window.fraction.value_or(kDefaultFraction);
  return std::max<int64_t>(1, static_cast<int64_t>(std::floor(fraction * static_cast<double>(slots) + 1e-9)));
}

std::vector<SourceConfig> SourcesOf(const PoolConfig& config) {
  if (!config.sources.empty()) return config.sources;
  return {SourceConfig{}};
}

// One each, then one at a time to whoever is owed most (the first listed on a tie).
std::vector<int64_t> Split(int64_t P, const std::vector<SourceConfig>& sources) {
  std::vector<int64_t> share(sources.size(), 1);
  double sum = 0;
  for (const SourceConfig& s : sources) sum += s.weight;
  for (int64_t left = P - static_cast<int64_t>(sources.size()); left > 0; --left) {
    size_t best = 0;
    double best_owed = 0;
    for (size_t i = 0; i < sources.size(); ++i) {
      double owed = sources[i].weight * static_cast<double>(P) - static_cast<double>(share[i]) * sum;
      if (i == 0 || owed > best_owed) {
        best = i;
        best_owed = owed;
      }
    }
    ++share[best];
  }
  return share;
}

}  // namespace

Status Validate(const PoolConfig& config) {
  RETURN_IF_ERROR(InRange("P", static_cast<double>(config.P), 1, kMaxSlots));
  RETURN_IF_ERROR(InRange("S", static_cast<double>(config.S), 0, kMaxSlots));
  RETURN_IF_ERROR(InRange("(S+1)*P", (static_cast<double>(config.S) + 1) * static_cast<double>(config.P), 1, kMaxSlots));
  RETURN_IF_ERROR(InRange("G", config.G, 1, kMaxRollouts));
  RETURN_IF_ERROR(InRange("extra", config.extra, 0, kMaxRollouts));
  const double held = config.B ? static_cast<double>(*config.B) : (static_cast<double>(config.S) + 1) * static_cast<double>(config.P);
  const double running = held * (static_cast<double>(config.G) + config.extra);
  RETURN_IF_ERROR(InRange(config.B ? "B*(G+extra)" : "(S+1)*P*(G+extra)", running, 1, kMaxRunning));
  RETURN_IF_ERROR(InRange("min_valid", config.MinValid(), 1, config.G));
  RETURN_IF_ERROR(InRange("retries", config.retries, 0, kMaxRollouts));
  RETURN_IF_ERROR(InRange("max_leases", static_cast<double>(config.max_leases), 1, kMaxSlots));
  if (config.B) {
    if (*config.B < config.P) {
      return InvalidArgument(fmt::format("B: {} slots cannot hold the {} groups of one step (P)", *config.B, config.P));
    }
    RETURN_IF_ERROR(InRange("B", static_cast<double>(*config.B), 1, kMaxSlots));
    if (config.sources.size() > 1) return InvalidArgument("B: not together with several sources");
  }
  if (config.deadline_s && !(*config.deadline_s > 0 && std::isfinite(*config.deadline_s))) {
    return InvalidArgument(fmt::format("deadline_s: {:.17g} is not a positive time", *config.deadline_s));
  }
  if (config.refill && config.G < 2) {
    return InvalidArgument("zero_signal: refill needs groups of two or more (G)");
  }
  if (config.max_staleness && *config.max_staleness < config.max_leases) {
    return InvalidArgument(fmt::format("max_staleness: {} is below max_leases {}; with a batch out a new group is born with staleness 1",
                                       *config.max_staleness, config.max_leases));
  }
  if (config.tasks && *config.tasks < 0) return InvalidArgument(fmt::format("tasks: {} is negative", *config.tasks));
  if (static_cast<int64_t>(config.sources.size()) > config.P) {
    return InvalidArgument(fmt::format("sources: {} of them, but a batch has only {} groups (P)", config.sources.size(), config.P));
  }
  std::set<std::string> names;
  double weights = 0;
  for (const SourceConfig& s : config.sources) {
    if (s.name.empty()) return InvalidArgument("sources: a name is empty");
    if (!names.insert(s.name).second) return InvalidArgument("sources: the name " + s.name + " occurs twice");
    if (!(s.weight > 0 && std::isfinite(s.weight))) {
      return InvalidArgument(fmt::format("sources.{}.weight: {:.17g} is not positive", s.name, s.weight));
    }
    weights += s.weight;
    if (s.tasks && *s.tasks < 0) return InvalidArgument(fmt::format("sources.{}.tasks: {} is negative", s.name, *s.tasks));
  }
  if (!std::isfinite(weights)) return InvalidArgument("sources: the sum of the weights is not finite");

  const std::vector<SourceConfig> sources = SourcesOf(config);
  const std::vector<int64_t> quota = Split(config.P, sources);
  for (size_t i = 0; i < sources.size(); ++i) {
    int64_t slots = config.B ? *config.B : (config.S + 1) * quota[i];
    if (sources[i].window) {
      RETURN_IF_ERROR(ValidateWindow("sources." + sources[i].name + ".window", *sources[i].window, slots));
    } else {
      RETURN_IF_ERROR(ValidateWindow("window", config.window, slots));
    }
  }
  return Status::Ok();
}

PoolPlan Plan(const PoolConfig& config) {
  const std::vector<SourceConfig> sources = SourcesOf(config);
  PoolPlan plan;
  plan.quota = Split(config.P, sources);
  for (size_t i = 0; i < sources.size(); ++i) {
    int64_t slots = config.B ? *config.B : (config.S + 1) * plan.quota[i];
    std::optional<int64_t> window = WindowSize(sources[i].window.value_or(config.window), slots);
    plan.slots.push_back(slots);
    plan.window.push_back(window);
    plan.bounds.push_back(window ? std::optional((slots + *window - 2) / plan.quota[i]) : std::nullopt);
  }
  plan.bound = plan.bounds[0];
  for (const std::optional<int64_t>& bound : plan.bounds) plan.bound = bound && plan.bound ? std::optional(std::max(*plan.bound, *bound)) : std::nullopt;
  return plan;
}

std::vector<std::string> SourceNames(const PoolConfig& config) {
  std::vector<std::string> names;
  for (const SourceConfig& source : SourcesOf(config)) names.push_back(source.name);
  return names;
}

}  // namespace temper::datapool
