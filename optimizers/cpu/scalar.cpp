// The scalar kernels: for processors without wider ones, and what those are held against.
#include "optimizers/scalar.hpp"

#include "optimizers/codes/kernel.hpp"
#include "optimizers/landing.hpp"
#include "optimizers/tables.hpp"

namespace strata {

const Kernels& scalar_kernels() {
  static constexpr Kernels table = make_kernels<Vec1>();
  return table;
}

const CodeKernels& scalar_code_kernels() {
  static constexpr CodeKernels table = make_code_kernels<Vec1>();
  return table;
}

}  // namespace strata
