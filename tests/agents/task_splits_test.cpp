// What the two splits of the terminal tasks share and what they do not.
#include <gtest/gtest.h>

#include <set>
#include <string>

#include <boost/json.hpp>

#include "agents/terminal_tasks.h"
#include "common/strings.h"

namespace temper::agents {
namespace {

// An instruction without the words of its task: "set the value in _ to _"; and those words.
struct Shape {
  std::string phrase, words;
};

Shape ShapeOf(const Task& task) {
  std::set<std::string> own;
  auto take = [&](std::string text) {
    for (char& c : text) {
      if (!isalpha(static_cast<unsigned char>(c))) c = ' ';
    }
    for (const std::string& word : temper::Split(text, ' ')) own.insert(word);
  };
  for (const TaskFile& file : task.files) take(file.path + " " + file.content);
  const boost::json::value hidden = boost::json::parse(task.hidden);
  for (const auto& [path, content] : hidden.at("files").as_object()) take(std::string(path) + " " + std::string(content.as_string()));
  for (const auto& path : hidden.at("folders").as_array()) take(std::string(path.as_string()));
  Shape shape;
  for (const std::string& word : temper::Split(task.instruction, ' ')) {
    shape.phrase += (own.count(word) ? "_" : word) + " ";
    if (own.count(word)) shape.words += word + " ";
  }
  return shape;
}

// What could go wrong: held-out tasks are new in one respect only, and the policy may recite what it learnt of the others.
TEST(TaskSplits, NoPhraseAndNoPairOfWordsIsInBoth) {
  std::set<std::string> phrases, pairs, families;
  for (int i = 0; i < 8192; ++i) {
    const Task task = TerminalTask(7, i, Split::kTrain);
    const Shape shape = ShapeOf(task);
    phrases.insert(shape.phrase);
    pairs.insert(task.family + ": " + shape.words);
    families.insert(task.family);
  }
  EXPECT_GE(families.size(), 5u);
  std::set<std::string> new_phrases;
  int two_words = 0;
  for (int i = 0; i < 256; ++i) {
    const Task task = TerminalTask(7, i, Split::kHeldOut);
    const Shape shape = ShapeOf(task);
    EXPECT_FALSE(phrases.count(shape.phrase)) << shape.phrase;
    new_phrases.insert(shape.phrase);
    if (shape.words.find(' ') + 1 == shape.words.size()) continue;
    ++two_words;
    EXPECT_FALSE(pairs.count(task.family + ": " + shape.words)) << task.family << ": " << shape.words;
  }
  EXPECT_GT(new_phrases.size(), 20u);
  EXPECT_GT(two_words, 150);
}

}  // namespace
}  // namespace temper::agents
