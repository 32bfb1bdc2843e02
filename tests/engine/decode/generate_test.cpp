#include "engine/decode/generate.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "common/json.h"

namespace temper::engine {
namespace {

class Generate : public testing::Test {
 protected:
  Generate() {
    ModelConfig c;
    c.vocab = 40;
    c.layers = 1;
    c.width = 32;
    c.heads = 2;
    c.kv_heads = 2;
    c.head_dim = 16;
    c.ffn = 32;
    c.max_positions = 100;
    weights_ = ComputeWeights::FromParameters(InitParameters(c, 1), Profile::kBf16);
    engine_ = *Engine::Create({.threads = 1});
  }
  std::vector<json::value> Run(const std::string& input, int bad = 0) {
    GenerateOutput out = GenerateLines(*engine_, weights_, input, 5);
    EXPECT_EQ(out.bad_lines, bad) << out.text;
    std::vector<json::value> lines;
    size_t at = 0;
    while (at < out.text.size()) {
      size_t end = out.text.find('\n', at);
      Result<json::value> v = ParseJson(out.text.substr(at, end - at));
      EXPECT_TRUE(v.ok()) << out.text;
      lines.push_back(*v);
      at = end + 1;
    }
    return lines;
  }
  static std::string Ids(const json::value& v) { return PrintJson(v.at("ids")); }

  ComputeWeights weights_;
  std::unique_ptr<Engine> engine_;
};

// Goes wrong if a line's answer depends on the lines beside it, or the order of answers is not that of the lines.
TEST_F(Generate, EachLineIsItsOwn) {
  std::vector<std::string> inputs = {R"({"ids":[1,2,3],"max_tokens":20})", R"({"ids":[4],"max_tokens":3,"temperature":1,"seed":7})",
                                     R"({"ids":[1,2,3],"max_tokens":20,"temperature":0.7,"top_p":0.9,"top_k":10,"min_p":0.01})",
                                     R"({"ids":[4],"max_tokens":3,"temperature":1,"seed":7})"};
  std::string all;
  for (const std::string& i : inputs) all += i + "\n\n";
  auto together = Run(all);
  ASSERT_EQ(together.size(), inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) EXPECT_EQ(together[i], Run(inputs[i])[0]);
  EXPECT_EQ(together[0].at("ids").as_array().size(), 20u);
  EXPECT_EQ(together[0].at("logprobs").as_array().size(), 20u);
  EXPECT_EQ(together[0].at("finish"), "length");
  EXPECT_EQ(together[1], together[3]);
}

// Goes wrong if a stop token is left out, drawn past, or implied when none is given.
TEST_F(Generate, StopTokenIsIncluded) {
  auto free = Run(R"({"ids":[1],"max_tokens":30,"temperature":1,"seed":3})")[0].at("ids").as_array();
  std::string stop = PrintJson(free[4]);
  auto stopped = Run(R"({"ids":[1],"max_tokens":30,"temperature":1,"seed":3,"stop_ids":[)" + stop + "]}")[0];
  EXPECT_EQ(stopped.at("finish"), "stop");
  EXPECT_LE(stopped.at("ids").as_array().size(), 5u);
  EXPECT_EQ(stopped.at("ids").as_array().back(), free[4]);
}

// Goes wrong if the seed is ignored, or greedy draws depend on it.
TEST_F(Generate, SeedsCount) {
  auto with = [&](const char* seed, const char* t) {
    return Ids(Run(std::string(R"({"ids":[1],"max_tokens":30,"temperature":)") + t + R"(,"seed":)" + seed + "}")[0]);
  };
  EXPECT_NE(with("1", "1"), with("2", "1"));
  EXPECT_EQ(with("1", "0"), with("2", "0"));
  EXPECT_EQ(with("5", "1"), Ids(Run(R"({"ids":[1],"max_tokens":30,"temperature":1})")[0])) << "--seed serves lines without one";
}

// Goes wrong if a prompt runs past the last position.
TEST_F(Generate, EndsAtTheLastPosition) {
  auto v = Run(R"({"ids":[1,2,3],"max_tokens":1000})")[0];
  EXPECT_EQ(v.at("ids").as_array().size(), 97u);
  EXPECT_EQ(v.at("finish"), "length");
}

// Goes wrong if one bad line loses the others, or is answered without its error.
TEST_F(Generate, BadLinesAreAnsweredInPlace) {
  std::string good = R"({"ids":[1],"max_tokens":2})";
  std::vector<std::string> bad = {"x", "[]", "{}", R"({"ids":[]})", R"({"ids":[40]})", R"({"ids":[-1]})", R"({"ids":[1.5]})", R"({"ids":"a"})",
                                  R"({"ids":[1],"max_token":3})", R"({"ids":[1],"max_tokens":0})", R"({"ids":[1],"top_p":0})",
                                  R"({"ids":[1],"temperature":-1})", R"({"ids":[1],"stop_ids":[99]})", R"({"ids":[99999999999]})",
                                  R"({"ids":[1],"top_k":-1})", R"({"ids":[1],"temperature":"hot"})"};
  std::string all = good + "\n";
  for (const std::string& b : bad) all += b + "\n";
  all += good;
  auto lines = Run(all, static_cast<int>(bad.size()));
  ASSERT_EQ(lines.size(), bad.size() + 2);
  EXPECT_EQ(lines.front(), lines.back());
  for (size_t i = 0; i < bad.size(); ++i) {
    const json::value* error = lines[i + 1].as_object().if_contains("error");
    ASSERT_TRUE(error) << bad[i] << " was accepted";
    EXPECT_EQ(error->at("kind"), "invalid_argument");
    EXPECT_FALSE(error->at("message").as_string().empty());
  }
}

// Goes wrong if some bytes of a line crash the parser (seeded mutations).
TEST_F(Generate, SurvivesMutatedLines) {
  std::mt19937_64 rng(11);
  const std::string base = R"({"ids":[1,2],"max_tokens":3,"temperature":0.5,"top_p":0.9,"top_k":3,"min_p":0.1,"stop_ids":[5],"seed":7})";
  std::string all;
  for (int i = 0; i < 2000; ++i) {
    std::string line = base;
    for (uint64_t n = 1 + rng() % 4; n > 0; --n) {
      size_t at = rng() % line.size();
      switch (rng() % 3) {
        case 0: line[at] = static_cast<char>(rng()); break;
        case 1: line.erase(at, 1 + rng() % 5); break;
        default: line.insert(at, line.substr(rng() % line.size(), rng() % 6));
      }
      if (line.empty()) line = "{";
    }
    std::erase(line, '\n');
    all += line + "\n";
  }
  GenerateOutput out = GenerateLines(*engine_, weights_, all, 0);
  EXPECT_GT(out.bad_lines, 500);
}

}  // namespace
}  // namespace temper::engine
