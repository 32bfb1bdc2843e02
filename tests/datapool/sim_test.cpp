// Generated worlds and what is learnt from them.
#include "datapool/sim.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

#include "common/strings.h"
#include "datapool/picture.h"
#include "tests/datapool/script.h"

namespace temper::datapool {
namespace {

// The ledger of a run of groups of one: rollout i takes latencies[i % n] seconds, a step of the trainer `trainer_s`.
std::string LedgerOf(const std::vector<double>& latencies, double trainer_s) {
  std::string text;
  int64_t seq = 0;
  auto add = [&](LedgerLine line) { text += PrintLedger({++seq, std::move(line)}) + "\n"; };
  double t = 0;
  for (int64_t i = 0; i < 40; ++i) {
    const double latency = latencies[static_cast<size_t>(i) % latencies.size()];
    LedgerLine line;
    line.kind = LedgerLine::Kind::kIssue;
    line.t = t;
    line.group = i;
    line.rollout = 0;
    line.attempt = 1;
    add(line);
    line.kind = LedgerLine::Kind::kOutcome;
    line.t = t + latency;
    line.outcome = "scored";
    line.reward = 1;
    add(line);
    LedgerLine lease;
    lease.kind = LedgerLine::Kind::kLease;
    lease.t = t + latency;
    lease.step = i + 1;
    lease.groups = {i};
    add(lease);
    LedgerLine consume;
    consume.kind = LedgerLine::Kind::kConsume;
    consume.t = t = lease.t + trainer_s;
    consume.group = i;
    consume.step = i + 1;
    consume.version_admitted = consume.version_consumed = i;
    add(consume);
  }
  return text;
}

// What could go wrong: the advice is to be staler than what pays, or not stale enough to keep the trainer busy, or the trainer's time
// is misread.
TEST(Advice, IsTheLeastBoundThatIsFast) {
  const PoolConfig config = Config(R"({"P":2,"S":1,"window":{"fraction":0.5}})");
  auto advise = [&](const std::vector<double>& latencies, double trainer_s) {
    Result<Advice> advice = Advise(config, LedgerOf(latencies, trainer_s), 100);
    TEMPER_CHECK(advice.ok()) << advice.status().message();
    return *std::move(advice);
  };
  // The trainer is all there is: fresh groups cost one second in a hundred.
  const Advice slow_trainer = advise({1}, 100);
  EXPECT_EQ(slow_trainer.world.trainer_s, 100);
  EXPECT_EQ(slow_trainer.steps, 40);
  EXPECT_EQ(slow_trainer.reports[slow_trainer.best].S, 0);
  // Both take equally long: one batch ahead hides sampling behind training, more does nothing.
  const Advice even = advise({1}, 1);
  EXPECT_EQ(even.reports[even.best].S, 1);
  EXPECT_EQ(even.reports[even.best].plan.bound, 1);
  // One rollout in eight takes sixteen times as long: a window lets the others pass it.
  const Advice tail = advise({1, 1, 1, 1, 1, 1, 1, 16}, 1);
  EXPECT_GT(*tail.reports[tail.best].plan.window[0], 1);
  EXPECT_GE(tail.reports[tail.best].S, 2);
  // What the run has: two of four slots.
  EXPECT_EQ(even.reports[even.own].S, 1);
  EXPECT_EQ(even.reports[even.own].plan.window[0], 2);
  EXPECT_THAT(PrintAdvice(even), testing::StartsWith(R"({"recommend":{"S":1,"policy":"strict","W":[1],"bound":1})"));
  EXPECT_FALSE(Advise(config, "", 100).ok());
  EXPECT_FALSE(Advise(config, PrintLedger({1, {}}) + "\n", 100).ok());
}

// What could go wrong: a slow source's rollouts are mixed into a quick one's, and what waits for it goes unseen. Each step needs a
// group of both: it takes as long as the slow one.
TEST(Advice, EachSourceTakesTheTimesOfItsOwn) {
  const PoolConfig config = Config(R"({"P":2,"S":0,"sources":[{"name":"quick"},{"name":"slow"}]})");
  World world;
  world.latency.dist = "ledger";
  world.updates = 10;
  world.trainer_s = 1;
  std::vector<RecordedRollout> recorded;
  for (int i = 0; i < 12; ++i) {
    recorded.push_back({1, false, 1.0, "quick"});
    if (i % 3 == 0) recorded.push_back({8, false, 1.0, "slow"});
  }
  const Result<WorldReport> own = RunWorld(config, world, recorded, nullptr, nullptr);
  ASSERT_TRUE(own.ok());
  EXPECT_EQ(own->time, 10 * (8 + 1));
  // One that recorded nothing has what there is.
  for (RecordedRollout& r : recorded) r.source = "quick";
  const Result<WorldReport> mixed = RunWorld(config, world, recorded, nullptr, nullptr);
  ASSERT_TRUE(mixed.ok());
  EXPECT_LT(mixed->time, 10 * (8 + 1));
}

// A PNG as any viewer reads it, as far as ours go: 8 bit RGB, stored blocks, no filter. Empty: broken.
struct Image {
  uint32_t width = 0, height = 0;
  std::string rows;  // three bytes a pixel
  std::array<int, 3> At(size_t x, size_t y) const {
    const size_t at = (y * width + x) * 3;
    return {static_cast<uint8_t>(rows[at]), static_cast<uint8_t>(rows[at + 1]), static_cast<uint8_t>(rows[at + 2])};
  }
};

Image ReadPng(std::string png) {
  const auto number = [](const std::string& s, size_t at) {
    uint32_t v = 0;
    for (size_t i = 0; i < 4; ++i) v = v << 8 | static_cast<uint8_t>(s.at(at + i));
    return v;
  };
  Image image;
  if (png.substr(0, 8) != "\x89PNG\r\n\x1a\n") return {};
  std::string data;
  std::vector<std::string> types;
  for (size_t at = 8; at < png.size();) {
    const uint32_t size = number(png, at);
    const std::string type = png.substr(at + 4, 4), body = png.substr(at + 8, size);
    uint32_t crc = ~0u;
    for (const char c : type + body) {
      crc ^= static_cast<uint8_t>(c);
      for (int bit = 0; bit < 8; ++bit) crc = crc & 1 ? crc >> 1 ^ 0xedb88320u : crc >> 1;
    }
    if (number(png, at + 8 + size) != ~crc) return {};
    if (type == "IHDR") {
      image.width = number(body, 0);
      image.height = number(body, 4);
      if (body.substr(8) != std::string("\x08\x02\0\0\0", 5)) return {};
    }
    if (type == "IDAT") data += body;
    types.push_back(type);
    at += 12 + size;
  }
  if (types != std::vector<std::string>{"IHDR", "IDAT", "IEND"} || (static_cast<uint8_t>(data.at(0)) * 256 + static_cast<uint8_t>(data.at(1))) % 31 != 0) return {};
  std::string raw;
  bool last = false;
  size_t at = 2;
  while (!last) {
    last = data.at(at) == 1;
    const size_t n = static_cast<uint8_t>(data.at(at + 1)) + 256u * static_cast<uint8_t>(data.at(at + 2));
    const size_t not_n = static_cast<uint8_t>(data.at(at + 3)) + 256u * static_cast<uint8_t>(data.at(at + 4));
    if (n + not_n != 65535) return {};
    raw += data.substr(at + 5, n);
    at += 5 + n;
  }
  uint32_t a = 1, b = 0;
  for (const char c : raw) b = (b + (a = (a + static_cast<uint8_t>(c)) % 65521)) % 65521;
  if (number(data, at) != (b << 16 | a) || raw.size() != image.height * (image.width * 3 + 1)) return {};
  for (size_t y = 0; y < image.height; ++y) {
    if (raw[y * (image.width * 3 + 1)] != 0) return {};
    image.rows += raw.substr(y * (image.width * 3 + 1) + 1, image.width * 3);
  }
  return image;
}

// What could go wrong: a file that no viewer opens, bars that are not the numbers, a bound in the wrong place, one policy's bars in
// another's row.
TEST(Picture, BarsAreTheNumbers) {
  WorldReport first, second;
  first.staleness_by_batch = {0, 1, 2, 2};
  first.idle_by_batch = {8, 0, 4, 2};
  first.plan.bound = 2;
  second.staleness_by_batch = {4, 0, 0, 1};
  second.idle_by_batch = {0, 1, 0, 0};
  const Image image = ReadPng(DrawReports({first, second}));
  constexpr size_t kRow = 120, kMargin = 8, kWidth = 640;
  ASSERT_EQ(image.width, kWidth + 2 * kMargin);
  ASSERT_EQ(image.height, 4 * (kRow + kMargin) + kMargin);
  const auto height = [&](size_t row, size_t batch, bool red) {
    const size_t x = kMargin + batch * kWidth / 4 + 20;  // inside its column
    size_t n = 0;
    for (size_t y = row * (kRow + kMargin) + kMargin; y < (row + 1) * (kRow + kMargin); ++y) {
      const auto [r, g, blue] = image.At(x, y);
      n += red ? r > 150 && g < 100 : blue > 150 && r < 100;
    }
    return n;
  };
  for (size_t b = 0; b < 4; ++b) {
    // All rows have one scale: the largest staleness or bound of any policy, the longest wait of any. A line of the bound may cross.
    EXPECT_NEAR(static_cast<double>(height(0, b, true)), 30.0 * static_cast<double>(first.staleness_by_batch[b]), 1) << b;
    EXPECT_NEAR(static_cast<double>(height(1, b, false)), 15 * first.idle_by_batch[b], 1) << b;
    EXPECT_NEAR(static_cast<double>(height(2, b, true)), 30.0 * static_cast<double>(second.staleness_by_batch[b]), 1) << b;
    EXPECT_NEAR(static_cast<double>(height(3, b, false)), 15 * second.idle_by_batch[b], 1) << b;
  }
  // The bound of the first, half up its row; the second has none.
  const auto grey = std::array<int, 3>{160, 160, 160};
  EXPECT_EQ(image.At(kMargin + 20, 1 * (kRow + kMargin) - 60), grey);
  EXPECT_NE(image.At(kMargin + kWidth / 4 + 20, 3 * (kRow + kMargin) - 60), grey);
  // Many batches, and none.
  first.staleness_by_batch.assign(50'000, 1);
  first.idle_by_batch.assign(50'000, 1);
  EXPECT_EQ(ReadPng(DrawReports({first})).width, 4000 + 2 * kMargin);
  EXPECT_EQ(ReadPng(DrawReports({WorldReport()})).width, kWidth + 2 * kMargin);
}

// What could go wrong: of two windows under one S the wider one is advised though it brings nothing, or the narrow one though it costs.
TEST(Advice, TheWindowIsNoWiderThanItPays) {
  const PoolConfig config = Config(R"({"P":4,"S":1,"window":{"policy":"greedy"}})");
  for (const bool tail : {false, true}) {
    std::vector<double> latencies(16, 1);
    if (tail) latencies[3] = 12;
    const Result<Advice> advice = Advise(config, LedgerOf(latencies, 1), 200);
    ASSERT_TRUE(advice.ok()) << advice.status().message();
    const WorldReport& best = advice->reports[advice->best];
    const double rate = static_cast<double>(best.updates) / best.time;
    double highest = 0;
    for (const WorldReport& r : advice->reports) highest = std::max(highest, static_cast<double>(r.updates) / r.time);
    EXPECT_GE(rate, highest * (1 - kAdviceSlack));
    for (const WorldReport& r : advice->reports) {
      if (*r.plan.bound >= *best.plan.bound) continue;
      EXPECT_LT(static_cast<double>(r.updates) / r.time, highest * (1 - kAdviceSlack)) << r.policy << " has a lesser bound and is as fast";
    }
    // With even rollouts strict order costs nothing; one straggler in sixteen makes every batch of four wait for it.
    EXPECT_EQ(best.plan.window[0] == 1, !tail);
    EXPECT_THAT(PrintAdvice(*advice), testing::HasSubstr(fmt::format(R"("W":[{}])", *best.plan.window[0])));
    EXPECT_EQ(advice->reports[advice->own].plan.window[0], 8) << "what the run has";
  }
}

}  // namespace
}  // namespace temper::datapool
