#include "datapool/bench/commands.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <string>

#include "common/file.h"
#include "common/json.h"
#include "common/process.h"
#include "common/strings.h"
#include "datapool/bench/pool_bench.h"
#include "fmt/format.h"

namespace temper::datapool {
namespace {

constexpr char kUsage[] =
    "usage: temper bench pool [--json] [--only write,lease,sustain] [--samples N] [--megabytes N] [--seconds N] [--dir DIR] [--redis PROGRAM]\n";

int BadUsage(const std::string& what) {
  std::fprintf(stderr, "temper bench pool: %s\n%s", what.c_str(), kUsage);
  return 2;
}

void PrintRow(const bench::Row& row, const std::string& cpu, bool as_json) {
  if (as_json) {
    JsonWriter w;
    w.BeginObject().Key("bench").String("pool").Key("case").String(row.work + ": " + row.name).Key("ours").Double(row.ours);
    w.Key("unit").String(row.unit).Key("reference").String(row.reference).Key("theirs").Double(row.theirs).Key("ratio").Double(row.ratio);
    w.Key("samples").Doubles(row.samples).Key("cpu").String(cpu).EndObject();
    std::printf("%s\n", w.text().c_str());
  } else {
    std::printf("%-8s %-60s %12.1f %-9s %12.1f  x%.2f  %s\n", row.work.c_str(), row.name.c_str(), row.ours, row.unit.c_str(), row.theirs,
                row.ratio, row.reference.c_str());
  }
  std::fflush(stdout);
}

int RunPool(int argc, char** argv) {
  // What the bench starts as a process of its own.
  if (argc == 5 && std::string(argv[1]) == "--serve") {
    const Status served = bench::ServePool(argv[2], argv[3], argv[4]);
    std::fprintf(stderr, "temper bench pool: %s\n", served.ToString().c_str());
    return 1;
  }
  bench::Options options;
  options.program = "/proc/self/exe";
  bool as_json = false;
  std::string dir = ".";
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg == "--help" || arg == "-h") {
      std::printf(
          "%sWrites records of 1k, 16k and 200k tokens through the pool, beside raw RocksDB and a Redis Stream; leases a batch of 64 groups of\n"
          "8 rollouts of 4k tokens; and keeps one pool process busy. In turn, medians of the ratios; docs/pool_speed.md. The stores lie in a\n"
          "folder made in DIR (the working folder), %s\n",
          kUsage, "on the disk to be measured.");
      return 0;
    }
    if (arg == "--json") {
      as_json = true;
      continue;
    }
    if (i + 1 == argc) return BadUsage("'" + arg + "' needs a value");
    const std::string value = argv[++i];
    int64_t number = 0;
    const auto count = [&](int64_t most) { return ParseInt(value, &number) && number >= 1 && number <= most; };
    if (arg == "--only") {
      for (const std::string& word : Split(value, ',')) {
        if (std::count(bench::Works().begin(), bench::Works().end(), word) == 0) {
          return BadUsage("--only: '" + word + "' is not one of " + Join(bench::Works(), ", "));
        }
        options.works.push_back(word);
      }
    } else if (arg == "--samples") {
      if (!count(1000)) return BadUsage("--samples: '" + value + "' is not within 1 to 1000");
      options.samples = static_cast<int>(number);
    } else if (arg == "--megabytes") {
      if (!count(100'000)) return BadUsage("--megabytes: '" + value + "' is not within 1 to 100000");
      options.sample_bytes = number << 20;
    } else if (arg == "--seconds") {
      if (!count(86'400)) return BadUsage("--seconds: '" + value + "' is not within 1 to 86400");
      options.seconds = static_cast<double>(number);
    } else if (arg == "--dir") {
      dir = value;
    } else if (arg == "--redis") {
      options.redis = value;
    } else {
      return BadUsage("unknown option '" + arg + "'");
    }
  }
  options.dir = AbsolutePath(fmt::format("{}/temper-bench-pool-{}", dir, getpid()));
  const std::string cpu = CpuModel();
  if (!as_json) std::printf("%s, %d cores, medians of %d\n", cpu.c_str(), CpuCount(), options.samples);
  const Status status = bench::RunPoolBench(
      options, [&](const bench::Row& row) { PrintRow(row, cpu, as_json); },
      [&](const std::string& what) {
        std::fprintf(as_json ? stderr : stdout, "%s\n", what.c_str());
        std::fflush(stdout);
      });
  (void)RemoveAll(options.dir);
  if (!status.ok()) {
    std::fprintf(stderr, "temper bench pool: %s\n", status.message().c_str());
    return 1;
  }
  return 0;
}

}  // namespace

const std::vector<Command>& BenchCommands() {
  static const std::vector<Command> kCommands = {
      {"bench", "pool", "measure the data pool beside raw RocksDB and Redis Streams", &RunPool},
  };
  return kCommands;
}

}  // namespace temper::datapool
