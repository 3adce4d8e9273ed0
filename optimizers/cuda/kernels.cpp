#include "optimizers/cuda/kernels.hpp"

#include <array>
#include <cstddef>

#include "optimizers/tables.hpp"

namespace strata {

namespace {

int update_spans(const UpdateSpan* spans, std::size_t count, Stream) {
  const Kernels& best = kernels(best_isa());
  for (std::size_t i = 0; i < count; ++i) best.update(spans[i]);
  return 0;
}

int land_spans(const LandSpan* spans, std::size_t count, Stream) {
  const Kernels& best = kernels(best_isa());
  alignas(float) std::array<std::byte, kNormBlock * sizeof(float)> nowhere;
  for (const LandSpan* span = spans; span != spans + count; ++span) {
    check_landing(*span);
    for (std::size_t begin = 0; begin < span->count; begin += kNormBlock) {
      const std::size_t left = span->count - begin;
      std::byte* const to =
          span->to == nullptr ? nowhere.data()
                              : static_cast<std::byte*>(span->to) + begin * size_of(span->to_dtype);
      span->sums[begin / kNormBlock] = best.land_gradient(
          to, span->to_dtype,
          static_cast<const std::byte*>(span->from) + begin * size_of(span->from_dtype),
          span->from_dtype, left < kNormBlock ? left : kNormBlock, span->mode, span->of_older);
    }
  }
  return 0;
}

int decode_spans(const DecodeSpan* spans, std::size_t count, Stream) {
  const CodeKernels& best = code_kernels(best_isa());
  for (const DecodeSpan* span = spans; span != spans + count; ++span) {
    check_decoding(*span);
    best.dequantise(*span, span->page, span->to, span->to_dtype);
  }
  return 0;
}

const char* text_of(int) {
  return "no error";
}

}  // namespace

const DeviceKernels& host_device_kernels() {
  static constexpr DeviceKernels table{
      .update = update_spans, .land = land_spans, .decode = decode_spans, .text = text_of};
  return table;
}

double sum_in_order(const double* sums, std::size_t blocks) {
  double total = 0.0;
  for (std::size_t block = 0; block < blocks; ++block) total += sums[block];
  return total;
}

}  // namespace strata
