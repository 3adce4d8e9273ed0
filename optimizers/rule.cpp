#include "optimizers/rule.hpp"

#include <algorithm>

#include "memory/check.hpp"
#include "optimizers/tables.hpp"

namespace strata {
namespace {

const void* ahead(const void* from, std::size_t bytes) {
  return from == nullptr ? nullptr : static_cast<const std::byte*>(from) + bytes;
}
void* ahead(void* from, std::size_t bytes) {
  return from == nullptr ? nullptr : static_cast<std::byte*>(from) + bytes;
}

}  // namespace

UpdateSpan slice_of(const UpdateSpan& span, std::size_t at, std::size_t count) {
  STRATA_ASSERT(at < span.count);
  UpdateSpan slice = span;
  slice.count = std::min(count, span.count - at);
  slice.first = span.first + at;
  slice.param = ahead(span.param, at * size_of(span.dtype));
  slice.new_param = ahead(span.new_param, at * size_of(span.dtype));
  slice.master = ahead(span.master, at * master_size(span.dtype));
  slice.moment1 = ahead(span.moment1, at * size_of(span.moment_dtype));
  slice.moment2 = ahead(span.moment2, at * size_of(span.moment_dtype));
  const std::size_t block = at / kMomentBlock;
  if (span.scales1 != nullptr) slice.scales1 = span.scales1 + block;
  if (span.scales2 != nullptr) slice.scales2 = span.scales2 + block;
  slice.grad = ahead(span.grad, at * size_of(span.grad_dtype));
  return slice;
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
