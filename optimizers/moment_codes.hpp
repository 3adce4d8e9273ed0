// The short forms of moments: bfloat16, and codes of 8 bits in blocks with a scale each. Both round
// with numbers below 2^16 that the caller draws, or with Halves, which round to nearest.
//
// Threads: pure functions of the memory they are given.
//
//   using Form = ShortForm<Vec8, MomentKind::mean>;
//   Form::encode(values, Halves<Vec8>(), count, MomentDtype::block8, codes, scales);
//   Form::decode(codes, scales, MomentDtype::block8, count, values);
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "optimizers/device_code.hpp"
#include "optimizers/prefetch.hpp"
#include "optimizers/rule.hpp"

namespace strata {

// Note [Codes of 8 bits]
// A block keeps one bfloat16 unit, its scale. A mean is a sign and a multiple of it, up to 127; a
// square is the square of a code times it, up to 255^2, so that its root, which is what is divided
// by, has even steps. The unit is the largest magnitude over 127 or 255^2, and the largest has the
// last code. These maps were chosen by the error they bring to Adam: how far m / sqrt(v) is off,
// root mean square over all elements, when a small transformer has learned text for 130 steps with
// the same gradients:
//   means    even steps 2.0 %, steps that grow like square roots 2.0 %, in proportion 3.8 %
//   squares  even roots 2.1 %, in proportion 2.2 %, even fourth roots 2.4 %, even steps 3.8 %
// (rounded to nearest, even roots are 2.8 % off; all in bfloat16: 0.8 %). In so few elements
// moments differ little: in half of the blocks 95 % of the squares are more than a tenth of the
// largest, so the fine steps that proportion gives to small numbers are mostly unused.
//   - A positive square never becomes zero, for it is divided by: its code is 1 at least.
//   - Encoding decoded numbers gives codes and scale back, because the largest has the last code.
//   - One NaN or infinity makes the whole block NaN: it cannot pass unseen.
//   - Units below 2^-120, whose inverse may be infinite, are not used: such means become zero, such
//     squares are counted in units of 2^-120.
template <class V, MomentKind kKind>
struct BlockCode {
  using F = typename V::F;
  using I = typename V::I;
  using All = typename V::All;
  static constexpr std::uint32_t kLast = kKind == MomentKind::mean ? 127 : 255;
  static constexpr float kUnits = kKind == MomentKind::mean ? 127.0f : 255.0f * 255.0f;
  static constexpr float kUnitMin = 0x1p-120f;
  static constexpr std::uint32_t kInfinity = 0x7f800000;

  // What the elements of a block are counted in.
  struct Unit {
    std::uint16_t scale;  // at rest
    bool counts;          // else every code is zero: nothing is there, or the scale is NaN
    float per_unit;       // how many units one is
    float limit;          // a magnitude that has the last code
  };

  STRATA_DEVICE_CODE static I magnitude(F value) {
    return V::both(V::bits(value), V::set_bits(0x7fffffff));
  }

  // One block; the draws of its elements begin at `first`. REQUIRES: kMomentBlock values and codes.
  template <class Draws>
  static void encode(const float* from, const Draws& draws, std::size_t first, std::uint8_t* codes,
                     std::uint16_t* scale) {
    // 1. Find the largest magnitude: of bits, which are ordered as the numbers are, NaNs on top.
    I most = V::set_bits(0);
    for (std::size_t at = 0; at < kMomentBlock; at += V::kLanes) {
      most = V::larger(most, magnitude(V::load(from + at, All{})));
    }
    // 2. Choose the unit.
    const Unit unit = unit_of(V::largest(most), draws.of_scale(first));
    *scale = unit.scale;
    if (!unit.counts) {
      std::memset(codes, 0, kMomentBlock);
      return;
    }
    // 3. Count units.
    const F per_unit = V::set(unit.per_unit);
    const F limit = V::set(unit.limit);
    for (std::size_t at = 0; at < kMomentBlock; at += V::kLanes) {
      const I bits = V::bits(V::load(from + at, All{}));
      const F draw = V::of_int(draws.of_lanes(first + at));
      V::store(codes + at, code_of(bits, per_unit, draw, limit));
    }
  }

