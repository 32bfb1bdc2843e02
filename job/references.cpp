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
Status CheckBuildFiles(const std::vector<std::string>& command, const std::string& build_folder, const std::string& key) {
  for (const std::string& word : command) {
    if (word.rfind(kBuild, 0) != 0) continue;
    const std::string path = build_folder + "/" + word.substr(kBuild.size());
    if (!Exists(path)) return InvalidArgument(key + ": '" + word + "' is not there: no file " + path);
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
Status CheckHostProgram(const std::string& program, const std::string& key) {
  if (program.rfind("{", 0) == 0) return Status::Ok();  // {build} is checked, {run} does not exist yet
  const bool found = program.find('/') == std::string::npos ? OnPath(program) : access(program.c_str(), X_OK) == 0;
  if (found) return Status::Ok();
  return InvalidArgument(key + ": '" + program + "' is no program that can be run here");
}

Status CheckTasks(const TaskList& list) {
  if (list.jsonl.empty()) return Status::Ok();
  auto tasks = agents::LoadJsonlTasks(list.jsonl);
  if (!tasks.ok()) return InvalidArgument(list.key + ".jsonl: " + tasks.status().message());
  if ((*tasks)->size() == 0) return InvalidArgument(list.key + ".jsonl: " + list.jsonl + " holds no task");
  return Status::Ok();
}

Status CheckSource(const Job::Source& source, const std::string& build_folder) {
  RETURN_IF_ERROR(CheckTasks(source.train));
  if (source.eval) RETURN_IF_ERROR(CheckTasks(*source.eval));
  agents::ScaffoldOptions scaffold;
  scaffold.name = source.scaffold.name;
  scaffold.kind = source.scaffold.kind;
  scaffold.command = source.scaffold.command;
  if (auto made = agents::MakeScaffold(scaffold); !made.ok()) {
    constexpr size_t kBlock = sizeof "scaffold" - 1;  // its messages begin with that key
    return InvalidArgument(source.scaffold.key + made.status().message().substr(kBlock));
  }
  RETURN_IF_ERROR(CheckBuildFiles(source.scaffold.command, build_folder, source.scaffold.key + ".command"));
  if (source.scaffold.host) RETURN_IF_ERROR(CheckHostProgram(source.scaffold.command[0], source.scaffold.key + ".command"));
  if (source.verifier.kind == "builtin") {
    if (auto made = verifiers::MakeBuiltinVerifier(source.verifier.name); !made.ok()) {
      return InvalidArgument(source.verifier.key + ".name: " + made.status().message());
    }
  }
  return CheckBuildFiles(source.verifier.command, build_folder, source.verifier.key + ".command");
}

}  // namespace

std::string BuildFolder() {
  char path[4096];
  const ssize_t n = readlink("/proc/self/exe", path, sizeof path);
  return n > 0 ? DirName(std::string(path, static_cast<size_t>(n))) : ".";
}

Status CheckReferences(const Job& job, const std::string& build_folder) {
  for (const Job::Source& source : job.sources) RETURN_IF_ERROR(CheckSource(source, build_folder));
  for (const sandbox::Mount& mount : job.sandbox.mounts) {
    if (!Exists(mount.source)) return InvalidArgument("sandbox.mounts: source '" + mount.source + "' is not there");
  }
  if (!job.sandbox.rootfs.empty() && !IsDirectory(job.sandbox.rootfs)) {
    return InvalidArgument("sandbox.rootfs: '" + job.sandbox.rootfs + "' is no folder");
  }
  return Status::Ok();
}

}  // namespace temper::job
