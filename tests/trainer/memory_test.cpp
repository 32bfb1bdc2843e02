// What engine/memory.h says a process will have resident at its peak, beside what it then had (VmHWM), for work in processes of their own.
#include <gtest/gtest.h>

#include <cstdio>
#include <string>

#include <fmt/format.h>

#include "common/json.h"
#include "common/strings.h"

namespace temper {
namespace {

constexpr double kGiB = 1 << 30;

struct Shape {
  const char* work;
  const char* model;
  const char* profile;
  int rows, length;
  double budget_gib = 1e6;  // for the pass
  bool recompute = false, chunked = false;  // what that must lead to
};
void PrintTo(const Shape& s, std::ostream* out) {
  *out << fmt::format("{} {} {}, {} x {}", s.work, s.model, s.profile, s.rows, s.length);
}

// Runs the probe; `limit_gib` is what the process may have at the most.
void Hold(const Shape& s, double limit_gib) {
  const std::string command = fmt::format("{} {} {} {} {} {} {:.0f}", TEMPER_MEMORY_PROBE, s.work, s.model, s.profile, s.rows, s.length,
                                          s.budget_gib * kGiB);
  FILE* pipe = popen(command.c_str(), "r");
  ASSERT_TRUE(pipe);
  std::string line;
  for (int c; (c = fgetc(pipe)) != EOF;) line += static_cast<char>(c);
  ASSERT_EQ(pclose(pipe), 0) << command << ": " << line;
  const auto value = ParseJson(line);
  ASSERT_TRUE(value.ok()) << line;
  const double planned = value->at("planned").to_number<double>() / kGiB, peak = value->at("peak").to_number<double>() / kGiB;
  const auto chunk = value->at("chunk_nodes").as_int64();
  const bool recompute = value->at("recompute").as_bool();
  // The long tier records it.
  std::printf("measured: %s %s %s, %d x %d%s%s: planned %.3f GiB, peak %.3f GiB (%+.1f %%), %.0f s\n", s.work, s.model, s.profile, s.rows, s.length,
              chunk ? fmt::format(" in chunks of {}", chunk).c_str() : "", recompute ? ", layers again" : "", planned, peak,
              100 * (planned / peak - 1), value->at("seconds").to_number<double>());
  std::fflush(stdout);
  EXPECT_GE(planned, 0.9 * peak);
  EXPECT_LE(planned, 1.1 * peak);
  EXPECT_LE(peak, limit_gib);
  EXPECT_EQ(recompute, s.recompute);
  EXPECT_EQ(chunk > 0, s.chunked);
  // A plan that says only what is there before the work would be right of a small one.
  EXPECT_GE(peak, 3 * value->at("before").to_number<double>() / kGiB);
}

class Peak : public testing::TestWithParam<Shape> {};
TEST_P(Peak, IsAsPlanned) { Hold(GetParam(), 1); }
INSTANTIATE_TEST_SUITE_P(Quickstart, Peak,
                         testing::Values(Shape{"step", "quickstart", "bf16", 16, 256}, Shape{"step", "quickstart", "f32", 16, 128},
                                         Shape{"step", "quickstart", "f32", 1, 3000, 0.01, true, true},
                                         Shape{"step", "quickstart", "bf16", 1, 4000, 0.06, false, true},
                                         Shape{"score", "quickstart", "bf16", 1, 8000}, Shape{"score", "quickstart", "f32", 4, 1500},
                                         Shape{"decode", "quickstart", "bf16", 64, 640}, Shape{"decode", "quickstart", "f32", 16, 1000}));

class PeakLong : public testing::TestWithParam<Shape> {};
TEST_P(PeakLong, IsAsPlanned) { Hold(GetParam(), 8); }
INSTANTIATE_TEST_SUITE_P(SmolLM2, PeakLong,
                         testing::Values(Shape{"step", "smollm2", "bf16", 2, 512}, Shape{"step", "smollm2", "f32", 2, 256},
                                         Shape{"step", "smollm2", "bf16", 1, 2048, 0.6, true, false},
                                         Shape{"step", "smollm2", "bf16", 1, 2048, 0.4, false, true},
                                         Shape{"score", "smollm2", "bf16", 1, 4096}, Shape{"score", "smollm2", "f32", 4, 512},
                                         Shape{"decode", "smollm2", "bf16", 16, 512}, Shape{"decode", "smollm2", "f32", 8, 256}));
INSTANTIATE_TEST_SUITE_P(Row8k, PeakLong, testing::Values(Shape{"step", "smollm2", "bf16", 1, 8192, 2, false, true}));
// An optimizer step over one row of 32k tokens in 8 GiB; the pass may take what weights, gradients and moments leave.
INSTANTIATE_TEST_SUITE_P(Row32k, PeakLong, testing::Values(Shape{"step", "smollm2", "bf16", 1, 32768, 5.6, false, true}));

}  // namespace
}  // namespace temper
