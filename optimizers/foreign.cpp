#include "optimizers/foreign.hpp"

#include <algorithm>
#include <vector>

#include "memory/check.hpp"

namespace strata {

void update_foreign(const UpdateSpan& span, const Kernels& kernels, const Foreign& foreign) {
  STRATA_ASSERT(span.hyper != nullptr);
  STRATA_ASSERT(span.hyper->rule == Rule::foreign);
  STRATA_ASSERT(span.moment_dtype == MomentDtype::float32);
  STRATA_ASSERT(span.step >= 1);
  STRATA_ASSERT(foreign != nullptr);
  const std::size_t most = std::min(span.count, kForeignSlice);
  std::vector<float> param(most);
  std::vector<float> grad(most);
  for (std::size_t at = 0; at < span.count; at += kForeignSlice) {
    UpdateSpan slice = slice_of(span, at, kForeignSlice);
    const UpdateSpan stored = slice;
    // 1. Everything as float32.
    kernels.join(stored.param, stored.master, slice.count, span.dtype, param.data());
    kernels.read_gradient(stored.grad, span.grad_dtype, span.scaling, slice.count, grad.data());
    if (span.grad_scale != 1.0f) {
      for (std::size_t i = 0; i < slice.count; ++i) grad[i] *= span.grad_scale;
    }
    // 2. Somebody else's step.
    slice.dtype = Dtype::float32;
    slice.grad_dtype = Dtype::float32;
    slice.grad_scale = 1.0f;
    slice.scaling = {};
    slice.param = param.data();
    slice.new_param = param.data();
    slice.master = nullptr;
    slice.grad = grad.data();
    foreign(slice);
    // 3. Back into the stored form.
    kernels.split(param.data(), slice.count, span.dtype, stored.new_param, stored.master);
  }
}

}  // namespace strata
