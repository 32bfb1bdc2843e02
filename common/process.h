// What the machine and this process have: memory, cores, CPU time.
#pragma once

#include <cstdint>
#include <string>

#include "common/status.h"

namespace temper {

int64_t RssBytes();        // resident now; 0 when unknown
int64_t PeakRssBytes();    // the most so far
Status ForgetPeakRss();    // from now on: the most since
int64_t MemoryAvailableBytes();  // MemAvailable, or the cgroup's rest when that is less
double ProcessCpuS();      // user + system time of this process
int CpuCount();            // cores this process may run on
std::string CpuModel();    // "Intel(R) Xeon(R) …", or "unknown"
// "2026-01-02T03:04:05Z" of seconds since 1970.
std::string IsoTime(double wall_s);

}  // namespace temper
