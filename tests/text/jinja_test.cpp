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
  for (const char* source : {"ok\n{% include 'x' %}", "ok\n{{ x|random }}", "ok\n{% if false %}{{ x|urlize }}{% endif %}", "ok\n{{ x is nope }}",
                             "ok\n{{ x|nope }}", "\n{% extends 'a' %}", "\n{% import 'x' as y %}", "\n{% from 'x' import y %}", "\n{{ 'x' }",
                             "\n{% autoescape x %}{% endautoescape %}", "\n{{ self.x() }}", "\n{% block a required %}{% endblock %}",
                             "\n{% trans %}{% endtrans %}", "\n{% do x %}"}) {
    auto tmpl = ChatTemplate::Parse(source);
    ASSERT_FALSE(tmpl.ok()) << source;
    EXPECT_NE(tmpl.status().message().find("line 2"), std::string::npos) << tmpl.status().message();
  }
}

// What Python has and this does not must be an error with its line and name, never another text.
TEST(Jinja, RefusesByNameWhereItIsCalled) {
  const std::pair<const char*, const char*> cases[] = {
      {"(-8) ** 0.5", "complex"},
      {"'a'.encode()", "encode"},
      {"(5).to_bytes(2)", "to_bytes"},
      {"dict.fromkeys('a')", "fromkeys"},
      {"joiner", "printing a type"},
      {"lipsum()", "lipsum"},
      {"[1]|map('string')", "printing a generator"},
      {"{'a': 1}.keys() - ['a']", "sets"},
      {"('ab' ~ x) is sameas 'aby'", "one object"},
      {"'&hearts;'|striptags", "&hearts;"},
      {"'%s'|map('random')|list", "random"},
      {"{}|tojson(indent='  ')", "indent"},
      {"10 ** 5000", "4300"},
      {"['x']|map('urlize')|first", "urlize"}};
  for (const auto& [expression, named] : cases) {
    SCOPED_TRACE(expression);
    const auto text = RenderWith("ok\n{{ " + std::string(expression) + " }}", MakeDict({{"x", "y"}}));
    ASSERT_FALSE(text.ok()) << *text;
    EXPECT_NE(text.status().message().find("line 2"), std::string::npos) << text.status().message();
    EXPECT_NE(text.status().message().find(named), std::string::npos) << text.status().message();
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
                             "{{ 10 ** (10 ** 10) }}", "{% set ns = namespace(x=3) %}{% for i in range(90) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
                             "{% for i in range(99999) %}{% set x = (10 ** 2000) * (10 ** 2000) // 7 %}{% endfor %}",
                             "{% for i in range(99999) %}{% for j in range(99) %}{% set x = '%d' % (10 ** 4000) %}{% endfor %}{% endfor %}",
                             "{{ '%*d' % (99999999999, 1) }}", "{{ '%.99999999999f' % 1.5 }}", "{{ '{:99999999999}'.format(1) }}", "{{ '{:.60000000f}'.format(1.5) * 9 }}",
                             "{{ '%60000000d|%60000000d' % (1, 2) }}", "{{ [1]|batch(99999999999, 'x')|list }}", "{{ [1]|slice(99999999999)|list }}",
                             "{% for i in range(99999) %}{% for x in range(99999)|map('string')|reject('string') %}{% endfor %}{% endfor %}",
                             "{% for i in range(9999) %}{% set x = ('a-' * 99999)|wordwrap(1) %}{% endfor %}",
                             "{% for i in range(9999) %}{% set x = [('ab ' * 9999)]|pprint %}{% endfor %}",
                             "{% for i in range(9999) %}{% set x = ('ab ' * 99999).translate({97: 'x' * 999}) %}{% endfor %}",
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
                            "{% set ns = namespace(l=[1]) %}{% for i in range(99999) %}{% set ns.l = ns.l|map('string') %}{% endfor %}",
                            "{% set ns = namespace(l=[1]) %}{% for i in range(99999) %}{% set ns.l = [1]|select('in', ns.l) %}{% endfor %}",
                            "{% set ns = namespace(l={}) %}{% for i in range(99999) %}{% set ns.l = {'a': ns.l}.values() %}{% endfor %}",
                            "{% set ns = namespace(l=()) %}{% for i in range(99999) %}{% set ns.l = (ns.l,) %}{% set x = {ns.l: 1} %}{% endfor %}",
                            "{% set ns = namespace(l=1) %}{% for i in range(99999) %}{% set ns.l = {'a': ns.l} %}{% endfor %}"}) {
    EXPECT_FALSE(RenderWith(chain, none).ok()) << chain;
  }
  // As deep as an expression may be, generators are still drawn from.
  std::string maps = "['x']";
  for (int i = 0; i < 330; ++i) maps += "|map('upper')";
  EXPECT_EQ(RenderWith("{{ (" + maps + ")|first }}", none).value(), "X");
  // A loop that holds itself is let go.
  EXPECT_EQ(RenderWith("{% for x in [1] %}{{ loop.changed(loop) }}{% endfor %}", none).value(), "True");
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
