// A task: what an agent is asked to do, the files it starts from, and what a verifier needs to judge the result.
//
// Plain data. `metadata` is what the agent may see; `hidden` goes to the verifier only and never enters the agent's
// sandbox. Both are JSON texts (objects).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/status.h"

namespace temper::agents {

struct TaskFile {
  std::string path;       // relative to the work folder, no "..", no leading slash
  std::string content;    // bytes; unused for a folder
  bool directory = false;
};

struct Task {
  std::string id;           // unique within its list
  std::string family;       // groups tasks in reports; may be empty
  std::string instruction;  // the user's message
  std::vector<TaskFile> files;
  std::string metadata = "{}";
  std::string hidden = "{}";
};

// The tasks of a job, fixed for its whole life; index i is the pool's task number. Thread-safe after construction.
class TaskSource {
 public:
  virtual ~TaskSource() = default;
  virtual int64_t size() const = 0;
  virtual Task Get(int64_t index) const = 0;  // 0 <= index < size()
};

enum class Split { kTrain, kHeldOut };

// The built-in generator `terminal` (agents/terminal_tasks.h). `seed` chooses the tasks; train and held-out never share a
// combination of names, contents and phrasing.
std::unique_ptr<TaskSource> MakeTerminalTasks(uint64_t seed, int64_t count, Split split);

// The built-in generator `sum`: "What is A + B? Answer with the number only.", A and B in 1..20. A quarter of the 400 pairs is held
// out. hidden = {"answer": A + B}, for the built-in verifier first_integer.
std::unique_ptr<TaskSource> MakeSumTasks(uint64_t seed, int64_t count, Split split);

// One JSON object a line: {"id","instruction","family"?,"files"?:{path: content},"metadata"?:{},"hidden"?:{}}. An error names
// file and line.
Result<std::unique_ptr<TaskSource>> LoadJsonlTasks(const std::string& path);

}  // namespace temper::agents
