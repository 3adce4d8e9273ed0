// How a parameter rests with its float32 master, and how a gradient of any dtype is read.
//
// Threads: pure functions of the memory they are given.
//
//   const SplitMaster<Vec8> master(param, new_param, residual);
//   master.store(at, updated, Vec8::All{});
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "optimizers/device_code.hpp"
#include "optimizers/prefetch.hpp"
#include "optimizers/rule.hpp"
#include "optimizers/tables.hpp"

namespace strata {

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

  STRATA_DEVICE_CODE SplitMaster(const void* from, void* to, void* master)
      : param(static_cast<const std::uint16_t*>(from)),
        new_param(static_cast<std::uint16_t*>(to)),
        residual(static_cast<std::uint16_t*>(master)) {}

  template <std::size_t kCount>
  void prefetch(std::size_t at) const {
    prefetch_lines<V, kCount>(param + at);
    prefetch_lines<V, kCount>(residual + at);
  }
  template <class Lanes>
  STRATA_DEVICE_CODE typename V::F load(std::size_t at, Lanes lanes) const {
    const auto upper = V::bits(V::from_bfloat16(V::load(param + at, lanes)));
    return V::of_bits(V::plus(upper, V::widen(V::load(residual + at, lanes))));
  }
  template <class Lanes>
  STRATA_DEVICE_CODE void store(std::size_t at, typename V::F value, Lanes lanes) const {
    const auto bits = V::bits(V::one_nan(value));
    const auto rounded = V::plus(bits, V::set_bits(0x8000));
    V::store(new_param + at, V::narrow(V::template down<16>(rounded)), lanes);
    // bits - (param << 16) as 16 bits: param << 16 has none there.
    V::store(residual + at, V::narrow(V::both(bits, V::set_bits(0xffff))), lanes);
  }
};

// float16 has other exponent bits than float32: its master is whole.
template <class V>
struct FullMaster {
  std::uint16_t* new_param;
  float* master;

  STRATA_DEVICE_CODE FullMaster(const void*, void* to, void* master_memory)
      : new_param(static_cast<std::uint16_t*>(to)), master(static_cast<float*>(master_memory)) {}

  template <std::size_t kCount>
  void prefetch(std::size_t at) const {
    prefetch_lines<V, kCount>(new_param + at);
    prefetch_lines<V, kCount>(master + at);
  }
  template <class Lanes>
  STRATA_DEVICE_CODE typename V::F load(std::size_t at, Lanes lanes) const {
    return V::load(master + at, lanes);
  }
  template <class Lanes>
  STRATA_DEVICE_CODE void store(std::size_t at, typename V::F value, Lanes lanes) const {
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

  STRATA_DEVICE_CODE NoMaster(const void* from, void* to, void*)
      : param(static_cast<const float*>(from)), new_param(static_cast<float*>(to)) {}

  template <std::size_t kCount>
  void prefetch(std::size_t at) const {
    prefetch_lines<V, kCount>(param + at);
  }
  template <class Lanes>
  STRATA_DEVICE_CODE typename V::F load(std::size_t at, Lanes lanes) const {
    return V::load(param + at, lanes);
  }
  template <class Lanes>
  STRATA_DEVICE_CODE void store(std::size_t at, typename V::F value, Lanes lanes) const {
    V::store(new_param + at, V::one_nan(value), lanes);
  }
};

// What a float32 value becomes where it is stored as `dtype`, to nearest with ties to even, as
// float32 again.
template <class V, Dtype dtype>
STRATA_DEVICE_CODE typename V::F rounded_to(typename V::F value) {
  if constexpr (dtype == Dtype::float32) {
    return value;
  } else if constexpr (dtype == Dtype::float16) {
    return V::from_float16(V::to_float16(value));
  } else {
    const auto bits = V::bits(V::one_nan(value));
    const auto odd = V::both(V::template down<16>(bits), V::set_bits(1));
    const auto rounded = V::plus(bits, V::plus(odd, V::set_bits(0x7fff)));
    return V::of_bits(V::both(rounded, V::set_bits(0xffff0000)));
  }
}

// Reads a gradient of any dtype as float32.
template <class V, Dtype dtype>
struct Gradient {
  const void* from;

