// ChatTemplate: renders a list of chat messages to the model's prompt with its Jinja template.
//
// Problem: the prompt must be, byte for byte, what Hugging Face's apply_chat_template gives. Idea: an interpreter of Jinja with
// Python's semantics under the same settings (trim_blocks, lstrip_blocks, loop controls, generation tag, immutable values),
// checked against Python. The template is parsed once; Render is const and thread-safe. Hostile templates end: steps,
// depth and output are bounded.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "common/status.h"
#include "text/value.h"

namespace temper::text {

struct RenderInput {
  Value messages;                      // list of messages as in the OpenAI Chat API, given to the template unchanged
  Value tools = nullptr;               // list or none
  Value documents = nullptr;           // list or none
  bool add_generation_prompt = false;
  Value variables;                     // dict of further variables; they override the special tokens; undefined = none
  std::optional<int64_t> now_s;        // what strftime_now takes for now, in seconds since the epoch; absent: the clock
};

class ChatTemplate {
 public:
  // Errors: InvalidArgument with line and the construct that is wrong or not supported.
  static Result<ChatTemplate> Parse(std::string_view source);

  ChatTemplate(ChatTemplate&&) noexcept;
  ChatTemplate& operator=(ChatTemplate&&) noexcept;
  ~ChatTemplate();

  // Variables of every rendering (bos_token, eos_token, …): a dict.
  void SetDefaults(Value variables);

  // Errors: InvalidArgument for a refusal of the template itself (raise_exception) and for runtime errors (use of something
  // undefined, wrong type, no such attribute), with the line; ResourceExhausted over a bound.
  Result<std::string> Render(const RenderInput& input) const;

  const std::string& source() const;

 private:
  struct Impl;
  explicit ChatTemplate(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// The messages with each tool_calls[].function.arguments that is the JSON text of an object replaced by that object, which is
// what most templates expect; text that is no JSON object stays as it is. For the door of an API, not for `text render`.
Value WithParsedToolArguments(const Value& messages);

}  // namespace temper::text
