// GradientPiece: what one rank adds to a part of a gradient, where its owner reads it: in an
// outbox, or in memory of its own.
//
// Threads: values.
//
//   GradientPiece piece{.rank = 2, .key = key, .bytes = bytes, .dtype = dtype};
//   piece.keep(bytes);                        // its place in the outbox is free again
//   double squares = add_pieces(kernels, sum, pieces, 0, count, GradMode::copy);
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "engine/ranks/progress.hpp"
#include "optimizers/rule.hpp"

namespace strata {

struct GradientPiece {
  std::uint32_t rank = 0;  // whose outbox it lies in
  GradientKey key = 0;
  const std::byte* bytes = nullptr;
  Dtype dtype = Dtype::bfloat16;
  bool lies_here = false;                  // in the outbox of this rank
  std::shared_ptr<std::byte[]> kept = {};  // a copy, where it lies in no outbox

  void keep(std::size_t size) {
    kept = std::make_shared_for_overwrite<std::byte[]>(size);
    std::memcpy(kept.get(), bytes, size);
    bytes = kept.get();
  }
};

// Adds elements [first, first + count) of the pieces, one after another, to float32 sums, as `mode`
// says of the first. Neighbours of one dtype are added in one pass. Allocates
// nothing, for a thread of a crew must not throw.
// Returns the squares of the sums. REQUIRES: there are pieces.
inline double add_pieces(const Kernels& kernels, void* to, std::span<const GradientPiece> pieces,
                         std::size_t first, std::size_t count, GradMode mode) {
  double squares = 0.0;
  std::array<const void*, 16> from;
  for (auto next = pieces.begin(); next != pieces.end(); mode = GradMode::add) {
    const Dtype dtype = next->dtype;
    std::size_t found = 0;
    for (; next != pieces.end() && next->dtype == dtype && found < from.size(); ++next) {
      from[found++] = next->bytes + first * size_of(dtype);
    }
    const std::span<const void* const> these(from.data(), found);
    squares = kernels.land_pieces(to, Dtype::float32, these, dtype, count, mode, {});
  }
  return squares;
}

}  // namespace strata
