#include "job/references.h"

#include <unistd.h>

#include <cstdlib>
#include <vector>

#include "agents/scaffold.h"
#include "agents/task.h"
#include "common/file.h"
#include "common/strings.h"
#include "verifiers/verifier.h"

namespace temper::job {
namespace {

constexpr std::string_view kBuild = "{build}/";

// Words of a command that name a file of the build folder.
Status CheckBuildFiles(const std::vector<std::string>& command, const std::string& build_folder, const char* key) {
  for (const std::string& word : command) {
    if (word.rfind(kBuild, 0) != 0) continue;
    const std::string path = build_folder + "/" + word.substr(kBuild.size());
    if (!Exists(path)) return InvalidArgument(std::string(key) + ": '" + word + "' is not there: no file " + path);
  }
  return Status::Ok();
}

bool OnPath(const std::string& program) {
  const char* path = std::getenv("PATH");
  for (const std::string& folder : Split(path ? path : "/usr/local/bin:/usr/bin:/bin", ':')) {
    if (access((folder + "/" + program).c_str(), X_OK) == 0) return true;
  }
  return false;
}

// The program of a scaffold that runs on the host.
Status CheckHostProgram(const std::string& program) {
  if (program.rfind("{", 0) == 0) return Status::Ok();  // {build} is checked, {run} does not exist yet
  const bool found = program.find('/') == std::string::npos ? OnPath(program) : access(program.c_str(), X_OK) == 0;
  if (found) return Status::Ok();
  return InvalidArgument("scaffold.command: '" + program + "' is no program that can be run here");
}

Status CheckTasks(const TaskList& list, const char* key) {
  if (list.jsonl.empty()) return Status::Ok();
  auto tasks = agents::LoadJsonlTasks(list.jsonl);
  if (!tasks.ok()) return InvalidArgument(std::string(key) + ".jsonl: " + tasks.status().message());
  if ((*tasks)->size() == 0) return InvalidArgument(std::string(key) + ".jsonl: " + list.jsonl + " holds no task");
  return Status::Ok();
}

}  // namespace

std::string BuildFolder() {
  char path[4096];
  const ssize_t n = readlink("/proc/self/exe", path, sizeof path);
  return n > 0 ? DirName(std::string(path, static_cast<size_t>(n))) : ".";
}

Status CheckReferences(const Job& job, const std::string& build_folder) {
  RETURN_IF_ERROR(CheckTasks(job.tasks.train, "tasks.train"));
  if (job.tasks.eval) RETURN_IF_ERROR(CheckTasks(*job.tasks.eval, "tasks.eval"));
  agents::ScaffoldOptions scaffold;
  scaffold.name = job.scaffold.name;
  scaffold.kind = job.scaffold.kind;
  scaffold.command = job.scaffold.command;
  if (auto made = agents::MakeScaffold(scaffold); !made.ok()) return InvalidArgument(made.status().message());
  RETURN_IF_ERROR(CheckBuildFiles(job.scaffold.command, build_folder, "scaffold.command"));
  if (job.scaffold.host) RETURN_IF_ERROR(CheckHostProgram(job.scaffold.command[0]));
  if (job.verifier.kind == "builtin") {
    if (auto made = verifiers::MakeBuiltinVerifier(job.verifier.name); !made.ok()) {
      return InvalidArgument("verifier.name: " + made.status().message());
    }
  }
  RETURN_IF_ERROR(CheckBuildFiles(job.verifier.command, build_folder, "verifier.command"));
  for (const sandbox::Mount& mount : job.sandbox.mounts) {
    if (!Exists(mount.source)) return InvalidArgument("sandbox.mounts: source '" + mount.source + "' is not there");
  }
  if (!job.sandbox.rootfs.empty() && !IsDirectory(job.sandbox.rootfs)) {
    return InvalidArgument("sandbox.rootfs: '" + job.sandbox.rootfs + "' is no folder");
  }
  return Status::Ok();
}

}  // namespace temper::job
