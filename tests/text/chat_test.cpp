// The chat format of the task vocabulary, the way from messages to tokens and back, and tool calls of sampled text.
#include <gtest/gtest.h>

#include "tests/text/golden.h"
#include "text/task_vocabulary.h"
#include "text/text_model.h"

namespace temper::text {
namespace {

TextModel TaskModel() {
  const std::vector<std::string> words = {"list the files in data", "shell command cat ls notes txt other done"};
  const TaskTextFiles files = MakeTaskVocabulary(words);
  TextFiles all;
  all.tokenizer_json = files.tokenizer_json;
  all.tokenizer_config_json = files.tokenizer_config_json;
  auto model = LoadTextModel(all);
  TEMPER_CHECK(model.ok()) << model.status().ToString();
  return std::move(model).value();
}

const char* const kShell =
    R"([{"type":"function","function":{"name":"shell","parameters":{"type":"object","properties":{"command":{"type":"string"}}}}}])";
const char* const kTwoTools =
    R"([{"type":"function","function":{"name":"shell","parameters":{"type":"object","properties":{"command":{"type":"string"}}}}},
        {"type":"function","function":{"name":"move","parameters":{"type":"object","properties":{"from":{"type":"string"},"to":{"type":"string"}}}}}])";

RenderInput Input(const std::string& messages, const std::string& tools, bool prompt) {
  RenderInput in;
  in.messages = WithParsedToolArguments(ParseJson(messages).value());
  if (!tools.empty()) in.tools = ParseJson(tools).value();
  in.add_generation_prompt = prompt;
  return in;
}

// A prompt with one token more than needed in every message costs a small policy a tenth of its speed.
TEST(TaskChat, RendersTheLeanFormat) {
  const TextModel model = TaskModel();
  EXPECT_EQ(model.tool_format, ToolFormat::kTask);
  EXPECT_EQ(model.end_ids, std::vector<int32_t>{*model.tokenizer.TokenId("<|end|>")});
  const std::string messages = R"([{"role":"system","content":"list"},{"role":"user","content":[{"type":"text","text":"list the files"}]},
    {"role":"assistant","content":null,"tool_calls":[{"id":"c","type":"function","function":{"name":"shell","arguments":"{\"command\":\"ls data\"}"}}]},
    {"role":"tool","tool_call_id":"c","content":" notes.txt\n"}])";
  const std::string text = model.Render(Input(messages, kShell, true)).value();
  EXPECT_EQ(text, "<|system|>list<|user|>list the files<|assistant|><tool_call>ls data<|end|><|tool|> notes.txt\n<|assistant|>");
  EXPECT_EQ(model.tokenizer.Encode(text).size(), 21u);
  EXPECT_EQ(model.tokenizer.Decode(model.tokenizer.Encode(text)), text);
  EXPECT_FALSE(model.Render(Input(R"([{"role":"nobody","content":"x"}])", "", true)).ok());
}

// If an answer parsed to a message does not render to the same text again, the next prompt is no continuation of what was
// sampled, and every turn becomes a branch.
TEST(TaskChat, SampledAnswerRendersAgainToItself) {
  const TextModel model = TaskModel();
  struct Case {
    const char* tools;
    const char* answer;
    size_t calls;
  };
  const Case kCases[] = {
      {kShell, "done", 0},
      {kShell, "", 0},
      {kShell, "<tool_call>ls data", 1},
      {kShell, "list <tool_call> cat \"a\" \\ {x}\n<tool_call>", 2},
      {kTwoTools, "<tool_call>shell\nls data", 1},
      {kTwoTools, "<tool_call>move\n{\"from\": \"a\", \"to\": \"b\"}<tool_call>shell\n", 2},
  };
  for (const Case& c : kCases) {
    SCOPED_TRACE(c.answer);
    const Value tools = ParseJson(c.tools).value();
    const ParsedAnswer parsed = ParseToolCalls(ToolFormat::kTask, c.answer, tools);
    EXPECT_FALSE(parsed.ill_formed) << parsed.problem;
    ASSERT_EQ(parsed.calls.size(), c.calls);
    Dict message = MakeDict({{"role", "assistant"}, {"content", parsed.content.empty() ? Value(nullptr) : Value(parsed.content)}});
    List calls;
    for (const ToolCall& call : parsed.calls) {
      calls.push_back(MakeDict({{"type", "function"}, {"function", MakeDict({{"name", call.name}, {"arguments", call.arguments}})}}));
    }
    if (!calls.empty()) message.Set("tool_calls", calls);
    EXPECT_EQ(model.Render(Input(CompactJson(List{message}), c.tools, false)).value(), std::string("<|assistant|>") + c.answer + "<|end|>");
  }
}

