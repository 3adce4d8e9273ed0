// Kingma and Ba, "Adam"; Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (AdamW); in
// torch.optim's order of operations.
//
// Threads: pure functions.
//
//   const AdamMath<Vec8, true> adamw(span);
//   adamw(grad, param, exp_avg, exp_avg_sq);
#pragma once

#include <cmath>

#include "optimizers/device_code.hpp"
#include "optimizers/lerp.hpp"
#include "optimizers/rule.hpp"

namespace strata {

template <class V, bool kDecoupled>
struct AdamMath {
  using F = typename V::F;
  static constexpr Rule kRule = kDecoupled ? Rule::adamw : Rule::adam;
  static constexpr int kMoments = 2;

  AdamMath() = default;
  explicit AdamMath(const UpdateSpan& span)
      : grad_scale(grad_scale_of<V>(span)), towards_grad(1.0 - span.hyper->beta1) {
    const Hyper& hyper = *span.hyper;
    const auto step = static_cast<double>(span.step);
    const double correction1 = 1.0 - std::pow(hyper.beta1, step);
    const double correction2 = 1.0 - std::pow(hyper.beta2, step);
    weight_decay = V::set(static_cast<float>(hyper.weight_decay));
    keep = V::set(static_cast<float>(1.0 - hyper.lr * hyper.weight_decay));
    beta2 = V::set(static_cast<float>(hyper.beta2));
    one_minus_beta2 = V::set(static_cast<float>(1.0 - hyper.beta2));
    denom_scale = V::set(static_cast<float>(1.0 / std::sqrt(correction2)));
    eps = V::set(static_cast<float>(hyper.eps));
    minus_step_size = V::set(static_cast<float>(-hyper.lr / correction1));
  }

  STRATA_DEVICE_CODE void operator()(F grad, F& param, F& exp_avg, F& exp_avg_sq) const {
    grad = V::mul(grad, grad_scale);
    if constexpr (kDecoupled) {
      param = V::mul(param, keep);
    } else {
      grad = V::fma(weight_decay, param, grad);
    }
    exp_avg = towards_grad(exp_avg, grad);
    exp_avg_sq = V::fma(V::mul(one_minus_beta2, grad), grad, V::mul(beta2, exp_avg_sq));
    const F denom = V::fma(V::sqrt(exp_avg_sq), denom_scale, eps);
    param = V::fma(minus_step_size, V::div(exp_avg, denom), param);
  }

  F grad_scale;
  Lerp<V> towards_grad;
  F weight_decay, keep, beta2, one_minus_beta2, denom_scale, eps, minus_step_size;
};

}  // namespace strata
