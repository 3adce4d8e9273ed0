// The kernels, written once over a vector type V: the straight line from memory through the
// arithmetic back to memory. Each instruction set instantiates them in a file of its own, so no
// code built for one processor can be called on another: everything here is a template over V.
//
// V gives lanes, the types F (floats), H (16-bit values) and Sums (doubles), loads and stores of
// All or Some lanes, and correctly rounded arithmetic. See scalar.cpp for the list, with its
// meaning.
//
// Threads: pure functions of the memory they are given.
//
//   update<Vec8>(span);
#pragma once

#include <cstddef>
#include <cstdint>

#include "optimizers/coefficients.hpp"
#include "optimizers/rule.hpp"

namespace strata {

// Note [Same bits everywhere]
// A span gives the same bits on every instruction set, wherever it begins or ends:
//   - each element is computed on its own, by additions, multiplications, divisions, square
//     roots and explicit fused multiply-adds, all correctly rounded by IEEE 754, in this order;
//   - the compiler may not fuse by itself (-ffp-contract=off);
//   - the last, partial vector runs the same operations with the missing lanes at zero;
//   - which NaN comes out of two NaNs depends on the instruction, so every NaN that is stored is
//     the one quiet NaN 0x7fc00000 (0x7fc0 in bfloat16, 0x7e00 in float16).
// It holds in the default floating-point environment: round to nearest, subnormal numbers kept.

// Note [Prefetch]
// An update is bound by memory, and its square root and division leave the processor's window too
// short to see far ahead. So each block asks for the lines, one of 16-bit values and two of
// float32, that come kPrefetchDistance later. Asking beyond the end of a span is harmless: a
// prefetch never faults.
inline constexpr std::size_t kBlock = 32;
inline constexpr std::size_t kPrefetchDistance = 512;  // elements

template <class V, class T>
void prefetch_block(const T* stream) {
  constexpr std::size_t kLineBytes = 64;
  for (std::size_t i = 0; i < kBlock; i += kLineBytes / sizeof(T)) {
    __builtin_prefetch(stream + i);
  }
}

// Note [Split master]
// A bfloat16 parameter is the upper half of its own float32 master; the residual is the lower half.
// With `bits` the master's bits, param = (bits + 0x8000) >> 16 and residual = bits - (param << 16).
// This rounds to nearest with ties away from zero. With ties to even, as the processor rounds, a
// tie would leave a residual of +0x8000 or -0x8000, which do not both fit into 16 bits; this way it
// is -0x8000 … 0x7fff, always an int16, and (param << 16) + residual gives back every bit:
// subnormals, infinities, and the largest numbers, whose param is infinite while the pair is not.
// Limit: a param that something else wrote must have its residual set to zero.
template <class V>
struct SplitMaster {
  const std::uint16_t* param;
  std::uint16_t* new_param;
  std::uint16_t* residual;

  SplitMaster(const void* from, void* to, void* master)
      : param(static_cast<const std::uint16_t*>(from)),
        new_param(static_cast<std::uint16_t*>(to)),
        residual(static_cast<std::uint16_t*>(master)) {}

  void prefetch(std::size_t at) const {
    prefetch_block<V>(param + at);
    prefetch_block<V>(residual + at);
  }
  template <class Lanes>
  typename V::F load(std::size_t at, Lanes lanes) const {
    return V::join_halves(V::load(param + at, lanes), V::load(residual + at, lanes));
  }
  template <class Lanes>
  void store(std::size_t at, typename V::F value, Lanes lanes) const {
    const typename V::F clean = V::one_nan(value);
    V::store(new_param + at, V::upper_half_rounded(clean), lanes);
    V::store(residual + at, V::lower_half(clean), lanes);
  }
};

// float16 has other exponent bits than float32: its master is whole.
template <class V>
struct FullMaster {
  std::uint16_t* new_param;
  float* master;

  FullMaster(const void*, void* to, void* master_memory)
      : new_param(static_cast<std::uint16_t*>(to)), master(static_cast<float*>(master_memory)) {}

  void prefetch(std::size_t at) const {
    prefetch_block<V>(new_param + at);
    prefetch_block<V>(master + at);
  }
  template <class Lanes>
  typename V::F load(std::size_t at, Lanes lanes) const {
    return V::load(master + at, lanes);
  }
  template <class Lanes>
  void store(std::size_t at, typename V::F value, Lanes lanes) const {
    const typename V::F clean = V::one_nan(value);
    V::store(master + at, clean, lanes);
    V::store(new_param + at, V::to_float16(clean), lanes);
  }
};

// A float32 parameter is its own master.
template <class V>
struct NoMaster {
  const float* param;
  float* new_param;

