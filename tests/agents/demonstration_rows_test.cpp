#include "agents/demonstration_rows.h"

#include <gtest/gtest.h>

#include "tests/text/golden.h"

namespace temper::agents {
namespace {

// Words stand right behind the end token, and answers behind a token that is none of the added ones.
constexpr char kTemplate[] =
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content + eos_token }}{% elif m.role == 'tool' %}"
    "{{ 'quick ' + m.content + ' fox\\n' }}{% else %}{{ bos_token + m.content + '\\n' }}{% endif %}{% endfor %}";

// Could go wrong: a piece of the conversation is encoded as if it began a text, and the policy learns a space that nobody wrote.
TEST(DemonstrationRows, SpellTheConversation) {
  Demonstration demo;
  demo.task.instruction = "the quick task";
  demo.steps = {{"ls it", "brown\nfox"}, {"cat it", " a\n b"}};
  auto call = [](const char* command) {
    text::Dict arguments, function;
    arguments.Set("command", command);
    function.Set("name", "shell");
    function.Set("arguments", std::move(arguments));
    return text::HermesCall(function);
  };
  for (const char* name : {"llama2_metaspace.json", "llama2.json", "gemma.json", "spm_unknown.json"}) {
    SCOPED_TRACE(name);
    text::TextFiles files;
    files.tokenizer_json = text::ReadFile(text::GoldenPath(name));
    files.tokenizer_config_json = R"({"bos_token": "<s>", "eos_token": "</s>"})";
    files.chat_template_jinja = kTemplate;
    const text::TextModel model = text::LoadTextModel(files).value();
    const auto row = ToRow(demo, model);
    ASSERT_TRUE(row.ok()) << row.status().ToString();
    ASSERT_EQ(row->ids.size(), row->mask.size());
    std::string spelled, learned;
    for (size_t i = 0; i < row->ids.size(); ++i) {
      const std::string_view bytes = model.tokenizer.TokenBytes(row->ids[i]);
      spelled += bytes;
      if (row->mask[i]) learned += bytes;
    }
    // Two of the families put a space behind every added token, of their own accord.
    const std::string mark = name == std::string("llama2.json") || name == std::string("spm_unknown.json") ? " " : "";
    const std::string first = call("ls it") + "</s>", second = call("cat it") + "</s>";
    EXPECT_EQ(spelled, "<s>" + mark + "the quick task\n" + first + mark + "quick brown\nfox fox\n" + second + mark +
                           "quick  a\n b fox\ndone</s>");
    EXPECT_EQ(learned, first + second + "done</s>");
  }
}

}  // namespace
}  // namespace temper::agents
