// Eight lanes: AVX2 with FMA and F16C. Partial vectors go through a buffer on the stack, so they
// run the same instructions as whole ones. scalar.hpp says what each operation means.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "optimizers/codes/kernel.hpp"
#include "optimizers/cpu/kernel.hpp"
#include "optimizers/landing.hpp"

namespace strata {

namespace {

struct Vec8 {
  static constexpr std::size_t kLanes = 8;
  using F = __m256;
  using I = __m256i;
  using H = __m128i;
  struct Sums {
    __m256d low, high;
  };

  struct All {};
  struct Some {
    std::size_t count;
  };

  static F load(const float* from, All) { return _mm256_loadu_ps(from); }
  static F load(const float* from, Some lanes) {
    float buffer[kLanes] = {};
    std::memcpy(buffer, from, lanes.count * sizeof(float));
    return _mm256_loadu_ps(buffer);
  }
  static H load(const std::uint16_t* from, All) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  }
  static H load(const std::uint16_t* from, Some lanes) {
    std::uint16_t buffer[kLanes] = {};
    std::memcpy(buffer, from, lanes.count * sizeof(std::uint16_t));
    return load(buffer, All{});
  }
  static void store(float* to, F value, All) { _mm256_storeu_ps(to, value); }
  static void store(float* to, F value, Some lanes) {
    float buffer[kLanes];
    _mm256_storeu_ps(buffer, value);
    std::memcpy(to, buffer, lanes.count * sizeof(float));
  }
  static void store(std::uint16_t* to, H value, All) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), value);
  }
  static void store(std::uint16_t* to, H value, Some lanes) {
    std::uint16_t buffer[kLanes];
    store(buffer, value, All{});
    std::memcpy(to, buffer, lanes.count * sizeof(std::uint16_t));
  }

  static F set(float value) { return _mm256_set1_ps(value); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F sqrt(F a) { return _mm256_sqrt_ps(a); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F one_nan(F a) {
    const __m256 quiet = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
    return _mm256_blendv_ps(a, quiet, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  }

  static F from_bfloat16(H half) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }
  static F from_float16(H half) { return _mm256_cvtph_ps(half); }
  static H to_float16(F value) { return _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT); }

  static F sign(F a) {
    const __m256 signs = _mm256_and_ps(a, _mm256_set1_ps(-0.0f));
    const __m256 one = _mm256_or_ps(signs, _mm256_set1_ps(1.0f));
    return _mm256_blendv_ps(a, one, _mm256_cmp_ps(a, _mm256_setzero_ps(), _CMP_NEQ_OQ));
  }

  static I bits(F value) { return _mm256_castps_si256(value); }
  static F of_bits(I bits) { return _mm256_castsi256_ps(bits); }
  static I set_bits(std::uint32_t value) { return _mm256_set1_epi32(static_cast<int>(value)); }
  static I lane_numbers() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
  static I plus(I a, I b) { return _mm256_add_epi32(a, b); }
  static I times(I a, I b) { return _mm256_mullo_epi32(a, b); }
  static I both(I a, I b) { return _mm256_and_si256(a, b); }
  static I differ(I a, I b) { return _mm256_xor_si256(a, b); }
  template <int kBits>
  static I up(I a) {
    return _mm256_slli_epi32(a, kBits);
  }
  template <int kBits>
  static I down(I a) {
    return _mm256_srli_epi32(a, kBits);
  }
  static I larger(I a, I b) { return _mm256_max_epi32(a, b); }
  static I smaller(I a, I b) { return _mm256_min_epi32(a, b); }
  static std::uint32_t largest(I a) {
    __m128i most = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1));
    return static_cast<std::uint32_t>(_mm_cvtsi128_si32(most));
  }
  static I if_less(F a, F b, I then, I otherwise) {
    const __m256i less = _mm256_castps_si256(_mm256_cmp_ps(a, b, _CMP_LT_OQ));
    return _mm256_blendv_epi8(otherwise, then, less);
  }
  static F of_int(I value) { return _mm256_cvtepi32_ps(value); }
  static I to_int(F value) { return _mm256_cvttps_epi32(value); }

  static I widen(H value) { return _mm256_cvtepi16_epi32(value); }
  // REQUIRES: every lane fits in 16 bits; larger ones would saturate.
  static H narrow(I wide) {
    return _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  }
  static I load(const std::uint32_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  }
  static void store(std::uint32_t* to, I value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), value);
  }
  static I load(const std::uint8_t* from) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  }
  static void store(std::uint8_t* to, I value) {
    const __m128i halves = narrow(value);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(halves, halves));
  }

  static I load(const std::int8_t* from) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  }

  // The lower and the upper bytes of the sixteen values are looked up apart, within halves of a
  // register: so the codes of elements 8 to 15 and 16 to 23 change places first.
  static void look_up(const std::uint16_t* sixteen, const std::uint8_t* codes, std::uint16_t* to) {
    const I table = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(sixteen));
    const I lows = _mm256_and_si256(table, _mm256_set1_epi16(0xff));
    const I highs = _mm256_srli_epi16(table, 8);
    const I bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(lows, highs), 0xd8);
    const I low_table = _mm256_permute4x64_epi64(bytes, 0x44);
    const I high_table = _mm256_permute4x64_epi64(bytes, 0xee);
    for (std::size_t i = 0; i < 64; i += 32) {
      const __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i / 2));
      const I wide = _mm256_cvtepu8_epi16(pairs);
      const I both = _mm256_or_si256(_mm256_srli_epi16(wide, 4), _mm256_slli_epi16(wide, 8));
      const I numbers =
          _mm256_permute4x64_epi64(_mm256_and_si256(both, _mm256_set1_epi8(15)), 0xd8);
      const I low = _mm256_shuffle_epi8(low_table, numbers);
      const I high = _mm256_shuffle_epi8(high_table, numbers);
      auto* const out = reinterpret_cast<__m256i*>(to + i);
      _mm256_storeu_si256(out, _mm256_unpacklo_epi8(low, high));
      _mm256_storeu_si256(out + 1, _mm256_unpackhi_epi8(low, high));
    }
  }
  static void look_up(const float* sixteen, const std::uint8_t* codes, float* to) {
    const F lower = _mm256_loadu_ps(sixteen);
    const F upper = _mm256_loadu_ps(sixteen + 8);
    const auto of = [&](I number) {
      const F fourth = _mm256_castsi256_ps(_mm256_slli_epi32(number, 28));
      return _mm256_blendv_ps(_mm256_permutevar8x32_ps(lower, number),
                              _mm256_permutevar8x32_ps(upper, number), fourth);
    };
    for (std::size_t i = 0; i < 64; i += 16) {
      const I pairs = load(codes + i / 2);
      const F even = of(_mm256_srli_epi32(pairs, 4));
      const F odd = of(pairs);
      const F low = _mm256_unpacklo_ps(even, odd);
      const F high = _mm256_unpackhi_ps(even, odd);
      _mm256_storeu_ps(to + i, _mm256_permute2f128_ps(low, high, 0x20));
      _mm256_storeu_ps(to + i + 8, _mm256_permute2f128_ps(low, high, 0x31));
    }
  }

  static void add_squares(Sums& sums, F value) {
    const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(value));
    const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(value, 1));
    sums.low = _mm256_fmadd_pd(low, low, sums.low);
    sums.high = _mm256_fmadd_pd(high, high, sums.high);
  }
  static void store(double* to, const Sums& sums) {
    _mm256_storeu_pd(to, sums.low);
    _mm256_storeu_pd(to + 4, sums.high);
  }
};

}  // namespace

const Kernels& avx2_kernels() {
  static constexpr Kernels table = make_kernels<Vec8>();
  return table;
}

const CodeKernels& avx2_code_kernels() {
  static constexpr CodeKernels table = make_code_kernels<Vec8>();
  return table;
}

}  // namespace strata
