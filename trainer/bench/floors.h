// What this machine can do at most: loops that do the arithmetic, or move the bytes, and nothing else. Measured in the process
// that measures ours, on as many threads, between its samples.
#pragma once

#include <cstddef>
#include <span>

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

}  // namespace temper::trainer::bench
