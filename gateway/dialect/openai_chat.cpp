#include "gateway/dialect/openai_chat.h"

#include <cmath>
#include <set>

#include "common/json.h"
#include "common/strings.h"
#include "text/json.h"

namespace temper::gateway::openai {
namespace {

using text::Value;

Refusal Bad(const std::string& param, const std::string& message) { return {.param = param, .message = message}; }
Refusal Unsupported(const std::string& param, const std::string& what) {
  return {.code = "unsupported_parameter", .param = param, .message = what + " is not supported"};
}

// A member that is there and not null.
const Value* Given(const Value& object, std::string_view key) {
  const Value* value = object.Find(key);
  return value && !value->is_none() ? value : nullptr;
}

// Reads the request field by field; the first refusal ends it.
class Reader {
 public:
  explicit Reader(const Value& body) : body_(body) {}

  std::variant<ChatRequest, Refusal> Read() {
    if (Model() && Messages() && Tools() && ToolChoice() && Streaming() && Lengths() && SamplingFields() && Stop() && Choices() &&
        Logprobs() && Format() && Template() && Refused()) {
      return std::move(out_);
    }
    return refusal_;
  }

 private:
  bool Fail(Refusal refusal) {
    refusal_ = std::move(refusal);
    return false;
  }

  bool Bool(std::string_view key, bool* out) {
    const Value* v = Given(body_, key);
    if (!v) return true;
    if (!v->is_bool()) return Fail(Bad(std::string(key), "'" + std::string(key) + "' must be a boolean"));
    *out = v->as_bool();
    return true;
  }

  // A number in [low, high], absent = nullopt.
  bool Number(std::string_view key, double low, double high, std::optional<double>* out) {
    const Value* v = Given(body_, key);
    if (!v) return true;
    const std::string name(key);
    if (!v->is_int() && !v->is_float()) return Fail(Bad(name, "'" + name + "' must be a number"));
    const double number = v->is_int() ? static_cast<double>(v->as_int()) : v->as_float();
    if (!(number >= low && number <= high)) {
      return Fail(Bad(name, "'" + name + "' must be from " + FormatDouble(low) + " to " + FormatDouble(high)));
    }
    *out = number;
    return true;
  }

  bool Integer(std::string_view key, int64_t low, int64_t high, std::optional<int64_t>* out) {
    const Value* v = Given(body_, key);
    if (!v) return true;
    const std::string name(key);
    int64_t number = 0;
    if (v->is_int()) {
      number = v->as_int();
    } else if (v->is_float() && v->as_float() == std::floor(v->as_float()) && std::fabs(v->as_float()) < 9e15) {
      number = static_cast<int64_t>(v->as_float());
    } else {
      return Fail(Bad(name, "'" + name + "' must be an integer"));
    }
    if (number < low || number > high) {
      return Fail(Bad(name, "'" + name + "' must be from " + std::to_string(low) + " to " + std::to_string(high)));
    }
    *out = number;
    return true;
  }

  bool Model() {
    const Value* v = body_.Find("model");
    if (!v || !v->is_string()) return Fail(Bad("model", "you must provide a model parameter (a string)"));
    out_.model = v->as_string();
    return true;
  }

  bool Messages() {
    const Value* list = body_.Find("messages");
    if (!list || !list->is_list() || list->as_list().empty()) {
      return Fail(Bad("messages", "'messages' must be a list with at least one message"));
    }
    for (size_t i = 0; i < list->as_list().size(); ++i) {
      if (!OneMessage(list->as_list()[i], "messages[" + std::to_string(i) + "]")) return false;
    }
    return true;
  }

