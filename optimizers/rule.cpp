#include "optimizers/rule.hpp"

#include <cmath>

#include "memory/check.hpp"
#include "optimizers/coefficients.hpp"

namespace strata {

namespace {

void set_adam(const UpdateSpan& span, Coefficients& c) {
  const Hyper& hyper = *span.hyper;
  const auto step = static_cast<double>(span.step);
  const double correction1 = 1.0 - std::pow(hyper.beta1, step);
  const double correction2 = 1.0 - std::pow(hyper.beta2, step);

  const auto weight = static_cast<float>(1.0 - hyper.beta1);
  c.lerp_from_grad = weight >= 0.5f;
  c.lerp = c.lerp_from_grad ? weight - 1.0f : weight;
  c.beta2 = static_cast<float>(hyper.beta2);
  c.one_minus_beta2 = static_cast<float>(1.0 - hyper.beta2);
  c.denom_scale = static_cast<float>(1.0 / std::sqrt(correction2));
  c.eps = static_cast<float>(hyper.eps);
  c.minus_step_size = static_cast<float>(-hyper.lr / correction1);
  if (hyper.rule == Rule::adamw) {
    c.keep = static_cast<float>(1.0 - hyper.lr * hyper.weight_decay);
  }
}

void set_sgd(const UpdateSpan& span, Coefficients& c) {
  const Hyper& hyper = *span.hyper;
  c.first_step = span.step == 1;
  c.nesterov = hyper.nesterov;
  c.momentum = static_cast<float>(hyper.momentum);
  c.one_minus_dampening = static_cast<float>(1.0 - hyper.dampening);
  c.minus_step_size = static_cast<float>(-hyper.lr);
}

}  // namespace

Coefficients coefficients(const UpdateSpan& span) {
  Coefficients c;
  c.grad_scale = span.hyper->maximize ? -span.grad_scale : span.grad_scale;
  if (span.hyper->rule != Rule::adamw) {
    c.weight_decay = static_cast<float>(span.hyper->weight_decay);
  }
  if (span.hyper->rule == Rule::sgd) {
    set_sgd(span, c);
  } else {
    set_adam(span, c);
  }
  return c;
}

void check_update(const UpdateSpan& span) {
  STRATA_ASSERT(span.hyper != nullptr);
  STRATA_ASSERT(span.step >= 1);
  STRATA_ASSERT(span.grad_dtype == span.dtype || span.grad_dtype == Dtype::float32);
  if (span.count == 0) return;
  STRATA_ASSERT(span.param != nullptr);
  STRATA_ASSERT(span.new_param != nullptr);
  STRATA_ASSERT(span.grad != nullptr);
  STRATA_ASSERT((span.master != nullptr) == (span.dtype != Dtype::float32));
  const int moments = moment_count(span.hyper->rule, span.hyper->momentum);
  STRATA_ASSERT((span.moment1 != nullptr) || moments < 1);
  STRATA_ASSERT((span.moment2 != nullptr) || moments < 2);
}

void check_landing(Dtype to_dtype, Dtype from_dtype, GradMode mode) {
  STRATA_ASSERT(to_dtype == from_dtype || to_dtype == Dtype::float32);
  STRATA_ASSERT(mode == GradMode::copy || to_dtype == Dtype::float32);
}

Isa best_isa() {
#if defined(STRATA_X86_KERNELS)
  // F16C came with AVX, before AVX2; FMA can be masked separately by a hypervisor.
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Isa::scalar;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return avx512 ? Isa::avx512 : Isa::avx2;
#else
  return Isa::scalar;
#endif
}

std::string_view name(Isa isa) {
  switch (isa) {
    case Isa::scalar:
      return "scalar";
    case Isa::avx2:
      return "avx2";
    case Isa::avx512:
      return "avx512";
  }
  return "?";
}

const Kernels& kernels(Isa isa) {
  STRATA_ASSERT(isa <= best_isa());
#if defined(STRATA_X86_KERNELS)
  if (isa == Isa::avx512) return avx512_kernels();
  if (isa == Isa::avx2) return avx2_kernels();
#endif
  return scalar_kernels();
}

}  // namespace strata
