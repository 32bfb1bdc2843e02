#include "common/process.h"

#include <sched.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "common/file.h"
#include "common/strings.h"

namespace temper {
namespace {

// The value of "Name:   123 kB" in a proc file, in bytes.
int64_t KibField(const char* path, std::string_view name) {
  auto text = ReadFile(path, 1 << 20);
  if (!text.ok()) return 0;
  for (const std::string& line : Split(*text, '\n')) {
    if (line.rfind(name, 0) != 0) continue;
    long long kib = 0;
    if (std::sscanf(line.c_str() + name.size(), ": %lld", &kib) == 1) return kib * 1024;
  }
  return 0;
}

int64_t NumberIn(const std::string& path) {
  auto text = ReadFile(path, 4096);
  int64_t value = 0;
  return text.ok() && ParseInt(Trim(*text), &value) ? value : -1;
}

}  // namespace

int64_t RssBytes() { return KibField("/proc/self/status", "VmRSS"); }
int64_t PeakRssBytes() { return KibField("/proc/self/status", "VmHWM"); }
Status ForgetPeakRss() { return WriteFile("/proc/self/clear_refs", "5"); }

int64_t MemoryAvailableBytes() {
  int64_t available = KibField("/proc/meminfo", "MemAvailable");
  for (auto [limit, used] : {std::pair("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
                             std::pair("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes")}) {
    const int64_t most = NumberIn(limit), now = NumberIn(used);
    if (most > 0 && now >= 0) available = std::min(available, std::max<int64_t>(0, most - now));
  }
  return available;
}

double ProcessCpuS() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  auto seconds = [](const timeval& t) { return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec); };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

int CpuCount() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)));
}

std::string CpuModel() {
  auto text = ReadFile("/proc/cpuinfo", 1 << 24);
  if (text.ok()) {
    for (const std::string& line : Split(*text, '\n')) {
      if (line.rfind("model name", 0) == 0) return std::string(Trim(line.substr(line.find(':') + 1)));
    }
  }
  return "unknown";
}

std::string IsoTime(double wall_s) {
  const time_t seconds = static_cast<time_t>(wall_s);
  tm parts;
  gmtime_r(&seconds, &parts);
  char text[40];
  strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

}  // namespace temper
