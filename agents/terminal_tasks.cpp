#include "agents/terminal_tasks.h"

#include <algorithm>
#include <array>
#include <map>
#include <random>
#include <set>
#include <utility>

#include <boost/json.hpp>

#include "common/check.h"

namespace temper::agents {
namespace {

using Words = std::vector<std::string>;

const Words kNames = {"apple", "pear",  "plum",  "fig",   "kiwi",  "lemon", "mango", "melon", "peach", "grape", "olive",
                      "cherry", "bread", "cheese", "honey", "sugar", "pepper", "tomato", "carrot", "onion", "river", "stone",
                      "cloud", "tiger", "zebra", "whale", "eagle", "horse", "mouse", "candle", "ladder", "violin"};
const Words kContents = {"red",   "blue",  "green", "black", "white", "brown", "pink",  "gold",  "north", "south", "east",
                         "west",  "one",   "two",   "three", "four",  "five",  "six",   "seven", "eight", "spring", "summer",
                         "autumn", "winter", "cold", "warm",  "dry",   "wet",   "fast",  "slow",  "loud",  "calm"};
const Words kFolders = {"docs", "data", "text", "box", "shelf", "attic", "vault", "cabin"};
const Words kEndings = {"txt", "md", "cfg", "log", "csv", "ini", "tmp", "bak"};
const Words kKeys = {"color", "shade", "style", "theme", "shape", "label", "title", "mode"};
const Words kLevels = {"low", "mid", "high", "top", "mild", "full", "none", "peak"};

// The habits a guess follows: the first entry of each list above.
const std::string& HabitFolder() { return kFolders[0]; }
const std::string& HabitEnding() { return kEndings[0]; }
const std::string& HabitKey() { return kKeys[0]; }
const std::string& HabitLevel() { return kLevels[0]; }

enum class Family { kConfig, kFind, kFolder, kEnding, kLevel, kWrite, kMake, kCopy };
constexpr std::array<const char*, 8> kFamilyNames = {"config", "find", "folder", "ending", "level", "write", "make", "copy"};
using FamilyCycle = std::array<Family, 20>;
// 15 of 20 need looking; interleaved so that any run of consecutive tasks is balanced.
constexpr FamilyCycle kTaskCycle = {
    Family::kConfig, Family::kFind,   Family::kFolder, Family::kWrite,  Family::kEnding, Family::kLevel, Family::kConfig,
    Family::kCopy,   Family::kFind,   Family::kFolder, Family::kEnding, Family::kMake,   Family::kLevel, Family::kConfig,
    Family::kFind,   Family::kWrite,  Family::kFolder, Family::kEnding, Family::kLevel,  Family::kCopy};
// Demonstrations show plain tasks more often than they come up (7 of 20): with the poor ones among those that need looking, a
// policy that only imitates then fails three of four of them, while every ability is shown by enough good demonstrations.
constexpr FamilyCycle kDemonstrationCycle = {
    Family::kConfig, Family::kWrite, Family::kFind,  Family::kFolder, Family::kCopy,   Family::kEnding, Family::kLevel,
    Family::kMake,   Family::kConfig, Family::kFind, Family::kWrite,  Family::kFolder, Family::kEnding, Family::kCopy,
    Family::kLevel,  Family::kConfig, Family::kMake, Family::kFolder, Family::kEnding, Family::kWrite};

bool NeedsLook(Family family) { return family <= Family::kLevel; }

struct Phrasing {
  Words verbs;
  Words shapes;  // V = verb, A and B = the words of the task
};

const Phrasing& PhrasingOf(Family family) {
  static const std::array<Phrasing, 8> all = {{
      {{"set", "fix", "change", "turn"}, {"V the value in B to A", "in B V the value to A", "V the value of B to A"}},
      {{"remove", "delete", "drop", "erase"}, {"V the file with A", "V the file that holds A", "find A and V its file"}},
      {{"save", "write", "put", "store"}, {"V A as B in the folder", "in the folder V A as B", "V A in the folder as B"}},
      {{"copy", "clone", "duplicate", "repeat"},
       {"V A to B keeping its ending", "V A as B with its ending", "keep the ending and V A to B"}},
      {{"save", "write", "put", "store"}, {"V the level of A in B", "in B V the level of A", "V in B the level of A"}},
      {{"save", "write", "put", "store"}, {"V A in B", "in B V A", "V the word A in B"}},
      {{"make", "create", "add", "start"}, {"V a folder A", "V the folder A", "V folder A here"}},
      {{"copy", "clone", "duplicate", "repeat"}, {"V A to B", "V A as B", "V the file A to B"}},
  }};
  return all[static_cast<size_t>(family)];
}
const Words kPrefixes = {"", "please", "now"};

// Small deterministic draws; std::distributions differ between libraries, modulo does not.
class Draw {
 public:
  Draw(uint64_t seed, uint64_t stream, uint64_t index) {
    uint64_t x = seed * 0x9E3779B97F4A7C15ull ^ (stream + 1) * 0xBF58476D1CE4E5B9ull ^ (index + 1) * 0x94D049BB133111EBull;
    engine_.seed(x);
    engine_.discard(4);
  }
  uint64_t Below(uint64_t n) { return engine_() % n; }
  double Unit() { return static_cast<double>(engine_() >> 11) * 0x1p-53; }
  const std::string& Pick(const Words& words) { return words[Below(words.size())]; }

