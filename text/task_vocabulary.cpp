#include "text/task_vocabulary.h"

#include <set>
#include <vector>

#include "text/byte_alphabet.h"
#include "text/json.h"
#include "text/tokenizer.h"
#include "text/value.h"

namespace temper::text {
namespace {

// One parameter, a string: its argument stands bare. A call has no name when the request has exactly one tool.
constexpr const char* kTemplate = R"({%- macro bare(name) -%}
{%- for t in tools or [] if t.function.name == name -%}
{%- set p = (t.function.parameters or {}).get('properties') or {} -%}
{%- if p|length == 1 and (p.values()|first).get('type') == 'string' -%}yes{%- endif -%}
{%- endfor -%}
{%- endmacro -%}
{%- for m in messages -%}
{%- set role = 'system' if m.role == 'developer' else m.role -%}
{%- if role not in ['system', 'user', 'assistant', 'tool'] -%}{{ raise_exception('no such role: ' ~ m.role) }}{%- endif -%}
{{- '<|' ~ role ~ '|>' -}}
{%- if m.content is string -%}
{{- m.content -}}
{%- elif m.content -%}
{%- for part in m.content -%}{{- part.text -}}{%- endfor -%}
{%- endif -%}
{%- if role == 'assistant' -%}
{%- for c in m.tool_calls or [] -%}
{%- set f = c.function -%}
{{- '<tool_call>' -}}
{%- if (tools or [])|length != 1 -%}{{- f.name ~ '\n' -}}{%- endif -%}
{%- if f.arguments is mapping and f.arguments|length == 1 and bare(f.name) and (f.arguments.values()|first) is string -%}
{{- f.arguments.values()|first -}}
{%- elif f.arguments is string -%}
{{- f.arguments -}}
{%- else -%}
{{- f.arguments|tojson -}}
{%- endif -%}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
)";

bool IsLetter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

}  // namespace

TaskTextFiles MakeTaskVocabulary(std::span<const std::string> texts) {
  std::set<std::string> words;
  for (const std::string& text : texts) {
    for (size_t i = 0; i < text.size(); ++i) {
      if (!IsLetter(text[i])) continue;
      size_t end = i;
      while (end < text.size() && IsLetter(text[end])) ++end;
      if (end - i > 1) words.insert(text.substr(i, end - i));  // single letters are bytes
      i = end;
    }
  }
  Dict vocab;
  for (int64_t b = 0; b < 256; ++b) vocab.Set(ToByteAlphabet(std::string(1, static_cast<char>(b))), b);
  List added;
  for (const char* content : {TaskTokens::kEnd, TaskTokens::kSystem, TaskTokens::kUser, TaskTokens::kAssistant, TaskTokens::kTool,
                              TaskTokens::kToolCall}) {
    const int64_t id = static_cast<int64_t>(vocab.size());
    vocab.Set(content, id);
    added.push_back(MakeDict({{"id", id}, {"content", content}, {"single_word", false}, {"lstrip", false}, {"rstrip", false},
                            {"normalized", false}, {"special", content != TaskTokens::kToolCall}}));
  }
  for (const std::string& word : words) vocab.Set(word, static_cast<int64_t>(vocab.size()));

  const Dict byte_level = MakeDict({{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", false}});
  const Dict split = MakeDict({{"type", "Split"}, {"pattern", MakeDict({{"Regex", "[A-Za-z]+|\\s|[^\\sA-Za-z]"}})}, {"behavior", "Isolated"},
                             {"invert", false}});
  const Dict tokenizer = MakeDict(
      {{"version", "1.0"},
       {"truncation", nullptr},
       {"padding", nullptr},
       {"added_tokens", added},
       {"normalizer", nullptr},
       {"pre_tokenizer", MakeDict({{"type", "Sequence"}, {"pretokenizers", List{split, byte_level}}})},
       {"post_processor", nullptr},
       {"decoder", byte_level},
       {"model", MakeDict({{"type", "BPE"}, {"dropout", nullptr}, {"unk_token", nullptr}, {"continuing_subword_prefix", nullptr},
                         {"end_of_word_suffix", nullptr}, {"fuse_unk", false}, {"byte_fallback", false}, {"ignore_merges", true},
                         {"vocab", vocab}, {"merges", List{}}})}});
  const Dict config = MakeDict({{"tokenizer_class", "PreTrainedTokenizerFast"},
                              {"clean_up_tokenization_spaces", false},
                              {"eos_token", TaskTokens::kEnd},
                              {"pad_token", TaskTokens::kEnd},
                              {"chat_template", kTemplate}});
  JsonStyle style;
  style.indent = 1;
  return {DumpJson(Value(tokenizer), style).value(), DumpJson(Value(config), style).value()};
}

}  // namespace temper::text
