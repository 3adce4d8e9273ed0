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

#include "optimizers/device_code.hpp"
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
STRATA_DEVICE_CODE std::uint64_t mixed(std::uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

template <class V>
STRATA_DEVICE_CODE typename V::I mixed_lanes(typename V::I value) {
  value = V::times(V::differ(value, V::template down<16>(value)), V::set_bits(0x21f0aaadu));
  value = V::times(V::differ(value, V::template down<15>(value)), V::set_bits(0x735a2d97u));
  return V::differ(value, V::template down<15>(value));
}

// Note [Stochastic rounding]: what all bits of a step of a parameter come from, those of a block,
// and the 32 bits of the elements of a block from `at` on.
template <class V>
std::uint64_t step_bits(const UpdateSpan& span) {
  return mixed<V>(static_cast<std::uint64_t>(span.step) << 32 | span.param_id);
}

// `block`: counted from the beginning of the parameter.
template <class V>
STRATA_DEVICE_CODE std::uint64_t block_bits(std::uint64_t of_step, std::uint64_t block) {
  return mixed<V>(of_step + block);
}

template <class V>
STRATA_DEVICE_CODE typename V::I element_bits(std::uint64_t of_block, std::size_t at) {
  constexpr std::uint32_t kStride = 0x9e3779b9;  // odd: no two elements of a block share a state
  const auto lanes = V::times(V::lane_numbers(), V::set_bits(kStride));
  const auto key = V::plus(V::set_bits(static_cast<std::uint32_t>(of_block)), lanes);
  const auto ahead = V::set_bits(static_cast<std::uint32_t>(at) * kStride);
  return mixed_lanes<V>(V::plus(key, ahead));
}

// The half that one of the two moments draws.
template <class V, bool kHigh>
STRATA_DEVICE_CODE typename V::I half_of(typename V::I bits) {
  return kHigh ? V::template down<16>(bits) : V::both(bits, V::set_bits(0xffff));
}
template <class V, bool kHigh>
STRATA_DEVICE_CODE std::uint32_t half_of_block(std::uint64_t of_block) {
  return static_cast<std::uint32_t>(of_block >> (kHigh ? 48 : 32)) & 0xffff;
}

// Blocks that are decoded, updated and encoded together: enough that what each of these begins with
// is paid for, few enough that they stay in the nearest cache.
inline constexpr std::size_t kGroupBlocks = 8;
inline constexpr std::size_t kGroup = kGroupBlocks * kMomentBlock;

// The bits of a group, 32 for each element and each block.
template <class V>
struct GroupBits {
  alignas(kLineBytes) std::uint32_t of_elements[kGroup];
  std::uint64_t of_blocks[kGroupBlocks];

  // `first_block`: of the group.
  void draw(std::uint64_t of_step, std::uint64_t first_block, std::size_t blocks) {
    for (std::size_t block = 0; block < blocks; ++block) {
      of_blocks[block] = block_bits<V>(of_step, first_block + block);
      std::uint32_t* const bits = of_elements + block * kMomentBlock;
      for (std::size_t at = 0; at < kMomentBlock; at += V::kLanes) {
        V::store(bits + at, element_bits<V>(of_blocks[block], at));
      }
    }
  }
};

// What one of the two moments draws.
template <class V, bool kHigh>
struct HalfOf {
  const GroupBits<V>& bits;

  typename V::I of_lanes(std::size_t at) const {
    return half_of<V, kHigh>(V::load(bits.of_elements + at));
  }
  std::uint32_t of_scale(std::size_t at) const {
    return half_of_block<V, kHigh>(bits.of_blocks[at / kMomentBlock]);
  }
};

// float32: exact, and nothing to open or close.
template <class V, class Math>
class PlainMoments {
 public:
  using F = typename V::F;
  static constexpr bool kInPlace = true;

  STRATA_DEVICE_CODE explicit PlainMoments(const UpdateSpan& span)
      : streams_{static_cast<float*>(span.moment1), static_cast<float*>(span.moment2)} {}

  template <std::size_t kAhead>
  void prefetch(std::size_t at) const {
    for (int k = 0; k < Math::kMoments; ++k) prefetch_lines<V, kAhead>(streams_[k] + at);
  }

  template <int k, class Lanes>
  STRATA_DEVICE_CODE F load(std::size_t at, Lanes lanes) const {
    return V::load(streams_[k] + at, lanes);
  }
  template <int k, class Lanes>
  STRATA_DEVICE_CODE void store(std::size_t at, F value, Lanes lanes) {
    V::store(streams_[k] + at, V::one_nan(value), lanes);
  }

 private:
  float* streams_[2];
};

// A short form, for a rule that computes on float32 all the same: open() decodes the group at `at`,
// load and store reach the elements of that group, close() encodes it.
template <class V, class Math>
class StoredMoments {
 public:
  using F = typename V::F;
  static constexpr bool kInPlace = false;

  explicit StoredMoments(const UpdateSpan& span)
      : dtype_(span.moment_dtype),
        streams_{static_cast<std::byte*>(span.moment1), static_cast<std::byte*>(span.moment2)},
        scales_{span.scales1, span.scales2},
        of_step_(step_bits<V>(span)),
        first_block_(span.first / kMomentBlock) {}

  // 32 elements are one line of bfloat16 and half a line of codes.
  template <std::size_t kAhead>
  void prefetch(std::size_t at) const {
    for (int k = 0; k < Math::kMoments; ++k) __builtin_prefetch(streams_[k] + at * size_of(dtype_));
  }
  void open(std::size_t at, std::size_t count) {
    if constexpr (Math::kMoments >= 1) decode<0>(at, count);
    if constexpr (Math::kMoments >= 2) decode<1>(at, count);
  }
  void close(std::size_t at, std::size_t count) {
    const std::size_t blocks = (count + kMomentBlock - 1) / kMomentBlock;
    bits_.draw(of_step_, first_block_ + at / kMomentBlock, blocks);
    if constexpr (Math::kMoments >= 1) encode<0>(at, count);
    if constexpr (Math::kMoments >= 2) encode<1>(at, count);
  }

  template <int k, class Lanes>
  F load(std::size_t at, Lanes lanes) const {
    return V::load(values_[k] + at % kGroup, lanes);
  }
  template <int k, class Lanes>
  void store(std::size_t at, F value, Lanes lanes) {
    V::store(values_[k] + at % kGroup, value, lanes);
  }

 private:
  template <int k>
  using Form = ShortForm<V, moment_kind(Math::kRule, k + 1)>;

  template <int k>
  std::uint16_t* scales(std::size_t at) const {
    return scales_[k] == nullptr ? nullptr : scales_[k] + at / kMomentBlock;
  }
  template <int k>
  void decode(std::size_t at, std::size_t count) {
    Form<k>::decode(streams_[k] + at * size_of(dtype_), scales<k>(at), dtype_, count, values_[k]);
  }
  template <int k>
  void encode(std::size_t at, std::size_t count) {
    Form<k>::encode(values_[k], HalfOf<V, k == 1>{bits_}, count, dtype_,
                    streams_[k] + at * size_of(dtype_), scales<k>(at));
  }

  MomentDtype dtype_;
  std::byte* streams_[2];
  std::uint16_t* scales_[2];
  std::uint64_t of_step_;
  std::size_t first_block_;
  alignas(kLineBytes) float values_[2][kGroup];
  GroupBits<V> bits_;
};

template <class V>
void load_moments(const void* from, const std::uint16_t* scales, MomentDtype dtype, MomentKind kind,
                  std::size_t count, float* to) {
  if (count == 0) return;
  check_moments(dtype, from, scales);
  if (dtype == MomentDtype::float32) {
    std::memcpy(to, from, count * sizeof(float));
  } else if (kind == MomentKind::mean) {
    ShortForm<V, MomentKind::mean>::decode(from, scales, dtype, count, to);
  } else {
    ShortForm<V, MomentKind::square>::decode(from, scales, dtype, count, to);
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
    ShortForm<V, MomentKind::mean>::encode(from, Halves<V>(), count, dtype, to, scales);
  } else {
    ShortForm<V, MomentKind::square>::encode(from, Halves<V>(), count, dtype, to, scales);
  }
}

}  // namespace strata
