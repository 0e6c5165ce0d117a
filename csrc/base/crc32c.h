// A page of a file, and CRC-32C (Castagnoli), its checksum: with the processor's own instructions where it has them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace infinity {

// What a checksum is of, and what a direct transfer is aligned to wherever it runs.
inline constexpr int64_t kPageBytes = 4096;

// The sum of a page is its CRC-32C, 4 bytes. 0 marks an unknown page, so a CRC-32C of 0 is kept as 1.
using PageSum = uint32_t;
inline constexpr PageSum kUnknownPage = 0;

// A way of computing it, of each of so many pages that lie one behind the other: faster than one by one, as no page
// waits for another.
struct Crc32c {
  const char* name;
  void (*pages)(const std::byte*, size_t, uint32_t*);
};

// Those that this processor can run, best first: the first is the one in use, the last is "table", which any can.
const std::vector<Crc32c>& crc32c_ways();

// The sums of `count` pages that lie one behind the other in memory.
void sum_pages(const std::byte* pages, size_t count, PageSum* sums, const Crc32c& way = crc32c_ways().front());

}  // namespace infinity
