// The instruction sets of this processor that kernels are compiled for.
#pragma once

#include <vector>

#include "optimizers/rule.hpp"

namespace strata {

inline std::vector<Isa> isas() {
  std::vector<Isa> all = {Isa::scalar};
  if (best_isa() >= Isa::avx2) all.push_back(Isa::avx2);
  if (best_isa() >= Isa::avx512) all.push_back(Isa::avx512);
  return all;
}

}  // namespace strata