 private:
  std::mt19937_64 engine_;
};

// A combination belongs to exactly one split; every word and every verb occurs in training with some other partner.
bool HeldOutCombination(size_t a, size_t b) { return (a * 7 + b * 3) % 4 == 0; }
bool HeldOutPhrase(size_t verb, size_t shape, size_t prefix) { return (verb + 2 * shape + prefix) % 4 == 0; }

// The parts a task is made of, before it is put into words and files.
struct Plan {
  Family family = Family::kWrite;
  std::string a, b;      // the words of the phrasing
  std::string answer;    // what only a look can tell (key, file, folder, ending, level)
  std::string instruction;
  std::vector<TaskFile> files;
};

std::string Phrase(Draw& draw, Split split, const Plan& plan) {
  const Phrasing& phrasing = PhrasingOf(plan.family);
  size_t verb, shape, prefix;
  do {
    verb = draw.Below(phrasing.verbs.size());
    shape = draw.Below(phrasing.shapes.size());
    prefix = draw.Below(kPrefixes.size());
  } while (HeldOutPhrase(verb, shape, prefix) != (split == Split::kHeldOut));
  std::string out = kPrefixes[prefix].empty() ? "" : kPrefixes[prefix] + " ";
  for (char ch : phrasing.shapes[shape]) {
    switch (ch) {
      case 'V': out += phrasing.verbs[verb]; break;
      case 'A': out += plan.a; break;
      case 'B': out += plan.b; break;
      default: out += ch;
    }
  }
  return out;
}

// Two indices into lists of sizes na and nb whose combination belongs to `split`.
std::pair<size_t, size_t> Combination(Draw& draw, Split split, size_t na, size_t nb) {
  for (;;) {
    size_t a = draw.Below(na), b = draw.Below(nb);
    if (HeldOutCombination(a, b) == (split == Split::kHeldOut)) return {a, b};
  }
}

Words DistinctNames(Draw& draw, size_t count, std::set<std::string> taken) {
  Words out;
  while (out.size() < count) {
    const std::string& name = draw.Pick(kNames);
    if (taken.insert(name).second) out.push_back(name);
  }
  return out;
}

Plan MakePlan(uint64_t seed, int64_t index, Split split, const FamilyCycle& cycle) {
  Draw draw(seed, split == Split::kHeldOut ? 1 : 0, static_cast<uint64_t>(index));
  Plan plan;
  plan.family = cycle[static_cast<size_t>(index) % cycle.size()];
  auto names_contents = [&] { return Combination(draw, split, kNames.size(), kContents.size()); };
  switch (plan.family) {
    case Family::kConfig: {
      auto [n, v] = names_contents();
      plan.b = kNames[n];
      plan.a = kContents[v];
      plan.answer = draw.Pick(kKeys);
      std::string old;
      do old = draw.Pick(kContents); while (old == plan.a);
      plan.files = {{plan.b, plan.answer + "=" + old + "\n"}};
      break;
    }
    case Family::kFind: {
      auto [n, v] = names_contents();
      plan.a = kContents[v];
      plan.answer = kNames[n];
      plan.files = {{plan.answer, plan.a + "\n"}};
      for (const std::string& name : DistinctNames(draw, 2, {plan.answer})) {
        std::string content;
        do content = draw.Pick(kContents); while (content == plan.a);
        plan.files.push_back({name, content + "\n"});
      }
      break;
    }
    case Family::kFolder: {
      auto [n, v] = names_contents();
      plan.b = kNames[n];
      plan.a = kContents[v];
      plan.answer = draw.Pick(kFolders);
      plan.files = {{plan.answer, "", true}};
      for (const std::string& name : DistinctNames(draw, 2, {plan.b})) {
        plan.files.push_back({name, draw.Pick(kContents) + "\n"});
      }
      break;
    }
    case Family::kEnding: {
      auto [n, v] = Combination(draw, split, kNames.size(), kNames.size());
      if (n == v) v = (v + 4) % kNames.size();  // the residue of a step of 4 keeps the split
      plan.a = kNames[n];
      plan.b = kNames[v];
      plan.answer = draw.Pick(kEndings);
      plan.files = {{plan.a + "." + plan.answer, draw.Pick(kContents) + "\n"}};
      std::string ending;
      do ending = draw.Pick(kEndings); while (ending == plan.answer);
      plan.files.push_back({DistinctNames(draw, 1, {plan.a, plan.b})[0] + "." + ending, draw.Pick(kContents) + "\n"});
      break;
    }
    case Family::kLevel: {
      auto [n, v] = Combination(draw, split, kNames.size(), kNames.size());
      if (n == v) v = (v + 4) % kNames.size();
      plan.b = kNames[n];
      plan.a = kNames[v];
      plan.answer = draw.Pick(kLevels);
      plan.files = {{plan.a, "level=" + plan.answer + "\n"}};
      break;
    }
    case Family::kWrite: {
      auto [n, v] = names_contents();
      plan.b = kNames[n];
      plan.a = kContents[v];
      break;
    }
    case Family::kMake: {
      auto [n, v] = names_contents();
      plan.a = kNames[n];
      plan.files = {{kContents[v], kContents[v] + "\n"}};
      break;
    }
    case Family::kCopy: {
      auto [n, v] = Combination(draw, split, kNames.size(), kNames.size());
      if (n == v) v = (v + 4) % kNames.size();
      plan.a = kNames[n];
      plan.b = kNames[v];
      plan.files = {{plan.a, draw.Pick(kContents) + "\n"}};
      break;
    }
  }
  std::sort(plan.files.begin(), plan.files.end(), [](const TaskFile& x, const TaskFile& y) { return x.path < y.path; });
  plan.instruction = Phrase(draw, split, plan);
  return plan;
}

std::string ContentOf(const Plan& plan, const std::string& path) {
  for (const TaskFile& f : plan.files) {
    if (f.path == path) return f.content;
  }
  TEMPER_CHECK(false) << "no file " << path;
  return "";
}

// The state of the work folder, as the verifier sees it: path -> content, folders end in "/".
using Tree = std::map<std::string, std::string>;

Tree StartTree(const Plan& plan) {
  Tree tree;
  for (const TaskFile& f : plan.files) tree[f.directory ? f.path + "/" : f.path] = f.content;
  return tree;
}

// The end state that is right, from the definition of the family, not from running commands.
Tree RightTree(const Plan& plan) {
  Tree tree = StartTree(plan);
  switch (plan.family) {
    case Family::kConfig: tree[plan.b] = plan.answer + "=" + plan.a + "\n"; break;
    case Family::kFind: tree.erase(plan.answer); break;
    case Family::kFolder: tree[plan.answer + "/" + plan.b] = plan.a + "\n"; break;
    case Family::kEnding:
      tree[plan.b + "." + plan.answer] = ContentOf(plan, plan.a + "." + plan.answer);
      break;
    case Family::kLevel: tree[plan.b] = plan.answer + "\n"; break;
    case Family::kWrite: tree[plan.b] = plan.a + "\n"; break;
    case Family::kMake: tree[plan.a + "/"] = ""; break;
    case Family::kCopy: tree[plan.b] = ContentOf(plan, plan.a); break;
  }
  return tree;
}

// The command that does the work, given what the strategy believes the answer to be.
std::string Act(const Plan& plan, const std::string& answer) {
  switch (plan.family) {
    case Family::kConfig: return "echo " + answer + "=" + plan.a + " > " + plan.b;
    case Family::kFind: return "rm " + answer;
    case Family::kFolder: return "echo " + plan.a + " > " + answer + "/" + plan.b;
    case Family::kEnding: return "cp " + plan.a + "." + answer + " " + plan.b + "." + answer;
    case Family::kLevel: return "echo " + answer + " > " + plan.b;
    case Family::kWrite: return "echo " + plan.a + " > " + plan.b;
    case Family::kMake: return "mkdir " + plan.a;
    case Family::kCopy: return "cp " + plan.a + " " + plan.b;
  }
  return "";
}

DemoStep Look(const Plan& plan) {
  switch (plan.family) {
    case Family::kConfig: {
      std::string content = ContentOf(plan, plan.b);
      content.pop_back();
      return {"cat " + plan.b, content};
    }
    case Family::kFind: return {"grep -l " + plan.a + " *", plan.answer};
    case Family::kFolder: return {"ls -d */", plan.answer + "/"};
    case Family::kEnding: return {"ls " + plan.a + ".*", plan.a + "." + plan.answer};
    case Family::kLevel: return {"cat " + plan.a, "level=" + plan.answer};
    default: return {"ls", ""};
  }
}

DemoStep List(const Plan& plan) {
  std::string out;
  for (const TaskFile& f : plan.files) out += (out.empty() ? "" : "\n") + f.path;
  return {"ls", out};
}

// What a strategy that does not look properly believes.
std::string Habit(const Plan& plan) {
  switch (plan.family) {
    case Family::kConfig: return HabitKey();
    case Family::kFolder: return HabitFolder();
    case Family::kEnding: return HabitEnding();
    case Family::kLevel: return HabitLevel();
    default: return plan.files.empty() ? "" : plan.files[0].path;
  }
}

std::string FirstSeen(const Plan& plan) {
  const std::string first = plan.files.empty() ? "" : plan.files[0].path;
  switch (plan.family) {
    case Family::kFind:
    case Family::kFolder: return first;
    case Family::kEnding: return first.substr(first.find('.') + 1);
    default: return Habit(plan);
  }
}

// An echo into a file where a folder is named, or a copy of a missing file, fails and says so; everything else prints nothing.
DemoStep ActStep(const Plan& plan, const std::string& answer) {
  DemoStep step{Act(plan, answer), ""};
  if (plan.family == Family::kFolder && answer != plan.answer) {
    step.output = "sh: 1: cannot create " + answer + "/" + plan.b + ": Directory nonexistent";
  } else if (plan.family == Family::kEnding && answer != plan.answer) {
    step.output = "cp: cannot stat '" + plan.a + "." + answer + "': No such file or directory";
  }
  return step;
}

std::string TreeJson(const Tree& tree) {
  boost::json::object files;
  boost::json::array folders;
  for (const auto& [path, content] : tree) {
    if (path.back() == '/') folders.push_back(boost::json::string(path.substr(0, path.size() - 1)));
    else files[path] = content;
  }
  return boost::json::serialize(boost::json::object{{"files", files}, {"folders", folders}});
}

Task ToTask(const Plan& plan, int64_t index, Split split) {
  Task task;
  task.family = kFamilyNames[static_cast<size_t>(plan.family)];
  task.id = std::string(split == Split::kHeldOut ? "held-" : "train-") + std::to_string(index) + "-" + task.family;
  task.instruction = plan.instruction;
  task.files = plan.files;
  task.hidden = TreeJson(RightTree(plan));
  return task;
}

class TerminalTasks : public TaskSource {
 public:
  TerminalTasks(uint64_t seed, int64_t count, Split split) : seed_(seed), count_(count), split_(split) {}
  int64_t size() const override { return count_; }
  Task Get(int64_t index) const override {
    TEMPER_CHECK(index >= 0 && index < count_) << "task " << index << " of " << count_;
    return TerminalTask(seed_, index, split_);
  }