  bool OneMessage(const Value& v, const std::string& path) {
    if (!v.is_dict()) return Fail(Bad(path, "'" + path + "' must be an object"));
    Message m;
    const std::string role = v.StringOr("role", "");
    if (role == "system" || role == "developer") {
      m.role = Role::kSystem;
    } else if (role == "user") {
      m.role = Role::kUser;
    } else if (role == "assistant") {
      m.role = Role::kAssistant;
    } else if (role == "tool" || role == "function") {
      m.role = Role::kTool;
    } else {
      return Fail(Bad(path + ".role", "'" + path + ".role' must be system, developer, user, assistant or tool"));
    }
    const Value* calls = Given(v, "tool_calls");
    if (calls && !ToolCalls(*calls, path + ".tool_calls", &m)) return false;
    if (Given(v, "function_call")) return Fail(Unsupported(path + ".function_call", "'function_call' (use tool_calls)"));
    const Value* content = Given(v, "content");
    if (!content) {
      if (m.role != Role::kAssistant) return Fail(Bad(path + ".content", "'" + path + ".content' is missing"));
    } else if (!Content(*content, path + ".content", &m.content)) {
      return false;
    }
    m.reasoning = v.StringOr("reasoning_content", v.StringOr("reasoning", ""));
    m.tool_call_id = v.StringOr("tool_call_id", "");
    m.name = v.StringOr("name", "");
    out_.messages.push_back(std::move(m));
    return true;
  }

  bool Content(const Value& v, const std::string& path, std::string* out) {
    if (v.is_string()) {
      *out = v.as_string();
      return true;
    }
    if (!v.is_list()) return Fail(Bad(path, "'" + path + "' must be a string or a list of parts"));
    for (size_t i = 0; i < v.as_list().size(); ++i) {
      const Value& part = v.as_list()[i];
      const std::string at = path + "[" + std::to_string(i) + "]";
      const std::string type = part.StringOr("type", "");
      if (type == "text" || type == "input_text" || type == "output_text") {
        const Value* t = part.Find("text");
        if (!t || !t->is_string()) return Fail(Bad(at + ".text", "'" + at + ".text' must be a string"));
        *out += t->as_string();
      } else if (type == "refusal") {
        *out += part.StringOr("refusal", "");
      } else if (type.empty()) {
        return Fail(Bad(at, "'" + at + "' must be an object with a type"));
      } else {
        return Fail(Unsupported(at + ".type", "content of type '" + type + "'"));
      }
    }
    return true;
  }

  bool ToolCalls(const Value& v, const std::string& path, Message* m) {
    if (!v.is_list()) return Fail(Bad(path, "'" + path + "' must be a list"));
    if (!v.as_list().empty() && m->role != Role::kAssistant) return Fail(Bad(path, "only an assistant message has tool calls"));
    for (size_t i = 0; i < v.as_list().size(); ++i) {
      const Value& call = v.as_list()[i];
      const std::string at = path + "[" + std::to_string(i) + "]";
      const Value* function = call.Find("function");
      const Value* name = function ? function->Find("name") : nullptr;
      if (!name || !name->is_string()) return Fail(Bad(at + ".function", "'" + at + ".function.name' must be a string"));
      ToolCall c{.id = call.StringOr("id", ""), .name = name->as_string()};
      const Value* arguments = function->Find("arguments");
      if (arguments && arguments->is_string()) {
        c.arguments = arguments->as_string();
      } else if (arguments && arguments->is_dict()) {
        c.arguments = text::CompactJson(*arguments);
      } else if (arguments && !arguments->is_none()) {
        return Fail(Bad(at + ".function.arguments", "'" + at + ".function.arguments' must be a string"));
      }
      m->tool_calls.push_back(std::move(c));
    }
    return true;
  }

  bool Tools() {
    if (Given(body_, "functions")) return Fail(Unsupported("functions", "'functions' (use tools)"));
    const Value* v = Given(body_, "tools");
    if (!v) return true;
    if (!v->is_list()) return Fail(Bad("tools", "'tools' must be a list"));
    text::List tools;
    for (size_t i = 0; i < v->as_list().size(); ++i) {
      const Value& tool = v->as_list()[i];
      const std::string path = "tools[" + std::to_string(i) + "]";
      const std::string type = tool.StringOr("type", "function");
      if (!tool.is_dict()) return Fail(Bad(path, "'" + path + "' must be an object"));
      if (type != "function") return Fail(Unsupported(path + ".type", "a tool of type '" + type + "'"));
      const Value* function = tool.Find("function");
      text::Dict nested;
      if (!function) {  // the flat form of the Responses API
        text::Dict inner;
        for (const auto& [key, value] : tool.as_dict().items()) {
          if (key.as_string() != "type") inner.Set(key, value);
        }
        nested.Set("type", "function");
        nested.Set("function", std::move(inner));
      }
      const Value whole = function ? tool : Value(std::move(nested));
      const Value* name = whole.Find("function")->Find("name");
      if (!name || !name->is_string() || name->as_string().empty()) {
        return Fail(Bad(path + ".function.name", "'" + path + ".function.name' must be a string"));
      }
      if (const Value* parameters = Given(*whole.Find("function"), "parameters"); parameters && !parameters->is_dict()) {
        return Fail(Bad(path + ".function.parameters", "'" + path + ".function.parameters' must be an object"));
      }
      tools.push_back(whole);
    }
    if (!tools.empty()) out_.tools = std::move(tools);
    return true;
  }

