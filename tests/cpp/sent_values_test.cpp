// Values that cross to another machine as codes: how far they are from what they were, and what
// becomes of those that are no numbers.
#include "optimizers/codes/sent_values.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "sent_codes.hpp"

namespace strata::sent_values_test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr Dtype kDtypes[] = {Dtype::float32, Dtype::float16, Dtype::bfloat16};

// Values of a dtype, by its kernels, which round to nearest, ties to even where it is float16.
std::vector<std::byte> as(Dtype dtype, const std::vector<float>& values) {
  std::vector<std::byte> result(values.size() * size_of(dtype));
  std::vector<float> rest(values.size());
  kernels(Isa::scalar).split(values.data(), values.size(), dtype, result.data(), rest.data());
  return result;
}

std::vector<float> floats(Dtype dtype, const std::vector<std::byte>& values) {
  std::vector<float> result(values.size() / size_of(dtype));
  kernels(Isa::scalar)
      .land_gradient(result.data(), Dtype::float32, values.data(), dtype, result.size(),
                     GradMode::copy, {});
  return result;
}

// What comes out at the other end.
std::vector<float> sent(const std::vector<float>& values, Dtype dtype, Isa isa = best_isa()) {
  return floats(dtype, rounded(as(dtype, values), dtype, isa));
}

std::vector<float> drawn(std::size_t count, std::uint64_t seed, float scale) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

// By block: its largest magnitude.
float magnitude(const std::vector<float>& values, std::size_t at) {
  const std::size_t first = at / kCodeBlock * kCodeBlock;
  float most = 0.0f;
  for (std::size_t i = first; i < std::min(first + kCodeBlock, values.size()); ++i)
    most = std::max(most, std::fabs(values[i]));
  return most;
}

double unit_of(Dtype dtype) {
  return dtype == Dtype::float32 ? 0x1p-23 : dtype == Dtype::float16 ? 0x1p-10 : 0x1p-7;
}

TEST(SentValues, AreAboutHalfOrAQuarterOfTheBytes) {
  constexpr std::size_t kPage = 64 * kKiB;
  EXPECT_EQ(sent_bytes(kPage / 2), kPage / 2 / 64 * 68);
  EXPECT_EQ(sent_bytes(kPage / 4), kPage / 4 / 64 * 68);
  EXPECT_EQ(sent_bytes(1), 68U);
  EXPECT_EQ(sent_bytes(65), 2 * 68U);
}

// Of every dtype and length: whole blocks, a part of one alone, and behind others.
TEST(SentValues, StayWithinAStepOfTheirBlock) {
  for (const Dtype dtype : kDtypes) {
    for (const std::size_t count : {1U, 63U, 64U, 65U, 640U, 1'000U}) {
      for (const float scale : {1e-3f, 1.0f, 300.0f}) {
        const auto values = floats(dtype, as(dtype, drawn(count, count, scale)));
        const auto come = sent(values, dtype);
        ASSERT_EQ(come.size(), count);
        for (std::size_t i = 0; i < count; ++i) {
          const double most = magnitude(values, i);
          // The step, the product that is rounded to the dtype, and three in float32.
          const double bound = most / 254 * (1 + 1e-4) + most * unit_of(dtype) / 2 + 6e-8;
          ASSERT_LE(std::fabs(double{come[i]} - double{values[i]}), bound)
              << name(dtype) << ", element " << i << " of " << count;
        }
      }
    }
  }
}

// A bound that codes of fewer bits would break: half of all values are off by a quarter of a step.
TEST(SentValues, UseAllSteps) {
  const auto values = drawn(6'400, 1, 1.0f);
  const auto come = sent(values, Dtype::float32);
  std::size_t far = 0;
  for (std::size_t i = 0; i < values.size(); ++i)
    far += std::fabs(come[i] - values[i]) > magnitude(values, i) / 254 / 2 ? 1U : 0U;
  EXPECT_GT(far, 2'000U);
  EXPECT_LT(far, 4'400U);
}

TEST(SentValues, OfSteps) {
  for (const Dtype dtype : kDtypes) {
    for (const float step : {1.0f, 0.125f, 32.0f}) {
      std::vector<float> values;
      for (int code = -127; code <= 127; ++code) values.push_back(static_cast<float>(code) * step);
      for (std::size_t at = 0; at < values.size(); at += kCodeBlock) values[at] = 127.0f * step;
      values.resize(300, 0.0f);  // and blocks of zeros
      EXPECT_EQ(sent(values, dtype), values) << name(dtype) << ", steps of " << step;
    }
  }
}

TEST(SentValues, NothingThatIsNoNumberPassesUnseen) {
  for (const Dtype dtype : kDtypes) {
    for (const float odd : {kNan, kInfinity, -kInfinity}) {
      for (const std::size_t place : {3U, 64U, 200U, 258U}) {
        std::vector<float> values = floats(dtype, as(dtype, drawn(260, 7, 1.0f)));
        values[place] = odd;
        const auto come = sent(values, dtype);
        for (std::size_t i = 0; i < values.size(); ++i) {
          EXPECT_EQ(std::isnan(come[i]), i / kCodeBlock == place / kCodeBlock)
              << name(dtype) << ", element " << i << ", with " << odd << " at " << place;
        }
      }
    }
  }
}

// Where products and quotients would have no float32.
TEST(SentValues, OfNoUsualSize) {
  for (const float huge : {2e36f, 3e38f}) {
    for (const float value : sent(std::vector<float>(64, huge), Dtype::float32))
      EXPECT_TRUE(std::isnan(value)) << huge;
  }
  for (const float tiny : {1e-37f, 1e-40f}) {
    EXPECT_EQ(sent(std::vector<float>(64, tiny), Dtype::float32), std::vector<float>(64, 0.0f));
  }
  for (const float fine : {9e35f, 2e-36f}) {
    for (const float value : sent(std::vector<float>(64, fine), Dtype::float32))
      EXPECT_NEAR(value / fine, 1.0f, 1e-6f);
  }
}

TEST(SentValues, AreTheSameOnEveryProcessor) {
  std::vector<float> values = drawn(1'000, 3, 2.0f);
  values[100] = kNan;
  for (const Dtype dtype : kDtypes) {
    const auto expected = sent(values, dtype, Isa::scalar);
    for (const Isa isa : {Isa::avx2, Isa::avx512}) {
      if (isa > best_isa()) continue;
      const auto come = sent(values, dtype, isa);
      EXPECT_EQ(std::memcmp(come.data(), expected.data(), come.size() * sizeof(float)), 0);
    }
  }
}

}  // namespace
}  // namespace strata::sent_values_test