  // `largest`: the bits of the largest magnitude, which is what it is on average.
  STRATA_DEVICE_CODE static Unit unit_of(std::uint32_t largest, std::uint32_t draw) {
    float unit = std::bit_cast<float>(largest) / kUnits;
    const bool tiny = unit < kUnitMin;
    const bool nothing = largest == 0 || (tiny && kKind == MomentKind::mean);
    if (nothing) return {.scale = 0, .counts = false, .per_unit = 0.0f, .limit = 0.0f};
    if (largest >= kInfinity) {
      return {.scale = 0x7fc0, .counts = false, .per_unit = 0.0f, .limit = 0.0f};
    }
    if (tiny) unit = kUnitMin;
    const std::uint32_t rounded = std::bit_cast<std::uint32_t>(unit) + draw;
    return {.scale = static_cast<std::uint16_t>(rounded >> 16),
            .counts = true,
            .per_unit = 1.0f / std::bit_cast<float>(rounded & 0xffff0000u),
            .limit = tiny ? std::bit_cast<float>(kInfinity) : std::bit_cast<float>(largest)};
  }

  // `draw`: from 0 to 2^16.
  STRATA_DEVICE_CODE static I code_of(I bits, F per_unit, F draw, F limit) {
    const I last = V::set_bits(kLast);
    const F size = V::of_bits(V::both(bits, V::set_bits(0x7fffffff)));
    const F units = V::mul(size, per_unit);
    if constexpr (kKind == MomentKind::mean) {
      const I code = V::smaller(V::to_int(V::fma(draw, V::set(0x1p-16f), units)), last);
      return V::plus(V::if_less(size, limit, code, last),
                     V::template up<7>(V::template down<31>(bits)));
    } else {
      // Up if the draw is less than the rest's part of the way to the next square, 2 root + 1.
      const I floor = V::to_int(V::sqrt(units));
      const F root = V::of_int(floor);
      const F rest = V::sub(units, V::mul(root, root));
      const F way = V::fma(root, V::set(0x1p-15f), V::set(0x1p-16f));
      const I one = V::set_bits(1);
      const I up = V::if_less(V::mul(draw, way), rest, one, V::set_bits(0));
      const I code = V::smaller(V::plus(floor, up), last);
      return V::if_less(size, limit, V::larger(code, V::smaller(V::bits(size), one)), last);
    }
  }

  static void decode(const std::uint8_t* codes, std::uint16_t scale, float* to) {
    const F unit = V::of_bits(V::set_bits(std::uint32_t{scale} << 16));
    for (std::size_t at = 0; at < kMomentBlock; at += V::kLanes) {
      V::store(to + at, value_of(V::load(codes + at), unit), All{});
    }
  }

  STRATA_DEVICE_CODE static F value_of(I code, F unit) {
    if constexpr (kKind == MomentKind::mean) {
      const I bits = V::bits(V::mul(V::of_int(V::both(code, V::set_bits(kLast))), unit));
      return V::of_bits(V::plus(bits, V::template up<31>(V::template down<7>(code))));
    } else {
      const F root = V::of_int(code);
      return V::mul(V::mul(root, root), unit);
    }
  }
};

template <class V, MomentKind kKind>
struct Bfloat16Code {
  using F = typename V::F;
  using I = typename V::I;
  using All = typename V::All;