  NoMaster(const void* from, void* to, void*)
      : param(static_cast<const float*>(from)), new_param(static_cast<float*>(to)) {}

  void prefetch(std::size_t at) const { prefetch_block<V>(param + at); }
  template <class Lanes>
  typename V::F load(std::size_t at, Lanes lanes) const {
    return V::load(param + at, lanes);
  }
  template <class Lanes>
  void store(std::size_t at, typename V::F value, Lanes lanes) const {
    V::store(new_param + at, V::one_nan(value), lanes);
  }
};

// Reads a gradient of any dtype as float32.
template <class V, Dtype dtype>
struct Gradient {
  const void* from;

  void prefetch(std::size_t at) const {
    if constexpr (dtype == Dtype::float32) {
      prefetch_block<V>(static_cast<const float*>(from) + at);
    } else {
      prefetch_block<V>(static_cast<const std::uint16_t*>(from) + at);
    }
  }
  template <class Lanes>
  typename V::F load(std::size_t at, Lanes lanes) const {
    if constexpr (dtype == Dtype::float32) {
      return V::load(static_cast<const float*>(from) + at, lanes);
    } else {
      const typename V::H half = V::load(static_cast<const std::uint16_t*>(from) + at, lanes);
      return dtype == Dtype::bfloat16 ? V::from_bfloat16(half) : V::from_float16(half);
    }
  }
};

// Kingma and Ba, "Adam"; Loshchilov and Hutter, "Decoupled Weight Decay Regularization"; in the
// order of torch.optim.
template <class V, bool kDecoupled>
struct AdamMath {
  using F = typename V::F;
  static constexpr int kMoments = 2;

  explicit AdamMath(const Coefficients& c)
      : grad_scale(V::set(c.grad_scale)),
        weight_decay(V::set(c.weight_decay)),
        keep(V::set(c.keep)),
        lerp(V::set(c.lerp)),
        beta2(V::set(c.beta2)),
        one_minus_beta2(V::set(c.one_minus_beta2)),
        denom_scale(V::set(c.denom_scale)),
        eps(V::set(c.eps)),
        minus_step_size(V::set(c.minus_step_size)),
        lerp_from_grad(c.lerp_from_grad) {}

  void operator()(F grad, F& param, F& exp_avg, F& exp_avg_sq) const {
    grad = V::mul(grad, grad_scale);
    if constexpr (kDecoupled) {
      param = V::mul(param, keep);
    } else {
      grad = V::fma(weight_decay, param, grad);
    }
    exp_avg = V::fma(lerp, V::sub(grad, exp_avg), lerp_from_grad ? grad : exp_avg);
    exp_avg_sq = V::fma(V::mul(one_minus_beta2, grad), grad, V::mul(beta2, exp_avg_sq));
    const F denom = V::fma(V::sqrt(exp_avg_sq), denom_scale, eps);
    param = V::fma(minus_step_size, V::div(exp_avg, denom), param);
  }

  F grad_scale, weight_decay, keep, lerp, beta2, one_minus_beta2, denom_scale, eps, minus_step_size;
  bool lerp_from_grad;
};

// Stochastic gradient descent, with torch.optim.SGD's momentum.
template <class V, bool kMomentum>
struct SgdMath {
  using F = typename V::F;
  static constexpr int kMoments = kMomentum ? 1 : 0;

  explicit SgdMath(const Coefficients& c)
      : grad_scale(V::set(c.grad_scale)),
        weight_decay(V::set(c.weight_decay)),
        momentum(V::set(c.momentum)),
        one_minus_dampening(V::set(c.one_minus_dampening)),
        minus_step_size(V::set(c.minus_step_size)),
        first_step(c.first_step),
        nesterov(c.nesterov) {}