 private:
  uint64_t seed_;
  int64_t count_;
  Split split_;
};

}  // namespace

Task TerminalTask(uint64_t seed, int64_t index, Split split) {
  return ToTask(MakePlan(seed, index, split, kTaskCycle), index, split);
}

std::vector<std::string> TerminalWords() {
  std::set<std::string> words;
  auto add = [&](const std::string& text) {
    std::string word;
    for (char c : text + " ") {
      if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')) {
        word += c;
      } else if (!word.empty()) {
        if (word.size() > 1) words.insert(word);  // single letters are bytes of their own
        word.clear();
      }
    }
  };
  for (const Words* list : {&kNames, &kContents, &kKeys, &kFolders, &kEndings, &kLevels, &kPrefixes}) {
    for (const std::string& w : *list) add(w);
  }
  for (size_t f = 0; f < kFamilyNames.size(); ++f) {
    const Phrasing& p = PhrasingOf(static_cast<Family>(f));
    for (const std::string& v : p.verbs) add(v);
    for (const std::string& s : p.shapes) add(s);
  }
  for (const char* text : {"echo cat grep ls rm cp mkdir mv touch sh level done user assistant tool shell command",
                           "cannot create stat Not a directory Directory nonexistent No such file or omitting"}) {
    add(text);
  }
  return {words.begin(), words.end()};
}

