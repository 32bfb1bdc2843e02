// Kernels for AVX2 and FMA. Built with -mavx2 -mfma; called only where the machine has them.
#define TEMPER_ISA avx2
#define TEMPER_ISA_NAME "avx2"
#include "engine/cpu/kernels.h"

namespace temper::engine::cpu {

const Ops* Avx2Ops(bool bf16) { return bf16 ? &avx2::kBf16Ops : &avx2::kFp32Ops; }

}  // namespace temper::engine::cpu
