// The folder of one run: what lies where, who holds it, and its small durable state.
//
//   job.yaml plan.json state.json lock summary.json metrics.jsonl ledger.jsonl eval.jsonl sft.jsonl
//   checkpoints/STEP model/ pool/ gateway/ attempts/ logs/ROLE.log
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "common/file.h"
#include "common/status.h"

namespace temper::job {

// RUN/state.json, replaced as a whole. Readers: the roles (endpoints, incarnation), `temper top`, a resume.
struct RunState {
  std::string phase = "starting";  // starting | running | done | failed | stopped
  int64_t incarnation = 0;         // rises at each start of the run
  int64_t pid = 0;                 // of the supervisor
  std::string sandbox_job;         // the janitor's name for its cgroups
  std::string working_folder;      // where relative paths of the job begin
  double started_wall_s = 0;       // of the first start
  double wall_s = 0;               // over all incarnations before this one
  double sampling_s = 0;           // of which tokens were drawn
  double began_s = 0;              // NowS() - began_s is the time of the job, breaks left out, by Clock of this boot; 0 = not known
  std::map<std::string, std::string> endpoints;  // "pool" -> "unix-abstract:…"; "agent_plane" -> "127.0.0.1:PORT"
  std::map<std::string, double> counters;        // what outlives its process (job/watcher.h, Counters)

  std::string ToJson() const;
  static Result<RunState> FromJson(const std::string& text);
};

class RunFolder {
 public:
  explicit RunFolder(std::string path) : path_(std::move(path)) {}
  const std::string& path() const { return path_; }
  std::string File(const std::string& name) const { return path_ + "/" + name; }

  // kFailedPrecondition unless the folder is absent or empty.
  Status CheckFresh() const;
  // Makes the folder and its parts and takes the lock.
  Status Create();
  // Takes the lock of an existing run. kNotFound: no run here; kFailedPrecondition: another process holds it.
  Status Open();

  Result<RunState> ReadState() const;
  Status WriteState(const RunState& state) const;
  // Whether a process holds the lock, that is, supervises the run or is about to. Takes nothing.
  bool Held() const;

 private:
  const std::string path_;
  Fd lock_;
};

// What to type to go on with a run that has not done all its steps: "temper run --resume --out RUN", its path absolute and
// quoted where a shell needs it.
std::string ResumeCommand(const std::string& run_path);

// "runs/NAME-20260102-030405" (UTC).
std::string DefaultRunPath(const std::string& name, double wall_s);

}  // namespace temper::job
