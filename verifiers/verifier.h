// A verifier looks at what a rollout left behind and says what it is worth.
//
// The outcome is a type: `kScored` has a reward; `kInfraFailure` has none, whatever went wrong (no answer, two, rubbish,
// NaN, a crash, the deadline), and never becomes one. Verify may be called from many threads at once.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/status.h"
#include "sandbox/client.h"

namespace temper::verifiers {

enum class VerdictOutcome { kScored, kInfraFailure };
// "scored", "infra_failure".
const char* Name(VerdictOutcome outcome);

struct Verdict {
  VerdictOutcome outcome = VerdictOutcome::kInfraFailure;
  double reward = 0;                         // finite; meaningful only when scored
  std::map<std::string, double> components;  // finite
  std::vector<double> turn_rewards;          // finite; empty, or one for each turn of the case
  std::string evidence_json = "{}";          // a JSON object; of an infra failure {"reason":…,"message":…,"log":…}
};

// What a verifier gets.
struct Case {
  std::string task_json = "{}";      // a JSON object: the task with its answers, as the task source made it
  std::string outcome = "sealed";    // how the rollout ended before verification
  std::string final_text;            // what the policy said in its last answer, may be empty
  int64_t turns = 0;                 // calls that the policy answered
  std::string metadata_json = "{}";  // a JSON object: session, group, rollout, attempt…
  std::vector<sandbox::File> files;  // exported state of the agent's sandbox
};
// One object without a line end, the standard input of a command verifier:
//   {"task":{…},"outcome":"…","final_text":"…","turns":3,"metadata":{…},"files":["path",…]}
// `files` names the regular files, which the verifier finds in its own work folder, /work. With `include_contents` they are
// objects instead: {"path","text"|"base64"|"link"|"folder":true,"mode"}: what `temper verifier run --case` reads.
std::string CaseToJson(const Case& c, bool include_contents = false);
// Every key may be absent. `files` may also be an object {"path":"text"}. Errors name the field.
Result<Case> CaseFromJson(const std::string& json);

class Verifier {
 public:
  virtual ~Verifier() = default;
  virtual Verdict Verify(const Case& c) = 0;
};

// Reads what a command wrote to file descriptor 3: exactly one JSON object with a finite number `reward`, optional
// `components` (finite numbers), `turn_rewards` (a list of finite numbers) and `evidence` (object); other keys are left alone. A verifier may also answer
// {"outcome":"infra_failure","evidence":{…}}. An error says why it is no verdict, which makes it an infra failure.
Result<Verdict> ParseVerdict(const std::string& bytes);
// Rewards of turns that are not one for each turn of the case make a verdict an infra failure (`verdict`), since nobody knows whose they are.
Verdict HeldToTurns(Verdict verdict, int64_t turns);
// One object as `temper verifier run` prints it: {"outcome":…,"reward":…|null,"components":{…},"evidence":{…}}, with
// "turn_rewards" where there are any.
std::string VerdictToJson(const Verdict& verdict);

// A command run in a fresh sandbox of its own, made from the case's files.
struct CommandOptions {
  std::string name = "command";
  std::vector<std::string> command;     // argv; no shell is implied
  std::vector<std::pair<std::string, std::string>> env;
  double timeout_s = 20;
  sandbox::Limits limits;
  std::string rootfs;
  std::vector<sandbox::Mount> mounts;   // the verifier's own program
};
// `service` is not owned and must outlive the verifier.
std::unique_ptr<Verifier> MakeCommandVerifier(const CommandOptions& options, sandbox::SandboxService* service);

// Verifiers built in by name, for `verifier: {name: NAME, kind: builtin}` and the door.
//   exact          reward 1 when final_text, without white space around it, equals the task's string "answer", else 0
//   first_integer  reward 1 when the first integer in final_text equals the task's integer "answer", else 0
// In a job "answer" stands in the task's "hidden" object.
std::vector<std::string> BuiltinNames();
// kNotFound lists the names.
Result<std::unique_ptr<Verifier>> MakeBuiltinVerifier(const std::string& name);

}  // namespace temper::verifiers
