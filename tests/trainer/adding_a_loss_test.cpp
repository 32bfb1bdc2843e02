// docs/adding_a_loss.md as it stands: its file and its line are compiled into this program beside the losses that are there.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "common/file.h"
#include "common/json.h"
#include "trainer/algorithm.h"
#include "trainer/commands.h"

namespace temper::trainer {
namespace {

// What stands between ```LANGUAGE and ``` in the document.
std::string BlockOf(const std::string& language) {
  const std::string text = ReadFile(TEMPER_SOURCE_DIR "/docs/adding_a_loss.md").value();
  const std::string fence = "```" + language + "\n";
  const size_t begin = text.find(fence);
  EXPECT_NE(begin, std::string::npos);
  return text.substr(begin + fence.size(), text.find("```", begin + fence.size()) - begin - fence.size());
}

// The document could promise what does not compile, or give other numbers.
TEST(AddingALoss, TheDocumentedLossDoesWhatTheDocumentSays) {
  const json::value answer = ParseJson(TrainLoss(BlockOf("json")).value()).value();
  EXPECT_EQ(PrintJson(answer.at("coef")), "[[[-2]]]");
  const std::string code = BlockOf("cpp");
  EXPECT_LE(std::count(code.begin(), code.end(), '\n'), 20);

  const Result<ParsedAlgorithm> parsed = ParseAlgorithm(ParseJson(R"({"recipe":"grpo","loss":{"kind":"gamma","power":1.5}})").value());
  ASSERT_TRUE(parsed.ok()) << parsed.status().message();
  EXPECT_NE(parsed->expanded.find(R"("loss":{"kind":"gamma","power":1.5,"lambda":3,"drift":0})"), std::string::npos) << parsed->expanded;
  EXPECT_TRUE(CheckAlgorithmForRun(parsed->algorithm, 1).ok());
  for (const char* wrong : {R"({"recipe":"grpo","loss":{"kind":"gamma","powr":1}})", R"({"recipe":"grpo","loss":{"kind":"gamma","power":-1}})",
                            R"({"recipe":"grpo","loss":{"kind":"gamma","clip_low":0.2}})", R"({"recipe":"grpo","loss":{"power":1}})"}) {
    EXPECT_FALSE(ParseAlgorithm(ParseJson(wrong).value()).ok()) << wrong;
  }
  // Off policy: r = e, weight e · exp(3 · (1 - e)) with power 1.
  const std::string off = R"({"algorithm":{"loss":{"kind":"gamma","power":1},"advantage":{"baseline":"none"},"aggregation":{"mode":"token-mean"}},)"
                          R"("groups":[{"rollouts":[{"reward":1,"mask":[1],"logp_new":[-1],"logp_old":[-2]}]}]})";
  const json::value moved = ParseJson(TrainLoss(off).value()).value();
  const double e = std::exp(1.0);
  EXPECT_NEAR(moved.at("coef").at(0).at(0).at(0).to_number<double>(), -e * std::exp(3 * (1 - e)), 1e-12);
}

}  // namespace
}  // namespace temper::trainer
