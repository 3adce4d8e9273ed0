// Exact sums: right against a count of single bits, and the same bytes in every order and grouping.
// A failure prints the seed that replays it.
#include "optimizers/exact_sum.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace strata::exact_sum_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// The slow way: how often each power of two from 2^-298 on is part of the sum.
class CountedBits {
 public:
  void add(double value) {
    while (value != 0.0) {
      const int at = std::ilogb(value) + kUnits;
      ++counts_.at(static_cast<std::size_t>(at));
      value -= std::ldexp(1.0, at - kUnits);
    }
  }
  double value() const {
    // 1. Carry, so that every count is a bit.
    std::vector<std::uint64_t> bits = counts_;
    for (std::size_t i = 0; i + 1 < bits.size(); ++i) {
      bits[i + 1] += bits[i] / 2;
      bits[i] %= 2;
    }
    // 2. The 53 highest bits; the next one and whether any behind it is set decide.
    std::size_t top = bits.size();
    while (top > 0 && bits[top - 1] == 0) --top;
    double result = 0.0;
    for (std::size_t i = 0; i < top && i < 53; ++i) result += term(bits, top - 1 - i);
    if (top <= 53) return result;
    const std::size_t lowest = top - 53;
    const bool half = bits[lowest - 1] != 0;
    const bool more = std::any_of(bits.begin(), bits.begin() + static_cast<long>(lowest) - 1,
                                  [](std::uint64_t bit) { return bit != 0; });
    const bool odd = bits[lowest] != 0;
    const double last = std::ldexp(1.0, static_cast<int>(lowest) - kUnits);
    return half && (more || odd) ? result + last : result;
  }

 private:
  static constexpr int kUnits = 298;
  static double term(const std::vector<std::uint64_t>& bits, std::size_t at) {
    return bits[at] == 0 ? 0.0 : std::ldexp(1.0, static_cast<int>(at) - kUnits);
  }
  std::vector<std::uint64_t> counts_ = std::vector<std::uint64_t>(700);
};

ExactSum sum_of(const std::vector<double>& values) {
  ExactSum sum;
  for (const double value : values) sum.add(value);
  return sum;
}

float any_float(bool small, std::mt19937_64& random) {
  for (;;) {
    auto bits = static_cast<std::uint32_t>(random()) & 0x7fffffffu;
    if (small) bits %= 0x01000000;  // subnormal, and the normal numbers next to them
    const float value = std::bit_cast<float>(bits);
    if (std::isfinite(value)) return value;
  }
}

// A sum of some squares as a kernel returns it: in double, each addition rounded.
double any_sum(bool small, std::mt19937_64& random) {
  double sum = 0.0;
  for (std::uint64_t i = random() % 5; i > 0; --i) {
    const double value = any_float(small, random);
    sum += value * value;
  }
  return sum;
}

std::vector<double> any_sums(std::mt19937_64& random) {
  std::vector<double> sums(random() % 200);
  const bool small = random() % 2 == 0;
  for (double& sum : sums) sum = any_sum(small, random);
  return sums;
}

TEST(ExactSum, IsTheNearestDoubleToTheTrueSum) {
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    std::mt19937_64 random(seed);
    ExactSum sum;
    CountedBits expected;
    for (const double value : any_sums(random)) {
      sum.add(value);
      expected.add(value);
      if (random() % 8 == 0) {
        ASSERT_EQ(sum.value(), expected.value()) << "seed " << seed;
      }
    }
    ASSERT_EQ(sum.value(), expected.value()) << "seed " << seed;
  }
}

// Sums of a few powers of two, near to each other: what decides is half a bit, or nearly that.
TEST(ExactSum, RoundsToTheEvenOneOnlyWhereBothAreAsNear) {
  for (std::uint64_t seed = 0; seed < 20'000; ++seed) {
    std::mt19937_64 random(seed);
    const int top = static_cast<int>(random() % 600) - 280;
    std::vector<double> values = {std::ldexp(1.0, top)};
    for (const int below : {51, 52, 53, 54, 63, 64, 65, 127, 128, 200}) {
      if (top - below < -298) break;
      if (random() % 2 == 0) values.push_back(std::ldexp(1.0, top - below));
    }
    CountedBits expected;
    for (const double value : values) expected.add(value);
    ASSERT_EQ(sum_of(values).value(), expected.value()) << "seed " << seed;
  }
  EXPECT_EQ(sum_of({0x1p53, 1.0}).value(), 0x1p53);
  EXPECT_EQ(sum_of({0x1p53, 1.0, 0x1p-298}).value(), 0x1.0000000000001p53);
  EXPECT_EQ(sum_of({0x1p53, 2.0, 1.0}).value(), 0x1.0000000000002p53);
  EXPECT_EQ(sum_of({0x1.fffffffffffffp53, 1.0}).value(), 0x1p54) << "a carry out of the fraction";
}

