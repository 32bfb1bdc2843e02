#include "agents/attempt.h"

#include <algorithm>
#include <set>
#include <utility>

#include "common/faults.h"
#include "common/file.h"
#include "common/json.h"
#include "common/strings.h"
#include "temper/v1/types.pb.h"

namespace temper::agents {
namespace {

constexpr int kDrainMs = 2000;

json::object TaskFields(const Task& task) {
  json::object files;
  for (const TaskFile& f : task.files) {
    if (f.directory) files[f.path + "/"] = nullptr;
    else files[f.path] = f.content;
  }
  json::object out{{"id", task.id}, {"family", task.family}, {"instruction", task.instruction}, {"files", files}};
  Result<json::value> metadata = ParseJson(task.metadata);
  out["metadata"] = metadata.ok() ? *metadata : json::value(json::object());
  return out;
}

AttemptResult Failed(std::string outcome, std::string reason, std::string detail) {
  AttemptResult result;
  result.outcome = std::move(outcome);
  result.reason = std::move(reason);
  result.detail = std::move(detail);
  return result;
}

// A call to one of our own parts failed. A part that is away (it stops, or was restarted and has forgotten the session or the
// sandbox) is no failure of the infrastructure: the attempt is simply played again.
AttemptResult PartFailed(const char* part, const Status& status) {
  const bool away = status.code() == StatusCode::kUnavailable || status.code() == StatusCode::kNotFound;
  return Failed(away ? "aborted" : "infra_failure", away ? std::string(part) + "_restarted" : part, status.ToString());
}

// Whether a verdict failed only because the sandbox service was away.
bool SandboxAway(const verifiers::Verdict& verdict) {
  Result<json::value> evidence = ParseJson(verdict.evidence_json);
  if (!evidence.ok()) return false;
  Result<std::string> message = JsonRef(*evidence).StringOr("message", "");
  return message.ok() && message->rfind("UNAVAILABLE", 0) == 0;
}

// What a verifier's failure says to people: "deadline: no verdict within 20 s; last output: …".
std::string LastWords(const verifiers::Verdict& verdict) {
  Result<json::value> evidence = ParseJson(verdict.evidence_json);
  if (!evidence.ok()) return verdict.evidence_json;
  const JsonRef ref(*evidence);
  auto field = [&](const char* name) {
    Result<std::string> text = ref.StringOr(name, "");
    return text.ok() ? std::string(Trim(*text)) : "";
  };
  const std::string reason = field("reason"), message = field("message"), log = field("log");
  if (reason.empty() || message.empty()) return verdict.evidence_json;  // the verifier's own words
  return reason + ": " + message + (log.empty() ? "" : "; last output: " + log);
}

bool HasFlag(const std::vector<std::string>& flags, const char* flag) {
  return std::find(flags.begin(), flags.end(), flag) != flags.end();
}

// As the trainer counts them: calls that sampled anything.
int64_t TurnsOf(const v1::Trajectory& trajectory) {
  std::set<int32_t> calls;
  for (const v1::TokenRun& run : trajectory.runs()) {
    if (run.provenance() == v1::SAMPLED) calls.insert(run.call());
  }
  return static_cast<int64_t>(calls.size());
}

std::string MetadataJson(const AttemptSpec& spec) {
  return PrintJson(json::object{{"session", spec.session}, {"group", spec.group}, {"rollout", spec.rollout}, {"attempt", spec.attempt}});
}

}  // namespace

OutcomeDecision DecideOutcome(const AgentEnd& end, const std::vector<std::string>& flags, int calls, bool exit_is_policy) {
  if (end.kind == AgentEnd::Kind::kStopped) return {"aborted", "stopped"};
  if (end.kind == AgentEnd::Kind::kGone) return {"aborted", "part_restarted"};
  if (end.kind == AgentEnd::Kind::kInfra) return {"infra_failure", "sandbox"};
  if (HasFlag(flags, "worker_error")) return {"infra_failure", "worker"};
  if (HasFlag(flags, "gateway_restart")) return {"aborted", "gateway_restart"};
  if (end.kind == AgentEnd::Kind::kLimit) return {"policy_failure", "limit"};
  if (end.kind == AgentEnd::Kind::kKilled) return {"policy_failure", "killed_agent"};
  // An agent that was refused a further call often exits with an error; the refusal is the cause.
  if (HasFlag(flags, "rollout_limit:turns")) return {"truncated", "turns"};
  if (HasFlag(flags, "rollout_limit:time") || end.kind == AgentEnd::Kind::kTimeout) return {"truncated", "time"};
  if (HasFlag(flags, "context_length_exceeded")) return {"truncated", "context"};
  if (HasFlag(flags, "rollout_limit:branches")) return {"truncated", "branches"};
  if (HasFlag(flags, "rollout_limit:kept_sets")) return {"truncated", "kept_sets"};
  // The gateway died between two calls, or before one was on record: the agent met a closed connection.
  if (HasFlag(flags, "recovered") && (end.kind == AgentEnd::Kind::kExit || calls == 0)) return {"aborted", "gateway_restart"};
  if (end.kind == AgentEnd::Kind::kExit) {
    return exit_is_policy ? OutcomeDecision{"policy_failure", "agent_exit"} : OutcomeDecision{"infra_failure", "agent_exit"};
  }
  if (calls == 0) return {"infra_failure", "no_call"};
  return {"scored", ""};
}

std::string TaskFileJson(const Task& task, const ScaffoldOptions& scaffold) {
  json::object out = TaskFields(task);
  out["limits"] = json::object{{"max_turns", scaffold.max_turns}, {"timeout_s", scaffold.timeout_s}};
  return PrintJson(out);
}

std::string TaskCaseJson(const Task& task) {
  json::object out = TaskFields(task);
  Result<json::value> hidden = ParseJson(task.hidden);
  out["hidden"] = hidden.ok() ? *hidden : json::value(json::object());
  return PrintJson(out);
}

AttemptRunner::AttemptRunner(const AttemptOptions& options, const Scaffold& scaffold, gateway::GatewayControl& gateway,
                             sandbox::SandboxService& sandbox, verifiers::Verifier& verifier)
    : options_(options), scaffold_(scaffold), gateway_(gateway), sandbox_(sandbox), verifier_(verifier) {}

AttemptResult AttemptRunner::Run(const AttemptSpec& spec, const std::atomic<bool>& stopped) const {
  gateway::OpenOptions open;
  open.session = spec.session;
  open.group = spec.group;
  open.rollout = spec.rollout;
  open.attempt = spec.attempt;
  open.task_id = spec.task.id;
  open.family = spec.task.family;
  open.sampling = options_.sampling;
  if (!spec.training) open.sampling->temperature = options_.eval_temperature;
  open.max_turns = options_.scaffold.max_turns;
  open.key_space.seed = options_.seed;
  open.key_space.domain = spec.training ? 0 : 1;
  // Every evaluation draws a task's numbers anew from the same place: what differs between two of them is the policy.
  open.key_space.a = static_cast<uint64_t>(spec.training ? spec.group : spec.task_index);
  open.key_space.b = static_cast<uint64_t>(spec.training ? spec.rollout : 0);
  open.training = spec.training;
  open.deadline_s = spec.deadline_s;
  open.fresh = !spec.training;  // an evaluation that is repeated begins each task anew
  Result<gateway::Opened> opened = gateway_.Open(open);
  // The session was played before this process started; another attempt number is free.
  if (opened.status().code() == StatusCode::kAlreadyExists) return Failed("aborted", "session_taken", opened.status().ToString());
  if (!opened.ok()) return PartFailed("gateway", opened.status());

  const std::string task_file = options_.scaffold.run_dir + "/attempts/" + spec.session + ".json";
  Status written = WriteFile(task_file, TaskFileJson(spec.task, options_.scaffold));
  if (!written.ok()) {
    (void)gateway_.Abort(spec.session, "task_file");
    return Failed("infra_failure", "task_file", written.ToString());
  }
  AttemptResult result = RunInSandbox(spec, *opened, task_file, stopped);
  (void)sandbox_.Destroy(spec.session);
  (void)RemoveAll(task_file);
  if (!result.trajectory) (void)gateway_.Abort(spec.session, result.reason);
  return result;
}

AttemptResult AttemptRunner::RunInSandbox(const AttemptSpec& spec, const gateway::Opened& opened, const std::string& task_file,
                                          const std::atomic<bool>& stopped) const {
  sandbox::CreateRequest create;
  create.id = spec.session;
  create.limits = options_.limits;
  create.rootfs = options_.rootfs;
  create.mounts = options_.mounts;
  for (sandbox::Mount& mount : scaffold_.Mounts(task_file)) create.mounts.push_back(std::move(mount));
  create.relay = scaffold_.NeedsRelay();
  create.ttl_s = options_.scaffold.timeout_s + 60;
  for (const TaskFile& f : spec.task.files) {
    sandbox::File file;
    file.path = f.path;
    file.bytes = f.content;
    file.kind = f.directory ? sandbox::File::Kind::kFolder : sandbox::File::Kind::kRegular;
    file.mode = f.directory ? 0775 : 0664;
    create.files.push_back(std::move(file));
  }
  Result<sandbox::SandboxInfo> made = sandbox_.Create(create);
  if (!made.ok()) return PartFailed("sandbox", made.status());

  const AgentEnd end = stopped ? AgentEnd{AgentEnd::Kind::kStopped, ""}
                               : scaffold_.Play({spec, opened.base_url, opened.api_key, sandbox_, spec.session, task_file, stopped});
  if (stopped) return Failed("aborted", "stopped", "");

  Result<gateway::Sealed> sealed = gateway_.Seal(spec.session, kDrainMs);
  if (!sealed.ok()) return PartFailed("gateway", sealed.status());
  AttemptResult result;
  result.trajectory = std::make_shared<v1::Trajectory>(*sealed->trajectory);
  const v1::Trajectory& sealed_trajectory = *sealed->trajectory;
  const std::vector<std::string> flags(sealed_trajectory.flags().begin(), sealed_trajectory.flags().end());
  const OutcomeDecision decision = DecideOutcome(end, flags, sealed_trajectory.calls_size(), options_.scaffold.exit_is_policy);
  result.outcome = decision.outcome;
  result.reason = decision.reason;
  result.detail = end.detail;

  if (result.outcome != "infra_failure" && result.outcome != "aborted") {
    if (result.outcome != "scored" && options_.failure_reward) {
      result.reward = options_.failure_reward;
    } else {
      Result<std::vector<sandbox::File>> files = sandbox_.Export(spec.session, {});
      if (!files.ok()) {
        // A work folder over the bounds is the policy's doing; any other failure is ours.
        const bool policy = files.status().code() == StatusCode::kResourceExhausted;
        if (!policy) return PartFailed("sandbox", files.status());
        result.outcome = "policy_failure";
        result.reason = "limit";
        result.detail = files.status().ToString();
        result.reward = options_.failure_reward.value_or(0);
      } else {
        (void)sandbox_.Destroy(spec.session);  // frees its memory before the judge's sandbox is made
        verifiers::Case the_case;
        the_case.task_json = TaskCaseJson(spec.task);
        the_case.outcome = result.outcome;
        the_case.final_text = sealed_trajectory.final_text();
        the_case.turns = TurnsOf(sealed_trajectory);
        the_case.metadata_json = MetadataJson(spec);
        the_case.files = std::move(*files);
        (void)Faults::Get().Hit("agents.verify");
        const verifiers::Verdict verdict = verifiers::HeldToTurns(verifier_.Verify(the_case), the_case.turns);
        result.trajectory->set_evidence(verdict.evidence_json);
        if (verdict.outcome == verifiers::VerdictOutcome::kScored) {
          result.reward = verdict.reward;
          for (const auto& [name, value] : verdict.components) (*result.trajectory->mutable_components())[name] = value;
          for (const double reward : verdict.turn_rewards) result.trajectory->add_turn_rewards(reward);
        } else {
          const bool away = SandboxAway(verdict);
          result.outcome = away ? "aborted" : "infra_failure";
          result.reason = away ? "sandbox_restarted" : "verifier";
          result.detail = LastWords(verdict);
        }
      }
    }
  }
  if (stopped) return Failed("aborted", "stopped", "");
  result.trajectory->set_outcome(result.outcome);
  result.trajectory->set_reason(result.reason);
  if (result.reward) result.trajectory->set_reward(*result.reward);
  return result;
}

void AttemptRunner::Stop(const std::string& session) const {
  (void)sandbox_.Destroy(session);
  (void)gateway_.Abort(session, "stopped");
}

}  // namespace temper::agents
