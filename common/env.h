// The world, passed in: clock, randomness, files and faults. A test builds one from a FakeClock and its own Faults; a
// process takes System().
#pragma once

#include <cstdint>

#include "common/clock.h"
#include "common/faults.h"
#include "common/file.h"
#include "common/rng.h"

namespace temper {

// Refers to objects that outlive it; copyable. Fork `rng` by name rather than drawing from it.
struct Env {
  Clock& clock;
  FileSystem& files;
  Faults& faults;
  Rng rng;

  static Env System(uint64_t seed = 0) {
    return Env{SystemClock::Get(), PosixFileSystem::Get(), Faults::Get(), Rng(seed)};
  }
};

}  // namespace temper
