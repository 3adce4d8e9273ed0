// Moments in short forms: the same bits on every instruction set and for every cut, right on
// average, never far off, and unchanged by a way through float32. A failure prints its seed.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "isas.hpp"
#include "optimizers/rule.hpp"

namespace strata::moments_test {
namespace {

constexpr MomentDtype kShort[] = {MomentDtype::bfloat16, MomentDtype::block8};
constexpr MomentKind kKinds[] = {MomentKind::mean, MomentKind::square};

std::string text(MomentDtype dtype) {
  return dtype == MomentDtype::bfloat16 ? "bfloat16" : "block8";
}

// Moments at rest, with an element and a scale behind them that nothing may touch.
struct Stored {
  Stored(MomentDtype dtype_, std::size_t count_)
      : dtype(dtype_),
        count(count_),
        bytes((count + 1) * size_of(dtype)),
        scales(dtype == MomentDtype::block8 ? (count + kMomentBlock - 1) / kMomentBlock + 1 : 0) {}

  std::uint16_t* scales_at(std::size_t i) {
    return scales.empty() ? nullptr : scales.data() + i / kMomentBlock;
  }
  void* at(std::size_t i) { return bytes.data() + i * size_of(dtype); }

  void store(const std::vector<float>& values, MomentKind kind, Isa isa) {
    kernels(isa).store_moments(values.data(), count, dtype, kind, at(0), scales_at(0));
  }
  std::vector<float> load(MomentKind kind, Isa isa = Isa::scalar) {
    std::vector<float> values(count);
    kernels(isa).load_moments(at(0), scales_at(0), dtype, kind, count, values.data());
    return values;
  }
  bool operator==(const Stored&) const = default;

  MomentDtype dtype;
  std::size_t count;
  std::vector<std::byte> bytes;
  std::vector<std::uint16_t> scales;
};

// A float32 parameter, its gradient and its moments.
struct State {
  State(MomentDtype dtype, std::size_t count)
      : param(count), grad(count), moment1(dtype, count), moment2(dtype, count) {}

  UpdateSpan span(const Hyper& hyper, std::int64_t step, std::size_t begin, std::size_t end) {
    return {.dtype = Dtype::float32,
            .grad_dtype = Dtype::float32,
            .count = end - begin,
            .param = param.data() + begin,
            .new_param = param.data() + begin,
            .moment_dtype = moment1.dtype,
            .moment1 = moment1.at(begin),
            .moment2 = moment2.at(begin),
            .scales1 = moment1.scales_at(begin),
            .scales2 = moment2.scales_at(begin),
            .grad = grad.data() + begin,
            .hyper = &hyper,
            .step = step,
            .param_id = 3,
            .first = begin};
  }
  void update(const Hyper& hyper, std::int64_t step, Isa isa = best_isa()) {
    kernels(isa).update(span(hyper, step, 0, param.size()));
  }
  bool same_bits(const State& other) const {
    return std::memcmp(param.data(), other.param.data(), param.size() * sizeof(float)) == 0 &&
           moment1 == other.moment1 && moment2 == other.moment2;
  }

