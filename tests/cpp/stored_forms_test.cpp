// How parameters and gradients are stored: the split master, float16, and gradients that land.
// A failure prints the seed or the bits that replay it.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "isas.hpp"
#include "landed_values.hpp"
#include "optimizers/half.hpp"
#include "optimizers/rule.hpp"

namespace strata::stored_forms_test {
namespace {

bool is_nan(std::uint32_t bits) {
  return (bits & 0x7fffffff) > 0x7f800000;
}

// Every upper half with the lower halves at which rounding turns, then patterns at random.
std::vector<std::uint32_t> patterns() {
  std::vector<std::uint32_t> all;
  for (std::uint32_t upper = 0; upper < 0x10000; ++upper) {
    for (const std::uint32_t lower : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      all.push_back(upper << 16 | lower);
    }
  }
  std::mt19937 random(11);
  for (int i = 0; i < 100'003; ++i) {
    all.push_back(static_cast<std::uint32_t>(random()));
  }
  return all;
}

struct Pair {
  std::vector<std::uint16_t> param, residual;
};

Pair split_of(const std::vector<std::uint32_t>& bits, Isa isa) {
  std::vector<float> values(bits.size());
  std::memcpy(values.data(), bits.data(), bits.size() * sizeof(float));
  Pair pair{std::vector<std::uint16_t>(bits.size()), std::vector<std::uint16_t>(bits.size())};
  kernels(isa).split(values.data(), bits.size(), Dtype::bfloat16, pair.param.data(),
                     pair.residual.data());
  return pair;
}

TEST(SplitMaster, ThePairGivesBackEveryBit) {
  const std::vector<std::uint32_t> bits = patterns();
  for (const Isa isa : isas()) {
    const Pair pair = split_of(bits, isa);
    std::vector<std::uint32_t> back(bits.size());
    std::vector<float> joined(bits.size());
    kernels(isa).join(pair.param.data(), pair.residual.data(), bits.size(), Dtype::bfloat16,
                      joined.data());
    std::memcpy(back.data(), joined.data(), joined.size() * sizeof(float));
    for (std::size_t i = 0; i < bits.size(); ++i) {
      const std::uint32_t expected = is_nan(bits[i]) ? 0x7fc00000 : bits[i];
      ASSERT_EQ(back[i], expected) << name(isa) << std::hex << " bits " << bits[i];
    }
  }
}

TEST(SplitMaster, TheParameterIsTheNearestBfloat16) {
  const std::vector<std::uint32_t> bits = patterns();
  const auto wide = [](std::uint32_t upper) {
    return static_cast<double>(std::bit_cast<float>(upper << 16));
  };
  for (const Isa isa : isas()) {
    const Pair pair = split_of(bits, isa);
    for (std::size_t i = 0; i < bits.size(); ++i) {
      const auto value = static_cast<double>(std::bit_cast<float>(bits[i]));
      const std::uint32_t upper = bits[i] >> 16;
      if (is_nan(bits[i])) {
        ASSERT_EQ(pair.param[i], 0x7fc0);
        ASSERT_EQ(pair.residual[i], 0);
        continue;
      }
      // The neighbour away from zero may be infinite, which lies where the next power of two would.
      const bool neighbour_is_infinite = ((upper + 1) & 0x7fff) == 0x7f80;
      const double outer = neighbour_is_infinite ? std::copysign(0x1p128, value) : wide(upper + 1);
      const double below = std::fabs(value - wide(upper));
      const bool up = (bits[i] & 0xffff) != 0 && std::fabs(outer - value) <= below;
      ASSERT_EQ(pair.param[i], up ? upper + 1 : upper) << name(isa) << std::hex << " " << bits[i];
    }
  }
}

TEST(Float16, EveryHalfSurvivesAndRoundingIsToNearestEven) {
  for (std::uint32_t half = 0; half < 0x10000; ++half) {
    const auto bits = static_cast<std::uint16_t>(half);
    const float value = float_of_float16(bits);
    const bool nan = (bits & 0x7fff) > 0x7c00;
    ASSERT_EQ(float16_bits(value), nan ? bits | 0x200 : bits) << std::hex << half;
    if ((bits & 0x7fff) >= 0x7bff) continue;
    // Half way to the next one goes to the even one; one bit more goes up.
    const float next = float_of_float16(static_cast<std::uint16_t>(bits + 1));
    const float middle = (value + next) / 2;
    const auto even = static_cast<std::uint16_t>((bits & 1) == 0 ? bits : bits + 1);
    ASSERT_EQ(float16_bits(middle), even) << std::hex << half;
    ASSERT_EQ(float16_bits(std::nextafter(middle, next)), bits + 1) << std::hex << half;
    ASSERT_EQ(float16_bits(std::nextafter(middle, value)), bits) << std::hex << half;
  }
  EXPECT_EQ(float16_bits(65519.996f), 0x7bff);
  EXPECT_EQ(float16_bits(65520.0f), 0x7c00);
}

TEST(Float16, EveryInstructionSetGivesTheSameBits) {
  const std::vector<std::uint32_t> bits = patterns();
  std::vector<float> values(bits.size());
  std::memcpy(values.data(), bits.data(), bits.size() * sizeof(float));
  for (const Isa isa : isas()) {
    std::vector<std::uint16_t> param(bits.size());
    std::vector<float> master(bits.size());
    kernels(isa).split(values.data(), bits.size(), Dtype::float16, param.data(), master.data());
    for (std::size_t i = 0; i < bits.size(); ++i) {
      const std::uint32_t clean = is_nan(bits[i]) ? 0x7fc00000 : bits[i];
      ASSERT_EQ(std::bit_cast<std::uint32_t>(master[i]), clean) << name(isa);
      ASSERT_EQ(param[i], float16_bits(std::bit_cast<float>(clean)))
          << name(isa) << std::hex << " bits " << bits[i];
    }
  }
}

struct LandingCase {
  Dtype to, from;
  GradMode mode;
};

constexpr LandingCase kLandings[] = {
    {Dtype::float32, Dtype::float32, GradMode::copy},
    {Dtype::float32, Dtype::float16, GradMode::copy},
    {Dtype::float32, Dtype::bfloat16, GradMode::copy},
    {Dtype::float32, Dtype::float32, GradMode::add},
    {Dtype::float32, Dtype::float16, GradMode::add},
    {Dtype::float32, Dtype::bfloat16, GradMode::add},
    {Dtype::float16, Dtype::float16, GradMode::copy},
    {Dtype::bfloat16, Dtype::bfloat16, GradMode::copy},
    {Dtype::float16, Dtype::float16, GradMode::add},
    {Dtype::bfloat16, Dtype::bfloat16, GradMode::add},
    {Dtype::float32, Dtype::float32, GradMode::stay},
    {Dtype::float16, Dtype::float16, GradMode::stay},
    {Dtype::bfloat16, Dtype::bfloat16, GradMode::stay},
};

TEST(LandGradient, LandsAndSumsInTheSameOrderEverywhere) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    std::mt19937_64 random(seed);
    const LandingCase& one = kLandings[random() % std::size(kLandings)];
    const std::size_t count = random() % 3 == 0 ? random() % 10'000 : random() % 70;
    SCOPED_TRACE("seed " + std::to_string(seed) + " to " + name(one.to) + " from " +
                 name(one.from) + " count " + std::to_string(count));
    std::vector<float> values(count), before(count);
    for (float& value : values) value = std::normal_distribution<float>(0.0f, 1.0f)(random);
    for (float& value : before) value = std::normal_distribution<float>(0.0f, 1.0f)(random);
    std::vector<std::byte> from(count * size_of(one.from) + 2);
    std::vector<std::byte> master(count * 4);
    void* const residual = one.from == Dtype::float32 ? nullptr : master.data();
    kernels(Isa::scalar).split(values.data(), count, one.from, from.data(), residual);
    values = as_floats(from.data(), one.from, count);

