// One loop for each kind of processor.
#include "base/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#include <asm/hwcap.h>
#include <sys/auxv.h>
#define INFINITY_ARM
#endif

namespace infinity {
namespace {

constexpr auto kPage = static_cast<size_t>(kPageBytes);
constexpr size_t kLine = 64;                  // of the caches, in bytes
constexpr uint32_t kPolynomial = 0x82f63b78;  // Castagnoli's, the highest power in the lowest bit

// Entry [k][byte]: what a byte contributes that k more bytes follow.
using Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) != 0 ? kPolynomial : 0);
    tables[0][byte] = value;
  }
  for (size_t k = 1; k < tables.size(); ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 0xff];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

void pages_by_table(const std::byte* pages, size_t count, uint32_t* sums) {
  for (; count > 0; --count, pages += kPage) {
    uint32_t state = ~0U;
    for (const std::byte* at = pages; at < pages + kPage; at += 8) {
      uint32_t next = 0;
      for (size_t i = 0; i < 8; ++i) {
        uint32_t before = i < 4 ? (state >> (8 * i)) & 0xff : 0;
        next ^= kTables[7 - i][before ^ static_cast<uint32_t>(at[i])];
      }
      state = next;
    }
    *sums++ = ~state;
  }
}

#if defined(__x86_64__) || defined(INFINITY_ARM)

// What the instruction of either processor takes and gives; x86 leaves the upper half of a register zero.
#if defined(__x86_64__)
#define INFINITY_CRC __attribute__((target("sse4.2")))
using State = uint64_t;
INFINITY_CRC inline State with_eight(State state, uint64_t bytes) {
  return _mm_crc32_u64(state, bytes);
}
#else
#define INFINITY_CRC
using State = uint32_t;
inline State with_eight(State state, uint64_t bytes) {
  asm(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(state) : "r"(bytes));
  return state;
}
#endif

