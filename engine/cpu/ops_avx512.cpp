// Kernels for AVX-512 (F, BW, DQ, VL). Built with those flags; called only where the machine has them.
#define TEMPER_ISA avx512
#define TEMPER_ISA_NAME "avx512"
#include "engine/cpu/kernels.h"

namespace temper::engine::cpu {

const Ops* Avx512Ops(bool bf16) { return bf16 ? &avx512::kBf16Ops : &avx512::kFp32Ops; }

}  // namespace temper::engine::cpu
