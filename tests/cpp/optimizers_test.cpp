// The update kernels: right against torch.optim, and the same bits on every instruction set at
// every length and offset. A failure prints the seed that replays it.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "device_fixtures.hpp"
#include "optimizers/rule.hpp"

namespace strata::optimizers_test {
namespace {

constexpr std::uint32_t kQuietNan = 0x7fc00000;

// The streams of one parameter, with elements before and after that no kernel may touch.
struct Streams {
  static constexpr std::size_t kGuard = 37;  // odd, so that nothing is aligned

  Streams(Dtype dtype_, Dtype grad_dtype_, std::size_t count_)
      : dtype(dtype_), grad_dtype(grad_dtype_), count(count_) {
    const std::size_t all = count + 2 * kGuard;
    param.assign(all * size_of(dtype), std::byte{0x5a});
    master.assign(all * master_bytes(dtype), std::byte{0x5a});
    moment1.assign(all, 0.0f);
    moment2.assign(all, 0.0f);
    grad.assign(all * size_of(grad_dtype), std::byte{0x5a});
  }

  std::byte* param_at(std::size_t i) { return param.data() + (kGuard + i) * size_of(dtype); }
  std::byte* master_at(std::size_t i) {
    return master.empty() ? nullptr : master.data() + (kGuard + i) * master_bytes(dtype);
  }
  std::byte* grad_at(std::size_t i) { return grad.data() + (kGuard + i) * size_of(grad_dtype); }

  UpdateSpan span(const Hyper& hyper, std::int64_t step, std::size_t begin, std::size_t end) {
    return {.dtype = dtype,
            .grad_dtype = grad_dtype,
            .count = end - begin,
            .param = param_at(begin),
            .new_param = param_at(begin),
            .master = master_at(begin),
            .moment1 = moment1.data() + kGuard + begin,
            .moment2 = moment2.data() + kGuard + begin,
            .grad = grad_at(begin),
            .hyper = &hyper,
            .step = step};
  }
  UpdateSpan span(const Hyper& hyper, std::int64_t step) { return span(hyper, step, 0, count); }

  void set_params(const std::vector<float>& values) {
    kernels(Isa::scalar).split(values.data(), count, dtype, param_at(0), master_at(0));
  }
  std::vector<float> params() {
    std::vector<float> values(count);
    kernels(Isa::scalar).join(param_at(0), master_at(0), count, dtype, values.data());
    return values;
  }
  void set_grad(const std::vector<float>& values) {
    if (values.empty()) return;
    if (grad_dtype == Dtype::float32) {
      std::memcpy(grad_at(0), values.data(), count * sizeof(float));
    } else {
      std::vector<float> master_unused(count);
      kernels(Isa::scalar)
          .split(values.data(), count, grad_dtype, grad_at(0), master_unused.data());
    }
  }
  std::vector<float> grads() {
    std::vector<float> values(count);
    kernels(Isa::scalar)
        .land_gradient(values.data(), Dtype::float32, grad_at(0), grad_dtype, count, GradMode::copy,
                       {});
    return values;
  }

  bool same_bits(const Streams& other) const {
    const auto equal = [](const auto& a, const auto& b) {
      return a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0;
    };
    return equal(param, other.param) && equal(master, other.master) && equal(grad, other.grad) &&
           equal(moment1, other.moment1) && equal(moment2, other.moment2);
  }

