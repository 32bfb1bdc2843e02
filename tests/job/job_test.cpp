#include "job/job.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "common/file.h"
#include "common/json.h"
#include "common/rng.h"
#include "tests/fuzz/mutate.h"

namespace temper::job {
namespace {

constexpr char kMinimal[] =
    "model: {create: {}}\n"
    "tasks: {train: {generator: terminal}}\n"
    "verifier: {name: files, kind: command, command: [v]}\n"
    "algorithm: {recipe: grpo}\n";

Result<Job> Read(const std::string& yaml, const std::vector<std::string>& sets = {}, std::string* resolved = nullptr) {
  ASSIGN_OR_RETURN(Config config, Config::Parse(yaml, "job.yaml"));
  for (const std::string& set : sets) RETURN_IF_ERROR(config.Set(set));
  auto job = ReadJob(config);
  if (resolved) *resolved = config.ResolvedYaml();
  return job;
}

std::string ErrorOf(const std::vector<std::string>& sets, const std::string& yaml = kMinimal) {
  auto job = Read(yaml, sets);
  return job.ok() ? "" : job.status().message();
}

// A default that changes unnoticed changes every job that relies on it.
TEST(Job, Defaults) {
  auto job = Read(kMinimal);
  ASSERT_TRUE(job.ok()) << job.status().ToString();
  EXPECT_EQ(job->numerics, "bf16");
  EXPECT_EQ(job->pool.P, 16);
  EXPECT_EQ(job->pool.G, 8);
  EXPECT_EQ(job->pool.S, 1);
  EXPECT_EQ(job->pool.retries, 1);
  EXPECT_EQ(job->pool.window.fraction, 0.3);
  EXPECT_FALSE(job->pool.deadline_s);
  EXPECT_FALSE(job->Evaluates());
  EXPECT_EQ(job->sources.at(0).train.count, 4096);
  EXPECT_EQ(job->sources.at(0).scaffold.kind, "builtin");
  EXPECT_EQ(job->optimizer.beta2, 0.95);
  EXPECT_TRUE(job->trainer.prove_tree);
  EXPECT_FALSE(job->trainer.sft);
  EXPECT_EQ(job->sandbox.limits.memory_bytes, 256 << 20);
}

// The resolved file is what roles and a resume read: it must mean the same job and be stable.
TEST(Job, ResolvedFileMeansTheSameJob) {
  std::string first, second;
  const std::vector<std::string> sets = {"tasks.eval={generator: terminal, count: 32}", "trainer.sft={tokens: 1000, poor_fraction: 0.5}",
                                         "sandbox.mounts=[{source: /opt/x, target: /opt/y}]", "pool.deadline_s=60", "pool.window.size=3",
                                         "algorithm={recipe: cispo, dynamic_sampling: off}", "scaffold={kind: command, command: [\"{build}/a\", b]}"};
  auto job = Read(kMinimal, sets, &first);
  ASSERT_TRUE(job.ok()) << job.status().ToString();
  auto again = Read(first, {}, &second);
  ASSERT_TRUE(again.ok()) << again.status().ToString() << "\n" << first;
  EXPECT_EQ(second, first);
  EXPECT_EQ(again->pool.window.size, 3);
  EXPECT_EQ(again->sandbox.mounts.at(0).target, "/opt/y");
  EXPECT_EQ(again->sources.at(0).scaffold.command, job->sources.at(0).scaffold.command);
  EXPECT_EQ(again->algorithm.expanded, job->algorithm.expanded);
  EXPECT_EQ(again->trainer.sft->poor_fraction, 0.5);
}

// A mount given from where the job starts must not be looked for from somewhere else, nor be refused by the sandbox.
TEST(Job, MountsStartWhereTheJobStarts) {
  auto job = Read(kMinimal, {"sandbox.mounts=[{source: ./a/../b, target: /opt/y}, {source: /opt/x, target: /opt/z}]"});
  ASSERT_TRUE(job.ok()) << job.status().ToString();
  EXPECT_EQ(job->sandbox.mounts.at(0).source, std::filesystem::current_path().string() + "/b");
  EXPECT_EQ(job->sandbox.mounts.at(1).source, "/opt/x");
  EXPECT_FALSE(Read(kMinimal, {"sandbox.mounts=[{source: \"\", target: /opt/y}]"}).ok());
}

// Every value must be able to tell whether the user, a recipe or nobody chose it.
TEST(Job, SourcesOfTheAlgorithm) {
  auto config = Config::Parse(kMinimal, "job.yaml");
  ASSERT_TRUE(config.ok());
  ASSERT_TRUE(config->Set("algorithm.loss.clip_high=0.3").ok());
  ASSERT_TRUE(ReadJob(*config).ok());
  std::map<std::string, std::string> sources;
  for (const ConfigEntry& entry : config->entries()) sources[entry.path] = ConfigSourceName(entry.source);
  EXPECT_EQ(sources["algorithm.recipe"], "file");
  EXPECT_EQ(sources["algorithm.loss.clip_high"], "--set");
  EXPECT_EQ(sources["algorithm.advantage.baseline"], "recipe");
  EXPECT_EQ(sources["trainer.steps"], "default");
}

constexpr char kSources[] =
    "model: {create: {}}\n"
    "verifier: {name: files, kind: command, command: [v]}\n"
    "algorithm: {recipe: grpo}\n"
    "scaffold: {max_turns: 3, concurrency: 5}\n"
    "pool:\n"
    "  groups_per_step: 6\n"
    "  sources:\n"
    "    - {name: math, weight: 2, tasks: {generator: sum, count: 9}, eval: {generator: sum, count: 4}, verifier: {name: first_integer}}\n"
    "    - {name: shell, tasks: {generator: terminal}, window: {size: 4}, scaffold: {kind: command, command: [a]}}\n";

// A source could be played or judged as another one is, or its share get lost on the way to the pool.
TEST(Job, EachSourceHasItsOwn) {
  std::string first, second;
  auto job = Read(kSources, {}, &first);
  ASSERT_TRUE(job.ok()) << job.status().ToString();
  for (int again = 0; again < 2; ++again) {
    ASSERT_EQ(job->sources.size(), 2u);
    const Job::Source &math = job->sources[0], &shell = job->sources[1];
    EXPECT_EQ(math.name, "math");
    EXPECT_EQ(math.train.generator, "sum");
    EXPECT_EQ(math.train.count, 9);
    EXPECT_EQ(math.eval->count, 4);
    EXPECT_EQ(math.scaffold.kind, "builtin");
    EXPECT_EQ(math.scaffold.max_turns, 3);
    EXPECT_EQ(math.verifier.name, "first_integer");
    EXPECT_EQ(shell.train.generator, "terminal");
    EXPECT_FALSE(shell.eval);
    EXPECT_EQ(shell.scaffold.command, std::vector<std::string>{"a"});
    EXPECT_EQ(shell.scaffold.max_turns, 16) << "a block of its own is not mixed with the job's";
    EXPECT_EQ(shell.verifier.command, std::vector<std::string>{"v"});
    EXPECT_EQ(job->concurrency, 5);
    EXPECT_TRUE(job->Evaluates());
    ASSERT_EQ(job->pool.sources.size(), 2u);
    EXPECT_EQ(job->pool.sources[0].weight, 2);
    EXPECT_FALSE(job->pool.sources[0].window);
    EXPECT_EQ(job->pool.sources[1].weight, 1);
    EXPECT_EQ(job->pool.sources[1].window->size, 4);
    EXPECT_EQ(datapool::Plan(job->pool).quota, (std::vector<int64_t>{4, 2}));
    // What roles and a resume read.
    job = Read(first, {}, &second);
    ASSERT_TRUE(job.ok()) << job.status().ToString() << "\n" << first;
    EXPECT_EQ(second, first);
  }
  for (const auto& [change, said] : std::vector<std::pair<std::pair<std::string, std::string>, std::string>>{
           {{"name: shell", "name: math"}, "the name math occurs twice"},
           {{"name: shell", "name: \"a b\""}, "pool.sources[1].name: must be 1 to 64 letters"},
           {{"name: shell, ", ""}, "pool.sources[1].name: must be given"},
           {{"tasks: {generator: terminal}, ", ""}, "pool.sources[1].tasks: must be given"},
           {{"weight: 2", "weight: 0"}, "pool.sources[0].weight: 0 is out of range"},
           {{"weight: 2", "wieght: 2"}, "did you mean 'weight'"},
           {{"size: 4", "size: 5"}, "sources.shell.window.size: 5 exceeds the 4 slots"},
           {{"groups_per_step: 6", "groups_per_step: 1"}, "sources: 2 of them, but a batch has only 1"},
           {{"groups_per_step: 6", "groups_per_step: 6\n  slots: 12"}, "pool.slots: has no effect beside several"},
           {{"command: [a]", "command: [a], concurrency: 3"}, "pool.sources[1].scaffold.concurrency: is of the whole job"},
           {{"algorithm:", "tasks: {train: {generator: sum}}\nalgorithm:"}, "tasks: has no effect beside pool.sources"},
           {{"window: {size: 4}, ", "verifier: {name: exact}, "}, "verifier: has no effect: every one of pool.sources"},
           {{"weight: 2", "weight: 2, scaffold: {}"}, "scaffold.max_turns: has no effect: every one of pool.sources"}}) {
    std::string yaml = kSources;
    const size_t at = yaml.find(change.first);
    ASSERT_NE(at, std::string::npos) << change.first;
    yaml.replace(at, change.first.size(), change.second);
    EXPECT_NE(ErrorOf({}, yaml).find(said), std::string::npos) << said << "\n" << ErrorOf({}, yaml);
  }
}

// A mistake that is not refused trains something else than the user meant.
TEST(Job, MistakesAreRefused) {
  EXPECT_EQ(ErrorOf({"trainer.stpes=3"}), "--set trainer.stpes=3: trainer.stpes: unknown key; did you mean 'steps'?");
  EXPECT_EQ(ErrorOf({"trainer.steps=many"}), "--set trainer.steps=many: trainer.steps: expected a whole number, got the text 'many'");
  EXPECT_NE(ErrorOf({"algorithm.loss.clip_lwo=1"}).find("clip_low"), std::string::npos) << ErrorOf({"algorithm.loss.clip_lwo=1"});
  EXPECT_EQ(ErrorOf({"algorithm.loss.clip_lwo=1"}).rfind("--set algorithm.loss.clip_lwo=1: algorithm.loss", 0), 0u)
      << ErrorOf({"algorithm.loss.clip_lwo=1"});
  for (const std::string& set : std::vector<std::string>{
           "pool.slots=3", "pool.window.size=33", "pool.on_deadline=requeue", "pool.retention.consumed=burn", "pool.retention.disk=1GiB", "pool.retention={consumed: drop, disk: 1MiB}",
           "pool.retention.free=-1", "pool.retention.keep=1", "pool.zero_signal=refill", "pool.seed=3",
           "pool.sources=[{name: a}]", "pool.sources=[]", "pool.sources=a", "eval.every=5", "model.path=x", "sampling.top_p=0", "sampling.top_k=1", "sampling.min_p=1", "sampling.repetition_stop=256", "sampling.temperature=0", "sandbox.net=host",
           "scaffold.where=host", "scaffold.kind=service", "scaffold.kind=command", "verifier.kind=library", "verifier.timeout_s=0",
           "tasks.train.folder=x", "tasks.train.jsonl=x", "algorithm.recipe=nonsense", "optimizer.name=sgd",
           "optimizer.warmup_steps=1000", "gateway.control_port=80", "weightsync.transport=rdma", "trainer.memory=1KB", "name=a/b", "seed=-1",
           "model.create.heads=3", "model.create.vocab=words", "trainer.prove_tree=always", "sampling.max_tokens=2000", "rollout.threads=0"}) {
    const std::string error = ErrorOf({set});
    EXPECT_FALSE(error.empty()) << set;
    EXPECT_LT(error.size(), 400u) << error;
    EXPECT_EQ(error.find('\n'), std::string::npos) << error;
  }
  EXPECT_NE(ErrorOf({"pool.window={policy: strict, size: 2}"}).find("policy strict"), std::string::npos);
  EXPECT_NE(ErrorOf({"pool.window={size: 2, fraction: 0.5}"}).find("give one"), std::string::npos);
  EXPECT_NE(ErrorOf({"trainer={tree: off, prove_tree: first_step}"}).find("no effect"), std::string::npos);
  EXPECT_NE(ErrorOf({"trainer.minibatches=3"}).find("cannot be made of 16 groups"), std::string::npos);
  EXPECT_EQ(ErrorOf({"trainer.minibatches=2", "algorithm={recipe: grpo, off_policy: {mode: decoupled, weight: token, weight_max: 2}}"}), "");
  EXPECT_NE(ErrorOf({"trainer.epochs=2", "pool.staleness=0", "algorithm={recipe: reinforce, advantage: {baseline: group_mean}}"}).find("algorithm.loss.kind: reinforce has no importance ratio, and 2 optimizer steps"),
            std::string::npos) << ErrorOf({"trainer.epochs=2", "pool.staleness=0", "algorithm={recipe: reinforce, advantage: {baseline: group_mean}}"});
  EXPECT_NE(ErrorOf({"algorithm.reward={process_coef: 0.5}", "verifier={kind: builtin, name: exact}"}).find("algorithm.reward.process_coef: has no effect"), std::string::npos)
      << ErrorOf({"algorithm.reward={process_coef: 0.5}", "verifier={kind: builtin, name: exact}"});
  EXPECT_EQ(ErrorOf({"algorithm.reward={process_coef: 0.5}"}), "");
  EXPECT_NE(ErrorOf({"trainer.ranks=33", "trainer.minibatches=4"}).find("an optimizer step of 32 rollouts keeps no more ranks than that busy"), std::string::npos);
  EXPECT_EQ(ErrorOf({"trainer.ranks=32", "trainer.minibatches=4"}), "");
  EXPECT_EQ(ErrorOf({"trainer.minibatches=2", "pool.max_leases=2", "optimizer.warmup_steps=200"}), "");
  EXPECT_NE(ErrorOf({"trainer.minibatches=2", "optimizer.warmup_steps=201"}).find("200 optimizer steps"), std::string::npos);
  EXPECT_NE(ErrorOf({}, "name: x\n").find("model.path"), std::string::npos);
  EXPECT_NE(ErrorOf({}, "modle: {path: x}\n").find("did you mean 'model'"), std::string::npos);
}

// The jobs we ship must be readable, or the first thing a user tries fails.
TEST(Job, ShippedJobsAreGood) {
  const std::string folder = std::string(TEMPER_SOURCE_DIR) + "/configs";
  auto names = ListDir(folder);
  ASSERT_TRUE(names.ok()) << names.status().ToString();
  for (const std::string& name : *names) {
    if (name.size() < 5 || name.substr(name.size() - 5) != ".yaml") continue;
    auto config = Config::Load(folder + "/" + name);
    ASSERT_TRUE(config.ok()) << config.status().ToString();
    auto job = ReadJob(*config);
    EXPECT_TRUE(job.ok()) << job.status().ToString();
  }
}

// The settings that the quickstart's numbers stand on could be changed, or a control differ from it in more than what it controls.
// `--set trainer.tree=off` of a job that comes with the project could be refused for what its file says of the tree.
TEST(Job, TheTreeOfEveryConfigCanBeTurnedOff) {
  int configs = 0;
  for (const auto& entry : std::filesystem::directory_iterator(std::string(TEMPER_SOURCE_DIR) + "/configs")) {
    if (entry.path().extension() != ".yaml") continue;
    ++configs;
    auto config = Config::Load(entry.path().string());
    ASSERT_TRUE(config.ok()) << config.status().ToString();
    ASSERT_TRUE(config->Set("trainer.tree=off").ok());
    const auto job = ReadJob(*config);
    if (!job.ok() && job.status().message().find("teacher") != std::string::npos) continue;  // to be given by the user
    ASSERT_TRUE(job.ok()) << job.status().ToString();
    EXPECT_FALSE(job->trainer.tree) << entry.path();
    EXPECT_FALSE(job->trainer.prove_tree) << entry.path();
  }
  EXPECT_GT(configs, 5);
}

TEST(Job, TheQuickstartIsTheJobThatIsPromised) {
  auto entries = [](const std::string& name) {
    auto config = Config::Load(std::string(TEMPER_SOURCE_DIR) + "/configs/" + name + ".yaml");
    EXPECT_TRUE(config.ok()) << config.status().ToString();
    auto job = ReadJob(*config);
    EXPECT_TRUE(job.ok()) << job.status().ToString();
    std::map<std::string, std::string> out;
    for (const ConfigEntry& entry : config->entries()) out[entry.path] = entry.json;
    return std::pair(*job, out);
  };
  const auto [job, settings] = entries("quickstart");
  EXPECT_EQ(settings.at("algorithm.recipe"), "\"cispo\"");
  EXPECT_EQ(settings.at("algorithm.dynamic_sampling"), "\"off\"");
  EXPECT_TRUE(job.model.create);
  ASSERT_TRUE(job.Evaluates());
  EXPECT_EQ(job.sources.at(0).eval->count, 256);
  EXPECT_EQ(settings.at("tasks.eval.split"), "held_out");
  EXPECT_EQ(settings.at("eval.temperature"), "1");
  EXPECT_EQ(settings.at("sampling.temperature"), "1");
  EXPECT_GE(*ParseJson(settings.at("eval.every"))->if_int64(), job.trainer.steps) << "no evaluation on the way, that could decide when to stop";
  ASSERT_TRUE(job.trainer.sft);
  EXPECT_EQ(job.trainer.sft->poor_fraction, 0.5);
  EXPECT_EQ(job.sources.at(0).scaffold.kind, "command");
  EXPECT_LE(job.trainer.steps * job.pool.P * job.pool.G, 8000);
  for (const auto& [control, differs] : std::map<std::string, std::vector<std::string>>{
           {"quickstart-blind", {"name", "scaffold.command"}}, {"quickstart-shuffled", {"name", "trainer.permute_rewards"}},
           // Other losses: nothing but the objective is another one.
           {"quickstart-grpo", {"name"}}, {"quickstart-dr_grpo", {"name"}}, {"quickstart-gspo", {"name"}}, {"quickstart-rloo", {"name"}},
           {"quickstart-opd", {"name"}}}) {
    const auto [other, theirs] = entries(control);
    const bool other_loss = differs.size() == 1;
    std::vector<std::string> found;
    for (const auto& [path, value] : settings) {
      if (other_loss && path.rfind("algorithm.", 0) == 0) continue;
      if (!theirs.count(path) || theirs.at(path) != value) found.push_back(path);
    }
    EXPECT_EQ(found, differs) << control;
    if (!other_loss) {
      EXPECT_EQ(theirs.size(), settings.size()) << control;
    }
    if (other_loss) {
      EXPECT_NE(theirs.at("algorithm.recipe"), settings.at("algorithm.recipe")) << control;
    }
  }
}

// Any value at any key must give a job or an error, never a crash.
TEST(Job, RandomOverridesAreHandled) {
  auto config = Config::Parse(kMinimal, "job.yaml");
  ASSERT_TRUE(ReadJob(*config).ok());
  std::vector<std::string> paths;
  for (const ConfigEntry& entry : config->entries()) paths.push_back(entry.path);
  const std::vector<std::string> values = {"0", "-1", "1", "3", "1e9", "x", "null", "true", "[]", "{}", "[1, 2]", "{a: 1}", "\"5\"", "0.5", "auto", "1KiB",
                                           "99999999999999999999", "nan", "off"};
  Rng rng(3);
  int good = 0;
  for (int i = 0; i < 800; ++i) {
    const std::string set = rng.Pick(paths) + "=" + rng.Pick(values);
    std::string resolved;
    auto job = Read(kMinimal, {set}, &resolved);
    if (!job.ok()) continue;
    ++good;
    auto again = Read(resolved);
    EXPECT_TRUE(again.ok()) << set << ": " << again.status().ToString();
  }
  EXPECT_GT(good, 40);
}

// What could go wrong: a job file that is damaged, or says something odd in any block, crashes the reader, or resolves to a job
// that reads differently.
TEST(Job, SurvivesMutatedFiles) {
  std::vector<std::string> seeds = {kMinimal};
  for (const char* name : {"quickstart", "quickstart-shuffled", "smoke", "smollm2-135m"}) {
    seeds.push_back(*ReadFile(std::string(TEMPER_SOURCE_DIR) + "/configs/" + name + ".yaml"));
  }
  // What the files of the tree leave at its default.
  const std::vector<std::string> sets = {
      "tasks.train={file: tasks.jsonl, split: train}", "tasks.train.count=0", "sandbox.mounts=[{source: /opt/x, target: /opt/y, read_only: true}]",
      "sandbox.cgroups=none", "sandbox.rootfs=/", "pool.window={policy: areal}", "pool.window={size: 3}", "pool.window={policy: strict}",
      "pool.on_deadline=partial", "pool.min_valid=2", "pool.extra=2", "algorithm={recipe: grpo}", "algorithm={recipe: cispo, dynamic_sampling: refill}",
      "algorithm.kl={coef: 0.1}", "optimizer={name: sgd}", "optimizer={schedule: cosine, warmup_steps: 3, clip_norm: null}", "trainer.memory=1GiB",
      "trainer.prove_tree=never", "trainer.prove_tree=always", "trainer.sft=null", "rollout={workers: 2, threads: 3, kv_memory: 64MiB}",
      "gateway={port: 8080, bind: 0.0.0.0}", "verifier={kind: builtin, name: files}", "verifier.failure_reward=-1", "weight_sync.in_flight=span",
      "model={path: /x}", "model={create: {layers: 1, heads: 3}}", "numerics=f32", "scaffold={kind: builtin, name: tool-loop}", "scaffold.kind=service",
      "scaffold={kind: command, command: [x], where: host}", "sampling={temperature: 0}", "eval.every=0", "tasks.eval=null"};
  const std::vector<std::string> words = {"0", "-1", "1", "null", "true", "auto", "1e300", ".nan", "64MiB", "99999999999999999999", "[]", "{}", "{a: 1}",
                                          "grpo", "builtin", "host", "off", "none", "anchored", "1.5", "\"3\"", "&a", "*a", "\n  ", "- "};
  Rng rng(41);
  int accepted = 0, refused = 0;
  for (int i = 0; i < 2500; ++i) {
    const std::string& seed = seeds[rng.Below(seeds.size())];
    std::vector<std::string> some;
    for (uint64_t n = rng.Below(3); n > 0; --n) some.push_back(sets[rng.Below(sets.size())]);
    std::string resolved, again;
    auto job = Read(i % 2 ? Mutated(seed, words, rng) : seed, some, &resolved);
    if (!job.ok()) {
      ++refused;
      EXPECT_FALSE(job.status().message().empty());
      continue;
    }
    ++accepted;
    auto second = Read(resolved, {}, &again);
    ASSERT_TRUE(second.ok()) << second.status().ToString() << "\n" << resolved;
    ASSERT_EQ(again, resolved);
  }
  EXPECT_GT(accepted, 200);
  EXPECT_GT(refused, 200);
}

}  // namespace
}  // namespace temper::job
