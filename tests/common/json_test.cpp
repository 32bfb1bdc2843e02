#include "common/json.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "common/rng.h"
#include "common/strings.h"

namespace temper {
namespace {

// Numbers that come back one ulp off would break exact resume and every bit-level comparison.
TEST(Json, NumbersSurviveTheRoundTripExactly) {
  Rng rng(1);
  for (int i = 0; i < 20000; ++i) {
    const uint64_t bits = rng.Next();
    double d;
    std::memcpy(&d, &bits, sizeof d);
    float f;
    const uint32_t low = static_cast<uint32_t>(bits);
    std::memcpy(&f, &low, sizeof f);
    if (!std::isfinite(d) || !std::isfinite(f)) continue;
    JsonWriter w;
    w.BeginArray().Double(d).Float(f).EndArray();
    auto parsed = ParseJson(w.text());
    ASSERT_TRUE(parsed.ok()) << w.text();
    const double back = *JsonRef(parsed->at(0)).Double();
    ASSERT_EQ(back, d) << w.text();
    ASSERT_EQ(static_cast<float>(*JsonRef(parsed->at(1)).Double()), f) << w.text();
    const std::string again = PrintJson(*parsed);
    ASSERT_EQ(again.substr(0, again.find(',')), w.text().substr(0, w.text().find(','))) << "printing a parsed value is stable";
  }
}

// Two values, a cut-off value or a repeated key must be refused, not half read.
TEST(Json, OnlyOneStrictValue) {
  for (const char* text : {"", " ", "{", "[1,]", "{} {}", "{}x", "{\"a\":1,\"a\":2}", "{\"b\":{\"a\":1,\"\\u0061\":2}}", "nul", "\"\xff\"",
                           "01", "+1", "NaN", "'a'", "[1 2]", "{\"a\" 1}", "\"\\ud800\""}) {
    EXPECT_FALSE(ParseJson(text).ok()) << text;
  }
  EXPECT_FALSE(ParseJson(std::string(100, '[') + std::string(100, ']')).ok()) << "a deep value could exhaust the stack";
  for (const char* text : {"null", " 1 \n", "{\"a\":{\"a\":1},\"b\":[{\"a\":2}]}", "\"\\ud83d\\ude00\"", "[]", "{}", "-0.0"}) {
    EXPECT_TRUE(ParseJson(text).ok()) << text;
  }
}

// Control bytes and broken UTF-8 would make a line of output unreadable for every JSON reader.
TEST(Json, StringsAreEscapedAndRepaired) {
  JsonWriter w;
  w.BeginObject().Key("a\"b").String(std::string("x\n\x01\xff\xe2\x82\xac", 7)).Key("n").Null().Key("t").Bool(true).EndObject();
  EXPECT_EQ(w.text(), "{\"a\\\"b\":\"x\\n\\u0001\xef\xbf\xbd\xe2\x82\xac\",\"n\":null,\"t\":true}");
  EXPECT_TRUE(ParseJson(w.text()).ok());
}

// An error without the place in the input is of no use in a thousand-line file.
TEST(JsonRef, ErrorsNameThePath) {
  auto value = *ParseJson(R"({"groups":[{"reward":"x","n":1.5,"ids":[1,null]}],"big":18446744073709551615})");
  JsonRef root(value);
  auto group = root.Field("groups")->Items()->at(0);
  EXPECT_EQ(group.Field("reward")->Double().status().message(), "groups[0].reward: expected a number, got a string");
  EXPECT_EQ(group.Field("missing").status().message(), "groups[0].missing: missing");
  EXPECT_EQ(group.Field("ids")->Ints().status().message(), "groups[0].ids[1]: expected a whole number, got null");
  EXPECT_FALSE(group.Field("n")->Int().ok());
  EXPECT_FALSE(root.Field("big")->Int().ok());
  EXPECT_EQ(*group.IntOr("absent", 4), 4);
  EXPECT_FALSE(group.IntOr("reward", 4).ok()) << "a wrong type is no absence";
  EXPECT_EQ(group.OnlyKeys({"rewards", "n", "ids"}).message(), "groups[0]: unknown key 'reward' (did you mean 'rewards'?)");
}

// Outside bytes must never crash the parser.
TEST(Json, MutatedInputIsHandled) {
  const std::string seed = R"({"a":[1,-2.5e3,"x\u00e9\n",true,null,{"b":{}}],"c":1e400,"d":"\ud83d\ude00"})";
  Rng rng(5);
  for (int i = 0; i < 20000; ++i) {
    std::string text = seed;
    for (uint64_t k = rng.Below(4) + 1; k > 0; --k) {
      const size_t at = rng.Below(text.size());
      switch (rng.Below(4)) {
        case 0: text[at] = static_cast<char>(rng.Next()); break;
        case 1: text.erase(at, rng.Below(5)); break;
        case 2: text.insert(at, 1, "{}[]\",:\\u0"[rng.Below(10)]); break;
        default: text += text.substr(at, rng.Below(10));
      }
      if (text.empty()) text = "[";
    }
    if (auto value = ParseJson(text); value.ok()) {
      ASSERT_TRUE(IsUtf8(PrintJson(*value)));
      ASSERT_TRUE(ParseJson(PrintJson(*value)).ok()) << text;
    }
  }
}

}  // namespace
}  // namespace temper
