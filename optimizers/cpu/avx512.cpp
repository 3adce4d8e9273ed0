// Sixteen lanes: AVX-512 F, BW, VL and DQ. Partial vectors are masked. scalar.hpp says what each
// operation means.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "optimizers/codes/kernel.hpp"
#include "optimizers/cpu/kernel.hpp"
#include "optimizers/landing.hpp"

namespace strata {

namespace {

struct Vec16 {
  static constexpr std::size_t kLanes = 16;
  using F = __m512;
  using I = __m512i;
  using H = __m256i;
  struct Sums {
    __m512d low, high;
  };

  struct All {};
  struct Some {
    __mmask16 mask;
    explicit Some(std::size_t count) : mask(static_cast<__mmask16>((1u << count) - 1u)) {}
  };

  static F load(const float* from, All) { return _mm512_loadu_ps(from); }
  static F load(const float* from, Some lanes) { return _mm512_maskz_loadu_ps(lanes.mask, from); }
  static H load(const std::uint16_t* from, All) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  }
  static H load(const std::uint16_t* from, Some lanes) {
    return _mm256_maskz_loadu_epi16(lanes.mask, from);
  }
  static void store(float* to, F value, All) { _mm512_storeu_ps(to, value); }
  static void store(float* to, F value, Some lanes) {
    _mm512_mask_storeu_ps(to, lanes.mask, value);
  }
  static void store(std::uint16_t* to, H value, All) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), value);
  }
  static void store(std::uint16_t* to, H value, Some lanes) {
    _mm256_mask_storeu_epi16(to, lanes.mask, value);
  }

  static F set(float value) { return _mm512_set1_ps(value); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F sqrt(F a) { return _mm512_sqrt_ps(a); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F one_nan(F a) {
    const __m512 quiet = _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000));
    return _mm512_mask_mov_ps(a, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), quiet);
  }

  static F from_bfloat16(H half) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
  static F from_float16(H half) { return _mm512_cvtph_ps(half); }
  static H to_float16(F value) { return _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT); }

  static F sign(F a) {
    const __m512 signs = _mm512_and_ps(a, _mm512_set1_ps(-0.0f));
    const __mmask16 other = _mm512_cmp_ps_mask(a, _mm512_setzero_ps(), _CMP_NEQ_OQ);
    return _mm512_mask_or_ps(a, other, signs, _mm512_set1_ps(1.0f));
  }

  static I bits(F value) { return _mm512_castps_si512(value); }
  static F of_bits(I bits) { return _mm512_castsi512_ps(bits); }
  static I set_bits(std::uint32_t value) { return _mm512_set1_epi32(static_cast<int>(value)); }
  static I lane_numbers() {
    return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  }
  static I plus(I a, I b) { return _mm512_add_epi32(a, b); }
  static I times(I a, I b) { return _mm512_mullo_epi32(a, b); }
  static I both(I a, I b) { return _mm512_and_si512(a, b); }
  static I differ(I a, I b) { return _mm512_xor_si512(a, b); }
  template <unsigned kBits>
  static I up(I a) {
    return _mm512_slli_epi32(a, kBits);
  }
  template <unsigned kBits>
  static I down(I a) {
    return _mm512_srli_epi32(a, kBits);
  }
  static I larger(I a, I b) { return _mm512_max_epi32(a, b); }
  static I smaller(I a, I b) { return _mm512_min_epi32(a, b); }
  static std::uint32_t largest(I a) {
    return static_cast<std::uint32_t>(_mm512_reduce_max_epi32(a));
  }
  static I if_less(F a, F b, I then, I otherwise) {
    return _mm512_mask_mov_epi32(otherwise, _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), then);
  }
  static F of_int(I value) { return _mm512_cvtepi32_ps(value); }
  static I to_int(F value) { return _mm512_cvttps_epi32(value); }

  static I widen(H value) { return _mm512_cvtepi16_epi32(value); }
  static H narrow(I value) { return _mm512_cvtepi32_epi16(value); }
  static I load(const std::uint32_t* from) { return _mm512_loadu_si512(from); }
  static void store(std::uint32_t* to, I value) { _mm512_storeu_si512(to, value); }
  static I load(const std::uint8_t* from) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static void store(std::uint8_t* to, I value) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(value));
  }

  static I load(const std::int8_t* from) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }

  // vpermw reads five bits of each number, and the table is there twice: whatever is in the fifth
  // does not matter.
  static void look_up(const std::uint16_t* sixteen, const std::uint8_t* codes, std::uint16_t* to) {
    const I table = _mm512_broadcast_i64x4(load(sixteen, All{}));
    for (std::size_t i = 0; i < 64; i += 32) {
      const I pairs = load(codes + i / 2);
      const I numbers = _mm512_or_si512(_mm512_srli_epi32(pairs, 4), _mm512_slli_epi32(pairs, 16));
      _mm512_storeu_si512(to + i, _mm512_permutexvar_epi16(numbers, table));
    }
  }
  // vpermps reads four bits of each number.
  static void look_up(const float* sixteen, const std::uint8_t* codes, float* to) {
    const F table = _mm512_loadu_ps(sixteen);
    const I low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const I high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    for (std::size_t i = 0; i < 64; i += 32) {
      const I pairs = load(codes + i / 2);
      const F even = _mm512_permutexvar_ps(_mm512_srli_epi32(pairs, 4), table);
      const F odd = _mm512_permutexvar_ps(pairs, table);
      _mm512_storeu_ps(to + i, _mm512_permutex2var_ps(even, low, odd));
      _mm512_storeu_ps(to + i + 16, _mm512_permutex2var_ps(even, high, odd));
    }
  }

  static void add_squares(Sums& sums, F value) {
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(value));
    const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(value, 1));
    sums.low = _mm512_fmadd_pd(low, low, sums.low);
    sums.high = _mm512_fmadd_pd(high, high, sums.high);
  }
  static void store(double* to, const Sums& sums) {
    _mm512_storeu_pd(to, sums.low);
    _mm512_storeu_pd(to + 8, sums.high);
  }
};

}  // namespace

const Kernels& avx512_kernels() {
  static constexpr Kernels table = make_kernels<Vec16>();
  return table;
}

const CodeKernels& avx512_code_kernels() {
  static constexpr CodeKernels table = make_code_kernels<Vec16>();
  return table;
}

}  // namespace strata
