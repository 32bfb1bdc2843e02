#include "text/tool_calls.h"

#include <algorithm>

#include "text/json.h"
#include "text/task_vocabulary.h"

namespace temper::text {
namespace {

constexpr std::string_view kOpen = "<tool_call>";
constexpr std::string_view kClose = "</tool_call>";
static_assert(kOpen == TaskTokens::kToolCall);

// The `function` of the tool called `name`, or nullptr.
const Value* FindTool(const Value& tools, std::string_view name) {
  if (!tools.is_list()) return nullptr;
  for (const Value& tool : tools.as_list()) {
    const Value* function = tool.Find("function");
    if (function && function->StringOr("name", "") == name) return function;
  }
  return nullptr;
}

// The name of the one parameter of a tool, when it is a string; its argument then stands bare (docs/task_vocabulary.md).
std::optional<std::string> BareParameter(const Value& function) {
  const Value* parameters = function.Find("parameters");
  const Value* properties = parameters ? parameters->Find("properties") : nullptr;
  if (!properties || !properties->is_dict() || properties->as_dict().size() != 1) return std::nullopt;
  const auto& [name, schema] = properties->as_dict().items()[0];
  if (schema.StringOr("type", "") != "string") return std::nullopt;
  return name.as_string();
}

ParsedAnswer IllFormed(std::string_view text, std::string problem) {
  ParsedAnswer out;
  out.content = std::string(text);
  out.ill_formed = true;
  out.problem = std::move(problem);
  return out;
}

std::string_view RightTrimmed(std::string_view s) {
  const size_t last = s.find_last_not_of(" \t\r\n");
  return s.substr(0, last == std::string_view::npos ? 0 : last + 1);
}

// Where the JSON value at the start of `s` ends: the offset after its closing brace, or npos. Braces within strings do not count.
size_t JsonObjectEnd(std::string_view s) {
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < s.size(); ++i) {
    const char c = s[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else if (c == '{') {
      ++depth;
    } else if (c == '}' && --depth == 0) {
      return i + 1;
    }
  }
  return std::string_view::npos;
}

ParsedAnswer ParseHermes(std::string_view text, bool complete) {
  ParsedAnswer out;
  std::string content;
  size_t at = 0;
  for (size_t open; (open = text.find(kOpen, at)) != std::string_view::npos;) {
    content += text.substr(at, open - at);
    std::string_view rest = text.substr(open + kOpen.size());
    const size_t brace = rest.find_first_not_of(" \t\r\n");
    if (brace == std::string_view::npos || rest[brace] != '{') return IllFormed(text, "a tool call holds no JSON object");
    // The closing tag may stand within a string of the JSON, so the end of the object is sought first.
    const size_t end = JsonObjectEnd(rest.substr(brace));
    if (end == std::string_view::npos) return IllFormed(text, complete ? "the JSON of a tool call has no end" : "the answer was cut within a tool call");
    const std::string_view json = rest.substr(brace, end);
    rest = rest.substr(brace + end);
    const size_t after = rest.find_first_not_of(" \t\r\n");
    if (after == std::string_view::npos || rest.substr(after, kClose.size()) != kClose) {
      return IllFormed(text, complete ? "a tool call has no closing tag" : "the answer was cut within a tool call");
    }
    at = text.size() - rest.size() + after + kClose.size();
    auto call = ParseJson(json);
    if (!call.ok()) return IllFormed(text, call.status().message());
    const Value *name = call->Find("name"), *arguments = call->Find("arguments");
    if (!arguments) arguments = call->Find("parameters");
    if (!name || !name->is_string() || name->as_string().empty()) return IllFormed(text, "a tool call has no name");
    ToolCall parsed;
    parsed.name = name->as_string();
    if (!arguments || arguments->is_none()) {
      parsed.arguments = "{}";
    } else if (arguments->is_dict()) {
      parsed.arguments = DumpJson(*arguments).value();
    } else if (arguments->is_string()) {  // some models quote the object once more
      auto inner = ParseJson(arguments->as_string());
      if (!inner.ok() || !inner->is_dict()) return IllFormed(text, "the arguments of a tool call are no object");
      parsed.arguments = arguments->as_string();
    } else {
      return IllFormed(text, "the arguments of a tool call are no object");
    }
    out.calls.push_back(std::move(parsed));
  }
  if (out.calls.empty()) {
    out.content = std::string(text);
    return out;
  }
  content += text.substr(at);
  out.content = std::string(RightTrimmed(content));
  return out;
}

ParsedAnswer ParseTask(std::string_view text, const Value& tools, bool complete) {
  ParsedAnswer out;
  const size_t first = text.find(kOpen);
  out.content = std::string(text.substr(0, first));
  if (first == std::string_view::npos) return out;
  if (!complete) return IllFormed(text, "the answer was cut within a tool call");
  const bool named = tools.as_list().size() != 1;
  for (size_t at = first; at < text.size();) {
    at += kOpen.size();
    const size_t end = std::min(text.find(kOpen, at), text.size());
    std::string_view body = text.substr(at, end - at);
    at = end;
    ToolCall call;
    if (named) {
      const size_t newline = body.find('\n');
      if (newline == std::string_view::npos) return IllFormed(text, "a tool call without a name");
      call.name = std::string(body.substr(0, newline));
      body = body.substr(newline + 1);
    } else {
      const Value* function = tools.as_list()[0].Find("function");
      call.name = function ? function->StringOr("name", "") : "";
    }
    const Value* tool = FindTool(tools, call.name);
    if (!tool) return IllFormed(text, "no tool is called '" + call.name + "'");
    if (const auto parameter = BareParameter(*tool)) {
      Dict arguments;
      arguments.Set(*parameter, body);
      call.arguments = DumpJson(Value(std::move(arguments))).value();
    } else {
      auto json = ParseJson(body);
      if (!json.ok()) return IllFormed(text, json.status().message());
      if (!json->is_dict()) return IllFormed(text, "the arguments of a tool call are no object");
      call.arguments = std::string(body);
    }
    out.calls.push_back(std::move(call));
  }
  return out;
}

}  // namespace

const char* ToolFormatName(ToolFormat format) {
  switch (format) {
    case ToolFormat::kNone: return "none";
    case ToolFormat::kHermes: return "hermes";
    case ToolFormat::kTask: return "task";
  }
  return "?";
}

ToolFormat ToolFormatOf(std::string_view template_source) {
  const bool task = template_source.find(TaskTokens::kEnd) != std::string_view::npos && template_source.find("'<|' ~ role ~ '|>'") != std::string_view::npos;
  return task ? ToolFormat::kTask : ToolFormat::kHermes;
}

ParsedAnswer ParseToolCalls(ToolFormat format, std::string_view text, const Value& tools, bool complete) {
  if (format == ToolFormat::kNone || !tools.is_list() || tools.as_list().empty()) {
    ParsedAnswer out;
    out.content = std::string(text);
    return out;
  }
  return format == ToolFormat::kHermes ? ParseHermes(text, complete) : ParseTask(text, tools, complete);
}

std::string HermesCall(const Value& function) {
  const Value* arguments = function.Find("arguments");
  std::string object = "{}";
  if (arguments && arguments->is_string()) object = arguments->as_string();
  if (arguments && arguments->is_dict()) object = CompactJson(*arguments);
  return std::string(kOpen) + "{\"name\":" + CompactJson(function.StringOr("name", "")) + ",\"arguments\":" + object + "}" +
         std::string(kClose);
}

size_t CertainContent(ToolFormat format, std::string_view text) {
  if (format == ToolFormat::kNone) return text.size();
  size_t end = text.find(kOpen);
  if (end == std::string_view::npos) {
    // A tag may have begun at the very end.
    end = text.size();
    for (size_t n = std::min(text.size(), kOpen.size() - 1); n > 0; --n) {
      if (text.substr(text.size() - n) == kOpen.substr(0, n)) {
        end = text.size() - n;
        break;
      }
    }
  }
  // Hermes content loses the white space at its end when calls follow, so that is not certain.
  if (format == ToolFormat::kHermes) {
    while (end > 0 && std::string_view(" \t\r\n").find(text[end - 1]) != std::string_view::npos) --end;
  }
  return end;
}

}  // namespace temper::text
