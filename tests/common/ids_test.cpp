#include "common/ids.h"

#include <gtest/gtest.h>

namespace temper {
namespace {

// A name that parses to another attempt would hand one attempt's tokens to another.
TEST(SessionId, RoundTrips) {
  for (const char* text : {"0.0.1", "12.7.3", "e0.255.1", "9007199254740993.1.2"}) {
    auto id = SessionId::Parse(text);
    ASSERT_TRUE(id.ok()) << text;
    EXPECT_EQ(id->ToString(), text);
  }
}

// Several spellings of one attempt would make two sessions of it.
TEST(SessionId, OnlyTheOneSpellingIsAccepted) {
  for (const char* text : {"", "1.2", "1.2.0", "1.2.3.4", "01.2.3", "-1.0.1", "1.2.x", "f1.2.3", "e", " 1.2.3", "1.99999999999.1", "+1.0.1"}) {
    EXPECT_FALSE(SessionId::Parse(text).ok()) << text;
  }
}

// The names are part of the ledger's format.
TEST(Outcome, NamesRoundTrip) {
  for (int i = 0; i < kOutcomes; ++i) {
    const Outcome outcome = static_cast<Outcome>(i);
    EXPECT_EQ(*ParseOutcome(OutcomeName(outcome)), outcome);
  }
  EXPECT_FALSE(ParseOutcome("success").ok());
}

// Versions of different epochs with the same step are different weights.
TEST(Version, OrdersByEpochFirst) {
  EXPECT_LT((Version{1, 9}), (Version{2, 0}));
  EXPECT_NE((Version{1, 3}), (Version{2, 3}));
}

}  // namespace
}  // namespace temper
