// Asks the processor itself: __builtin_cpu_supports() reads what a compiler's run-time library
// fills in, and that of Zig fills in nothing.
#include "optimizers/rule.hpp"

#if defined(STRATA_X86_KERNELS)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace strata {

#if defined(STRATA_X86_KERNELS)
namespace {

constexpr unsigned kAvx2Bits = bit_AVX2;
constexpr unsigned kAvx512Bits = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
// Registers that the system saves when it changes threads, as bits of XCR0.
constexpr unsigned long long kYmm = 0b0000'0110;
constexpr unsigned long long kZmm = 0b1110'0110;

constexpr bool has(unsigned long long found, unsigned long long bits) {
  return (found & bits) == bits;
}

__attribute__((target("xsave"))) unsigned long long saved_registers() {
  return _xgetbv(0);
}

Isa detect_isa() {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  // A hypervisor can mask each of them by itself.
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return Isa::scalar;
  if (!has(ecx, bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C)) return Isa::scalar;
  const unsigned long long saved = saved_registers();
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return Isa::scalar;
  if (!has(ebx, kAvx2Bits) || !has(saved, kYmm)) return Isa::scalar;
  return has(ebx, kAvx512Bits) && has(saved, kZmm) ? Isa::avx512 : Isa::avx2;
}

}  // namespace

Isa best_isa() {
  static const Isa best = detect_isa();  // a virtual machine takes microseconds to answer
  return best;
}
#else
Isa best_isa() {
  return Isa::scalar;
}
#endif

}  // namespace strata
