// Which kernels a profile really runs on, for reports.
#pragma once

#include "engine/engine.h"
#include "engine/weights.h"

namespace temper::engine {

// f32 has no kernels for AMX and takes those of AVX-512.
inline CpuPath KernelPath(const Engine& engine, Profile profile) {
  return engine.path() == CpuPath::kAmx && profile == Profile::kF32 ? CpuPath::kAvx512 : engine.path();
}

}  // namespace temper::engine
