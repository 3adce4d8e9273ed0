// Somebody else's optimizer behind the seam of the kernels: a span whatever its dtypes, cut into
// slices, and each handed over as plain float32 values. A slice stays in cache while the optimizer
// passes over it again and again.
//
// Threads: as the callback allows; workers call it from several at a time.
//
//   const Foreign foreign = [](const UpdateSpan& slice) { ...float32 in and out... };
//   update_foreign(span, kernels(best_isa()), foreign);
#pragma once

#include <cstddef>
#include <functional>

#include "optimizers/rule.hpp"

namespace strata {

// Gets slices in float32: param is new_param, the gradient is scaled and is the callback's to
// overwrite, and there is no master. Moments are the span's own, or null. Throws std::exception
// where it cannot go on; its elements are then neither old nor new.
using Foreign = std::function<void(const UpdateSpan&)>;

// Elements of a slice. Libraries that share out work among threads leave so little to the caller's.
inline constexpr std::size_t kForeignSlice = std::size_t{1} << 14;

// REQUIRES: span.hyper->rule is Rule::foreign, span.moment_dtype float32, and foreign callable.
void update_foreign(const UpdateSpan& span, const Kernels& kernels, const Foreign& foreign);

}  // namespace strata
