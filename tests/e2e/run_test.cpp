// The whole job, once, and everything that must be refused before it starts.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <netinet/in.h>

#include <algorithm>
#include <cmath>

#include "common/config.h"
#include "common/file.h"
#include "common/strings.h"
#include "engine/files/model_file.h"
#include "job/job.h"
#include "job/run_folder.h"
#include "tests/e2e/job_process.h"
#include "tests/harness/tiny_model.h"

namespace temper::e2e {
namespace {

// Any part that does not fit the others shows here: numbers that do not agree, a ledger out of balance, something left behind.
TEST(Run, TheWholeLoop) {
  JobProcess job("whole");
  job.Start();
  ASSERT_EQ(job.Wait(200), 0);
  const json::value summary = job.Summary();
  const JsonRef s(summary);
  for (const char* key : {"steps", "wall_s", "eval_start", "eval_end", "eval_change", "tokens_sampled", "tokens_trained", "tree_tokens", "logical_tokens",
                          "on_policy_tokens", "on_policy_versions", "importance_ratio_max_dev_on_policy", "staleness_max", "staleness_bound",
                          "outcomes", "ledger_balanced", "weight_updates", "tokens_per_s", "numerics", "cpu_paths"}) {
    EXPECT_TRUE(s.Has(key)) << key;
    EXPECT_FALSE(s.Field(key)->is_null()) << key;
  }
  EXPECT_FALSE(summary.at("cpu_paths").as_array().empty());
  EXPECT_NEAR(*s.Field("eval_change")->DoubleOr("mean", 99), *s.DoubleOr("eval_end", 0) - *s.DoubleOr("eval_start", 0), 1e-12);
  EXPECT_EQ(*s.Field("eval_change")->IntOr("unpaired", -1), 0);
  EXPECT_EQ(*s.IntOr("steps", 0), 5);
  EXPECT_LE(*s.DoubleOr("wall_s", 1e9), 60) << "the fast tier runs it whole";
  EXPECT_EQ(*s.IntOr("weight_updates", 0), 5);
  EXPECT_EQ(*s.DoubleOr("importance_ratio_max_dev_on_policy", 1), 0);
  EXPECT_GT(*s.IntOr("on_policy_tokens", 0), 0);
  EXPECT_FALSE(summary.at("on_policy_versions").as_array().empty());
  EXPECT_LE(*s.IntOr("staleness_max", 99), *s.IntOr("staleness_bound", 0));
  EXPECT_TRUE(*s.BoolOr("ledger_balanced", false));
  EXPECT_TRUE(*s.BoolOr("ledger_replayed", false));
  EXPECT_EQ(*s.Field("outcomes")->IntOr("infra_failure", 1), 0);
  EXPECT_GE(*s.IntOr("tokens_sampled", 0), *s.IntOr("tokens_trained", 0));
  EXPECT_GE(*s.IntOr("logical_tokens", 0), *s.IntOr("tree_tokens", 0));
  EXPECT_EQ(job.Remains(), "");
  // Without a reward no weight moves, and every version is the first one: the ratios would be 1 whatever the sync did.
  EXPECT_GT(*s.DoubleOr("eval_start", 0), 0);
  int moved = 0;
  for (const std::string& line : Split(std::string(Trim(job.Read("metrics.jsonl"))), '\n')) {
    moved += *JsonRef(*ParseJson(line)).DoubleOr("grad_norm", 0) > 0;
  }
  EXPECT_GE(moved, 3) << job.Output();

  // The folder of docs/doors.md, and plain lines where there is no terminal: the plan, each step, the end.
  for (const char* file : {"summary.json", "metrics.jsonl", "ledger.jsonl", "eval.jsonl", "sft.jsonl", "job.yaml", "plan.json", "state.json",
                           "lock", "checkpoints/5/checkpoint.json", "logs/trainer.log"}) {
    EXPECT_TRUE(Exists(job.folder() + "/" + file)) << file;
  }
  for (const char* line : {"never above 2 updates", "\nstep 1/5 reward ", "\nstep 5/5 reward ", "\ndone: all 5 steps are done\nheld-out "}) {
    EXPECT_NE(job.Output().find(line), std::string::npos) << line << job.Output();
  }

  std::string output;
  EXPECT_EQ(JobProcess::Door({"pool", "verify", job.folder()}, &output), 0) << output;
  // Each attempt in the ledger that came to its end has a tree that can be shown.
  int shown = 0;
  for (const std::string& line : Split(std::string(Trim(job.Read("ledger.jsonl"))), '\n')) {
    const json::value event = *ParseJson(line);
    const JsonRef e(event);
    const std::string outcome = *e.StringOr("outcome", "");
    if (outcome.empty() || outcome == "aborted") continue;
    const std::string id = std::to_string(*e.IntOr("group", -1)) + "." + std::to_string(*e.IntOr("rollout", -1)) + "." +
                           std::to_string(*e.IntOr("attempt", -1));
    EXPECT_EQ(JobProcess::Door({"trajectory", "show", job.folder(), id, "--json"}, &output), 0) << id << " " << output;
    auto tree = ParseJson(Trim(output));
    ASSERT_TRUE(tree.ok()) << id << " " << output;
    EXPECT_EQ(*JsonRef(*tree).StringOr("outcome", ""), outcome) << id;
    EXPECT_GE(tree->at("nodes").as_array().size(), 2u) << id;
    ++shown;
  }
  EXPECT_GE(shown, 80);
  // The rows of `pool export`: every trained token once, with the logprob it was drawn with, and what its reward says of it.
  EXPECT_EQ(JobProcess::Door({"pool", "export", job.folder()}, &output), 0) << output;
  int64_t trained = 0;
  std::map<int64_t, std::vector<std::pair<double, double>>> gained;  // of each rollout of a group: reward, advantage
  std::map<int64_t, bool> silent;
  std::set<std::pair<int64_t, int64_t>> rollouts;
  for (const std::string& line : Split(std::string(Trim(output)), '\n')) {
    auto parsed = ParseJson(line);
    ASSERT_TRUE(parsed.ok()) << line;
    const json::object& row = parsed->as_object();
    const int64_t group = row.at("group").as_int64();
    double advantage = 0;
    for (const char* key : {"mask", "logprobs", "versions", "advantages"}) ASSERT_EQ(row.at(key).as_array().size(), row.at("ids").as_array().size()) << key;
    for (size_t k = 0; k < row.at("ids").as_array().size(); ++k) {
      if (row.at("mask").as_array()[k].as_int64() == 0) continue;
      ++trained;
      EXPECT_LE(row.at("logprobs").as_array()[k].to_number<double>(), 0);
      EXPECT_GE(row.at("versions").as_array()[k].as_int64(), row.at("version_admitted").as_int64());
      advantage = row.at("advantages").as_array()[k].to_number<double>();
    }
    silent[group] = row.at("silent").as_bool();
    if (rollouts.insert({group, row.at("rollout").as_int64()}).second) gained[group].emplace_back(row.at("reward").to_number<double>(), advantage);
  }
  EXPECT_EQ(trained, *s.IntOr("tokens_trained", 0));
  int with_signal = 0;
  for (const auto& [group, members] : gained) {
    double mean = 0, squares = 0, sum = 0;
    for (const auto& [reward, advantage] : members) mean += reward / static_cast<double>(members.size()), sum += advantage;
    for (const auto& [reward, advantage] : members) squares += (reward - mean) * (reward - mean);
    EXPECT_NEAR(sum, 0, 1e-4) << "group " << group << ": advantages of a group have mean 0";
    // cispo: over the sample deviation of the group.
    const double deviation = members.size() > 1 ? std::sqrt(squares / static_cast<double>(members.size() - 1)) : 0;
    with_signal += deviation > 0;
    EXPECT_EQ(silent.at(group), deviation == 0) << "group " << group;
    for (const auto& [reward, advantage] : members) EXPECT_NEAR(advantage, deviation > 0 ? (reward - mean) / deviation : 0, 1e-4) << group;
  }
  EXPECT_GT(with_signal, 0) << "an export of zeros would pass";
  EXPECT_EQ(JobProcess::Door({"top", job.folder()}, &output), 0) << output;
  EXPECT_NE(output.find("step      5 of 5"), std::string::npos) << output;
  // A folder that is done is not trained again.
  job.Resume();
  EXPECT_EQ(job.Wait(30), 0);
}

// Draws that differ from one evaluation to the next would hide a change of the policy behind luck, and show one where there is none.
TEST(Run, APolicyThatDoesNotMoveIsJudgedAlike) {
  JobProcess job("still");
  job.Start({"--set", "optimizer.lr=1e-30", "--set", "trainer.steps=1"});
  ASSERT_EQ(job.Wait(100), 0) << job.Output();
  const std::vector<std::string> lines = Split(std::string(Trim(job.Read("eval.jsonl"))), '\n');
  ASSERT_EQ(lines.size(), 2u);
  const json::value first = *ParseJson(lines[0]), last = *ParseJson(lines[1]);
  EXPECT_EQ(first.at("rewards"), last.at("rewards"));
  EXPECT_EQ(first.at("tokens_sampled_eval"), last.at("tokens_sampled_eval"));
  EXPECT_GT(*JsonRef(first).DoubleOr("pass_rate", 0), 0);
}

// Tokens drawn from few could be trained as if drawn from all: every ratio would be wrong, and a KL to the start weights not 0 at the start.
TEST(Run, TruncatedSamplingIsTrainedExactly) {
  JobProcess job("truncated");
  job.Start({"--set", "sampling={temperature: 0.9, top_p: 0.95, top_k: 60, min_p: 0.002, max_tokens: 24}", "--set", "trainer.steps=3", "--set",
             "eval.every=3", "--set", "algorithm={recipe: grpo, dynamic_sampling: off, kl: {where: loss, coef: 0.01}}"});
  ASSERT_EQ(job.Wait(200), 0) << job.Output();
  const json::value summary = job.Summary();
  EXPECT_EQ(*JsonRef(summary).DoubleOr("importance_ratio_max_dev_on_policy", 1), 0);
  EXPECT_GT(*JsonRef(summary).IntOr("on_policy_tokens", 0), 100);
  EXPECT_FALSE(summary.at("on_policy_versions").as_array().empty());
  EXPECT_EQ(*JsonRef(summary).Field("outcomes")->IntOr("infra_failure", 1), 0);
  const std::vector<std::string> steps = Split(std::string(Trim(job.Read("metrics.jsonl"))), '\n');
  ASSERT_EQ(steps.size(), 3u);
  EXPECT_EQ(*JsonRef(*ParseJson(steps[0])).DoubleOr("kl_reference", 1), 0);
  EXPECT_GT(*JsonRef(*ParseJson(steps[2])).DoubleOr("kl_reference", 0), 0);
  EXPECT_GT(*JsonRef(*ParseJson(steps[2])).DoubleOr("grad_norm", 0), 0);
  // The sets are in the records: in what is shown, and in the rows for others.
  std::string output;
  EXPECT_EQ(JobProcess::Door({"trajectory", "show", job.folder(), "0.0", "--json"}, &output), 0) << output;
  int cut = 0;
  const json::value tree = *ParseJson(Trim(output));
  for (const json::value& node : tree.at("nodes").as_array()) {
    const json::value* kept = node.as_object().if_contains("kept");
    if (!kept) continue;
    ASSERT_EQ(kept->as_array().size(), node.at("ids").as_array().size());
    for (size_t k = 0; k < kept->as_array().size(); ++k) {
      const json::value& set = kept->as_array()[k];
      if (set.is_null()) continue;
      ++cut;
      EXPECT_NE(std::find(set.as_array().begin(), set.as_array().end(), node.at("ids").as_array()[k]), set.as_array().end());
      EXPECT_LE(set.as_array().size(), 60u);
      EXPECT_EQ(node.at("logprobs").as_array()[k].to_number<double>() == 0, set.as_array().size() == 1);
    }
  }
  EXPECT_GT(cut, 5);
  EXPECT_EQ(JobProcess::Door({"pool", "export", job.folder()}, &output), 1) << "its advantages need the reference";
}

// The built-in loop could end its attempts as failures, never run a command, or not let the policy hear what it printed.
TEST(Run, TheBuiltInLoopPlays) {
  JobProcess job("built_in");
  job.Start({"--set", "trainer.steps=1", "--set", "scaffold={name: tool-loop, kind: builtin, max_turns: 4, timeout_s: 30}"});
  ASSERT_EQ(job.Wait(200), 0) << job.Output();
  const json::value summary = job.Summary();
  EXPECT_EQ(*JsonRef(summary).DoubleOr("importance_ratio_max_dev_on_policy", 1), 0);
  const json::value& outcomes = summary.at("outcomes");
  EXPECT_EQ(*JsonRef(outcomes).IntOr("infra_failure", 1), 0);
  EXPECT_EQ(*JsonRef(outcomes).IntOr("policy_failure", 1), 0);
  EXPECT_GE(*JsonRef(outcomes).IntOr("scored", 0), 8);
  // What a tool says stands between two turns: its mark, its words, the mark of the answer.
  size_t heard = 0;
  for (int i = 0; i < 16; ++i) {
    std::string output;
    EXPECT_EQ(JobProcess::Door({"trajectory", "show", job.folder(), std::to_string(i / 4) + "." + std::to_string(i % 4), "--json"}, &output), 0);
    const json::value tree = *ParseJson(Trim(output));
    for (const json::value& node : tree.at("nodes").as_array()) {
      if (node.at("call").as_int64() > 0 && node.at("provenance") == "context") heard = std::max(heard, node.at("ids").as_array().size());
    }
  }
  EXPECT_GT(heard, 2u);
}

// A refusal must come before anything exists, with exit code 2 and one line that says where.
TEST(Run, BadJobsAreRefusedBeforeTheStart) {
  struct Case {
    std::string set, expected;
  };
  for (const Case& c : std::vector<Case>{{"trainer.stpes=3", "did you mean 'steps'"},
                                         {"trainer.steps=many", "expected a whole number"},
                                         {"pool.slots=2", "pool.slots"},
                                         {"pool.window={size: 99}", "wider than"},
                                         {"algorithm.recipe=nonsense", "algorithm"},
                                         {"verifier={name: exakt, kind: builtin}", "there are: exact"},
                                         {"verifier.command=[\"{build}/nothing\"]", "verifier.command: '{build}/nothing' is not there"},
                                         {"scaffold.command=[\"{build}/nothing\"]", "scaffold.command: '{build}/nothing'"},
                                         {"scaffold={kind: command, where: host, command: [no-such-agent]}", "no-such-agent"},
                                         {"scaffold={kind: builtin, name: loop}", "there is: tool-loop"},
                                         {"sandbox.mounts=[{source: /no/such/folder, target: /opt/x}]", "/no/such/folder"},
                                         {"tasks.eval={jsonl: /no/such/tasks.jsonl}", "tasks.eval.jsonl"}}) {
    JobProcess job("bad");
    job.Start({"--set", c.set});
    EXPECT_EQ(job.Wait(30), 2) << c.set;
    EXPECT_NE(job.Output().find(c.expected), std::string::npos) << job.Output();
    EXPECT_EQ(Split(std::string(Trim(job.Output())), '\n').size(), 1u) << job.Output();
    EXPECT_FALSE(Exists(job.folder())) << c.set;
  }
}

// A dry run must not make anything.
TEST(Run, DryRunOnlyPrints) {
  JobProcess job("dry");
  job.Start({"--dry-run"});
  EXPECT_EQ(job.Wait(30), 0);
  EXPECT_NE(job.Output().find("never above 2 updates"), std::string::npos) << job.Output();
  EXPECT_NE(job.Output().find("algorithm.advantage.baseline"), std::string::npos);
  EXPECT_FALSE(Exists(job.folder()));
}

// "About a million parameters" could become ten.
TEST(Run, TheQuickstartsPolicyIsSmall) {
  JobProcess job("small");
  job.Start({"--dry-run"}, {}, "quickstart.yaml");
  EXPECT_EQ(job.Wait(30), 0);
  const size_t at = job.Output().find("  policy       ");
  ASSERT_NE(at, std::string::npos) << job.Output();
  EXPECT_NEAR(std::strtod(job.Output().c_str() + at + 15, nullptr), 1.0, 0.5) << job.Output();
}

// A port somebody else has: exit code 1, and no folder of a job that never was.
TEST(Run, APortInUseMakesNoFolder) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  ASSERT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(listen(fd, 1), 0);
  ASSERT_EQ(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length), 0);
  const std::string port = std::to_string(ntohs(address.sin_port));
  JobProcess job("port");
  job.Start({"--set", "gateway.port=" + port});
  EXPECT_EQ(job.Wait(30), 1);
  EXPECT_NE(job.Output().find(port), std::string::npos) << job.Output();
  EXPECT_FALSE(Exists(job.folder()));
  close(fd);
}