    // What was there has been scaled, and rounded.
    GradScaling scaling;
    const bool adds = one.mode == GradMode::add;
    if (adds && random() % 2 == 0) scaling = {.factor = 0.3f, .divides = random() % 2 == 0};
    std::vector<std::byte> start(count * size_of(one.to) + 1, std::byte{0x5a});
    kernels(Isa::scalar).split(before.data(), count, one.to, start.data(), master.data());
    before = as_floats(start.data(), one.to, count);
    std::vector<float> expected = values;
    for (std::size_t i = 0; adds && i < count; ++i) {
      const float by = scaling.factor;
      before[i] = rounded(scaling.divides ? before[i] / by : before[i] * by, one.to);
      expected[i] = rounded(before[i] + values[i], one.to);
    }
    for (const Isa isa : isas()) {
      std::vector<std::byte> to = start;
      const bool stays = one.mode == GradMode::stay;
      const double sum = kernels(isa).land_gradient(
          stays ? nullptr : to.data(), one.to, from.data(), one.from, count, one.mode, scaling);
      if (!stays) {
        EXPECT_EQ(as_floats(to.data(), one.to, count), expected) << name(isa);
      }
      EXPECT_EQ(to.back(), std::byte{0x5a}) << name(isa);
      EXPECT_EQ(std::bit_cast<std::uint64_t>(sum),
                std::bit_cast<std::uint64_t>(norm_in_order(expected)))
          << name(isa);
    }
  }
}

