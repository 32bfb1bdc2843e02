#include "trainer/commands.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <optional>
#include <tuple>
#include <utility>

#include <fmt/format.h>

#include "common/file.h"
#include "common/json.h"
#include "trainer/algorithm.h"
#include "trainer/loss.h"

namespace temper::trainer {
namespace {

constexpr int64_t kMaxTurn = 1'000'000;  // a turn number sizes an array

// Reads the fields of one rollout; every error carries the path of the value.
class RolloutReader {
 public:
  RolloutReader(const Algorithm& algorithm, const json::value& value, std::string path)
      : algorithm_(algorithm), value_(value), path_(std::move(path)) {}

  Result<LossRollout> Read() {
    if (!value_.is_object()) return InvalidArgument(path_ + ": expected an object");
    LossRollout r;
    if (const json::value* outcome = Find("outcome")) {
      if (!outcome->is_string()) return InvalidArgument(path_ + ".outcome: expected a string");
      Result<Outcome> parsed = ParseOutcome(std::string(outcome->get_string()));
      if (!parsed.ok()) return parsed.status().WithContext(path_ + ".outcome");
      r.outcome = *parsed;
    }
    // Only the length of what failed on our side is read: nothing of it is trained or counted.
    const bool removed = r.outcome == Outcome::kInfraFailure || r.outcome == Outcome::kAborted;
    if (!removed || Find("mask")) {
      RETURN_IF_ERROR(ReadMask(r.mask));
    }
    if (removed) {
      r.logp_new.assign(r.mask.size(), 0);
      return r;
    }
    RETURN_IF_ERROR(ReadTokens("logp_new", r.mask, r.logp_new));
    const std::tuple<const char*, bool, std::vector<double>*> arrays[] = {
        {"logp_old", algorithm_.ReadsOldLogprobs(), &r.logp_old}, {"logp_rollout", algorithm_.ReadsRolloutLogprobs(), &r.logp_rollout},
        {"logp_ref", algorithm_.ReadsReference(), &r.logp_ref},   {"logp_teacher", algorithm_.ReadsTeacher(), &r.logp_teacher},
        {"values", algorithm_.ReadsValues(), &r.values}};
    for (const auto& [name, read, out] : arrays) {
      if (!read) continue;
      RETURN_IF_ERROR(ReadTokens(name, r.mask, *out));
    }
    if (algorithm_.ReadsTeacherTop()) {
      RETURN_IF_ERROR(ReadTop(r.mask, r.teacher_top));
    }
    if (algorithm_.ReadsRewards()) {
      RETURN_IF_ERROR(ReadRewards(r));
    }
    if (algorithm_.aggregation.per_segment && Find("segment")) {
      RETURN_IF_ERROR(ReadIntegers("segment", r.mask, r.segment));
    }
    return r;
  }

 private:
  const json::value* Find(const char* name) const { return value_.get_object().if_contains(name); }

  Status ReadRewards(LossRollout& r) {
    ASSIGN_OR_RETURN(r.reward, Number("reward"));
    if (!algorithm_.TakesTaskAdvantage()) return Status::Ok();
    if (algorithm_.reward.speed_coef != 0) {
      ASSIGN_OR_RETURN(r.wall_s, Number("wall_s"));
    }
    if (const json::value* rewards = Find("turn_rewards")) {
      if (!rewards->is_array()) return InvalidArgument(path_ + ".turn_rewards: expected an array of numbers");
      for (size_t u = 0; u < rewards->get_array().size(); ++u) {
        ASSIGN_OR_RETURN(double reward, Finite(rewards->get_array()[u], fmt::format("{}.turn_rewards[{}]", path_, u)));
        r.turn_rewards.push_back(reward);
      }
    }
    if (algorithm_.advantage.credit == Credit::kRollout || !Find("turn")) return Status::Ok();
    std::vector<int64_t> turns;
    RETURN_IF_ERROR(ReadIntegers("turn", r.mask, turns));
    int64_t last = 0;
    for (size_t t = 0; t < turns.size(); ++t) {
      if (r.mask[t]) {
        const int64_t end = r.turn_rewards.empty() ? kMaxTurn : static_cast<int64_t>(r.turn_rewards.size());
        if (turns[t] < 0 || turns[t] >= end) {
          return InvalidArgument(fmt::format("{}.turn[{}]: {} is not in 0..{}", path_, t, turns[t], end - 1));
        }
        if (turns[t] < last) {
          return InvalidArgument(fmt::format("{}.turn[{}]: {} after {}: turns do not decrease over sampled tokens", path_, t,
                                             turns[t], last));
        }
        last = turns[t];
      }
      r.turn.push_back(static_cast<int32_t>(r.mask[t] ? turns[t] : 0));
    }
    return Status::Ok();
  }

