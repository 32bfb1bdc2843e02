// A job in a process of its own, for tests: started like a user starts it, watched, signalled, its folder read.
#pragma once

#include <sys/types.h>

#include <map>
#include <string>
#include <vector>

#include "common/json.h"

namespace temper::e2e {

class JobProcess {
 public:
  // The folder lies in the test's temporary folder and goes with this object.
  explicit JobProcess(const std::string& name);
  ~JobProcess();

  // temper run configs/CONFIG --out FOLDER ARGUMENTS… (CONFIG with a leading slash: that file); `Resume` continues the folder instead, with ARGUMENTS.
  void Start(const std::vector<std::string>& arguments = {}, const std::map<std::string, std::string>& env = {},
             const std::string& config = "smoke.yaml");
  void Resume(const std::vector<std::string>& arguments = {});
  // The exit code (128 + signal when killed); kills it and fails the test after `limit_s`.
  int Wait(double limit_s);
  void Signal(int signal);
  // Until metrics.jsonl has so many lines; false after `limit_s` or when the job ended before.
  bool WaitSteps(int steps, double limit_s);
  // The process of a role; -1 when there is none. All of them, where a job has several.
  pid_t RolePid(const std::string& role) const;
  std::vector<pid_t> RolePids(const std::string& role) const;

  // -1 when state.json does not say it yet.
  pid_t SupervisorPid() const;
  // The one child of the supervisor that is no role; -1 when there is none.
  pid_t JanitorPid() const;

  const std::string& folder() const { return folder_; }
  std::string Read(const std::string& file) const;  // "" when absent
  std::string Output() const;
  json::value Summary() const;
  // What is left of the job: processes, cgroups, mounts, ports; "" = nothing.
  std::string Remains() const;
  // Exit code and output of a door, such as {"pool", "verify", FOLDER}.
  static int Door(const std::vector<std::string>& arguments, std::string* output);

 private:
  void Spawn(const std::vector<std::string>& arguments, const std::map<std::string, std::string>& env);
  std::string base_, folder_;
  pid_t pid_ = -1;
  double started_s_ = 0;
};

}  // namespace temper::e2e