// A policy writes nonsense most of the time at first: nothing may be lost, and nothing taken for a call that is none.
TEST(ToolCalls, IllFormedAnswersStayText) {
  const Value shell = ParseJson(kShell).value(), two = ParseJson(kTwoTools).value();
  auto expect_text = [](ToolFormat format, const char* text, const Value& tools, bool complete) {
    const ParsedAnswer parsed = ParseToolCalls(format, text, tools, complete);
    EXPECT_TRUE(parsed.ill_formed) << text;
    EXPECT_EQ(parsed.content, text);
    EXPECT_TRUE(parsed.calls.empty());
    EXPECT_FALSE(parsed.problem.empty());
  };
  expect_text(ToolFormat::kTask, "<tool_call>ls", shell, false);
  expect_text(ToolFormat::kTask, "<tool_call>ls data", two, true);
  expect_text(ToolFormat::kTask, "<tool_call>nothing\nx", two, true);
  expect_text(ToolFormat::kTask, "<tool_call>move\nfrom a", two, true);
  expect_text(ToolFormat::kTask, "<tool_call>move\n[1]", two, true);
  expect_text(ToolFormat::kHermes, "<tool_call>ls</tool_call>", shell, true);
  expect_text(ToolFormat::kHermes, "a <tool_call>{\"name\": \"shell\", \"arguments\": {}", shell, true);
  expect_text(ToolFormat::kHermes, "<tool_call>{\"name\": \"shell\", \"arguments\": {}}", shell, true);
  expect_text(ToolFormat::kHermes, "<tool_call>{\"name\": \"shell\", \"arguments\": 5}</tool_call>", shell, true);
  expect_text(ToolFormat::kHermes, "<tool_call>{\"arguments\": {}}</tool_call>", shell, true);
  expect_text(ToolFormat::kHermes, "<tool_call>{'name': 'shell'}</tool_call>", shell, true);
  const ParsedAnswer none = ParseToolCalls(ToolFormat::kHermes, "<tool_call>{}</tool_call>", nullptr);
  EXPECT_FALSE(none.ill_formed);
  EXPECT_EQ(none.content, "<tool_call>{}</tool_call>");
}

// The closing tag within a string of the arguments must not cut the call.
TEST(ToolCalls, HermesCalls) {
  const Value shell = ParseJson(kShell).value();
  const ParsedAnswer parsed = ParseToolCalls(
      ToolFormat::kHermes,
      "I look.\n<tool_call>\n{\"name\": \"shell\", \"arguments\": {\"command\": \"echo '</tool_call>' \\\"}\", \"n\": 1.0}}\n</tool_call>\n<tool_call>{\"name\":\"x\"}</tool_call>", shell);
  EXPECT_FALSE(parsed.ill_formed) << parsed.problem;
  EXPECT_EQ(parsed.content, "I look.");
  ASSERT_EQ(parsed.calls.size(), 2u);
  EXPECT_EQ(parsed.calls[0].name, "shell");
  EXPECT_EQ(parsed.calls[0].arguments, "{\"command\": \"echo '</tool_call>' \\\"}\", \"n\": 1.0}");
  EXPECT_EQ(parsed.calls[1].arguments, "{}");
}

