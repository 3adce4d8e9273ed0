// What a landing is held against, written the slow way: values that rest in any dtype, what they
// are rounded to, and their norm.
//
//   const std::vector<float> values = as_floats(from.data(), Dtype::bfloat16, count);
//   EXPECT_EQ(sum, norm_in_order(values));
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "optimizers/half.hpp"
#include "optimizers/rule.hpp"

namespace strata {

inline std::vector<float> as_floats(const std::byte* from, Dtype dtype, std::size_t count) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) {
    std::uint16_t half = 0;
    if (dtype == Dtype::float32) {
      std::memcpy(&values[i], from + i * 4, 4);
      continue;
    }
    std::memcpy(&half, from + i * 2, 2);
    values[i] = dtype == Dtype::float16 ? float_of_float16(half)
                                        : std::bit_cast<float>(std::uint32_t{half} << 16);
  }
  return values;
}

// To the nearest number of `dtype`, ties to even, found without the kernels' bit tricks.
inline float rounded(float value, Dtype dtype) {
  if (dtype == Dtype::float32 || !std::isfinite(value) || value == 0.0f) return value;
  const bool half = dtype == Dtype::float16;
  const int exponent = std::max(std::ilogb(value), half ? -14 : -126);
  const double last = std::ldexp(1.0, exponent - (half ? 10 : 7));
  const double nearest = std::nearbyint(value / last) * last;
  const bool fits = std::fabs(nearest) < (half ? 0x1p16 : 0x1p128);
  const float result = fits ? static_cast<float>(nearest) : std::numeric_limits<float>::infinity();
  return std::copysign(result, value);
}

// The order that Note [Order of the norm] promises, written the slow way.
inline double norm_in_order(const std::vector<float>& values) {
  double total = 0.0;
  for (std::size_t begin = 0; begin < values.size(); begin += kNormBlock) {
    double lanes[16] = {};
    const std::size_t end = std::min(values.size(), begin + kNormBlock);
    for (std::size_t i = begin; i < end; ++i) {
      const double value = values[i];
      lanes[(i - begin) % 16] += value * value;
    }
    for (std::size_t half = 8; half > 0; half /= 2) {
      for (std::size_t j = 0; j < half; ++j) lanes[j] += lanes[j + half];
    }
    total += lanes[0];
  }
  return total;
}

}  // namespace strata
