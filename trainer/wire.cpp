// The wire form of a trajectory: temper.v1.Trajectory.
#include <cmath>
#include <map>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "engine/kept_set.h"
#include "temper/v1/types.pb.h"
#include "trainer/trajectory.h"

namespace temper::trainer {

Result<Rollout> ParseTrajectory(std::string_view bytes, int vocab) {
  v1::Trajectory wire;
  if (!wire.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return InvalidArgument("trajectory: not a temper.v1.Trajectory");
  Rollout out;
  out.session = wire.session();
  out.rollout = wire.rollout();
  out.reward = wire.reward();
  out.wall_s = wire.wall_s();
  auto error = [&](int run, const std::string& what) {
    return InvalidArgument(fmt::format("session {}, run {}: {}", wire.session(), run, what));
  };
  Result<Outcome> outcome = ParseOutcome(wire.outcome());
  if (!outcome.ok()) return outcome.status().WithContext("session " + wire.session());
  out.outcome = *outcome;
  if (!std::isfinite(out.reward)) return InvalidArgument("session " + wire.session() + ": the reward is not finite");
  for (const double reward : wire.turn_rewards()) {
    if (!std::isfinite(reward)) return InvalidArgument("session " + wire.session() + ": the reward of a turn is not finite");
    out.turn_rewards.push_back(reward);
  }

  std::set<int32_t> turns;
  std::map<int32_t, int32_t> index_of_id;
  for (const v1::TokenRun& run : wire.runs()) {
    const auto index = static_cast<int32_t>(out.runs.size());
    if (!index_of_id.emplace(run.id(), index).second) return error(index, fmt::format("id {} is there twice", run.id()));
    TokenRun& r = out.runs.emplace_back();
    if (run.parent() >= 0) {
      const auto parent = index_of_id.find(run.parent());
      if (parent == index_of_id.end() || parent->second == index) {
        return error(index, fmt::format("parent {} does not come before it", run.parent()));
      }
      r.parent = parent->second;
    }
    r.sampled = run.provenance() == v1::SAMPLED;
    r.call = run.call();
    r.choice = run.choice();
    for (uint32_t id : run.ids()) {
      if (id >= static_cast<uint32_t>(vocab)) return error(index, fmt::format("token id {} is outside the vocabulary of {}", id, vocab));
      r.ids.push_back(static_cast<int32_t>(id));
    }
    if (!r.sampled) continue;
    turns.insert(r.call);
    if (run.logprobs_size() != run.ids_size()) {
      return error(index, fmt::format("{} sampled ids, {} logprobs", run.ids_size(), run.logprobs_size()));
    }
    for (float logprob : run.logprobs()) {
      if (!std::isfinite(logprob)) return error(index, "a logprob is not finite");
      r.logprobs.push_back(logprob);
    }
    if (run.kept_size() != 0 && run.kept_size() != run.ids_size()) {
      return error(index, fmt::format("{} sampled ids, {} kept sets", run.ids_size(), run.kept_size()));
    }
    for (int k = 0; k < run.kept_size(); ++k) {
      const Status kept = engine::CheckKept(run.kept(k), vocab, r.ids[static_cast<size_t>(k)]);
      if (!kept.ok()) return error(index, fmt::format("token {}: {}", k, kept.message()));
      r.kept.push_back(run.kept(k));
    }
    r.version = {.epoch = run.version().epoch(), .step = run.version().step()};
    r.mixed = run.mixed();
    r.trainable = run.trainable();
    r.inv_temperature = run.inv_temperature();
    if (!std::isfinite(r.inv_temperature) || r.inv_temperature <= 0) {
      return error(index, fmt::format("1/temperature is {}", r.inv_temperature));
    }
  }
  if (!out.turn_rewards.empty() && out.turn_rewards.size() != turns.size()) {
    return InvalidArgument(fmt::format("session {}: {} rewards of turns, {} turns", wire.session(), out.turn_rewards.size(), turns.size()));
  }
  return out;
}

}  // namespace temper::trainer