  Dtype dtype, grad_dtype;
  std::size_t count;
  std::vector<std::byte> param, master, grad;
  std::vector<float> moment1, moment2;
};

// Ordinary numbers, and now and then one of those that break things.
float any_float(std::mt19937_64& random) {
  if (random() % 8 != 0) return std::normal_distribution<float>(0.0f, 0.1f)(random);
  constexpr std::uint32_t kSpecial[] = {0,          0x80000000, 1,          0x807fffff, 0x00800000,
                                        0x7f7fffff, 0xff7fffff, 0x7f800000, 0xff800000, 0x7fc00001,
                                        0xffffffff, 0x7f800001, 0x3f7fffff, 0x3f808000, 0x33000000};
  if (random() % 4 == 0) return std::bit_cast<float>(static_cast<std::uint32_t>(random()));
  return std::bit_cast<float>(kSpecial[random() % std::size(kSpecial)]);
}

std::vector<float> any_floats(std::size_t count, std::mt19937_64& random) {
  std::vector<float> values(count);
  for (float& value : values) value = any_float(random);
  return values;
}

Hyper any_hyper(std::mt19937_64& random) {
  constexpr Rule kRules[] = {Rule::adamw, Rule::adam, Rule::sgd, Rule::lion, Rule::adagrad};
  constexpr double kBetas[] = {0.0, 0.3, 0.5, 0.9, 0.999};
  Hyper hyper;
  hyper.rule = kRules[random() % std::size(kRules)];
  hyper.lr = 1e-2;
  hyper.beta1 = kBetas[random() % 5];
  hyper.beta2 = kBetas[random() % 5];
  hyper.eps = random() % 4 == 0 ? 0.0 : 1e-8;
  hyper.weight_decay = random() % 2 == 0 ? 0.0 : 0.1;
  hyper.momentum = random() % 2 == 0 ? 0.0 : 0.9;
  hyper.dampening = random() % 2 == 0 ? 0.0 : 0.5;
  hyper.lr_decay = random() % 2 == 0 ? 0.0 : 0.1;
  hyper.initial_accumulator = random() % 2 == 0 ? 0.0 : 0.5;
  hyper.nesterov = random() % 2 == 0;
  hyper.maximize = random() % 2 == 0;
  return hyper;
}

std::string text(const Hyper& hyper) {
  return "rule " + std::to_string(static_cast<int>(hyper.rule)) + " beta1 " +
         std::to_string(hyper.beta1) + " momentum " + std::to_string(hyper.momentum);
}

TEST(Update, EveryInstructionSetGivesTheSameBits) {
  for (std::uint64_t seed = 0; seed < 600; ++seed) {
    std::mt19937_64 random(seed);
    const Dtype dtype = kDtypes[random() % 3];
    const Dtype grad_dtype = random() % 2 == 0 ? dtype : Dtype::float32;
    const std::size_t count = random() % 4 == 0 ? random() % 3000 : random() % 70;
    const Hyper hyper = any_hyper(random);
    SCOPED_TRACE("seed " + std::to_string(seed) + " " + name(dtype) + " grad " + name(grad_dtype) +
                 " count " + std::to_string(count) + " " + text(hyper));

    Streams start(dtype, grad_dtype, count);
    start.set_params(any_floats(count, random));
    start.set_grad(any_floats(count, random));
    for (std::size_t i = 0; i < count; ++i) {
      start.moment1[Streams::kGuard + i] = any_float(random);
      start.moment2[Streams::kGuard + i] = std::fabs(any_float(random));
    }
    const auto step = static_cast<std::int64_t>(1 + random() % 3);
    const float grad_scale = random() % 2 == 0 ? 1.0f : 0.37f;
    GradScaling scaling;
    if (random() % 2 == 0) scaling = {.factor = 0.3f, .divides = random() % 2 == 0};
    const std::size_t cut = count == 0 ? 0 : random() % count;

    Streams expected = start;
    UpdateSpan span = expected.span(hyper, step);
    span.grad_scale = grad_scale;
    span.scaling = scaling;
    kernels(Isa::scalar).update(span);
    for (const Isa isa : isas()) {
      Streams actual = start;
      // In two pieces, so that what was inside a vector is now at its edge.
      for (UpdateSpan piece :
           {actual.span(hyper, step, 0, cut), actual.span(hyper, step, cut, count)}) {
        piece.grad_scale = grad_scale;
        piece.scaling = scaling;
        kernels(isa).update(piece);
      }
      ASSERT_TRUE(actual.same_bits(expected)) << name(isa);
    }
  }
}

// Values printed by torch 2.13 for parameters 0.5, -0.25, 1, -2 and the three gradients below.
TEST(Update, GivesWhatTorchGives) {
  struct Golden {
    Hyper hyper;
    float expected[4];
  };
  const Golden golden[] = {
      {{.rule = Rule::adamw, .lr = 0.01, .weight_decay = 0.1},
       {0.482589036f, -0.242154375f, 0.976987958f, -1.99490047f}},
      {{.rule = Rule::adamw,
        .lr = 0.01,
        .beta1 = 0.3,
        .beta2 = 0.95,
        .weight_decay = 0.1,
        .maximize = true},
       {0.510493636f, -0.25055787f, 1.01774621f, -1.98561633f}},
      {{.rule = Rule::adam, .lr = 0.01, .weight_decay = 0.1},
       {0.482993633f, -0.240490407f, 0.976622701f, -1.99633694f}},
      {{.rule = Rule::sgd, .lr = 0.1}, {0.540000021f, -0.254999995f, 0.782499969f, -2.13499999f}},
      {{.rule = Rule::sgd, .lr = 0.1, .weight_decay = 0.01, .momentum = 0.9, .dampening = 0.5},
       {0.473352551f, -0.218542278f, 0.826471031f, -2.01583529f}},
      {{.rule = Rule::sgd,
        .lr = 0.1,
        .weight_decay = 0.01,
        .momentum = 0.9,
        .nesterov = true,
        .maximize = true},
       {0.475589037f, -0.248905659f, 1.44099617f, -1.70793915f}},
  };
  const std::vector<std::vector<float>> grads = {
      {0.1f, -0.2f, 0.3f, -0.4f}, {0.5f, 0.25f, -0.125f, 1.0f}, {-1.0f, 0.0f, 2.0f, 0.75f}};

  for (const Golden& one : golden) {
    SCOPED_TRACE(text(one.hyper));
    Streams streams(Dtype::float32, Dtype::float32, 4);
    streams.set_params({0.5f, -0.25f, 1.0f, -2.0f});
    for (std::size_t step = 0; step < grads.size(); ++step) {
      streams.set_grad(grads[step]);
      kernels(best_isa()).update(streams.span(one.hyper, static_cast<std::int64_t>(step) + 1));
    }
    const std::vector<float> params = streams.params();
    for (std::size_t i = 0; i < 4; ++i) {
      EXPECT_NEAR(params[i], one.expected[i], 3e-7 * std::fabs(one.expected[i])) << i;
    }
  }
}

// AdamW written out in double. Every dtype keeps a float32 master, so all of them stay within
// float32 rounding of it when they see the same gradients.
TEST(Update, AdamwStaysWithinRoundingOfDouble) {
  const Hyper hyper{.rule = Rule::adamw, .lr = 1e-3, .weight_decay = 0.1};
  for (const Dtype dtype : kDtypes) {
    SCOPED_TRACE(name(dtype));
    std::mt19937_64 random(7);
    std::uniform_real_distribution<float> magnitude(0.1f, 1.0f);
    const std::size_t count = 1000;
    Streams streams(dtype, dtype, count);
    std::vector<float> values(count);
    for (float& value : values) value = magnitude(random) * (random() % 2 == 0 ? 1.0f : -1.0f);
    streams.set_params(values);

    std::vector<double> param(values.begin(), values.end());
    std::vector<double> exp_avg(count), exp_avg_sq(count);
    for (int step = 1; step <= 20; ++step) {
      for (float& value : values) value = std::normal_distribution<float>(0.1f, 1.0f)(random);
      streams.set_grad(values);
      const std::vector<float> grad = streams.grads();
      UpdateSpan span = streams.span(hyper, step);
      span.grad_scale = 0.5f;
      kernels(best_isa()).update(span);
      for (std::size_t i = 0; i < count; ++i) {
        const double g = 0.5 * static_cast<double>(grad[i]);
        param[i] *= 1.0 - hyper.lr * hyper.weight_decay;
        exp_avg[i] = hyper.beta1 * exp_avg[i] + (1.0 - hyper.beta1) * g;
        exp_avg_sq[i] = hyper.beta2 * exp_avg_sq[i] + (1.0 - hyper.beta2) * g * g;
        const double corrected = exp_avg[i] / (1.0 - std::pow(hyper.beta1, step));
        const double variance = exp_avg_sq[i] / (1.0 - std::pow(hyper.beta2, step));
        param[i] -= hyper.lr * corrected / (std::sqrt(variance) + hyper.eps);
      }
    }
    const std::vector<float> result = streams.params();
    for (std::size_t i = 0; i < count; ++i) {
      ASSERT_NEAR(result[i], param[i], 1e-6 * std::fabs(param[i])) << "element " << i;
    }
  }
}

// Copy on write: readers of the old parameter see nothing of an update.
TEST(Update, ANewPlaceForTheParameterLeavesTheOldOneAlone) {
  for (const Isa isa : isas()) {
    for (const Dtype dtype : kDtypes) {
      for (const Rule rule : {Rule::adamw, Rule::sgd, Rule::lion, Rule::adagrad}) {
        SCOPED_TRACE(std::string(name(isa)) + " " + name(dtype));
        std::mt19937_64 random(3);
        const Hyper hyper{.rule = rule, .lr = 0.1, .weight_decay = 0.1};
        Streams in_place(dtype, dtype, 77);
        in_place.set_params(any_floats(77, random));
        in_place.set_grad(any_floats(77, random));
        Streams beside = in_place;
        const std::vector<std::byte> before = beside.param;

        kernels(isa).update(in_place.span(hyper, 1));
        std::vector<std::byte> new_param = before;
        UpdateSpan span = beside.span(hyper, 1);
        span.new_param = new_param.data() + (beside.param_at(0) - beside.param.data());
        kernels(isa).update(span);

        EXPECT_EQ(beside.param, before);
        EXPECT_NE(new_param, before);
        beside.param = new_param;
        EXPECT_TRUE(beside.same_bits(in_place));
      }
    }
  }
}

TEST(Update, ALargeStepHasNoBiasCorrectionLeft) {
  const Hyper hyper{.rule = Rule::adamw, .lr = 0.5, .eps = 0.0};
  for (const std::int64_t step : {std::int64_t{1} << 24, std::int64_t{1} << 40}) {
    Streams streams(Dtype::float32, Dtype::float32, 1);
    streams.set_params({1.0f});
    streams.set_grad({0.0f});
    streams.moment1[Streams::kGuard] = 1.0f;
    streams.moment2[Streams::kGuard] = 4.0f;
    kernels(best_isa()).update(streams.span(hyper, step));
    EXPECT_NEAR(streams.params()[0], 1.0 - 0.5 * 0.9 / std::sqrt(4.0 * 0.999), 1e-6);
  }
}

TEST(Update, TheFirstStepOfMomentumIgnoresWhatTheBufferHeld) {
  const Hyper hyper{.rule = Rule::sgd, .lr = 1.0, .momentum = 0.9, .dampening = 0.5};
  Streams streams(Dtype::float32, Dtype::float32, 20);
  streams.set_params(std::vector<float>(20, 1.0f));
  streams.set_grad(std::vector<float>(20, 0.25f));
  std::fill(streams.moment1.begin(), streams.moment1.end(), std::bit_cast<float>(kQuietNan));
  kernels(best_isa()).update(streams.span(hyper, 1));
  EXPECT_EQ(streams.params(), std::vector<float>(20, 0.75f));
  EXPECT_EQ(streams.moment1[Streams::kGuard], 0.25f);
}

TEST(Update, TheFirstStepOfAdagradIgnoresWhatTheSumHeld) {
  const Hyper hyper{.rule = Rule::adagrad, .lr = 1.0, .eps = 0.0, .initial_accumulator = 12.0};
  Streams streams(Dtype::float32, Dtype::float32, 20);
  streams.set_params(std::vector<float>(20, 1.0f));
  streams.set_grad(std::vector<float>(20, 2.0f));
  std::fill(streams.moment1.begin(), streams.moment1.end(), std::bit_cast<float>(kQuietNan));
  kernels(best_isa()).update(streams.span(hyper, 1));
  EXPECT_EQ(streams.moment1[Streams::kGuard], 16.0f);
  EXPECT_EQ(streams.params(), std::vector<float>(20, 0.5f));
}

TEST(Update, LionTakesNoStepWhereItsDirectionIsZero) {
  const Hyper hyper{.rule = Rule::lion, .lr = 0.25};
  for (const Isa isa : isas()) {
    Streams streams(Dtype::float32, Dtype::float32, 20);
    streams.set_params(std::vector<float>(20, 1.0f));
    std::vector<float> grad(20, 0.0f);
    grad[1] = 1e-30f;
    grad[17] = -3.0f;
    streams.set_grad(grad);
    kernels(isa).update(streams.span(hyper, 1));
    std::vector<float> expected(20, 1.0f);
    expected[1] = 0.75f;
    expected[17] = 1.25f;
    EXPECT_EQ(streams.params(), expected);
  }
}

TEST(Update, AnInfiniteGradientMakesThatElementNanAndNoOther) {
  for (const Isa isa : isas()) {
    const Hyper hyper{};
    Streams streams(Dtype::bfloat16, Dtype::bfloat16, 33);
    streams.set_params(std::vector<float>(33, 1.0f));
    std::vector<float> grad(33, 0.5f);
    grad[32] = std::numeric_limits<float>::infinity();
    streams.set_grad(grad);
    kernels(isa).update(streams.span(hyper, 1));
    const std::vector<float> params = streams.params();
    for (std::size_t i = 0; i < 32; ++i) EXPECT_TRUE(std::isfinite(params[i])) << i;
    EXPECT_EQ(std::bit_cast<std::uint32_t>(params[32]), kQuietNan);
  }
}

TEST(Update, AMasterThatIsMissingIsRefused) {
  const Hyper hyper{};
  Streams streams(Dtype::bfloat16, Dtype::bfloat16, 4);
  UpdateSpan span = streams.span(hyper, 1);
  span.master = nullptr;
  EXPECT_DEATH(kernels(Isa::scalar).update(span), "master");
}

}  // namespace
}  // namespace strata::optimizers_test
