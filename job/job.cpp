#include "job/job.h"

#include <algorithm>
#include <filesystem>

#include "common/json.h"
#include "common/strings.h"

namespace temper::job {
namespace {

constexpr char kNameRule[] = "must be 1 to 64 letters, digits, '.', '_' or '-'";

bool IsName(const std::string& text) {
  return !text.empty() && text.size() <= 64 &&
         text.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") == std::string::npos;
}

constexpr char kNotBuilt[] = "is documented but not built into this version";

void ReadModel(ConfigBlock root, Job* job) {
  ConfigBlock model = root.Block("model");
  if (model.Has("create") && model.Has("path")) {
    model.Fail("create", "has no effect beside model.path; give one of the two");
  }
  if (model.Has("create")) {
    model.Refuse("path", "has no effect beside model.create");
    ConfigBlock block = model.Block("create");
    Job::Create create;
    auto size = [&](const char* key, int fallback, double max) {
      return static_cast<int>(block.Int(key, fallback, {.min = 1, .max = max}));
    };
    create.layers = size("layers", create.layers, 256);
    create.width = size("width", create.width, 16384);
    create.heads = size("heads", create.heads, 256);
    create.kv_heads = size("kv_heads", std::min(create.kv_heads, create.heads), 256);
    create.ffn = size("ffn", create.ffn, 65536);
    create.max_positions = size("max_positions", create.max_positions, 1 << 20);
    block.Choice("vocab", "tasks", {"tasks"});
    if (create.width % create.heads != 0) block.Fail("heads", "must divide model.create.width (" + std::to_string(create.width) + ")");
    else if (create.width / create.heads % 2 != 0) block.Fail("heads", "leaves an odd head size; rotary positions need an even one");
    if (create.heads % create.kv_heads != 0) block.Fail("kv_heads", "must divide model.create.heads (" + std::to_string(create.heads) + ")");
    block.Finish();
    job->model.create = create;
  } else {
    model.Require("path", "a model folder, a GGUF file, a checkpoint or a fetched name (or model.create, a new policy)");
    job->model.path = model.Has("path") ? model.String("path", "") : "";
    if (model.Has("path") && job->model.path.empty()) model.Fail("path", "is empty");
    model.Refuse("create", "has no effect beside model.path");
  }
  model.Finish();
}

TaskList ReadTaskList(ConfigBlock block, bool evaluation) {
  TaskList list;
  list.key = block.path();
  int kinds = 0;
  for (const char* key : {"generator", "jsonl", "command", "folder"}) kinds += block.Has(key);
  block.Refuse("command", kNotBuilt);
  block.Refuse("folder", kNotBuilt);
  if (kinds > 1) block.Fail("", "give one of generator, jsonl, command, folder");
  if (block.Has("jsonl")) {
    list.jsonl = block.String("jsonl", "");
    block.Refuse("count", "has no effect with jsonl: the file has as many tasks as lines");
    block.Refuse("split", "has no effect with jsonl: give two files");
    block.Refuse("generator", "has no effect beside jsonl");
  } else {
    if (kinds == 0) block.Fail("", "must say where tasks come from: generator or jsonl");
    list.generator = block.Choice("generator", "terminal", {"terminal", "sum"});
    list.count = block.Int("count", evaluation ? 256 : 4096, {.min = 1, .max = 1e9});
    list.held_out = block.Choice("split", evaluation ? "held_out" : "train", {"train", "held_out"}) == "held_out";
    block.Refuse("jsonl", "has no effect beside a generator");
  }
  block.Finish();
  return list;
}

// The training tasks under `train_key` of a block, and `eval` beside them.
void ReadSourceTasks(ConfigBlock& block, const char* train_key, Job::Source* out) {
  block.Require(train_key, "the tasks to train on");
  ConfigBlock train = block.Block(train_key);
  if (train.present()) out->train = ReadTaskList(train, false);
  ConfigBlock eval = block.Block("eval");
  if (eval.present()) out->eval = ReadTaskList(eval, true);
}

// `kind` of a scaffold or verifier, and the program that a command is.
std::string ReadKind(ConfigBlock& block, std::vector<std::string>* command) {
  const std::string kind = block.Choice("kind", "builtin", {"builtin", "command", "service", "library"});
  if (kind == "service" || kind == "library") block.Fail("kind", "'" + kind + "' " + kNotBuilt);
  if (kind != "command") return kind;
  block.Require("command", "the program to run, as a list");
  *command = block.Strings("command");
  if (block.Has("command") && command->empty()) block.Fail("command", "is empty");
  return kind;
}

Job::Scaffold ReadScaffold(ConfigBlock& block) {
  Job::Scaffold out;
  out.key = block.path();
  out.kind = ReadKind(block, &out.command);
  out.name = block.String("name", out.kind == "builtin" ? "tool-loop" : "agent");
  if (out.kind == "command") {
    out.host = block.Choice("where", "sandbox", {"sandbox", "host"}) == "host";
    out.exit_is_policy = block.Choice("on_exit", "infra", {"infra", "policy"}) == "policy";
  } else {
    for (const char* key : {"command", "where", "on_exit"}) block.Refuse(key, "is read with kind: command only");
  }
  out.max_turns = static_cast<int>(block.Int("max_turns", 16, {.min = 0, .max = 100000}));
  out.timeout_s = block.Double("timeout_s", 120, {.min = 0, .max = 1e6, .above = true});
  return out;
}

void ReadSampling(ConfigBlock root, Job* job) {
  ConfigBlock block = root.Block("sampling");
  job->sampling.temperature = block.Double("temperature", 1, {.min = 0, .max = 100, .above = true});
  job->sampling.top_p = block.Double("top_p", 1, {.min = 0, .max = 1, .above = true});
  job->sampling.top_k = block.Int("top_k", 0, {.min = 0, .max = 1 << 30});
  job->sampling.min_p = block.Double("min_p", 0, {.min = 0, .max = 1});
  constexpr char kNoChoice[] = "leaves one token to draw, whose logprob is 0 whatever the weights are: nothing could be trained";
  if (job->sampling.top_k == 1) block.Fail("top_k", kNoChoice);
  if (job->sampling.min_p == 1) block.Fail("min_p", kNoChoice);
  job->sampling.repetition_stop = block.Int("repetition_stop", 0, {.min = 0, .max = 1 << 20});
  job->sampling.max_tokens = block.Int("max_tokens", 256, {.min = 1, .max = 1 << 20});
  if (job->sampling.repetition_stop >= job->sampling.max_tokens) {
    block.Fail("repetition_stop",
               "has no effect: a call ends after max_tokens (" + std::to_string(job->sampling.max_tokens) + ") as it is");
  }
  block.Finish();
}

void ReadSandbox(ConfigBlock root, Job* job) {
  ConfigBlock block = root.Block("sandbox");
  sandbox::Limits& limits = job->sandbox.limits;
  limits.memory_bytes = block.Size("memory", limits.memory_bytes, {.min = 8 << 20});
  limits.processes = block.Int("processes", limits.processes, {.min = 2, .max = 4194304});
  limits.disk_bytes = block.Size("disk", limits.disk_bytes, {.min = 1 << 20});
  limits.files = block.Int("files", limits.files, {.min = 16});
  limits.cpu_s = block.Double("cpu_s", limits.cpu_s, {.min = 0});
  limits.wall_s = block.Double("wall_s", limits.wall_s, {.min = 0, .above = true});
  limits.output_bytes = block.Size("output", limits.output_bytes, {.min = 1024});
  if (block.Choice("net", "none", {"none", "host", "allow"}) != "none") block.Fail("net", std::string("anything but none ") + kNotBuilt);
  static const std::vector<std::string> kModes = {"auto", "v2", "hybrid", "none"};
  const std::string mode = block.Choice("cgroups", "auto", kModes);
  job->sandbox.cgroups = static_cast<sandbox::CgroupMode>(std::find(kModes.begin(), kModes.end(), mode) - kModes.begin());
  if (auto rootfs = block.OptionalString("rootfs")) job->sandbox.rootfs = *rootfs;
  for (ConfigBlock mount : block.BlockList("mounts")) {
    mount.Require("source", "a folder or file of this machine");
    mount.Require("target", "an absolute path inside");
    // Like every path of a job: from the folder the job is started in. The sandbox takes whole paths only.
    std::error_code error;
    const std::filesystem::path source = std::filesystem::absolute(mount.String("source", ""), error);
    if (source.empty()) mount.Fail("source", "is no path");
    job->sandbox.mounts.push_back({source.lexically_normal(), mount.String("target", "")});
    mount.Finish();
  }
  block.Finish();
}

Job::Verifier ReadVerifier(ConfigBlock block) {
  Job::Verifier out;
  out.key = block.path();
  block.Require("name", "the verifier's name");
  out.name = block.String("name", "verifier");
  out.kind = ReadKind(block, &out.command);
  if (out.kind == "command") {
    out.timeout_s = block.Double("timeout_s", 20, {.min = 0, .max = 1e5, .above = true});
  } else {
    for (const char* key : {"command", "timeout_s"}) block.Refuse(key, "is read with kind: command only");
  }
  out.failure_reward = block.OptionalDouble("failure_reward");
  block.Finish();
  return out;
}

datapool::WindowConfig ReadWindow(ConfigBlock window) {
  datapool::WindowConfig out;
  static const std::vector<std::string> kPolicies = {"anchored", "strict", "greedy", "areal"};
  const std::string policy = window.Choice("policy", "anchored", kPolicies);
  if (policy == "areal") window.Fail("policy", "'areal' has no bound on staleness, and a job must have one; `temper pool sim` compares with it");
  out.policy = static_cast<datapool::Policy>(std::find(kPolicies.begin(), kPolicies.end(), policy) - kPolicies.begin());
  if (policy == "anchored") {
    const std::string path = window.path();
    if (window.Has("size") && window.Has("fraction")) window.Fail("fraction", "has no effect beside " + path + ".size; give one of the two");
    if (window.Has("size")) {
      out.size = window.OptionalInt("size", {.min = 1});
      window.Refuse("fraction", "has no effect beside " + path + ".size");
    } else {
      out.fraction = window.Double("fraction", 0.3, {.min = 0, .max = 1, .above = true});
      window.Refuse("size", "has no effect beside " + path + ".fraction");
    }
  } else {
    for (const char* key : {"size", "fraction"}) window.Refuse(key, "has no effect with policy " + policy);
  }
  window.Finish();
  return out;
}

std::vector<ConfigBlock> SourceBlocks(ConfigBlock root) { return root.Block("pool").BlockList("sources"); }

// tasks, scaffold and verifier: of the job, or of each of its sources. A scaffold or verifier of the job is for those that have none.
void ReadSources(ConfigBlock root, Job* job) {
  std::vector<ConfigBlock> blocks = SourceBlocks(root);
  auto each_has = [&](const char* key) {
    return !blocks.empty() && std::all_of(blocks.begin(), blocks.end(), [&](const ConfigBlock& b) { return b.Has(key); });
  };
  Job::Source shared;
  if (blocks.empty()) {
    ConfigBlock tasks = root.Block("tasks");
    ReadSourceTasks(tasks, "train", &shared);
    tasks.Finish();
  } else {
    root.Refuse("tasks", "has no effect beside pool.sources: each of them has its tasks");
  }
  ConfigBlock scaffold = root.Block("scaffold");
  job->concurrency = scaffold.IntOrAuto("concurrency", {.min = 1, .max = 4096});
  if (each_has("scaffold")) {
    for (const char* key : {"name", "kind", "command", "where", "max_turns", "timeout_s", "on_exit"}) {
      scaffold.Refuse(key, "has no effect: every one of pool.sources has a scaffold of its own");
    }
  } else {
    shared.scaffold = ReadScaffold(scaffold);
  }
  scaffold.Finish();
  root.Refuse("verifiers", std::string("a list of verifiers ") + kNotBuilt + "; give one as verifier");
  if (each_has("verifier")) {
    root.Refuse("verifier", "has no effect: every one of pool.sources has a verifier of its own");
  } else {
    root.Require("verifier", "what judges a rollout");
    shared.verifier = ReadVerifier(root.Block("verifier"));
  }
  if (blocks.empty()) job->sources = {std::move(shared)};
  for (size_t i = 0; i < blocks.size(); ++i) {
    ConfigBlock& block = blocks[i];
    Job::Source& source = job->sources.emplace_back(shared);
    block.Require("name", "what ledger and plan call it");
    source.name = block.String("name", "source");
    if (!IsName(source.name)) block.Fail("name", kNameRule);
    ReadSourceTasks(block, "tasks", &source);
    if (block.Has("scaffold")) {
      ConfigBlock own = block.Block("scaffold");
      own.Refuse("concurrency", "is of the whole job: set scaffold.concurrency");
      source.scaffold = ReadScaffold(own);
      own.Finish();
    }
    if (block.Has("verifier")) source.verifier = ReadVerifier(block.Block("verifier"));

    datapool::SourceConfig& share = job->pool.sources.emplace_back();
    share.name = source.name;
    share.weight = block.Double("weight", 1, {.min = 0, .max = 1e9, .above = true});
    if (block.Has("window")) share.window = ReadWindow(block.Block("window"));
    block.Finish();
  }
}

// The recipe's expansion, leaf by leaf, as if the user had written it.
void AddAlgorithmEntries(Config& config, const trainer::ParsedAlgorithm& parsed, const json::value& value, const std::string& path) {
  if (value.is_object()) {
    for (const auto& member : value.get_object()) {
      AddAlgorithmEntries(config, parsed, member.value(), (path.empty() ? "" : path + ".") + std::string(member.key_c_str()));
    }
    return;
  }
  ConfigEntry entry{"algorithm." + path, PrintJson(value), ConfigSource::kDefault};
  auto source = parsed.sources.find(path);
  // A value inside a list or block the user wrote whole has the source of the whole.
  for (std::string above = path; source == parsed.sources.end() && above.find('.') != std::string::npos;) {
    above.resize(above.rfind('.'));
    source = parsed.sources.find(above);
  }
  if (source != parsed.sources.end() && source->second == "recipe") entry.source = ConfigSource::kRecipe;
  if (path == "recipe" || (source != parsed.sources.end() && source->second == "file")) {
    entry.source = ConfigSource::kFile;
    const ConfigNode* node = config.root().Find("algorithm");
    for (const std::string& key : Split(path, '.')) {
      if (node && node->Find(key)) node = node->Find(key);
    }
    if (node) entry.source = node->source;
  }
  config.Add(std::move(entry));
}

// Messages begin with the key's path ("algorithm.loss.kind: …"), which gives the place in the file.
void FailAlgorithm(Config& config, const Status& status) {
  const std::string& message = status.message();
  const size_t colon = message.find(": ");
  const bool has_path = message.rfind("algorithm", 0) == 0 && colon != std::string::npos && message.substr(0, colon).find(' ') == std::string::npos;
  if (has_path) config.Fail(message.substr(0, colon), message.substr(colon + 2));
  else config.Fail("algorithm", message);
}

void ReadAlgorithm(Config& config, ConfigBlock root, Job* job) {
  root.Require("algorithm", "the objective, for example algorithm: {recipe: grpo}");
  const ConfigNode* node = root.Raw("algorithm");
  if (!node) return;
  auto value = ParseJson(node->ToJson());
  if (!value.ok()) return root.Fail("algorithm", value.status().message());
  auto parsed = trainer::ParseAlgorithm(*value);
  if (!parsed.ok()) return FailAlgorithm(config, parsed.status());
  job->algorithm = *parsed;
  if (auto expanded = ParseJson(parsed->expanded); expanded.ok()) AddAlgorithmEntries(config, *parsed, *expanded, "");
}

void ReadPool(ConfigBlock root, Job* job) {
  ConfigBlock block = root.Block("pool");
  datapool::PoolConfig& pool = job->pool;
  pool.P = block.Int("groups_per_step", 16, {.min = 1, .max = 1e6});
  pool.S = block.Int("staleness", 1, {.min = 0, .max = 1000});
  pool.G = static_cast<int32_t>(block.Int("group_size", 8, {.min = 1, .max = 4096}));
  pool.B = block.OptionalInt("slots", {.min = 1});
  pool.extra = static_cast<int32_t>(block.Int("extra", 0, {.min = 0, .max = 4096}));
  if (auto least = block.OptionalInt("min_valid", {.min = 1, .max = 4096})) pool.min_valid = static_cast<int32_t>(*least);
  pool.retries = static_cast<int32_t>(block.Int("retries", 1, {.min = 0, .max = 1000}));
  pool.deadline_s = block.OptionalDouble("deadline_s", {.min = 0, .above = true});
  if (!pool.deadline_s) block.Refuse("on_deadline", "has no effect without pool.deadline_s");
  else {
    static const std::vector<std::string> kChoices = {"wait", "tombstone", "requeue"};
    const std::string choice = block.Choice("on_deadline", "tombstone", kChoices);
    pool.on_deadline = static_cast<datapool::OnDeadline>(std::find(kChoices.begin(), kChoices.end(), choice) - kChoices.begin());
  }
  pool.max_staleness = block.OptionalInt("max_staleness", {.min = 0});
  pool.max_leases = block.Int("max_leases", 1, {.min = 1, .max = 64});
  // Read with the tasks.
  block.BlockList("sources");
  if (block.Has("sources") && pool.sources.empty()) block.Fail("sources", "is an empty list; leave it out");
  block.Refuse("zero_signal", "follows algorithm.dynamic_sampling; set that");
  block.Refuse("seed", "the job's seed counts; set seed");

  ConfigBlock alarms = block.Block("alarms");
  // 0 turns one off.
  auto limit = [&](const char* key, std::optional<double>& value, double most) {
    value = alarms.Double(key, *value, {.min = 0, .max = most});
    if (*value == 0) value.reset();
  };
  limit("infra_share", job->alarms.infra_share, 1);
  limit("zero_signal_share", job->alarms.zero_signal_share, 1);
  limit("head_wait_s", job->alarms.head_wait_s, 1e9);
  limit("nothing_scored_s", job->alarms.nothing_scored_s, 1e9);
  job->alarms.reward_collapse = alarms.Bool("reward_collapse", job->alarms.reward_collapse);
  job->alarms.pause = alarms.Choice("action", "say", {"say", "pause"}) == "pause";
  alarms.Finish();

  ConfigBlock retention = block.Block("retention");
  static const std::vector<std::string> kConsumed = {"keep", "archive", "drop"};
  const std::string consumed = retention.Choice("consumed", "keep", kConsumed);
  job->retention.consumed = static_cast<datapool::Consumed>(std::find(kConsumed.begin(), kConsumed.end(), consumed) - kConsumed.begin());
  job->retention.disk = retention.SizeOrAuto("disk", {.min = 256.0 * (1 << 20)});
  if (job->retention.disk && consumed == "keep") {
    retention.Fail("disk", "with consumed: keep nothing ever leaves the store, and the job would stand still at the bound; archive or drop");
  }
  job->retention.free = retention.Size("free", int64_t{256} << 20, {.min = 0});
  retention.Finish();

  const bool each_has_one = !pool.sources.empty() && std::all_of(pool.sources.begin(), pool.sources.end(), [](const auto& s) { return s.window.has_value(); });
  if (each_has_one) block.Refuse("window", "has no effect: every one of pool.sources has a window of its own");
  else pool.window = ReadWindow(block.Block("window"));
  block.Finish();
}

void ReadOptimizer(ConfigBlock root, Job* job) {
  ConfigBlock block = root.Block("optimizer");
  Job::Optimizer& out = job->optimizer;
  block.Choice("name", "adamw", {"adamw"});
  out.lr = block.Double("lr", 3e-4, {.min = 0, .max = 10, .above = true});
  const std::vector<double> betas = block.Doubles("betas", {0.9, 0.95}, 2, {.min = 0, .max = 0.9999999});
  out.beta1 = betas[0];
  out.beta2 = betas[1];
  out.eps = block.Double("eps", 1e-15, {.min = 0, .max = 1});
  out.weight_decay = block.Double("weight_decay", 0, {.min = 0, .max = 10});
  out.clip_norm = block.Double("clip_norm", 1, {.min = 0});
  out.schedule = block.Choice("schedule", "constant", {"constant", "linear", "cosine", "wsd"});
  if (out.schedule == "wsd") {
    block.Require("decay_steps", "over how many of the last steps the rate falls to 0");
    out.decay_steps = block.Int("decay_steps", 0, {.min = 1, .max = 1e9});
  } else {
    block.Refuse("decay_steps", "is read with schedule: wsd only");
  }
  out.skip_limit = block.Int("skip_limit", 0, {.min = 0, .max = 1e6});
  out.warmup_steps = block.Int("warmup_steps", 0, {.min = 0, .max = 1e9});
  block.Finish();
}

// The models beside the policy, where the algorithm reads their logprobs.
void ReadOtherModels(ConfigBlock& block, Job* job) {
  const trainer::Algorithm& algorithm = job->algorithm.algorithm;
  if (!algorithm.loss.kind) return;  // the algorithm has a mistake of its own
  if (algorithm.ReadsReference()) {
    const std::string name = block.String("reference", "start");
    if (name.empty()) block.Fail("reference", "is empty: 'start' or a model");
    if (name != "start") job->trainer.reference = name;
  } else {
    block.Refuse("reference", "has no effect: only algorithm.kl and the loss kinds dpo and ipo compare with a reference");
  }
  if (algorithm.HasTeacher()) {
    block.Require("teacher", "a model with the policy's tokens, whose logprobs algorithm.distillation reads");
    job->trainer.teacher = block.String("teacher", "");
  } else {
    block.Refuse("teacher", "has no effect: only algorithm.distillation reads a teacher");
  }
  if (algorithm.ReadsTeacherTop()) {
    job->trainer.teacher_top = static_cast<int>(block.Int("teacher_top", 16, {.min = 1, .max = 1024}));
  } else {
    block.Refuse("teacher_top", "has no effect: only the kind topk_forward_kl of algorithm.distillation compares with likeliest tokens");
  }
}

void ReadTrainer(ConfigBlock root, Job* job) {
  ConfigBlock block = root.Block("trainer");
  Job::Trainer& out = job->trainer;
  out.steps = block.Int("steps", 100, {.min = 1, .max = 1e9});
  ConfigBlock sft = block.Block("sft");
  if (sft.present()) {
    Job::Sft s;
    sft.Choice("source", "demonstrations", {"demonstrations"});
    s.tokens = sft.Int("tokens", 500000, {.min = 1, .max = 1e12});
    s.poor_fraction = sft.Double("poor_fraction", 0, {.min = 0, .max = 1});
    s.batch_tokens = sft.Int("batch_tokens", 8192, {.min = 1, .max = 1e9});
    s.lr = sft.Double("lr", 1e-3, {.min = 0, .max = 10, .above = true});
    s.warmup_fraction = sft.Double("warmup_fraction", 0.05, {.min = 0, .max = 1});
    sft.Finish();
    const bool demonstrated = std::any_of(job->sources.begin(), job->sources.end(), [](const auto& source) { return source.train.generator == "terminal"; });
    if (!demonstrated) block.Fail("sft", "needs demonstrations, which only the generator 'terminal' gives");
    out.sft = s;
  }
  out.ranks = block.Int("ranks", 1, {.min = 1, .max = 64});
  out.minibatches = block.Int("minibatches", 1, {.min = 1, .max = 1e6});
  out.epochs = block.Int("epochs", 1, {.min = 1, .max = 1e6});
  out.memory_bytes = block.SizeOrAuto("memory", {.min = 1 << 20});
  out.tree = block.Choice("tree", "on", {"on", "off"}) == "on";
  if (out.tree) {
    const std::string prove = block.Choice("prove_tree", "first_step", {"first_step", "every_n", "off"});
    out.prove_tree = prove != "off";
    if (prove == "every_n") out.prove_every = block.Int("prove_every", 10, {.min = 1, .max = 1e9});
    else block.Refuse("prove_every", "is read with prove_tree: every_n only");
  } else {
    block.Refuse("prove_every", "has no effect with trainer.tree: off");
    block.Refuse("prove_tree", "has no effect with trainer.tree: off");
    out.prove_tree = false;
  }
  out.checkpoint_every = block.Int("checkpoint_every", 10, {.min = 1, .max = 1e9});
  out.keep = block.Int("keep", 3, {.min = 1, .max = 1e6});
  if (job->Evaluates()) out.keep_best = block.Bool("keep_best", false);
  else block.Refuse("keep_best", "has no effect without tasks.eval");
  out.permute_rewards = block.Bool("permute_rewards", false);
  ReadOtherModels(block, job);
  block.Finish();
}

void ReadRest(ConfigBlock root, Job* job) {
  ConfigBlock rollout = root.Block("rollout");
  job->rollout.workers = rollout.Int("workers", 1, {.min = 1, .max = 64});
  job->rollout.threads = rollout.IntOrAuto("threads", {.min = 1, .max = 1024});
  job->rollout.max_batch = rollout.Int("max_batch", 64, {.min = 1, .max = 4096});
  job->rollout.kv_memory_bytes = rollout.SizeOrAuto("kv_memory", {.min = 1 << 20});
  rollout.Finish();

  ConfigBlock gateway = root.Block("gateway");
  job->gateway.port = static_cast<int>(gateway.Int("port", 0, {.min = 0, .max = 65535}));
  if (gateway.Int("control_port", 0, {.min = 0, .max = 65535}) != 0) {
    gateway.Fail("control_port", "a TCP port for the control plane is documented but not built; it is a unix socket (leave 0)");
  }
  job->gateway.bind = gateway.String("bind", "127.0.0.1");
  gateway.Finish();

  if (job->Evaluates()) {
    ConfigBlock eval = root.Block("eval");
    job->eval.every = eval.Int("every", 20, {.min = 0, .max = 1e9});
    job->eval.temperature = eval.Double("temperature", 1, {.min = 0, .max = 100});
    eval.Finish();
  } else {
    root.Refuse("eval", "has no effect without tasks.eval");
  }

  ConfigBlock sync = root.Block("weightsync");
  const std::string transport = sync.Choice("transport", "auto", {"auto", "shm", "tcp", "nccl", "rdma"});
  if (transport != "auto" && transport != "shm") sync.Fail("transport", "'" + transport + "' " + kNotBuilt);
  job->weightsync.span = sync.Choice("in_flight", "retract", {"retract", "span"}) == "span";
  sync.Finish();
}

// What only the whole can tell.
void CrossCheck(Config& config, Job* job) {
  if (job->pool.B && *job->pool.B < job->pool.P) {
    config.Fail("pool.slots", std::to_string(*job->pool.B) + " slots cannot fill a batch of " + std::to_string(job->pool.P) + " groups (pool.groups_per_step)");
  }
  if (job->pool.B && job->pool.sources.size() > 1) {
    config.Fail("pool.slots", "has no effect beside several pool.sources: each has (staleness + 1) * its groups of a step");
  }
  const int64_t slots = job->pool.B ? *job->pool.B : (job->pool.S + 1) * job->pool.P;
  if (job->pool.sources.empty() && job->pool.window.size && *job->pool.window.size > slots) {
    config.Fail("pool.window.size", std::to_string(*job->pool.window.size) + " is wider than the " + std::to_string(slots) +
                " groups that can be in flight ((staleness + 1) * groups_per_step, or slots)");
  }
  if (job->algorithm.algorithm.loss.kind) {
    const Status runs = trainer::CheckAlgorithmForRun(job->algorithm.algorithm, job->pool.S, job->trainer.optimizer_steps());
    if (!runs.ok()) FailAlgorithm(config, runs);
  }
  // (A verifier outside may give rewards of turns; those that are built in do not.)
  const bool built_in = std::all_of(job->sources.begin(), job->sources.end(), [](const Job::Source& source) { return source.verifier.kind == "builtin"; });
  if (job->algorithm.algorithm.reward.process_coef != 1 && built_in) {  // (A resolved job says 1.)
    config.Fail("algorithm.reward.process_coef", "has no effect: verifiers that are built in give no rewards of turns, one of kind: command may");
  }
  const int64_t parts = job->trainer.minibatches, optimizer_steps = job->trainer.steps * job->trainer.optimizer_steps();
  if (job->pool.P % parts != 0) {
    config.Fail("trainer.minibatches", std::to_string(parts) + " parts of one size cannot be made of " + std::to_string(job->pool.P) + " groups (pool.groups_per_step)");
  }
  if (const int64_t rollouts = job->pool.P * job->pool.G / parts; job->trainer.ranks > rollouts) {
    config.Fail("trainer.ranks", "an optimizer step of " + std::to_string(rollouts) + " rollouts keeps no more ranks than that busy");
  }
  const std::string length = std::to_string(optimizer_steps) + " optimizer steps: trainer.steps is " + std::to_string(job->trainer.steps) +
                             (parts > 1 ? ", trainer.minibatches " + std::to_string(parts) : "") +
                             (job->trainer.epochs > 1 ? ", trainer.epochs " + std::to_string(job->trainer.epochs) : "") + ")";
  if (job->optimizer.warmup_steps > optimizer_steps) config.Fail("optimizer.warmup_steps", "longer than the job (" + length);
  if (const trainer::LossKind* kind = job->algorithm.algorithm.loss.kind; kind && kind->pairs && (job->pool.G != 2 || job->pool.extra != 0)) {
    config.Fail("pool.group_size", std::string("loss kind ") + kind->name + " takes pairs: 2, without pool.extra");
  }
  if (job->optimizer.warmup_steps + job->optimizer.decay_steps > optimizer_steps && job->optimizer.decay_steps > 0) {
    config.Fail("optimizer.decay_steps", "with the warm-up longer than the job (" + length);
  }
  if (job->trainer.permute_rewards && job->pool.G < 2) {
    config.Fail("trainer.permute_rewards", "has no effect with groups of one");
  }
  if (job->model.create && job->sampling.max_tokens > job->model.create->max_positions) {
    config.Fail("sampling.max_tokens", "more than the model has positions (model.create.max_positions is " +
                std::to_string(job->model.create->max_positions) + ")");
  }
  // One rollout is its own mean: whatever it got, its advantage is 0, and the job would never learn.
  const trainer::Baseline baseline = job->algorithm.algorithm.advantage.baseline;
  if (job->pool.G == 1 && (baseline == trainer::Baseline::kGroupMean || baseline == trainer::Baseline::kLeaveOneOut ||
                           baseline == trainer::Baseline::kLengthWeighted)) {
    config.Fail("pool.group_size", "1: a rollout alone in its group has advantage 0, and no reward would teach anything; at least 2, or "
                "algorithm.advantage.baseline batch_mean or none");
  }
  job->pool.refill = job->algorithm.algorithm.dynamic_sampling == trainer::DynamicSampling::kRefill;
  job->pool.seed = job->seed;
  if (config.Finish().ok()) {
    if (Status s = datapool::Validate(job->pool); !s.ok()) config.Fail("pool", s.message());
  }
}

}  // namespace

bool Job::Evaluates() const {
  return std::any_of(sources.begin(), sources.end(), [](const Source& source) { return source.eval.has_value(); });
}

Result<Job> ReadJob(Config& config) {
  Job job;
  ConfigBlock root = config.Root();
  job.name = root.String("name", "job");
  if (!IsName(job.name)) root.Fail("name", std::string(kNameRule) + ": it becomes a folder's name");
  job.seed = static_cast<uint64_t>(root.Int("seed", 0, {.min = 0}));
  job.numerics = root.Choice("numerics", "bf16", {"bf16", "f32"});
  job.cpu = root.Choice("cpu", "auto", {"auto", "avx2", "avx512", "amx"});
  ReadModel(root, &job);
  ReadSources(root, &job);
  ReadSampling(root, &job);
  ReadSandbox(root, &job);
  ReadPool(root, &job);
  ReadAlgorithm(config, root, &job);
  ReadOptimizer(root, &job);
  ReadTrainer(root, &job);
  ReadRest(root, &job);
  root.Finish();
  CrossCheck(config, &job);
  RETURN_IF_ERROR(config.Finish());
  return job;
}

}  // namespace temper::job
