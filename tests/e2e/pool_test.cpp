// Whole jobs whose agents and verifiers do as they are told (tests/harness/told.h), so that a test knows which group is slow, dies or has
// no signal; what the pool made of it stands in the ledger.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "common/clock.h"
#include "common/file.h"
#include "common/strings.h"
#include "tests/e2e/job_process.h"

namespace temper::e2e {
namespace {

constexpr char kCommon[] = R"(name: told
seed: 3
model: {create: {layers: 1, width: 32, heads: 2, kv_heads: 2, ffn: 64, vocab: tasks}}
sampling: {temperature: 1.0, max_tokens: 8}
sandbox: {memory: 96MiB, processes: 24, disk: 8MiB, wall_s: 30, net: none}
optimizer: {name: adamw, lr: 1.0e-4}
rollout: {workers: 1, max_batch: 32}
)";

std::string Scaffold(const std::string& rules) {
  return "{name: told, kind: command, command: [\"{build}/bad-agent\", told, \"" + rules + "\"], where: host, max_turns: 4, timeout_s: 20}";
}
std::string Verifier(const std::string& rules) {
  return "{name: told, kind: command, command: [\"{build}/bad-verifier\", told, \"" + rules + "\"], timeout_s: 20}";
}
// A job of one source: two steps of two groups, on policy, so that the order of things is known.
std::string OneSource(const std::string& agent, const std::string& verifier, const std::string& pool, const std::string& dynamic_sampling = "off") {
  return kCommon + ("tasks: {train: {generator: terminal, count: 64}}\nscaffold: " + Scaffold(agent) + "\nverifier: " + Verifier(verifier) +
                    "\nalgorithm: {recipe: cispo, dynamic_sampling: " + dynamic_sampling + "}\npool: {groups_per_step: 2, staleness: 0, " + pool +
                    "}\ntrainer: {steps: 2, checkpoint_every: 10}\n");
}

class PoolJob {
 public:
  PoolJob(const std::string& name, const std::string& yaml) : job_(name) {
    config_ = job_.folder().substr(0, job_.folder().rfind('/')) + "/job.yaml";
    EXPECT_TRUE(WriteFile(config_, yaml).ok());
  }
  void Start(const std::vector<std::string>& arguments = {}, const std::map<std::string, std::string>& env = {}) { job_.Start(arguments, env, config_); }

  // The job must end well, its ledger balance and lead back to the decisions.
  void ExpectDone() {
    ASSERT_EQ(job_.Wait(150), 0) << job_.Output();
    const json::value summary = job_.Summary();
    EXPECT_TRUE(*JsonRef(summary).BoolOr("ledger_balanced", false));
    EXPECT_TRUE(*JsonRef(summary).BoolOr("ledger_replayed", false));
    EXPECT_LE(*JsonRef(summary).IntOr("staleness_max", 99), *JsonRef(summary).IntOr("staleness_bound", -1));
    EXPECT_EQ(*JsonRef(summary).DoubleOr("importance_ratio_max_dev_on_policy", 1), 0);
    std::string output;
    EXPECT_EQ(JobProcess::Door({"pool", "verify", job_.folder()}, &output), 0) << output;
    EXPECT_EQ(job_.Remains(), "");
    ledger_ = ParseLines("ledger.jsonl");
  }

