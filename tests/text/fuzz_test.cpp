// Outside bytes that crash, hang or fill the process would take a job down: seeded mutations of good inputs through every parser.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "tests/text/golden.h"
#include "text/chat_template.h"
#include "text/json.h"
#include "text/regex.h"
#include "text/text_model.h"
#include "text/utf8.h"

namespace temper::text {
namespace {

// Flips, cuts, doubles and mixes pieces of `seed`.
std::string Mutate(std::string seed, const std::vector<std::string>& words, std::mt19937_64& rng) {
  const int edits = 1 + static_cast<int>(rng() % 4);
  for (int e = 0; e < edits; ++e) {
    const size_t at = seed.empty() ? 0 : rng() % seed.size();
    const size_t n = seed.empty() ? 0 : rng() % std::min<size_t>(seed.size() - at, 20);
    switch (rng() % 6) {
      case 0: seed.insert(at, words[rng() % words.size()]); break;
      case 1: seed.erase(at, n); break;
      case 2: seed.insert(at, seed.substr(at, n)); break;
      case 3: if (!seed.empty()) seed[at] = static_cast<char>(rng()); break;
      case 4: seed.resize(at); break;
      default: if (!seed.empty()) seed[at] ^= static_cast<char>(1 << (rng() % 7)); break;
    }
  }
  return seed;
}

TEST(Fuzz, Json) {
  std::mt19937_64 rng(1);
  const std::vector<std::string> words = {"[", "{", "\"", "\\u", "\\ud800", "1e", "-", "0.5", "null", ":", ",", "}", "]", "\xff", "1e999", "[[[[[["};
  const std::string seed = R"({"a": [1, 2.5e-7, -0, true, null, "xé\n\ud83c\udf89"], "b": {"c": {}, "d": []}, "e": 123456789012345678901234567890})";
  for (int i = 0; i < 20000; ++i) {
    auto v = ParseJson(Mutate(seed, words, rng));
    if (!v.ok()) continue;
    const std::string text = DumpJson(*v).value();
    EXPECT_EQ(DumpJson(ParseJson(text).value()).value(), text);  // what is read is printed the same for ever
  }
  EXPECT_FALSE(ParseJson(std::string(1000000, '[')).ok());
}

TEST(Fuzz, Jinja) {
  std::mt19937_64 rng(2);
  std::vector<std::string> seeds;
  Value variables;
  for (const Value& c : ReadLines(GoldenPath("jinja.cases.jsonl"))) {
    if (c.Find("define")) {
      if (c.Find("define")->as_string() == "V") variables = *c.Find("value");
    } else {
      seeds.push_back(c.Find("template")->as_string());
    }
  }
  const std::vector<std::string> words = {"{{", "}}", "{%", "%}", "{#", "-", "|", " if ", " else ", "(", ")", "[", "]", "~", "**", "* 99999999", "|list", " for x in ", "not ", "'", "\\", "is ", "loop.", "namespace(", "|tojson", "range(99999)", "{% endfor %}"};
  RenderInput input;
  input.messages = List{};
  input.variables = variables;
  for (int i = 0; i < 6000; ++i) {
    auto tmpl = ChatTemplate::Parse(Mutate(seeds[rng() % seeds.size()], words, rng));
    if (tmpl.ok()) (void)tmpl->Render(input).ok();
  }
}

TEST(Fuzz, TokenizerJsonAndText) {
  std::mt19937_64 rng(3);
  // Small vocabularies, so that mutations hit the structure.
  const std::string bytes = R"({"version":"1.0","added_tokens":[{"id":6,"content":"<s>","special":true,"normalized":false}],"normalizer":{"type":"NFC"},
"pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":"(?i:'s)|\\p{L}+|\\s+(?!\\S)|\\s+|[^\\s\\p{L}]{1,3}"},"behavior":"Isolated","invert":false},
{"type":"Digits","individual_digits":true},{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true}]},
"post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<s>","type_id":0}},{"Sequence":{"id":"A","type_id":0}}],"special_tokens":{"<s>":{"id":"<s>","ids":[6],"tokens":["<s>"]}}},
"decoder":{"type":"ByteLevel"},"model":{"type":"BPE","ignore_merges":false,"unk_token":null,"vocab":{"a":0,"b":1,"ab":2,"Ġ":3,"Ġa":4,"abab":5},"merges":["a b",["ab","ab"],"Ġ a"]}})";
  const std::string pieces_of_text = R"({"version":"1.0","added_tokens":[{"id":6,"content":"<s>","special":true,"normalized":true,"lstrip":true}],