  std::vector<float> param, grad;
  Stored moment1, moment2;
};

// Numbers of very different sizes, and now and then one of those that break things.
float any_float(std::mt19937_64& random) {
  constexpr float kSpecial[] = {0.0f,
                                -0.0f,
                                1e-45f,
                                -1e-45f,
                                std::numeric_limits<float>::min(),
                                std::numeric_limits<float>::max(),
                                std::numeric_limits<float>::infinity(),
                                std::numeric_limits<float>::quiet_NaN()};
  if (random() % 64 == 0) return kSpecial[random() % std::size(kSpecial)];
  return std::ldexp(std::normal_distribution<float>(0.0f, 1.0f)(random),
                    -static_cast<int>(random() % 14));
}

std::vector<float> any_floats(std::size_t count, MomentKind kind, std::mt19937_64& random) {
  std::vector<float> values(count);
  for (float& value : values) {
    value = any_float(random);
    if (kind == MomentKind::square) value = std::fabs(value);
  }
  return values;
}

Hyper any_hyper(std::mt19937_64& random) {
  constexpr Rule kRules[] = {Rule::adamw, Rule::adam, Rule::sgd, Rule::lion, Rule::adagrad};
  return {.rule = kRules[random() % std::size(kRules)],
          .weight_decay = random() % 2 == 0 ? 0.0 : 0.1,
          .momentum = random() % 4 == 0 ? 0.0 : 0.9};
}

TEST(Moments, EveryInstructionSetAndCutGivesTheSameBits) {
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    std::mt19937_64 random(seed);
    const MomentDtype dtype = kShort[random() % 2];
    const std::size_t count = 1 + random() % 300;
    const Hyper hyper = any_hyper(random);
    SCOPED_TRACE("seed " + std::to_string(seed) + " " + text(dtype) + " count " +
                 std::to_string(count) + " rule " + std::to_string(static_cast<int>(hyper.rule)));
    State start(dtype, count);
    start.param = any_floats(count, MomentKind::mean, random);
    start.grad = any_floats(count, MomentKind::mean, random);
    start.moment1.store(any_floats(count, moment_kind(hyper.rule, 1), random),
                        moment_kind(hyper.rule, 1), Isa::scalar);
    start.moment2.store(any_floats(count, moment_kind(hyper.rule, 2), random),
                        moment_kind(hyper.rule, 2), Isa::scalar);
    const auto step = static_cast<std::int64_t>(1 + random() % 3);
    const std::size_t cut = random() % (count / kMomentBlock + 1) * kMomentBlock;

    State expected = start;
    expected.update(hyper, step, Isa::scalar);
    for (const Isa isa : isas()) {
      State actual = start;
      kernels(isa).update(actual.span(hyper, step, cut, count));
      kernels(isa).update(actual.span(hyper, step, 0, cut));
      ASSERT_TRUE(actual.same_bits(expected)) << name(isa);
    }
  }
}

TEST(Moments, StoringAndLoadingGiveTheSameBitsOnEveryInstructionSet) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    std::mt19937_64 random(seed);
    const MomentDtype dtype = kShort[random() % 2];
    const MomentKind kind = kKinds[random() % 2];
    const std::size_t count = 1 + random() % 300;
    SCOPED_TRACE("seed " + std::to_string(seed) + " " + text(dtype));
    const std::vector<float> values = any_floats(count, kind, random);
    Stored expected(dtype, count);
    expected.store(values, kind, Isa::scalar);
    const std::vector<float> loaded = expected.load(kind);
    for (const Isa isa : isas()) {
      Stored actual(dtype, count);
      actual.store(values, kind, isa);
      ASSERT_TRUE(actual == expected) << name(isa);
      const std::vector<float> again = actual.load(kind, isa);
      ASSERT_EQ(std::memcmp(again.data(), loaded.data(), count * sizeof(float)), 0) << name(isa);
    }
  }
}

// Checkpoints hold float32: what was loaded from one must be what was saved.
TEST(Moments, StoringWhatWasLoadedChangesNoBit) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    std::mt19937_64 random(seed);
    const MomentDtype dtype = kShort[random() % 2];
    const Hyper hyper{.rule = random() % 2 == 0 ? Rule::adamw : Rule::adagrad};
    SCOPED_TRACE("seed " + std::to_string(seed) + " " + text(dtype));
    State state(dtype, 200);
    for (int step = 1; step <= 3; ++step) {
      // Down to where nothing but subnormal numbers is left.
      state.grad = any_floats(200, MomentKind::mean, random);
      const int down = seed % 4 == 0 ? -60 : 0;
      for (float& value : state.grad) value = std::ldexp(value, down);
      state.update(hyper, step);
    }
    for (const int number : {1, 2}) {
      Stored& stored = number == 1 ? state.moment1 : state.moment2;
      const MomentKind kind = moment_kind(hyper.rule, number);
      Stored again(dtype, 200);
      again.store(stored.load(kind), kind, best_isa());
      ASSERT_TRUE(again == stored) << "moment " << number;
    }
  }
}

// The moments after a first step that makes them the gradient, or its square.
std::vector<float> drawn(MomentDtype dtype, MomentKind kind, const std::vector<float>& grad,
                         std::uint32_t param_id, std::int64_t step) {
  const Hyper mean{.rule = Rule::sgd, .momentum = 0.5};
  const Hyper square{.rule = Rule::adagrad};
  const Hyper& hyper = kind == MomentKind::mean ? mean : square;
  State state(dtype, grad.size());
  state.grad = grad;
  UpdateSpan span = state.span(hyper, step, 0, grad.size());
  span.param_id = param_id;
  kernels(best_isa()).update(span);
  return state.moment1.load(kind);
}

