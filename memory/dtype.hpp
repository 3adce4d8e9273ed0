// Element types of parameters and gradients. Computation happens in these; the master copy and the
// optimizer's moments are float32 (bfloat16 + residual reconstructs float32 bit for bit).
#pragma once

#include <cstddef>
#include <cstdint>

namespace strata {

enum class Dtype : std::uint8_t { float32, float16, bfloat16 };

constexpr std::size_t size_of(Dtype dtype) {
  return dtype == Dtype::float32 ? 4 : 2;
}

constexpr const char* name(Dtype dtype) {
  switch (dtype) {
    case Dtype::float32:
      return "float32";
    case Dtype::float16:
      return "float16";
    case Dtype::bfloat16:
      return "bfloat16";
  }
  return "?";
}

}  // namespace strata