  std::vector<json::object> ParseLines(const std::string& file) const {
    std::vector<json::object> lines;
    for (const std::string& line : Split(std::string(Trim(job_.Read(file))), '\n')) {
      if (auto value = ParseJson(line); value.ok()) lines.push_back(value->as_object());
    }
    return lines;
  }
  // Ledger lines in which these fields have these values, in order.
  std::vector<json::object> Find(const json::object& fields) const {
    std::vector<json::object> found;
    for (const json::object& line : ledger_) {
      const bool fits = std::all_of(fields.begin(), fields.end(), [&](const auto& f) { return line.contains(f.key()) && line.at(f.key()) == f.value(); });
      if (fits) found.push_back(line);
    }
    return found;
  }
  std::set<int64_t> Trained() const {
    std::set<int64_t> groups;
    for (const json::object& line : Find({{"event", "consume"}})) groups.insert(line.at("group").as_int64());
    return groups;
  }
  // What was sampled for each rollout that was trained, by `pool export`.
  std::map<std::pair<int64_t, int64_t>, std::string> Tokens() const {
    std::map<std::pair<int64_t, int64_t>, std::string> tokens;
    std::string output;
    EXPECT_EQ(JobProcess::Door({"pool", "export", job_.folder()}, &output), 0) << output;
    for (const std::string& line : Split(std::string(Trim(output)), '\n')) {
      const json::value row = *ParseJson(line);
      tokens[{row.at("group").as_int64(), row.at("rollout").as_int64()}] += PrintJson(row.at("ids")) + PrintJson(row.at("logprobs"));
    }
    return tokens;
  }
  int64_t Tombstoned(const char* reason) const {
    const json::value summary = job_.Summary();
    return *JsonRef(summary.at("groups").at("tombstoned")).IntOr(reason, 0);
  }
  // Until the agents of so many attempts have had their answer from the model and sleep.
  bool WaitForAttempts(int attempts) {
    for (int i = 0; i < 1000; ++i) {
      auto files = ListDir(job_.folder() + "/attempts");
      if (files.ok() && static_cast<int>(files->size()) >= attempts) {
        SystemClock::Get().SleepS(0.7);
        return true;
      }
      SystemClock::Get().SleepS(0.02);
    }
    return false;
  }

  JobProcess& job() { return job_; }