  template <class Draws>
  static void encode(const float* from, const Draws& draws, std::size_t first, std::uint16_t* to) {
    for (std::size_t at = 0; at < kMomentBlock; at += V::kLanes) {
      const I code = code_of(V::load(from + at, All{}), draws.of_lanes(first + at));
      V::store(to + at, V::narrow(code), All{});
    }
  }
  STRATA_DEVICE_CODE static I code_of(F value, I draw) {
    const I bits = V::bits(V::one_nan(value));
    const I upper = V::template down<16>(V::plus(bits, draw));
    if constexpr (kKind == MomentKind::mean) return upper;
    return V::larger(upper, V::smaller(bits, V::set_bits(1)));
  }
  static void decode(const std::uint16_t* from, float* to) {
    for (std::size_t at = 0; at < kMomentBlock; at += V::kLanes) {
      V::store(to + at, V::from_bfloat16(V::load(from + at, All{})), All{});
    }
  }
};

// Half of a step added before the rest is cut off: to nearest, ties away from zero.
template <class V>
struct Halves {
  typename V::I of_lanes(std::size_t) const { return V::set_bits(0x8000); }
  std::uint32_t of_scale(std::size_t) const { return 0x8000; }
};

// Any number of elements from the beginning of a block. The last block may be short: it goes
// through a whole one, filled up with zeros.
template <class V, MomentKind kKind>
struct ShortForm {
  template <class Draws>
  static void encode(const float* from, const Draws& draws, std::size_t count, MomentDtype dtype,
                     void* to, std::uint16_t* scales) {
    std::size_t at = 0;
    for (; at + kMomentBlock <= count; at += kMomentBlock) {
      encode_block(from + at, draws, at, dtype, ahead(to, at, dtype), scales);
    }
    if (at == count) return;
    alignas(kLineBytes) float values[kMomentBlock] = {};
    alignas(kLineBytes) std::byte stored[kMomentBlock * sizeof(std::uint16_t)];
    std::memcpy(values, from + at, (count - at) * sizeof(float));
    encode_block(values, draws, at, dtype, stored, scales);
    std::memcpy(ahead(to, at, dtype), stored, (count - at) * size_of(dtype));
  }

  static void decode(const void* from, const std::uint16_t* scales, MomentDtype dtype,
                     std::size_t count, float* to) {
    std::size_t at = 0;
    for (; at + kMomentBlock <= count; at += kMomentBlock) {
      decode_block(ahead(from, at, dtype), scales, at, dtype, to + at);
    }
    if (at == count) return;
    alignas(kLineBytes) float values[kMomentBlock];
    alignas(kLineBytes) std::byte stored[kMomentBlock * sizeof(std::uint16_t)] = {};
    std::memcpy(stored, ahead(from, at, dtype), (count - at) * size_of(dtype));
    decode_block(stored, scales, at, dtype, values);
    std::memcpy(to + at, values, (count - at) * sizeof(float));
  }

 private:
  static void* ahead(void* memory, std::size_t at, MomentDtype dtype) {
    return static_cast<std::byte*>(memory) + at * size_of(dtype);
  }
  static const void* ahead(const void* memory, std::size_t at, MomentDtype dtype) {
    return static_cast<const std::byte*>(memory) + at * size_of(dtype);
  }

  template <class Draws>
  static void encode_block(const float* from, const Draws& draws, std::size_t at, MomentDtype dtype,
                           void* to, std::uint16_t* scales) {
    if (dtype == MomentDtype::bfloat16) {
      Bfloat16Code<V, kKind>::encode(from, draws, at, static_cast<std::uint16_t*>(to));
    } else {
      BlockCode<V, kKind>::encode(from, draws, at, static_cast<std::uint8_t*>(to),
                                  scales + at / kMomentBlock);
    }
  }
  static void decode_block(const void* from, const std::uint16_t* scales, std::size_t at,
                           MomentDtype dtype, float* to) {
    if (dtype == MomentDtype::bfloat16) {
      Bfloat16Code<V, kKind>::decode(static_cast<const std::uint16_t*>(from), to);
    } else {
      BlockCode<V, kKind>::decode(static_cast<const std::uint8_t*>(from), scales[at / kMomentBlock],
                                  to);
    }
  }
};

}  // namespace strata
