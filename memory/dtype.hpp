// Element types of parameters and gradients. Computation happens in these; the master copy and the
// optimizer's moments are float32 (bfloat16 + residual reconstructs float32 bit for bit).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace strata {

enum class Dtype : std::uint8_t { float32, float16, bfloat16 };

constexpr std::size_t size_of(Dtype dtype) {
  return dtype == Dtype::float32 ? 4 : 2;
}

// What rests beside a parameter of it: the lower half of its master, all of that, or nothing (the
// parameter is its own). See optimizers, Note [Split master].
constexpr std::size_t master_size(Dtype dtype) {
  return dtype == Dtype::bfloat16 ? 2 : dtype == Dtype::float16 ? 4 : 0;
}

inline constexpr std::array kDtypeNames = {"float32", "float16", "bfloat16"};

constexpr const char* name(Dtype dtype) {
  return kDtypeNames[static_cast<std::size_t>(dtype)];
}

}  // namespace strata
