// Sixteen lanes in pairs of registers: AVX2 with FMA and F16C, which every CPU that has AVX2 has, too.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>

#define TARGET __attribute__((target("avx2,fma,f16c")))
#define INLINE TARGET __attribute__((always_inline)) inline

namespace infinity {
namespace {

struct Lanes {
  static constexpr int kWidth = 16;
  struct Floats {
    __m256 low, high;
  };

  INLINE static Floats floats(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
  INLINE static Floats load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
  INLINE static void store(float* to, Floats value) {
    _mm256_storeu_ps(to, value.low);
    _mm256_storeu_ps(to + 8, value.high);
  }
  INLINE static Floats add(Floats a, Floats b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
  INLINE static Floats subtract(Floats a, Floats b) {
    return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
  }
  INLINE static Floats multiply(Floats a, Floats b) {
    return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
  }
  INLINE static Floats divide(Floats a, Floats b) {
    return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
  }
  INLINE static Floats square_root(Floats a) { return {_mm256_sqrt_ps(a.low), _mm256_sqrt_ps(a.high)}; }
  INLINE static Floats multiply_add(Floats a, Floats b, Floats c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
  }
  INLINE static bool any_nan(Floats a) { return _mm256_movemask_ps(unordered(a)) != 0; }

#include "base/lanes_avx.inc"

  INLINE static void add_by_eights(Eight& sums, Floats a, int64_t) {
    sums = _mm256_add_ps(_mm256_add_ps(sums, a.low), a.high);
  }
  INLINE static bool any_equal(Halves a, uint16_t value) {
    __m256i equal = _mm256_cmpeq_epi16(a, halves(value));
    return !_mm256_testz_si256(equal, equal);
  }
  INLINE static bool any_equal_or_nan(Halves a, uint16_t value, Floats b) {
    __m256i either = _mm256_or_si256(_mm256_cmpeq_epi16(a, halves(value)), _mm256_castps_si256(unordered(b)));
    return !_mm256_testz_si256(either, either);
  }

  // Instructions that narrow or widen work on each 128 bits, so the middle quarters change places around them.
  INLINE static Floats interleave(Halves upper, Halves lower) {
    upper = _mm256_permute4x64_epi64(upper, kMiddleSwapped);
    lower = _mm256_permute4x64_epi64(lower, kMiddleSwapped);
    return {_mm256_castsi256_ps(_mm256_unpacklo_epi16(lower, upper)),
            _mm256_castsi256_ps(_mm256_unpackhi_epi16(lower, upper))};
  }
  INLINE static Halves upper_halves(Floats a) {
    __m256i low = _mm256_srli_epi32(_mm256_castps_si256(a.low), 16);
    __m256i high = _mm256_srli_epi32(_mm256_castps_si256(a.high), 16);
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), kMiddleSwapped);
  }
  INLINE static Halves lower_halves(Floats a) {
    __m256i low = _mm256_blend_epi16(_mm256_castps_si256(a.low), _mm256_setzero_si256(), 0xAA);
    __m256i high = _mm256_blend_epi16(_mm256_castps_si256(a.high), _mm256_setzero_si256(), 0xAA);
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), kMiddleSwapped);
  }

