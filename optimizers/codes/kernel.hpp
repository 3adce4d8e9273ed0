// The kernels of codes, written once over a vector type V; see cpu/kernel.hpp for what V gives and
// why every instruction set gives the same bits.
//
// Threads: pure functions of the memory they are given.
//
//   static constexpr CodeKernels table = make_code_kernels<Vec8>();
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "optimizers/codes/codes.hpp"
#include "optimizers/codes/tables.hpp"
#include "optimizers/device_code.hpp"
#include "optimizers/masters.hpp"

namespace strata {

// Note [Sixteen products]
// A block of 4-bit codes has at most sixteen values: the table times the block's scale. So they are
// computed once for each block, with every rounding that the library and the destination ask for,
// and its 64 elements are looked up. Exactness costs a quarter of what it would for each element:
// AVX-512 looks up 32 values of 16 bits by one vpermw, AVX2 by two vpshufb of the lower and the
// upper bytes.

// Note [Two libraries]
// bitsandbytes multiplies table and scale in float32 and rounds once, to the weight's dtype. A
// nested scale is map[code] * factor, rounded, plus offset, rounded, all in float32. int8 is
// code * scale, rounded, times 1/127 as float32, rounded, then rounded to the dtype.
// torchao has all in the weight's dtype, rounded after each operation: the table (of other digits),
// code / factor, plus offset, and the product.

// Nearest, ties to even, in the lower halves. An infinity stays one. REQUIRES: no NaN.
template <class V>
STRATA_DEVICE_CODE typename V::I bfloat16_of(typename V::F value) {
  const auto bits = V::bits(value);
  const auto odd = V::both(V::template down<16>(bits), V::set_bits(1));
  return V::template down<16>(V::plus(bits, V::plus(odd, V::set_bits(0x7fff))));
}

template <class V, Dtype kTo>
STRATA_DEVICE_CODE void store_as(void* to, std::size_t at, typename V::F value) {
  if constexpr (kTo == Dtype::float32) {
    V::store(static_cast<float*>(to) + at, value, typename V::All{});
  } else if constexpr (kTo == Dtype::float16) {
    V::store(static_cast<std::uint16_t*>(to) + at, V::to_float16(value), typename V::All{});
  } else {
    V::store(static_cast<std::uint16_t*>(to) + at, V::narrow(bfloat16_of<V>(value)),
             typename V::All{});
  }
}

// One after another: to the weight's dtype, then to the destination's.
template <class V, Dtype kDtype, Dtype kTo>
STRATA_DEVICE_CODE void store_value(void* to, std::size_t at, typename V::F value) {
  if constexpr (kDtype == kTo) {
    store_as<V, kTo>(to, at, value);
  } else {
    store_as<V, kTo>(to, at, rounded_to<V, kDtype>(value));
  }
}

template <Dtype kTo>
struct ElementOf {
  using Type = std::uint16_t;
};
template <>
struct ElementOf<Dtype::float32> {
  using Type = float;
};

// A scale of nf4_double, of what its code stands for: a number of the map, or the code itself.
template <class V, Dtype kDtype, Arithmetic kArithmetic>
STRATA_DEVICE_CODE typename V::F nested_scale(typename V::F code, typename V::F factor,
                                              typename V::F offset) {
  if constexpr (kArithmetic == Arithmetic::bitsandbytes) {
    return V::add(V::mul(code, factor), offset);
  } else {
    return rounded_to<V, kDtype>(V::add(rounded_to<V, kDtype>(V::div(code, factor)), offset));
  }
}

inline constexpr float kInt8Unit = 7.874015718698502e-3f;  // 1/127 in bitsandbytes' digits

template <class V>
STRATA_DEVICE_CODE typename V::F int8_value(typename V::I code, typename V::F scale) {
  return V::mul(V::mul(V::of_int(code), scale), V::set(kInt8Unit));
}

template <class V, Dtype kDtype, Arithmetic kArithmetic>
struct FourBits {
  using F = typename V::F;
  // The table as the library multiplies it.
  float table[16];

  FourBits() {
    constexpr bool rounds = kArithmetic == Arithmetic::torchao;
    for (std::size_t i = 0; i < 16; i += V::kLanes) {
      const F values = V::load((rounds ? kNf4Torchao : kNf4) + i, typename V::All{});
      V::store(table + i, rounds ? rounded_to<V, kDtype>(values) : values, typename V::All{});
    }
  }

  // REQUIRES: `count` is a multiple of kCodeBlock.
  template <Dtype kTo>
  void run(const std::uint8_t* codes, const float* scales, std::size_t count, void* to) const {
    using Element = typename ElementOf<kTo>::Type;
    auto* values = static_cast<Element*>(to);
    for (std::size_t at = 0; at < count; at += kCodeBlock) {
      const F scale = V::set(scales[at / kCodeBlock]);
      alignas(kLineBytes) Element products[16];
      for (std::size_t i = 0; i < 16; i += V::kLanes) {
        const F product = V::mul(V::load(table + i, typename V::All{}), scale);
        store_value<V, kDtype, kTo>(products, i, product);
      }
      V::look_up(products, codes + at / 2, values + at);
    }
  }

