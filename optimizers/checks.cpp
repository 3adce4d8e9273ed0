// What every kernel asks of its spans, on this processor or on a device.
#include "memory/check.hpp"
#include "optimizers/cuda/kernels.hpp"
#include "optimizers/tables.hpp"

namespace strata {

void check_update(const UpdateSpan& span) {
  STRATA_ASSERT(span.hyper != nullptr);
  STRATA_ASSERT(span.step >= 1 || !counts_as_step(*span.hyper));
  STRATA_ASSERT(span.grad_dtype == span.dtype || span.grad_dtype == Dtype::float32);
  if (span.count == 0) return;
  check_master(span.dtype, span.param, span.master);
  STRATA_ASSERT(span.master == nullptr || master_size(span.dtype) != 0);
  STRATA_ASSERT(span.new_param != nullptr);
  STRATA_ASSERT(span.grad != nullptr);
  const int moments = moment_count(span.hyper->rule, span.hyper->momentum);
  if (moments >= 1) check_moments(span.moment_dtype, span.moment1, span.scales1);
  if (moments >= 2) check_moments(span.moment_dtype, span.moment2, span.scales2);
  STRATA_ASSERT(span.moment_dtype == MomentDtype::float32 || span.first % kMomentBlock == 0);
}

void check_master(Dtype dtype, const void* param, const void* master) {
  STRATA_ASSERT(param != nullptr);
  STRATA_ASSERT(master != nullptr || master_size(dtype) == 0);
}

void check_moments(MomentDtype dtype, const void* moments, const std::uint16_t* scales) {
  STRATA_ASSERT(moments != nullptr);
  STRATA_ASSERT((scales != nullptr) == (dtype == MomentDtype::block8));
}

void check_landing(Dtype to_dtype, Dtype from_dtype, GradMode mode) {
  STRATA_ASSERT(to_dtype == from_dtype || to_dtype == Dtype::float32);
  STRATA_ASSERT(mode != GradMode::stay || to_dtype == from_dtype);
}

void check_pieces(Dtype to_dtype, std::span<const void* const> pieces, Dtype from_dtype,
                  GradMode mode, const GradScaling& of_older) {
  check_landing(to_dtype, from_dtype, mode);
  STRATA_ASSERT(!pieces.empty() || mode != GradMode::copy);
  STRATA_ASSERT(mode != GradMode::stay);
  STRATA_ASSERT(of_older.empty() || mode == GradMode::add);
}

void check_landing(const LandSpan& span) {
  check_landing(span.to_dtype, span.from_dtype, span.mode);
  STRATA_ASSERT((span.to == nullptr) == (span.mode == GradMode::stay));
  STRATA_ASSERT(span.of_older.empty() || span.mode == GradMode::add);
  STRATA_ASSERT(span.count == 0 || span.from != nullptr);
  STRATA_ASSERT(span.count == 0 || span.sums != nullptr);
}

void check_decoding(const DecodeSpan& span) {
  STRATA_ASSERT(span.page != nullptr);
  STRATA_ASSERT(span.to != nullptr);
  STRATA_ASSERT(span.form.codes <= Codes::nf4_double);
  STRATA_ASSERT(span.first % kCodeBlock == 0 && span.count % kCodeBlock == 0);
  const std::size_t room = packing_of(span.form.codes, span.page_bytes).elements;
  STRATA_ASSERT(span.first <= room && span.count <= room - span.first);
}

}  // namespace strata
