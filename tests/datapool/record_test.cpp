#include "datapool/record.h"

#include <gtest/gtest.h>

#include "common/rng.h"

namespace temper::datapool {
namespace {

// What could go wrong: a record that was cut short, changed in one bit, or lies under another attempt's key is taken for a good one.
TEST(Record, VerifiesToTheLastBit) {
  Rng rng(3);
  const AttemptId id{7, 2, 1};
  std::string noise(40, '\0');
  for (char& c : noise) c = static_cast<char>(rng.Below(256));
  for (const std::string& bytes : {std::string(), std::string("x"), noise, std::string(300, 'a') + noise}) {
    const std::string stored = PackRecord(id, bytes);
    ASSERT_EQ(*UnpackRecord(id, stored), bytes);
    for (size_t bit = 0; bit < stored.size() * 8; ++bit) {
      std::string flipped = stored;
      flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << (bit % 8)));
      EXPECT_EQ(UnpackRecord(id, flipped).status().code(), StatusCode::kDataLoss) << "bit " << bit;
    }
    for (size_t n = 0; n < stored.size(); ++n) EXPECT_FALSE(UnpackRecord(id, stored.substr(0, n)).ok()) << n;
    EXPECT_FALSE(UnpackRecord(id, stored + "x").ok());
    for (const AttemptId& other : {AttemptId{8, 2, 1}, AttemptId{7, 3, 1}, AttemptId{7, 2, 2}}) EXPECT_FALSE(UnpackRecord(other, stored).ok());
  }
  EXPECT_LT(PackRecord(id, std::string(10000, 'a')).size(), 200u) << "what can be compressed is";
  EXPECT_LE(PackRecord(id, noise).size(), noise.size() + 20) << "what cannot is stored as it is";
}

}  // namespace
}  // namespace temper::datapool
