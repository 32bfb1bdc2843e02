// Whole jobs whose verifier or agent misbehaves: always, or for a share of the attempts. What goes wrong is counted by its type,
// never enters a group's statistics when it is ours, and the job goes on or stops as docs/job_file.md says.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "common/file.h"
#include "common/strings.h"
#include "tests/e2e/job_process.h"

namespace temper::e2e {
namespace {

// The smallest job there is: no warm-up, no evaluation, a policy that knows nothing.
const char kJob[] = R"(name: fire
seed: 3
model: {create: {layers: 1, width: 32, heads: 2, kv_heads: 2, ffn: 64, vocab: tasks}}
tasks: {train: {generator: terminal, count: 256}}
scaffold: {name: bad, kind: command, command: ["{build}/bad-agent", good], where: sandbox, max_turns: 4, timeout_s: 20}
sampling: {temperature: 1.0, max_tokens: 8}
sandbox: {memory: 96MiB, processes: 24, disk: 8MiB, wall_s: 30, net: none}
verifier: {name: bad, kind: command, command: ["{build}/bad-verifier", good, never], timeout_s: 20}
algorithm: {recipe: cispo, dynamic_sampling: off}
pool: {groups_per_step: 4, staleness: 1, group_size: 4, deadline_s: 100}
optimizer: {name: adamw, lr: 1.0e-4}
trainer: {steps: 2, checkpoint_every: 10}
rollout: {workers: 1, max_batch: 32}
)";

struct LedgerLine {
  std::string event, outcome, reason;
  int64_t group = -1, rollout = -1, attempt = -1, task = -1;
  bool rewarded = false;
};

class Fire {
 public:
  explicit Fire(const std::string& name) : job_(name) {
    config_ = job_.folder().substr(0, job_.folder().rfind('/')) + "/fire.yaml";
    EXPECT_TRUE(WriteFile(config_, kJob).ok());
  }

  // Exit code of the job with these settings changed.
  int Run(const std::vector<std::string>& sets, double limit_s = 200) {
    std::vector<std::string> arguments;
    for (const std::string& set : sets) arguments.insert(arguments.end(), {"--set", set});
    job_.Start(arguments, {}, config_);
    const int code = job_.Wait(limit_s);
    if (code > 2) return code;
    summary_ = job_.Summary();
    for (const std::string& line : Split(std::string(Trim(job_.Read("ledger.jsonl"))), '\n')) {
      const json::value value = *ParseJson(line);
      const JsonRef ref(value);
      LedgerLine& event = ledger_.emplace_back();
      for (auto [key, text] : {std::pair{"event", &event.event}, {"outcome", &event.outcome}, {"reason", &event.reason}}) {
        *text = *ref.StringOr(key, "");
      }
      for (auto [key, number] :
           {std::pair{"group", &event.group}, {"rollout", &event.rollout}, {"attempt", &event.attempt}, {"task", &event.task}}) {
        *number = *ref.IntOr(key, -1);
      }
      event.rewarded = ref.Has("reward") && !ref.Field("reward")->is_null();
    }
    return code;
  }

  // What must hold after every end.
  void ExpectCountedAndGone() {
    std::map<std::string, int64_t> outcomes;
    int64_t issued = 0;
    for (const LedgerLine& line : ledger_) {
      issued += line.event == "issue";
      if (line.event != "outcome") continue;
      ++outcomes[line.outcome];
      const bool valid = line.outcome == "scored" || line.outcome == "policy_failure" || line.outcome == "truncated";
      EXPECT_EQ(line.rewarded, valid) << line.group << "." << line.rollout << "." << line.attempt << " " << line.outcome;
      if (line.outcome != "scored") {
        EXPECT_NE(line.reason, "") << line.outcome;
      }
    }
    int64_t sum = 0;
    for (const char* outcome : {"scored", "policy_failure", "truncated", "infra_failure", "aborted"}) {
      EXPECT_EQ(Count(outcome), outcomes[outcome]) << outcome;
      sum += Count(outcome);
    }
    EXPECT_EQ(sum, issued) << "an attempt has no end, or two";
    EXPECT_TRUE(*JsonRef(summary_).BoolOr("ledger_balanced", false));
    EXPECT_TRUE(*JsonRef(summary_).BoolOr("ledger_replayed", false));
    std::string output;
    EXPECT_EQ(JobProcess::Door({"pool", "verify", job_.folder()}, &output), 0) << output;
    EXPECT_EQ(job_.Remains(), "");
  }

