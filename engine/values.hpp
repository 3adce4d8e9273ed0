// What callers and a session hand to each other: who visits, what is saved, and values of
// parameters.
//
// Threads: values.
//
//   session.read(param, Kind::moment1, 0, values, count);
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "memory/dtype.hpp"

namespace strata {

// Who has units entered: a number of the caller's, new for every visit.
using Visit = std::uint64_t;

// A tensor that was set aside (swapping.hpp).
enum class SaveId : std::uint32_t {};

// What a parameter has an element of.
enum class Kind : std::uint8_t { master, moment1, moment2, grad };
inline constexpr std::array kKindNames = {"master", "moment1", "moment2", "grad"};
constexpr const char* name(Kind kind) {
  return kKindNames[static_cast<std::size_t>(kind)];
}

// A tensor that is to be stored as codes.
struct PlainValues {
  const void* values = nullptr;
  Dtype dtype = Dtype::bfloat16;
  std::size_t row_elements = 0;      // of its last dimension; of one without rows, all
  std::optional<float> offset = {};  // of nf4-double; none: the mean, summed in double
};

// Codes and scales of elements of a parameter, in order: see form.hpp, Note [A page of codes].
// `Byte`: const where they are written.
template <class Byte>
struct Stored {
  std::span<Byte> codes;   // code_bytes(): says how many elements there are
  std::span<Byte> scales;  // scale_bytes()
  std::span<Byte> groups;  // of nf4-double: a ScaleGroup for every 256 blocks, the last for fewer
};

}  // namespace strata