  // By shuffles of bytes: of the lower ones of all halves, and of the upper ones.
  template <bool streams>
  INLINE static void look_up_16(const uint16_t* table, uint64_t codes, uint16_t* to) {
    __m128i pairs = _mm_cvtsi64_si128(static_cast<int64_t>(codes)), four_bits = _mm_set1_epi8(15);
    __m128i index =
        _mm_unpacklo_epi8(_mm_and_si128(pairs, four_bits), _mm_and_si128(_mm_srli_epi16(pairs, 4), four_bits));
    __m256i halves = load_halves(table), lower = _mm256_and_si256(halves, _mm256_set1_epi16(0xFF));
    __m128i lower_bytes = _mm_packus_epi16(_mm256_castsi256_si128(lower), _mm256_extracti128_si256(lower, 1));
    __m256i upper = _mm256_srli_epi16(halves, 8);
    __m128i upper_bytes = _mm_packus_epi16(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1));
    __m128i low = _mm_shuffle_epi8(lower_bytes, index), high = _mm_shuffle_epi8(upper_bytes, index);
    Halves found = _mm256_set_m128i(_mm_unpackhi_epi8(low, high), _mm_unpacklo_epi8(low, high));
    streams ? stream_halves(to, found) : store_halves(to, found);
  }

  struct Words {
    __m256i low, high;
  };
  INLINE static Words load_words(const uint32_t* from) {
    const auto* both = reinterpret_cast<const __m256i*>(from);
    return {_mm256_loadu_si256(both), _mm256_loadu_si256(both + 1)};
  }
  INLINE static void store_words(uint32_t* to, Words value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), value.low);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to) + 1, value.high);
  }
  INLINE static void store_transposed(uint32_t* to, int64_t stride, const Words (&a)[4]) {
    store_transposed(to, stride, a[0].low, a[1].low, a[2].low, a[3].low);
    store_transposed(to + 8 * stride, stride, a[0].high, a[1].high, a[2].high, a[3].high);
  }
  INLINE static Words words(uint32_t value) {
    __m256i all = _mm256_set1_epi32(static_cast<int32_t>(value));
    return {all, all};
  }
  INLINE static Words numbered_from(uint32_t first) {
    return add(words(first),
               {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)});
  }
  INLINE static Words add(Words a, Words b) {
    return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
  }
  INLINE static Words multiply(Words a, Words b) {
    return {_mm256_mullo_epi32(a.low, b.low), _mm256_mullo_epi32(a.high, b.high)};
  }
  INLINE static Words bit_and(Words a, Words b) {
    return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)};
  }
  INLINE static Words bit_xor(Words a, Words b) {
    return {_mm256_xor_si256(a.low, b.low), _mm256_xor_si256(a.high, b.high)};
  }
  template <int kBits>
  INLINE static Words shifted_right(Words a) {
    return {_mm256_srli_epi32(a.low, kBits), _mm256_srli_epi32(a.high, kBits)};
  }
  template <int kBits>
  INLINE static Words shifted_left(Words a) {
    return {_mm256_slli_epi32(a.low, kBits), _mm256_slli_epi32(a.high, kBits)};
  }
  INLINE static Words upper_halves_less_saturated(Words a, uint16_t b) {
    Words less = words(static_cast<uint32_t>(b) << 16);
    return {_mm256_subs_epu16(a.low, less.low), _mm256_subs_epu16(a.high, less.high)};
  }
  INLINE static Words maximum(Words a, Words b) {
    return {_mm256_max_epi32(a.low, b.low), _mm256_max_epi32(a.high, b.high)};
  }
  INLINE static Words unsigned_maximum(Words a, Words b) {
    return {_mm256_max_epu32(a.low, b.low), _mm256_max_epu32(a.high, b.high)};
  }
  INLINE static Words maximum_where_at_least(Words a, Words b, Floats c, Floats d) {
    Words where{_mm256_castps_si256(_mm256_cmp_ps(c.low, d.low, _CMP_GE_OQ)),
                _mm256_castps_si256(_mm256_cmp_ps(c.high, d.high, _CMP_GE_OQ))};
    Words larger = maximum(a, b);
    return {_mm256_blendv_epi8(a.low, larger.low, where.low), _mm256_blendv_epi8(a.high, larger.high, where.high)};
  }
  INLINE static uint32_t largest(Words a) {
    alignas(32) uint32_t lanes[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), _mm256_max_epu32(a.low, a.high));
    return *std::max_element(lanes, lanes + 8);
  }
  INLINE static Floats minimum(Floats a, Floats b) {
    return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
  }
  INLINE static Floats negated_where_negative(Floats a, Floats b) {
    __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_xor_ps(a.low, _mm256_and_ps(b.low, sign)), _mm256_xor_ps(a.high, _mm256_and_ps(b.high, sign))};
  }
  INLINE static Words load_bytes(const uint8_t* from) {
    __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
  }
  INLINE static void store_bytes(uint8_t* to, const Words (&a)[4], int16_t more) {
    __m256i added = _mm256_set1_epi16(more);
    for (int i = 0; i < 4; i += 2) {
      __m256i front = _mm256_adds_epi16(_mm256_packs_epi32(a[i].low, a[i].high), added);
      __m256i back = _mm256_adds_epi16(_mm256_packs_epi32(a[i + 1].low, a[i + 1].high), added);
      __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
      __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(front, back), in_order);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i * kWidth), bytes);
    }
  }
  INLINE static Floats to_floats(Words a) { return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }
  INLINE static Words truncated(Floats a) { return {_mm256_cvttps_epi32(a.low), _mm256_cvttps_epi32(a.high)}; }
  INLINE static Words look_up_16(const int32_t* table, Words index) {
    index = bit_and(index, words(15));
    return {_mm256_i32gather_epi32(table, index.low, 4), _mm256_i32gather_epi32(table, index.high, 4)};
  }
  INLINE static Floats look_up_16(const float* table, Words index) {
    index = bit_and(index, words(15));
    return {_mm256_i32gather_ps(table, index.low, 4), _mm256_i32gather_ps(table, index.high, 4)};
  }
  INLINE static Words as_words(Floats a) { return {_mm256_castps_si256(a.low), _mm256_castps_si256(a.high)}; }
  INLINE static Floats as_floats(Words a) { return {_mm256_castsi256_ps(a.low), _mm256_castsi256_ps(a.high)}; }

  INLINE static Floats from_float16(Halves a) {
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(a)), _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1))};
  }
  INLINE static Halves to_float16(Floats a) {
    __m128i low = _mm256_cvtps_ph(a.low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m128i high = _mm256_cvtps_ph(a.high, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
  }

 private:
  static constexpr int kMiddleSwapped = 0xD8;

  // Lane i of all four lies side by side at to + i * stride.
  INLINE static void store_transposed(uint32_t* to, int64_t stride, __m256i a, __m256i b, __m256i c, __m256i d) {
    __m256i low[2] = {_mm256_unpacklo_epi32(a, b), _mm256_unpacklo_epi32(c, d)};
    __m256i high[2] = {_mm256_unpackhi_epi32(a, b), _mm256_unpackhi_epi32(c, d)};
    store_both(to, 4 * stride, _mm256_unpacklo_epi64(low[0], low[1]));
    store_both(to + stride, 4 * stride, _mm256_unpackhi_epi64(low[0], low[1]));
    store_both(to + 2 * stride, 4 * stride, _mm256_unpacklo_epi64(high[0], high[1]));
    store_both(to + 3 * stride, 4 * stride, _mm256_unpackhi_epi64(high[0], high[1]));
  }
  INLINE static void store_both(uint32_t* to, int64_t stride, __m256i a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(a));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + stride), _mm256_extracti128_si256(a, 1));
  }

  // In some lane of the result, where one of the two that it comes from is a NaN.
  INLINE static __m256 unordered(Floats a) { return _mm256_cmp_ps(a.low, a.high, _CMP_UNORD_Q); }
};

}  // namespace
}  // namespace infinity