uint64_t load(const std::byte* bytes) {
  uint64_t value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

// The instruction takes 8 bytes per cycle, with a latency of three: four pages at a time keep it busy. The next four
// are prefetched, because the processor prefetches only up to the end of a page.
INFINITY_CRC void pages_by_instruction(const std::byte* pages, size_t count, uint32_t* sums) {
  for (; count >= 4; count -= 4, pages += 4 * kPage, sums += 4) {
    State a = ~0U, b = ~0U, c = ~0U, d = ~0U;
    for (const std::byte* line = pages; line < pages + kPage; line += kLine) {
      if (count >= 8) {
        for (size_t i = 4; i < 8; ++i) __builtin_prefetch(line + i * kPage);
      }
      for (const std::byte* at = line; at < line + kLine; at += 8) {
        a = with_eight(a, load(at));
        b = with_eight(b, load(at + kPage));
        c = with_eight(c, load(at + 2 * kPage));
        d = with_eight(d, load(at + 3 * kPage));
      }
    }
    sums[0] = ~static_cast<uint32_t>(a);
    sums[1] = ~static_cast<uint32_t>(b);
    sums[2] = ~static_cast<uint32_t>(c);
    sums[3] = ~static_cast<uint32_t>(d);
  }
  for (; count > 0; --count, pages += kPage) {
    State state = ~0U;
    for (const std::byte* at = pages; at < pages + kPage; at += 8) state = with_eight(state, load(at));
    *sums++ = ~static_cast<uint32_t>(state);
  }
}

#undef INFINITY_CRC

#endif

#if defined(__x86_64__)

#define INFINITY_AVX512 __attribute__((target("sse4.2,avx512f,vpclmulqdq")))

// [Note: folding]
// A CRC is the remainder of the bytes, as a polynomial over two elements, by kPolynomial. Bits that `distance` more
// follow count as themselves times x^distance; so the first 128 bits of a message may be multiplied by that, modulo the
// polynomial, and added to those that far behind, without a change of the remainder (V. Gopal et al., "Fast CRC
// Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel, 2009). A register holds the highest power
// in its lowest bit. The product of two 64-bit registers then comes out one power too high, and a constant of 32 bits
// in the low half of one counts as 32 powers more: hence 33 less in the constants.
constexpr uint64_t power_of_x(int exponent) {
  uint32_t value = 0x80000000;
  for (int i = 0; i < exponent; ++i) value = (value >> 1) ^ ((value & 1) != 0 ? kPolynomial : 0);
  return value;
}
constexpr uint64_t first_half_over(int distance) {
  return power_of_x(distance + 64 - 33);
}
constexpr uint64_t second_half_over(int distance) {
  return power_of_x(distance - 33);
}

// Moves what is in `from` over the distance of `by`, and adds what is there.
INFINITY_AVX512 inline __m512i fold(__m512i from, __m512i by, __m512i there) {
  __m512i first = _mm512_clmulepi64_epi128(from, by, 0x00);
  __m512i second = _mm512_clmulepi64_epi128(from, by, 0x11);
  return _mm512_ternarylogic_epi64(first, second, there, 0x96);  // the sum of all three
}

// The same for each 128 bits of a register. (g++ 12 warns of its own _mm512_broadcast_i32x4.)
INFINITY_AVX512 inline __m512i over(uint64_t first_half, uint64_t second_half) {
  auto first = static_cast<int64_t>(first_half), second = static_cast<int64_t>(second_half);
  return _mm512_set_epi64(second, first, second, first, second, first, second, first);
}

// A page in four registers of 64 bytes, which at the end become one, then 16 bytes, then the instruction's remainder.
// It prefetches the page after the next: as above, the processor does not look past the end of a page.
INFINITY_AVX512 void pages_by_avx512(const std::byte* pages, size_t count, uint32_t* sums) {
  constexpr size_t kPagesAhead = 2;
  constexpr uint64_t kFirst4 = first_half_over(4 * 512), kSecond4 = second_half_over(4 * 512);
  constexpr uint64_t kFirst1 = first_half_over(512), kSecond1 = second_half_over(512);
  alignas(64) static constexpr uint64_t kToLast[8] = {first_half_over(384),
                                                      second_half_over(384),
                                                      first_half_over(256),
                                                      second_half_over(256),
                                                      first_half_over(128),
                                                      second_half_over(128),
                                                      0,
                                                      0};
  const __m512i over_four = over(kFirst4, kSecond4);
  const __m512i over_one = over(kFirst1, kSecond1);
  const __m512i to_last = _mm512_load_si512(kToLast);
  const __m512i begin = _mm512_zextsi128_si512(_mm_cvtsi32_si128(-1));
  for (size_t i = 0; i < count; ++i, pages += kPage) {
    __m512i a = _mm512_xor_si512(_mm512_loadu_si512(pages), begin);
    __m512i b = _mm512_loadu_si512(pages + 64);
    __m512i c = _mm512_loadu_si512(pages + 128);
    __m512i d = _mm512_loadu_si512(pages + 192);
    for (const std::byte* at = pages + 256; at < pages + kPage; at += 256) {
      if (count - i > kPagesAhead) {
        for (size_t line = 0; line < 256; line += kLine) __builtin_prefetch(at + kPagesAhead * kPage + line);
      }
      a = fold(a, over_four, _mm512_loadu_si512(at));
      b = fold(b, over_four, _mm512_loadu_si512(at + 64));
      c = fold(c, over_four, _mm512_loadu_si512(at + 128));
      d = fold(d, over_four, _mm512_loadu_si512(at + 192));
    }
    __m512i all = fold(fold(fold(a, over_one, b), over_one, c), over_one, d);
    alignas(64) uint64_t moved[8], stayed[8];
    _mm512_store_si512(moved, fold(all, to_last, _mm512_setzero_si512()));
    _mm512_store_si512(stayed, all);
    uint64_t state = _mm_crc32_u64(0, moved[0] ^ moved[2] ^ moved[4] ^ stayed[6]);
    state = _mm_crc32_u64(state, moved[1] ^ moved[3] ^ moved[5] ^ stayed[7]);
    sums[i] = ~static_cast<uint32_t>(state);
  }
}

#undef INFINITY_AVX512

#endif

}  // namespace

const std::vector<Crc32c>& crc32c_ways() {
  // Never destroyed: a ring may sum pages while the process ends.
  static const auto& ways = *new const auto([] {
    std::vector<Crc32c> ways;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("sse4.2")) {
      if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq")) {
        ways.push_back({"avx512", pages_by_avx512});
      }
      ways.push_back({"sse4.2", pages_by_instruction});
    }
#elif defined(INFINITY_ARM)
    if ((getauxval(AT_HWCAP) & HWCAP_CRC32) != 0) {
      ways.push_back({"armv8", pages_by_instruction});
    }
#endif
    ways.push_back({"table", pages_by_table});
    return ways;
  }());
  return ways;
}

void sum_pages(const std::byte* pages, size_t count, PageSum* sums, const Crc32c& way) {
  way.pages(pages, count, sums);
  for (size_t i = 0; i < count; ++i) sums[i] = sums[i] == kUnknownPage ? 1 : sums[i];
}

}  // namespace infinity
