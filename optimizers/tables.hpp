// The table of each instruction set, every one made in a file of its own that is compiled for it,
// and what all of them check first.
//
// Threads: pure functions.
//
//   check_update(span);
#pragma once

#include <span>

#include "optimizers/rule.hpp"

namespace strata {

// REQUIRES, stated as assertions: every pointer that the rule and the dtypes need is there.
void check_update(const UpdateSpan& span);
void check_landing(Dtype to_dtype, Dtype from_dtype, GradMode mode);
void check_pieces(Dtype to_dtype, std::span<const void* const> pieces, Dtype from_dtype,
                  GradMode mode, const GradScaling& of_older);
void check_master(Dtype dtype, const void* param, const void* master);
void check_moments(MomentDtype dtype, const void* moments, const std::uint16_t* scales);

const Kernels& scalar_kernels();
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();

}  // namespace strata
