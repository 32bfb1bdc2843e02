#include "job/curves.h"

#include <fmt/format.h>

#include <algorithm>

#include "common/file.h"
#include "common/json.h"
#include "common/strings.h"

namespace temper::job {
namespace {

constexpr const char* kForm = "; lines are {\"step\":n,\"reward_mean\":x,\"wall_s\":t}";

struct Line {
  json::value value;
  std::string place;  // "FILE line 3"
};

// All whole lines. A last one without an end is being written, unless it can be read.
Result<std::vector<Line>> ReadLines(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  std::vector<Line> lines;
  size_t begin = 0;
  for (int number = 1; begin < text.size(); ++number) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view line = Trim(std::string_view(text).substr(begin, end - begin));
    const bool whole = end < text.size();
    begin = end + 1;
    if (line.empty()) continue;
    auto value = ParseJson(line);
    std::string place = fmt::format("{} line {}", path, number);
    if (!value.ok() && !whole && number > 1) break;
    if (!value.ok()) return InvalidArgument(place + ": " + value.status().message());
    if (!value->is_object()) return InvalidArgument(place + ": no object" + kForm);
    lines.push_back({std::move(*value), std::move(place)});
  }
  return lines;
}

std::optional<double> NumberOf(const json::value& line, const char* key) {
  const json::value* found = line.as_object().if_contains(key);
  if (!found) return std::nullopt;
  auto number = JsonRef(*found).Double();
  return number.ok() ? std::optional(*number) : std::nullopt;
}

Status ReadPoints(const std::string& path, Curve* curve) {
  ASSIGN_OR_RETURN(const std::vector<Line> lines, ReadLines(path));
  double before_s = 0, offset_s = 0;
  for (const Line& line : lines) {
    CurvePoint point;
    const auto step = NumberOf(line.value, "step"), wall_s = NumberOf(line.value, "wall_s"),
               reward = NumberOf(line.value, "reward_mean");
    // A step of which nothing got a reward has none to draw.
    if (curve->run && step && wall_s && !reward) continue;
    for (const auto& [key, number] : {std::pair{"step", step}, {"reward_mean", reward}, {"wall_s", wall_s}}) {
      if (!number) return InvalidArgument(line.place + ": no number \"" + key + "\"" + kForm);
    }
    if (*step < 0 || *step > 1e9 || *step != static_cast<double>(static_cast<int64_t>(*step))) {
      return InvalidArgument(line.place + ": \"step\" is not a whole number from 0");
    }
    if (*wall_s < 0) return InvalidArgument(line.place + ": \"wall_s\" is negative");
    point.step = static_cast<int64_t>(*step);
    point.reward = *reward;
    if (!curve->points.empty() && point.step <= curve->points.back().step) {
      return InvalidArgument(fmt::format("{}: step {} after step {}", line.place, point.step, curve->points.back().step));
    }
    const bool resumed = *wall_s < before_s;  // each start of a trainer counts from its own beginning
    if (resumed && !curve->run) return InvalidArgument(line.place + ": \"wall_s\" is less than in the line before");
    if (resumed) offset_s = curve->points.empty() ? 0 : curve->points.back().wall_s;
    point.wall_s = offset_s + *wall_s;
    if (const auto job_s = NumberOf(line.value, "job_s"); job_s && curve->run) {
      point.wall_s = *job_s;
      offset_s = *job_s - *wall_s;
    }
    if (curve->run) {
      double train_s = 0;
      for (const char* part : {"batch_s", "forward_s", "backward_s", "optimizer_s"}) train_s += NumberOf(line.value, part).value_or(0);
      const auto sampled = NumberOf(line.value, "tokens_trained"), logical = NumberOf(line.value, "logical_tokens");
      point.staleness = NumberOf(line.value, "staleness_max");
      if (logical && train_s > 0) point.train_tokens_per_s = *logical / train_s;
      // The first step after a start waited for more than its tokens: for processes, weights, the first evaluation.
      if (sampled && !resumed && !curve->points.empty() && *wall_s > before_s)
        point.sample_tokens_per_s = *sampled / (*wall_s - before_s);
    }
    before_s = *wall_s;
    curve->points.push_back(point);
  }
  return Status::Ok();
}

// When the trainer of a run without `job_s` had its first evaluation, which took `eval_s`.
double FirstEvaluationSeconds(const std::string& run_dir, double eval_s) {
  double warm_up_s = 0;
  bool known = false;
  if (auto lines = ReadLines(run_dir + "/sft.jsonl"); lines.ok()) {
    for (const Line& line : *lines) warm_up_s = NumberOf(line.value, "wall_s").value_or(warm_up_s);
    known = !lines->empty();
  }
  double latest_s = 0;  // what the first step says of its parts lies behind it
  if (auto lines = ReadLines(run_dir + "/metrics.jsonl"); lines.ok() && !lines->empty()) {
    latest_s = NumberOf(lines->front().value, "wall_s").value_or(0);
    for (const char* part : {"wait_s", "batch_s", "forward_s", "backward_s", "optimizer_s", "publish_s"}) {
      latest_s -= NumberOf(lines->front().value, part).value_or(0);
    }
    if (!known) return std::max(0.0, latest_s);
    return std::max(0.0, std::min(latest_s, warm_up_s + eval_s));
  }
  return warm_up_s + eval_s;
}

Status ReadEvaluations(const std::string& run_dir, Curve* curve) {
  ASSIGN_OR_RETURN(const std::vector<Line> lines, ReadLines(run_dir + "/eval.jsonl"));
  for (const Line& line : lines) {
    const auto version = NumberOf(line.value, "version"), value = NumberOf(line.value, "pass_rate");
    if (!version || !value) return InvalidArgument(line.place + ": no numbers \"version\" and \"pass_rate\"");
    CurveEvaluation evaluation{static_cast<int64_t>(*version), 0, *value};
    const double took_s = NumberOf(line.value, "wall_s").value_or(0);
    if (const auto job_s = NumberOf(line.value, "job_s")) {
      evaluation.wall_s = *job_s;
    } else if (evaluation.step == 0) {
      evaluation.wall_s = FirstEvaluationSeconds(run_dir, took_s);
    } else {
      for (const CurvePoint& point : curve->points) {
        if (point.step <= evaluation.step) evaluation.wall_s = point.wall_s + took_s;
      }
    }
    // After a rollback a version can be evaluated again.
    if (!curve->evaluations.empty() && curve->evaluations.back().step >= evaluation.step) curve->evaluations.pop_back();
    curve->evaluations.push_back(evaluation);
  }
  return Status::Ok();
}

}  // namespace

