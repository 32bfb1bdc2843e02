#include <gtest/gtest.h>

#include "common/file.h"
#include "common/json.h"
#include "common/strings.h"
#include "datapool/sim.h"

namespace temper::datapool {
namespace {

bool Equal(const json::value& a, const json::value& b) {
  if (a.is_number() && b.is_number()) return a.to_number<double>() == b.to_number<double>();
  if (a.is_array() && b.is_array()) {
    return a.get_array().size() == b.get_array().size() && std::equal(a.get_array().begin(), a.get_array().end(), b.get_array().begin(), Equal);
  }
  if (a.is_object() && b.is_object()) {
    if (a.get_object().size() != b.get_object().size()) return false;
    for (const auto& [key, value] : a.get_object()) {
      const json::value* other = b.get_object().if_contains(key);
      if (other == nullptr || !Equal(value, *other)) return false;
    }
    return true;
  }
  return a == b;
}

// What could go wrong: the machine's indexes (slots, ready sets, deadlines) drift from the plain rules. tests/golden/datapool/make_scripts.py
// is a second model, with plain lists and no index, of the same page.
TEST(WindowGolden, TheSecondModelDecidesTheSame) {
  Result<std::string> text = ReadFile(TEMPER_SOURCE_DIR "/tests/golden/datapool/scripts.jsonl");
  ASSERT_TRUE(text.ok());
  int cases = 0;
  for (const std::string& line : Split(*text, '\n')) {
    if (line.empty()) continue;
    ++cases;
    const json::value golden = *ParseJson(line);
    const std::string config = PrintJson(golden.at("config"));
    Result<SimConfig> sim = ParseSimConfig(config);
    ASSERT_TRUE(sim.ok()) << config << ": " << sim.status().message();
    std::vector<std::string> events;
    for (const json::value& e : golden.at("events").as_array()) events.push_back(PrintJson(e));
    std::vector<std::string> out;
    RunScript(sim->pool, {events.begin(), events.end()}, [&](const std::string& o) { out.push_back(o); });
    const json::array& want = golden.at("output").as_array();
    for (size_t i = 0; i < std::min(out.size(), want.size()); ++i) {
      const json::value got = *ParseJson(out[i]);
      if (got.as_object().contains("error") && want[i].as_object().contains("error")) continue;
      ASSERT_TRUE(Equal(got, want[i])) << "case " << cases << " " << config << "\nline " << i << "\n got " << out[i] << "\nwant " << PrintJson(want[i]);
    }
    EXPECT_EQ(out.size(), want.size());
  }
  EXPECT_EQ(cases, 24);
}

}  // namespace
}  // namespace temper::datapool
