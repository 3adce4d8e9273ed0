// What the kernels need of a span's hyperparameters: computed in double, as torch.optim does, and
// rounded to float32 once per span. Every instruction set reads the same numbers.
//
// Threads: pure functions.
//
//   const Coefficients c = coefficients(span);
#pragma once

#include "optimizers/rule.hpp"

namespace strata {

struct Coefficients {
  float grad_scale = 1.0f;    // negative where the rule maximizes
  float weight_decay = 0.0f;  // added to the gradient: adam, sgd
  // adamw and adam
  float keep = 1.0f;  // 1 - lr * weight_decay, adamw only
  float lerp = 0.0f;  // see Note [Lerp]
  bool lerp_from_grad = false;
  float beta2 = 0.0f;
  float one_minus_beta2 = 0.0f;
  float denom_scale = 1.0f;  // 1 / sqrt(1 - beta2^step)
  float eps = 0.0f;
  // all rules: what the direction is multiplied with before it is added to the parameter
  float minus_step_size = 0.0f;
  // sgd
  bool first_step = false;  // the momentum buffer starts as the gradient
  bool nesterov = false;
  float momentum = 0.0f;
  float one_minus_dampening = 1.0f;
};

// Note [Lerp]
// exp_avg moves towards the gradient by weight w = 1 - beta1. Like torch.lerp, the end that is
// nearer is the one we start from: exp_avg + w (grad - exp_avg) for w < 1/2, else
// grad - (1 - w)(grad - exp_avg), so that beta1 = 0 gives the gradient itself. Either way the
// result is fma(lerp, grad - exp_avg, start).
Coefficients coefficients(const UpdateSpan& span);

// REQUIRES, stated as assertions: every pointer that the rule and the dtypes need is there.
void check_update(const UpdateSpan& span);
void check_landing(Dtype to_dtype, Dtype from_dtype, GradMode mode);

// The instruction sets, each in a file of its own that is compiled for it.
const Kernels& scalar_kernels();
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();

}  // namespace strata
