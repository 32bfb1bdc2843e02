#include "job/resume.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "common/config.h"
#include "common/file.h"
#include "common/json.h"
#include "common/strings.h"

namespace temper::job {
namespace {

// The first value in which a job differs from the one of a run, by its key, or "". Both are resolved YAML: the same keys in the same
// order where nothing differs, one a line, blocks by indentation.
std::string FirstDifference(const std::string& stored, const std::string& now) {
  const std::vector<std::string> a = Split(stored, '\n'), b = Split(now, '\n');
  std::vector<std::pair<size_t, std::string>> blocks;  // indentation and key of those that hold the line
  for (size_t i = 0; i < std::max(a.size(), b.size()); ++i) {
    std::string left = i < a.size() ? a[i] : "", right = i < b.size() ? b[i] : "";
    // A line that only one of them has is the difference, not the one it pushed down.
    if (left != right && std::find(b.begin() + static_cast<ptrdiff_t>(std::min(i, b.size())), b.end(), left) != b.end()) left.clear();
    else if (left != right && std::find(a.begin() + static_cast<ptrdiff_t>(std::min(i, a.size())), a.end(), right) != a.end()) right.clear();
    const std::string& line = left.empty() ? right : left;
    const size_t indentation = std::min(line.find_first_not_of(' '), line.size()), colon = line.find(':');
    while (!blocks.empty() && blocks.back().first >= indentation) blocks.pop_back();
    if (left == right) {
      if (colon != std::string::npos && colon + 1 == line.size()) blocks.emplace_back(indentation, line.substr(indentation, colon - indentation));
      continue;
    }
    std::string path;
    for (const auto& block : blocks) path += block.second + ".";
    const auto quoted = [](const std::string& text) { return text.empty() ? std::string("nothing") : "`" + std::string(Trim(text)) + "`"; };
    return path + line.substr(indentation, colon == std::string::npos ? colon : colon - indentation) + ": the run has " + quoted(left) +
           ", this job " + quoted(right);
  }
  return "";
}

}  // namespace

Status CheckResume(const std::string& run_dir, const Job& job, const std::string& resolved) {
  ASSIGN_OR_RETURN(Config config, Config::Load(run_dir + "/job.yaml"));
  ASSIGN_OR_RETURN(const Job stored, ReadJob(config));
  ASSIGN_OR_RETURN(std::string same, ReadFile(run_dir + "/job.yaml"));
  const int64_t steps = stored.trainer.steps, wanted = job.trainer.steps;
  if (wanted != steps) {
    ASSIGN_OR_RETURN(Config changed, Config::Load(run_dir + "/job.yaml"));
    RETURN_IF_ERROR(changed.Set(fmt::format("trainer.steps={}", wanted)));
    // Fewer steps may be no job at all (a longer warm-up), which is said below.
    if (ReadJob(changed).ok()) same = changed.ResolvedYaml();
  }
  // How long records stay may change while a run goes on: it decides nothing else.
  if (job.retention != stored.retention) {
    ASSIGN_OR_RETURN(Config changed, Config::Parse(same, "job.yaml"));
    const datapool::RetentionConfig& keep = job.retention;
    RETURN_IF_ERROR(changed.Set(fmt::format("pool.retention.consumed={}", datapool::Name(keep.consumed))));
    RETURN_IF_ERROR(changed.Set("pool.retention.disk=" + (keep.disk ? std::to_string(*keep.disk) : std::string("auto"))));
    RETURN_IF_ERROR(changed.Set(fmt::format("pool.retention.free={}", keep.free)));
    RETURN_IF_ERROR(ReadJob(changed).status());
    same = changed.ResolvedYaml();
  }
  // Another job first: what it says of its steps means nothing here.
  if (const std::string difference = FirstDifference(same, resolved); !difference.empty() && difference.rfind("trainer.steps:", 0) != 0) {
    return InvalidArgument("a resumed job must be the same: " + difference);
  }
  if (wanted < steps) {
    return InvalidArgument(fmt::format("trainer.steps: the run has {}; a resumed job may have more, not {}", steps, wanted));
  }
  if (wanted > steps) {
    // The checkpoint of the last step is written before anything says that the run is done.
    if (IsDirectory(fmt::format("{}/checkpoints/{}", run_dir, steps))) {
      return InvalidArgument(fmt::format("trainer.steps: all {0} steps of the run are done and its pool has ended; start a new run from its "
                                         "weights with model.path: {1}/checkpoints/{0}", steps, run_dir));
    }
    if (job.optimizer.schedule != "constant") {
      return InvalidArgument(fmt::format("trainer.steps: the learning rate of schedule '{}' follows from the number of steps, so a run that "
                                         "began with {} cannot be given {}", job.optimizer.schedule, steps, wanted));
    }
  }
  return Status::Ok();
}

double LastJobSeconds(const std::string& run_dir) {
  double last_s = 0;
  for (const char* file : {"/metrics.jsonl", "/eval.jsonl"}) {
    auto text = ReadFile(run_dir + file);
    if (!text.ok()) continue;
    for (const std::string& line : Split(*text, '\n')) {
      auto value = ParseJson(line);
      if (!value.ok()) continue;
      if (auto job_s = JsonRef(*value).DoubleOr("job_s", 0); job_s.ok()) last_s = std::max(last_s, *job_s);
    }
  }
  return last_s;
}

}  // namespace temper::job
