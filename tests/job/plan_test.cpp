#include "job/plan.h"

#include <gtest/gtest.h>

#include <map>

#include "common/json.h"

namespace temper::job {
namespace {

Job MakeJob() {
  auto config = Config::Parse(
      "model: {create: {}}\ntasks: {train: {generator: terminal}}\nverifier: {name: f, kind: command, command: [v]}\nalgorithm: {recipe: grpo}\n", "f");
  return *ReadJob(*config);
}

engine::ModelConfig Model() {
  engine::ModelConfig m;
  m.vocab = 400;
  m.layers = 4;
  m.width = 128;
  m.heads = 4;
  m.kv_heads = 2;
  m.head_dim = 32;
  m.ffn = 384;
  m.max_positions = 1024;
  m.eos_ids = {256};
  return m;
}

const Machine kMachine{2, int64_t{8} << 30, {"avx2", "avx512"}};

// A bound that is printed too small is a broken promise: it comes from the pool's own formula.
TEST(Plan, NumbersOfThePool) {
  auto plan = MakePlan(MakeJob(), Model(), kMachine);
  ASSERT_TRUE(plan.ok()) << plan.status().ToString();
  EXPECT_EQ(plan->slots, 32);
  ASSERT_EQ(plan->sources.size(), 1u);
  EXPECT_EQ(plan->sources[0].window, 9);
  EXPECT_EQ(plan->bound, 2);
  EXPECT_EQ(plan->rollouts, 100 * 16 * 8);
  EXPECT_EQ(plan->cpu_path, "avx512");
  EXPECT_GT(plan->parameters, 500000);
  EXPECT_EQ(plan->processes.size(), 8u);
  const std::string text = PrintPlan(MakeJob(), *plan);
  // What a user is told before anything starts: every part with its memory, the ports, the bound, the recipe's source.
  for (const char* said : {"never above 2 updates", "ports        gateway 127.0.0.1:any; everything else on unix sockets", "processes    8, at most ",
                           "objective    recipe as in arXiv 2402.03300",
                           "disk         records of groups that are over: kept; no new rollouts while less than 256 MiB are free"}) {
    EXPECT_NE(text.find(said), std::string::npos) << said << "\n" << text;
  }
  int64_t sum = 0;
  for (const PlannedProcess& process : plan->processes) {
    EXPECT_GT(process.memory_bytes, 0) << process.name;
    EXPECT_NE(text.find("    " + process.name + " "), std::string::npos) << process.name << "\n" << text;
    sum += process.memory_bytes;
  }
  EXPECT_EQ(plan->memory_bytes, sum);
}

// The largest bound is the job's; a source's own share, slots, window and bound must be told beside it.
TEST(Plan, NumbersOfEachSource) {
  auto config = Config::Parse(
      "model: {create: {}}\nalgorithm: {recipe: grpo}\nverifier: {name: f, kind: command, command: [v]}\n"
      "pool: {groups_per_step: 8, staleness: 1, sources: [\n"
      "  {name: math, weight: 3, tasks: {generator: sum}, verifier: {name: first_integer}, window: {policy: greedy}},\n"
      "  {name: shell, tasks: {generator: terminal}, scaffold: {kind: command, command: [a], timeout_s: 7}}]}\n", "f");
  auto job = ReadJob(*config);
  ASSERT_TRUE(job.ok()) << job.status().ToString();
  const Plan plan = MakePlan(*job, Model(), kMachine).value();
  EXPECT_EQ(plan.slots, 16);
  EXPECT_EQ(plan.bound, 3);
  const std::string text = PrintPlan(*job, plan);
  for (const char* said : {"pool         B = 16 slots, staleness S = 1, never above 3 updates\n",
                           "    math         6 of the 8 groups of every batch, B = 12 slots, window W = 12, never above 3 updates\n",
                           "    shell        2 of the 8 groups of every batch, B = 4 slots, window W = 1, never above 1 updates\n",
                           "agents       32 at once; math: tool-loop (builtin), 120 s each; shell: agent (command in its sandbox), 7 s each\n"}) {
    EXPECT_NE(text.find(said), std::string::npos) << said << "\n" << text;
  }
  EXPECT_EQ(PrintJson(ParseJson(PlanToJson(*job, plan))->at("pool")),
            R"({"P":8,"S":1,"B":16,"W":12,"bound":3,"sources":[{"name":"math","P":6,"B":12,"W":12,"bound":3},{"name":"shell","P":2,"B":4,"W":1,"bound":1}]})");
}

// Which rule makes the bound must be told: what an update is, and what several optimizer steps or batches at once do to it.
TEST(Plan, SaysWhatTheStalenessIsCountedIn) {
  Job job = MakeJob();
  auto says = [&](const std::string& expected) {
    const std::string text = PrintPlan(job, MakePlan(job, Model(), kMachine).value());
    const size_t at = text.find("  staleness    ");
    ASSERT_NE(at, std::string::npos) << text;
    EXPECT_EQ(text.substr(at + 15, text.find('\n', at) - at - 15), expected);
  };
  const std::string served = "counted in updates, and an update counts once every worker serves its weights: those on their way add nothing; ";
  says(served + "one optimizer step an update");
  job.trainer.minibatches = 4;
  job.pool.max_leases = 2;
  says(served + "4 optimizer steps an update, so that a token is at most 4·2 + 3 = 11 optimizer steps old; 2 batches out at once are within the bound");
  EXPECT_EQ(PrintJson(ParseJson(PlanToJson(job, MakePlan(job, Model(), kMachine).value()))->at("pool")),
            R"({"P":16,"S":1,"B":32,"W":9,"bound":2,"bound_optimizer_steps":11})");
  job.pool.max_leases = 1;
  job.trainer.minibatches = 2;
  job.trainer.epochs = 3;
  job.algorithm.algorithm.off_policy.decoupled = true;
  says(served + "6 optimizer steps an update (3 epochs of 2), so that a token is at most 6·2 + 5 = 17 optimizer steps old; "
                "logp_old stays that of the weights before the first of them");
}

// A second model could take memory that no plan has counted.
TEST(Plan, CountsTheModelsBesideThePolicy) {
  auto config = Config::Parse(
      "model: {create: {}}\ntasks: {train: {generator: terminal}}\nverifier: {name: f, kind: command, command: [v]}\n"
      "algorithm: {recipe: opd, distillation: {task_reward: true}, advantage: {baseline: group_mean}, kl: {where: loss, coef: 0.1}}\n"
      "trainer: {teacher: models/big}\n", "f");
  auto job = ReadJob(*config);
  ASSERT_TRUE(job.ok()) << job.status().ToString();
  EXPECT_EQ(job->trainer.teacher, "models/big");
  engine::ModelConfig teacher = Model();
  teacher.layers = 12;
  const Plan without = MakePlan(*job, Model(), kMachine).value();
  const Plan with = MakePlan(*job, Model(), kMachine, {Model(), teacher}).value();
  EXPECT_EQ(with.reference_bytes, with.weight_bytes);
  EXPECT_GT(with.teacher_bytes, 2 * with.weight_bytes);
  EXPECT_EQ(with.memory_bytes, without.memory_bytes + with.reference_bytes + with.teacher_bytes);
  const std::string text = PrintPlan(*job, with);
  EXPECT_NE(text.find("reference    the weights of version 0, "), std::string::npos) << text;
  EXPECT_NE(text.find("teacher      models/big, "), std::string::npos) << text;
  EXPECT_EQ(PrintPlan(*job, without).find("teacher"), std::string::npos);
}

// Ranks could take memory that no plan has counted, or be more than have anything to do.
TEST(Plan, CountsTheRanksOfTheTrainer) {
  Job job = MakeJob();
  const Plan one = MakePlan(job, Model(), kMachine).value();
  job.trainer.ranks = 3;
  const Plan three = MakePlan(job, Model(), kMachine).value();
  ASSERT_EQ(three.processes.size(), one.processes.size() + 2);
  std::map<std::string, int64_t> bytes;
  for (const PlannedProcess& process : three.processes) bytes[process.name] = process.memory_bytes;
  // Weights in their compute form, a gradient, activations; not the fp32 weights, both moments and the versions that are served.
  EXPECT_GE(bytes["rank-1"], three.weight_bytes + 4 * three.parameters + three.trainer_memory_bytes);
  EXPECT_EQ(bytes["rank-2"], bytes["trainer"] - 12 * three.parameters - 2 * three.weight_bytes);
  EXPECT_EQ(three.memory_bytes, one.memory_bytes + 2 * bytes["rank-1"]);
  const std::string text = PrintPlan(job, three);
  for (const char* said : {"  ranks        3 trainer processes, each with a part of every batch; ", " in each rank of the trainer (trainer.memory)", "    rank-2 "}) {
    EXPECT_NE(text.find(said), std::string::npos) << said << "\n" << text;
  }
  EXPECT_EQ(PrintPlan(MakeJob(), one).find("ranks"), std::string::npos);
  EXPECT_EQ(ParseJson(PlanToJson(job, three))->at("ranks").as_int64(), 3);
}

// What cannot run must be refused before anything starts.
TEST(Plan, RefusesWhatTheMachineCannotDo) {
  Job job = MakeJob();
  job.cpu = "amx";
  EXPECT_NE(MakePlan(job, Model(), kMachine).status().message().find("cpu: this machine lacks amx"), std::string::npos);
  EXPECT_FALSE(MakePlan(MakeJob(), Model(), {2, 1 << 20, {"avx2"}}).ok());
  EXPECT_FALSE(MakePlan(MakeJob(), Model(), {2, int64_t{8} << 30, {}}).ok());
  job = MakeJob();
  job.rollout.kv_memory_bytes = 1 << 19;
  EXPECT_NE(MakePlan(job, Model(), kMachine).status().message().find("rollout.kv_memory"), std::string::npos);
  job = MakeJob();
  job.sampling.max_tokens = 4096;
  EXPECT_FALSE(MakePlan(job, Model(), kMachine).ok());
}

// The last bits of a gradient follow from the chunks, these from the memory: what else runs on the machine must not enter.
TEST(Plan, AutomaticTrainerMemoryIsAConstantWhereItFits) {
  const auto memory = [](int64_t free) {
    const auto plan = MakePlan(MakeJob(), Model(), {2, free, {"avx2"}});
    return plan.ok() ? plan->trainer_memory_bytes : -1;
  };
  EXPECT_EQ(memory(int64_t{16} << 30), int64_t{4} << 30);
  EXPECT_EQ(memory(int64_t{500} << 30), int64_t{4} << 30);
  EXPECT_EQ(memory(int64_t{2} << 30), int64_t{512} << 20);
  Job job = MakeJob();
  job.trainer.memory_bytes = int64_t{9} << 30;
  EXPECT_NE(MakePlan(job, Model(), {2, int64_t{8} << 30, {"avx2"}}).status().message().find("trainer.memory: 9"), std::string::npos);
  EXPECT_TRUE(MakePlan(job, Model(), {2, int64_t{10} << 30, {"avx2"}}).ok());
}

// The chunk sizes of a resumed job must be those of its first start, whatever memory is free now.
TEST(Plan, StoredPlanIsKept) {
  auto plan = MakePlan(MakeJob(), Model(), kMachine);
  ASSERT_TRUE(plan.ok());
  const std::string stored = PlanToJson(MakeJob(), *plan);
  auto value = ParseJson(stored);
  ASSERT_TRUE(value.ok());
  EXPECT_EQ(PrintJson(value->at("pool")), R"({"P":16,"S":1,"B":32,"W":9,"bound":2})");
  auto later = MakePlan(MakeJob(), Model(), {2, int64_t{4} << 30, {"avx2"}});
  ASSERT_TRUE(later.ok());
  EXPECT_NE(later->trainer_memory_bytes, plan->trainer_memory_bytes);
  ASSERT_TRUE(RestorePlan(stored, &*later).ok());
  EXPECT_EQ(later->trainer_memory_bytes, plan->trainer_memory_bytes);
  EXPECT_FALSE(RestorePlan("{}", &*later).ok());
}

}  // namespace
}  // namespace temper::job
