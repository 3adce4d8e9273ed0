// The short forms of moments: bfloat16, and codes of 8 bits in blocks with a scale each. Both round
// with bits that the caller draws, or with halves for rounding to nearest.
//
// Threads: pure functions of the memory they are given.
//
//   encode_block<V, MomentKind::mean>(values, random, 64, MomentDtype::block8, codes, &scale);
//   decode_block<V, MomentKind::mean>(codes, &scale, MomentDtype::block8, 64, values);
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "optimizers/rule.hpp"

namespace strata {

// Note [Codes of 8 bits]
// Positive float32 numbers are ordered as their bits are, so the bits without the last kShift of
// them count the numbers of kMantissaBits: a step up is a 16th to a 32nd of the number. The largest
// magnitude of a block, rounded to such a number, is its scale and has the code kTop; a code lower
// by one means the number one step below, and code 0 is zero. So a mean, with one bit for its sign
// and 127 codes, spans a factor of 240; a square, with 255 codes, 2^16, and their relative error is
// the same all over.
//   - A number too small for the lowest code is drawn between it and zero; but a positive square
//     never becomes zero: it is divided by.
//   - Decoded numbers lie on the steps, the largest at kTop: encoding them gives the codes and the
//     scale back, however the bits are drawn.
//   - Infinities and NaNs are numbers of kMantissaBits too, and spoil no other element of the block
//     but those that are too small beside them.

template <class V, MomentKind kKind>
struct BlockCode {
  using F = typename V::F;
  using I = typename V::I;
  using All = typename V::All;
  static constexpr std::uint32_t kTop = kKind == MomentKind::mean ? 127 : 255;
  static constexpr int kMantissaBits = 4;
  static constexpr int kShift = 23 - kMantissaBits;
  static constexpr std::size_t kVectors = kMomentBlock / V::kLanes;

  // Code 0 would be this step, were it not zero.
  static std::uint32_t lowest_step(std::uint32_t top) { return top > kTop ? top - kTop : 0; }

  static I magnitude(F value) { return V::both(V::bits(value), V::set_bits(0x7fffffffu)); }

  static I step_of(F value, const std::uint16_t* random) {
    const I draw = V::template up<kShift - 16>(V::widen(V::load(random, All{})));
    const I step = V::template down<kShift>(V::plus(magnitude(value), draw));
    if constexpr (kKind == MomentKind::mean) return step;
    return V::larger(step, V::smaller(magnitude(value), V::set_bits(1)));
  }

  // REQUIRES: kMomentBlock values, random numbers and codes.
  static void encode(const float* from, const std::uint16_t* random, std::uint8_t* codes,
                     std::uint16_t* scale) {
    // 1. Round every number to a step.
    I steps[kVectors];
    I most = V::set_bits(0);
    for (std::size_t k = 0; k < kVectors; ++k) {
      const std::size_t at = k * V::kLanes;
      steps[k] = step_of(V::one_nan(V::load(from + at, All{})), random + at);
      most = V::larger(most, steps[k]);
    }
    // 2. Count the steps from the largest one.
    const std::uint32_t top = V::largest(most);
    const std::uint32_t lowest = lowest_step(top);
    *scale = static_cast<std::uint16_t>(top << (kShift - 16));
    for (std::size_t k = 0; k < kVectors; ++k) {
      const std::size_t at = k * V::kLanes;
      const F value = V::one_nan(V::load(from + at, All{}));
      V::store(codes + at, code_of(value, steps[k], lowest, random + at));
    }
  }