  // The scales of up to kScaleBlock blocks of one group, in an array that has room for all.
  static void scales_of(const std::uint8_t* codes, const ScaleGroup& group, std::size_t count,
                        float* scales) {
    const F factor = V::set(group.factor);
    const F offset = V::set(group.offset);
    if constexpr (kArithmetic == Arithmetic::bitsandbytes) {
      for (std::size_t i = 0; i < count; ++i) scales[i] = kDynamicMap.values[codes[i]];
      for (std::size_t i = 0; i < count; i += V::kLanes) {
        const F code = V::load(scales + i, typename V::All{});
        V::store(scales + i, nested_scale<V, kDtype, kArithmetic>(code, factor, offset),
                 typename V::All{});
      }
    } else {
      std::int8_t whole[kScaleBlock] = {};
      std::memcpy(whole, codes, count);
      for (std::size_t i = 0; i < count; i += V::kLanes) {
        const F code = V::of_int(V::load(whole + i));
        V::store(scales + i, nested_scale<V, kDtype, kArithmetic>(code, factor, offset),
                 typename V::All{});
      }
    }
  }

  template <Dtype kTo>
  void run_double(const ConstPageParts& parts, std::size_t first, std::size_t count,
                  void* to) const {
    constexpr std::size_t kGroup = kCodeBlock * kScaleBlock;
    auto* values = static_cast<typename ElementOf<kTo>::Type*>(to);
    for (std::size_t at = first; at < first + count;) {
      const std::size_t group = at / kGroup;
      const std::size_t group_end = (group + 1) * kGroup;
      const std::size_t end = group_end < first + count ? group_end : first + count;
      alignas(kLineBytes) float scales[kScaleBlock] = {};
      scales_of(parts.scale_codes + at / kCodeBlock, parts.groups[group], (end - at) / kCodeBlock,
                scales);
      run<kTo>(parts.codes + at / 2, scales, end - at, values + (at - first));
      at = end;
    }
  }
};

template <class V, Dtype kDtype, Dtype kTo>
void dequantise_int8(const ConstPageParts& parts, std::size_t first, std::size_t count, void* to) {
  const auto* const codes = reinterpret_cast<const std::int8_t*>(parts.codes);
  for (std::size_t at = 0; at < count; at += kCodeBlock) {
    const auto scale = V::set(parts.scales[(first + at) / kCodeBlock]);
    for (std::size_t k = at; k < at + kCodeBlock; k += V::kLanes) {
      store_value<V, kDtype, kTo>(to, k, int8_value<V>(V::load(codes + first + k), scale));
    }
  }
}

template <class V>
void dequantise(const CodeSpan& span, const void* page, void* to, Dtype to_dtype) {
  check_code_span(span, false);
  const ConstPageParts parts = parts_of(span.form.codes, page, span.page_bytes);
  with_dtype(span.form.dtype, [&]<Dtype kDtype>() {
    const auto to_each = [&]<Dtype kTo>() {
      const auto four_bits = [&]<Arithmetic kArithmetic>() {
        const FourBits<V, kDtype, kArithmetic> table;
        if (span.form.codes == Codes::nf4_double) {
          return table.template run_double<kTo>(parts, span.first, span.count, to);
        }
        table.template run<kTo>(parts.codes + span.first / 2,
                                parts.scales + span.first / kCodeBlock, span.count, to);
      };
      if (span.form.codes == Codes::int8) {
        return dequantise_int8<V, kDtype, kTo>(parts, span.first, span.count, to);
      }
      if (span.form.arithmetic == Arithmetic::bitsandbytes) {
        return four_bits.template operator()<Arithmetic::bitsandbytes>();
      }
      four_bits.template operator()<Arithmetic::torchao>();
    };
    with_dtype(to_dtype, to_each);
  });
}

template <class V>
bool absmax(const void* from, Dtype dtype, std::size_t count, float* to) {
  check_blocks(count);
  return with_dtype(dtype, [&]<Dtype kDtype>() {
    const Gradient<V, kDtype> values{from};
    std::uint32_t largest = 0;
    for (std::size_t at = 0; at < count; at += kCodeBlock) {
      // Magnitudes are in order as the integers that their bits are; those of NaNs come last.
      auto most = V::set_bits(0);
      for (std::size_t k = at; k < at + kCodeBlock; k += V::kLanes) {
        const auto bits = V::bits(values.load(k, typename V::All{}));
        most = V::larger(most, V::both(bits, V::set_bits(0x7fffffff)));
      }
      const std::uint32_t here = V::largest(most);
      to[at / kCodeBlock] = __builtin_bit_cast(float, here);
      if (here > largest) largest = here;
    }
    return largest < 0x7f800000;
  });
}

// The number of bounds below the value, which is multiplied and cut off at 1 as bitsandbytes does.
template <class V>
typename V::I nf4_code(typename V::F value, typename V::F inverse) {
  // Beyond 1 or -1 by a rounding: no bound lies there, so cutting off would change no code.
  const auto scaled = V::mul(value, inverse);
  auto code = V::set_bits(0);
  for (const float bound : kNf4Bounds.values) {
    code = V::plus(code, V::if_less(V::set(bound), scaled, V::set_bits(1), V::set_bits(0)));
  }
  return code;
}

template <class V, Dtype kDtype>
void quantise_nf4(const void* from, const float* absmax, std::size_t count, std::uint8_t* codes) {
  const Gradient<V, kDtype> values{from};
  for (std::size_t at = 0; at < count; at += kCodeBlock) {
    const float most = absmax[at / kCodeBlock];
    const auto inverse = V::set(1.0f / (most < 1e-38f ? 1e-38f : most));
    std::uint8_t block[kCodeBlock];
    for (std::size_t k = 0; k < kCodeBlock; k += V::kLanes) {
      V::store(block + k, nf4_code<V>(values.load(at + k, typename V::All{}), inverse));
    }
    for (std::size_t k = 0; k < kCodeBlock; k += 2) {
      codes[(at + k) / 2] = static_cast<std::uint8_t>(block[k] << 4 | block[k + 1]);
    }
  }
}

// The byte of a quotient in [-1, 1], as bitsandbytes finds it on a processor: the nearest of 65,536
// steps from -1 to 1, by one fused multiply and add, then the number of bounds below that step.
template <class V>
std::uint8_t dynamic_code(float quotient) {
  if (!(quotient > -1.0f)) quotient = -1.0f;
  if (quotient > 1.0f) quotient = 1.0f;
  const auto step =
      static_cast<std::uint32_t>(__builtin_fmaf((quotient + 1.0f) * 0.5f, 65535.0f, 0.5f));
  const float value = -1.0f + (2.0f * static_cast<float>(step)) / 65535.0f;
  std::size_t code = 0;
  for (std::size_t half = 128; half != 0; half /= 2) {
    if (kDynamicBounds.values[code + half - 1] < value) code += half;
  }
  return static_cast<std::uint8_t>(code);
}

template <class V>
void quantise_scales(const float* absmax, std::size_t count, float offset, std::uint8_t* codes,
                     ScaleGroup* groups) {
  for (std::size_t at = 0; at < count; at += kScaleBlock) {
    const std::size_t end = count - at < kScaleBlock ? count : at + kScaleBlock;
    float factor = 0.0f;
    for (std::size_t i = at; i < end; ++i) {
      const float distance = __builtin_fabsf(absmax[i] - offset);
      if (distance > factor) factor = distance;
    }
    groups[at / kScaleBlock] = {.factor = factor, .offset = offset};
    const float inverse = factor == 0.0f ? 0.0f : 1.0f / factor;
    for (std::size_t i = at; i < end; ++i) {
      // Where all are the offset, the code does not matter; bitsandbytes writes 0.
      codes[i] = factor == 0.0f ? std::uint8_t{0} : dynamic_code<V>((absmax[i] - offset) * inverse);
    }
  }
}

template <class V, Dtype kDtype>
void quantise_int8(const void* from, const float* absmax, std::size_t count, std::uint8_t* codes) {
  // Added and taken away again: rounds to an integer, ties to even.
  const auto round = V::set(12582912.0f);  // 1.5 * 2^23
  const Gradient<V, kDtype> values{from};
  for (std::size_t at = 0; at < count; at += kCodeBlock) {
    const float most = absmax[at / kCodeBlock];
    const float inverse = 1.0f / most;  // rounded before it is multiplied: 127 / most differs
    const auto factor = V::set(most == 0.0f ? 0.0f : inverse * 127.0f);
    for (std::size_t k = at; k < at + kCodeBlock; k += V::kLanes) {
      const auto scaled = V::mul(values.load(k, typename V::All{}), factor);
      const auto code = V::to_int(V::sub(V::add(scaled, round), round));
      V::store(codes + k, V::both(code, V::set_bits(0xff)));
    }
  }
}

template <class V>
void quantise(const CodeSpan& span, const void* from, Dtype dtype, const float* absmax,
              float offset, void* page) {
  // 1. Codes.
  check_code_span(span, true);
  const Codes codes = span.form.codes;
  const PageParts parts = parts_of(codes, page, span.page_bytes);
  with_dtype(dtype, [&]<Dtype kDtype>() {
    if (codes == Codes::int8) {
      return quantise_int8<V, kDtype>(from, absmax, span.count, parts.codes + span.first);
    }
    quantise_nf4<V, kDtype>(from, absmax, span.count, parts.codes + span.first / 2);
  });

  // 2. Scales.
  const std::size_t first = span.first / kCodeBlock;
  const std::size_t blocks = span.count / kCodeBlock;
  if (codes == Codes::nf4_double) {
    return quantise_scales<V>(absmax, blocks, offset, parts.scale_codes + first,
                              parts.groups + first / kScaleBlock);
  }
  for (std::size_t i = 0; i < blocks; ++i) parts.scales[first + i] = absmax[i];
}

template <class V>
constexpr CodeKernels make_code_kernels() {
  return {.dequantise = dequantise<V>, .absmax = absmax<V>, .quantise = quantise<V>};
}

}  // namespace strata
