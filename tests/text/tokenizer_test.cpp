// Wrong ids would train the policy on another text than the agent saw, silently: every id must be Hugging Face's.
#include "text/tokenizer.h"

#include <gtest/gtest.h>

#include "tests/text/golden.h"
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
                         testing::Values("smollm", "gpt2_prefix", "llama3", "qwen", "deepseek", "o200k", "behaviors"));

// A byte without a token must be left out and counted, not turned into something else.
TEST(Tokenizer, CountsDroppedBytes) {
  auto tokenizer = Tokenizer::FromJson(ReadFile(GoldenPath("smollm.json"))).value();
  size_t dropped = 0;
  tokenizer.Encode("a\u0106z", {}, &dropped);  // C4 86, and this vocabulary has no token for 86
  EXPECT_EQ(dropped, 1u);
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

// A code point cut by a token border must not come out as two replacement characters when the text is streamed.
TEST(StreamDecoder, EqualsDecodeForEverySplit) {
  auto tokenizer = Tokenizer::FromJson(ReadFile(GoldenPath("llama3.json"))).value();
  std::vector<int32_t> ids = tokenizer.Encode("né 👩‍👩‍👧 你\xe4\xbd<|im_end|>x");
  const std::vector<int32_t> bad = {*tokenizer.TokenId("ð"), *tokenizer.TokenId("Ł"), *tokenizer.TokenId("a"), *tokenizer.TokenId("ð")};
  ids.insert(ids.end(), bad.begin(), bad.end());
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

// An approximated component would give ids that are nearly right: each must be refused by name.
TEST(Tokenizer, RefusesWhatItDoesNotImplement) {
  const std::string good = ReadFile(GoldenPath("smollm.json"));
  const std::pair<const char*, const char*> kChanges[] = {
      {"\"type\":\"BPE\"", "\"type\":\"Unigram\""},
      {"\"byte_fallback\":false", "\"byte_fallback\":true"},
      {"\"type\":\"Digits\"", "\"type\":\"Metaspace\""},
      {"\"normalizer\":null", "\"normalizer\":{\"type\":\"NFKC\"}"},
      {"\"decoder\":{\"type\":\"ByteLevel\"", "\"decoder\":{\"type\":\"WordPiece\""},
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
