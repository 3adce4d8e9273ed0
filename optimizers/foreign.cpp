#include "optimizers/foreign.hpp"

#include <algorithm>
#include <vector>

#include "memory/check.hpp"

namespace strata {

namespace {

const void* ahead(const void* from, std::size_t bytes) {
  return from == nullptr ? nullptr : static_cast<const std::byte*>(from) + bytes;
}
void* ahead(void* from, std::size_t bytes) {
  return from == nullptr ? nullptr : static_cast<std::byte*>(from) + bytes;
}

}  // namespace

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
    UpdateSpan slice = span;
    slice.count = std::min(kForeignSlice, span.count - at);
    slice.first = span.first + at;
    const void* const stored = ahead(span.param, at * size_of(span.dtype));
    void* const master = ahead(span.master, at * master_size(span.dtype));
    // 1. Everything as float32.
    kernels.join(stored, master, slice.count, span.dtype, param.data());
    kernels.land_gradient(grad.data(), Dtype::float32,
                          ahead(span.grad, at * size_of(span.grad_dtype)), span.grad_dtype,
                          slice.count, GradMode::copy);
    if (span.grad_scale != 1.0f) {
      for (std::size_t i = 0; i < slice.count; ++i) grad[i] *= span.grad_scale;
    }
    // 2. Somebody else's step.
    slice.dtype = Dtype::float32;
    slice.grad_dtype = Dtype::float32;
    slice.grad_scale = 1.0f;
    slice.param = param.data();
    slice.new_param = param.data();
    slice.master = nullptr;
    slice.grad = grad.data();
    slice.moment1 = ahead(span.moment1, at * sizeof(float));
    slice.moment2 = ahead(span.moment2, at * sizeof(float));
    foreign(slice);
    // 3. Back into the stored form.
    kernels.split(param.data(), slice.count, span.dtype,
                  ahead(span.new_param, at * size_of(span.dtype)), master);
  }
}

}  // namespace strata