  bool ToolChoice() {
    if (Given(body_, "function_call")) return Fail(Unsupported("function_call", "'function_call' (use tool_choice)"));
    bool parallel = true;  // a hint: what the policy wrote is shown as it is
    if (!Bool("parallel_tool_calls", &parallel)) return false;
    const Value* v = Given(body_, "tool_choice");
    if (!v) return true;
    if (v->is_string() && v->as_string() == "auto") return true;
    if (v->is_string() && v->as_string() == "none") {
      out_.tools = nullptr;
      return true;
    }
    return Fail(Unsupported("tool_choice", "a tool_choice other than 'auto' and 'none'"));
  }

  bool Streaming() {
    if (!Bool("stream", &out_.stream)) return false;
    const Value* options = Given(body_, "stream_options");
    if (!options) return true;
    if (!options->is_dict()) return Fail(Bad("stream_options", "'stream_options' must be an object"));
    if (const Value* usage = Given(*options, "include_usage")) {
      if (!usage->is_bool()) return Fail(Bad("stream_options.include_usage", "'include_usage' must be a boolean"));
      out_.include_usage = usage->as_bool();
    }
    return true;
  }

  bool Lengths() {
    std::optional<int64_t> newer, older;
    if (!Integer("max_completion_tokens", 1, 1 << 30, &newer) || !Integer("max_tokens", 1, 1 << 30, &older)) return false;
    if (newer || older) out_.max_tokens = static_cast<uint32_t>(newer ? *newer : *older);
    return true;
  }

  bool SamplingFields() {
    std::optional<double> temperature, top_p, min_p, penalty;
    std::optional<int64_t> top_k, seed;
    if (!Number("temperature", 0, 2, &temperature) || !Number("top_p", 0, 1, &top_p) || !Number("min_p", 0, 1, &min_p) ||
        !Integer("top_k", -1, 1 << 30, &top_k) || !Integer("seed", INT64_MIN, INT64_MAX, &seed)) {
      return false;
    }
    if (top_p && *top_p <= 0) return Fail(Bad("top_p", "'top_p' must be above 0"));
    if (temperature) out_.temperature = static_cast<float>(*temperature);
    if (top_p) out_.top_p = static_cast<float>(*top_p);
    if (min_p) out_.min_p = static_cast<float>(*min_p);
    if (top_k) out_.top_k = static_cast<uint32_t>(std::max<int64_t>(*top_k, 0));
    if (seed) out_.seed = static_cast<uint64_t>(*seed);
    for (const auto& [name, neutral, low, high] :
         {std::tuple{"presence_penalty", 0.0, -2.0, 2.0}, {"frequency_penalty", 0.0, -2.0, 2.0}, {"repetition_penalty", 1.0, 0.0, 10.0}}) {
      penalty.reset();
      if (!Number(name, low, high, &penalty)) return false;
      if (penalty && *penalty != neutral) out_.unsupported_sampling.push_back(name);
    }
    if (const Value* bias = Given(body_, "logit_bias")) {
      if (!bias->is_dict()) return Fail(Bad("logit_bias", "'logit_bias' must be an object"));
      if (bias->as_dict().size() > 0) out_.unsupported_sampling.push_back("logit_bias");
    }
    return true;
  }

  bool Stop() {
    const Value* v = Given(body_, "stop");
    if (!v) return true;
    const text::List list = v->is_list() ? v->as_list() : text::List{*v};
    if (list.size() > 4) return Fail(Bad("stop", "'stop' takes at most 4 strings"));
    for (const Value& s : list) {
      if (!s.is_string()) return Fail(Bad("stop", "'stop' must be a string or a list of strings"));
      if (!s.as_string().empty()) out_.stop.push_back(s.as_string());
    }
    return true;
  }

