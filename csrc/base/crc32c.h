// CRC-32C (Castagnoli), the checksum of a page: with the processor's own instructions where it has them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace infinity {

// Of any bytes; `crc`: of those that come before them.
uint32_t crc32c(const std::byte* bytes, size_t length, uint32_t crc = 0);

// The sum of a page is its CRC-32C, 4 bytes; 0 stands for a page of which nobody knows what it holds, and so a CRC-32C
// of 0 is kept as 1.
using PageSum = uint32_t;
inline constexpr PageSum kUnknownPage = 0;

// Of each of `count` pages of 4096 bytes that lie one behind the other. Faster than one by one: no page waits for
// another.
void crc32c_pages(const std::byte* pages, size_t count, uint32_t* sums);

// A way of computing both, which takes and gives them as the two functions above do.
struct Crc32c {
  const char* name;
  uint32_t (*bytes)(const std::byte*, size_t, uint32_t);
  void (*pages)(const std::byte*, size_t, uint32_t*);
};

// Those that this processor can run, best first: the first is the one in use, the last is "table", which any can.
const std::vector<Crc32c>& crc32c_ways();

// The sums of `count` pages that lie one behind the other in memory.
void sum_pages(const std::byte* pages, size_t count, PageSum* sums, const Crc32c& way = crc32c_ways().front());

}  // namespace infinity