Result<Curve> ReadCurve(const std::string& argument) {
  std::string path = argument;
  Curve curve;
  if (const size_t equals = argument.find('='); equals != std::string::npos && !Exists(argument)) {
    curve.name = argument.substr(0, equals);
    path = argument.substr(equals + 1);
    if (curve.name.empty()) return InvalidArgument("'" + argument + "': no name before '='");
  }
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  if (!Exists(path)) return InvalidArgument("'" + path + "': no such run or file");
  if (curve.name.empty()) curve.name = BaseName(AbsolutePath(path));
  curve.run = IsDirectory(path);
  if (!curve.run) {
    RETURN_IF_ERROR(ReadPoints(path, &curve));
    if (curve.points.empty()) return InvalidArgument(path + ": no lines" + kForm);
    return curve;
  }
  if (!Exists(path + "/metrics.jsonl") && !Exists(path + "/job.yaml")) return InvalidArgument("'" + path + "': no run here");
  if (Exists(path + "/metrics.jsonl")) RETURN_IF_ERROR(ReadPoints(path + "/metrics.jsonl", &curve));
  if (Exists(path + "/eval.jsonl")) RETURN_IF_ERROR(ReadEvaluations(path, &curve));
  if (auto text = ReadFile(path + "/plan.json"); text.ok()) {
    auto plan = ParseJson(*text);
    if (plan.ok() && plan->is_object() && plan->as_object().contains("pool") && plan->at("pool").is_object()) {
      curve.staleness_bound = NumberOf(plan->at("pool"), "bound");
    }
  }
  return curve;
}

}  // namespace temper::job
