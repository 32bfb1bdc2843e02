// The door `temper train loss` beside what an independent program makes of docs/algorithm_block.md.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include <fmt/format.h>

#include "common/file.h"
#include "common/json.h"
#include "trainer/commands.h"
#include "trainer/losses/kind.h"

namespace temper::trainer {
namespace {

constexpr double kTolerance = 1e-9;  // relative above 1

// Where `got` is not what is wanted, as paths with both values; what `want` does not mention is not looked at.
void Compare(const json::value& got, const json::value& want, const std::string& path, std::vector<std::string>& wrong) {
  const auto differ = [&] { wrong.push_back(fmt::format("{}: {} instead of {}", path, PrintJson(got), PrintJson(want))); };
  if (const json::object* object = want.if_object()) {
    if (!got.is_object()) return differ();
    for (const auto& [name, value] : *object) {
      const json::value* mine = got.get_object().if_contains(name);
      Compare(mine ? *mine : json::value(), value, path + "." + std::string(name), wrong);
    }
  } else if (const json::array* array = want.if_array()) {
    if (!got.is_array() || got.get_array().size() != array->size()) return differ();
    for (size_t i = 0; i < array->size(); ++i) Compare(got.get_array()[i], (*array)[i], fmt::format("{}[{}]", path, i), wrong);
  } else {
    if (!got.is_number()) return differ();
    const double a = got.to_number<double>(), b = want.to_number<double>();
    if (!(std::abs(a - b) <= kTolerance * std::max({1.0, std::abs(a), std::abs(b)}))) differ();
  }
}

// Any rule of the block could be another than the document's: a baseline of the wrong mean, a coefficient ignored, a term on another
// token. tests/golden/trainer/make_loss_goldens.py knows the document alone. Settings and rollouts are random, over every kind and recipe.
TEST(LossGolden, AreWhatTheDocumentSays) {
  const json::value file = ParseJson(ReadFile(TEMPER_SOURCE_DIR "/tests/golden/trainer/losses.json").value()).value();
  const json::array& cases = file.at("cases").as_array();
  ASSERT_GT(cases.size(), 300u);
  std::set<std::string> kinds;
  for (size_t c = 0; c < cases.size(); ++c) {
    const json::value& in = cases[c].at("in");
    const Result<std::string> text = TrainLoss(PrintJson(in));
    ASSERT_TRUE(text.ok()) << "case " << c << ": " << text.status().message() << ": " << PrintJson(in.at("algorithm"));
    const json::value out = ParseJson(*text).value();
    std::vector<std::string> wrong;
    Compare(out, cases[c].at("out"), "$", wrong);
    // What the settings do not read has no number.
    const json::object& told = cases[c].at("out").at("metrics").as_object();
    for (const auto& [name, value] : out.at("metrics").as_object()) {
      if (!told.if_contains(name) && !value.is_null()) wrong.push_back(std::string(name) + " is not null");
    }
    if (!wrong.empty()) ADD_FAILURE() << "case " << c << ", " << PrintJson(in.at("algorithm")) << ": " << wrong.size() << " wrong, " << wrong[0];
    // The expanded block means the same.
    json::object again = in.as_object();
    again["algorithm"] = out.at("algorithm");
    EXPECT_EQ(TrainLoss(PrintJson(again)).value(), *text) << "case " << c;
    kinds.insert(std::string(out.at("algorithm").at("loss").at("kind").as_string()));
  }
  EXPECT_EQ(kinds.size(), LossKinds().size()) << "a kind without a case";
}

}  // namespace
}  // namespace temper::trainer
