// Times Tokenizer::Encode for tests/text/speed_test.py: encode_speed TOKENIZER.json TEXTS.jsonl (JSON strings).
// For each line on standard input: encodes all texts on this thread, prints the seconds and the number of ids.
#include <chrono>
#include <cstdio>
#include <iostream>
#include <string>

#include "tests/text/golden.h"
#include "text/tokenizer.h"

int main(int argc, char** argv) {
  using namespace temper::text;
  if (argc != 3) return 2;
  const Tokenizer tokenizer = Tokenizer::FromJson(ReadFile(argv[1])).value();
  std::vector<std::string> texts;
  for (const Value& line : ReadLines(argv[2])) texts.push_back(line.as_string());
  for (std::string line; std::getline(std::cin, line);) {
    const auto start = std::chrono::steady_clock::now();
    size_t ids = 0;
    for (const std::string& text : texts) ids += tokenizer.Encode(text, {.parse_special = true}).size();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::printf("%.6f %zu\n", seconds, ids);
    std::fflush(stdout);
  }
}