  template <std::size_t kCount>
  void prefetch(std::size_t at) const {
    if constexpr (dtype == Dtype::float32) {
      prefetch_lines<V, kCount>(static_cast<const float*>(from) + at);
    } else {
      prefetch_lines<V, kCount>(static_cast<const std::uint16_t*>(from) + at);
    }
  }
  template <class Lanes>
  STRATA_DEVICE_CODE typename V::F load(std::size_t at, Lanes lanes) const {
    if constexpr (dtype == Dtype::float32) {
      return V::load(static_cast<const float*>(from) + at, lanes);
    } else {
      const typename V::H half = V::load(static_cast<const std::uint16_t*>(from) + at, lanes);
      return dtype == Dtype::bfloat16 ? V::from_bfloat16(half) : V::from_float16(half);
    }
  }
  template <class Lanes>
  typename V::F added_to(typename V::F older, std::size_t at, Lanes lanes) const {
    return V::add(older, load(at, lanes));
  }
};

// Several of them, of the same elements, which are added one after another.
template <class V, Dtype dtype>
struct GradientPieces {
  std::span<const void* const> pieces;

  template <std::size_t kCount>
  void prefetch(std::size_t at) const {
    for (const void* piece : pieces) Gradient<V, dtype>{piece}.template prefetch<kCount>(at);
  }
  template <class Lanes>
  typename V::F added_to(typename V::F older, std::size_t at, Lanes lanes) const {
    for (const void* piece : pieces) older = Gradient<V, dtype>{piece}.added_to(older, at, lanes);
    return older;
  }
};

// A gradient that was scaled since it landed. What is read can be scaled later: on a GPU a branch
// after each load would wait for it, where many can be under way.
template <class V, Dtype dtype>
struct ScaledGradient {
  Gradient<V, dtype> stored;
  GradScaling scaling;

  template <class Lanes>
  typename V::F load(std::size_t at, Lanes lanes) const {
    return scaled(stored.load(at, lanes));
  }
  STRATA_DEVICE_CODE typename V::F scaled(typename V::F value) const {
    if (scaling.empty()) return value;
    const typename V::F factor = V::set(scaling.factor);
    return rounded_to<V, dtype>(scaling.divides ? V::div(value, factor) : V::mul(value, factor));
  }
};

template <class V, Dtype>
struct MasterOf;
template <class V>
struct MasterOf<V, Dtype::float32> {
  using Type = NoMaster<V>;
};
template <class V>
struct MasterOf<V, Dtype::float16> {
  using Type = FullMaster<V>;
};
template <class V>
struct MasterOf<V, Dtype::bfloat16> {
  using Type = SplitMaster<V>;
};

// Calls visit.operator()<dtype>(), with what is known at run time as a constant.
template <class Visit>
auto with_dtype(Dtype dtype, Visit visit) {
  switch (dtype) {
    case Dtype::float32:
      return visit.template operator()<Dtype::float32>();
    case Dtype::float16:
      return visit.template operator()<Dtype::float16>();
    case Dtype::bfloat16:
      break;
  }
  return visit.template operator()<Dtype::bfloat16>();
}

// Calls step(at, lanes) for every vector of `count` elements, the last of which may be partial.
template <class V, class Step>
void for_each_vector(std::size_t count, Step step) {
  std::size_t at = 0;
  for (; at + V::kLanes <= count; at += V::kLanes) step(at, typename V::All{});
  if (at < count) step(at, typename V::Some{count - at});
}

template <class V>
void split(const float* from, std::size_t count, Dtype dtype, void* param, void* master) {
  if (count != 0) check_master(dtype, param, master);
  with_dtype(dtype, [&]<Dtype kDtype>() {
    const typename MasterOf<V, kDtype>::Type stored(param, param, master);
    for_each_vector<V>(count, [&](std::size_t at, auto lanes) {
      stored.store(at, V::load(from + at, lanes), lanes);
    });
  });
}

template <class V>
void read_gradient(const void* from, Dtype dtype, const GradScaling& scaling, std::size_t count,
                   float* to) {
  with_dtype(dtype, [&]<Dtype kDtype>() {
    const ScaledGradient<V, kDtype> gradient{{from}, scaling};
    for_each_vector<V>(count, [&](std::size_t at, auto lanes) {
      V::store(to + at, gradient.load(at, lanes), lanes);
    });
  });
}

// A master is only read here; the storage types hold it as they do for an update.
template <class V>
void join(const void* param, const void* master, std::size_t count, Dtype dtype, float* to) {
  if (count != 0) check_master(dtype, param, master);
  with_dtype(dtype, [&]<Dtype kDtype>() {
    const typename MasterOf<V, kDtype>::Type stored(param, nullptr, const_cast<void*>(master));
    for_each_vector<V>(count, [&](std::size_t at, auto lanes) {
      V::store(to + at, stored.load(at, lanes), lanes);
    });
  });
}

}  // namespace strata