"normalizer":{"type":"Sequence","normalizers":[{"type":"Strip"},{"type":"NFKC"},{"type":"Prepend","prepend":"▁"},{"type":"Replace","pattern":{"String":" "},"content":"▁"},
{"type":"Replace","pattern":{"Regex":"a{2,}"},"content":"aa"},{"type":"Lowercase"}]},
"pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":true},{"type":"Punctuation","behavior":"Isolated"}]},
"decoder":{"type":"Sequence","decoders":[{"type":"Replace","pattern":{"String":"▁"},"content":" "},{"type":"ByteFallback"},{"type":"Fuse"},{"type":"Strip","content":" ","start":1,"stop":0}]},
"model":{"type":"BPE","byte_fallback":true,"fuse_unk":true,"unk_token":"<u>","vocab":{"<u>":0,"a":1,"▁":2,"▁a":3,"<0xC3>":4,"<0xA9>":5},"merges":["▁ a"]}})";
  const std::vector<std::string> words = {"\"", "null", "[", "{", "99999999999", "-1", "*", "+", "(", "(?", "\\\\p{", "{0,1000}", "1", "true", "abab", "▁", "▁▁▁▁▁▁▁▁"};
  const std::vector<std::string> pieces = {"ab", " a", "'s", "<s>", "\xff", "é", "e\u0301", "  \n", "123", "\u1100\u1161", std::string(90, 'a')};
  for (const std::string& seed : {bytes, pieces_of_text}) {
    ASSERT_TRUE(Tokenizer::FromJson(seed).ok()) << Tokenizer::FromJson(seed).status().ToString();
  }
  for (int i = 0; i < 8000; ++i) {
    auto t = Tokenizer::FromJson(Mutate(i % 2 ? pieces_of_text : bytes, words, rng));
    if (!t.ok()) continue;
    std::string text;
    for (int k = 0; k < 10; ++k) text += pieces[rng() % pieces.size()];
    const std::vector<int32_t> ids = t->Encode(text, {.add_special = (i & 1) != 0, .parse_special = (i & 2) != 0});
    const std::string whole = t->Decode(ids);
    EXPECT_TRUE(IsValidUtf8(whole));
    StreamDecoder stream(*t);
    std::string pieces_of_it;
    for (size_t at = 0; at < ids.size(); at += 3) pieces_of_it += stream.Append(std::span(ids).subspan(at, std::min<size_t>(3, ids.size() - at)));
    EXPECT_EQ(pieces_of_it + stream.Finish(), whole);
  }
}

