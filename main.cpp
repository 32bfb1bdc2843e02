// The one binary: looks up `temper GROUP NAME` in the table of doors and runs it. No logic of its own.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "common/command.h"
#include "datapool/bench/commands.h"
#include "datapool/commands.h"
#include "engine/commands.h"
#include "engine/files/commands.h"
#include "engine/decode/commands.h"
#include "gateway/commands.h"
#include "job/commands.h"
#include "sandbox/commands.h"
#include "trainer/bench/commands.h"
#include "trainer/commands.h"
#include "verifiers/commands.h"

namespace temper {
namespace {

std::vector<Command> AllCommands() {
  std::vector<Command> all;
  auto add = [&](const std::vector<Command>& part) { all.insert(all.end(), part.begin(), part.end()); };
  add(trainer::Commands());
  add(trainer::BenchCommands());
  add(datapool::Commands());
  add(datapool::BenchCommands());
  add(engine::Commands());
  add(engine::FileCommands());
  add(engine::DecodeCommands());
  add(gateway::Commands());
  add(sandbox::Commands());
  add(verifiers::Commands());
  add(job::Commands());
  return all;
}

// Of one group alone where `group` is not empty.
int Usage(const std::vector<Command>& all, FILE* out, const std::string& group = "") {
  std::fprintf(out, "usage: temper %sCOMMAND [ARGUMENTS]   (temper %sCOMMAND --help says more)\n\n", group.empty() ? "" : (group + " ").c_str(),
               group.empty() ? "" : (group + " ").c_str());
  for (const Command& c : all) {
    if (!group.empty() && group != c.group) continue;
    std::string name = *c.group ? std::string(c.group) + " " + c.name : std::string(c.name);
    std::fprintf(out, "  %-24s %s\n", name.c_str(), c.summary);
  }
  if (group.empty()) std::fprintf(out, "  %-24s %s\n", "test", "the test tiers (through the launcher ./temper of a checkout)");
  return out == stdout ? 0 : 2;
}

bool AsksForHelp(const char* word) { return !std::strcmp(word, "--help") || !std::strcmp(word, "-h") || !std::strcmp(word, "help"); }

int Main(int argc, char** argv) {
  const std::vector<Command> all = AllCommands();
  if (argc < 2) return Usage(all, stderr);
  if (AsksForHelp(argv[1])) return Usage(all, stdout);
  const bool group = std::any_of(all.begin(), all.end(), [&](const Command& c) { return !std::strcmp(argv[1], c.group); });
  if (*argv[1] && group && (argc < 3 || AsksForHelp(argv[2]))) return Usage(all, argc < 3 ? stderr : stdout, argv[1]);
  for (const Command& c : all) {
    int words = *c.group ? 2 : 1;
    bool match = *c.group ? (argc > 2 && !std::strcmp(argv[1], c.group) && !std::strcmp(argv[2], c.name))
                          : !std::strcmp(argv[1], c.name);
    if (!match) continue;
    std::string program = "temper " + (*c.group ? std::string(c.group) + " " + c.name : std::string(c.name));
    argv[words] = program.data();
    // Wherever it stands: help, and nothing else. What follows `--` is another program's.
    for (int i = words + 1; i < argc && std::strcmp(argv[i], "--") != 0; ++i) {
      if (std::strcmp(argv[i], "--help") != 0) continue;
      char* help[] = {argv[words], argv[i], nullptr};
      return c.run(2, help);
    }
    return c.run(argc - words, argv + words);
  }
  std::fprintf(stderr, "temper: no command '%s%s%s'; `temper --help` lists them\n", argv[1], argc > 2 ? " " : "",
               argc > 2 ? argv[2] : "");
  return 2;
}

}  // namespace
}  // namespace temper

int main(int argc, char** argv) { return temper::Main(argc, argv); }
