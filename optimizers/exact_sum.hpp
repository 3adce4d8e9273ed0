// Exact sums of squares of float32 values: whatever the order they are added in, and however they
// are grouped, the result has the same bits.
//
// Threads: one at a time, as a number. It is plain bytes, so a process may send it to another.
//
//   ExactSum sum;
//   for (const Piece& piece : pieces) sum.add(land(piece));   // doubles
//   sum.add(sum_of_another_rank);
//   double norm = std::sqrt(sum.value());
//
// Note [Exact sums]
// A sum of doubles depends on their order, for each addition rounds. These do not round: they are
// integers of 640 bits that count units of 2^-298, the square of the smallest float32. A double
// that is a sum of such squares, rounded or not, is a multiple of it. All the squares there can be,
// of 2^64 elements, are below 2^320, so the integer never comes near its end at 2^342. It is
// rounded once, when it is read. What is infinite or no number is remembered beside it.
// Limit: a double that is added was itself summed in some order. Sums agree where the same doubles
// are added, so whoever wants them to agree cuts the elements at the same places.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "memory/check.hpp"

namespace strata {

class ExactSum final {
 public:
  // REQUIRES: a sum of squares of float32 values: not negative, below 2^320 and a multiple of
  // 2^-298; or infinite, or no number.
  void add(double value);
  void add(const ExactSum& other);

  // To the nearest double, ties to even. No number where one was added that was none; infinite
  // where else an infinite one was added.
  double value() const;

  bool operator==(const ExactSum&) const = default;

 private:
  static constexpr int kUnitExponent = -298;
  static constexpr int kAddendExponent = 320;  // addends are below 2 to the power of it
  static constexpr std::size_t kLimbs = 10;
  static constexpr int kLimbBits = 64;
  static constexpr int kFractionBits = 52;  // of a double
  static constexpr int kExponentBias = 1023;
  static constexpr std::uint64_t kInfinity = 1, kNan = 2;  // flags

  void add_at(std::size_t limb, std::uint64_t bits);

  std::array<std::uint64_t, kLimbs> limbs_{};  // the lowest first
  std::uint64_t flags_ = 0;
};

static_assert(std::is_trivially_copyable_v<ExactSum> && std::is_standard_layout_v<ExactSum>);
static_assert(std::has_unique_object_representations_v<ExactSum>, "its bytes are its value");
static_assert(sizeof(ExactSum) == 88, "every process that sends one has the same");

// Adds to one limb, and the carry to those above.
inline void ExactSum::add_at(std::size_t limb, std::uint64_t bits) {
  for (; bits != 0; ++limb) {
    STRATA_ASSERT(limb < kLimbs);
    limbs_[limb] += bits;
    bits = limbs_[limb] < bits ? 1 : 0;
  }
}

inline void ExactSum::add(double value) {
  if (!std::isfinite(value)) {
    STRATA_ASSERT(!(value < 0.0));
    flags_ |= std::isnan(value) ? kNan : kInfinity;
    return;
  }
  if (value == 0.0) return;
  STRATA_ASSERT(value > 0.0);
  // 1. The value is fraction * 2^exponent; no such sum is subnormal as a double.
  const auto bits = std::bit_cast<std::uint64_t>(value);
  const auto biased = static_cast<int>(bits >> kFractionBits);
  constexpr std::uint64_t kLeadingBit = std::uint64_t{1} << kFractionBits;
  std::uint64_t fraction = (bits & (kLeadingBit - 1)) | kLeadingBit;
  STRATA_ASSERT(biased < kExponentBias + kAddendExponent);
  // 2. Its lowest bit in units. The smallest sums have bits below the unit, which are zero.
  int at = biased - kExponentBias - kFractionBits - kUnitExponent;
  if (at < 0) {
    STRATA_ASSERT(at >= -kFractionBits);
    STRATA_ASSERT(std::countr_zero(fraction) >= -at);
    fraction >>= -at;
    at = 0;
  }
  // 3. It lies in one limb or two.
  const auto limb = static_cast<std::size_t>(at / kLimbBits);
  const int shift = at % kLimbBits;
  add_at(limb, fraction << shift);
  if (shift > kLimbBits - 1 - kFractionBits) add_at(limb + 1, fraction >> (kLimbBits - shift));
}

inline void ExactSum::add(const ExactSum& other) {
  std::uint64_t carry = 0;
  for (std::size_t i = 0; i < kLimbs; ++i) {
    const std::uint64_t addend = other.limbs_[i] + carry;
    carry = addend < carry ? 1 : 0;
    limbs_[i] += addend;
    carry |= limbs_[i] < addend ? 1 : 0;
  }
  STRATA_ASSERT(carry == 0);
  flags_ |= other.flags_;
}

inline double ExactSum::value() const {
  if ((flags_ & kNan) != 0) return std::numeric_limits<double>::quiet_NaN();
  if ((flags_ & kInfinity) != 0) return std::numeric_limits<double>::infinity();
  // 1. The highest limb that is not zero.
  std::size_t top = kLimbs;
  while (top > 0 && limbs_[top - 1] == 0) --top;
  if (top == 0) return 0.0;
  --top;
  // 2. The 64 bits from the highest one on, and whether any below them is set.
  const int unused = std::countl_zero(limbs_[top]);
  std::uint64_t window = limbs_[top] << unused;
  std::uint64_t below = 0;
  for (std::size_t i = 0; i < top; ++i) {
    const bool next = i + 1 == top;
    if (next && unused > 0) window |= limbs_[i] >> (kLimbBits - unused);
    below |= next ? limbs_[i] << unused : limbs_[i];
  }
  // 3. The conversion rounds; the lowest of the bits that it drops stands for all below.
  if (below != 0) window |= 1;
  const int exponent = static_cast<int>(top) * kLimbBits - unused + kUnitExponent;
  return std::ldexp(static_cast<double>(window), exponent);
}

}  // namespace strata
