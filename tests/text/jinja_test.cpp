// A prompt that differs from Python's by one byte trains the policy on a chat it will never see.
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>

#include "tests/text/golden.h"
#include "text/chat_template.h"

namespace temper::text {
namespace {

// Renders with `variables` alone (messages, tools and the rest from them).
Result<std::string> RenderWith(const std::string& source, const Value& variables) {
  auto tmpl = ChatTemplate::Parse(source);
  if (!tmpl.ok()) return tmpl.status();
  RenderInput input;
  input.messages = List{};
  input.variables = variables;
  input.now_s = 1767323045;
  return tmpl->Render(input);
}

// Any operator, filter, method or rule of white space that is not Python's would show in one of these templates.
TEST(Jinja, AgreesWithPython) {
  setenv("TZ", "UTC", 1);
  std::map<std::string, Value> variables;
  for (const Value& c : ReadLines(GoldenPath("jinja.cases.jsonl"))) {
    if (c.Find("define")) {
      variables[c.Find("define")->as_string()] = *c.Find("value");
      continue;
    }
    const std::string& source = c.Find("template")->as_string();
    SCOPED_TRACE(source);
    const auto text = RenderWith(source, variables[c.Find("with")->as_string()]);
    if (c.Find("failed")) {
      EXPECT_FALSE(text.ok()) << "rendered: " << *text;
    } else {
      EXPECT_EQ(text.ok() ? *text : text.status().ToString(), c.Find("text")->as_string());
    }
  }
}

// What cannot be rendered must be refused when the model is loaded, with its line, not in the middle of a job.
TEST(Jinja, RefusesAtLoadWithLine) {
  for (const char* source : {"ok\n{% include 'x' %}", "ok\n{{ x|random }}", "ok\n{% if x is nope %}{% endif %}", "\n{% block a %}{% endblock %}",
                             "\n{% import 'x' as y %}", "\n{{ 'x' }"}) {
    auto tmpl = ChatTemplate::Parse(source);
    ASSERT_FALSE(tmpl.ok()) << source;
    EXPECT_NE(tmpl.status().message().find("line 2"), std::string::npos) << tmpl.status().message();
  }
}

// A template comes with a model from anywhere: it must not be able to hang or fill the machine.
TEST(Jinja, HostileTemplatesEnd) {
  const Value none = Dict();
  for (const char* source : {"{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
                             "{{ 'x' * 999999999999 }}", "{{ [0] * 999999999999 }}", "{{ range(10**9)|list }}",
                             "{% set ns = namespace(x='ab') %}{% for i in range(90) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
                             "{% set ns = namespace(x=[1]) %}{% for i in range(90) %}{% set ns.x = ns.x + ns.x %}{% endfor %}", "{{ 'x'.center(99999999999) }}",
                             "{{ 'aaaa'.replace('', 'b' * 60000000) }}", "{% set ns = namespace() %}{% set ns.n = ns %}{{ ns }}",
                             "{% set l = [[]] %}{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l }}"}) {
    EXPECT_FALSE(RenderWith(source, none).ok()) << source;
  }
  std::string deep;
  for (int i = 0; i < 100000; ++i) deep += "(";
  EXPECT_FALSE(ChatTemplate::Parse("{{ " + deep).ok());
  std::string ors = "x", filters = "x", plus = "m()";
  for (int i = 0; i < 50000; ++i) ors += " or x", filters += "|list", plus += "+1";
  EXPECT_FALSE(ChatTemplate::Parse("{{ " + ors + " }}").ok());
  EXPECT_FALSE(ChatTemplate::Parse("{{ " + filters + " }}").ok());
  EXPECT_FALSE(ChatTemplate::Parse("{{ " + plus + " }}").ok());
  EXPECT_FALSE(RenderWith("{% macro m() %}{{ " + plus.substr(0, 1500) + " }}{% endmacro %}{{ m() }}", none).ok());
  // What holds itself or a long chain must be taken apart without recursion.
  for (const char* chain : {"{% set ns = namespace(l=1) %}{% for i in range(99999) %}{% set p = ns.l %}{% for j in [1] %}{% set ns.l = loop %}{% endfor %}{% endfor %}",
                            "{% set ns = namespace(l=1) %}{% for i in range(99999) %}{% set ns.l = namespace(p=ns.l) %}{% endfor %}",
                            "{% set ns = namespace(l=1) %}{% for i in range(99999) %}{% set p = ns.l %}{% macro m() %}{% endmacro %}{% set ns.l = m %}{% endfor %}"}) {
    EXPECT_TRUE(RenderWith(chain, none).ok()) << RenderWith(chain, none).status().ToString();
  }
  for (const char* chain : {"{% set ns = namespace(l=1) %}{% for i in range(99999) %}{% set ns.l = cycler(ns.l) %}{% endfor %}",
                            "{% set ns = namespace(l=1) %}{% for i in range(99999) %}{% set ns.l = [ns.l].index %}{% endfor %}",
                            "{% set ns = namespace(l=1) %}{% for i in range(99999) %}{% set ns.l = [ns.l]|reverse %}{% endfor %}",
                            "{% set ns = namespace(l=1) %}{% for i in range(99999) %}{% set ns.l = {'a': ns.l} %}{% endfor %}"}) {
    EXPECT_FALSE(RenderWith(chain, none).ok()) << chain;
  }
  std::string nots, ifs;
  for (int i = 0; i < 100000; ++i) nots += "not ", ifs += "{% if x %}";
  EXPECT_FALSE(ChatTemplate::Parse("{{ " + nots + "x }}").ok());
  EXPECT_FALSE(ChatTemplate::Parse(ifs).ok());
}

// absent tools must be none, not undefined, and variables win over the special tokens.
TEST(ChatTemplate, VariablesOfARendering) {
  auto tmpl = ChatTemplate::Parse("{{ tools is none }}{{ documents is none }}{{ bos_token }}{{ eos_token }}{{ add_generation_prompt }}{{ enable_thinking }}");
  ASSERT_TRUE(tmpl.ok());
  tmpl->SetDefaults(MakeDict({{"bos_token", "<b>"}, {"eos_token", "<e>"}}));
  RenderInput input;
  input.messages = List{};
  input.variables = MakeDict({{"enable_thinking", false}, {"eos_token", "</s>"}});
  EXPECT_EQ(tmpl->Render(input).value(), "TrueTrue<b></s>FalseFalse");
}

}  // namespace
}  // namespace temper::text
