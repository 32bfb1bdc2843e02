// Kernels for machines with AMX tiles for bf16: the GEMM of profile bf16 on tiles, everything else as AVX-512. The profile
// f32 has no tile form and runs AVX-512.
#define TEMPER_ISA amx
#define TEMPER_ISA_NAME "amx"
#define TEMPER_AMX 1
#include "engine/cpu/kernels.h"

namespace temper::engine::cpu {

const Ops* AmxOps(bool bf16) { return bf16 ? &amx::kBf16Ops : &amx::kFp32Ops; }

}  // namespace temper::engine::cpu
