// The update kernels, written once over a vector type V: the straight line from memory through the
// arithmetic of a rule back to memory. Each instruction set instantiates them in a file of its own,
// so no code built for one processor can be called on another: everything here is a template over
// V.
//
// V gives lanes, the types F (floats), I (32-bit integers), H (16-bit values) and Sums (doubles),
// loads and stores of All or Some lanes, and correctly rounded arithmetic. See scalar.hpp for the
// list, with its meaning.
//
// Threads: pure functions of the memory they are given.
//
//   update<Vec8>(span);
#pragma once

#include <cstddef>

#include "memory/check.hpp"
#include "optimizers/adagrad.hpp"
#include "optimizers/adam.hpp"
#include "optimizers/lion.hpp"
#include "optimizers/masters.hpp"
#include "optimizers/moments.hpp"
#include "optimizers/prefetch.hpp"
#include "optimizers/rule.hpp"
#include "optimizers/sgd.hpp"
#include "optimizers/tables.hpp"

namespace strata {

// Note [Same bits everywhere]
// A span gives the same bits on every instruction set, wherever it begins or ends:
//   - each element is computed on its own, by additions, multiplications, divisions, square
//     roots and explicit fused multiply-adds, all correctly rounded by IEEE 754, in this order;
//   - the compiler may not fuse by itself (-ffp-contract=off);
//   - the last, partial vector runs the same operations with the missing lanes at zero;
//   - which NaN comes out of two NaNs depends on the instruction, so every NaN that is stored is
//     the one quiet NaN 0x7fc00000 (0x7fc0 in bfloat16, 0x7e00 in float16);
//   - moments in a short form are rounded block by block, so such a span begins with a block.
// It holds in the default floating-point environment: round to nearest, subnormal numbers kept.

template <class V, class Math, class Master, class Grad, template <class, class> class Moments>
struct Update {
  using F = typename V::F;
  static constexpr std::size_t kBlock = 32;

  explicit Update(const UpdateSpan& span)
      : math(span),
        master(span.param, span.new_param, span.master),
        grad{span.grad},
        moments(span) {}

  void run(std::size_t count) {
    if constexpr (Moments<V, Math>::kInPlace) {
      run(0, count);
    } else {
      for (std::size_t at = 0; at < count; at += kGroup) {
        const std::size_t here = count - at < kGroup ? count - at : kGroup;
        moments.open(at, here);
        run(at, at + here);
        moments.close(at, here);
      }
    }
  }

  void run(std::size_t at, std::size_t end) {
    for (; at + kBlock <= end; at += kBlock) {
      prefetch(at + kPrefetchDistance);
      for (std::size_t k = 0; k < kBlock; k += V::kLanes) update_lanes(at + k, typename V::All{});
    }
    for (; at + V::kLanes <= end; at += V::kLanes) update_lanes(at, typename V::All{});
    if (at < end) update_lanes(at, typename V::Some{end - at});
  }

  void prefetch(std::size_t at) const {
    master.template prefetch<kBlock>(at);
    grad.template prefetch<kBlock>(at);
    moments.template prefetch<kBlock>(at);
  }

  template <class Lanes>
  void update_lanes(std::size_t at, Lanes lanes) {
    // 1. Read every stream.
    F param = master.load(at, lanes);
    F value1 = V::set(0.0f);
    F value2 = V::set(0.0f);
    if constexpr (Math::kMoments >= 1) value1 = moments.template load<0>(at, lanes);
    if constexpr (Math::kMoments >= 2) value2 = moments.template load<1>(at, lanes);

    // 2. Compute.
    math(grad.load(at, lanes), param, value1, value2);

    // 3. Write back.
    if constexpr (Math::kMoments >= 1) moments.template store<0>(at, value1, lanes);
    if constexpr (Math::kMoments >= 2) moments.template store<1>(at, value2, lanes);
    master.store(at, param, lanes);
  }

  // Pointers by value: a store through float* could change what a reference to a span leads to.
  Math math;
  Master master;
  Grad grad;
  Moments<V, Math> moments;
};

template <class V, class Math, template <class, class> class Moments>
void update_with(const UpdateSpan& span) {
  with_dtype(span.dtype, [&]<Dtype kDtype>() {
    using Master = typename MasterOf<V, kDtype>::Type;
    const auto run = [&]<Dtype kGrad>() {
      Update<V, Math, Master, Gradient<V, kGrad>, Moments>(span).run(span.count);
    };
    if (span.grad_dtype == kDtype) return run.template operator()<kDtype>();
    run.template operator()<Dtype::float32>();
  });
}

template <class V, class Math>
void update_by(const UpdateSpan& span) {
  if constexpr (Math::kMoments > 0) {
    if (span.moment_dtype != MomentDtype::float32) {
      return update_with<V, Math, StoredMoments>(span);
    }
  }
  update_with<V, Math, PlainMoments>(span);
}

template <class V>
void update_scaled(const UpdateSpan& span);

template <class V>
void update(const UpdateSpan& span) {
  check_update(span);
  if (!span.scaling.empty()) return update_scaled<V>(span);
  switch (span.hyper->rule) {
    case Rule::adamw:
      return update_by<V, AdamMath<V, true>>(span);
    case Rule::adam:
      return update_by<V, AdamMath<V, false>>(span);
    case Rule::sgd:
      if (span.hyper->momentum != 0.0) return update_by<V, SgdMath<V, true>>(span);
      return update_by<V, SgdMath<V, false>>(span);
    case Rule::lion:
      return update_by<V, LionMath<V>>(span);
    case Rule::adagrad:
      return update_by<V, AdagradMath<V>>(span);
    case Rule::foreign:
      STRATA_ASSERT(false && "a foreign rule is not computed here");
  }
}

// Slice by slice, whose gradient is scaled on the stack: a gradient that was not scaled costs
// nothing more.
template <class V>
void update_scaled(const UpdateSpan& span) {
  constexpr std::size_t kSlice = 1024;
  static_assert(kSlice % kMomentBlock == 0);
  float grad[kSlice];
  for (std::size_t at = 0; at < span.count; at += kSlice) {
    UpdateSpan slice = slice_of(span, at, kSlice);
    read_gradient<V>(slice.grad, slice.grad_dtype, slice.scaling, slice.count, grad);
    slice.grad = grad;
    slice.grad_dtype = Dtype::float32;
    slice.scaling = {};
    update<V>(slice);
  }
}

}  // namespace strata