  static I code_of(F value, I step, std::uint32_t lowest, const std::uint16_t* random) {
    const I code = V::minus(step, V::set_bits(lowest));
    if constexpr (kKind == MomentKind::square) {
      return V::larger(code, V::smaller(magnitude(value), V::set_bits(1)));
    } else {
      const F size = V::of_bits(magnitude(value));
      const I sign = V::template up<7>(V::template down<31>(V::bits(value)));
      // Where steps reach down to zero, rounding to a step has already drawn.
      const F least = V::of_bits(V::set_bits(lowest > 0 ? (lowest + 1) << kShift : 0));
      const I one_to_two = V::template up<7>(V::widen(V::load(random, All{})));
      const F draw = V::sub(V::of_bits(V::plus(V::set_bits(0x3f800000u), one_to_two)), V::set(1));
      const I small = V::if_less(V::mul(draw, least), size, V::set_bits(1), V::set_bits(0));
      return V::plus(V::if_less(size, least, small, code), sign);
    }
  }

  static void decode(const std::uint8_t* codes, std::uint16_t scale, float* to) {
    const I lowest = V::set_bits(lowest_step(std::uint32_t{scale} >> (kShift - 16)));
    for (std::size_t at = 0; at < kMomentBlock; at += V::kLanes) {
      const I stored = V::load(codes + at);
      const I code = V::both(stored, V::set_bits(kTop));
      const I bits = V::unless_zero(code, V::template up<kShift>(V::plus(code, lowest)));
      if constexpr (kKind == MomentKind::square) {
        V::store(to + at, V::of_bits(bits), All{});
      } else {
        const I sign = V::template up<31>(V::template down<7>(stored));
        V::store(to + at, V::of_bits(V::plus(bits, sign)), All{});
      }
    }
  }
};

template <class V, MomentKind kKind>
struct Bfloat16Code {
  using F = typename V::F;
  using I = typename V::I;
  using All = typename V::All;

  static void encode(const float* from, const std::uint16_t* random, std::uint16_t* to) {
    for (std::size_t at = 0; at < kMomentBlock; at += V::kLanes) {
      const I bits = V::bits(V::one_nan(V::load(from + at, All{})));
      I upper = V::template down<16>(V::plus(bits, V::widen(V::load(random + at, All{}))));
      if constexpr (kKind == MomentKind::square) {
        upper = V::larger(upper, V::smaller(bits, V::set_bits(1)));
      }
      V::store(to + at, V::narrow(upper), All{});
    }
  }
  static void decode(const std::uint16_t* from, float* to) {
    for (std::size_t at = 0; at < kMomentBlock; at += V::kLanes) {
      V::store(to + at, V::from_bfloat16(V::load(from + at, All{})), All{});
    }
  }
};

// One block, of `count` <= kMomentBlock elements; what lies beyond them in `to` reads as zero.
template <class V, MomentKind kKind>
void decode_block(const void* from, const std::uint16_t* scale, MomentDtype dtype,
                  std::size_t count, float* to) {
  alignas(64) std::byte whole[kMomentBlock * sizeof(std::uint16_t)] = {};
  if (count < kMomentBlock) {
    std::memcpy(whole, from, count * size_of(dtype));
    from = whole;
  }
  if (dtype == MomentDtype::bfloat16) {
    Bfloat16Code<V, kKind>::decode(static_cast<const std::uint16_t*>(from), to);
  } else {
    BlockCode<V, kKind>::decode(static_cast<const std::uint8_t*>(from), *scale, to);
  }
}

// REQUIRES: kMomentBlock values, those beyond `count` zero, and as many random numbers.
template <class V, MomentKind kKind>
void encode_block(const float* from, const std::uint16_t* random, std::size_t count,
                  MomentDtype dtype, void* to, std::uint16_t* scale) {
  alignas(64) std::byte whole[kMomentBlock * sizeof(std::uint16_t)];
  void* const target = count < kMomentBlock ? whole : to;
  if (dtype == MomentDtype::bfloat16) {
    Bfloat16Code<V, kKind>::encode(from, random, static_cast<std::uint16_t*>(target));
  } else {
    BlockCode<V, kKind>::encode(from, random, static_cast<std::uint8_t*>(target), scale);
  }
  if (count < kMomentBlock) std::memcpy(to, whole, count * size_of(dtype));
}

}  // namespace strata