  static Result<double> Finite(const json::value& v, const std::string& where) {
    if (!v.is_number()) return InvalidArgument(where + ": expected a number");
    const double number = v.to_number<double>();
    if (!std::isfinite(number)) return InvalidArgument(where + ": not a finite number");
    return number;
  }

  Result<double> Number(const char* name) const {
    const json::value* v = Find(name);
    if (!v) return InvalidArgument(fmt::format("{}.{}: missing", path_, name));
    return Finite(*v, fmt::format("{}.{}", path_, name));
  }

  Status ReadMask(std::vector<uint8_t>& out) const {
    const json::value* v = Find("mask");
    if (!v) return InvalidArgument(path_ + ".mask: missing");
    if (!v->is_array()) return InvalidArgument(path_ + ".mask: expected an array of 0 and 1");
    for (size_t t = 0; t < v->get_array().size(); ++t) {
      const json::value& entry = v->get_array()[t];
      const double number = entry.is_number() ? entry.to_number<double>() : -1;
      if (number != 0 && number != 1) return InvalidArgument(fmt::format("{}.mask[{}]: expected 0 or 1", path_, t));
      out.push_back(number == 1);
    }
    return Status::Ok();
  }

  // An array as long as the mask; entries at mask 0 are not looked at.
  Result<const json::array*> Array(const char* name, size_t length) const {
    const json::value* v = Find(name);
    if (!v) return InvalidArgument(fmt::format("{}.{}: missing; these settings read it", path_, name));
    if (!v->is_array()) return InvalidArgument(fmt::format("{}.{}: expected an array", path_, name));
    if (v->get_array().size() != length) {
      return InvalidArgument(
          fmt::format("{}.{}: {} entries, mask has {}", path_, name, v->get_array().size(), length));
    }
    return &v->get_array();
  }

  Status ReadTokens(const char* name, const std::vector<uint8_t>& mask, std::vector<double>& out) const {
    ASSIGN_OR_RETURN(const json::array* values, Array(name, mask.size()));
    out.assign(mask.size(), 0);
    for (size_t t = 0; t < mask.size(); ++t) {
      if (!mask[t]) continue;
      ASSIGN_OR_RETURN(out[t], Finite((*values)[t], fmt::format("{}.{}[{}]", path_, name, t)));
    }
    return Status::Ok();
  }

  Status ReadTop(const std::vector<uint8_t>& mask, std::vector<std::vector<TopToken>>& out) const {
    ASSIGN_OR_RETURN(const json::array* values, Array("teacher_top", mask.size()));
    out.resize(mask.size());
    for (size_t t = 0; t < mask.size(); ++t) {
      if (!mask[t]) continue;
      const std::string where = fmt::format("{}.teacher_top[{}]", path_, t);
      if (!(*values)[t].is_array()) return InvalidArgument(where + ": expected an array of pairs");
      const json::array& pairs = (*values)[t].get_array();
      for (size_t k = 0; k < pairs.size(); ++k) {
        const std::string at = fmt::format("{}[{}]", where, k);
        if (!pairs[k].is_array() || pairs[k].get_array().size() != 2) return InvalidArgument(at + ": expected [logp_teacher, logp_new]");
        TopToken token;
        ASSIGN_OR_RETURN(token.logp_teacher, Finite(pairs[k].get_array()[0], at + "[0]"));
        ASSIGN_OR_RETURN(token.logp_new, Finite(pairs[k].get_array()[1], at + "[1]"));
        out[t].push_back(token);
      }
    }
    return Status::Ok();
  }

