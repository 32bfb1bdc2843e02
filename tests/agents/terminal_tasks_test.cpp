#include "agents/terminal_tasks.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include <boost/json.hpp>

namespace temper::agents {
namespace {

namespace fs = std::filesystem;

class Folder {
 public:
  Folder() {
    std::string name = (fs::temp_directory_path() / "temper-tasks-XXXXXX").string();
    path_ = mkdtemp(name.data());
  }
  ~Folder() { fs::remove_all(path_); }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

void Lay(const Task& task, const fs::path& root) {
  for (const TaskFile& f : task.files) {
    if (f.directory) {
      fs::create_directories(root / f.path);
    } else {
      std::ofstream(root / f.path) << f.content;
    }
  }
}

std::string Shell(const fs::path& root, const std::string& command) {
  const std::string line = "cd " + root.string() + " && LC_ALL=C sh -c \"$TEMPER_TEST_COMMAND\" 2>&1";
  setenv("TEMPER_TEST_COMMAND", command.c_str(), 1);
  FILE* pipe = popen(line.c_str(), "r");
  std::string out;
  std::array<char, 512> buffer;
  while (size_t n = fread(buffer.data(), 1, buffer.size(), pipe)) out.append(buffer.data(), n);
  pclose(pipe);
  while (!out.empty() && out.back() == '\n') out.pop_back();
  return out;
}

// Files and folders as TerminalTask's hidden JSON has them.
std::string TreeOf(const fs::path& root) {
  std::map<std::string, std::string> files;
  std::set<std::string> folders;
  for (const auto& entry : fs::recursive_directory_iterator(root)) {
    const std::string path = fs::relative(entry.path(), root).string();
    if (entry.is_directory()) {
      folders.insert(path);
    } else {
      std::stringstream text;
      text << std::ifstream(entry.path()).rdbuf();
      files[path] = text.str();
    }
  }
  boost::json::object f;
  for (const auto& [k, v] : files) f[k] = v;
  boost::json::array d;
  for (const auto& k : folders) d.push_back(boost::json::string(k));
  return boost::json::serialize(boost::json::object{{"files", f}, {"folders", d}});
}

// What could go wrong: demonstrations teach outputs no shell gives, or count a wrong end state as right.
TEST(TerminalTasks, DemonstrationsAreWhatAShellDoes) {
  for (int i = 0; i < 160; ++i) {
    const Demonstration demo = TerminalDemonstration(3, i, 0.7);
    Folder folder;
    Lay(demo.task, folder.path());
    for (const DemoStep& step : demo.steps) {
      EXPECT_EQ(Shell(folder.path(), step.command), step.output) << demo.task.id << " " << step.command;
    }
    EXPECT_EQ(TreeOf(folder.path()) == demo.task.hidden, demo.right)
        << demo.task.id << " " << StrategyName(demo.strategy) << " " << demo.task.instruction;
    EXPECT_TRUE(demo.right || demo.strategy != Strategy::kGood) << demo.task.id;
  }
}

// What could go wrong: the poor strategies are never right (then RL need only learn not to be them), or too often.
TEST(TerminalTasks, HalfThePoorStrategiesAndEachRightSometimes) {
  std::map<Strategy, std::pair<int, int>> by_strategy;
  std::map<std::string, std::pair<int, int>> by_family;
  int poor = 0, right = 0;
  const int n = 8000;
  for (int i = 0; i < n; ++i) {
    const Demonstration demo = TerminalDemonstration(11, i, 0.5);
    poor += demo.strategy != Strategy::kGood;
    right += demo.right;
    auto& s = by_strategy[demo.strategy];
    ++s.first;
    s.second += demo.right;
    auto& f = by_family[demo.task.family];
    ++f.first;
    f.second += demo.right;
  }
  EXPECT_NEAR(poor / double(n), 0.5, 0.02);
  for (Strategy s : {Strategy::kGuess, Strategy::kGlance, Strategy::kQuit}) {
    EXPECT_GT(by_strategy[s].second, 0) << StrategyName(s);
    EXPECT_LT(by_strategy[s].second, by_strategy[s].first / 2) << StrategyName(s);
  }
  for (const char* family : {"config", "find", "folder", "ending", "level"}) {
    EXPECT_LT(by_family[family].second / double(by_family[family].first), 0.6) << family;
  }
  EXPECT_LT(right / double(n), 0.62);
}

// What could go wrong: held-out tasks were seen in training, or hold words that training never showed.
TEST(TerminalTasks, HeldOutIsNewCombinationsOfKnownWords) {
  std::set<std::string> train, train_words;
  auto words = [](const std::string& text) {
    std::vector<std::string> out;
    std::string word;
    for (char c : text + " ") {
      if (isalpha(static_cast<unsigned char>(c))) {
        word += c;
      } else if (!word.empty()) {
        out.push_back(word);
        word.clear();
      }
    }
    return out;
  };
  auto text_of = [](const Task& task) {
    std::string out = task.instruction;
    for (const TaskFile& f : task.files) out += " " + f.path + " " + f.content;
    return out;
  };
  for (int i = 0; i < 4096; ++i) {
    const Task task = TerminalTask(7, i, Split::kTrain);
    train.insert(task.instruction);
    for (const std::string& w : words(text_of(task))) train_words.insert(w);
  }
  const std::vector<std::string> list = TerminalWords();
  const std::set<std::string> vocabulary(list.begin(), list.end());
  EXPECT_EQ(vocabulary.size(), list.size());
  int looking = 0;
  std::set<std::string> ids;
  for (int i = 0; i < 256; ++i) {
    const Task task = TerminalTask(7, i, Split::kHeldOut);
    EXPECT_FALSE(train.count(task.instruction)) << task.instruction;
    std::string hidden = task.hidden;
    for (size_t at; (at = hidden.find("\\n")) != std::string::npos;) hidden.replace(at, 2, "  ");
    for (const std::string& w : words(text_of(task) + " " + hidden)) {
      if (w == "files" || w == "folders") continue;
      EXPECT_TRUE(train_words.count(w)) << w;
      EXPECT_TRUE(w.size() == 1 || vocabulary.count(w)) << w;
    }
    looking += task.family != "write" && task.family != "make" && task.family != "copy";
    ids.insert(task.id);
  }
  EXPECT_EQ(ids.size(), 256u);
  EXPECT_GE(looking, 154);  // 60 %
}

// What could go wrong: a held-out sum was trained on, the hidden answer is another, or a seed changes nothing.
TEST(SumTasks, PairsAreSplitAndAnswersRight) {
  std::set<std::string> train;
  auto tasks = MakeSumTasks(7, 4096, Split::kTrain);
  auto held = MakeSumTasks(7, 256, Split::kHeldOut);
  for (const auto& list : {tasks.get(), held.get()}) {
    for (int64_t i = 0; i < list->size(); ++i) {
      const Task task = list->Get(i);
      int a = 0, b = 0, used = 0;
      ASSERT_EQ(std::sscanf(task.instruction.c_str(), "What is %d + %d? Answer with the number only.%n", &a, &b, &used), 2);
      EXPECT_EQ(static_cast<size_t>(used), task.instruction.size());
      EXPECT_TRUE(a >= 1 && a <= 20 && b >= 1 && b <= 20) << task.instruction;
      EXPECT_EQ(boost::json::parse(task.hidden).at("answer").as_int64(), a + b);
      if (list == tasks.get()) train.insert(task.instruction);
      else EXPECT_FALSE(train.count(task.instruction)) << task.instruction;
    }
  }
  EXPECT_EQ(train.size(), 300u);  // every pair that is not held out comes up
  EXPECT_NE(MakeSumTasks(8, 1, Split::kTrain)->Get(0).instruction + MakeSumTasks(8, 2, Split::kTrain)->Get(1).instruction,
            tasks->Get(0).instruction + tasks->Get(1).instruction);
}

}  // namespace
}  // namespace temper::agents