const char* StrategyName(Strategy strategy) {
  switch (strategy) {
    case Strategy::kGood: return "good";
    case Strategy::kGuess: return "guess";
    case Strategy::kGlance: return "glance";
    case Strategy::kQuit: return "quit";
  }
  return "?";
}

Demonstration TerminalDemonstration(uint64_t seed, int64_t index, double poor_fraction) {
  const Plan plan = MakePlan(seed, index, Split::kTrain, kDemonstrationCycle);
  Draw draw(seed, 2, static_cast<uint64_t>(index));
  Demonstration demo;
  demo.task = ToTask(plan, index, Split::kTrain);
  // 13 looking and 7 plain tasks in 20: 1.516·f and 0.042·f average to f.
  const double poor = (NeedsLook(plan.family) ? 1.516 : 0.042) * poor_fraction;
  if (draw.Unit() < poor) {
    const uint64_t kind = draw.Below(20);
    demo.strategy = kind < 2 ? Strategy::kGuess : kind < 4 ? Strategy::kGlance : Strategy::kQuit;
  }
  const bool look = NeedsLook(plan.family);
  std::string believed = plan.answer;
  switch (demo.strategy) {
    case Strategy::kGood:
      if (look) demo.steps.push_back(Look(plan));
      demo.steps.push_back(ActStep(plan, believed));
      break;
    case Strategy::kGuess:
      // Nothing suggests a file name before a look, so in `find` even a guess lists the folder, then takes the last.
      if (plan.family == Family::kFind) demo.steps.push_back(List(plan));
      believed = plan.family == Family::kFind ? plan.files.back().path : Habit(plan);
      demo.steps.push_back(ActStep(plan, believed));
      break;
    case Strategy::kGlance:
      demo.steps.push_back(List(plan));
      believed = FirstSeen(plan);
      demo.steps.push_back(ActStep(plan, believed));
      break;
    case Strategy::kQuit:
      demo.steps.push_back(look ? Look(plan) : ActStep(plan, believed));
      break;
  }
  const bool acted = !(demo.strategy == Strategy::kQuit && look);
  demo.right = acted && (!look || believed == plan.answer);
  return demo;
}

std::unique_ptr<TaskSource> MakeTerminalTasks(uint64_t seed, int64_t count, Split split) {
  return std::make_unique<TerminalTasks>(seed, count, split);
}

}  // namespace temper::agents
