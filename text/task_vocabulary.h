// The tokenizer and chat template of `vocab: tasks` (docs/job_file.md): made from the words of the tasks, so that a small policy
// has one id per word wherever it stands. Format of prompt and tool call: docs/task_vocabulary.md.
#pragma once

#include <span>
#include <string>

#include "common/status.h"

namespace temper::text {

struct TaskTextFiles {
  std::string tokenizer_json;
  std::string tokenizer_config_json;  // holds the chat template
};

// `texts`: any texts; every run of A-Z a-z in them becomes a word of the vocabulary (sorted, each once, beside the 256 bytes), so
// the files are a pure function of the set of words. Ids: bytes 0..255, then the special tokens in the order of
// TaskTokens, then the words.
TaskTextFiles MakeTaskVocabulary(std::span<const std::string> texts);

struct TaskTokens {
  static constexpr const char* kEnd = "<|end|>";              // ends an answer: the end-of-sequence token
  static constexpr const char* kSystem = "<|system|>";
  static constexpr const char* kUser = "<|user|>";
  static constexpr const char* kAssistant = "<|assistant|>";
  static constexpr const char* kTool = "<|tool|>";
  static constexpr const char* kToolCall = "<tool_call>";     // not special: it is part of the answer's text
};

}  // namespace temper::text