  void operator()(F grad, F& param, F& buffer, F&) const {
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

template <class V, class Math, class Master, class Grad>
struct Update {
  using F = typename V::F;

  explicit Update(const UpdateSpan& span)
      : math(coefficients(span)),
        master(span.param, span.new_param, span.master),
        grad{span.grad},
        moment1(static_cast<float*>(span.moment1)),
        moment2(static_cast<float*>(span.moment2)) {}

  void run(std::size_t count) const {
    std::size_t at = 0;
    for (; at + kBlock <= count; at += kBlock) {
      prefetch(at + kPrefetchDistance);
      for (std::size_t k = 0; k < kBlock; k += V::kLanes) update_lanes(at + k, typename V::All{});
    }
    for (; at + V::kLanes <= count; at += V::kLanes) update_lanes(at, typename V::All{});
    if (at < count) update_lanes(at, typename V::Some{count - at});
  }

  void prefetch(std::size_t at) const {
    master.prefetch(at);
    grad.prefetch(at);
    if constexpr (Math::kMoments >= 1) prefetch_block<V>(moment1 + at);
    if constexpr (Math::kMoments >= 2) prefetch_block<V>(moment2 + at);
  }

  template <class Lanes>
  void update_lanes(std::size_t at, Lanes lanes) const {
    // 1. Read every stream.
    F param = master.load(at, lanes);
    F value1 = V::set(0.0f);
    F value2 = V::set(0.0f);
    if constexpr (Math::kMoments >= 1) value1 = V::load(moment1 + at, lanes);
    if constexpr (Math::kMoments >= 2) value2 = V::load(moment2 + at, lanes);

    // 2. Compute.
    math(grad.load(at, lanes), param, value1, value2);

    // 3. Write back.
    if constexpr (Math::kMoments >= 1) V::store(moment1 + at, V::one_nan(value1), lanes);
    if constexpr (Math::kMoments >= 2) V::store(moment2 + at, V::one_nan(value2), lanes);
    master.store(at, param, lanes);
  }

  // Pointers by value: a store through float* could change what a reference to a span leads to.
  Math math;
  Master master;
  Grad grad;
  float* moment1;
  float* moment2;
};

template <class V, class Math>
void update_with(const UpdateSpan& span) {
  const bool wide = span.grad_dtype == Dtype::float32;
  switch (span.dtype) {
    case Dtype::float32:
      return Update<V, Math, NoMaster<V>, Gradient<V, Dtype::float32>>(span).run(span.count);
    case Dtype::float16:
      if (wide)
        return Update<V, Math, FullMaster<V>, Gradient<V, Dtype::float32>>(span).run(span.count);
      return Update<V, Math, FullMaster<V>, Gradient<V, Dtype::float16>>(span).run(span.count);
    case Dtype::bfloat16:
      if (wide)
        return Update<V, Math, SplitMaster<V>, Gradient<V, Dtype::float32>>(span).run(span.count);
      return Update<V, Math, SplitMaster<V>, Gradient<V, Dtype::bfloat16>>(span).run(span.count);
  }
}

template <class V>
void update(const UpdateSpan& span) {
  check_update(span);
  switch (span.hyper->rule) {
    case Rule::adamw:
      return update_with<V, AdamMath<V, true>>(span);
    case Rule::adam:
      return update_with<V, AdamMath<V, false>>(span);
    case Rule::sgd:
      if (span.hyper->momentum != 0.0) return update_with<V, SgdMath<V, true>>(span);
      return update_with<V, SgdMath<V, false>>(span);
    case Rule::lion:
    case Rule::adagrad:
    case Rule::foreign:
      break;
  }
}

template <class V, class Master>
void split_with(const float* from, std::size_t count, void* param, void* master_memory) {
  const Master master(param, param, master_memory);
  std::size_t at = 0;
  for (; at + V::kLanes <= count; at += V::kLanes) {
    master.store(at, V::load(from + at, typename V::All{}), typename V::All{});
  }
  const typename V::Some rest{count - at};
  if (at < count) master.store(at, V::load(from + at, rest), rest);
}

template <class V>
void split(const float* from, std::size_t count, Dtype dtype, void* param, void* master) {
  switch (dtype) {
    case Dtype::float32:
      return split_with<V, NoMaster<V>>(from, count, param, master);
    case Dtype::float16:
      return split_with<V, FullMaster<V>>(from, count, param, master);
    case Dtype::bfloat16:
      return split_with<V, SplitMaster<V>>(from, count, param, master);
  }
}

// A master is only read here; the storage types hold it as they do for an update.
template <class V, class Master>
void join_with(const void* param, const void* master_memory, std::size_t count, float* to) {
  const Master master(param, nullptr, const_cast<void*>(master_memory));
  std::size_t at = 0;
  for (; at + V::kLanes <= count; at += V::kLanes) {
    V::store(to + at, master.load(at, typename V::All{}), typename V::All{});
  }
  const typename V::Some rest{count - at};
  if (at < count) V::store(to + at, master.load(at, rest), rest);
}

template <class V>
void join(const void* param, const void* master, std::size_t count, Dtype dtype, float* to) {
  switch (dtype) {
    case Dtype::float32:
      return join_with<V, NoMaster<V>>(param, master, count, to);
    case Dtype::float16:
      return join_with<V, FullMaster<V>>(param, master, count, to);
    case Dtype::bfloat16:
      return join_with<V, SplitMaster<V>>(param, master, count, to);
  }
}

}  // namespace strata
