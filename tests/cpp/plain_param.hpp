// One parameter of a plain training: the same arithmetic by the scalar kernels, on one piece of
// memory that never moves. The simulator's oracle.
//
// Threads: none.
//
//   PlainParam plain(spec, accumulate, initial);
//   plain.land(gradient);
//   plain.update(hyper);
//   EXPECT_EQ(plain.bytes(), what_the_device_shows);
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "engine/config.hpp"
#include "optimizers/cpu/kernel.hpp"
#include "optimizers/half.hpp"

namespace strata {

class PlainParam final {
 public:
  // `accumulate`: gradients rest, and add up, in float32.
  PlainParam(const ParamSpec& spec, bool accumulate, const std::vector<float>& initial)
      : numel_(spec.numel),
        dtype_(spec.dtype),
        trainable_(spec.trainable),
        accumulate_(accumulate),
        param_(numel_ * size_of(dtype_)),
        master_(numel_ * 4),
        grad_(numel_ * 4),
        moment1_(numel_),
        moment2_(numel_) {
    kernels(Isa::scalar).split(initial.data(), numel_, dtype_, param_.data(), master_.data());
  }

  // As the device shows it.
  const std::vector<std::byte>& bytes() const { return param_; }
  std::int64_t steps() const { return steps_; }
  // As pages hold them.
  const std::vector<std::byte>& master_bytes() const { return master_; }
  const std::vector<float>& moment(int number) const { return number == 1 ? moment1_ : moment2_; }

  // What is read from outside: the master where there is one.
  std::vector<float> master() const {
    std::vector<float> values(numel_);
    if (trainable_ && dtype_ != Dtype::float32) {
      kernels(Isa::scalar).join(param_.data(), master_.data(), numel_, dtype_, values.data());
    } else {
      kernels(Isa::scalar)
          .land_gradient(values.data(), Dtype::float32, param_.data(), dtype_, numel_,
                         GradMode::copy, {});
    }
    return values;
  }

  void set_to_zero() {
    std::fill(param_.begin(), param_.end(), std::byte{0});
    std::fill(master_.begin(), master_.end(), std::byte{0});
  }

  void land(const std::vector<std::byte>& gradient) { land(gradient, dtype_); }
  void land(const std::vector<std::byte>& gradient, Dtype dtype) {
    const bool adds = landed_++ != 0;
    kernels(Isa::scalar)
        .land_gradient(grad_.data(), grad_dtype(), gradient.data(), dtype, numel_,
                       adds ? GradMode::add : GradMode::copy, {});
  }
  bool has_gradient() const { return landed_ != 0; }
  bool trainable() const { return trainable_; }
  std::vector<float> gradient() const {
    std::vector<float> values(numel_);
    kernels(Isa::scalar).read_gradient(grad_.data(), grad_dtype(), {}, numel_, values.data());
    return values;
  }
  // Right away, and not when the gradient is used.
  void scale_gradient(float factor, bool divides) {
    const GradScaling scaling{.factor = factor, .divides = divides};
    std::vector<float> values(numel_);
    kernels(Isa::scalar).read_gradient(grad_.data(), grad_dtype(), scaling, numel_, values.data());
    for (std::size_t i = 0; i < numel_; ++i) {
      const std::uint32_t bits = std::bit_cast<std::uint32_t>(values[i]);
      const std::uint16_t half = grad_dtype() == Dtype::float16
                                     ? float16_bits(values[i])
                                     : static_cast<std::uint16_t>(bits >> 16);
      if (grad_dtype() == Dtype::float32)
        std::memcpy(grad_.data() + i * 4, &bits, 4);
      else
        std::memcpy(grad_.data() + i * 2, &half, 2);
    }
  }
  void forget_gradient() { landed_ = 0; }

  // If a gradient has landed. `scale`: what it is multiplied with.
  void update(const Hyper& hyper, float scale = 1.0f) {
    if (landed_ == 0) return;
    landed_ = 0;
    UpdateSpan span;
    span.dtype = dtype_;
    span.grad_dtype = grad_dtype();
    span.count = numel_;
    span.param = param_.data();
    span.new_param = param_.data();
    span.master = dtype_ == Dtype::float32 ? nullptr : master_.data();
    span.moment1 = moment1_.data();
    span.moment2 = moment_count(hyper.rule, hyper.momentum) < 2 ? nullptr : moment2_.data();
    span.grad = grad_.data();
    span.hyper = &hyper;
    span.grad_scale = scale;
    if (counts_as_step(hyper)) ++steps_;
    span.step = std::max<std::int64_t>(steps_, 1);
    kernels(Isa::scalar).update(span);
  }

 private:
  Dtype grad_dtype() const { return accumulate_ ? Dtype::float32 : dtype_; }

  std::size_t numel_;
  Dtype dtype_;
  bool trainable_, accumulate_;
  std::vector<std::byte> param_, master_, grad_;
  std::vector<float> moment1_, moment2_;
  std::int64_t steps_ = 0;
  int landed_ = 0;
};

}  // namespace strata