// A template that knows nothing of tools would forget what the policy called.
TEST(ToolCalls, ATemplateWithoutToolsShowsThemInTheContent) {
  TextFiles files;
  std::vector<std::string> words = {"a"};
  const TaskTextFiles task = MakeTaskVocabulary(words);
  files.tokenizer_json = task.tokenizer_json;
  files.tokenizer_config_json = task.tokenizer_config_json;
  files.chat_template_jinja = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}\n{% endfor %}";
  const TextModel model = LoadTextModel(files).value();
  EXPECT_FALSE(model.template_shows_calls);
  const Value messages = ParseJson(R"([{"role":"user","content":"list"},
      {"role":"assistant","content":null,"tool_calls":[
        {"id":"1","type":"function","function":{"name":"shell","arguments":{"command":"ls \"a\""}}},
        {"id":"2","type":"function","function":{"name":"shell","arguments":"{\"command\":\"cat x\"}"}}]},
      {"role":"assistant","content":"I look","tool_calls":[{"function":{"name":"shell","arguments":{}}}]}])").value();
  RenderInput input;
  input.messages = model.ShowCalls(messages);
  const std::string first = R"(<tool_call>{"name":"shell","arguments":{"command":"ls \"a\""}}</tool_call>)" "\n"
                            R"(<tool_call>{"name":"shell","arguments":{"command":"cat x"}}</tool_call>)";
  EXPECT_EQ(model.Render(input).value(),
            "user: list\nassistant: " + first + "\nassistant: I look\n" R"(<tool_call>{"name":"shell","arguments":{}}</tool_call>)" "\n");
  const ParsedAnswer back = ParseToolCalls(ToolFormat::kHermes, first, ParseJson(kShell).value());
  ASSERT_EQ(back.calls.size(), 2u);
  EXPECT_EQ(ParseJson(back.calls[0].arguments)->StringOr("command", ""), "ls \"a\"");

  files.chat_template_jinja = "{% for m in messages %}{{ m.tool_calls }}{% endfor %}";
  const TextModel knows = LoadTextModel(files).value();
  EXPECT_TRUE(knows.template_shows_calls);
  EXPECT_EQ(CompactJson(knows.ShowCalls(messages)), CompactJson(messages));
}

// What was streamed as content cannot be taken back when a call follows.
TEST(ToolCalls, CertainContentIsAPrefixOfTheContent) {
  const Value shell = ParseJson(kShell).value();
  for (ToolFormat format : {ToolFormat::kHermes, ToolFormat::kTask, ToolFormat::kNone}) {
    for (const char* answer : {"plain text", "a <b", "x \n<tool_call>{\"name\":\"shell\",\"arguments\":{}}</tool_call>", "<tool", "tail <tool_call", "  \n"}) {
      const std::string text = answer;
      const std::string content = ParseToolCalls(format, text, shell).content;
      size_t before = 0;
      for (size_t n = 0; n <= text.size(); ++n) {
        const size_t certain = CertainContent(format, std::string_view(text).substr(0, n));
        EXPECT_GE(certain, before);
        EXPECT_EQ(text.substr(0, certain), content.substr(0, certain)) << text;
        before = certain;
      }
    }
  }
}

// A golden of transformers loading our files: the same ids and prompt as here.
TEST(TaskChat, HuggingFaceAgrees) {
  const std::vector<Value> lines = ReadLines(GoldenPath("task_chat.cases.jsonl"));
  ASSERT_GE(lines.size(), 2u);
  std::vector<std::string> words;
  for (const Value& w : lines[0].Find("texts")->as_list()) words.push_back(w.as_string());
  const TaskTextFiles files = MakeTaskVocabulary(words);
  TextFiles all;
  all.tokenizer_json = files.tokenizer_json;
  all.tokenizer_config_json = files.tokenizer_config_json;
  const TextModel model = LoadTextModel(all).value();
  for (size_t i = 1; i < lines.size(); ++i) {
    RenderInput in;
    in.messages = *lines[i].Find("messages");
    in.tools = *lines[i].Find("tools");
    in.add_generation_prompt = lines[i].Find("add_generation_prompt")->as_bool();
    const std::string text = model.Render(in).value();
    EXPECT_EQ(text, lines[i].Find("text")->as_string());
    EXPECT_EQ(model.tokenizer.Encode(text), Ids(*lines[i].Find("ids")));
  }
}

}  // namespace
}  // namespace temper::text
