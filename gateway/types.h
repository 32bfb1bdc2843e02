// The canonical form of a model call: what every dialect is turned into, and what every dialect's answer is made of.
//
// Plain data, no proto, no threads. Token ids are int32 as in the engine.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/decode/types.h"
#include "text/value.h"

namespace temper::gateway {

enum class Role { kSystem, kUser, kAssistant, kTool };

struct ToolCall {
  std::string id = {};
  std::string name = {};
  std::string arguments = {};  // the text on the wire, as it came; usually a JSON object
};

struct Message {
  Role role = Role::kUser;
  std::string content = {};  // text parts joined; "" for null
  std::string reasoning = {};
  std::vector<ToolCall> tool_calls = {};
  std::string tool_call_id = {};  // of a tool message
  std::string name = {};
};

// One request. Fields that name a draw are what the client asked for; the session decides what is done.
struct ChatRequest {
  std::string model;
  std::vector<Message> messages;
  text::Value tools = nullptr;      // a list in OpenAI form ({type, function: {…}}), or none
  text::Value variables;            // chat_template_kwargs: a dict, or undefined
  bool stream = false;
  bool include_usage = false;
  int n = 1;
  std::optional<uint32_t> max_tokens;
  std::optional<float> temperature, top_p, min_p;
  std::optional<uint32_t> top_k;
  std::optional<uint64_t> seed;
  std::vector<std::string> stop;
  bool logprobs = false;
  bool return_token_ids = false;
  // Accepted only where the session's own policy overrides the client (names, for the call's note); a session that lets the
  // client choose refuses them.
  std::vector<std::string> unsupported_sampling;
};

// A refusal of a call, in OpenAI's words.
struct Refusal {
  int status = 400;
  std::string type = "invalid_request_error";
  std::string code = {};   // "" = null
  std::string param = {};  // "" = null
  std::string message = {};
  int retry_after_ms = 0;  // > 0: a header says so; 0: `x-should-retry: false` unless the status is one that SDKs never retry
};

// Tokens of one choice that were drawn at one version.
struct Span {
  std::vector<int32_t> ids = {};
  std::vector<float> logprobs = {};  // one per id
  std::vector<std::string> kept = {};  // empty, or one per id (engine/kept_set.h)
  engine::Version version = {};
  bool mixed = false;
};

// One completion as the client sees it.
struct Choice {
  std::string content;
  std::string reasoning;
  std::vector<ToolCall> tool_calls;
  std::string finish;  // stop | length | tool_calls
  std::vector<int32_t> ids;      // every sampled id, the end token included
  std::vector<float> logprobs;
};

struct Answer {
  std::string id;  // chatcmpl-…
  int64_t created_s = 0;
  std::vector<Choice> choices;
  int prompt_tokens = 0;
  int cached_tokens = 0;
  std::vector<int32_t> prompt_ids;  // only when asked for
  engine::Version version;
  int completion_tokens() const {
    int sum = 0;
    for (const Choice& c : choices) sum += static_cast<int>(c.ids.size());
    return sum;
  }
};

}  // namespace temper::gateway
