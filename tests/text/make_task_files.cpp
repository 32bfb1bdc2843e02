// Writes the files of the task vocabulary made from the texts given: make_task_files DIR TEXT… (for the golden generator).
#include <fstream>
#include <string>
#include <vector>

#include "text/task_vocabulary.h"

int main(int argc, char** argv) {
  const std::vector<std::string> texts(argv + 2, argv + argc);
  const auto files = temper::text::MakeTaskVocabulary(texts);
  std::ofstream(std::string(argv[1]) + "/tokenizer.json") << files.tokenizer_json;
  std::ofstream(std::string(argv[1]) + "/tokenizer_config.json") << files.tokenizer_config_json;
  return 0;
}
