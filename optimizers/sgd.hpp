// Stochastic gradient descent, with torch.optim.SGD's momentum.
//
// Threads: pure functions.
//
//   const SgdMath<Vec8, true> momentum(span);
//   momentum(grad, param, buffer, unused);
#pragma once

#include "optimizers/device_code.hpp"
#include "optimizers/lerp.hpp"
#include "optimizers/rule.hpp"

namespace strata {

template <class V, bool kMomentum>
struct SgdMath {
  using F = typename V::F;
  static constexpr Rule kRule = Rule::sgd;
  static constexpr int kMoments = kMomentum ? 1 : 0;

  SgdMath() = default;
  explicit SgdMath(const UpdateSpan& span)
      : grad_scale(grad_scale_of<V>(span)),
        weight_decay(V::set(static_cast<float>(span.hyper->weight_decay))),
        momentum(V::set(static_cast<float>(span.hyper->momentum))),
        one_minus_dampening(V::set(static_cast<float>(1.0 - span.hyper->dampening))),
        minus_step_size(V::set(static_cast<float>(-span.hyper->lr))),
        first_step(span.step == 1),
        nesterov(span.hyper->nesterov) {}

  STRATA_DEVICE_CODE void operator()(F grad, F& param, F& buffer, F&) const {
    grad = V::fma(weight_decay, param, V::mul(grad, grad_scale));
    if constexpr (kMomentum) {
      buffer = first_step ? grad : V::fma(one_minus_dampening, grad, V::mul(momentum, buffer));
      grad = nesterov ? V::fma(momentum, buffer, grad) : buffer;
    }
    param = V::fma(minus_step_size, grad, param);
  }

  F grad_scale, weight_decay, momentum, one_minus_dampening, minus_step_size;
  bool first_step, nesterov;
};

}  // namespace strata
