#include "engine/engine.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cpuid.h>
#include <cstdlib>

#include <fmt/format.h>

#include "engine/cpu/ops.h"

namespace temper::engine {
namespace {

// Asks the kernel once for the use of tile registers; must happen before threads that use them start.
bool EnableAmx() {
  static const bool ok = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
    if ((d & (kAmxBf16 | kAmxTile)) != (kAmxBf16 | kAmxTile)) return false;
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return ok;
}

int UsableCores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set)) return 1;
  return std::max(1, CPU_COUNT(&set));
}

const cpu::Ops* OpsOf(CpuPath path, bool bf16) {
  switch (path) {
    case CpuPath::kAmx: return cpu::AmxOps(bf16);
    case CpuPath::kAvx512: return cpu::Avx512Ops(bf16);
    default: return cpu::Avx2Ops(bf16);
  }
}

}  // namespace

const char* CpuPathName(CpuPath path) {
  switch (path) {
    case CpuPath::kAuto: return "auto";
    case CpuPath::kAvx2: return "avx2";
    case CpuPath::kAvx512: return "avx512";
    case CpuPath::kAmx: return "amx";
  }
  return "?";
}

Result<CpuPath> ParseCpuPath(const std::string& name) {
  for (CpuPath path : {CpuPath::kAuto, CpuPath::kAvx2, CpuPath::kAvx512, CpuPath::kAmx}) {
    if (name == CpuPathName(path)) return path;
  }
  return InvalidArgument(fmt::format("cpu '{}' is not one of auto, avx2, avx512, amx", name));
}

std::vector<CpuPath> AvailableCpuPaths() {
  std::vector<CpuPath> out;
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return out;
  out.push_back(CpuPath::kAvx2);
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512dq") ||
      !__builtin_cpu_supports("avx512vl")) {
    return out;
  }
  out.push_back(CpuPath::kAvx512);
  if (EnableAmx()) out.push_back(CpuPath::kAmx);
  return out;
}

Result<std::unique_ptr<Engine>> Engine::Create(const EngineOptions& options) {
  CpuPath path = options.cpu;
  if (path == CpuPath::kAuto) {
    if (const char* name = std::getenv("TEMPER_CPU"); name && *name) {
      auto parsed = ParseCpuPath(name);
      if (!parsed.ok()) return parsed.status().WithContext("environment TEMPER_CPU");
      path = *parsed;
    }
  }
  const std::vector<CpuPath> available = AvailableCpuPaths();
  if (available.empty()) return FailedPrecondition("this machine has neither AVX2 with FMA nor AVX-512");
  if (path == CpuPath::kAuto) path = available.back();
  if (std::find(available.begin(), available.end(), path) == available.end()) {
    return FailedPrecondition(fmt::format("this machine cannot run cpu path {}; its fastest is {}", CpuPathName(path),
                                          CpuPathName(available.back())));
  }
  if (options.threads < 0 || options.threads > 1024) {
    return InvalidArgument(fmt::format("threads {} is outside 0 … 1024", options.threads));
  }
  const int threads = options.threads ? options.threads : UsableCores();
  return std::unique_ptr<Engine>(new Engine(path, OpsOf(path, true), OpsOf(path, false), threads));
}

std::unique_ptr<Engine> Engine::WithKernels(const cpu::Ops& bf16, const cpu::Ops& f32, int threads) {
  return std::unique_ptr<Engine>(new Engine(CpuPath::kAuto, &bf16, &f32, threads));
}

Engine::Engine(CpuPath path, const cpu::Ops* bf16, const cpu::Ops* f32, int threads)
    : path_(path), bf16_(bf16), f32_(f32), threads_(threads) {}

Engine::~Engine() = default;

float RowLogSumExp(const Engine& engine, std::span<const float> logits) {
  FlushDenormals mode;
  return engine.ops(Profile::kF32).log_sum_exp(logits.data(), static_cast<int>(logits.size()));
}

}  // namespace temper::engine
