// The engine: which kernels this process runs and the threads that run them. Create once, pass by reference to passes.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/status.h"
#include "engine/config.h"
#include "engine/threads.h"

namespace temper::engine {

namespace cpu {
struct Ops;
}

enum class CpuPath : uint8_t { kAuto, kAvx2, kAvx512, kAmx };
const char* CpuPathName(CpuPath path);
Result<CpuPath> ParseCpuPath(const std::string& name);
// Paths this machine can run, slowest first. Empty: not even AVX2 and FMA, the engine cannot run.
std::vector<CpuPath> AvailableCpuPaths();

struct EngineOptions {
  CpuPath cpu = CpuPath::kAuto;  // kAuto: environment TEMPER_CPU, else the fastest present. All give the same bits.
  int threads = 0;               // 0: one per core the process may use
};

// Several engines may live in one process; each serves one calling thread at a time.
class Engine {
 public:
  // FailedPrecondition when the machine lacks the path asked for, InvalidArgument for a bad TEMPER_CPU.
  static Result<std::unique_ptr<Engine>> Create(const EngineOptions& options);
  // With kernel tables of the caller's, which outlive it (tests: scalar code, emulated tiles, tables with a fault built in).
  static std::unique_ptr<Engine> WithKernels(const cpu::Ops& bf16, const cpu::Ops& f32, int threads);
  ~Engine();

  CpuPath path() const { return path_; }
  Threads& threads() { return threads_; }
  // The kernels of a profile on this path (engine-internal: engine/cpu/ops.h).
  const cpu::Ops& ops(Profile profile) const { return profile == Profile::kBf16 ? *bf16_ : *f32_; }

 private:
  Engine(CpuPath path, const cpu::Ops* bf16, const cpu::Ops* f32, int threads);
  CpuPath path_;
  const cpu::Ops* bf16_;
  const cpu::Ops* f32_;
  Threads threads_;
};

// log(sum(exp(logits[0..vocab)))) in the one order used everywhere: tiles of 256, tile maximum, 16 lanes, tiles merged in
// order. `logits` are already multiplied by 1/T. logprob of a token = logits[token] - this; among the tokens that a truncating sampler
// kept, with their logits alone in order of their ids (engine/kept_set.h).
float RowLogSumExp(const Engine& engine, std::span<const float> logits);

}  // namespace temper::engine
