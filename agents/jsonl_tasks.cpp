#include <set>
#include <utility>

#include "agents/task.h"
#include "common/file.h"
#include "common/json.h"

namespace temper::agents {
namespace {

constexpr int64_t kTaskFileBytesMax = int64_t{1} << 30;

class TaskList : public TaskSource {
 public:
  explicit TaskList(std::vector<Task> tasks) : tasks_(std::move(tasks)) {}
  int64_t size() const override { return static_cast<int64_t>(tasks_.size()); }
  Task Get(int64_t index) const override {
    TEMPER_CHECK(index >= 0 && index < size()) << "task " << index << " of " << size();
    return tasks_[static_cast<size_t>(index)];
  }

 private:
  const std::vector<Task> tasks_;
};

// A path that stays inside the work folder.
bool IsInside(const std::string& path) {
  if (path.empty() || path[0] == '/' || path.find('\0') != std::string::npos) return false;
  for (size_t begin = 0; begin <= path.size();) {
    const size_t end = std::min(path.find('/', begin), path.size());
    const std::string part = path.substr(begin, end - begin);
    if (part == "." || part == ".." || (part.empty() && end != path.size())) return false;
    begin = end + 1;
  }
  return true;
}

Result<Task> ParseTask(const JsonRef& ref) {
  RETURN_IF_ERROR(ref.OnlyKeys({"id", "family", "instruction", "files", "metadata", "hidden"}));
  Task task;
  ASSIGN_OR_RETURN(JsonRef id, ref.Field("id"));
  ASSIGN_OR_RETURN(task.id, id.String());
  ASSIGN_OR_RETURN(JsonRef instruction, ref.Field("instruction"));
  ASSIGN_OR_RETURN(task.instruction, instruction.String());
  ASSIGN_OR_RETURN(task.family, ref.StringOr("family", ""));
  if (ref.Has("files")) {
    ASSIGN_OR_RETURN(JsonRef files, ref.Field("files"));
    if (!files.value().is_object()) return files.Error("must be an object of path: content");
    for (const auto& [path, unused] : files.value().as_object()) {
      ASSIGN_OR_RETURN(JsonRef content, files.Field(path));
      TaskFile file{std::string(path), "", false};
      if (!file.path.empty() && file.path.back() == '/') {
        file.path.pop_back();
        file.directory = true;
      } else {
        ASSIGN_OR_RETURN(file.content, content.String());
      }
      if (!IsInside(file.path)) return content.Error("path must stay inside the work folder");
      task.files.push_back(std::move(file));
    }
  }
  for (auto [key, out] : {std::pair{"metadata", &task.metadata}, {"hidden", &task.hidden}}) {
    if (!ref.Has(key)) continue;
    ASSIGN_OR_RETURN(JsonRef field, ref.Field(key));
    if (!field.value().is_object()) return field.Error("must be an object");
    *out = PrintJson(field.value());
  }
  return task;
}

}  // namespace

Result<std::unique_ptr<TaskSource>> LoadJsonlTasks(const std::string& path) {
  ASSIGN_OR_RETURN(std::string text, ReadFile(path, kTaskFileBytesMax));
  std::vector<Task> tasks;
  std::set<std::string> ids;
  int64_t line_number = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string line = text.substr(begin, end - begin);
    begin = end + 1;
    const std::string where = path + ":" + std::to_string(++line_number);
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    Result<json::value> value = ParseJson(line);
    if (!value.ok()) return value.status().WithContext(where);
    Result<Task> task = ParseTask(JsonRef(*value));
    if (!task.ok()) return task.status().WithContext(where);
    if (!ids.insert(task->id).second) return InvalidArgument(where + ": id '" + task->id + "' is there twice");
    tasks.push_back(std::move(*task));
  }
  if (tasks.empty()) return InvalidArgument(path + ": no tasks");
  return std::unique_ptr<TaskSource>(std::make_unique<TaskList>(std::move(tasks)));
}

}  // namespace temper::agents