  // Every step trained `rollouts` rollouts, whose rewards had this mean; nothing but valid ones among them.
  void ExpectSteps(int64_t steps, int64_t rollouts, double reward_mean) {
    EXPECT_EQ(*JsonRef(summary_).IntOr("steps", 0), steps) << job_.Output();
    EXPECT_EQ(*JsonRef(summary_).DoubleOr("importance_ratio_max_dev_on_policy", 1), 0);
    const std::vector<std::string> lines = Split(std::string(Trim(job_.Read("metrics.jsonl"))), '\n');
    EXPECT_EQ(lines.size(), static_cast<size_t>(steps));
    for (const std::string& line : lines) {
      const json::value step = *ParseJson(line);
      EXPECT_EQ(*JsonRef(step).IntOr("rollouts", 0), rollouts) << line;
      EXPECT_NEAR(*JsonRef(step).DoubleOr("reward_mean", 0), reward_mean, 1e-12) << line;
      for (const char* outcome : {"infra_failure", "aborted"}) {
        EXPECT_EQ(*JsonRef(step).Field("outcomes")->IntOr(outcome, 0), 0) << line;
      }
    }
  }

  int64_t Count(const char* outcome) const { return *JsonRef(summary_).Field("outcomes")->IntOr(outcome, -1); }
  std::string Reason() const { return *JsonRef(summary_).StringOr("reason", ""); }
  const std::vector<LedgerLine>& ledger() const { return ledger_; }
  JobProcess& job() { return job_; }