// How far apart the numbers around a value are that a block with that largest magnitude can hold.
double step_around(double value, double largest, MomentDtype dtype, MomentKind kind) {
  if (dtype == MomentDtype::bfloat16) return std::fabs(value) / 128;
  const double last = kind == MomentKind::mean ? 127 : 255;
  if (kind == MomentKind::mean) return 1.01 * largest / last;
  return 1.01 * largest * (2 * std::sqrt(value / largest) * last + 1) / (last * last);
}

TEST(Moments, RoundingIsRightOnAverage) {
  constexpr int kDraws = 4000;
  const std::vector<float> one_block = {1.0f,  -0.9f,   0.77f,  -0.5001f, 0.123f,
                                        0.01f, -0.007f, 0.005f, 0.0f};
  for (const MomentDtype dtype : kShort) {
    for (const MomentKind kind : kKinds) {
      SCOPED_TRACE(text(dtype) + (kind == MomentKind::mean ? " mean" : " square"));
      std::vector<double> by_step(one_block.size()), by_param(one_block.size());
      std::vector<double> by_element(one_block.size());
      std::vector<float> many_blocks;
      for (int i = 0; i < kDraws; ++i) {
        many_blocks.insert(many_blocks.end(), one_block.begin(), one_block.end());
        many_blocks.resize((static_cast<std::size_t>(i) + 1) * kMomentBlock);
      }
      const std::vector<float> blocks = drawn(dtype, kind, many_blocks, 0, 1);
      for (int i = 0; i < kDraws; ++i) {
        const auto draw = static_cast<std::uint32_t>(i);
        const std::vector<float> steps = drawn(dtype, kind, one_block, 0, i + 1);
        const std::vector<float> params = drawn(dtype, kind, one_block, draw, 1);
        for (std::size_t k = 0; k < one_block.size(); ++k) {
          by_step[k] += static_cast<double>(steps[k]) / kDraws;
          by_param[k] += static_cast<double>(params[k]) / kDraws;
          by_element[k] += static_cast<double>(blocks[draw * kMomentBlock + k]) / kDraws;
        }
      }
      for (std::size_t k = 0; k < one_block.size(); ++k) {
        const double exact = kind == MomentKind::mean
                                 ? static_cast<double>(one_block[k])
                                 : static_cast<double>(one_block[k] * one_block[k]);
        // Five deviations of the mean of draws between two numbers one step apart.
        const double step = step_around(exact, 1.0, dtype, kind);
        const double tolerance = 5 * step / 2 / std::sqrt(kDraws);
        EXPECT_NEAR(by_step[k], exact, tolerance) << "element " << k;
        EXPECT_NEAR(by_param[k], exact, tolerance) << "element " << k;
        EXPECT_NEAR(by_element[k], exact, tolerance) << "element " << k;
      }
    }
  }
}

TEST(Moments, TheTwoMomentsDrawBitsOfTheirOwn) {
  // Both moments become (1 - beta) of the gradient or its square: numbers between two stored ones.
  const Hyper hyper{.rule = Rule::adamw, .beta1 = 0.5, .beta2 = 0.5};
  constexpr std::size_t kCount = 64 * 256;
  State state(MomentDtype::bfloat16, kCount);
  const float between = 1.0f + 0x1p-8f;  // halfway, and so nearly is its square over two
  state.grad.assign(kCount, between);
  state.update(hyper, 1);
  const std::vector<float> first = state.moment1.load(MomentKind::mean);
  const std::vector<float> second = state.moment2.load(MomentKind::square);
  const float low1 = *std::min_element(first.begin(), first.end());
  const float low2 = *std::min_element(second.begin(), second.end());
  int both = 0, up1 = 0, up2 = 0;
  for (std::size_t i = 0; i < kCount; ++i) {
    up1 += first[i] > low1;
    up2 += second[i] > low2;
    both += first[i] > low1 && second[i] > low2;
  }
  const double n = kCount;
  EXPECT_NEAR(up1 / n, 0.5, 0.02);
  EXPECT_GT(up2, 0);
  EXPECT_NEAR(both / n, (up1 / n) * (up2 / n), 0.02);
}

