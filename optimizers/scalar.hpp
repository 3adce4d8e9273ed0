// The reference: a vector of one lane, in plain C++. It runs anywhere, on a GPU as one of its
// threads, and says what each operation of a vector type means.
//
// Threads: pure functions of the memory they are given.
//
//   Vec1::store(to, Vec1::add(Vec1::load(from, Vec1::All{}), Vec1::set(1.0f)), Vec1::All{});
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "optimizers/device_code.hpp"
#include "optimizers/half.hpp"

namespace strata {

struct Vec1 {
  static constexpr std::size_t kLanes = 1;
  using F = float;
  using I = std::uint32_t;
  using H = std::uint16_t;
  using Sums = double;  // of squares, one for each lane

  struct All {};
  // The first `count` lanes: those beyond read as zero and are not written.
  struct Some {
    std::size_t count;
  };

  STRATA_DEVICE_CODE static F load(const float* from, All) { return *from; }
  STRATA_DEVICE_CODE static F load(const float* from, Some lanes) {
    return lanes.count > 0 ? *from : 0.0f;
  }
  STRATA_DEVICE_CODE static H load(const std::uint16_t* from, All) { return *from; }
  STRATA_DEVICE_CODE static H load(const std::uint16_t* from, Some lanes) {
    return lanes.count > 0 ? *from : std::uint16_t{0};
  }
  STRATA_DEVICE_CODE static void store(float* to, F value, All) { *to = value; }
  STRATA_DEVICE_CODE static void store(float* to, F value, Some lanes) {
    if (lanes.count > 0) *to = value;
  }
  STRATA_DEVICE_CODE static void store(std::uint16_t* to, H value, All) { *to = value; }
  STRATA_DEVICE_CODE static void store(std::uint16_t* to, H value, Some lanes) {
    if (lanes.count > 0) *to = value;
  }

  STRATA_DEVICE_CODE static F set(float value) { return value; }
  STRATA_DEVICE_CODE static F add(F a, F b) { return a + b; }
  STRATA_DEVICE_CODE static F sub(F a, F b) { return a - b; }
  STRATA_DEVICE_CODE static F mul(F a, F b) { return a * b; }
  STRATA_DEVICE_CODE static F div(F a, F b) { return a / b; }
  STRATA_DEVICE_CODE static F sqrt(F a) { return std::sqrt(a); }
  // a * b + c, rounded once.
  STRATA_DEVICE_CODE static F fma(F a, F b, F c) { return std::fma(a, b, c); }
  STRATA_DEVICE_CODE static F one_nan(F a) {
    return a == a ? a : std::bit_cast<float>(0x7fc00000u);
  }

  STRATA_DEVICE_CODE static F from_bfloat16(H half) {
    return std::bit_cast<float>(std::uint32_t{half} << 16);
  }
  STRATA_DEVICE_CODE static F from_float16(H half) { return float_of_float16(half); }
  STRATA_DEVICE_CODE static H to_float16(F value) { return float16_bits(value); }

  STRATA_DEVICE_CODE static F sign(F a) {
    return a > 0.0f ? 1.0f : a < 0.0f ? -1.0f : a;
  }  // zeros and NaNs as they are

  // Integers, modulo 2^32.
  STRATA_DEVICE_CODE static I bits(F value) { return std::bit_cast<I>(value); }
  STRATA_DEVICE_CODE static F of_bits(I bits) { return std::bit_cast<F>(bits); }
  STRATA_DEVICE_CODE static I set_bits(std::uint32_t value) { return value; }
  STRATA_DEVICE_CODE static I lane_numbers() { return 0; }  // 0, 1, 2, …
  STRATA_DEVICE_CODE static I plus(I a, I b) { return a + b; }
  STRATA_DEVICE_CODE static I times(I a, I b) { return a * b; }
  STRATA_DEVICE_CODE static I both(I a, I b) { return a & b; }
  STRATA_DEVICE_CODE static I differ(I a, I b) { return a ^ b; }
  template <int kBits>
  STRATA_DEVICE_CODE static I up(I a) {
    return a << kBits;
  }
  template <int kBits>
  STRATA_DEVICE_CODE static I down(I a) {
    return a >> kBits;
  }
  // Compared as signed numbers.
  STRATA_DEVICE_CODE static I larger(I a, I b) {
    return static_cast<std::int32_t>(a) > static_cast<std::int32_t>(b) ? a : b;
  }
  STRATA_DEVICE_CODE static I smaller(I a, I b) {
    return static_cast<std::int32_t>(a) < static_cast<std::int32_t>(b) ? a : b;
  }
  STRATA_DEVICE_CODE static std::uint32_t largest(I a) { return a; }  // of all lanes
  STRATA_DEVICE_CODE static I if_less(F a, F b, I then, I otherwise) {
    return a < b ? then : otherwise;
  }
  STRATA_DEVICE_CODE static F of_int(I value) {
    return static_cast<F>(static_cast<std::int32_t>(value));
  }
  // Cut off; what no int32 holds becomes the smallest, as x86 has it.
  STRATA_DEVICE_CODE static I to_int(F value) {
    const bool fits = value >= -0x1p31f && value < 0x1p31f;
    return fits ? static_cast<I>(static_cast<std::int32_t>(value)) : I{1} << 31;
  }

  STRATA_DEVICE_CODE static I widen(H value) {
    return static_cast<I>(std::bit_cast<std::int16_t>(value));
  }  // with its sign
  STRATA_DEVICE_CODE static H narrow(I value) {
    return static_cast<H>(value);
  }  // REQUIRES: every lane fits
  STRATA_DEVICE_CODE static I load(const std::uint32_t* from) { return *from; }
  STRATA_DEVICE_CODE static void store(std::uint32_t* to, I value) { *to = value; }
  STRATA_DEVICE_CODE static I load(const std::uint8_t* from) { return *from; }
  STRATA_DEVICE_CODE static void store(std::uint8_t* to, I value) {
    *to = static_cast<std::uint8_t>(value);
  }  // same

  STRATA_DEVICE_CODE static I load(const std::int8_t* from) {
    return static_cast<I>(std::int32_t{*from});
  }  // with its sign

  // 64 of sixteen values, chosen by codes of four bits: the upper half of each byte comes first.
  template <class T>
  STRATA_DEVICE_CODE static void look_up(const T* sixteen, const std::uint8_t* codes, T* to) {
    for (std::size_t i = 0; i < 32; ++i) {
      to[2 * i] = sixteen[codes[i] >> 4];
      to[2 * i + 1] = sixteen[codes[i] & 15];
    }
  }

  STRATA_DEVICE_CODE static void add_squares(Sums& sums, F value) {
    const double wide = value;
    sums += wide * wide;
  }
  STRATA_DEVICE_CODE static void store(double* to, const Sums& sums) { *to = sums; }
};

}  // namespace strata
