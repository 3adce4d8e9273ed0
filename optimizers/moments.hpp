// Moments of a span, as an update reads and writes them: float32 in place, or a short form, whose
// blocks are decoded to float32 on the stack, updated there like any other, and encoded again with
// rounding that draws its bits.
//
// Threads: pure functions of the memory they are given.
//
//   StoredMoments<Vec8, AdamMath<Vec8, true>> moments(span);
//   moments.open(at, count);  …  moments.close(at, count);
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "optimizers/moment_codes.hpp"
#include "optimizers/prefetch.hpp"
#include "optimizers/rule.hpp"
#include "optimizers/tables.hpp"

namespace strata {

// Note [Stochastic rounding]
// A second moment moves by a thousandth of itself in a step, less than any step of a short form:
// rounded to nearest it would stand still. So a number between two stored ones becomes the upper
// one as often as its place between them says, and what is stored is right on average.
// The 16 bits that decide are a hash of (param_id, element, step), low half for the first moment
// and high half for the second: the same for every page size, vector width and worker.

// Mixers of bits: the finalizer of SplitMix64 (Steele, Lea, Flood) and one of Wellons's "hash
// prospector", of two multiplications, which vectors of 32-bit lanes can do.
template <class V>
std::uint64_t mixed(std::uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

template <class V>
typename V::I mixed_lanes(typename V::I value) {
  value = V::times(V::differ(value, V::template down<16>(value)), V::set_bits(0x21f0aaadu));
  value = V::times(V::differ(value, V::template down<15>(value)), V::set_bits(0x735a2d97u));
  return V::differ(value, V::template down<15>(value));
}

// Note [Stochastic rounding]: the bits of one block, the last ones for its scales.
template <class V>
struct Draws {
  alignas(64) std::uint16_t low[kMomentBlock + 1];
  alignas(64) std::uint16_t high[kMomentBlock + 1];

  Draws(std::uint32_t param_id, std::int64_t step, std::uint64_t block) {
    const std::uint64_t of_step = mixed<V>(static_cast<std::uint64_t>(step) << 32 | param_id);
    const std::uint64_t of_block = mixed<V>(of_step + block);
    const auto key = static_cast<std::uint32_t>(of_block);
    const auto lanes = V::times(V::lane_numbers(), V::set_bits(kStride));
    for (std::size_t at = 0; at < kMomentBlock; at += V::kLanes) {
      const auto first = V::set_bits(key + static_cast<std::uint32_t>(at) * kStride);
      const auto bits = mixed_lanes<V>(V::plus(first, lanes));
      V::store(low + at, V::narrow(V::both(bits, V::set_bits(0xffff))), typename V::All{});
      V::store(high + at, V::narrow(V::template down<16>(bits)), typename V::All{});
    }
    low[kMomentBlock] = static_cast<std::uint16_t>(of_block >> 32);
    high[kMomentBlock] = static_cast<std::uint16_t>(of_block >> 48);
  }

 private:
  static constexpr std::uint32_t kStride = 0x9e3779b9;  // odd: no two elements share a state
};

// float32: exact, and nothing to open or close.
template <class V, class Math>
class PlainMoments {
 public:
  using F = typename V::F;
  static constexpr std::size_t kBlock = 32;

  explicit PlainMoments(const UpdateSpan& span)
      : streams_{static_cast<float*>(span.moment1), static_cast<float*>(span.moment2)} {}

  void prefetch(std::size_t at) const {
    for (int k = 0; k < Math::kMoments; ++k) prefetch_lines<V, kBlock>(streams_[k] + at);
  }
  void open(std::size_t, std::size_t) {}
  void close(std::size_t, std::size_t) {}

  template <int k, class Lanes>
  F load(std::size_t at, Lanes lanes) const {
    return V::load(streams_[k] + at, lanes);
  }
  template <int k, class Lanes>
  void store(std::size_t at, F value, Lanes lanes) {
    V::store(streams_[k] + at, V::one_nan(value), lanes);
  }

 private:
  float* streams_[2];
};

// The moments of a span whose rule computes on float32 all the same: open() decodes the block at
// `at`, load and store reach the elements of that block, close() encodes it.
template <class V, class Math>
class StoredMoments {
 public:
  using F = typename V::F;
  static constexpr std::size_t kBlock = kMomentBlock;

  explicit StoredMoments(const UpdateSpan& span)
      : dtype_(span.moment_dtype),
        streams_{static_cast<std::byte*>(span.moment1), static_cast<std::byte*>(span.moment2)},
        scales_{span.scales1, span.scales2},
        param_id_(span.param_id),
        step_(span.step),
        first_block_(span.first / kMomentBlock) {}

  void prefetch(std::size_t at) const {
    for (int k = 0; k < Math::kMoments; ++k) {
      const std::byte* const line = streams_[k] + at * size_of(dtype_);
      __builtin_prefetch(line);
      if (dtype_ == MomentDtype::bfloat16) __builtin_prefetch(line + kLineBytes);
    }
  }
  void open(std::size_t at, std::size_t count) {
    if constexpr (Math::kMoments >= 1) decode<0>(at, count);
    if constexpr (Math::kMoments >= 2) decode<1>(at, count);
  }
  void close(std::size_t at, std::size_t count) {
    if constexpr (Math::kMoments == 0) return;
    const Draws<V> draws(param_id_, step_, first_block_ + at / kMomentBlock);
    if constexpr (Math::kMoments >= 1) encode<0>(at, count, draws.low);
    if constexpr (Math::kMoments >= 2) encode<1>(at, count, draws.high);
  }

  template <int k, class Lanes>
  F load(std::size_t at, Lanes lanes) const {
    return V::load(values_[k] + at % kMomentBlock, lanes);
  }
  template <int k, class Lanes>
  void store(std::size_t at, F value, Lanes lanes) {
    V::store(values_[k] + at % kMomentBlock, value, lanes);
  }

 private:
  template <int k>
  static constexpr MomentKind kKind = moment_kind(Math::kRule, k + 1);

  template <int k>
  void decode(std::size_t at, std::size_t count) {
    decode_block<V, kKind<k>>(streams_[k] + at * size_of(dtype_), scales_[k] + at / kMomentBlock,
                              dtype_, count, values_[k]);
  }
  template <int k>
  void encode(std::size_t at, std::size_t count, const std::uint16_t* random) {
    encode_block<V, kKind<k>>(values_[k], random, count, dtype_, streams_[k] + at * size_of(dtype_),
                              scales_[k] + at / kMomentBlock);
  }

  MomentDtype dtype_;
  std::byte* streams_[2];
  std::uint16_t* scales_[2];
  std::uint32_t param_id_;
  std::int64_t step_;
  std::size_t first_block_;
  alignas(64) float values_[2][kMomentBlock];
};

template <class V, MomentKind kKind>
void load_moments_of(const void* from, const std::uint16_t* scales, MomentDtype dtype,
                     std::size_t count, float* to) {
  for (std::size_t at = 0; at < count; at += kMomentBlock) {
    const std::size_t here = count - at < kMomentBlock ? count - at : kMomentBlock;
    const auto* const stored = static_cast<const std::byte*>(from) + at * size_of(dtype);
    const std::uint16_t* const scale =
        dtype == MomentDtype::block8 ? scales + at / kMomentBlock : nullptr;
    alignas(64) float whole[kMomentBlock];
    decode_block<V, kKind>(stored, scale, dtype, here, whole);
    std::memcpy(to + at, whole, here * sizeof(float));
  }
}

template <class V>
void load_moments(const void* from, const std::uint16_t* scales, MomentDtype dtype, MomentKind kind,
                  std::size_t count, float* to) {
  if (count == 0) return;
  check_moments(dtype, from, scales);
  if (dtype == MomentDtype::float32) {
    std::memcpy(to, from, count * sizeof(float));
  } else if (kind == MomentKind::mean) {
    load_moments_of<V, MomentKind::mean>(from, scales, dtype, count, to);
  } else {
    load_moments_of<V, MomentKind::square>(from, scales, dtype, count, to);
  }
}

template <class V, MomentKind kKind>
void store_moments_of(const float* from, std::size_t count, MomentDtype dtype, void* to,
                      std::uint16_t* scales) {
  // Half of a step added before the rest is cut off: to nearest, ties away from zero.
  alignas(64) std::uint16_t half[kMomentBlock + 1];
  for (std::uint16_t& one : half) one = 0x8000;
  for (std::size_t at = 0; at < count; at += kMomentBlock) {
    const std::size_t here = count - at < kMomentBlock ? count - at : kMomentBlock;
    alignas(64) float whole[kMomentBlock] = {};
    std::memcpy(whole, from + at, here * sizeof(float));
    std::uint16_t* const scale =
        dtype == MomentDtype::block8 ? scales + at / kMomentBlock : nullptr;
    encode_block<V, kKind>(whole, half, here, dtype,
                           static_cast<std::byte*>(to) + at * size_of(dtype), scale);
  }
}

template <class V>
void store_moments(const float* from, std::size_t count, MomentDtype dtype, MomentKind kind,
                   void* to, std::uint16_t* scales) {
  if (count == 0) return;
  check_moments(dtype, to, scales);
  if (dtype == MomentDtype::float32) {
    std::memcpy(to, from, count * sizeof(float));
  } else if (kind == MomentKind::mean) {
    store_moments_of<V, MomentKind::mean>(from, count, dtype, to, scales);
  } else {
    store_moments_of<V, MomentKind::square>(from, count, dtype, to, scales);
  }
}

}  // namespace strata
