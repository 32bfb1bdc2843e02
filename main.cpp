// The one binary: looks up `temper GROUP NAME` in the table of doors and runs it. No logic of its own.
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "common/command.h"
#include "datapool/commands.h"
#include "engine/commands.h"
#include "engine/files/commands.h"
#include "engine/decode/commands.h"
#include "gateway/commands.h"
#include "job/commands.h"
#include "sandbox/commands.h"
#include "trainer/commands.h"
#include "verifiers/commands.h"

namespace temper {
namespace {

std::vector<Command> AllCommands() {
  std::vector<Command> all;
  auto add = [&](const std::vector<Command>& part) { all.insert(all.end(), part.begin(), part.end()); };
  add(trainer::Commands());
  add(datapool::Commands());
  add(engine::Commands());
  add(engine::FileCommands());
  add(engine::DecodeCommands());
  add(gateway::Commands());
  add(sandbox::Commands());
  add(verifiers::Commands());
  add(job::Commands());
  return all;
}

int Usage(const std::vector<Command>& all, FILE* out) {
  std::fprintf(out, "usage: temper COMMAND [ARGUMENTS]   (temper COMMAND --help says more)\n\n");
  for (const Command& c : all) {
    std::string name = *c.group ? std::string(c.group) + " " + c.name : std::string(c.name);
    std::fprintf(out, "  %-24s %s\n", name.c_str(), c.summary);
  }
  return out == stdout ? 0 : 2;
}

int Main(int argc, char** argv) {
  const std::vector<Command> all = AllCommands();
  if (argc < 2) return Usage(all, stderr);
  if (!std::strcmp(argv[1], "--help") || !std::strcmp(argv[1], "-h") || !std::strcmp(argv[1], "help")) {
    return Usage(all, stdout);
  }
  for (const Command& c : all) {
    int words = *c.group ? 2 : 1;
    bool match = *c.group ? (argc > 2 && !std::strcmp(argv[1], c.group) && !std::strcmp(argv[2], c.name))
                          : !std::strcmp(argv[1], c.name);
    if (!match) continue;
    std::string program = "temper " + (*c.group ? std::string(c.group) + " " + c.name : std::string(c.name));
    argv[words] = program.data();
    return c.run(argc - words, argv + words);
  }
  std::fprintf(stderr, "temper: no command '%s%s%s'; `temper --help` lists them\n", argv[1], argc > 2 ? " " : "",
               argc > 2 ? argv[2] : "");
  return 2;
}

}  // namespace
}  // namespace temper

int main(int argc, char** argv) { return temper::Main(argc, argv); }
