// Job files that must be refused: exit code 2 at once, one line that names file, line and key, and nothing made.
#include <gtest/gtest.h>

#include <chrono>

#include "common/file.h"
#include "common/strings.h"
#include "tests/e2e/job_process.h"

namespace temper::e2e {
namespace {

struct Edit {
  std::string from, to;  // of configs/smoke.yaml
  int line;              // where the message must point
  std::string says;      // key and fault
};

const std::string kModel = "model:\n  create: {layers: 2, width: 64, heads: 4, kv_heads: 2, ffn: 192, vocab: tasks}";
const std::string kWindow = "window: {policy: anchored, fraction: 0.3}";

std::string AliasBomb() {
  std::string out = "seed: 7\na: &a [x, x, x, x, x, x, x, x]";
  for (char c = 'b'; c < 'h'; ++c) {
    const std::string last(1, static_cast<char>(c - 1));
    out += std::string("\n") + c + ": &" + c + " [*" + last + ", *" + last + ", *" + last + ", *" + last + ", *" + last + "]";
  }
  return out;
}

const std::vector<Edit>& Table() {
  static const std::vector<Edit> table = {
      // Unknown keys, in every block and at every depth.
      {"name: smoke", "nmae: smoke", 3, "nmae: unknown key; did you mean 'name'?"},
      {"verifier: {name", "verifierx: {name", 19, "verifierx: unknown key"},
      {"layers: 2", "layer: 2", 6, "model.create.layer: unknown key; did you mean 'layers'?"},
      {"count: 64}", "cuont: 64}", 8, "tasks.train.cuont: unknown key; did you mean 'count'?"},
      {"split: held_out", "splitt: held_out", 9, "tasks.eval.splitt: unknown key"},
      {"  kind: command\n  command", "  kidn: command\n  command", 12, "scaffold.kidn: unknown key"},
      {"top_p: 1.0", "topp: 1.0", 17, "sampling.topp: unknown key"},
      {"disk: 8MiB", "dsik: 8MiB", 18, "sandbox.dsik: unknown key"},
      {"timeout_s: 20}", "timeouts: 20}", 19, "verifier.timeouts: unknown key"},
      {"recipe: cispo,", "recipee: cispo,", 20, "algorithm.recipee: unknown key"},
      {"recipe: cispo,", "recipe: cispo, loss: {clip_lwo: 1},", 20, "clip_lwo"},
      {"group_size: 4", "groupsize: 4", 24, "pool.groupsize: unknown key"},
      {"fraction: 0.3", "fractoin: 0.3", 25, "pool.window.fractoin: unknown key"},
      {"lr: 4.0e-4", "learning_rate: 4.0e-4", 27, "optimizer.learning_rate: unknown key"},
      {"  steps: 5", "  step: 5", 29, "trainer.step: unknown key"},
      {"poor_fraction: 0.5", "poor: 0.5", 30, "trainer.sft.poor: unknown key"},
      {"workers: 1", "worker: 1", 33, "rollout.worker: unknown key"},
      {"every: 5", "evry: 5", 34, "eval.evry: unknown key"},
      // Models beside the policy.
      {"  steps: 5", "  steps: 5\n  teacher: models/none", 30, "trainer.teacher: has no effect: only algorithm.distillation reads a teacher"},
      {"  steps: 5", "  steps: 5\n  reference: start", 30, "trainer.reference: has no effect: only algorithm.kl and the loss kinds dpo and ipo"},
      {"{recipe: cispo, dynamic_sampling: off}", "{recipe: opd}", 28, "trainer.teacher"},
      {"{recipe: cispo, dynamic_sampling: off}", "{recipe: dpo}", 24, "pool.group_size: loss kind dpo takes pairs: 2"},
      {"  checkpoint_every: 2", "  checkpoint_every: 2\n  prove_every: 2", 32, "trainer.prove_every: is read with prove_tree: every_n only"},
      {"lr: 4.0e-4", "lr: 4.0e-4, decay_steps: 3", 27, "optimizer.decay_steps: is read with schedule: wsd only"},
      {"lr: 4.0e-4", "lr: 4.0e-4, schedule: wsd, decay_steps: 6", 27, "optimizer.decay_steps: with the warm-up longer than the job"},
      // Wrong types.
      {"seed: 7", "seed: seven", 4, "seed: expected a whole number, got the text 'seven'"},
      {"seed: 7", "seed: 1.5", 4, "seed: expected a whole number"},
      {"layers: 2", "layers: \"2\"", 6, "model.create.layers: expected a whole number, got the text '2'"},
      {"layers: 2", "layers: [2]", 6, "model.create.layers: expected a whole number, got a list"},
      {"timeout_s: 30\n", "timeout_s: soon\n", 16, "scaffold.timeout_s: expected a number"},
      {"memory: 64MiB", "memory: 64MB", 18, "sandbox.memory: expected a size"},
      {"lr: 4.0e-4", "lr: .nan", 27, "optimizer.lr: expected a number"},
      {"lr: 4.0e-4", "lr: 1e999", 27, "optimizer.lr: expected a number"},
      {"tasks:\n", "tasks: 5\nmore:\n", 8, "more: unknown key"},
      {"command: [\"{build}/terminal-agent\"]", "command: 5", 13, "scaffold.command"},
      // Out of range.
      {"seed: 7", "seed: -1", 4, "seed: -1 is out of range"},
      {"count: 64}", "count: -64}", 8, "tasks.train.count: -64 is out of range"},
      {"max_turns: 4", "max_turns: -4", 15, "scaffold.max_turns: -4 is out of range"},
      {"temperature: 1.0, top_p", "temperature: -1.0, top_p", 17, "sampling.temperature: -1.0 is out of range"},
      {"memory: 64MiB", "memory: -64MiB", 18, "sandbox.memory"},
      {"groups_per_step: 4", "groups_per_step: 0", 22, "pool.groups_per_step: 0 is out of range"},
      {"staleness: 1", "staleness: -1", 23, "pool.staleness: -1 is out of range"},
      {"checkpoint_every: 2", "checkpoint_every: -2", 31, "trainer.checkpoint_every: -2 is out of range"},
      {"fraction: 0.3", "fraction: 1.5", 25, "pool.window.fraction: 1.5 is out of range"},
      // Impossible together, or without effect.
      {kWindow, "window: {policy: anchored, size: 99}", 25, "pool.window.size: 99 is wider than the 8 groups"},
      {kWindow, "window: {policy: strict, fraction: 0.3}", 25, "pool.window.fraction: has no effect with policy strict"},
      {kWindow, "window: {policy: anchored, size: 2, fraction: 0.3}", 25, "give one"},
      {kWindow, "window: {policy: areal}", 25, "pool.window.policy: 'areal' has no bound"},
      {"group_size: 4", "group_size: 4\n  slots: 3", 25, "pool.slots: 3 slots cannot fill a batch of 4 groups"},
      {"  deadline_s: 60", "  on_deadline: tombstone", 26, "pool.on_deadline"},
      {"layers: 2, width: 64", "layers: 2, width: 63", 6, "model.create.heads: must divide model.create.width (63)"},
      {"top_p: 1.0", "top_k: 1", 17, "sampling.top_k: leaves one token to draw"},
      {"top_p: 1.0", "min_p: 1.0", 17, "sampling.min_p: leaves one token to draw"},
      {"top_p: 1.0", "top_k: 100000", 17, "sampling.top_k: 100000 has no effect, the model has "},
      {"top_p: 1.0", "repetition_stop: 24", 17, "sampling.repetition_stop: has no effect"},
      {"max_tokens: 24", "max_tokens: 100000", 17, "sampling.max_tokens: more than the model has positions"},
      {"  checkpoint_every: 2", "  checkpoint_every: 2\n  tree: off\n  prove_tree: first_step", 33, "no effect"},
      {"recipe: cispo,", "recipe: cispo, advantage: {gamma: 0.9},", 20, "gamma"},
      // Unknown names, missing files.
      {"recipe: cispo", "recipe: cipso", 20, "algorithm.recipe: no recipe 'cipso'. Did you mean 'cispo'?"},
      {"name: adamw", "name: adam", 27, "optimizer.name: 'adam' is not one of adamw"},
      {"where: sandbox", "where: moon", 14, "scaffold.where: 'moon' is not one of sandbox, host"},
      {"net: none", "net: host", 18, "sandbox.net"},
      {"train: {generator: terminal", "train: {generator: termnal", 8, "tasks.train.generator: 'termnal' is not one of terminal"},
      {"eval: {generator: terminal, count: 16, split: held_out}", "eval: {jsonl: /no/such/file.jsonl}", 9, "tasks.eval.jsonl: "},
      {"  kind: command\n  command", "  kind: service\n  command", 12, "scaffold.kind: 'service' is documented but not built"},
      {"name: files, kind: command, command: [\"{build}/files-verifier\"], timeout_s: 20", "name: exakt, kind: builtin", 19,
       "verifier.name: no built-in verifier 'exakt'; there are: exact, first_integer"},
      {"command: [\"{build}/files-verifier\"]", "command: [\"{build}/nothing\"]", 19, "verifier.command: '{build}/nothing' is not there"},
      {"command: [\"{build}/terminal-agent\"]", "command: [\"{build}/nothing\"]", 13, "scaffold.command: '{build}/nothing' is not there"},
      {"command: [\"{build}/terminal-agent\"]\n  where: sandbox", "command: [no-such-agent]\n  where: host", 13, "scaffold.command: 'no-such-agent'"},
      {"command: [\"{build}/terminal-agent\"]", "command: []", 13, "scaffold.command: is empty"},
      {"net: none}", "net: none, mounts: [{source: /no/such/folder, target: /opt/x}]}", 18, "sandbox.mounts: source '/no/such/folder' is not there"},
      {"net: none}", "net: none, rootfs: /no/such/root}", 18, "sandbox.rootfs: '/no/such/root' is no folder"},
      {kModel, "model: {path: /no/such/model}", 5, "model.path: no model '/no/such/model'"},
      {"  steps: 5", "  steps: 5\n  memory: 100000GiB", 30, "trainer.memory: 97.7 TiB is more than is free"},
      {"group_size: 4", "group_size: 1", 24, "pool.group_size: 1: a rollout alone in its group has advantage 0"},
      {"memory: 64MiB", "memory: 64", 18, "sandbox.memory: 64 is out of range: must be at least 8MiB"},
      // YAML that says something else than it seems to.
      {"seed: 7", "seed: 7\nseed: 8", 5, "key 'seed' twice in one block; the other one is at line 4"},
      {"  steps: 5", "  steps: 5\n  steps: 6", 30, "key 'steps' twice"},
      {"  steps: 5", "\tsteps: 5", 29, "a tab; use spaces"},
      {"seed: 7", "seed: [7", 5, "end of sequence flow not found"},
      {"seed: 7", AliasBomb(), 0, "aliases"},
      {"seed: 7", "seed: !!python/object 7", 4, "tag"},
  };
  return table;
}

TEST(BadJobs, EachIsRefusedAtOnceWithItsPlaceAndNothingIsMade) {
  const std::string good = *ReadFile(std::string(TEMPER_SOURCE_DIR) + "/configs/smoke.yaml");
  std::string folder = testing::TempDir() + "temper-bad-jobs-XXXXXX";
  ASSERT_TRUE(mkdtemp(folder.data()));
  const std::string file = folder + "/job.yaml", out = folder + "/run";
  EXPECT_GE(Table().size(), 40u);
  for (const Edit& edit : Table()) {
    SCOPED_TRACE(edit.to);
    const size_t at = good.find(edit.from);
    ASSERT_NE(at, std::string::npos) << edit.from;
    ASSERT_TRUE(WriteFile(file, good.substr(0, at) + edit.to + good.substr(at + edit.from.size())).ok());
    std::string output;
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_EQ(JobProcess::Door({"run", file, "--out", out}, &output), 2) << output;
    EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(), 2);
    const std::string place = file + ":" + (edit.line ? std::to_string(edit.line) + ":" : "");
    EXPECT_NE(output.find(place), std::string::npos) << output;
    EXPECT_NE(output.find(edit.says), std::string::npos) << output;
    EXPECT_EQ(std::count(output.begin(), output.end(), '\n'), 1) << output;
    EXPECT_EQ(ListDir(folder)->size(), 1u) << "something was made";
  }
  EXPECT_TRUE(RemoveAll(folder).ok());
}

}  // namespace
}  // namespace temper::e2e
