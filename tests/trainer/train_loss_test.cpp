// The door `temper train loss`.
#include <gtest/gtest.h>

#include "common/json.h"
#include "common/rng.h"
#include "trainer/commands.h"

namespace temper::trainer {
namespace {

constexpr const char* kExample1 =
    R"({"algorithm":{"loss":{"kind":"cispo"},"advantage":{"baseline":"group_mean"},"aggregation":{"mode":"token-mean"}},"groups":[{"rollouts":[{"reward":1,"mask":[1,1,1],"logp_new":[-1,-2,-0.5],"logp_old":[-0.306852819,-2.095310180,-0.905465108]},{"reward":-1,"mask":[0,1,1],"logp_new":[null,-1.5,-0.25],"logp_old":[null,-1.143325056,-1.636294361]}]}]})";
constexpr const char* kExample2 =
    R"({"algorithm":{"recipe":"grpo"},"groups":[{"rollouts":[{"reward":1,"mask":[1],"logp_new":[-1],"logp_old":[-1]},{"reward":0,"mask":[1,1],"logp_new":[-1,-1],"logp_old":[-1,-1]},{"reward":0,"mask":[1],"logp_new":[-1],"logp_old":[-1]},{"reward":1,"mask":[1],"logp_new":[-1],"logp_old":[-1]}]}]})";

void ExpectRows(const JsonRef& got, const std::vector<std::vector<double>>& want) {
  const auto rows = got.Items().value();
  ASSERT_EQ(rows.size(), want.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto row = rows[i].Doubles().value();
    ASSERT_EQ(row.size(), want[i].size());
    for (size_t t = 0; t < row.size(); ++t) EXPECT_NEAR(row[t], want[i][t], 1e-9);
  }
}

// The documented examples are what a user holds us to.
TEST(TrainLoss, DocumentedExamples) {
  const json::value first = ParseJson(TrainLoss(kExample1).value()).value();
  EXPECT_NEAR(JsonRef(first).Field("loss")->Double().value(), 0.28, 1e-9);
  ExpectRows(JsonRef(first).Field("advantages").value(), {{1, -1}});
  ExpectRows(JsonRef(first).Field("coef")->Items().value()[0], {{-0.1, -0.22, -0.3}, {0, 0.14, 0.8}});

  const json::value second = ParseJson(TrainLoss(kExample2).value()).value();
  EXPECT_EQ(JsonRef(second).Field("loss")->Double().value(), 0);
  ExpectRows(JsonRef(second).Field("advantages").value(), {{0.866023904, -0.866023904, -0.866023904, 0.866023904}});
  ExpectRows(JsonRef(second).Field("coef")->Items().value()[0],
             {{-0.216505976}, {0.108252988, 0.108252988}, {0.216505976}, {-0.216505976}});
  EXPECT_EQ(JsonRef(second).Field("metrics")->Field("tokens")->Int().value(), 5);
  EXPECT_EQ(JsonRef(second).Field("algorithm")->Field("loss")->Field("kind")->String().value(), "ppo_clip");
}

void ExpectError(const std::string& groups, const std::string& path, const std::string& algorithm = R"({"recipe":"grpo"})") {
  const auto result = TrainLoss(R"({"algorithm":)" + algorithm + R"(,"groups":)" + groups + "}");
  ASSERT_FALSE(result.ok()) << groups << " gave " << *result;
  EXPECT_NE(result.status().message().find(path), std::string::npos) << result.status().message();
}

// A hole in the data could be read as zero.
TEST(TrainLoss, WhatIsReadMustBeThere) {
  ExpectError(R"([{"rollouts":[{"mask":[1],"logp_new":[-1],"logp_old":[-1]}]}])", "groups[0].rollouts[0].reward");
  ExpectError(R"([{"rollouts":[{"reward":null,"mask":[1],"logp_new":[-1],"logp_old":[-1]}]}])", "groups[0].rollouts[0].reward");
  ExpectError(R"([{"rollouts":[{"reward":1,"mask":[1],"logp_new":[-1]}]}])", "groups[0].rollouts[0].logp_old");
  ExpectError(R"([{"rollouts":[]},{"rollouts":[{"reward":1,"mask":[0,1],"logp_new":[null,null],"logp_old":[-1,-1]}]}])",
              "groups[1].rollouts[0].logp_new[1]");
  ExpectError(R"([{"rollouts":[{"reward":1,"mask":[1],"logp_new":[-1],"logp_old":[1e999]}]}])", "groups[0].rollouts[0].logp_old[0]");
  ExpectError(R"([{"rollouts":[{"reward":1,"mask":[1],"logp_new":[-1,-1],"logp_old":[-1]}]}])", "groups[0].rollouts[0].logp_new");
  ExpectError(R"([{"rollouts":[{"reward":1,"mask":[2],"logp_new":[-1],"logp_old":[-1]}]}])", "groups[0].rollouts[0].mask[0]");
  ExpectError(R"([{"rollouts":[{"outcome":"fine","reward":1,"mask":[],"logp_new":[],"logp_old":[]}]}])", "groups[0].rollouts[0].outcome");
  ExpectError(R"([{}])", "groups[0].rollouts");
  const std::string turns = R"({"recipe":"grpo","advantage":{"credit":"turn"}})";
  ExpectError(R"([{"rollouts":[{"reward":1,"mask":[1,1],"logp_new":[-1,-1],"logp_old":[-1,-1],"turn":[1,0]}]}])",
              "groups[0].rollouts[0].turn[1]", turns);
  ExpectError(R"([{"rollouts":[{"reward":1,"mask":[1],"turn_rewards":[0],"logp_new":[-1],"logp_old":[-1],"turn":[1]}]}])",
              "groups[0].rollouts[0].turn[0]", turns);
  EXPECT_FALSE(TrainLoss("{").ok());
  EXPECT_FALSE(TrainLoss(R"({"groups":[]})").ok());
}

// Data that the settings do not read, or that belongs to failures of ours, could be refused.
TEST(TrainLoss, WhatIsNotReadMayBeAnything) {
  const char* sft =
      R"({"algorithm":{"loss":{"kind":"sft"},"aggregation":{"mode":"token-mean"}},"groups":[{"rollouts":[{"mask":[0,1],"logp_new":[null,-2],"logp_old":"no","values":3}]}]})";
  const json::value v = ParseJson(TrainLoss(sft).value()).value();
  EXPECT_EQ(JsonRef(v).Field("loss")->Double().value(), 2);
  EXPECT_TRUE(JsonRef(v).Field("metrics")->Field("mismatch_k1")->is_null());
  EXPECT_TRUE(TrainLoss(R"({"algorithm":{"recipe":"grpo"},"groups":[{"rollouts":[{"outcome":"infra_failure"}]}]})").ok());
  EXPECT_TRUE(TrainLoss(R"({"algorithm":{"recipe":"grpo"},"groups":[]})").ok());
}

// Bytes from outside could crash the door.
TEST(TrainLoss, SurvivesMutatedInput) {
  Rng rng(11);
  const std::string seeds[] = {kExample1, kExample2,
                               R"({"algorithm":{"recipe":"cispo","advantage":{"credit":"token","gamma":0.5},"reward":{"speed_coef":1}},"groups":[{"rollouts":[{"reward":1,"wall_s":2,"turn_rewards":[1,2],"mask":[1,0,1],"turn":[0,0,1],"logp_new":[-1,null,-2],"logp_old":[-1,null,-2]}]}]})"};
  const std::string alphabet = "0123456789-.,:[]{}\"eEnultrfas";
  int accepted = 0;
  for (int n = 0; n < 20000; ++n) {
    std::string text = seeds[static_cast<size_t>(n) % 3];
    const int edits = 1 + n % 4;
    for (int e = 0; e < edits; ++e) {
      const size_t at = static_cast<size_t>(rng.Uniform() * static_cast<double>(text.size()));
      const char c = alphabet[static_cast<size_t>(rng.Uniform() * static_cast<double>(alphabet.size()))];
      if (rng.Uniform() < 0.5) {
        text[at] = c;
      } else if (rng.Uniform() < 0.5) {
        text.erase(at, 1 + static_cast<size_t>(rng.Uniform() * 8));
      } else {
        text.insert(at, 1, c);
      }
    }
    accepted += TrainLoss(text).ok();
  }
  EXPECT_GT(accepted, 100);
}

}  // namespace
}  // namespace temper::trainer
