// Values on their way to another machine, as int8 codes: a byte for each, and a float32 for each
// block of 64. About half of the bytes of 16-bit values, and a quarter of those of float32.
//
//   std::span<std::byte> codes = ...sent_bytes(count)...      // begins at a multiple of 64 bytes
//   encode_values(kernels, values, Dtype::bfloat16, codes);
//   decode_values(kernels, codes, Dtype::bfloat16, values);   // at the other end
//
// Threads: pure functions of the memory they are given.
//
// Note [What codes lose]
// A value comes back as the nearest of 255 steps between the block's largest magnitude and its
// negative, rounded to the dtype: at most magnitude / 254 away from what it was, and half a unit in
// the last place of the dtype. A block with an infinity, a NaN or a magnitude above 1e36, whose
// products have no float32, comes back as NaNs: nothing that is not a number passes unseen. One
// whose magnitudes are all below 1e-36, of which no quotient has a float32, comes back as zeros.
#pragma once

#include <cstddef>
#include <span>

#include "memory/dtype.hpp"
#include "optimizers/codes/codes.hpp"

namespace strata {

// What so many values take. The last block may be a part of one.
constexpr std::size_t sent_bytes(std::size_t count) {
  return packing_for(Codes::int8, round_up(count, kCodeBlock)).bytes;
}

// REQUIRES of both: values are aligned as their dtype is, and there is at least one; of codes there
// are sent_bytes(), which begin at a multiple of kPartAlignment.
void encode_values(const CodeKernels& kernels, std::span<const std::byte> values, Dtype dtype,
                   std::span<std::byte> codes);
void decode_values(const CodeKernels& kernels, std::span<const std::byte> codes, Dtype dtype,
                   std::span<std::byte> values);

}  // namespace strata