  bool Choices() {
    std::optional<int64_t> n;
    if (!Integer("n", 1, kChoicesMax, &n)) return false;
    out_.n = static_cast<int>(n.value_or(1));
    return true;
  }

  bool Logprobs() {
    std::optional<int64_t> top;
    if (!Bool("logprobs", &out_.logprobs) || !Integer("top_logprobs", 0, 20, &top) ||
        !Bool("return_token_ids", &out_.return_token_ids)) {
      return false;
    }
    if (top && !out_.logprobs) return Fail(Bad("top_logprobs", "'top_logprobs' needs 'logprobs': true"));
    if (top && *top > 0) return Fail(Unsupported("top_logprobs", "'top_logprobs' above 0 (the record holds the drawn token only)"));
    return true;
  }

  bool Format() {
    const Value* v = Given(body_, "response_format");
    if (!v) return true;
    const std::string type = v->StringOr("type", "");
    if (type == "text") return true;
    if (type == "json_object" || type == "json_schema") {
      return Fail(Unsupported("response_format", "response_format '" + type + "'"));
    }
    return Fail(Bad("response_format", "'response_format.type' must be text, json_object or json_schema"));
  }

  bool Template() {
    text::Dict variables;
    bool any = false;
    if (const Value* kwargs = Given(body_, "chat_template_kwargs")) {
      if (!kwargs->is_dict()) return Fail(Bad("chat_template_kwargs", "'chat_template_kwargs' must be an object"));
      static const std::set<std::string> kOurs = {"messages", "tools", "documents", "add_generation_prompt"};
      for (const auto& [key, value] : kwargs->as_dict().items()) {
        if (kOurs.count(key.as_string())) {
          return Fail(Bad("chat_template_kwargs." + key.as_string(), "'" + key.as_string() + "' cannot be set here"));
        }
        variables.Set(key, value);
        any = true;
      }
    }
    for (const char* name : {"reasoning_effort", "enable_thinking"}) {
      if (const Value* v = Given(body_, name)) {
        variables.Set(name, *v);
        any = true;
      }
    }
    if (any) out_.variables = std::move(variables);
    return true;
  }

  // What would change the answer and is not there.
  bool Refused() {
    for (const char* name : {"audio", "web_search_options", "prompt_logprobs", "input_ids", "best_of", "guided_json", "guided_regex",
                             "guided_choice", "guided_grammar", "suffix", "echo"}) {
      const Value* v = Given(body_, name);
      if (v && !(v->is_bool() && !v->as_bool())) return Fail(Unsupported(name, "'" + std::string(name) + "'"));
    }
    if (const Value* v = Given(body_, "continue_final_message"); v && !(v->is_bool() && !v->as_bool())) {
      return Fail(Unsupported("continue_final_message", "'continue_final_message'"));
    }
    if (const Value* v = Given(body_, "add_generation_prompt"); v && !(v->is_bool() && v->as_bool())) {
      return Fail(Unsupported("add_generation_prompt", "'add_generation_prompt': false"));
    }
    if (const Value* v = Given(body_, "modalities")) {
      if (!v->is_list()) return Fail(Bad("modalities", "'modalities' must be a list"));
      for (const Value& m : v->as_list()) {
        if (!m.is_string() || m.as_string() != "text") return Fail(Unsupported("modalities", "a modality other than 'text'"));
      }
    }
    return true;
  }

