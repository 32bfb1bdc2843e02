// Wrong ids would train the policy on another text than the agent saw, silently: every id must be Hugging Face's.
#include "text/tokenizer.h"

#include <gtest/gtest.h>

#include "tests/text/golden.h"
#include "text/byte_alphabet.h"
#include "text/task_vocabulary.h"
#include "text/utf8.h"

namespace temper::text {
namespace {

class TokenizerGolden : public testing::TestWithParam<const char*> {};

// A scanner, an added-token rule or a merge order that differs from Hugging Face's would show in some of these texts.
TEST_P(TokenizerGolden, AgreesWithHuggingFace) {
  const std::string name = GetParam();
  auto tokenizer = Tokenizer::FromJson(ReadFile(GoldenPath(name + ".json")));
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().ToString();
  for (const Value& c : ReadLines(GoldenPath(name + ".cases.jsonl"))) {
    const std::string& text = c.Find("text")->as_string();
    SCOPED_TRACE(CompactJson(text));
    EXPECT_EQ(tokenizer->Encode(text), Ids(*c.Find("ids")));
    EXPECT_EQ(tokenizer->Encode(text, {.parse_special = false}), Ids(*c.Find("plain")));
    EXPECT_EQ(tokenizer->Encode(text, {.add_special = true}), Ids(*c.Find("full")));
    const List& decoded = c.Find("decoded")->as_list();
    EXPECT_EQ(tokenizer->Decode(Ids(*c.Find("ids"))), decoded[0].as_string());
    EXPECT_EQ(tokenizer->Decode(Ids(*c.Find("ids")), true), decoded[1].as_string());
    EXPECT_EQ(tokenizer->Decode(Ids(*c.Find("noise"))), decoded[2].as_string());
    EXPECT_LE(tokenizer->LeastTokens(text), Ids(*c.Find("plain")).size());
    EXPECT_LE(tokenizer->LeastTokens(text), Ids(*c.Find("ids")).size());
  }
}
INSTANTIATE_TEST_SUITE_P(Kinds, TokenizerGolden,
                         testing::Values("smollm", "gpt2_prefix", "llama3", "qwen", "deepseek", "o200k", "behaviors", "llama2",
                                         "swallowed", "llama2_metaspace", "gemma", "spm_unknown", "components", "decomposed", "kimi", "folds",
                                         "accents"));

// A byte without a token must be left out and counted, not turned into something else.
TEST(Tokenizer, CountsDroppedBytes) {
  auto tokenizer = Tokenizer::FromJson(ReadFile(GoldenPath("smollm.json"))).value();
  size_t dropped = 0;
  tokenizer.Encode("a\u0106z", {}, &dropped);  // C4 86, and this vocabulary has no token for 86
  EXPECT_EQ(dropped, 1u);
}

// A turn is encoded behind the end token of the one before: its first word must not be taken for the first of the text.
TEST(Tokenizer, GoesOnBehindAToken) {
  for (const char* name : {"llama2_metaspace", "llama2", "gemma", "llama3", "spm_unknown", "gpt2_prefix"}) {
    auto tokenizer = Tokenizer::FromJson(ReadFile(GoldenPath(std::string(name) + ".json"))).value();
    for (const AddedToken& token : tokenizer.added_tokens()) {
      if (token.single_word || token.normalized) continue;  // they are none beside a letter
      for (const char* rest : {"the fox", " the fox", "\n9", " \n the", " ", ""}) {
        std::vector<int32_t> ids = tokenizer.Encode("a quick" + token.content);
        const std::vector<int32_t> more = tokenizer.EncodeAfter(token.id, rest);
        ids.insert(ids.end(), more.begin(), more.end());
        EXPECT_EQ(ids, tokenizer.Encode("a quick" + token.content + rest)) << name << " " << token.content;
      }
    }
  }
}

// An answer is encoded behind the prompt, wherever the template breaks off: no space may come between the two.
TEST(Tokenizer, GoesOnInsideAText) {
  for (const char* name : {"llama2_metaspace", "llama2", "gemma", "llama3", "spm_unknown", "gpt2_prefix"}) {
    auto tokenizer = Tokenizer::FromJson(ReadFile(GoldenPath(std::string(name) + ".json"))).value();
    auto bytes = [&](const std::vector<int32_t>& ids) {
      std::string out;
      for (int32_t id : ids) out += tokenizer.TokenBytes(id);
      return out;
    };
    for (const char* before : {"the fo", "a\n", "a quick "}) {
      const std::vector<int32_t> ids = tokenizer.Encode(before);
      for (const char* rest : {"x jumps", " over", "  it", "the <s>lazy"}) {
        if (std::string(rest).find('<') != std::string::npos && !tokenizer.TokenId("<s>")) continue;
        const std::string more = bytes(tokenizer.EncodeAfter(ids.back(), rest));
        const size_t n = std::string_view(rest).find('<');  // behind <s> a family may mark the word
        EXPECT_EQ(more.substr(0, n), std::string(rest).substr(0, n)) << name << " behind " << before;
      }
    }
  }
}

// A bound that is too high refuses what fits, one that is 0 lets a giant text through.
TEST(Tokenizer, LeastTokensIsABound) {
  auto words = Tokenizer::FromJson(MakeTaskVocabulary(std::vector<std::string>{"which word is in the longest-folder"}).tokenizer_json).value();
  std::string text;
  for (int i = 0; i < 1000; ++i) text += "longest";
  EXPECT_EQ(words.Encode(text).size(), 7000u);  // in one row they are no known word
  EXPECT_GE(words.LeastTokens(text), 100u);
  EXPECT_EQ(words.LeastTokens("longest"), 0u);
  auto smollm = Tokenizer::FromJson(ReadFile(GoldenPath("smollm.json"))).value();
  EXPECT_EQ(smollm.LeastTokens(std::string(100000, '\x86')), 0u) << "a byte without a token";
  EXPECT_EQ(smollm.Encode(std::string(1000, ' ')).size() >= smollm.LeastTokens(std::string(1000, ' ')), true);
  EXPECT_GE(smollm.LeastTokens(std::string(1 << 20, 'x')), 1000u);
}

// A code point cut by a token border must not come out as two replacement characters when the text is streamed, and a row of
// bytes that turns out broken must not have been given out before.
TEST(StreamDecoder, EqualsDecodeForEverySplit) {
  for (const char* name : {"llama3", "llama2", "components"}) {
    auto tokenizer = Tokenizer::FromJson(ReadFile(GoldenPath(std::string(name) + ".json"))).value();
    std::vector<int32_t> ids = tokenizer.Encode(" né 👩‍👩‍👧 你\xe4\xbd<|im_end|>x");
    for (const char* token : {"ð", "Ł", "a", "ð", "<0xF0>", "<0x9F>", "a", "<0xC3>", "<0xA9>", "<0xE4>", "a", "<0xC3>", "<0xA9>"}) {
      if (const auto id = tokenizer.TokenId(token)) ids.push_back(*id);
    }
    for (bool skip : {false, true}) {
      const std::string whole = tokenizer.Decode(ids, skip);
      for (size_t chunk = 1; chunk <= ids.size(); ++chunk) {
        StreamDecoder stream(tokenizer, skip);
        std::string out;
        for (size_t i = 0; i < ids.size(); i += chunk) {
          const std::string part = stream.Append(std::span(ids).subspan(i, std::min(chunk, ids.size() - i)));
          EXPECT_TRUE(IsValidUtf8(part));
          out += part;
        }
        EXPECT_EQ(out + stream.Finish(), whole);
      }
    }
  }
}

// What is held back is what cannot be known yet, no more: a client would wait for its text.
TEST(StreamDecoder, GivesWhatIsCertain) {
  auto tokenizer = Tokenizer::FromJson(ReadFile(GoldenPath("llama2.json"))).value();
  StreamDecoder stream(tokenizer);
  auto append = [&](const char* token) { return stream.Append(std::vector<int32_t>{*tokenizer.TokenId(token)}); };
  EXPECT_EQ(append("\u2581"), "") << "the first space stands for the beginning";
  EXPECT_EQ(append("a"), "a");
  EXPECT_EQ(append("\u2581"), " ");
  EXPECT_EQ(append("<0xC3>"), "");
  EXPECT_EQ(append("<0xA9>"), "");
  EXPECT_EQ(append("a"), "éa");
  EXPECT_EQ(append("<0xC3>"), "");
  EXPECT_EQ(stream.Finish(), "\uFFFD");
  EXPECT_EQ(tokenizer.TokenBytes(*tokenizer.TokenId("\u2581")), " ");
  EXPECT_EQ(tokenizer.TokenBytes(*tokenizer.TokenId("<0xC3>")), "\xc3");
}

// The metadata of a GGUF file that say what a tokenizer.json says.
GgufTokenizer AsGguf(const Value& json, const char* model, const char* pre) {
  GgufTokenizer out;
  out.model = model;
  out.pre = pre;
  auto place = [&](size_t id) -> std::string& {
    if (id >= out.tokens.size()) out.tokens.resize(id + 1), out.token_types.resize(id + 1, 1);
    return out.tokens[id];
  };
  for (const auto& [token, id] : json.Find("model")->Find("vocab")->as_dict().items()) {
    place(static_cast<size_t>(id.as_int())) = token.as_string();
    const std::string& t = token.as_string();
    if (t.size() == 6 && t.substr(0, 3) == "<0x") out.token_types[static_cast<size_t>(id.as_int())] = 6;
  }
  for (const Value& token : json.Find("added_tokens")->as_list()) {
    const size_t id = static_cast<size_t>(token.Find("id")->as_int());
    place(id) = token.Find("content")->as_string();
    out.token_types[id] = token.Find("special")->as_bool() ? 3 : 4;
  }
  if (out.model == "llama") {
    for (size_t i = 0; i < out.tokens.size(); ++i) out.scores.push_back(-static_cast<float>(i));
  } else {
    for (const Value& m : json.Find("model")->Find("merges")->as_list()) {
      out.merges.push_back(m.as_list()[0].as_string() + " " + m.as_list()[1].as_string());
    }
  }
  if (out.model != "gpt2") out.unk = 0;
  return out;
}

// A pre-tokenizer under the wrong name, or merges in the wrong order, would give other ids for the same model in the other format.
TEST(TokenizerGguf, SaysWhatTheJsonSays) {
  const std::tuple<const char*, const char*, const char*> kKinds[] = {
      {"smollm", "gpt2", "smollm"},     {"smollm", "gpt2", "starcoder"},     {"llama3", "gpt2", "llama-bpe"},
      {"o200k", "gpt2", "gpt-4o"},      {"deepseek", "gpt2", "deepseek-v3"}, {"o200k", "gpt2", "minimax-m2"},
      {"gemma", "gemma4", "default"},   {"kimi", "gpt2", "kimi-k2"},         {"llama2", "llama", "default"}};
  for (const auto& [golden, model, pre] : kKinds) {
    SCOPED_TRACE(std::string(golden) + " as " + model + " " + pre);
    const std::string text = ReadFile(GoldenPath(std::string(golden) + ".json"));
    const Tokenizer json = Tokenizer::FromJson(text).value();
    auto gguf = Tokenizer::FromGguf(AsGguf(ParseJson(text).value(), model, pre));
    ASSERT_TRUE(gguf.ok()) << gguf.status().ToString();
    const Tokenizer again = Tokenizer::FromJson(gguf->json()).value();
    for (const Value& c : ReadLines(GoldenPath(std::string(golden) + ".cases.jsonl"))) {
      const std::string& input = c.Find("text")->as_string();
      // The metadata do not say which tokens swallow white space or stand alone.
      if (input.find("<|user|>") != std::string::npos || input.find("wörd") != std::string::npos) continue;
      const std::vector<int32_t> ids = gguf->Encode(input);
      EXPECT_EQ(ids, json.Encode(input)) << CompactJson(input);
      EXPECT_EQ(again.Encode(input), ids);
      EXPECT_EQ(gguf->Decode(ids), json.Decode(ids));
    }
  }
}

// Kimi's vocabulary is tiktoken's: without merges, two neighbours merge when they make a token, the lowest id first.
TEST(TokenizerGguf, KimiWithoutMerges) {
  const Value json = ParseJson(ReadFile(GoldenPath("kimi.json"))).value();
  GgufTokenizer g = AsGguf(json, "gpt2", "kimi-k2");
  g.merges.clear();
  const Tokenizer tokenizer = Tokenizer::FromGguf(g).value();
  for (const char* word : {"the", "thequickbrownfoxjumpsoverthelazydog", "quickthey", "Gr\u00F6\u00DFe", "importirange", "ooverthth"}) {
    std::vector<std::string> parts;  // in the byte alphabet
    const std::string spelled = ToByteAlphabet(word);
    for (size_t at = 0; at < spelled.size(); at += ReadUtf8(spelled, at).length) {
      parts.push_back(spelled.substr(at, ReadUtf8(spelled, at).length));
    }
    for (;;) {
      int32_t lowest = INT32_MAX;
      size_t where = 0;
      for (size_t i = 0; i + 1 < parts.size(); ++i) {
        const auto id = tokenizer.TokenId(parts[i] + parts[i + 1]);
        if (id && *id < lowest) lowest = *id, where = i;
      }
      if (lowest == INT32_MAX) break;
      parts[where] += parts[where + 1];
      parts.erase(parts.begin() + static_cast<long>(where) + 1);
    }
    std::vector<int32_t> ids;
    for (const std::string& part : parts) ids.push_back(*tokenizer.TokenId(part));
    EXPECT_EQ(tokenizer.Encode(word), ids) << word;
  }
}

// Gemma's files spell tokens of spaces with spaces, and only the order of their tokens tells the merges.
TEST(TokenizerGguf, TokensOfSpaces) {
  GgufTokenizer g;
  g.model = "llama";
  g.tokens = {"<unk>", "  ", "    ", "\u2581a", "\u2581", "a", "b", "ab", "bb"};
  g.token_types = {2, 4, 4, 1, 1, 1, 1, 1, 1};
  g.scores.resize(g.tokens.size());
  g.scores.back() = 1;
  g.add_space_prefix = false;
  g.unk = 0;
  auto t = Tokenizer::FromGguf(g);
  ASSERT_TRUE(t.ok()) << t.status().ToString();
  EXPECT_EQ(t->Encode("a    a b"), (std::vector<int32_t>{5, 2, 5, 4, 6}));
  EXPECT_EQ(t->Decode(t->Encode("a    a b")), "a    a b");
  EXPECT_EQ(t->Encode("abb"), (std::vector<int32_t>{7, 6})) << "ab stands before bb";
  g.scores.pop_back();
  EXPECT_FALSE(Tokenizer::FromGguf(g).ok());
}

TEST(TokenizerGguf, RefusesByName) {
  GgufTokenizer g;
  g.tokens = {"a"};
  for (const auto& [model, pre] : {std::pair{"bert", "default"}, {"t5", "default"}, {"gpt2", "falcon"}, {"gpt2", "no-such"}}) {
    g.model = model;
    g.pre = pre;
    const auto t = Tokenizer::FromGguf(g);
    ASSERT_FALSE(t.ok()) << model << " " << pre;
    const std::string name = g.model == "gpt2" ? pre : model;
    EXPECT_NE(t.status().message().find("'" + name + "'"), std::string::npos) << t.status().ToString();
  }
}

// An approximated component would give ids that are nearly right: each must be refused by name.
TEST(Tokenizer, RefusesWhatItDoesNotImplement) {
  const std::string good = ReadFile(GoldenPath("smollm.json"));
  const std::pair<const char*, const char*> kChanges[] = {
      {"\"type\":\"BPE\"", "\"type\":\"Unigram\""},
      {"\"type\":\"Digits\"", "\"type\":\"UnicodeScripts\""},
      {"{\"type\":\"Digits\",\"individual_digits\":true}", "{\"type\":\"Metaspace\",\"replacement\":\"__\"}"},
      {"{\"type\":\"Digits\",\"individual_digits\":true}", "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"\\\\bx\"},\"behavior\":\"Isolated\"}"},
      {"{\"type\":\"Digits\",\"individual_digits\":true}", "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(?i)cla(?:s)s\"},\"behavior\":\"Isolated\"}"},
      {"{\"type\":\"Digits\",\"individual_digits\":true}", "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(?i)\u1E9E\"},\"behavior\":\"Isolated\"}"},
      {"{\"type\":\"Digits\",\"individual_digits\":true}", "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(?i:[a\\\\p{Lu}])\"},\"behavior\":\"Isolated\"}"},
      {"{\"type\":\"Digits\",\"individual_digits\":true}", "{\"type\":\"Punctuation\",\"behavior\":\"Kept\"}"},
      {"{\"type\":\"Digits\",\"individual_digits\":true}", "{\"type\":\"ByteLevel\"}"},
      {"\"normalizer\":null", "\"normalizer\":{\"type\":\"Nmt\"}"},
      {"\"normalizer\":null", "\"normalizer\":{\"type\":\"Replace\",\"pattern\":{\"String\":\"\"},\"content\":\"x\"}"},
      {"\"decoder\":{\"type\":\"ByteLevel\"", "\"decoder\":{\"type\":\"WordPiece\""},
      {"\"decoder\":{", "\"decoder\":{\"type\":\"Strip\",\"content\":\" \",\"start\":0,\"stop\":1},\"was\":{"},
      {"\"decoder\":{", "\"decoder\":{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"Fuse\"},{\"type\":\"ByteFallback\"}]},\"was\":{"},
      {"\"individual_digits\":true", "\"individual_digits\":true,\"surprise\":1"},
      {"\"end_of_word_suffix\":null", "\"end_of_word_suffix\":\"</w>\""},
      {"\"post_processor\":null", "\"post_processor\":{\"type\":\"BertProcessing\"}"},
  };
  for (const auto& [from, to] : kChanges) {
    std::string bad = good;
    const size_t at = bad.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    bad.replace(at, std::string(from).size(), to);
    auto result = Tokenizer::FromJson(bad);
    ASSERT_FALSE(result.ok()) << to;
    EXPECT_EQ(result.status().code(), StatusCode::kInvalidArgument);
  }
}

// A word that costs two ids, or another id after a space, makes copying hard for a small policy.
TEST(TaskVocabulary, OneIdPerWordAndExactRoundTrip) {
  const std::vector<std::string> texts = {"list files in data", "cat notes.txt", "grep -r Word data"};
  const TaskTextFiles files = MakeTaskVocabulary(texts);
  auto tokenizer = Tokenizer::FromJson(files.tokenizer_json);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().ToString();
  EXPECT_EQ(tokenizer->size(), 256 + 6 + 9);
  const int32_t data = *tokenizer->TokenId("data");
  EXPECT_EQ(tokenizer->Encode("data/data data"), (std::vector<int32_t>{data, '/', data, *tokenizer->TokenId("Ġ"), data}));
  const std::string any = "<|user|>data <tool_call>x1 unknownword \xc3\xa9\xf0\x9f\x8e\x89\n<|end|>";
  EXPECT_EQ(tokenizer->Decode(tokenizer->Encode(any)), any);
  EXPECT_EQ(tokenizer->Decode(tokenizer->Encode(any), true), "data <tool_call>x1 unknownword \xc3\xa9\xf0\x9f\x8e\x89\n");
}

}  // namespace
}  // namespace temper::text