// The same kind of tokenizer as the metadata of a GGUF file says it: lists that disagree, ids that point nowhere.
TEST(Fuzz, TokenizerGguf) {
  std::mt19937_64 rng(6);
  const std::vector<std::string> pres = {"smollm", "llama-bpe", "qwen2", "gpt-2", "default", "deepseek-v3", "llama3", "qwen35", ""};
  const std::vector<std::string> words = {"a", "b", "ab", "\u0120", "\u0120a", "abab", "<s>", "</s>", "1", "\xff", ""};
  int accepted = 0;
  for (int i = 0; i < 3000; ++i) {
    GgufTokenizer g;
    g.model = i % 50 == 0 ? "bert" : i % 7 == 0 ? "gemma4" : i % 3 == 0 ? "llama" : "gpt2";
    g.pre = pres[rng() % pres.size()];
    g.tokens = {"a", "b", "ab", "\u0120", "\u0120a", "abab", "<s>", "</s>"};
    g.token_types = {1, 1, 1, 1, 1, 1, 3, 4};
    g.merges = {"a b", "ab ab", "\u0120 a"};
    if (g.model == "llama") g.merges.clear(), g.scores.resize(g.tokens.size(), 0.5f);
    if (rng() % 8 == 0) g.scores.assign(rng() % 10, static_cast<float>(rng() % 3) - NAN * static_cast<float>(rng() % 2));
    g.bos = 6;
    g.eos = 7;
    g.add_bos = rng() % 2;
    g.add_eos = rng() % 2;
    for (int e = static_cast<int>(rng() % 3); e > 0; --e) {
      const std::string& word = words[rng() % words.size()];
      switch (rng() % 8) {
        case 0: g.tokens[rng() % g.tokens.size()] = word; break;
        case 1: g.tokens.push_back(word); break;
        case 2: g.token_types[rng() % g.token_types.size()] = static_cast<int32_t>(rng() % 9) - 1; break;
        case 3: g.token_types.clear(); g.token_types.resize(g.tokens.size(), 1); break;
        case 4: g.merges.push_back(word + (rng() % 4 ? " " : "") + words[rng() % words.size()]); break;
        case 5: g.bos = static_cast<int32_t>(rng()); break;
        case 6: g.eos.reset(); break;
        default:
          if (!g.merges.empty()) g.merges[rng() % g.merges.size()] = word + " " + words[rng() % words.size()];
          break;
      }
    }
    auto t = Tokenizer::FromGguf(g);
    if (!t.ok()) continue;
    ++accepted;
    const std::vector<int32_t> ids = t->Encode("abab a's <s>12 \u00e9</s>\xff  \n", {.add_special = true, .parse_special = (i & 1) != 0});
    EXPECT_TRUE(IsValidUtf8(t->Decode(ids)));
  }
  EXPECT_GT(accepted, 500);
}

// A regular expression from a tokenizer file must not take exponential time.
TEST(Fuzz, Regex) {
  std::mt19937_64 rng(4);
  const std::string seed = "(?i:'s|'t)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|(a|b)*c|(?:ab?)+?d|\\p{N}{1,3}(?=x)|(?>a+)b|[a-c&&[^b]]++";
  const std::vector<std::string> words = {"(", ")", "*", "+", "?", "{2,9}", "|", "[", "]", "^", "(?!", "(?i)", "ss", "\u00DF", "[\\w]", "\\s", "\\p{Lu}", "(a|aa)+$", "(a*a*)+b"};
  const std::vector<uint32_t> text = ToCodePoints(std::string(60, 'a') + " 'S x1234 " + std::string(40, 'b') + "d");
  for (int i = 0; i < 2000; ++i) {
    auto r = Regex::Parse(Mutate(seed, words, rng));
    if (r.ok()) (void)r->FindAll(text);
  }
  auto evil = Regex::Parse("(a|aa)+$b");
  ASSERT_TRUE(evil.ok());
  EXPECT_TRUE(evil->FindAll(ToCodePoints(std::string(2000, 'a'))).empty());
}

TEST(Fuzz, ToolCalls) {
  std::mt19937_64 rng(5);
  const Value tools = ParseJson(R"([{"type":"function","function":{"name":"f","parameters":{"properties":{"a":{"type":"string"}}}}},{"function":{"name":"g"}}])").value();
  const std::vector<std::string> words = {"<tool_call>", "</tool_call>", "{", "}", "\"", "\n", "f\n", "\\"};
  for (int i = 0; i < 20000; ++i) {
    const std::string text = Mutate("say <tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"b\"}}</tool_call><tool_call>g\n{}", words, rng);
    for (ToolFormat format : {ToolFormat::kHermes, ToolFormat::kTask}) {
      const ParsedAnswer parsed = ParseToolCalls(format, text, tools, (i & 1) != 0);
      EXPECT_TRUE(!parsed.ill_formed || parsed.content == text);
      for (const ToolCall& call : parsed.calls) EXPECT_TRUE(ParseJson(call.arguments).ok());
      EXPECT_LE(CertainContent(format, text), text.size());
    }
  }
}

}  // namespace
}  // namespace temper::text
