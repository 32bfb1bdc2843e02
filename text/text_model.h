// TextModel: everything a model says about text, together: tokenizer, chat template, end tokens, tool-call format.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/status.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"
#include "text/tool_calls.h"

namespace temper::text {

// The text files of a model folder, or the metadata of a GGUF file (then `gguf` is set and the rest empty).
struct TextFiles {
  std::string tokenizer_json;
  std::string tokenizer_config_json;    // may be empty
  std::string special_tokens_map_json;  // may be empty
  std::string chat_template_jinja;      // may be empty; wins over the one in tokenizer_config.json
  std::string generation_config_json;   // may be empty; its eos_token_id are end tokens too
  std::optional<GgufTokenizer> gguf;
};

struct TextModel {
  Tokenizer tokenizer;
  std::optional<ChatTemplate> chat_template;  // with the special tokens as variables; absent when the model has none
  std::optional<ChatTemplate> tool_template;  // a template of its own for requests with tools, when the model has one
  std::vector<int32_t> end_ids;               // tokens that end an answer, sorted; may be empty
  ToolFormat tool_format = ToolFormat::kNone;

  bool template_shows_calls = true;           // the template reads `tool_calls`

  // The messages as the template can show them. One that knows nothing of tool calls would drop them from the history: there they
  // stand in the content, in the form that ParseToolCalls reads back. A missing content becomes "".
  Value ShowCalls(const Value& messages) const;
  // Renders the messages as they are with the template that fits (tools given or not). FailedPrecondition when the model has none.
  Result<std::string> Render(const RenderInput& input) const;
};

Result<TextModel> LoadTextModel(const TextFiles& files);

// tokenizer.json and tokenizer_config.json that say the same as the metadata of a GGUF file.
Result<TextFiles> HuggingFaceFiles(const GgufTokenizer& gguf);

}  // namespace temper::text
