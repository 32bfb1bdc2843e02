#include "common/strings.h"

#include <gtest/gtest.h>

namespace temper {
namespace {

// A size that is silently read as another would change memory limits a thousandfold.
TEST(Strings, Sizes) {
  int64_t bytes = 0;
  EXPECT_TRUE(ParseSize("4096", &bytes) && bytes == 4096);
  EXPECT_TRUE(ParseSize("64KiB", &bytes) && bytes == 65536);
  EXPECT_TRUE(ParseSize("1.5 GiB", &bytes) && bytes == 1610612736);
  for (const char* bad : {"", "KiB", "1KB", "1 kib", "-1KiB", "-1", "1.3", "0.0001KiB", "1e30GiB", "99999999999GiB", "1MiBx", "nanKiB"}) {
    EXPECT_FALSE(ParseSize(bad, &bytes)) << bad;
  }
  EXPECT_EQ(FormatSize(1536), "1.5 KiB");
  EXPECT_EQ(FormatSize(268435456), "256 MiB");
}

// Trailing rubbish, overflow and locale must not slip through.
TEST(Strings, Numbers) {
  double d = 0;
  int64_t i = 0;
  EXPECT_TRUE(ParseDouble("3.0e-4", &d) && d == 3.0e-4);
  EXPECT_TRUE(ParseDouble("+1", &d) && d == 1);
  EXPECT_TRUE(ParseInt("-12", &i) && i == -12);
  for (const char* bad : {"", "1x", "nan", "inf", "1e999", " 1", "0x10", "1,5", "+-1"}) {
    EXPECT_FALSE(ParseDouble(bad, &d)) << bad;
    EXPECT_FALSE(ParseInt(bad, &i)) << bad;
  }
  EXPECT_FALSE(ParseInt("9223372036854775808", &i));
  EXPECT_EQ(FormatFloat(0.1f), "0.1");
  EXPECT_EQ(FormatDouble(0.1), "0.1");
}

// A suggestion far from what was typed misleads; one a letter away must be found.
TEST(Strings, NearestKey) {
  EXPECT_EQ(EditDistance("kitten", "sitting"), 3);
  EXPECT_EQ(EditDistance("setps", "steps"), 1);
  EXPECT_EQ(Nearest("setps", {"seed", "steps", "name"}), "steps");
  EXPECT_EQ(Nearest("zzzzzz", {"seed", "steps", "name"}), "");
}

// Overlong forms and surrogates are refused by the readers of what we print.
TEST(Strings, Utf8) {
  EXPECT_TRUE(IsUtf8("a\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80"));
  for (const char* bad : {"\x80", "\xc0\x80", "\xe0\x80\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xc3", "\xe2\x82", "\xff"}) EXPECT_FALSE(IsUtf8(bad));
}

// Empty pieces carry meaning in lists.
TEST(Strings, SplitAndJoin) {
  EXPECT_EQ(Split("a,,b", ','), (std::vector<std::string>{"a", "", "b"}));
  EXPECT_EQ(Split("", ','), std::vector<std::string>{""});
  EXPECT_EQ(Join({"a", "b"}, ", "), "a, b");
  EXPECT_EQ(Trim(" \tx y\r\n"), "x y");
  EXPECT_EQ(Trim("  "), "");
}

}  // namespace
}  // namespace temper
