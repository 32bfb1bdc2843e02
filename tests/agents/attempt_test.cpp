#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <string>
#include <vector>

#include "agents/attempt.h"
#include "agents/server.h"
#include "common/file.h"
#include "common/json.h"
#include "common/rng.h"
#include "tests/fuzz/mutate.h"

namespace temper::agents {
namespace {

using Kind = AgentEnd::Kind;

std::string Decide(Kind kind, std::vector<std::string> flags, int calls = 3, bool exit_is_policy = false) {
  const OutcomeDecision d = DecideOutcome({kind, ""}, flags, calls, exit_is_policy);
  return d.reason.empty() ? d.outcome : d.outcome + "/" + d.reason;
}

// What could go wrong: a failure of our own parts is taken for the policy's, or the other way round.
TEST(DecideOutcome, BlamesTheRightOne) {
  EXPECT_EQ(Decide(Kind::kDone, {}), "scored");
  EXPECT_EQ(Decide(Kind::kDone, {"rollout_limit:turns"}), "truncated/turns");
  EXPECT_EQ(Decide(Kind::kExit, {"rollout_limit:turns"}), "truncated/turns");
  EXPECT_EQ(Decide(Kind::kTimeout, {}), "truncated/time");
  EXPECT_EQ(Decide(Kind::kDone, {"context_length_exceeded"}), "truncated/context");
  EXPECT_EQ(Decide(Kind::kExit, {"rollout_limit:branches"}), "truncated/branches");
  EXPECT_EQ(Decide(Kind::kExit, {}), "infra_failure/agent_exit");
  EXPECT_EQ(Decide(Kind::kExit, {}, 3, true), "policy_failure/agent_exit");
  EXPECT_EQ(Decide(Kind::kKilled, {}), "policy_failure/killed_agent");
  EXPECT_EQ(Decide(Kind::kLimit, {}), "policy_failure/limit");
  EXPECT_EQ(Decide(Kind::kDone, {}, 0), "infra_failure/no_call");
  EXPECT_EQ(Decide(Kind::kStopped, {"worker_error"}), "aborted/stopped");
  // The gateway died under it without a call on record.
  EXPECT_EQ(Decide(Kind::kExit, {"recovered"}), "aborted/gateway_restart");
  EXPECT_EQ(Decide(Kind::kExit, {"recovered"}, 3, true), "aborted/gateway_restart");
  EXPECT_EQ(Decide(Kind::kDone, {"recovered"}, 0), "aborted/gateway_restart");
  EXPECT_EQ(Decide(Kind::kDone, {"recovered"}), "scored");
  EXPECT_EQ(Decide(Kind::kTimeout, {"recovered"}), "truncated/time");
}

// What could go wrong: infrastructure trouble is hidden behind a limit that was hit at the same time.
TEST(DecideOutcome, InfrastructureComesFirst) {
  for (Kind kind : {Kind::kDone, Kind::kExit, Kind::kKilled, Kind::kTimeout, Kind::kLimit, Kind::kInfra}) {
    EXPECT_EQ(Decide(kind, {"worker_error", "rollout_limit:turns"}).substr(0, 13), "infra_failure") << static_cast<int>(kind);
  }
  EXPECT_EQ(Decide(Kind::kInfra, {}), "infra_failure/sandbox");
  EXPECT_EQ(Decide(Kind::kGone, {}), "aborted/part_restarted");
}

// What could go wrong: the answers reach the agent.
TEST(Task, HiddenStaysHidden) {
  Task task;
  task.id = "t";
  task.instruction = "do";
  task.metadata = R"({"hint":"a"})";
  task.hidden = R"({"answer":"secret"})";
  EXPECT_EQ(TaskFileJson(task, {}).find("secret"), std::string::npos);
  EXPECT_NE(TaskFileJson(task, {}).find("hint"), std::string::npos);
  EXPECT_NE(TaskCaseJson(task).find("secret"), std::string::npos);
}

class TempFile {
 public:
  explicit TempFile(const std::string& text) {
    std::string name = (std::filesystem::temp_directory_path() / "temper-jsonl-XXXXXX").string();
    const int fd = mkstemp(name.data());
    EXPECT_TRUE(WriteAll(fd, text).ok());
    close(fd);
    path = name;
  }
  ~TempFile() { std::filesystem::remove(path); }
  std::string path;
};

// What could go wrong: a bad line is skipped, or its message does not say where it is.
TEST(JsonlTasks, ErrorsNameFileAndLine) {
  const std::string good = R"({"id":"a","instruction":"x","files":{"d/e":"1","empty/":null},"hidden":{"k":1}})";
  TempFile file(good + "\n\n");
  Result<std::unique_ptr<TaskSource>> tasks = LoadJsonlTasks(file.path);
  ASSERT_TRUE(tasks.ok()) << tasks.status().ToString();
  EXPECT_EQ((*tasks)->size(), 1);
  EXPECT_EQ((*tasks)->Get(0).files.size(), 2u);
  EXPECT_TRUE((*tasks)->Get(0).files[1].directory);
  for (const char* bad : {"{", R"({"id":"b"})", R"({"id":"a","instruction":"x"})", R"({"id":"b","instruction":"x","files":{"../e":"1"}})",
                          R"({"id":"b","instruction":"x","files":{"/e":"1"}})", R"({"id":"b","instruction":"x","other":1})",
                          R"({"id":"b","instruction":1})", R"({"id":"b","instruction":"x","hidden":[]})"}) {
    TempFile broken(good + "\n" + bad + "\n");
    Result<std::unique_ptr<TaskSource>> result = LoadJsonlTasks(broken.path);
    ASSERT_FALSE(result.ok()) << bad;
    EXPECT_NE(result.status().message().find(broken.path + ":2"), std::string::npos) << result.status().message();
  }
}

// What could go wrong: bytes that are no task file crash the reader or pass as tasks outside the work folder.
TEST(JsonlTasks, SurvivesMutations) {
  const std::string good = R"({"id":"a","family":"f","instruction":"x","files":{"d/e":"1","empty/":null},"metadata":{},"hidden":{"k":[1,2]}})";
  Rng rng(5);
  int accepted = 0;
  for (int round = 0; round < 2000; ++round) {
    std::string text = good + "\n";
    for (uint64_t i = 0; i < 1 + rng.Below(4); ++i) text[rng.Below(text.size())] = static_cast<char>(rng.Below(256));
    TempFile file(text);
    Result<std::unique_ptr<TaskSource>> tasks = LoadJsonlTasks(file.path);
    if (!tasks.ok()) continue;
    ++accepted;
    for (int64_t i = 0; i < (*tasks)->size(); ++i) {
      for (const TaskFile& f : (*tasks)->Get(i).files) {
        EXPECT_NE(f.path[0], '/');
        EXPECT_EQ(("/" + f.path + "/").find("/../"), std::string::npos);
      }
    }
  }
  EXPECT_GT(accepted, 0);
}

// What could go wrong: a report read back from eval.jsonl differs, and a resumed job shows another curve.
TEST(EvaluationReport, SurvivesItsFile) {
  EvaluationReport report;
  report.evaluation = 2;
  report.version = 40;
  report.tasks = 3;
  report.pass_rate = 2.0 / 3;
  report.families = {{"find", {2, 1}}, {"write", {1, 1}}};
  report.outcomes = {{"scored", 3}};
  report.rewards = {1, std::nullopt, 0.5};
  report.tokens_sampled = 77;
  report.wall_s = 1.25;
  report.job_s = 91.5;
  Result<EvaluationReport> back = ReportFromJson(ReportToJson(report));
  ASSERT_TRUE(back.ok()) << back.status().ToString();
  EXPECT_EQ(ReportToJson(*back).find("\"pass_rate\":0.66666666666666663"), ReportToJson(report).find("\"pass_rate\":0.66666666666666663"));
  EXPECT_EQ(back->families["find"].passed, 1);
  EXPECT_EQ(back->pass_rate, report.pass_rate);
  EXPECT_EQ(back->rewards, report.rewards);
  EXPECT_EQ(back->job_s, 91.5);
}

// What could go wrong: a line of eval.jsonl that was half written crashes the resume.
TEST(EvaluationReport, SurvivesMutations) {
  EvaluationReport report;
  report.tasks = 3;
  report.families = {{"find", {2, 1}}, {"write", {1, 1}}};
  report.rewards = {1, std::nullopt, 1};
  Rng rng(7);
  int accepted = 0;
  for (int i = 0; i < 5000; ++i) {
    Result<EvaluationReport> back = ReportFromJson(Mutated(i % 4 ? ReportToJson(report) : R"({"tasks":1,"families":2})", {"null", "{}", "[]", "\"x\"", "1e400", "-1"}, rng));
    if (!back.ok()) continue;
    ++accepted;
    EXPECT_TRUE(ReportFromJson(ReportToJson(*back)).ok());
  }
  EXPECT_GT(accepted, 100);
}

struct NoSandbox final : sandbox::SandboxService {
  Result<sandbox::SandboxInfo> Create(const sandbox::CreateRequest&) override { return Unimplemented("no sandbox here"); }
  Result<sandbox::ExecResult> Exec(const sandbox::ExecRequest& request) override {
    asked = request;
    return sandbox::ExecResult{};
  }
  Result<std::vector<sandbox::File>> Export(const std::string&, const sandbox::ExportOptions&) override { return Unimplemented(""); }
  Status Renew(const std::string&, double) override { return Status::Ok(); }
  Status Destroy(const std::string&) override { return Status::Ok(); }
  Result<std::vector<sandbox::SandboxInfo>> List() override { return std::vector<sandbox::SandboxInfo>{}; }
  sandbox::ExecRequest asked;
};

// What could go wrong: a program gets another's key, no way to the model, or no task; or its end is taken for another.
TEST(CommandScaffold, GivesUrlKeyAndTaskByEnvironment) {
  TempFile seen("");
  ScaffoldOptions options;
  options.command = {"sh", "-c", "env > \"$0\"; exit $1", seen.path, "3"};
  options.host = true;
  const AttemptSpec spec;
  const std::atomic<bool> stopped = false;
  NoSandbox service;
  const AttemptContext context{spec, "http://127.0.0.1:81/v1", "sk-this-one", service, "box-1", "/somewhere/task.json", stopped};
  const AgentEnd end = (*MakeScaffold(options))->Play(context);
  EXPECT_EQ(end.kind, Kind::kExit);
  EXPECT_NE(end.detail.find("3"), std::string::npos) << end.detail;
  const std::string environment = "\n" + *ReadFile(seen.path);
  for (const char* line : {"OPENAI_BASE_URL=http://127.0.0.1:81/v1", "OPENAI_API_KEY=sk-this-one", "ANTHROPIC_AUTH_TOKEN=sk-this-one",
                           "TEMPER_TASK_FILE=/somewhere/task.json"}) {
    EXPECT_NE(environment.find(std::string("\n") + line + "\n"), std::string::npos) << line << environment;
  }
  options.command = {"sh", "-c", "exec sleep 60"};
  options.timeout_s = 0.2;
  EXPECT_EQ((*MakeScaffold(options))->Play(context).kind, Kind::kTimeout);
  options.command = {"true"};
  EXPECT_EQ((*MakeScaffold(options))->Play(context).kind, Kind::kDone);

  // Inside the sandbox the same, with the addresses as they are there.
  options.host = false;
  options.command = {"{build}/agent", "--task", "{task}"};
  options.build_dir = "/b";
  const auto scaffold = *MakeScaffold(options);
  EXPECT_TRUE(scaffold->NeedsRelay());
  (void)scaffold->Play(context);
  EXPECT_EQ(service.asked.id, "box-1");
  ASSERT_EQ(service.asked.argv.size(), 3u);
  std::map<std::string, std::string> env(service.asked.env.begin(), service.asked.env.end());
  EXPECT_EQ(env["OPENAI_API_KEY"], "sk-this-one");
  EXPECT_EQ(env["OPENAI_BASE_URL"], std::string("http://") + sandbox::kRelayAddress + "/v1");
  EXPECT_EQ(env["TEMPER_TASK_FILE"], service.asked.argv[2]);
  const std::vector<sandbox::Mount> mounts = scaffold->Mounts("/host/task.json");
  ASSERT_EQ(mounts.size(), 2u);
  EXPECT_EQ(mounts[0].source, "/host/task.json");
  EXPECT_EQ(mounts[0].target, service.asked.argv[2]);
  EXPECT_EQ(mounts[1].source, "/b/agent");
  EXPECT_EQ(mounts[1].target, service.asked.argv[0]);
}

TEST(MakeScaffold, RefusesByName) {
  ScaffoldOptions options;
  options.kind = "service";
  EXPECT_NE(MakeScaffold(options).status().message().find("service"), std::string::npos);
  options.kind = "command";
  EXPECT_NE(MakeScaffold(options).status().message().find("command"), std::string::npos);
  options.kind = "builtin";
  options.name = "nobody";
  EXPECT_NE(MakeScaffold(options).status().message().find("tool-loop"), std::string::npos);
  options.name = "tool-loop";
  EXPECT_TRUE(MakeScaffold(options).ok());
}

}  // namespace
}  // namespace temper::agents
