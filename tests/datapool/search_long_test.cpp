#include "tests/datapool/search.h"

namespace temper::datapool {
namespace {

// What could go wrong: any slip in slots, window or order shows as one situation somewhere that is staler than promised.
TEST(WindowSearchLong, TheBoundHoldsAndIsReached) { ExpectBound({6, 1, 8'000'000}); }

// As in the fast tier, larger.
TEST(WindowSearchLong, EachSourceKeepsToItsShareAndItsBound) { ExpectBoundOfEachSource({{1, 1}, {2, 1}}, 1, {4, 1, 8'000'000}); }

}  // namespace
}  // namespace temper::datapool
