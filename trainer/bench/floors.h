// What this machine can do at most: loops that do the arithmetic, or move the bytes, and nothing else. Measured in the process
// that measures ours, on as many threads, between its samples.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "engine/engine.h"

namespace temper::trainer::bench {

// What time is: that on the wall, or that of the calling thread on its core, which other programs lengthen less. The latter is
// for engines of one thread.
enum class Clock { kWall, kCpu };
double Now(Clock clock);  // seconds

// FLOP/s of multiply-adds on fp32 registers of the engine's path (two a multiply-add), all threads together: the best of several.
double PeakFlops(engine::Engine& engine, Clock clock);
// Bytes/s of reading `memory`, each thread a stretch of its own: the best of several loops.
double ReadBandwidth(engine::Engine& engine, std::span<const std::byte> memory, Clock clock);


// Memory of panels, and the rows that meet it.
struct Stretch {
  std::span<const std::byte> memory;
  int rows = 0;
};
// Seconds in which the stretches are read, one after the other, while every number read is multiplied with `rows` numbers in
// registers and added up (bf16: pairs are taken apart first, as the pair-dot must): the bytes and the arithmetic of a product
// of so many rows, without indices, edges, inputs or results. Rows are rounded down to what the loops are written for: 1, 2, 3,
// 4 and multiples of 8, with AVX2 1 and multiples of 2. The best of several loops.
double ReadAndMultiply(engine::Engine& engine, engine::Profile profile, const std::vector<Stretch>& stretches, Clock clock);

}  // namespace temper::trainer::bench
