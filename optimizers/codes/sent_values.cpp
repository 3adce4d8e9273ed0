#include "optimizers/codes/sent_values.hpp"

#include <array>
#include <cstdint>
#include <cstring>
#include <limits>

#include "memory/check.hpp"

namespace strata {
namespace {

// See Note [What codes lose].
constexpr float kMagnitudeMin = 1e-36f;
constexpr float kMagnitudeMax = 1e36f;

// A block of values of any dtype.
struct alignas(kPartAlignment) Block {
  std::array<std::byte, kCodeBlock * sizeof(float)> bytes{};
};

CodeSpan span_of(Dtype dtype, std::size_t page_bytes, std::size_t first, std::size_t count) {
  return {.form = {.codes = Codes::int8, .dtype = dtype},
          .page_bytes = page_bytes,
          .first = first,
          .count = count};
}

// Codes and scales of values that are whole blocks, the first of them number `first`.
void encode_blocks(const CodeKernels& kernels, const std::byte* from, Dtype dtype,
                   std::size_t first, std::size_t count, std::span<std::byte> codes) {
  // 1. Magnitudes, where their scales are.
  const PageParts parts = parts_of(Codes::int8, codes.data(), codes.size());
  float* const scales = parts.scales + first / kCodeBlock;
  kernels.absmax(from, dtype, count, scales);
  const std::size_t blocks = count / kCodeBlock;
  for (std::size_t i = 0; i < blocks; ++i) {
    if (scales[i] < kMagnitudeMin) scales[i] = 0.0f;
    if (!(scales[i] <= kMagnitudeMax)) scales[i] = std::numeric_limits<float>::quiet_NaN();
  }
  // 2. Codes, of all blocks that have a scale.
  for (std::size_t at = 0; at < count;) {
    const std::size_t fine =
        kCodeBlock *
        first_bad_scale(span_of(dtype, codes.size(), first + at, count - at), codes.data());
    if (fine != 0) {
      kernels.quantise(span_of(dtype, codes.size(), first + at, fine), from + at * size_of(dtype),
                       dtype, scales + at / kCodeBlock, 0.0f, codes.data());
    }
    at += fine;
    if (at == count) break;
    std::memset(parts.codes + first + at, 0, kCodeBlock);
    at += kCodeBlock;
  }
}

void fill_with_nan(std::byte* to, Dtype dtype) {
  const std::uint32_t nan = dtype == Dtype::float32    ? 0x7fc00000
                            : dtype == Dtype::bfloat16 ? 0x7fc0
                                                       : 0x7e00;
  for (std::size_t i = 0; i < kCodeBlock; ++i) {
    std::memcpy(to + i * size_of(dtype), &nan, size_of(dtype));  // its lower bytes come first
  }
}

// Values that are whole blocks.
void decode_blocks(const CodeKernels& kernels, std::span<const std::byte> codes, Dtype dtype,
                   std::size_t first, std::size_t count, std::byte* to) {
  for (std::size_t at = 0; at < count;) {
    const std::size_t fine =
        kCodeBlock *
        first_bad_scale(span_of(dtype, codes.size(), first + at, count - at), codes.data());
    if (fine != 0) {
      kernels.dequantise(span_of(dtype, codes.size(), first + at, fine), codes.data(),
                         to + at * size_of(dtype), dtype);
    }
    at += fine;
    if (at == count) break;
    fill_with_nan(to + at * size_of(dtype), dtype);
    at += kCodeBlock;
  }
}

}  // namespace

void encode_values(const CodeKernels& kernels, std::span<const std::byte> values, Dtype dtype,
                   std::span<std::byte> codes) {
  const std::size_t count = values.size() / size_of(dtype);
  STRATA_ASSERT(count > 0 && values.size() % size_of(dtype) == 0);
  STRATA_ASSERT(codes.size() == sent_bytes(count));
  const std::size_t whole = count - count % kCodeBlock;
  encode_blocks(kernels, values.data(), dtype, 0, whole, codes);
  if (whole == count) return;
  Block last;  // zeros behind what there is
  std::memcpy(last.bytes.data(), values.data() + whole * size_of(dtype),
              (count - whole) * size_of(dtype));
  encode_blocks(kernels, last.bytes.data(), dtype, whole, kCodeBlock, codes);
}

void decode_values(const CodeKernels& kernels, std::span<const std::byte> codes, Dtype dtype,
                   std::span<std::byte> values) {
  const std::size_t count = values.size() / size_of(dtype);
  STRATA_ASSERT(count > 0 && values.size() % size_of(dtype) == 0);
  STRATA_ASSERT(codes.size() == sent_bytes(count));
  const std::size_t whole = count - count % kCodeBlock;
  decode_blocks(kernels, codes, dtype, 0, whole, values.data());
  if (whole == count) return;
  Block last;
  decode_blocks(kernels, codes, dtype, whole, kCodeBlock, last.bytes.data());
  std::memcpy(values.data() + whole * size_of(dtype), last.bytes.data(),
              (count - whole) * size_of(dtype));
}

}  // namespace strata
