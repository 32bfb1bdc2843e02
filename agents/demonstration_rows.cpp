#include "agents/demonstration_rows.h"

#include <utility>

#include "common/json.h"
#include "text/json.h"

namespace temper::agents {
namespace {

json::object AssistantCall(const DemoStep& step, size_t number) {
  return {{"role", "assistant"},
          {"content", nullptr},
          {"tool_calls",
           json::array{json::object{{"id", "call_" + std::to_string(number)},
                                    {"type", "function"},
                                    {"function", json::object{{"name", "shell"}, {"arguments", json::object{{"command", step.command}}}}}}}}};
}

constexpr char kShellTool[] =
    R"([{"type":"function","function":{"name":"shell","description":"Run a shell command.","parameters":{"type":"object","properties":{"command":{"type":"string"}},"required":["command"]}}}])";

Result<std::string> Render(const text::TextModel& model, const json::array& messages, bool ask) {
  text::RenderInput input;
  ASSIGN_OR_RETURN(const text::Value plain, text::ParseJson(PrintJson(messages)));
  input.messages = model.ShowCalls(plain);
  ASSIGN_OR_RETURN(input.tools, text::ParseJson(kShellTool));
  input.add_generation_prompt = ask;
  return model.Render(input);
}

}  // namespace

Result<DemonstrationRow> ToRow(const Demonstration& demonstration, const text::TextModel& model) {
  json::array messages{json::object{{"role", "user"}, {"content", demonstration.task.instruction}}};
  DemonstrationRow row;
  std::string done;  // the text that is in the row already
  auto add = [&](const std::string& whole, bool sampled) -> Status {
    if (whole.compare(0, done.size(), done) != 0) {
      return FailedPrecondition("the chat template rewrites earlier messages; demonstrations cannot be made for it");
    }
    const std::string more = whole.substr(done.size());
    const auto ids = row.ids.empty() ? model.tokenizer.Encode(more) : model.tokenizer.EncodeAfter(row.ids.back(), more);
    row.ids.insert(row.ids.end(), ids.begin(), ids.end());
    row.mask.insert(row.mask.end(), ids.size(), sampled ? 1 : 0);
    done = whole;
    return Status::Ok();
  };
  auto answer = [&](json::object message) -> Status {
    ASSIGN_OR_RETURN(std::string before, Render(model, messages, true));
    RETURN_IF_ERROR(add(before, false));
    messages.push_back(std::move(message));
    ASSIGN_OR_RETURN(std::string after, Render(model, messages, false));
    return add(after, true);
  };
  for (size_t i = 0; i < demonstration.steps.size(); ++i) {
    RETURN_IF_ERROR(answer(AssistantCall(demonstration.steps[i], i)));
    messages.push_back(json::object{
        {"role", "tool"}, {"tool_call_id", "call_" + std::to_string(i)}, {"content", demonstration.steps[i].output}});
  }
  RETURN_IF_ERROR(answer(json::object{{"role", "assistant"}, {"content", "done"}}));
  return row;
}

}  // namespace temper::agents
