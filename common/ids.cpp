#include "common/ids.h"

#include "common/strings.h"

namespace temper {
namespace {

constexpr const char* kNames[kOutcomes] = {"scored", "policy_failure", "truncated", "infra_failure", "aborted"};

}  // namespace

std::string SessionId::ToString() const {
  return (evaluation ? "e" : "") + std::to_string(group) + "." + std::to_string(rollout) + "." + std::to_string(attempt);
}

Result<SessionId> SessionId::Parse(std::string_view text) {
  SessionId id;
  std::string_view rest = text;
  if (!rest.empty() && rest[0] == 'e') {
    id.evaluation = true;
    rest.remove_prefix(1);
  }
  const std::vector<std::string> parts = Split(rest, '.');
  int64_t numbers[3] = {};
  bool good = parts.size() == 3;
  for (size_t i = 0; good && i < 3; ++i) {
    good = ParseInt(parts[i], &numbers[i]) && numbers[i] >= 0 && std::to_string(numbers[i]) == parts[i];
  }
  if (!good || numbers[1] > INT32_MAX || numbers[2] > INT32_MAX || numbers[2] < 1) {
    return InvalidArgument("session '" + std::string(text.substr(0, 80)) + "': expected GROUP.ROLLOUT.ATTEMPT or eN.TASK.ATTEMPT");
  }
  id.group = numbers[0];
  id.rollout = static_cast<int32_t>(numbers[1]);
  id.attempt = static_cast<int32_t>(numbers[2]);
  return id;
}

const char* OutcomeName(Outcome outcome) { return kNames[static_cast<int>(outcome)]; }

Result<Outcome> ParseOutcome(std::string_view name) {
  for (int i = 0; i < kOutcomes; ++i) {
    if (name == kNames[i]) return static_cast<Outcome>(i);
  }
  return InvalidArgument("unknown outcome '" + std::string(name.substr(0, 80)) + "'");
}

}  // namespace temper
