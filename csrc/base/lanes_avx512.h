// Sixteen lanes: AVX-512 (F, with BW, DQ and VL, which every CPU but the first that had F has).
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))
#define INLINE TARGET __attribute__((always_inline)) inline

namespace infinity {
namespace {

struct Lanes {
  static constexpr int kWidth = 16;
  using Floats = __m512;

  INLINE static Floats floats(float value) { return _mm512_set1_ps(value); }
  INLINE static Floats load(const float* from) { return _mm512_loadu_ps(from); }
  INLINE static void store(float* to, Floats value) { _mm512_storeu_ps(to, value); }
  INLINE static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
  INLINE static Floats subtract(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
  INLINE static Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  INLINE static Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }
  INLINE static Floats square_root(Floats a) { return _mm512_maskz_sqrt_ps(kAll, a); }
  INLINE static Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  INLINE static bool any_nan(Floats a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q) != 0; }

#include "base/lanes_avx.inc"

  INLINE static void add_by_eights(Eight& sums, Floats a, int64_t) {
    constexpr __mmask8 kAllEight = 0xFF;
    sums = _mm256_add_ps(sums, _mm512_maskz_extractf32x8_ps(kAllEight, a, 0));
    sums = _mm256_add_ps(sums, _mm512_maskz_extractf32x8_ps(kAllEight, a, 1));
  }
  INLINE static bool any_equal(Halves a, uint16_t value) { return _mm256_cmpeq_epi16_mask(a, halves(value)) != 0; }
  INLINE static bool any_equal_or_nan(Halves a, uint16_t value, Floats b) {
    return (_mm256_cmpeq_epi16_mask(a, halves(value)) | _mm512_cmp_ps_mask(b, b, _CMP_UNORD_Q)) != 0;
  }

  INLINE static Floats interleave(Halves upper, Halves lower) {
    __m512i shifted = _mm512_maskz_slli_epi32(kAll, _mm512_maskz_cvtepu16_epi32(kAll, upper), 16);
    return _mm512_castsi512_ps(_mm512_or_si512(shifted, _mm512_maskz_cvtepu16_epi32(kAll, lower)));
  }
  INLINE static Halves upper_halves(Floats a) {
    return _mm512_maskz_cvtepi32_epi16(kAll, _mm512_maskz_srli_epi32(kAll, _mm512_castps_si512(a), 16));
  }
  INLINE static Halves lower_halves(Floats a) { return _mm512_maskz_cvtepi32_epi16(kAll, _mm512_castps_si512(a)); }

