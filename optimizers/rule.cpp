#include "optimizers/rule.hpp"

#include "memory/check.hpp"
#include "optimizers/tables.hpp"

namespace strata {

Isa best_isa() {
#if defined(STRATA_X86_KERNELS)
  // F16C came with AVX, before AVX2; FMA can be masked separately by a hypervisor.
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Isa::scalar;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return avx512 ? Isa::avx512 : Isa::avx2;
#else
  return Isa::scalar;
#endif
}

const Kernels& kernels(Isa isa) {
  STRATA_ASSERT(isa <= best_isa());
#if defined(STRATA_X86_KERNELS)
  if (isa == Isa::avx512) return avx512_kernels();
  if (isa == Isa::avx2) return avx2_kernels();
#endif
  return scalar_kernels();
}

}  // namespace strata