  Status ReadIntegers(const char* name, const std::vector<uint8_t>& mask, std::vector<int64_t>& out) const {
    ASSIGN_OR_RETURN(const json::array* values, Array(name, mask.size()));
    out.assign(mask.size(), 0);
    for (size_t t = 0; t < mask.size(); ++t) {
      if (!mask[t]) continue;
      const json::value& v = (*values)[t];
      if (!v.is_int64()) return InvalidArgument(fmt::format("{}.{}[{}]: expected an integer", path_, name, t));
      out[t] = v.get_int64();
    }
    return Status::Ok();
  }

  const Algorithm& algorithm_;
  const json::value& value_;
  const std::string path_;
};

// Without the sign of a zero.
double Plain(double x) { return x == 0 ? 0 : x; }

void WriteRow(JsonWriter& w, const std::vector<double>& row) {
  w.BeginArray();
  for (double x : row) w.Double(Plain(x));
  w.EndArray();
}

void WriteDistribution(JsonWriter& w, const char* name, const Distribution& d) {
  w.Key(name).BeginObject().Key("mean").Double(Plain(d.mean)).Key("std").Double(Plain(d.deviation));
  w.Key("min").Double(Plain(d.min)).Key("max").Double(Plain(d.max)).EndObject();
}

void WriteRows(JsonWriter& w, const std::vector<std::vector<double>>& rows) {
  w.BeginArray();
  for (const auto& row : rows) WriteRow(w, row);
  w.EndArray();
}

int RunTrainLoss(int argc, char** argv) {
  std::string path;
  for (int i = 1; i < argc; ++i) {
    if (!std::strcmp(argv[i], "--help") || !std::strcmp(argv[i], "-h")) {
      std::printf(
          "usage: temper train loss --in FILE\n"
          "Loss, advantages and coef = d(loss)/d(logp_new) of an optimizer step given as JSON (docs/algorithm_block.md 4).\n");
      return 0;
    }
    if (!std::strcmp(argv[i], "--in") && i + 1 < argc) {
      path = argv[++i];
    } else {
      std::fprintf(stderr, "temper train loss: unexpected argument '%s'; usage: temper train loss --in FILE\n", argv[i]);
      return 2;
    }
  }
  if (path.empty()) {
    std::fprintf(stderr, "temper train loss: --in FILE is missing ('-' is standard input)\n");
    return 2;
  }
  const Result<std::string> input = path == "-" ? ReadAll(STDIN_FILENO) : ReadFile(path);
  if (!input.ok()) {
    std::fprintf(stderr, "temper train loss: %s\n", input.status().message().c_str());
    return 2;
  }
  const Result<std::string> output = TrainLoss(*input);
  if (!output.ok()) {
    std::fprintf(stderr, "temper train loss: %s: %s\n", path.c_str(), output.status().message().c_str());
    return output.status().code() == StatusCode::kOutOfRange ? 1 : 2;
  }
  std::printf("%s\n", output->c_str());
  return 0;
}

}  // namespace

Result<std::string> TrainLoss(const std::string& input) {
  ASSIGN_OR_RETURN(const json::value root, ParseJson(input));
  if (!root.is_object()) return InvalidArgument("expected one JSON object with algorithm and groups");
  const json::value* block = root.get_object().if_contains("algorithm");
  const json::value* groups = root.get_object().if_contains("groups");
  if (!block) return InvalidArgument("algorithm: missing");
  if (!groups || !groups->is_array()) return InvalidArgument("groups: expected an array of groups");
  ASSIGN_OR_RETURN(const ParsedAlgorithm parsed, ParseAlgorithm(*block));

  std::vector<LossGroup> batch;
  for (size_t g = 0; g < groups->get_array().size(); ++g) {
    const json::value& group = groups->get_array()[g];
    const json::value* rollouts = group.is_object() ? group.get_object().if_contains("rollouts") : nullptr;
    if (!rollouts || !rollouts->is_array()) {
      return InvalidArgument(fmt::format("groups[{}].rollouts: expected an array of rollouts", g));
    }
    LossGroup& out = batch.emplace_back();
    for (size_t i = 0; i < rollouts->get_array().size(); ++i) {
      RolloutReader reader(parsed.algorithm, rollouts->get_array()[i], fmt::format("groups[{}].rollouts[{}]", g, i));
      ASSIGN_OR_RETURN(LossRollout rollout, reader.Read());
      out.rollouts.push_back(std::move(rollout));
    }
    if (parsed.algorithm.loss.kind->pairs && out.rollouts.size() != 2) {
      return InvalidArgument(fmt::format("groups[{}].rollouts: loss kind {} takes groups of two, a chosen and a rejected one; {} here", g,
                                         parsed.algorithm.loss.kind->name, out.rollouts.size()));
    }
  }

  const LossResult result = ComputeLoss(parsed.algorithm, batch);
  const LossMetrics& m = result.metrics;
  const double numbers[] = {result.loss, m.mismatch_k1, m.mismatch_k3, m.log_ppl_diff, m.ppl_ratio, m.chi2_token, m.chi2_seq, m.kl_reference,
                            m.kl_teacher, m.entropy, m.reward.mean, m.reward.deviation, m.advantage.mean, m.advantage.deviation};
  bool finite = std::all_of(std::begin(numbers), std::end(numbers), [](double x) { return std::isfinite(x); });
  for (const auto& group : result.coef) {
    for (const auto& rollout : group) finite = finite && std::all_of(rollout.begin(), rollout.end(), [](double c) { return std::isfinite(c); });
  }
  if (!finite) {
    return Status(StatusCode::kOutOfRange, "the loss or one of its metrics is not a finite number: the logprobs or rewards are too large");
  }
  JsonWriter w;
  w.BeginObject().Key("loss").Double(Plain(result.loss)).Key("advantages").BeginArray();
  const bool per_token = parsed.algorithm.advantage.credit != Credit::kRollout || parsed.algorithm.distillation.kind != DistillationKind::kNone;
  for (size_t g = 0; g < batch.size(); ++g) {
    if (per_token) {
      WriteRows(w, result.token_advantages[g]);
    } else {
      WriteRow(w, result.rollout_advantage[g]);
    }
  }
  w.EndArray().Key("coef").BeginArray();
  for (const auto& group : result.coef) WriteRows(w, group);
  w.EndArray();
  if (!result.coef_top.empty()) {
    w.Key("coef_top").BeginArray();
    for (const auto& group : result.coef_top) {
      w.BeginArray();
      for (const auto& rollout : group) WriteRows(w, rollout);
      w.EndArray();
    }
    w.EndArray();
  }
  w.Key("metrics").BeginObject();
  const std::tuple<const char*, bool, double> optional[] = {
      {"mismatch_k1", m.has_mismatch, m.mismatch_k1}, {"mismatch_k3", m.has_mismatch, m.mismatch_k3},
      {"log_ppl_diff", m.has_mismatch, m.log_ppl_diff}, {"ppl_ratio", m.has_mismatch, m.ppl_ratio},
      {"chi2_token", m.has_mismatch, m.chi2_token}, {"chi2_seq", m.has_mismatch, m.chi2_seq},
      {"kl_reference", m.has_reference, m.kl_reference}, {"kl_teacher", m.has_teacher, m.kl_teacher}};
  for (const auto& [name, present, value] : optional) {
    w.Key(name);
    if (present) {
      w.Double(Plain(value));
    } else {
      w.Null();
    }
  }
  w.Key("ess").Double(m.ess);
  w.Key("clip_fraction_low").Double(m.clip_fraction_low).Key("clip_fraction_high").Double(m.clip_fraction_high);
  w.Key("rejected_tokens").Int(m.rejected_tokens).Key("zero_signal_groups").Int(m.zero_signal_groups);
  w.Key("tokens").Int(m.tokens).Key("sequences").Int(m.sequences).Key("entropy").Double(Plain(m.entropy));
  WriteDistribution(w, "reward", m.reward);
  WriteDistribution(w, "advantage", m.advantage);
  WriteDistribution(w, "turn_tokens", m.turn_tokens);
  w.EndObject();
  w.Key("algorithm").Value(ParseJson(parsed.expanded).value()).EndObject();
  return w.Take();
}

const std::vector<Command>& Commands() {
  static const std::vector<Command> commands = {
      {"train", "loss", "loss, advantages and per-token coefficients of an optimizer step", RunTrainLoss},
  };
  return commands;
}

}  // namespace temper::trainer