  const Value& body_;
  ChatRequest out_;
  Refusal refusal_;
};

void WriteLogprobs(JsonWriter& w, const PolicyText& text, const std::vector<int32_t>& ids, const std::vector<float>& logprobs,
                   size_t from) {
  w.BeginObject().Key("content").BeginArray();
  for (size_t i = from; i < ids.size(); ++i) {
    if (text.IsSpecial(ids[i])) continue;
    const std::string_view bytes = text.TokenBytes(ids[i]);
    w.BeginObject().Key("token").String(bytes).Key("logprob").Float(logprobs[i]).Key("bytes").BeginArray();
    for (unsigned char b : bytes) w.Int(b);
    w.EndArray().Key("top_logprobs").BeginArray().EndArray().EndObject();
  }
  w.EndArray().Key("refusal").Null().EndObject();
}

void WriteToolCalls(JsonWriter& w, const std::vector<ToolCall>& calls, bool with_index) {
  w.BeginArray();
  for (size_t i = 0; i < calls.size(); ++i) {
    w.BeginObject();
    if (with_index) w.Key("index").Int(static_cast<int64_t>(i));
    w.Key("id").String(calls[i].id).Key("type").String("function").Key("function").BeginObject();
    w.Key("name").String(calls[i].name).Key("arguments").String(calls[i].arguments).EndObject().EndObject();
  }
  w.EndArray();
}

void WriteUsage(JsonWriter& w, const Answer& answer) {
  const int completion = answer.completion_tokens();
  w.BeginObject().Key("prompt_tokens").Int(answer.prompt_tokens).Key("completion_tokens").Int(completion);
  w.Key("total_tokens").Int(answer.prompt_tokens + completion);
  w.Key("prompt_tokens_details").BeginObject().Key("cached_tokens").Int(answer.cached_tokens).EndObject();
  w.Key("completion_tokens_details").BeginObject().Key("reasoning_tokens").Int(0).EndObject().EndObject();
}

std::string Frame(const std::string& json) { return "data: " + json + "\n\n"; }

// The common head of every chunk, up to and including the key `choices`.
void BeginChunk(JsonWriter& w, const std::string& id, int64_t created_s, const std::string& model) {
  w.BeginObject().Key("id").String(id).Key("object").String("chat.completion.chunk").Key("created").Int(created_s);
  w.Key("model").String(model).Key("system_fingerprint").String("temper").Key("choices").BeginArray();
}

}  // namespace

std::variant<ChatRequest, Refusal> ParseChatRequest(std::string_view body) {
  auto json = text::ParseJson(body);
  if (!json.ok()) return Refusal{.message = "the body is not JSON: " + json.status().message()};
  if (!json->is_dict()) return Refusal{.message = "the body must be a JSON object"};
  return Reader(*json).Read();
}

std::string ChatBody(const ChatRequest& request, const Answer& answer, const PolicyText& text) {
  JsonWriter w;
  w.BeginObject().Key("id").String(answer.id).Key("object").String("chat.completion").Key("created").Int(answer.created_s);
  w.Key("model").String(request.model).Key("system_fingerprint").String("temper").Key("choices").BeginArray();
  for (size_t i = 0; i < answer.choices.size(); ++i) {
    const Choice& c = answer.choices[i];
    w.BeginObject().Key("index").Int(static_cast<int64_t>(i)).Key("message").BeginObject().Key("role").String("assistant");
    w.Key("content");
    if (c.content.empty() && !c.tool_calls.empty()) {
      w.Null();
    } else {
      w.String(c.content);
    }
    w.Key("refusal").Null();
    if (!c.reasoning.empty()) w.Key("reasoning_content").String(c.reasoning);
    if (!c.tool_calls.empty()) {
      w.Key("tool_calls");
      WriteToolCalls(w, c.tool_calls, false);
    }
    w.EndObject().Key("logprobs");
    if (request.logprobs) {
      WriteLogprobs(w, text, c.ids, c.logprobs, 0);
    } else {
      w.Null();
    }
    w.Key("finish_reason").String(c.finish);
    if (request.return_token_ids) w.Key("token_ids").Ints(c.ids);
    w.EndObject();
  }
  w.EndArray().Key("usage");
  WriteUsage(w, answer);
  if (request.return_token_ids) w.Key("prompt_token_ids").Ints(answer.prompt_ids);
  w.EndObject();
  return w.Take();
}

ChatStream::ChatStream(const ChatRequest& request, const PolicyText& text, std::string id, int64_t created_s)
    : request_(request), text_(text), id_(std::move(id)), created_s_(created_s), shown_(request.n) {}

std::string ChatStream::Start() const {
  std::string frames;
  for (int i = 0; i < request_.n; ++i) {
    JsonWriter w;
    BeginChunk(w, id_, created_s_, request_.model);
    w.BeginObject().Key("index").Int(i).Key("delta").BeginObject().Key("role").String("assistant").Key("content").String("");
    w.EndObject().Key("logprobs").Null().Key("finish_reason").Null().EndObject().EndArray().EndObject();
    frames += Frame(w.text());
  }
  return frames;
}

std::string ChatStream::Content(int choice, std::string_view added, const std::vector<int32_t>& ids,
                                const std::vector<float>& logprobs) {
  Shown& shown = shown_[choice];
  JsonWriter w;
  BeginChunk(w, id_, created_s_, request_.model);
  w.BeginObject().Key("index").Int(choice).Key("delta").BeginObject().Key("content").String(added).EndObject().Key("logprobs");
  if (request_.logprobs) {
    WriteLogprobs(w, text_, ids, logprobs, shown.tokens);
    shown.tokens = ids.size();
  } else {
    w.Null();
  }
  w.Key("finish_reason").Null().EndObject().EndArray().EndObject();
  shown.bytes += added.size();
  return Frame(w.text());
}

std::string ChatStream::Finish(const Answer& answer) {
  std::string frames;
  for (size_t i = 0; i < answer.choices.size(); ++i) {
    const Choice& c = answer.choices[i];
    const int index = static_cast<int>(i);
    if (c.content.size() > shown_[i].bytes || (request_.logprobs && c.ids.size() > shown_[i].tokens)) {
      const std::string rest = c.content.size() > shown_[i].bytes ? c.content.substr(shown_[i].bytes) : "";
      frames += Content(index, rest, c.ids, c.logprobs);
    }
    // One delta a call, whole: clients assemble fragments of arguments in too many ways.
    for (size_t k = 0; k < c.tool_calls.size(); ++k) {
      JsonWriter w;
      BeginChunk(w, id_, created_s_, request_.model);
      w.BeginObject().Key("index").Int(index).Key("delta").BeginObject().Key("tool_calls").BeginArray().BeginObject();
      w.Key("index").Int(static_cast<int64_t>(k)).Key("id").String(c.tool_calls[k].id).Key("type").String("function");
      w.Key("function").BeginObject().Key("name").String(c.tool_calls[k].name);
      w.Key("arguments").String(c.tool_calls[k].arguments).EndObject().EndObject().EndArray().EndObject();
      w.Key("logprobs").Null().Key("finish_reason").Null().EndObject().EndArray().EndObject();
      frames += Frame(w.text());
    }
    JsonWriter w;
    BeginChunk(w, id_, created_s_, request_.model);
    w.BeginObject().Key("index").Int(index).Key("delta").BeginObject().EndObject().Key("logprobs").Null();
    w.Key("finish_reason").String(c.finish);
    if (request_.return_token_ids) w.Key("token_ids").Ints(c.ids);
    w.EndObject().EndArray();
    if (request_.return_token_ids && i == 0) w.Key("prompt_token_ids").Ints(answer.prompt_ids);
    w.EndObject();
    frames += Frame(w.text());
  }
  if (request_.include_usage) {
    JsonWriter w;
    BeginChunk(w, id_, created_s_, request_.model);
    w.EndArray().Key("usage");
    WriteUsage(w, answer);
    w.EndObject();
    frames += Frame(w.text());
  }
  return frames + "data: [DONE]\n\n";
}

std::string ChatStream::Error(const Refusal& refusal) { return Frame(ErrorBody(refusal)); }

std::string ErrorBody(const Refusal& refusal) {
  JsonWriter w;
  w.BeginObject().Key("error").BeginObject().Key("message").String(refusal.message).Key("type").String(refusal.type);
  w.Key("param");
  refusal.param.empty() ? w.Null() : w.String(refusal.param);
  w.Key("code");
  refusal.code.empty() ? w.Null() : w.String(refusal.code);
  w.EndObject().EndObject();
  return w.Take();
}

namespace {
void WriteModel(JsonWriter& w, const ModelCard& model) {
  w.BeginObject().Key("id").String(model.id).Key("object").String("model").Key("created").Int(model.created_s);
  w.Key("owned_by").String("temper").Key("max_model_len").Int(model.context_tokens).EndObject();
}
}  // namespace

std::string ModelsBody(const std::vector<ModelCard>& models) {
  JsonWriter w;
  w.BeginObject().Key("object").String("list").Key("data").BeginArray();
  for (const ModelCard& model : models) WriteModel(w, model);
  w.EndArray().EndObject();
  return w.Take();
}

std::string ModelBody(const ModelCard& model) {
  JsonWriter w;
  WriteModel(w, model);
  return w.Take();
}

}  // namespace temper::gateway::openai
