// The built-in task generator `terminal`: small jobs in a shell, most of which cannot be done without looking first.
//
//   looking needed (15 of 20 tasks)                               the look that tells
//   config   "set the value in apple to red"                 which key does the file use (color, shade, style, … of eight)
//   find     "remove the file with red"                          which file holds the word
//   folder   "save red as apple in the folder"                   what is the only folder called
//   ending   "copy apple to pear keeping its ending"              does the file end in txt, md, cfg, … (of eight)
//   level    "write the level of plum in apple"                   what does the file say
//   no look (5 of 20): write, folder creation, copy
//
// Demonstrations for supervised warm-up follow a good strategy (look, act, say done) or one of three poor ones, each of them
// right on some tasks: `guess` acts at once out of habit (right on one in eight of the looking tasks with a habit, and on all
// that need no look), `glance` lists the folder and takes the first thing it sees (right on about a third of `find`, `folder`
// and `ending`), `quit` stops after its first command (right where one command is enough). What reinforcement learning
// then has to change is the choice of strategy, not an ability.
//
// Pure: the same (seed, index, split) gives the same task on every machine.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "agents/task.h"

namespace temper::agents {

Task TerminalTask(uint64_t seed, int64_t index, Split split);

// Every word of instructions, commands, file names and contents, once each; the words of `model.create.vocab: tasks`.
std::vector<std::string> TerminalWords();

enum class Strategy { kGood, kGuess, kGlance, kQuit };
const char* StrategyName(Strategy strategy);

// One step of a demonstration: a shell command and what it prints. The demonstration ends with the assistant's "done".
struct DemoStep {
  std::string command;
  std::string output;  // without the trailing newline
};

struct Demonstration {
  Task task;
  Strategy strategy = Strategy::kGood;
  std::vector<DemoStep> steps;
  bool right = false;  // would the verifier accept the end state? (computed by a model of the commands used)
};

// Demonstration number `index` on a train task; 13 of 20 need looking. `poor_fraction` of all demonstrations follow a poor
// strategy: looking families get nearly all of them, in a fixed proportion (at 0.5, three of four of theirs).
Demonstration TerminalDemonstration(uint64_t seed, int64_t index, double poor_fraction);

}  // namespace temper::agents
