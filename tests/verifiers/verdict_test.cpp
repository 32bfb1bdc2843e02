// What a verifier says and what it is told: text that comes from, or goes to, a program outside.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "common/base64.h"
#include "common/rng.h"
#include "tests/fuzz/mutate.h"
#include "verifiers/verifier.h"

namespace temper::verifiers {
namespace {

using ::testing::HasSubstr;

// What could go wrong: a good verdict loses a field.
TEST(Verdict, GoodOnes) {
  auto v = ParseVerdict(R"( {"outcome":"scored","reward":0.25,"components":{"a":1,"b":-2.5},"evidence":{"why":[1,2]},"other":3} )" "\n");
  ASSERT_TRUE(v.ok()) << v.status().ToString();
  EXPECT_EQ(v->outcome, VerdictOutcome::kScored);
  EXPECT_EQ(v->reward, 0.25);
  EXPECT_EQ(v->components, (std::map<std::string, double>{{"a", 1}, {"b", -2.5}}));
  EXPECT_EQ(v->evidence_json, R"({"why":[1,2]})");
  EXPECT_EQ(VerdictToJson(*v), R"({"outcome":"scored","reward":0.25,"components":{"a":1,"b":-2.5},"evidence":{"why":[1,2]}})");
  v = ParseVerdict(R"({"reward":1,"turn_rewards":[0.5,-1,0]})");
  ASSERT_TRUE(v.ok()) << v.status().ToString();
  EXPECT_EQ(v->turn_rewards, (std::vector<double>{0.5, -1, 0}));
  EXPECT_EQ(VerdictToJson(*v), R"({"outcome":"scored","reward":1,"components":{},"turn_rewards":[0.5,-1,0],"evidence":{}})");
  v = ParseVerdict(R"({"reward":1})");
  ASSERT_TRUE(v.ok());
  EXPECT_EQ(v->outcome, VerdictOutcome::kScored);
  v = ParseVerdict(R"({"outcome":"infra_failure","evidence":{"x":1}})");
  ASSERT_TRUE(v.ok());
  EXPECT_EQ(v->outcome, VerdictOutcome::kInfraFailure);
  EXPECT_EQ(VerdictToJson(*v), R"({"outcome":"infra_failure","reward":null,"components":{},"evidence":{"x":1}})");
}

// What could go wrong: something that is no verdict becomes a reward.
TEST(Verdict, EverythingElseIsNone) {
  for (const char* bad : {"", " \n", "1", "null", "[]", "[{\"reward\":1}]", "{}", "{\"reward\":null}", "{\"reward\":\"1\"}", "{\"reward\":true}",
                          "{\"reward\":NaN}", "{\"reward\":Infinity}", "{\"reward\":-Infinity}", "{\"reward\":1e999}", "{\"reward\":nan}",
                          "{\"reward\":1}{\"reward\":1}", "{\"reward\":1}\n{\"reward\":1}\n", "{\"reward\":1} x", "x{\"reward\":1}", "{\"reward\":1",
                          "{\"reward\":1,\"reward\":0}", "{\"reward\":1,}", "{'reward':1}", "{\"reward\":1,\"components\":[]}",
                          "{\"reward\":1,\"components\":{\"a\":\"1\"}}", "{\"reward\":1,\"components\":{\"a\":1e999}}", "{\"reward\":1,\"evidence\":3}", "{\"reward\":1,\"turn_rewards\":{}}", "{\"reward\":1,\"turn_rewards\":[1,null]}",
                          "{\"reward\":1,\"turn_rewards\":[1e999]}", "{\"turn_rewards\":[1]}",
                          "{\"reward\":1,\"outcome\":\"passed\"}", "{\"reward\":1,\"outcome\":1}", "{\"reward\":1,\"evidence\":\"\xff\"}", "\xef\xbb\xbf{\"reward\":1}"}) {
    EXPECT_FALSE(ParseVerdict(bad).ok()) << bad;
  }
  EXPECT_FALSE(ParseVerdict(std::string("{\"reward\":1}\0", 13)).ok());
}

// What could go wrong: rewards of turns are given to others than they were meant for.
TEST(Verdict, RewardsOfTurnsAreOneATurn) {
  const Verdict good = ParseVerdict(R"({"reward":1,"turn_rewards":[0.5,2]})").value();
  EXPECT_EQ(HeldToTurns(good, 2).turn_rewards.size(), 2u);
  EXPECT_EQ(HeldToTurns(ParseVerdict(R"({"reward":1})").value(), 2).outcome, VerdictOutcome::kScored);
  for (const int64_t turns : {0, 1, 3}) {
    const Verdict held = HeldToTurns(good, turns);
    EXPECT_EQ(held.outcome, VerdictOutcome::kInfraFailure) << turns;
    EXPECT_THAT(held.evidence_json, HasSubstr("turn_rewards has 2 numbers; the rollout has " + std::to_string(turns) + " turns"));
    EXPECT_EQ(held.reward, 0);
  }
}

// What could go wrong: rubbish crashes us, or a reward that is no number comes through.
TEST(Verdict, Fuzz) {
  const std::string good = R"({"outcome":"scored","reward":0.25,"components":{"a":1,"b":-2.5},"evidence":{"why":[1,2,"x\u00e9"]}})";
  Rng rng(21);
  int accepted = 0;
  for (int i = 0; i < 30000; ++i) {
    std::string s = good;
    for (uint64_t k = rng.Between(1, 5); k > 0; --k) {
      size_t at = rng.Below(s.size());
      static const std::string kAlphabet = "{}[]\",:0123456789eE+-.\\ntfau \xff";
      if (rng.Chance(0.6)) {
        s[at] = kAlphabet[rng.Below(kAlphabet.size())];
      } else if (rng.Chance(0.5)) {
        s.erase(at, rng.Below(6));
      } else {
        s.insert(at, s.substr(rng.Below(s.size()), rng.Below(10)));
      }
      if (s.empty()) s = "{";
    }
    auto v = ParseVerdict(s);
    if (!v.ok()) continue;
    ++accepted;
    EXPECT_TRUE(std::isfinite(v->reward));
    for (const auto& [name, value] : v->components) EXPECT_TRUE(std::isfinite(value)) << name;
    auto again = ParseVerdict(VerdictToJson(*v));
    ASSERT_TRUE(again.ok()) << s;
    EXPECT_EQ(VerdictToJson(*again), VerdictToJson(*v));
  }
  EXPECT_GT(accepted, 300);
}

// What could go wrong: a case file written by hand crashes the door, or a file of it is read as something else than is printed.
TEST(Case, SurvivesMutations) {
  const std::vector<std::string> words = {"\"text\"", "\"base64\"", "\"link\"", "\"folder\"", "\"mode\"", "null", "-1", "512", "{", "[]", "\"AA==\"", "\"A\""};
  const std::string good = R"({"task":{"id":"t"},"outcome":"scored","final_text":"x","metadata":{"group":3},"files":[{"path":"d","folder":true,"mode":493},)"
                           R"({"path":"d/a","text":"b"},{"path":"b","base64":"AP8="},{"path":"l","link":"../x"}]})";
  const std::string brief = R"({"task":{},"files":{"a":"x","b":"y"}})";
  const std::string scalars = R"({"task":0,"metadata":1,"files":[2]})";  // a value for a value makes any type of these
  Rng rng(31);
  int accepted = 0;
  for (int i = 0; i < 20000; ++i) {
    auto c = CaseFromJson(Mutated(i % 4 ? good : i % 8 ? brief : scalars, words, rng));
    if (!c.ok()) continue;
    ++accepted;
    auto again = CaseFromJson(CaseToJson(*c, true));
    ASSERT_TRUE(again.ok()) << again.status().ToString();
    EXPECT_EQ(CaseToJson(*again, true), CaseToJson(*c, true));
  }
  EXPECT_GT(accepted, 500);
}

// What could go wrong: a case that is written for the door is not what the job built.
TEST(Case, RoundTrip) {
  using sandbox::File;
  Case c;
  c.task_json = R"({"id":"t1","answer":{"x":[1.5,null]}})";
  c.outcome = "truncated";
  c.final_text = "bye \"q\" \xc3\xa9";
  c.turns = 3;
  c.metadata_json = R"({"group":3})";
  c.files = {{"d", "", 0755, File::Kind::kFolder}, {"d/a.txt", "text\n", 0640, File::Kind::kRegular},
             {"bin", std::string("\0\xff", 2), 0755, File::Kind::kRegular}, {"l", "../x", 0777, File::Kind::kLink}};
  EXPECT_EQ(CaseToJson(c),
            R"({"task":{"id":"t1","answer":{"x":[1.5,null]}},"outcome":"truncated","final_text":"bye \"q\" é","turns":3,"metadata":{"group":3},"files":["d/a.txt","bin"]})");
  auto back = CaseFromJson(CaseToJson(c, true));
  ASSERT_TRUE(back.ok()) << back.status().ToString();
  c.files[3].mode = back->files[3].mode;  // a link has none
  EXPECT_EQ(back->files, c.files);
  EXPECT_EQ(back->task_json, c.task_json);
  EXPECT_EQ(back->metadata_json, c.metadata_json);
  EXPECT_EQ(back->outcome, c.outcome);
  EXPECT_EQ(back->final_text, c.final_text);
  auto brief = CaseFromJson(R"({"files":{"a":"x"}})");
  ASSERT_TRUE(brief.ok());
  EXPECT_EQ(brief->files, (std::vector<File>{{"a", "x", 0644, File::Kind::kRegular}}));
}

// What could go wrong: a wrong case is verified as if it were right.
TEST(Case, BadOnesNameTheField) {
  for (auto [text, named] : {std::pair{"[]", "object"}, {"{\"tasc\":{}}", "task"}, {"{\"task\":1}", "task"}, {"{\"files\":1}", "files"},
                             {"{\"files\":[{\"path\":\"a\"}]}", "text, base64, link, folder"}, {"{\"files\":[{\"path\":\"a\",\"base64\":\"?\"}]}", "base64"},
                             {"{\"files\":[{\"path\":\"a\",\"text\":\"\",\"link\":\"x\"}]}", "files[0]"}, {"{\"files\":{\"a\":1}}", "'a'"},
                             {"{\"files\":[{\"path\":\"a\",\"text\":\"\",\"mode\":4095}]}", "mode"}, {"{\"final_text\":3}", "final_text"}}) {
    auto c = CaseFromJson(text);
    EXPECT_EQ(c.status().code(), StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(c.status().message(), HasSubstr(named)) << text;
  }
}

// What could go wrong: some length or byte does not survive base64, or text outside it is taken.
TEST(Base64, RoundTripAndRefusals) {
  Rng rng(2);
  for (size_t n = 0; n < 200; ++n) {
    std::string bytes(n, 0), back;
    for (char& c : bytes) c = static_cast<char>(rng.Below(256));
    ASSERT_TRUE(Base64Decode(Base64Encode(bytes), &back));
    EXPECT_EQ(back, bytes);
  }
  EXPECT_EQ(Base64Encode("any carnal pleas"), "YW55IGNhcm5hbCBwbGVhcw==");
  std::string out = "kept";
  for (const char* bad : {"a", "abc", "ab=c", "=abc", "a===", "ab c", "YW5=YW55", "YW6=\n", "YQ=a", "YR=="}) {
    EXPECT_FALSE(Base64Decode(bad, &out)) << bad;
  }
  EXPECT_EQ(out, "kept");
}

// What could go wrong: the built-in judge by name is not there, or says yes to everything.
TEST(Builtin, Exact) {
  EXPECT_THAT(MakeBuiltinVerifier("exakt").status().message(), HasSubstr("exact"));
  auto v = MakeBuiltinVerifier("exact");
  ASSERT_TRUE(v.ok());
  Case c;
  c.task_json = R"({"answer":"forty two"})";
  c.final_text = " forty two\n";
  EXPECT_EQ((*v)->Verify(c).reward, 1);
  c.final_text = "forty  two";
  EXPECT_EQ((*v)->Verify(c).reward, 0);
  EXPECT_EQ((*v)->Verify(c).outcome, VerdictOutcome::kScored);
  c.task_json = R"({"answer":"no","hidden":{"answer":"forty  two"}})";  // as in a job
  EXPECT_EQ((*v)->Verify(c).reward, 1);
  for (const char* without : {"{}", R"({"hidden":{}})", R"({"hidden":{"answer":7}})"}) {
    c.task_json = without;
    EXPECT_EQ((*v)->Verify(c).outcome, VerdictOutcome::kInfraFailure) << without;
  }
}

// What could go wrong: digits of another number count, or a text without a number passes.
TEST(Builtin, FirstInteger) {
  auto v = MakeBuiltinVerifier("first_integer");
  ASSERT_TRUE(v.ok());
  Case c;
  c.task_json = R"({"hidden":{"answer":17}})";
  for (const char* right : {"17", "The answer is 17.", "17 + 3", "=17", "0017", " 17th"}) {
    c.final_text = right;
    EXPECT_EQ((*v)->Verify(c).reward, 1) << right;
  }
  for (const char* wrong : {"", "seventeen", "117", "170", "-17", "3 + 14 = 17", "1 7", "99999999999999999999"}) {
    c.final_text = wrong;
    EXPECT_EQ((*v)->Verify(c).reward, 0) << wrong;
    EXPECT_EQ((*v)->Verify(c).outcome, VerdictOutcome::kScored) << wrong;
  }
  // A reader of the attempt sees what was compared.
  c.final_text = "117 or 17";
  EXPECT_EQ((*v)->Verify(c).evidence_json, R"({"answer":17,"said":117})");
  c.final_text = "seventeen";
  EXPECT_EQ((*v)->Verify(c).evidence_json, R"({"answer":17,"said":null})");
  c.task_json = R"({"hidden":{"answer":-3}})";
  c.final_text = "it is -3";
  EXPECT_EQ((*v)->Verify(c).reward, 1);
  c.task_json = R"({"hidden":{"answer":"17"}})";
  EXPECT_EQ((*v)->Verify(c).outcome, VerdictOutcome::kInfraFailure);
}

}  // namespace
}  // namespace temper::verifiers