 private:
  JobProcess job_;
  std::string config_;
  std::vector<json::object> ledger_;
};

double Number(const json::value& value) { return value.to_number<double>(); }

// ---- sources

// Two sources with their own agents and verifiers in one job, stopped and resumed: a batch could have another mixture than the plan says,
// a task be played or judged as one of the other source, or a resumed job lose its place in one of them.
TEST(PoolJobs, TwoSourcesHaveTheirSharesInEveryBatch) {
  PoolJob told("two_sources", std::string(kCommon) + R"(algorithm: {recipe: cispo, dynamic_sampling: off}
pool:
  groups_per_step: 3
  staleness: 1
  group_size: 2
  sources:
    - {name: math, weight: 2, tasks: {generator: sum, count: 5}, eval: {generator: sum, count: 2, split: held_out}, window: {policy: greedy},
       scaffold: {kind: builtin, max_turns: 1, timeout_s: 20}, verifier: )" + Verifier("*.*.*=7") + R"(}
    - {name: shell, tasks: {generator: terminal, count: 64}, scaffold: )" + Scaffold("*.1.1=exits-3;*.*.*=sleeps:0.4") + R"(, verifier: )" +
                                  Verifier("") + R"(}
trainer: {steps: 6, checkpoint_every: 2}
)");
  JobProcess& job = told.job();
  told.Start();
  ASSERT_TRUE(job.WaitSteps(2, 120)) << job.Output();
  std::string output;
  EXPECT_EQ(JobProcess::Door({"top", job.folder()}, &output), 0) << output;
  EXPECT_NE(output.find("\nwindow    math   W = 4  "), std::string::npos) << output;
  EXPECT_NE(output.find("\n          shell  W = 1  "), std::string::npos) << output;
  EXPECT_NE(output.find(" of 1 taken, "), std::string::npos) << output;
  job.Signal(SIGINT);
  ASSERT_EQ(job.Wait(30), 130) << job.Output();
  job.Resume();
  told.ExpectDone();

  for (const char* line : {"B = 6 slots, staleness S = 1, never above 3 updates\n", "math         2 of the 3 groups of every batch, B = 4 slots, window W = 4, never above 3 updates\n",
                           "shell        1 of the 3 groups of every batch, B = 2 slots, window W = 1, never above 1 updates\n"}) {
    EXPECT_NE(job.Output().find(line), std::string::npos) << line << job.Output();
  }
  std::map<int64_t, std::string> source_of;
  std::map<std::string, int64_t> tasks;
  for (const json::object& admit : told.Find({{"event", "admit"}})) {
    const std::string source(admit.at("source").as_string());
    source_of[admit.at("group").as_int64()] = source;
    EXPECT_EQ(admit.at("task").as_int64(), tasks[source]++) << "each source counts its own tasks";
  }
  std::set<int64_t> steps;
  for (const json::object& lease : told.Find({{"event", "lease"}})) {
    std::map<std::string, int> shares;
    for (const json::value& group : lease.at("groups").as_array()) ++shares[source_of.at(group.as_int64())];
    EXPECT_EQ(shares, (std::map<std::string, int>{{"math", 2}, {"shell", 1}}));
    steps.insert(lease.at("step").as_int64());
  }
  EXPECT_EQ(steps, (std::set<int64_t>{1, 2, 3, 4, 5, 6}));
  EXPECT_FALSE(told.Find({{"event", "recover"}, {"who", "job"}}).empty()) << "it was stopped and resumed";
  EXPECT_EQ(told.Trained().size(), 18u);

  // Who was played by which agent, who was judged by which verifier.
  std::set<std::string> failed;
  for (const json::object& outcome : told.Find({{"event", "outcome"}, {"outcome", "infra_failure"}})) failed.insert(source_of.at(outcome.at("group").as_int64()));
  EXPECT_EQ(failed, std::set<std::string>{"shell"});
  for (const json::object& line : told.ParseLines("metrics.jsonl")) {
    const json::object& sources = line.at("sources").as_object();
    EXPECT_EQ(Number(sources.at("math").at("reward_mean")), 7);
    EXPECT_EQ(Number(sources.at("shell").at("reward_mean")), 1.5);
    EXPECT_EQ(sources.at("math").at("groups").as_int64(), 2);
    EXPECT_EQ(sources.at("shell").at("groups").as_int64(), 1);
  }
  const std::vector<json::object> evaluations = told.ParseLines("eval.jsonl");
  ASSERT_EQ(evaluations.size(), 2u);
  EXPECT_EQ(evaluations[0].at("rewards").as_array(), (json::array{7, 7})) << "tasks of the one source that has some, judged by its verifier";

  const json::value summary = job.Summary();
  EXPECT_EQ(summary.at("sources").at("math").at("consumed").as_int64(), 12);
  EXPECT_EQ(summary.at("sources").at("shell").at("consumed").as_int64(), 6);
  EXPECT_EQ(summary.at("sources").at("math").at("staleness_bound").to_number<int64_t>(), 3);
  EXPECT_LE(summary.at("sources").at("shell").at("staleness_max").as_int64(), 1);
  EXPECT_EQ(PrintJson(ParseJson(job.Read("plan.json"))->at("pool")),
            R"({"P":3,"S":1,"B":6,"W":4,"bound":3,"sources":[{"name":"math","P":2,"B":4,"W":4,"bound":3},{"name":"shell","P":1,"B":2,"W":1,"bound":1}]})");
  EXPECT_EQ(JobProcess::Door({"pool", "verify", job.folder()}, &output), 0);
  EXPECT_NE(output.find(R"("shell":{"of_every_step":1,"admitted":)"), std::string::npos) << output;
  EXPECT_EQ(JobProcess::Door({"pool", "ls", job.folder()}, &output), 0);
  EXPECT_NE(output.find(R"("source":"shell","task":0,)"), std::string::npos) << output;
  EXPECT_EQ(JobProcess::Door({"pool", "explain", job.folder(), "4"}, &output), 0);
  EXPECT_NE(output.find(R"("event":"admit","group":4,"source":"shell","task":0)"), std::string::npos) << output;
  EXPECT_EQ(JobProcess::Door({"pool", "sim", "--ledger", job.folder()}, &output), 0) << output;
  EXPECT_NE(output.find(R"({"recommend":)"), std::string::npos) << output;
}

// A source that is broken could hide behind one that is not: every second attempt succeeds, and no row of failures gets long.
TEST(PoolJobs, ABrokenSourceEndsTheJobByItsName) {
  PoolJob told("broken_source", std::string(kCommon) + R"(algorithm: {recipe: cispo, dynamic_sampling: off}
pool:
  groups_per_step: 2
  staleness: 1
  group_size: 2
  sources:
    - {name: well, tasks: {generator: terminal, count: 64}, scaffold: )" + Scaffold("") + R"(}
    - {name: broken, tasks: {generator: terminal, count: 64}, scaffold: )" + Scaffold("*.*.*=exits-3") + R"(}
verifier: )" + Verifier("") + R"(
trainer: {steps: 6, checkpoint_every: 2}
)");
  told.Start();
  EXPECT_EQ(told.job().Wait(100), 1) << told.job().Output();
  const json::value summary = told.job().Summary();
  EXPECT_NE(JsonRef(summary).StringOr("reason", "")->find("6 infrastructure failures in a row of source 'broken', cause 'agent_exit'"), std::string::npos)
      << PrintJson(summary);
  EXPECT_TRUE(*JsonRef(summary).BoolOr("ledger_balanced", false));
}

// ---- several batches out, several optimizer steps on each

// The trainer dies with one batch in its hands and the next one leased ahead: both come back with their members, nothing is trained twice,
// and the stated bound holds in updates and in optimizer steps.
TEST(PoolJobs, TwoBatchesOutComeBackAfterACrash) {
  PoolJob told("ahead", std::string(kCommon) + "tasks: {train: {generator: terminal, count: 64}}\nscaffold: " + Scaffold("") + "\nverifier: " + Verifier("") +
                            "\nalgorithm: {recipe: cispo, dynamic_sampling: off}\npool: {groups_per_step: 2, staleness: 2, group_size: 2, max_leases: 2}\n"
                            "trainer: {steps: 6, checkpoint_every: 2, minibatches: 2}\n");
  told.Start({}, {{"TEMPER_FAULTS", "trainer.before_update=exit@4"}});
  told.ExpectDone();
  EXPECT_NE(told.job().Output().find("never above 2 updates"), std::string::npos) << told.job().Output();
  EXPECT_NE(told.job().Output().find("at most 2·2 + 1 = 5 optimizer steps old; 2 batches out at once"), std::string::npos) << told.job().Output();
  EXPECT_EQ(told.Trained().size(), 12u);
  EXPECT_EQ(told.Find({{"event", "rollback"}, {"step", 2}}).size(), 1u);
  int asked_ahead = 0, came_back = 0;
  for (int64_t step = 1; step <= 6; ++step) {
    const std::vector<json::object> leases = told.Find({{"event", "lease"}, {"step", step}});
    ASSERT_FALSE(leases.empty());
    for (const json::object& lease : leases) EXPECT_EQ(lease.at("groups"), leases[0].at("groups"));
    came_back += leases.size() > 1;
    const std::vector<json::object> before = told.Find({{"event", "consume"}, {"step", step - 1}});
    asked_ahead += !before.empty() && leases[0].at("seq").as_int64() < before[0].at("seq").as_int64();
  }
  EXPECT_GE(came_back, 2) << "the one that was trained, and the one leased ahead";
  EXPECT_GE(asked_ahead, 1);
  int64_t stalest = 0;
  for (const json::object& line : told.ParseLines("metrics.jsonl")) {
    EXPECT_LE(line.at("staleness_max").as_int64(), 2);
    stalest = std::max(stalest, line.at("staleness_steps_max").as_int64());
  }
  EXPECT_LE(stalest, 5);
  EXPECT_GE(stalest, 3) << "with S = 2 the third batch was admitted before the first update";
}

// ---- the head of the line

TEST(PoolJobsLong, OnDeadlineWait) {
  PoolJob told("wait", OneSource("0.0.1=sleeps:2.5", "", "group_size: 2, deadline_s: 1, on_deadline: wait"));
  told.Start();
  told.ExpectDone();
  EXPECT_EQ(told.Trained(), (std::set<int64_t>{0, 1, 2, 3}));
  const std::vector<json::object> late = told.Find({{"event", "outcome"}, {"group", 0}, {"rollout", 0}});
  ASSERT_EQ(late.size(), 1u);
  EXPECT_EQ(late[0].at("outcome").as_string(), "scored");
  EXPECT_GT(Number(late[0].at("t")), Number(told.Find({{"event", "admit"}, {"group", 0}})[0].at("t")) + 2.5);
  EXPECT_EQ(told.Tombstoned("deadline"), 0);
}

TEST(PoolJobs, OnDeadlineTombstone) {
  PoolJob told("tombstone", OneSource("0.*.*=hangs", "", "group_size: 2, deadline_s: 3, on_deadline: tombstone"));
  told.Start();
  told.ExpectDone();
  EXPECT_EQ(told.Trained(), (std::set<int64_t>{1, 2, 3, 4}));
  EXPECT_EQ(told.Tombstoned("deadline"), 1);
  const std::vector<json::object> dead = told.Find({{"event", "tombstone"}, {"group", 0}, {"reason", "deadline"}});
  ASSERT_EQ(dead.size(), 1u);
  const double admitted = Number(told.Find({{"event", "admit"}, {"group", 0}})[0].at("t"));
  EXPECT_NEAR(Number(dead[0].at("t")), admitted + 3, 1e-6) << "at the deadline itself, whenever the pool looked";
  EXPECT_EQ(told.Find({{"event", "outcome"}, {"group", 0}, {"outcome", "aborted"}, {"reason", "deadline"}}).size(), 2u);
  // Its slot is free at once.
  const json::object next = told.Find({{"event", "admit"}, {"group", 2}})[0];
  EXPECT_EQ(next.at("seq").as_int64(), dead[0].at("seq").as_int64() + 1);
  EXPECT_EQ(next.at("t"), dead[0].at("t"));
}

// Everything sampled is thrown away, the task gets one more group at the tail, and a second deadline buries it.
TEST(PoolJobs, OnDeadlineRequeueOnce) {
  PoolJob told("requeue", OneSource("0.1.*=hangs;2.1.*=hangs", "", "group_size: 2, deadline_s: 3, on_deadline: requeue"));
  told.Start();
  told.ExpectDone();
  EXPECT_EQ(told.Trained(), (std::set<int64_t>{1, 3, 4, 5}));
  EXPECT_EQ(told.Tombstoned("requeued"), 1);
  EXPECT_EQ(told.Tombstoned("deadline"), 1);
  EXPECT_EQ(told.Find({{"event", "outcome"}, {"group", 0}, {"rollout", 0}, {"outcome", "scored"}}).size(), 1u) << "and is trained nowhere";
  const json::object first = told.Find({{"event", "admit"}, {"group", 0}})[0], again = told.Find({{"event", "admit"}, {"group", 2}})[0];
  EXPECT_EQ(again.at("from").as_int64(), 0);
  EXPECT_EQ(again.at("task"), first.at("task"));
  EXPECT_EQ(told.Find({{"event", "issue"}, {"group", 2}, {"attempt", 1}}).size(), 2u) << "both rollouts anew";
  EXPECT_EQ(told.Find({{"event", "tombstone"}, {"group", 2}, {"reason", "deadline"}}).size(), 1u);
  EXPECT_EQ(told.Find({{"event", "admit"}, {"from", 2}}).size(), 0u) << "once";
}

// With enough valid rollouts the deadline makes a smaller group of what is there.
TEST(PoolJobsLong, MinValidTrainsAPartialGroup) {
  PoolJob told("min_valid", OneSource("0.2.*=hangs", "", "group_size: 3, min_valid: 2, deadline_s: 3"));
  told.Start();
  told.ExpectDone();
  EXPECT_EQ(told.Trained(), (std::set<int64_t>{0, 1, 2, 3}));
  EXPECT_EQ(told.Find({{"event", "outcome"}, {"group", 0}, {"rollout", 2}, {"outcome", "aborted"}, {"reason", "deadline"}}).size(), 1u);
  const std::vector<json::object> steps = told.ParseLines("metrics.jsonl");
  ASSERT_EQ(steps.size(), 2u);
  EXPECT_EQ(steps[0].at("rollouts").as_int64(), 5);
  EXPECT_NEAR(Number(steps[0].at("reward_mean")), (1 + 2 + 1 + 2 + 3) / 5.0, 1e-12);
  EXPECT_EQ(steps[1].at("rollouts").as_int64(), 6);
}

// ---- more rollouts than a group needs; groups without a signal

// The slowest rollout of three is cut as soon as two are valid. What is trained is then shorter than what was drawn, which is told.
TEST(PoolJobsLong, SparesAreCutAndTheBiasIsTold) {
  PoolJob told("extra", OneSource("*.2.*=sleeps:10;*.1.*=sleeps:0.6", "", "group_size: 2, extra: 1"));
  told.Start();
  told.ExpectDone();
  for (int64_t group : told.Trained()) {
    EXPECT_EQ(told.Find({{"event", "issue"}, {"group", group}}).size(), 3u);
    EXPECT_EQ(told.Find({{"event", "outcome"}, {"group", group}, {"rollout", 2}, {"outcome", "aborted"}, {"reason", "extra"}}).size(), 1u) << group;
  }
  for (const json::object& step : told.ParseLines("metrics.jsonl")) EXPECT_EQ(step.at("rollouts").as_int64(), 4);
  const double bias = Number(told.job().Summary().at("length_bias"));
  EXPECT_LT(bias, 0.97);
  EXPECT_GT(bias, 0.3);
}

// A group of equal rewards is buried with its last outcome, and its slot is taken by a new group in the same breath.
TEST(PoolJobs, AGroupWithoutSignalIsReplacedAtOnce) {
  PoolJob told("refill", OneSource("", "1.*.*=0.5", "group_size: 2", "refill"));
  told.Start();
  told.ExpectDone();
  EXPECT_EQ(told.Trained(), (std::set<int64_t>{0, 2, 3, 4}));
  EXPECT_EQ(told.Tombstoned("zero_signal"), 1);
  const std::vector<json::object> ends = told.Find({{"event", "outcome"}, {"group", 1}});
  ASSERT_EQ(ends.size(), 2u);
  const int64_t last = ends[1].at("seq").as_int64();
  const std::vector<json::object> dead = told.Find({{"event", "tombstone"}, {"group", 1}, {"reason", "zero_signal"}});
  ASSERT_EQ(dead.size(), 1u);
  EXPECT_EQ(dead[0].at("seq").as_int64(), last + 1);
  const json::object next = told.Find({{"event", "admit"}, {"group", 2}})[0];
  EXPECT_EQ(next.at("seq").as_int64(), last + 2);
  EXPECT_EQ(next.at("version_admitted").as_int64(), 0);
  std::string output;
  EXPECT_EQ(JobProcess::Door({"pool", "tasks", told.job().folder()}, &output), 0);
  EXPECT_NE(output.find(R"("task":1,"groups":1,"trained":0,"zero_signal":1,"buried":1)"), std::string::npos) << output;
}

// ---- restarts while agents play

// One step of two groups, whose agents have had their answer and sleep when a part of the job is killed.
struct Interrupted {
  PoolJob told{"interrupted", OneSource("*.*.*=sleeps:2", "", "group_size: 2")};
  explicit Interrupted(const char* role) {
    told.Start({"--set", "trainer.steps=1"});
    EXPECT_TRUE(told.WaitForAttempts(4)) << told.job().Output();
    if (std::string(role) == "supervisor") {
      told.job().Signal(SIGKILL);
      EXPECT_EQ(told.job().Wait(10), 128 + SIGKILL);
      EXPECT_EQ(told.job().Remains(), "");
      told.job().Resume();
    } else if (*role) {
      const pid_t pid = told.job().RolePid(role);
      EXPECT_GT(pid, 0);
      kill(pid, SIGKILL);
    }
    told.ExpectDone();
  }
};

// A restart of the pool could lose rollouts in flight, or have them played twice; what must be played again could draw other tokens, and
// a group then hold what no uninterrupted run would.
TEST(PoolJobsLong, RolloutsInFlightSurviveOrAreReissuedWithTheSameSeed) {
  const auto undisturbed = Interrupted("").told.Tokens();
  ASSERT_EQ(undisturbed.size(), 4u);
  {
    const Interrupted pool("pool");
    EXPECT_EQ(pool.told.Find({{"event", "recover"}, {"who", "pool"}}).size(), 1u);
    EXPECT_EQ(pool.told.Find({{"event", "issue"}, {"attempt", 2}}).size(), 0u) << "the agents still live: their sessions go on";
    for (int64_t group : {0, 1}) {
      EXPECT_EQ(pool.told.Find({{"event", "outcome"}, {"group", group}, {"attempt", 1}, {"outcome", "scored"}}).size(), 2u);
    }
    EXPECT_EQ(pool.told.Tokens(), undisturbed);
  }
  for (const auto& [role, reason] : std::map<std::string, std::string>{{"agents", "agents_restart"}, {"supervisor", "supervisor"}}) {
    const Interrupted other(role.c_str());
    for (int64_t group : {0, 1}) {
      EXPECT_EQ(other.told.Find({{"event", "outcome"}, {"group", group}, {"attempt", 1}, {"outcome", "aborted"}, {"reason", reason}}).size(), 2u) << role;
      EXPECT_EQ(other.told.Find({{"event", "issue"}, {"group", group}, {"attempt", 2}}).size(), 2u) << role << ": within their group";
      EXPECT_EQ(other.told.Find({{"event", "outcome"}, {"group", group}, {"attempt", 2}, {"outcome", "scored"}}).size(), 2u) << role;
    }
    EXPECT_EQ(other.told.Trained(), (std::set<int64_t>{0, 1})) << role;
    EXPECT_EQ(other.told.Tokens(), undisturbed) << role << ": the same seed";
  }
}

}  // namespace
}  // namespace temper::e2e