TEST(ReadGradient, ReadsWhatWasScaled) {
  std::mt19937_64 random(7);
  for (const Dtype dtype : {Dtype::float32, Dtype::float16, Dtype::bfloat16}) {
    std::vector<float> values(1000), read(values.size());
    for (float& value : values) value = std::normal_distribution<float>(0.0f, 1.0f)(random);
    std::vector<std::byte> from(values.size() * 4), master(values.size() * 4);
    kernels(Isa::scalar).split(values.data(), values.size(), dtype, from.data(), master.data());
    values = as_floats(from.data(), dtype, values.size());
    for (const bool divides : {false, true}) {
      std::vector<float> expected = values;
      for (float& value : expected) value = rounded(divides ? value / 0.3f : value * 0.3f, dtype);
      const GradScaling scaling{.factor = 0.3f, .divides = divides};
      for (const Isa isa : isas()) {
        kernels(isa).read_gradient(from.data(), dtype, scaling, read.size(), read.data());
        EXPECT_EQ(read, expected) << name(isa) << ' ' << name(dtype);
      }
    }
  }
}

TEST(LandGradient, OnlyNonFiniteElementsMakeTheSumNonFinite) {
  for (const Isa isa : isas()) {
    std::vector<float> from(5000, std::numeric_limits<float>::max()), to(5000);
    const auto land = [&] {
      return kernels(isa).land_gradient(to.data(), Dtype::float32, from.data(), Dtype::float32,
                                        from.size(), GradMode::copy, {});
    };
    EXPECT_TRUE(std::isfinite(land())) << name(isa);
    for (const std::size_t at : {std::size_t{0}, std::size_t{4095}, std::size_t{4999}}) {
      from[at] = -std::numeric_limits<float>::infinity();
      EXPECT_FALSE(std::isfinite(land())) << name(isa) << " infinity at " << at;
      from[at] = std::numeric_limits<float>::quiet_NaN();
      EXPECT_TRUE(std::isnan(land())) << name(isa) << " NaN at " << at;
      from[at] = 0.0f;
    }
  }
}

TEST(StoredForms, EmptySpansTouchNothing) {
  for (const Isa isa : isas()) {
    const Hyper hyper{};
    kernels(isa).update({.hyper = &hyper});
    kernels(isa).split(nullptr, 0, Dtype::bfloat16, nullptr, nullptr);
    kernels(isa).join(nullptr, nullptr, 0, Dtype::bfloat16, nullptr);
    kernels(isa).load_moments(nullptr, nullptr, MomentDtype::block8, MomentKind::mean, 0, nullptr);
    kernels(isa).store_moments(nullptr, 0, MomentDtype::block8, MomentKind::mean, nullptr, nullptr);
    EXPECT_EQ(kernels(isa).land_gradient(nullptr, Dtype::float32, nullptr, Dtype::float32, 0,
                                         GradMode::add, {}),
              0.0);
  }
}

}  // namespace
}  // namespace strata::stored_forms_test