 private:
  JobProcess job_;
  std::string config_;
  json::value summary_;
  std::vector<LedgerLine> ledger_;
};

std::string Verifier(const std::string& mode, const std::string& share, double timeout_s) {
  return "verifier={name: bad, kind: command, command: [\"{build}/bad-verifier\", " + mode + (share.empty() ? "" : ", " + share) +
         "], timeout_s: " + FormatDouble(timeout_s) + "}";
}
std::string Agent(const std::string& mode, double timeout_s, const std::string& more = "") {
  return "scaffold={name: bad, kind: command, command: [\"{build}/bad-agent\", " + mode +
         "], where: sandbox, max_turns: 4, timeout_s: " + FormatDouble(timeout_s) + more + "}";
}

// The first verdict of one rollout in each group fails, in another way each time: its second attempt takes its place, and no mean
// sees the first. Returns how many ways there were.
size_t FirstVerdictsFail(int64_t steps) {
  Fire fire("first_verdicts");
  const int code = fire.Run({Verifier("mix", "first", 1.5), "trainer.steps=" + std::to_string(steps)});
  EXPECT_EQ(code, 0) << fire.job().Output();
  if (code != 0) return 0;
  fire.ExpectCountedAndGone();
  fire.ExpectSteps(steps, 16, 2.5);
  std::set<int64_t> failed;
  for (const LedgerLine& line : fire.ledger()) {
    if (line.outcome != "infra_failure") continue;
    EXPECT_EQ(line.reason, "verifier");
    EXPECT_EQ(line.rollout, 1);
    EXPECT_EQ(line.attempt, 1);
    EXPECT_TRUE(failed.insert(line.group).second);
  }
  for (const LedgerLine& line : fire.ledger()) {
    if (line.event == "consume") EXPECT_TRUE(failed.count(line.group)) << "group " << line.group;
  }
  return failed.size();
}

// A failing verifier could cost its group a member, pull a mean down, or end the job.
TEST(UnderFire, VerdictsThatFailOnceAreAskedForAgain) { EXPECT_GE(FirstVerdictsFail(2), 8u); }
TEST(UnderFireLong, EveryBadVerdictIsAskedForAgain) { EXPECT_GE(FirstVerdictsFail(7), 28u); }

// A rollout whose verdict never comes could enter its group as a reward of 0, or hold the group for ever.
TEST(UnderFireLong, AGroupGoesOnWithoutTheMemberThatCannotBeJudged) {
  for (const char* mode : {"1e999", "crash", "hang"}) {
    Fire fire("never_judged");
    // Eight groups at once fail sixteen times in a row when nothing else is left to play; twenty-four would end the job.
    ASSERT_EQ(fire.Run({Verifier(mode, "always-0", 0.5), "pool.group_size=8"}), 0) << fire.job().Output();
    fire.ExpectCountedAndGone();
    fire.ExpectSteps(2, 28, 5);  // the mean of 2 to 8
    EXPECT_GE(fire.Count("infra_failure"), 16) << "two attempts a group";
    std::string output;
    EXPECT_EQ(JobProcess::Door({"trajectory", "show", fire.job().folder(), "0.0.2", "--json"}, &output), 0) << output;
    EXPECT_NE(output.find("\"outcome\":\"infra_failure\""), std::string::npos) << output;
  }
}

// A verifier that is broken for good could be asked for ever, or end the job without a word of why.
void EveryVerdictFails(const std::string& mode, double timeout_s, const std::vector<std::string>& words) {
  SCOPED_TRACE(mode);
  Fire fire("no_verdict");
  ASSERT_EQ(fire.Run({Verifier(mode, "", timeout_s)}, 60), 1) << fire.job().Output();
  fire.ExpectCountedAndGone();
  EXPECT_EQ(fire.Count("scored") + fire.Count("truncated") + fire.Count("policy_failure"), 0);
  EXPECT_GE(fire.Count("infra_failure"), 8);  // of twelve; what is reported in the moment of the end may be cut off
  EXPECT_LE(fire.Count("infra_failure"), 12 + 32) << "the failures go on";
  EXPECT_EQ(fire.Reason().rfind("agents: 12 infrastructure failures in a row, cause 'verifier'; last words: ", 0), 0u)
      << fire.Reason();
  for (const std::string& word : words) EXPECT_NE(fire.Reason().find(word), std::string::npos) << fire.Reason();
  EXPECT_EQ(fire.job().Read("metrics.jsonl"), "");
}
TEST(UnderFire, AVerifierThatAlwaysFailsEndsTheJobWithItsLastWords) {
  EveryVerdictFails("exit-3", 20, {"exit: the verifier ended with exit code 3", "last output: not my day"});
}
TEST(UnderFireLong, EveryKindOfBrokenVerifierEndsTheJob) {
  EveryVerdictFails("logs-slowly", 0.5, {"deadline: no verdict within 0.5 s", "still here"});
  EveryVerdictFails("1e999", 20, {"verdict: "});
  EveryVerdictFails("gigabyte-on-fd3", 60, {"verdict: more than 4 MiB on file descriptor 3"});
}

// Each task tells its agent how to misbehave; what becomes of the group is the table's word, and the job reaches its steps.
TEST(UnderFire, BadAgentsAreCountedByWhatTheyDidAndTheJobGoesOn) {
  struct Row {
    const char* mode;
    const char* ending;  // of every attempt that was not cut off; several with '|' between
  };
  const std::vector<Row> rows = {{"exits-at-once", "infra_failure/no_call"},
                                 {"hangs", "truncated/time"},
                                 {"kills-itself", "policy_failure/killed_agent"},
                                 {"10000-calls", "truncated/turns"},
                                 {"good", "scored/"},
                                 {"kills-its-session", "scored/"},
                                 {"large-body", "truncated/context"},
                                 {"500-at-once", "truncated/time"},
                                 {"exits-3", "infra_failure/agent_exit"},
                                 {"fork-storm-for-ever", "truncated/time"},
                                 {"never-exits", "truncated/time"},
                                 {"memory", "policy_failure/limit|truncated/time"},  // time where it is held by rlimits
                                 {"daemon-calls-on", "scored/|truncated/turns"},
                                 {"hangs-up", "scored/"}};
  Fire fire("agents");
  std::string tasks;
  for (size_t i = 0; i < 64; ++i) {
    const char* mode = i < rows.size() ? rows[i].mode : "good";
    tasks += "{\"id\":\"t" + std::to_string(i) + "\",\"instruction\":\"say something\",\"metadata\":{\"mode\":\"" + mode +
             "\"}}\n";
  }
  const std::string file = fire.job().folder().substr(0, fire.job().folder().rfind('/')) + "/tasks.jsonl";
  ASSERT_TRUE(WriteFile(file, tasks).ok());
  ASSERT_EQ(fire.Run({"tasks={train: {jsonl: " + file + "}}", Agent("as-told", 3), "trainer.steps=4"}), 0) << fire.job().Output();
  fire.ExpectCountedAndGone();
  fire.ExpectSteps(4, 16, 2.5);
  std::map<int64_t, size_t> task_of;
  std::map<size_t, std::map<std::string, int>> endings;
  std::set<int64_t> tombstoned;
  for (const LedgerLine& line : fire.ledger()) {
    if (line.event == "admit") task_of[line.group] = static_cast<size_t>(line.task);
    if (line.event == "outcome" && line.outcome != "aborted") ++endings[task_of[line.group]][line.outcome + "/" + line.reason];
    if (line.event == "tombstone" && line.reason == "too_few_valid") tombstoned.insert(line.group);
  }
  for (size_t i = 0; i < rows.size(); ++i) {
    SCOPED_TRACE(rows[i].mode);
    const std::vector<std::string> expected = Split(rows[i].ending, '|');
    int seen = 0;
    for (const auto& [ending, count] : endings[i]) {
      EXPECT_EQ(std::count(expected.begin(), expected.end(), ending), 1) << ending;
      seen += count;
    }
    const bool ours = std::string(rows[i].ending).rfind("infra_failure", 0) == 0;
    EXPECT_EQ(seen, ours ? 8 : 4) << "one again each, when it was ours";
    EXPECT_EQ(tombstoned.count(static_cast<int64_t>(i)), ours ? 1u : 0u);
  }
}

// About every third attempt fails by its key, whatever its group: the others must not be touched by it.
TEST(UnderFireLong, AShareOfBadAgentsDoesNotStopTheJob) {
  for (const char* mode : {"calls-and-exits-3", "crashes", "exits-at-once"}) {
    SCOPED_TRACE(mode);
    Fire fire("share");
    ASSERT_EQ(fire.Run({Agent(std::string(mode) + ", some", 5), "pool.retries=20"}), 0) << fire.job().Output();
    fire.ExpectCountedAndGone();
    fire.ExpectSteps(2, 16, 2.5);
    EXPECT_GT(fire.Count("infra_failure"), 0);
  }
}

// Agents that always crash are ours to mend unless the job says that it is the policy's doing.
TEST(UnderFireLong, AgentsThatAlwaysFail) {
  {
    Fire fire("agent_exit");
    ASSERT_EQ(fire.Run({Agent("exits-3", 5)}, 60), 1);
    fire.ExpectCountedAndGone();
    const std::string begin = "agents: 12 infrastructure failures in a row, cause 'agent_exit'; last words: exit code 3";
    EXPECT_EQ(fire.Reason().rfind(begin, 0), 0u) << fire.Reason();
    EXPECT_NE(fire.Reason().find("no model for me"), std::string::npos) << fire.Reason();
    EXPECT_EQ(fire.Count("scored"), 0);
  }
  {
    Fire fire("agent_silent");
    ASSERT_EQ(fire.Run({Agent("exits-at-once", 5)}, 60), 1);
    fire.ExpectCountedAndGone();
    EXPECT_NE(fire.Reason().find("cause 'no_call'"), std::string::npos) << fire.Reason();
  }
  {
    Fire fire("agent_policy");
    ASSERT_EQ(fire.Run({Agent("calls-and-exits-3", 5, ", on_exit: policy")}), 0) << fire.job().Output();
    fire.ExpectCountedAndGone();
    fire.ExpectSteps(2, 16, 2.5);
    EXPECT_EQ(fire.Count("scored"), 0);
    EXPECT_EQ(fire.Count("infra_failure"), 0);
    EXPECT_GE(fire.Count("policy_failure"), 32);
  }
  {
    Fire fire("agent_hangs");
    ASSERT_EQ(fire.Run({Agent("never-exits", 1)}), 0) << fire.job().Output();
    fire.ExpectCountedAndGone();
    fire.ExpectSteps(2, 16, 2.5);
    EXPECT_GE(fire.Count("truncated"), 32);
  }
}

}  // namespace
}  // namespace temper::e2e
