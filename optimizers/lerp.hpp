// What several rules compute alike.
//
// Threads: pure functions.
//
//   const Lerp<Vec8> towards_gradient(1.0 - hyper.beta1);
//   exp_avg = towards_gradient(exp_avg, grad);
#pragma once

#include "optimizers/device_code.hpp"
#include "optimizers/rule.hpp"

namespace strata {

// What a gradient is multiplied with first: negative where the rule maximizes.
template <class V>
typename V::F grad_scale_of(const UpdateSpan& span) {
  return V::set(span.hyper->maximize ? -span.grad_scale : span.grad_scale);
}

// Note [Lerp]
// start moves towards end by weight w. Like torch.lerp, the end that is nearer is the one we begin
// with: start + w (end - start) for w < 1/2, else end - (1 - w)(end - start), so that w = 1 gives
// the end itself. Either way the result is fma(factor, end - start, where we begin).
template <class V>
struct Lerp {
  using F = typename V::F;

  Lerp() = default;
  explicit Lerp(double weight_of_end) {
    const auto weight = static_cast<float>(weight_of_end);
    from_end = weight >= 0.5f;
    factor = V::set(from_end ? weight - 1.0f : weight);
  }
  STRATA_DEVICE_CODE F operator()(F start, F end) const {
    return V::fma(factor, V::sub(end, start), from_end ? end : start);
  }

  F factor;
  bool from_end;
};

}  // namespace strata
