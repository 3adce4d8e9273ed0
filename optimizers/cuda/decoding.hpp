// The body of a decoding on a device: a group of threads computes the values of a tile of codes, by
// the arithmetic of codes/kernel.hpp over a vector of one lane.
//
// Threads: pure functions of the memory they are given.
//
//   run_decoding<DecodeForm<Codes::nf4, Arithmetic::bitsandbytes, Dtype::bfloat16,
//                           Dtype::bfloat16>>(task, tile, group);
#pragma once

#include <cstddef>
#include <cstdint>

#include "optimizers/codes/kernel.hpp"
#include "optimizers/cuda/kernels.hpp"
#include "optimizers/cuda/update.hpp"
#include "optimizers/device_code.hpp"
#include "optimizers/scalar.hpp"

namespace strata {

// Values in a row that one thread computes: all of them have one scale, and their codes are read by
// one access, or by one of each kind of byte.
inline constexpr std::size_t kDecodedByThread = 16;
inline constexpr std::size_t kDecodedByTile = kTileThreads * kDecodedByThread;
static_assert(kCodeBlock % kDecodedByThread == 0, "a thread has one scale");

template <Codes kCodes_, Arithmetic kArithmetic_, Dtype kDtype_, Dtype kTo_>
struct DecodeForm {
  static constexpr Codes kCodes = kCodes_;
  static constexpr Arithmetic kArithmetic = kArithmetic_;
  static constexpr Dtype kDtype = kDtype_;
  static constexpr Dtype kTo = kTo_;
  // The map of bitsandbytes' nested scales.
  static constexpr bool kMaps =
      kCodes == Codes::nf4_double && kArithmetic == Arithmetic::bitsandbytes;
};

// What codes stand for ahead of their scale. It travels with the task, for a device does not have
// the constants of the host.
template <class Form>
struct DecodeTables {
  float four_bits[16];
  float map[Form::kMaps ? 256 : 1];
};

// One span, as it travels to the device.
template <class Form>
struct DecodeTask {
  ConstPageParts parts{};
  std::size_t first = 0, count = 0;
  void* to = nullptr;
  DecodeTables<Form> tables{};
};

template <class Form>
STRATA_DEVICE_CODE float scale_of(const DecodeTask<Form>& task, const DecodeTables<Form>& tables,
                                  std::size_t block) {
  if constexpr (Form::kCodes != Codes::nf4_double) {
    return task.parts.scales[block];
  } else {
    const std::uint8_t byte = task.parts.scale_codes[block];
    const ScaleGroup& group = task.parts.groups[block / kScaleBlock];
    float code = 0.0f;
    if constexpr (Form::kMaps) {
      code = tables.map[byte];
    } else {
      code = Vec1::of_int(Vec1::load(reinterpret_cast<const std::int8_t*>(&byte)));
    }
    return nested_scale<Vec1, Form::kDtype, Form::kArithmetic>(code, group.factor, group.offset);
  }
}

// Values [at, at + kDecodedByThread) of the span.
template <class Form>
STRATA_DEVICE_CODE void decode_run(const DecodeTask<Form>& task, const DecodeTables<Form>& tables,
                                   std::size_t at) {
  using Element = typename ElementOf<Form::kTo>::Type;
  constexpr std::size_t kBytes = code_bytes(Form::kCodes, kDecodedByThread);
  const std::size_t from = task.first + at;
  // 1. Codes and their scale.
  alignas(kBytes) std::uint8_t codes[kBytes];
  const void* const there = task.parts.codes + code_bytes(Form::kCodes, from);
  __builtin_memcpy(codes, __builtin_assume_aligned(there, kBytes), kBytes);
  const float scale = scale_of<Form>(task, tables, from / kCodeBlock);
  // 2. Values, which are written together.
  alignas(16) Element values[kDecodedByThread];
  for (std::size_t i = 0; i < kDecodedByThread; ++i) {
    float value = 0.0f;
    if constexpr (Form::kCodes == Codes::int8) {
      value = int8_value<Vec1>(Vec1::load(reinterpret_cast<const std::int8_t*>(codes) + i), scale);
    } else {
      const std::size_t code = i % 2 == 0 ? codes[i / 2] >> 4 : codes[i / 2] & 15;
      value = Vec1::mul(tables.four_bits[code], scale);
    }
    store_value<Vec1, Form::kDtype, Form::kTo>(values, i, value);
  }
  void* const to = static_cast<Element*>(task.to) + at;
  __builtin_memcpy(__builtin_assume_aligned(to, 16), values, sizeof values);
}

// See Note [Phases] in update.hpp.
template <class Form, class Group>
STRATA_DEVICE_CODE void run_decoding(const DecodeTask<Form>& task, std::size_t tile, Group& group) {
  DecodeTables<Form>& tables = group.shared();
  // 1. Tables come near.
  group.each([&](std::size_t thread) {
    if (thread < sizeof tables.four_bits / sizeof(float)) {
      tables.four_bits[thread] = task.tables.four_bits[thread];
    }
    if (thread < sizeof tables.map / sizeof(float)) tables.map[thread] = task.tables.map[thread];
  });
  // 2. Values.
  group.each([&](std::size_t thread) {
    const std::size_t at = tile * kDecodedByTile + thread * kDecodedByThread;
    if (at < task.count) decode_run<Form>(task, tables, at);
  });
}

}  // namespace strata