  // Of a word, the permutation takes the lowest four bits.
  template <bool streams>
  INLINE static void look_up_16(const uint16_t* table, uint64_t codes, uint16_t* to) {
    __m256i pairs = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(codes)));
    __m256i index = _mm256_or_si256(pairs, _mm256_slli_epi32(pairs, 12));
    Halves found = _mm256_maskz_permutexvar_epi16(kAll, index, load_halves(table));
    streams ? stream_halves(to, found) : store_halves(to, found);
  }

  using Words = __m512i;
  INLINE static Words load_words(const uint32_t* from) { return _mm512_loadu_si512(from); }
  INLINE static void store_words(uint32_t* to, Words value) { _mm512_storeu_si512(to, value); }
  // Lane i of all four lies side by side at to + i * stride.
  INLINE static void store_transposed(uint32_t* to, int64_t stride, const Words (&a)[4]) {
    constexpr __mmask8 kAllEight = 0xFF;
    Words low[2] = {_mm512_maskz_unpacklo_epi32(kAll, a[0], a[1]), _mm512_maskz_unpacklo_epi32(kAll, a[2], a[3])};
    Words high[2] = {_mm512_maskz_unpackhi_epi32(kAll, a[0], a[1]), _mm512_maskz_unpackhi_epi32(kAll, a[2], a[3])};
    store_quarters(to, 4 * stride, _mm512_maskz_unpacklo_epi64(kAllEight, low[0], low[1]));
    store_quarters(to + stride, 4 * stride, _mm512_maskz_unpackhi_epi64(kAllEight, low[0], low[1]));
    store_quarters(to + 2 * stride, 4 * stride, _mm512_maskz_unpacklo_epi64(kAllEight, high[0], high[1]));
    store_quarters(to + 3 * stride, 4 * stride, _mm512_maskz_unpackhi_epi64(kAllEight, high[0], high[1]));
  }
  INLINE static Words words(uint32_t value) { return _mm512_set1_epi32(static_cast<int32_t>(value)); }
  INLINE static Words numbered_from(uint32_t first) {
    return _mm512_add_epi32(words(first), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  }
  INLINE static Words add(Words a, Words b) { return _mm512_add_epi32(a, b); }
  INLINE static Words multiply(Words a, Words b) { return _mm512_mullo_epi32(a, b); }
  INLINE static Words bit_and(Words a, Words b) { return _mm512_and_si512(a, b); }
  INLINE static Words bit_xor(Words a, Words b) { return _mm512_xor_si512(a, b); }
  template <int kBits>
  INLINE static Words shifted_right(Words a) {
    return _mm512_maskz_srli_epi32(kAll, a, kBits);
  }
  template <int kBits>
  INLINE static Words shifted_left(Words a) {
    return _mm512_maskz_slli_epi32(kAll, a, kBits);
  }
  INLINE static Words upper_halves_less_saturated(Words a, uint16_t b) {
    return _mm512_subs_epu16(a, words(static_cast<uint32_t>(b) << 16));
  }
  INLINE static Words maximum(Words a, Words b) { return _mm512_maskz_max_epi32(kAll, a, b); }
  INLINE static Words unsigned_maximum(Words a, Words b) { return _mm512_maskz_max_epu32(kAll, a, b); }
  INLINE static Words maximum_where_at_least(Words a, Words b, Floats c, Floats d) {
    return _mm512_mask_max_epi32(a, _mm512_cmp_ps_mask(c, d, _CMP_GE_OQ), a, b);
  }
  INLINE static uint32_t largest(Words a) {
    constexpr __mmask8 kAllFour = 0xF;
    __m256i eight = _mm256_max_epu32(_mm512_maskz_extracti64x4_epi64(kAllFour, a, 0),
                                     _mm512_maskz_extracti64x4_epi64(kAllFour, a, 1));
    __m128i four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    __m128i two = _mm_max_epu32(four, _mm_shuffle_epi32(four, _MM_SHUFFLE(1, 0, 3, 2)));
    return static_cast<uint32_t>(
        _mm_cvtsi128_si32(_mm_max_epu32(two, _mm_shuffle_epi32(two, _MM_SHUFFLE(2, 3, 0, 1)))));
  }
  INLINE static Floats minimum(Floats a, Floats b) { return _mm512_maskz_min_ps(kAll, a, b); }
  INLINE static Floats negated_where_negative(Floats a, Floats b) {
    constexpr int kFirstXorSecondAndThird = 0x78;
    return as_floats(_mm512_ternarylogic_epi32(as_words(a), as_words(b), words(0x80000000), kFirstXorSecondAndThird));
  }
  INLINE static Words load_bytes(const uint8_t* from) {
    return _mm512_maskz_cvtepu8_epi32(kAll, _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  // Instructions that narrow work on each 128 bits, so what they leave is a matrix of four by four to be transposed.
  INLINE static void store_bytes(uint8_t* to, const Words (&a)[4], int16_t more) {
    __m512i added = _mm512_set1_epi16(more);
    __m512i front = _mm512_adds_epi16(_mm512_packs_epi32(a[0], a[1]), added);
    __m512i back = _mm512_adds_epi16(_mm512_packs_epi32(a[2], a[3]), added);
    __m512i transposed = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(to, _mm512_maskz_permutexvar_epi32(kAll, transposed, _mm512_packus_epi16(front, back)));
  }
  INLINE static Floats to_floats(Words a) { return _mm512_maskz_cvtepi32_ps(kAll, a); }
  INLINE static Words truncated(Floats a) { return _mm512_maskz_cvttps_epi32(kAll, a); }
  INLINE static Words look_up_16(const int32_t* table, Words index) {
    return _mm512_maskz_permutexvar_epi32(kAll, index, _mm512_load_si512(table));
  }
  INLINE static Floats look_up_16(const float* table, Words index) {
    return _mm512_maskz_permutexvar_ps(kAll, index, _mm512_load_ps(table));
  }
  INLINE static Words as_words(Floats a) { return _mm512_castps_si512(a); }
  INLINE static Floats as_floats(Words a) { return _mm512_castsi512_ps(a); }

  INLINE static Floats from_float16(Halves a) { return _mm512_maskz_cvtph_ps(kAll, a); }
  INLINE static Halves to_float16(Floats a) {
    return _mm512_maskz_cvtps_ph(kAll, a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }

 private:
  INLINE static void store_quarters(uint32_t* to, int64_t stride, Words a) {
    constexpr __mmask8 kAllFour = 0xF;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_maskz_extracti32x4_epi32(kAllFour, a, 0));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + stride), _mm512_maskz_extracti32x4_epi32(kAllFour, a, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 2 * stride), _mm512_maskz_extracti32x4_epi32(kAllFour, a, 2));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 3 * stride), _mm512_maskz_extracti32x4_epi32(kAllFour, a, 3));
  }

  // Some headers of GCC warn of an uninitialised register in what has no mask (bug 105593).
  static constexpr __mmask16 kAll = 0xFFFF;
};

}  // namespace
}  // namespace infinity
