// How gradients land: copied or added to where they rest, one or the pieces of several ranks, with
// the sum of squares of what is there afterwards taken in passing, so that clipping by norm needs
// no pass of its own. With it the kernels of an instruction set are complete.
//
// Threads: pure functions of the memory they are given.
//
//   const Kernels& avx2_kernels() {
//     static constexpr Kernels table = make_kernels<Vec8>();
//     return table;
//   }
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "optimizers/cpu/kernel.hpp"
#include "optimizers/device_code.hpp"
#include "optimizers/masters.hpp"
#include "optimizers/moments.hpp"
#include "optimizers/rule.hpp"
#include "optimizers/tables.hpp"

namespace strata {

// Note [Order of the norm]
// Sums of squares are sums of doubles, whose order matters. A span is cut into blocks of kNormBlock
// elements from its start; in a block, element i goes to lane i % 16, and the lanes are added as a
// tree: j and j + 8, then j and j + 4, j + 2, j + 1. Blocks are added in order. No order depends on
// the instruction set: a vector of 16 lanes is one row, of 8 half a row, a scalar one lane. The
// square of a float32 is exact in double, so fusing it with the addition changes nothing. The
// sums of several spans are added exactly (exact_sum.hpp), so their order does not matter.
inline constexpr std::size_t kNormLanes = 16;
static_assert(kNormBlock % kNormLanes == 0, "only the last block of a span has a ragged row");

// Adds the lanes of a block as Note [Order of the norm] says, in place.
template <class V>
STRATA_DEVICE_CODE double sum_of_lanes(double* lanes) {
  for (std::size_t half = kNormLanes / 2; half > 0; half /= 2) {
    for (std::size_t j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  }
  return lanes[0];
}

// Note [One rounding]
// The pieces of several ranks are added in float32, one by one in the order of the ranks, in a
// register, and the sum is rounded to the destination's dtype once: bytes are read and written
// once, and a sum in bfloat16 loses nothing on the way. Where pieces are copied, the first is what
// the others are added to: an addition whose older values lie elsewhere. A sum that is not a number
// is the one quiet NaN, whichever addition made it, so pieces that land in float32 one by one leave
// the same bits. A single piece lands as a gradient does, whose count is known to the compiler.

// `Older`: how what is added to is read. `From`: what lands, or what is added one after another.
template <class V, Dtype kTo, Dtype kFrom, GradMode kMode, class Older = Gradient<V, kTo>,
          class From = Gradient<V, kFrom>>
struct Landing {
  using F = typename V::F;
  static constexpr bool kAdds = kMode == GradMode::add;
  static constexpr std::size_t kVectors = kNormLanes / V::kLanes;
  static constexpr std::size_t kPrefetched = 32;  // elements, at a time
  static constexpr std::size_t kAhead = 1024;

  void* to;
  From from;
  Older older;

  double run(std::size_t count) const {
    double total = 0.0;
    for (std::size_t begin = 0; begin < count; begin += kNormBlock) {
      const std::size_t left = count - begin;
      total += land_block(begin, begin + (left < kNormBlock ? left : kNormBlock));
    }
    return total;
  }

  double land_block(std::size_t begin, std::size_t end) const {
    typename V::Sums sums[kVectors] = {};
    std::size_t at = begin;
    while (at + kNormLanes <= end) {
      if (at % kPrefetched == 0) from.template prefetch<kPrefetched>(at + kAhead);
      for (std::size_t k = 0; k < kVectors; ++k, at += V::kLanes) {
        V::add_squares(sums[k], land_lanes(at, typename V::All{}));
      }
    }
    for_each_vector<V>(end - at, [&](std::size_t past, auto lanes) {
      V::add_squares(sums[past / V::kLanes], land_lanes(at + past, lanes));
    });
    double lanes[kNormLanes];
    for (std::size_t k = 0; k < kVectors; ++k) V::store(lanes + k * V::kLanes, sums[k]);
    return sum_of_lanes<V>(lanes);
  }

  // Lands some elements and returns what the destination then holds.
  template <class Lanes>
  F land_lanes(std::size_t at, Lanes lanes) const {
    const F value = read(at, lanes);
    write(at, value, lanes);
    return value;
  }

  // What a sum is where it lands.
  STRATA_DEVICE_CODE static F rounded(F sum) { return rounded_to<V, kTo>(V::one_nan(sum)); }

  // The two halves of it: what the destination is to hold, and that it does. A GPU has a first half
  // of its own, in which all loads come first.
  template <class Lanes>
  F read(std::size_t at, Lanes lanes) const {
    if constexpr (kAdds) {
      return rounded(from.added_to(older.load(at, lanes), at, lanes));
    } else {
      return from.load(at, lanes);
    }
  }
  template <class Lanes>
  STRATA_DEVICE_CODE void write(std::size_t at, F value, Lanes lanes) const {
    if constexpr (kMode == GradMode::stay) {
      return;
    } else if constexpr (kTo == Dtype::float32) {
      V::store(static_cast<float*>(to) + at, value, lanes);
    } else if constexpr (kAdds) {
      auto* const halves = static_cast<std::uint16_t*>(to) + at;
      if constexpr (kTo == Dtype::float16) {
        V::store(halves, V::to_float16(value), lanes);
      } else {
        V::store(halves, V::narrow(V::template down<16>(V::bits(value))), lanes);
      }
    } else {
      const auto* const halves = static_cast<const std::uint16_t*>(from.from) + at;
      V::store(static_cast<std::uint16_t*>(to) + at, V::load(halves, lanes), lanes);
    }
  }
};

template <class V, Dtype kTo, Dtype kFrom, class From>
double land_added(void* to, From from, std::size_t count, const GradScaling& of_older) {
  constexpr GradMode kAdd = GradMode::add;
  if (of_older.empty()) {
    return Landing<V, kTo, kFrom, kAdd, Gradient<V, kTo>, From>{to, from, {to}}.run(count);
  }
  using Older = ScaledGradient<V, kTo>;
  return Landing<V, kTo, kFrom, kAdd, Older, From>{to, from, {{to}, of_older}}.run(count);
}

template <class V>
double land_gradient(void* to, Dtype to_dtype, const void* from, Dtype from_dtype,
                     std::size_t count, GradMode mode, const GradScaling& of_older) {
  check_landing(to_dtype, from_dtype, mode);
  return with_dtype(from_dtype, [&]<Dtype kFrom>() {
    using From = Gradient<V, kFrom>;
    const auto land = [&]<Dtype kTo>() {
      if (mode == GradMode::add) {
        return land_added<V, kTo, kFrom, From>(to, {from}, count, of_older);
      }
      return Landing<V, kTo, kFrom, GradMode::copy>{to, {from}, {to}}.run(count);
    };
    if (mode == GradMode::stay) {
      return Landing<V, kFrom, kFrom, GradMode::stay>{to, {from}, {to}}.run(count);
    }
    if (to_dtype == kFrom) return land.template operator()<kFrom>();
    return land.template operator()<Dtype::float32>();
  });
}

// See Note [One rounding].
template <class V>
double land_pieces(void* to, Dtype to_dtype, std::span<const void* const> pieces, Dtype from_dtype,
                   std::size_t count, GradMode mode, const GradScaling& of_older) {
  check_pieces(to_dtype, pieces, from_dtype, mode, of_older);
  if (pieces.size() == 1) {
    return land_gradient<V>(to, to_dtype, pieces[0], from_dtype, count, mode, of_older);
  }
  return with_dtype(from_dtype, [&]<Dtype kFrom>() {
    using Piece = Gradient<V, kFrom>;
    using Pieces = GradientPieces<V, kFrom>;
    const auto land = [&]<Dtype kTo>() {
      if (mode == GradMode::add) {
        return land_added<V, kTo, kFrom, Pieces>(to, {pieces}, count, of_older);
      }
      using Added = Landing<V, kTo, kFrom, GradMode::add, Piece, Pieces>;
      return Added{to, {pieces.subspan(1)}, {pieces[0]}}.run(count);
    };
    if (to_dtype == kFrom) return land.template operator()<kFrom>();
    return land.template operator()<Dtype::float32>();
  });
}

template <class V>
constexpr Kernels make_kernels() {
  return {.update = update<V>,
          .land_gradient = land_gradient<V>,
          .land_pieces = land_pieces<V>,
          .read_gradient = read_gradient<V>,
          .split = split<V>,
          .join = join<V>,
          .load_moments = load_moments<V>,
          .store_moments = store_moments<V>};
}

}  // namespace strata