TEST(Moments, NearestIsWithinHalfAStep) {
  std::mt19937_64 random(5);
  for (const MomentDtype dtype : kShort) {
    for (const MomentKind kind : kKinds) {
      SCOPED_TRACE(text(dtype));
      std::vector<float> values(64 * 50 + 7);
      for (float& value : values) {
        value = std::ldexp(std::normal_distribution<float>()(random), -int(random() % 18));
        if (kind == MomentKind::square) value *= value;
      }
      Stored stored(dtype, values.size());
      stored.store(values, kind, best_isa());
      const std::vector<float> loaded = stored.load(kind);
      for (std::size_t i = 0; i < values.size(); ++i) {
        const std::size_t block = i / kMomentBlock * kMomentBlock;
        float largest = 0.0f;
        for (std::size_t k = block; k < std::min(values.size(), block + kMomentBlock); ++k) {
          largest = std::max(largest, std::fabs(values[k]));
        }
        const double step = step_around(std::fabs(values[i]), largest, dtype, kind);
        // The least square is not zero, so what is far below it moves by a whole step.
        const bool whole = kind == MomentKind::square && values[i] < largest / (255 * 255);
        ASSERT_LE(std::fabs(loaded[i] - values[i]), whole ? step : step / 2)
            << "element " << i << " value " << values[i] << " largest " << largest;
      }
    }
  }
}

TEST(Moments, APositiveSquareNeverBecomesZero) {
  for (const MomentDtype dtype : kShort) {
    std::vector<float> values;
    for (int exponent = -149; exponent < 128; ++exponent) {
      values.push_back(std::ldexp(1.0f, exponent));
    }
    values.push_back(0.0f);
    Stored stored(dtype, values.size());
    for (const Isa isa : isas()) {
      stored.store(values, MomentKind::square, isa);
      const std::vector<float> loaded = stored.load(MomentKind::square);
      for (std::size_t i = 0; i + 1 < values.size(); ++i) {
        ASSERT_GT(loaded[i], 0.0f) << text(dtype) << " 2^" << static_cast<int>(i) - 149;
      }
      EXPECT_EQ(loaded.back(), 0.0f);
    }
    // Nor by an update: beside a large one, every draw.
    const std::vector<float> grad = {1.0f, 1e-6f, 1e-12f, 1e-19f};
    for (std::uint32_t param_id = 0; param_id < 1000; ++param_id) {
      const std::vector<float> sums = drawn(dtype, MomentKind::square, grad, param_id, 1);
      for (const float sum : sums) ASSERT_GT(sum, 0.0f) << text(dtype) << " " << param_id;
    }
  }
}

TEST(Moments, WhatIsNotFiniteIsSeenAndStaysInItsBlock) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const MomentDtype dtype : kShort) {
    for (const float bad : {infinity, -infinity, std::numeric_limits<float>::quiet_NaN()}) {
      std::vector<float> values(100, 0.25f);
      values[70] = bad;
      Stored stored(dtype, values.size());
      stored.store(values, MomentKind::mean, best_isa());
      const std::vector<float> loaded = stored.load(MomentKind::mean);
      EXPECT_FALSE(std::isfinite(loaded[70])) << text(dtype);
      for (std::size_t i = 0; i < 64; ++i) ASSERT_NEAR(loaded[i], 0.25f, 1e-3f);
    }
  }
}

// A zero page is what a new parameter's moments rest in.
TEST(Moments, ZeroBytesAreZeroMoments) {
  for (const MomentDtype dtype : kShort) {
    for (const MomentKind kind : kKinds) {
      Stored stored(dtype, 100);
      const Stored fresh = stored;
      EXPECT_EQ(stored.load(kind), std::vector<float>(100, 0.0f));
      stored.store(std::vector<float>(100, 0.0f), kind, best_isa());
      EXPECT_TRUE(stored == fresh);
    }
  }
}

TEST(Moments, ASpanThatBeginsInsideABlockIsRefused) {
  const Hyper hyper{};
  State state(MomentDtype::block8, 128);
  UpdateSpan span = state.span(hyper, 1, 0, 128);
  span.first = 32;
  EXPECT_DEATH(kernels(Isa::scalar).update(span), "kMomentBlock");
  span.first = 64;
  span.scales2 = nullptr;
  EXPECT_DEATH(kernels(Isa::scalar).update(span), "scales");
}

}  // namespace
}  // namespace strata::moments_test
