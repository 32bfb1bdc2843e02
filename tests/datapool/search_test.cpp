#include "tests/datapool/search.h"

namespace temper::datapool {
namespace {

// What could go wrong: any slip in slots, window or order shows as one situation somewhere that is staler than promised.
TEST(WindowSearch, TheBoundHoldsAndIsReached) { ExpectBound({4, 1}); }

// What could go wrong: a batch with another mixture than the one stated; a source whose head waits while the other one's groups grow
// stale, or that is overtaken through the other one's window.
TEST(WindowSearch, EachSourceKeepsToItsShareAndItsBound) { ExpectBoundOfEachSource({{1, 1}}, 1, {4, 1}); }

}  // namespace
}  // namespace temper::datapool
