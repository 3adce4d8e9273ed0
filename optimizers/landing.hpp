// How gradients land: copied or added to where they rest, with the sum of squares of what is there
// afterwards taken in passing, so that clipping by norm needs no pass of its own. With it the
// kernels of an instruction set are complete.
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
// square of a float32 is exact in double, so fusing it with the addition changes nothing.
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

// `Older`: how what is added to is read.
template <class V, Dtype kTo, Dtype kFrom, GradMode kMode, class Older = Gradient<V, kTo>>
struct Landing {
  using F = typename V::F;
  static constexpr std::size_t kVectors = kNormLanes / V::kLanes;
  static constexpr std::size_t kPrefetched = 32;  // elements, at a time
  static constexpr std::size_t kAhead = 1024;

  void* to;
  Gradient<V, kFrom> from;
  Older older;  // of `to`

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

  // The two halves of it: what the destination is to hold, and that it does.
  template <class Lanes>
  STRATA_DEVICE_CODE F read(std::size_t at, Lanes lanes) const {
    const F value = from.load(at, lanes);
    if constexpr (kMode != GradMode::add) return value;
    return rounded_to<V, kTo>(V::one_nan(V::add(older.load(at, lanes), value)));
  }
  template <class Lanes>
  STRATA_DEVICE_CODE void write(std::size_t at, F value, Lanes lanes) const {
    if constexpr (kMode == GradMode::stay) {
      return;
    } else if constexpr (kTo == Dtype::float32) {
      V::store(static_cast<float*>(to) + at, value, lanes);
    } else if constexpr (kMode == GradMode::add) {
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

template <class V>
double land_gradient(void* to, Dtype to_dtype, const void* from, Dtype from_dtype,
                     std::size_t count, GradMode mode, const GradScaling& of_older) {
  check_landing(to_dtype, from_dtype, mode);
  return with_dtype(from_dtype, [&]<Dtype kFrom>() {
    const auto land = [&]<Dtype kTo, GradMode kMode>() {
      return Landing<V, kTo, kFrom, kMode>{to, {from}, {to}}.run(count);
    };
    const auto add = [&]<Dtype kTo>() {
      if (of_older.empty()) return land.template operator()<kTo, GradMode::add>();
      using Older = ScaledGradient<V, kTo>;
      return Landing<V, kTo, kFrom, GradMode::add, Older>{to, {from}, {{to}, of_older}}.run(count);
    };
    if (mode == GradMode::stay) return land.template operator()<kFrom, GradMode::stay>();
    if (to_dtype == kFrom) {
      if (mode == GradMode::add) return add.template operator()<kFrom>();
      return land.template operator()<kFrom, GradMode::copy>();
    }
    if (mode == GradMode::add) return add.template operator()<Dtype::float32>();
    return land.template operator()<Dtype::float32, GradMode::copy>();
  });
}

template <class V>
constexpr Kernels make_kernels() {
  return {.update = update<V>,
          .land_gradient = land_gradient<V>,
          .read_gradient = read_gradient<V>,
          .split = split<V>,
          .join = join<V>,
          .load_moments = load_moments<V>,
          .store_moments = store_moments<V>};
}

}  // namespace strata
