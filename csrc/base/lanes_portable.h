// One lane, on any CPU. The numbers are those of the other sets; without an FMA instruction they take long.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "base/halves.h"

#define TARGET
#define INLINE inline

namespace infinity {
namespace {

struct Lanes {
  static constexpr int kWidth = 1;
  using Floats = float;
  using Halves = uint16_t;

  static Floats floats(float value) { return value; }
  static Floats load(const float* from) { return *from; }
  static void store(float* to, Floats value) { *to = value; }
  static Floats add(Floats a, Floats b) { return a + b; }
  static Floats subtract(Floats a, Floats b) { return a - b; }
  static Floats multiply(Floats a, Floats b) { return a * b; }
  static Floats divide(Floats a, Floats b) { return a / b; }
  static Floats square_root(Floats a) { return std::sqrt(a); }
  static Floats multiply_add(Floats a, Floats b, Floats c) { return std::fma(a, b, c); }
  static bool any_nan(Floats a) { return std::isnan(a); }

  using Eight = std::array<float, 8>;
  static Eight eight_zeros() { return {}; }
  static void add_by_eights(Eight& sums, Floats a, int64_t at) { sums[static_cast<size_t>(at % 8)] += a; }
  static void store(float* to, const Eight& sums) { std::copy(sums.begin(), sums.end(), to); }

  static Halves halves(uint16_t value) { return value; }
  static Halves load_halves(const uint16_t* from) { return *from; }
  static void store_halves(uint16_t* to, Halves value) { *to = value; }
  static Halves add(Halves a, Halves b) { return static_cast<Halves>(a + b); }
  static Halves bit_and(Halves a, Halves b) { return a & b; }
  static Halves average(Halves a, Halves b) { return static_cast<Halves>((a + b + 1) >> 1); }
  static Halves sign_bit(Halves a) { return a >> 15; }
  static Halves minus_one_where_negative(Halves a) { return a >> 15 ? 0xFFFF : 0; }
  static bool any_equal(Halves a, uint16_t value) { return a == value; }
  static bool any_equal_or_nan(Halves a, uint16_t value, Floats b) { return a == value || std::isnan(b); }

  static Floats interleave(Halves upper, Halves lower) {
    return bits_as<float>(static_cast<uint32_t>(upper) << 16 | lower);
  }
  static Halves upper_halves(Floats a) { return static_cast<Halves>(bits_as<uint32_t>(a) >> 16); }
  static Halves lower_halves(Floats a) { return static_cast<Halves>(bits_as<uint32_t>(a)); }

  static void stream_halves(uint16_t* to, Halves value) { *to = value; }
  static void end_streams() {}
  static Halves load_signed(const uint8_t* from) { return static_cast<Halves>(static_cast<int8_t>(*from)); }
  template <int kBits>
  static Halves shifted_left(Halves a) {
    return static_cast<Halves>(a << kBits);
  }
  template <bool streams>
  static void look_up_16(const uint16_t* table, uint64_t codes, uint16_t* to) {
    for (int i = 0; i < 16; ++i) to[i] = table[codes >> 4 * i & 15];
  }

  using Words = uint32_t;
  static Words load_words(const uint32_t* from) { return *from; }
  static void store_words(uint32_t* to, Words value) { *to = value; }
  static void store_transposed(uint32_t* to, int64_t, const Words (&a)[4]) { std::memcpy(to, a, sizeof a); }
  static Words words(uint32_t value) { return value; }
  static Words numbered_from(uint32_t first) { return first; }
  static Words add(Words a, Words b) { return a + b; }
  static Words multiply(Words a, Words b) { return a * b; }
  static Words bit_and(Words a, Words b) { return a & b; }
  static Words bit_xor(Words a, Words b) { return a ^ b; }
  template <int kBits>
  static Words shifted_right(Words a) {
    return a >> kBits;
  }
  template <int kBits>
  static Words shifted_left(Words a) {
    return a << kBits;
  }
  static Words upper_halves_less_saturated(Words a, uint16_t b) {
    return (a & 0xFFFF) | (a >> 16 > b ? (a >> 16) - b : 0) << 16;
  }
  static Words maximum(Words a, Words b) { return static_cast<int32_t>(a) > static_cast<int32_t>(b) ? a : b; }
  static Words unsigned_maximum(Words a, Words b) { return std::max(a, b); }
  static Words maximum_where_at_least(Words a, Words b, Floats c, Floats d) { return c >= d ? maximum(a, b) : a; }
  static uint32_t largest(Words a) { return a; }
  static Floats minimum(Floats a, Floats b) { return a < b ? a : b; }
  static Floats negated_where_negative(Floats a, Floats b) { return std::signbit(b) ? -a : a; }
  static Words load_bytes(const uint8_t* from) { return *from; }
  static void store_bytes(uint8_t* to, const Words (&a)[4], int16_t more) {
    for (Words word : a) *to++ = static_cast<uint8_t>(std::clamp(static_cast<int32_t>(word) + more, 0, 255));
  }
  static Floats to_floats(Words a) { return static_cast<float>(static_cast<int32_t>(a)); }
  static Words truncated(Floats a) { return static_cast<uint32_t>(static_cast<int32_t>(a)); }
  static Words look_up_16(const int32_t* table, Words index) { return static_cast<uint32_t>(table[index & 15]); }
  static Floats look_up_16(const float* table, Words index) { return table[index & 15]; }
  static Words as_words(Floats a) { return bits_as<uint32_t>(a); }
  static Floats as_floats(Words a) { return bits_as<float>(a); }

  static Floats from_float16(Halves a) { return float16_to_float(a); }
  static Halves to_float16(Floats a) { return float_to_float16(a); }
};

}  // namespace
}  // namespace infinity