// A folder in use must not be written into.
TEST(Run, AFolderThatIsNotEmptyIsRefused) {
  JobProcess job("full");
  ASSERT_TRUE(MakeDirs(job.folder()).ok());
  ASSERT_TRUE(WriteFile(job.folder() + "/mine", "x").ok());
  job.Start();
  EXPECT_EQ(job.Wait(30), 2);
  EXPECT_EQ(*ListDir(job.folder()), std::vector<std::string>{"mine"});
}

// A run that is continued from another folder looked for a relative model.path there, and was refused.
TEST(Run, AResumedRunFindsItsModelWhereItBegan) {
  std::string base = testing::TempDir() + "temper_e2e_elsewhere_XXXXXX";
  ASSERT_TRUE(mkdtemp(base.data()));
  const std::string run = base + "/run";
  ASSERT_TRUE(MakeDirs(base + "/began").ok());
  ASSERT_TRUE(MakeDirs(run).ok());
  engine::ModelConfig model = TinyModel(300);
  model.max_positions = 1024;
  ASSERT_TRUE(engine::SaveHuggingFace(base + "/began/model", model, engine::InitParameters(model, 1), {}, engine::FileType::kF32).ok());
  Config config = Config::Parse(
                      "model: {path: model}\ntasks: {train: {generator: terminal}}\nverifier: {name: f, kind: command, command: [v]}\n"
                      "algorithm: {recipe: grpo}\n", "f").value();
  ASSERT_TRUE(job::ReadJob(config).ok());
  ASSERT_TRUE(WriteFile(run + "/job.yaml", config.ResolvedYaml()).ok());
  job::RunState state;
  state.incarnation = 1;
  state.phase = "done";  // all it has to do is to find that out
  state.working_folder = base + "/began";
  ASSERT_TRUE(job::RunFolder(run).WriteState(state).ok());
  std::string output;
  EXPECT_EQ(JobProcess::Door({"run", "--resume", "--out", run}, &output), 0) << output;
  EXPECT_NE(output.find("done already"), std::string::npos) << output;
  EXPECT_TRUE(RemoveAll(base).ok());
}

// A broken verifier must end the job with its words, and never become a reward of 0.
TEST(Run, ABrokenVerifierEndsTheJob) {
  JobProcess job("verifier");
  job.Start({"--set", "verifier.command=[\"/bin/false\"]", "--set", "trainer.sft.tokens=2000"});
  EXPECT_EQ(job.Wait(100), 1);
  const json::value summary = job.Summary();
  EXPECT_NE(JsonRef(summary).StringOr("reason", "")->find("verifier"), std::string::npos) << job.Output();
  EXPECT_EQ(*JsonRef(summary).Field("outcomes")->IntOr("scored", 1), 0);
  EXPECT_EQ(job.Remains(), "");
}

}  // namespace
}  // namespace temper::e2e
