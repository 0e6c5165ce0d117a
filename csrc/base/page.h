// A page of a file: what a checksum is of, and what a direct transfer is aligned to wherever it runs.
#pragma once

#include <cstdint>

namespace infinity {

inline constexpr int64_t kPageBytes = 4096;

}  // namespace infinity
