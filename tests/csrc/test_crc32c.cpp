// Every way of computing the checksum of a page against its definition, and that against the vectors of RFC 3720.
#include "base/crc32c.h"

#include <array>
#include <cstdlib>
#include <random>
#include <string>

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include <doctest/doctest.h>

namespace infinity::aio::testing {
namespace {

std::vector<std::byte> random_bytes(size_t length, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(length);
  for (std::byte& one : bytes) one = static_cast<std::byte>(random() & 0xff);
  return bytes;
}

// Bit by bit, as the RFC defines it.
uint32_t crc32c(const std::byte* bytes, size_t length) {
  uint32_t state = ~0U;
  for (size_t i = 0; i < length; ++i) {
    state ^= static_cast<uint32_t>(bytes[i]);
    for (int bit = 0; bit < 8; ++bit) state = (state >> 1) ^ ((state & 1) != 0 ? 0x82f63b78 : 0);
  }
  return ~state;
}

}  // namespace

// Registered before any test runs, so that it is called when everything that the tests have made for good is destroyed:
// as a ring may sum pages when the process ends. The address sanitizer sees what is gone.
const bool kSumsAtTheEnd = std::atexit([] {
                             constexpr std::array<std::byte, 4096> kZeros{};
                             PageSum sum = 0;
                             sum_pages(kZeros.data(), 1, &sum);
                             if (sum != 0x98f94189) std::abort();
                           }) == 0;

TEST_CASE("CRC-32C gives the vectors of RFC 3720 (B.4)") {
  REQUIRE(kSumsAtTheEnd);
  std::vector<std::byte> zeros(32, std::byte{0});
  std::vector<std::byte> ones(32, std::byte{0xff});
  std::vector<std::byte> up, down;
  for (int i = 0; i < 32; ++i) {
    up.push_back(static_cast<std::byte>(i));
    down.push_back(static_cast<std::byte>(31 - i));
  }
  std::vector<std::byte> digits;
  for (char digit : std::string("123456789")) digits.push_back(static_cast<std::byte>(digit));
  std::vector<std::pair<std::vector<std::byte>, uint32_t>> vectors{
      {{}, 0}, {zeros, 0x8a9136aa}, {ones, 0x62a8ab43}, {up, 0x46dd794e}, {down, 0x113fdb5c}, {digits, 0xe3069283}};
  for (const auto& [bytes, sum] : vectors) CHECK(crc32c(bytes.data(), bytes.size()) == sum);
}

TEST_CASE("every way gives the same sums for any number of pages, at any address") {
  REQUIRE(std::string(crc32c_ways().back().name) == "table");
  constexpr size_t kPages = 9;
  std::vector<std::byte> bytes = random_bytes((kPages + 1) * 4096, 7);
  std::fill(bytes.begin(), bytes.begin() + 4096, std::byte{0});
  for (const Crc32c& way : crc32c_ways()) {
    CAPTURE(way.name);
    for (size_t shift : {0, 1, 8, 4000}) {
      for (size_t count = 0; count <= kPages; ++count) {
        std::vector<uint32_t> sums(kPages + 1, 42);
        way.pages(bytes.data() + shift, count, sums.data());
        for (size_t i = 0; i < count; ++i) REQUIRE(sums[i] == crc32c(bytes.data() + shift + i * 4096, 4096));
        REQUIRE(sums[count] == 42);
      }
    }
  }
  uint32_t sum = 0;
  crc32c_ways().front().pages(bytes.data(), 1, &sum);
  CHECK(sum == 0x98f94189);  // of a page of zeros
}

TEST_CASE("a processor that has the instruction uses it") {
  [[maybe_unused]] std::string best = crc32c_ways().front().name;
#if defined(__x86_64__)
  CHECK((best != "table") == (__builtin_cpu_supports("sse4.2") != 0));
#elif defined(__aarch64__)
  CHECK((best == "armv8") == ((getauxval(AT_HWCAP) & HWCAP_CRC32) != 0));
  MESSAGE("the way in use is ", best);
#endif
}

TEST_CASE("a single bit of a page changes its sum, wherever it is") {
  std::vector<std::byte> page = random_bytes(4096, 3);
  for (const Crc32c& way : crc32c_ways()) {
    CAPTURE(way.name);
    uint32_t sound = 0;
    way.pages(page.data(), 1, &sound);
    for (size_t bit = 0; bit < 4096 * 8; bit += 13) {
      page[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
      uint32_t sum = 0;
      way.pages(page.data(), 1, &sum);
      REQUIRE(sum != sound);
      page[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
    }
  }
}

}  // namespace infinity::aio::testing
