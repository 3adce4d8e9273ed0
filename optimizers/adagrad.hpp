// Duchi, Hazan and Singer, "Adaptive Subgradient Methods" (Adagrad); in torch.optim's order of
// operations.
//
// Threads: pure functions.
//
//   const AdagradMath<Vec8> adagrad(span);
//   adagrad(grad, param, sum, unused);
#pragma once

#include "optimizers/device_code.hpp"
#include "optimizers/lerp.hpp"
#include "optimizers/rule.hpp"

namespace strata {

template <class V>
struct AdagradMath {
  using F = typename V::F;
  static constexpr Rule kRule = Rule::adagrad;
  static constexpr int kMoments = 1;

  AdagradMath() = default;
  explicit AdagradMath(const UpdateSpan& span) : grad_scale(grad_scale_of<V>(span)) {
    const Hyper& hyper = *span.hyper;
    const double steps_before = static_cast<double>(span.step) - 1.0;
    weight_decay = V::set(static_cast<float>(hyper.weight_decay));
    eps = V::set(static_cast<float>(hyper.eps));
    minus_lr = V::set(static_cast<float>(-hyper.lr / (1.0 + steps_before * hyper.lr_decay)));
    initial = V::set(static_cast<float>(hyper.initial_accumulator));
    first_step = span.step == 1;
  }

  // Before the first step the sum is what the rule says, whatever its memory holds.
  STRATA_DEVICE_CODE void operator()(F grad, F& param, F& sum, F&) const {
    grad = V::fma(weight_decay, param, V::mul(grad, grad_scale));
    sum = V::fma(grad, grad, first_step ? initial : sum);
    param = V::fma(minus_lr, V::div(grad, V::add(V::sqrt(sum), eps)), param);
  }

  F grad_scale, weight_decay, eps, minus_lr, initial;
  bool first_step;
};

}  // namespace strata
