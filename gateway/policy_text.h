// What the gateway asks of the policy's text side: template, tokenizer, tool-call format. The real one wraps text::TextModel
// (NewPolicyText); tests have a byte-level one of their own. Const and thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"
#include "text/tool_calls.h"
#include "text/value.h"

namespace temper::text {
struct TextModel;
}

namespace temper::gateway {

class PolicyText {
 public:
  virtual ~PolicyText() = default;

  // The prompt's text. `variables`: a dict or undefined. Errors: InvalidArgument (the template refused).
  virtual Result<std::string> Render(const text::Value& messages, const text::Value& tools, bool add_generation_prompt,
                                     const text::Value& variables) const = 0;
  // Special tokens in the text become their ids; nothing is put before or after.
  virtual std::vector<int32_t> Encode(std::string_view text) const = 0;
  // The same of a text that goes on behind the token `last`.
  virtual std::vector<int32_t> EncodeAfter(int32_t last, std::string_view text) const = 0;
  // Encode gives no fewer ids; cheap. Asked before a giant text is encoded in vain.
  virtual size_t LeastTokens(std::string_view text) const = 0;
  virtual std::string_view TokenBytes(int32_t id) const = 0;
  virtual bool IsSpecial(int32_t id) const = 0;
  // The tokens that end an answer.
  virtual const std::vector<int32_t>& end_ids() const = 0;
  virtual text::ParsedAnswer Parse(std::string_view text, const text::Value& tools, bool complete) const = 0;
  // How many leading bytes of a growing answer are certainly content.
  virtual size_t CertainContent(std::string_view text, const text::Value& tools) const = 0;
};

std::unique_ptr<PolicyText> NewPolicyText(text::TextModel model);

}  // namespace temper::gateway