TEST(ExactSum, EveryOrderAndGroupingGivesTheSameBytes) {
  for (std::uint64_t seed = 0; seed < 1000; ++seed) {
    std::mt19937_64 random(seed);
    std::vector<double> values = any_sums(random);
    const ExactSum expected = sum_of(values);
    std::shuffle(values.begin(), values.end(), random);
    // Into groups, which are merged two at a time until one is left.
    std::vector<ExactSum> groups(1 + random() % 8);
    for (const double value : values) groups[random() % groups.size()].add(value);
    while (groups.size() > 1) {
      const ExactSum last = groups.back();
      groups.pop_back();
      groups[random() % groups.size()].add(last);
    }
    ASSERT_EQ(groups[0], expected) << "seed " << seed;
    ASSERT_EQ(std::memcmp(&groups[0], &expected, sizeof(ExactSum)), 0) << "seed " << seed;
  }
}

TEST(ExactSum, ALoneValueComesBackAsItIs) {
  EXPECT_EQ(std::bit_cast<std::uint64_t>(ExactSum{}.value()), 0u);
  EXPECT_EQ(std::bit_cast<std::uint64_t>(sum_of({-0.0, 0.0}).value()), 0u);
  constexpr double kLargest = 0x1.fffffffffffffp319;
  for (const double value : {0x1p-298, 0x3p-298, 0x1.fffffffffffffp-246, 0x1p-247, 1.0, 0.1,
                             0x1.fffffcp127 * 0x1.fffffcp127, kLargest}) {
    EXPECT_EQ(sum_of({value}).value(), value);
  }
  for (std::uint64_t seed = 0; seed < 10'000; ++seed) {
    std::mt19937_64 random(seed);
    const double value = any_sum(random() % 2 == 0, random);
    ASSERT_EQ(sum_of({value}).value(), value) << "seed " << seed;
  }
}

TEST(ExactSum, ACarryGoesThroughEveryLimb) {
  // Ones all the way up, and one more of the lowest.
  ExactSum sum;
  for (int exponent = -298; exponent < 320; ++exponent) sum.add(std::ldexp(1.0, exponent));
  sum.add(0x1p-298);
  EXPECT_EQ(sum.value(), 0x1p320);
  ExactSum merged, lowest;
  for (int exponent = -298; exponent < 320; ++exponent) merged.add(std::ldexp(1.0, exponent));
  lowest.add(0x1p-298);
  merged.add(lowest);
  EXPECT_EQ(merged, sum);
  lowest.add(merged);
  EXPECT_EQ(lowest.value(), 0x1p320);
}

TEST(ExactSum, InfinityAndNanComeOutOfWhateverTheyWereAddedTo) {
  std::mt19937_64 random(1);
  for (const auto& [values, expected] :
       std::vector<std::pair<std::vector<double>, double>>{{{1.0, kInfinity, 2.0}, kInfinity},
                                                           {{kInfinity, kInfinity}, kInfinity},
                                                           {{1.0, kNan}, kNan},
                                                           {{kInfinity, kNan, 1.0}, kNan},
                                                           {{-kNan, kInfinity}, kNan}}) {
    std::vector<double> shuffled = values;
    std::shuffle(shuffled.begin(), shuffled.end(), random);
    ExactSum merged;
    for (const double value : shuffled) merged.add(sum_of({value}));
    EXPECT_EQ(merged, sum_of(values));
    EXPECT_EQ(std::bit_cast<std::uint64_t>(merged.value()), std::bit_cast<std::uint64_t>(expected));
  }
  EXPECT_NE(sum_of({kInfinity}), sum_of({}));
  EXPECT_NE(sum_of({kInfinity}), sum_of({kNan}));
}

TEST(ExactSum, WhatIsNoSumOfSquaresIsRefused) {
  ExactSum sum;
  EXPECT_DEATH(sum.add(-1.0), "value > 0.0");
  EXPECT_DEATH(sum.add(-kInfinity), "value < 0.0");
  EXPECT_DEATH(sum.add(0x1p320), "kAddendExponent");
  EXPECT_DEATH(sum.add(0x1p-299), "kFractionBits");
  EXPECT_DEATH(sum.add(0x1.8p-298), "countr_zero");
  EXPECT_DEATH(sum.add(0x1p-400), "kFractionBits");
  EXPECT_DEATH(sum.add(std::numeric_limits<double>::denorm_min()), "kFractionBits");
  for (int doubled = 0; doubled < 22; ++doubled) {
    if (doubled == 0) sum.add(0x1p319);
    sum.add(ExactSum(sum));
  }
  EXPECT_DEATH(sum.add(ExactSum(sum)), "carry");
}

}  // namespace
}  // namespace strata::exact_sum_test
