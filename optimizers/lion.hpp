// Chen et al., "Symbolic Discovery of Optimization Algorithms" (Lion): the step is the sign of a
// mean of gradients, and weight decay is decoupled. Its beta2 is commonly 0.99.
//
// Threads: pure functions.
//
//   const LionMath<Vec8> lion(span);
//   lion(grad, param, exp_avg, unused);
#pragma once

#include "optimizers/device_code.hpp"
#include "optimizers/lerp.hpp"
#include "optimizers/rule.hpp"

namespace strata {

template <class V>
struct LionMath {
  using F = typename V::F;
  static constexpr Rule kRule = Rule::lion;
  static constexpr int kMoments = 1;

  LionMath() = default;
  explicit LionMath(const UpdateSpan& span)
      : grad_scale(grad_scale_of<V>(span)),
        direction(1.0 - span.hyper->beta1),
        towards_grad(1.0 - span.hyper->beta2),
        keep(V::set(static_cast<float>(1.0 - span.hyper->lr * span.hyper->weight_decay))),
        minus_lr(V::set(static_cast<float>(-span.hyper->lr))) {}

  STRATA_DEVICE_CODE void operator()(F grad, F& param, F& exp_avg, F&) const {
    grad = V::mul(grad, grad_scale);
    param = V::fma(minus_lr, V::sign(direction(exp_avg, grad)), V::mul(param, keep));
    exp_avg = towards_grad(exp_avg, grad);
  }

  F grad_scale;
  Lerp<V> direction, towards_grad;
  F keep, minus_lr;
};

}  // namespace strata
