#include "common/config.h"

#include <gtest/gtest.h>

#include "common/json.h"
#include "common/rng.h"
#include "common/strings.h"

namespace temper {
namespace {

// A small schema with every kind of getter.
struct Small {
  std::string name, cpu;
  int64_t steps = 0, memory = 0;
  double lr = 0;
  bool tree = false;
  std::optional<double> deadline_s;
  std::optional<int64_t> threads;
  std::vector<double> betas;
  std::vector<std::string> command;
};

Status ReadSmall(Config& config, Small* out) {
  ConfigBlock root = config.Root();
  out->name = root.String("name", "job");
  out->cpu = root.Choice("cpu", "auto", {"auto", "avx2", "off"});
  ConfigBlock trainer = root.Block("trainer");
  out->steps = trainer.Int("steps", 60, {.min = 1, .max = 1000});
  out->lr = trainer.Double("lr", 3e-4, {.min = 0, .above = true});
  out->tree = trainer.Bool("tree", true);
  out->betas = trainer.Doubles("betas", {0.9, 0.95}, 2, {.min = 0, .max = 1});
  trainer.Finish();
  ConfigBlock sandbox = root.Block("sandbox");
  out->memory = sandbox.Size("memory", 256 << 20, {.min = 4096});
  out->deadline_s = sandbox.OptionalDouble("deadline_s", {.min = 0});
  out->threads = sandbox.IntOrAuto("threads", {.min = 1});
  out->command = sandbox.Strings("command");
  sandbox.Finish();
  root.Finish();
  return config.Finish();
}

std::string ErrorOf(const std::string& yaml, const std::vector<std::string>& sets = {}) {
  auto config = Config::Parse(yaml, "job.yaml");
  if (!config.ok()) return config.status().message();
  for (const std::string& set : sets) {
    if (Status s = config->Set(set); !s.ok()) return s.message();
  }
  Small small;
  return ReadSmall(*config, &small).message();
}

// Values, defaults and their sources.
TEST(Config, ReadsAndRemembersSources) {
  auto config = Config::Parse("name: quick\ncpu: off\ntrainer:\n  steps: 5\n  lr: 1.0e-3\nsandbox: {memory: 1.5GiB, deadline_s: null, command: [\"a\", b c]}\n", "job.yaml");
  ASSERT_TRUE(config.ok()) << config.status().ToString();
  ASSERT_TRUE(config->Set("trainer.lr=2e-3").ok());
  ASSERT_TRUE(config->Set("sandbox.threads=3").ok());
  Small small;
  ASSERT_TRUE(ReadSmall(*config, &small).ok());
  EXPECT_EQ(small.name, "quick");
  EXPECT_EQ(small.cpu, "off");
  EXPECT_EQ(small.steps, 5);
  EXPECT_EQ(small.lr, 2e-3);
  EXPECT_TRUE(small.tree);
  EXPECT_EQ(small.memory, 1610612736);
  EXPECT_FALSE(small.deadline_s);
  EXPECT_EQ(small.threads, 3);
  EXPECT_EQ(small.command, (std::vector<std::string>{"a", "b c"}));
  std::string sources;
  for (const ConfigEntry& entry : config->entries()) sources += entry.path + "=" + entry.json + " " + ConfigSourceName(entry.source) + "\n";
  EXPECT_NE(sources.find("trainer.steps=5 file\ntrainer.lr=0.002 --set\ntrainer.tree=true default\n"), std::string::npos) << sources;
}

// The resolved file is what a resume reads: it must give the same values, without a line the schema does not know.
TEST(Config, ResolvedYamlIsAFixedPoint) {
  auto config = Config::Parse("name: \"7\"\ncpu: off\nsandbox: {memory: 4097, command: [\"x: y\", \"\\t\\\"é\"]}\ntrainer: {betas: [0.1, 1]}\n", "job.yaml");
  ASSERT_TRUE(config.ok());
  Small first, second;
  ASSERT_TRUE(ReadSmall(*config, &first).ok());
  const std::string yaml = config->ResolvedYaml();
  auto again = Config::Parse(yaml, "job.yaml");
  ASSERT_TRUE(again.ok()) << again.status().ToString() << "\n" << yaml;
  ASSERT_TRUE(ReadSmall(*again, &second).ok()) << yaml;
  EXPECT_EQ(again->ResolvedYaml(), yaml);
  EXPECT_EQ(second.name, "7");
  EXPECT_EQ(second.cpu, "off");
  EXPECT_EQ(second.command, first.command);
  EXPECT_EQ(second.betas, first.betas);
  EXPECT_EQ(second.memory, 4097);
}

// Each mistake gives one error that says where and what to write instead.
TEST(Config, MistakesAreNamedWithTheirPlace) {
  EXPECT_EQ(ErrorOf("trainer:\n  stpes: 3\n"), "job.yaml:2:3: trainer.stpes: unknown key; did you mean 'steps'?");
  EXPECT_EQ(ErrorOf("tariner: {steps: 3}\n"), "job.yaml:1:1: tariner: unknown key; did you mean 'trainer'?");
  EXPECT_EQ(ErrorOf("zzz: 1\n"), "job.yaml:1:1: zzz: unknown key; known here: name, cpu, trainer, sandbox");
  EXPECT_EQ(ErrorOf("trainer: {steps: many}\n"), "job.yaml:1:11: trainer.steps: expected a whole number, got the text 'many'");
  EXPECT_EQ(ErrorOf("trainer: {steps: \"3\"}\n"), "job.yaml:1:11: trainer.steps: expected a whole number, got the text '3'");
  EXPECT_EQ(ErrorOf("trainer: {steps: 2.5}\n"), "job.yaml:1:11: trainer.steps: expected a whole number, got the number 2.5");
  EXPECT_EQ(ErrorOf("trainer: {steps: 0}\n"), "job.yaml:1:11: trainer.steps: 0 is out of range: must be at least 1 and at most 1000");
  EXPECT_EQ(ErrorOf("trainer: {lr: 0}\n"), "job.yaml:1:11: trainer.lr: 0 is out of range: must be above 0");
  EXPECT_EQ(ErrorOf("trainer: {tree: yes}\n"), "job.yaml:1:11: trainer.tree: expected true or false, got the text 'yes'");
  EXPECT_EQ(ErrorOf("trainer: {betas: [1]}\n"), "job.yaml:1:11: trainer.betas: expected a list of 2 numbers, got a list");
  EXPECT_EQ(ErrorOf("trainer: 5\n"), "job.yaml:1:1: trainer: expected a block of keys, got the number 5");
  EXPECT_EQ(ErrorOf("name: 5\n"), "job.yaml:1:1: name: expected text (quote it), got the number 5");
  EXPECT_EQ(ErrorOf("name:\n"), "job.yaml:1:1: name: expected text, got nothing");
  EXPECT_EQ(ErrorOf("cpu: avx3\n"), "job.yaml:1:1: cpu: 'avx3' is not one of auto, avx2, off; did you mean 'avx2'?");
  EXPECT_EQ(ErrorOf("sandbox:\n  memory: 3GB\n"), "job.yaml:2:3: sandbox.memory: expected a size such as 4096, 64KiB, 256MiB or 1.5GiB, got the text '3GB'");
  EXPECT_EQ(ErrorOf("sandbox: {command: [a, 5]}\n"), "job.yaml:1:24: sandbox.command[1]: expected text (quote it), got the number 5");
  EXPECT_EQ(ErrorOf("name: a\nname: b\n"), "job.yaml:2:1: key 'name' twice in one block; the other one is at line 1");
  EXPECT_EQ(ErrorOf("trainer:\n\tsteps: 1\n"), "job.yaml:2:1: a tab; use spaces (inside double quotes write \\t)");
  EXPECT_EQ(ErrorOf("- a\n- b\n"), "job.yaml:1:1: expected a block of keys, got a list");
  EXPECT_EQ(ErrorOf("name: a\n---\nname: b\n"), "job.yaml: more than one document ('---')");
  EXPECT_NE(ErrorOf("name: [a\n").find("job.yaml:"), std::string::npos);
  EXPECT_NE(ErrorOf("name: !!str 5\n").find("tags"), std::string::npos);
  EXPECT_NE(ErrorOf("{a: 1}: b\n").find("a key must be a word"), std::string::npos);
  EXPECT_EQ(ErrorOf(""), "");
}

// --set is the last word, and its mistakes name the option rather than a line of the file.
TEST(Config, SetOverridesAndExplains) {
  EXPECT_EQ(ErrorOf("trainer: {steps: 0}\n", {"trainer.steps=3"}), "");
  EXPECT_EQ(ErrorOf("", {"trainer.stepz=3"}), "--set trainer.stepz=3: trainer.stepz: unknown key; did you mean 'steps'?");
  EXPECT_EQ(ErrorOf("", {"trainer.steps=x"}), "--set trainer.steps=x: trainer.steps: expected a whole number, got the text 'x'");
  EXPECT_EQ(ErrorOf("name: a\n", {"name.b=1"}), "--set name.b=1: name is the text 'a', not a block");
  EXPECT_EQ(ErrorOf("", {"trainer"}), "--set trainer: expected KEY.KEY=VALUE");
  EXPECT_EQ(ErrorOf("", {"=3"}), "--set =3: expected KEY.KEY=VALUE");
  EXPECT_EQ(ErrorOf("", {"sandbox={memory: 8KiB, threads: 2}"}), "");
  EXPECT_EQ(ErrorOf("", {"trainer.betas=[0.5, 0.5]"}), "");
  EXPECT_FALSE(ErrorOf("", {"a..b=1"}).empty());
}

// Aliases that multiply would fill the memory from a few lines.
TEST(Config, AliasBombsAreRefused) {
  EXPECT_EQ(ErrorOf("trainer: &t {steps: 3}\nsandbox: {}\n"), "");
  std::string bomb = "a0: &a0 [x, x, x, x, x, x, x, x]\n";
  for (int i = 1; i < 9; ++i) {
    const std::string last = "*a" + std::to_string(i - 1);
    bomb += "a" + std::to_string(i) + ": &a" + std::to_string(i) + " [" + last + ", " + last + ", " + last + "]\n";
  }
  EXPECT_NE(ErrorOf(bomb).find("more than"), std::string::npos) << ErrorOf(bomb);
  EXPECT_FALSE(ErrorOf("a: &a [*a]\n").empty());
  EXPECT_FALSE(ErrorOf(std::string(100000, '[')).empty());
  EXPECT_FALSE(ErrorOf(std::string(2 << 20, ' ')).empty());
  std::string deep;
  for (int i = 0; i < 3000; ++i) deep += std::string(static_cast<size_t>(i % 600), ' ') + "- \n";
  ErrorOf(deep);
}

// The algorithm block goes on as JSON: what is a number there must be one here.
TEST(Config, ToJsonKeepsTypes) {
  auto config = Config::Parse("a: {n: 3, x: 1.0e-3, t: \"3\", off: off, b: true, z: null, l: [1, x]}\n", "f");
  ASSERT_TRUE(config.ok());
  EXPECT_EQ(config->root().ToJson(), R"({"a":{"n":3,"x":0.001,"t":"3","off":"off","b":true,"z":null,"l":[1,"x"]}})");
  EXPECT_EQ(config->PlaceOf("a.l[1]").ToString(), "f:1:65");
  EXPECT_EQ(config->PlaceOf("a.q.r").ToString(), "f:1:1");
}

// Bytes from a user's editor must never crash or hang the reader.
TEST(Config, MutatedFilesAreHandled) {
  const std::string seed =
      "name: quick # c\ntrainer: &t\n  steps: 5\n  lr: 1.0e-3\n  betas: [0.9, 0.95]\nsandbox:\n  memory: 64KiB\n  command:\n  - \"a\\n\"\n  - 'b'\n  - |\n    text\n  threads: auto\nother: *t\n";
  Rng rng(11);
  for (int i = 0; i < 6000; ++i) {
    std::string text = seed;
    for (uint64_t k = rng.Below(5) + 1; k > 0; --k) {
      const size_t at = rng.Below(text.size());
      switch (rng.Below(5)) {
        case 0: text[at] = static_cast<char>(rng.Next()); break;
        case 1: text.erase(at, rng.Below(8)); break;
        case 2: text.insert(at, 1, "{}[]\":-&*!|>%@`#,?\n "[rng.Below(20)]); break;
        case 3: text.insert(at, text.substr(rng.Below(text.size()), rng.Below(20))); break;
        default: text.insert(at, std::string(rng.Below(6), ' ')); break;
      }
      if (text.empty()) text = "a";
    }
    auto config = Config::Parse(text, "f");
    if (!config.ok()) continue;
    Small small;
    if (!ReadSmall(*config, &small).ok()) continue;
    auto again = Config::Parse(config->ResolvedYaml(), "f");
    ASSERT_TRUE(again.ok()) << text << "\n" << config->ResolvedYaml() << again.status().ToString();
    ASSERT_TRUE(ReadSmall(*again, &small).ok()) << text << "\n" << config->ResolvedYaml();
    ASSERT_TRUE(ParseJson(config->root().ToJson()).ok());
  }
}

}  // namespace
}  // namespace temper
