// ToolCallParser: finds the tool calls in a sampled answer.
//
// Never throws bytes away: when anything in the answer is ill-formed the whole answer is content and `ill_formed` says why.
// Pure; thread-safe.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/value.h"

namespace temper::text {

enum class ToolFormat {
  kNone,    // the model has no tool calls: all text is content
  kHermes,  // <tool_call>{"name":…,"arguments":{…}}</tool_call>, repeated (Hermes, Qwen 2.5 and 3, SmolLM)
  kTask,    // <tool_call>ARGUMENT up to the next <tool_call> or the end (vocab: tasks, text/task_vocabulary.h)
};
const char* ToolFormatName(ToolFormat format);

// The format a model writes, told from the source of its chat template; kHermes for a template without sign of tools.
ToolFormat ToolFormatOf(std::string_view template_source);

struct ToolCall {
  std::string name;
  std::string arguments;  // the JSON text of an object
};

struct ParsedAnswer {
  std::string content;  // what is left of the text beside the calls
  std::vector<ToolCall> calls;
  bool ill_formed = false;
  std::string problem;  // one line when ill_formed
};

// `text`: the sampled answer without its stop token. `tools`: the request's tools (OpenAI form; a list or none); without tools
// all text is content. `complete`: false when the answer was cut by its length, so that an open call is ill-formed.
ParsedAnswer ParseToolCalls(ToolFormat format, std::string_view text, const Value& tools, bool complete = true);

// One call as a Hermes model writes it; `function` has `name` and `arguments` (an object, or its JSON text).
std::string HermesCall(const Value& function);

// For streaming: how many leading bytes of `text` are certainly content whatever follows (calls begin after them).
size_t CertainContent(ToolFormat format, std::string_view text);

}  // namespace temper::text
