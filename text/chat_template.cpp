#include "text/chat_template.h"

#include <ctime>
#include <string>

#include "text/jinja.h"
#include "text/json.h"

namespace temper::text {
namespace {

constexpr size_t kMaxSource = size_t{4} << 20;  // bytes of one template

Status ToStatus(const jinja::TemplateError& e) {
  const std::string message = "chat template line " + std::to_string(e.line) + ": " + e.message;
  return e.limit ? ResourceExhausted(message) : InvalidArgument(message);
}

}  // namespace

struct ChatTemplate::Impl {
  std::string source;
  jinja::Template tmpl;
  Dict defaults;
};

ChatTemplate::ChatTemplate(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ChatTemplate::ChatTemplate(ChatTemplate&&) noexcept = default;
ChatTemplate& ChatTemplate::operator=(ChatTemplate&&) noexcept = default;
ChatTemplate::~ChatTemplate() = default;

Result<ChatTemplate> ChatTemplate::Parse(std::string_view source) {
  if (source.size() > kMaxSource) return InvalidArgument("a chat template above 4 MiB");
  auto impl = std::make_unique<Impl>();
  impl->source = std::string(source);
  try {
    impl->tmpl = jinja::ParseTemplate(source);
  } catch (const jinja::TemplateError& e) {
    return ToStatus(e);
  }
  return ChatTemplate(std::move(impl));
}

void ChatTemplate::SetDefaults(Value variables) { impl_->defaults = variables.is_dict() ? variables.as_dict() : Dict(); }

Result<std::string> ChatTemplate::Render(const RenderInput& input) const {
  if (!input.messages.is_list()) return InvalidArgument("messages must be a list");
  Dict variables = impl_->defaults;
  variables.Set("messages", input.messages);
  variables.Set("tools", input.tools);
  variables.Set("documents", input.documents);
  variables.Set("add_generation_prompt", input.add_generation_prompt);
  if (input.variables.is_dict()) {
    for (const auto& [key, value] : input.variables.as_dict().items()) variables.Set(key, value);
  }
  const int64_t now_s = input.now_s ? *input.now_s : static_cast<int64_t>(std::time(nullptr));
  try {
    return jinja::RenderTemplate(impl_->tmpl, variables, now_s);
  } catch (const jinja::TemplateError& e) {
    return ToStatus(e);
  }
}

const std::string& ChatTemplate::source() const { return impl_->source; }

Value WithParsedToolArguments(const Value& messages) {
  if (!messages.is_list()) return messages;
  // Replaces `key` of a dict.
  auto with = [](const Value& dict, const char* key, Value value) {
    Dict out = dict.as_dict();
    out.Set(key, std::move(value));
    return Value(std::move(out));
  };
  List out;
  for (const Value& message : messages.as_list()) {
    const Value* calls = message.Find("tool_calls");
    if (!calls || !calls->is_list()) {
      out.push_back(message);
      continue;
    }
    List parsed;
    for (const Value& call : calls->as_list()) {
      const Value* function = call.Find("function");
      const Value* arguments = function ? function->Find("arguments") : nullptr;
      if (!arguments || !arguments->is_string()) {
        parsed.push_back(call);
        continue;
      }
      auto object = ParseJson(arguments->as_string());
      parsed.push_back(object.ok() && object->is_dict() ? with(call, "function", with(*function, "arguments", *object)) : call);
    }
    out.push_back(with(message, "tool_calls", Value(std::move(parsed))));
  }
  return Value(std::move(out));
}

}  // namespace temper::text
