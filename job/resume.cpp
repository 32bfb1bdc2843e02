#include "job/resume.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "common/config.h"
#include "common/file.h"
#include "common/strings.h"

namespace temper::job {
namespace {

// The first value in which a job differs from the one of a run, or "".
std::string FirstDifference(const std::string& stored, const std::string& now) {
  const std::vector<std::string> a = Split(stored, '\n'), b = Split(now, '\n');
  for (size_t i = 0; i < std::max(a.size(), b.size()); ++i) {
    const std::string left = i < a.size() ? a[i] : "", right = i < b.size() ? b[i] : "";
    if (left != right) return "the run has `" + std::string(Trim(left)) + "`, this job `" + std::string(Trim(right)) + "`";
  }
  return "";
}

}  // namespace

Status CheckResume(const std::string& run_dir, const Job& job, const std::string& resolved) {
  ASSIGN_OR_RETURN(Config config, Config::Load(run_dir + "/job.yaml"));
  ASSIGN_OR_RETURN(const Job stored, ReadJob(config));
  ASSIGN_OR_RETURN(std::string same, ReadFile(run_dir + "/job.yaml"));
  const int64_t steps = stored.trainer.steps, wanted = job.trainer.steps;
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
    ASSIGN_OR_RETURN(Config raised, Config::Load(run_dir + "/job.yaml"));
    RETURN_IF_ERROR(raised.Set(fmt::format("trainer.steps={}", wanted)));
    ASSIGN_OR_RETURN(const Job read, ReadJob(raised));
    same = raised.ResolvedYaml();
  }
  const std::string difference = FirstDifference(same, resolved);
  if (!difference.empty()) return InvalidArgument("a resumed job must be the same: " + difference);
  return Status::Ok();
}

}  // namespace temper::job
