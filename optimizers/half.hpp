// float16 to float32 and back in integer arithmetic, for processors without an instruction for it.
// Gives the same bits as F16C: round to nearest even, NaNs made quiet with the payload that fits.
//
// Threads: pure functions.
//
//   const std::uint16_t half = float16_bits(0.1f);        // 0x2e66
//   const float back = float_of_float16(half);
#pragma once

#include <bit>
#include <cstdint>

namespace strata {

constexpr std::uint16_t float16_bits(float value) {
  constexpr std::uint32_t kInfinity = 0x7f800000;
  constexpr std::uint32_t kOverflow = 0x477ff000;       // 65520: rounds to infinity
  constexpr std::uint32_t kNormalMin = 0x38800000;      // 2^-14
  constexpr std::uint32_t kExponentShift = 112u << 23;  // the difference of the two biases

  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000;
  const std::uint32_t magnitude = bits & 0x7fffffff;
  std::uint32_t half = 0;
  if (magnitude > kInfinity) {
    half = 0x7e00 | ((magnitude >> 13) & 0x3ff);
  } else if (magnitude >= kOverflow) {
    half = 0x7c00;
  } else if (magnitude >= kNormalMin) {
    const std::uint32_t odd = (magnitude >> 13) & 1;
    half = (magnitude - kExponentShift + 0xfff + odd) >> 13;
  } else {
    // A subnormal is a multiple of 2^-24, which is what the last bit of 0.5 is worth: the addition
    // rounds, and its mantissa is the result.
    half = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000;
  }
  return static_cast<std::uint16_t>(sign | half);
}

constexpr float float_of_float16(std::uint16_t half) {
  const std::uint32_t sign = (half & 0x8000u) << 16;
  const std::uint32_t exponent = (half >> 10) & 0x1f;
  const std::uint32_t mantissa = half & 0x3ffu;
  // Chosen, not branched to: a GPU then has the loads of many elements under way.
  const auto subnormal = std::bit_cast<std::uint32_t>(static_cast<float>(mantissa) * 0x1p-24f);
  const std::uint32_t quiet = mantissa != 0 ? 0x400000u : 0u;
  const std::uint32_t normal = ((exponent + 112) << 23) | (mantissa << 13);
  const std::uint32_t special = 0x7f800000u | quiet | (mantissa << 13);
  const std::uint32_t large = exponent == 0x1f ? special : normal;
  return std::bit_cast<float>(sign | (exponent == 0 ? subnormal : large));
}

}  // namespace strata
