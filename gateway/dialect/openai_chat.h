// The OpenAI Chat Completions dialect: request bytes → ChatRequest, Answer → response bytes or server-sent events.
//
// Pure. Strict about what cannot be done: such a field is refused by name, never ignored; fields without effect on the answer
// and unknown fields are accepted. docs/gateway.md lists every field.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "gateway/policy_text.h"
#include "gateway/types.h"

namespace temper::gateway::openai {

inline constexpr int kChoicesMax = 8;

// Of untrusted bytes. A Refusal names the field (`param`).
std::variant<ChatRequest, Refusal> ParseChatRequest(std::string_view body);

// {"id":…,"object":"chat.completion",…}
std::string ChatBody(const ChatRequest& request, const Answer& answer, const PolicyText& text);

// The events of one streamed answer, in order: Start, any Content, Finish. Each returns whole `data: …\n\n` frames. The
// aggregate of a stream equals the message of ChatBody.
class ChatStream {
 public:
  ChatStream(const ChatRequest& request, const PolicyText& text, std::string id, int64_t created_s);

  std::string Start() const;  // the role of every choice
  // Visible text that was added, and the tokens drawn since the last event of this choice (for logprobs).
  std::string Content(int choice, std::string_view added, const std::vector<int32_t>& ids, const std::vector<float>& logprobs);
  // What Content did not show yet, tool calls whole, finish reasons, usage when asked for, [DONE].
  std::string Finish(const Answer& answer);
  // A failure after the head was sent: the last event, without [DONE].
  static std::string Error(const Refusal& refusal);

 private:
  const ChatRequest& request_;
  const PolicyText& text_;
  const std::string id_;
  const int64_t created_s_;
  struct Shown {
    size_t bytes = 0;
    size_t tokens = 0;
  };
  std::vector<Shown> shown_;
};

// {"error":{"message":…,"type":…,"param":…,"code":…}}
std::string ErrorBody(const Refusal& refusal);

struct ModelCard {
  std::string id;
  int64_t created_s = 0;
  int context_tokens = 0;
};
std::string ModelsBody(const std::vector<ModelCard>& models);
std::string ModelBody(const ModelCard& model);

}  // namespace temper::gateway::openai
