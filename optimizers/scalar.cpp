// The scalar reference: a vector of one lane, in plain C++. It runs anywhere and says what each
// operation of a vector type means.
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "optimizers/half.hpp"
#include "optimizers/kernel.hpp"
#include "optimizers/landing.hpp"

namespace strata {

namespace {

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

  static F load(const float* from, All) { return *from; }
  static F load(const float* from, Some lanes) { return lanes.count > 0 ? *from : 0.0f; }
  static H load(const std::uint16_t* from, All) { return *from; }
  static H load(const std::uint16_t* from, Some lanes) {
    return lanes.count > 0 ? *from : std::uint16_t{0};
  }
  static void store(float* to, F value, All) { *to = value; }
  static void store(float* to, F value, Some lanes) {
    if (lanes.count > 0) *to = value;
  }
  static void store(std::uint16_t* to, H value, All) { *to = value; }
  static void store(std::uint16_t* to, H value, Some lanes) {
    if (lanes.count > 0) *to = value;
  }

  static F set(float value) { return value; }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F sqrt(F a) { return std::sqrt(a); }
  static F fma(F a, F b, F c) { return std::fma(a, b, c); }  // a * b + c, rounded once
  static F one_nan(F a) { return a == a ? a : std::bit_cast<float>(0x7fc00000u); }

  static F from_bfloat16(H half) { return std::bit_cast<float>(std::uint32_t{half} << 16); }
  static F from_float16(H half) { return float_of_float16(half); }
  static H to_float16(F value) { return float16_bits(value); }

  static F sign(F a) {
    return a > 0.0f ? 1.0f : a < 0.0f ? -1.0f : a;
  }  // zeros and NaNs as they are

  // Integers, modulo 2^32.
  static I bits(F value) { return std::bit_cast<I>(value); }
  static F of_bits(I bits) { return std::bit_cast<F>(bits); }
  static I set_bits(std::uint32_t value) { return value; }
  static I lane_numbers() { return 0; }  // 0, 1, 2, …
  static I plus(I a, I b) { return a + b; }
  static I minus(I a, I b) { return a - b; }
  static I times(I a, I b) { return a * b; }
  static I both(I a, I b) { return a & b; }
  static I differ(I a, I b) { return a ^ b; }
  template <int kBits>
  static I up(I a) {
    return a << kBits;
  }
  template <int kBits>
  static I down(I a) {
    return a >> kBits;
  }
  // Compared as signed numbers.
  static I larger(I a, I b) {
    return static_cast<std::int32_t>(a) > static_cast<std::int32_t>(b) ? a : b;
  }
  static I smaller(I a, I b) {
    return static_cast<std::int32_t>(a) < static_cast<std::int32_t>(b) ? a : b;
  }
  static std::uint32_t largest(I a) { return a; }  // of all lanes
  static I if_less(F a, F b, I then, I otherwise) { return a < b ? then : otherwise; }
  static F of_int(I value) { return static_cast<F>(static_cast<std::int32_t>(value)); }
  static I to_int(F value) { return static_cast<I>(static_cast<std::int32_t>(value)); }  // cut off

  static H narrow(I value) { return static_cast<H>(value); }  // REQUIRES: every lane fits
  static I load(const std::uint32_t* from) { return *from; }
  static void store(std::uint32_t* to, I value) { *to = value; }
  static I load(const std::uint8_t* from) { return *from; }
  static void store(std::uint8_t* to, I value) { *to = static_cast<std::uint8_t>(value); }  // same

  // Note [Split master]
  static F join_halves(H param, H residual) {
    const auto signed_residual = static_cast<std::uint32_t>(std::bit_cast<std::int16_t>(residual));
    return std::bit_cast<float>((std::uint32_t{param} << 16) + signed_residual);
  }
  static H upper_half_rounded(F value) {
    return static_cast<H>((std::bit_cast<std::uint32_t>(value) + 0x8000u) >> 16);
  }
  // bits - (param << 16) as 16 bits: param << 16 has none there.
  static H lower_half(F value) { return static_cast<H>(std::bit_cast<std::uint32_t>(value)); }

  static void add_squares(Sums& sums, F value) {
    const double wide = value;
    sums += wide * wide;
  }
  static void store(double* to, const Sums& sums) { *to = sums; }
};

}  // namespace

const Kernels& scalar_kernels() {
  static constexpr Kernels table = make_kernels<Vec1>();
  return table;
}

}  // namespace strata
