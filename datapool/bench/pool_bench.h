// The data pool beside raw RocksDB and beside a pool made of Redis Streams: the same records, the same durability (a write is
// answered when it survives kill -9 of the process; none waits for the disk), both sides measured in one run, sample by sample in turn.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "common/status.h"

namespace temper::datapool::bench {

struct Options {
  int samples = 5;
  std::vector<std::string> works;  // write, lease, sustain; empty: all
  int64_t sample_bytes = int64_t{96} << 20;  // of records, a sample of `write`
  double seconds = 60;             // of `sustain`
  std::string dir;                 // where the stores lie, on the disk to be measured; made and emptied
  std::string redis = "redis-server";
  std::string program;             // this binary: the pool's process is `PROGRAM bench pool --serve DIR`
};
const std::vector<std::string>& Works();

struct Row {
  std::string work;             // "write"
  std::string name;             // the case: "1000 tokens, 5.7 kB a record, in this process"
  double ours = 0;              // the median
  std::string unit;             // "MB/s", "tokens/s", …: more is better; "ms": less is
  std::string reference;        // what `theirs` is: "raw RocksDB 7.8.3", "Redis 7.0.15 Streams", "asked for"
  double theirs = 0;            // the median
  double ratio = 0;             // the median over the samples taken in turn; more is better: of "ms", theirs over ours
  std::vector<double> samples;  // ours
};

// Runs what `options` names; `emit` gets each row as soon as it is there, `say` what could not be run and why.
Status RunPoolBench(const Options& options, const std::function<void(const Row&)>& emit, const std::function<void(const std::string&)>& say);

// The process that is measured: a pool on `dir`/pool behind unix-abstract:`name`, until it is killed. `config`: pool_sim.md 2.
Status ServePool(const std::string& dir, const std::string& name, const std::string& config);

// A serialised temper.v1.Trajectory of so many tokens as an agent leaves them: turns of given and of sampled tokens, ids as frequent as
// words are, log-probabilities with all their bits.
std::string MakeTrajectory(int64_t tokens, uint64_t seed);

}  // namespace temper::datapool::bench
