// Numbers of 16 bits as floats, and back, one at a time.
#pragma once

#include <cstdint>
#include <cstring>

namespace infinity {

template <typename To, typename From>
To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof result);
  return result;
}

// A float16 is a float with 13 bits less of fraction and an exponent smaller by 112; multiplying by 2^112 shifts that
// back, denormals included.
inline float float16_to_float(uint16_t half) {
  uint32_t magnitude = (half & 0x7FFFu) << 13;
  uint32_t sign = (half & 0x8000u) << 16;
  if (magnitude >= 0x0F800000u) return bits_as<float>(sign | magnitude | 0x7F800000u);  // infinity and NaN
  return bits_as<float>(sign | bits_as<uint32_t>(bits_as<float>(magnitude) * 0x1p112f));
}

inline uint16_t float_to_float16(float value) {
  uint32_t bits = bits_as<uint32_t>(value);
  uint32_t magnitude = bits & 0x7FFFFFFFu;
  auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);
  if (magnitude >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);  // from halfway to 2^16 on
  if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 leaves the last bit at 2^-24, that of the denormals
    return static_cast<uint16_t>(sign | (bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3F000000u));
  }
  uint32_t rounded = magnitude + 0xFFFu + (magnitude >> 13 & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

inline float bfloat16_to_float(uint16_t half) {
  return bits_as<float>(static_cast<uint32_t>(half) << 16);
}

}  // namespace infinity
